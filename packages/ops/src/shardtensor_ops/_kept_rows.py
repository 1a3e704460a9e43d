"""Which rows of a split dim a slice or a selection keeps on every shard: integers only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from shardtensor_spec import DimSplit


class RowRange(NamedTuple):
    """The rows ``range(start, stop, step)`` of a dim, all of them inside it."""

    start: int
    stop: int
    step: int

    @property
    def n_rows(self) -> int:
        """How many rows these are."""
        return len(range(*self))


def row_range(start: int | None, stop: int | None, step: int, extent: int) -> RowRange:
    """Resolve the arguments of a slice as torch does: negative ones count from the end, what sticks out is cut off.

    Examples
    --------
    >>> row_range(-3, None, 2, 10)
    RowRange(start=7, stop=10, step=2)
    """
    start, stop, _ = slice(start, stop).indices(extent)
    return RowRange(start, max(start, stop), step)


def rows_in(rows: RowRange, first: int, last: int) -> RowRange:
    """Find the rows that lie in the shard ``[first, last)``, counted from the shard's first row.

    Examples
    --------
    >>> rows_in(RowRange(1, 9, 3), 3, 6)
    RowRange(start=1, stop=3, step=3)
    """
    n_before = -(-(first - rows.start) // rows.step) if first > rows.start else 0
    start = rows.start + n_before * rows.step - first
    stop = min(rows.stop, last) - first
    return RowRange(0, 0, rows.step) if start >= stop else RowRange(start, stop, rows.step)


def kept_rows(sizes: Sequence[int], rows: RowRange) -> list[RowRange]:
    """Find the rows that each shard keeps, counted from its first row.

    Examples
    --------
    >>> [kept.n_rows for kept in kept_rows((2, 5, 0, 3), RowRange(1, 2, 1))]
    [1, 0, 0, 0]
    """
    cuts = [0, *itertools.accumulate(sizes)]
    return [rows_in(rows, first, last) for first, last in itertools.pairwise(cuts)]


class RowOwner(NamedTuple):
    """Who holds a row.

    Attributes
    ----------
    shard : int
        Position among the split's sizes.
    row : int
        Row of the shard's local tensor.
    """

    shard: int
    row: int


def owner_of(split: DimSplit, row: int) -> RowOwner:
    """Find the owner of a row of a dim, folded or not.

    Examples
    --------
    >>> owner_of(DimSplit((0,), (2, 3), n_repeats=2), 8)
    RowOwner(shard=1, row=4)
    """
    repeat, left = divmod(row, sum(split.sizes))
    for shard, size in enumerate(split.sizes):
        if left < size:
            return RowOwner(shard, repeat * size + left)
        left -= size
    raise AssertionError((split, row))


def held_by_one(
    split: DimSplit, owner: int, other: DimSplit | None, extent: int, mesh_shape: Sequence[int]
) -> DimSplit:
    """Split of another dim that says: only shard ``owner`` of ``split`` has anything.

    Parameters
    ----------
    split : DimSplit
        The split that is to be told.
    owner : int
        The one of its shards that has something.
    other : DimSplit, optional
        How the other dim is split already, by other mesh axes.
    extent : int
        Rows of the other dim.
    mesh_shape : Sequence of int
        Ranks along each mesh axis.

    Examples
    --------
    >>> held_by_one(DimSplit((0,), (2, 3)), 1, DimSplit((1,), (4, 5)), 9, (2, 2))
    DimSplit(axes=(0, 1), sizes=(0, 0, 4, 5), n_repeats=1)
    """
    if other is None:
        return DimSplit(split.axes, tuple(extent if shard == owner else 0 for shard in range(len(split.sizes))))
    axes = tuple(sorted(split.axes + other.axes))
    coordinate = [0] * len(mesh_shape)
    sizes = []
    for position in itertools.product(*(range(mesh_shape[axis]) for axis in axes)):
        for axis, index in zip(axes, position, strict=True):
            coordinate[axis] = index
        is_owner = split.shard_index(coordinate, mesh_shape) == owner
        sizes.append(other.sizes[other.shard_index(coordinate, mesh_shape)] if is_owner else 0)
    return DimSplit(axes, tuple(sizes), other.n_repeats)
