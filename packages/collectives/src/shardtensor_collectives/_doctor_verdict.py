"""Which rank is at fault, decided from what every rank reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """What one rank says about one row of checks.

    Attributes
    ----------
    failed : str
        The check that failed, empty if none did.
    error : str
        Its message.
    senders : tuple of int
        Ranks whose part was wrong.
    order : int
        1 for the rank that failed first, 2 for the next, … 0 for one that did not fail.
    """

    failed: str = ""
    error: str = ""
    senders: tuple[int, ...] = ()
    order: int = 0


@dataclass(frozen=True)
class Verdict:
    """Who is at fault and why."""

    ranks: tuple[int, ...]
    reason: str


def judge(reports: Mapping[int, Report], n_ranks: int) -> Verdict | None:
    """Decide from the reports of those ranks that answered.

    Examples
    --------
    >>> judge({0: Report(), 1: Report()}, 2) is None
    True
    >>> judge({0: Report()}, 2)
    Verdict(ranks=(1,), reason='gave no sign of life')
    """
    silent = tuple(rank for rank in range(n_ranks) if rank not in reports)
    if silent:
        return Verdict(silent, "gave no sign of life")
    failures = {rank: report for rank, report in reports.items() if report.failed}
    if not failures:
        return None
    if len({report.error for report in failures.values()}) == 1 and len(failures) == n_ranks > 1:
        first = next(iter(failures.values()))
        if not first.senders:
            return Verdict(tuple(range(n_ranks)), f"{first.failed}: {first.error}")
    votes: Counter[int] = Counter()
    for rank, report in failures.items():
        # Whoever finds everybody else wrong is more likely to be wrong itself.
        accuses_all = n_ranks > 2 and len(set(report.senders) - {rank}) == n_ranks - 1
        votes.update([rank] if accuses_all else report.senders)
    if votes:
        top = max(votes.values())
        culprits = tuple(sorted(rank for rank, count in votes.items() if count == top))
        witness = next(report for report in failures.values() if report.senders)
        return Verdict(culprits, f"{witness.failed}: {witness.error}")
    # Nothing was merely wrong: somebody raised, and the others then failed waiting.
    culprit = min(failures, key=lambda rank: failures[rank].order)
    return Verdict((culprit,), f"{failures[culprit].failed}: {failures[culprit].error}")


def odd_ones_out(values: Sequence[str]) -> tuple[int, ...]:
    """Ranks whose value differs from the most common one.

    Examples
    --------
    >>> odd_ones_out(["2.13", "2.13", "2.12"])
    (2,)
    """
    common, _ = Counter(values).most_common(1)[0]
    return tuple(rank for rank, value in enumerate(values) if value != common)
