"""What the doctor tries: every collective with even, uneven and empty shards, and every dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import shardtensor_collectives as sc
from shardtensor_spec import plan_exchange

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)

SHARDS = ("even", "uneven", "empty")


@dataclass(frozen=True)
class Bench:
    """Where a check runs."""

    group: dist.ProcessGroup
    rank: int
    n_ranks: int
    device: torch.device


class WrongValue(Exception):
    """A collective returned other values than it should.

    Attributes
    ----------
    senders : tuple of int
        The ranks whose part is wrong, where that can be told.
    """

    def __init__(self, what: str, senders: Sequence[int] = ()) -> None:
        where = f" in the part of rank {', '.join(map(str, senders))}" if senders else ""
        super().__init__(f"{what}: wrong values{where}")
        self.senders = tuple(senders)


Check = Callable[[Bench, str], None]
BoundCheck = Callable[[Bench], None]


def sizes_of(shards: str, n_ranks: int) -> list[int]:
    """Rows per rank: all alike, all different, or with every second shard empty."""
    return {
        "even": [4] * n_ranks,
        "uneven": [1 + (3 * rank) % 5 for rank in range(n_ranks)],
        "empty": [0 if rank % 2 == 0 else 3 for rank in range(n_ranks)],
    }[shards]


def part(owner: int, n_rows: int, bench: Bench, dtype: torch.dtype = torch.float32) -> Tensor:
    """The rows of one rank, (n_rows, 2): small whole numbers that every dtype holds."""
    values = (torch.arange(2 * n_rows) + owner).remainder(3).view(n_rows, 2)
    return values.to(dtype).to(bench.device)


def compare(what: str, result: Tensor, expected: Sequence[Tensor], dim: int = 0) -> None:
    """Compare part by part, so that a wrong one names its sender."""
    if result.dtype is not expected[0].dtype or list(result.shape) != list(torch.cat(_comparable(expected), dim).shape):
        raise WrongValue(f"{what} has shape {tuple(result.shape)} and dtype {result.dtype}")
    parts = result.split([tensor.shape[dim] for tensor in expected], dim)
    wrong = [owner for owner, pair in enumerate(zip(parts, expected, strict=True)) if not _equal(*pair)]
    if wrong:
        raise WrongValue(what, wrong)


def _comparable(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The values in a dtype that every device can compare."""
    if tensors[0].dtype.is_complex:
        return [tensor.to(torch.complex128) for tensor in tensors]
    return [tensor.to(torch.float64) for tensor in tensors]


def _equal(first: Tensor, second: Tensor) -> bool:
    return torch.equal(*_comparable([first, second]))


def _gathers(bench: Bench, shards: str, dtype: torch.dtype = torch.float32) -> None:
    sizes = sizes_of(shards, bench.n_ranks)
    parts = [part(owner, size, bench, dtype) for owner, size in enumerate(sizes)]
    compare("all_gather_v", sc.all_gather_v(parts[bench.rank], sizes, 0, bench.group), parts)


def _reduce_scatters(bench: Bench, shards: str, dtype: torch.dtype = torch.float32) -> None:
    sizes = sizes_of(shards, bench.n_ranks)
    contributions = [part(owner, sum(sizes), bench) for owner in range(bench.n_ranks)]
    result = sc.reduce_scatter_v(contributions[bench.rank].to(dtype), sizes, 0, bench.group)
    compare("reduce_scatter_v", result, [sum(contributions).split(sizes)[bench.rank].to(dtype)])  # type: ignore[union-attr]


def _all_to_alls(bench: Bench, shards: str) -> None:
    send = sizes_of("uneven", bench.n_ranks)
    receive = sizes_of(shards, bench.n_ranks)
    full = [part(owner, rows, bench).repeat(1, sum(send)) for owner, rows in enumerate(receive)]
    result = sc.all_to_all_v(full[bench.rank][:, : sum(send)], send, receive, bench.group, send_dim=1)
    compare("all_to_all_v", result, [rows[:, : sum(send)].split(send, 1)[bench.rank] for rows in full])


def _scatters(bench: Bench, shards: str) -> None:
    sizes = sizes_of(shards, bench.n_ranks)
    source = bench.n_ranks - 1
    parts = [part(owner, size, bench) for owner, size in enumerate(sizes)]
    full = torch.cat(parts) if bench.rank == source else torch.zeros(sum(sizes), 2, device=bench.device)
    if not _equal(sc.scatter_v(full, sizes, 0, bench.group, source=source), parts[bench.rank]):
        raise WrongValue("scatter_v", [source])


def _gathers_to_one(bench: Bench, shards: str) -> None:
    sizes = sizes_of(shards, bench.n_ranks)
    parts = [part(owner, size, bench) for owner, size in enumerate(sizes)]
    result = sc.gather_v(parts[bench.rank], sizes, 0, bench.group, destination=bench.n_ranks - 1)
    if bench.rank == bench.n_ranks - 1:
        compare("gather_v", result, parts)


def _exchanges(bench: Bench, shards: str) -> None:
    sizes = sizes_of(shards, bench.n_ranks)
    parts = [part(owner, size, bench) for owner, size in enumerate(sizes)]
    stops = [sum(sizes[: owner + 1]) for owner in range(bench.n_ranks)]
    owned = [((stop - size, stop), (0, 2)) for stop, size in zip(stops, sizes, strict=True)]
    wanted = [((start - 2, stop + 2), columns) for (start, stop), columns in owned]
    plan = plan_exchange(owned, wanted, bench.rank, global_shape=(sum(sizes), 2))
    start, stop = wanted[bench.rank][0]
    expected = []
    for owner, ((own_start, own_stop), _) in enumerate(owned):
        expected.append(parts[owner][max(start - own_start, 0) : max(min(stop, own_stop) - own_start, 0)])
    window = sc.exchange(parts[bench.rank], plan, bench.group)
    compare("exchange", window[max(0, -start) : max(0, -start) + sum(map(len, expected))], expected)


def _rings(bench: Bench, shards: str) -> None:
    sizes = sizes_of(shards, bench.n_ranks)
    for owner, block in sc.ring_blocks(part(bench.rank, sizes[bench.rank], bench), sizes, 0, bench.group):
        if not _equal(block, part(owner, sizes[owner], bench)):
            raise WrongValue("ring_shift", [owner])


def _broadcasts(bench: Bench, shards: str) -> None:
    n_rows = {"even": 4, "uneven": 5, "empty": 0}[shards]
    for source in range(bench.n_ranks):
        result = sc.broadcast(part(bench.rank, n_rows, bench), bench.group, source=source)
        if not _equal(result, part(source, n_rows, bench)):
            raise WrongValue("broadcast", [source])


def _all_reduces(bench: Bench, shards: str, dtype: torch.dtype = torch.float32) -> None:
    n_rows = {"even": 4, "uneven": 5, "empty": 0}[shards]
    parts = [part(owner, n_rows, bench) for owner in range(bench.n_ranks)]
    expected = sum(parts)
    compare("all_reduce", sc.all_reduce(parts[bench.rank].to(dtype), bench.group), [expected.to(dtype)])  # type: ignore[union-attr]


def _gradients(bench: Bench, shards: str) -> None:
    sizes = sizes_of(shards, bench.n_ranks)
    local = part(bench.rank, sizes[bench.rank], bench).requires_grad_()
    full = sc.all_gather_v(local, sizes, 0, bench.group)
    (full * (bench.rank + 1)).sum().backward()
    assert local.grad is not None
    total = bench.n_ranks * (bench.n_ranks + 1) / 2
    if not _equal(local.grad, torch.full_like(local, total)):
        raise WrongValue("backward of all_gather_v")


COLLECTIVES: dict[str, Check] = {
    "all_gather_v": _gathers,
    "reduce_scatter_v": _reduce_scatters,
    "all_to_all_v": _all_to_alls,
    "scatter_v": _scatters,
    "gather_v": _gathers_to_one,
    "exchange": _exchanges,
    "ring_shift": _rings,
    "broadcast": _broadcasts,
    "all_reduce": _all_reduces,
    "gradients": _gradients,
}


def dtype_checks(dtype: torch.dtype) -> dict[str, BoundCheck]:
    """What has to work in one dtype: moving, and summing on the way and here."""
    return {
        "moves": lambda bench: _gathers(bench, "uneven", dtype),
        "all_reduce": lambda bench: _all_reduces(bench, "even", dtype),
        "reduce_scatter_v": lambda bench: _reduce_scatters(bench, "uneven", dtype),
    }


def rows() -> list[tuple[str, dict[str, BoundCheck]]]:
    """All checks, one table row at a time."""
    table: list[tuple[str, dict[str, BoundCheck]]] = []
    for name, check in COLLECTIVES.items():
        table.append((name, {shards: _bound(check, shards) for shards in SHARDS}))
    table += [(str(dtype).removeprefix("torch."), dtype_checks(dtype)) for dtype in DTYPES]
    return table


def _bound(check: Check, shards: str) -> BoundCheck:
    return lambda bench: check(bench, shards)
