"""Concatenation on every layout, against plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import ShardTensor
from shardtensor.testing import Layout, check_op, fallback_mode, layouts_of, shard
from shardtensor_collectives import comm_trace


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("domain",))


def _mesh_2d() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "domain"))


@pytest.mark.ranks(1, 2, 4)
def test_pieces_cut_in_every_way() -> None:
    mesh = _mesh()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    z = torch.randn(5, 2, dtype=torch.float64)
    for first in layouts_of(x.shape, mesh):
        for second in [layouts_of(y.shape, mesh)[-1], layouts_of(y.shape, mesh)[0], None]:
            check_op(lambda a, b: torch.cat([a, b, a]), x, y, mesh=mesh, layouts=[first, second], fallback="error")
        for second in [*layouts_of(z.shape, mesh)[::3], None]:
            check_op(lambda a, b: torch.cat([b, a], 1), x, z, mesh=mesh, layouts=[first, second], fallback="error")


@pytest.mark.ranks(4)
def test_two_dimensional_mesh() -> None:
    mesh = _mesh_2d()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    for first in layouts_of(x.shape, mesh):
        for second in [*layouts_of(y.shape, mesh)[::2], None]:
            check_op(lambda a, b: torch.cat([a, b]), x, y, mesh=mesh, layouts=[first, second], fallback="error")
            check_op(lambda a, b: torch.cat([b, a, b]), x, y, mesh=mesh, layouts=[first, second], fallback="error")


@pytest.mark.ranks(3)
def test_a_class_token_makes_the_first_shard_longer() -> None:
    mesh = _mesh()
    token, patches = torch.randn(1, 1, 4, dtype=torch.float64), torch.randn(2, 9, 4, dtype=torch.float64)
    for sizes in [(2, 3, 4), (0, 9, 0), (3, 3, 3)]:
        sharded = shard(patches, mesh, Layout((Shard(1),), {1: sizes}))
        with fallback_mode("error"), comm_trace() as trace:
            tokens = torch.cat([token.expand(2, -1, -1), sharded], 1)
        assert not trace.events
        assert tokens._spec.sizes() == {1: (sizes[0] + 1, *sizes[1:])}

        def model(cls: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            tokens = torch.cat([cls.expand(2, -1, -1), x], 1) * 2
            return tokens[:, 0] + tokens[:, 1:].sum(1)

        check_op(model, token, patches, mesh=mesh, layouts=[None, Layout((Shard(1),), {1: sizes})], fallback="error")


@pytest.mark.ranks(2)
def test_only_rows_that_cross_a_border_move() -> None:
    mesh = _mesh()
    x = torch.arange(10.0)
    first, second = (shard(x + 100 * i, mesh, Layout((Shard(0),), {0: (4, 6)})) for i in range(2))
    with fallback_mode("error"), comm_trace() as trace:
        joined = torch.cat([first, second])
    assert joined._spec.sizes() == {0: (8, 12)}
    # Rank 0 lacks rows 4..7, rank 1 rows 10..13 of the result.
    assert sum(event.bytes_received for event in trace.events) == 4 * 4
    assert joined.full_tensor().tolist() == [*x.tolist(), *(x + 100).tolist()]


@pytest.mark.ranks(2)
def test_pending_sums_stay_pending() -> None:
    mesh = _mesh()
    rank = torch.distributed.get_rank()
    pending = ShardTensor.from_local(torch.tensor([1.0 + rank, 2.0]), mesh, [Partial()])
    whole = torch.tensor([10.0, 20.0])
    with comm_trace() as trace:
        joined = torch.cat([pending, whole, pending])
        stacked = torch.stack([pending, pending])
    assert not trace.events
    assert joined.placements == stacked.placements == (Partial(),)
    assert joined.full_tensor().tolist() == [3, 4, 10, 20, 3, 4]
    assert stacked.full_tensor().tolist() == [[3, 4], [3, 4]]


@pytest.mark.ranks(3)
def test_stacks_and_their_relatives() -> None:
    mesh = _mesh()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    functions: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
        lambda a, b: torch.stack([a, b]),
        lambda a, b: torch.stack([a, b, a], dim=-1),
        lambda a, b: torch.stack([a, b], 1).flatten(1, 2),
        lambda a, b: torch.hstack([a, b]),
        lambda a, b: torch.vstack([a, b]),
        lambda a, b: torch.concat((a, b), dim=-2),
        lambda a, b: torch.cat([t * 2 for t in (a, b)], dim=0).chunk(2)[1],
    ]
    for first in layouts_of(x.shape, mesh):
        for second in [layouts_of(x.shape, mesh)[1], layouts_of(x.shape, mesh)[-1], None]:
            for function in functions:
                check_op(function, x, y, mesh=mesh, layouts=[first, second], fallback="error")


@pytest.mark.ranks(2)
def test_dtypes_empty_pieces_and_folds() -> None:
    mesh = _mesh()
    layout = Layout((Shard(0),), {0: (1, 3)})
    x = torch.arange(4)
    mixed = torch.cat([shard(x, mesh, layout), torch.ones(2, dtype=torch.float64)])
    assert mixed.dtype == torch.float64 and mixed.full_tensor().tolist() == [0, 1, 2, 3, 1, 1]
    matrix = shard(torch.randn(4, 2), mesh, layout)
    assert torch.cat([torch.empty(0), matrix]).full_tensor().equal(matrix.full_tensor())
    assert torch.cat([matrix[:0], matrix, matrix[4:]]).full_tensor().equal(matrix.full_tensor())
    b = torch.randn(2, 5, 3, dtype=torch.float64)
    for split in layouts_of(b.shape, mesh, [1]):
        check_op(lambda t: torch.cat([t.view(10, 3), t.view(10, 3)]), b, mesh=mesh, layouts=[split], fallback="error")
        check_op(
            lambda t: torch.cat([t.view(10, 3), t.view(10, 3)], 1), b, mesh=mesh, layouts=[split], fallback="error"
        )


@pytest.mark.ranks(2)
def test_shapes_that_cannot_be_joined_raise_on_all_ranks() -> None:
    mesh = _mesh()
    x = shard(torch.randn(4, 3), mesh, Layout((Shard(0),), {0: (1, 3)}))
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat([x, torch.randn(4, 2)])
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        torch.stack([x, torch.randn(4, 2)])
    replicated = shard(torch.randn(4, 3), mesh, Layout((Replicate(),)))
    assert torch.cat([x, replicated]).shape == (8, 3)
