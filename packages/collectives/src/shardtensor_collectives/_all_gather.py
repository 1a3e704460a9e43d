"""``all_gather_v``: every rank gets all shards, of whatever sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch.distributed as dist
from torch import Tensor

from shardtensor_collectives import _traced
from shardtensor_collectives._checks import check_extent, checked_dim, checked_sizes, members
from shardtensor_collectives._pending import Pending, finished, launch
from shardtensor_collectives._torch_private import all_gather_single, is_traced
from shardtensor_collectives._wire import (
    as_wire,
    flattened,
    is_gloo_like,
    piece_shape,
    post_pieces,
    row_numel,
    splits,
    unpack,
)


@overload
def all_gather_v(
    local: Tensor,
    sizes: Sequence[int],
    dim: int,
    group: dist.ProcessGroup,
    *,
    axis: str | None = ...,
    async_op: Literal[False] = ...,
) -> Tensor: ...


@overload
def all_gather_v(
    local: Tensor,
    sizes: Sequence[int],
    dim: int,
    group: dist.ProcessGroup,
    *,
    axis: str | None = ...,
    async_op: Literal[True],
) -> Pending: ...


def all_gather_v(
    local: Tensor,
    sizes: Sequence[int],
    dim: int,
    group: dist.ProcessGroup,
    *,
    axis: str | None = None,
    async_op: bool = False,
) -> Tensor | Pending:
    """Join the shards of all ranks along one dimension, on every rank.

    Parameters
    ----------
    local : Tensor, (..., sizes[rank], ...)
        This rank's shard. The other dimensions and the dtype are equal on all ranks.
    sizes : sequence of int, (n_ranks,)
        Rows of every rank along `dim`, zeros allowed.
    dim : int
        The dimension to join.
    group : ProcessGroup
        The ranks; position in the group is the order of the shards.
    axis : str, optional
        Name of the mesh axis, for traces.
    async_op : bool
        Return a :class:`Pending` at once instead of the result.

    Returns
    -------
    Tensor, (..., sum(sizes), ...) or Pending
        Contiguous, and never an alias of `local`.

    Raises
    ------
    LayoutMismatchError
        If the sizes do not fit the group or this rank's shard. Raised before any communication.

    Notes
    -----
    Communication: this rank sends its shard to each other rank and receives theirs: nothing is padded.
    None in a group of one. Rows of dimension 0 are received in their place in the result. The
    adjoint is :func:`reduce_scatter_v`.

    Examples
    --------
    >>> import torch
    >>> group = mesh.get_group()  # a mesh of one rank
    >>> all_gather_v(torch.ones(2), [2], 0, group)
    tensor([1., 1.])
    """
    n_ranks, rank = members(group)
    dim = checked_dim(dim, local.ndim, "all_gather_v")
    sizes = checked_sizes(sizes, n_ranks, "all_gather_v")
    check_extent(local, dim, sizes[rank], f"sizes says that rank {rank} has", "all_gather_v")
    if n_ranks == 1:
        return finished(local.clone(), async_op)
    if is_traced(local):
        return finished(_traced.all_gather_v(local, sizes, dim, group), async_op)

    def traffic() -> tuple[int, int]:
        row = row_numel(local.shape, dim)
        return (n_ranks - 1) * local.numel(), (sum(sizes) - sizes[rank]) * row

    def adjoint(grad: Tensor) -> Tensor:
        from shardtensor_collectives._reduce_scatter import reduce_scatter_v

        return reduce_scatter_v(grad, sizes, dim, group, axis=axis)

    return launch(
        "all_gather_v", axis, local, lambda data: _post(data, sizes, dim, group, rank), traffic, adjoint, async_op
    )


def _post(local: Tensor, sizes: tuple[int, ...], dim: int, group: dist.ProcessGroup, rank: int) -> Pending:
    row = row_numel(local.shape, dim)
    buffer = local.new_empty(sum(sizes) * row)
    targets = splits(buffer, [size * row for size in sizes])
    mine = flattened(local)
    shapes = [piece_shape(local.shape, dim, size) for size in sizes]
    if is_gloo_like(local):
        works, _ = post_pieces([mine] * len(sizes), targets, group, rank)
        targets[rank].copy_(mine)  # while the others travel
    elif len(set(sizes)) == 1:
        works = [all_gather_single(as_wire(buffer), as_wire(mine), group=group, async_op=True)]
    else:  # NCCL makes one grouped broadcast per rank of it
        works = [dist.all_gather([as_wire(target) for target in targets], as_wire(mine), group=group, async_op=True)]
    return Pending(works, lambda: unpack(buffer, shapes, dim), keep=mine)
