"""``reduce_scatter_v``: every rank gets the sum of its shard over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from shardtensor_collectives import _traced
from shardtensor_collectives._all_gather import all_gather_v
from shardtensor_collectives._checks import check_extent, checked_dim, checked_sizes, members
from shardtensor_collectives._pending import Pending, finished, launch
from shardtensor_collectives._reduction import ReduceOp, check_op, dist_op, narrowed, reduce_in_order, widened
from shardtensor_collectives._torch_private import is_traced, reduce_scatter_single
from shardtensor_collectives._wire import is_gloo_like, pack, piece_shape, post_pieces, row_numel, splits


@overload
def reduce_scatter_v(
    full: Tensor,
    sizes: Sequence[int],
    dim: int,
    group: dist.ProcessGroup,
    *,
    op: ReduceOp = ...,
    axis: str | None = ...,
    async_op: Literal[False] = ...,
) -> Tensor: ...


@overload
def reduce_scatter_v(
    full: Tensor,
    sizes: Sequence[int],
    dim: int,
    group: dist.ProcessGroup,
    *,
    op: ReduceOp = ...,
    axis: str | None = ...,
    async_op: Literal[True],
) -> Pending: ...


def reduce_scatter_v(
    full: Tensor,
    sizes: Sequence[int],
    dim: int,
    group: dist.ProcessGroup,
    *,
    op: ReduceOp = "sum",
    axis: str | None = None,
    async_op: bool = False,
) -> Tensor | Pending:
    """Reduce a tensor over all ranks and keep this rank's rows.

    Parameters
    ----------
    full : Tensor, (..., sum(sizes), ...)
        This rank's contribution; of the same shape and dtype on all ranks.
    sizes : sequence of int, (n_ranks,)
        Rows along `dim` that each rank keeps, zeros allowed.
    dim : int
        The dimension to cut.
    group : ProcessGroup
        The ranks.
    op : {"sum", "mean", "max", "min", "product"}
        The reduction. Sums and means have gradients.
    axis : str, optional
        Name of the mesh axis, for traces.
    async_op : bool
        Return a :class:`Pending` at once instead of the result.

    Returns
    -------
    Tensor, (..., sizes[rank], ...) or Pending
        Contiguous, and never an alias of `full`.

    Raises
    ------
    LayoutMismatchError
        If the sizes do not fit the group or the tensor.
    UnsupportedShardingError
        If the dtype cannot be reduced. Both are raised before any communication.

    Notes
    -----
    Communication: this rank sends every other rank its rows, and receives its own from each. On CPU the sum is taken
    here, in rank order and for 16-bit floats in float32, so that it is the same each time; NCCL reduces on the way. The
    adjoint is :func:`all_gather_v`.

    Examples
    --------
    >>> import torch
    >>> group = mesh.get_group()  # a mesh of one rank
    >>> reduce_scatter_v(torch.ones(2), [2], 0, group)
    tensor([1., 1.])
    """
    n_ranks, rank = members(group)
    dim = checked_dim(dim, full.ndim, "reduce_scatter_v")
    sizes = checked_sizes(sizes, n_ranks, "reduce_scatter_v")
    check_extent(full, dim, sum(sizes), "the sizes sum to", "reduce_scatter_v")
    check_op(op, full.dtype, full.requires_grad and torch.is_grad_enabled(), "reduce_scatter_v")
    if n_ranks == 1:
        return finished(full.clone(), async_op)
    if is_traced(full):
        return finished(_traced.reduce_scatter_v(full, sizes, dim, group, op), async_op)

    def traffic() -> tuple[int, int]:
        row = row_numel(full.shape, dim)
        return full.numel() - sizes[rank] * row, (n_ranks - 1) * sizes[rank] * row

    def adjoint(grad: Tensor) -> Tensor:
        return all_gather_v(grad / n_ranks if op == "mean" else grad, sizes, dim, group, axis=axis)

    return launch(
        "reduce_scatter_v",
        axis,
        full,
        lambda data: _post(data, sizes, dim, group, rank, op),
        traffic,
        adjoint,
        async_op,
    )


def _post(full: Tensor, sizes: tuple[int, ...], dim: int, group: dist.ProcessGroup, rank: int, op: ReduceOp) -> Pending:
    row = row_numel(full.shape, dim)
    shape = piece_shape(full.shape, dim, sizes[rank])
    n_ranks, n_mine = len(sizes), sizes[rank] * row
    if is_gloo_like(full):
        # gloo's own reduce-scatter costs an all-reduce or more; this moves the fewest bytes.
        buffers = [full.new_empty(n_mine if peer != rank else 0) for peer in range(n_ranks)]
        pieces = full.split(sizes, dim)
        works, keep = post_pieces(pieces, buffers, group, rank)

        def finish_here() -> Tensor:
            contributions = [pieces[peer] if peer == rank else buffers[peer].view(shape) for peer in range(n_ranks)]
            return reduce_in_order(contributions, op, untouched=rank).contiguous()

        return Pending(works, finish_here, keep)
    wide = widened(pack(full, sizes, dim))
    output = wide.new_empty((n_mine, *wide.shape[1:]))
    reduction = dist_op(op, full.dtype)
    if len(set(sizes)) == 1:
        work = reduce_scatter_single(output, wide, op=reduction, group=group, async_op=True)
    else:  # NCCL makes one grouped reduction per rank of it
        parts = splits(wide, [size * row for size in sizes])
        work = dist.reduce_scatter(output, parts, op=reduction, group=group, async_op=True)

    def finish() -> Tensor:
        if op == "mean":
            output.div_(n_ranks)
        return narrowed(output, full.dtype).view(shape)

    return Pending([work], finish, keep=wide)
