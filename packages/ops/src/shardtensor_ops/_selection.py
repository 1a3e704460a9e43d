"""Layouts of slices and of selected rows, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from shardtensor import ShardTensorSpec
from shardtensor.extending import axis_group, axis_name
from shardtensor_collectives import broadcast
from shardtensor_spec import DimSplit, chunk_sizes

from ._kept_rows import RowOwner, RowRange, held_by_one, kept_rows, owner_of
from ._naming import shape_of

Grid = dict[int, DimSplit]


def shard_of(spec: ShardTensorSpec, split: DimSplit) -> int:
    """Position among a split's sizes of what this rank holds."""
    assert spec.coordinate is not None
    return split.shard_index(spec.coordinate, spec.mesh.shape)


class Slice(NamedTuple):
    """A slice along one dim, on one rank.

    Attributes
    ----------
    source : dict of int to DimSplit
        What the sliced tensor must be split like.
    grid : dict of int to DimSplit
        Split of the slice.
    rows : RowRange
        The rows of the local tensor that are in the slice.
    """

    source: Grid
    grid: Grid
    rows: RowRange


def sliced(spec: ShardTensorSpec, dim: int, rows: RowRange) -> Slice:
    """Each rank keeps what it has of the slice; a folded dim is unfolded first unless all of it stays."""
    source = dict(spec.grid)
    split = source.get(dim)
    if split is None:
        return Slice(source, source, rows)
    if split.n_repeats != 1:
        if rows == (0, split.extent, 1):
            return Slice(source, source, RowRange(0, split.n_repeats * split.sizes[shard_of(spec, split)], 1))
        split = source[dim] = DimSplit(split.axes, chunk_sizes(split.extent, len(split.sizes)))
    kept = kept_rows(split.sizes, rows)
    grid = {**source, dim: split._replace(sizes=tuple(part.n_rows for part in kept))}
    return Slice(source, grid, kept[shard_of(spec, split)])


class Selection(NamedTuple):
    """One row of a dim, on one rank.

    Attributes
    ----------
    grid : dict of int to DimSplit
        Split of the result, which lacks the dim.
    owner : RowOwner or None
        Who holds the row; None if every rank has its part of it.
    local_row : int or None
        The row of the local tensor, None on ranks that hold nothing of it.
    is_shared : bool
        Whether the owner must send the row to the others, because a result without dims cannot be split.
    """

    grid: Grid
    owner: RowOwner | None
    local_row: int | None
    is_shared: bool


def selected(spec: ShardTensorSpec, dim: int, row: int) -> Selection:
    """Leave a row where it is: the result is split so that its owner has all of it.

    The first dim of the result that is not split tells so: operators that go row by row then run on the owner alone.
    """
    grid = {other - (other > dim): split for other, split in spec.grid.items() if other != dim}
    split = spec.grid.get(dim)
    if split is None:
        return Selection(grid, None, row, False)
    owner = owner_of(split, row)
    local_row = owner.row if shard_of(spec, split) == owner.shard else None
    shape = [extent for other, extent in enumerate(shape_of(spec)) if other != dim]
    if not shape:
        return Selection(grid, owner, local_row, True)
    home = min(range(len(shape)), key=lambda other: (other in grid, shape[other] == 1, other))
    grid[home] = held_by_one(split, owner.shard, grid.get(home), shape[home], spec.mesh.shape)
    return Selection(grid, owner, local_row, False)


def local_select(spec: ShardTensorSpec, dim: int, selection: Selection, result: ShardTensorSpec) -> Callable[..., Any]:
    """Return what selects the row of a local tensor."""
    shape = tuple(result.local_shape)
    row = selection.local_row
    if not selection.is_shared:

        def select(local: torch.Tensor, *arguments: object) -> torch.Tensor:
            return local.new_empty(shape) if row is None else local.select(dim, row)

        return select
    assert selection.owner is not None
    split = spec.grid[dim]
    send = row_sender(spec, split, selection.owner.shard)

    def select_and_send(local: torch.Tensor, *arguments: object) -> torch.Tensor:
        return send(local.new_empty(shape) if row is None else local.select(dim, row))

    return select_and_send


def row_sender(spec: ShardTensorSpec, split: DimSplit, owner: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what sends the owner's tensor to the other shards of a split."""
    mesh = spec.mesh
    roots: list[tuple[int, int]] = []  # (axis, coordinate of the owner), sent along one axis after the other
    left = owner
    for axis in reversed(split.axes):
        left, index = divmod(left, mesh.shape[axis])
        roots.append((axis, index))

    def send(local: torch.Tensor) -> torch.Tensor:
        for axis, index in roots:
            local = broadcast(local, axis_group(mesh, axis), source=index, axis=axis_name(mesh, axis))
        return local

    return send
