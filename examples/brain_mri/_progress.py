"""A progress bar on a terminal, a line per step in a log file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Report(Protocol):
    """Called after every step."""

    def __call__(self, step: int, loss: float, seconds: float) -> None:
        """Show the loss of a step and how long it took."""


@contextmanager
def progress(title: str, n_steps: int, *, is_shown: bool) -> Iterator[Report]:
    """Show how far the training is.

    Parameters
    ----------
    title : str
        Stands in front.
    n_steps : int
        Steps in total.
    is_shown : bool
        False on all ranks but one.

    Yields
    ------
    Report
        To be called after every step.
    """
    if not is_shown:
        yield lambda step, loss, seconds: None
    elif not sys.stdout.isatty():
        yield lambda step, loss, seconds: print(
            f"{title}  step {step + 1:3d}/{n_steps}  loss {loss:.6f}  {seconds:.1f} s", flush=True
        )
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns) as bar:
            task = bar.add_task(title, total=n_steps, loss="-")

            def advance(step: int, loss: float, seconds: float) -> None:
                bar.update(task, completed=step + 1, loss=f"{loss:.5f}")

            yield advance
