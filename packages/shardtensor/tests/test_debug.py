"""``SHARDTENSOR_DEBUG=1``: a rank that goes its own way is named on all ranks, instead of a hang."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardtensor import LayoutMismatchError, ShardTensor, _debug, _dispatch, _function
from shardtensor.testing import Layout, fallback_mode, shard


def test_the_environment_switches_it_on() -> None:
    environment = {**os.environ, "SHARDTENSOR_DEBUG": "1", "OMP_NUM_THREADS": "1"}
    script = "from shardtensor import _debug; raise SystemExit(7 if _debug.enabled else 1)"
    finished = subprocess.run([sys.executable, "-c", script], env=environment, timeout=100, check=False)
    assert finished.returncode == 7


def test_it_is_off_by_default() -> None:
    assert _debug.enabled == (os.environ.get("SHARDTENSOR_DEBUG", "0") not in ("", "0"))


def _switch(on: bool) -> None:
    _debug.enabled = on
    _dispatch.forget_plans()
    _function._served.clear()


Pair = tuple[Callable[[Any], Any], Callable[[Any], Any]]

DIFFERENT: dict[str, tuple[str, Pair]] = {
    "operator": ("aten.sub.Tensor", (lambda t: t * 3 + 1, lambda t: t * 3 - 1)),
    "number": (r"7\.0", (lambda t: t * 3.0, lambda t: t * 7.0)),
    "plain values": ("checksum", (lambda t: t * torch.ones(2), lambda t: t * torch.tensor([1.0, 2.0]))),
    "plain shape": (r"plain \(1, 2\)", (lambda t: t + torch.ones(2), lambda t: t + torch.ones(1, 2))),
    "layout": (r"rows 0,4", (lambda t: t.clone(), lambda t: _other(t).clone())),
    "dtype": ("torch.float64", (lambda t: t + 1, lambda t: _double(t) + 1)),
    "shape in error": (r"plain \(5,\)", (lambda t: t + torch.ones(2), lambda t: t + torch.ones(5))),
    "list": ("aten.cat", (lambda t: torch.cat([t, t]), lambda t: torch.cat([t, t, t]))),
    "redistribution": ("redistribute", (lambda t: t.full_tensor(), lambda t: t.redistribute(placements=[Shard(1)]))),
    "gather or operator": ("redistribute", (lambda t: t.clone(), lambda t: t.full_tensor())),
    "function": ("1, 2", (lambda t: F.linear(t, torch.ones(3, 2)), lambda t: F.linear(t, torch.ones(1, 2)))),
}


def _other(t: ShardTensor) -> ShardTensor:
    return shard(torch.ones(4, 2), t.device_mesh, Layout((Shard(0),), {0: (0, 4)}))


def _double(t: ShardTensor) -> ShardTensor:
    return shard(torch.ones(4, 2, dtype=torch.float64), t.device_mesh, Layout((Shard(0),), {0: (1, 3)}))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", DIFFERENT)
def test_one_rank_goes_its_own_way(kind: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    t = shard(torch.ones(4, 2), mesh, Layout((Shard(0),), {0: (1, 3)}))
    told, calls = DIFFERENT[kind]
    _switch(True)
    try:
        message = "rank 1 is about to run something else than rank 0"
        with fallback_mode("silent"), pytest.raises(LayoutMismatchError, match=message) as raised:
            calls[dist.get_rank()](t)
        assert re.search(told, str(raised.value)), str(raised.value)
        assert len(raised.value.inputs) == 2
    finally:
        _switch(False)


@pytest.mark.ranks(1, 2)
def test_agreeing_ranks_pass() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))
    t = shard(torch.ones(4, 2), mesh, Layout((Shard(0),)), requires_grad=True)
    _switch(True)
    try:
        with fallback_mode("silent"):
            weight = torch.ones(3, 2, requires_grad=True)
            generator = torch.Generator()
            for _ in range(2):
                F.linear(t * 2, weight).relu().sum().backward()
            t.detach().clone().normal_(generator=generator)
            torch.cat([t, t]).full_tensor()
            t + torch.ones(0, 1, dtype=torch.complex64).sum()
            assert torch.equal(weight.grad, torch.full((3, 2), 16.0))  # type: ignore[arg-type]
    finally:
        _switch(False)
