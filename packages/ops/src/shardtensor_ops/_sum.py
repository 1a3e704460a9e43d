"""Sums and means above autograd: the gradient is made in the layout that the operand has.

torch's own formula expands the gradient to the global shape, on every rank. Here it is a view of the result's gradient,
expanded to the local shape: no memory at all. Sum and expansion are each other's adjoint, so they can be differentiated
again and again.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardtensor import ShardTensor, ShardTensorSpec
from shardtensor.extending import (
    Call,
    TensorMeta,
    contiguous_meta,
    direct_apply,
    dispatch,
    make_spec,
    register_function_handler,
    transition,
    wrap,
)
from shardtensor_spec import on_new_world

from ._arguments import below, bind, is_in_graph, sharded_like
from ._autocast import autocast_is_on
from ._naming import shape_of
from ._reduced_dims import checked_dims
from ._torch_private import requires_grad

aten = torch.ops.aten
_SUM, _MEAN = aten.sum.default, aten.mean.default


class _Reduced(NamedTuple):
    """How to make a sum or mean, and the gradient from the gradient of that."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None
    direct: Callable[[Tensor], Tensor] | None  # what makes the local result where the operand is taken as it is
    result: ShardTensorSpec | None  # its layout
    is_mean: bool
    dims: tuple[int, ...] | None
    keepdim: bool
    dtype: torch.dtype | None
    gradient_of_result: ShardTensorSpec
    gradient_of_operand: ShardTensorSpec
    local_shape_kept: tuple[int, ...]  # of the result, reduced dims kept
    n_elements: int  # to divide by; 1 for a sum
    may_be_cast: bool  # autocast makes it in float32: sums of short floats on accelerators, where no dtype is given


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
    # The expanded dims take no memory, so they have no stride.
    strides = contiguous_meta(shape_kept, meta.dtype).stride
    expanded = tuple(0 if dim in reduced else stride for dim, stride in enumerate(strides))
    direct, result = _direct(spec, op, args, kwargs)
    return _Reduced(
        op=op,
        args=args,
        kwargs=kwargs,
        direct=direct,
        result=result,
        is_mean=is_mean,
        dims=dims,
        keepdim=keepdim,
        dtype=dtype,
        gradient_of_result=make_spec(spec.mesh, meta, {position[d]: s for d, s in spec.grid.items() if d in position}),
        gradient_of_operand=make_spec(spec.mesh, TensorMeta(torch.Size(shape), expanded, meta.dtype), spec.grid),
        local_shape_kept=tuple(1 if dim in reduced else extent for dim, extent in enumerate(spec.local_shape)),
        n_elements=math.prod(shape[dim] for dim in reduced) if is_mean else 1,
        may_be_cast=not is_mean
        and dtype is None
        and meta.dtype in (torch.float16, torch.bfloat16)
        and spec.mesh.device_type != "cpu",
    )


def _direct(
    spec: ShardTensorSpec, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> tuple[Callable[[Tensor], Tensor] | None, ShardTensorSpec | None]:
    """What the plan does to a local tensor, found once: the dispatcher's look-up costs as much as the sum."""
    from .reduce import plan_sum

    if os.environ.get("SHARDTENSOR_DEBUG"):
        return None, None  # the dispatcher compares the ranks then
    plan = plan_sum(Call(op, (spec, *args), kwargs or {}))
    if plan is None or plan.targets != (spec,) or plan.kind != "native" or not isinstance(plan.result, ShardTensorSpec):
        return None, None
    if plan.local is None or plan.local is op:
        # The function of torch costs half of the operator's own call.
        fast = torch.mean if op in (_MEAN, aten.mean.dim) else torch.sum
        return (functools.partial(_called, fast, args, kwargs or {}) if args or kwargs else fast), plan.result
    return functools.partial(_called, plan.local, args, kwargs or {}), plan.result


def _called(function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], local: Tensor) -> Tensor:
    return function(local, *args, **kwargs)


def _run(tensor: Any, reduced: _Reduced) -> Any:
    if reduced.direct is not None:
        return wrap(reduced.direct(tensor._local_tensor), reduced.result)  # type: ignore[arg-type]
    return dispatch(reduced.op, (tensor, *reduced.args), reduced.kwargs)


class _Sum(torch.autograd.Function):
    """Sum or mean. Backward: the gradient expanded, in the operand's layout."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, reduced: _Reduced) -> Any:
        ctx.reduced = reduced
        if reduced.direct is not None:  # as `_run`, without its frame
            return wrap(reduced.direct(tensor._local_tensor), reduced.result)  # type: ignore[arg-type]
        return _run(tensor, reduced)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
        if torch.is_grad_enabled():
            return _Expand.apply(gradient, ctx.reduced), None
        return _expanded(gradient, ctx.reduced), None


class _Expand(torch.autograd.Function):
    """The adjoint of `_Sum`. Backward: the same sum or mean of the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, reduced: _Reduced) -> Any:
        ctx.reduced = reduced
        return _expanded(tensor, reduced)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
        how = ctx.reduced
        again = _reduced(gradient._spec, how.is_mean, how.dims, how.keepdim, how.dtype)
        return _apply(gradient, again), None


def _expanded(gradient: Any, reduced: _Reduced) -> Any:
    target = reduced.gradient_of_result
    gradient = sharded_like(gradient, target)
    local: Tensor = gradient._local_tensor
    if gradient._spec is not target:
        local = transition(local, gradient._spec, target)
    if reduced.n_elements != 1:
        local = local / reduced.n_elements if reduced.n_elements else local * math.inf
    spec = reduced.gradient_of_operand
    assert spec.tensor_meta is not None
    if local.dtype is not spec.tensor_meta.dtype:
        local = local.to(spec.tensor_meta.dtype)
    if local.ndim:
        local = local.reshape(reduced.local_shape_kept)
    return wrap(local.expand(spec.local_shape), spec)


_apply = direct_apply(_Sum)


def _serve(is_mean: bool) -> Any:
    @functools.lru_cache(maxsize=1024)
    def over_all(spec: ShardTensorSpec) -> _Reduced:
        """Look up the commonest case by one key."""
        return _reduced(spec, is_mean, None, False, None)

    on_new_world(over_all.cache_clear)

    def serve(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not kwargs and len(args) == 1:
            (tensor,) = args
            reduced = over_all(tensor._spec)
        else:
            bound = bind(args, kwargs, ("input", "dim", "keepdim"), ("dtype",))
            if bound is None or type(bound["input"]) is not ShardTensor or not _is_served(bound.get("dim")):
                return below(func, types, args, kwargs)
            tensor, dims = bound["input"], bound.get("dim")
            dims = (dims,) if type(dims) is int else None if dims is None else tuple(dims)
            reduced = _reduced(tensor._spec, is_mean, dims, bool(bound.get("keepdim")), bound.get("dtype"))
        if reduced.may_be_cast and autocast_is_on() and torch.is_autocast_enabled(tensor.device.type):
            return torch.sum(tensor, reduced.dims, reduced.keepdim, dtype=torch.float32)
        if torch.is_grad_enabled() and requires_grad(tensor):
            return _apply(tensor, reduced)
        return _run(tensor, reduced)

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


_serve_sum, _serve_mean = _serve(is_mean=False), _serve(is_mean=True)
for _function in (torch.sum, torch.Tensor.sum):
    register_function_handler(_function, _serve_sum, promote=False)
for _function in (torch.mean, torch.Tensor.mean):
    register_function_handler(_function, _serve_mean, promote=False)
for _function in (torch.nansum, torch.Tensor.nansum):
    register_function_handler(_function, _nansum, promote=False)
on_new_world(_reduced.cache_clear)
for _function in (torch.nanmean, torch.Tensor.nanmean):
    register_function_handler(_function, _nanmean, promote=False)
