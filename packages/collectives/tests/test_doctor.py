from __future__ import annotations

import multiprocessing
import os
import re
import socket
import subprocess
import sys

import doctor_job
import pytest

from shardtensor_collectives._doctor_verdict import Report, judge, odd_ones_out
from shardtensor_collectives.testing import DEFAULT_PRELOAD


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(folder, fault, n_ranks):
    """Run the doctor on every rank without a launcher that would hide how each one ended."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(DEFAULT_PRELOAD))
    port = free_port()
    processes = [
        context.Process(target=doctor_job.run, args=(rank, n_ranks, port, fault, str(folder / str(rank))))
        for rank in range(n_ranks)
    ]
    outputs = []
    try:
        for process in processes:
            process.start()
        for rank, process in enumerate(processes):
            process.join(60)
            texts = [(folder / f"{rank}.{name}").read_text() for name in ("out", "err")]
            outputs.append((process.exitcode, *texts))
    finally:
        for process in processes:
            process.kill()
            process.join()
    return outputs


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raise", "at fault is rank 1: all_gather_v even: RuntimeError: the cable is loose"),
        ("wrong", "at fault is rank 1: all_gather_v even: .* wrong values in the part of rank 1"),
        ("hang", "at fault is rank 1: gave no sign of life"),
        ("die", "at fault is rank 1: gave no sign of life"),
    ],
)
def test_a_fault_on_one_rank_is_named_and_all_ranks_fail(tmp_path, fault, reason):
    outputs = start(tmp_path, fault, 3)
    assert re.search(reason, outputs[0][1]), outputs
    assert all(code not in (0, None) for code, _, _ in outputs), outputs  # None: still running
    assert "FAILED" in outputs[0][1]
    if fault == "hang":
        assert "in faulty" in outputs[1][2]  # where it hung


def test_torchrun_prints_the_tables_and_succeeds():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "shardtensor_collectives", "doctor", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    lines = [line.split() for line in run.stdout.splitlines()]
    assert ["collective", "even", "uneven", "empty"] in lines
    assert ["exchange", "ok", "ok", "ok"] in lines
    assert ["bfloat16", "ok", "ok", "ok"] in lines
    assert run.stdout.rstrip().endswith("all is well")
    assert "] all_gather_v" in run.stderr
    assert sum(line.endswith("all_gather_v") for line in run.stderr.splitlines()) == 1  # progress on rank 0 only


def wrong(*senders, order=1):
    return Report("all_gather_v even", f"wrong {senders}", senders, order)


def failed(error, order):
    return Report("all_gather_v even", error, (), order)


@pytest.mark.parametrize(
    ("reports", "culprits"),
    [
        ({0: Report(), 1: Report(), 2: Report()}, None),
        ({0: Report(), 2: Report()}, (1,)),
        ({0: wrong(2), 1: wrong(2), 2: Report()}, (2,)),
        ({0: wrong(1, 2), 1: Report(), 2: Report()}, (0,)),  # who finds all others wrong is wrong
        ({0: failed("timeout", 2), 1: failed("loose cable", 1), 2: failed("timeout", 3)}, (1,)),
        ({rank: failed("no such dtype", rank + 1) for rank in range(3)}, (0, 1, 2)),
        ({0: failed("wrong values", 1), 1: Report(), 2: Report()}, (0,)),
    ],
)
def test_judge(reports, culprits):
    verdict = judge(reports, 3)
    assert (verdict and verdict.ranks) == culprits


def test_odd_ones_out():
    assert odd_ones_out(["a", "a", "a"]) == ()
    assert odd_ones_out(["a", "b", "a", "b", "a"]) == (1, 3)
