"""Losses: every mean divides by the global count, or by the global sum of weights.

Each rank computes with torch's own operator on its rows. A mean over these is weighted by the rank's share of the
elements, so the contributions add up to the global mean and nothing overflows on the way; the gradient is scaled
alike and stays in the layout of the input. Where weights are known from the targets only (``nll_loss``), one
all-reduce of two numbers brings the sums together, and the loss is complete at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial

from shardtensor import ShardTensorSpec
from shardtensor.extending import (
    Call,
    Plan,
    axis_group,
    axis_name,
    axis_plan,
    contiguous_meta,
    register_rule,
    without_partial,
)
from shardtensor_collectives import all_reduce

from ._naming import broadcast_names, shape_of

_NONE, _MEAN, _SUM = 0, 1, 2  # torch's numbers of the reductions

_ELEMENTWISE = ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy")


@register_rule(*(f"aten.{name}" for name in _ELEMENTWISE), "aten.binary_cross_entropy_with_logits")
def plan_elementwise(call: Call) -> Plan | None:
    """A loss of corresponding elements, then a sum or a mean of all."""
    names, every = broadcast_names(call.specs)
    if call.argument("reduction") == _NONE:
        return axis_plan(call, names, [every])
    return _by_share(call, axis_plan(call, names, [()]), every, names)


@register_rule(*(f"aten.{name}_backward" for name in _ELEMENTWISE))
def plan_elementwise_backward(call: Call) -> Plan | None:
    """The gradient of each element, on the rank that has it."""
    names, every = broadcast_names(call.specs)
    return _by_share(call, axis_plan(call, names, [every]), every, names)


@register_rule("aten.multi_margin_loss", "aten.multilabel_margin_loss_forward")
def plan_margin(call: Call) -> Plan | None:
    """One loss per row, from all classes of the row."""
    names = _row_names(call.specs[0].ndim, call.specs)
    rows = names[0][:-1]
    per_row: list[tuple[Hashable, ...]] = [rows if call.argument("reduction") == _NONE else ()]
    if call.returns_many:
        per_row.append(names[0])
    input = call.specs[0].tensor_meta
    assert input is not None
    # Not every one of these operators has a meta kernel.
    output = contiguous_meta(input.shape[:-1] if per_row[0] else (), input.dtype)
    metas = [output, contiguous_meta(input.shape, input.dtype)][: len(per_row)]
    return _by_share(call, axis_plan(call, names, per_row, whole=("c",), metas=metas), rows, names)


@register_rule("aten.multi_margin_loss_backward", "aten.multilabel_margin_loss_backward")
def plan_margin_backward(call: Call) -> Plan | None:
    """The gradient of every row."""
    gradient, *others = call.specs
    names = _row_names(others[0].ndim, others)
    rows = names[0][:-1]
    names = [rows if gradient.ndim else (), *names]
    input = others[0].tensor_meta
    assert input is not None
    metas = [contiguous_meta(input.shape, input.dtype)]
    return _by_share(call, axis_plan(call, names, [names[1]], whole=("c",), metas=metas), rows, names)


def _row_names(n_dims: int, specs: Sequence[ShardTensorSpec]) -> list[tuple[Hashable, ...]]:
    """Names of ``(n, c)`` operands, of ``(n,)`` targets, which come second, and of ``(c,)`` weights."""
    full = ("n", "c")[-n_dims:]
    return [
        full if position == 0 or spec.ndim == 2 else ("n",) if position == 1 and n_dims == 2 else ("c",)[: spec.ndim]
        for position, spec in enumerate(specs)
    ]


def _by_share(
    call: Call, plan: Plan | None, counted: Sequence[Hashable], names: Sequence[Sequence[Hashable]]
) -> Plan | None:
    """Weight what torch's operator makes of the local elements by their share of all elements, if it takes a mean."""
    if plan is None or call.argument("reduction") != _MEAN:
        return plan
    n_local = n_global = 1
    for name in counted:
        extents = [
            (target.local_shape[position], shape_of(target)[position])
            for target, operand in zip(plan.targets, names, strict=True)
            for position, other in enumerate(operand)
            if other == name
        ]
        n_local *= extents[0][0]
        n_global *= extents[0][1]
    if n_local == n_global:
        return plan
    return dataclasses.replace(plan, local=_weighted(call.op, n_local / n_global))


def _weighted(op: Any, share: float) -> Callable[..., Any]:
    position = [argument.name for argument in op._schema.arguments].index("reduction")

    def run(*args: Any, **kwargs: Any) -> Any:
        if share == 0:
            # The mean of nothing is no number, its sum is zero.
            if position < len(args):
                args = (*args[:position], _SUM, *args[position + 1 :])
            else:
                kwargs = {**kwargs, "reduction": _SUM}
        result = op(*args, **kwargs)
        if isinstance(result, tuple):
            return (result[0] * share, *result[1:])
        return result * share

    return run


@register_rule("aten.nll_loss_forward", "aten.nll_loss2d_forward")
def plan_nll(call: Call) -> Plan | None:
    """Negative log-likelihood of class indices. The number of rows that count is known from the targets only.

    Notes
    -----
    Communication: for the mean, one all-reduce of three numbers over every axis that shards rows; none else.

    A class index out of range is seen by the rank that holds it. For the mean it travels with the sums, so that all
    ranks raise; a sum or no reduction does not communicate, so there it raises on that rank only.
    """
    names = _nll_names(call.specs)
    reduction = call.argument("reduction")
    output = names[1] if reduction == _NONE else ()
    plan = axis_plan(call, names, [output, ()], whole=("c",))
    if plan is None or reduction != _MEAN:
        return plan
    assert isinstance(plan.result, tuple)
    loss, total_weight = plan.result
    assert loss is not None and total_weight is not None
    pending = [axis for axis, placement in enumerate(loss.placements) if isinstance(placement, Partial)]
    if not pending:
        return plan
    whole = (without_partial(loss), without_partial(total_weight))
    return dataclasses.replace(plan, result=whole, local=_nll_mean(call.op, loss, pending))


def _nll_mean(op: Any, spec: ShardTensorSpec, axes: Sequence[int]) -> Callable[..., Any]:
    lines = [(axis_group(spec.mesh, axis), axis_name(spec.mesh, axis)) for axis in axes]

    def run(input: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
        fault: IndexError | None = None
        try:
            mean, total = op(input, target, weight, _MEAN, ignore_index)
        except IndexError as error:  # the others wait in the all-reduce below, so it is raised behind that
            fault, mean, total = error, input.new_zeros(()), input.new_zeros(())
        # A sum of many rows leaves the range of float16, so sums are float32 at least.
        wide = torch.promote_types(mean.dtype, torch.float32)
        n = total.to(wide)
        n_faults = torch.full_like(n, 0 if fault is None else 1)
        sums = torch.stack([torch.where(n == 0, n, mean.to(wide) * n), n, n_faults])
        for group, name in lines:
            sums = all_reduce(sums, group, axis=name)
        # On other devices torch itself does not raise, and a graph that is being traced has no numbers.
        if type(sums) is torch.Tensor and sums.device.type == "cpu" and sums[2] != 0:
            raise IndexError("a target is out of bounds on some rank: see the rank whose error has a cause") from fault
        return (sums[0] / sums[1]).to(mean.dtype), sums[1].to(total.dtype)

    return run


@register_rule("aten.nll_loss_backward", "aten.nll_loss2d_backward")
def plan_nll_backward(call: Call) -> Plan | None:
    """The gradient of every row; the total weight is global already."""
    gradient, *others, _ = call.specs
    names = _nll_names(others)
    names = [names[1] if gradient.ndim else (), *names, ()]
    plan = axis_plan(call, names, [names[1]], whole=("c",))
    if plan is not None and call.argument("reduction") != _MEAN:
        # Only a mean reads the total weight: a pending one may stay so.
        plan = dataclasses.replace(plan, targets=(*plan.targets[:-1], call.specs[-1]))
    return plan


def _nll_names(specs: Sequence[ShardTensorSpec]) -> list[tuple[Hashable, ...]]:
    """Names of the input ``(n, c, ...)``, the target ``(n, ...)`` and the class weights ``(c,)``."""
    input, _, *weight = specs
    spatial = tuple(range(input.ndim - 2))
    rows: tuple[Hashable, ...] = ("n", *spatial) if input.ndim > 1 else ()
    full: tuple[Hashable, ...] = ("n", "c", *spatial) if input.ndim > 1 else ("c",)
    return [full, rows, *[("c",)] * len(weight)]
