"""Where the elements of a window lie in the global tensor: clipping, wrapping and repetition."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ._boxes import Box, box_shape
from ._exchange_plan import Piece


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of a window that is one box of the global tensor.

    Attributes
    ----------
    region : Box
        In global coordinates, inside the tensor, not empty.
    offset : tuple of int
        Add it to global coordinates to get coordinates in the window.
    """

    region: Box
    offset: tuple[int, ...]


def window_tiles(window: Box, global_shape: Sequence[int], circular: Sequence[int]) -> list[Tile]:
    """Cut a window into boxes of the global tensor.

    Parameters
    ----------
    window : Box
        In global coordinates. May stick out; along a circular dim what sticks out wraps around.
    global_shape : Sequence of int
        Shape of the global tensor.
    circular : Sequence of int
        Dims that wrap around.

    Returns
    -------
    list of Tile
        Disjoint in the window and in the global tensor: of a circular dim only the window's first
        ``global_shape[dim]`` rows are covered, the rest are `window_repeats`.

    Examples
    --------
    >>> window_tiles(((-1, 3),), (8,), ())
    [Tile(region=((0, 3),), offset=(1,))]
    >>> window_tiles(((-1, 3),), (8,), (0,))
    [Tile(region=((7, 8),), offset=(-7,)), Tile(region=((0, 3),), offset=(1,))]
    """
    runs_per_dim: list[list[tuple[tuple[int, int], int]]] = []
    for dim, ((start, stop), extent) in enumerate(zip(window, global_shape, strict=True)):
        runs: list[tuple[tuple[int, int], int]] = []
        if dim not in circular:
            first, last = max(start, 0), min(stop, extent)
            if first < last:
                runs.append(((first, last), -start))
        elif extent:
            stop = min(stop, start + extent)
            position = start
            while position < stop:
                lap = position // extent * extent
                end = min(stop, lap + extent)
                runs.append(((position - lap, end - lap), lap - start))
                position = end
        if not runs:
            return []
        runs_per_dim.append(runs)
    return [
        Tile(tuple([run[0] for run in combination]), tuple([run[1] for run in combination]))
        for combination in itertools.product(*runs_per_dim)
    ]


def window_repeats(window: Box, global_shape: Sequence[int], circular: Sequence[int]) -> tuple[Piece, ...]:
    """Copies inside the window that repeat what a circular dim holds more than once.

    Parameters
    ----------
    window, global_shape, circular
        As in `window_tiles`.

    Returns
    -------
    tuple of Piece
        Source and target are in window coordinates. To be carried out in order: the laps of a later dim repeat those
        of an earlier one as well.

    Examples
    --------
    >>> window_repeats(((-1, 5),), (4,), (0,))
    (Piece(source=((0, 2),), target=((4, 6),)),)
    """
    shape = box_shape(window)
    if 0 in shape:
        return ()
    filled = [(0, extent) for extent in shape]
    lapped = [dim for dim in sorted(circular) if 0 < global_shape[dim] < shape[dim]]
    for dim in lapped:
        filled[dim] = (0, global_shape[dim])
    repeats = []
    for dim in lapped:
        extent = global_shape[dim]
        for start in range(extent, shape[dim], extent):
            stop = min(start + extent, shape[dim])
            source, target = list(filled), list(filled)
            source[dim], target[dim] = (0, stop - start), (start, stop)
            repeats.append(Piece(tuple(source), tuple(target)))
        filled[dim] = (0, shape[dim])
    return tuple(repeats)
