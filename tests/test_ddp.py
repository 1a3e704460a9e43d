"""DDP over the data axis with sharded inputs, as the reference page does it: the single process's gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from domain_parallel import ShardTensor, init_domain_mesh, scatter_tensor, sync_module_over_mesh


def _model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.InstanceNorm2d(4, affine=True), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1)
    ).double()


def _samples(n_samples: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(n_samples, 1, 7, 5, dtype=torch.float64, generator=generator)


# SGD, not AdamW: the bias in front of an instance norm has no gradient but rounding, which AdamW would turn into steps.
def _reference(samples: torch.Tensor, n_steps: int) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9)
    losses = []
    for _ in range(n_steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(samples), samples * 2)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.ranks(4, timeout=60)
@pytest.mark.parametrize(
    ("ddp", "domain", "rows"), [(2, 2, (1, 6)), (2, 2, (7, 0)), (1, 4, (1, 3, 1, 2)), (4, 1, (7,))]
)
def test_ddp_times_domain_is_the_single_process(ddp: int, domain: int, rows: tuple[int, ...]) -> None:
    mesh = init_domain_mesh(ddp=ddp, domain=domain, device_type="cpu")
    data_mesh, domain_mesh = mesh["ddp"], mesh["domain"]
    torch.manual_seed(dist.get_rank())  # ranks begin with other weights: synchronising must matter
    model = _model()
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        model.load_state_dict(_model().state_dict())
    sync_module_over_mesh(model, domain_mesh)
    model = DistributedDataParallel(model, process_group=data_mesh.get_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9)
    samples = _samples(ddp)
    mine = samples[data_mesh.get_local_rank()].unsqueeze(0)
    source = int(domain_mesh.mesh[0])
    x = scatter_tensor(mine if dist.get_rank() == source else None, source, domain_mesh, (Shard(2),), sizes={2: rows})
    want_losses, want_weights = _reference(samples, n_steps=4)
    for want in want_losses:
        optimizer.zero_grad()
        y = model(x)
        assert isinstance(y, ShardTensor)
        loss = nn.functional.mse_loss(y, x * 2)
        loss.backward()
        assert all(type(parameter.grad) is torch.Tensor for parameter in model.parameters())
        optimizer.step()
        value = torch.tensor(loss.item(), dtype=torch.float64)
        dist.all_reduce(value)
        assert value.item() / dist.get_world_size() == pytest.approx(want, rel=1e-10)
    for got, weight in zip(model.parameters(), want_weights, strict=True):
        torch.testing.assert_close(got.detach(), weight, rtol=1e-10, atol=1e-12)
        first = got.detach().clone()
        dist.broadcast(first, source, group=domain_mesh.get_group())
        assert torch.equal(first, got.detach()), "weights differ over the domain axis"
