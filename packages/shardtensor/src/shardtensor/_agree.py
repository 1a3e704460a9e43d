"""Shapes that ranks tell each other when a ShardTensor is built from local tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from shardtensor_collectives import all_gather_objects, all_gather_v
from shardtensor_spec import DimSplit, Grid, LayoutMismatchError, sharded_dims

from ._groups import axis_name, whole_group

_MAX_DIMS = 64


def infer_grid(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], Grid]:
    """Learn the global shape and the split of every dim from the local shapes of all ranks.

    Parameters
    ----------
    local : Tensor
        This rank's shard.
    mesh : DeviceMesh
        The mesh.
    placements : Sequence of Placement, (n_axes,)
        How the shards make up the tensor.

    Returns
    -------
    tuple
        Global shape, and the split of every sharded dim.

    Raises
    ------
    LayoutMismatchError
        On all ranks alike, if the shards do not fit together: other numbers of dims, other extents along dims that
        are not sharded, a ragged grid, or other dtypes.

    Notes
    -----
    Communication: one all-gather over the mesh of 66 numbers per rank (528 bytes), whatever the number of dims, so that
    ranks that disagree about it do not hang.
    """
    mine = torch.zeros(_MAX_DIMS + 2, dtype=torch.int64)
    mine[0] = local.ndim
    mine[1] = _dtype_code(local.dtype)
    mine[2 : 2 + local.ndim] = torch.tensor(tuple(local.shape), dtype=torch.int64)
    mine = mine.to(local.device)
    if mesh.size() > 1:
        rows = all_gather_v(mine.unsqueeze(0), (1,) * mesh.size(), 0, whole_group(mesh), axis=axis_name(mesh)).tolist()
    else:
        rows = [mine.tolist()]
    ranks = [int(rank) for rank in mesh.mesh.flatten()]
    shapes = [tuple(int(extent) for extent in row[2 : 2 + int(row[0])]) for row in rows]
    _require_equal("number of dims", [str(len(shape)) for shape in shapes], ranks, shapes)
    _require_equal("dtype", [str(int(row[1])) for row in rows], ranks, shapes)
    return _fit(shapes, ranks, mesh, placements)


def _fit(
    shapes: list[tuple[int, ...]], ranks: list[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], Grid]:
    """Put the shapes of all ranks together into a product grid."""
    strides = [1] * mesh.ndim
    for axis in reversed(range(mesh.ndim - 1)):
        strides[axis] = strides[axis + 1] * mesh.shape[axis + 1]
    coordinates = [
        tuple(index // strides[axis] % mesh.shape[axis] for axis in range(mesh.ndim)) for index in range(len(shapes))
    ]
    splits = sharded_dims(placements)
    global_shape = list(shapes[0])
    grid: Grid = {}
    for dim in range(len(global_shape)):
        axes = splits.get(dim, ())
        n_shards = 1
        for axis in axes:
            n_shards *= mesh.shape[axis]
        rows_of_shard: dict[int, tuple[int, int]] = {}
        for rank, coordinate, shape in zip(ranks, coordinates, shapes, strict=True):
            shard = DimSplit(axes, (0,) * n_shards).shard_index(coordinate, mesh.shape)
            extent, first_rank = rows_of_shard.setdefault(shard, (shape[dim], rank))
            if extent != shape[dim]:
                first_shape = shapes[ranks.index(first_rank)]
                raise LayoutMismatchError(
                    f"the local tensors of rank {first_rank} {first_shape} and rank {rank} {shape} do not fit together: "
                    f"dim {dim} must be equal on both",
                    advice="shard the dim that differs, or give every rank the same extent there",
                )
        if axes:
            sizes = tuple(rows_of_shard[shard][0] for shard in range(n_shards))
            grid[dim] = DimSplit(axes, sizes)
            global_shape[dim] = sum(sizes)
    return tuple(global_shape), grid


def check_same(description: str, mesh: DeviceMesh) -> None:
    """Check that all ranks of the mesh describe their tensor alike.

    Raises
    ------
    LayoutMismatchError
        On all ranks, naming the first that differs.

    Notes
    -----
    Communication: one all-gather of a short text.
    """
    texts = all_gather_objects(description, whole_group(mesh))
    for position, text in enumerate(texts):
        if text != texts[0]:
            ranks = mesh.mesh.flatten()
            raise LayoutMismatchError(
                f"rank {int(ranks[position])} disagrees with rank {int(ranks[0])}",
                inputs=[f"rank {int(ranks[0])}: {texts[0]}", f"rank {int(ranks[position])}: {text}"],
                advice="call from_local with the same placements, sizes and dtype on every rank",
            )


def _require_equal(what: str, values: list[str], ranks: list[int], shapes: list[tuple[int, ...]]) -> None:
    for rank, value, shape in zip(ranks, values, shapes, strict=True):
        if value != values[0]:
            raise LayoutMismatchError(
                f"the {what} of the local tensors differs: rank {ranks[0]} has {shapes[0]}, rank {rank} has {shape}",
                advice="give every rank a local tensor of the same dtype and number of dims",
            )


_DTYPES = sorted((value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=str)


def _dtype_code(dtype: torch.dtype) -> int:
    return _DTYPES.index(dtype)
