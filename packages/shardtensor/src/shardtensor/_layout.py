"""Building specs: from placements and a grid to the layout of an operator's operand or result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from shardtensor_spec import DimSplit, ShardTensorSpec, contiguous_stride, folded_placement

from ._torch_private import TensorMeta


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """Shape, stride and dtype of a tensor."""
    return TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)


def contiguous_meta(shape: Sequence[int], dtype: torch.dtype) -> TensorMeta:
    """Meta data of a contiguous tensor."""
    return TensorMeta(torch.Size(shape), contiguous_stride(shape), dtype)


def replicated_spec(tensor: torch.Tensor, mesh: DeviceMesh) -> ShardTensorSpec:
    """Layout of a plain tensor that every rank of the mesh holds whole."""
    return ShardTensorSpec.of(mesh, (Replicate(),) * mesh.ndim, meta_of(tensor), {})


def without_partial(spec: ShardTensorSpec) -> ShardTensorSpec:
    """Return the layout with every pending reduction done: what a gradient is brought to."""
    placements = tuple(Replicate() if isinstance(p, Partial) else p for p in spec.placements)
    return ShardTensorSpec.of(spec.mesh, placements, spec.tensor_meta, spec.grid)


def placements_of(grid: Mapping[int, DimSplit], n_axes: int, partial: Mapping[int, str] = {}) -> tuple[Placement, ...]:
    """Placements that say the same as a grid.

    Parameters
    ----------
    grid : Mapping of int to DimSplit
        Split of every sharded dimension.
    n_axes : int
        Axes of the mesh.
    partial : Mapping of int to str
        Mesh axis -> operation of a pending reduction.
    """
    placements: list[Placement] = [Replicate()] * n_axes
    for axis, reduce_op in partial.items():
        placements[axis] = Partial(reduce_op)
    for dim, split in grid.items():
        for axis in split.axes:
            placements[axis] = Shard(dim) if split.n_repeats == 1 else folded_placement(dim, split.n_repeats)
    return tuple(placements)


def make_spec(
    mesh: DeviceMesh, meta: TensorMeta, grid: Mapping[int, DimSplit], partial: Mapping[int, str] = {}
) -> ShardTensorSpec:
    """Layout of a tensor from its grid and its pending reductions."""
    return ShardTensorSpec.of(mesh, placements_of(grid, mesh.ndim, partial), meta, dict(grid))
