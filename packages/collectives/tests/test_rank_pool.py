from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from rank_helpers import ramp
from torch.distributed.device_mesh import init_device_mesh

from shardtensor_collectives.testing import RankFailure, RankPool, RankSkip


def module_level_helper() -> int:
    return dist.get_world_size()


class Box:
    def __init__(self, value: int) -> None:
        self.value = value


@pytest.mark.ranks(1, 2, 3, 4)
def test_body_runs_on_every_rank():
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    n = module_level_helper()
    assert total.item() == n * (n + 1) // 2
    assert ramp(2, 3).shape == (2, 3)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("factor", [2, 3])
@pytest.mark.parametrize(
    ("function", "box"), [(lambda x: x + 1, Box(4)), pytest.param(lambda x: x * 2, Box(6), id="mul")]
)
def test_parametrize_takes_lambdas_and_local_classes(function, factor, box):
    assert function(3) == box.value
    assert factor in (2, 3)
    assert isinstance(box, Box)


@pytest.mark.ranks(2)
def test_raises_and_monkeypatch_and_tmp_path(monkeypatch, tmp_path):
    monkeypatch.setenv("SOME_VARIABLE", "1")
    assert os.environ["SOME_VARIABLE"] == "1"
    assert tmp_path.is_dir()
    with pytest.raises(ValueError, match="on purpose"):
        raise ValueError("on purpose")


@pytest.mark.ranks(2)
class TestInAClass:
    def test_method(self):
        assert "SOME_VARIABLE" not in os.environ
        assert dist.get_world_size() == 2


def test_parent_never_initialises_a_group():
    assert not dist.is_initialized()


def fail_on(rank):
    if dist.get_rank() == rank:
        raise KeyError("the reason")
    dist.barrier()


def hang_on(rank):
    if dist.get_rank() == rank:
        time.sleep(100)
    dist.barrier()


def die_on(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def warn():
    import warnings

    warnings.warn("a warning", stacklevel=1)


def skip_on(*ranks):
    if dist.get_rank() in ranks:
        raise RankSkip("not here")


def rank_and_world():
    return dist.get_rank(), dist.get_world_size()


def make_mesh():
    start = time.perf_counter()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "domain"))
    total = torch.ones(2)
    dist.all_reduce(total, group=mesh["domain"].get_group())
    assert total[0] == 2
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    n_descriptors = len(os.listdir("/proc/self/fd"))
    return time.perf_counter() - start, int(status["VmRSS"].split()[0]), int(status["Threads"]), n_descriptors


@pytest.fixture(scope="module")
def pool():
    with RankPool() as pool:
        yield pool


def test_results_come_in_rank_order(pool):
    assert pool.run(rank_and_world, 3) == [(0, 3), (1, 3), (2, 3)]
    assert pool.run(rank_and_world, 1) == [(0, 1)]


def test_failure_names_the_rank_that_raised_and_shows_all(pool):
    before = pool.run(os.getpid, 2)
    with pytest.raises(RankFailure) as failure:
        pool.run(fail_on, 2, 1)
    text = str(failure.value)
    assert "first was rank 1" in text
    assert "KeyError: 'the reason'" in text
    assert "rank 0 of 2" in text and "barrier" in text  # where the rank that waited stands
    after = pool.run(os.getpid, 2)
    assert not set(before) & set(after)


def test_hang_shows_where_every_rank_stands(pool):
    pool.run(rank_and_world, 2)
    start = time.monotonic()
    with pytest.raises(RankFailure, match="limit 1 s") as failure:
        pool.run(hang_on, 2, 0, timeout=1)
    assert time.monotonic() - start < 10
    assert "hang_on" in str(failure.value) and "barrier" in str(failure.value)
    assert pool.run(rank_and_world, 2) == [(0, 2), (1, 2)]


def test_death_is_reported(pool):
    with pytest.raises(RankFailure, match="died with exit code -9"):
        pool.run(die_on, 2, 1)
    assert pool.run(rank_and_world, 2) == [(0, 2), (1, 2)]


def test_skips_must_agree(pool):
    with pytest.raises(RankSkip, match="not here"):
        pool.run(skip_on, 2, 0, 1)
    with pytest.raises(RankFailure, match=r"ranks \[1\] of 2 skipped"):
        pool.run(skip_on, 2, 1)


def test_warnings_can_be_errors(pool):
    assert pool.run(warn, 1) == [None]
    with RankPool(warnings_as_errors=True) as strict, pytest.raises(RankFailure, match="UserWarning: a warning"):
        strict.run(warn, 1)


def test_meshes_do_not_accumulate(pool):
    samples = [pool.run(make_mesh, 4)[0] for _ in range(30)]
    seconds, kilobytes, n_threads, n_descriptors = zip(*samples, strict=True)
    assert sorted(seconds[-10:])[5] < 3 * sorted(seconds[5:15])[5] + 0.02
    assert n_threads[-1] <= n_threads[5] + 2
    assert n_descriptors[-1] <= n_descriptors[5] + 4
    assert kilobytes[-1] - kilobytes[5] < 30 * 200
