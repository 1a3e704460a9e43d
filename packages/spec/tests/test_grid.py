from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor_spec import (
    DimSplit,
    LayoutMismatchError,
    chunk_grid,
    folded_placement,
    grid_of_sizes,
    is_sharding,
    sharded_dims,
)
from shardtensor_spec._grid import n_repeats_of

quick = settings(deadline=None, derandomize=True, database=None)


def test_axes_of_every_dim() -> None:
    placements = [Shard(1), Replicate(), Shard(0), Shard(1), Partial()]
    assert sharded_dims(placements) == {1: (0, 3), 0: (2,)}
    assert [is_sharding(placement) for placement in placements] == [True, False, True, True, False]
    assert sharded_dims([Replicate()]) == {}
    assert sharded_dims([folded_placement(2, 3)]) == {2: (0,)}


@quick
@given(extent=st.integers(0, 40), outer=st.integers(1, 4), inner=st.integers(1, 4))
def test_nested_chunks_are_chunks_of_chunks(extent: int, outer: int, inner: int) -> None:
    """The lower axis is the outer one, as in DTensor."""
    grid = chunk_grid((2, extent), (outer, inner), [Shard(1), Shard(1)])
    rows = torch.arange(extent)
    parts = [list(part.chunk(inner)) for part in rows.chunk(outer)]
    empty = rows[:0]
    padded = [part + [empty] * (inner - len(part)) for part in parts + [[]] * (outer - len(parts))]
    assert grid == {1: DimSplit((0, 1), tuple(len(part) for line in padded for part in line))}
    assert grid[1].extent == extent


@quick
@given(
    sizes=st.lists(st.integers(0, 6), min_size=6, max_size=6),
    n_repeats=st.integers(1, 3),
)
def test_rows_tile_the_dimension(sizes: list[int], n_repeats: int) -> None:
    split = DimSplit((0, 2), tuple(sizes), n_repeats)
    mesh_shape = (2, 5, 3)
    end = 0
    for a, c in itertools.product(range(2), range(3)):
        for b in range(5):  # an axis that does not shard the dim makes no difference
            assert split.shard_index((a, b, c), mesh_shape) == 3 * a + c
        start, stop = split.rows((a, 0, c), mesh_shape)
        assert start == end and stop - start == sizes[3 * a + c]
        end = stop
    assert end * n_repeats == split.extent


def test_folded_dims() -> None:
    placement = folded_placement(0, 3)
    assert placement != Shard(0)
    assert n_repeats_of([placement, Replicate()], (0,), 0) == 3
    assert chunk_grid((12, 2), (2,), [placement]) == {0: DimSplit((0,), (2, 2), 3)}
    assert grid_of_sizes((12, 2), (2,), [placement], {0: (1, 3)}) == {0: DimSplit((0,), (1, 3), 3)}
    with pytest.raises(LayoutMismatchError, match="dim 0 of 10 rows cannot repeat 3 times"):
        chunk_grid((10, 2), (2,), [placement])
    with pytest.raises(LayoutMismatchError, match=r"fold dim 0 differently: \[1, 3\] repeats"):
        chunk_grid((12, 2), (2, 2), [placement, Shard(0)])


def test_sizes_that_are_not_given_are_those_of_torch_chunk() -> None:
    placements = [Shard(0), Shard(2)]
    given = grid_of_sizes((5, 1, 7), (2, 3), placements, {-1: (7, 0, 0)})
    assert given == {0: DimSplit((0,), (3, 2)), 2: DimSplit((1,), (7, 0, 0))}
    assert grid_of_sizes((5, 1, 7), (2, 3), placements, None) == chunk_grid((5, 1, 7), (2, 3), placements)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({1: (5, 0)}, "shard sizes are given for dim 1, but the placements .* do not shard it"),
        ({3: (5, 0)}, "shard sizes are given for dim 3"),
        ({0: (5, 1)}, "shard sizes 5,1 along dim 0 sum to 6, but the global extent is 5"),
        ({0: (5,)}, r"1 shard sizes \(5, total 5\) along dim 0, but it has 2 shards"),
        ({0: (6, -1)}, "contain a negative one"),
    ],
)
def test_sizes_that_contradict_the_layout(sizes: dict[int, tuple[int, ...]], message: str) -> None:
    with pytest.raises(LayoutMismatchError, match=message):
        grid_of_sizes((5, 3), (2,), [Shard(0)], sizes)
