"""`scatter_tensor`: from the one rank that has the tensor to the shards of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from shardtensor_collectives import broadcast, exchange
from shardtensor_spec import (
    Box,
    LayoutMismatchError,
    ShardTensorSpec,
    describe_placement,
    grid_of_sizes,
    is_sharding,
    normalized_placements,
    plan_exchange,
)

from ._agree import require_same
from ._groups import axis_name, flat_coordinate, whole_group
from ._layout import contiguous_meta
from ._tensor import ShardTensor

_WHERE = "scatter_tensor"


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
        Shape of the tensor, for a check. The source tells it.
    dtype : torch.dtype, optional
        The dtype of the result; that of the tensor by default.
    requires_grad : bool
        Whether the result is a leaf that collects a gradient. One rank that says so is enough.
    sizes : Mapping of int to Sequence of int, optional
        Tensor dim -> rows of every shard; ``torch.chunk``'s by default.

    Returns
    -------
    ShardTensor

    Raises
    ------
    LayoutMismatchError
        (a ``ValueError``) If ``global_src`` is no integer or not in the mesh, the source has no tensor, sizes, shape
        and placements do not fit, or one rank asks for another layout than the others. On all ranks alike.
    IndexError
        If a shard dim is out of range.

    Notes
    -----
    Communication: one all-gather of a short text, the metadata; then each rank receives its own shard and nothing else.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise LayoutMismatchError(f"this rank is not part of the mesh {mesh}", where=_WHERE)
    here = flat_coordinate(tuple(coordinate), mesh)
    placements = tuple(placements)
    fault: LayoutMismatchError | None = None
    source = 0
    try:
        source = _checked_source(tensor, global_src, mesh, placements, here)
    except LayoutMismatchError as error:
        fault = error
    listed = "; ".join(map(describe_placement, placements))
    text = f"source {global_src}, placements {listed}, sizes {None if sizes is None else dict(sizes)}"
    mine = _Told(
        None if here != source or tensor is None or fault is not None else (tuple(tensor.shape), tensor.dtype),
        None if global_shape is None else tuple(global_shape),
        dtype,
        requires_grad,
    )
    told: list[_Told] = require_same(text, mesh, fault, where=_WHERE, payload=mine)
    shape, dtype = _metadata(told, source)
    placements = normalized_placements(placements, len(shape))
    grid = grid_of_sizes(shape, mesh.shape, placements, sizes)
    spec = ShardTensorSpec.of(mesh, placements, contiguous_meta(shape, dtype), grid)
    local = _deal(tensor if here == source else None, spec, source, here)
    return cast(ShardTensor, ShardTensor(local, spec, requires_grad=any(one.requires_grad for one in told)))


class _Told(NamedTuple):
    """What each rank tells the others: from it all of them derive the same layout, or the same error."""

    source_meta: tuple[tuple[int, ...], torch.dtype] | None
    global_shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    requires_grad: bool


def _checked_source(
    tensor: Any, global_src: Any, mesh: DeviceMesh, placements: tuple[Placement, ...], here: int
) -> int:
    """Check what needs no other rank, and return the position of the source in the mesh."""
    if isinstance(global_src, bool) or not isinstance(global_src, int):
        raise LayoutMismatchError(
            f"global_src must be the global rank of the source, an int, not {global_src!r}", where=_WHERE
        )
    ranks = [int(rank) for rank in mesh.mesh.flatten()]
    if global_src not in ranks:
        raise LayoutMismatchError(
            f"global_src {global_src} is not in the mesh, whose ranks are {ranks}",
            where=_WHERE,
            advice="choose a source on the mesh",
        )
    if len(placements) != mesh.ndim:
        listed = ", ".join(map(describe_placement, placements))
        raise LayoutMismatchError(
            f"{len(placements)} placements ({listed}) are given for a mesh of {mesh.ndim} axes",
            where=_WHERE,
            advice="give one placement per mesh axis",
        )
    if any(placement.is_partial() for placement in placements):
        raise LayoutMismatchError("a tensor cannot be scattered to Partial", where=_WHERE)
    source = ranks.index(global_src)
    if here == source and (not isinstance(tensor, torch.Tensor) or isinstance(tensor, (ShardTensor, DTensor))):
        what = "no tensor" if tensor is None else f"a {type(tensor).__name__} instead of a plain tensor"
        raise LayoutMismatchError(
            f"the source rank {global_src} passed {what}", where=_WHERE, advice="pass the tensor on rank global_src"
        )
    return source


def _metadata(told: list[_Told], source: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Find shape and dtype of the result, the same on all ranks."""
    source_meta = told[source].source_meta
    assert source_meta is not None
    shape, source_dtype = source_meta
    for one in told:
        if one.global_shape is not None and one.global_shape != shape:
            raise LayoutMismatchError(
                f"the source's tensor is {shape}, not the global_shape {one.global_shape}", where=_WHERE
            )
    dtypes = sorted({one.dtype for one in told if one.dtype is not None}, key=str)
    if len(dtypes) > 1:
        raise LayoutMismatchError(f"the ranks ask for several dtypes: {', '.join(map(str, dtypes))}", where=_WHERE)
    return shape, dtypes[0] if dtypes else source_dtype


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
