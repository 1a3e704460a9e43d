"""`sync_module_over_mesh`: what it copies, what it leaves alone, and that its errors reach all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardtensor_collectives import comm_trace
from shardtensor_parallel_utils import init_domain_mesh, sync_module_over_mesh


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)


def _randomize(module: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape))
            else:
                tensor.fill_(seed)


@pytest.mark.ranks(1, 2, 4)
def test_parameters_and_buffers_come_from_the_source() -> None:
    n_ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (n_ranks,), mesh_dim_names=("domain",))
    source = n_ranks - 1
    expected, module = _Tied(), _Tied()
    _randomize(expected, 100 + source)
    _randomize(module, 100 + rank)
    with torch.no_grad():
        module.norm.running_mean[0] = expected.norm.running_mean[0] = float("nan")
    sync_module_over_mesh(module, mesh, source, verify=True)
    for (name, got), want in zip(module.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(got.nan_to_num(), want.nan_to_num()), name
    assert module.second.weight is module.first.weight


@pytest.mark.ranks(2)
def test_many_tensors_travel_in_one_broadcast_per_dtype() -> None:
    mesh = init_device_mesh("cpu", (2,))
    module = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(20)))
    with comm_trace() as trace:
        sync_module_over_mesh(module, mesh)
    assert [event.collective for event in trace.events].count("broadcast") == 2  # float32, and int64 counters


@pytest.mark.ranks(4)
def test_only_the_given_axis_is_synchronised() -> None:
    mesh = init_domain_mesh(ddp=2, domain=2)
    module = nn.Linear(2, 2)
    _randomize(module, dist.get_rank())
    sync_module_over_mesh(module, mesh["domain"])
    expected = nn.Linear(2, 2)
    _randomize(expected, dist.get_rank() // 2 * 2)
    assert torch.equal(module.weight, expected.weight)


@pytest.mark.ranks(2)
def test_distributed_tensors_are_left_alone() -> None:
    mesh = init_device_mesh("cpu", (2,))
    module = nn.Linear(2, 2)
    local = torch.full((1, 2), float(dist.get_rank()))
    module.weight = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]))
    sync_module_over_mesh(module, mesh)
    assert module.weight.to_local().flatten().tolist() == [float(dist.get_rank())] * 2


@pytest.mark.ranks(2)
def test_misuse_is_refused() -> None:
    mesh = init_domain_mesh(ddp=1, domain=2)
    with pytest.raises(ValueError, match=r"the mesh has 2 axes \('ddp', 'domain'\)"):
        sync_module_over_mesh(nn.Linear(1, 1), mesh)
    with pytest.raises(ValueError, match="src_mesh_rank 2 is no position in a mesh of 2 ranks"):
        sync_module_over_mesh(nn.Linear(1, 1), mesh["domain"], 2)
    sync_module_over_mesh(nn.Identity(), mesh["domain"], verify=True)
    distributed = nn.Linear(2, 2, bias=False)
    distributed.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh["domain"], [Replicate()]))
    with pytest.raises(RuntimeError, match="all parameters and buffers are distributed already"):
        sync_module_over_mesh(distributed, mesh["domain"])
    sharded = nn.Linear(2, 2)
    torch.distributed.fsdp.fully_shard(sharded, mesh=mesh["domain"])
    with pytest.raises(RuntimeError, match="wrapped by fully_shard already"):
        sync_module_over_mesh(sharded, mesh["domain"])


@pytest.mark.ranks(2)
def test_trouble_on_one_rank_is_raised_on_all() -> None:
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    with pytest.raises(RuntimeError, match="rank 1: weight is on the meta device"):
        sync_module_over_mesh(nn.Linear(2, 2, device="meta" if rank == 1 else "cpu"), mesh)
    with pytest.raises(RuntimeError, match=r"metadata differs between rank 0 and rank 1: 'weight \(2, 2\)"):
        sync_module_over_mesh(nn.Linear(2 + rank, 2), mesh)
    with pytest.raises(RuntimeError, match=r"'bias .* is on one side only"):
        sync_module_over_mesh(nn.Linear(2, 2, bias=rank == 0), mesh)


@pytest.mark.ranks(2, 4)
def test_mesh_sizes_are_completed_and_checked() -> None:
    n_ranks = dist.get_world_size()
    assert tuple(init_domain_mesh().shape) == (1, n_ranks)
    assert tuple(init_domain_mesh(ddp=n_ranks).shape) == (n_ranks, 1)
    assert tuple(init_domain_mesh(domain=2).shape) == (n_ranks // 2, 2)
    with pytest.raises(ValueError, match=f"does not use the {n_ranks} processes: 3 x 1 = 3"):
        init_domain_mesh(ddp=3, domain=1)
