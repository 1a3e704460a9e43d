"""Arithmetic on boxes: axis-aligned regions of a tensor, in plain ints.

A box is one half-open ``(start, stop)`` pair per dimension. The box of a scalar is ``()`` and holds one element, so
"no box" is always written ``None``; test for it with ``is None``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Box = tuple[tuple[int, int], ...]


def box_of_shape(shape: Sequence[int]) -> Box:
    """Box that begins at the origin.

    Examples
    --------
    >>> box_of_shape((2, 3))
    ((0, 2), (0, 3))
    """
    return tuple((0, extent) for extent in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """Extent along every dimension.

    Examples
    --------
    >>> box_shape(((1, 3), (4, 4)))
    (2, 0)
    """
    return tuple([stop - start for start, stop in box])


def box_numel(box: Box) -> int:
    """Number of elements.

    Examples
    --------
    >>> box_numel(((1, 3), (4, 7))), box_numel(())
    (6, 1)
    """
    return math.prod([stop - start for start, stop in box])


def box_slices(box: Box) -> tuple[slice, ...]:
    """Index of the box in a tensor whose origin is the box's own.

    Examples
    --------
    >>> box_slices(((1, 3), (0, 2)))
    (slice(1, 3, None), slice(0, 2, None))
    """
    return tuple([slice(start, stop) for start, stop in box])


def intersect(first: Box, second: Box) -> Box | None:
    """Common part of two boxes, ``None`` where it has no element.

    Examples
    --------
    >>> intersect(((0, 4),), ((2, 9),))
    ((2, 4),)
    >>> intersect(((0, 4),), ((4, 9),)) is None
    True
    """
    common = []
    for (first_start, first_stop), (second_start, second_stop) in zip(first, second, strict=True):
        start = first_start if first_start > second_start else second_start
        stop = first_stop if first_stop < second_stop else second_stop
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


def shift(box: Box, offsets: Sequence[int]) -> Box:
    """Move a box.

    Examples
    --------
    >>> shift(((0, 4), (1, 2)), (10, -1))
    ((10, 14), (0, 1))
    """
    return tuple([(start + offset, stop + offset) for (start, stop), offset in zip(box, offsets, strict=True)])


def relative_to(box: Box, origin: Box) -> Box:
    """Express a box in the coordinates of another one, whose first element becomes the origin.

    Examples
    --------
    >>> relative_to(((5, 7),), ((4, 9),))
    ((1, 3),)
    """
    return tuple([(start - first, stop - first) for (start, stop), (first, _) in zip(box, origin, strict=True)])


def contains(outer: Box, inner: Box) -> bool:
    """Whether every element of ``inner`` is in ``outer``. An empty box is in every box.

    Examples
    --------
    >>> contains(((0, 4),), ((1, 4),)), contains(((0, 4),), ((1, 5),)), contains(((0, 4),), ((9, 9),))
    (True, False, True)
    """
    return box_numel(inner) == 0 or all(
        outer_start <= start and stop <= outer_stop
        for (outer_start, outer_stop), (start, stop) in zip(outer, inner, strict=True)
    )


def subtract(box: Box, hole: Box) -> list[Box]:
    """Disjoint boxes that make up the elements of ``box`` outside ``hole``, at most two per dimension.

    Examples
    --------
    >>> subtract(((0, 4), (0, 4)), ((1, 9), (1, 3)))
    [((0, 1), (0, 4)), ((1, 4), (0, 1)), ((1, 4), (3, 4))]
    >>> subtract(((0, 4),), ((6, 7),))
    [((0, 4),)]
    """
    if box_numel(box) == 0:
        return []
    common = intersect(box, hole)
    if common is None:
        return [box]
    parts: list[Box] = []
    for dim, ((start, stop), (common_start, common_stop)) in enumerate(zip(box, common, strict=True)):
        before, after = common[:dim], box[dim + 1 :]
        if start < common_start:
            parts.append((*before, (start, common_start), *after))
        if common_stop < stop:
            parts.append((*before, (common_stop, stop), *after))
    return parts


def subtract_from_all(boxes: Iterable[Box], hole: Box) -> list[Box]:
    """`subtract` from each of several boxes.

    Examples
    --------
    >>> subtract_from_all([((0, 2),), ((2, 4),)], ((1, 3),))
    [((0, 1),), ((3, 4),)]
    """
    return [part for box in boxes for part in subtract(box, hole)]


def are_disjoint(boxes: Sequence[Box]) -> bool:
    """Whether no two of the boxes have an element in common.

    Examples
    --------
    >>> are_disjoint([((0, 2),), ((2, 4),), ((3, 3),)]), are_disjoint([((0, 3),), ((2, 4),)])
    (True, False)
    """
    boxes = [box for box in boxes if box_numel(box)]
    if len(boxes) < 2:
        return True
    n_dims = len(boxes[0])
    if n_dims == 0:
        return False
    # Sweep along the dimension that tells most boxes apart, so that a sharded dim other than the first stays cheap.
    sweep = max(range(n_dims), key=lambda dim: len({box[dim][0] for box in boxes}))
    boxes.sort(key=lambda box: box[sweep])
    for index, box in enumerate(boxes):
        for later in boxes[index + 1 :]:
            if later[sweep][0] >= box[sweep][1]:
                break
            if intersect(box, later) is not None:
                return False
    return True


def merge_adjacent(boxes: Iterable[Box]) -> list[Box]:
    """Join disjoint boxes that share a whole face, until none do; sorted.

    Cheap and not always minimal: boxes that only three together could form a box stay apart.

    Examples
    --------
    >>> merge_adjacent([((2, 4), (0, 3)), ((0, 2), (0, 1)), ((0, 2), (1, 3))])
    [((0, 4), (0, 3))]
    """
    merged = sorted(boxes)
    n_before = len(merged) + 1
    while len(merged) < n_before:
        n_before = len(merged)
        for dim in range(len(merged[0]) if n_before > 1 else 0):
            merged = _merge_along(merged, dim)
    return sorted(merged)


def _merge_along(boxes: list[Box], dim: int) -> list[Box]:
    """Join the runs of disjoint boxes that differ along one dim only."""
    merged: list[Box] = []
    # Sorted by all other dims first, the parts of a run are neighbours in the list.
    for box in sorted(boxes, key=lambda box: (*box[:dim], *box[dim + 1 :], box[dim])):
        last = merged[-1] if merged else None
        if (
            last is not None
            and last[dim][1] == box[dim][0]
            and last[:dim] == box[:dim]
            and last[dim + 1 :] == box[dim + 1 :]
        ):
            merged[-1] = (*box[:dim], (last[dim][0], box[dim][1]), *box[dim + 1 :])
        else:
            merged.append(box)
    return merged
