"""Reductions on every layout, against plain torch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from shardtensor import ShardTensor
from shardtensor.testing import Layout, check_op, fallback_mode, layouts_of, shard
from shardtensor_collectives import comm_trace


def _mesh(world: int):  # type: ignore[no-untyped-def]
    return init_device_mesh("cpu", (world,), mesh_dim_names=("domain",))


def _mesh2x2():  # type: ignore[no-untyped-def]
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "domain"))


def _world() -> int:
    return torch.distributed.get_world_size()


def _cut(x, sizes, dim=0, **kwargs):  # type: ignore[no-untyped-def]
    return shard(x, _mesh(_world()), Layout((Shard(dim),), {dim: sizes}), **kwargs)


DIFFERENTIABLE = {
    "sum": torch.sum,
    "mean": torch.mean,
    "amax": torch.amax,
    "amin": torch.amin,
    "var": torch.var,
    "std": torch.std,
    "norm": torch.linalg.vector_norm,
    "logsumexp": torch.logsumexp,
    "nansum": torch.nansum,
    "nanmean": torch.nanmean,
}


@pytest.mark.ranks(1, 2, 3, 4)
def test_differentiable_reductions_over_any_dims() -> None:
    mesh = _mesh(_world())
    x = torch.randn(5, 3, 2, dtype=torch.float64)
    forms = [((0,), False), ((0, 2), True), ((1, -1), False), ((0, 1, 2), False)]
    for index, layout in enumerate(layouts_of(x.shape, mesh, dims=(0, 1))):
        for offset, function in enumerate(DIFFERENTIABLE.values()):
            # Two forms each, other ones for every pair of layout and function: all of them would take minutes.
            for dims, keepdim in (forms[(index + offset) % 4], forms[(index + offset + 2) % 4]):
                check_op(
                    lambda t, f=function, d=dims, k=keepdim: f(t, dim=d, keepdim=k),
                    x,
                    mesh=mesh,
                    layouts=[layout],
                    fallback="error",
                )


@pytest.mark.ranks(1, 3)
def test_forms_of_a_call() -> None:
    mesh = _mesh(_world())
    x = torch.randn(5, 3, 2, dtype=torch.float64)
    forms = [
        lambda t: t.sum(),
        lambda t: t.sum(1),
        lambda t: t.sum((0, 1)),
        lambda t: t.sum(axis=0, keepdims=True),
        lambda t: t.sum(dim=(), keepdim=True),
        lambda t: t.mean(-1, True),
        lambda t: t.mean(dim=0),
        lambda t: torch.mean(input=t, dim=[0, 2]),
        lambda t: t.sum(dtype=torch.float32),
        lambda t: t.mean(0, dtype=torch.float32),
        lambda t: t.var(),
        lambda t: t.var(0, unbiased=False),
        lambda t: t.var(0, False),
        lambda t: t.std((0, 1), correction=2, keepdim=True),
        lambda t: torch.var_mean(t, 0),
        lambda t: torch.std_mean(t, (0, 1), correction=0),
        lambda t: t.norm(),
        lambda t: t.norm(dim=0),
        lambda t: torch.linalg.vector_norm(t, 3, 0),
        lambda t: torch.linalg.vector_norm(t, 1.5),
        lambda t: torch.linalg.vector_norm(t, 1, 0),
        lambda t: torch.linalg.vector_norm(t, math.inf, (0, 1)),
        lambda t: torch.linalg.vector_norm(t, -math.inf, 0),
        lambda t: torch.linalg.vector_norm(t, 0, 0),
        lambda t: t.max(),
        lambda t: t.min(),
        lambda t: t.max(0).values,
        lambda t: t.max(0, keepdim=True)[0],
        lambda t: torch.min(t, dim=1).values,
        lambda t: torch.max(t, t * 0.5),
        lambda t: t.aminmax(dim=0),
        lambda t: torch.aminmax(t),
        lambda t: t.prod(),
        lambda t: t.prod(0),
        lambda t: torch.prod(t, 1, keepdim=True),
        lambda t: t.median(0).values,
        lambda t: t.kthvalue(2, 0).values,
        lambda t: t.logsumexp(0),
        lambda t: torch.logsumexp(t, (0, 1), keepdim=True),
    ]
    for layout in layouts_of(x.shape, mesh, dims=(0, 1))[::2]:
        for form in forms:
            check_op(form, x, mesh=mesh, layouts=[layout], fallback="silent", tolerance=1e-6)


@pytest.mark.ranks(1, 3, 4)
def test_reductions_without_gradient() -> None:
    mesh = _mesh(_world())
    floats = torch.tensor([[3.0, 7, 7, 1, 2], [7, 0, 7, 3, -1], [7, -2, 1, 0, 5]])
    functions = [
        torch.argmax,
        torch.argmin,
        lambda t: t.argmax(0),
        lambda t: t.argmax(1, keepdim=True),
        lambda t: t.argmin(-1),
        lambda t: t.max(1),
        lambda t: t.min(0),
        lambda t: t.amax((0, 1)),
        lambda t: t.sum(1),
        lambda t: torch.count_nonzero(t),
        lambda t: torch.count_nonzero(t, dim=1),
        lambda t: (t > 0).any(),
        lambda t: (t > 0).all(0),
        lambda t: (t > 0).any((0, 1)),
        lambda t: t.bool().any(1, keepdim=True),
        lambda t: (t > 0).sum(0),
        lambda t: (t > 0).max(1),
        lambda t: t.prod(1),
        lambda t: t.amin(1),
    ]
    for x in (floats, floats.to(torch.int64), floats.to(torch.int32)):
        for layout in layouts_of(x.shape, mesh):
            for function in functions:
                check_op(function, x, mesh=mesh, layouts=[layout], gradient=False, fallback="error")


@pytest.mark.ranks(3)
def test_not_a_number_wins_as_in_torch() -> None:
    x = torch.tensor([[1.0, math.nan, 3.0, math.nan, -math.inf], [math.inf, -math.inf, 2.0, 0.0, -0.0]])
    for sizes in [(1, 3, 1), (0, 2, 3), (4, 0, 1)]:
        t = _cut(x, sizes, dim=1)
        for function in [
            lambda t: t.amax(1),
            lambda t: t.amin(1),
            lambda t: t.max(),
            lambda t: t.min(),
            lambda t: t.argmax(1),
            lambda t: t.argmin(1),
            lambda t: t.max(1).values,
            lambda t: t.min(1).indices,
            lambda t: t.logsumexp(1),
            lambda t: torch.nansum(t[:1], 1),
            lambda t: torch.linalg.vector_norm(t, math.inf, 1),
        ]:
            assert torch.equal(function(t).full_tensor().nan_to_num(7.5), function(x).nan_to_num(7.5))


@pytest.mark.ranks(4)
def test_means_over_uneven_shards() -> None:
    """Field case A1: every element counts the same, wherever it is."""
    x = torch.arange(10.0)
    t = _cut(x, (2, 5, 0, 3), requires_grad=True)
    assert t.mean().item() == 4.5
    assert abs(t.std().item() - 3.02765) < 1e-5
    for function in (torch.mean, torch.std, torch.var):
        leaf = x.clone().requires_grad_()
        function(leaf).backward()
        (gradient,) = torch.autograd.grad(function(t), t)
        assert gradient.full_tensor().allclose(leaf.grad)
        assert gradient._local_tensor.shape == t._local_tensor.shape


@pytest.mark.ranks(4)
def test_reading_a_scalar_of_a_pending_sum() -> None:
    """Field case A4."""
    t = _cut(torch.arange(10.0), (2, 5, 0, 3))
    total = t.sum()
    assert total.item() == 45
    assert float(total) == 45
    assert int(total) == 45
    assert bool(total > 44)
    assert total.cpu().numpy() == 45
    assert f"{total:.0f}" == "45"


@pytest.mark.ranks(3)
def test_truth_values_are_not_counted() -> None:
    """Field case A15."""
    t = _cut(torch.ones(4), (1, 2, 1))
    assert (t > 0).any().float().item() == 1.0
    assert (t > 0).all().int().item() == 1
    assert (t > 0).any().sum().item() == 1
    assert (t > 0).any(0).float().full_tensor().item() == 1.0
    mixed = _cut(torch.tensor([1.0, 1.0, -1.0, 1.0]), (1, 2, 1))
    assert (mixed > 0).any().int().item() == 1
    assert (mixed > 0).all().int().item() == 0
    assert not torch.isnan(t).any()
    if torch.isnan(t * math.nan).any():
        return
    raise AssertionError("NaN was not seen")


@pytest.mark.ranks(4)
def test_empty_shards() -> None:
    """Field case C2."""
    x = torch.arange(6.0).view(2, 3) + 1
    t = _cut(x, (1, 0, 1, 0))
    with fallback_mode("error"):
        assert t.max().item() == 6
        assert t.amax(0).full_tensor().tolist() == [4, 5, 6]
        assert t.min().item() == 1
        assert torch.linalg.vector_norm(t, math.inf).item() == 6
        assert t.argmax().item() == 5
        assert t.prod().item() == 720
        assert t.mean().item() == 3.5
        assert abs(t.std().item() - x.std().item()) < 1e-6
        assert bool(t.all()) and bool(t.any())
        assert abs(t.logsumexp((0, 1)).item() - x.logsumexp((0, 1)).item()) < 1e-6
    mesh = _mesh(4)
    for function in [
        torch.max,
        torch.min,
        lambda t: t.amax(0),
        lambda t: torch.linalg.vector_norm(t, math.inf),
        torch.prod,
        torch.mean,
        torch.std,
        lambda t: t.logsumexp(0),
        lambda t: t.max(0).values,
        lambda t: t.softmax(0),
    ]:
        check_op(function, x.double(), mesh=mesh, layouts=[Layout((Shard(0),), {0: (1, 0, 1, 0)})])


@pytest.mark.ranks(4)
def test_product_with_zeros_and_its_second_derivative() -> None:
    for values in ([1.0, 2, 3, 4, 5], [1.0, 0, 3, 4, 5], [1.0, 0, 3, 0, 5]):
        x = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        t = _cut(x.detach(), (2, 1, 0, 2), requires_grad=True)
        weights = torch.arange(1.0, 6.0, dtype=torch.float64)
        (want,) = torch.autograd.grad(x.prod(), x, create_graph=True)
        (got,) = torch.autograd.grad(t.prod(), t, create_graph=True)
        assert got.full_tensor().allclose(want)
        (want,) = torch.autograd.grad((want * weights).sum(), x)
        (got,) = torch.autograd.grad((got * weights).sum(), t)
        assert got.full_tensor().allclose(want), (got.full_tensor(), want)


@pytest.mark.ranks(1, 3)
def test_gradients_of_gradients() -> None:
    x = torch.randn(5, 3, dtype=torch.float64)
    sizes = (5,) if _world() == 1 else (1, 0, 4)
    for function in [
        lambda t: (t * t).sum() ** 2,
        lambda t: (t**3).mean(0).pow(2).sum(),
        lambda t: t.sum(1).pow(3).mean(),
        lambda t: t.var(0).pow(2).sum(),
        lambda t: (t**3).max(0).values.pow(2).sum(),
        lambda t: t.logsumexp(0).pow(2).sum(),
    ]:
        plain = x.clone().requires_grad_()
        t = _cut(x, sizes, requires_grad=True)
        for leaf in (plain, t):
            (first,) = torch.autograd.grad(function(leaf), leaf, create_graph=True)
            (first * first).sum().backward()
        assert t.grad.full_tensor().allclose(plain.grad), function


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operator makes on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (list, tuple)) else [result]:
            if type(value) is torch.Tensor:
                self.numel = max(self.numel, value.untyped_storage().nbytes() // value.element_size())
        return result


@pytest.mark.ranks(4)
def test_no_gradient_is_of_global_size() -> None:
    n_rows, n_columns = 64, 32
    x = torch.randn(n_rows, n_columns)
    w = torch.randn(n_columns, 8)
    for loss in [
        lambda t: (t @ w).mean(),
        lambda t: (t @ w).sum(),
        lambda t: t.var(),
        lambda t: t.std(0).sum(),
        lambda t: t.amax(),
        lambda t: t.max(),
        lambda t: t.max(0).values.sum(),
        lambda t: torch.linalg.vector_norm(t),
        lambda t: t.logsumexp((0, 1)),
        lambda t: t.prod(),
        lambda t: t.mean(0).sum(),
    ]:
        t = _cut(x, (20, 14, 20, 10), requires_grad=True)
        with _Largest() as largest:
            loss(t).backward()
        assert largest.numel <= 20 * n_columns, (largest.numel, loss)
        assert t.grad._local_tensor.shape == t._local_tensor.shape


@pytest.mark.ranks(4)
def test_two_dimensional_mesh() -> None:
    mesh = _mesh2x2()
    x = torch.randn(5, 4, 2, dtype=torch.float64)
    for layout in layouts_of(x.shape, mesh, dims=(0, 1)):
        for function in [
            torch.sum,
            torch.mean,
            torch.var,
            torch.max,
            torch.prod,
            lambda t: t.mean(0),
            lambda t: t.sum((0, 2)),
            lambda t: t.std((0, 1)),
            lambda t: torch.var_mean(t, 1),
            lambda t: t.max(1).values,
            lambda t: t.amin((0, 1)),
            lambda t: torch.linalg.vector_norm(t, 2, (0, 1)),
            lambda t: t.logsumexp((0, 1)),
        ]:
            check_op(function, x, mesh=mesh, layouts=[layout], fallback="error")
        for function in [torch.argmax, lambda t: t.argmin(0), lambda t: (t > 0).all(1)]:
            check_op(function, x, mesh=mesh, layouts=[layout], gradient=False, fallback="error")


@pytest.mark.ranks(2)
def test_pending_operands() -> None:
    mesh = _mesh(2)
    rank = torch.distributed.get_rank()
    pending = ShardTensor.from_local(torch.tensor([[1.0 + rank, -5.0], [2.0, rank]]), mesh, [Partial()])
    whole = torch.tensor([[3.0, -10.0], [4.0, 1.0]])
    assert pending.sum().placements == (Partial(),)
    assert pending.mean(0).placements == (Partial(),)
    for function in [
        torch.sum,
        torch.mean,
        torch.max,
        torch.argmin,
        torch.var,
        torch.prod,
        lambda t: t.amin(0),
        lambda t: t.sum(1),
        lambda t: (t > 0).any(0),
        lambda t: t.sum(dtype=torch.int64),
        lambda t: torch.linalg.vector_norm(t, 2, 0),
    ]:
        assert torch.allclose(function(pending).full_tensor(), function(whole)), function
    leaf = torch.tensor([[1.0 + rank, -5.0], [2.0, rank]], requires_grad=True)
    ShardTensor.from_local(leaf, mesh, [Partial()]).mean().backward()
    assert leaf.grad.tolist() == [[0.25, 0.25], [0.25, 0.25]]


@pytest.mark.ranks(3)
def test_short_floats_are_no_worse_than_on_one_device() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(3000, 2, generator=generator, dtype=torch.float64) + 100
    for dtype in (torch.float16, torch.bfloat16):
        for function in [torch.mean, lambda t: t.mean(0), torch.var, lambda t: t.std(0), lambda t: t[:300].sum(0)]:
            exact = function(x.to(dtype).double())
            one = function(x.to(dtype))
            ours = function(_cut(x.to(dtype), (1000, 0, 2000))).full_tensor()
            assert ours.dtype == one.dtype
            assert (ours - exact).abs().max() <= (one - exact).abs().max() * 1.0001 + 1e-12, (function, dtype)


@pytest.mark.ranks(1)
def test_one_rank_sends_nothing() -> None:
    """Field case B6."""
    t = _cut(torch.randn(4, 3), (4,), requires_grad=True)
    with comm_trace() as trace, fallback_mode("error"):
        for function in DIFFERENTIABLE.values():
            if function is not torch.logsumexp:
                function(t).sum().backward()
        t.argmax()
        t.max(0).values.sum().backward()
    assert not trace.events


@pytest.mark.ranks(4)
def test_variance_of_large_numbers_does_not_cancel() -> None:
    x = torch.tensor([-1.0, 1.0] * 16) + 4096
    for sizes in [(1, 7, 0, 24), (8, 8, 8, 8)]:
        t = _cut(x, sizes)
        assert abs(t.var(correction=0).item() - 1) < 1e-4
    single = _cut(torch.tensor([5.0]), (0, 1, 0, 0))
    assert math.isnan(single.var().item()) and single.var(correction=0).item() == 0


@pytest.mark.ranks(2)
def test_a_bad_dim_is_torchs_own_error_on_all_ranks() -> None:
    t = _cut(torch.randn(4, 3), (1, 3))
    for function, message in itertools.product([lambda t: t.sum(5), lambda t: t.amax(2)], ["out of range"]):
        with pytest.raises(IndexError, match=message):
            function(t)
    with pytest.raises(IndexError):
        _cut(torch.zeros(0, 3), (0, 0)).max(0)


@pytest.mark.ranks(2)
def test_replicated_operands_stay_replicated() -> None:
    mesh = _mesh(2)
    t = shard(torch.randn(4, 3), mesh, Layout((Replicate(),)), requires_grad=True)
    with comm_trace() as trace:
        total = t.mean()
        assert total.placements == (Replicate(),)
        total.backward()
        t.max()
        t.var()
    assert not trace.events


@pytest.mark.ranks(2, timeout=120)
def test_compiled_reductions_equal_eager() -> None:
    def loss(t: torch.Tensor) -> torch.Tensor:
        parts = [t.mean(0), t.var(0), t.max(0).values, t.logsumexp(0), t.prod(0), torch.linalg.vector_norm(t, 2, 0)]
        return sum(part.sum() for part in parts) + t.softmax(0).amax(1).sum()

    x = torch.randn(5, 3, dtype=torch.float64)
    plain, t = x.clone().requires_grad_(), _cut(x, (1, 4), requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=False)
    want, got = loss(plain), compiled(t)
    want.backward()
    got.backward()
    assert got.detach().full_tensor().allclose(want.detach())
    assert t.grad.full_tensor().allclose(plain.grad)
