"""What ranks tell each other when a ShardTensor is built from local tensors."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from shardtensor_collectives import all_gather_objects, all_gather_v
from shardtensor_spec import DimSplit, Grid, LayoutMismatchError, describe_placement, sharded_dims

from ._groups import axis_name, whole_group

_MAX_DIMS = 64
_N_HEADER = 4
N_BYTES_PER_RANK = 8 * (_N_HEADER + 2 * _MAX_DIMS)
"""What each rank contributes to the all-gather of `infer_grid`."""


class Inferred(NamedTuple):
    """What all ranks know after `infer_grid`.

    Attributes
    ----------
    shape : tuple of int
        Global shape.
    grid : Grid
        Split of every sharded dim.
    order : tuple of int
        Dims from the largest stride to the smallest, on every rank that has an element; the contiguous order if they
        differ.
    """

    shape: tuple[int, ...]
    grid: Grid
    order: tuple[int, ...]


def infer_grid(
    local: Any, mesh: DeviceMesh, placements: Sequence[Placement], fault: Exception | None = None
) -> Inferred:
    """Learn the global shape and the split of every dim from the local shapes of all ranks.

    Parameters
    ----------
    local : Tensor
        This rank's shard.
    mesh : DeviceMesh
        The mesh.
    placements : Sequence of Placement, (n_axes,)
        How the shards make up the tensor.
    fault : Exception, optional
        Why this rank cannot go on. It takes part nevertheless, so that nobody waits for it.

    Returns
    -------
    Inferred
        Equal on all ranks.

    Raises
    ------
    LayoutMismatchError
        On all ranks alike, if the shards do not fit together: other numbers of dims, other extents along dims that
        are not sharded, a ragged grid, other dtypes, placements or meshes, or a fault on some rank.

    Notes
    -----
    Communication: one all-gather over the mesh of 132 numbers per rank (`N_BYTES_PER_RANK`), whatever the number of
    dims, so that ranks that disagree about it do not hang. Only before an error a second one, of texts.
    """
    described = describe(local, mesh, placements)
    rows = _gather_records(_record(local, mesh, placements, fault), mesh)
    if any(row[:_N_HEADER] != rows[0][:_N_HEADER] or row[0] for row in rows):
        require_same(described, mesh, fault)
        raise AssertionError("the numbers differ, but the texts do not")  # pragma: no cover
    n_dims = local.ndim
    first_order, first_extent = _N_HEADER, _N_HEADER + _MAX_DIMS
    shapes = [tuple(row[first_extent : first_extent + n_dims]) for row in rows]
    orders = {tuple(row[first_order : first_order + n_dims]) for row in rows}
    shape, grid = _fit(shapes, [int(rank) for rank in mesh.mesh.flatten()], mesh, placements)
    told = {order for order in orders if -1 not in order}
    return Inferred(shape, grid, told.pop() if len(told) == 1 else tuple(range(n_dims)))


def stride_order(local: torch.Tensor) -> tuple[int, ...] | None:
    """Dims from the largest stride to the smallest; None for a tensor without elements, whose strides mean nothing."""
    if local.numel() == 0:
        return None
    if local.is_contiguous():
        return tuple(range(local.ndim))
    strides = local.stride()
    return tuple(sorted(range(local.ndim), key=lambda dim: (-strides[dim], dim)))


def describe(local: Any, mesh: DeviceMesh, placements: Sequence[Placement]) -> str:
    """One line about a rank's shard for messages and comparisons of what must be equal everywhere."""
    what = f"{tuple(local.shape)} {local.dtype}" if isinstance(local, torch.Tensor) else type(local).__name__
    names = "x".join(map(str, mesh.shape))
    return f"{what}  {'; '.join(map(describe_placement, placements))} on a mesh of {names} ranks"


def require_same(
    text: str,
    mesh: DeviceMesh,
    fault: Exception | None = None,
    *,
    where: str = "ShardTensor.from_local",
    payload: Any = None,
) -> list[Any]:
    """Check that all ranks of the mesh say the same, and that none has a fault.

    Parameters
    ----------
    text : str
        What must be equal everywhere.
    mesh : DeviceMesh
        Who has to agree.
    fault : Exception, optional
        Why this rank cannot go on. It takes part nevertheless, so that nobody waits for it.
    where : str
        The function that the user called.
    payload : object, optional
        What the ranks tell each other on this occasion.

    Returns
    -------
    list of object, (n_ranks,)
        Every rank's payload, in the order of the mesh.

    Raises
    ------
    LayoutMismatchError
        On all ranks, with what the first that differs from the most says and what these say. A rank with a fault
        raises that.

    Notes
    -----
    Communication: one all-gather of a short text.
    """
    ranks = [int(rank) for rank in mesh.mesh.flatten()]
    told = all_gather_objects((text, None if fault is None else _summary(fault), payload), whole_group(mesh))
    texts = [said for said, _, _ in told]
    faulty = [(rank, reason) for rank, (_, reason, _) in zip(ranks, told, strict=True) if reason is not None]
    if fault is not None:
        raise fault
    if faulty:
        raise LayoutMismatchError(
            f"rank {faulty[0][0]} cannot make its part of the tensor: {faulty[0][1]}",
            where=where,
            inputs=[f"rank {rank}: {said}" for rank, said in zip(ranks, texts, strict=True)],
            advice="give every rank arguments that fit together",
        )
    common = Counter(texts).most_common(1)[0][0]
    for rank, said in zip(ranks, texts, strict=True):
        if said != common:
            first = ranks[texts.index(common)]
            raise LayoutMismatchError(
                f"rank {rank} disagrees with rank {first} about the tensor",
                where=where,
                inputs=[f"rank {first}: {common}", f"rank {rank}: {said}"],
                advice="give every rank the same placements, sizes, dtype and number of dims",
            )
    return [carried for _, _, carried in told]


def _summary(fault: Exception) -> str:
    return getattr(fault, "what", None) or str(fault)


_DTYPES = sorted((value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=str)


def _record(local: Any, mesh: DeviceMesh, placements: Sequence[Placement], fault: Exception | None) -> torch.Tensor:
    """Put what the ranks must know of each other in a fixed number of integers: an equal header, and the shard."""
    numbers = torch.full((_N_HEADER + 2 * _MAX_DIMS,), -1, dtype=torch.int64)
    layout = f"{mesh.mesh.tolist()} {'; '.join(map(describe_placement, placements))}"
    numbers[0] = fault is not None
    numbers[3] = zlib.crc32(layout.encode())
    if isinstance(local, torch.Tensor):
        numbers[1], numbers[2] = local.ndim, _DTYPES.index(local.dtype)
        order = stride_order(local)
        if order is not None:
            numbers[_N_HEADER : _N_HEADER + local.ndim] = torch.tensor(order, dtype=torch.int64)
        first_extent = _N_HEADER + _MAX_DIMS
        numbers[first_extent : first_extent + local.ndim] = torch.tensor(tuple(local.shape), dtype=torch.int64)
    return numbers.to(mesh.device_type)


def _gather_records(mine: torch.Tensor, mesh: DeviceMesh) -> list[list[int]]:
    if mesh.size() == 1:
        return [mine.tolist()]
    rows = all_gather_v(mine.unsqueeze(0), (1,) * mesh.size(), 0, whole_group(mesh), axis=axis_name(mesh)).tolist()
    return [[int(number) for number in row] for row in rows]


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
                    f"the local tensors of rank {first_rank} {first_shape} and rank {rank} {shape} do not fit "
                    f"together: dim {dim} must be equal on both",
                    where="ShardTensor.from_local",
                    advice="shard the dim that differs, or give every rank the same extent there",
                )
        if axes:
            sizes = tuple(rows_of_shard[shard][0] for shard in range(n_shards))
            grid[dim] = DimSplit(axes, sizes)
            global_shape[dim] = sum(sizes)
    return tuple(global_shape), grid
