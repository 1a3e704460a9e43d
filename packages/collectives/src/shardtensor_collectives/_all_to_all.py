"""``all_to_all_v``: every rank sends a piece of its own to every other one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch.distributed as dist
from torch import Tensor

from shardtensor_collectives import _traced
from shardtensor_collectives._checks import check_extent, checked_dim, checked_sizes, members
from shardtensor_collectives._pending import Pending, finished, launch
from shardtensor_collectives._torch_private import is_traced
from shardtensor_collectives._wire import (
    is_gloo_like,
    pack,
    piece_shape,
    post_all_to_all,
    post_pieces,
    row_numel,
    splits,
    unpack,
)
from shardtensor_spec import LayoutMismatchError


@overload
def all_to_all_v(
    tensor: Tensor,
    send_sizes: Sequence[int],
    receive_sizes: Sequence[int],
    group: dist.ProcessGroup,
    *,
    send_dim: int = ...,
    receive_dim: int = ...,
    axis: str | None = ...,
    async_op: Literal[False] = ...,
) -> Tensor: ...


@overload
def all_to_all_v(
    tensor: Tensor,
    send_sizes: Sequence[int],
    receive_sizes: Sequence[int],
    group: dist.ProcessGroup,
    *,
    send_dim: int = ...,
    receive_dim: int = ...,
    axis: str | None = ...,
    async_op: Literal[True],
) -> Pending: ...


def all_to_all_v(
    tensor: Tensor,
    send_sizes: Sequence[int],
    receive_sizes: Sequence[int],
    group: dist.ProcessGroup,
    *,
    send_dim: int = 0,
    receive_dim: int = 0,
    axis: str | None = None,
    async_op: bool = False,
) -> Tensor | Pending:
    """Cut a tensor along one dimension, send each rank its piece, and join what arrives along another.

    Parameters
    ----------
    tensor : Tensor, (..., sum(send_sizes), ...)
        This rank's part. With two different dims its extent along `receive_dim` is ``receive_sizes[rank]``.
    send_sizes : sequence of int, (n_ranks,)
        Rows along `send_dim` for each rank, zeros allowed.
    receive_sizes : sequence of int, (n_ranks,)
        Rows along `receive_dim` from each rank, zeros allowed.
    group : ProcessGroup
        The ranks.
    send_dim, receive_dim : int
        The dimension to cut and the one to join. ``Shard(a)`` becomes ``Shard(b)`` with ``send_dim=b``,
        ``receive_dim=a``, the sizes along `b` and those along `a`.
    axis : str, optional
        Name of the mesh axis, for traces.
    async_op : bool
        Return a :class:`Pending` at once instead of the result.

    Returns
    -------
    Tensor or Pending
        With one dim ``(..., sum(receive_sizes), ...)``; with two the extents are ``send_sizes[rank]`` along
        `send_dim` and ``sum(receive_sizes)`` along `receive_dim`. Contiguous, never an alias.

    Raises
    ------
    LayoutMismatchError
        If the sizes do not fit the group or the tensor. Raised before any communication.

    Notes
    -----
    Communication: the pieces for the other ranks, each once. None in a group of one. The adjoint is the same
    operation with both pairs of arguments exchanged.

    Examples
    --------
    >>> import torch
    >>> group = mesh.get_group()  # a mesh of one rank
    >>> all_to_all_v(torch.ones(2, 1), [2], [2], group)
    tensor([[1.],
            [1.]])
    """
    n_ranks, rank = members(group)
    send_dim = checked_dim(send_dim, tensor.ndim, "all_to_all_v")
    receive_dim = checked_dim(receive_dim, tensor.ndim, "all_to_all_v")
    send = checked_sizes(send_sizes, n_ranks, "all_to_all_v", "send_sizes")
    receive = checked_sizes(receive_sizes, n_ranks, "all_to_all_v", "receive_sizes")
    check_extent(tensor, send_dim, sum(send), "send_sizes sums to", "all_to_all_v")
    if send_dim == receive_dim and send[rank] != receive[rank]:
        raise LayoutMismatchError(
            f"rank {rank} sends itself {send[rank]} rows but would receive {receive[rank]}", where="all_to_all_v"
        )
    if send_dim != receive_dim:
        check_extent(tensor, receive_dim, receive[rank], f"receive_sizes says that rank {rank} has", "all_to_all_v")
    if n_ranks == 1:
        return finished(tensor.clone(), async_op)
    base = piece_shape(tensor.shape, send_dim, send[rank])
    shapes = [piece_shape(base, receive_dim, size) for size in receive]
    if is_traced(tensor):
        result = _traced.all_to_all_v(tensor, send, send_dim, shapes, receive_dim, group)
        return finished(result, async_op)
    row = row_numel(tensor.shape, send_dim)
    received_row = row_numel(base, receive_dim)

    def traffic() -> tuple[int, int]:
        return (sum(send) - send[rank]) * row, (sum(receive) - receive[rank]) * received_row

    def post(data: Tensor) -> Pending:
        buffer = data.new_empty(sum(receive) * received_row)
        n_received = [size * received_row for size in receive]
        keep: object
        if is_gloo_like(data):
            pieces, targets = data.split(send, send_dim), splits(buffer, n_received)
            works, keep = post_pieces(pieces, targets, group, rank)
            targets[rank].view(shapes[rank]).copy_(pieces[rank])  # while the others travel
        else:
            keep = source = pack(data, send, send_dim)
            works = post_all_to_all(buffer, source, n_received, [size * row for size in send], group)
        return Pending(works, lambda: unpack(buffer, shapes, receive_dim), keep)

    def adjoint(grad: Tensor) -> Tensor:
        return all_to_all_v(grad, receive, send, group, send_dim=receive_dim, receive_dim=send_dim, axis=axis)

    return launch("all_to_all_v", axis, tensor, post, traffic, adjoint, async_op)
