"""Helpers that test bodies import, in the parent and on the ranks."""

from __future__ import annotations

import torch

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


def ramp(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """0, 1, 2, … in a given shape; equal on all ranks."""
    n = 1
    for extent in shape:
        n *= extent
    return torch.arange(n).reshape(shape).to(dtype)


def contribution(dtype: torch.dtype, *shape: int, seed: int) -> torch.Tensor:
    """Small whole numbers that every dtype holds, products and sums of two of them included."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 4, shape, generator=generator)
    if dtype.is_complex:
        values = torch.complex(values.double(), torch.randint(0, 4, shape, generator=generator).double())
    return values.to(dtype)


def noncontiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with other strides."""
    result = torch.stack([tensor, tensor], -1)[..., 0]
    assert result.numel() < 2 or not result.is_contiguous()
    return result


def sizes_for(kind: str, n_ranks: int) -> list[int]:
    """Rows per rank: even, uneven, or with empty shards."""
    return {
        "even": [2] * n_ranks,
        "uneven": [3, 1, 4, 2][:n_ranks],
        "empty": [0, 5, 0, 2][:n_ranks],
    }[kind]
