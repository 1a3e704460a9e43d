"""Max and average pooling of 1 to 3 dims on any split.

Output rows belong to the rank that owns the middle of their window (`_window`). What is outside of the tensor is -inf
for a maximum and 0 for an average, whose divisor follows from global coordinates. Indices of maxima are those of the
whole tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from shardtensor import ShardTensor
from shardtensor_collectives import operator_range
from shardtensor_spec import on_new_world

from ._linear import LinearOperator, brought_to, in_layout
from ._naming import shape_of
from ._pool_plan import (
    PoolingPlan,
    divide_by_counts,
    find_maxima,
    global_places,
    pick,
    plan_pooling,
    put,
    spread_windows,
    sum_windows,
)
from ._supported import supported_layout

# -- maxima -----------------------------------------------------------------------------------------------------------


class _MaxPool(torch.autograd.Function):
    """Input -> maxima, and their places: in the whole input as a ShardTensor if asked for."""

    @staticmethod
    def forward(ctx: Any, x: Any, plan: PoolingPlan, name: str, with_indices: bool) -> Any:
        ctx.plan, ctx.name = plan, name
        with operator_range(name):
            window = plan.fill(x._local_tensor, _lowest(x._local_tensor.dtype))
        values, places = find_maxima(plan, window)
        ctx.save_for_backward(places)
        result = in_layout(values, plan.result)
        if not with_indices:
            return result
        indices = in_layout(global_places(plan, places), plan.result)
        ctx.mark_non_differentiable(indices)
        return result, indices

    @staticmethod
    def backward(ctx: Any, gradient: Any, *_: Any) -> tuple[Any, None, None, None]:
        (places,) = ctx.saved_tensors
        return _Spread.apply(brought_to(gradient, ctx.plan.result), places, ctx.plan, ctx.name), None, None, None


class _Spread(torch.autograd.Function):
    """Gradient of the maxima -> gradient of the input. Linear; its adjoint is `_Pick`."""

    @staticmethod
    def forward(ctx: Any, gradient: Any, places: torch.Tensor, plan: PoolingPlan, name: str) -> Any:
        ctx.plan, ctx.name = plan, name
        ctx.save_for_backward(places)
        with operator_range(f"{name} backward"):
            return in_layout(plan.give_back(put(plan, gradient._local_tensor, places)), plan.source)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None, None, None]:
        (places,) = ctx.saved_tensors
        return _Pick.apply(brought_to(gradient, ctx.plan.source), places, ctx.plan, ctx.name), None, None, None


class _Pick(torch.autograd.Function):
    """Input -> its elements at the places of the maxima."""

    @staticmethod
    def forward(ctx: Any, x: Any, places: torch.Tensor, plan: PoolingPlan, name: str) -> Any:
        ctx.plan, ctx.name = plan, name
        ctx.save_for_backward(places)
        with operator_range(name):
            return in_layout(pick(plan, plan.fill(x._local_tensor, 0), places), plan.result)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None, None, None]:
        (places,) = ctx.saved_tensors
        return _Spread.apply(brought_to(gradient, ctx.plan.result), places, ctx.plan, ctx.name), None, None, None


def max_pool(x: Any, plan: PoolingPlan, name: str, with_indices: bool) -> Any:
    """Pool a ShardTensor in the layout of the plan; return maxima, and their places if asked for."""
    return _MaxPool.apply(x, plan, name, with_indices)


def _lowest(dtype: torch.dtype) -> float:
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def _max_pool(n_spatial: int, is_pair: bool, returns_pair: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def call(
        input: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        kernel, pads, dilations = (_tuple_of(v, n_spatial) for v in (kernel_size, padding, dilation))
        strides = _tuple_of(stride, n_spatial) if stride or stride == 0 else kernel
        x = _with_plain_dims(input, n_spatial)
        name = f"max_pool{n_spatial}d"
        plan = plan_pooling(
            _meta_function(name, kernel, strides, pads, dilations, ceil_mode),
            x._spec,
            n_spatial,
            kernel,
            strides,
            pads,
            dilations,
            ceil_mode,
        )
        return max_pool(x, plan, name, returns_pair or (is_pair and return_indices))

    return call(*args, **kwargs)


@functools.lru_cache(maxsize=1024)
def _meta_function(name: str, *arguments: Any) -> Callable[..., Any]:
    """Return the function of a meta tensor, the same object for the same arguments."""
    function = getattr(F, name)
    return lambda tensor: function(tensor, *arguments)


# -- averages ---------------------------------------------------------------------------------------------------------


def _avg_pool(n_spatial: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def call(
        input: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        kernel, pads = _tuple_of(kernel_size, n_spatial), _tuple_of(padding, n_spatial)
        strides = _tuple_of(stride, n_spatial) if stride or stride == 0 else kernel
        x = _with_plain_dims(input, n_spatial)
        override = () if n_spatial == 1 else (divisor_override,)
        operator = _averaging(
            f"avg_pool{n_spatial}d", x._spec, kernel, strides, pads, bool(ceil_mode), bool(count_include_pad), *override
        )
        return operator(x)

    return call(*args, **kwargs)


@functools.lru_cache(maxsize=1024)
def _averaging(
    name: str,
    spec: Any,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    ceil_mode: bool,
    counts_padding: bool,
    *divisor: int | None,
) -> LinearOperator:
    n_spatial = len(kernel)
    meta_function = _meta_function(name, kernel, stride, padding, ceil_mode, counts_padding, *divisor)
    ones = (1,) * n_spatial
    plan = plan_pooling(meta_function, spec, n_spatial, kernel, stride, padding, ones, ceil_mode, counts_padding)
    override = divisor[0] if divisor else None

    def forward(local: torch.Tensor) -> torch.Tensor:
        return divide_by_counts(plan, sum_windows(plan, plan.fill(local, 0)), override)

    def adjoint(gradient: torch.Tensor) -> torch.Tensor:
        return plan.give_back(spread_windows(plan, divide_by_counts(plan, gradient, override)))

    return LinearOperator(name, plan.source, plan.result, forward, adjoint)


# -- arguments --------------------------------------------------------------------------------------------------------


def _tuple_of(value: Any, n_spatial: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return values * n_spatial if len(values) == 1 else values


def _with_plain_dims(x: Any, n_spatial: int) -> Any:
    """Reduce what is pending and unfold the pooled dims."""
    n_dims = len(shape_of(x._spec))
    return brought_to(x, supported_layout(x._spec, "pool", unfolded=tuple(range(max(n_dims - n_spatial, 0), n_dims))))


def _register() -> None:
    def max_handler(n_spatial: int, is_pair: bool, returns_pair: bool) -> Callable[..., Any]:
        return lambda function, types, args, kwargs: _max_pool(n_spatial, is_pair, returns_pair, args, kwargs)

    def average_handler(n_spatial: int) -> Callable[..., Any]:
        return lambda function, types, args, kwargs: _avg_pool(n_spatial, args, kwargs)

    for n_spatial in (1, 2, 3):
        for module in (F, torch):
            plain = getattr(module, f"max_pool{n_spatial}d")
            ShardTensor.register_function_handler(plain, max_handler(n_spatial, module is F, False))
            with_indices = getattr(module, f"max_pool{n_spatial}d_with_indices", None)
            if with_indices is not None:
                ShardTensor.register_function_handler(with_indices, max_handler(n_spatial, True, True))
        ShardTensor.register_function_handler(getattr(F, f"avg_pool{n_spatial}d"), average_handler(n_spatial))


_register()
on_new_world(_averaging.cache_clear)
