"""Training steps under ``torch.compile`` on uneven shards equal the eager ones, output and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from shardtensor import ShardTensor
from shardtensor.testing import Layout, shard, splits


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.InstanceNorm2d(4, affine=True),
        nn.LeakyReLU(0.1),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(4, 3, 2, stride=2),
    )


def _step(
    model: Callable[[ShardTensor], ShardTensor], parameters: list[nn.Parameter], x: ShardTensor
) -> list[torch.Tensor]:
    for parameter in parameters:
        parameter.grad = None
    x = x.detach().requires_grad_()
    y = model(x)
    (y * y).mean().backward()
    gradients = [parameter.grad for parameter in parameters]
    assert all(type(gradient) is torch.Tensor for gradient in gradients)
    assert isinstance(x.grad, ShardTensor)
    return [y.detach().full_tensor(), x.grad.full_tensor(), *[g.clone() for g in gradients if g is not None]]


@pytest.mark.ranks(2, 3, timeout=120)
@pytest.mark.parametrize(("make", "shape", "dim"), [(_mlp, (7, 6), 0), (_mlp, (2, 7, 6), 1), (_cnn, (2, 2, 8, 6), 2)])
def test_a_training_step_compiles_whole(make: Callable[[], nn.Module], shape: tuple[int, ...], dim: int) -> None:
    torch._dynamo.reset()
    n_ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (n_ranks,), mesh_dim_names=("domain",))
    torch.manual_seed(0)
    model = make().double()
    parameters = list(model.parameters())
    whole = torch.randn(shape, dtype=torch.float64)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    for rows in splits(shape[dim], n_ranks)[:2]:
        x = shard(whole, mesh, Layout((Shard(dim),), {dim: rows}))
        for got, want in zip(_step(compiled, parameters, x), _step(model, parameters, x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.ranks(2, timeout=120)
def test_results_may_be_used_eagerly_in_any_layout() -> None:
    """Field case B11: the gradient that comes back to a compiled region is not in the layout that tracing saw."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    whole = torch.randn(5, 4, dtype=torch.float64)
    weight = torch.randn(4, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(lambda t: torch.relu(t * weight), fullgraph=True, backend="aot_eager")
    uses: list[tuple[Callable[[ShardTensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = [
        (lambda y: y.sum(), lambda y: y.sum()),
        (lambda y: y.redistribute(placements=[Replicate()]).sum(), lambda y: y.sum()),
        (lambda y: (y.full_tensor() * 2).sum(), lambda y: 2 * y.sum()),
        (lambda y: (y.t() * torch.arange(5.0)).sum(), lambda y: (y.t() * torch.arange(5.0)).sum()),
    ]
    for use_shards, use_whole in uses:
        x = shard(whole, mesh, Layout((Shard(0),), {0: (1, 4)}), requires_grad=True)
        use_shards(compiled(x)).backward()
        got, weight.grad = weight.grad, None
        reference = whole.clone().requires_grad_()
        use_whole(torch.relu(reference * weight)).backward()
        want, weight.grad = weight.grad, None
        assert got is not None and want is not None and x.grad is not None and reference.grad is not None
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(x.grad.full_tensor(), reference.grad)
