"""Sums and means above autograd: the gradient is made in the layout that the operand has.

torch's own formula expands the gradient to the global shape, on every rank. Here it is a view of the result's gradient, expanded to
the local shape: no memory at all. Sum and expansion are each other's adjoint, so they can be differentiated again and again.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardtensor import ShardTensor, ShardTensorSpec
from shardtensor.extending import (
    TensorMeta,
    contiguous_meta,
    dispatch,
    make_spec,
    register_function_handler,
    transition,
    wrap,
)

from ._arguments import below, bind, is_in_graph, sharded_like
from ._naming import shape_of
from ._reduced_dims import checked_dims

aten = torch.ops.aten
_SUM, _MEAN = aten.sum.default, aten.mean.default


class _Reduced(NamedTuple):
    """How to make a sum or mean, and the gradient from the gradient of that."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None
    gradient_of_result: ShardTensorSpec
    gradient_of_operand: ShardTensorSpec
    local_shape_kept: tuple[int, ...]  # of the result, reduced dims kept
    n_elements: int  # to divide by; 1 for a sum


@functools.lru_cache(maxsize=4096)
def _reduced(
    spec: ShardTensorSpec, is_mean: bool, dims: tuple[int, ...] | None, keepdim: bool, dtype: torch.dtype | None
) -> _Reduced:
    op: Any
    args: tuple[Any, ...]
    if dims is None and not keepdim:
        op, args = (_MEAN if is_mean else _SUM), ()
    else:
        op, args = (aten.mean.dim if is_mean else aten.sum.dim_IntList), (dims, keepdim)
    kwargs = None if dtype is None else {"dtype": dtype}
    shape, reduced = shape_of(spec), checked_dims(dims, spec.ndim)
    kept = tuple(dim for dim in range(len(shape)) if dim not in reduced)
    shape_kept = tuple(1 if dim in reduced else extent for dim, extent in enumerate(shape))
    result_shape = shape_kept if keepdim else tuple(shape[dim] for dim in kept)
    assert spec.tensor_meta is not None
    meta = contiguous_meta(result_shape, spec.tensor_meta.dtype)
    position = {dim: dim if keepdim else kept.index(dim) for dim in kept}
    gradient_of_result = make_spec(spec.mesh, meta, {position[d]: s for d, s in spec.grid.items() if d in position})
    # The expanded dims take no memory, so they have no stride.
    strides = contiguous_meta(shape_kept, meta.dtype).stride
    expanded = tuple(0 if dim in reduced else stride for dim, stride in enumerate(strides))
    gradient_of_operand = make_spec(spec.mesh, TensorMeta(torch.Size(shape), expanded, meta.dtype), spec.grid)
    local_kept = tuple(1 if dim in reduced else extent for dim, extent in enumerate(spec.local_shape))
    n_elements = math.prod(shape[dim] for dim in reduced) if is_mean else 1
    return _Reduced(op, args, kwargs, gradient_of_result, gradient_of_operand, local_kept, n_elements)


class _Sum(torch.autograd.Function):
    """Sum or mean. Backward: the gradient expanded, in the operand's layout."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, is_mean: bool, dims: tuple[int, ...] | None, keepdim: bool, dtype: Any) -> Any:
        reduced = _reduced(tensor._spec, is_mean, dims, keepdim, dtype)
        ctx.reduced, ctx.how = reduced, (is_mean, dims, keepdim, dtype)
        return dispatch(reduced.op, (tensor, *reduced.args), reduced.kwargs)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return _Expand.apply(gradient, ctx.reduced, ctx.how), None, None, None, None
        return _expanded(gradient, ctx.reduced), None, None, None, None


class _Expand(torch.autograd.Function):
    """The adjoint of `_Sum`. Backward: the same sum or mean of the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, reduced: _Reduced, how: tuple[Any, ...]) -> Any:
        ctx.how = how
        return _expanded(tensor, reduced)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None, None]:
        return _Sum.apply(gradient, *ctx.how), None, None


def _expanded(gradient: Any, reduced: _Reduced) -> Any:
    target = reduced.gradient_of_result
    gradient = sharded_like(gradient, target)
    local: Tensor = transition(gradient._local_tensor, gradient._spec, target)
    if reduced.n_elements != 1:
        local = local / reduced.n_elements if reduced.n_elements else local * math.inf
    spec = reduced.gradient_of_operand
    assert spec.tensor_meta is not None
    if local.dtype is not spec.tensor_meta.dtype:
        local = local.to(spec.tensor_meta.dtype)
    return wrap(local.reshape(reduced.local_shape_kept).expand(spec.local_shape), spec)


def _serve(is_mean: bool) -> Any:
    op = _MEAN if is_mean else _SUM

    def serve(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not kwargs and len(args) == 1:
            (tensor,) = args
            if is_in_graph(tensor):
                return _Sum.apply(tensor, is_mean, None, False, None)
            return dispatch(op, args, None)
        bound = bind(args, kwargs, ("input", "dim", "keepdim"), ("dtype",))
        if bound is None or not isinstance(bound["input"], ShardTensor):
            return below(func, types, args, kwargs)
        tensor, dims, keepdim, dtype = bound["input"], bound.get("dim"), bool(bound.get("keepdim")), bound.get("dtype")
        if not _is_served(dims) or not is_in_graph(tensor):
            return below(func, types, args, kwargs)
        if isinstance(dims, int):
            dims = (dims,)
        return _Sum.apply(tensor, is_mean, None if dims is None else tuple(dims), keepdim, dtype)

    return serve


def _is_served(dims: Any) -> bool:
    """Whether the dims are numbers: what else there is (names) torch itself explains."""
    return dims is None or isinstance(dims, int) or all(isinstance(dim, int) for dim in dims)


def _nansum(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = bind(args, kwargs, ("input", "dim", "keepdim"), ("dtype",))
    if bound is None or not is_in_graph(bound["input"]):
        return below(func, types, args, kwargs)
    tensor = bound.pop("input")
    return torch.sum(tensor.masked_fill(tensor.isnan(), 0), bound.pop("dim", None), **bound)


def _nanmean(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = bind(args, kwargs, ("input", "dim", "keepdim"), ("dtype",))
    if bound is None:
        return below(func, types, args, kwargs)
    tensor, dims, keepdim = bound["input"], bound.get("dim"), bool(bound.get("keepdim"))
    total = torch.nansum(tensor, dims, keepdim, dtype=bound.get("dtype"))
    return total / tensor.isnan().logical_not_().sum(dims, keepdim)


for _function in (torch.sum, torch.Tensor.sum):
    register_function_handler(_function, _serve(is_mean=False), promote=False)
for _function in (torch.mean, torch.Tensor.mean):
    register_function_handler(_function, _serve(is_mean=True), promote=False)
for _function in (torch.nansum, torch.Tensor.nansum):
    register_function_handler(_function, _nansum, promote=False)
for _function in (torch.nanmean, torch.Tensor.nanmean):
    register_function_handler(_function, _nanmean, promote=False)
