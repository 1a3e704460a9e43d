"""NVTX for real, without a GPU: a small library, injected as a profiler is, records what the ranges say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import shardtensor_collectives as sc
from shardtensor_collectives import _nvtx
from shardtensor_collectives._pending import Pending, launch

SCRIPT = textwrap.dedent(
    """
    import sys, torch, torch.distributed as dist
    import shardtensor_collectives as sc
    from shardtensor_spec import plan_exchange

    rank, store = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store, 2))
    group = dist.group.WORLD
    x = torch.ones(3 - rank, 2, requires_grad=True)
    with sc.operator_range("aten.convolution"):
        y = sc.all_gather_v(x, [3, 2], 0, group, axis="domain")
        with sc.operator_range("aten.sum"):
            pending = sc.all_reduce(x.detach().sum(), group, axis="ddp", async_op=True)
    pending.wait()
    y.sum().backward()
    boxes = [((0, 2),), ((2, 4),)]
    plan = plan_exchange(boxes, [((0, 3),), ((1, 4),)], rank, global_shape=(4,))
    sc.exchange(torch.ones(2), plan, group)
    try:
        with sc.operator_range("aten.fails"):
            raise KeyError
    except KeyError:
        pass
    dist.destroy_process_group()
    """
)


@pytest.fixture(scope="module")
def recorder(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler to build the recorder with")
    library = tmp_path_factory.mktemp("nvtx") / "recorder.so"
    source = Path(__file__).with_name("nvtx_recorder.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, source], check=True)
    return library


@pytest.fixture(scope="module")
def records(recorder, tmp_path_factory):
    """The lines of rank 0's and rank 1's recorder."""
    folder = tmp_path_factory.mktemp("records")
    (folder / "job.py").write_text(SCRIPT)
    ranks = []
    for rank in range(2):
        environment = {
            **os.environ,
            "NVTX_INJECTION64_PATH": str(recorder),
            "NVTX_RECORD_FILE": str(folder / f"record-{rank}"),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        command = [sys.executable, folder / "job.py", str(rank), str(folder / "store")]
        ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    for process in ranks:
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
    return [[line.split("\t") for line in (folder / f"record-{rank}").read_text().splitlines()] for rank in range(2)]


def ranges_of(lines):
    """(path of enclosing messages, category, payload) of every range, in the order in which they were opened."""
    names = {category: name for kind, _, category, name in (line for line in lines if line[0] == "category")}
    opened, result = [], []
    for line in lines:
        assert line[1] == "domain_parallel"
        if line[0] == "push":
            _, _, message, category, payload = line
            opened.append(message)
            result.append(("/".join(opened), names.get(category), int(payload)))
        elif line[0] == "pop":
            opened.pop()
    assert not opened
    return result


@pytest.mark.parametrize("rank", [0, 1])
def test_ranges_are_nested_and_carry_axis_and_bytes(records, rank):
    mine, theirs = ((3, 2), (2, 3))[rank]
    row = 2 * 4
    assert ranges_of(records[rank]) == [
        ("aten.convolution", None, 0),
        ("aten.convolution/all_gather_v", "domain", (mine + theirs) * row),
        ("aten.convolution/aten.sum", None, 0),
        ("aten.convolution/aten.sum/all_reduce", "ddp", 2 * 4),
        ("all_reduce.wait", "ddp", 2 * 4),
        ("aten.convolution backward", None, 0),
        ("aten.convolution backward/reduce_scatter_v", "domain", (mine + theirs) * row),
        ("exchange", None, 2 * 4),
        ("aten.fails", None, 0),
    ]


def test_without_a_profiler_nothing_is_attached():
    if "NVTX_INJECTION64_PATH" in os.environ:
        pytest.skip("a profiler is attached to the tests themselves")
    assert not _nvtx.attached


def best_seconds(function, n=2000, n_tries=30):
    best = float("inf")
    for _ in range(n_tries):
        start = time.perf_counter()
        for _ in range(n):
            function()
        best = min(best, (time.perf_counter() - start) / n)
    return best


def test_unobserved_cost_is_below_a_microsecond():
    x = torch.ones(2)
    done = Pending.done(x)

    def post(_):
        return done

    def bare():
        return post(x).wait()

    def ours():
        return launch("all_reduce", "domain", x, post, bare, bare, False)

    def marked():
        with sc.operator_range("aten.add"):
            pass

    assert best_seconds(ours) - best_seconds(bare) < 1e-6
    assert best_seconds(marked) < 1e-6
