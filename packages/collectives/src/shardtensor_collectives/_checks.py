"""Checks that every rank makes alike, before any communication.

A receive buffer of a wrong size aborts a gloo process and hangs NCCL, so nothing is sent before these have passed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from shardtensor_spec import LayoutMismatchError, UnsupportedShardingError


def members(group: dist.ProcessGroup) -> tuple[int, int]:
    """Number of ranks in the group, and this rank's position in it.

    Raises
    ------
    UnsupportedShardingError
        If this rank is not in the group.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise UnsupportedShardingError(
            f"this rank is not a member of the process group (it holds {group!r} in its place)",
            advice="call it only on the ranks of the mesh",
        )
    return group.size(), group.rank()


def checked_dim(dim: int, n_dims: int, where: str) -> int:
    """Tensor dimension counted from the front.

    Raises
    ------
    LayoutMismatchError
        If there is no such dimension.
    """
    if not -n_dims <= dim < n_dims:
        raise LayoutMismatchError(f"dim {dim} does not exist: the tensor has {n_dims} dims", where=where)
    return dim % n_dims


def checked_sizes(sizes: Sequence[int], n_ranks: int, where: str, name: str = "sizes") -> tuple[int, ...]:
    """One non-negative size per rank.

    Raises
    ------
    LayoutMismatchError
        If the count is wrong or a size is negative.
    """
    sizes = tuple(sizes)
    if len(sizes) != n_ranks:
        raise LayoutMismatchError(
            f"{name} has {len(sizes)} entries ({_listed(sizes)}), but the group has {n_ranks} ranks",
            where=where,
            advice="give one size per rank, 0 for an empty shard",
        )
    if sizes and min(sizes) < 0:
        raise LayoutMismatchError(f"{name} has a negative entry: {_listed(sizes)}", where=where)
    return sizes


def check_extent(tensor: Tensor, dim: int, expected: int, what: str, where: str) -> None:
    """Check the tensor's extent along `dim`.

    Raises
    ------
    LayoutMismatchError
        If it is another one.
    """
    if tensor.shape[dim] != expected:
        raise LayoutMismatchError(
            f"the tensor has {tensor.shape[dim]} rows along dim {dim}, but {what} {expected}",
            where=where,
            inputs=(f"tensor {tuple(tensor.shape)}",),
        )


def checked_peer(position: int, n_ranks: int, where: str, name: str) -> int:
    """Position in the group.

    Raises
    ------
    LayoutMismatchError
        If the group has no such position.
    """
    if not 0 <= position < n_ranks:
        raise LayoutMismatchError(
            f"{name} {position} is not in the group of {n_ranks} ranks",
            where=where,
            advice="give the position in the group, not the global rank",
        )
    return position


def _listed(sizes: Sequence[int]) -> str:
    return ",".join(str(size) for size in sizes)
