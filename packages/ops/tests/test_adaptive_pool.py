"""Adaptive pooling in terms of the whole tensor, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardtensor.testing import Layout, check_op, layouts_of, shard, splits
from shardtensor_collectives import comm_trace

F64 = torch.float64


def _mesh(world: int) -> Any:
    return init_device_mesh("cpu", (world,), mesh_dim_names=("domain",))


@pytest.mark.ranks(1, 2, 3, 4)
def test_averages() -> None:
    world = torch.distributed.get_world_size()
    mesh = _mesh(world)
    x = torch.randn(2, 3, 11, dtype=F64)
    for layout in [Layout((Shard(2),), {2: split}) for split in splits(11, world)]:
        for size in (1, 2, 5, 7, 11, 13):
            check_op(lambda a: F.adaptive_avg_pool1d(a, size), x, mesh=mesh, layouts=[layout], fallback="error")  # noqa: B023


@pytest.mark.ranks(2, 3)
def test_averages_of_images_and_volumes() -> None:
    mesh = _mesh(torch.distributed.get_world_size())
    image, volume = torch.randn(2, 3, 7, 6, dtype=F64), torch.randn(1, 2, 4, 5, 3, dtype=F64)
    for layout in layouts_of(image.shape, mesh):
        for size in (1, (5, None), (4, 3), (7, 2)):
            check_op(lambda a: F.adaptive_avg_pool2d(a, size), image, mesh=mesh, layouts=[layout], fallback="error")  # noqa: B023
    for layout in layouts_of(volume.shape, mesh):
        for size in (1, (2, 4, 3)):
            check_op(lambda a: F.adaptive_avg_pool3d(a, size), volume, mesh=mesh, layouts=[layout], fallback="error")  # noqa: B023


@pytest.mark.ranks(2, 3)
def test_maxima_and_their_global_indices() -> None:
    mesh = _mesh(torch.distributed.get_world_size())
    line, image, volume = (torch.randn(shape, dtype=F64) for shape in ((2, 3, 12), (2, 3, 8, 6), (1, 2, 4, 5, 3)))
    for layout in layouts_of(line.shape, mesh):
        for size in (1, 4, 5):
            check_op(
                lambda a: F.adaptive_max_pool1d(a, size, True),  # noqa: B023
                line,
                mesh=mesh,
                layouts=[layout],
                fallback="error",
            )
    for layout in layouts_of(image.shape, mesh):
        for size in (1, (4, 3), (5, None)):
            check_op(
                lambda a: F.adaptive_max_pool2d(a, size, return_indices=True),  # noqa: B023
                image,
                mesh=mesh,
                layouts=[layout],
                fallback="error",
            )
    for layout in layouts_of(volume.shape, mesh):
        check_op(lambda a: F.adaptive_max_pool3d(a, 2), volume, mesh=mesh, layouts=[layout], fallback="error")


@pytest.mark.ranks(4)
def test_two_sharded_dims() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "domain"))
    x = torch.randn(2, 2, 8, 6, dtype=F64)
    for layout in layouts_of(x.shape, mesh):
        for size in (1, (4, 5)):
            check_op(lambda a: F.adaptive_avg_pool2d(a, size), x, mesh=mesh, layouts=[layout], fallback="error")  # noqa: B023
            check_op(lambda a: F.adaptive_max_pool2d(a, size), x, mesh=mesh, layouts=[layout], fallback="error")  # noqa: B023


@pytest.mark.ranks(2)
def test_a_global_average_moves_nothing_but_its_result() -> None:
    mesh = _mesh(2)
    x = shard(torch.randn(2, 3, 8, 6), mesh, Layout((Shard(2),), {2: (3, 5)}))
    with comm_trace() as trace:
        F.adaptive_avg_pool2d(x, 1).full_tensor()
    assert [(event.collective, event.bytes_sent) for event in trace] == [("all_reduce", 2 * 3 * 4)]
