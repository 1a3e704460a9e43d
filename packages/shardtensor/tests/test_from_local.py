"""`ShardTensor.from_local`: every way to say the sizes, and gradients both ways."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import ShardTensor
from shardtensor.testing import splits
from shardtensor_collectives import comm_trace

Shapes = dict[int, list[tuple[int, ...]]]


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))


def _whole(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).view(shape)


def _rows(whole: torch.Tensor, dim: int, sizes: tuple[int, ...], index: int) -> torch.Tensor:
    return whole.split(list(sizes), dim)[index]


@pytest.mark.ranks(1, 2, 3, 4)
def test_infer_asks_for_the_sizes_in_one_small_collective() -> None:
    mesh, rank = _mesh(), dist.get_rank()
    whole = _whole(7, 3)
    for dim in (0, 1, -1):
        for sizes in splits(whole.shape[dim], mesh.size()):
            local = _rows(whole, dim, sizes, rank)
            with comm_trace() as trace:
                t = ShardTensor.from_local(local, mesh, [Shard(dim)])
            assert t.shape == whole.shape and t.placements == (Shard(dim % 2),)
            assert t._spec.sizes() == {dim % 2: sizes}
            assert torch.equal(t.full_tensor(), whole)
            assert t._local_tensor.data_ptr() == local.data_ptr() or local.numel() == 0
            assert [event.collective for event in trace.events] == ["all_gather_v"] * (mesh.size() > 1)
            assert all(event.bytes_sent <= 2048 * (mesh.size() - 1) for event in trace.events)


@pytest.mark.ranks(1, 2, 3, 4)
def test_known_sizes_need_no_communication() -> None:
    mesh, rank = _mesh(), dist.get_rank()
    whole = _whole(7, 3)
    with comm_trace() as trace:
        made = []
        for sizes in splits(7, mesh.size()):
            local = _rows(whole, 0, sizes, rank)
            shapes: Shapes = {0: [(n, 3) for n in sizes]}
            made.append((ShardTensor.from_local(local, mesh, [Shard(0)], shapes), sizes))
        chunk = splits(7, mesh.size())[0]
        local = _rows(whole, 0, chunk, rank)
        made.append((ShardTensor.from_local(local, mesh, [Shard(0)], "chunk", (7, 3)), chunk))
        replicated = ShardTensor.from_local(whole, mesh, [Replicate()], "chunk", (7, 3))
    assert not trace.events
    for t, sizes in made:
        assert t._spec.sizes() == {0: sizes}
        assert torch.equal(t.full_tensor(), whole)
    assert torch.equal(replicated.full_tensor(), whole)


@pytest.mark.ranks(4)
def test_two_axes() -> None:
    mesh, rank = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "domain")), dist.get_rank()
    first, second = mesh.get_coordinate() or (0, 0)
    whole = _whole(7, 5)
    grid = whole[[slice(0, 6), slice(6, 7)][first], [slice(0, 0), slice(0, 5)][second]]
    t = ShardTensor.from_local(grid, mesh, [Shard(0), Shard(1)])
    assert t._spec.sizes() == {0: (6, 1), 1: (0, 5)}
    assert torch.equal(t.full_tensor(), whole)
    shapes: Shapes = {0: [(6, grid.shape[1]), (1, grid.shape[1])], 1: [(grid.shape[0], 0), (grid.shape[0], 5)]}
    assert ShardTensor.from_local(grid, mesh, [Shard(0), Shard(1)], shapes)._spec is t._spec

    sizes = (1, 0, 4, 2)
    nested = _rows(whole, 0, sizes, rank)
    t = ShardTensor.from_local(nested, mesh, [Shard(0), Shard(0)])
    assert t._spec.sizes() == {0: sizes}
    assert torch.equal(t.full_tensor(), whole)
    # Along one axis nobody sees the rows of the other one's shards, so a mapping asks too.
    outer: Shapes = {0: [(1, 5), (4, 5)], 1: [(1, 5), (0, 5)]}
    assert ShardTensor.from_local(nested, mesh, [Shard(0), Shard(0)], outer)._spec is t._spec
    chunk = _rows(whole, 0, (2, 2, 2, 1), rank)
    with comm_trace() as trace:
        t = ShardTensor.from_local(chunk, mesh, [Shard(0), Shard(0)], "chunk", (7, 5))
    assert not trace.events
    assert torch.equal(t.full_tensor(), whole)

    mixed = ShardTensor.from_local(_rows(whole, 1, (2, 3), second), mesh, [Replicate(), Shard(1)])
    assert torch.equal(mixed.full_tensor(), whole)
    pending = ShardTensor.from_local(_rows(whole, 1, (2, 3), second) * (first + 1), mesh, [Partial(), Shard(1)])
    assert torch.equal(pending.full_tensor(), 3 * whole)


@pytest.mark.ranks(2)
def test_mesh_and_placements_have_defaults() -> None:
    mesh = _mesh()
    with mesh:
        t = ShardTensor.from_local(torch.ones(3))
        assert t.device_mesh == mesh and t.placements == (Replicate(),)
        sharded = ShardTensor.from_local(torch.ones(3), placements=[Shard(0)])
    assert sharded.shape == (6,)
    with pytest.raises(RuntimeError, match="No device mesh is currently active"):
        ShardTensor.from_local(torch.ones(3))


@pytest.mark.ranks(2)
def test_scalars_and_tensors_of_no_rows() -> None:
    mesh, rank = _mesh(), dist.get_rank()
    assert ShardTensor.from_local(torch.tensor(3.0), mesh, [Replicate()]).item() == 3
    assert ShardTensor.from_local(torch.tensor(rank + 1.0), mesh, [Partial()]).item() == 3
    nothing = ShardTensor.from_local(torch.ones(0, 4), mesh, [Shard(0)])
    assert nothing.shape == (0, 4) and nothing.full_tensor().shape == (0, 4)
    with pytest.raises(IndexError, match=r"Shard\(0\) is out of range for a tensor of 0 dims"):
        ShardTensor.from_local(torch.tensor(3.0), mesh, [Shard(0)])


@pytest.mark.ranks(2)
def test_stride_orders_are_agreed_upon() -> None:
    mesh, rank = _mesh(), dist.get_rank()
    whole = _whole(2, 3, 5, 4)
    last = whole.contiguous(memory_format=torch.channels_last)
    for sizes in [(2, 3), (0, 5)]:
        t = ShardTensor.from_local(_rows(last, 2, sizes, rank), mesh, [Shard(2)])
        assert t.stride() == last.stride() and t.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(t.full_tensor(), whole)
    # One rank's memory is laid out otherwise: all ranks must nevertheless build the same layout.
    mine = whole.transpose(0, 1) if rank else whole.transpose(0, 1).contiguous()
    t = ShardTensor.from_local(mine, mesh, [Replicate()])
    assert t.stride() == mine.contiguous().stride() == t._local_tensor.stride()
    assert torch.equal(t.view(-1).full_tensor(), mine.reshape(-1))


@pytest.mark.ranks(1, 2, 3)
def test_gradients_pass_both_ways() -> None:
    mesh, rank = _mesh(), dist.get_rank()
    whole = _whole(6, 2)
    sizes = splits(6, mesh.size())[-1]
    local = _rows(whole, 0, sizes, rank).clone().requires_grad_()
    t = ShardTensor.from_local(local * 1, mesh, [Shard(0)])
    assert t.requires_grad and not t.is_leaf
    out = (t * t).to_local()
    assert type(out) is torch.Tensor
    (out * out).sum().backward()  # each rank's own loss
    assert type(local.grad) is torch.Tensor
    torch.testing.assert_close(local.grad, 4 * local.detach() ** 3)

    weight = torch.full((2,), 2.0, dtype=torch.float64, requires_grad=True)
    replicated = ShardTensor.from_local(weight, mesh, [Replicate()])
    (t.detach() * replicated).sum().backward()
    torch.testing.assert_close(weight.grad, whole.sum(0))  # of the whole, on every rank

    with torch.no_grad():
        assert not ShardTensor.from_local(local, mesh, [Shard(0)]).requires_grad


@pytest.mark.ranks(2)
def test_gradient_of_a_contribution_is_whole() -> None:
    mesh, rank = _mesh(), dist.get_rank()
    local = torch.full((3,), rank + 1.0, dtype=torch.float64, requires_grad=True)
    t = ShardTensor.from_local(local, mesh, [Partial()])
    (t * torch.arange(3.0, dtype=torch.float64)).sum().backward()
    torch.testing.assert_close(local.grad, torch.arange(3.0, dtype=torch.float64))


@pytest.mark.ranks(2)
def test_second_derivatives_pass() -> None:
    mesh, rank = _mesh(), dist.get_rank()
    local = _rows(_whole(5), 0, (1, 4), rank).clone().requires_grad_()
    t = ShardTensor.from_local(local, mesh, [Shard(0)])
    (first,) = torch.autograd.grad((t * t * t).sum(), local, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), local)
    torch.testing.assert_close(second, 6 * local.detach())


@pytest.mark.ranks(2)
def test_check_passes_where_ranks_agree() -> None:
    mesh, rank = _mesh(), dist.get_rank()
    shapes: Shapes = {0: [(1, 2), (4, 2)]}
    local = torch.ones(shapes[0][rank])
    for how in ("infer", shapes):
        assert ShardTensor.from_local(local, mesh, [Shard(0)], how, check=True).shape == (5, 2)
