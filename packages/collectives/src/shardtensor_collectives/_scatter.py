"""``scatter_v`` and ``gather_v``: shards from one rank to all, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch.distributed as dist
from torch import Tensor

from shardtensor_collectives import _traced
from shardtensor_collectives._checks import check_extent, checked_dim, checked_peer, checked_sizes, members
from shardtensor_collectives._pending import Pending, finished, launch
from shardtensor_collectives._torch_private import is_traced
from shardtensor_collectives._wire import (
    flattened,
    join_group,
    pack,
    piece_shape,
    post_messages,
    row_numel,
    splits,
    unpack,
)


@overload
def scatter_v(
    full: Tensor,
    sizes: Sequence[int],
    dim: int,
    group: dist.ProcessGroup,
    *,
    source: int = ...,
    axis: str | None = ...,
    async_op: Literal[False] = ...,
) -> Tensor: ...


@overload
def scatter_v(
    full: Tensor,
    sizes: Sequence[int],
    dim: int,
    group: dist.ProcessGroup,
    *,
    source: int = ...,
    axis: str | None = ...,
    async_op: Literal[True],
) -> Pending: ...


def scatter_v(
    full: Tensor,
    sizes: Sequence[int],
    dim: int,
    group: dist.ProcessGroup,
    *,
    source: int = 0,
    axis: str | None = None,
    async_op: bool = False,
) -> Tensor | Pending:
    """Cut one rank's tensor along a dimension and give every rank its shard.

    Parameters
    ----------
    full : Tensor, (..., sum(sizes), ...)
        On the source the values, elsewhere a tensor of the same shape and dtype whose values do not matter;
        ``torch.empty((), dtype=...).expand(shape)`` takes no memory.
    sizes : sequence of int, (n_ranks,)
        Rows for every rank, zeros allowed.
    dim : int
        The dimension to cut.
    group : ProcessGroup
        The ranks.
    source : int
        Position in the group (not the global rank).
    axis : str, optional
        Name of the mesh axis, for traces.
    async_op : bool
        Return a :class:`Pending` at once instead of the result.

    Returns
    -------
    Tensor, (..., sizes[rank], ...) or Pending
        Contiguous, never an alias.

    Raises
    ------
    LayoutMismatchError
        If the sizes do not fit the group or the tensor, or there is no such position. Raised before any
        communication.

    Notes
    -----
    Communication: the source sends every other rank its shard. The adjoint is :func:`gather_v`: the gradient is
    complete at the source and zero elsewhere; the input must need a gradient on all ranks or on none.

    Examples
    --------
    >>> import torch
    >>> group = mesh.get_group()  # a mesh of one rank
    >>> scatter_v(torch.ones(2), [2], 0, group)
    tensor([1., 1.])
    """
    n_ranks, rank = members(group)
    dim = checked_dim(dim, full.ndim, "scatter_v")
    sizes = checked_sizes(sizes, n_ranks, "scatter_v")
    checked_peer(source, n_ranks, "scatter_v", "source")
    check_extent(full, dim, sum(sizes), "the sizes sum to", "scatter_v")
    if n_ranks == 1:
        return finished(full.clone(), async_op)
    if is_traced(full):
        return finished(_traced.scatter_v(full, sizes, dim, group, source), async_op)
    row = row_numel(full.shape, dim)
    shape = piece_shape(full.shape, dim, sizes[rank])

    def post(data: Tensor) -> Pending:
        join_group(data, group)
        output = data.new_empty(sizes[rank] * row)
        if rank != source:
            return Pending(post_messages([], [(source, output)], group), lambda: output.view(shape))
        pieces = splits(pack(data, sizes, dim), [size * row for size in sizes])
        works = post_messages([(peer, piece) for peer, piece in enumerate(pieces) if peer != rank], [], group)
        output.copy_(pieces[rank])
        return Pending(works, lambda: output.view(shape), keep=pieces)

    def traffic() -> tuple[int, int]:
        return ((sum(sizes) - sizes[rank]) * row, 0) if rank == source else (0, sizes[rank] * row)

    def adjoint(grad: Tensor) -> Tensor:
        return gather_v(grad, sizes, dim, group, destination=source, axis=axis)

    return launch("scatter_v", axis, full, post, traffic, adjoint, async_op)


@overload
def gather_v(
    local: Tensor,
    sizes: Sequence[int],
    dim: int,
    group: dist.ProcessGroup,
    *,
    destination: int = ...,
    axis: str | None = ...,
    async_op: Literal[False] = ...,
) -> Tensor: ...


@overload
def gather_v(
    local: Tensor,
    sizes: Sequence[int],
    dim: int,
    group: dist.ProcessGroup,
    *,
    destination: int = ...,
    axis: str | None = ...,
    async_op: Literal[True],
) -> Pending: ...


def gather_v(
    local: Tensor,
    sizes: Sequence[int],
    dim: int,
    group: dist.ProcessGroup,
    *,
    destination: int = 0,
    axis: str | None = None,
    async_op: bool = False,
) -> Tensor | Pending:
    """Join the shards of all ranks along one dimension, on one rank.

    Parameters
    ----------
    local : Tensor, (..., sizes[rank], ...)
        This rank's shard.
    sizes : sequence of int, (n_ranks,)
        Rows of every rank, zeros allowed.
    dim : int
        The dimension to join.
    group : ProcessGroup
        The ranks.
    destination : int
        Position in the group (not the global rank).
    axis : str, optional
        Name of the mesh axis, for traces.
    async_op : bool
        Return a :class:`Pending` at once instead of the result.

    Returns
    -------
    Tensor, (..., sum(sizes), ...) or Pending
        The whole tensor on the destination. Elsewhere zeros of the same shape, one element expanded: they
        take no memory and carry the gradient history that lets every rank run its part of the backward.

    Raises
    ------
    LayoutMismatchError
        If the sizes do not fit the group or this rank's shard, or there is no such position. Raised before any
        communication.

    Notes
    -----
    Communication: every other rank sends its shard to the destination. The adjoint is :func:`scatter_v`.

    Examples
    --------
    >>> import torch
    >>> group = mesh.get_group()  # a mesh of one rank
    >>> gather_v(torch.ones(2), [2], 0, group)
    tensor([1., 1.])
    """
    n_ranks, rank = members(group)
    dim = checked_dim(dim, local.ndim, "gather_v")
    sizes = checked_sizes(sizes, n_ranks, "gather_v")
    checked_peer(destination, n_ranks, "gather_v", "destination")
    check_extent(local, dim, sizes[rank], f"sizes says that rank {rank} has", "gather_v")
    if n_ranks == 1:
        return finished(local.clone(), async_op)
    if is_traced(local):
        return finished(_traced.gather_v(local, sizes, dim, group, destination), async_op)
    row = row_numel(local.shape, dim)

    def post(data: Tensor) -> Pending:
        join_group(data, group)
        mine = flattened(data)
        if rank != destination:
            shape = piece_shape(data.shape, dim, sum(sizes))
            return Pending(
                post_messages([(destination, mine)], [], group), lambda: data.new_zeros(()).expand(shape), keep=mine
            )
        buffer = data.new_empty(sum(sizes) * row)
        targets = splits(buffer, [size * row for size in sizes])
        works = post_messages([], [(peer, target) for peer, target in enumerate(targets) if peer != rank], group)
        targets[rank].copy_(mine)
        shapes = [piece_shape(data.shape, dim, size) for size in sizes]
        return Pending(works, lambda: unpack(buffer, shapes, dim))

    def traffic() -> tuple[int, int]:
        return (0, (sum(sizes) - sizes[rank]) * row) if rank == destination else (local.numel(), 0)

    def adjoint(grad: Tensor) -> Tensor:
        return scatter_v(grad, sizes, dim, group, source=destination, axis=axis)

    return launch("gather_v", axis, local, post, traffic, adjoint, async_op)
