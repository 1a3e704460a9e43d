"""``doctor``: tries everything on the ranks it is started on, and names the rank that is at fault.

The ranks agree through the store of the rendezvous, not through collectives, which may be what is broken.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from shardtensor_collectives import _doctor_checks, _nvtx
from shardtensor_collectives._doctor_checks import Bench, WrongValue
from shardtensor_collectives._doctor_verdict import Report, Verdict, judge, odd_ones_out
from shardtensor_collectives._trace import align_columns

_GRACE_SECONDS = 5.0  # between a failure and the end, so that rank 0 can print before the launcher stops it


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run; 0 if all is well."""
    parser = argparse.ArgumentParser(prog="python -m shardtensor_collectives", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="check this installation; start it with torchrun")
    doctor.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one for every rank")
    doctor.add_argument("--timeout", type=float, default=30.0, help="seconds that one row of checks may take")
    options = parser.parse_args(arguments)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    code = Doctor(device, options.timeout).run()
    if code:
        # Threads of a broken process group may never end; what was to be said has been said.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return 0


class Doctor:
    """One run of all checks on this rank."""

    def __init__(self, device: str, timeout: float) -> None:
        self.timeout = timeout
        self.rank, self.n_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.device = torch.device("cpu")
        if device == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        self.backend = "nccl" if device == "cuda" else "gloo"
        self.store: dist.Store = dist.HashStore()
        self.n_rounds = 0
        self.round_start = time.monotonic()

    def run(self) -> int:
        """Return 0, or 1 on every rank if any is at fault."""
        self._connect()
        verdict = self._describe()
        cells: dict[str, dict[str, str]] = {}
        if verdict is None:
            table = _doctor_checks.rows()
            for index, (name, checks) in enumerate(table):
                self._progress(index, len(table), name)
                verdict = self._check_row(name, checks, cells)
                if verdict is not None:
                    break
        return self._conclude(verdict, cells)

    def _connect(self) -> None:
        if "RANK" in os.environ:
            base, self.rank, self.n_ranks = next(dist.rendezvous("env://"))
        else:
            base = self.store
            print("started without torchrun: a world of one rank, which checks little")
        self.store = dist.PrefixStore("doctor", base)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            self.backend,
            store=dist.PrefixStore("group", base),
            rank=self.rank,
            world_size=self.n_ranks,
            timeout=timedelta(seconds=self.timeout),
            device_id=self.device if self.device.type == "cuda" else None,
        )

    def _begin_round(self) -> None:
        self.round_start = time.monotonic()
        # A rank that hangs shows where, and ends, after the others have told who it is.
        faulthandler.dump_traceback_later(self.timeout + 3 * _GRACE_SECONDS, exit=True)

    def _describe(self) -> Verdict | None:
        self._begin_round()
        mine = {
            "host": socket.gethostname(),
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if self.device.type == "cuda" else "-",
            "collectives": _version("shardtensor-collectives"),
            "nvtx": f"{_version('nvtx')}{' (profiler attached)' if _nvtx.attached else ''}",
            "threads": str(torch.get_num_threads()),
        }
        answers = self._swap(json.dumps(mine))
        verdict = judge({rank: Report() for rank in answers}, self.n_ranks)
        if verdict is not None:
            return verdict
        descriptions = [json.loads(answers[rank]) for rank in range(self.n_ranks)]
        if self.rank == 0:
            print(f"backend {self.backend}, {self.n_ranks} ranks, device {self.device.type}\n")
            names = list(mine)
            lines = [("rank", *names)]
            lines += [(str(rank), *(answer[name] for name in names)) for rank, answer in enumerate(descriptions)]
            print(align_columns(lines), end="\n\n", flush=True)
        for name in ("torch", "nccl", "collectives"):
            odd = odd_ones_out([answer[name] for answer in descriptions])
            if odd:
                return Verdict(odd, f"has {name} {descriptions[odd[0]][name]}, unlike the others")
        return None

    def _check_row(
        self, name: str, checks: dict[str, _doctor_checks.BoundCheck], cells: dict[str, dict[str, str]]
    ) -> Verdict | None:
        self._begin_round()
        group = dist.group.WORLD
        assert group is not None
        bench = Bench(group, self.rank, self.n_ranks, self.device)
        row = cells.setdefault(name, {})
        report = Report()
        for column, check in checks.items():
            row[column] = "ok"
            try:
                check(bench)
            except Exception as error:
                row[column] = "FAILED"
                senders = error.senders if isinstance(error, WrongValue) else ()
                order = self.store.add("failures", 1)
                # The first line says what; the rest is where in torch.
                text = str(error).splitlines()[0] if str(error) else ""
                report = Report(f"{name} {column}", f"{type(error).__name__}: {text}", senders, order)
                break
        answers = self._swap(json.dumps(asdict(report)))
        reports = {}
        for rank, answer in answers.items():
            fields = json.loads(answer)
            reports[rank] = Report(**{**fields, "senders": tuple(fields["senders"])})
            if reports[rank].failed:
                row[reports[rank].failed.removeprefix(f"{name} ")] = "FAILED"
        return judge(reports, self.n_ranks)

    def _swap(self, value: str) -> dict[int, str]:
        """Give a text to all ranks and collect theirs; a rank that does not answer in time is left out."""
        self.n_rounds += 1
        self.store.set(f"{self.n_rounds}/{self.rank}", value)
        # A rank that waits in a collective for a dead one answers only after that has timed out.
        deadline = self.round_start + self.timeout + _GRACE_SECONDS
        answers: dict[int, str] = {}
        for rank in range(self.n_ranks):
            key = f"{self.n_rounds}/{rank}"
            left = max(deadline - time.monotonic(), 0.01)
            with contextlib.suppress(dist.DistStoreError, RuntimeError):
                self.store.wait([key], timedelta(seconds=left))
                answers[rank] = self.store.get(key).decode()
        return answers

    def _progress(self, index: int, total: int, name: str) -> None:
        if self.rank != 0:
            return
        line = f"[{index + 1:2d}/{total}] {name}"
        if sys.stderr.isatty():
            print(f"\r{line:<40}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def _conclude(self, verdict: Verdict | None, cells: dict[str, dict[str, str]]) -> int:
        speaker = min((rank for rank in range(self.n_ranks) if verdict is None or rank not in verdict.ranks), default=0)
        if verdict is not None and len(verdict.ranks) == self.n_ranks:
            speaker = 0
        if self.rank == speaker:
            if sys.stderr.isatty():
                print(f"\r{'':<40}\r", end="", file=sys.stderr)
            self._print_tables(cells)
            print(_sentence(verdict, self.n_ranks), flush=True)
            self.store.set("said", "")
        else:
            # The launcher stops everybody once one rank has ended.
            with contextlib.suppress(dist.DistStoreError, RuntimeError):
                self.store.wait(["said"], timedelta(seconds=_GRACE_SECONDS))
        faulthandler.cancel_dump_traceback_later()
        if verdict is None:
            dist.destroy_process_group()
        return 0 if verdict is None else 1

    def _print_tables(self, cells: dict[str, dict[str, str]]) -> None:
        collectives = {name: row for name, row in cells.items() if name in _doctor_checks.COLLECTIVES}
        dtypes = {name: row for name, row in cells.items() if name not in collectives}
        for title, rows in (("collective", collectives), ("dtype", dtypes)):
            if rows:
                columns = list(next(iter(rows.values())))
                lines = [(name, *(row.get(column, "-") for column in columns)) for name, row in rows.items()]
                print(align_columns([(title, *columns), *lines]), end="\n\n")


def _sentence(verdict: Verdict | None, n_ranks: int) -> str:
    if verdict is None:
        return "all is well"
    if len(verdict.ranks) == n_ranks > 1:
        return f"FAILED on all ranks: {verdict.reason}"
    name = f"rank {verdict.ranks[0]}" if len(verdict.ranks) == 1 else f"ranks {', '.join(map(str, verdict.ranks))}"
    return f"FAILED, at fault is {name}: {verdict.reason}"


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "(not installed)"
