"""Train on one process and on several, compare, and write a report.

python demo.py                                            2 ranks with 0.4 and 0.6 of the volume
python demo.py --domain 3 --split 0.5,0,0.5               any other split
python demo.py --ddp 2 --domain 2 --split 0.3,0.7         two samples per step as well
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from brain_mri._options import Launch, add_training_arguments, check_options
from brain_mri._record import load_run
from brain_mri._report import write_report

TRAIN = Path(__file__).resolve().with_name("train.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_training_arguments(parser)
    parser.add_argument("--output", type=Path, default=Path("reports/brain_mri"), help="folder for the report")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of each process of both runs (default 1: a fair comparison)"
    )
    arguments = parser.parse_args()
    if arguments.domain is None:
        arguments.domain = 2 if arguments.split is None else len(arguments.split)
    if arguments.split is None and arguments.domain == 2:
        arguments.split = (0.4, 0.6)
    n_ranks = arguments.ddp * arguments.domain
    try:
        check_options(arguments, Launch(0, n_ranks, 0, n_ranks, is_distributed=True))
    except ValueError as error:
        parser.error(str(error))

    start = time.perf_counter()
    one, split = arguments.output / "one_process", arguments.output / "split"
    common = common_arguments(arguments)
    launch([str(TRAIN), *common, "--output", str(one)], arguments.threads)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_ranks)]
    shares = ["--domain", str(arguments.domain), "--shard-dim", str(arguments.shard_dim)]
    if arguments.split is not None:
        shares += ["--split", ",".join(map(str, arguments.split))]
    launch([*torchrun, str(TRAIN), *common, *shares, "--output", str(split)], arguments.threads)

    checks = write_report(load_run(one), load_run(split), arguments.output)
    for check in checks:
        print(f"{'ok  ' if check.has_passed else 'FAIL'}  {check.name}: {check.detail}")
    print(f"{arguments.output / 'report.md'} after {time.perf_counter() - start:.0f} s")
    if not all(check.has_passed for check in checks):
        raise SystemExit(1)


def common_arguments(arguments: argparse.Namespace) -> list[str]:
    """The options that both runs get alike."""
    names = ("ddp", "resolution", "steps", "dtype", "device", "lr", "seed")
    options = [part for name in names for part in (f"--{name}", str(getattr(arguments, name)))]
    return [*options, "--features", ",".join(map(str, arguments.features))]


def launch(command: list[str], threads: int) -> None:
    """Run a Python command to its end; its failure ends the demo."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    environment.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr
    result = subprocess.run([sys.executable, *command], env=environment, check=False)
    if result.returncode:
        raise SystemExit(f"the demo stopped: {' '.join(command)} ended with status {result.returncode}")


if __name__ == "__main__":
    main()
