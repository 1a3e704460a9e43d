"""Views: the order of the elements stays, the dims change.

An uneven split is kept whenever a dim of the result can hold it, folded if need be: ``[B, S sharded, E]`` seen as
``[B * S, E]`` stays where it is. Where none can, the cuts move to the nearest places that the new shape allows, or the
shards to another dim. A view that moved rows shares no memory with what it is a view of, so the engine refuses writes
to both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardtensor import ShardTensorSpec
from shardtensor.extending import Call, Plan, TensorMeta, axis_plan, make_spec, register_rule, transition
from shardtensor_spec import DimSplit

from ._naming import shape_of
from ._relabel import local_reshape, local_view, numel, only_meta, pending_of, relabel_plan, relaid
from ._view_layout import Realigned, held_by_view, moved_elsewhere, realigned


@register_rule(
    "aten.view.default", "aten._unsafe_view", "aten._reshape_alias", "aten.view_copy.default", "aten._reshape_copy"
)
def plan_view(call: Call) -> Plan | None:
    """View as another shape."""
    must_alias = any(result.alias_info is not None for result in call.op._schema.returns)
    return plan_reshape(call, must_alias=must_alias)


def plan_reshape(call: Call, *, must_alias: bool = True) -> Plan:
    """Plan whatever keeps the elements' order and gives them another shape."""
    (spec,) = call.specs
    meta = only_meta(call)
    before, after = shape_of(spec), tuple(meta.shape)
    make_local = local_view if must_alias else local_reshape
    if numel(before) == 0:
        grid = spec.grid if before == after else {}
        target = spec if before == after else relaid(spec, {})
        result = relaid(spec, grid, meta)
        return Plan((target,), result, make_local(result.local_shape))
    target = spec
    while True:
        held = held_by_view(before, after, target.grid)
        if not held.lost:
            result = relaid(target, held.grid, meta)
            return Plan(
                (target,), result, make_local(result.local_shape), kind="native" if target is spec else "reshard"
            )
        (first, *_) = held.lost
        split = target.grid[first]
        way = realigned(before, after, target.grid)
        if way is not None and _is_balanced(way, target.grid, held.lost):
            return _realigning_plan(spec, target, way, meta)
        moved = moved_elsewhere(before, after, target.grid, spec.mesh.shape, at_least=len(split.sizes))
        if moved is None and way is not None:
            return _realigning_plan(spec, target, way, meta)
        if moved is None:
            moved = moved_elsewhere(before, after, target.grid, spec.mesh.shape)
        if moved is None:
            moved = {dim: other for dim, other in target.grid.items() if dim != first}
        target = relaid(spec, moved)


def _is_balanced(way: Realigned, grid: dict[int, DimSplit], lost: tuple[int, ...]) -> bool:
    """Whether moving the cuts leaves no rank with much more than the largest shard had."""
    most = max(max(grid[dim].sizes) / max(sum(grid[dim].sizes), 1) for dim in lost)
    now = max(max(split.sizes) / sum(split.sizes) for dim, split in way.after.items() if split != way.before.get(dim))
    return now <= 1.5 * most


def _realigning_plan(spec: ShardTensorSpec, target: ShardTensorSpec, way: Realigned, meta: TensorMeta) -> Plan:
    flat_meta = TensorMeta(torch.Size(way.shape), _contiguous(way.shape), meta.dtype)
    pending = pending_of(target)
    before = make_spec(spec.mesh, flat_meta, way.before, pending)
    after = make_spec(spec.mesh, flat_meta, way.after, pending)
    result = relaid(target, way.grid, meta)
    return Plan((target,), result, _realign(before, after, tuple(result.local_shape)), kind="reshard")


def _realign(before: ShardTensorSpec, after: ShardTensorSpec, shape: tuple[int, ...]) -> Callable[..., torch.Tensor]:
    def view(local: torch.Tensor, *arguments: object, **keywords: object) -> torch.Tensor:
        return transition(local.reshape(before.local_shape), before, after).reshape(shape)

    return view


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


@register_rule("aten.permute", "aten.permute_copy")
def plan_permute(call: Call) -> Plan | None:
    """Reorder the dims."""
    (spec,) = call.specs
    return relabel_plan(call, [dim % spec.ndim for dim in call.argument("dims")])


@register_rule("aten.transpose.int", "aten.transpose_copy.int")
def plan_transpose(call: Call) -> Plan | None:
    """Swap two dims."""
    (spec,) = call.specs
    sources = list(range(spec.ndim))
    if spec.ndim:
        first, second = call.argument("dim0"), call.argument("dim1")
        sources[first], sources[second] = sources[second], sources[first]
    return relabel_plan(call, sources)


@register_rule("aten.t", "aten.t_copy", "aten.numpy_T")
def plan_t(call: Call) -> Plan | None:
    """Transpose a matrix."""
    (spec,) = call.specs
    return relabel_plan(call, list(reversed(range(spec.ndim))))


@register_rule("aten.unsqueeze", "aten.unsqueeze_copy")
def plan_unsqueeze(call: Call) -> Plan | None:
    """Insert a dim of one row."""
    (spec,) = call.specs
    sources: list[int | None] = list(range(spec.ndim))
    sources.insert(call.argument("dim") % (spec.ndim + 1), None)
    return relabel_plan(call, sources)


@register_rule("aten.squeeze", "aten.squeeze_copy")
def plan_squeeze(call: Call) -> Plan | None:
    """Drop dims of one row: which ones depends on the whole tensor, not on the shards."""
    (spec,) = call.specs
    shape = shape_of(spec)
    dims = call.argument("dim")
    if dims is None:
        chosen = set(range(spec.ndim))
    else:
        chosen = {dim % max(spec.ndim, 1) for dim in (dims if isinstance(dims, (list, tuple)) else [dims])}
    dropped = sorted(dim for dim in chosen if dim < spec.ndim and shape[dim] == 1)
    if any(dim in spec.grid for dim in dropped):
        return plan_reshape(call)  # one rank holds the row: another dim holds that instead
    dropped_dims = tuple(dropped)

    def squeeze(local: torch.Tensor, *arguments: object) -> torch.Tensor:
        return local.squeeze(dropped_dims)

    return relabel_plan(call, [dim for dim in range(spec.ndim) if dim not in dropped], squeeze)


@register_rule("aten.expand", "aten.expand_copy")
def plan_expand(call: Call) -> Plan | None:
    """Repeat dims of one row without copying them."""
    (spec,) = call.specs
    meta = only_meta(call)
    n_new = len(meta.shape) - spec.ndim
    # A single row that one rank holds is needed by all of them where it is repeated.
    sources = [None] * n_new + [
        dim if extent == meta.shape[n_new + dim] else None for dim, extent in enumerate(shape_of(spec))
    ]
    plan = relabel_plan(call, sources)
    assert isinstance(plan.result, ShardTensorSpec)
    shape = tuple(plan.result.local_shape)

    def expand(local: torch.Tensor, *arguments: object, **keywords: object) -> torch.Tensor:
        return local.expand(shape)

    return Plan(plan.targets, plan.result, expand)


@register_rule("aten.view.dtype")
def plan_view_dtype(call: Call) -> Plan | None:
    """Read the same bytes as another dtype. A pending sum is no sum of bytes."""
    (spec,) = call.specs
    meta = only_meta(call)
    names: list[Any] = list(range(spec.ndim))
    result = list(names)
    whole = []
    if shape_of(spec) != tuple(meta.shape):
        names[-1], result[-1] = "bytes before", "bytes after"
        whole = ["bytes before"]
    return axis_plan(call, [names], [result], whole=whole)
