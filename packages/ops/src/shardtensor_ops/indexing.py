"""Python-level slicing, above autograd: each view is told the layout that its gradient comes home to.

The views themselves are torch's own, with torch's own backward formulas, so writes through them have gradients too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardtensor import ShardTensor
from shardtensor.extending import Redistribute, register_function_handler, without_partial, wrap

from ._homes import bring_home
from ._naming import shape_of
from ._torch_private import below_torch_function, requires_grad, run_below_torch_function

aten = torch.ops.aten


def _needs_home(tensor: Any) -> bool:
    return isinstance(tensor, ShardTensor) and requires_grad(tensor) and torch.is_grad_enabled()


def getitem(func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Serve ``tensor[index]``: ints, slices, None and an ellipsis here, other indices below."""
    tensor, index = args
    items = index if isinstance(index, tuple) else (index,)
    if not _needs_home(tensor) or not all(_is_basic(item) for item in items):
        return run_below_torch_function(func, types, args, kwargs)
    n_indexed = sum(item is not None and item is not Ellipsis for item in items)
    if n_indexed > tensor._spec.ndim or sum(item is Ellipsis for item in items) > 1:
        return run_below_torch_function(func, types, args, kwargs)  # for torch's own error
    with below_torch_function():
        return _index(tensor, items, n_indexed)


def _is_basic(item: Any) -> bool:
    if item is None or item is Ellipsis:
        return True
    if isinstance(item, slice):
        bounds = (item.start, item.stop, item.step)
        return all(b is None or type(b) is int for b in bounds) and (item.step is None or item.step > 0)
    return type(item) is int


def _index(tensor: ShardTensor, items: Sequence[Any], n_indexed: int) -> Any:
    view: Any = tensor
    dim = 0
    for item in items:
        if item is Ellipsis:
            dim += tensor._spec.ndim - n_indexed
        elif item is None:
            view = view.unsqueeze(dim)
            dim += 1
        elif isinstance(item, slice):
            if item != slice(None):
                view = _slice(view, dim, item.start, item.stop, 1 if item.step is None else item.step)
            dim += 1
        else:
            view = bring_home(aten.select.int(view, dim, item), view)
    return aten.alias.default(tensor) if view is tensor else view


def _slice(tensor: Any, dim: int, start: int | None, stop: int | None, step: int = 1) -> Any:
    return bring_home(aten.slice.Tensor(tensor, dim, start, stop, step), tensor)


def _view(func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Serve a function that makes one view by one operator."""
    result = run_below_torch_function(func, types, args, kwargs)
    tensor: Any = args[0] if args else kwargs.get("input")
    return bring_home(result, tensor) if _needs_home(tensor) else result


class _Split(torch.autograd.Function):
    """Pieces of a tensor along a dim. Backward: the pieces' gradients in a row, in the layout of the tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardTensor, sizes: Sequence[int], dim: int) -> Any:
        ctx.set_materialize_grads(False)
        ctx.dim, ctx.home = dim, without_partial(tensor._spec)
        with below_torch_function():
            pieces = tuple(aten.split_with_sizes.default(tensor, sizes, dim))
        ctx.likes = [piece._spec for piece in pieces]
        return pieces

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        present = next((gradient for gradient in gradients if gradient is not None), None)
        if present is None:
            return None, None, None
        filled = [
            zeros_in(without_partial(spec), present) if gradient is None else gradient
            for gradient, spec in zip(gradients, ctx.likes, strict=True)
        ]
        return Redistribute.apply(torch.cat(filled, ctx.dim), ctx.home), None, None


def zeros_in(spec: Any, like: ShardTensor) -> Any:
    """Zeros in a layout, of the dtype and on the device of another tensor."""
    local = like._local_tensor.new_zeros(spec.local_shape)
    return wrap(local, spec.with_meta(spec.tensor_meta._replace(dtype=local.dtype)))


def split(func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Serve the functions that cut a tensor into pieces along a dim."""
    tensor, how, dim = _split_arguments(*args, **kwargs)
    if not _needs_home(tensor) or tensor._spec.ndim == 0 or not -tensor._spec.ndim <= dim < tensor._spec.ndim:
        with below_torch_function():
            return func(*args, **kwargs)
    extent = shape_of(tensor._spec)[dim]
    sizes = _chunk_sizes(extent, how) if func in _CHUNKS else _piece_sizes(extent, how)
    if sizes is None:
        with below_torch_function():
            return func(*args, **kwargs)  # for torch's own error, or a piece of no size
    return _Split.apply(tensor, sizes, dim % tensor._spec.ndim)


def _split_arguments(
    tensor: Any = None,
    how: Any = None,
    dim: int = 0,
    *,
    input: Any = None,  # torch's names
    self: Any = None,
    split_size: Any = None,
    split_sizes: Any = None,
    split_size_or_sections: Any = None,
    chunks: Any = None,
) -> tuple[Any, Any, int]:
    first = next((value for value in (tensor, input, self) if value is not None), None)
    given = (how, split_size, split_sizes, split_size_or_sections, chunks)
    return first, next((value for value in given if value is not None), None), operator.index(dim)


def _piece_sizes(extent: int, how: Any) -> list[int] | None:
    if isinstance(how, (list, tuple)):
        return [int(size) for size in how] if sum(how) == extent and all(size >= 0 for size in how) else None
    if type(how) is not int or how <= 0 or extent == 0:
        return None
    return [min(how, extent - start) for start in range(0, extent, how)]


def _chunk_sizes(extent: int, how: Any) -> list[int] | None:
    return _piece_sizes(extent, -(-extent // how)) if type(how) is int and how > 0 else None


class _Unbind(torch.autograd.Function):
    """All rows of a dim that is not sharded. Backward: the rows' gradients stacked, in the layout of the tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardTensor, dim: int) -> Any:
        ctx.set_materialize_grads(False)
        ctx.dim, ctx.home = dim, without_partial(tensor._spec)
        with below_torch_function():
            rows = tuple(aten.unbind.int(tensor, dim))
        ctx.likes = [row._spec for row in rows]
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        present = next((gradient for gradient in gradients if gradient is not None), None)
        if present is None:
            return None, None
        filled = [
            zeros_in(without_partial(spec), present) if gradient is None else gradient
            for gradient, spec in zip(gradients, ctx.likes, strict=True)
        ]
        return Redistribute.apply(torch.stack(filled, ctx.dim), ctx.home), None


def unbind(func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Serve ``unbind``, which iterating over a tensor calls too."""
    tensor, dim = _unbind_arguments(*args, **kwargs)
    if not _needs_home(tensor) or tensor._spec.ndim == 0 or not -tensor._spec.ndim <= dim < tensor._spec.ndim:
        with below_torch_function():
            return func(*args, **kwargs)
    dim %= tensor._spec.ndim
    if dim not in tensor._spec.grid and shape_of(tensor._spec)[dim] > 0:
        return _Unbind.apply(tensor, dim)
    with below_torch_function():
        return tuple(
            bring_home(aten.select.int(tensor, dim, row), tensor) for row in range(shape_of(tensor._spec)[dim])
        )


def _unbind_arguments(tensor: Any = None, dim: int = 0, *, input: Any = None) -> tuple[Any, int]:
    return (input if tensor is None else tensor), operator.index(dim)


_CHUNKS = frozenset({torch.chunk, torch.Tensor.chunk, torch.unsafe_chunk, torch.Tensor.unsafe_chunk})

register_function_handler(torch.Tensor.__getitem__, getitem)
for _function in (torch.select, torch.narrow, torch.diagonal):
    register_function_handler(_function, _view)
    register_function_handler(getattr(torch.Tensor, _function.__name__), _view)
for _name in ("split", "chunk", "split_with_sizes", "unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes"):
    register_function_handler(getattr(torch, _name), split)
    register_function_handler(getattr(torch.Tensor, _name), split)
register_function_handler(torch.unbind, unbind)
register_function_handler(torch.Tensor.unbind, unbind)
