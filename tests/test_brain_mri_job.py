"""The brain job on a coarse grid: every way to split a sample is the single process's training, to rounding."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).resolve().parent.parent / "examples" / "brain_mri"
SMALL = ["--resolution", "4", "--steps", "3", "--dtype", "float64", "--features", "2,2,4,4,4,2"]


def _run(script: str, *arguments: str, n_ranks: int = 0) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_ranks)] if n_ranks else []
    return subprocess.run(
        [sys.executable, *launcher, str(JOB / script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Samples per step -> folder of the single-process run."""
    folders = {}
    for n_samples in (1, 2):
        folders[n_samples] = tmp_path_factory.mktemp(f"one_process_{n_samples}")
        done = _run("train.py", *SMALL, "--ddp", str(n_samples), "--output", str(folders[n_samples]))
        assert done.returncode == 0, done.stdout + done.stderr
    return folders


@pytest.mark.parametrize(
    ("n_ranks", "n_samples", "arguments"),
    [
        pytest.param(1, 1, [], id="one rank"),
        pytest.param(2, 1, ["--split", "0.4,0.6"], id="uneven"),
        pytest.param(3, 1, ["--split", "0.5,0,0.5"], id="empty share"),
        pytest.param(4, 1, ["--split", "0.02,0.9,0.02,0.06"], id="thinner than the halo"),
        pytest.param(4, 2, ["--ddp", "2", "--domain", "2", "--split", "0.3,0.7"], id="two samples over two ranks each"),
    ],
)
def test_a_split_run_is_the_same_training(
    references: dict[int, Path], tmp_path: Path, n_ranks: int, n_samples: int, arguments: list[str]
) -> None:
    done = _run("train.py", *SMALL, *arguments, "--output", str(tmp_path), n_ranks=n_ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    # The bound on memory is for samples that fill it: here halos and workspaces outweigh the activations.
    checked = _run("check.py", str(references[n_samples]), str(tmp_path), "--skip-memory")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout.count("ok ") >= 4, checked.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--split", "0.4,0.4"], "sum to 0.8"),
        (["--split", "0.4,0.3,0.3"], "3"),
        (["--ddp", "3"], "3"),
        (["--split", "1.5,-0.5"], "at least 0"),
    ],
)
def test_shares_that_do_not_fit_end_every_rank_with_one_message(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = _run("train.py", *SMALL, *arguments, "--output", str(tmp_path), n_ranks=2)
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("train.py: error:")]
    assert len(errors) == 2, done.stderr
    assert errors[0] == errors[1]
    assert message in done.stderr
