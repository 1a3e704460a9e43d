"""Field case A29: replicas draw the same numbers, shards different ones, even where every rank has its own seed."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from shardtensor import ShardTensor
from shardtensor.testing import Layout, fallback_mode, shard
from shardtensor_collectives import all_gather_v

N = 4000


def _mesh() -> DeviceMesh:
    torch.manual_seed(torch.distributed.get_rank())
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("domain",))


def _is_equal_on_all_ranks(local: torch.Tensor) -> bool:
    group = torch.distributed.group.WORLD
    assert group is not None
    world = torch.distributed.get_world_size()
    every = all_gather_v(local.reshape(1, -1).double(), [1] * world, 0, group)
    return bool((every == every[0]).all())


@pytest.mark.ranks(2)
def test_dropout_of_replicas_and_of_shards() -> None:
    mesh = _mesh()
    x = torch.ones(2 * N)
    with fallback_mode("error"):
        replicated = F.dropout(shard(x, mesh, Layout((Replicate(),))), 0.25)
        sharded = F.dropout(shard(x, mesh, Layout((Shard(0),), {0: (N, N)})), 0.25)
    assert _is_equal_on_all_ranks(replicated._local_tensor)
    whole = sharded.full_tensor()
    assert not torch.equal(whole[:N], whole[N:])
    for dropped in (replicated.full_tensor(), whole):
        assert set(dropped.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
        assert (dropped == 0).double().mean().item() == pytest.approx(0.25, abs=5 * math.sqrt(0.25 * 0.75 / (2 * N)))


@pytest.mark.ranks(2)
def test_dropout_has_the_gradient_of_its_own_mask_and_does_nothing_in_evaluation() -> None:
    mesh = _mesh()
    t = shard(torch.ones(10, 4), mesh, Layout((Shard(0),), {0: (3, 7)}), requires_grad=True)
    dropped = F.dropout(t, 0.5)
    dropped.sum().backward()
    assert t.grad is not None and torch.equal(t.grad.full_tensor(), dropped.detach().full_tensor())
    assert F.dropout(t, 0.5, training=False) is t or torch.equal(
        F.dropout(t, 0.5, False).full_tensor(), torch.ones(10, 4)
    )
    assert not F.dropout(t, 1.0).full_tensor().any()


@pytest.mark.ranks(2)
def test_native_dropout_draws_a_mask_per_shard() -> None:
    mesh = _mesh()
    t = shard(torch.ones(2 * N), mesh, Layout((Shard(0),), {0: (N, N)}))
    with fallback_mode("error"):
        dropped, mask = torch.native_dropout(t, 0.5, True)
    whole = mask.full_tensor()
    assert not torch.equal(whole[:N], whole[N:])
    assert torch.equal(dropped.full_tensor(), whole * 2.0)


CHANNELS: list[Callable[..., torch.Tensor]] = [F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("index", range(4))
def test_channels_are_dropped_by_all_ranks_that_share_them(index: int) -> None:
    mesh = _mesh()
    function = CHANNELS[index]
    n_spatial = (1, 2, 3, 2)[index]
    shape = (2, 50, 6, 5, 4)[: 2 + n_spatial]
    for in_place in (False, True):
        for dim, sizes in [(2, (1, 5)), (1, (20, 30))]:
            t = shard(torch.ones(shape), mesh, Layout((Shard(dim),), {dim: sizes}))
            with fallback_mode("error"):
                dropped: ShardTensor = function(t, 0.5, True, in_place)
            assert (dropped is t) == in_place
            rows = dropped.full_tensor().flatten(2)
            assert (rows == rows[:, :, :1]).all()
            assert 10 < (rows[:, :, 0] == rows.min()).sum() < 90


@pytest.mark.ranks(2)
def test_fills_and_likes() -> None:
    mesh = _mesh()
    replicated = shard(torch.zeros(N), mesh, Layout((Replicate(),)))
    sharded = shard(torch.zeros(2 * N), mesh, Layout((Shard(0),), {0: (N, N)}))
    with fallback_mode("error"):
        for fill in (
            lambda t: t.normal_(),
            lambda t: t.uniform_(),
            lambda t: t.bernoulli_(0.5),
            lambda t: t.exponential_(),
            torch.rand_like,
            torch.randn_like,
            torch.nn.init.trunc_normal_,
        ):
            assert _is_equal_on_all_ranks(fill(replicated)._local_tensor)
            whole = fill(sharded).full_tensor()
            assert not torch.equal(whole[:N], whole[N:])


@pytest.mark.ranks(2)
def test_the_first_ranks_seed_reproduces_everything() -> None:
    mesh = _mesh()
    t = shard(torch.ones(2 * N), mesh, Layout((Shard(0),), {0: (N, N)}))
    drawn = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed + 100 * torch.distributed.get_rank())
        drawn.append(F.dropout(t).full_tensor())
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
