"""Whole blocks, one training step on uneven shards against one process: outputs, gradients, updated weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from shardtensor import ShardTensor
from shardtensor.testing import Layout, fallback_mode, shard
from shardtensor_collectives import comm_trace

B, S, E, HEADS = 2, 7, 8, 2


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("domain",))


def _uneven(extent: int, n_shards: int) -> tuple[int, ...]:
    """One row each for all but the last."""
    return (*((1,) * (n_shards - 1)), extent - n_shards + 1)


def _with_empty(extent: int, n_shards: int) -> tuple[int, ...]:
    return (*((0,) * (n_shards - 1)), extent)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(E, 2 * E), nn.GELU(), nn.Linear(2 * E, E), nn.Tanh(), nn.Linear(E, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


class Block(nn.Module):
    """Pre-norm transformer block. Its attention is either spelled out or torch's own."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(E), nn.LayerNorm(E)
        self.qkv, self.out = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.mlp = nn.Sequential(nn.Linear(E, 4 * E), nn.GELU(), nn.Linear(4 * E, E))
        self.attend = attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.first_norm(x)).view(batch, length, 3, HEADS, width // HEADS)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        attended = self.attend(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(attended)
        out: torch.Tensor = x + self.mlp(self.second_norm(x))
        return out


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
    return weights @ v


def _check_step(model: nn.Module, x: torch.Tensor, target: torch.Tensor, make: Callable[[torch.Tensor], Any]) -> None:
    """One step of AdamW on whole tensors and on what ``make`` makes of them."""
    reference = copy.deepcopy(model)
    whole = x.clone().requires_grad_()
    expected = reference(whole)
    F.mse_loss(expected, target).backward()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.1)
    optimizer.step()

    sharded = make(x).requires_grad_()
    actual = model(sharded)
    loss = F.mse_loss(actual, make(target))
    loss.backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.step()

    assert torch.allclose(actual.full_tensor(), expected, atol=1e-10)
    assert torch.allclose(sharded.grad.full_tensor(), whole.grad, atol=1e-10)
    assert sharded.grad._spec.sizes() == sharded._spec.sizes()
    for (name, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert type(got.grad) is torch.Tensor, name
        assert want.grad is not None and torch.allclose(got.grad, want.grad, atol=1e-10), name
        assert torch.allclose(got, want, atol=1e-7), name


@pytest.mark.ranks(1, 2, 3, 4)
def test_mlp_on_a_batch_or_a_sequence() -> None:
    mesh = _mesh()
    for shape, dim in [((S, E), 0), ((B, S, E), 0), ((B, S, E), 1), ((B, S, E), 2), ((B, 2, S, E), 2)]:
        for cut in (_uneven, _with_empty):
            layout = Layout((Shard(dim),), {dim: cut(shape[dim], mesh.size())})
            if min(layout.sizes[dim]) < 0:
                continue
            torch.manual_seed(0)
            x, target = torch.randn(shape, dtype=torch.float64), torch.randn((*shape[:-1], 3), dtype=torch.float64)

            def make(tensor: torch.Tensor, layout: Layout = layout, dim: int = dim) -> ShardTensor:
                is_split_alike = tensor.shape[dim] == sum(layout.sizes[dim])
                return shard(tensor, mesh, layout if is_split_alike else Layout((Replicate(),)))

            with fallback_mode("error"):
                _check_step(Mlp().double(), x, target, make)


@pytest.mark.ranks(2)
def test_mlp_on_a_sequence_moves_gradients_of_weights_only() -> None:
    mesh = _mesh()
    x = shard(torch.randn(B, S, E), mesh, Layout((Shard(1),), {1: (2, 5)}))
    model = Mlp()
    with comm_trace() as trace:
        model(x).square().mean().backward()
    assert {event.collective for event in trace.events} == {"all_reduce"}
    sent = sum(event.bytes_sent for event in trace.events)
    assert sent <= 4 * (sum(parameter.numel() for parameter in model.parameters()) + 1)


@pytest.mark.ranks(4)
def test_mlp_on_a_two_dimensional_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "domain"))
    for layout in [
        Layout((Shard(0), Shard(1)), {0: (3, 1), 1: (2, 5)}),
        Layout((Shard(1), Shard(1)), {1: (2, 0, 4, 1)}),
        Layout((Replicate(), Shard(1)), {1: (2, 5)}),
    ]:
        torch.manual_seed(0)
        x, target = torch.randn(4, S, E, dtype=torch.float64), torch.randn(4, S, 3, dtype=torch.float64)
        with fallback_mode("error"):
            _check_step(Mlp().double(), x, target, lambda tensor, layout=layout: shard(tensor, mesh, layout))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("attend", [attention, F.scaled_dot_product_attention], ids=["spelled out", "fused"])
def test_pre_norm_transformer_block(attend: Callable[..., torch.Tensor]) -> None:
    mesh = _mesh()
    for dim, extent in [(1, S), (0, B)]:
        layout = Layout(
            (Shard(dim),), {dim: _with_empty(extent, mesh.size()) if dim == 0 else _uneven(extent, mesh.size())}
        )
        torch.manual_seed(0)
        x, target = torch.randn(B, S, E, dtype=torch.float64), torch.randn(B, S, E, dtype=torch.float64)
        with fallback_mode("error" if attend is attention else "silent"):
            _check_step(Block(attend).double(), x, target, lambda tensor, layout=layout: shard(tensor, mesh, layout))
