"""What a run leaves behind in its folder, for the comparison and the report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Communication:
    """What one operator sent in one kind of collective, summed over all steps.

    Attributes
    ----------
    operator, collective, axis : str
        Who communicated, how, and over which mesh axis.
    n_calls, bytes_sent, bytes_received : int
        On this rank.
    largest_bytes : int
        Most that one of the calls brought to this rank.
    seconds : float
        Time inside the calls, waiting for slower ranks included.
    """

    operator: str
    collective: str
    axis: str
    n_calls: int
    bytes_sent: int
    bytes_received: int
    largest_bytes: int
    seconds: float


@dataclass(frozen=True)
class RankRecord:
    """What one rank measured.

    Attributes
    ----------
    rank, ddp_rank, domain_rank : int
        Its number, its sample, and its place among the ranks that share it.
    start, stop : int
        Its rows along the split dimension.
    peak_bytes : int
        Peak of torch's allocator over one step minus the start.
    communication : tuple of Communication
        The domain's collectives in all steps; empty for a single process.
    """

    rank: int
    ddp_rank: int
    domain_rank: int
    start: int
    stop: int
    peak_bytes: int
    communication: tuple[Communication, ...]


@dataclass(frozen=True)
class RunRecord:
    """What is the same for all ranks.

    Attributes
    ----------
    job : dict
        Everything that two runs must have in common to be comparable.
    is_distributed : bool
        False for the single-process reference.
    shard_dim : int
        The tensor dimension that is split.
    rows : list of int
        Rows of each rank that shares a sample.
    device : str
        Where it ran.
    threads : int
        Threads of each process.
    losses : list of float, (steps,)
        Before each update.
    seconds : list of float, (steps,)
        Time of each step; the one whose memory was measured is slower.
    measured_step : int
        That step.
    """

    job: dict[str, object]
    is_distributed: bool
    shard_dim: int
    rows: list[int]
    device: str
    threads: int
    losses: list[float]
    seconds: list[float]
    measured_step: int


@dataclass(frozen=True)
class Run:
    """Everything that a run left.

    Attributes
    ----------
    record : RunRecord
        What is common.
    ranks : list of RankRecord
        In the order of ranks.
    weights : list of dict
        The weights that each rank ended with.
    planes : list of dict
        Each rank's part of one plane of image, tissue maps and prediction.
    """

    record: RunRecord
    ranks: list[RankRecord]
    weights: list[dict[str, torch.Tensor]]
    planes: list[dict[str, torch.Tensor]]


def save_rank(
    folder: Path,
    rank: RankRecord,
    weights: Mapping[str, torch.Tensor],
    planes: Mapping[str, torch.Tensor],
    run: RunRecord | None,
) -> None:
    """Write one rank's files; the first rank also writes what is common.

    Parameters
    ----------
    folder : Path
        Made if missing.
    rank, weights, planes, run
        See `Run`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"weights": dict(weights), "planes": dict(planes)}, folder / f"rank{rank.rank}.pt")
    (folder / f"rank{rank.rank}.json").write_text(json.dumps(asdict(rank), indent=1))
    if run is not None:
        (folder / "run.json").write_text(json.dumps(asdict(run), indent=1))


def load_run(folder: Path) -> Run:
    """Read what a run left.

    Raises
    ------
    FileNotFoundError
        If there is no finished run in the folder.
    """
    if not (folder / "run.json").is_file():
        raise FileNotFoundError(f"{folder} holds no finished run: train.py --output {folder} makes one")
    record = RunRecord(**json.loads((folder / "run.json").read_text()))
    n_samples = record.job["n_samples"]
    assert isinstance(n_samples, int)
    ranks, weights, planes = [], [], []
    for number in range(n_samples * len(record.rows) if record.is_distributed else 1):
        fields = json.loads((folder / f"rank{number}.json").read_text())
        fields["communication"] = tuple(Communication(**row) for row in fields["communication"])
        ranks.append(RankRecord(**fields))
        tensors = torch.load(folder / f"rank{number}.pt", weights_only=True)
        weights.append(tensors["weights"])
        planes.append(tensors["planes"])
    return Run(record, ranks, weights, planes)
