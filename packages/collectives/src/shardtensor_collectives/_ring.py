"""``ring_shift`` and ``ring_blocks``: blocks that travel around the ring while the caller computes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardtensor_collectives import _traced
from shardtensor_collectives._checks import check_extent, checked_dim, checked_sizes, members
from shardtensor_collectives._pending import Pending, launch
from shardtensor_collectives._torch_private import is_traced
from shardtensor_collectives._wire import flattened, join_group, piece_shape, post_messages
from shardtensor_spec import LayoutMismatchError


def ring_shift(
    block: Tensor,
    receive_size: int,
    dim: int,
    group: dist.ProcessGroup,
    *,
    offset: int = 1,
    buffer: Tensor | None = None,
    axis: str | None = None,
) -> Pending:
    """Start to send a block to the next rank and to receive the previous rank's.

    Parameters
    ----------
    block : Tensor
        The block to pass on. It may be read, not written, until the handle has been waited for.
    receive_size : int
        Rows along `dim` of the block that arrives, 0 allowed. The other dimensions are those of `block`.
    dim : int
        The dimension along which blocks differ.
    group : ProcessGroup
        The ring, in the order of positions.
    offset : int
        How many positions further the block goes; negative goes back.
    buffer : Tensor, (at least as many elements as arrive,), optional
        Flat memory of the same dtype to receive into, so that two buffers serve a whole ring.
    axis : str, optional
        Name of the mesh axis, for traces.

    Returns
    -------
    Pending
        Its result is the block that arrives.

    Raises
    ------
    LayoutMismatchError
        If the buffer is too small or of another dtype, or `receive_size` is negative. Raised before any communication.

    Notes
    -----
    Communication: one message to one rank and one from another. None if the offset is a multiple of the group
    size. The adjoint is the shift by ``-offset``.

    Examples
    --------
    >>> import torch
    >>> group = mesh.get_group()  # a mesh of one rank
    >>> ring_shift(torch.ones(2), 2, 0, group).wait()
    tensor([1., 1.])
    """
    n_ranks, rank = members(group)
    dim = checked_dim(dim, block.ndim, "ring_shift")
    if receive_size < 0:
        raise LayoutMismatchError(f"receive_size is negative: {receive_size}", where="ring_shift")
    shape = piece_shape(block.shape, dim, receive_size)
    n_received = math.prod(shape)
    if buffer is not None and (buffer.dtype is not block.dtype or buffer.numel() < n_received):
        raise LayoutMismatchError(
            f"the buffer holds {buffer.numel()} elements of {buffer.dtype}, but {n_received} of {block.dtype} arrive",
            where="ring_shift",
        )
    if offset % n_ranks == 0:
        check_extent(block, dim, receive_size, "receive_size is", "ring_shift")
        return Pending.done(block)
    if is_traced(block):
        return Pending.done(_traced.ring_shift(block, shape, group, offset))
    n_kept = block.shape[dim]

    def post(data: Tensor) -> Pending:
        join_group(data, group)
        target = data.new_empty(n_received) if buffer is None else buffer.view(-1)[:n_received]
        mine = flattened(data)
        works = post_messages([((rank + offset) % n_ranks, mine)], [((rank - offset) % n_ranks, target)], group)
        return Pending(works, lambda: target.view(shape), keep=mine)

    def adjoint(grad: Tensor) -> Tensor:
        return ring_shift(grad, n_kept, dim, group, offset=-offset, axis=axis).wait()

    pending = launch("ring_shift", axis, block, post, lambda: (block.numel(), n_received), adjoint, async_op=True)
    assert isinstance(pending, Pending)
    return pending


def ring_blocks(
    local: Tensor, sizes: Sequence[int], dim: int, group: dist.ProcessGroup, *, axis: str | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Visit every rank's block, the own one first, with the next one in flight while the caller computes.

    Parameters
    ----------
    local : Tensor, (..., sizes[rank], ...)
        This rank's block.
    sizes : sequence of int, (n_ranks,)
        Rows of every rank's block along `dim`, zeros allowed.
    dim : int
        The dimension along which the blocks lie.
    group : ProcessGroup
        The ring.
    axis : str, optional
        Name of the mesh axis, for traces.

    Yields
    ------
    owner : int
        Position of the block's owner: rank, rank - 1, rank - 2, … around the ring.
    block : Tensor, (..., sizes[owner], ...)
        Valid until the next one is asked for (without gradients, two buffers serve the whole ring).

    Raises
    ------
    LayoutMismatchError
        If the sizes do not fit the group or the tensor. Raised before any communication.

    Notes
    -----
    Communication: ``n_ranks - 1`` shifts, each posted before its predecessor's block is handed out. The caller has
    to take all blocks on every rank.

    Examples
    --------
    >>> import torch
    >>> group = mesh.get_group()  # a mesh of one rank
    >>> [(owner, block.shape) for owner, block in ring_blocks(torch.ones(2), [2], 0, group)]
    [(0, torch.Size([2]))]
    """
    n_ranks, rank = members(group)
    dim = checked_dim(dim, local.ndim, "ring_blocks")
    sizes = checked_sizes(sizes, n_ranks, "ring_blocks")
    check_extent(local, dim, sizes[rank], f"sizes says that rank {rank} has", "ring_blocks")
    return _ring_blocks(local, sizes, dim, group, rank, axis)


def _ring_blocks(
    local: Tensor, sizes: tuple[int, ...], dim: int, group: dist.ProcessGroup, rank: int, axis: str | None
) -> Iterator[tuple[int, Tensor]]:
    n_ranks = len(sizes)
    buffers: list[Tensor | None] = [None, None]
    keeps_history = local.requires_grad and torch.is_grad_enabled()
    if n_ranks > 2 and not keeps_history and not is_traced(local):
        largest = math.prod(piece_shape(local.shape, dim, max(sizes)))
        buffers = [local.new_empty(largest), local.new_empty(largest)]
    block, owner = local, rank
    for step in range(n_ranks - 1):
        next_owner = (rank - step - 1) % n_ranks
        pending = ring_shift(block, sizes[next_owner], dim, group, buffer=buffers[step % 2], axis=axis)
        yield owner, block
        block, owner = pending.wait(), next_owner
    yield owner, block
