"""A ShardTensor as autograd sees it: leaves, hooks, gradients, copies."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import ShardTensor
from shardtensor.testing import Layout, shard


def _whole(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def _make(*, requires_grad: bool = False) -> tuple[torch.Tensor, ShardTensor]:
    """Five rows, one of them on the first rank, the others on the last."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))
    rows = [0] * mesh.size()
    rows[-1] = 4
    rows[0] += 1
    whole = _whole(5, 2)
    return whole, shard(whole, mesh, Layout((Shard(0),), {0: rows}), requires_grad=requires_grad)


def _full(tensor: Any) -> torch.Tensor:
    assert isinstance(tensor, ShardTensor)
    return tensor.detach().full_tensor()


@pytest.mark.ranks(1, 2, 3)
def test_requires_grad_in_place() -> None:
    """Field case F1."""
    whole, t = _make()
    assert not t.requires_grad and t.is_leaf
    assert t.requires_grad_(True) is t
    assert t.requires_grad and t.is_leaf and t.grad is None and t.grad_fn is None
    (t * t).sum().backward()
    assert t.grad is not None and t.grad._spec is t._spec and not t.grad.requires_grad
    torch.testing.assert_close(_full(t.grad), 2 * whole)
    (t * t).sum().backward()  # accumulates
    torch.testing.assert_close(_full(t.grad), 4 * whole)
    t.requires_grad = False
    assert not t.requires_grad and not (t * t).requires_grad
    assert t.requires_grad_().requires_grad
    assert t.grad_dtype == torch.float64


@pytest.mark.ranks(1, 2)
def test_results_are_not_leaves() -> None:
    _, t = _make(requires_grad=True)
    result = t * 2
    assert result.requires_grad and not result.is_leaf
    assert result.grad_fn is not None and result.grad_fn.name() == "MulBackward0"
    assert result.grad_fn.next_functions[0][0].variable is t
    with pytest.raises(RuntimeError, match="you can only change requires_grad flags of leaf variables"):
        result.requires_grad_(False)
    with pytest.warns(UserWarning, match="non-leaf"):
        assert result.grad is None


@pytest.mark.ranks(1, 2, 3)
def test_hooks_and_retained_gradients() -> None:
    whole, t = _make(requires_grad=True)
    seen: list[Any] = []
    middle = t * 3
    middle.retain_grad()
    handle = middle.register_hook(lambda gradient: seen.append(gradient) or gradient * 10)  # type: ignore[func-returns-value]
    t.register_post_accumulate_grad_hook(lambda tensor: seen.append(tensor))
    (middle * middle).sum().backward()
    assert len(seen) == 2 and seen[1] is t
    torch.testing.assert_close(_full(seen[0]), 6 * whole)
    torch.testing.assert_close(_full(middle.grad), 60 * whole)
    torch.testing.assert_close(_full(t.grad), 180 * whole)
    handle.remove()


@pytest.mark.ranks(1, 2, 3)
def test_autograd_grad_and_second_derivatives() -> None:
    whole, t = _make(requires_grad=True)
    loss = (t * t * t).sum()
    (first,) = torch.autograd.grad(loss, t, create_graph=True)
    torch.testing.assert_close(_full(first), 3 * whole**2)
    (second,) = torch.autograd.grad(first.sum(), [t])
    torch.testing.assert_close(_full(second), 6 * whole)
    assert t.grad is None
    unused = torch.autograd.grad((t * 1).sum(), [t, t.detach().requires_grad_()], allow_unused=True)
    assert unused[1] is None


@pytest.mark.ranks(1, 2)
def test_gradients_can_be_set_and_cleared() -> None:
    whole, t = _make(requires_grad=True)
    t.grad = t.detach() * 2
    torch.testing.assert_close(_full(t.grad), 2 * whole)
    (t * 1).sum().backward()
    torch.testing.assert_close(_full(t.grad), 2 * whole + 1)
    t.grad = None
    assert t.grad is None
    optimizer = torch.optim.SGD([t], lr=0.5)
    (t * t).sum().backward()
    optimizer.step()
    torch.testing.assert_close(_full(t), torch.zeros_like(whole))
    optimizer.zero_grad()
    assert t.grad is None
    t.backward(t.detach())
    torch.testing.assert_close(_full(t.grad), torch.zeros_like(whole))


@pytest.mark.ranks(1, 2, 3)
def test_backward_of_a_pending_tensor() -> None:
    whole, t = _make(requires_grad=True)
    n = t.device_mesh.size()
    pending = ShardTensor.from_local(t.to_local().sum(0), t.device_mesh, [Partial()])
    assert pending.placements == (Partial(),)
    seed = ShardTensor.from_local(torch.tensor([1.0, 10.0], dtype=torch.float64), t.device_mesh, [Replicate()])
    pending.backward(seed)
    torch.testing.assert_close(_full(t.grad), torch.tensor([1.0, 10.0], dtype=torch.float64).expand(5, 2))
    t.grad = None
    ShardTensor.from_local(t.to_local().sum(), t.device_mesh, [Partial()]).backward()
    torch.testing.assert_close(_full(t.grad), torch.ones_like(whole))
    assert n == dist.get_world_size()


@pytest.mark.ranks(1, 2)
def test_detach_and_data_share_memory() -> None:
    whole, t = _make(requires_grad=True)
    for alias in (t.detach(), t.data):
        assert isinstance(alias, ShardTensor) and not alias.requires_grad and alias._spec is t._spec
        assert alias._local_tensor.data_ptr() == t._local_tensor.data_ptr()
    with torch.no_grad():
        t.mul_(2)
    torch.testing.assert_close(_full(t), 2 * whole)
    t.data.add_(1)
    torch.testing.assert_close(_full(t), 2 * whole + 1)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        t.mul_(2)


@pytest.mark.ranks(1, 2)
def test_data_can_be_replaced() -> None:
    whole, t = _make(requires_grad=True)
    other = shard(whole * 5, t.device_mesh, Layout((Replicate(),)))
    t.data = other
    assert t.placements == (Replicate(),) and t.is_leaf and t.requires_grad
    torch.testing.assert_close(_full(t), 5 * whole)
    assert t._local_tensor.data_ptr() == other._local_tensor.data_ptr()
    with pytest.raises(TypeError, match="the data of a ShardTensor must be a ShardTensor, not a Tensor"):
        t.data = whole
    with pytest.raises(ValueError, match=r"shape \(5, 2\) cannot become one of \(2, 2\)"):
        t.data = shard(whole[:2], t.device_mesh, Layout((Replicate(),)))
    with pytest.raises(NotImplementedError, match=r"not torch.float64 on cpu by torch.float32 on cpu"):
        t.data = other.float()


@pytest.mark.ranks(1, 2)
def test_copies_and_pickles() -> None:
    whole, t = _make(requires_grad=True)
    (t * t).sum().backward()
    for twin in (copy.deepcopy(t), pickle.loads(pickle.dumps(t))):
        assert type(twin) is ShardTensor and twin._spec is t._spec and twin.requires_grad and twin.is_leaf
        assert twin._local_tensor.data_ptr() != t._local_tensor.data_ptr()
        torch.testing.assert_close(_full(twin), whole)
    assert copy.deepcopy(t).grad is not None
    torch.testing.assert_close(_full(copy.deepcopy(t).grad), 2 * whole)
    twice: Any = copy.deepcopy([t, t])
    assert twice[0] is twice[1]
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(t * 2)
    shallow = copy.copy(t)
    assert shallow._local_tensor is not None and shallow._spec is t._spec


@pytest.mark.ranks(1, 2)
def test_parameters() -> None:
    whole, t = _make()
    parameter = torch.nn.Parameter(t)
    assert isinstance(parameter, torch.nn.Parameter) and isinstance(parameter, ShardTensor)
    assert parameter.requires_grad and parameter.is_leaf and parameter._spec is t._spec

    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = parameter

    module = Scale()
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    (module.weight * module.weight).sum().backward()
    torch.testing.assert_close(_full(parameter.grad), 2 * whole)
    state = module.state_dict()
    module.load_state_dict({"weight": state["weight"] * 3})
    torch.testing.assert_close(_full(module.weight), 3 * whole)
    module.zero_grad()
    assert copy.deepcopy(module).weight._spec is t._spec
    module.to(torch.float32)
    assert module.weight.dtype == torch.float32 and isinstance(module.weight, ShardTensor)
    torch.testing.assert_close(_full(module.weight), 3 * whole.float())


@pytest.mark.ranks(1, 2)
def test_operators_on_a_tensor_without_gradients_record_none() -> None:
    _, t = _make(requires_grad=True)
    with torch.no_grad():
        assert not (t * 2).requires_grad
    with torch.inference_mode():
        result = t * 2
        assert result.is_inference() and not result.requires_grad
    assert not t.is_inference()
