"""Dim names for axis rules."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardtensor import ShardTensorSpec


def shape_of(spec: ShardTensorSpec) -> tuple[int, ...]:
    """Global shape of a tensor."""
    assert spec.tensor_meta is not None
    return tuple(spec.tensor_meta.shape)


def dtype_of(spec: ShardTensorSpec) -> torch.dtype:
    """Dtype of a tensor."""
    assert spec.tensor_meta is not None
    return spec.tensor_meta.dtype


def broadcast_names(specs: Sequence[ShardTensorSpec]) -> tuple[list[tuple[int | None, ...]], tuple[int, ...]]:
    """Name the dims of operands that broadcast together, counted from the last; None for a dim that is broadcast.

    Returns
    -------
    tuple
        Names of each operand, and of the result.
    """
    shapes = [shape_of(spec) for spec in specs]
    n_dims = max(map(len, shapes), default=0)
    padded = [(1,) * (n_dims - len(shape)) + shape for shape in shapes]
    result = [max((shape[dim] for shape in padded), default=1) for dim in range(n_dims)]
    # A dim of no rows broadcasts with one of a single row: the maximum would be wrong there.
    result = [0 if any(shape[dim] == 0 for shape in padded) else result[dim] for dim in range(n_dims)]
    names = [
        tuple(
            None if extent == 1 and result[n_dims - len(shape) + dim] != 1 else n_dims - len(shape) + dim
            for dim, extent in enumerate(shape)
        )
        for shape in shapes
    ]
    return names, tuple(range(n_dims))
