from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from shardtensor_spec import LayoutMismatchError, check_sizes, chunk_sizes, offsets_of, sizes_from_fractions

quick = settings(deadline=None, derandomize=True, database=None)


@quick
@given(extent=st.integers(0, 300), n_chunks=st.integers(1, 40))
def test_chunk_sizes_are_those_of_torch_chunk_and_dtensor(extent: int, n_chunks: int) -> None:
    sizes = chunk_sizes(extent, n_chunks)
    chunks = [chunk.numel() for chunk in torch.arange(extent).chunk(n_chunks)]
    assert sizes == tuple(chunks + [0] * (n_chunks - len(chunks)))

    offsets = offsets_of(sizes)
    for index in range(n_chunks):
        size, offset = Shard.local_shard_size_and_offset(extent, n_chunks, index)
        assert size == sizes[index]
        assert not size or offset == offsets[index]


@pytest.mark.parametrize(("extent", "n_chunks"), [(-1, 2), (4, 0)])
def test_chunk_sizes_refuses_nonsense(extent: int, n_chunks: int) -> None:
    with pytest.raises(LayoutMismatchError, match=f"cannot split {extent} rows into {n_chunks} chunks"):
        chunk_sizes(extent, n_chunks)


@quick
@given(st.lists(st.integers(0, 9), max_size=8))
def test_offsets_are_where_split_begins(sizes: list[int]) -> None:
    rows = torch.arange(sum(sizes))
    for size, offset, part in zip(sizes, offsets_of(sizes), rows.split(sizes), strict=True):
        assert torch.equal(part, rows[offset : offset + size])
    assert len(offsets_of(sizes)) == len(sizes)


@quick
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_check_sizes_accepts_every_split(sizes: list[int]) -> None:
    assert check_sizes(sizes, sum(sizes), len(sizes), 0) == tuple(sizes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([3, 2, 0], r"shard sizes 3,2,0 along dim 2 sum to 5, but the global extent is 6"),
        ([3, 3], r"2 shard sizes \(3,3, total 6\) along dim 2, but it has 3 shards"),
        ([7, 0, -1], r"shard sizes 7,0,-1 along dim 2 \(total 6\) contain a negative one"),
        ([3.0, 2, 1], r"shard sizes 3.0,2,1 along dim 2 are not all whole numbers"),
        ([True, 2, 3], r"shard sizes True,2,3 along dim 2 are not all whole numbers"),
    ],
)
def test_check_sizes_names_list_and_total(sizes: list[int], message: str) -> None:
    with pytest.raises(LayoutMismatchError, match=message):
        check_sizes(sizes, extent=6, n_shards=3, dim=2)


@quick
@given(extent=st.integers(0, 1000), weights=st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any))
def test_sizes_from_fractions_are_the_nearest_whole_rows(extent: int, weights: list[int]) -> None:
    total = sum(weights)
    sizes = sizes_from_fractions(extent, [weight / total for weight in weights])
    assert sum(sizes) == extent
    for size, weight in zip(sizes, weights, strict=True):
        assert abs(size - extent * weight / total) < 1 + 1e-9
        assert weight or size == 0
    if all(extent * weight % total == 0 for weight in weights):
        assert sizes == tuple(extent * weight // total for weight in weights)


def test_rounded_fractions_still_give_every_row() -> None:
    thirds = [0.3333333] * 3
    for extent in (0, 1, 10, 10**9):
        sizes = sizes_from_fractions(extent, thirds)
        assert sum(sizes) == extent
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("fractions", "message"),
    [
        ([0.5, 0.4], "fractions 0.5,0.4 sum to 0.9"),
        ([1.5, -0.5], "fractions 1.5,-0.5 sum to 1;"),
        ([], "sum to 0"),
        ([math.nan, 1.0], "sum to nan"),
        ([0.5, 0.500002], "0.500002"),
    ],
)
def test_sizes_from_fractions_names_list_and_total(fractions: list[float], message: str) -> None:
    with pytest.raises(LayoutMismatchError, match=message):
        sizes_from_fractions(10, fractions)
