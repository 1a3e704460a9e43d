"""The checks of `ShardTensor.from_local` and `ShardTensor.redistribute`: arguments in, layout out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from shardtensor_spec import (
    Grid,
    LayoutMismatchError,
    ShardTensorSpec,
    chunk_grid,
    describe_placement,
    grid_of_sizes,
    is_sharding,
    normalized_placements,
    sharded_dims,
)

from . import _tensor
from ._agree import describe, infer_grid, require_same, stride_order
from ._convert import FromLocal, respelled, wrap
from ._layout import contiguous_meta
from ._torch_private import TensorMeta, current_mesh

_WHERE = "ShardTensor.from_local"


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
            f"this rank is not part of the mesh {mesh}",
            where=_WHERE,
            advice="call from_local on the ranks of the mesh only",
        )
    placements = (Replicate(),) * mesh.ndim if placements is None else tuple(placements)
    # A fault that one rank alone may see is first told to the others, where a collective is due anyway: none may wait.
    asks_ranks = sharding_shapes == "infer" or (not isinstance(sharding_shapes, str) and _is_nested(placements))
    fault: Exception | None = None
    spec: ShardTensorSpec | None = None
    try:
        placements = _checked_arguments(local, mesh, placements, sharding_shapes)
        if local.device.type != mesh.device_type:
            local = local.to(mesh.device_type)
        if not asks_ranks:
            spec = _spec_of_arguments(local, mesh, placements, sharding_shapes, global_shape)
    except (LayoutMismatchError, IndexError, TypeError) as error:
        if not asks_ranks and not check:
            raise
        fault = error
    if asks_ranks:
        inferred = infer_grid(local, mesh, placements, fault)
        meta = _meta_in_order(inferred.shape, local.dtype, inferred.order)
        if stride_order(local) not in (None, inferred.order):
            local = local.contiguous()  # the ranks' strides differ, and one of them has to be told to all
        spec = ShardTensorSpec.of(mesh, placements, meta, inferred.grid)
    if check:
        held = local.dtype if isinstance(local, torch.Tensor) else type(local).__name__
        text = describe(local, mesh, placements) if spec is None else f"{spec.describe()} {held}"
        require_same(text, mesh, fault)
    assert spec is not None
    _tensor.ShardTensor._patches_enabled = True
    if local.requires_grad and torch.is_grad_enabled():
        return FromLocal.apply(local, spec)
    return wrap(local.detach(), spec)


def _is_nested(placements: Sequence[Placement]) -> bool:
    """Whether several axes shard one dim: a line of ranks does not tell the rows of the shards elsewhere then."""
    return any(len(axes) > 1 for axes in sharded_dims(placements).values())


def _checked_arguments(
    local: Any, mesh: DeviceMesh, placements: Sequence[Placement], sharding_shapes: Any
) -> tuple[Placement, ...]:
    """Check what needs no other rank, and count negative dims from the end."""
    if len(placements) != mesh.ndim:
        raise LayoutMismatchError(
            f"{len(placements)} placements {_listed(placements)} are given for a mesh of {mesh.ndim} axes "
            f"{mesh.mesh_dim_names}",
            where=_WHERE,
            advice="give one placement per mesh axis",
        )
    if not isinstance(local, torch.Tensor):
        raise TypeError(f"the local tensor must be a torch.Tensor, not {type(local).__name__}")
    if isinstance(local, (_tensor.ShardTensor, DTensor)):
        raise TypeError(
            f"the local tensor must be plain, not a {type(local).__name__}: use its to_local() or redistribute()"
        )
    is_known = sharding_shapes in ("infer", "chunk") if isinstance(sharding_shapes, str) else False
    if not is_known and not isinstance(sharding_shapes, Mapping):
        raise LayoutMismatchError(
            f"sharding_shapes={sharding_shapes!r} is neither 'infer' nor 'chunk' nor a mapping", where=_WHERE
        )
    return normalized_placements(placements, local.ndim)


def _spec_of_arguments(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    sharding_shapes: Any,
    global_shape: Sequence[int] | None,
) -> ShardTensorSpec:
    """Make the layout without asking anybody."""
    shape: tuple[int, ...]
    if sharding_shapes != "chunk":
        shape, grid = _grid_of_shapes(local, mesh, placements, sharding_shapes)
    elif global_shape is None:
        raise LayoutMismatchError(
            "sharding_shapes='chunk' needs the global_shape",
            where=_WHERE,
            advice="pass global_shape, or sharding_shapes='infer'",
        )
    elif len(global_shape) != local.ndim:
        raise LayoutMismatchError(
            f"global_shape {tuple(global_shape)} has {len(global_shape)} dims, but the local tensor "
            f"{tuple(local.shape)} has {local.ndim}",
            where=_WHERE,
        )
    else:
        shape = tuple(global_shape)
        grid = chunk_grid(shape, mesh.shape, placements)
    order = stride_order(local)
    meta = _meta_in_order(shape, local.dtype, order if order is not None else tuple(range(local.ndim)))
    if not grid and tuple(local.shape) == shape:
        meta = meta._replace(stride=local.stride())
    spec = ShardTensorSpec.of(mesh, placements, meta, grid)
    if tuple(local.shape) != tuple(spec.local_shape):
        raise LayoutMismatchError(
            f"the local tensor is {tuple(local.shape)}, but by the sizes this rank holds {tuple(spec.local_shape)}",
            where=_WHERE,
            inputs=[spec.describe()],
            advice="pass the shard that the sizes describe, or sharding_shapes='infer'",
        )
    return spec


def _grid_of_shapes(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shapes: Mapping[int, Sequence[Sequence[int]]],
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
                where=_WHERE,
                advice="give the shapes along every mesh axis that shards, or 'infer'",
            )
        along = [tuple(int(extent) for extent in entry) for entry in shapes[axis]]
        if len(along) != mesh.shape[axis] or any(len(entry) != local.ndim for entry in along):
            raise LayoutMismatchError(
                f"sharding_shapes of mesh axis {axis} are {along}: they must be {mesh.shape[axis]} shapes of "
                f"{local.ndim} dims",
                where=_WHERE,
            )
        for entry in along:
            if any(extent != local.shape[other] for other, extent in enumerate(entry) if other != dim):
                raise LayoutMismatchError(
                    f"sharding_shapes of mesh axis {axis} are {along}, but the local tensor is {tuple(local.shape)}: "
                    f"they may differ from it along dim {dim} only",
                    where=_WHERE,
                )
        sizes[dim] = tuple(entry[dim] for entry in along)
        shape[dim] = sum(sizes[dim])
    return tuple(shape), grid_of_sizes(shape, mesh.shape, placements, sizes)


def _meta_in_order(shape: Sequence[int], dtype: torch.dtype, order: Sequence[int]) -> TensorMeta:
    """Give the whole tensor the stride order of the shards, without gaps."""
    dense = contiguous_meta([shape[dim] for dim in order], dtype).stride
    stride = [0] * len(order)
    for position, dim in enumerate(order):
        stride[dim] = dense[position]
    return contiguous_meta(shape, dtype)._replace(stride=tuple(stride))


def _listed(placements: Sequence[Placement]) -> str:
    return f"({', '.join(map(describe_placement, placements))})"


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
            f"{len(placements)} placements {_listed(placements)} are given for a mesh of {spec.mesh.ndim} axes",
            where="ShardTensor.redistribute",
            inputs=[spec.describe()],
            advice="give one placement per mesh axis",
        )
    if any(isinstance(placement, Partial) for placement in placements):
        raise RuntimeError(
            "a tensor cannot be redistributed to Partial: a pending reduction arises from operators only"
        )
    target = respelled(spec, placements)
    if sizes is None:
        return target
    assert spec.tensor_meta is not None
    grid = grid_of_sizes(tuple(spec.tensor_meta.shape), spec.mesh.shape, target.placements, sizes)
    kept = {dim: split for dim, split in target.grid.items() if dim not in {d % spec.ndim for d in sizes}}
    return ShardTensorSpec.of(spec.mesh, target.placements, spec.tensor_meta, grid | kept)
