"""Views on every layout, against plain torch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import ShardTensor, UnsupportedShardingError
from shardtensor.testing import Layout, check_op, fallback_mode, layouts_of, shard
from shardtensor_collectives import comm_trace
from shardtensor_ops._grouping import aligned_sizes, dims_that_hold, flat_split, view_groups
from shardtensor_ops._view_layout import held_by_view
from shardtensor_spec import DimSplit


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("domain",))


def _mesh_2d() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "domain"))


def _moves_nothing(function: Callable[..., object], *args: object) -> object:
    with fallback_mode("error"), comm_trace() as trace:
        result = function(*args)
    assert not trace.events, [event.collective for event in trace.events]
    return result


def _random_shape(generator: random.Random, n_elements: int) -> tuple[int, ...]:
    shape = []
    while n_elements > 1:
        divisors = [d for d in range(2, n_elements + 1) if n_elements % d == 0]
        extent = generator.choice(divisors)
        shape.append(extent)
        n_elements //= extent
    for _ in range(generator.choice([0, 0, 1, 2])):
        shape.insert(generator.randint(0, len(shape)), 1)
    return tuple(shape) or (1,)


# -- integers ---------------------------------------------------------------------------------------------------------


def test_groups_are_the_smallest_runs_with_as_many_elements() -> None:
    generator = random.Random(0)
    for _ in range(300):
        n_elements = generator.choice([1, 6, 24, 30, 36])
        before, after = _random_shape(generator, n_elements), _random_shape(generator, n_elements)
        groups = view_groups(before, after)
        assert [dim for group in groups for dim in group.inputs] == list(range(len(before)))
        assert [dim for group in groups for dim in group.outputs] == list(range(len(after)))
        for group in groups:
            assert math.prod(before[d] for d in group.inputs) == math.prod(after[d] for d in group.outputs)


def test_a_dim_that_holds_a_split_cuts_the_flat_rows_alike() -> None:
    def rows_of(extents: tuple[int, ...], position: int, n_repeats: int, sizes: tuple[int, ...]) -> list[int]:
        owner = [shard for shard, size in enumerate(sizes) for _ in range(size)] * n_repeats
        where = torch.tensor(owner).view([-1 if i == position else 1 for i in range(len(extents))])
        return where.expand(extents).flatten().tolist()

    generator = random.Random(1)
    n_held = 0
    for _ in range(500):
        n_elements = generator.choice([6, 24, 36])
        before, after = _random_shape(generator, n_elements), _random_shape(generator, n_elements)
        position = generator.randrange(len(before))
        cut = generator.randint(0, before[position])
        split = DimSplit((0,), (cut, before[position] - cut))
        flat = flat_split(before, position, split)
        wanted = rows_of(before, position, 1, split.sizes)
        assert rows_of((n_elements,), 0, *flat) == wanted
        for output, held in dims_that_hold(after, flat):
            n_held += 1
            assert rows_of(after, output, *held) == wanted
    assert n_held > 300


def test_cuts_move_to_the_nearest_multiple() -> None:
    assert aligned_sizes((3, 7), 2) == (4, 6)
    assert aligned_sizes((1, 1, 10), 4) == (0, 4, 8)
    assert aligned_sizes((0, 0, 6), 3) == (0, 0, 6)


def test_several_split_dims_of_one_group_find_separate_homes() -> None:
    grid = {0: DimSplit((0,), (1, 3)), 1: DimSplit((1,), (2, 4))}
    assert held_by_view((4, 6), (4, 3, 2), grid).grid == {0: grid[0], 1: DimSplit((1,), (1, 2))}
    assert held_by_view((4, 6), (24,), grid).lost == (1,)


# -- native views -----------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 3, 4)
def test_views_that_a_layout_can_hold_move_nothing() -> None:
    mesh = _mesh()
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    views: list[tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = [
        (0, lambda t: t.view(10, 6)),
        (1, lambda t: t.view(10, 6)),
        (1, lambda t: t.reshape(-1, 6)),
        (2, lambda t: t.view(10, 6)),
        (2, lambda t: t.view(60)),
        (1, lambda t: t.view(2, 1, 5, 2, 3)),
        (1, lambda t: t.flatten(1)),
        (1, lambda t: t.flatten()),
        (1, lambda t: t.flatten().view(2, 5, 6)),
        (1, lambda t: t.view(10, 6).view(2, 5, 3, 2)),
        (1, lambda t: t.view(10, 3, 2)),
        (1, lambda t: t.unflatten(2, (3, 2))),
        (1, lambda t: t.permute(2, 0, 1)),
        (1, lambda t: t.transpose(0, 1)),
        (1, lambda t: t.mT),
        (1, lambda t: t.movedim(1, 0)),
        (1, lambda t: t.unsqueeze(1).squeeze(1)),
        (1, lambda t: t[None].expand(3, 2, 5, 6)),
        (1, lambda t: t.view(2, 5, 1, 6).expand(2, 5, 4, 6)),
    ]
    for dim, view in views:
        for layout in layouts_of(x.shape, mesh, [dim]):
            result = _moves_nothing(view, shard(x, mesh, layout))
            assert isinstance(result, ShardTensor)
            assert result.full_tensor().equal(view(x))


@pytest.mark.ranks(3)
def test_merged_rows_keep_their_uneven_split() -> None:
    mesh = _mesh()
    x = torch.arange(2 * 9 * 4.0).view(2, 9, 4)
    t = shard(x, mesh, Layout((Shard(1),), {1: (1, 0, 8)}))
    merged = t.view(18, 4)
    assert merged._spec.grid == {0: DimSplit((0,), (1, 0, 8), 2)}
    assert merged.view(2, 9, 4)._spec is t._spec
    outermost = shard(x, mesh, Layout((Shard(0),), {0: (1, 0, 1)})).view(18, 4)
    assert outermost._spec.grid == {0: DimSplit((0,), (9, 0, 9))}
    split = shard(x.view(18, 4), mesh, Layout((Shard(0),), {0: (6, 3, 9)})).view(6, 3, 4)
    assert split._spec.grid == {0: DimSplit((0,), (2, 1, 3))}


@pytest.mark.ranks(2)
def test_view_of_a_reduction_that_is_pending_stays_pending() -> None:
    mesh = _mesh()
    for operation in ("sum", "max"):
        local = torch.arange(6.0) + torch.distributed.get_rank()
        pending = ShardTensor.from_local(local, mesh, [Partial(operation)])
        view = _moves_nothing(lambda t: t.view(2, 3).t()[None].expand(2, 3, 2), pending)
        assert isinstance(view, ShardTensor) and view.placements == (Partial(operation),)
        assert view.full_tensor().equal(pending.full_tensor().view(2, 3).t()[None].expand(2, 3, 2))


# -- views that move rows ---------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_a_cut_between_two_rows_moves_to_the_nearest_row() -> None:
    """Field case A30: reshape (10) -> (5, 2), cut [3, 7]."""
    mesh = _mesh()
    t = shard(torch.arange(10.0), mesh, Layout((Shard(0),), {0: (3, 7)}))
    with fallback_mode("error"), comm_trace() as trace:
        result = t.reshape(5, 2)
    assert result._spec.sizes() == {0: (2, 3)}
    assert sum(event.bytes_received for event in trace.events) <= 4
    assert result.full_tensor().equal(torch.arange(10.0).view(5, 2))
    assert result.flatten()._spec.sizes() == {0: (4, 6)}
    for shape in [(2, 5), (5, 2, 1), (1, 10), (5, 1, 2)]:
        for cut in [(3, 7), (1, 9), (10, 0), (9, 1)]:
            t = shard(torch.arange(10.0), mesh, Layout((Shard(0),), {0: cut}))
            assert t.view(shape).full_tensor().equal(torch.arange(10.0).view(shape))


@pytest.mark.ranks(1, 2, 3, 4)
def test_random_chains_of_reshapes_and_permutes() -> None:
    mesh = _mesh()
    generator = random.Random(7)
    for trial in range(60):
        n_elements = generator.choice([24, 36, 60])
        shape = _random_shape(generator, n_elements)
        x = torch.randn(shape, dtype=torch.float64)
        layout = generator.choice(layouts_of(shape, mesh))
        steps: list[tuple[str, tuple[int, ...]]] = []
        n_dims = len(shape)
        for _ in range(4):
            if generator.random() < 0.6:
                new = _random_shape(generator, n_elements)
                steps.append(("reshape", new))
                n_dims = len(new)
            else:
                order = list(range(n_dims))
                generator.shuffle(order)
                steps.append(("permute", tuple(order)))

        def chain(t: torch.Tensor, steps: list[tuple[str, tuple[int, ...]]] = steps) -> torch.Tensor:
            for name, argument in steps:
                t = getattr(t, name)(argument) * 1.5
            return t

        try:
            check_op(chain, x, mesh=mesh, layouts=[layout], fallback="error")
        except Exception as error:
            raise AssertionError(f"trial {trial}: {shape} {layout} {steps}") from error


@pytest.mark.ranks(4)
def test_random_chains_on_a_two_dimensional_mesh() -> None:
    mesh = _mesh_2d()
    generator = random.Random(11)
    for trial in range(60):
        n_elements = generator.choice([24, 36, 60])
        shape = _random_shape(generator, n_elements)
        x = torch.randn(shape, dtype=torch.float64)
        layout = generator.choice(layouts_of(shape, mesh))
        shapes = [_random_shape(generator, n_elements) for _ in range(3)]

        def chain(t: torch.Tensor, shapes: list[tuple[int, ...]] = shapes) -> torch.Tensor:
            for new in shapes:
                t = t.reshape(new) * 1.5
                t = t.transpose(0, -1)
            return t

        try:
            check_op(chain, x, mesh=mesh, layouts=[layout], fallback="error")
        except Exception as error:
            raise AssertionError(f"trial {trial}: {shape} {layout} {shapes}") from error


@pytest.mark.ranks(4)
def test_dims_sharded_by_two_axes() -> None:
    mesh = _mesh_2d()
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    for view in [
        lambda t: t.view(20, 6),
        lambda t: t.view(4, 30),
        lambda t: t.view(120),
        lambda t: t.view(2, 2, 5, 6),
        lambda t: t.view(4, 5, 2, 3).permute(2, 0, 1, 3).reshape(8, 15),
    ]:
        for layout in layouts_of(x.shape, mesh):
            check_op(view, x, mesh=mesh, layouts=[layout], fallback="error")
    nested = Layout((Shard(0), Shard(0)), {0: (0, 1, 2, 1)})
    t = shard(x, mesh, nested)
    merged = _moves_nothing(lambda t: t.view(20, 6).view(4, 5, 6), t)
    assert isinstance(merged, ShardTensor) and merged._spec is t._spec


@pytest.mark.ranks(4)
def test_nested_shards_are_right_after_the_mesh_is_flattened() -> None:
    """Field case A14."""
    mesh = _mesh_2d()
    mesh._flatten()
    x = torch.arange(15.0).view(5, 3)
    t = shard(x, mesh, Layout((Shard(0), Shard(0))))
    assert [t._spec.shapes()[c][0] for c in t._spec.coordinates()] == [2, 1, 1, 1]
    assert t.full_tensor().equal(x)
    assert t.reshape(15).full_tensor().equal(x.flatten())
    assert t.reshape(3, 5).full_tensor().equal(x.view(3, 5))
    assert t.t().full_tensor().equal(x.t())


# -- rows of one, rows of none ----------------------------------------------------------------------------------------


@pytest.mark.ranks(3)
def test_dims_of_one_row_and_of_none() -> None:
    mesh = _mesh()
    x = torch.randn(1, 5, 1, dtype=torch.float64)
    for layout in [*layouts_of(x.shape, mesh), Layout((Replicate(),))]:
        for view in [
            lambda t: t.squeeze(),
            lambda t: t.squeeze(0),
            lambda t: t.squeeze(-1),
            lambda t: t.squeeze((0, 2)),
            lambda t: t.view(5),
            lambda t: t.view(1, 1, 5),
            lambda t: t.squeeze(1),
            lambda t: t.expand(4, 5, 3),
            lambda t: t.expand(2, -1, -1, 3),
            lambda t: t.unsqueeze(-1).transpose(0, -1),
        ]:
            check_op(view, x, mesh=mesh, layouts=[layout], fallback="silent")
    empty = torch.randn(0, 6, dtype=torch.float64)
    for layout in layouts_of(empty.shape, mesh):
        for view in [lambda t: t.view(3, 0, 2), lambda t: t.flatten(), lambda t: t.t(), lambda t: t.reshape(0, 2, 3)]:
            check_op(view, empty, mesh=mesh, layouts=[layout])
    scalar = torch.randn((), dtype=torch.float64)
    check_op(lambda t: t.view(1, 1).squeeze(), scalar, mesh=mesh, layouts=[Layout((Replicate(),))])


@pytest.mark.ranks(2)
def test_a_shape_that_does_not_fit_raises_what_torch_raises() -> None:
    t = shard(torch.randn(4, 3), _mesh(), Layout((Shard(0),), {0: (1, 3)}))
    with pytest.raises(RuntimeError, match="invalid for input of size 12"):
        t.view(5, 2)
    with pytest.raises((RuntimeError, IndexError), match="Dimension out of range"):
        t.unsqueeze(4)


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_writes_through_views_reach_the_base() -> None:
    mesh = _mesh()
    x = torch.arange(24.0).view(2, 6, 2)
    for view in [
        lambda t: t.view(12, 2),
        lambda t: t.transpose(0, 1),
        lambda t: t.view(2, 3, 2, 2).permute(3, 0, 1, 2),
        lambda t: t.unsqueeze(0),
        lambda t: t.flatten(1),
    ]:
        t, plain = shard(x, mesh, Layout((Shard(1),), {1: (2, 4)})), x.clone()
        view(t).mul_(2).add_(1)
        view(plain).mul_(2).add_(1)
        assert t.full_tensor().equal(plain)


@pytest.mark.ranks(2)
def test_a_view_that_moved_rows_refuses_writes_on_all_ranks() -> None:
    t = shard(torch.arange(10.0), _mesh(), Layout((Shard(0),), {0: (3, 7)}))
    view = t.view(5, 2)
    with pytest.raises(UnsupportedShardingError, match="cannot share its memory"):
        view.zero_()
    with pytest.raises(UnsupportedShardingError, match="cannot share its memory"):
        t.zero_()
    del view
    t.zero_()
    assert not t.full_tensor().any()


@pytest.mark.ranks(2)
def test_received_rows_are_viewed_though_their_strides_differ() -> None:
    mesh = _mesh()
    x = torch.arange(24.0).view(6, 4)
    t = shard(x, mesh, Layout((Shard(0),), {0: (2, 4)})).t().redistribute(placements=[Shard(0)])
    t = t.t()
    view = t.view(24)
    view.mul_(2)
    assert view.full_tensor().equal(2 * x.flatten())
    assert t.full_tensor().equal(2 * x)


@pytest.mark.ranks(3)
def test_gradients_through_folds_and_matrix_products() -> None:
    mesh = _mesh()
    x, weight = torch.randn(2, 5, 4, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)

    def project(t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (t.reshape(-1, 4) @ w).view(2, 5, 3)

    for layout in layouts_of(x.shape, mesh, [0, 1]):
        result = check_op(project, x, weight, mesh=mesh, layouts=[layout, None], fallback="error")
        ((dim, sizes),) = layout.sizes.items()
        if sum(size > 0 for size in sizes) > 1:  # rows of a single rank may be told as a split of any dim
            assert result._spec.sizes() == {dim: tuple(sizes)}


@pytest.mark.ranks(3)
def test_window_partition_and_back() -> None:
    """The reshape and permute chain of windowed attention; patches of an image as tokens."""
    mesh = _mesh()
    x = torch.randn(2, 8, 6, 3, dtype=torch.float64)

    def windows(t: torch.Tensor) -> torch.Tensor:
        parts = t.view(2, 4, 2, 3, 2, 3).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 3)
        return (parts * 2).view(2, 4, 3, 2, 2, 3).permute(0, 1, 3, 2, 4, 5).reshape(2, 8, 6, 3)

    def tokens(t: torch.Tensor) -> torch.Tensor:
        return t.permute(0, 3, 1, 2).flatten(2).transpose(1, 2)

    for layout in layouts_of(x.shape, mesh):
        check_op(windows, x, mesh=mesh, layouts=[layout], fallback="error")
        check_op(tokens, x, mesh=mesh, layouts=[layout], fallback="error")
    even = shard(x, mesh, Layout((Shard(1),), {1: (2, 4, 2)}))
    result = _moves_nothing(windows, even)
    assert isinstance(result, ShardTensor) and result._spec.sizes() == {1: (2, 4, 2)}


@pytest.mark.ranks(2)
def test_composite_operators_are_taken_apart_in_inference_mode() -> None:
    x = torch.randn(2, 6, 4)
    t = shard(x, _mesh(), Layout((Shard(1),), {1: (2, 4)}))
    with torch.inference_mode(), fallback_mode("error"):
        result = t.reshape(12, 4).unflatten(0, (2, 6)).flatten(1).chunk(2, dim=1)[1].narrow(0, 1, 1).squeeze()
    assert result.full_tensor().equal(x[1, 3:].flatten())


@pytest.mark.ranks(2)
def test_in_place_views_change_the_object_and_its_layout() -> None:
    mesh = _mesh()
    x = torch.randn(4, 3, dtype=torch.float64)
    for layout in layouts_of(x.shape, mesh):
        for change in [
            lambda t: t.unsqueeze_(1).squeeze_(),
            lambda t: t.unsqueeze_(0),
            lambda t: t.t_(),
            lambda t: t.transpose_(0, 1).unsqueeze_(-1).squeeze_(-1),
            lambda t: t.swapaxes_(0, 1),
        ]:
            check_op(lambda t, f=change: f(t * 1) * 2, x, mesh=mesh, layouts=[layout], fallback="error")
            t = shard(x, mesh, layout)
            assert change(t) is t and t.shape == change(x.clone()).shape
            assert tuple(t._local_tensor.shape) == tuple(t._spec.local_shape)


@pytest.mark.ranks(2)
def test_addressing_memory_raises_on_all_ranks() -> None:
    t = shard(torch.randn(4, 3), _mesh(), Layout((Shard(0),), {0: (1, 3)}))
    assert t.as_strided((4, 3), (3, 1)).full_tensor().equal(t.full_tensor())
    with pytest.raises(UnsupportedShardingError, match="each shard has its own"):
        t.t().as_strided((2, 2), (1, 2))
