"""Convolutions on every split, against plain torch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardtensor import ShardTensor
from shardtensor.testing import Layout, check_op, fallback_mode, layouts_of, shard, splits
from shardtensor_collectives import comm_trace

F64 = torch.float64
pytestmark = pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel:UserWarning")


def _mesh(world: int) -> Any:
    return init_device_mesh("cpu", (world,), mesh_dim_names=("domain",))


def _world() -> int:
    return torch.distributed.get_world_size()


def _rows(extent: int, world: int, dim: int) -> list[Layout]:
    return [Layout((Shard(dim),), {dim: split}) for split in splits(extent, world)]


@pytest.mark.parametrize("padding", [0, 2, "same"])
@pytest.mark.ranks(1, 2, 3, 4)
def test_one_dim_with_every_stride_padding_and_dilation(padding: Any) -> None:
    """Field case A13 in general: even and odd kernels, odd starts, shards thinner than the reach, empty ones."""
    mesh = _mesh(_world())
    x = torch.randn(2, 3, 11, dtype=F64)
    layouts = _rows(11, _world(), 2)
    for kernel, stride, dilation in itertools.product((1, 3, 4), (1, 2), (1, 2)):
        if padding == "same" and stride != 1:
            continue
        weight, bias = torch.randn(4, 3, kernel, dtype=F64), torch.randn(4, dtype=F64)
        for layout in layouts:
            check_op(
                lambda a, w, b: F.conv1d(a, w, b, stride, padding, dilation),  # noqa: B023  called at once
                x,
                weight,
                bias,
                mesh=mesh,
                layouts=[layout, None, None],
                fallback="error",
            )


@pytest.mark.ranks(3, 4)
def test_halos_that_reach_over_several_shards() -> None:
    mesh = _mesh(_world())
    x, weight = torch.randn(2, 3, 11, dtype=F64), torch.randn(4, 3, 7, dtype=F64)
    for layout in [*_rows(11, _world(), 2), Layout((Shard(2),), {2: (4, *([1] * (_world() - 2)), 9 - _world())})]:
        check_op(lambda a, w: F.conv1d(a, w, padding=3), x, weight, mesh=mesh, layouts=[layout, None], fallback="error")
        check_op(lambda a, w: F.conv1d(a, w, stride=3), x, weight, mesh=mesh, layouts=[layout, None], fallback="error")


@pytest.mark.ranks(1, 2, 3, 4)
def test_transposed_with_every_stride_and_padding() -> None:
    mesh = _mesh(_world())
    x = torch.randn(2, 4, 7, dtype=F64)
    layouts = _rows(7, _world(), 2)
    for kernel, stride, padding, output_padding, dilation in (
        (2, 2, 0, 0, 1),
        (2, 2, 0, 1, 1),
        (3, 2, 1, 1, 1),
        (4, 2, 1, 0, 1),
        (1, 3, 0, 2, 1),
        (3, 1, 1, 0, 1),
        (3, 1, 0, 0, 2),
        (5, 3, 2, 1, 2),
        (2, 1, 0, 0, 1),
    ):
        weight, bias = torch.randn(4, 3, kernel, dtype=F64), torch.randn(6, dtype=F64)
        for layout in layouts:
            check_op(
                lambda a, w, b: F.conv_transpose1d(a, w, b, stride, padding, output_padding, 2, dilation),  # noqa: B023
                x,
                weight,
                bias,
                mesh=mesh,
                layouts=[layout, None, None],
                fallback="error",
            )


@pytest.mark.ranks(2, 3)
def test_images_with_every_dim_sharded() -> None:
    """Batch shards stay, channel shards move, spatial ones exchange rows; groups and depthwise."""
    mesh = _mesh(_world())
    x = torch.randn(3, 4, 7, 6, dtype=F64)
    for layout in layouts_of(x.shape, mesh):
        for kernel, groups, options in (
            ((3, 3), 1, {"padding": 1}),
            ((3, 2), 4, {"stride": (2, 1), "padding": (1, 0)}),
            ((2, 3), 2, {"padding": "same", "dilation": (1, 2)}),
            ((1, 1), 1, {}),
        ):
            weight, bias = torch.randn(4, 4 // groups, *kernel, dtype=F64), torch.randn(4, dtype=F64)
            check_op(
                lambda a, w, b: F.conv2d(a, w, b, groups=groups, **options),  # noqa: B023  called at once
                x,
                weight,
                bias,
                mesh=mesh,
                layouts=[layout, None, None],
                fallback="error",
            )


@pytest.mark.ranks(2, 3)
def test_volumes() -> None:
    mesh = _mesh(_world())
    x = torch.randn(1, 2, 5, 4, 6, dtype=F64)
    weight, bias = torch.randn(3, 2, 3, 3, 3, dtype=F64), torch.randn(3, dtype=F64)
    up = torch.randn(2, 3, 2, 2, 2, dtype=F64)
    for layout in layouts_of(x.shape, mesh, dims=[2, 3, 4]):
        layouts = [layout, None, None]
        check_op(lambda a, w, b: F.conv3d(a, w, b, 1, 1), x, weight, bias, mesh=mesh, layouts=layouts, fallback="error")
        check_op(lambda a, w, b: F.conv3d(a, w, b, 2, 1), x, weight, bias, mesh=mesh, layouts=layouts, fallback="error")
        check_op(
            lambda a, w, b: F.conv_transpose3d(a, w, b, 2), x, up, bias, mesh=mesh, layouts=layouts, fallback="error"
        )


@pytest.mark.ranks(4)
def test_two_dimensional_mesh() -> None:
    """Corners of two sharded dims, nested shards of one dim, replicas beside shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "domain"))
    x = torch.randn(2, 2, 7, 6, dtype=F64)
    weight, bias = torch.randn(2, 2, 3, 3, dtype=F64), torch.randn(2, dtype=F64)
    for layout in layouts_of(x.shape, mesh):
        for function in (
            lambda a, w, b: F.conv2d(a, w, b, 1, 1),
            lambda a, w, b: F.conv2d(a, w, b, 2, 1),
            lambda a, w, b: F.conv_transpose2d(a, w, b, 2, 1, 1),
        ):
            check_op(function, x, weight, bias, mesh=mesh, layouts=[layout, None, None], fallback="error")


@pytest.mark.ranks(3)
def test_stride_with_uneven_starts_gives_the_known_values() -> None:
    """Field case A13."""
    mesh = _mesh(3)
    x = shard(
        torch.arange(11.0, dtype=F64).view(1, 1, 11), mesh, Layout((Shard(2),), {2: (3, 3, 5)}), requires_grad=True
    )
    weight = torch.tensor([[[1.0, 2.0, 3.0]]], dtype=F64, requires_grad=True)
    y = F.conv1d(x, weight, stride=2, padding=1)
    assert y.detach().full_tensor().flatten().tolist() == [3, 14, 26, 38, 50, 29]
    y.sum().backward()
    assert x.grad is not None and weight.grad is not None
    assert x.grad.full_tensor().flatten().tolist() == [2, 4, 2, 4, 2, 4, 2, 4, 2, 4, 2]
    assert type(weight.grad) is torch.Tensor
    assert weight.grad.flatten().tolist() == [25, 30, 25]


@pytest.mark.ranks(2)
def test_a_dtensor_is_convolved_as_its_shards_say() -> None:
    """Field case A5: torch's own rule returns the local result labelled as replicated."""
    mesh = _mesh(2)
    x = torch.randn(1, 4, 10, 6, dtype=F64)
    for kernel, groups, with_bias in itertools.product((3, 1), (1, 4), (True, False)):
        weight = torch.randn(4, 4 // groups, kernel, kernel, dtype=F64)
        bias = torch.randn(4, dtype=F64) if with_bias else None
        want = F.conv2d(x, weight, bias, padding=kernel // 2, groups=groups)
        uneven = shard(x, mesh, Layout((Shard(2),), {2: (3, 7)}))
        assert torch.allclose(F.conv2d(uneven, weight, bias, padding=kernel // 2, groups=groups).full_tensor(), want)
        dtensor = distribute_tensor(x, mesh, [Shard(2)])
        replicated = ShardTensor.from_local(weight, mesh, [Replicate()])
        got = F.conv2d(dtensor, replicated, bias, padding=kernel // 2, groups=groups)
        assert isinstance(got, ShardTensor) and got.placements == (Shard(2),)
        assert torch.allclose(got.full_tensor(), want)
        again = F.conv2d(ShardTensor.from_dtensor(dtensor), weight, bias, padding=kernel // 2, groups=groups)
        assert torch.allclose(again.full_tensor(), want)
        sharded_weight = distribute_tensor(weight, mesh, [Shard(0)])
        assert isinstance(sharded_weight, DTensor)
        got = F.conv2d(uneven, sharded_weight, bias, padding=kernel // 2, groups=groups)
        assert torch.allclose(got.full_tensor(), want)


@pytest.mark.ranks(2)
def test_periodic_dim_on_two_ranks_does_not_swap_left_and_right() -> None:
    """Field case C5: both neighbours are the same rank, and the kernel is asymmetric."""
    mesh = _mesh(2)
    x = torch.arange(6.0, dtype=F64).view(1, 1, 6)
    layer = torch.nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular", bias=False, dtype=F64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[[1.0, 10.0, 100.0]]]))
    for cut in ((1, 5), (3, 3)):
        layer.zero_grad()
        t = shard(x, mesh, Layout((Shard(2),), {2: cut}), requires_grad=True)
        y = layer(t)
        assert y._spec.sizes() == {2: cut}
        assert y.detach().full_tensor().flatten().tolist() == [105, 210, 321, 432, 543, 54]
        (y * torch.arange(6.0, dtype=F64)).sum().backward()
        assert t.grad is not None and layer.weight.grad is not None
        assert t.grad.full_tensor().flatten().tolist() == [501, 12, 123, 234, 345, 450]
        assert layer.weight.grad.flatten().tolist() == [40, 55, 40]


@pytest.mark.ranks(2, 3)
def test_layers_with_every_padding_mode() -> None:
    world = _world()
    mesh = _mesh(world)
    x = torch.randn(1, 2, 6, 5, 4, dtype=F64)
    for mode in ("zeros", "reflect", "replicate", "circular"):
        torch.manual_seed(0)
        layer = torch.nn.Conv3d(2, 3, (3, 3, 2), padding=(1, 1, 0), padding_mode=mode, dtype=F64)
        want = layer(x)
        want.sum().backward()
        gradients = [parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None]
        for dim in (2, 3):
            for split in splits(x.shape[dim], world):
                layer.zero_grad()
                y = layer(shard(x, mesh, Layout((Shard(dim),), {dim: split})))
                assert torch.allclose(y.detach().full_tensor(), want.detach())
                y.sum().backward()
                for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
                    assert torch.allclose(parameter.grad, gradient)


@pytest.mark.ranks(3)
def test_inputs_that_are_not_contiguous() -> None:
    """Field case A31: transposed, strided, channels-last inputs, and an expanded gradient."""
    mesh = _mesh(3)
    weight = torch.randn(3, 2, 3, 3, dtype=F64)
    layout = Layout((Shard(2),), {2: (2, 1, 4)})
    whole = torch.randn(2, 2, 6, 7, dtype=F64)
    for make in (
        lambda a: a.permute(0, 1, 3, 2),
        lambda a: a.permute(0, 1, 3, 2).contiguous(memory_format=torch.channels_last),
    ):
        x = make(whole)
        t = shard(x, mesh, layout, requires_grad=True)
        if x.is_contiguous(memory_format=torch.channels_last):
            t = shard(x, mesh, layout)
            t._local_tensor = t._local_tensor.contiguous(memory_format=torch.channels_last)
            t.requires_grad_()
        y = F.conv2d(t, weight, padding=1)
        reference = x.detach().clone().requires_grad_()
        want = F.conv2d(reference, weight, padding=1)
        assert torch.allclose(y.detach().full_tensor(), want.detach())
        y.sum().backward()  # the gradient of a sum is an expanded number
        want.sum().backward()
        assert t.grad is not None and reference.grad is not None
        assert torch.allclose(t.grad.full_tensor(), reference.grad)


@pytest.mark.ranks(1)
def test_one_rank_communicates_nothing() -> None:
    """Field case B6."""
    mesh = _mesh(1)
    x = shard(torch.randn(1, 2, 7, 6), mesh, Layout((Shard(2),)), requires_grad=True)
    weight = torch.randn(2, 2, 3, 3, requires_grad=True)
    with comm_trace() as trace:
        y = F.conv_transpose2d(F.conv2d(F.conv2d(x, weight, padding=1), weight, stride=2, padding=1), weight, stride=2)
        y.sum().to_local().backward()
    assert trace.events == []


@pytest.mark.ranks(3)
def test_only_halo_rows_travel() -> None:
    """Field case D1: no gather, and exactly the bytes of the rows that a rank lacks; a kernel of one row needs none."""
    mesh = _mesh(3)
    rank = torch.distributed.get_rank()
    x = shard(torch.randn(1, 2, 12, 5), mesh, Layout((Shard(2),), {2: (3, 5, 4)}), requires_grad=True)
    weight = torch.randn(4, 2, 3, 3)
    row = 2 * 5 * 4
    n_neighbours = 1 if rank != 1 else 2
    with comm_trace() as trace:
        y = F.conv2d(x, weight, padding=1)
    assert [event.collective for event in trace] == ["exchange"]
    assert [(event.bytes_sent, event.bytes_received) for event in trace] == [(n_neighbours * row, n_neighbours * row)]
    assert trace.events[0].axis == "domain"
    gradient = shard(torch.randn(1, 4, 12, 5), mesh, Layout((Shard(2),), {2: (3, 5, 4)}))
    with comm_trace() as trace:
        y.backward(gradient)
    assert [event.collective for event in trace] == ["exchange_adjoint"]
    assert [(event.bytes_sent, event.bytes_received) for event in trace] == [(n_neighbours * row, n_neighbours * row)]
    with comm_trace() as trace:
        F.conv2d(x, torch.randn(4, 2, 1, 1)).backward(gradient)
        F.conv2d(x, torch.randn(4, 2, 1, 3), padding=(0, 1)).backward(gradient)
    assert trace.events == []
    by_batch = shard(torch.randn(3, 2, 12, 5), mesh, Layout((Shard(0),)), requires_grad=True)
    with comm_trace() as trace:
        F.conv2d(by_batch, weight, padding=1).backward(shard(torch.randn(3, 4, 12, 5), mesh, Layout((Shard(0),))))
    assert trace.events == []


@pytest.mark.ranks(2)
def test_gradients_of_gradients() -> None:
    mesh = _mesh(2)
    x, weight = torch.randn(1, 2, 7, dtype=F64), torch.randn(2, 2, 3, dtype=F64)
    for function in (
        lambda a, w: F.conv1d(a, w, padding=1),
        lambda a, w: F.conv1d(a, w, stride=2, padding=1),
        lambda a, w: F.conv_transpose1d(a, w, stride=2, padding=1),
    ):

        def penalty(a: Any, w: Any, function: Any = function) -> Any:
            loss = function(a, w).pow(3).sum()
            by_a, by_w = torch.autograd.grad(loss, (a, w), create_graph=True)
            return by_a.pow(2).sum() + by_w.pow(2).sum()

        for layout in _rows(7, 2, 2):
            check_op(penalty, x, weight, mesh=mesh, layouts=[layout, None])


@pytest.mark.ranks(2)
def test_pending_replicated_complex_and_single_inputs() -> None:
    mesh = _mesh(2)
    weight = torch.randn(3, 2, 3, dtype=F64)
    part = torch.randn(1, 2, 7, dtype=F64)
    pending = ShardTensor.from_local(part, mesh, [Partial()])
    assert torch.allclose(F.conv1d(pending, weight).full_tensor(), F.conv1d(2 * part, weight))
    replicated = ShardTensor.from_local(part, mesh, [Replicate()])
    with comm_trace() as trace:
        y = F.conv1d(replicated, weight)
    assert trace.events == [] and torch.allclose(y.full_tensor(), F.conv1d(part, weight))
    for layout in layouts_of((2, 7), mesh):
        check_op(
            lambda a, w: F.conv1d(a, w, padding=1), part[0], weight, mesh=mesh, layouts=[layout, None], fallback="error"
        )
    layout = Layout((Shard(2),), {2: (2, 5)})
    whole = torch.complex(part, part.flip(2))
    kernel = torch.complex(weight, weight.flip(0))
    got = F.conv1d(shard(whole, mesh, layout), kernel, padding=1).full_tensor()
    assert torch.allclose(got, F.conv1d(whole, kernel, padding=1))


@pytest.mark.ranks(2)
def test_errors_are_torchs_own_on_all_ranks() -> None:
    mesh = _mesh(2)
    x = shard(torch.randn(1, 2, 7), mesh, Layout((Shard(2),), {2: (2, 5)}))
    with comm_trace() as trace:
        with pytest.raises(RuntimeError, match="expected input"):
            F.conv1d(x, torch.randn(3, 4, 3))
        with pytest.raises(RuntimeError, match="Kernel size can't be greater than actual input size"):
            F.conv1d(x, torch.randn(3, 2, 9))
    assert trace.events == []


@pytest.mark.ranks(2)
def test_autocast_lowers_the_precision_as_for_plain_tensors() -> None:
    mesh = _mesh(2)
    whole, weight = torch.randn(1, 2, 7), torch.randn(3, 2, 3, requires_grad=True)
    x = shard(whole, mesh, Layout((Shard(2),), {2: (2, 5)}), requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, want = F.conv1d(x, weight, padding=1), F.conv1d(whole, weight, padding=1)
    assert y.dtype == want.dtype == torch.bfloat16
    assert torch.allclose(y.detach().full_tensor(), want.detach(), atol=2e-2, rtol=2e-2)
    y.float().sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert weight.grad is not None and weight.grad.dtype == torch.float32


@pytest.mark.ranks(2)
def test_backward_keeps_the_shard_and_the_halo_only() -> None:
    mesh = _mesh(2)
    x = shard(torch.randn(1, 4, 40, 9), mesh, Layout((Shard(2),), {2: (15, 25)}), requires_grad=True)
    weight = torch.randn(4, 4, 3, 3)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        F.conv2d(x, weight, padding=1)
        F.conv2d(x, weight, stride=2, padding=1)
    own = {x._local_tensor.untyped_storage().data_ptr(), weight.untyped_storage().data_ptr()}
    others = [t for t in kept if not isinstance(t, ShardTensor)]
    shards = [t for t in kept if isinstance(t, ShardTensor)]
    assert all(t._local_tensor.untyped_storage().data_ptr() in own for t in shards)
    n_rows = sum(t.untyped_storage().nbytes() for t in others) / (4 * 9 * 4)
    assert 0 < n_rows <= 4


@pytest.mark.ranks(2)
def test_compiled_step_equals_eager() -> None:
    mesh = _mesh(2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Conv2d(3, 2, 3, stride=2)
    ).to(F64)
    x = shard(torch.randn(1, 2, 13, 12, dtype=F64), mesh, Layout((Shard(2),), {2: (5, 8)}))
    want = model(x)
    want.sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    got = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    assert got._spec is want._spec
    assert torch.allclose(got.detach().full_tensor(), want.detach().full_tensor())
    got.sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.allclose(parameter.grad, gradient)


@pytest.mark.ranks(2)
def test_a_gather_is_never_needed() -> None:
    mesh = _mesh(2)
    x = shard(torch.randn(1, 2, 7), mesh, Layout((Shard(2),), {2: (2, 5)}), requires_grad=True)
    with fallback_mode("error"), comm_trace() as trace:
        F.conv1d(x, torch.randn(3, 2, 3, requires_grad=True), padding=1).sum().to_local().backward()
    assert "all_gather_v" not in {event.collective for event in trace}
