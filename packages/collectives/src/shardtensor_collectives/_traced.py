"""The collectives as ``torch.compile`` can record them: functional collectives only, waited for before they return.

Point-to-point messages cannot be traced, so whatever uses them elsewhere is one all-to-all with exact sizes here.
Gradients come from the functional collectives' own formulas. Arguments are checked by the callers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardtensor_collectives._reduction import ReduceOp, narrowed, reduce_in_order, widened
from shardtensor_collectives._regions import region
from shardtensor_collectives._torch_private import functional_collectives, resolved
from shardtensor_collectives._wire import as_wire, piece_shape, row_numel
from shardtensor_spec import ExchangePlan, Message, Piece


def _all_to_all(flat: Tensor, receive: Sequence[int], send: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """All-to-all of a flat tensor; sizes in elements."""
    if flat.is_complex():  # has a gradient, which a view as bytes would lose
        pairs = torch.view_as_real(flat.resolve_conj().contiguous())
        result = functional_collectives.all_to_all_single(pairs, list(receive), list(send), group)
        return torch.view_as_complex(resolved(result))
    wire = as_wire(flat.contiguous())
    factor = flat.element_size() // wire.element_size()
    result = resolved(
        functional_collectives.all_to_all_single(wire, [factor * n for n in receive], [factor * n for n in send], group)
    )
    # A view in another dtype has no gradient, not even if it is the same dtype.
    return result if result.dtype is flat.dtype else result.view(flat.dtype)


def _zeroed(tensor: Tensor) -> Tensor:
    """Zeros that keep the gradient history; a product with zero would keep infinities too."""
    return tensor.masked_fill(torch.ones((), dtype=torch.bool, device=tensor.device), 0)


def _joined(flat: Tensor, shapes: Sequence[Sequence[int]], dim: int) -> Tensor:
    pieces = flat.split([math.prod(shape) for shape in shapes])
    return torch.cat([piece.reshape(list(shape)) for piece, shape in zip(pieces, shapes, strict=True)], dim)


def _packed(tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    return torch.cat([piece.reshape(-1) for piece in tensor.split(list(sizes), dim)])


def all_gather_v(local: Tensor, sizes: tuple[int, ...], dim: int, group: dist.ProcessGroup) -> Tensor:
    """See the eager function."""
    row = row_numel(local.shape, dim)
    n_ranks, n_mine = len(sizes), local.numel()
    flat = _all_to_all(local.reshape(-1).repeat(n_ranks), [size * row for size in sizes], [n_mine] * n_ranks, group)
    return _joined(flat, [piece_shape(local.shape, dim, size) for size in sizes], dim)


def reduce_scatter_v(full: Tensor, sizes: tuple[int, ...], dim: int, group: dist.ProcessGroup, op: ReduceOp) -> Tensor:
    """See the eager function."""
    row = row_numel(full.shape, dim)
    n_ranks, mine = len(sizes), sizes[group.rank()]
    flat = _all_to_all(_packed(full, sizes, dim), [mine * row] * n_ranks, [size * row for size in sizes], group)
    pieces = list(flat.split([mine * row] * n_ranks))
    return reduce_in_order(pieces, op).reshape(piece_shape(full.shape, dim, mine))


def all_to_all_v(
    tensor: Tensor,
    send: tuple[int, ...],
    send_dim: int,
    shapes: list[list[int]],
    receive_dim: int,
    group: dist.ProcessGroup,
) -> Tensor:
    """See the eager function; `shapes` are those of the pieces that arrive."""
    row = row_numel(tensor.shape, send_dim)
    receive = [math.prod(shape) for shape in shapes]
    flat = _all_to_all(_packed(tensor, send, send_dim), receive, [size * row for size in send], group)
    return _joined(flat, shapes, receive_dim)


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, op: ReduceOp) -> Tensor:
    """See the eager function."""
    name = "sum" if op == "mean" else op
    if tensor.dtype is torch.bool:
        name = "min" if op in ("min", "product") else "max"
    result = resolved(functional_collectives.all_reduce(widened(tensor.resolve_conj().contiguous()), name, group))
    if op == "mean":
        result = result / group.size()
    return narrowed(result, tensor.dtype)


def broadcast(tensor: Tensor, group: dist.ProcessGroup, source: int) -> Tensor:
    """See the eager function."""
    if tensor.requires_grad and torch.is_grad_enabled():
        # The functional broadcast has no gradient; a sum with zeros has the right one.
        contribution = tensor if group.rank() == source else _zeroed(tensor)
        return resolved(functional_collectives.all_reduce(contribution.contiguous(), "sum", group))
    flat = tensor.contiguous().reshape(-1)
    send = [flat.numel()] * group.size() if group.rank() == source else [0] * group.size()
    receive = [flat.numel() if peer == source else 0 for peer in range(group.size())]
    payload = flat.repeat(group.size()) if group.rank() == source else flat[:0]
    return _all_to_all(payload, receive, send, group).reshape(tensor.shape)


def reduce(tensor: Tensor, group: dist.ProcessGroup, destination: int, op: ReduceOp) -> Tensor:
    """See the eager function."""
    result = all_reduce(tensor, group, op)
    return result if group.rank() == destination else _zeroed(result)


def scatter_v(full: Tensor, sizes: tuple[int, ...], dim: int, group: dist.ProcessGroup, source: int) -> Tensor:
    """See the eager function."""
    row, rank = row_numel(full.shape, dim), group.rank()
    receive = [sizes[rank] * row if peer == source else 0 for peer in range(len(sizes))]
    send = [size * row if rank == source else 0 for size in sizes]
    payload = _packed(full, sizes, dim)
    flat = _all_to_all(payload if rank == source else payload[:0], receive, send, group)
    return flat.reshape(piece_shape(full.shape, dim, sizes[rank]))


def gather_v(local: Tensor, sizes: tuple[int, ...], dim: int, group: dist.ProcessGroup, destination: int) -> Tensor:
    """See the eager function."""
    row, rank = row_numel(local.shape, dim), group.rank()
    receive = [size * row if rank == destination else 0 for size in sizes]
    send = [local.numel() if peer == destination else 0 for peer in range(len(sizes))]
    flat = _all_to_all(local.reshape(-1), receive, send, group)
    if rank == destination:
        return _joined(flat, [piece_shape(local.shape, dim, size) for size in sizes], dim)
    return (flat.sum() * 0).to(local.dtype).expand(piece_shape(local.shape, dim, sum(sizes)))


def ring_shift(block: Tensor, shape: Sequence[int], group: dist.ProcessGroup, offset: int) -> Tensor:
    """See the eager function."""
    n_ranks, rank = group.size(), group.rank()
    send, receive = [0] * n_ranks, [0] * n_ranks
    send[(rank + offset) % n_ranks] = block.numel()
    receive[(rank - offset) % n_ranks] = math.prod(shape)
    return _all_to_all(block.reshape(-1), receive, send, group).reshape(list(shape))


def exchange(local: Tensor, plan: ExchangePlan, group: dist.ProcessGroup, fill: float) -> Tensor:
    """See the eager function."""
    arrived = _swap(local, plan.sends, plan.receives, plan.moves_nothing, group)
    window = local.new_empty(plan.window_shape) if plan.is_complete else local.new_full(plan.window_shape, fill)
    for piece in plan.copies:
        region(window, piece.target).copy_(region(local, piece.source))
    for piece, values in arrived:
        region(window, piece.target).copy_(values)
    for piece in plan.repeats:
        region(window, piece.target).copy_(region(window, piece.source).clone())
    return window


def exchange_adjoint(grad: Tensor, plan: ExchangePlan, group: dist.ProcessGroup) -> Tensor:
    """See the eager function. The plan is reversed here: ``plan.adjoint()`` keeps a cache, which cannot be traced."""
    if plan.repeats:
        grad = grad.clone()
    for piece in reversed(plan.repeats):
        region(grad, piece.source).add_(region(grad, piece.target))
    sends = [message.reversed() for message in plan.receives]
    receives = [message.reversed() for message in plan.sends]
    arrived = _swap(grad, sends, receives, plan.moves_nothing, group)
    result = grad.new_zeros(plan.local_shape)
    for piece in plan.copies:
        region(result, piece.source).add_(region(grad, piece.target))
    for piece, values in arrived:
        region(result, piece.target).add_(values)
    return result


def _swap(
    tensor: Tensor, sends: Sequence[Message], receives: Sequence[Message], is_silent: bool, group: dist.ProcessGroup
) -> list[tuple[Piece, Tensor]]:
    """Send the pieces of all messages; return those that arrive."""
    if is_silent:
        return []
    send, receive = [0] * group.size(), [0] * group.size()
    parts = [tensor.reshape(-1)[:0]]
    for message in sends:
        send[message.peer] = message.numel
        parts += [region(tensor, piece.source).reshape(-1) for piece in message.pieces]
    for message in receives:
        receive[message.peer] = message.numel
    flat = _all_to_all(torch.cat(parts), receive, send, group)
    pieces = [piece for message in receives for piece in message.pieces]
    values = flat.split([piece.numel for piece in pieces]) if pieces else []
    return [(piece, value.reshape(piece.shape)) for piece, value in zip(pieces, values, strict=True)]
