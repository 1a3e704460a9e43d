"""Padding in every mode, along sharded dims and others, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardtensor.testing import Layout, check_op, layouts_of, splits

F64 = torch.float64


def _mesh(world: int) -> Any:
    return init_device_mesh("cpu", (world,), mesh_dim_names=("domain",))


def _world() -> int:
    return torch.distributed.get_world_size()


def _pad(pad: tuple[int, ...], mode: str, value: float | None = None) -> Any:
    return lambda x: F.pad(x, pad, mode, value)


@pytest.mark.ranks(1, 2, 3, 4)
def test_one_dim_in_every_mode() -> None:
    """Thin and empty shards at the border, and pads longer than the shard at the edge."""
    mesh = _mesh(_world())
    x = torch.randn(2, 3, 7, dtype=F64)
    for layout in [Layout((Shard(2),), {2: split}) for split in splits(7, _world())]:
        for pad in ((2, 1), (0, 3), (5, 6), (-1, 2), (3, -2), (-2, -3), (0, 0), (-6, 0)):
            check_op(_pad(pad, "constant", 1.5), x, mesh=mesh, layouts=[layout], fallback="error")
            check_op(_pad(pad, "constant"), x, mesh=mesh, layouts=[layout], fallback="error")
            check_op(_pad(pad, "circular"), x, mesh=mesh, layouts=[layout], fallback="error")
            check_op(_pad(pad, "reflect"), x, mesh=mesh, layouts=[layout], fallback="error")
            check_op(_pad(pad, "replicate"), x, mesh=mesh, layouts=[layout], fallback="error")


@pytest.mark.ranks(2, 3)
def test_several_dims_at_once() -> None:
    mesh = _mesh(_world())
    image, volume = torch.randn(2, 3, 6, 5, dtype=F64), torch.randn(1, 2, 4, 5, 3, dtype=F64)
    for mode in ("constant", "reflect", "replicate", "circular"):
        for layout in layouts_of(image.shape, mesh):
            check_op(_pad((1, 2, 2, 0), mode), image, mesh=mesh, layouts=[layout], fallback="error")
        for layout in layouts_of(volume.shape, mesh):
            check_op(_pad((0, 1, 0, 0, 0, 1), mode), volume, mesh=mesh, layouts=[layout], fallback="error")
            check_op(_pad((1, 1, 2, 1, 3, 2), mode), volume, mesh=mesh, layouts=[layout], fallback="error")
    for layout in layouts_of(image.shape, mesh):
        check_op(_pad((1, 0, 0, 1, 0, 2, 3, 1), "constant", -1.0), image, mesh=mesh, layouts=[layout], fallback="error")
