"""Plain tensors, DTensors and Python numbers that meet a ShardTensor: values, and gradients that stay plain."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardtensor import LayoutMismatchError, ShardTensor, TensorPromotionMode
from shardtensor.testing import Layout, fallback_mode, shard, splits

Pair = tuple[torch.Tensor, ShardTensor]


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))


def _input(dim: int = 1, which: int = -1, *, requires_grad: bool = False) -> Pair:
    """The tensor (1, 10, 6) of field case B1, whole and sharded."""
    whole = torch.linspace(-1, 2, 60, dtype=torch.float64).view(1, 10, 6)
    sizes = splits(whole.shape[dim], dist.get_world_size())[which]
    return whole, shard(whole, _mesh(), Layout((Shard(dim),), {dim: sizes}), requires_grad=requires_grad)


def _full(tensor: Any) -> torch.Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, ShardTensor) else tensor.detach()


row = torch.arange(6.0, dtype=torch.float64)
column = torch.arange(10.0, dtype=torch.float64).view(1, 10, 1)
mask = (torch.arange(60) % 3 == 0).view(1, 10, 6)
scalar = torch.tensor(2.5, dtype=torch.float64)

MIXED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "t + row": lambda t: t + row,
    "row + t": lambda t: row + t,
    "column * t": lambda t: column * t,
    "t ** scalar": lambda t: t.abs() ** scalar,
    "scalar - t": lambda t: scalar - t,
    "numpy scalar": lambda t: np.float64(2.0) * t + np.float32(1.0) - t * np.int64(3),
    "python": lambda t: 2 * t - 1 + True,
    "where": lambda t: torch.where(mask, t, 0.0),
    "where, plain other": lambda t: torch.where(t > 0, row, t),
    "masked_fill": lambda t: t.masked_fill(mask, 7.0),
    "clamp": lambda t: torch.clamp(t, min=row * 0, max=row),
    "keyword": lambda t: torch.add(input=row, other=t, alpha=2),
    "cat": lambda t: torch.cat([t, column.expand(1, 10, 6)], 1),
    "stack": lambda t: torch.stack((row.expand(1, 10, 6), t)),
    "einsum": lambda t: torch.einsum("bsc,c->bs", t, row),
    "layer_norm": lambda t: F.layer_norm(t, (6,), row, row * 2),
    "linear": lambda t: F.linear(t, torch.ones(4, 6, dtype=t.dtype), bias=torch.ones(4, dtype=t.dtype)),
    "in place": lambda t: t.clone().add_(column).mul_(row),
    "buffer made inside": lambda t: t + torch.zeros(1, t.shape[1], 1, dtype=t.dtype) + torch.arange(t.shape[2]),
    "bool": lambda t: (t > 0) & mask | ~mask,
    "integer index": lambda t: t[:, torch.tensor([1, 5, 9])],
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("with_grad", [True, False], ids=["grad", "no_grad"])
def test_plain_operands(with_grad: bool) -> None:
    for name, function in MIXED.items():
        for dim in (1, 2):
            whole, t = _input(dim)
            with torch.set_grad_enabled(with_grad), fallback_mode("silent"):
                result = function(t.requires_grad_(with_grad and name != "bool"))
                assert isinstance(result, ShardTensor), name
                torch.testing.assert_close(_full(result), function(whole), msg=name)


@pytest.mark.ranks(1, 2, 3)
def test_gradients_of_plain_leaves_are_plain_complete_and_equal() -> None:
    """Field case A3: each rank sees its own rows, but the gradient is that of all of them."""
    whole, t = _input()
    makers: list[Callable[[], torch.Tensor]] = [
        row.clone,
        column.clone,
        scalar.clone,
        whole.clone,
        lambda: whole[:, :1].clone(),
    ]
    for make in makers:
        for use in (lambda x, w: x * w, lambda x, w: w / (x + 3) + w * x, lambda x, w: torch.mul(x, other=w)):
            expected, weight = make().requires_grad_(), make().requires_grad_()
            use(whole, expected).sum().backward()
            use(t, weight).sum().backward()
            assert type(weight.grad) is torch.Tensor
            torch.testing.assert_close(weight.grad, expected.grad)


@pytest.mark.ranks(2)
def test_the_field_case_of_a_replicated_operand() -> None:
    mesh = _mesh()
    x = shard(torch.tensor([[1.0, 2], [3, 4], [5, 6]]), mesh, Layout((Shard(0),), {0: (1, 2)}))
    weight = torch.ones(2, requires_grad=True)
    (x * weight).sum().backward()
    assert torch.equal(weight.grad, torch.tensor([9.0, 12.0]))  # type: ignore[arg-type]
    as_dtensor = distribute_tensor(torch.ones(2), mesh, [Replicate()]).requires_grad_()
    (x * as_dtensor).sum().backward()
    assert isinstance(as_dtensor.grad, DTensor) and not isinstance(as_dtensor.grad, ShardTensor)
    assert torch.equal(as_dtensor.grad.full_tensor(), torch.tensor([9.0, 12.0]))
    for shape in [(2,), (3, 2)]:
        replicated = shard(torch.ones(shape), mesh, Layout((Replicate(),)), requires_grad=True)
        (x * replicated + replicated).sum().backward()
        expected = torch.tensor([9.0, 12.0]) + 3 if shape == (2,) else _full(x) + 1
        assert torch.equal(_full(replicated.grad), expected)


@pytest.mark.ranks(2, 3)
def test_a_module_keeps_plain_parameters() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 5), torch.nn.GELU(), torch.nn.LayerNorm(5), torch.nn.Linear(5, 5)
    ).double()
    tied = torch.nn.Linear(5, 5).double()
    tied.weight = model[3].weight  # used twice
    whole, t = _input()
    tied(model(whole)).pow(2).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with fallback_mode("silent"):
        tied(model(t)).pow(2).sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert type(parameter.grad) is torch.Tensor
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.ranks(2)
def test_second_derivatives_through_promotion() -> None:
    whole, t = _input()
    for x in (whole, t):
        weight = row.clone().requires_grad_()
        (first,) = torch.autograd.grad((x * weight**3).sum(), weight, create_graph=True)
        assert type(first) is torch.Tensor
        (second,) = torch.autograd.grad((first * row).sum(), weight)
        torch.testing.assert_close(second, 6 * row * row * whole.sum((0, 1)))


@pytest.mark.ranks(1, 2)
def test_dtensors() -> None:
    whole, t = _input()
    mesh = t.device_mesh
    for placement in (Replicate(), Shard(1), Shard(2)):
        other = distribute_tensor(whole * 2, mesh, [placement]).requires_grad_()
        for result in (t * other, other * t, torch.mul(t, other=other), torch.stack([t, other])[0] * other):
            assert isinstance(result, ShardTensor)
            torch.testing.assert_close(_full(result), 2 * whole * whole)
        (other * t).sum().backward()
        assert isinstance(other.grad, DTensor) and other.grad.placements == (placement,)
        torch.testing.assert_close(other.grad.full_tensor(), whole)


@pytest.mark.ranks(4)
def test_a_dtensor_on_another_mesh() -> None:
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "domain"))
    t = shard(torch.ones(4, 2), square, Layout((Replicate(), Shard(0))))
    for mesh in (square["domain"], init_device_mesh("cpu", (4,), mesh_dim_names=("other",))):
        other = distribute_tensor(torch.ones(4, 2), mesh, [Replicate()])
        for call in (
            lambda other=other: t + other,
            lambda other=other: other * t,
            lambda other=other: torch.cat([t, other]),
        ):
            with pytest.raises(LayoutMismatchError, match=r"a DTensor on the mesh .* meets a ShardTensor on the mesh"):
                call()


@pytest.mark.ranks(2)
def test_wrong_global_sizes_raise_with_both() -> None:
    _, t = _input()
    for other, sizes in ((torch.ones(5), r"\[5\]"), (torch.ones(1, 9, 6), r"\[1, 9, 6\]")):
        with pytest.raises(RuntimeError, match=sizes + r".*\[1, 10, 6\]"):
            t + other


@pytest.mark.ranks(1, 2)
def test_modes() -> None:
    _, t = _input()
    assert ShardTensor.get_promotion_mode() is TensorPromotionMode.SILENT
    for mode in (TensorPromotionMode.DISABLED, "disabled"):
        with ShardTensor.promotion_mode(mode):
            assert ShardTensor.get_promotion_mode() is TensorPromotionMode.DISABLED
            for other in (row, row.clone().requires_grad_()):
                with pytest.raises(LayoutMismatchError, match=r"a plain tensor of shape \(6,\) meets a ShardTensor"):
                    t * other
            with pytest.raises(LayoutMismatchError, match="promotion is disabled"):
                torch.stack([t, torch.ones(1, 10, 6, dtype=torch.float64)])
            assert isinstance(t * scalar * 2, ShardTensor)  # scalars say nothing about a layout
        assert ShardTensor.get_promotion_mode() is TensorPromotionMode.SILENT
    with pytest.raises(ZeroDivisionError), ShardTensor.promotion_mode("warn"):
        raise ZeroDivisionError
    assert ShardTensor.get_promotion_mode() is TensorPromotionMode.SILENT
    with pytest.raises(ValueError, match="loud"):
        ShardTensor.set_promotion_mode("loud")
    with pytest.raises(ValueError, match="loud"), ShardTensor.promotion_mode("loud"):
        pass


@pytest.mark.ranks(1)
def test_warnings_are_logged_each_time() -> None:
    records: list[str] = []

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    recorder = Recorder()
    logging.getLogger("shardtensor").addHandler(recorder)
    try:
        _, t = _input()
        with ShardTensor.promotion_mode(TensorPromotionMode.WARN):
            for _ in range(3):
                t * row
            t * row.clone().requires_grad_()
            t * scalar
    finally:
        logging.getLogger("shardtensor").removeHandler(recorder)
    assert len(records) == 4
    assert all("plain tensor of shape (6,) is replicated" in record for record in records)


@pytest.mark.ranks(1)
def test_threads_have_their_own_context_and_share_the_default() -> None:
    seen: dict[str, TensorPromotionMode] = {}

    def look(name: str) -> None:
        seen[name] = ShardTensor.get_promotion_mode()

    def in_thread(name: str) -> None:
        thread = threading.Thread(target=look, args=(name,))
        thread.start()
        thread.join()

    with ShardTensor.promotion_mode("disabled"):
        in_thread("inside a block")
        ShardTensor.set_promotion_mode("warn")
        look("the block itself")
        in_thread("after setting")
    look("after the block")
    ShardTensor.set_promotion_mode("silent")
    assert seen == {
        "inside a block": TensorPromotionMode.SILENT,
        "the block itself": TensorPromotionMode.DISABLED,
        "after setting": TensorPromotionMode.WARN,
        "after the block": TensorPromotionMode.WARN,
    }


@pytest.mark.ranks(2)
def test_a_plain_accumulator_receives_the_complete_value() -> None:
    """``plain += sharded``: the plain tensor stays what it is, on every rank."""
    whole, t = _input()
    total = torch.zeros(1, 10, 6, dtype=torch.float64)
    address = total.data_ptr()
    total += t
    assert type(total) is torch.Tensor and total.data_ptr() == address and torch.equal(total, whole)
    total.copy_(t * 2)
    assert torch.equal(total, 2 * whole)
    buffer = torch.zeros(2, 10, 6, dtype=torch.float64)
    buffer[1] = t[0]
    assert torch.equal(buffer, torch.stack([torch.zeros(10, 6).double(), whole[0]]))
    torch.add(t, 1.0, out=total)
    assert torch.equal(total, whole + 1)
