from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

import shardtensor_collectives as sc
from shardtensor_collectives import _trace


def world():
    return dist.group.WORLD


@pytest.mark.ranks(3)
def test_bytes_of_every_collective():
    rank = dist.get_rank()
    sizes = [3, 0, 2]
    local, full = torch.ones(sizes[rank], 2), torch.ones(5, 2)
    with sc.comm_trace() as trace:
        sc.all_gather_v(local, sizes, 0, world(), axis="domain")
        sc.reduce_scatter_v(full, sizes, 0, world())
        sc.all_to_all_v(local, [1, 1, 0], sizes, world(), send_dim=1)
        sc.scatter_v(full, sizes, 0, world(), source=2)
        sc.gather_v(local, sizes, 0, world(), destination=2)
        sc.broadcast(full, world(), source=1)
        sc.reduce(full, world(), destination=1)
        sc.all_reduce(full, world())
        sc.ring_shift(local, sizes[rank - 1], 0, world()).wait()
    row = 2 * 4
    mine, whole = sizes[rank] * row, 5 * row
    columns = {0: 1, 1: 1, 2: 0}
    expected = {
        "all_gather_v": (2 * mine, whole - mine),
        "reduce_scatter_v": (whole - mine, 2 * mine),
        "all_to_all_v": (4 * sizes[rank] * (2 - columns[rank]), 4 * columns[rank] * (5 - sizes[rank])),
        "scatter_v": (whole - mine, 0) if rank == 2 else (0, mine),
        "gather_v": (0, whole - mine) if rank == 2 else (mine, 0),
        "broadcast": (2 * whole, 0) if rank == 1 else (0, whole),
        "reduce": (0, 2 * whole) if rank == 1 else (whole, 0),
        "all_reduce": (whole, whole),
        "ring_shift": (mine, sizes[rank - 1] * row),
    }
    assert {event.collective: (event.bytes_sent, event.bytes_received) for event in trace} == expected
    assert all(event.seconds > 0 for event in trace)
    assert trace.events[0].axis == "domain" and trace.events[1].axis is None


@pytest.mark.ranks(2)
def test_traces_nest_and_operators_attribute():
    x = torch.ones(4)
    with sc.comm_trace() as outer:
        sc.all_reduce(x, world())
        with sc.comm_trace() as inner, sc.operator_range("aten.sum"):
            sc.all_reduce(x, world(), axis="domain")
            with sc.operator_range("aten.mm"):
                sc.all_reduce(x, world(), axis="domain")
                sc.all_gather_v(x, [4, 4], 0, world(), axis="domain")
            assert sc.current_operator() == "aten.sum"
    sc.all_reduce(x, world())
    assert [event.operator for event in outer] == [None, "aten.sum", "aten.mm", "aten.mm"]
    assert inner.events == outer.events[1:]
    summary = outer.by_operator()["aten.mm"]
    assert (summary.n_calls, summary.collective, summary.bytes_sent) == (2, "all_gather_v+all_reduce", 32)
    table = outer.table().splitlines()
    assert table[0].split() == ["operator", "collective", "axis", "calls", "sent", "received", "ms"]
    assert len(table) == 5
    assert any(line.split()[:5] == ["aten.mm", "all_gather_v", "domain", "1", "16"] for line in table)
    assert not _trace.observed


@pytest.mark.ranks(2)
def test_waiting_counts_and_computing_does_not():
    x = torch.ones(1000)
    with sc.comm_trace() as trace:
        pending = sc.all_reduce(x, world(), async_op=True)
        time.sleep(0.3)
        pending.wait()
        issued = trace.events[0].seconds
        pending.wait()  # costs nothing a second time
    assert 0 < issued < 0.25
    assert trace.events[0].seconds - issued < 1e-3


def test_operators_are_per_thread_and_traces_are_not():
    names = []

    def other():
        names.append(sc.current_operator())
        with _trace.Span("all_reduce", None, 1, 2):
            pass

    with sc.comm_trace() as trace, sc.operator_range("aten.add"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert names == [None]
    assert (trace.bytes_sent, trace.bytes_received) == (1, 2)


def test_operator_is_restored_after_an_error():
    with pytest.raises(KeyError), sc.operator_range("aten.add"):
        raise KeyError
    assert sc.current_operator() is None
