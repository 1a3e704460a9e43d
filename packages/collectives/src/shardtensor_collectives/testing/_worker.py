"""What runs inside one process of a :class:`~shardtensor_collectives.testing.RankPool`."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

# Added to the limit of a job for the process group's own timeout, so that the pool, which
# can show where every rank stands, notices a hang before gloo does.
_GROUP_GRACE_SECONDS = 30.0


class RankSkip(Exception):
    """Raised by a job (and by ``RankPool.run``) to say that it does not apply here."""


@dataclass(frozen=True)
class Job:
    """One call for one rank, as it travels through the pipe."""

    n_ranks: int
    store_path: str
    timeout: float
    call: bytes  # pickled (function, args)
    warnings_as_errors: bool


@dataclass(frozen=True)
class Reply:
    """A worker's answer: ``kind`` is one of ready, started, value, skip, error."""

    kind: str
    value: Any = None
    text: str = ""


def serve(rank: int, pipe: Connection, threads: int, stack_path: str) -> None:
    """Run jobs from `pipe` until it closes or ``None`` arrives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes the pool
    os.environ["LOCAL_RANK"] = os.environ["RANK"] = str(rank)
    import torch

    torch.set_num_threads(threads)
    with open(stack_path, "w") as stack_file:
        # Works while the main thread is blocked inside a collective, where no Python code can run.
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        pipe.send(Reply("ready"))
        while True:
            try:
                job = pipe.recv()
            except EOFError:
                return
            if job is None:
                return
            reply = _run(rank, pipe, job)
            try:
                pipe.send(reply)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                pipe.send(Reply("error", text=f"the result cannot be pickled: {error!r}"))
            # The parent answers once all ranks are done: nobody leaves the group while a peer still uses it.
            try:
                pipe.recv()
            except EOFError:
                return
            _reset()


def _run(rank: int, pipe: Connection, job: Job) -> Reply:
    import torch
    import torch.distributed as dist

    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(job.n_ranks)
    try:
        function, args = pickle.loads(job.call)
        prepare = getattr(function, "prepare", None)
        if prepare is not None:  # slow imports do not count against the limit
            prepare()
        pipe.send(Reply("started"))
        dist.init_process_group(
            "gloo",
            rank=rank,
            world_size=job.n_ranks,
            store=dist.FileStore(job.store_path, job.n_ranks),
            timeout=timedelta(seconds=job.timeout + _GROUP_GRACE_SECONDS),
        )
        torch.manual_seed(0)
        with warnings.catch_warnings():
            if job.warnings_as_errors:
                warnings.simplefilter("error")
            return Reply("value", function(*args))
    except RankSkip as skip:
        return Reply("skip", text=str(skip))
    except BaseException as error:  # pytest's outcomes and SystemExit are failures of the rank too
        return Reply("error", text="".join(traceback.format_exception(error)))


def _reset() -> None:
    """Forget what a job may have left behind: groups, meshes, compiled code, global switches."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    mesh_module = sys.modules.get("torch.distributed.device_mesh")
    resources = getattr(mesh_module, "_mesh_resources", None)
    stack = getattr(resources, "mesh_stack", None)
    if stack:
        stack.clear()
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.utils.counters:  # something was compiled: its guards name the old group
        dynamo.reset()
        dynamo.utils.counters.clear()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
