"""Runs the doctor on one rank with a fault injected; started through the fork server, where torch is loaded."""

from __future__ import annotations

import os
import signal
import sys
import time

import shardtensor_collectives as sc
from shardtensor_collectives import _doctor

gather = sc.all_gather_v


def run(rank: int, n_ranks: int, port: int, fault: str, output: str) -> None:
    """Replace this process's output by files, break rank 1, and exit as the doctor does."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{output}.{name}", os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n_ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    _doctor._GRACE_SECONDS = 1.5

    def faulty(local, *args, **kwargs):
        if fault == "raise":
            raise RuntimeError("the cable is loose")
        if fault == "hang":
            time.sleep(1000)
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(local + 1, *args, **kwargs)

    if rank == 1:
        sc.all_gather_v = faulty
    sys.exit(_doctor.main(["doctor", "--device", "cpu", "--timeout", "4"]))
