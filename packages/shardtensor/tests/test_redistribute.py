"""Every transition between layouts, on one- and two-dimensional meshes, with gradients and bytes."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import ShardTensor
from shardtensor.extending import contiguous_meta, make_spec, transition, wrap
from shardtensor.testing import Layout, layouts_of, shard, splits
from shardtensor_collectives import comm_trace
from shardtensor_spec import DimSplit, ShardTensorSpec, lower_bound_elements


def _whole(shape: tuple[int, ...] = (7, 4, 3)) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).view(shape)


@pytest.mark.ranks(1, 2, 3, 4)
def test_every_pair_of_layouts() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))
    x = _whole()
    layouts = [*layouts_of(x.shape, mesh), Layout((Replicate(),))]
    for before, after in itertools.product(layouts, layouts):
        t = shard(x, mesh, before, requires_grad=True)
        with comm_trace() as trace:
            r = t.redistribute(placements=after.placements, sharding_shapes=after.sizes)
        assert r.placements == after.placements
        assert r._spec.sizes() == {dim: tuple(sizes) for dim, sizes in after.sizes.items()}
        assert torch.equal(r.full_tensor(), x), (before, after)
        source, target = t._spec, r._spec
        coordinates = source.coordinates()
        bound = lower_bound_elements(
            [source.box_at(c) for c in coordinates],
            [target.box_at(c) for c in coordinates],
            dist.get_rank(),
            global_shape=tuple(x.shape),
        )
        assert sum(event.bytes_received for event in trace.events) == bound * 8, (before, after, trace.events)
        (r * x).backward(r.detach())
        assert t.grad is not None
        assert t.grad._spec is t._spec
        assert torch.equal(t.grad.full_tensor(), x * x)


@pytest.mark.ranks(4)
def test_every_pair_of_layouts_on_a_two_dimensional_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = _whole((5, 4))
    layouts = [
        *layouts_of(x.shape, mesh),
        Layout((Replicate(), Replicate())),
        Layout((Shard(0), Shard(0)), {0: (1, 0, 3, 1)}),
    ]
    for before, after in itertools.product(layouts, layouts):
        t = shard(x, mesh, before)
        with comm_trace() as trace:
            r = t.redistribute(placements=after.placements, sharding_shapes=after.sizes)
        assert torch.equal(r.full_tensor(), x), (before, after)
        is_gathered = all(isinstance(p, Replicate) for p in after.placements)
        if not is_gathered and any(p != q for p, q in zip(before.placements, after.placements, strict=True)):
            received = sum(event.bytes_received for event in trace.events)
            assert received <= r._local_tensor.nbytes, (before, after, trace.events)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("reduce_op", ["sum", "avg", "min", "max", "product"])
def test_pending_reductions_end_in_every_layout(reduce_op: str) -> None:
    n_ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (n_ranks,), mesh_dim_names=("domain",))
    parts = torch.stack([_whole((5, 2)) * (r + 1) - 3 * r for r in range(n_ranks)])
    want = {
        "sum": parts.sum(0),
        "avg": parts.mean(0),
        "min": parts.amin(0),
        "max": parts.amax(0),
        "product": parts.prod(0),
    }[reduce_op]
    for layout in [*layouts_of((5, 2), mesh), Layout((Replicate(),))]:
        t = ShardTensor.from_local(parts[rank].clone(), mesh, [Partial(reduce_op)])
        r = t.redistribute(placements=layout.placements, sharding_shapes=layout.sizes)
        assert torch.equal(r.full_tensor(), want), layout


@pytest.mark.ranks(4)
def test_a_pending_axis_beside_a_moving_one() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    a, b = mesh.get_coordinate()
    x = _whole((5, 4))
    for first, second in itertools.product(splits(5, 2), splits(4, 2)):
        source = make_spec(mesh, contiguous_meta((5, 4), x.dtype), {0: DimSplit((1,), first)}, {0: "sum"})
        start = sum(first[:b])
        local = (x * (a + 1))[start : start + first[b]]
        target = make_spec(mesh, contiguous_meta((5, 4), x.dtype), {1: DimSplit((1,), second)}, {0: "sum"})
        moved = wrap(transition(local, source, target), target)
        assert torch.equal(moved.full_tensor(), 3 * x)
        both = make_spec(
            mesh, contiguous_meta((5, 4), x.dtype), {1: DimSplit((1,), second), 0: DimSplit((0,), splits(5, 2)[1])}
        )
        assert torch.equal(wrap(transition(local, source, both), both).full_tensor(), 3 * x)


@pytest.mark.ranks(1, 2, 3)
def test_folded_dims_come_and_go() -> None:
    """Two batches of split rows, seen as one dim: to and from every other layout of it."""
    n_ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (n_ranks,), mesh_dim_names=("domain",))
    x = _whole((8, 3))  # two repeats of four rows
    meta = contiguous_meta((8, 3), x.dtype)
    folded: list[ShardTensorSpec] = [make_spec(mesh, meta, {0: DimSplit((0,), s, 2)}) for s in splits(4, n_ranks)]
    folded += [make_spec(mesh, meta, {0: DimSplit((0,), s, 4)}) for s in splits(2, n_ranks)]
    others = [shard(x, mesh, layout)._spec for layout in [*layouts_of((8, 3), mesh), Layout((Replicate(),))]]
    for one in folded:
        for other in [*folded, *others]:
            local = transition(x, one.replicated(), one)
            assert tuple(local.shape) == tuple(one.local_shape)
            there = transition(local, one, other)
            assert tuple(there.shape) == tuple(other.local_shape), (one, other)
            assert torch.equal(wrap(there, other).full_tensor(), x), (one, other)
            assert torch.equal(transition(there, other, one), local), (one, other)


@pytest.mark.ranks(2)
def test_misuse_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    t = shard(_whole((4, 2)), mesh, Layout((Shard(0),), {0: (1, 3)}))
    with pytest.raises(RuntimeError, match="needs the placements"):
        t.redistribute()
    with pytest.raises(RuntimeError, match="cannot be redistributed to Partial"):
        t.redistribute(placements=[Partial()])
    with pytest.raises(ValueError, match=r"2 placements .* a mesh of 1 axes"):
        t.redistribute(placements=[Shard(0), Shard(1)])
    with pytest.raises(IndexError, match=r"Shard\(2\) is out of range for a tensor of 2 dims"):
        t.redistribute(placements=[Shard(2)])
    with pytest.raises(ValueError, match=r"shard sizes 1,4 along dim 0 sum to 5, but the global extent is 4"):
        t.redistribute(placements=[Shard(0)], sharding_shapes={0: (1, 4)})
    with pytest.raises(NotImplementedError, match="another one"):
        t.redistribute(init_device_mesh("cpu", (2,), mesh_dim_names=("other",)), [Shard(0)])
    assert t.redistribute(placements=[Shard(-1)]).placements == (Shard(1),)
