"""``F.linear`` on every layout of input, weight and bias, against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from shardtensor import LayoutMismatchError, ShardTensor
from shardtensor.testing import Layout, check_op, layouts_of, shard
from shardtensor_collectives import comm_trace

REPLICATED = Layout((Replicate(),))


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("domain",))


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.ranks(1, 2, 3, 4)
def test_any_dim_of_the_input_may_be_sharded() -> None:
    mesh = _mesh()
    weight, bias = _random(3, 4), _random(3)
    for shape in [(4,), (5, 4), (2, 5, 4), (2, 3, 2, 4)]:
        x = _random(*shape)
        for layout in layouts_of(shape, mesh):
            check_op(F.linear, x, weight, bias, mesh=mesh, layouts=[layout, None, None], fallback="error")
            check_op(F.linear, x, weight, mesh=mesh, layouts=[layout, REPLICATED], fallback="error")


@pytest.mark.ranks(2, 3)
def test_weights_may_be_sharded_too() -> None:
    """Column parallel, row parallel, and both against every layout of the input."""
    mesh = _mesh()
    x, weight, bias = _random(2, 5, 4), _random(3, 4), _random(3)
    for x_layout in [*layouts_of(x.shape, mesh)[::2], REPLICATED]:
        for weight_layout in layouts_of(weight.shape, mesh)[1::2]:
            for bias_layout in [REPLICATED, Layout((Shard(0),)), None]:
                layouts = [x_layout, weight_layout, bias_layout]
                check_op(F.linear, x, weight, bias, mesh=mesh, layouts=layouts, fallback="error")


@pytest.mark.ranks(2)
def test_column_and_row_parallel_layouts() -> None:
    mesh = _mesh()
    x, weight, bias = _random(5, 4), _random(3, 4), _random(3)
    column = shard(weight, mesh, Layout((Shard(0),), {0: (1, 2)}))
    replicated = [shard(tensor, mesh, REPLICATED) for tensor in (x, bias)]
    with comm_trace() as trace:
        out = F.linear(replicated[0], column, replicated[1])
        assert out.placements == (Shard(1),) and out._spec.sizes() == {1: (1, 2)}
        row = shard(_random(2, 3), mesh, Layout((Shard(1),), {1: (1, 2)}))
        assert F.linear(out, row, shard(_random(2), mesh, REPLICATED)).placements == (Partial(),)
    assert not trace.events


@pytest.mark.ranks(2, 3)
def test_a_bias_is_added_once_to_a_pending_product() -> None:
    mesh = _mesh()
    rank = torch.distributed.get_rank()
    world = torch.distributed.get_world_size()
    weight, bias = _random(3, 4), _random(3)
    total = sum(torch.arange(8.0, dtype=torch.float64).view(2, 4) * (r + 1) for r in range(world))
    pending = ShardTensor.from_local(
        torch.arange(8.0, dtype=torch.float64).view(2, 4) * (rank + 1), mesh, [Partial()]
    ).requires_grad_()
    assert isinstance(total, torch.Tensor)
    whole = total.requires_grad_()
    expected = F.linear(whole, weight, bias)
    with comm_trace() as trace:
        actual = F.linear(pending, weight, bias)
    assert actual.placements == (Partial(),) and not trace.events
    assert torch.allclose(actual.full_tensor(), expected)
    expected.square().sum().backward()
    actual.full_tensor().square().sum().backward()
    assert pending.grad is not None
    assert torch.allclose(pending.grad.full_tensor(), whole.grad)


@pytest.mark.ranks(4)
def test_two_dimensional_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "domain"))
    x, weight, bias = _random(2, 5, 4), _random(3, 4), _random(3)
    for layout in layouts_of(x.shape, mesh):
        check_op(F.linear, x, weight, bias, mesh=mesh, layouts=[layout, None, None], fallback="error")
    both = Layout((Shard(1), Shard(2)), {1: (1, 4), 2: (3, 1)})
    for layout in layouts_of(weight.shape, mesh):
        check_op(F.linear, x, weight, bias, mesh=mesh, layouts=[both, layout, None], fallback="error")


@pytest.mark.ranks(2)
def test_field_case_a3_a_replicated_operand_receives_the_gradient_of_all_ranks() -> None:
    mesh = _mesh()
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    t = shard(x, mesh, Layout((Shard(0),), {0: (1, 2)}))
    ones = torch.ones(2)
    plain = ones.clone().requires_grad_()
    dtensor = DTensor.from_local(ones.clone(), mesh, [Replicate()]).requires_grad_()
    replicated = shard(ones, mesh, REPLICATED, requires_grad=True)
    for weight in (plain, dtensor, replicated):
        for _ in range(2):
            weight.grad = None
            (t * weight).sum().backward()
            assert _plain(weight.grad).tolist() == [9.0, 12.0]
        weight.grad = None
        F.linear(t, weight.unsqueeze(0)).sum().backward()
        assert _plain(weight.grad).tolist() == [9.0, 12.0]
        weight.grad = None
        (t @ weight).sum().backward()
        assert _plain(weight.grad).tolist() == [9.0, 12.0]
        weight.grad = None
        ((t * weight).sum() + (t @ weight).sum()).backward()
        assert _plain(weight.grad).tolist() == [18.0, 24.0]
    full_size = torch.ones(3, 2, requires_grad=True)
    (t * full_size).sum().backward()
    assert full_size.grad is not None and type(full_size.grad) is torch.Tensor
    assert full_size.grad.tolist() == x.tolist()
    bias = torch.zeros(1, requires_grad=True)
    F.linear(t, plain.detach().unsqueeze(0), bias).sum().backward()
    assert bias.grad is not None and bias.grad.tolist() == [3.0]


def _plain(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, (ShardTensor, DTensor)) else tensor


@pytest.mark.ranks(2)
def test_field_case_b16_film_from_a_plain_embedding() -> None:
    mesh = _mesh()
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8).double()
    embedding, x = _random(1, 8), _random(1, 4, 10, 6)

    def film(volume: torch.Tensor) -> torch.Tensor:
        scale, shift = (part.unsqueeze(-1).unsqueeze(-1) for part in layer(embedding).chunk(2, dim=1))
        return ((volume * (1 + scale) + shift) ** 2).mean()

    film(x).backward()
    expected = [parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None]
    layer.zero_grad()
    film(shard(x, mesh, Layout((Shard(2),), {2: (3, 7)}))).backward()
    for parameter, want in zip(layer.parameters(), expected, strict=True):
        assert type(parameter.grad) is torch.Tensor and torch.allclose(parameter.grad, want, atol=1e-12)


@pytest.mark.ranks(2)
def test_second_derivatives() -> None:
    mesh = _mesh()
    x, weight, bias = _random(2, 5, 4), _random(3, 4), _random(3)

    def penalty(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        out = F.linear(x, weight, bias)
        inner = (out * out * out).sum()
        gradients = torch.autograd.grad(inner, (x, weight, bias), create_graph=True)
        total = out.sum()
        for gradient in gradients:
            total = total + (gradient * gradient).sum()
        return total

    for layout in layouts_of(x.shape, mesh):
        for weights in (None, REPLICATED):
            check_op(penalty, x, weight, bias, mesh=mesh, layouts=[layout, weights, weights])


@pytest.mark.ranks(2)
def test_no_activation_travels_and_weight_and_bias_share_one_reduction() -> None:
    mesh = _mesh()
    x = shard(_random(2, 5, 4), mesh, Layout((Shard(1),), {1: (1, 4)}), requires_grad=True)
    layer = torch.nn.Linear(4, 3).double()
    with comm_trace() as trace:
        out = layer(x)
        out.backward(torch.ones_like(out))
    assert [event.collective for event in trace.events] == ["all_reduce"]
    assert trace.events[0].bytes_sent == (3 * 4 + 3) * 8
    assert x.grad is not None and x.grad._spec is x._spec
    weight = shard(_random(3, 4), mesh, REPLICATED, requires_grad=True)
    with comm_trace() as trace:
        out = F.linear(x, weight)
        out.backward(torch.ones_like(out))
    assert not trace.events
    assert weight.grad is not None and weight.grad.placements == (Partial(),)


class _Largest(TorchDispatchMode):
    """Remembers the largest number of elements that an operator put into new memory."""

    n_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if type(result) is torch.Tensor and result.untyped_storage().nbytes():
            n_stored = result.untyped_storage().nbytes() // result.element_size()
            self.n_elements = max(self.n_elements, n_stored)
        return result


@pytest.mark.ranks(2)
def test_the_backward_of_a_mean_allocates_nothing_of_global_size() -> None:
    mesh = _mesh()
    n_rows, n_local = 64, (24, 40)[torch.distributed.get_rank()]
    x = shard(_random(2, n_rows, 16), mesh, Layout((Shard(1),), {1: (24, 40)}), requires_grad=True)
    weight = shard(_random(16, 8), mesh, REPLICATED, requires_grad=True)
    loss = (x @ weight).mean()
    with _Largest() as watch:
        loss.backward()
    assert 0 < watch.n_elements <= 2 * n_local * 16


@pytest.mark.ranks(2)
def test_the_backward_of_a_slice_allocates_nothing_of_global_size() -> None:
    mesh = _mesh()
    n_rows, n_local = 64, (24, 40)[torch.distributed.get_rank()]
    x = shard(_random(2, n_rows, 16), mesh, Layout((Shard(1),), {1: (24, 40)}), requires_grad=True)
    weight = shard(_random(16, 8), mesh, REPLICATED, requires_grad=True)
    loss = (x @ weight)[:, 10:50].mean()
    with _Largest() as watch:
        loss.backward()
    assert 0 < watch.n_elements <= 2 * n_local * 16


@pytest.mark.ranks(2)
def test_autocast_computes_in_the_low_precision() -> None:
    mesh = _mesh()
    x, layer = torch.randn(5, 4), torch.nn.Linear(4, 3)
    t = shard(x, mesh, Layout((Shard(0),), {0: (1, 4)}), requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = layer(x), layer(t)
        assert actual.dtype == actual._local_tensor.dtype == torch.bfloat16
        actual.float().sum().backward()
    assert torch.equal(actual.full_tensor(), expected)
    assert t.grad is not None and t.grad.dtype == torch.float32
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32


@pytest.mark.ranks(2)
def test_errors_are_torchs_own_and_raised_on_all_ranks() -> None:
    mesh = _mesh()
    t = shard(torch.randn(5, 4), mesh, Layout((Shard(0),), {0: (0, 5)}))
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        F.linear(t, torch.randn(3, 5))
    with ShardTensor.promotion_mode("disabled"), pytest.raises(LayoutMismatchError, match="promotion is disabled"):
        F.linear(t, torch.randn(3, 4))


@pytest.mark.ranks(2)
def test_inference_mode() -> None:
    mesh = _mesh()
    x, layer = torch.randn(2, 5, 4), torch.nn.Linear(4, 3)
    t = shard(x, mesh, Layout((Shard(2),), {2: (1, 3)}))
    with torch.inference_mode():
        assert torch.allclose(layer(t).full_tensor(), layer(x), atol=1e-6)
        # Below the handler, as a C++ caller would reach it.
        assert torch.allclose(torch.ops.aten.linear(t, layer.weight, layer.bias).full_tensor(), layer(x), atol=1e-6)
