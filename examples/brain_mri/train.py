"""Train a 3-D U-Net on a brain volume, on one process or with the volume split over several.

python train.py                                                 the ordinary job, on plain tensors
torchrun --nproc-per-node 3 train.py --split 0.3,0.5,0.2        the same, every sample split unevenly over three ranks
torchrun --nproc-per-node 4 train.py --ddp 2 --domain 2         two samples per step, each over two ranks
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from brain_mri._memory import StepMemory
from brain_mri._model import build_model
from brain_mri._options import Launch, Options, add_training_arguments, check_options, describe
from brain_mri._progress import progress
from brain_mri._record import Communication, RankRecord, RunRecord, save_rank
from brain_mri._train import train_step
from brain_mri._workers import SingleProcess, Workers
from shardtensor_collectives import comm_trace

#: AdamW divides every gradient by its size, so small ones, which are mostly rounding (a bias in front of an instance
#: norm has no other), move the weights as fast as large ones, differently in every run. With a small epsilon (1e-8 is
#: the default) two single-process runs that round differently may part by more than 1e-3 within 20 steps; with this
#: one they stay within about 1e-4, and the loss falls as fast.
ADAM_EPSILON = 1e-2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_training_arguments(parser)
    parser.add_argument("--output", type=Path, default=Path("reports/brain_mri/run"), help="folder for the results")
    arguments = parser.parse_args()
    launch = Launch.from_environment()
    try:
        options = check_options(arguments, launch)
        workers = make_workers(options, launch)
    except ValueError as error:
        parser.error(str(error))
    try:
        run(options, launch, workers)
    finally:
        workers.close()


def make_workers(options: Options, launch: Launch) -> Workers:
    if not launch.is_distributed:
        return SingleProcess(options, launch)
    from brain_mri._sharded import ShardedProcesses

    return ShardedProcesses(options, launch)


def run(options: Options, launch: Launch, workers: Workers) -> None:
    """Train, then predict the unchanged volume, and write down what was seen."""
    is_first = launch.rank == 0
    if is_first:
        print(describe(options), flush=True)
    model = build_model(options.features, options.seed).to(workers.device, getattr(torch, options.dtype))
    model = workers.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, eps=ADAM_EPSILON)

    losses, seconds = [], []
    measured_step = min(1, options.steps - 1)  # in the first one the optimizer still allocates its state
    memory = StepMemory(workers.device)
    title = f"{launch.world_size} ranks" if launch.is_distributed else "1 process"
    with comm_trace() as trace, progress(title, options.steps, is_shown=is_first) as report:
        for step in range(options.steps):
            image, tissues = workers.batch(step)
            start = time.perf_counter()
            with ExitStack() as stack:
                if step == measured_step:
                    stack.enter_context(memory)
                loss = train_step(model, optimizer, image, tissues)
            losses.append(workers.mean_loss(loss))
            del loss  # else its release would fall into the next step's measurement
            seconds.append(time.perf_counter() - start)
            report(step, losses[-1], seconds[-1])

    domain_rank, ddp_rank = launch.rank % options.n_shards, launch.rank // options.n_shards
    save_rank(
        options.output,
        RankRecord(
            rank=launch.rank,
            ddp_rank=ddp_rank,
            domain_rank=domain_rank,
            start=workers.bounds[options.shard_dim - 2][0],
            stop=workers.bounds[options.shard_dim - 2][1],
            peak_bytes=memory.peak_bytes,
            communication=communication_of(trace),
        ),
        weights=plain_state(model),
        planes=predict_plane(options, workers, model),
        run=run_record(options, launch, workers, losses, seconds, measured_step) if is_first else None,
    )


def run_record(
    options: Options, launch: Launch, workers: Workers, losses: list[float], seconds: list[float], measured_step: int
) -> RunRecord:
    same = ("n_samples", "shape", "resolution", "steps", "seed", "dtype", "lr", "features")
    job = {name: getattr(options, name) for name in same}
    return RunRecord(
        job={name: list(value) if isinstance(value, tuple) else value for name, value in job.items()},
        is_distributed=launch.is_distributed,
        shard_dim=options.shard_dim,
        rows=list(options.rows),
        device=str(workers.device.type),
        threads=torch.get_num_threads(),
        losses=losses,
        seconds=seconds,
        measured_step=measured_step,
    )


def communication_of(trace: comm_trace) -> tuple[Communication, ...]:
    largest: dict[tuple[str | None, str, str | None], int] = defaultdict(int)
    for event in trace:
        key = event.operator, event.collective, event.axis
        largest[key] = max(largest[key], event.bytes_received)
    return tuple(
        Communication(
            operator=row.operator or "-",
            collective=row.collective,
            axis=row.axis or "-",
            n_calls=row.n_calls,
            bytes_sent=row.bytes_sent,
            bytes_received=row.bytes_received,
            largest_bytes=largest[key],
            seconds=row.seconds,
        )
        for key, row in trace.by_collective().items()
    )


def plain_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights, on the CPU and under their names in the unwrapped model."""
    return {name.removeprefix("module."): value.detach().cpu() for name, value in model.state_dict().items()}


def predict_plane(options: Options, workers: Workers, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The rows of this rank in one plane of the unchanged volume and of what the network makes of it.

    Returns
    -------
    dict of str to Tensor, (n_channels, rows, columns)
        ``image``, ``tissues``, ``prediction``; an axial plane, or a sagittal one if foot-head is the split dimension.
    """
    dim = 4 if options.shard_dim != 4 else 2
    middle = int(0.52 * options.shape[dim - 2])
    image, tissues = workers.plain_batch()
    with torch.no_grad():
        prediction = torch.sigmoid(model(image))
    tensors = {"image": image, "tissues": tissues, "prediction": prediction}
    return {
        name: workers.local(value)[0].select(dim - 1, middle).cpu().float().clone() for name, value in tensors.items()
    }


if __name__ == "__main__":
    main()
