"""A pool of rank processes that outlives the calls that use it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from shardtensor_collectives.testing._worker import Job, RankSkip, Reply, serve

#: Modules that the fork server imports once, so that a new worker starts in milliseconds.
DEFAULT_PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch._dynamo",
    "shardtensor_collectives",
)

_START_SECONDS = 180.0  # for importing torch and the modules of a job, on a busy machine
_EXPLAIN_SECONDS = 0.5  # once a rank has failed, the others get this long to tell their side


class RankFailure(AssertionError):
    """One or more ranks raised, died or hung; the message holds every rank's traceback."""


@dataclass
class _Worker:
    rank: int
    process: Any
    pipe: Connection
    stack_path: str


class RankPool:
    """Processes that run a function on every rank of a fresh gloo world.

    Parameters
    ----------
    threads : int
        Intra-op threads of each process.
    preload : sequence of str
        Modules that the fork server imports once for all workers. Use it for whatever your tests import.
        The fork server is shared by all pools of a process, so the first pool's list decides.
    method : str
        Start method of :mod:`multiprocessing`: ``"forkserver"`` (fast) or ``"spawn"``.
    warnings_as_errors : bool
        Whether a warning on any rank fails the call.

    Notes
    -----
    A call costs a few milliseconds plus the creation of its group. A rank that raises, dies or hangs
    costs one restart of the pool, never the calls after it. The parent never initialises a process group.

    Examples
    --------
    >>> import operator
    >>> with RankPool(threads=1) as pool:  # doctest: +SKIP
    ...     pool.run(operator.add, 2, 20, 22)
    [42, 42]
    """

    def __init__(
        self,
        *,
        threads: int = 1,
        preload: Sequence[str] = DEFAULT_PRELOAD,
        method: str = "forkserver",
        warnings_as_errors: bool = False,
    ) -> None:
        self.threads = threads
        self.warnings_as_errors = warnings_as_errors
        self._context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            self._context.set_forkserver_preload(list(preload))
        self._folder = tempfile.mkdtemp(prefix="rankpool-")
        self._workers: list[_Worker] = []
        self._n_calls = 0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], n_ranks: int, *args: Any, timeout: float = 20.0) -> list[Any]:
        """Run ``function(*args)`` on `n_ranks` ranks of a fresh world.

        Parameters
        ----------
        function : callable
            A picklable function. If it has a method ``prepare()``, that is called first and does not
            count against the limit.
        n_ranks : int
            The world size.
        timeout : float
            Seconds that the slowest rank may take.

        Returns
        -------
        list
            The results in rank order.

        Raises
        ------
        RankFailure
            If a rank raised, died or did not answer in time.
        RankSkip
            If every rank raised :class:`RankSkip`.
        """
        if n_ranks < 1:
            raise ValueError(f"n_ranks must be at least 1, got {n_ranks}")
        self._grow(n_ranks)
        workers = self._workers[:n_ranks]
        self._n_calls += 1
        store_path = os.path.join(self._folder, f"store-{self._n_calls}")
        job = Job(n_ranks, store_path, timeout, pickle.dumps((function, args)), self.warnings_as_errors)
        for worker in workers:
            # A worker that died between calls is noticed below, when its pipe is read.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                worker.pipe.send(job)
        replies = self._collect(workers, timeout)
        failures = {rank: reply.text for rank, reply in replies.items() if reply.kind == "error"}
        skips = {rank: reply.text for rank, reply in replies.items() if reply.kind == "skip"}
        if failures or (skips and len(skips) < n_ranks):
            self._stop_workers()
            raise RankFailure(_explain(failures, skips, n_ranks))
        for worker in workers:
            worker.pipe.send("all done")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(store_path)
        if skips:
            raise RankSkip(skips[0])
        return [replies[rank].value for rank in range(n_ranks)]

    def close(self) -> None:
        """End all workers."""
        self._stop_workers()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The process ids of the live workers, in rank order."""
        return tuple(worker.process.pid for worker in self._workers)

    def _grow(self, n_ranks: int) -> None:
        os.makedirs(self._folder, exist_ok=True)  # a closed pool may be used again
        fresh = []
        while len(self._workers) < n_ranks:
            rank = len(self._workers)
            ours, theirs = self._context.Pipe()
            stack_path = os.path.join(self._folder, f"stack-{rank}")
            process = self._context.Process(
                target=serve, args=(rank, theirs, self.threads, stack_path), daemon=True, name=f"rank-{rank}"
            )
            process.start()
            theirs.close()
            self._workers.append(_Worker(rank, process, ours, stack_path))
            fresh.append(self._workers[-1])
        for worker in fresh:
            try:
                ready = worker.pipe.poll(_START_SECONDS) and worker.pipe.recv()
            except EOFError:
                ready = False
            if not ready:
                self._stop_workers()
                raise RankFailure(f"rank {worker.rank} did not start; does the main module import cleanly?")

    def _collect(self, workers: list[_Worker], timeout: float) -> dict[int, Reply]:
        replies: dict[int, Reply] = {}
        pending = {worker.pipe: worker for worker in workers}
        started: set[int] = set()
        deadline = time.monotonic() + _START_SECONDS
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                replies.update(self._describe_hang(list(pending.values()), timeout))
                return replies
            for pipe in ready:
                worker = pending[pipe]  # type: ignore[index]
                try:
                    reply: Reply = worker.pipe.recv()
                except (EOFError, ConnectionResetError):
                    worker.process.join(1)
                    reply = Reply("error", text=f"died with exit code {worker.process.exitcode}")
                if reply.kind == "started":
                    started.add(worker.rank)
                    if len(started) == len(workers):
                        deadline = time.monotonic() + timeout
                    continue
                del pending[worker.pipe]
                replies[worker.rank] = reply
                if reply.kind == "error":
                    deadline = min(deadline, time.monotonic() + _EXPLAIN_SECONDS)
        return replies

    def _describe_hang(self, hung: list[_Worker], timeout: float) -> dict[int, Reply]:
        for worker in hung:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.process.pid, signal.SIGUSR1)
        time.sleep(0.2)  # for the signal handlers to write
        replies = {}
        for worker in hung:
            try:
                with open(worker.stack_path) as file:
                    stack = file.read().strip()
            except OSError:
                stack = ""
            text = f"no answer (limit {timeout:g} s); it stands at\n{stack or '(unknown)'}\n"
            replies[worker.rank] = Reply("error", text=text)
        return replies

    def _stop_workers(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers.clear()


def _explain(failures: dict[int, str], skips: dict[int, str], n_ranks: int) -> str:
    if not failures:
        return f"ranks {sorted(skips)} of {n_ranks} skipped and the others did not: {next(iter(skips.values()))}"
    # A rank that raised is the likelier cause than those that then waited for it.
    first = min(failures, key=lambda rank: (failures[rank].startswith("no answer"), rank))
    order = sorted(failures, key=lambda rank: (rank != first, rank))
    body = "\n".join(f"--- rank {rank} of {n_ranks} ---\n{failures[rank].rstrip()}" for rank in order)
    return f"{len(failures)} of {n_ranks} ranks failed, first was rank {first}:\n{body}"
