"""Random operators: replicas draw the same numbers, shards different ones, and a seed reproduces both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from shardtensor_collectives import broadcast
from shardtensor_spec import ShardTensorSpec

from ._groups import axis_name, whole_group


@contextlib.contextmanager
def seeded_by_shard(spec: ShardTensorSpec | None, mesh_of: ShardTensorSpec, device: torch.device) -> Iterator[None]:
    """Run a random operator with a seed that all ranks derive from one draw of the mesh's first rank.

    Parameters
    ----------
    spec : ShardTensorSpec or None
        Layout of the result; None for a replicated one.
    mesh_of : ShardTensorSpec
        Any layout on the mesh.
    device : torch.device
        Where the local tensors are.

    Notes
    -----
    Communication: one broadcast of 8 bytes over the mesh. The ranks' own seeds may differ, so they cannot be used.
    """
    mesh = mesh_of.mesh
    seed = torch.randint(0, 2**62, (1,), dtype=torch.int64)
    if mesh.size() > 1:
        seed = broadcast(seed.to(device), whole_group(mesh), axis=axis_name(mesh)).cpu()
    shard = 0
    if spec is not None:
        assert spec.coordinate is not None
        for split in spec.grid.values():
            shard = shard * len(split.sizes) + split.shard_index(spec.coordinate, mesh.shape)
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(int(seed.item()) + shard)
        yield
