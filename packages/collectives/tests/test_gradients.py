"""Every gradient is the adjoint of its collective, on whatever thread autograd runs it."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from rank_helpers import ramp, sizes_for

import shardtensor_collectives as sc


def world():
    return dist.group.WORLD


def weight(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def total(value):
    """Sum of a number over all ranks."""
    value = value.detach().clone()
    dist.all_reduce(value)
    return value


def check_adjoint(call, source, seed):
    """<call(x), y> summed over ranks equals <x, grad>, for this rank's x and y."""
    for options in ({}, {"async_op": True}):
        x = source.clone().requires_grad_()
        result = call(x, **options)
        if isinstance(result, sc.Pending):
            with torch.no_grad():  # the history belongs to the call, not to the wait
                result = result.wait()
        assert result.requires_grad
        y = weight(*result.shape, seed=100 * seed + dist.get_rank())
        (grad,) = torch.autograd.grad(result, x, y)
        assert grad.shape == x.shape
        torch.testing.assert_close(total((result * y).sum()), total((grad * x).sum()))
        assert total(grad.abs().sum()) > 0


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("kind", ["even", "uneven", "empty"])
@pytest.mark.parametrize("dim", [0, 1])
def test_adjoints(kind, dim):
    rank, n = dist.get_rank(), dist.get_world_size()
    sizes = sizes_for(kind, n)
    if sum(sizes) == 0:
        pytest.skip("nothing there")
    shape = [3, 2]
    shape[dim] = sum(sizes)
    mine = list(shape)
    mine[dim] = sizes[rank]
    local, full = weight(*mine, seed=rank), weight(*shape, seed=10 + rank)
    root = n - 1
    check_adjoint(lambda x, **o: sc.all_gather_v(x, sizes, dim, world(), **o), local, 1)
    check_adjoint(lambda x, **o: sc.reduce_scatter_v(x, sizes, dim, world(), **o), full, 2)
    check_adjoint(lambda x, **o: sc.reduce_scatter_v(x, sizes, dim, world(), op="mean", **o), full, 3)
    check_adjoint(lambda x, **o: sc.gather_v(x, sizes, dim, world(), destination=root, **o), local, 4)
    check_adjoint(lambda x, **o: sc.scatter_v(x, sizes, dim, world(), source=root, **o), full, 5)
    check_adjoint(lambda x, **o: sc.broadcast(x, world(), source=root, **o), full, 6)
    check_adjoint(lambda x, **o: sc.reduce(x, world(), destination=root, **o), full, 7)
    check_adjoint(lambda x, **o: sc.all_reduce(x, world(), **o), full, 8)
    check_adjoint(lambda x, **o: sc.all_reduce(x, world(), op="mean", **o), full, 9)
    other = sizes_for("uneven", n)
    block = list(mine)
    block[1 - dim] = sum(other)
    check_adjoint(
        lambda x, **o: sc.all_to_all_v(x, other, sizes, world(), send_dim=1 - dim, receive_dim=dim, **o),
        weight(*block, seed=20 + rank),
        10,
    )
    if n > 1:
        check_adjoint(lambda x, **_: sc.ring_shift(x, sizes[(rank - 1) % n], dim, world()), local, 11)


@pytest.mark.ranks(2, 3)
def test_second_derivative():
    rank, n = dist.get_rank(), dist.get_world_size()
    sizes = sizes_for("uneven", n)
    x = ramp(sizes[rank], 2).requires_grad_()
    gathered = sc.all_gather_v(x, sizes, 0, world())
    (first,) = torch.autograd.grad((gathered**3).sum(), x, create_graph=True)
    torch.testing.assert_close(first, 3 * n * x**2)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 6 * n * x)


@pytest.mark.ranks(2)
def test_ring_of_blocks_has_gradients():
    rank, n = dist.get_rank(), dist.get_world_size()
    sizes = [3, 1]
    x = (ramp(sizes[rank], 2) + 1).requires_grad_()
    loss = sum(((owner + 1) * block**2).sum() for owner, block in sc.ring_blocks(x, sizes, 0, world()))
    loss.backward()
    torch.testing.assert_close(x.grad, n * 2 * (rank + 1) * x.detach())


@pytest.mark.ranks(2)
def test_no_history_without_need():
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not sc.all_reduce(x, world()).requires_grad
    assert not sc.all_reduce(x.detach(), world()).requires_grad
    with pytest.raises(ValueError, match="has no gradient"):
        sc.all_reduce(x, world(), op="max")
    assert sc.all_reduce(x.detach(), world(), op="max").sum() == 2


@pytest.mark.ranks(2)
def test_backward_on_another_thread_keeps_the_operator():
    x = torch.ones(2, 3, requires_grad=True)
    with sc.comm_trace() as trace:
        with sc.operator_range("aten.mm"):
            y = sc.all_gather_v(x, [2, 2], 0, world(), axis="domain")
        thread = threading.Thread(target=lambda: y.sum().backward())
        thread.start()
        thread.join()
    assert [(event.operator, event.collective, event.axis) for event in trace] == [
        ("aten.mm", "all_gather_v", "domain"),
        ("aten.mm backward", "reduce_scatter_v", "domain"),
    ]
