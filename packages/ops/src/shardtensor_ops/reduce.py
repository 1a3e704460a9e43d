"""Reductions over any mix of dims, sharded or not: sums, means, extremes, moments, norms.

Over a sharded dim a sum stays pending (``Partial``), a mean as a sum over the global count. What is no sum is merged at
once by a small collective: extremes by integers of the same order, so that NaN survives; truth values as truth values,
never as counts; moments by Chan's formula. Sums of short floats are made in float32 and reduced at once, so that no
contribution is rounded.

Their gradients are made in the operand's layout, by the handlers of `_sum`, `_extreme` and `_prod`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shardtensor.extending import Call, Plan, axis_plan, register_rule

from . import _extreme, _prod, _sum  # noqa: F401  they register the function handlers
from ._rank_merge import accumulation_dtype, from_order_key, merged_moments, order_identity, order_key
from ._reduced_dims import Reduction, check_not_empty, checked_dims, reduction_plan

aten = torch.ops.aten


def _dtype_of(call: Call) -> torch.dtype:
    meta = call.specs[0].tensor_meta
    assert meta is not None
    return meta.dtype


def _result_dtype(call: Call) -> torch.dtype:
    meta = call.global_metas[0]
    assert meta is not None
    return meta.dtype


def _dims_of(call: Call) -> tuple[int, ...]:
    return checked_dims(call.argument("dim"), call.specs[0].ndim)


def _keepdim(call: Call) -> bool:
    return bool(call.argument("keepdim", False))


# -- sums ------------------------------------------------------------------------------------------------------------


@register_rule("aten.sum", "aten.mean", "aten.nansum")
def plan_sum(call: Call) -> Plan | None:
    """Sums and means: pending over the ranks, divided by the global count."""
    packet = str(call.op.overloadpacket).removeprefix("aten.")
    before, after = _dtype_of(call), _result_dtype(call)
    is_linear = before == after or ((before.is_floating_point or before.is_complex) and not _is_integral(after))
    merges_at_once = accumulation_dtype(after) != after
    local = {"sum": None, "mean": _local_mean, "nansum": None}[packet]
    if merges_at_once:
        local = {"sum": _merged_sum, "mean": _merged_mean, "nansum": _merged_nansum}[packet]
    return reduction_plan(
        call,
        _dims_of(call),
        _keepdim(call),
        local,
        pending=None if merges_at_once else "sum",
        linear="each" if is_linear and packet != "nansum" else "no",
    )


def _is_integral(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _local_mean(reduction: Reduction, local: Tensor, *args: Any, dtype: torch.dtype | None = None) -> Tensor:
    total = torch.sum(local, reduction.dims, reduction.keepdim, dtype=dtype)
    # No division by an empty count in Python: the mean of nothing is NaN.
    return total.div_(reduction.n_elements) if reduction.n_elements else total.fill_(math.nan)


def _merged_sum(reduction: Reduction, local: Tensor, *args: Any, dtype: torch.dtype | None = None) -> Tensor:
    dtype = dtype or local.dtype
    total = torch.sum(local, reduction.dims, reduction.keepdim, dtype=accumulation_dtype(dtype))
    return reduction.merge.all_reduce(total).to(dtype)


def _merged_mean(reduction: Reduction, local: Tensor, *args: Any, dtype: torch.dtype | None = None) -> Tensor:
    dtype = dtype or local.dtype
    return reduction.merge.all_reduce(_local_mean(reduction, local, dtype=accumulation_dtype(dtype))).to(dtype)


def _merged_nansum(reduction: Reduction, local: Tensor, *args: Any, dtype: torch.dtype | None = None) -> Tensor:
    dtype = dtype or local.dtype
    total = torch.nansum(local, reduction.dims, reduction.keepdim, dtype=accumulation_dtype(dtype))
    return reduction.merge.all_reduce(total).to(dtype)


@register_rule("aten.count_nonzero")
def plan_count_nonzero(call: Call) -> Plan | None:
    """Counts are sums."""
    return reduction_plan(call, _dims_of(call), False, None, pending="sum")


@register_rule("aten.prod")
def plan_prod(call: Call) -> Plan | None:
    """Products of the shards, multiplied at once."""
    if call.specs[0].grid and _result_dtype(call).is_complex:
        return None  # no backend multiplies complex numbers
    return reduction_plan(call, _dims_of(call), _keepdim(call), _merged_prod)


def _merged_prod(reduction: Reduction, local: Tensor, *args: Any, dtype: torch.dtype | None = None) -> Tensor:
    if dtype is None:
        dtype = local.dtype if local.dtype.is_floating_point else torch.int64
    product = local.to(accumulation_dtype(dtype))
    for dim in reversed(reduction.dims):
        product = torch.prod(product, dim, reduction.keepdim)
    return reduction.merge.all_reduce(product, "product").to(dtype)


# -- truth values ----------------------------------------------------------------------------------------------------


@register_rule("aten.any", "aten.all")
def plan_truth(call: Call) -> Plan | None:
    """Any and all: the shards' answers joined as truth values."""
    (spec, *_) = call.specs
    dims = _dims_of(call)
    if call.argument("dim") == [] and len(call.global_metas[0].shape) == spec.ndim:  # type: ignore[union-attr]
        dims = ()  # this operator takes an empty list as no dims
    is_any = "any" in str(call.op.overloadpacket)
    return reduction_plan(call, dims, _keepdim(call), _merged_any if is_any else _merged_all)


def _merged_any(reduction: Reduction, local: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return reduction.merge.all_reduce(torch.any(local, reduction.dims, reduction.keepdim), "max")


def _merged_all(reduction: Reduction, local: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return reduction.merge.all_reduce(torch.all(local, reduction.dims, reduction.keepdim), "min")


# -- extremes --------------------------------------------------------------------------------------------------------


@register_rule("aten.amax", "aten.amin", "aten.max.default", "aten.min.default", "aten.aminmax")
def plan_extreme(call: Call) -> Plan | None:
    """Largest and smallest values: an empty shard contributes what loses against every other."""
    packet = str(call.op.overloadpacket).removeprefix("aten.")
    local = {"amax": _merged_max, "max": _merged_max, "amin": _merged_min, "min": _merged_min}.get(packet)
    check_not_empty(call, _dims_of(call))
    return reduction_plan(call, _dims_of(call), _keepdim(call), local or _merged_min_and_max)


def _merged_max(reduction: Reduction, local: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _merged_extreme(reduction, local, largest=True)


def _merged_min(reduction: Reduction, local: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _merged_extreme(reduction, local, largest=False)


def _merged_min_and_max(reduction: Reduction, local: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    keys = torch.stack([order_key(_local_extreme(reduction, local, largest), largest) for largest in (False, True)])
    smallest, greatest = reduction.merge.all_reduce(keys, "max").unbind(0)
    return from_order_key(smallest, False, local.dtype), from_order_key(greatest, True, local.dtype)


def _merged_extreme(reduction: Reduction, local: Tensor, largest: bool) -> Tensor:
    key = order_key(_local_extreme(reduction, local, largest), largest)
    return from_order_key(reduction.merge.all_reduce(key, "max"), largest, local.dtype)


def _local_extreme(reduction: Reduction, local: Tensor, largest: bool) -> Tensor:
    if local.numel() == 0:
        return local.new_full(reduction.shape_after(local.shape), order_identity(local.dtype, largest))
    function = torch.amax if largest else torch.amin
    return function(local, reduction.dims, reduction.keepdim)


@register_rule("aten.max.dim", "aten.min.dim", "aten.argmax", "aten.argmin")
def plan_argument(call: Call) -> Plan | None:
    """Extremes with their global positions; of equal values the first counts."""
    return _extreme.plan_argument(call)


@register_rule("aten.median.dim", "aten.nanmedian.dim", "aten.mode", "aten.kthvalue")
def plan_order_statistic(call: Call) -> Plan | None:
    """Order statistics along one dim need it whole: the shards move to another dim meanwhile."""
    if len(call.specs) != 1:
        return None
    (spec,) = call.specs
    (dim,) = checked_dims(call.argument("dim"), spec.ndim) or (0,)
    if not spec.ndim:
        return None
    names = tuple(range(spec.ndim))
    kept = tuple(None if n == dim else n for n in names) if _keepdim(call) else tuple(n for n in names if n != dim)
    return axis_plan(call, [names], [kept, kept], whole=(dim,), reduce_op=None)


# -- moments ---------------------------------------------------------------------------------------------------------


@register_rule("aten.var", "aten.std", "aten.var_mean", "aten.std_mean")
def plan_moments(call: Call) -> Plan | None:
    """Variances: counts, means and squared deviations of the shards merged, never sums of squares subtracted."""
    if _dtype_of(call).is_complex:
        return None
    packet = str(call.op.overloadpacket).removeprefix("aten.")
    is_root, with_mean = packet.startswith("std"), packet.endswith("mean")
    is_old_form = call.op._overloadname != "correction"

    def local_moments(reduction: Reduction, local: Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_old_form:
            # unbiased comes after dim, where there is one
            flags = [value for value in args if isinstance(value, bool)]
            correction: float = float(kwargs.get("unbiased", flags[0] if flags else True))
        else:
            given = kwargs.get("correction")
            correction = 1.0 if given is None else float(given)
        mean, squares = _merged_moments(reduction, local)
        freedom = max(reduction.n_elements - correction, 0.0)
        variance = squares / freedom if freedom else squares.div_(0.0)
        result = (variance.sqrt_() if is_root else variance).to(local.dtype)
        return (result, mean.to(local.dtype)) if with_mean else result

    return reduction_plan(call, _dims_of(call), _keepdim(call), local_moments, serves_empty=True)


def _merged_moments(reduction: Reduction, local: Tensor) -> tuple[Tensor, Tensor]:
    """Global mean and sum of squared deviations, in the dtype that sums are made in."""
    wide = local.to(accumulation_dtype(local.dtype))
    counts = reduction.merge.counts(reduction.spec, reduction.dims)
    n_mine = math.prod(local.shape[dim] for dim in reduction.dims)
    if n_mine == 0 or local.numel() == 0:
        mean = wide.new_zeros(reduction.shape_after(local.shape))
        squares = torch.zeros_like(mean)
    else:
        variance, mean = torch.var_mean(wide, reduction.dims, correction=0, keepdim=reduction.keepdim)
        squares = variance * n_mine
    return merged_moments(reduction.merge, mean, squares, counts)


# -- norms -----------------------------------------------------------------------------------------------------------


@register_rule("aten.linalg_vector_norm", "aten.norm")
def plan_norm(call: Call) -> Plan | None:
    """Norms of the shards, joined by the norm of the same order."""
    if _dtype_of(call).is_complex and len(call.specs) == 1:
        # The norm of a complex number is its absolute value's; the local function takes that first.
        pass
    return reduction_plan(call, _dims_of(call), _keepdim(call), _merged_norm)


def _merged_norm(
    reduction: Reduction, local: Tensor, order: Any = 2, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any
) -> Tensor:
    order = kwargs.get("ord", kwargs.get("p", order))
    order = 2.0 if order is None else float(order)
    result_dtype = dtype or local.dtype
    result_dtype = result_dtype.to_real() if result_dtype.is_complex else result_dtype
    wide_dtype = accumulation_dtype(result_dtype)
    if math.isinf(order):
        magnitudes = local.abs() if order < 0 or local.numel() == 0 or local.is_complex() else None
        largest = order > 0
        if local.numel() == 0:
            norms = torch.full(
                reduction.shape_after(local.shape), 0.0 if largest else math.inf, dtype=wide_dtype, device=local.device
            )
        else:
            wide = (local if magnitudes is None else magnitudes).to(wide_dtype)
            norms = torch.linalg.vector_norm(wide, order, reduction.dims, reduction.keepdim)
        key = reduction.merge.all_reduce(order_key(norms, largest), "max")
        return from_order_key(key, largest, wide_dtype).to(result_dtype)
    wide = local.to(wide_dtype.to_complex() if local.is_complex() else wide_dtype)
    if order == 0:
        counts = (wide != 0).sum(reduction.dims, reduction.keepdim).to(wide_dtype)
        return reduction.merge.all_reduce(counts).to(result_dtype)
    norms = torch.linalg.vector_norm(wide, order, reduction.dims, reduction.keepdim)
    if order == 1:
        return reduction.merge.all_reduce(norms).to(result_dtype)
    if order == 2:
        return reduction.merge.all_reduce(norms.square_()).sqrt_().to(result_dtype)
    return reduction.merge.all_reduce(norms.pow_(order)).pow_(1 / order).to(result_dtype)


@register_rule("aten.logsumexp")
def plan_logsumexp(call: Call) -> Plan | None:
    """Logarithms of the shards' sums, joined about the largest of them."""
    if _dtype_of(call).is_complex:
        return None
    return reduction_plan(call, _dims_of(call), _keepdim(call), _merged_logsumexp)


def _merged_logsumexp(reduction: Reduction, local: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    result_dtype = local.dtype if local.dtype.is_floating_point else torch.get_default_dtype()
    wide = local.to(accumulation_dtype(result_dtype))
    mine = torch.logsumexp(wide, reduction.dims, reduction.keepdim)
    largest = from_order_key(reduction.merge.all_reduce(order_key(mine, True), "max"), True, mine.dtype)
    anchor = torch.where(largest.isinf(), torch.zeros_like(largest), largest)
    return reduction.merge.all_reduce((mine - anchor).exp_()).log_().add_(anchor).to(result_dtype)
