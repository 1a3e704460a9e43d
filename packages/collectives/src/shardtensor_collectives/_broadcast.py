"""``broadcast`` and ``reduce``: one rank to all, and back."""

from __future__ import annotations

from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from shardtensor_collectives import _traced
from shardtensor_collectives._checks import checked_peer, members
from shardtensor_collectives._pending import Pending, finished, launch
from shardtensor_collectives._reduction import ReduceOp, check_op, dist_op, narrowed, widened
from shardtensor_collectives._torch_private import is_traced
from shardtensor_collectives._wire import as_wire


@overload
def broadcast(
    tensor: Tensor,
    group: dist.ProcessGroup,
    *,
    source: int = ...,
    axis: str | None = ...,
    async_op: Literal[False] = ...,
) -> Tensor: ...


@overload
def broadcast(
    tensor: Tensor, group: dist.ProcessGroup, *, source: int = ..., axis: str | None = ..., async_op: Literal[True]
) -> Pending: ...


def broadcast(
    tensor: Tensor,
    group: dist.ProcessGroup,
    *,
    source: int = 0,
    axis: str | None = None,
    async_op: bool = False,
) -> Tensor | Pending:
    """Give every rank the tensor of one.

    Parameters
    ----------
    tensor : Tensor, any shape
        On the source the values, elsewhere a tensor of the same shape and dtype whose values do not matter;
        ``torch.empty((), dtype=...).expand(shape)`` takes no memory. It is not changed.
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
    Tensor, shape of the input, or Pending
        Contiguous, never an alias.

    Raises
    ------
    LayoutMismatchError
        If the group has no such position. Raised before any communication.

    Notes
    -----
    Communication: one broadcast of the tensor's bytes. None in a group of one. The gradient is summed at the source
    and zero elsewhere; the input must need a gradient on all ranks or on none.

    Examples
    --------
    >>> import torch
    >>> group = mesh.get_group()  # a mesh of one rank
    >>> broadcast(torch.ones(2), group)
    tensor([1., 1.])
    """
    n_ranks, rank = members(group)
    checked_peer(source, n_ranks, "broadcast", "source")
    if n_ranks == 1 or tensor.numel() == 0:
        return finished(tensor.clone(), async_op)
    if is_traced(tensor):
        return finished(_traced.broadcast(tensor, group, source), async_op)

    def post(data: Tensor) -> Pending:
        output = torch.empty(data.shape, dtype=data.dtype, device=data.device)
        if rank == source:
            output.copy_(data)
        work = dist.broadcast(as_wire(output.view(-1)), group=group, group_src=source, async_op=True)
        return Pending([work], lambda: output)

    def traffic() -> tuple[int, int]:
        return ((n_ranks - 1) * tensor.numel(), 0) if rank == source else (0, tensor.numel())

    def adjoint(grad: Tensor) -> Tensor:
        return reduce(grad, group, destination=source, axis=axis)

    return launch("broadcast", axis, tensor, post, traffic, adjoint, async_op)


@overload
def reduce(
    tensor: Tensor,
    group: dist.ProcessGroup,
    *,
    destination: int = ...,
    op: ReduceOp = ...,
    axis: str | None = ...,
    async_op: Literal[False] = ...,
) -> Tensor: ...


@overload
def reduce(
    tensor: Tensor,
    group: dist.ProcessGroup,
    *,
    destination: int = ...,
    op: ReduceOp = ...,
    axis: str | None = ...,
    async_op: Literal[True],
) -> Pending: ...


def reduce(
    tensor: Tensor,
    group: dist.ProcessGroup,
    *,
    destination: int = 0,
    op: ReduceOp = "sum",
    axis: str | None = None,
    async_op: bool = False,
) -> Tensor | Pending:
    """Reduce a tensor over all ranks, for one of them.

    Parameters
    ----------
    tensor : Tensor, any shape
        This rank's contribution; of the same shape and dtype on all ranks. It is not changed.
    group : ProcessGroup
        The ranks.
    destination : int
        Position in the group (not the global rank).
    op : {"sum", "mean", "max", "min", "product"}
        The reduction. Sums and means have gradients.
    axis : str, optional
        Name of the mesh axis, for traces.
    async_op : bool
        Return a :class:`Pending` at once instead of the result.

    Returns
    -------
    Tensor, shape of the input, or Pending
        The result on the destination, zeros elsewhere.

    Raises
    ------
    LayoutMismatchError
        If the group has no such position.
    ValueError, UnsupportedShardingError
        As :func:`all_reduce`. All are raised before any communication.

    Notes
    -----
    Communication: one reduction of the tensor's bytes. None in a group of one. The adjoint is
    :func:`broadcast` (divided by the number of ranks for a mean).

    Examples
    --------
    >>> import torch
    >>> group = mesh.get_group()  # a mesh of one rank
    >>> reduce(torch.ones(2), group)
    tensor([1., 1.])
    """
    n_ranks, rank = members(group)
    checked_peer(destination, n_ranks, "reduce", "destination")
    check_op(op, tensor.dtype, tensor.requires_grad and torch.is_grad_enabled(), "reduce")
    if n_ranks == 1 or tensor.numel() == 0:
        return finished(tensor.clone(), async_op)
    if is_traced(tensor):
        return finished(_traced.reduce(tensor, group, destination, op), async_op)

    def post(data: Tensor) -> Pending:
        output = widened(data.contiguous())
        if output.data_ptr() == data.data_ptr():
            output = output.clone()
        work = dist.reduce(output, op=dist_op(op, data.dtype), group=group, group_dst=destination, async_op=True)

        def finish() -> Tensor:
            if rank != destination:
                return torch.zeros(data.shape, dtype=data.dtype, device=data.device)
            if op == "mean":
                output.div_(n_ranks)
            return narrowed(output, data.dtype)

        return Pending([work], finish)

    def traffic() -> tuple[int, int]:
        return (0, (n_ranks - 1) * tensor.numel()) if rank == destination else (tensor.numel(), 0)

    def adjoint(grad: Tensor) -> Tensor:
        return broadcast(grad / n_ranks if op == "mean" else grad, group, source=destination, axis=axis)

    return launch("reduce", axis, tensor, post, traffic, adjoint, async_op)
