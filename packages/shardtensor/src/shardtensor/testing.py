"""Check an operator on shards against the same operator on one device: values, layouts and gradients.

`check_op` runs on every rank of a process group, for example in a test marked ``@pytest.mark.ranks(1, 2, 3, 4)`` of the
plugin ``shardtensor_collectives.testing.pytest_plugin``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from shardtensor_spec import ShardTensorSpec, chunk_sizes, grid_of_sizes

from ._convert import wrap
from ._fallback_mode import FallbackMode, get_fallback_mode, set_fallback_mode
from ._layout import meta_of, without_partial
from ._tensor import ShardTensor
from ._transition import transition

__all__ = ["Layout", "check_op", "fallback_mode", "layouts_of", "shard", "splits"]

_DEFAULT_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.complex128: 1e-10, torch.complex64: 1e-5}


class Layout(NamedTuple):
    """How `check_op` is to shard one argument.

    Attributes
    ----------
    placements : tuple of Placement, (n_axes,)
        One placement per mesh axis.
    sizes : Mapping of int to Sequence of int
        Tensor dim -> rows of every shard; ``torch.chunk``'s where missing.
    """

    placements: tuple[Placement, ...]
    sizes: Mapping[int, Sequence[int]] = {}


def splits(extent: int, n_shards: int) -> list[tuple[int, ...]]:
    """Return ways to split ``extent`` rows over ``n_shards``: as torch does, uneven, and with empty shards.

    Examples
    --------
    >>> splits(5, 2)
    [(3, 2), (1, 4), (0, 5), (5, 0)]
    """
    ways = [chunk_sizes(extent, n_shards)]
    if n_shards == 1:
        return ways
    front = max(0, extent - (n_shards - 1))
    ways.append((*((min(1, extent),) * (n_shards - 1)), extent - min(1, extent) * (n_shards - 1)) if front else ways[0])
    ways.append((0,) * (n_shards - 1) + (extent,))
    ways.append((extent - extent // 3,) + (0,) * (n_shards - 2) + (extent // 3,) if n_shards > 2 else (extent, 0))
    return list(dict.fromkeys(ways))


def layouts_of(shape: Sequence[int], mesh: DeviceMesh, dims: Sequence[int] | None = None) -> list[Layout]:
    """Return layouts of a tensor on a mesh: each dim sharded, each way of `splits`, and on 2-D meshes pairs of dims.

    Parameters
    ----------
    shape : Sequence of int, (ndim,)
        Global shape.
    mesh : DeviceMesh
        Of one or two axes.
    dims : Sequence of int, optional
        Dims to shard; all by default.
    """
    dims = [dim % len(shape) for dim in (range(len(shape)) if dims is None else dims)]
    if mesh.ndim == 1:
        return [Layout((Shard(dim),), {dim: split}) for dim in dims for split in splits(shape[dim], mesh.size())]
    layouts = []
    for first in dims:
        for second in dims:
            sizes: dict[int, Sequence[int]] = {}
            if first != second:
                sizes = {
                    first: splits(shape[first], mesh.shape[0])[-1],
                    second: splits(shape[second], mesh.shape[1])[1 % len(splits(shape[second], mesh.shape[1]))],
                }
            layouts.append(Layout((Shard(first), Shard(second)), sizes))
        layouts.append(Layout((Replicate(), Shard(first)), {first: splits(shape[first], mesh.shape[1])[-1]}))
        layouts.append(Layout((Shard(first), Replicate()), {first: splits(shape[first], mesh.shape[0])[-1]}))
    return layouts


def shard(tensor: torch.Tensor, mesh: DeviceMesh, layout: Layout, *, requires_grad: bool = False) -> ShardTensor:
    """Cut a tensor that every rank has into a ShardTensor. No communication."""
    grid = grid_of_sizes(tuple(tensor.shape), mesh.shape, layout.placements, layout.sizes)
    spec = ShardTensorSpec.of(mesh, layout.placements, meta_of(tensor), grid)
    local = transition(tensor.detach(), spec.replicated(), spec).clone()
    made: ShardTensor = wrap(local, spec)
    if requires_grad:
        made.requires_grad_()
    return made


@contextlib.contextmanager
def fallback_mode(mode: FallbackMode) -> Iterator[None]:
    """Set the fallback mode inside a ``with`` block."""
    before = get_fallback_mode()
    set_fallback_mode(mode)
    try:
        yield
    finally:
        set_fallback_mode(before)


def check_op(
    function: Callable[..., Any],
    *args: Any,
    mesh: DeviceMesh,
    layouts: Sequence[Layout | None],
    kwargs: Mapping[str, Any] | None = None,
    gradient: bool = True,
    fallback: FallbackMode = "silent",
    tolerance: float | None = None,
) -> Any:
    """Run a function on shards and on whole tensors, and compare results and gradients.

    Parameters
    ----------
    function : callable
        Called with the arguments; returns a tensor, or a tuple or list of tensors.
    *args
        Whole arguments, equal on all ranks. Tensors may be nested in lists.
    mesh : DeviceMesh
        The mesh.
    layouts : Sequence of Layout or None
        For each tensor among ``args`` and then ``kwargs``, in order, its layout; None leaves it plain.
    kwargs : Mapping, optional
        Keyword arguments.
    gradient : bool
        Whether to compare the gradients of all floating-point tensor arguments too.
    fallback : {"silent", "warn", "error"}
        ``"error"`` makes the check fail where the operator gathers.
    tolerance : float, optional
        Largest difference, relative to the largest magnitude of the expected tensor (at least 1). By default 1e-10 for
        float64, 1e-5 for float32, 2e-2 for narrower ones.

    Returns
    -------
    object
        What the function returned on the shards.

    Raises
    ------
    AssertionError
        Naming what differs.

    Notes
    -----
    Communication: what the function does, and gathers of the results.
    """
    kwargs = dict(kwargs or {})
    whole, sharded = _Arguments(args, kwargs, None, mesh, gradient), _Arguments(args, kwargs, layouts, mesh, gradient)
    torch.manual_seed(1234)
    expected = _listed(function(*whole.args, **whole.kwargs))
    torch.manual_seed(1234)
    with fallback_mode(fallback):
        returned = function(*sharded.args, **sharded.kwargs)
        actual = _listed(returned)
        assert len(actual) == len(expected), f"{len(actual)} results instead of {len(expected)}"
        for index, (got, want) in enumerate(zip(actual, expected, strict=True)):
            _compare(got, want, f"result {index}", tolerance)
        if gradient:
            _backward(expected)
            _backward(actual)
            for index, (got, want) in enumerate(zip(sharded.leaves, whole.leaves, strict=True)):
                _compare_gradient(got, want, index, tolerance)
    return returned


class _Arguments:
    """Fresh copies of the arguments, sharded by the layouts, with every floating-point tensor a leaf."""

    def __init__(
        self,
        args: Any,
        kwargs: dict[str, Any],
        layouts: Sequence[Layout | None] | None,
        mesh: DeviceMesh,
        gradient: bool,
    ) -> None:
        self.leaves: list[torch.Tensor] = []
        self._layouts = None if layouts is None else iter(layouts)
        self._mesh = mesh
        self._gradient = gradient
        self.args = self._copy(tuple(args))
        self.kwargs = self._copy(kwargs)
        if self._layouts is not None:
            assert next(self._layouts, self) is self, "more layouts than tensor arguments"

    def _copy(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            needs_gradient = self._gradient and (value.is_floating_point() or value.is_complex())
            layout = None if self._layouts is None else next(self._layouts)
            if layout is None:
                leaf = value.detach().clone().requires_grad_(needs_gradient)
            else:
                leaf = shard(value, self._mesh, layout, requires_grad=needs_gradient)
            if needs_gradient:
                self.leaves.append(leaf)
            return leaf
        if isinstance(value, (list, tuple)):
            return type(value)(self._copy(item) for item in value)
        if isinstance(value, dict):
            return {key: self._copy(item) for key, item in value.items()}
        return value


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _backward(results: list[Any]) -> None:
    generator = torch.Generator().manual_seed(99)
    outputs, gradients = [], []
    for result in results:
        if not isinstance(result, torch.Tensor) or not result.requires_grad:
            continue
        whole = torch.randn(tuple(result.shape), generator=generator, dtype=torch.float64).to(result.dtype)
        outputs.append(result)
        gradients.append(_like(whole, result) if isinstance(result, ShardTensor) else whole)
    if outputs:
        torch.autograd.backward(outputs, gradients)


def _like(whole: torch.Tensor, result: ShardTensor) -> ShardTensor:
    """Cut the gradient as the result is; of a pending result the gradient is whole."""
    spec = without_partial(result._spec).with_meta(result._spec.tensor_meta._replace(dtype=whole.dtype))  # type: ignore[union-attr]
    return wrap(transition(whole, spec.replicated(), spec).clone(), spec)  # type: ignore[no-any-return]


def _compare(got: Any, want: Any, what: str, tolerance: float | None) -> None:
    if not isinstance(want, torch.Tensor):
        assert got == want, f"{what} is {got!r} instead of {want!r}"
        return
    assert got.dtype == want.dtype, f"{what} is {got.dtype} instead of {want.dtype}"
    assert tuple(got.shape) == tuple(want.shape), f"{what} has shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    if isinstance(got, ShardTensor):
        held, told = tuple(got._local_tensor.shape), tuple(got._spec.local_shape)
        assert held == told, f"{what} holds {held} on this rank, but its layout says {told}"
        got = got.detach().full_tensor()
    _assert_close(got, want.detach(), what, tolerance)


def _compare_gradient(got: torch.Tensor, want: torch.Tensor, index: int, tolerance: float | None) -> None:
    what = f"gradient of tensor argument {index}"
    if want.grad is None:
        assert got.grad is None or bool((_plain(got.grad) == 0).all()), f"{what} is there, but should not be"
        return
    assert got.grad is not None, f"{what} is missing"
    is_sharded = isinstance(got, ShardTensor)
    assert isinstance(got.grad, ShardTensor) == is_sharded, f"{what} is a {type(got.grad).__name__}"
    _compare(got.grad, want.grad, what, tolerance)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, ShardTensor) else tensor


def _assert_close(got: torch.Tensor, want: torch.Tensor, what: str, tolerance: float | None) -> None:
    if not (want.is_floating_point() or want.is_complex()):
        assert torch.equal(got, want), f"{what} differs: {got} instead of {want}"
        return
    limit = _DEFAULT_TOLERANCE.get(want.dtype, 2e-2) if tolerance is None else tolerance
    same = (got == want) | (torch.isnan(got) & torch.isnan(want))
    difference = torch.where(same, torch.zeros_like(want), got - want).abs()
    finite = want[torch.isfinite(want)].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    worst = float(difference.max()) if difference.numel() else 0.0
    assert worst <= limit * scale, (
        f"{what} differs by {worst:.3g} (limit {limit * scale:.3g}):\n{got}\ninstead of\n{want}"
    )
