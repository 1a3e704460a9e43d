"""Softmax on every layout, against plain torch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Shard

from shardtensor import ShardTensor
from shardtensor.testing import Layout, check_op, fallback_mode, layouts_of, shard
from shardtensor_collectives import comm_trace


def _mesh(world: int):  # type: ignore[no-untyped-def]
    return init_device_mesh("cpu", (world,), mesh_dim_names=("domain",))


def _world() -> int:
    return torch.distributed.get_world_size()


def _cut(x, sizes, dim=0, **kwargs):  # type: ignore[no-untyped-def]
    return shard(x, _mesh(_world()), Layout((Shard(dim),), {dim: sizes}), **kwargs)


FUNCTIONS = [
    lambda t, d: F.softmax(t, d),
    lambda t, d: F.log_softmax(t, d),
    lambda t, d: F.softmin(t, dim=d),
    lambda t, d: t.softmax(d),
    lambda t, d: torch.log_softmax(t, d, dtype=torch.float64),
    lambda t, d: torch.ops.aten._safe_softmax(t, d),
]


@pytest.mark.ranks(1, 2, 3, 4)
def test_every_layout() -> None:
    mesh = _mesh(_world())
    x = 5 * torch.randn(5, 3, 4, dtype=torch.float64)
    for index, layout in enumerate(layouts_of(x.shape, mesh, dims=(0, 1))):
        for function in FUNCTIONS:
            dim = layout.placements[0].dim
            check_op(lambda t, f=function, d=dim: f(t, d), x, mesh=mesh, layouts=[layout], fallback="error")
        function = FUNCTIONS[index % len(FUNCTIONS)]
        check_op(lambda t, f=function: f(t, -1), x, mesh=mesh, layouts=[layout], fallback="error")


@pytest.mark.ranks(4)
def test_two_dimensional_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "domain"))
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    for layout in layouts_of(x.shape, mesh, dims=(0, 1)):
        for function in FUNCTIONS[:2]:
            for dim in (0, 1):
                check_op(lambda t, f=function, d=dim: f(t, d), x, mesh=mesh, layouts=[layout], fallback="error")


@pytest.mark.ranks(3)
def test_extreme_rows() -> None:
    x = torch.tensor([[1e4, -1e4, 3.0, 1e4], [-math.inf, 0.0, -math.inf, 1.0], [math.nan, 0.0, 1.0, 2.0]])
    masked = torch.full((2, 4), -math.inf)
    for sizes in [(1, 0, 3), (2, 1, 1)]:
        for function in FUNCTIONS:
            got, want = function(_cut(x, sizes, dim=1), 1).full_tensor(), function(x, 1)
            assert torch.allclose(got, want, equal_nan=True)
        t = _cut(masked, sizes, dim=1)
        assert torch.ops.aten._safe_softmax(t, 1).full_tensor().eq(0).all()
        assert F.softmax(t, 1).full_tensor().isnan().all()


@pytest.mark.ranks(3)
def test_only_a_number_per_row_is_sent() -> None:
    x = torch.randn(6, 50)
    t = _cut(x, (10, 0, 40), dim=1, requires_grad=True)
    with comm_trace() as trace, fallback_mode("error"):
        result = F.softmax(t, 1)
    assert [event.collective for event in trace.events] == ["all_reduce", "all_reduce"]
    assert trace.bytes_sent == 2 * 6 * 4
    gradient = _cut(torch.randn(6, 50), (10, 0, 40), dim=1)
    with comm_trace() as trace:
        result.backward(gradient)
    assert [event.collective for event in trace.events] == ["all_reduce"]
    with comm_trace() as trace:
        F.log_softmax(t, 0)
    assert not trace.events


@pytest.mark.ranks(2)
def test_pending_operands_and_short_floats() -> None:
    mesh = _mesh(2)
    pending = ShardTensor.from_local(torch.tensor([[1.0, 2.0]]) + torch.distributed.get_rank(), mesh, [Partial()])
    assert F.softmax(pending, 1).full_tensor().allclose(torch.tensor([[3.0, 5.0]]).softmax(1))
    x = torch.randn(3, 64, dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float16):
        exact, one = F.softmax(x.to(dtype).double(), 1), F.softmax(x.to(dtype), 1)
        ours = F.softmax(_cut(x.to(dtype), (3, 61), dim=1), 1)
        assert ours.dtype == dtype
        assert (ours.full_tensor() - exact).abs().max() <= (one - exact).abs().max()


@pytest.mark.ranks(2)
def test_gradients_of_gradients() -> None:
    x = torch.randn(5, 3, dtype=torch.float64)
    for function in FUNCTIONS[:2]:
        plain, t = x.clone().requires_grad_(), _cut(x, (1, 4), requires_grad=True)
        for leaf in (plain, t):
            (first,) = torch.autograd.grad(function(leaf, 0).pow(3).sum(), leaf, create_graph=True)
            first.pow(2).sum().backward()
        assert t.grad.full_tensor().allclose(plain.grad)
