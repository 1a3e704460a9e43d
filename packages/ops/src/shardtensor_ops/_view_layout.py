"""Which layout holds the result of a view, and what to move where none does: integers and layouts only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from shardtensor_spec import DimSplit, chunk_sizes

from ._grouping import FlatSplit, ViewGroup, aligned_sizes, dims_that_hold, flat_split, view_groups

Grid = Mapping[int, DimSplit]


class Held(NamedTuple):
    """What a view makes of a grid.

    Attributes
    ----------
    grid : dict of int to DimSplit
        Splits of output dims.
    lost : tuple of int
        Input dims whose split no output dim can hold.
    """

    grid: dict[int, DimSplit]
    lost: tuple[int, ...]


class Realigned(NamedTuple):
    """A way through a shape with the troublesome groups merged, where the cuts are moved to where the view allows them.

    Attributes
    ----------
    shape : tuple of int
        The input with each such group merged to one dim.
    before, after : dict of int to DimSplit
        Splits of the merged shape: what the input has, and what it is brought to.
    grid : dict of int to DimSplit
        Splits of output dims, of the latter.
    """

    shape: tuple[int, ...]
    before: dict[int, DimSplit]
    after: dict[int, DimSplit]
    grid: dict[int, DimSplit]


def held_by_view(input_shape: Sequence[int], output_shape: Sequence[int], grid: Grid) -> Held:
    """Find an output dim for every split of an input dim.

    Examples
    --------
    Rows 4,1 of the middle dim, folded by what is in front of it:

    >>> held_by_view((2, 5, 3), (10, 3), {1: DimSplit((0,), (4, 1))})
    Held(grid={0: DimSplit(axes=(0,), sizes=(4, 1), n_repeats=2)}, lost=())
    """
    held: dict[int, DimSplit] = {}
    lost: list[int] = []
    for group in view_groups(input_shape, output_shape):
        extents = [input_shape[dim] for dim in group.inputs]
        out_extents = [output_shape[dim] for dim in group.outputs]
        for position, dim in enumerate(group.inputs):
            split = grid.get(dim)
            if split is None:
                continue
            if extents == out_extents:
                held[group.outputs[position]] = split
                continue
            found = _first_free(group, out_extents, flat_split(extents, position, split), held)
            if found is None:
                lost.append(dim)
            else:
                output, flat = found
                held[output] = DimSplit(split.axes, flat.sizes, flat.n_repeats)
    return Held(held, tuple(lost))


def _first_free(
    group: ViewGroup, out_extents: Sequence[int], flat: FlatSplit, held: Grid
) -> tuple[int, FlatSplit] | None:
    for position, split in dims_that_hold(out_extents, flat):
        if group.outputs[position] not in held:
            return group.outputs[position], split
    return None


def realigned(input_shape: Sequence[int], output_shape: Sequence[int], grid: Grid) -> Realigned | None:
    """Move the cuts of split dims that a view cannot hold to the nearest places where it can.

    Returns
    -------
    Realigned or None
        None where such a dim shares its group with another split dim.
    """
    lost = held_by_view(input_shape, output_shape, grid).lost
    shape: list[int] = []
    before: dict[int, DimSplit] = {}
    after: dict[int, DimSplit] = {}
    for group in view_groups(input_shape, output_shape):
        extents = [input_shape[dim] for dim in group.inputs]
        split_dims = [dim for dim in group.inputs if dim in grid]
        if not set(split_dims) & set(lost):
            for dim in group.inputs:
                if dim in grid:
                    before[len(shape)] = after[len(shape)] = grid[dim]
                shape.append(input_shape[dim])
            continue
        if len(split_dims) != 1:
            return None
        (dim,) = split_dims
        flat = flat_split(extents, group.inputs.index(dim), grid[dim])
        before[len(shape)] = DimSplit(grid[dim].axes, flat.sizes, flat.n_repeats)
        n_rows = math.prod(extents)
        outermost = next((i for i, output in enumerate(group.outputs) if output_shape[output] > 1), 0)
        n_inner = math.prod(output_shape[output] for output in group.outputs[outermost + 1 :])
        whole = tuple(size * flat.n_repeats for size in flat.sizes)
        after[len(shape)] = DimSplit(grid[dim].axes, aligned_sizes(whole, n_inner))
        shape.append(n_rows)
    held = held_by_view(shape, output_shape, after)
    assert not held.lost, (input_shape, output_shape, grid)
    return Realigned(tuple(shape), before, after, held.grid)


def moved_elsewhere(
    input_shape: Sequence[int], output_shape: Sequence[int], grid: Grid, mesh_shape: Sequence[int], *, at_least: int = 2
) -> dict[int, DimSplit] | None:
    """Bring the split of the first dim that a view cannot hold to another dim, or nest it in a split that it can.

    Parameters
    ----------
    input_shape, output_shape, grid
        The view.
    mesh_shape : Sequence of int
        Ranks along each mesh axis.
    at_least : int
        Rows that the other dim must have.

    Returns
    -------
    dict of int to DimSplit or None
        The grid to bring the input to; other splits may still be lost. None if there is no such dim.
    """
    lost = held_by_view(input_shape, output_shape, grid).lost
    split = grid[lost[0]]
    others = {dim: other for dim, other in grid.items() if dim != lost[0]}
    for dim, candidate in _candidates(input_shape, others, split, mesh_shape, at_least):
        moved = {**others, dim: candidate}
        if len(held_by_view(input_shape, output_shape, moved).lost) < len(lost):
            return moved
    return None


def _candidates(
    shape: Sequence[int], others: Grid, split: DimSplit, mesh_shape: Sequence[int], at_least: int
) -> Iterator[tuple[int, DimSplit]]:
    n_shards = len(split.sizes)
    for dim in sorted(range(len(shape)), key=lambda dim: (-shape[dim], dim)):
        if dim not in others and shape[dim] >= at_least:
            yield dim, DimSplit(split.axes, chunk_sizes(shape[dim], n_shards))
    for dim, other in others.items():
        if other.n_repeats == 1 and max(other.axes) < min(split.axes):
            sizes = tuple(part for size in other.sizes for part in chunk_sizes(size, n_shards))
            yield dim, DimSplit(other.axes + split.axes, sizes)
