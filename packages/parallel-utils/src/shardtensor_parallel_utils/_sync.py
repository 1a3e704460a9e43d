"""Equal weights and buffers on all ranks of a mesh axis, from one of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardtensor import ShardTensor
from shardtensor_collectives import all_gather_objects, broadcast
from shardtensor_spec import LayoutMismatchError, ShardTensorError

BUCKET_BYTES = 64 * 2**20
"""Payload of one broadcast: large enough that its latency does not count, small beside a model."""


class ModuleStateError(ShardTensorError, RuntimeError):
    """A module's state cannot be made equal over a mesh."""


def sync_module_over_mesh(module: nn.Module, mesh: DeviceMesh, src_mesh_rank: int = 0, verify: bool = False) -> None:
    """Copy a module's plain parameters and buffers from one rank of a mesh axis to the others, in place.

    DDP makes weights equal over its own process group only, and FSDP2 over none, so call this for the domain axis
    whenever it has more than one rank, before FSDP2 wraps the module. DTensors and ShardTensors are skipped: their
    shards are meant to differ. Gradients and later changes of buffers are not synchronised here.

    Parameters
    ----------
    module : nn.Module
        Of the same structure on all ranks. Tied weights are sent once.
    mesh : DeviceMesh
        One axis, for example ``mesh["domain"]``.
    src_mesh_rank : int
        Position in the mesh, not the global rank, of the source.
    verify : bool
        Whether to compare checksums of all tensors afterwards.

    Raises
    ------
    LayoutMismatchError
        (a ``ValueError``) If the mesh has several axes, or the source is not in it.
    ModuleStateError
        (a ``RuntimeError``) On all ranks alike, naming the rank: if the module is an FSDP2 module already, has meta
        tensors or tensors on another device type than the mesh, has distributed state only, if the tensors' names,
        shapes or dtypes differ between ranks, or if ``verify`` finds different values.

    Notes
    -----
    Communication: one gather of a short text; the tensors, packed into broadcasts of at most 64 MB per dtype; with
    ``verify`` one more gather of a checksum per tensor.

    Examples
    --------
    >>> from shardtensor_parallel_utils import init_domain_mesh
    >>> mesh = init_domain_mesh(device_type="cpu")
    >>> sync_module_over_mesh(nn.Linear(2, 2), mesh["domain"], verify=True)
    """
    if mesh.ndim != 1:
        raise LayoutMismatchError(
            f"the mesh has {mesh.ndim} axes {mesh.mesh_dim_names}, but a module is synchronised over one",
            where="sync_module_over_mesh",
            advice="pass one axis, e.g. mesh['domain']",
        )
    if not 0 <= src_mesh_rank < mesh.size():
        raise LayoutMismatchError(
            f"src_mesh_rank {src_mesh_rank} is no position in a mesh of {mesh.size()} ranks",
            where="sync_module_over_mesh",
            advice="give the position along the axis, not the global rank",
        )
    group = mesh.get_group()
    state, n_distributed = _plain_state(module)
    # One rank's trouble must not leave the others waiting in a broadcast, so all tell before any tensor moves.
    reports = all_gather_objects((_trouble(module, mesh, state, n_distributed), _signature(state)), group)
    ranks = [int(rank) for rank in mesh.mesh.flatten()]
    for rank, (trouble, _) in zip(ranks, reports, strict=True):
        if trouble is not None:
            raise ModuleStateError(f"rank {rank}: {trouble}", where="sync_module_over_mesh")
    for rank, (_, signature) in zip(ranks, reports, strict=True):
        if signature != reports[0][1]:
            difference = _first_difference(reports[0][1], signature)
            raise ModuleStateError(
                f"metadata differs between rank {ranks[0]} and rank {rank}: {difference}",
                where="sync_module_over_mesh",
                advice="build the same model on every rank",
            )
    axis = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else None
    with torch.no_grad():
        for bucket in _buckets([tensor for _, tensor in state]):
            packed = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
            received = broadcast(packed, group, source=src_mesh_rank, axis=axis)
            for tensor, values in zip(bucket, received.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(values.view(tensor.shape))
    if verify:
        _verify(state, mesh, ranks)


def _plain_state(module: nn.Module) -> tuple[list[tuple[str, Tensor]], int]:
    """Collect plain parameters and then plain buffers, each once, and count the distributed ones."""
    plain, n_distributed = [], 0
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, (DTensor, ShardTensor)):
            n_distributed += 1
        else:
            plain.append((name, tensor))
    return plain, n_distributed


def _trouble(module: nn.Module, mesh: DeviceMesh, state: list[tuple[str, Tensor]], n_distributed: int) -> str | None:
    if any(isinstance(part, FSDPModule) for part in module.modules()):
        return "the module is wrapped by fully_shard already; synchronise it before wrapping"
    if n_distributed and not state:
        return "all parameters and buffers are distributed already; synchronise the module before distributing them"
    for name, tensor in state:
        if tensor.is_meta:
            return f"{name} is on the meta device; materialise the module (to_empty and init) first"
        if tensor.device.type != mesh.device_type:
            return (
                f"{name} is on {tensor.device.type!r}, but the mesh is of {mesh.device_type!r}; move the module first"
            )
    return None


def _signature(state: list[tuple[str, Tensor]]) -> list[str]:
    return [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in state]


def _first_difference(first: list[str], other: list[str]) -> str:
    for mine, theirs in zip(first, other, strict=False):
        if mine != theirs:
            return f"{mine!r} and {theirs!r}"
    longer = max(first, other, key=len)
    return f"{len(first)} and {len(other)} tensors, {longer[min(len(first), len(other))]!r} is on one side only"


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors of one dtype up to `BUCKET_BYTES`; one that is larger goes alone."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same_dtype in by_dtype.values():
        bucket: list[Tensor] = []
        n_bytes = 0
        for tensor in same_dtype:
            if bucket and n_bytes + tensor.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, n_bytes = [], 0
            bucket.append(tensor)
            n_bytes += tensor.nbytes
        yield bucket


def _verify(state: list[tuple[str, Tensor]], mesh: DeviceMesh, ranks: list[int]) -> None:
    checksums = all_gather_objects([_checksum(tensor) for _, tensor in state], mesh.get_group())
    for rank, theirs in zip(ranks, checksums, strict=True):
        for (name, _), first, other in zip(state, checksums[0], theirs, strict=True):
            if first != other:
                raise ModuleStateError(
                    f"{name} has other values on rank {rank} than on rank {ranks[0]} after the broadcast",
                    where="sync_module_over_mesh",
                    advice="look for a parameter that is written concurrently, or for a faulty device",
                )


def _checksum(tensor: Tensor) -> str:
    # Of the bytes, so that NaNs compare equal to themselves.
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(raw.numpy().tobytes(), digest_size=8).hexdigest()
