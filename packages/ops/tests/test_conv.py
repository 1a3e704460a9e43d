"""Convolutions on every split, against plain torch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardtensor import ShardTensor
from shardtensor.testing import Layout, check_op, fallback_mode, layouts_of, shard, splits
from shardtensor_collectives import comm_trace

F64 = torch.float64
pytestmark = pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel:UserWarning")


def _mesh(world: int) -> Any:
    return init_device_mesh("cpu", (world,), mesh_dim_names=("domain",))


def _world() -> int:
    return torch.distributed.get_world_size()


def _rows(extent: int, world: int, dim: int) -> list[Layout]:
    return [Layout((Shard(dim),), {dim: split}) for split in splits(extent, world)]


@pytest.mark.ranks(1, 2, 3, 4)
def test_one_dim_with_every_stride_padding_and_dilation() -> None:
    """Field case A13 in general: even and odd kernels, odd starts, shards thinner than the reach, empty ones."""
    mesh = _mesh(_world())
    x = torch.randn(2, 3, 11, dtype=F64)
    layouts = _rows(11, _world(), 2)
    for kernel, stride, dilation, padding in itertools.product((1, 3, 4), (1, 2), (1, 2), (0, 2, "same")):
        if padding == "same" and stride != 1:
            continue
        weight, bias = torch.randn(4, 3, kernel, dtype=F64), torch.randn(4, dtype=F64)
        for layout in layouts:
            check_op(
                lambda a, w, b: F.conv1d(a, w, b, stride, padding, dilation),  # noqa: B023  called at once
                x,
                weight,
                bias,
                mesh=mesh,
                layouts=[layout, None, None],
                fallback="error",
            )
    weight = torch.randn(4, 3, 7, dtype=F64)
    for layout in layouts:
        check_op(lambda a, w: F.conv1d(a, w, padding=3), x, weight, mesh=mesh, layouts=[layout, None], fallback="error")
        check_op(lambda a, w: F.conv1d(a, w, stride=3), x, weight, mesh=mesh, layouts=[layout, None], fallback="error")


@pytest.mark.ranks(1, 2, 3, 4)
def test_transposed_with_every_stride_and_padding() -> None:
    mesh = _mesh(_world())
    x = torch.randn(2, 4, 7, dtype=F64)
    layouts = _rows(7, _world(), 2)
    for kernel, stride, padding, output_padding, dilation in (
        (2, 2, 0, 0, 1),
        (2, 2, 0, 1, 1),
        (3, 2, 1, 1, 1),
        (4, 2, 1, 0, 1),
        (1, 3, 0, 2, 1),
        (3, 1, 1, 0, 1),
        (3, 1, 0, 0, 2),
        (5, 3, 2, 1, 2),
        (2, 1, 0, 0, 1),
    ):
        weight, bias = torch.randn(4, 3, kernel, dtype=F64), torch.randn(6, dtype=F64)
        for layout in layouts:
            check_op(
                lambda a, w, b: F.conv_transpose1d(a, w, b, stride, padding, output_padding, 2, dilation),  # noqa: B023
                x,
                weight,
                bias,
                mesh=mesh,
                layouts=[layout, None, None],
                fallback="error",
            )
