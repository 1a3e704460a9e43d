"""Every collective under ``torch.compile(fullgraph=True)``: the same values and gradients as eager."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from rank_helpers import ramp
from torch.utils._python_dispatch import return_and_correct_aliasing

import shardtensor_collectives as sc
from shardtensor_collectives._torch_private import is_traced
from shardtensor_spec import plan_exchange

SIZES = (3, 1)


def world():
    return dist.group.WORLD


def halo_plan(circular=()):
    owned, wanted = [((0, 3), (0, 2)), ((3, 4), (0, 2))], [((-1, 5), (0, 2)), ((2, 5), (0, 2))]
    return plan_exchange(owned, wanted, dist.get_rank(), global_shape=(4, 2), circular=circular)


def own_rows():
    return SIZES[dist.get_rank()]


CALLS = {
    "all_gather_v": lambda x: sc.all_gather_v(x, SIZES, 0, world()),
    "all_gather_v columns": lambda x: sc.all_gather_v(x.t(), SIZES, 1, world()),
    "reduce_scatter_v": lambda x: sc.reduce_scatter_v(x, SIZES, 0, world()),
    "reduce_scatter_v mean": lambda x: sc.reduce_scatter_v(x.t(), SIZES, 1, world(), op="mean"),
    "all_to_all_v": lambda x: sc.all_to_all_v(x, (1, 1), SIZES, world(), send_dim=1, receive_dim=0),
    "all_to_all_v back": lambda x: sc.all_to_all_v(x, SIZES, (1, 1), world(), send_dim=0, receive_dim=1),
    "scatter_v": lambda x: sc.scatter_v(x, SIZES, 0, world(), source=1),
    "gather_v": lambda x: sc.gather_v(x, SIZES, 0, world(), destination=1),
    "broadcast": lambda x: sc.broadcast(x, world(), source=1),
    "reduce": lambda x: sc.reduce(x, world(), destination=1),
    "all_reduce": lambda x: sc.all_reduce(x, world()),
    "all_reduce mean": lambda x: sc.all_reduce(x, world(), op="mean"),
    "all_reduce async": lambda x: sc.all_reduce(x, world(), async_op=True).wait(),
    "exchange": lambda x: sc.exchange(x, halo_plan(), world(), fill=5),
    "exchange circular": lambda x: sc.exchange(x, halo_plan((0,)), world()),
    "exchange_adjoint": lambda x: sc.exchange_adjoint(x, halo_plan(), world()),
    "exchange_adjoint circular": lambda x: sc.exchange_adjoint(x, halo_plan((0,)), world()),
    "ring_shift": lambda x: sc.ring_shift(x, SIZES[1 - dist.get_rank()], 0, world()).wait(),
}


def source_for(name):
    rows = {"exchange_adjoint": (6, 3)[dist.get_rank()]}.get(name.split()[0], own_rows())
    if name.startswith(("reduce_scatter", "scatter", "broadcast", "reduce", "all_reduce")):
        rows = 4
    if name == "all_to_all_v back":
        return ramp(4, 1) + dist.get_rank()
    return ramp(rows, 2) + 10 * dist.get_rank()


def value_and_grad(call, x):
    x = x.clone().requires_grad_()
    result = call(x)
    (grad,) = torch.autograd.grad((result * torch.sin(ramp(*result.shape) + dist.get_rank())).sum(), x)
    return result.detach(), grad


# Plans are made outside of the compiled function, as the dispatch engine does.
@pytest.mark.ranks(2, timeout=60)
@pytest.mark.parametrize("name", list(CALLS))
def test_function_in_a_compiled_region(name):
    call = CALLS[name]
    if name.startswith("exchange"):
        plan, operation = halo_plan((0,) if "circular" in name else ()), getattr(sc, name.split()[0])
        options = {"fill": 5} if name == "exchange" else {}
        call = lambda x: operation(x, plan, world(), **options)  # noqa: E731
    x = source_for(name)
    expected, expected_grad = value_and_grad(lambda x: call(x * 2) + 1, x)
    compiled = torch.compile(lambda x: call(x * 2) + 1, fullgraph=True, backend="aot_eager")
    value, grad = value_and_grad(compiled, x)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(grad, expected_grad)


class Wrapper(torch.Tensor):
    """A tensor subclass that communicates below autograd, as a sharded tensor does."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=False)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(tensors, _context, _size, _stride):
        return Wrapper(tensors["inner"])

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, _types, args, kwargs=None):
        unwrapped = [a.inner if isinstance(a, Wrapper) else a for a in args]
        if function is torch.ops.aten.sin.default:
            communicated = unwrapped[0]
            for name in Wrapper.calls:
                communicated = CALLS[name](communicated)
            return Wrapper(communicated)
        result = function(*unwrapped, **(kwargs or {}))
        wrapped = Wrapper(result) if isinstance(result, torch.Tensor) else result
        return return_and_correct_aliasing(function, args, kwargs or {}, wrapped)


@pytest.mark.ranks(2, timeout=60)
@pytest.mark.parametrize(
    ("calls", "rows"),
    [
        (["all_gather_v", "reduce_scatter_v"], None),
        (["all_reduce", "all_reduce mean", "broadcast", "reduce", "scatter_v"], 4),
        (["exchange", "exchange_adjoint"], None),
        (["all_to_all_v", "all_to_all_v back"], None),
        (["ring_shift"], None),
        (["gather_v"], None),
    ],
)
def test_collectives_below_autograd(calls, rows):
    Wrapper.calls = calls
    x = ramp(rows or own_rows(), 2) + 10 * dist.get_rank()
    assert not is_traced(x)
    expected = x * 3
    for name in calls:
        expected = CALLS[name](expected)
    if calls == ["ring_shift"]:  # the wrapper's shape is that of its inner tensor, so it may change
        assert expected.shape[0] == SIZES[1 - dist.get_rank()]

    def function(w):
        return torch.sin(w * 3)

    value = torch.compile(function, fullgraph=True, backend="aot_eager")(Wrapper(x))
    torch.testing.assert_close(value.inner, expected)


@pytest.mark.ranks(2, timeout=60)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.complex64, torch.bfloat16], ids=str)
def test_traced_dtypes(dtype):
    x = (ramp(own_rows(), 2) % 2).to(dtype)
    full = sc.all_gather_v(x, SIZES, 0, world())
    compiled = torch.compile(lambda x: sc.all_gather_v(x, SIZES, 0, world()), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), full)
    reduced = torch.compile(lambda x: sc.all_reduce(x, world()), fullgraph=True, backend="aot_eager")(full)
    assert torch.equal(reduced, sc.all_reduce(full, world()))


@pytest.mark.ranks(1)
def test_group_of_one_compiles_without_collectives():
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph.code)
        return graph

    compiled = torch.compile(lambda x: sc.all_gather_v(x, (2,), 0, world()) + 1, fullgraph=True, backend=backend)
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2) + 1)
    assert "c10d" not in graphs[0] and "all_to_all" not in graphs[0]


@pytest.mark.ranks(2, timeout=60)
def test_placeholders_do_not_poison_a_traced_broadcast():
    x = torch.full((2,), float("nan") if dist.get_rank() == 0 else 3.0, requires_grad=True)
    compiled = torch.compile(lambda x: sc.broadcast(x, world(), source=1), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), torch.full((2,), 3.0))
