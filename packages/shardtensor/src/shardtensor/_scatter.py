"""`scatter_tensor`: from the one rank that has the tensor to the shards of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from shardtensor_collectives import all_gather_objects, broadcast, exchange
from shardtensor_spec import (
    Box,
    LayoutMismatchError,
    ShardTensorSpec,
    grid_of_sizes,
    is_sharding,
    normalized_placements,
    plan_exchange,
)

from ._groups import axis_name, flat_coordinate, whole_group
from ._layout import contiguous_meta
from ._tensor import ShardTensor


def scatter_tensor(
    tensor: torch.Tensor | None,
    global_src: int,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    global_shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    *,
    sizes: Mapping[int, Sequence[int]] | None = None,
) -> ShardTensor:
    """Distribute a tensor that one rank has.

    Parameters
    ----------
    tensor : Tensor or None
        The tensor on the source; not looked at elsewhere. It is not changed.
    global_src : int
        Global rank of the source.
    mesh : DeviceMesh
        The mesh to distribute over.
    placements : Sequence of Placement, (n_axes,)
        ``Shard`` or ``Replicate`` for every mesh axis.
    global_shape : Sequence of int, optional
        Shape of the tensor. If this and ``dtype`` are given on all ranks, no metadata is sent.
    dtype : torch.dtype, optional
        Its dtype.
    requires_grad : bool
        Whether the result is a leaf that collects a gradient.
    sizes : Mapping of int to Sequence of int, optional
        Tensor dim -> rows of every shard; ``torch.chunk``'s by default.

    Returns
    -------
    ShardTensor

    Raises
    ------
    ValueError
        If ``global_src`` is no integer or not in the mesh, the source has no tensor, or sizes, shape and placements do not fit.
        On all ranks alike.

    Notes
    -----
    Communication: the metadata (one small gather of objects, unless shape and dtype are given), then each rank receives
    its own shard and nothing else.
    """
    if isinstance(global_src, bool) or not isinstance(global_src, int):
        raise LayoutMismatchError(f"global_src must be the global rank of the source, an int, not {global_src!r}")
    ranks = [int(rank) for rank in mesh.mesh.flatten()]
    if global_src not in ranks:
        raise LayoutMismatchError(
            f"global_src {global_src} is not in the mesh, whose ranks are {ranks}",
            where="scatter_tensor",
            advice="choose a source on the mesh",
        )
    if len(placements) != mesh.ndim:
        raise LayoutMismatchError(
            f"{len(placements)} placements {tuple(placements)} are given for a mesh of {mesh.ndim} axes",
            where="scatter_tensor",
            advice="give one placement per mesh axis",
        )
    if any(placement.is_partial() for placement in placements):
        raise LayoutMismatchError("a tensor cannot be scattered to Partial", where="scatter_tensor")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise LayoutMismatchError(f"this rank is not part of the mesh {mesh}", where="scatter_tensor")
    source = ranks.index(global_src)
    here = flat_coordinate(tuple(coordinate), mesh)
    shape, dtype = _metadata(tensor if here == source else None, source, mesh, global_shape, dtype)
    placements = normalized_placements(placements, len(shape))
    grid = grid_of_sizes(shape, mesh.shape, placements, sizes)
    spec = ShardTensorSpec.of(mesh, placements, contiguous_meta(shape, dtype), grid)
    local = _deal(tensor if here == source else None, spec, source, here)
    return ShardTensor(local, spec, requires_grad=requires_grad)


def _metadata(
    tensor: torch.Tensor | None,
    source: int,
    mesh: DeviceMesh,
    global_shape: Sequence[int] | None,
    dtype: torch.dtype | None,
) -> tuple[tuple[int, ...], torch.dtype]:
    """Let all ranks know shape and dtype, and whether the source's tensor has them."""
    if global_shape is not None and dtype is not None:
        return tuple(global_shape), dtype
    mine: Any = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
    told = all_gather_objects(mine, whole_group(mesh))[source]
    if told is None:
        raise LayoutMismatchError(
            "the source rank passed no tensor", where="scatter_tensor", advice="pass the tensor on rank global_src"
        )
    shape, source_dtype = told
    if global_shape is not None and tuple(global_shape) != shape:
        raise LayoutMismatchError(
            f"the source's tensor is {shape}, not the global_shape {tuple(global_shape)}", where="scatter_tensor"
        )
    return shape, source_dtype if dtype is None else dtype


def _deal(tensor: torch.Tensor | None, spec: ShardTensorSpec, source: int, here: int) -> torch.Tensor:
    """Send every rank its box of the tensor that the source owns whole."""
    mesh, meta = spec.mesh, spec.tensor_meta
    assert meta is not None
    whole: Box = tuple((0, extent) for extent in meta.shape)
    nothing: Box = tuple((0, 0) for _ in meta.shape)
    coordinates = spec.coordinates()
    owned = [whole if rank == source else nothing for rank in range(len(coordinates))]
    wanted = [spec.box_at(coordinate) for coordinate in coordinates]
    if tensor is not None:
        if tuple(tensor.shape) != tuple(meta.shape):
            raise LayoutMismatchError(
                f"the source's tensor is {tuple(tensor.shape)}, not the global_shape {tuple(meta.shape)}",
                where="scatter_tensor",
            )
        local = tensor.detach().to(device=mesh.device_type, dtype=meta.dtype)
    else:
        shape = (0,) * len(meta.shape)
        local = torch.empty(shape, dtype=meta.dtype, device=mesh.device_type)
    if not meta.shape or not any(map(is_sharding, spec.placements)):
        return _copy_of_whole(local if tensor is not None else None, spec, source)
    plan = plan_exchange(owned, wanted, here, global_shape=meta.shape)
    return exchange(local, plan, whole_group(mesh), axis=axis_name(mesh))


def _copy_of_whole(tensor: torch.Tensor | None, spec: ShardTensorSpec, source: int) -> torch.Tensor:
    meta = spec.tensor_meta
    assert meta is not None
    buffer = torch.empty(meta.shape, dtype=meta.dtype, device=spec.mesh.device_type) if tensor is None else tensor
    copy = broadcast(buffer, whole_group(spec.mesh), source=source, axis=axis_name(spec.mesh))
    return copy.clone() if copy is tensor else copy
