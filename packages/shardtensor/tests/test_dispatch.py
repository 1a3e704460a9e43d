"""The dispatch engine: caches, in-place writes, mixed meshes, and what a plain tensor inside may not do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import ShardTensor, _dispatch
from shardtensor.extending import Call, Plan, axis_plan, register_rule
from shardtensor.testing import Layout, fallback_mode, shard

_library = torch.library.Library("dispatch_test", "DEF")
_library.define("double(Tensor a) -> Tensor")
_library.define("double_(Tensor(a!) a) -> Tensor(a!)")
_library.define("scaled(Tensor a, float factor, *, bool negate=False) -> Tensor")
for key in ("CPU", "Meta"):
    _library.impl("double", lambda a: a + a, key)
    _library.impl("double_", lambda a: a.add_(a), key)
    _library.impl("scaled", lambda a, factor, negate=False: a * (-factor if negate else factor), key)
ops = torch.ops.dispatch_test

n_plans_made = 0


@register_rule("dispatch_test.double", "dispatch_test.scaled")
def _plan_unary(call: Call) -> Plan | None:
    global n_plans_made
    n_plans_made += 1
    names = tuple(range(call.specs[0].ndim))
    return axis_plan(call, [names], [names], linear="each")


@register_rule("dispatch_test.double_")
def _plan_in_place(call: Call) -> Plan | None:
    names = tuple(range(call.specs[0].ndim))
    return axis_plan(call, [names], [names], pinned=0, linear="each")


def _sharded(rows: tuple[int, ...] = (1, 4)) -> tuple[torch.Tensor, ShardTensor]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    x = torch.arange(10.0).view(5, 2)
    return x, shard(x, mesh, Layout((Shard(0),), {0: rows}))


@pytest.mark.ranks(2)
def test_a_plan_is_made_once_per_layout_and_static_argument() -> None:
    _, t = _sharded()
    _, other = _sharded((2, 3))
    before = n_plans_made
    for _ in range(3):
        ops.double(t)
        ops.double(other)
        ops.scaled(t, 2.0)
        ops.scaled(t, 3.5)  # another value of a float changes no layout
        ops.scaled(t, 2.0, negate=True)
    assert n_plans_made - before == 4
    assert torch.equal(ops.scaled(t, 3.5, negate=True).full_tensor(), -3.5 * torch.arange(10.0).view(5, 2))


@pytest.mark.ranks(2)
def test_caches_stay_bounded() -> None:
    """Field case D4: a new length at every step."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    for n_rows in range(2, 700):
        t = shard(torch.ones(n_rows), mesh, Layout((Shard(0),)))
        for _ in range(8):
            t = ops.double(t)
        ops.scaled(t, 1.0)
    assert len(_dispatch._direct) <= _dispatch.N_CACHED_PLANS
    assert len(_dispatch._plans) <= _dispatch.N_CACHED_PLANS


@pytest.mark.ranks(2)
def test_in_place_writes_reach_the_shard_itself() -> None:
    x, t = _sharded()
    local = t._local_tensor
    for factor in (2, 4, 8):
        assert ops.double_(t) is t
        assert t._local_tensor is local
        assert torch.equal(t.full_tensor(), factor * x)


@pytest.mark.ranks(2)
def test_an_in_place_operator_without_a_rule_comes_home() -> None:
    x, t = _sharded()
    spec, local = t._spec, t._local_tensor
    assert t.cumsum_(0) is t
    assert t._spec is spec
    assert t._local_tensor is local
    assert torch.equal(t.full_tensor(), x.cumsum(0))
    plain = torch.zeros(5, 2)
    assert plain.copy_(t) is plain
    assert torch.equal(plain, x.cumsum(0))


@pytest.mark.ranks(2)
def test_a_pending_target_is_reduced_before_a_write_that_is_not_linear() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    t = ShardTensor.from_local(torch.tensor([1.0, -5.0]) + dist.get_rank(), mesh, [Partial()])
    t.relu_()
    assert t.placements == (Replicate(),)
    assert t.full_tensor().tolist() == [3.0, 0.0]


@pytest.mark.ranks(4)
def test_tensors_on_two_meshes_do_not_mix() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    first = shard(torch.ones(4), mesh["a"], Layout((Shard(0),)))
    second = shard(torch.ones(4), mesh["b"], Layout((Shard(0),)))
    with pytest.raises(ValueError, match=r"ShardTensors on two meshes meet"):
        first + second


@pytest.mark.ranks(2)
def test_torch_raises_its_own_error_for_wrong_shapes_on_all_ranks() -> None:
    _, t = _sharded()
    with pytest.raises(RuntimeError, match=r"\[3, 2\].*\[5, 2\]"):
        t + torch.ones(3, 2)


@pytest.mark.ranks(2)
def test_errors_name_operator_layout_and_advice() -> None:
    _, t = _sharded()
    with fallback_mode("error"), pytest.raises(NotImplementedError) as caught:
        torch.linalg.svdvals(t)
    text = str(caught.value)
    assert "aten." in text
    assert "(5, 2)  Shard(0) on axis 'domain', rows 1,4" in text
    assert "try     shard another dim" in text
