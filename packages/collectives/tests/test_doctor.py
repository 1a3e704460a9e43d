from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import textwrap

import pytest

from shardtensor_collectives._doctor_verdict import Report, judge, odd_ones_out

SCRIPT = textwrap.dedent(
    """
    import os, signal, sys, time
    import shardtensor_collectives as sc
    from shardtensor_collectives import _doctor_checks
    from shardtensor_collectives._doctor import main

    fault = sys.argv.pop(1)
    gather = sc.all_gather_v

    def faulty(local, *args, **kwargs):
        if fault == "raise":
            raise RuntimeError("the cable is loose")
        if fault == "hang":
            time.sleep(1000)
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(local + 1, *args, **kwargs)

    if os.environ["RANK"] == "1" and fault != "none":
        sc.all_gather_v = faulty
    sys.exit(main(sys.argv[1:]))
    """
)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(folder, fault, n_ranks):
    """Run the doctor on every rank without a launcher that would hide how each one ended."""
    (folder / "job.py").write_text(SCRIPT)
    port, processes = free_port(), []
    for rank in range(n_ranks):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(n_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        command = [sys.executable, str(folder / "job.py"), fault, "doctor", "--device", "cpu", "--timeout", "4"]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    outputs = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=40)
            outputs.append((process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
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
    assert all(code != 0 for code, _, _ in outputs)
    assert "FAILED" in outputs[0][1]
    if fault == "hang":
        assert "time.sleep(1000)" in SCRIPT and "in faulty" in outputs[1][2]  # where it hung


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
