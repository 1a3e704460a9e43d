"""Values and gradients of every collective against plain torch on the full tensor."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from rank_helpers import DTYPES, contribution, noncontiguous, ramp, sizes_for

import shardtensor_collectives as sc
from shardtensor_spec import LayoutMismatchError, UnsupportedShardingError

KINDS = ["even", "uneven", "empty"]


def world():
    return dist.group.WORLD


def me():
    return dist.get_rank(), dist.get_world_size()


def full_and_sizes(kind, dim, dtype=torch.float64):
    rank, n = me()
    sizes = sizes_for(kind, n)
    shape = [2, 3, 2]
    shape[dim] = sum(sizes)
    return ramp(*shape, dtype=dtype), sizes, rank, n


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_all_gather_v_and_reduce_scatter_v(kind):
    for dim in (0, 1, -1):
        full, sizes, rank, n = full_and_sizes(kind, dim)
        local = full.split(sizes, dim)[rank]
        for shard in (local, noncontiguous(local)):
            result = sc.all_gather_v(shard, sizes, dim, world())
            assert torch.equal(result, full) and result.is_contiguous()
            assert torch.equal(sc.all_gather_v(shard, sizes, dim, world(), async_op=True).wait(), full)
        mine = full * (rank + 1)
        expected = (full * (n * (n + 1) // 2)).split(sizes, dim)[rank]
        for whole in (mine, noncontiguous(mine)):
            assert torch.equal(sc.reduce_scatter_v(whole, sizes, dim, world()), expected)
            assert torch.equal(sc.reduce_scatter_v(whole, sizes, dim, world(), async_op=True).wait(), expected)
        torch.testing.assert_close(sc.reduce_scatter_v(mine, sizes, dim, world(), op="mean"), expected / n)
        assert torch.equal(sc.reduce_scatter_v(mine, sizes, dim, world(), op="max"), full.split(sizes, dim)[rank] * n)
        assert torch.equal(sc.reduce_scatter_v(mine, sizes, dim, world(), op="min"), full.split(sizes, dim)[rank])


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_all_to_all_v_moves_shards_between_dims(kind):
    rank, n = me()
    rows, columns = sizes_for(kind, n), sizes_for("uneven", n)
    full = ramp(sum(rows), 2, sum(columns))
    by_row, by_column = full.split(rows, 0)[rank], full.split(columns, 2)[rank]
    there = sc.all_to_all_v(by_row, columns, rows, world(), send_dim=2, receive_dim=0)
    assert torch.equal(there, by_column)
    back = sc.all_to_all_v(there, rows, columns, world(), send_dim=0, receive_dim=2, async_op=True)
    assert torch.equal(back.wait(), by_row)
    assert torch.equal(
        sc.all_to_all_v(noncontiguous(by_row), columns, rows, world(), send_dim=-1, receive_dim=0), by_column
    )


@pytest.mark.ranks(1, 2, 3, 4)
def test_all_to_all_v_along_one_dim():
    rank, n = me()
    send = [(rank + peer) % 3 for peer in range(n)]  # symmetric, so that what i sends to j is known to both
    tensor = 100.0 * rank + torch.arange(float(sum(send)))
    result = sc.all_to_all_v(tensor, send, send, world())
    expected = []
    for peer in range(n):
        theirs = [(peer + other) % 3 for other in range(n)]
        start = sum(theirs[:rank])
        expected.append(100.0 * peer + torch.arange(float(start), float(start + theirs[rank])))
    assert torch.equal(result, torch.cat(expected))


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_scatter_v_and_gather_v(kind):
    for dim in (0, 2):
        full, sizes, rank, n = full_and_sizes(kind, dim)
        root = n - 1
        given = full if rank == root else torch.empty((), dtype=full.dtype).expand(full.shape)
        local = sc.scatter_v(given, sizes, dim, world(), source=root)
        assert torch.equal(local, full.split(sizes, dim)[rank])
        whole = sc.gather_v(noncontiguous(local), sizes, dim, world(), destination=root, async_op=True).wait()
        assert torch.equal(whole, full if rank == root else torch.zeros_like(full))
        assert whole.shape == full.shape
        assert rank == root or whole.untyped_storage().nbytes() <= 8


@pytest.mark.ranks(1, 2, 3, 4)
def test_broadcast_reduce_and_all_reduce():
    rank, n = me()
    mine = noncontiguous(ramp(3, 4) + rank)
    root = n // 2
    assert torch.equal(sc.broadcast(mine, world(), source=root), ramp(3, 4) + root)
    assert torch.equal(mine, ramp(3, 4) + rank)  # not changed
    total = n * ramp(3, 4) + n * (n - 1) // 2
    assert torch.equal(sc.all_reduce(mine, world()), total)
    assert torch.equal(sc.all_reduce(mine, world(), async_op=True).wait(), total)
    torch.testing.assert_close(sc.all_reduce(mine, world(), op="mean"), total / n)
    assert torch.equal(sc.all_reduce(mine, world(), op="max"), ramp(3, 4) + n - 1)
    assert torch.equal(sc.all_reduce(torch.tensor(rank + 1), world(), op="product"), torch.tensor([1, 1, 2, 6, 24][n]))
    expected = total if rank == root else torch.zeros_like(total)
    assert torch.equal(sc.reduce(mine, world(), destination=root), expected)
    assert torch.equal(mine, ramp(3, 4) + rank)
    assert sc.all_reduce(torch.ones(0, 3), world()).shape == (0, 3)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_ring(kind):
    full, sizes, rank, n = full_and_sizes(kind, 1)
    blocks = full.split(sizes, 1)
    previous, following = (rank - 1) % n, (rank + 1) % n
    assert torch.equal(sc.ring_shift(blocks[rank], sizes[previous], 1, world()).wait(), blocks[previous])
    back = sc.ring_shift(noncontiguous(blocks[rank]), sizes[following], 1, world(), offset=-1)
    assert torch.equal(back.wait(), blocks[following])
    seen = {owner: block.clone() for owner, block in sc.ring_blocks(blocks[rank], sizes, 1, world())}
    assert sorted(seen) == list(range(n))
    for owner, block in seen.items():
        assert torch.equal(block, blocks[owner])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_moves(dtype):
    rank, _ = me()
    sizes = [3, 1]
    full = contribution(dtype, 4, 2, seed=0)
    local = full.split(sizes)[rank]
    as_bytes = lambda tensor: tensor.contiguous().view(torch.uint8)  # noqa: E731 - equal() lacks some dtypes
    assert torch.equal(as_bytes(sc.all_gather_v(local, sizes, 0, world())), as_bytes(full))
    columns = sc.all_to_all_v(local, [1, 1], sizes, world(), send_dim=1, receive_dim=0)
    assert torch.equal(as_bytes(columns), as_bytes(full[:, rank : rank + 1]))
    given = full if rank == 1 else torch.zeros_like(full)
    assert torch.equal(as_bytes(sc.scatter_v(given, sizes, 0, world(), source=1)), as_bytes(local))
    assert torch.equal(as_bytes(sc.broadcast(given, world(), source=1)), as_bytes(full))
    assert torch.equal(
        as_bytes(sc.ring_shift(local, sizes[1 - rank], 0, world()).wait()), as_bytes(full.split(sizes)[1 - rank])
    )
    gathered = sc.gather_v(local, sizes, 0, world())
    assert rank == 1 or torch.equal(as_bytes(gathered), as_bytes(full))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "product"])
def test_reductions_in_every_dtype(dtype, op):
    rank, _ = me()
    first, second = (contribution(dtype, 4, 2, seed=seed) for seed in (1, 2))
    mine = (first, second)[rank]
    wide = {torch.bool: torch.int64, torch.uint64: torch.int64}.get(dtype, dtype)
    if dtype.is_floating_point:
        wide = torch.float64
    elif not dtype.is_complex:
        wide = torch.int64
    impossible = (
        (dtype.is_complex and op in ("max", "min", "product"))
        or (op == "mean" and not (dtype.is_floating_point or dtype.is_complex))
        or (dtype is torch.uint64 and op in ("max", "min"))
    )
    if impossible:
        for call in (sc.all_reduce, sc.reduce):
            with pytest.raises(UnsupportedShardingError):
                call(mine, world(), op=op)
        return
    a, b = first.to(wide), second.to(wide)
    expected = {
        "sum": lambda: a + b,
        "mean": lambda: (a + b) / 2,
        "max": lambda: torch.maximum(a, b),
        "min": lambda: torch.minimum(a, b),
        "product": lambda: a * b,
    }[op]().to(dtype)
    if dtype is torch.bool:
        expected = {"sum": first | second, "max": first | second, "min": first & second, "product": first & second}[op]
    assert_same(sc.all_reduce(mine, world(), op=op), expected)
    assert_same(sc.reduce_scatter_v(mine, [3, 1], 0, world(), op=op), expected.split([3, 1])[rank])
    reduced = sc.reduce(mine, world(), destination=1, op=op)
    if rank == 1:
        assert_same(reduced, expected)


def assert_same(actual, expected):
    assert actual.dtype is expected.dtype
    if actual.dtype.is_floating_point:
        actual, expected = actual.double(), expected.double()
    elif actual.dtype in (torch.uint16, torch.uint32, torch.uint64):
        actual, expected = actual.long(), expected.long()
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.ranks(4)
def test_subgroup_whose_ranks_do_not_start_at_zero():
    rank, _ = me()
    odd = dist.new_group([1, 3])
    if rank not in (1, 3):
        with pytest.raises(UnsupportedShardingError, match="not a member"):
            sc.all_reduce(torch.ones(1), odd)
        return
    position = odd.rank()
    sizes = [2, 1]
    full = ramp(3, 2)
    local = full.split(sizes)[position]
    assert torch.equal(sc.all_gather_v(local, sizes, 0, odd), full)
    assert torch.equal(sc.reduce_scatter_v(full, sizes, 0, odd), 2 * local)
    assert torch.equal(sc.all_to_all_v(local, [1, 1], sizes, odd, send_dim=1), full[:, position : position + 1])
    assert torch.equal(sc.scatter_v(full, sizes, 0, odd, source=1), local)
    whole = sc.gather_v(local, sizes, 0, odd, destination=1)
    assert torch.equal(whole, full if position == 1 else 0 * full)
    assert torch.equal(sc.broadcast(full + rank, odd, source=1), full + 3)
    assert torch.equal(sc.reduce(full + rank, odd, destination=1), 2 * full + 4 if position == 1 else 0 * full)
    assert torch.equal(sc.all_reduce(full + rank, odd), 2 * full + 4)
    assert torch.equal(sc.ring_shift(local, sizes[1 - position], 0, odd).wait(), full.split(sizes)[1 - position])


@pytest.mark.ranks(1)
def test_group_of_one_issues_nothing_and_never_aliases(monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("a collective was issued")

    for name in ("isend", "irecv", "all_reduce", "broadcast", "reduce", "all_to_all_single", "batch_isend_irecv"):
        monkeypatch.setattr(dist, name, forbidden)
    tensor = ramp(2, 3)
    with sc.comm_trace() as trace:
        results = [
            sc.all_gather_v(tensor, [2], 0, world()),
            sc.reduce_scatter_v(tensor, [2], 0, world()),
            sc.all_to_all_v(tensor, [3], [2], world(), send_dim=1),
            sc.scatter_v(tensor, [2], 0, world()),
            sc.gather_v(tensor, [2], 0, world()),
            sc.broadcast(tensor, world()),
            sc.reduce(tensor, world()),
            sc.all_reduce(tensor, world()),
        ]
        assert sc.ring_shift(tensor, 2, 0, world()).wait() is tensor
    assert not trace.events
    for result in results:
        assert torch.equal(result, tensor)
        assert result.data_ptr() != tensor.data_ptr()


@pytest.mark.ranks(2)
def test_bad_arguments_raise_on_all_ranks_before_communication():
    local = torch.ones(2, 3)
    cases = [
        (lambda: sc.all_gather_v(local, [2, 2, 1], 0, world()), "3 entries .* 2 ranks"),
        (lambda: sc.all_gather_v(local, [1, 1], 0, world()), "has 2 rows along dim 0"),
        (lambda: sc.all_gather_v(local, [2, 2], 2, world()), "dim 2 does not exist"),
        (lambda: sc.all_gather_v(local, [3, -1], 0, world()), "negative"),
        (lambda: sc.reduce_scatter_v(local, [1, 2], 0, world()), "sizes sum to 3"),
        (lambda: sc.all_to_all_v(local, [1, 1], [2, 2], world()), "would receive 2"),
        (lambda: sc.scatter_v(local, [1, 2], 0, world()), "sizes sum to 3"),
        (lambda: sc.scatter_v(local, [1, 1], 0, world(), source=2), "source 2 is not in the group"),
        (lambda: sc.ring_shift(local, 2, 0, world(), buffer=torch.ones(5)), "buffer holds 5"),
        (lambda: sc.broadcast(local, world(), source=-1), "source -1"),
    ]
    for call, message in cases:
        with pytest.raises(LayoutMismatchError, match=message):
            call()
    with pytest.raises(ValueError, match="unknown reduction 'median'"):
        sc.all_reduce(local, world(), op="median")
    assert sc.all_reduce(torch.ones(1), world()).item() == 2  # the group is still usable


@pytest.mark.ranks(3)
def test_sums_of_short_floats_are_ordered_and_accurate():
    rank, _ = me()
    values = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16)
    mine = values[rank].repeat(3)
    result = sc.reduce_scatter_v(mine, [1, 1, 1], 0, world())
    assert result.item() == 258.0  # bfloat16 steps would lose both ones
    spread = torch.tensor([1e16, 1.0, -1e16], dtype=torch.float64)[rank].repeat(3)
    assert sc.reduce_scatter_v(spread, [1, 1, 1], 0, world()).item() == 0.0  # (1e16 + 1) - 1e16, in rank order


@pytest.mark.ranks(2, 3)
def test_several_collectives_in_flight():
    rank, n = me()
    sizes = sizes_for("uneven", n)
    full = ramp(sum(sizes), 2)
    local = full.split(sizes)[rank]
    handles = [sc.all_gather_v(local + k, sizes, 0, world(), async_op=True) for k in range(4)]
    handles += [sc.all_reduce(local[:0].sum() + k, world(), async_op=True) for k in range(4)]
    for k in (3, 1, 2, 0):
        assert torch.equal(handles[k].wait(), full + k)
        assert torch.equal(handles[4 + k].wait(), torch.tensor(n * k, dtype=full.dtype))
    assert handles[0].wait() is handles[0].wait()


@pytest.mark.ranks(2)
def test_lazily_conjugated_and_negated_inputs_send_their_values():
    rank, n = me()
    numbers = torch.complex(ramp(3, 2), ramp(3, 2) + 1)
    sizes = [2, 1]
    for full in (numbers.conj(), numbers.conj().imag):
        assert full.is_conj() or full.is_neg()
        local = full.split(sizes)[rank]
        assert torch.equal(sc.all_gather_v(local, sizes, 0, world()), full)
        assert torch.equal(sc.all_reduce(full, world()), n * full)
        assert torch.equal(sc.reduce_scatter_v(full, sizes, 0, world()), n * local)
        assert torch.equal(sc.ring_shift(local, sizes[1 - rank], 0, world()).wait(), full.split(sizes)[1 - rank])
