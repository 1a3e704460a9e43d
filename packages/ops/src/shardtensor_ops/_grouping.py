"""How the split of a dim looks after a view: integers only.

A view keeps the row-major order of the elements. It falls apart into *groups*: runs of input dims and of output dims
with as many elements. Inside a group a split dim is a pattern of the group's flat rows: ``n_repeats`` times the same
sizes (see `FlatSplit`). An output dim can hold the split if cutting it gives the same pattern. As every rank holds its
elements in row-major order before and after, its local tensor is then viewed too, and nothing moves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from shardtensor_spec import DimSplit


class ViewGroup(NamedTuple):
    """Input dims that become output dims.

    Attributes
    ----------
    inputs, outputs : tuple of int
        Consecutive dims whose extents have the same product.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class FlatSplit(NamedTuple):
    """Split of the flat rows of a group: ``n_repeats`` times ``sizes``, one entry per shard."""

    n_repeats: int
    sizes: tuple[int, ...]


def view_groups(input_shape: Sequence[int], output_shape: Sequence[int]) -> list[ViewGroup]:
    """Match the dims of a view, in groups as small as possible.

    Parameters
    ----------
    input_shape, output_shape : Sequence of int
        Shapes of as many elements, at least one.

    Examples
    --------
    >>> view_groups((2, 3, 4), (6, 2, 2))
    [ViewGroup(inputs=(0, 1), outputs=(0,)), ViewGroup(inputs=(2,), outputs=(1, 2))]
    """
    assert math.prod(input_shape) == math.prod(output_shape) != 0, (input_shape, output_shape)
    groups: list[tuple[list[int], list[int]]] = []
    n_inputs, n_outputs = len(input_shape), len(output_shape)
    i = j = 0
    while i < n_inputs and j < n_outputs:
        inputs, outputs = [i], [j]
        n_in, n_out = input_shape[i], output_shape[j]
        i, j = i + 1, j + 1
        while n_in != n_out:
            if n_in < n_out:
                n_in *= input_shape[i]
                inputs.append(i)
                i += 1
            else:
                n_out *= output_shape[j]
                outputs.append(j)
                j += 1
        groups.append((inputs, outputs))
    # What is left on one side has a single row each, and goes with its neighbour.
    if i < n_inputs or j < n_outputs:
        if not groups:
            groups.append(([], []))
        groups[-1][0].extend(range(i, n_inputs))
        groups[-1][1].extend(range(j, n_outputs))
    return [ViewGroup(tuple(inputs), tuple(outputs)) for inputs, outputs in groups]


def flat_split(extents: Sequence[int], position: int, split: DimSplit) -> FlatSplit:
    """Pattern of a group's flat rows where one of its dims is split.

    Parameters
    ----------
    extents : Sequence of int
        Extents of the group's dims.
    position : int
        The split one among them.
    split : DimSplit
        Its split.

    Examples
    --------
    >>> flat_split((2, 5, 3), 1, DimSplit((0,), (4, 1)))
    FlatSplit(n_repeats=2, sizes=(12, 3))
    """
    n_inner = math.prod(extents[position + 1 :])
    n_repeats = math.prod(extents[:position]) * split.n_repeats
    return simplified(FlatSplit(n_repeats, tuple(size * n_inner for size in split.sizes)))


def simplified(flat: FlatSplit) -> FlatSplit:
    """Spell a pattern without repeats where it has none: all rows are in one shard."""
    if flat.n_repeats > 1 and sum(size > 0 for size in flat.sizes) <= 1:
        return FlatSplit(1, tuple(size * flat.n_repeats for size in flat.sizes))
    return flat


def dims_that_hold(extents: Sequence[int], flat: FlatSplit) -> list[tuple[int, FlatSplit]]:
    """Positions in a group whose split gives a pattern of the flat rows, best first.

    Parameters
    ----------
    extents : Sequence of int
        Extents of the group's dims, their product is the number of flat rows.
    flat : FlatSplit
        The pattern.

    Returns
    -------
    list of (int, FlatSplit)
        Position, and how the dim there is split. Dims that need no fold come first, then those of more rows.

    Examples
    --------
    >>> dims_that_hold((2, 5, 3), FlatSplit(2, (12, 3)))
    [(1, FlatSplit(n_repeats=1, sizes=(4, 1)))]
    >>> dims_that_hold((5, 2), FlatSplit(1, (3, 7)))
    []
    """
    found = []
    for position, extent in enumerate(extents):
        n_outer, n_inner = math.prod(extents[:position]), math.prod(extents[position + 1 :])
        if flat.n_repeats % n_outer or any(size % n_inner for size in flat.sizes):
            continue
        split = simplified(FlatSplit(flat.n_repeats // n_outer, tuple(size // n_inner for size in flat.sizes)))
        assert split.n_repeats * sum(split.sizes) == extent, (extents, flat)
        found.append((position, split))
    return sorted(found, key=lambda candidate: (candidate[1].n_repeats, -extents[candidate[0]], candidate[0]))


def aligned_sizes(sizes: Sequence[int], multiple: int) -> tuple[int, ...]:
    """Move every cut to the nearest multiple, so that few rows change their owner.

    Examples
    --------
    >>> aligned_sizes((3, 7), 2)
    (4, 6)
    """
    total = sum(sizes)
    assert total % multiple == 0, (sizes, multiple)
    cuts, seen = [0], 0
    for size in sizes:
        seen += size
        nearest = (seen + multiple // 2) // multiple * multiple
        cuts.append(min(max(nearest, cuts[-1]), total))
    cuts[-1] = total
    return tuple(stop - start for start, stop in itertools.pairwise(cuts))
