"""Roll, flip, repeat, shuffles, embedding and index_select on every layout, against plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import ShardTensor
from shardtensor.testing import Layout, check_op, fallback_mode, layouts_of, shard
from shardtensor_collectives import comm_trace

Function = Callable[[torch.Tensor], torch.Tensor]


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("domain",))


def _mesh_2d() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "domain"))


MOVERS: list[Function] = [
    lambda t: t.roll(1, 0),
    lambda t: t.roll((-2, 3), (0, 1)),
    lambda t: t.roll(17, 0),
    lambda t: t.roll(3),
    lambda t: t.flip(0),
    lambda t: t.flip(0, 1),
    lambda t: t.flip(-1),
    lambda t: t.rot90(),
    lambda t: t.rot90(2),
    lambda t: t.rot90(-1, (1, 0)),
    lambda t: t.fliplr(),
    lambda t: t.repeat(2, 1),
    lambda t: t.repeat(3, 1, 2),
    lambda t: t.tile(2),
    lambda t: t.repeat(2, 2).view(2, 7, 8).sum(0),
    lambda t: t.repeat_interleave(2, 0),
    lambda t: t.repeat_interleave(3, dim=1),
]


@pytest.mark.ranks(1, 3)
def test_rows_that_change_places() -> None:
    mesh = _mesh()
    x = torch.randn(7, 4, dtype=torch.float64)
    for layout in layouts_of(x.shape, mesh):
        for function in MOVERS:
            check_op(function, x, mesh=mesh, layouts=[layout], fallback="error")


@pytest.mark.ranks(4)
def test_rows_that_change_places_on_a_two_dimensional_mesh() -> None:
    mesh = _mesh_2d()
    x = torch.randn(7, 4, dtype=torch.float64)
    for layout in layouts_of(x.shape, mesh):
        for function in MOVERS:
            check_op(function, x, mesh=mesh, layouts=[layout], fallback="error")


@pytest.mark.ranks(2)
def test_only_rows_that_change_their_owner_are_sent() -> None:
    t = shard(torch.arange(10.0), _mesh(), Layout((Shard(0),), {0: (4, 6)}))
    with fallback_mode("error"), comm_trace() as trace:
        rolled = t.roll(1)
        repeated = t.repeat(3)
    assert rolled._spec is t._spec
    assert sum(event.bytes_received for event in trace.events) == 4
    assert repeated._spec.grid[0].n_repeats == 3
    pending = ShardTensor.from_local(torch.arange(3.0), t.device_mesh, [Partial()])
    assert pending.roll(1).flip(0).placements == (Partial(),)
    assert pending.roll(1).full_tensor().tolist() == [4, 0, 2]


@pytest.mark.ranks(2)
def test_shuffles_of_pixels_and_channels() -> None:
    """Field case A30: pixel_shuffle(2) on arange(40).view(1, 4, 5, 2), cut H [1, 4]."""
    mesh = _mesh()
    x = torch.arange(40.0, dtype=torch.float64).view(1, 4, 5, 2)
    cut = Layout((Shard(2),), {2: (1, 4)})
    shuffled = F.pixel_shuffle(shard(x, mesh, cut), 2)
    assert shuffled._spec.sizes() == {2: (2, 8)}
    assert shuffled.full_tensor().equal(F.pixel_shuffle(x, 2))
    for layout in [cut, *layouts_of(x.shape, mesh)]:
        check_op(lambda t: F.pixel_shuffle(t, 2), x, mesh=mesh, layouts=[layout], fallback="error")
        check_op(lambda t: F.channel_shuffle(t, 2), x, mesh=mesh, layouts=[layout], fallback="error")
    y = torch.randn(1, 2, 6, 4, dtype=torch.float64)
    for layout in [Layout((Shard(2),), {2: (1, 5)}), *layouts_of(y.shape, mesh)]:
        check_op(lambda t: F.pixel_unshuffle(t, 2), y, mesh=mesh, layouts=[layout], fallback="error")
    with pytest.raises(RuntimeError, match="pixel_shuffle"):
        F.pixel_shuffle(shard(x, mesh, cut), 3)


@pytest.mark.ranks(3)
def test_uneven_splits_through_unflatten_and_repeat_interleave() -> None:
    """Field case A30: extents that are no multiples."""
    mesh = _mesh()
    x = torch.randn(12, 3, dtype=torch.float64)
    for sizes in [(1, 5, 6), (5, 0, 7), (4, 4, 4)]:
        layout = Layout((Shard(0),), {0: sizes})
        check_op(lambda t: t.unflatten(0, (4, 3)).flatten(0, 1), x, mesh=mesh, layouts=[layout], fallback="error")
        check_op(lambda t: t.unflatten(0, (3, 4)).flatten(1), x, mesh=mesh, layouts=[layout], fallback="error")
        check_op(lambda t: t.repeat_interleave(2, dim=0), x, mesh=mesh, layouts=[layout], fallback="error")


@pytest.mark.ranks(3)
def test_embeddings_of_sharded_ids() -> None:
    mesh = _mesh()
    table = torch.randn(10, 4, dtype=torch.float64)
    ids = torch.tensor([[1, 9, 1, 0, 3], [2, 2, 7, 5, 9]])
    for layout in [*layouts_of(ids.shape, mesh), Layout((Replicate(),))]:
        for table_layout in (None, Layout((Shard(1),)), Layout((Shard(0),), {0: (3, 1, 6)})):
            layouts = [table_layout, layout]
            check_op(lambda w, i: F.embedding(i, w), table, ids, mesh=mesh, layouts=layouts, fallback="error")
            check_op(lambda w, i: F.embedding(i, w, padding_idx=2), table, ids, mesh=mesh, layouts=layouts)
        check_op(lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), table, ids, mesh=mesh, layouts=[None, layout])


@pytest.mark.ranks(1, 3)
def test_index_select() -> None:
    mesh = _mesh()
    x = torch.randn(9, 4, dtype=torch.float64)
    for layout in layouts_of(x.shape, mesh):
        for dim, picked in [(0, [8, 0, 0]), (0, [1]), (0, list(range(9)) * 2), (1, [3, 0]), (0, [])]:
            index = torch.tensor(picked, dtype=torch.long)
            check_op(
                lambda t, i, d=dim: t.index_select(d, i), x, index, mesh=mesh, layouts=[layout, None], fallback="error"
            )
        index = torch.tensor([4, 4, 1])
        check_op(
            lambda t, i: torch.index_select(t, 0, i),
            x,
            index,
            mesh=mesh,
            layouts=[layout, Layout((Shard(0),))],
            fallback="error",
        )


@pytest.mark.ranks(2)
def test_second_derivative_of_index_select() -> None:
    mesh = _mesh()
    x, index = torch.randn(6, 2, dtype=torch.float64), torch.tensor([5, 0, 5])

    def squared_gradient(t: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad((t.index_select(0, index) ** 3).sum(), t, create_graph=True)
        return gradient * t

    for layout in layouts_of(x.shape, mesh):
        check_op(squared_gradient, x, mesh=mesh, layouts=[layout])
