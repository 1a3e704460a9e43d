"""Windows of the global tensor against narrow, roll and pad on the full one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from rank_helpers import noncontiguous, ramp, sizes_for

import shardtensor_collectives as sc
from shardtensor_spec import LayoutMismatchError, plan_exchange


def boxes_along(shape, dim, sizes):
    boxes, start = [], 0
    for size in sizes:
        box = [(0, extent) for extent in shape]
        box[dim] = (start, start + size)
        boxes.append(tuple(box))
        start += size
    return boxes


def halo(boxes, dim, before, after):
    wanted = []
    for box in boxes:
        window = list(box)
        start, stop = box[dim]
        window[dim] = (start - before, stop + after) if stop > start else (start, stop)
        wanted.append(tuple(window))
    return wanted


def window_of(full, box, circular, fill):
    """The same window, index by index, from the full tensor."""
    result = full
    for dim, (start, stop) in enumerate(box):
        extent = full.shape[dim]
        index = torch.arange(start, stop)
        inside = torch.ones_like(index, dtype=torch.bool) if dim in circular else (index >= 0) & (index < extent)
        index = index % extent if dim in circular else index.clamp(0, max(extent - 1, 0))
        result = result.index_select(dim, index)
        shape = [1] * full.ndim
        shape[dim] = -1
        result = torch.where(inside.view(shape), result, torch.tensor(fill, dtype=full.dtype))
    return result


def case(name, n):
    """Full tensor, owners, windows, circular dims."""
    if name == "reshard":
        full = ramp(sum(sizes_for("uneven", n)), 3, sum(sizes_for("empty", n)))
        owned = boxes_along(full.shape, 0, sizes_for("uneven", n))
        return full, owned, boxes_along(full.shape, 2, sizes_for("empty", n)), ()
    kind = {"thin": "uneven", "empty": "empty"}.get(name, "even")
    sizes = sizes_for(kind, n)
    dim = 1
    full = ramp(2, sum(sizes) + 0, 3) + 1
    owned = boxes_along(full.shape, dim, sizes)
    circular = (dim,) if name in ("periodic", "long") and full.shape[dim] else ()
    reach = (2 * full.shape[dim], 1) if name == "long" else (2, 3) if name in ("thin", "empty") else (1, 1)
    return full, owned, halo(owned, dim, *reach), circular


CASES = ["reshard", "halo", "thin", "empty", "periodic", "long"]


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", CASES)
def test_exchange_fills_windows(name):
    rank, n = dist.get_rank(), dist.get_world_size()
    full, owned, wanted, circular = case(name, n)
    plan = plan_exchange(owned, wanted, rank, global_shape=full.shape, circular=circular)
    local = full[tuple(slice(start, stop) for start, stop in owned[rank])]
    expected = window_of(full, wanted[rank], circular, 7.0)
    for tensor in (local.contiguous(), noncontiguous(local)):
        with sc.comm_trace() as trace:
            window = sc.exchange(tensor, plan, dist.group.WORLD, fill=7)
        assert torch.equal(window, expected) and window.is_contiguous()
        assert (len(trace) == 0) == plan.moves_nothing
        assert trace.bytes_received == 8 * plan.n_received
        assert trace.bytes_sent == 8 * plan.n_sent
    assert torch.equal(sc.exchange(local, plan, dist.group.WORLD, fill=7, async_op=True).wait(), expected)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", CASES)
def test_adjoint_is_the_transpose(name):
    rank, n = dist.get_rank(), dist.get_world_size()
    full, owned, wanted, circular = case(name, n)
    # What autograd gives for the same windows of one full tensor.
    whole = full.clone().requires_grad_()
    weights = [torch.sin(ramp(*[stop - start for start, stop in box]) + peer) for peer, box in enumerate(wanted)]
    sum((window_of(whole, box, circular, 0.0) * w).sum() for box, w in zip(wanted, weights, strict=True)).backward()
    expected = whole.grad[tuple(slice(start, stop) for start, stop in owned[rank])]

    plan = plan_exchange(owned, wanted, rank, global_shape=full.shape, circular=circular)
    result = sc.exchange_adjoint(weights[rank], plan, dist.group.WORLD)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    again = sc.exchange_adjoint(noncontiguous(weights[rank]), plan, dist.group.WORLD, async_op=True).wait()
    assert torch.equal(again, result)  # the same bits each time

    local = full[tuple(slice(start, stop) for start, stop in owned[rank])].clone().requires_grad_()
    sc.exchange(local, plan, dist.group.WORLD).backward(weights[rank])
    assert torch.equal(local.grad, result)

    window = weights[rank].clone().requires_grad_()
    sc.exchange_adjoint(window, plan, dist.group.WORLD).backward(local.detach())
    assert torch.equal(window.grad, sc.exchange(local.detach(), plan, dist.group.WORLD))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.complex64, torch.bfloat16, torch.int16, torch.float8_e5m2], ids=str
)
def test_exchange_moves_every_kind_of_dtype(dtype):
    rank, n = dist.get_rank(), dist.get_world_size()
    full, owned, wanted, _ = case("halo", n)
    full = (full % 3).to(dtype)
    plan = plan_exchange(owned, wanted, rank, global_shape=full.shape)
    local = full[tuple(slice(start, stop) for start, stop in owned[rank])]
    window = sc.exchange(local, plan, dist.group.WORLD)
    expected = window_of(full.to(torch.complex128), wanted[rank], (), 0.0)
    assert torch.equal(window.to(torch.complex128), expected)


@pytest.mark.ranks(2)
def test_a_plan_for_something_else_is_refused():
    rank, n = dist.get_rank(), dist.get_world_size()
    full, owned, wanted, _ = case("halo", n)
    plan = plan_exchange(owned, wanted, rank, global_shape=full.shape)
    with pytest.raises(LayoutMismatchError, match="the plan is for a tensor of shape"):
        sc.exchange(torch.ones(1), plan, dist.group.WORLD)
    other = plan_exchange(owned, wanted, 1 - rank, global_shape=full.shape)
    with pytest.raises(LayoutMismatchError, match=f"rank {1 - rank} of 2, but this is rank {rank}"):
        sc.exchange_adjoint(torch.ones(other.window_shape), other, dist.group.WORLD)
