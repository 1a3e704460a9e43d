"""Axis rules on operators of our own, so that nothing depends on an ops package."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import ShardTensor
from shardtensor.extending import Call, Plan, axis_plan, register_rule
from shardtensor.testing import Layout, fallback_mode, layouts_of, shard
from shardtensor_collectives import comm_trace

_library = torch.library.Library("axis_rule_test", "DEF")
_library.define("product(Tensor a, Tensor b) -> Tensor")
_library.define("sorted_rows(Tensor a, int dim) -> Tensor")
_library.define("extrema(Tensor a, int dim) -> (Tensor, Tensor)")
for name, function in {
    "product": torch.mm,
    "sorted_rows": lambda a, dim: a.sort(dim).values,
    "extrema": lambda a, dim: (a.amin(dim), a.amax(dim)),
}.items():
    _library.impl(name, function, "CPU")
    _library.impl(name, function, "Meta")
ops = torch.ops.axis_rule_test


@register_rule("axis_rule_test.product")
def _plan_product(call: Call) -> Plan | None:
    return axis_plan(call, ["mk", "kn"], ["mn"], linear="each")


@register_rule("axis_rule_test.sorted_rows")
def _plan_sorted(call: Call) -> Plan | None:
    (spec,) = call.specs
    names = "abc"[: spec.ndim]
    return axis_plan(call, [names], [names], whole=[names[call.argument("dim")]])


@register_rule("axis_rule_test.extrema")
def _plan_extrema(call: Call) -> Plan | None:
    (spec,) = call.specs
    names = list("abc"[: spec.ndim])
    dim = call.argument("dim")
    rest = names[:dim] + names[dim + 1 :]
    return axis_plan(call, [names], [rest, rest], reduce_op=None)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.ranks(1, 2, 3, 4)
def test_contraction_of_every_pair_of_layouts() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))
    a, b = _random(5, 4), _random(4, 6)
    with fallback_mode("error"):
        for first in [*layouts_of(a.shape, mesh), Layout((Replicate(),))]:
            for second in [*layouts_of(b.shape, mesh), Layout((Replicate(),))]:
                got = ops.product(shard(a, mesh, first), shard(b, mesh, second))
                assert got.full_tensor().allclose(a @ b, atol=1e-12), (first, second)


@pytest.mark.ranks(4)
def test_contraction_on_a_two_dimensional_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    a, b = _random(5, 4), _random(4, 6)
    for first in layouts_of(a.shape, mesh):
        for second in layouts_of(b.shape, mesh):
            got = ops.product(shard(a, mesh, first), shard(b, mesh, second))
            assert got.full_tensor().allclose(a @ b, atol=1e-12), (first, second)


@pytest.mark.ranks(2)
def test_a_sharded_axis_keeps_its_sizes_and_a_contracted_one_is_pending() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    a, b = _random(5, 4), _random(4, 6)
    with comm_trace() as trace:
        rows = ops.product(shard(a, mesh, Layout((Shard(0),), {0: (1, 4)})), b)
        columns = ops.product(a, shard(b, mesh, Layout((Shard(1),), {1: (6, 0)})))
        pending = ops.product(shard(a, mesh, Layout((Shard(1),), {1: (1, 3)})), b)
    assert rows._spec.sizes() == {0: (1, 4)}
    assert columns._spec.sizes() == {1: (6, 0)}
    assert pending.placements == (Partial("sum"),)
    assert trace.events == []


@pytest.mark.ranks(2)
def test_pending_operands_pass_a_product_one_at_a_time() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    rank = dist.get_rank()
    a, b = torch.arange(6.0).view(2, 3), torch.ones(3, 2)
    pending = ShardTensor.from_local(a * (rank + 1), mesh, [Partial()])
    assert ops.product(pending, b).placements == (Partial(),)
    assert torch.equal(ops.product(pending, b).full_tensor(), 3 * a @ b)
    both = ops.product(pending, ShardTensor.from_local(b, mesh, [Partial()]))
    assert torch.equal(both.full_tensor(), 3 * a @ (2 * b))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_shards_move_away_from_a_dim_that_must_be_whole_and_back(dim: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))
    x = _random(5, 4, 3)
    with fallback_mode("error"):
        for layout in layouts_of(x.shape, mesh):
            t = shard(x, mesh, layout)
            with comm_trace() as trace:
                got = ops.sorted_rows(t, dim)
            assert got._spec is t._spec
            assert torch.equal(got.full_tensor(), x.sort(dim).values)
            assert {event.collective for event in trace.events} <= {"exchange"}
            low, high = ops.extrema(t, dim)
            assert torch.equal(low.full_tensor(), x.amin(dim))
            assert torch.equal(high.full_tensor(), x.amax(dim))


@pytest.mark.ranks(2)
def test_without_another_dim_the_operand_is_gathered() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    x = _random(5)
    t = shard(x, mesh, Layout((Shard(0),), {0: (1, 4)}))
    assert torch.equal(ops.sorted_rows(t, 0).full_tensor(), x.sort().values)
    with (
        fallback_mode("error"),
        pytest.raises(NotImplementedError, match=r"axis_rule_test.sorted_rows.* gathered whole"),
    ):
        ops.sorted_rows(t, 0)


@pytest.mark.ranks(4)
def test_one_axis_moves_while_the_other_stays() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = _random(5, 4, 3)
    for layout in layouts_of(x.shape, mesh):
        for dim in range(3):
            t = shard(x, mesh, layout)
            got = ops.sorted_rows(t, dim)
            assert torch.equal(got.full_tensor(), x.sort(dim).values), (layout, dim)
