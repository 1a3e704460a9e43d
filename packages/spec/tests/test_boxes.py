from __future__ import annotations

import itertools

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardtensor_spec import (
    Box,
    are_disjoint,
    box_numel,
    box_of_shape,
    box_shape,
    box_slices,
    contains,
    intersect,
    merge_adjacent,
    relative_to,
    shift,
    subtract,
)

quick = settings(deadline=None, derandomize=True, database=None)
EXTENT = 6

n_dims = st.shared(st.integers(0, 3), key="n_dims")


def boxes_of(n: int) -> st.SearchStrategy[Box]:
    pair = st.tuples(st.integers(0, EXTENT), st.integers(0, EXTENT)).map(lambda ends: (min(ends), max(ends)))
    return st.tuples(*[pair] * n)


boxes = n_dims.flatmap(boxes_of)


def points(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(start, stop) for start, stop in box)))


@quick
@given(boxes)
def test_shape_numel_and_slices_agree_with_indexing(box: Box) -> None:
    part = torch.zeros([EXTENT] * len(box))[box_slices(box)]
    assert part.shape == box_shape(box)
    assert part.numel() == box_numel(box) == len(points(box))
    assert box_shape(box_of_shape(box_shape(box))) == box_shape(box)


@quick
@given(boxes, boxes)
def test_set_operations(first: Box, second: Box) -> None:
    common = intersect(first, second)
    assert (set() if common is None else points(common)) == points(first) & points(second)
    assert contains(first, second) == (points(second) <= points(first))
    assert are_disjoint([first, second]) == points(first).isdisjoint(points(second))

    rest = subtract(first, second)
    assert sum(map(box_numel, rest)) == len(points(first) - points(second))
    assert set().union(*map(points, rest)) == points(first) - points(second)
    assert len(rest) <= max(1, 2 * len(first))


@quick
@given(boxes, boxes)
def test_moving_and_changing_the_origin(box: Box, origin: Box) -> None:
    offsets = [start for start, _ in origin]
    moved = shift(box, offsets)
    assert points(moved) == {tuple(map(sum, zip(point, offsets, strict=True))) for point in points(box)}
    assert relative_to(moved, origin) == box


@quick
@given(st.lists(boxes, max_size=6))
@example([((0, 1),), ((4, 6),), ((0, 2),)])
def test_many_boxes_are_disjoint_if_all_pairs_are(many: list[Box]) -> None:
    assert are_disjoint(many) == (len(set().union(*map(points, many))) == sum(map(box_numel, many)))


@quick
@given(boxes, st.lists(boxes, max_size=4))
def test_merging_keeps_the_elements_and_joins_what_was_cut(whole: Box, knives: list[Box]) -> None:
    parts = [whole] if box_numel(whole) else []
    for knife in knives:
        parts = [
            piece for part in parts for piece in [*subtract(part, knife), intersect(part, knife)] if piece is not None
        ]
    merged = merge_adjacent(parts)
    assert are_disjoint(merged)
    assert sum(map(box_numel, merged)) == box_numel(whole)
    assert set().union(*map(points, merged)) == (points(whole) if parts else set())
    assert len(merged) <= len(parts)
    if len(whole) == 1 and parts:
        assert merged == [whole]
