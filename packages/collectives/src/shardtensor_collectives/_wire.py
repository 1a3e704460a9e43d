"""What travels: flat contiguous buffers, in dtypes that every backend can send, packed without padding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Both gloo and NCCL move these as they are; all others travel as bytes.
_NATIVE = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    }
)

_joined: set[Any] = set()


def flattened(tensor: Tensor) -> Tensor:
    """Flat contiguous tensor; a view where possible. (``reshape(-1)`` alone may return one with strides.)"""
    return tensor.contiguous().view(-1)


def as_wire(flat: Tensor) -> Tensor:
    """View a flat contiguous tensor in a dtype that can be sent."""
    return flat if flat.dtype in _NATIVE else flat.view(torch.uint8)


def piece_shape(shape: Sequence[int], dim: int, extent: int) -> list[int]:
    """The shape with another extent along `dim`."""
    result = list(shape)
    result[dim] = extent
    return result


def row_numel(shape: Sequence[int], dim: int) -> int:
    """Elements in one row along `dim`."""
    return math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])


def rows_are_contiguous(shape: Sequence[int], dim: int) -> bool:
    """Whether the rows along `dim` of a contiguous tensor follow each other in memory."""
    return math.prod(shape[:dim]) == 1


def pack(tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    """Flat buffer holding the pieces of `tensor` along `dim`, one after the other; a view where possible."""
    if tensor.is_contiguous() and rows_are_contiguous(tensor.shape, dim):
        return tensor.view(-1)
    buffer = tensor.new_empty(tensor.numel())
    row = row_numel(tensor.shape, dim)
    start = 0
    for piece in tensor.split(list(sizes), dim):
        n = piece.shape[dim] * row
        buffer[start : start + n].view(piece.shape).copy_(piece)
        start += n
    return buffer


def unpack(buffer: Tensor, shapes: Sequence[Sequence[int]], dim: int) -> Tensor:
    """Tensor made of the pieces of a flat buffer, joined along `dim`; a view where possible."""
    extent = sum(shape[dim] for shape in shapes)
    shape = piece_shape(shapes[0], dim, extent)
    if rows_are_contiguous(shape, dim):
        return buffer.view(shape)
    pieces = buffer.split([math.prod(shape) for shape in shapes])
    return torch.cat([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)], dim)


def splits(flat: Tensor, numels: Sequence[int]) -> list[Tensor]:
    """Consecutive parts of a flat buffer."""
    return list(flat.split(list(numels)))


def is_gloo_like(tensor: Tensor) -> bool:
    """Whether point-to-point messages go out one by one (CPU) instead of as one group of kernels (NCCL)."""
    return tensor.device.type == "cpu"


def post_messages(
    sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], group: dist.ProcessGroup
) -> list[Any]:
    """Start point-to-point messages, at most one per peer and direction.

    Parameters
    ----------
    sends, receives : sequence of (position in the group, flat contiguous tensor)
        Empty messages are left out on both sides. None may go to this rank itself.

    Returns
    -------
    list of Work
        To be waited for. The tensors must live until then.
    """
    sends = [(peer, as_wire(tensor)) for peer, tensor in sends if tensor.numel()]
    receives = [(peer, as_wire(tensor)) for peer, tensor in receives if tensor.numel()]
    if not sends and not receives:
        return []
    if is_gloo_like((sends or receives)[0][1]):
        works = [dist.irecv(tensor, group=group, group_src=peer) for peer, tensor in receives]
        works += [dist.isend(tensor, group=group, group_dst=peer) for peer, tensor in sends]
        return works
    operations = [dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer) for peer, tensor in receives]
    operations += [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for peer, tensor in sends]
    return list(dist.batch_isend_irecv(operations))


def join_group(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Let all ranks create the group's communicator together, before some of them exchange messages.

    NCCL creates it at first use, which must then be by all ranks. Every rank calls this, also those
    that have nothing to send. gloo connects when the group is made.
    """
    if is_gloo_like(tensor) or group in _joined:
        return
    dist.all_reduce(torch.zeros(1, device=tensor.device), group=group)
    _joined.add(group)


def post_pieces(
    pieces: Sequence[Tensor], targets: Sequence[Tensor], group: dist.ProcessGroup, rank: int
) -> tuple[list[Any], object]:
    """Start to send piece *i* to rank *i*, and to receive into flat target *i*, point to point.

    The own piece is left alone. Each message leaves as soon as it is packed.

    Returns
    -------
    list of Work
        To be waited for.
    object
        To be kept until then.
    """
    works = [
        dist.irecv(as_wire(target), group=group, group_src=peer)
        for peer, target in enumerate(targets)
        if peer != rank and target.numel()
    ]
    n_ranks = len(pieces)
    buffers = []
    for step in range(1, n_ranks):  # everybody starts with another receiver
        peer = (rank + step) % n_ranks
        if pieces[peer].numel():
            buffers.append(flattened(pieces[peer]))
            works.append(dist.isend(as_wire(buffers[-1]), group=group, group_dst=peer))
    return works, buffers


def post_all_to_all(
    output: Tensor, source: Tensor, receive: Sequence[int], send: Sequence[int], group: dist.ProcessGroup
) -> list[Any]:
    """Start an all-to-all between flat buffers; `receive` and `send` count elements per rank."""
    factor = 1 if source.dtype in _NATIVE else source.element_size()
    work = dist.all_to_all_single(
        as_wire(output),
        as_wire(source),
        [factor * n for n in receive],
        [factor * n for n in send],
        group=group,
        async_op=True,
    )
    return [work]
