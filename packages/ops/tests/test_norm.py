"""Norms on every layout, against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
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


def _double(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _row_cases():  # type: ignore[no-untyped-def]
    x = _double(3, 5, 4)
    w4, b4, w54, b54 = _double(4), _double(4), _double(5, 4), _double(5, 4)
    return [
        (lambda x, w, b: F.layer_norm(x, (4,), w, b), (x, w4, b4)),
        (lambda x, w, b: F.layer_norm(x, [5, 4], w, b, 1e-3), (x, w54, b54)),
        (lambda x: F.layer_norm(x, (4,)), (x,)),
        (lambda x, w: F.layer_norm(x, (4,), weight=w), (x, w4)),
        (lambda x, b: F.layer_norm(x, (4,), bias=b), (x, b4)),
        (lambda x, w: F.rms_norm(x, (4,), w, 1e-5), (x, w4)),
        (lambda x, w: F.rms_norm(x, (5, 4), w), (x, w54)),
        (lambda x: F.rms_norm(x, (4,)), (x,)),
    ]


def _channel_cases():  # type: ignore[no-untyped-def]
    x = 3 * _double(2, 4, 5, 3) + 2
    w, b = _double(4), _double(4)
    return [
        (lambda x, w, b: F.group_norm(x, 2, w, b), (x, w, b)),
        (lambda x: F.group_norm(x, 1), (x,)),
        (lambda x, w: F.group_norm(x, 4, w), (x, w)),
        (lambda x, w, b: F.instance_norm(x, None, None, w, b), (x, w, b)),
        (lambda x: F.instance_norm(x), (x,)),
        (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (x, w, b)),
        (lambda x: F.batch_norm(x, None, None, training=True), (x,)),
        (lambda x, w, b: F.batch_norm(x, b.detach() * 1, (w * w).detach() + 1, w, b, False), (x, w, b)),
    ]


@pytest.mark.ranks(1, 2, 3, 4)
def test_row_norms_on_every_layout() -> None:
    mesh = _mesh(_world())
    for function, (x, *parameters) in _row_cases():
        for layout in layouts_of(x.shape, mesh):
            plain = [None] * len(parameters)
            check_op(function, x, *parameters, mesh=mesh, layouts=[layout, *plain], fallback="error")


@pytest.mark.ranks(1, 2, 3, 4)
def test_channel_norms_on_every_layout() -> None:
    mesh = _mesh(_world())
    for function, (x, *parameters) in _channel_cases():
        for layout in layouts_of(x.shape, mesh, dims=(0, 1, 2)):
            plain = [None] * len(parameters)
            check_op(function, x, *parameters, mesh=mesh, layouts=[layout, *plain], fallback="error", tolerance=1e-9)


@pytest.mark.ranks(3)
def test_weights_that_are_shardtensors() -> None:
    mesh = _mesh(3)
    whole = Layout((Replicate(),))
    for function, (x, *parameters) in _row_cases() + _channel_cases()[:-1]:
        for dim in (1, 2):
            for weight_layout in (whole, Layout((Shard(0),))):
                layouts = [Layout((Shard(dim),)), *[weight_layout] * len(parameters)]
                check_op(function, x, *parameters, mesh=mesh, layouts=layouts, tolerance=1e-9)


@pytest.mark.ranks(4)
def test_two_dimensional_mesh() -> None:
    mesh = _mesh2x2()
    for function, (x, *parameters) in _row_cases()[:6] + _channel_cases():
        for layout in layouts_of(x.shape, mesh, dims=(0, 1, 2)):
            plain = [None] * len(parameters)
            check_op(function, x, *parameters, mesh=mesh, layouts=[layout, *plain], fallback="error", tolerance=1e-9)


@pytest.mark.ranks(3)
def test_group_norm_of_large_numbers() -> None:
    """Field case A11: no difference of squares."""
    signs = torch.tensor([-1.0, 1, -1, 1, -1, 1, -1, 1])
    x = (1000 + signs).view(1, 1, 8)
    t = _cut(x, (1, 0, 7), dim=2)
    assert (F.group_norm(t, 1).full_tensor() - signs).abs().max() < 1e-3
    assert (F.instance_norm(t).full_tensor() - signs).abs().max() < 1e-3
    assert (F.layer_norm(t, (8,)).full_tensor() - signs).abs().max() < 1e-3


@pytest.mark.ranks(3)
def test_short_floats_are_no_worse_than_on_one_device() -> None:
    x = torch.randn(2, 4, 9, 5, dtype=torch.float64) * 2 + 5
    for dtype in (torch.bfloat16, torch.float16):
        short = x.to(dtype)
        for function in [
            lambda t: F.group_norm(t, 2),
            F.instance_norm,
            lambda t: F.batch_norm(t, None, None, training=True),
            lambda t: F.layer_norm(t, (9, 5)),
            lambda t: F.rms_norm(t, (9, 5)),
        ]:
            exact_leaf, one_leaf = short.double().requires_grad_(), short.clone().requires_grad_()
            t = _cut(short, (2, 0, 7), dim=2, requires_grad=True)
            weights = torch.randn(x.shape).to(dtype)
            exact, one, ours = function(exact_leaf), function(one_leaf), function(t)
            assert ours.dtype == dtype
            worst = (one - exact).abs().max()
            assert (ours.full_tensor() - exact).abs().max() <= 1.01 * worst
            for result, factor in ((exact, weights.double()), (one, weights), (ours, weights)):
                (result * factor).sum().backward()
            worst = (one_leaf.grad - exact_leaf.grad).abs().max()
            assert t.grad.dtype == dtype
            assert (t.grad.full_tensor() - exact_leaf.grad).abs().max() <= 1.01 * worst


@pytest.mark.ranks(2)
def test_running_statistics_use_the_global_counts() -> None:
    """Field case A11."""
    norm = torch.nn.BatchNorm1d(1, momentum=0.1)
    norm(_cut(torch.arange(6.0).view(6, 1), (1, 5)))
    assert abs(norm.running_mean.item() - 0.25) < 1e-6
    assert abs(norm.running_var.item() - 1.25) < 1e-6
    assert norm.num_batches_tracked.item() == 1
    assert type(norm.running_mean) is torch.Tensor


MODULES = {
    "BatchNorm2d": lambda: torch.nn.BatchNorm2d(4),
    "cumulative": lambda: torch.nn.BatchNorm2d(4, momentum=None),
    "InstanceNorm2d": lambda: torch.nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "GroupNorm": lambda: torch.nn.GroupNorm(2, 4),
    "LayerNorm": lambda: torch.nn.LayerNorm((5, 3)),
    "RMSNorm": lambda: torch.nn.RMSNorm((5, 3)),
}


@pytest.mark.ranks(3)
def test_modules_train_and_evaluate_as_on_one_device() -> None:
    for make in MODULES.values():
        for dim, sizes in [(0, (1, 0, 1)), (2, (0, 1, 4)), (1, (2, 0, 2))]:
            torch.manual_seed(0)
            one, ours = make().double(), make().double()
            for parameter in (*one.parameters(), *ours.parameters()):
                torch.nn.init.ones_(parameter)
            for step in range(2):
                x = _double(2, 4, 5, 3) + step
                weights = _double(2, 4, 5, 3)
                (one(x) * weights).sum().backward()
                (ours(_cut(x, sizes, dim)) * weights).sum().backward()
            for (name, want), got in zip(one.named_parameters(), ours.parameters(), strict=True):
                assert type(got.grad) is torch.Tensor
                assert got.grad.allclose(want.grad), (make, dim, name)
            for (name, want), got in zip(one.named_buffers(), ours.buffers(), strict=True):
                assert torch.allclose(got, want), (make, dim, name, got, want)
            one.eval(), ours.eval()
            assert ours(_cut(x, sizes, dim)).full_tensor().allclose(one(x))


@pytest.mark.ranks(2)
def test_batch_sharded_group_norm_is_local() -> None:
    t = _cut(_double(3, 4, 5), (1, 2), requires_grad=True)
    with comm_trace() as trace, fallback_mode("error"):
        F.group_norm(t, 2).sum()
        F.instance_norm(t).sum()
        F.layer_norm(t, (5,)).sum()
    assert not trace.events


@pytest.mark.ranks(3)
def test_one_collective_each_way() -> None:
    x = _double(2, 4, 5, 3)
    weight, bias = _double(4).requires_grad_(), _double(4).requires_grad_()
    gradient = _cut(torch.ones_like(x), (1, 0, 4), dim=2)
    for function in [
        lambda t: F.instance_norm(t, None, None, weight, bias),
        lambda t: F.group_norm(t, 2, weight, bias),
        lambda t: F.batch_norm(t, None, None, weight, bias, True),
    ]:
        t = _cut(x, (1, 0, 4), dim=2, requires_grad=True)
        with comm_trace() as trace:
            result = function(t)
        assert len(trace.events) == 1, trace.table()
        with comm_trace() as trace:
            result.backward(gradient)
        assert len(trace.events) == 1, trace.table()


@pytest.mark.ranks(1)
def test_one_rank_sends_nothing() -> None:
    """Field case B6."""
    with comm_trace() as trace, fallback_mode("error"):
        for function, (x, *parameters) in _row_cases() + _channel_cases():
            function(_cut(x, (x.shape[2],), dim=2, requires_grad=True), *parameters).sum().backward()
    assert not trace.events


@pytest.mark.ranks(2)
def test_gradients_of_gradients() -> None:
    cases = _row_cases() + _channel_cases()
    for function, (x, *parameters) in cases:
        for dim in (1, 2):
            plain = [p.clone().requires_grad_() for p in (x, *parameters)]
            sizes = {1: (x.shape[1] - 2, 2), 2: (1, x.shape[2] - 1)}[dim]
            sharded = [_cut(x, sizes, dim, requires_grad=True)]
            sharded += [p.clone().requires_grad_() for p in parameters]
            for leaves in (plain, sharded):
                (first,) = torch.autograd.grad(function(*leaves).pow(3).sum(), leaves[0], create_graph=True)
                first.pow(2).sum().backward()
            for got, want in zip(sharded, plain, strict=True):
                if want.grad is None:
                    continue
                gradient = got.grad.full_tensor() if isinstance(got, ShardTensor) else got.grad
                assert gradient.allclose(want.grad, rtol=1e-6, atol=1e-10)


class _Made(TorchDispatchMode):
    """Adds up the bytes of the storages that operators make on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.n_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        seen = {a.untyped_storage().data_ptr() for a in args if type(a) is torch.Tensor}
        for value in result if isinstance(result, (list, tuple)) else [result]:
            if type(value) is torch.Tensor and value.untyped_storage().data_ptr() not in seen:
                self.n_bytes += value.untyped_storage().nbytes()
        return result


@pytest.mark.ranks(2)
def test_no_temporary_of_an_activations_size() -> None:
    x = torch.randn(1, 2, 4000)
    weight, bias = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    for function in [
        lambda t: F.instance_norm(t, None, None, weight, bias),
        lambda t: F.group_norm(t, 1, weight, bias),
        lambda t: F.batch_norm(t, None, None, weight, bias, True),
    ]:
        t = _cut(x, (1000, 3000), dim=2, requires_grad=True)
        gradient = _cut(torch.ones_like(x), (1000, 3000), dim=2)
        n_bytes = t._local_tensor.nbytes
        with _Made() as made:
            result = function(t)
        assert made.n_bytes < 1.2 * n_bytes
        with _Made() as made:
            torch.autograd.backward(result, gradient, inputs=[t, weight, bias])
        assert made.n_bytes < 1.2 * n_bytes, made.n_bytes / n_bytes


@pytest.mark.ranks(2)
def test_bad_arguments_are_torchs_own_errors_on_all_ranks() -> None:
    t = _cut(_double(2, 4, 5), (1, 4), dim=2)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        F.layer_norm(t, (4,))
    with pytest.raises(RuntimeError, match=r"(?i)divisible"):
        F.group_norm(t, 3)
    with pytest.raises(RuntimeError, match="running_mean"):
        F.batch_norm(t, torch.zeros(3), torch.ones(3), training=True)
    with pytest.raises(ValueError, match="more than 1 value"):
        F.batch_norm(_cut(_double(1, 4), (1, 3), dim=1), None, None, training=True)


@pytest.mark.ranks(2)
def test_operators_below_autograd() -> None:
    mesh = _mesh(2)
    x, w = _double(3, 4, 5), _double(5)
    for layout in layouts_of(x.shape, mesh):
        check_op(
            lambda x, w: torch.native_layer_norm(x, (5,), w, None, 1e-5)[0],
            x,
            w,
            mesh=mesh,
            layouts=[layout, None],
            fallback="error",
        )
        check_op(lambda x: torch.native_group_norm(x, None, None, 3, 4, 5, 2, 1e-5)[0], x, mesh=mesh, layouts=[layout])


@pytest.mark.ranks(2, timeout=120)
def test_a_compiled_step_equals_eager() -> None:
    x = _double(2, 4, 5, 3)
    for make in [lambda: torch.nn.GroupNorm(2, 4), lambda: torch.nn.BatchNorm2d(4), lambda: torch.nn.LayerNorm((5, 3))]:
        torch._dynamo.reset()
        one, ours = make().double(), make().double()
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=False)
        plain, t = x.clone().requires_grad_(), _cut(x, (1, 4), dim=2, requires_grad=True)
        for module, leaf in ((one, plain), (compiled, t)):
            (module(leaf) * leaf).sum().backward()
        assert t.grad.full_tensor().allclose(plain.grad)
        for got, want in zip(ours.parameters(), one.parameters(), strict=True):
            assert got.grad.allclose(want.grad)
        for got, want in zip(ours.buffers(), one.buffers(), strict=True):
            assert torch.allclose(got, want)
