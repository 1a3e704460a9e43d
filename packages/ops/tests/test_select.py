"""Slices, selected rows and pieces on every layout, against plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardtensor import ShardTensor, UnsupportedShardingError
from shardtensor.testing import Layout, check_op, fallback_mode, layouts_of, shard
from shardtensor_collectives import comm_trace
from shardtensor_ops._kept_rows import RowRange, kept_rows, row_range


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("domain",))


def _mesh_2d() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "domain"))


class _LargestAllocation(TorchDispatchMode):
    """Largest tensor that an operator makes on this rank, counted below the ShardTensors."""

    n_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if type(leaf) is torch.Tensor:
                self.n_elements = max(self.n_elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


def _slices() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    for dim in (0, 1):
        for start, stop, step in [
            (0, 2, 1),
            (1, 4, 1),
            (3, 3, 1),
            (-3, None, 1),
            (0, None, 2),
            (1, None, 3),
            (2, 99, 4),
        ]:
            index = (slice(None),) * dim + (slice(start, stop, step),)
            yield lambda t, index=index: t[index]  # type: ignore[misc]
        yield lambda t, dim=dim: t.select(dim, 2)  # type: ignore[misc]
        yield lambda t, dim=dim: t.narrow(dim, -4, 2)  # type: ignore[misc]
    yield lambda t: t[1]
    yield lambda t: t[..., -1]
    yield lambda t: t[-1, 1:3]
    yield lambda t: t[2:6, None, ::2]
    yield lambda t: t[3, 4]
    yield lambda t: t[1:][1:][::2].select(0, 1)


def test_kept_rows_are_those_of_a_slice_of_the_whole() -> None:
    for start in range(-11, 12):
        for stop in range(-11, 12):
            for step in (1, 2, 3, 7):
                rows = row_range(start, stop, step, 10)
                assert list(range(*rows)) == list(range(10))[start:stop:step]
                found, first = [], 0
                for size, kept in zip((2, 5, 0, 3), kept_rows((2, 5, 0, 3), rows), strict=True):
                    found += [first + row for row in range(*kept)]
                    first += size
                assert found == list(range(*rows))
    assert [kept.n_rows for kept in kept_rows((2, 5, 0, 3), RowRange(3, 3, 1))] == [0, 0, 0, 0]


@pytest.mark.ranks(1, 2, 3, 4)
def test_slices_and_rows_with_their_gradients() -> None:
    mesh = _mesh()
    x = torch.randn(7, 6, dtype=torch.float64)
    for layout in layouts_of(x.shape, mesh):
        for function in _slices():
            check_op(function, x, mesh=mesh, layouts=[layout], fallback="error")


@pytest.mark.ranks(4)
def test_slices_on_a_two_dimensional_mesh() -> None:
    mesh = _mesh_2d()
    x = torch.randn(7, 6, dtype=torch.float64)
    for layout in layouts_of(x.shape, mesh):
        for function in _slices():
            check_op(function, x, mesh=mesh, layouts=[layout], fallback="error")


@pytest.mark.ranks(4)
def test_slices_that_live_on_few_ranks() -> None:
    """Field case A24."""
    mesh = _mesh()
    x = torch.arange(10.0)
    t = shard(x, mesh, Layout((Shard(0),), {0: (2, 5, 0, 3)}))
    with comm_trace() as trace:
        u = t[1:2]
        nothing = t[3:3]
    assert not trace.events
    assert u.shape == (1,) and u._spec.sizes() == {0: (1, 0, 0, 0)}
    assert u.full_tensor().tolist() == [1]
    assert (u * 2).full_tensor().tolist() == [2]
    assert float(u.mean()) == 1
    assert nothing.shape == (0,) and nothing.full_tensor().tolist() == []
    columns = shard(x.view(2, 5), mesh, Layout((Shard(0),), {0: (0, 1, 0, 1)}))[:, 0:1]
    assert columns.shape == (2, 1) and columns._local_tensor.ndim == 2
    assert (columns * 2).full_tensor().tolist() == [[0], [10]]


@pytest.mark.ranks(3)
def test_a_slice_makes_no_collective_and_its_gradient_comes_home() -> None:
    mesh = _mesh()
    n_columns = 64
    x = torch.randn(12, n_columns, dtype=torch.float64)
    for index in [slice(2, 5), slice(1, None, 2), slice(5, 6), 7, (slice(None), slice(1, 3))]:
        t = shard(x, mesh, Layout((Shard(0),), {0: (3, 7, 2)}), requires_grad=True)
        with fallback_mode("error"), comm_trace() as trace:
            part = t[index]
            weight = torch.ones_like(part.detach())
            with _LargestAllocation() as largest:
                (gradient,) = torch.autograd.grad(part, t, weight)
        assert not trace.events
        assert gradient._spec.grid == t._spec.grid
        assert largest.n_elements <= t._local_tensor.numel()
        plain = x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(plain[index].sum(), plain)
        assert gradient.full_tensor().equal(expected)


@pytest.mark.ranks(2)
def test_the_gradient_of_a_slice_that_was_gathered_is_still_made_in_shards() -> None:
    mesh = _mesh()
    t = shard(torch.randn(100, 8), mesh, Layout((Shard(0),), {0: (40, 60)}), requires_grad=True)
    whole = t[10:14].redistribute(placements=[Replicate()])
    with _LargestAllocation() as largest:
        whole.backward(torch.ones_like(whole.detach()))
    assert t.grad is not None and t.grad._spec.grid == t._spec.grid
    assert largest.n_elements <= t._local_tensor.numel()
    assert t.grad.full_tensor().sum() == 4 * 8


@pytest.mark.ranks(4)
def test_writes_through_slices_reach_the_base() -> None:
    """Field case A23."""
    mesh = _mesh()
    layout = Layout((Shard(0),), {0: (2, 5, 0, 3)})

    def first_rows(t: torch.Tensor) -> None:
        t[:2].zero_()

    def a_number(t: torch.Tensor) -> None:
        t[1:4] = 7

    def initialise(t: torch.Tensor) -> None:
        torch.nn.init.zeros_(t[:2])

    def a_tensor(t: torch.Tensor) -> None:
        t[1:4] = torch.tensor([5.0, 6.0, 7.0])

    def other_rows(t: torch.Tensor) -> None:
        t[1:4] = t[6:9] * 2

    def every_third(t: torch.Tensor) -> None:
        t[::3] += 100

    def chained(t: torch.Tensor) -> None:
        t[2:8][1:3].view(2, 1).mul_(-1)

    for write in (first_rows, a_number, initialise, a_tensor, other_rows, every_third, chained):
        expected = torch.arange(10.0)
        t = shard(expected, mesh, layout)
        write(expected)
        with fallback_mode("error"):
            write(t)
        assert t.full_tensor().equal(expected), write.__name__


@pytest.mark.ranks(3)
def test_writes_through_rows_reach_the_base() -> None:
    mesh = _mesh()
    x = torch.randn(4, 5)
    for layout in layouts_of(x.shape, mesh):
        expected, t = x.clone(), shard(x, mesh, layout)
        for target in (expected, t):
            target[1] = 3
            target[2].mul_(2)
            target[:, 1] = torch.arange(4.0)
            target[3] = target[0]
        assert t.full_tensor().equal(expected)


@pytest.mark.ranks(2)
def test_a_single_number_is_sent_to_all_ranks_and_is_no_view() -> None:
    t = shard(torch.arange(5.0), _mesh(), Layout((Shard(0),), {0: (1, 4)}))
    number = t[3]
    assert number.placements == (Replicate(),) and number.item() == 3
    with pytest.raises(UnsupportedShardingError):
        number.zero_()


@pytest.mark.ranks(2)
def test_gradients_of_writes_through_slices() -> None:
    mesh = _mesh()
    x, y = torch.randn(7, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)

    def overwrite(t: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        result = t * 1
        result[1:4] = other
        result[5].mul_(3)
        result[:, 1:2].mul_(2)
        return result * t

    for layout in layouts_of(x.shape, mesh):
        check_op(overwrite, x, y, mesh=mesh, layouts=[layout, layouts_of(y.shape, mesh)[1]])


@pytest.mark.ranks(1, 3)
def test_pieces() -> None:
    mesh = _mesh()
    x = torch.randn(7, 6, dtype=torch.float64)
    for layout in layouts_of(x.shape, mesh):
        for function in [
            lambda t: t.split(3),
            lambda t: t.split([1, 0, 4, 2]),
            lambda t: t.chunk(4, dim=1),
            lambda t: torch.tensor_split(t, 3),
            lambda t: t.unbind(1),
            lambda t: t.unbind(0),
            lambda t: t.chunk(3, -1)[1],
            lambda t: t.split(2)[1],
            lambda t: torch.split(t, 2, dim=1)[0] * 2,
            lambda t: t.unbind()[3],
            lambda t: t.hsplit(2),
        ]:
            check_op(function, x, mesh=mesh, layouts=[layout], fallback="error")


@pytest.mark.ranks(2)
def test_pieces_that_nobody_uses_take_no_memory_of_global_size() -> None:
    mesh = _mesh()
    x = torch.randn(40, 8)
    for use in [
        lambda t: t.chunk(4)[1],
        lambda t: t.split([30, 10])[1],
        lambda t: t.unbind(1)[2],
        lambda t: t.unbind()[3],
    ]:
        t = shard(x, mesh, Layout((Shard(0),), {0: (15, 25)}), requires_grad=True)
        with fallback_mode("error"), comm_trace() as trace:
            used = use(t)
            weight = torch.ones_like(used.detach())
            with _LargestAllocation() as largest:
                (gradient,) = torch.autograd.grad(used, t, weight)
        assert not trace.events
        assert gradient._spec.grid == t._spec.grid
        assert largest.n_elements <= t._local_tensor.numel()
        plain = x.clone().requires_grad_()
        assert gradient.full_tensor().equal(torch.autograd.grad(use(plain).sum(), plain)[0])


@pytest.mark.ranks(3)
def test_diagonals() -> None:
    mesh = _mesh()
    x = torch.randn(5, 7, 2, dtype=torch.float64)
    for layout in layouts_of(x.shape, mesh):
        for offset in (-6, -2, 0, 1, 3, 9):
            check_op(lambda t, o=offset: t.diagonal(o), x, mesh=mesh, layouts=[layout], fallback="error")
            check_op(lambda t, o=offset: t.diagonal(o, 1, 2), x, mesh=mesh, layouts=[layout], fallback="error")


@pytest.mark.ranks(2)
def test_slices_of_pending_sums_stay_pending() -> None:
    mesh = _mesh()
    pending = ShardTensor.from_local(torch.arange(6.0).view(3, 2), mesh, [Partial()])
    with comm_trace() as trace:
        parts = [pending[1:], pending[0], *pending.split(2), *pending.unbind(1)]
    assert not trace.events
    assert all(part.placements == (Partial(),) for part in parts)
    assert parts[0].full_tensor().tolist() == [[4, 6], [8, 10]]
    assert parts[1].full_tensor().tolist() == [0, 2]


@pytest.mark.ranks(3)
def test_folded_dims_are_sliced_rightly() -> None:
    mesh = _mesh()
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    for layout in layouts_of(x.shape, mesh, [1]):
        for function in [
            lambda t: t.view(10, 4)[3:8],
            lambda t: t.view(10, 4)[6],
            lambda t: t.view(10, 4)[:],
            lambda t: t.view(10, 4).split(4),
            lambda t: t.view(10, 4)[:, 1],
        ]:
            check_op(function, x, mesh=mesh, layouts=[layout], fallback="error")


@pytest.mark.ranks(2)
def test_second_derivatives_through_slices() -> None:
    mesh = _mesh()
    x = torch.randn(5, 3, dtype=torch.float64)

    def squared_gradient(t: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad((t[1:4] ** 3).sum() + (t[2] ** 2).sum(), t, create_graph=True)
        return gradient * t

    for layout in layouts_of(x.shape, mesh):
        check_op(squared_gradient, x, mesh=mesh, layouts=[layout])


@pytest.mark.ranks(2)
def test_an_index_out_of_range_raises_what_torch_raises() -> None:
    t = shard(torch.randn(4, 3), _mesh(), Layout((Shard(0),), {0: (1, 3)}))
    with pytest.raises(IndexError, match=r"out of range|out of bounds"):
        t[4]
    with pytest.raises((RuntimeError, IndexError)):
        t.narrow(0, 2, 5)
