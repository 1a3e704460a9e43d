"""Worlds of many ranks in one process: the layout arithmetic asks a mesh for its shape and our place in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardtensor_spec import contiguous_stride
from shardtensor_spec._torch_private import TensorMeta


@contextlib.contextmanager
def world(rank: int, mesh_shape: Sequence[int]) -> Iterator[DeviceMesh]:
    """Be one rank of a mesh whose other ranks do not exist: who communicates gets nothing sensible."""
    n_ranks = 1
    for extent in mesh_shape:
        n_ranks *= extent
    dist.init_process_group("fake", rank=rank, world_size=n_ranks, store=FakeStore())
    try:
        names = ("a", "b", "c")[: len(mesh_shape)]
        yield init_device_mesh("cpu", tuple(mesh_shape), mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> TensorMeta:
    return TensorMeta(torch.Size(shape), contiguous_stride(shape), dtype)
