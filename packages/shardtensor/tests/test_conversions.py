"""Out of ShardTensors and to DTensors and back: values, and where gradients come from."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardtensor import LayoutMismatchError, ShardTensor
from shardtensor.testing import Layout, layouts_of, shard
from shardtensor_collectives import comm_trace


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))


def _whole(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).view(shape)


def _pending(mesh: DeviceMesh, whole: torch.Tensor) -> ShardTensor:
    """Contributions (1, 2, ...) / total of a whole tensor, as a leaf."""
    n = mesh.size()
    share = (dist.get_rank() + 1) / (n * (n + 1) / 2)
    return ShardTensor.from_local(whole * share, mesh, [Partial()]).requires_grad_()


@pytest.mark.ranks(1, 2, 3)
def test_full_tensor_and_its_gradient() -> None:
    mesh, whole = _mesh(), _whole(5, 3)
    for layout in [*layouts_of(whole.shape, mesh), Layout((Replicate(),))]:
        t = shard(whole, mesh, layout, requires_grad=True)
        full = t.full_tensor()
        assert type(full) is torch.Tensor and torch.equal(full, whole)
        (full * whole).sum().backward()  # every rank has the whole gradient
        assert t.grad is not None and t.grad._spec is t._spec
        torch.testing.assert_close(t.grad.full_tensor(), whole)


@pytest.mark.ranks(1, 2, 3)
def test_gradients_that_are_contributions() -> None:
    """Each rank's loss is its own part of the whole one, so the gradients add up."""
    mesh, rank, whole = _mesh(), dist.get_rank(), _whole(5, 3)
    factor = sum(range(1, mesh.size() + 1))
    for layout in layouts_of(whole.shape, mesh):
        t = shard(whole, mesh, layout, requires_grad=True)
        (t.full_tensor(grad_placements=[Partial()]) * whole * (rank + 1)).sum().backward()
        assert t.grad is not None and t.grad._spec is t._spec
        torch.testing.assert_close(t.grad.full_tensor(), whole * factor)
    t = shard(whole, mesh, Layout((Replicate(),)), requires_grad=True)
    (t.to_local(grad_placements=[Partial()]) * (rank + 1)).sum().backward()
    assert t.grad is not None and t.grad.placements == (Partial(),)  # as told: the sum is still to be done
    torch.testing.assert_close(t.grad.full_tensor(), torch.full_like(whole, factor))


@pytest.mark.ranks(2, 3)
def test_gradient_of_a_replica_cut_into_shards() -> None:
    """Every rank uses its own rows of its copy only, and says so by the placements of the gradient."""
    mesh, rank, whole = _mesh(), dist.get_rank(), _whole(6, 2)
    t = shard(whole, mesh, Layout((Replicate(),)), requires_grad=True)
    with pytest.raises(LayoutMismatchError, match="no shard of a gradient with these grad_placements"):
        t.to_local(grad_placements=[Shard(0)])
    mine = t.redistribute(placements=[Shard(0)]).to_local()
    (mine * (rank + 1)).sum().backward()
    assert t.grad is not None and t.grad.placements == (Replicate(),)
    expected = torch.cat([torch.full((6 // mesh.size(), 2), r + 1.0) for r in range(mesh.size())]).double()
    torch.testing.assert_close(t.grad.full_tensor(), expected)


@pytest.mark.ranks(1, 2, 3)
def test_to_local_is_the_shard_itself() -> None:
    mesh, rank, whole = _mesh(), dist.get_rank(), _whole(5, 3)
    for layout in layouts_of(whole.shape, mesh):
        t = shard(whole, mesh, layout, requires_grad=True)
        with comm_trace() as trace:
            local = t.to_local()
            assert local.data_ptr() == t._local_tensor.data_ptr()
            (local * (rank + 1)).sum().backward()
        assert not trace.events
        assert t.grad is not None and t.grad._spec is t._spec
        assert bool((t.grad._local_tensor == rank + 1).all())


@pytest.mark.ranks(1, 2, 3)
def test_pending_values() -> None:
    mesh, whole = _mesh(), _whole(4, 2)
    t = _pending(mesh, whole)
    local = t.to_local()
    assert torch.equal(local, t._local_tensor)  # the contribution, not the sum
    torch.testing.assert_close(t.full_tensor(), whole)
    (t.full_tensor() * whole).sum().backward()
    assert t.grad is not None and t.grad.placements == (Replicate(),)
    torch.testing.assert_close(t.grad.to_local(), whole)


@pytest.mark.ranks(2)
def test_wrong_gradient_placements() -> None:
    t = shard(_whole(5, 3), _mesh(), Layout((Shard(0),)))
    with pytest.raises(LayoutMismatchError, match=r"2 placements .* a mesh of 1 axes"):
        t.to_local(grad_placements=[Shard(0), Shard(0)])
    with pytest.raises(IndexError, match=r"Shard\(2\) is out of range"):
        t.full_tensor(grad_placements=[Shard(2)])


@pytest.mark.ranks(1, 2, 3)
def test_from_dtensor() -> None:
    mesh, whole = _mesh(), _whole(5, 3)
    for placement in (Shard(0), Shard(1), Replicate()):
        d = distribute_tensor(whole, mesh, [placement]).requires_grad_()
        with comm_trace() as trace:
            t = ShardTensor.from_dtensor(d * 1)
        assert not trace.events
        assert isinstance(t, ShardTensor) and t.placements == (placement,) and not t.is_leaf
        assert torch.equal(t.full_tensor(), whole)
        (t.full_tensor() * whole).sum().backward()
        assert isinstance(d.grad, DTensor) and d.grad.placements == (placement,)
        torch.testing.assert_close(d.grad.full_tensor(), whole)
    leaf = distribute_tensor(whole, mesh, [Shard(0)])
    assert ShardTensor.from_dtensor(leaf)._local_tensor.data_ptr() == leaf._local_tensor.data_ptr()
    t = ShardTensor.from_dtensor(leaf)
    assert ShardTensor.from_dtensor(t) is t  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="from_dtensor takes a DTensor, not a Tensor"):
        ShardTensor.from_dtensor(whole)  # type: ignore[arg-type]


@pytest.mark.ranks(1, 2, 3, 4)
def test_to_dtensor_recuts_what_a_dtensor_cannot_say() -> None:
    """Field case A6: a DTensor knows no other sizes than those of torch.chunk."""
    mesh, whole = _mesh(), _whole(7, 3)
    for layout in [*layouts_of(whole.shape, mesh), Layout((Replicate(),))]:
        t = shard(whole, mesh, layout, requires_grad=True)
        d = t.to_dtensor()
        assert isinstance(d, DTensor) and not isinstance(d, ShardTensor) and d.placements == t.placements
        assert d.to_local().shape == distribute_tensor(whole, mesh, t.placements).to_local().shape
        assert torch.equal(d.full_tensor(), whole)
        (d * d).to_local().sum().backward()
        assert t.grad is not None and t.grad._spec is t._spec
        torch.testing.assert_close(t.grad.full_tensor(), 2 * whole)
    back = ShardTensor.from_dtensor(_pending(mesh, whole).to_dtensor())
    assert back.placements == (Partial(),)
    torch.testing.assert_close(back.full_tensor(), whole)


@pytest.mark.ranks(4)
def test_sizes_of_a_dtensor_round_trip() -> None:
    """Field case A6 with its values."""
    mesh, rank = _mesh(), dist.get_rank()
    rows = (2, 5, 0, 3)
    t = ShardTensor.from_local(torch.full((rows[rank],), float(rank)), mesh, [Shard(0)])
    expected = torch.tensor([0.0, 0, 1, 1, 1, 1, 1, 3, 3, 3])
    assert torch.equal(t.full_tensor(), expected)
    assert torch.equal(t.to_dtensor().full_tensor(), expected)
    assert t.to_dtensor().to_local().shape == ((3, 3, 3, 1)[rank],)
    assert torch.equal(t.flip(0).full_tensor(), expected.flip(0))


@pytest.mark.ranks(4)
def test_dtensors_on_two_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = _whole(5, 3)
    for placements in [(Shard(0), Shard(1)), (Shard(0), Shard(0)), (Replicate(), Shard(1)), (Shard(1), Replicate())]:
        t = ShardTensor.from_dtensor(distribute_tensor(whole, mesh, placements))
        assert torch.equal(t.full_tensor(), whole), placements
        assert torch.equal(t.to_dtensor().full_tensor(), whole), placements
