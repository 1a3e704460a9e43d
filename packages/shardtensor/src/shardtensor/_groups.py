"""Process groups of a mesh: one axis, or all axes flattened."""

from __future__ import annotations

import functools
import math

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardtensor_spec import LayoutMismatchError, forget_old_world, on_new_world

from ._torch_private import flattened_mesh, outside_modes


def axis_group(mesh: DeviceMesh, axis: int) -> dist.ProcessGroup:
    """Group of the ranks along one mesh axis, on the line through this rank. Member i has coordinate i.

    Raises
    ------
    LayoutMismatchError
        If the ranks on the line do not ascend: torch sorts the members of a group, so none has them in this order.
    """
    forget_old_world()  # an equal mesh of another world had other groups
    return _axis_group(mesh, axis)


@functools.lru_cache(maxsize=64)
def _axis_group(mesh: DeviceMesh, axis: int) -> dist.ProcessGroup:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise LayoutMismatchError(f"this rank is not part of the mesh {mesh}, so it cannot communicate over it")
    with outside_modes():  # the ranks are real numbers, also while a graph is traced
        line = mesh.mesh[tuple(slice(None) if other == axis else at for other, at in enumerate(coordinate))]
        _require_ascending(line.tolist(), mesh)
    return mesh.get_group(axis)


def whole_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Group of all ranks of the mesh, in row-major order of their coordinates.

    Raises
    ------
    LayoutMismatchError
        If the ranks do not ascend.

    Notes
    -----
    Communication: the first call for a mesh of several axes may create a process group; all ranks make that call.
    """
    forget_old_world()
    return _whole_group(mesh)


@functools.lru_cache(maxsize=64)
def _whole_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.get_coordinate() is None:
        raise LayoutMismatchError(f"this rank is not part of the mesh {mesh}, so it cannot communicate over it")
    with outside_modes():
        ranks = mesh.mesh.flatten().tolist()
    _require_ascending(ranks, mesh)
    if mesh.ndim == 1:
        return mesh.get_group(0)
    if mesh.size() == dist.get_world_size() and ranks == list(range(mesh.size())):
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    return flattened_mesh(mesh).get_group()


def _require_ascending(ranks: list[int], mesh: DeviceMesh) -> None:
    if ranks != sorted(ranks):
        raise LayoutMismatchError(
            f"the ranks {ranks} of the mesh {mesh} do not ascend, but the members of a process group always do, so "
            "shards would come in another order than the mesh says",
            advice="build the mesh with ascending ranks, for example with init_device_mesh",
        )


@functools.lru_cache(maxsize=64)
def axis_name(mesh: DeviceMesh, axis: int | None = None) -> str:
    """Name of a mesh axis (or of all of them) for traces and messages."""
    names = mesh.mesh_dim_names or tuple(f"axis{index}" for index in range(mesh.ndim))
    return "x".join(names) if axis is None else names[axis]


def flat_coordinate(coordinate: tuple[int, ...], mesh: DeviceMesh) -> int:
    """Position of a coordinate in row-major order."""
    index = 0
    for position, n_ranks in zip(coordinate, mesh.shape, strict=True):
        index = index * n_ranks + position
    assert 0 <= index < math.prod(mesh.shape)
    return index


on_new_world(_axis_group.cache_clear)
on_new_world(_whole_group.cache_clear)
