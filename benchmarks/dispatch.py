"""What an operator costs on the CPU: ShardTensor (uneven shards) against DTensor (even shards).

Run ``hatch run bench-dispatch``, or ``torchrun --nproc-per-node 2 benchmarks/dispatch.py``. Each rank measures the
CPU time of its own thread, which waiting for other ranks or for other programs does not touch; rank 0 prints the
medians. The two libraries take turns, so that a slow phase of the machine hits both. Plain weights are promoted by
ShardTensor itself; DTensor cannot, so its side makes them DTensors by ``DTensor.from_local`` in every call, which
completes their gradients likewise. Backward passes enter the autograd engine directly: ``torch.autograd.grad`` adds
its own checks once per backward pass, not per operator.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardtensor import scatter_tensor

N_ROWS = N_COLUMNS = 64


class Case(NamedTuple):
    """One operator of the table.

    Attributes
    ----------
    name : str
        As printed.
    call : callable
        Called with the input and the weights.
    n_weights : int
        Weights that it takes: none, or a matrix or vector and a bias.
    weight_shape : tuple of int
        Shape of the first weight.
    """

    name: str
    call: Callable[..., torch.Tensor]
    n_weights: int = 0
    weight_shape: tuple[int, ...] = (N_COLUMNS,)


CASES = [
    Case("x + x", lambda x: x + x),
    Case("relu", torch.relu),
    Case("x * 2", lambda x: x * 2),
    Case("sum", torch.sum),
    Case("linear", F.linear, 2, (N_COLUMNS, N_COLUMNS)),
    Case("layer_norm", lambda x, weight, bias: F.layer_norm(x, (N_COLUMNS,), weight, bias), 2),
]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="times that each variant is measured")
    parser.add_argument("--calls", type=int, default=200, help="calls per measurement")
    parser.add_argument("--nproc-per-node", type=int, default=2, help="ranks to start when not run by torchrun")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.nproc_per_node)]
        sys.exit(subprocess.call([*launcher, __file__, *sys.argv[1:]]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))
    rows = [row for case in CASES for row in _measure_case(case, mesh, options.rounds, options.calls)]
    if dist.get_rank() == 0:
        _print_table(rows, mesh.size())
    dist.destroy_process_group()


class Row(NamedTuple):
    """One line of the table: medians in microseconds."""

    name: str
    mode: str
    weights: str
    plain: float
    dtensor: float
    shard_tensor: float


def _measure_case(case: Case, mesh: DeviceMesh, n_rounds: int, n_calls: int) -> list[Row]:
    rows = []
    for needs_gradient, with_backward, mode in [
        (False, False, "no gradient"),
        (True, False, "forward"),
        (True, True, "forward + backward"),
    ]:
        runs = {
            kind: _run(_promoting(case, mesh) if kind == "DTensor, plain weights" else case, operands, with_backward)
            for kind, operands in _operands(case, mesh, needs_gradient).items()
        }
        with torch.set_grad_enabled(needs_gradient):
            times = _interleaved(runs, n_rounds, n_calls // 2 if with_backward else n_calls)
        for ours, theirs, weights in [
            ("ShardTensor", "DTensor", "sharded"),
            ("ShardTensor, plain weights", "DTensor, plain weights", "plain"),
        ]:
            if ours in times:
                label = weights if case.n_weights else ""
                rows.append(Row(case.name, mode, label, times["plain"], times[theirs], times[ours]))
    return rows


def _promoting(case: Case, mesh: DeviceMesh) -> Case:
    """Return the case as a user of DTensor writes it for plain weights."""

    def call(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        promoted = [DTensor.from_local(weight, mesh, [Replicate()], run_check=False) for weight in weights]
        return case.call(x, *promoted)

    return case._replace(call=call)


def _operands(case: Case, mesh: DeviceMesh, needs_gradient: bool) -> dict[str, list[torch.Tensor]]:
    """Input and weights of plain torch (on a shard's rows), DTensor, ShardTensor, ShardTensor with plain weights."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N_ROWS, N_COLUMNS, generator=generator)
    weights = [torch.randn(case.weight_shape, generator=generator), torch.randn(N_COLUMNS, generator=generator)]
    weights = weights[: case.n_weights]
    replicated = [Replicate()]
    sizes = _uneven(N_ROWS, mesh.size())
    uneven = (
        scatter_tensor(x, 0, mesh, [Shard(0)]).redistribute(placements=[Shard(0)], sharding_shapes={0: sizes}).detach()
    )
    operands: dict[str, list[torch.Tensor]] = {
        "plain": [x[: sizes[mesh.get_local_rank()]].clone(), *(weight.clone() for weight in weights)],
        "DTensor": [
            distribute_tensor(x, mesh, [Shard(0)]),
            *(distribute_tensor(weight, mesh, replicated) for weight in weights),
        ],
        "ShardTensor": [uneven.clone(), *(scatter_tensor(weight, 0, mesh, replicated) for weight in weights)],
    }
    if case.n_weights:
        for kind, sharded in [("DTensor", operands["DTensor"][0]), ("ShardTensor", uneven)]:
            parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
            operands[f"{kind}, plain weights"] = [sharded.clone(), *parameters]
    for tensors in operands.values():
        for position, tensor in enumerate(tensors):
            tensors[position] = tensor.detach().requires_grad_(needs_gradient)
    return operands


def _uneven(n_rows: int, n_shards: int) -> list[int]:
    """One small shard, the others alike."""
    first = n_rows // (2 * n_shards) if n_shards > 1 else n_rows
    rest = [len(part) for part in torch.arange(n_rows - first).tensor_split(max(n_shards - 1, 1))]
    return [first, *rest][:n_shards]


def _run(case: Case, operands: Sequence[torch.Tensor], with_backward: bool) -> Callable[[], Any]:
    if not with_backward:
        return lambda: case.call(*operands)
    gradient = torch.ones_like(case.call(*operands)).detach()
    run_backward = torch.autograd.Variable._execution_engine.run_backward
    inputs = tuple(operands)

    def run() -> Any:
        return run_backward((case.call(*operands),), (gradient,), False, False, inputs, False, accumulate_grad=False)

    return run


def _interleaved(runs: dict[str, Callable[[], Any]], n_rounds: int, n_calls: int) -> dict[str, float]:
    """Return medians over rounds, in microseconds per call; in every round each variant has its turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        _microseconds(run, 20)
    for _ in range(n_rounds):
        for name, run in runs.items():
            times[name].append(_microseconds(run, n_calls))
    return {name: statistics.median(measured) for name, measured in times.items()}


def _microseconds(run: Callable[[], Any], n_calls: int) -> float:
    start = time.thread_time()
    for _ in range(n_calls):
        run()
    return (time.thread_time() - start) / n_calls * 1e6


def _print_table(rows: Sequence[Row], n_ranks: int) -> None:
    print(f"CPU time per call in µs, {N_ROWS}x{N_COLUMNS} float32, {n_ranks} ranks, torch {torch.__version__}")
    print(f"{'operator':<12}{'mode':<20}{'weights':<10}{'plain':>8}{'DTensor':>9}{'ShardTensor':>13}{'ratio':>8}")
    for row in rows:
        print(
            f"{row.name:<12}{row.mode:<20}{row.weights:<10}{row.plain:>8.1f}{row.dtensor:>9.1f}"
            f"{row.shard_tensor:>13.1f}{row.shard_tensor / row.dtensor:>8.2f}"
        )
    print("ratio: ShardTensor / DTensor. Gradients of plain weights are complete: backward includes their all-reduce.")


if __name__ == "__main__":
    main()
