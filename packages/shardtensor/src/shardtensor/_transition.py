"""From one layout to another, on local tensors and below autograd: the only place that decides how data moves.

========================  =============================================================================
transition                communication, per rank
========================  =============================================================================
equal splits              none
Replicate -> Shard        none (a slice)
Shard -> Replicate        all-gather-v: receives what it lacks
Shard -> Shard            exchange: receives the rows that it wants and does not hold
Partial -> Replicate      all-reduce
Partial -> Shard          reduce-scatter-v
Replicate -> Partial      none (the value on the first rank of the axis, zeros elsewhere)
several axes at once      one exchange over the whole mesh, never through a replicated state
========================  =============================================================================
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor_collectives import all_gather_v, all_reduce, exchange, reduce_scatter_v
from shardtensor_spec import Box, DimSplit, ShardTensorSpec, chunk_sizes, is_sharding, plan_exchange

from ._groups import axis_group, axis_name, flat_coordinate, whole_group
from ._layout import contiguous_meta, make_spec


def transition(local: torch.Tensor, source: ShardTensorSpec, target: ShardTensorSpec) -> torch.Tensor:
    """Bring a local tensor from one layout to another.

    Parameters
    ----------
    local : Tensor, source.local_shape
        This rank's shard.
    source, target : ShardTensorSpec
        Layouts of tensors of the same global shape on the same mesh. Strides and dtypes are not compared.

    Returns
    -------
    Tensor, target.local_shape
        ``local`` itself or a view of it where nothing moves.

    Notes
    -----
    Communication: see the table of the module.
    """
    if source is target or (source.placements == target.placements and source.grid == target.grid):
        return local
    if source.is_folded or target.is_folded:
        return _through_unfolded(local, source, target)
    local, source = _reduce_partials(local, source, target)
    local, source = _exchange_boxes(local, source, target)
    return _make_partials(local, source, target)


def _reduce_partials(
    local: torch.Tensor, source: ShardTensorSpec, target: ShardTensorSpec
) -> tuple[torch.Tensor, ShardTensorSpec]:
    """Do the reductions that the target does not leave pending, each as a reduce-scatter where it can be one."""
    for axis, placement in enumerate(source.placements):
        if not isinstance(placement, Partial) or target.placements[axis] == placement:
            continue
        group, label = axis_group(source.mesh, axis), axis_name(source.mesh, axis)
        n_ranks = source.mesh.shape[axis]
        grid = dict(source.grid)
        wanted = target.placements[axis]
        wanted_dim = wanted.dim if isinstance(wanted, Shard) else -1
        split = target.grid.get(wanted_dim)
        reduce_op: Any = placement.reduce_op
        # A dim that other axes shard too, now or then, is reduced whole: its shards along this axis differ by row.
        if split is not None and split.axes == (axis,) and wanted_dim not in grid and reduce_op != "avg":
            local = reduce_scatter_v(local, split.sizes, wanted_dim, group, op=reduce_op, axis=label)
            grid[wanted_dim] = split
        elif reduce_op == "avg":
            # The sum of the shares: not every backend knows an averaging reduction.
            local = all_reduce(local / n_ranks, group, op="sum", axis=label)
        else:
            local = all_reduce(local, group, op=reduce_op, axis=label)
        pending = {a: p.reduce_op for a, p in enumerate(source.placements) if isinstance(p, Partial) and a != axis}
        source = make_spec(source.mesh, _meta(source), grid, pending)
    return local, source


def _exchange_boxes(
    local: torch.Tensor, source: ShardTensorSpec, target: ShardTensorSpec
) -> tuple[torch.Tensor, ShardTensorSpec]:
    """Move rows until every rank holds its box of the target."""
    if source.grid == target.grid:
        return local, source
    mesh = source.mesh
    changed = {
        axis
        for dim in source.grid.keys() | target.grid.keys()
        if source.grid.get(dim) != target.grid.get(dim)
        for split in (source.grid.get(dim), target.grid.get(dim))
        if split is not None
        for axis in split.axes
    }
    pending = {axis: p.reduce_op for axis, p in enumerate(source.placements) if isinstance(p, Partial)}
    reached = make_spec(mesh, _meta(source), target.grid, pending)
    if len(changed) == 1:
        (axis,) = changed
        local = _exchange_along(local, source, reached, axis)
    else:
        local = _exchange_over_mesh(local, source, reached)
    return local, reached


def _exchange_along(local: torch.Tensor, source: ShardTensorSpec, target: ShardTensorSpec, axis: int) -> torch.Tensor:
    mesh = source.mesh
    here = _coordinate(source)
    before, after = (_split_of_axis(spec, axis) for spec in (source, target))
    if before is None and after is not None:
        dim, split = after
        start, stop = split.rows(here, mesh.shape)
        return local.narrow(dim, start, stop - start)
    group, label = axis_group(mesh, axis), axis_name(mesh, axis)
    line = [(*here[:axis], index, *here[axis + 1 :]) for index in range(mesh.shape[axis])]
    if after is None and before is not None:
        dim = before[0]
        sizes = [source.shape_at(coordinate)[dim] for coordinate in line]
        return all_gather_v(local, sizes, dim, group, axis=label)
    return _run_exchange(local, source, target, line, here[axis], group, label)


def _exchange_over_mesh(local: torch.Tensor, source: ShardTensorSpec, target: ShardTensorSpec) -> torch.Tensor:
    mesh = source.mesh
    coordinates = source.coordinates()
    rank = flat_coordinate(_coordinate(source), mesh)
    if source.has_partial:
        # Contributions differ between the ranks of a pending axis, so they are no replicas to choose from.
        return _exchange_beside_partials(local, source, target)
    return _run_exchange(local, source, target, coordinates, rank, whole_group(mesh), axis_name(mesh))


def _exchange_beside_partials(local: torch.Tensor, source: ShardTensorSpec, target: ShardTensorSpec) -> torch.Tensor:
    """Exchange among the ranks that share their place along every pending axis: others look as if they had nothing."""
    mesh = source.mesh
    here = _coordinate(source)
    pending = [axis for axis, placement in enumerate(source.placements) if isinstance(placement, Partial)]
    nothing: Box = tuple((0, 0) for _ in _meta(source).shape)
    coordinates = source.coordinates()
    beside = [all(c[axis] == here[axis] for axis in pending) for c in coordinates]
    owned = [source.box_at(c) if is_beside else nothing for c, is_beside in zip(coordinates, beside, strict=True)]
    wanted = [target.box_at(c) if is_beside else nothing for c, is_beside in zip(coordinates, beside, strict=True)]
    rank = flat_coordinate(here, mesh)
    plan = plan_exchange(owned, wanted, rank, global_shape=_meta(source).shape)
    return exchange(local, plan, whole_group(mesh), axis=axis_name(mesh))


def _run_exchange(
    local: torch.Tensor,
    source: ShardTensorSpec,
    target: ShardTensorSpec,
    coordinates: list[tuple[int, ...]],
    rank: int,
    group: Any,
    label: str,
) -> torch.Tensor:
    owned = [source.box_at(coordinate) for coordinate in coordinates]
    wanted = [target.box_at(coordinate) for coordinate in coordinates]
    plan = plan_exchange(owned, wanted, rank, global_shape=_meta(source).shape)
    if plan.moves_nothing and len(plan.copies) == 1 and plan.is_complete:
        # Every rank already holds what it wants: a view, no copy.
        return local[tuple(slice(start, stop) for start, stop in plan.copies[0].source)]
    return exchange(local, plan, group, axis=label)


def _make_partials(local: torch.Tensor, source: ShardTensorSpec, target: ShardTensorSpec) -> torch.Tensor:
    """Turn replicas into contributions whose reduction is the value."""
    for axis, placement in enumerate(target.placements):
        if not isinstance(placement, Partial) or source.placements[axis] == placement:
            continue
        assert isinstance(source.placements[axis], Replicate), "a shard is replicated before it becomes a contribution"
        if placement.reduce_op == "sum" and _coordinate(source)[axis] != 0:
            local = torch.zeros_like(local)
        elif placement.reduce_op == "product" and _coordinate(source)[axis] != 0:
            local = torch.ones_like(local)
    return local


def _through_unfolded(local: torch.Tensor, source: ShardTensorSpec, target: ShardTensorSpec) -> torch.Tensor:
    """Unfold both sides where their repeats agree; else pass through shards of whole repeats: contiguous rows."""
    repeats = {dim: split.n_repeats for dim, split in source.grid.items() if split.n_repeats != 1}
    wanted = {dim: split.n_repeats for dim, split in target.grid.items() if split.n_repeats != 1}
    for dim in repeats.keys() & wanted.keys():
        if repeats[dim] != wanted[dim]:
            flat = make_spec(
                source.mesh, _meta(source), {d: s for d, s in source.grid.items() if d != dim}, _pending(source)
            )
            return transition(transition(local, source, flat), flat, target)
    folds = repeats | wanted
    return _unfolded_transition(local, source, target, folds)


def _unfolded_transition(
    local: torch.Tensor, source: ShardTensorSpec, target: ShardTensorSpec, folds: dict[int, int]
) -> torch.Tensor:
    """Run the transition on the tensor with each dim of ``folds`` seen as two, where each side is a grid of boxes."""
    begin, by_begin = _seen_unfolded(source, folds)
    end, by_end = _seen_unfolded(target, folds)
    local = transition(local, source, by_begin) if by_begin is not source else local
    local = local.reshape(begin.local_shape)
    local = transition(local, begin, end).reshape(by_end.local_shape)
    return transition(local, by_end, target) if by_end is not target else local


def _seen_unfolded(spec: ShardTensorSpec, folds: dict[int, int]) -> tuple[ShardTensorSpec, ShardTensorSpec]:
    """Return the layout in unfolded coordinates, and the folded-coordinate layout that it is a view of.

    A dimension that this side shards contiguously is cut between repeats for the purpose: the second layout then
    differs from ``spec`` in its sizes, and one more exchange of the rows in between is needed.
    """
    shape: list[int] = []
    grid: dict[int, DimSplit] = {}
    flat_grid = dict(spec.grid)
    for dim, extent in enumerate(_meta(spec).shape):
        split = spec.grid.get(dim)
        if dim not in folds:
            if split is not None:
                grid[len(shape)] = split
            shape.append(extent)
            continue
        n_repeats = folds[dim]
        if split is not None and split.n_repeats == 1:
            rows_of_repeat = extent // n_repeats
            whole = _whole_repeats(split.sizes, n_repeats, rows_of_repeat)
            grid[len(shape)] = split._replace(sizes=whole)
            flat_grid[dim] = split._replace(sizes=tuple(n * rows_of_repeat for n in whole))
        elif split is not None:
            grid[len(shape) + 1] = split._replace(n_repeats=1)
        shape += [n_repeats, extent // n_repeats]
    dtype = _meta(spec).dtype
    pending = _pending(spec)
    unfolded = make_spec(spec.mesh, contiguous_meta(shape, dtype), grid, pending)
    folded = make_spec(spec.mesh, _meta(spec), flat_grid, pending)
    return unfolded, folded


def _whole_repeats(sizes: tuple[int, ...], n_repeats: int, rows_of_repeat: int) -> tuple[int, ...]:
    """Split whole repeats over the ranks, as close to the given rows as it goes."""
    if rows_of_repeat == 0:
        return chunk_sizes(n_repeats, len(sizes))
    cuts = [0]
    total = 0
    for size in sizes:
        total += size
        cuts.append(max(cuts[-1], min(n_repeats, round(total / rows_of_repeat))))
    cuts[-1] = n_repeats
    return tuple(stop - start for start, stop in itertools.pairwise(cuts))


def _split_of_axis(spec: ShardTensorSpec, axis: int) -> tuple[int, DimSplit] | None:
    placement: Any = spec.placements[axis]
    return (placement.dim, spec.grid[placement.dim]) if is_sharding(placement) else None


def _pending(spec: ShardTensorSpec) -> dict[int, str]:
    return {axis: p.reduce_op for axis, p in enumerate(spec.placements) if isinstance(p, Partial)}


def _meta(spec: ShardTensorSpec) -> Any:
    assert spec.tensor_meta is not None
    return spec.tensor_meta


def _coordinate(spec: ShardTensorSpec) -> tuple[int, ...]:
    assert spec.coordinate is not None, "a rank outside the mesh holds no shard"
    return spec.coordinate
