"""``all_reduce``: every rank gets the sum over all ranks."""

from __future__ import annotations

from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from shardtensor_collectives import _traced
from shardtensor_collectives._checks import members
from shardtensor_collectives._pending import Pending, finished, launch
from shardtensor_collectives._reduction import ReduceOp, check_op, dist_op, narrowed, widened
from shardtensor_collectives._torch_private import is_traced


@overload
def all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup,
    *,
    op: ReduceOp = ...,
    axis: str | None = ...,
    async_op: Literal[False] = ...,
) -> Tensor: ...


@overload
def all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup,
    *,
    op: ReduceOp = ...,
    axis: str | None = ...,
    async_op: Literal[True],
) -> Pending: ...


def all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup,
    *,
    op: ReduceOp = "sum",
    axis: str | None = None,
    async_op: bool = False,
) -> Tensor | Pending:
    """Reduce a tensor over all ranks; every rank gets the result.

    Parameters
    ----------
    tensor : Tensor, any shape
        This rank's contribution; of the same shape and dtype on all ranks. It is not changed.
    group : ProcessGroup
        The ranks.
    op : {"sum", "mean", "max", "min", "product"}
        The reduction. Sums and means have gradients. For ``bool``, sum and max mean *any*, product and min *all*.
    axis : str, optional
        Name of the mesh axis, for traces.
    async_op : bool
        Return a :class:`Pending` at once instead of the result.

    Returns
    -------
    Tensor, shape of the input, or Pending
        Contiguous; equal on all ranks, bit by bit.

    Raises
    ------
    ValueError
        If the reduction is unknown, or a gradient is needed that it lacks.
    UnsupportedShardingError
        If the dtype cannot be reduced. Raised before any communication.

    Notes
    -----
    Communication: one all-reduce of the tensor's bytes, in the nearest wider dtype where the backend lacks its own.
    None in a group of one or for an empty tensor. The adjoint is an all-reduce of the gradients.

    Examples
    --------
    >>> import torch
    >>> group = mesh.get_group()  # a mesh of one rank
    >>> all_reduce(torch.ones(2), group)
    tensor([1., 1.])
    """
    n_ranks, _ = members(group)
    check_op(op, tensor.dtype, tensor.requires_grad and torch.is_grad_enabled(), "all_reduce")
    if n_ranks == 1 or tensor.numel() == 0:
        return finished(tensor.clone(), async_op)
    if is_traced(tensor):
        return finished(_traced.all_reduce(tensor, group, op), async_op)

    def traffic() -> tuple[int, int]:
        return tensor.numel(), tensor.numel()

    def adjoint(grad: Tensor) -> Tensor:
        return all_reduce(grad, group, op=op, axis=axis)

    return launch("all_reduce", axis, tensor, lambda data: _post(data, group, op, n_ranks), traffic, adjoint, async_op)


def _post(tensor: Tensor, group: dist.ProcessGroup, op: ReduceOp, n_ranks: int) -> Pending:
    output = widened(tensor.contiguous())
    if output.data_ptr() == tensor.data_ptr():
        output = output.clone()
    work = dist.all_reduce(output, op=dist_op(op, tensor.dtype), group=group, async_op=True)

    def finish() -> Tensor:
        if op == "mean":
            output.div_(n_ranks)
        return narrowed(output, tensor.dtype)

    return Pending([work], finish)
