"""Matrix products on every layout, against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import ShardTensor
from shardtensor.testing import Layout, check_op, layouts_of, shard
from shardtensor_collectives import comm_trace

REPLICATED = Layout((Replicate(),))


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("domain",))


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


MATMUL_SHAPES = [
    ((5, 4), (4, 3)),
    ((4,), (4, 3)),
    ((5, 4), (4,)),
    ((4,), (4,)),
    ((2, 5, 4), (4, 3)),
    ((2, 5, 4), (4,)),
    ((5, 4), (2, 4, 3)),
    ((4,), (2, 4, 3)),
    ((2, 5, 4), (2, 4, 3)),
    ((2, 3, 5, 4), (2, 3, 4, 5)),
    ((2, 1, 5, 4), (3, 4, 2)),
    ((1, 5, 4), (2, 4, 3)),
]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("shapes", MATMUL_SHAPES, ids=str)
def test_matmul_of_any_dims(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    mesh = _mesh()
    first, second = _random(*shapes[0]), _random(*shapes[1])
    for layout in layouts_of(first.shape, mesh):
        check_op(torch.matmul, first, second, mesh=mesh, layouts=[layout, None], fallback="error")
    for layout in layouts_of(second.shape, mesh):
        check_op(torch.matmul, first, second, mesh=mesh, layouts=[None, layout], fallback="error")
        for other in layouts_of(first.shape, mesh)[1::2]:
            check_op(lambda a, b: a @ b, first, second, mesh=mesh, layouts=[other, layout], fallback="error")


@pytest.mark.ranks(2)
def test_plain_operand_on_the_left() -> None:
    mesh = _mesh()
    first, second = _random(3, 5), _random(5, 4)
    for layout in layouts_of(second.shape, mesh):
        check_op(lambda a, b: a @ b, first, second, mesh=mesh, layouts=[None, layout], fallback="error")


CALLS = {
    "mm": (torch.mm, (5, 4), (4, 3)),
    "bmm": (torch.bmm, (2, 5, 4), (2, 4, 3)),
    "mv": (torch.mv, (5, 4), (4,)),
    "dot": (torch.dot, (5,), (5,)),
    "outer": (torch.outer, (5,), (3,)),
    "inner": (torch.inner, (2, 5), (3, 5)),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", CALLS)
def test_products_below_autograd(name: str) -> None:
    mesh = _mesh()
    function, *shapes = CALLS[name]
    first, second = _random(*shapes[0]), _random(*shapes[1])
    for layout in layouts_of(first.shape, mesh):
        check_op(function, first, second, mesh=mesh, layouts=[layout, None])
        for other in layouts_of(second.shape, mesh)[::2]:
            check_op(function, first, second, mesh=mesh, layouts=[layout, other])


SUMS = {
    "addmm": (torch.addmm, (5, 4), (4, 3), [(5, 3), (3,), (5, 1), (1, 3), ()]),
    "baddbmm": (torch.baddbmm, (2, 5, 4), (2, 4, 3), [(2, 5, 3), (1, 1, 3)]),
    "addbmm": (torch.addbmm, (2, 5, 4), (2, 4, 3), [(5, 3), (1, 3)]),
    "addmv": (torch.addmv, (5, 4), (4,), [(5,), (1,)]),
    "addr": (torch.addr, (5,), (3,), [(5, 3), (3,)]),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", SUMS)
def test_what_is_added_is_added_once(name: str) -> None:
    mesh = _mesh()
    function, first_shape, second_shape, added_shapes = SUMS[name]
    first, second = _random(*first_shape), _random(*second_shape)
    for added_shape in added_shapes:
        added = _random(*added_shape)
        for layout in layouts_of(first.shape, mesh)[::2]:
            for kwargs in ({}, {"beta": 0.5, "alpha": 2.0}):
                check_op(function, added, first, second, kwargs=kwargs, mesh=mesh, layouts=[None, layout, None])
        for layout in layouts_of(added.shape, mesh)[::2]:
            check_op(
                function, added, first, second, mesh=mesh, layouts=[layout, None, layouts_of(second.shape, mesh)[1]]
            )


@pytest.mark.ranks(2)
def test_addmm_reads_the_added_tensor_once_and_makes_no_collective() -> None:
    mesh = _mesh()
    first = shard(_random(5, 4), mesh, Layout((Shard(1),), {1: (1, 3)}))
    second = shard(_random(4, 3), mesh, Layout((Shard(0),), {0: (1, 3)}))
    with comm_trace() as trace:
        result = torch.addmm(torch.ones(3, dtype=torch.float64), first, second)
    assert result.placements == (Partial(),) and not trace.events


EINSUMS = [
    ("ij,jk->ik", (5, 4), (4, 3)),
    ("bhqd,bhkd->bhqk", (2, 3, 5, 4), (2, 3, 6, 4)),
    ("bhqk,bhkd->bhqd", (2, 3, 5, 6), (2, 3, 6, 4)),
    ("bsd,hdk->bhsk", (2, 5, 4), (3, 4, 2)),
    ("...i,io->...o", (2, 5, 4), (4, 3)),
    ("bi,bj", (3, 4), (3, 5)),
    ("bixy,ioxy->boxy", (2, 3, 4, 5), (3, 2, 4, 5)),
    ("ij,k->k", (3, 4), (5,)),
]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(("equation", "first_shape", "second_shape"), EINSUMS, ids=[e[0] for e in EINSUMS])
def test_einsum(equation: str, first_shape: tuple[int, ...], second_shape: tuple[int, ...]) -> None:
    mesh = _mesh()
    first, second = _random(*first_shape), _random(*second_shape)

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.einsum(equation, a, b)

    for layout in layouts_of(first.shape, mesh):
        check_op(run, first, second, mesh=mesh, layouts=[layout, None])
        for other in layouts_of(second.shape, mesh)[1::3]:
            check_op(run, first, second, mesh=mesh, layouts=[layout, other])


@pytest.mark.ranks(2)
def test_einsum_of_one_three_and_repeated_operands() -> None:
    mesh = _mesh()
    a, b, c = _random(5, 4), _random(4, 3), _random(3, 2)
    for layout in layouts_of(a.shape, mesh):
        check_op(lambda x: torch.einsum("ij->ji", x), a, mesh=mesh, layouts=[layout])
        check_op(lambda x: torch.einsum("ij->j", x), a, mesh=mesh, layouts=[layout])
        check_op(
            lambda x, y, z: torch.einsum("ij,jk,kl->il", x, y, z), a, b, c, mesh=mesh, layouts=[layout, None, None]
        )
        check_op(lambda x, y: torch.einsum("ij,jk", [x, y]), a, b, mesh=mesh, layouts=[layout, None])
    square = _random(4, 4)
    for layout in layouts_of(square.shape, mesh):
        check_op(lambda x, y: torch.einsum("ii,ij->j", x, y), square, square, mesh=mesh, layouts=[layout, None])


@pytest.mark.ranks(2, 3)
def test_bilinear() -> None:
    mesh = _mesh()
    first, second, weight, bias = _random(2, 5, 4), _random(2, 5, 3), _random(2, 4, 3), _random(2)
    for layout in layouts_of(first.shape, mesh):
        check_op(F.bilinear, first, second, weight, bias, mesh=mesh, layouts=[layout, None, None, None])


@pytest.mark.ranks(4)
def test_two_dimensional_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "domain"))
    first, second = _random(3, 5, 4), _random(4, 6)
    for layout in layouts_of(first.shape, mesh):
        for other in [*layouts_of(second.shape, mesh), None]:
            check_op(torch.matmul, first, second, mesh=mesh, layouts=[layout, other], fallback="error")


@pytest.mark.ranks(4)
def test_field_case_a33_contracting_nested_shards_cut_in_different_orders() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "domain"))
    first, second = _random(4, 4), _random(4, 4)
    nested = Layout((Shard(1), Shard(1)), {1: (1, 0, 2, 1)})
    for other in [
        Layout((Shard(0), Shard(0))),
        Layout((Shard(0), Shard(0)), {0: (0, 2, 1, 1)}),
        Layout((Shard(0), Shard(1))),
    ]:
        check_op(torch.matmul, first, second, mesh=mesh, layouts=[nested, other], fallback="error")
        check_op(torch.mm, first, second, mesh=mesh, layouts=[nested, other])


@pytest.mark.ranks(2)
def test_field_case_a2_operands_cut_at_different_places() -> None:
    mesh = _mesh()
    first, second = _random(5, 4), _random(4, 3)
    for sizes in [(1, 3), (3, 1), (0, 4), (4, 0)]:
        layouts = [Layout((Shard(1),), {1: (1, 3)}), Layout((Shard(0),), {0: sizes})]
        check_op(lambda a, b: a @ b, first, second, mesh=mesh, layouts=layouts, fallback="error")


@pytest.mark.ranks(2)
def test_pending_operands() -> None:
    mesh = _mesh()
    rank = torch.distributed.get_rank()
    value = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    pending = ShardTensor.from_local(value * (1 + rank), mesh, [Partial()])
    whole, other = value * 3, _random(3, 4)
    with comm_trace() as trace:
        product = pending @ other
    assert product.placements == (Partial(),) and not trace.events
    assert torch.allclose(product.full_tensor(), whole @ other)
    assert torch.allclose((pending @ pending.t()).full_tensor(), whole @ whole.t())
    contracted = shard(other, mesh, Layout((Shard(0),), {0: (1, 2)}))
    assert torch.allclose((pending @ contracted).full_tensor(), whole @ other)


@pytest.mark.ranks(2)
def test_complex_operands() -> None:
    mesh = _mesh()
    first = torch.randn(2, 5, 4, dtype=torch.complex128)
    second = torch.randn(4, 3, dtype=torch.complex128)

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(a @ b)

    for layout in layouts_of(first.shape, mesh):
        check_op(run, first, second, mesh=mesh, layouts=[layout, None])


@pytest.mark.ranks(2)
def test_out_and_wrong_shapes() -> None:
    mesh = _mesh()
    first = shard(_random(5, 4), mesh, Layout((Shard(0),), {0: (1, 4)}))
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        first @ _random(3, 3)
    out = shard(torch.zeros(5, 3, dtype=torch.float64), mesh, Layout((Shard(0),), {0: (2, 3)}))
    other = _random(4, 3)
    assert torch.matmul(first, other, out=out) is out
    assert torch.allclose(out.full_tensor(), first.full_tensor() @ other)
