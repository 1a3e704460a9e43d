"""Which dims an operator reduces, and the plan for what is left of a layout then."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Partial

from shardtensor import ShardTensorSpec
from shardtensor.extending import Call, Linearity, Plan, axis_plan, make_spec

from ._naming import shape_of
from ._rank_merge import RankMerge
from ._torch_private import outside_modes


class Reduction(NamedTuple):
    """What a local function needs to know of the layout that it reduces.

    Attributes
    ----------
    spec : ShardTensorSpec
        Layout of the operand.
    dims : tuple of int
        The reduced dims, ascending.
    keepdim : bool
        Whether they stay, with one row.
    merge : RankMerge
        The ranks that hold parts of the reduced dims; no axes where none is sharded.
    """

    spec: ShardTensorSpec
    dims: tuple[int, ...]
    keepdim: bool
    merge: RankMerge

    @property
    def n_elements(self) -> int:
        """Elements of the whole tensor that are reduced to one."""
        return math.prod(shape_of(self.spec)[dim] for dim in self.dims)

    def shape_after(self, shape: Sequence[int]) -> list[int]:
        """Shape of the result for an operand of a (local) shape."""
        if self.keepdim:
            return [1 if dim in self.dims else extent for dim, extent in enumerate(shape)]
        return [extent for dim, extent in enumerate(shape) if dim not in self.dims]


def checked_dims(dims: int | Sequence[int] | None, n_dims: int, *, none_if_empty: bool = True) -> tuple[int, ...]:
    """Reduced dims, ascending and counted from the front.

    Parameters
    ----------
    dims : int, Sequence of int, or None
        As the operator got them; the checks are the operator's own.
    n_dims : int
        Dims of the operand.
    none_if_empty : bool
        Whether an empty list means all dims, as for most operators.
    """
    if dims is None:
        return tuple(range(n_dims))
    listed = (dims,) if isinstance(dims, int) else tuple(dims)
    if not listed and none_if_empty:
        return tuple(range(n_dims))
    return tuple(sorted(dim % n_dims for dim in listed)) if n_dims else ()


def reduction_plan(
    call: Call,
    dims: tuple[int, ...],
    keepdim: bool,
    local: Callable[..., Any] | None,
    *,
    pending: str | None = None,
    linear: Linearity = "no",
    serves_empty: bool = False,
) -> Plan | None:
    """Plan an operator with one operand that reduces dims.

    Parameters
    ----------
    call : Call
        The call.
    dims, keepdim
        What it reduces.
    local : callable, optional
        Called as ``local(reduction, local_tensor, *args, **kwargs)`` in place of the operator where a reduced dim is
        sharded. None to run the operator itself.
    pending : str, optional
        The reduction that ``local`` leaves pending over the ranks; by default it merges them itself.
    linear : {"no", "each"}
        Whether a pending sum of the operand stays pending.
    serves_empty : bool
        Whether ``local`` also stands in where only dims that are kept are sharded and some shard is empty, because the
        operator itself is not silent about empty tensors.
    """
    if len(call.specs) != 1:  # an out= form
        return None
    (spec,) = call.specs
    kept = tuple(dim for dim in range(spec.ndim) if dim not in dims)
    names = tuple(None if dim in dims else dim for dim in range(spec.ndim)) if keepdim else kept
    plan = axis_plan(call, [tuple(range(spec.ndim))], [names] * len(call.global_metas), reduce_op="sum", linear=linear)
    assert plan is not None
    (target,) = plan.targets
    crossed = tuple(sorted(axis for dim in dims if dim in target.grid for axis in target.grid[dim].axes))
    has_empty = serves_empty and any(0 in split.sizes for split in target.grid.values())
    if not crossed and not has_empty:
        return plan
    merge = RankMerge(call.mesh, crossed, str(call.op))
    reduction = Reduction(target, dims, keepdim, merge)
    result = plan.result if isinstance(plan.result, tuple) else (plan.result,)
    settled = tuple(None if layout is None else _with_pending(layout, crossed, pending) for layout in result)
    return Plan(plan.targets, settled if call.returns_many else settled[0], _bound(local or call.op, reduction, local))


def check_not_empty(call: Call, dims: tuple[int, ...]) -> None:
    """Let torch raise its own error where it has no answer for no elements; its meta kernels do not check."""
    (spec, *_) = call.specs
    shape = shape_of(spec)
    if any(shape[dim] == 0 for dim in dims):
        assert spec.tensor_meta is not None
        with outside_modes():
            call.op(torch.empty(shape, dtype=spec.tensor_meta.dtype), *call.args[1:], **call.kwargs)


def _bound(function: Callable[..., Any], reduction: Reduction, local: Callable[..., Any] | None) -> Callable[..., Any]:
    if local is None:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        return function(reduction, *args, **kwargs)

    return run


def _with_pending(layout: ShardTensorSpec, axes: Sequence[int], reduce_op: str | None) -> ShardTensorSpec:
    """Change what is pending along ``axes``: another reduction, or none."""
    pending = {axis: p.reduce_op for axis, p in enumerate(layout.placements) if isinstance(p, Partial)}
    for axis in axes:
        del pending[axis]
        if reduce_op is not None:
            pending[axis] = reduce_op
    assert layout.tensor_meta is not None
    return make_spec(layout.mesh, layout.tensor_meta, layout.grid, pending)
