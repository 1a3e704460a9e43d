"""Whether the split run is the same training as the single-process one, and what it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from brain_mri._record import RankRecord, Run

#: Largest relative difference of a step's loss.
LOSS_TOLERANCE = {"float32": 1e-3, "float64": 1e-9}

#: Largest absolute difference of a weight after the last step; float32 weights drift apart by rounding alone.
WEIGHT_TOLERANCE = {"float64": 1e-7}

#: Numbers per channel that a norm may ask of every rank.
N_STATISTICS = 3

#: Largest peak of a rank, in shares of the single process's peak that its rows would account for.
MEMORY_BOUND = 1.08


@dataclass(frozen=True)
class Check:
    """One thing that must hold.

    Attributes
    ----------
    name : str
        What.
    has_passed : bool
        Whether it holds.
    detail : str
        What was measured, and the bound.
    """

    name: str
    has_passed: bool
    detail: str


def compare(reference: Run, run: Run) -> list[Check]:
    """Check a split run against the single-process one.

    Parameters
    ----------
    reference, run : Run
        Of one process, and of many.

    Raises
    ------
    ValueError
        If they are not runs of the same job.
    """
    if reference.record.is_distributed or not run.record.is_distributed:
        raise ValueError("the first run must be of a single process (no torchrun), the second one started by torchrun")
    different = [key for key, value in reference.record.job.items() if run.record.job[key] != value]
    if different:
        pairs = ", ".join(f"{key} {reference.record.job[key]} and {run.record.job[key]}" for key in different)
        raise ValueError(f"the runs are of different jobs: {pairs}")
    checks = [_losses_agree(reference, run), _ranks_agree(run)]
    dtype = str(run.record.job["dtype"])
    if dtype in WEIGHT_TOLERANCE:
        checks.append(_weights_agree(reference, run, WEIGHT_TOLERANCE[dtype]))
    checks += [_no_gather(run), _memory_bound(reference, run)]
    return checks


def loss_differences(reference: Run, run: Run) -> list[float]:
    """Relative difference of the loss at every step."""
    pairs = zip(reference.record.losses, run.record.losses, strict=True)
    return [abs(split - whole) / abs(whole) for whole, split in pairs]


def memory_shares(reference: Run, run: Run) -> list[float]:
    """Each rank's peak over what its share of the rows would account for; NaN for a rank without rows."""
    whole = reference.ranks[0].peak_bytes / _n_samples(reference)
    extent = sum(run.record.rows)
    return [rank.peak_bytes / (whole * n_rows(rank) / extent) if n_rows(rank) else math.nan for rank in run.ranks]


def weight_difference(reference: Run, run: Run) -> float:
    """Largest absolute difference of any weight on any rank from the single process's."""
    return max(_largest_difference(reference.weights[0], weights) for weights in run.weights)


def n_rows(rank: RankRecord) -> int:
    """Rows that a rank holds."""
    return rank.stop - rank.start


def _losses_agree(reference: Run, run: Run) -> Check:
    bound = LOSS_TOLERANCE[str(run.record.job["dtype"])]
    differences = loss_differences(reference, run)
    worst = max(differences, key=lambda difference: math.inf if math.isnan(difference) else difference)
    return Check(
        "the loss is that of one process",
        all(difference <= bound for difference in differences),
        f"largest relative difference {worst:.1e} in {len(differences)} steps (bound {bound:.0e})",
    )


def _ranks_agree(run: Run) -> Check:
    worst = max(_largest_difference(run.weights[0], weights) for weights in run.weights)
    return Check("every rank has the same weights", worst == 0, f"largest difference {worst:.1e} (bound 0)")


def _weights_agree(reference: Run, run: Run, bound: float) -> Check:
    worst = weight_difference(reference, run)
    return Check(
        "the weights are those of one process", worst <= bound, f"largest difference {worst:.1e} (bound {bound:.0e})"
    )


def _no_gather(run: Run) -> Check:
    features = run.record.job["features"]
    assert isinstance(features, list)
    # Norms may gather the statistics of every channel (count, mean, spread) from every rank, and nothing else.
    statistics = N_STATISTICS * 8 * max(features) * (len(run.record.rows) - 1)
    gathers = [row for rank in run.ranks for row in rank.communication if "gather" in row.collective]
    large = {f"{row.operator} ({row.largest_bytes:,} bytes)" for row in gathers if row.largest_bytes > statistics}
    largest = max((row.largest_bytes for row in gathers), default=0)
    small = f"the largest gather brought {largest:,} bytes; statistics of all channels are up to {statistics:,}"
    return Check("no activation is gathered", not large, ", ".join(sorted(large)) or small)


def _memory_bound(reference: Run, run: Run) -> Check:
    shares = [share for share in memory_shares(reference, run) if not math.isnan(share)]
    return Check(
        "a rank needs no more memory than its share",
        max(shares) <= MEMORY_BOUND,
        f"peak of {', '.join(f'{share:.3f}' for share in shares)} × the share of rows (bound {MEMORY_BOUND})",
    )


def _largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    if one.keys() != other.keys():
        raise ValueError(f"the runs have different weights: {sorted(one.keys() ^ other.keys())}")
    return max(float((value.double() - other[name].double()).abs().max()) for name, value in one.items())


def _n_samples(run: Run) -> int:
    n_samples = run.record.job["n_samples"]
    assert isinstance(n_samples, int)
    return n_samples
