"""Softmax and its relatives along any dim: along a sharded one by maximum and sum over the ranks, without a gather.

==================  =========================================================================
along a whole dim   local
along a sharded     forward: one all-reduce of the maxima, one of the sums, a number per row;
                    backward: one all-reduce of a number per row
==================  =========================================================================
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from shardtensor.extending import Call, Plan, axis_plan, register_rule

from ._rank_merge import RankMerge, accumulation_dtype, from_order_key, order_identity, order_key
from ._reduced_dims import Reduction


@register_rule("aten._softmax", "aten._log_softmax", "aten._safe_softmax")
def plan_softmax(call: Call) -> Plan | None:
    """The layout stays."""
    local: dict[str, Callable[..., Tensor]] = {
        "_softmax": _softmax,
        "_log_softmax": _log_softmax,
        "_safe_softmax": _safe_softmax,
    }
    return _plan(call, local[str(call.op.overloadpacket).removeprefix("aten.")])


@register_rule("aten._softmax_backward_data", "aten._log_softmax_backward_data")
def plan_softmax_backward(call: Call) -> Plan | None:
    """The layout stays."""
    is_log = "log" in str(call.op.overloadpacket)
    return _plan(call, _log_softmax_backward if is_log else _softmax_backward)


def _plan(call: Call, local: Callable[..., Tensor]) -> Plan | None:
    if len(call.specs) != len([a for a in call.args if a in call.specs]):  # an out= form
        return None
    names = tuple(range(call.specs[0].ndim))
    operands = [names] * len(call.specs)
    plan = axis_plan(call, operands, [names])
    assert plan is not None
    dim = call.argument("dim")
    (target, *_) = plan.targets
    dim = dim % len(names) if names else 0
    if dim not in target.grid:
        return plan
    if target.grid[dim].n_repeats != 1:  # a row of a folded dim is no row of a shard
        plan = axis_plan(call, operands, [names], allow_folded=False)
        assert plan is not None
        (target, *_) = plan.targets
    merge = RankMerge(call.mesh, target.grid[dim].axes, str(call.op))
    reduction = Reduction(target, (dim,), True, merge)
    return Plan(plan.targets, plan.result, functools.partial(local, reduction), kind=plan.kind)


def _shifted(reduction: Reduction, local: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Subtract the maximum of every row; also return where all of a row is minus infinity."""
    (dim,) = reduction.dims
    wide = local.to(accumulation_dtype(dtype))
    if local.shape[dim] == 0:
        shape = reduction.shape_after(local.shape)
        mine = wide.new_full(shape, order_identity(wide.dtype, largest=True))
    else:
        mine = wide.amax(dim, True)
    largest = from_order_key(reduction.merge.all_reduce(order_key(mine, True), "max"), True, mine.dtype)
    return wide - largest, largest


def _softmax(reduction: Reduction, local: Tensor, dim: int, half_to_float: bool) -> Tensor:
    dtype = torch.float32 if half_to_float else local.dtype
    shifted, _ = _shifted(reduction, local, dtype)
    exponentials = shifted.exp_()
    return exponentials.div_(reduction.merge.all_reduce(exponentials.sum(dim, True))).to(dtype)


def _log_softmax(reduction: Reduction, local: Tensor, dim: int, half_to_float: bool) -> Tensor:
    dtype = torch.float32 if half_to_float else local.dtype
    shifted, _ = _shifted(reduction, local, dtype)
    total = reduction.merge.all_reduce(shifted.exp().sum(dim, True))
    return shifted.sub_(total.log_()).to(dtype)


def _safe_softmax(reduction: Reduction, local: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    shifted, largest = _shifted(reduction, local, dtype or local.dtype)
    exponentials = shifted.exp_()
    result = exponentials.div_(reduction.merge.all_reduce(exponentials.sum(dim, True)))
    return result.masked_fill_(largest == order_identity(largest.dtype, largest=True), 0).to(dtype or local.dtype)


def _softmax_backward(
    reduction: Reduction, gradient: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    dtype = accumulation_dtype(gradient.dtype)
    product = gradient.to(dtype) * output.to(dtype)
    total = reduction.merge.all_reduce(product.sum(dim, True))
    return product.sub_(output.to(dtype) * total).to(input_dtype)


def _log_softmax_backward(
    reduction: Reduction, gradient: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    dtype = accumulation_dtype(gradient.dtype)
    wide = gradient.to(dtype)
    total = reduction.merge.all_reduce(wide.sum(dim, True))
    return (wide - output.to(dtype).exp().mul_(total)).to(input_dtype)
