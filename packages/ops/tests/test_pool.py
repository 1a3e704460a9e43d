"""Pooling on every split, against plain torch."""

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


def _world() -> int:
    return torch.distributed.get_world_size()


def _rows(extent: int, world: int, dim: int) -> list[Layout]:
    return [Layout((Shard(dim),), {dim: split}) for split in splits(extent, world)]


# kernel, stride, padding, dilation, ceil_mode
MAX_POOLS = [
    (2, 2, 0, 1, False),
    (2, 2, 0, 1, True),
    (3, None, 1, 1, False),
    (3, 1, 1, 1, False),
    (3, 2, 1, 2, True),
    (4, 3, 2, 1, True),
    (2, 3, 1, 3, False),
    (1, 1, 0, 1, False),
]


@pytest.mark.ranks(1, 2, 3, 4)
def test_max_pool_and_its_global_indices() -> None:
    """Field case A13: windows of 2 and 3 with an odd start of the shard, and ceil_mode."""
    mesh = _mesh(_world())
    x = torch.randn(2, 3, 11, dtype=F64)
    for layout in _rows(11, _world(), 2):
        for kernel, stride, padding, dilation, ceil_mode in MAX_POOLS:
            check_op(
                lambda a: F.max_pool1d(a, kernel, stride, padding, dilation, ceil_mode, return_indices=True),  # noqa: B023
                x,
                mesh=mesh,
                layouts=[layout],
                fallback="error",
            )
            check_op(
                lambda a: F.max_pool1d(a, kernel, stride, padding, dilation, ceil_mode),  # noqa: B023
                x,
                mesh=mesh,
                layouts=[layout],
                fallback="error",
            )


@pytest.mark.ranks(2, 3)
def test_max_pool_of_images_and_volumes() -> None:
    mesh = _mesh(_world())
    image, volume = torch.randn(2, 3, 7, 6, dtype=F64), torch.randn(1, 2, 5, 6, 7, dtype=F64)
    for layout in layouts_of(image.shape, mesh):
        for function in (
            lambda a: F.max_pool2d(a, (3, 2), (2, 1), (1, 0), (1, 2), True, True),
            lambda a: F.max_pool2d(a, 2),
            lambda a: torch.max_pool2d(a, [3, 3], [1, 1], [1, 1]),
        ):
            check_op(function, image, mesh=mesh, layouts=[layout], fallback="error")
    for layout in layouts_of(volume.shape, mesh):
        check_op(
            lambda a: F.max_pool3d(a, 2, return_indices=True), volume, mesh=mesh, layouts=[layout], fallback="error"
        )
        check_op(lambda a: F.max_pool3d(a, 3, 2, 1), volume, mesh=mesh, layouts=[layout], fallback="error")


@pytest.mark.ranks(2)
def test_maximum_over_nothing_but_minus_infinity_is_in_the_tensor() -> None:
    mesh = _mesh(2)
    x = torch.full((1, 1, 6, 6), -torch.inf, dtype=F64)
    for layout in layouts_of(x.shape, mesh, dims=[2, 3]):
        for dilation in (1, 2):
            check_op(
                lambda a: F.max_pool2d(a, 3, 2, 1, dilation, return_indices=True),  # noqa: B023
                x,
                mesh=mesh,
                layouts=[layout],
                fallback="error",
            )


@pytest.mark.ranks(2)
def test_max_pool_of_one_sample_and_of_integers() -> None:
    mesh = _mesh(2)
    for layout in layouts_of((3, 7, 6), mesh):
        x = torch.randn(3, 7, 6, dtype=F64)
        check_op(lambda a: F.max_pool2d(a, 3, 2, 1), x, mesh=mesh, layouts=[layout], fallback="error")
        check_op(lambda a: F.avg_pool2d(a, 3, 2, 1), x, mesh=mesh, layouts=[layout], fallback="error")
    whole = torch.randint(-9, 9, (1, 1, 7, 6))
    for layout in layouts_of(whole.shape, mesh, dims=[2]):
        check_op(
            lambda a: F.max_pool2d(a, 3, 1, 1), whole, mesh=mesh, layouts=[layout], gradient=False, fallback="error"
        )


@pytest.mark.ranks(1, 2, 3, 4)
def test_avg_pool_with_every_way_to_count() -> None:
    mesh = _mesh(_world())
    x, image = torch.randn(2, 3, 11, dtype=F64), torch.randn(2, 2, 7, 5, dtype=F64)
    volume = torch.randn(1, 2, 5, 4, 3, dtype=F64)
    for layout in _rows(11, _world(), 2):
        for kernel, stride, padding, ceil_mode in (
            (2, None, 0, False),
            (3, 2, 1, True),
            (3, 1, 1, False),
            (4, 3, 2, True),
        ):
            for counts_padding in (True, False):
                check_op(
                    lambda a: F.avg_pool1d(a, kernel, stride, padding, ceil_mode, counts_padding),  # noqa: B023
                    x,
                    mesh=mesh,
                    layouts=[layout],
                    fallback="error",
                )
    for layout in _rows(7, _world(), 2) + _rows(5, _world(), 3):
        for counts_padding, divisor in ((True, None), (False, None), (True, 5)):
            check_op(
                lambda a: F.avg_pool2d(a, (3, 2), (2, 2), (1, 1), True, counts_padding, divisor),  # noqa: B023
                image,
                mesh=mesh,
                layouts=[layout],
                fallback="error",
            )
    for layout in _rows(5, _world(), 2) + _rows(4, _world(), 3):
        check_op(
            lambda a: F.avg_pool3d(a, 2, 1, 1, False, False), volume, mesh=mesh, layouts=[layout], fallback="error"
        )


@pytest.mark.ranks(4)
def test_two_sharded_dims() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "domain"))
    x = torch.randn(2, 2, 7, 6, dtype=F64)
    for layout in layouts_of(x.shape, mesh):
        check_op(
            lambda a: F.max_pool2d(a, 3, 2, 1, return_indices=True), x, mesh=mesh, layouts=[layout], fallback="error"
        )
        check_op(lambda a: F.avg_pool2d(a, 3, 1, 1), x, mesh=mesh, layouts=[layout], fallback="error")


@pytest.mark.ranks(2)
def test_gradients_of_gradients() -> None:
    mesh = _mesh(2)
    x = torch.randn(1, 2, 7, dtype=F64)
    for pool in (lambda a: F.max_pool1d(a, 3, 2, 1), lambda a: F.avg_pool1d(a, 3, 2, 1)):

        def penalty(a: Any, pool: Any = pool) -> Any:
            (gradient,) = torch.autograd.grad(pool(a * a).pow(2).sum(), a, create_graph=True)
            return gradient * gradient

        for layout in _rows(7, 2, 2):
            check_op(penalty, x, mesh=mesh, layouts=[layout])


@pytest.mark.ranks(1)
def test_one_rank_communicates_nothing() -> None:
    """Field case B6."""
    mesh = _mesh(1)
    x = shard(torch.randn(1, 2, 7, 6), mesh, Layout((Shard(2),)), requires_grad=True)
    with comm_trace() as trace:
        F.max_pool2d(x, 3, 2, 1).sum().to_local().backward()
        F.avg_pool2d(x, 3, 2, 1).sum().to_local().backward()
    assert trace.events == []


@pytest.mark.ranks(2)
def test_only_the_rows_of_the_windows_travel() -> None:
    """Field case D1: with a cut between windows nothing moves, else one row."""
    mesh = _mesh(2)
    x = torch.randn(1, 2, 8, 6)
    for cut, n_rows in ((4, 0), (3, 1)):
        t = shard(x, mesh, Layout((Shard(2),), {2: (cut, 8 - cut)}))
        with comm_trace() as trace:
            F.max_pool2d(t, 2)
        assert {event.collective for event in trace} <= {"exchange"}
        received = trace.bytes_received if torch.distributed.get_rank() == 0 else trace.bytes_sent
        assert received == n_rows * 2 * 6 * 4
