"""Views that had to be copied: a write that one side would miss is refused on all ranks; anything else works."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from shardtensor import ShardTensor, UnsupportedShardingError, _lost_alias
from shardtensor.testing import Layout, fallback_mode, shard

_library = torch.library.Library("alias_test", "DEF")
_library.define("first_half(Tensor(a) a) -> Tensor(a)")
for key in ("CPU", "Meta"):
    _library.impl("first_half", lambda a: a.narrow(0, 0, a.shape[0] // 2), key)
first_half: Callable[[torch.Tensor], torch.Tensor] = torch.ops.alias_test.first_half
"""A view that no rule knows, so it is made of gathered rows."""


def _sharded(*, whole: bool = False) -> ShardTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))
    layout = Layout((Replicate(),)) if whole else Layout((Shard(0),), {0: (1, 4)})
    return shard(torch.arange(10.0).view(5, 2), mesh, layout)


@pytest.mark.ranks(2)
def test_writes_to_either_side_are_refused() -> None:
    with fallback_mode("silent"):
        t = _sharded()
        view = first_half(t)
        assert torch.equal(view.full_tensor(), torch.arange(4.0).view(2, 2))  # type: ignore[attr-defined]
        for write in (lambda: t.add_(1), lambda: t.zero_(), lambda: t.detach().mul_(2), lambda: view.mul_(2)):
            with pytest.raises(UnsupportedShardingError, match="cannot share its memory") as raised:
                write()
            assert "write before taking the view" in str(raised.value)
        alias = t.detach()
        with pytest.raises(UnsupportedShardingError, match=r"aten.add_"):
            alias.add_(1)
        assert torch.equal(t.full_tensor(), torch.arange(10.0).view(5, 2))  # nothing was written


@pytest.mark.ranks(2)
def test_a_dead_view_is_in_nobodys_way() -> None:
    with fallback_mode("silent"):
        t = _sharded()
        doubled = first_half(t) * 2
        gc.collect()
        t.add_(1)
        assert torch.equal(t.full_tensor(), torch.arange(10.0).view(5, 2) + 1)
        assert torch.equal(doubled.full_tensor(), torch.arange(4.0).view(2, 2) * 2)  # type: ignore[attr-defined]


@pytest.mark.ranks(2)
def test_other_tensors_can_be_written_to() -> None:
    with fallback_mode("silent"):
        t, other = _sharded(), _sharded()
        view = first_half(t)
        other.add_(1)
        t.clone().add_(1)
        (t * 1).add_(1)
        assert torch.equal(view.full_tensor(), torch.arange(4.0).view(2, 2))  # type: ignore[attr-defined]


@pytest.mark.ranks(2)
def test_a_view_of_a_replicated_tensor_shares_its_memory() -> None:
    with fallback_mode("silent"):
        t = _sharded(whole=True)
        view = first_half(t)
        view.add_(100)
        assert torch.equal(t.full_tensor()[:3, 0], torch.tensor([100.0, 102.0, 4.0]))
        t.zero_()
        assert not bool(view.any())


@pytest.mark.ranks(2)
def test_many_views_leave_nothing_behind() -> None:
    with fallback_mode("silent"):
        t = _sharded()
        for _ in range(50):
            first_half(t)
        gc.collect()
        first_half(t)
        assert len(_lost_alias._partners) <= 3 and len(_lost_alias._partners[_lost_alias._memory(t)]) == 1


@pytest.mark.ranks(2)
def test_views_that_are_differentiable() -> None:
    with fallback_mode("silent"):
        t = _sharded()
        t.requires_grad_()
        (t.unfold(0, 3, 1) * 1).sum().backward()  # rows seen 1, 2, 3, 2, 1 times
        expected = torch.tensor([1.0, 2, 3, 2, 1]).view(5, 1).expand(5, 2)
        assert t.grad is not None and torch.equal(t.grad.full_tensor(), expected)
