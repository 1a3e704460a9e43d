"""`ShardTensor`: one tensor whose rows live on several ranks, as many on each as its layout says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from shardtensor_spec import ShardTensorSpec

from ._torch_private import OpOverload, make_wrapper

ShardingShapes = str | Mapping[int, Sequence[Sequence[int]]]


class ShardTensor(torch.Tensor):
    """A distributed tensor whose shards may have a different size on every rank, zero included.

    Operators compute what one big device would compute: on the shards where the layouts allow, else with the
    communication that the operator needs. Plain tensors that it meets are taken as replicated, and their gradients
    are summed over the mesh. Build one with `from_local`, `from_dtensor` or `scatter_tensor`; the constructor itself
    does not take part in autograd.

    Parameters
    ----------
    local_tensor : Tensor, spec.local_shape
        This rank's shard.
    spec : ShardTensorSpec
        The layout, with the extents of every rank.
    requires_grad : bool
        Whether the tensor is a leaf that collects a gradient.

    Notes
    -----
    A ``Partial`` placement is a pending reduction: the local tensor is a contribution, and `full_tensor`,
    `redistribute` or any operator that is not linear does the reduction.

    Communication: none here.

    Examples
    --------
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.tensor import Shard
    >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("domain",))
    >>> x = ShardTensor.from_local(torch.ones(3, 2), mesh, [Shard(0)])
    >>> (x * 2).sum().full_tensor()
    tensor(12.)
    """

    _local_tensor: torch.Tensor
    _spec: ShardTensorSpec
    __slots__ = ["_local_tensor", "_spec"]
    _patches_enabled = False

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __new__(
        cls: type[ShardTensor], local_tensor: torch.Tensor, spec: ShardTensorSpec, *, requires_grad: bool
    ) -> ShardTensor:
        ShardTensor._patches_enabled = True
        # Autograd runs on the wrapper: a local tensor with a graph of its own would record everything twice.
        local_tensor = local_tensor.detach() if local_tensor.requires_grad else local_tensor
        return cast(ShardTensor, make_wrapper(cls, local_tensor, spec, requires_grad=requires_grad))

    def __init__(self, local_tensor: torch.Tensor, spec: ShardTensorSpec, *, requires_grad: bool) -> None:
        super().__init__()

    # -- dispatch ---------------------------------------------------------------------------------------------------

    # __torch_function__ and __torch_dispatch__ are set below the class: the engine's own functions, not methods that
    # call them, since every frame is paid for by every operator.

    @classmethod
    def patches_enabled(cls) -> bool:
        """Whether handlers are in force: from the first ShardTensor on."""
        return cls._patches_enabled

    # -- into and out of ---------------------------------------------------------------------------------------------

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        sharding_shapes: ShardingShapes = "infer",
        global_shape: Sequence[int] | None = None,
        *,
        check: bool = False,
    ) -> ShardTensor:
        """Make a ShardTensor of the shards that the ranks hold.

        Parameters
        ----------
        local_tensor : Tensor
            This rank's shard. It is moved to the mesh's device type.
        device_mesh : DeviceMesh, optional
            The mesh; the current one (``with mesh:``) by default.
        placements : Sequence of Placement, (n_axes,), optional
            One placement per mesh axis; replicated by default. Negative shard dims count from the end.
        sharding_shapes : {"infer", "chunk"} or Mapping of int to shapes
            ``"infer"`` asks the ranks for their shapes; ``"chunk"`` takes ``torch.chunk``'s split of
            ``global_shape``; a mapping gives, for each mesh axis that shards, the shape of every shard along it.
        global_shape : Sequence of int, optional
            Shape of the whole tensor, for ``"chunk"``.
        check : bool
            Whether to let all ranks compare their layouts first.

        Returns
        -------
        ShardTensor
            Sharing memory with ``local_tensor`` where that is on the device already. Differentiable: the gradient of
            ``local_tensor`` is this rank's shard of the gradient.

        Raises
        ------
        LayoutMismatchError
            (a ``ValueError``) If there are not as many placements as mesh axes, the shapes do not fit together, or
            sizes contradict the local tensor. With ``"infer"`` or ``check`` all ranks raise, whichever has the fault;
            with a mapping or ``"chunk"`` alone a wrong local tensor is seen by its own rank only.
        IndexError
            If a shard dim is out of range.
        TypeError
            If the local tensor is not a plain tensor.

        Notes
        -----
        ``"chunk"`` and a mapping take the stride order of this rank's shard for that of the tensor; it must be the same
        everywhere.

        Communication: ``"infer"`` one all-gather of 1056 bytes per rank over the mesh. ``"chunk"`` none, a mapping
        none, unless two axes shard one dim: then that all-gather too. ``check`` one all-gather of a short text. In
        backward what brings the gradient to this layout.
        """
        made = from_local(local_tensor, device_mesh, placements, sharding_shapes, global_shape, check)
        return cast(ShardTensor, made)

    @classmethod
    def from_dtensor(cls, dtensor: DTensor) -> ShardTensor:
        """Make a ShardTensor of a DTensor's shards.

        Parameters
        ----------
        dtensor : DTensor
            A ShardTensor passes through.

        Returns
        -------
        ShardTensor
            Sharing memory with the DTensor's local tensor. Differentiable.

        Notes
        -----
        Communication: none; in backward what brings the gradient to this layout.
        """
        if isinstance(dtensor, ShardTensor):
            return cast(ShardTensor, dtensor)
        if not isinstance(dtensor, DTensor):
            raise TypeError(f"from_dtensor takes a DTensor, not a {type(dtensor).__name__}: use from_local for shards")
        ShardTensor._patches_enabled = True
        return cast(ShardTensor, FromDTensor.apply(dtensor))

    def to_dtensor(self) -> DTensor:
        """Make a DTensor of the tensor.

        Returns
        -------
        DTensor
            With the same placements. Differentiable.

        Notes
        -----
        Communication: none if the shards are ``torch.chunk``'s, all that a DTensor knows; else an exchange of the
        rows that change their owner.
        """
        spec = chunked_spec(self._spec)
        tensor = self if spec is self._spec else Redistribute.apply(self, spec)
        return cast(DTensor, ToDTensor.apply(tensor))

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return this rank's shard.

        Parameters
        ----------
        grad_placements : Sequence of Placement, (n_axes,), optional
            What the gradients of the local tensors make up in backward: by default shards like the tensor's, with
            ``Replicate`` for a ``Partial``. ``Partial`` declares that each is a contribution to a sum.

        Returns
        -------
        Tensor, local_shape
            Sharing memory. A ``Partial`` is not reduced: the local tensor is this rank's contribution.

        Raises
        ------
        LayoutMismatchError
            (a ``ValueError``) If the gradients of the local tensors cannot be the shards that ``grad_placements`` says.

        Notes
        -----
        Communication: none.
        """
        spec = None if grad_placements is None else gradient_spec(self._spec, grad_placements)
        return cast(torch.Tensor, ToLocal.apply(self, spec))

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the whole tensor, equal on all ranks.

        Parameters
        ----------
        grad_placements : Sequence of Placement, (n_axes,), optional
            What the gradients of the full tensors make up in backward: by default ``Replicate``, each is the whole
            gradient. ``Partial`` declares that each is a contribution to a sum.

        Returns
        -------
        Tensor, global shape

        Notes
        -----
        Communication: an all-gather-v over each axis that shards, an all-reduce over each that is pending.
        """
        replicated = self._spec.replicated()
        whole = self if replicated is self._spec else Redistribute.apply(self, replicated)
        return cast(torch.Tensor, whole.to_local(grad_placements=grad_placements))

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        sharding_shapes: Mapping[int, Sequence[int]] | None = None,
    ) -> ShardTensor:
        """Bring the tensor to another layout.

        Parameters
        ----------
        device_mesh : DeviceMesh, optional
            Must be the tensor's mesh.
        placements : Sequence of Placement, (n_axes,)
            The new placements, no ``Partial`` among them. Negative shard dims count from the end.
        async_op : bool
            Whether the call may return before the data arrived.
        sharding_shapes : Mapping of int to Sequence of int, optional
            Tensor dim -> rows of every shard. By default a dim that stays sharded over the same axes keeps its rows,
            others are split as ``torch.chunk`` does.

        Returns
        -------
        ShardTensor
            Differentiable; the gradient comes back in the layout of the input.

        Raises
        ------
        RuntimeError
            If no placements are given, or a ``Partial`` is among them.
        NotImplementedError
            If the mesh is another one.
        LayoutMismatchError
            (a ``ValueError``) If the number of placements or the sizes are wrong.

        Notes
        -----
        Communication: see the table in ``shardtensor._transition``. Each rank receives only what it lacks.
        """
        del async_op  # the rows are waited for here: an early return is an optimisation that no result depends on
        target = redistribute_target(self._spec, device_mesh, placements, sharding_shapes)
        return cast(ShardTensor, Redistribute.apply(self, target))

    # -- what it is --------------------------------------------------------------------------------------------------

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that the tensor is distributed over."""
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis."""
        return self._spec.placements

    # Served from the layout: through ``__torch_function__`` each of these costs 1.5 µs, and models read them often.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Global shape."""
        return self._spec._meta.shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Data type."""
        return self._spec._meta.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Device of this rank's shard."""
        return self._local_tensor.device

    def offsets(self, mesh_dim: int | None = None) -> tuple[int, ...] | int:
        """First row of this rank's shard, for each mesh axis or for one. See `ShardTensorSpec.offsets`."""
        return self._spec.offsets(mesh_dim)

    def __repr__(self) -> str:  # type: ignore[override]
        # No operator runs here: one rank alone may print a tensor.
        pending = ", reduction pending" if self._spec.has_partial else ""
        return f"ShardTensor({self._spec.describe()}{pending}, dtype={self.dtype}, local_tensor={self._local_tensor})"

    # -- values ------------------------------------------------------------------------------------------------------

    def item(self) -> Any:
        """Return the value of a tensor of one element.

        Notes
        -----
        Communication: collective where the value is pending or on one rank only; all ranks call it.
        """
        return self._whole_value().item()

    def tolist(self) -> Any:
        """Return the whole tensor as nested lists. Collective, as `full_tensor`."""
        return self._whole_value().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the whole tensor as an array. Collective, as `full_tensor`."""
        if self.requires_grad and not force:
            raise RuntimeError("can't call numpy() on a ShardTensor that requires grad; use detach().numpy() instead")
        return self._whole_value().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __bool__(self) -> bool:
        return bool(self._whole_value())

    def __float__(self) -> float:
        return float(self._whole_value())

    def __int__(self) -> int:
        return int(self._whole_value())

    def __complex__(self) -> complex:
        return complex(self._whole_value())

    def __index__(self) -> int:
        return self._whole_value().__index__()

    def __format__(self, format_spec: str) -> str:
        # Without a format the text is the repr, which must not communicate.
        return format(self._whole_value(), format_spec) if format_spec else repr(self)

    def _whole_value(self) -> torch.Tensor:
        with torch.no_grad():
            return self.full_tensor()

    # -- autograd ----------------------------------------------------------------------------------------------------

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass from this tensor, pending reductions done first.

        Parameters
        ----------
        *args, **kwargs
            As for ``torch.Tensor.backward``.

        Notes
        -----
        Communication: an all-reduce where the tensor is pending (the gradient of a scalar loss does not need it, so it
        is skipped there), then what the operators' gradients need.
        """
        tensor = self
        if self._spec.has_partial and self.ndim > 0:
            tensor = cast(ShardTensor, Redistribute.apply(self, without_partial(self._spec)))
        torch.autograd.backward(tensor, *args, **kwargs)

    # -- torch.compile -----------------------------------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], ShardTensorSpec]:
        return ["_local_tensor"], self._spec

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, torch.Tensor], spec: ShardTensorSpec, outer_size: Any, outer_stride: Any
    ) -> ShardTensor:
        local = inner_tensors["_local_tensor"]
        return cast(ShardTensor, make_wrapper(ShardTensor, local, spec, requires_grad=False))

    def __coerce_tangent_metadata__(self) -> ShardTensor:
        if not self._spec.has_partial:
            return self
        return cast(ShardTensor, redistribute_below_autograd(self, without_partial(self._spec)))

    def __coerce_same_metadata_as_tangent__(
        self, spec: ShardTensorSpec, expected_type: type[torch.Tensor] | None = None
    ) -> Any:
        if expected_type is not None and not issubclass(expected_type, ShardTensor):
            return self._whole_value()
        return redistribute_below_autograd(self, spec)

    @classmethod
    def _stable_hash_for_caching(cls) -> str:
        return f"{cls.__module__}.{cls.__qualname__}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (type(self), self._local_tensor, self._spec, self.requires_grad)

    # -- settings ----------------------------------------------------------------------------------------------------

    @classmethod
    def register_dispatch_handler(cls, op: OpOverload, handler: Callable[..., Any]) -> None:
        """Serve an operator below autograd.

        Parameters
        ----------
        op : OpOverload
            For example ``torch.ops.aten.mm.default``.
        handler : callable
            Called as ``handler(*args, **kwargs)`` with every tensor a ShardTensor.
        """
        register_dispatch_handler(op, handler)

    @classmethod
    def register_function_handler(cls, func: Callable[..., Any], handler: Callable[..., Any]) -> None:
        """Serve a Python-level function above autograd.

        Parameters
        ----------
        func : callable
            For example ``torch.dot``; its aliases are separate.
        handler : callable
            Called as ``handler(func, types, args, kwargs)`` with plain tensors and DTensors already promoted.
        """
        register_function_handler(func, handler)

    @classmethod
    def register_named_function_handler(cls, func_name: str, handler: Callable[..., Any]) -> None:
        """Serve a function made by ``torch.library.custom_op``.

        Parameters
        ----------
        func_name : str
            Its ``str``, for example ``"mylib.my_op.default"``.
        handler : callable
            As for `register_function_handler`.
        """
        register_named_function_handler(func_name, handler)

    @classmethod
    def get_promotion_mode(cls) -> TensorPromotionMode:
        """Return what happens to plain tensors in this context."""
        return get_promotion_mode()

    @classmethod
    def set_promotion_mode(cls, mode: TensorPromotionMode | str) -> None:
        """Choose what happens to plain tensors, by mode or by its name."""
        set_promotion_mode(mode)

    @classmethod
    def promotion_mode(cls, mode: TensorPromotionMode | str) -> AbstractContextManager[None]:
        """Choose what happens to plain tensors inside a ``with`` block, in this thread."""
        return promotion_mode(mode)

    @classmethod
    def set_fallback_mode(cls, mode: FallbackMode) -> None:
        """Choose what an operator that must gather does: ``"silent"``, ``"warn"`` (once per operator), ``"error"``."""
        set_fallback_mode(mode)


def _rebuild(cls: type[ShardTensor], local: torch.Tensor, spec: ShardTensorSpec, requires_grad: bool) -> ShardTensor:
    return cast(ShardTensor, cls(local, spec, requires_grad=requires_grad))


# The engine below needs the class above, and the class the engine: it is imported last.
from ._convert import (  # noqa: E402
    FromDTensor,
    Redistribute,
    ToDTensor,
    ToLocal,
    chunked_spec,
    gradient_spec,
    redistribute_below_autograd,
)
from ._dispatch import torch_dispatch  # noqa: E402
from ._fallback_mode import FallbackMode, set_fallback_mode  # noqa: E402
from ._from_local import from_local, redistribute_target  # noqa: E402
from ._function import torch_function  # noqa: E402
from ._layout import without_partial  # noqa: E402
from ._promotion import (  # noqa: E402
    TensorPromotionMode,
    get_promotion_mode,
    promotion_mode,
    set_promotion_mode,
)
from ._registry import (  # noqa: E402
    register_dispatch_handler,
    register_function_handler,
    register_named_function_handler,
)

ShardTensor.__torch_function__ = classmethod(torch_function)
ShardTensor.__torch_dispatch__ = classmethod(torch_dispatch)
