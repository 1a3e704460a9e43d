"""What can be asked of the job, and whether it makes sense.

Everything is checked from the command line and the environment, before any process talks to another.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from brain_mri._data import RESOLUTIONS, grid_shape
from shardtensor_spec import ShardTensorError, sizes_from_fractions

#: Channels at full resolution and at each of the four pooled levels, and of the last block.
DEFAULT_FEATURES = (8, 8, 16, 32, 64, 8)
SHARD_DIMS = {2: "left-right", 3: "back-front", 4: "foot-head"}


@dataclass(frozen=True)
class Launch:
    """How this process was started.

    Attributes
    ----------
    rank, world_size, local_rank, local_world_size : int
        As ``torchrun`` says; 0, 1, 0, 1 without it.
    is_distributed : bool
        Whether ``torchrun`` started it. If not, the job is the ordinary single-process one, without any ShardTensor.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    is_distributed: bool

    @classmethod
    def from_environment(cls) -> Launch:
        """Read what ``torchrun`` left in the environment."""
        environment = os.environ
        return cls(
            rank=int(environment.get("RANK", 0)),
            world_size=int(environment.get("WORLD_SIZE", 1)),
            local_rank=int(environment.get("LOCAL_RANK", 0)),
            local_world_size=int(environment.get("LOCAL_WORLD_SIZE", 1)),
            is_distributed="RANK" in environment,
        )


@dataclass(frozen=True)
class Options:
    """The validated job.

    Attributes
    ----------
    n_samples : int
        Samples per step (``--ddp``).
    n_shards : int
        Ranks that share one sample (``--domain``).
    shard_dim : int
        Tensor dimension that is split.
    rows : tuple of int, (n_shards,)
        Rows of each rank along it; 0 is an empty share.
    shape : tuple of int, (3,)
        Voxels of the whole sample.
    resolution : int
        Edge of a voxel in mm.
    steps, seed : int
        Length of the training; seed of weights and augmentations.
    dtype, device : str
        ``"float32"`` or ``"float64"``; ``"auto"``, ``"cpu"`` or ``"cuda"``.
    lr : float
        Learning rate of AdamW.
    features : tuple of int, (6,)
        See `DEFAULT_FEATURES`.
    output : Path
        Folder for the results.
    """

    n_samples: int
    n_shards: int
    shard_dim: int
    rows: tuple[int, ...]
    shape: tuple[int, int, int]
    resolution: int
    steps: int
    seed: int
    dtype: str
    device: str
    lr: float
    features: tuple[int, ...]
    output: Path


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the demo and the training script both understand."""
    parser.add_argument("--ddp", type=int, default=1, metavar="D", help="samples per step (default 1)")
    parser.add_argument("--domain", type=int, metavar="N", help="ranks that share one sample (default: all the rest)")
    parser.add_argument("--split", type=_numbers, metavar="A,B,...", help="share of each rank (default: equal)")
    parser.add_argument(
        "--shard-dim", type=int, choices=SHARD_DIMS, default=3, help="dim that is split (default 3, the longest)"
    )
    parser.add_argument("--resolution", type=int, choices=RESOLUTIONS, default=2, help="voxel edge in mm (default 2)")
    parser.add_argument("--steps", type=int, default=20, help="training steps (default 20)")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--lr", type=float, default=0.03, help="learning rate of AdamW (default 0.03)")
    parser.add_argument(
        "--features",
        type=_whole_numbers,
        default=DEFAULT_FEATURES,
        metavar="F,F,F,F,F,F",
        help=f"channels of the U-Net (default {','.join(map(str, DEFAULT_FEATURES))})",
    )
    parser.add_argument("--seed", type=int, default=0)


def check_options(arguments: argparse.Namespace, launch: Launch) -> Options:
    """Turn parsed arguments into a job.

    Raises
    ------
    ValueError
        If they do not fit each other or the number of processes. Every rank raises alike, since each sees the same
        command line.
    """
    if arguments.ddp < 1:
        raise ValueError(f"--ddp {arguments.ddp}: there must be at least one sample per step")
    if arguments.steps < 1 or not arguments.lr > 0:
        raise ValueError(f"--steps {arguments.steps} --lr {arguments.lr}: both must be positive")
    if len(arguments.features) != len(DEFAULT_FEATURES) or min(arguments.features) < 1:
        raise ValueError(f"--features {arguments.features}: the U-Net needs {len(DEFAULT_FEATURES)} positive numbers")
    n_shards = _n_shards(arguments, launch)
    shape = grid_shape(arguments.resolution)
    extent = shape[arguments.shard_dim - 2]
    return Options(
        n_samples=arguments.ddp,
        n_shards=n_shards,
        shard_dim=arguments.shard_dim,
        rows=_rows(arguments.split, n_shards, extent),
        shape=shape,
        resolution=arguments.resolution,
        steps=arguments.steps,
        seed=arguments.seed,
        dtype=arguments.dtype,
        device=arguments.device,
        lr=arguments.lr,
        features=arguments.features,
        output=arguments.output,
    )


def _n_shards(arguments: argparse.Namespace, launch: Launch) -> int:
    n_shards: int | None = arguments.domain
    if n_shards is not None and n_shards < 1:
        raise ValueError(f"--domain {n_shards}: a sample needs at least one rank")
    if not launch.is_distributed:
        if n_shards is not None and n_shards > 1:
            raise ValueError(
                f"--domain {n_shards} needs {arguments.ddp * n_shards} processes: "
                f"start with torchrun --nproc-per-node {arguments.ddp * n_shards}"
            )
        return 1
    if n_shards is None:
        n_shards = max(1, launch.world_size // arguments.ddp)
    if arguments.ddp * n_shards != launch.world_size:
        raise ValueError(
            f"--ddp {arguments.ddp} times --domain {n_shards} is {arguments.ddp * n_shards} ranks, "
            f"but torchrun started {launch.world_size}: make them equal"
        )
    return n_shards


def _rows(split: tuple[float, ...] | None, n_shards: int, extent: int) -> tuple[int, ...]:
    if split is None:
        split = (1 / n_shards,) * n_shards
    listed = ",".join(f"{share:g}" for share in split)
    if len(split) != n_shards:
        raise ValueError(
            f"--split {listed} names {len(split)} shares (sum {sum(split):g}), "
            f"but {n_shards} ranks share a sample: give one share per rank, 0 for none"
        )
    try:
        return sizes_from_fractions(extent, split)
    except ShardTensorError as error:
        raise ValueError(f"--split {listed}: {error}") from error


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 0.4,0.6") from None


def _whole_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 8,8,16") from None


def describe(options: Options) -> str:
    """One line that tells what will run.

    Parameters
    ----------
    options : Options
        The job.
    """
    voxels = "×".join(map(str, options.shape))
    rows = ",".join(map(str, options.rows))
    return (
        f"{options.n_samples} sample(s) of {voxels} voxels ({options.resolution} mm) per step, {options.dtype}, "
        f"dim {options.shard_dim} ({SHARD_DIMS[options.shard_dim]}) in rows {rows}"
    )
