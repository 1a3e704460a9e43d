"""Random operators: replicas equal, shards different, and a seed reproduces both although the ranks' seeds differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from shardtensor import ShardTensor
from shardtensor.testing import Layout, fallback_mode, shard

DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda t: torch.randint_like(t, 0, 1 << 20),
    "dropout": lambda t: F.dropout(t, 0.5),
    "normal_": lambda t: t.clone().normal_(1.0, 2.0),
    "uniform_": lambda t: t.clone().uniform_(),
    "bernoulli": lambda t: torch.bernoulli(t * 0 + 0.5),
    "bernoulli_": lambda t: t.clone().bernoulli_(0.5),
    "exponential_": lambda t: t.clone().exponential_(),
    "init": lambda t: torch.nn.init.trunc_normal_(t.clone()),
}


def _draw(name: str, layout: Layout, seed: int, shape: tuple[int, ...] = (24, 8)) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))
    t = shard(torch.ones(shape, dtype=torch.float64), mesh, layout)
    torch.manual_seed(seed + dist.get_rank())
    with fallback_mode("silent"):
        result: Any = DRAWS[name](t)
    assert isinstance(result, ShardTensor)
    local = result.to_local()
    assert local.shape == result._spec.local_shape
    gathered: list[Any] = [None] * mesh.size()
    dist.all_gather_object(gathered, local)
    if result.placements == (Replicate(),):
        assert all(torch.equal(other, gathered[0]) for other in gathered), name
    else:
        blocks = [block[:4] for block in gathered if len(block)]
        assert all(not torch.equal(a, b) for i, a in enumerate(blocks) for b in blocks[:i]), name
    return result.full_tensor()


@pytest.mark.ranks(1, 2, 3)
def test_replicas_are_equal_and_shards_differ() -> None:
    n_ranks = dist.get_world_size()
    rows = {1: (24,), 2: (8, 16), 3: (8, 0, 16)}[n_ranks]
    for name in DRAWS:
        for layout in (Layout((Replicate(),)), Layout((Shard(0),), {0: rows})):
            first, again, other = (_draw(name, layout, seed) for seed in (7, 7, 8))
            assert torch.equal(first, again), name
            assert not torch.equal(first, other), name


@pytest.mark.ranks(2)
def test_the_generator_moves_on() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    t = shard(torch.ones(6, 2), mesh, Layout((Shard(0),)))
    torch.manual_seed(3)
    first, second = torch.rand_like(t), torch.rand_like(t)
    assert not torch.equal(first.full_tensor(), second.full_tensor())
    # The ranks' own generators have moved alike, so that what they draw next for themselves stays in step.
    own = torch.rand(1)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, own)
    assert torch.equal(everyone[0], everyone[1])


@pytest.mark.ranks(2)
def test_a_dropped_path_is_dropped_on_every_rank() -> None:
    """Field case A29: a mask per sample, of shape (B, 1, 1), drawn from a tensor that is sharded elsewhere."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    t = shard(torch.ones(16, 4, 2), mesh, Layout((Shard(1),), {1: (1, 3)}))
    torch.manual_seed(dist.get_rank())
    with fallback_mode("silent"):
        keep = t.new_empty((16, 1, 1)).bernoulli_(0.5)
        result = (t * keep).to_local().amax((1, 2))
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, result)
    assert torch.equal(everyone[0], everyone[1]) and 0 < int(result.sum()) < 16


@pytest.mark.ranks(2)
def test_gradients_of_dropout_use_the_same_mask() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    t = shard(torch.ones(6, 50, dtype=torch.float64), mesh, Layout((Shard(0),), {0: (1, 5)}), requires_grad=True)
    with fallback_mode("silent"):
        result = F.dropout(t, 0.25)
        result.sum().backward()
    assert t.grad is not None
    torch.testing.assert_close(t.grad.full_tensor(), result.detach().full_tensor())
    kept = (result.detach().full_tensor() != 0).double().mean()
    assert 0.6 < float(kept) < 0.9


@pytest.mark.ranks(2)
def test_no_dropout_outside_of_training() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    t = shard(torch.ones(6, 5), mesh, Layout((Shard(0),)))
    assert torch.equal(torch.nn.Dropout(0.5).eval()(t).full_tensor(), torch.ones(6, 5))
