"""Interpolation in every mode on every split, against plain torch."""

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


def _options() -> list[dict[str, Any]]:
    options: list[dict[str, Any]] = []
    for mode in ("nearest", "nearest-exact", "linear", "area"):
        for how in ({"size": 11}, {"size": 3}, {"size": 14}, {"scale_factor": 2.6}, {"scale_factor": 0.7}):
            options.append({"mode": mode, **how})
        if mode != "area":
            options.append({"mode": mode, "scale_factor": 1.9, "recompute_scale_factor": True})
    options += [{"mode": "linear", "align_corners": True, "size": size} for size in (11, 4, 1)]
    options.append({"mode": "linear", "align_corners": True, "scale_factor": 1.7})
    options += [{"mode": "nearest", "scale_factor": 2.0}, {"mode": "nearest", "size": 7}]
    return options


@pytest.mark.ranks(1, 2, 3, 4)
def test_one_dim_in_every_mode() -> None:
    mesh = _mesh(_world())
    x = torch.randn(2, 3, 7, dtype=F64)
    for layout in _rows(7, _world(), 2):
        for options in _options():
            check_op(lambda a: F.interpolate(a, **options), x, mesh=mesh, layouts=[layout], fallback="error")  # noqa: B023


@pytest.mark.ranks(2, 3)
def test_images() -> None:
    mesh = _mesh(_world())
    image = torch.randn(2, 3, 7, 5, dtype=F64)
    for layout in layouts_of(image.shape, mesh)[::2]:
        for options in (
            {"mode": "bilinear", "scale_factor": (2.0, 1.5)},
            {"mode": "bilinear", "size": (3, 9), "align_corners": True},
            {"mode": "bicubic", "scale_factor": 1.6},
            {"mode": "bicubic", "size": (4, 11), "align_corners": True},
            {"mode": "bicubic", "size": (7, 9)},
            {"mode": "nearest", "scale_factor": 2},
            {"mode": "area", "size": (3, 4)},
            {"mode": "bilinear", "size": (3, 4), "antialias": True},
        ):
            check_op(lambda a: F.interpolate(a, **options), image, mesh=mesh, layouts=[layout], fallback="error")  # noqa: B023


@pytest.mark.ranks(2, 3)
def test_volumes() -> None:
    mesh = _mesh(_world())
    volume = torch.randn(1, 2, 4, 5, 3, dtype=F64)
    for layout in layouts_of(volume.shape, mesh, dims=[2, 3, 4])[::2]:
        for options in (
            {"mode": "trilinear", "scale_factor": 2},
            {"mode": "nearest-exact", "size": (7, 3, 5)},
            {"mode": "area", "size": 2},
        ):
            check_op(lambda a: F.interpolate(a, **options), volume, mesh=mesh, layouts=[layout], fallback="error")  # noqa: B023


@pytest.mark.ranks(2)
def test_positions_are_rounded_as_torch_rounds_them() -> None:
    """A long dim with scales that no float holds: one row off would be a difference of order one."""
    mesh = _mesh(2)
    for dtype, tolerance in ((torch.float32, 1e-4), (F64, 1e-10)):
        x = torch.randn(1, 1, 1001, dtype=dtype)
        layout = Layout((Shard(2),), {2: (400, 601)})
        for mode in ("nearest", "nearest-exact", "linear"):
            for how in ({"scale_factor": 1.1}, {"scale_factor": 0.3}, {"size": 3003}, {"size": 333}):
                check_op(
                    lambda a: F.interpolate(a, mode=mode, **how),  # noqa: B023
                    x,
                    mesh=mesh,
                    layouts=[layout],
                    fallback="error",
                    tolerance=tolerance,
                )


@pytest.mark.ranks(4)
def test_two_sharded_dims() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "domain"))
    x = torch.randn(2, 2, 7, 6, dtype=F64)
    for layout in layouts_of(x.shape, mesh, dims=[0, 2, 3]):
        check_op(
            lambda a: F.interpolate(a, scale_factor=1.7, mode="bilinear"),
            x,
            mesh=mesh,
            layouts=[layout],
            fallback="error",
        )


@pytest.mark.ranks(2)
def test_gradients_of_gradients() -> None:
    mesh = _mesh(2)
    x = torch.randn(1, 2, 7, dtype=F64)

    def penalty(a: Any) -> Any:
        y = F.interpolate(a * a, size=11, mode="linear")
        (gradient,) = torch.autograd.grad(y.pow(2).sum(), a, create_graph=True)
        return gradient * gradient

    for layout in _rows(7, 2, 2):
        check_op(penalty, x, mesh=mesh, layouts=[layout])


@pytest.mark.ranks(2)
def test_only_the_rows_of_the_windows_travel() -> None:
    mesh = _mesh(2)
    x = shard(torch.randn(1, 2, 8, 6), mesh, Layout((Shard(2),), {2: (3, 5)}))
    for mode, n_rows in (("nearest", 0), ("bilinear", 1)):
        with comm_trace() as trace:
            F.interpolate(x, scale_factor=2, mode=mode)
        assert {event.collective for event in trace} <= {"exchange"}
        assert trace.bytes_received == n_rows * 2 * 6 * 4


@pytest.mark.ranks(1)
def test_one_rank_communicates_nothing() -> None:
    mesh = _mesh(1)
    x = shard(torch.randn(1, 2, 7, 6), mesh, Layout((Shard(2),)), requires_grad=True)
    with comm_trace() as trace:
        F.interpolate(x, scale_factor=1.5, mode="bicubic").sum().to_local().backward()
    assert trace.events == []
