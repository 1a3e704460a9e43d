"""Tensors in a row. Along a sharded dim too, each rank ends with a run of rows of the result, and only rows that cross
a border move: a class token in front of sharded patches makes rank 0's shard one row longer, and nothing moves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence

from torch.distributed.tensor import Partial, Replicate

from shardtensor import ShardTensorSpec
from shardtensor.extending import Call, Plan, axis_plan, make_spec, register_rule
from shardtensor_spec import DimSplit, chunk_sizes

from ._naming import shape_of
from ._relabel import only_meta


@register_rule("aten.stack")
def plan_stack(call: Call) -> Plan | None:
    """Stack along a new dim, which is not sharded."""
    specs = call.specs
    names = tuple(range(specs[0].ndim))
    dim = call.argument("dim") % (specs[0].ndim + 1)
    only_meta(call)  # torch's own error for shapes that differ
    return axis_plan(call, [names] * len(specs), [(*names[:dim], None, *names[dim:])], linear="jointly")


@register_rule("aten.cat")
def plan_cat(call: Call) -> Plan | None:
    """Concatenate. Pieces cut elsewhere along another dim come to the split of the largest."""
    specs = call.specs
    meta = only_meta(call)
    n_dims = len(meta.shape)
    dim = call.argument("dim") % n_dims
    pieces = [spec for spec in specs if not _is_skipped(spec, n_dims)]
    order = sorted(pieces, key=lambda spec: -math.prod(shape_of(spec)))
    others: dict[int, DimSplit] = {}
    taken: set[int] = set()
    for spec in order:
        for other, place in spec.grid.items():
            if other not in others and not taken & set(place.axes):
                others[other] = place
                taken |= set(place.axes)
    if dim not in others:
        return _plan_beside(call, n_dims, dim)
    split = others.pop(dim)
    sizes = _sizes_along([spec.grid.get(dim) for spec in pieces], [shape_of(spec)[dim] for spec in pieces], split)
    result = make_spec(call.mesh, meta, {**others, dim: DimSplit(split.axes, sizes)})
    targets, first = [], 0
    for spec in specs:
        assert spec.tensor_meta is not None
        if _is_skipped(spec, n_dims):
            targets.append(spec.replicated())
            continue
        extent = shape_of(spec)[dim]
        part = DimSplit(split.axes, _overlaps(sizes, first, first + extent))
        first += extent
        targets.append(make_spec(spec.mesh, spec.tensor_meta, {**others, dim: part}))
    moves = any(target.grid != spec.grid and spec.grid for spec, target in zip(specs, targets, strict=True))
    return Plan(tuple(targets), result, kind="reshard" if moves else "native")


def _plan_beside(call: Call, n_dims: int, dim: int) -> Plan | None:
    """Concatenate along a dim that stays whole."""
    specs = call.specs
    names: list[Sequence[Hashable]] = []
    for index, spec in enumerate(specs):
        if _is_skipped(spec, n_dims):
            names.append((("skipped", index),))
        else:
            names.append([("piece", index) if other == dim else other for other in range(n_dims)])
    result = ["pieces" if other == dim else other for other in range(n_dims)]
    whole = {name for operand in names for name in operand if isinstance(name, tuple)}
    pending = _common_pending(specs)
    plan = axis_plan(call, names, [result], whole=whole, linear="jointly")
    if plan is None or not pending or not isinstance(plan.result, ShardTensorSpec):
        return plan
    # A replica is a contribution too, on one rank: so one pending piece leaves the whole pending.
    sharded = {axis for split in plan.result.grid.values() for axis in split.axes}
    left = {axis: operation for axis, operation in pending.items() if axis not in sharded}
    targets = [make_spec(t.mesh, t.tensor_meta, t.grid, left) for t in plan.targets if t.tensor_meta is not None]
    result_meta = only_meta(call)
    return Plan(tuple(targets), make_spec(call.mesh, result_meta, plan.result.grid, left), kind=plan.kind)


def _common_pending(specs: Sequence[ShardTensorSpec]) -> dict[int, str]:
    """Mesh axes along which every piece is a pending sum or whole, and at least one is pending."""
    pending = {}
    for axis in range(specs[0].mesh.ndim):
        placements = [spec.placements[axis] for spec in specs]
        operations = {str(p.reduce_op) for p in placements if isinstance(p, Partial)}
        if operations == {"sum"} and all(isinstance(p, (Partial, Replicate)) for p in placements):
            pending[axis] = "sum"
    return pending


def _is_skipped(spec: ShardTensorSpec, n_dims: int) -> bool:
    """Whether torch ignores a piece: an empty vector goes with anything."""
    return n_dims != 1 and shape_of(spec) == (0,)


def _sizes_along(splits: Sequence[DimSplit | None], extents: Sequence[int], leader: DimSplit) -> tuple[int, ...]:
    """Choose the rows of the result that each shard gets.

    A rank keeps as many rows as it has now. Whole pieces are on every rank already: in front of the first sharded piece
    they go to the first rank and behind the last one to the last rank, so that nothing else need move; between two
    they are dealt evenly.
    """
    n_shards = len(leader.sizes)
    sharded = [index for index, split in enumerate(splits) if split is not None and split.axes == leader.axes]
    sizes = [0] * n_shards
    for index, (split, extent) in enumerate(zip(splits, extents, strict=True)):
        if split is not None and split.axes == leader.axes and split.n_repeats == 1:
            part: Sequence[int] = split.sizes
        elif index < sharded[0] and _is_small(extent, extents, n_shards):
            part = [extent] + [0] * (n_shards - 1)
        elif index > sharded[-1] and _is_small(extent, extents, n_shards):
            part = [0] * (n_shards - 1) + [extent]
        else:
            part = chunk_sizes(extent, n_shards)
        sizes = [size + more for size, more in zip(sizes, part, strict=True)]
    return tuple(sizes)


def _is_small(extent: int, extents: Sequence[int], n_shards: int) -> bool:
    """Whether one rank may take a whole piece: it is less than what a rank has anyway."""
    return extent * n_shards <= sum(extents)


def _overlaps(sizes: Sequence[int], start: int, stop: int) -> tuple[int, ...]:
    """Rows of ``[start, stop)`` in each shard of the given sizes."""
    cuts = [0, *itertools.accumulate(sizes)]
    return tuple(max(0, min(stop, last) - max(start, first)) for first, last in itertools.pairwise(cuts))
