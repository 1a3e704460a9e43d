"""The checks of `ShardTensor.from_local` and `ShardTensor.redistribute`: arguments in, layout out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate

from shardtensor_spec import (
    Grid,
    LayoutMismatchError,
    ShardTensorSpec,
    chunk_grid,
    grid_of_sizes,
    is_sharding,
    sharded_dims,
)

from . import _tensor
from ._agree import check_same, infer_grid
from ._convert import FromLocal, respelled, wrap
from ._layout import contiguous_meta, normalized_placements
from ._torch_private import TensorMeta, current_mesh


def from_local(
    local: torch.Tensor,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    sharding_shapes: Any,
    global_shape: Sequence[int] | None,
    check: bool,
) -> Any:
    """Serve `ShardTensor.from_local`."""
    mesh = current_mesh() if mesh is None else mesh
    if mesh.get_coordinate() is None:
        raise LayoutMismatchError(
            f"this rank is not part of the mesh {mesh}", advice="call from_local on the ranks of the mesh only"
        )
    placements = (Replicate(),) * mesh.ndim if placements is None else tuple(placements)
    if len(placements) != mesh.ndim:
        raise LayoutMismatchError(
            f"{len(placements)} placements {placements} are given for a mesh of {mesh.ndim} axes {mesh.mesh_dim_names}",
            where="ShardTensor.from_local",
            advice="give one placement per mesh axis",
        )
    placements = normalized_placements(placements, local.ndim)
    if local.device.type != mesh.device_type:
        local = local.to(mesh.device_type)
    shape, grid = _shape_and_grid(local, mesh, placements, sharding_shapes, global_shape)
    spec = ShardTensorSpec.of(mesh, placements, _global_meta(local, shape, grid), grid)
    fits = tuple(local.shape) == tuple(spec.local_shape)
    if check:
        check_same(f"{spec.describe()} {local.dtype}" + ("" if fits else f", but holds {tuple(local.shape)}"), mesh)
    if not fits:
        raise LayoutMismatchError(
            f"the local tensor is {tuple(local.shape)}, but by the sizes this rank holds {tuple(spec.local_shape)}",
            where="ShardTensor.from_local",
            inputs=[spec.describe()],
            advice="pass the shard that the sizes describe, or sharding_shapes='infer'",
        )
    _tensor.ShardTensor._patches_enabled = True
    return FromLocal.apply(local, spec) if local.requires_grad and torch.is_grad_enabled() else wrap(local.detach(), spec)


def _shape_and_grid(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    sharding_shapes: Any,
    global_shape: Sequence[int] | None,
) -> tuple[tuple[int, ...], Grid]:
    if isinstance(sharding_shapes, str) and sharding_shapes not in ("infer", "chunk"):
        raise LayoutMismatchError(
            f"sharding_shapes={sharding_shapes!r} is neither 'infer' nor 'chunk' nor a mapping",
            where="ShardTensor.from_local",
        )
    if not any(map(is_sharding, placements)) and sharding_shapes != "infer":
        return tuple(local.shape), {}
    if sharding_shapes == "infer":
        return infer_grid(local, mesh, placements)
    if sharding_shapes == "chunk":
        if global_shape is None:
            raise LayoutMismatchError(
                "sharding_shapes='chunk' needs the global_shape",
                where="ShardTensor.from_local",
                advice="pass global_shape, or sharding_shapes='infer'",
            )
        return tuple(global_shape), chunk_grid(global_shape, mesh.shape, placements)
    if any(len(axes) > 1 for axes in sharded_dims(placements).values()):
        # The line of ranks through this one does not tell the rows of nested shards elsewhere.
        return infer_grid(local, mesh, placements)
    return _grid_of_shapes(local, mesh, placements, sharding_shapes)


def _grid_of_shapes(
    local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shapes: Mapping[int, Sequence[Sequence[int]]]
) -> tuple[tuple[int, ...], Grid]:
    sizes: dict[int, tuple[int, ...]] = {}
    shape = list(local.shape)
    for axis, placement in enumerate(placements):
        if not is_sharding(placement):
            continue
        dim = cast(Any, placement).dim
        if axis not in shapes:
            raise LayoutMismatchError(
                f"sharding_shapes has no entry for mesh axis {axis}, which shards dim {dim}",
                where="ShardTensor.from_local",
                advice="give the shapes along every mesh axis that shards, or 'infer'",
            )
        along = [tuple(int(extent) for extent in entry) for entry in shapes[axis]]
        if len(along) != mesh.shape[axis] or any(len(entry) != local.ndim for entry in along):
            raise LayoutMismatchError(
                f"sharding_shapes of mesh axis {axis} are {along}: they must be {mesh.shape[axis]} shapes of "
                f"{local.ndim} dims",
                where="ShardTensor.from_local",
            )
        sizes[dim] = tuple(entry[dim] for entry in along)
        shape[dim] = sum(sizes[dim])
    return tuple(shape), grid_of_sizes(shape, mesh.shape, placements, sizes)


def _global_meta(local: torch.Tensor, shape: Sequence[int], grid: Grid) -> TensorMeta:
    """Give the whole tensor the stride order of the shard; ranks may not disagree, so only dense orders count."""
    contiguous = contiguous_meta(shape, local.dtype)
    if local.is_contiguous() or local.numel() == 0 or not grid:
        return contiguous if grid or local.is_contiguous() else contiguous._replace(stride=local.stride())
    order = sorted(range(local.ndim), key=lambda dim: (-local.stride(dim), dim))
    dense = contiguous_meta([shape[dim] for dim in order], local.dtype).stride
    stride = [0] * local.ndim
    for position, dim in enumerate(order):
        stride[dim] = dense[position]
    return contiguous._replace(stride=tuple(stride))


def redistribute_target(
    spec: ShardTensorSpec,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    sizes: Mapping[int, Sequence[int]] | None,
) -> ShardTensorSpec:
    """Check the arguments of `ShardTensor.redistribute` and return the layout that they ask for."""
    if placements is None:
        raise RuntimeError("redistribute needs the placements to bring the tensor to")
    if mesh is not None and mesh != spec.mesh:
        raise NotImplementedError(
            f"redistribute from the mesh {spec.mesh} to another one, {mesh}, is not supported; "
            "gather with full_tensor() and make a new ShardTensor on the other mesh"
        )
    if len(placements) != spec.mesh.ndim:
        raise LayoutMismatchError(
            f"{len(placements)} placements {tuple(placements)} are given for a mesh of {spec.mesh.ndim} axes",
            where="ShardTensor.redistribute",
            inputs=[spec.describe()],
            advice="give one placement per mesh axis",
        )
    if any(isinstance(placement, Partial) for placement in placements):
        raise RuntimeError("a tensor cannot be redistributed to Partial: a pending reduction arises from operators only")
    target = respelled(spec, placements)
    if sizes is None:
        return target
    assert spec.tensor_meta is not None
    grid = grid_of_sizes(tuple(spec.tensor_meta.shape), spec.mesh.shape, target.placements, sizes)
    kept = {dim: split for dim, split in target.grid.items() if dim not in {d % spec.ndim for d in sizes}}
    return ShardTensorSpec.of(spec.mesh, target.placements, spec.tensor_meta, grid | kept)
