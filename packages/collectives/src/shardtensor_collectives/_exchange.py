"""``exchange`` and ``exchange_adjoint``: run a plan of :func:`shardtensor_spec.plan_exchange`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch.distributed as dist
from torch import Tensor

from shardtensor_collectives import _traced
from shardtensor_collectives._checks import members
from shardtensor_collectives._pending import Pending, finished, launch
from shardtensor_collectives._regions import region
from shardtensor_collectives._torch_private import is_traced
from shardtensor_collectives._wire import flattened, join_group, post_messages
from shardtensor_spec import AdjointPlan, ExchangePlan, LayoutMismatchError, Message, Piece


@overload
def exchange(
    local: Tensor,
    plan: ExchangePlan,
    group: dist.ProcessGroup,
    *,
    fill: float = ...,
    axis: str | None = ...,
    async_op: Literal[False] = ...,
) -> Tensor: ...


@overload
def exchange(
    local: Tensor,
    plan: ExchangePlan,
    group: dist.ProcessGroup,
    *,
    fill: float = ...,
    axis: str | None = ...,
    async_op: Literal[True],
) -> Pending: ...


def exchange(
    local: Tensor,
    plan: ExchangePlan,
    group: dist.ProcessGroup,
    *,
    fill: float = 0,
    axis: str | None = None,
    async_op: bool = False,
) -> Tensor | Pending:
    """Fill this rank's window of the global tensor.

    Parameters
    ----------
    local : Tensor, plan.local_shape
        This rank's part. The dtype is equal on all ranks.
    plan : ExchangePlan
        This rank's part of the plan. All ranks call with theirs, also those that move nothing.
    group : ProcessGroup
        The ranks that the plan was made for.
    fill : number
        What the window holds where no rank owns anything (padding).
    axis : str, optional
        Name of the mesh axis, for traces.
    async_op : bool
        Return a :class:`Pending` at once instead of the result.

    Returns
    -------
    Tensor, plan.window_shape, or Pending
        Contiguous, and never an alias of `local`.

    Raises
    ------
    LayoutMismatchError
        If the plan was made for another shape, group size or rank. Raised before any communication.

    Notes
    -----
    Communication: one point-to-point message per peer and direction that has data, of exactly the planned elements;
    what fits is received in its place in the window. None if ``plan.moves_nothing``. When traced, one all-to-all. The
    adjoint is :func:`exchange_adjoint`.

    Examples
    --------
    >>> import torch
    >>> group = mesh.get_group()  # a mesh of one rank
    >>> from shardtensor_spec import plan_exchange
    >>> plan = plan_exchange([((0, 3),)], [((-1, 3),)], 0, global_shape=(3,))
    >>> exchange(torch.ones(3), plan, group, fill=7)
    tensor([7., 1., 1., 1.])
    """
    _check(local, plan.local_shape, plan, group, "exchange")
    if is_traced(local):
        return finished(_traced.exchange(local, plan, group, fill), async_op)

    def adjoint(grad: Tensor) -> Tensor:
        return exchange_adjoint(grad, plan, group, axis=axis)

    return launch(
        "exchange",
        axis,
        local,
        lambda data: _post(data, plan, group, fill),
        lambda: (plan.n_sent, plan.n_received),
        adjoint,
        async_op,
        is_silent=plan.moves_nothing,
    )


@overload
def exchange_adjoint(
    window: Tensor,
    plan: ExchangePlan,
    group: dist.ProcessGroup,
    *,
    axis: str | None = ...,
    async_op: Literal[False] = ...,
) -> Tensor: ...


@overload
def exchange_adjoint(
    window: Tensor,
    plan: ExchangePlan,
    group: dist.ProcessGroup,
    *,
    axis: str | None = ...,
    async_op: Literal[True],
) -> Pending: ...


def exchange_adjoint(
    window: Tensor,
    plan: ExchangePlan,
    group: dist.ProcessGroup,
    *,
    axis: str | None = None,
    async_op: bool = False,
) -> Tensor | Pending:
    """Send the windows back to the owners and add them where they overlap: the transpose of :func:`exchange`.

    Parameters
    ----------
    window : Tensor, plan.window_shape
        For example the gradient of what :func:`exchange` returned.
    plan : ExchangePlan
        The plan of the forward exchange.
    group : ProcessGroup
        The ranks that the plan was made for.
    axis : str, optional
        Name of the mesh axis, for traces.
    async_op : bool
        Return a :class:`Pending` at once instead of the result.

    Returns
    -------
    Tensor, plan.local_shape, or Pending
        Contiguous. Own contributions are added first, then the peers' in rank order, so that the sum is the
        same each time. What lies in a gap of the window is dropped.

    Raises
    ------
    LayoutMismatchError
        If the plan was made for another shape, group size or rank. Raised before any communication.

    Notes
    -----
    Communication: the messages of the forward exchange, reversed. The adjoint is
    :func:`exchange` with zeros in the gaps.

    Examples
    --------
    >>> import torch
    >>> group = mesh.get_group()  # a mesh of one rank
    >>> from shardtensor_spec import plan_exchange
    >>> plan = plan_exchange([((0, 3),)], [((-1, 4),)], 0, global_shape=(3,), circular=(0,))
    >>> exchange_adjoint(torch.ones(5), plan, group)
    tensor([2., 1., 2.])
    """
    _check(window, plan.window_shape, plan, group, "exchange_adjoint")
    if is_traced(window):
        return finished(_traced.exchange_adjoint(window, plan, group), async_op)
    reverse = plan.adjoint()

    def adjoint(grad: Tensor) -> Tensor:
        return exchange(grad, plan, group, axis=axis)

    return launch(
        "exchange_adjoint",
        axis,
        window,
        lambda data: _post_adjoint(data, reverse, group),
        lambda: (reverse.n_sent, reverse.n_received),
        adjoint,
        async_op,
        is_silent=plan.moves_nothing,
    )


def _post(local: Tensor, plan: ExchangePlan, group: dist.ProcessGroup, fill: float) -> Pending:
    window = local.new_empty(plan.window_shape)
    sends = _outgoing(local, plan.sends)
    receives, unpacking = [], []
    for message in plan.receives:
        place = region(window, message.pieces[0].target)
        if len(message.pieces) == 1 and place.is_contiguous():
            receives.append((message.peer, place.view(-1)))
        else:
            buffer = local.new_empty(message.numel)
            receives.append((message.peer, buffer))
            unpacking.append((message.pieces, buffer))
    works = _start(sends, receives, local, plan, group)
    for gap in plan.gaps:
        region(window, gap).fill_(fill)
    for piece in plan.copies:
        region(window, piece.target).copy_(region(local, piece.source))

    def finish() -> Tensor:
        for pieces, buffer in unpacking:
            for target, values in _pieces_of(window, pieces, buffer):
                target.copy_(values)
        for piece in plan.repeats:
            region(window, piece.target).copy_(region(window, piece.source))
        return window

    return Pending(works, finish, keep=(sends, receives))


def _post_adjoint(window: Tensor, plan: AdjointPlan, group: dist.ProcessGroup) -> Pending:
    if plan.folds:
        window = window.clone()
        for piece in plan.folds:
            region(window, piece.target).add_(region(window, piece.source))
    sends = _outgoing(window, plan.sends)
    receives = [(message.peer, window.new_empty(message.numel)) for message in plan.receives]
    works = _start(sends, receives, window, plan, group)
    result = window.new_empty(plan.local_shape) if plan.writes_each_once else window.new_zeros(plan.local_shape)
    write = Tensor.copy_ if plan.writes_each_once else Tensor.add_
    for piece in plan.copies:
        write(region(result, piece.target), region(window, piece.source))

    def finish() -> Tensor:
        for message, (_, buffer) in zip(plan.receives, receives, strict=True):
            for target, values in _pieces_of(result, message.pieces, buffer):
                write(target, values)
        return result

    return Pending(works, finish, keep=(sends, receives))


def _start(
    sends: list[tuple[int, Tensor]],
    receives: list[tuple[int, Tensor]],
    tensor: Tensor,
    plan: ExchangePlan | AdjointPlan,
    group: dist.ProcessGroup,
) -> list[object]:
    if plan.moves_nothing:
        return []
    join_group(tensor, group)
    return post_messages(sends, receives, group)


def _outgoing(tensor: Tensor, messages: Sequence[Message]) -> list[tuple[int, Tensor]]:
    """The buffer of each message: a view where its one piece is contiguous, else packed."""
    outgoing = []
    for message in messages:
        if len(message.pieces) == 1:
            outgoing.append((message.peer, flattened(region(tensor, message.pieces[0].source))))
            continue
        buffer = tensor.new_empty(message.numel)
        start = 0
        for piece in message.pieces:
            values = region(tensor, piece.source)
            buffer[start : start + piece.numel].view(values.shape).copy_(values)
            start += piece.numel
        outgoing.append((message.peer, buffer))
    return outgoing


def _pieces_of(tensor: Tensor, pieces: Sequence[Piece], buffer: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Each piece's place in the tensor, with its values in the buffer."""
    pairs = []
    start = 0
    for piece in pieces:
        target = region(tensor, piece.target)
        pairs.append((target, buffer[start : start + piece.numel].view(target.shape)))
        start += piece.numel
    return pairs


def _check(tensor: Tensor, shape: tuple[int, ...], plan: ExchangePlan, group: dist.ProcessGroup, where: str) -> None:
    n_ranks, rank = members(group)
    if (n_ranks, rank) != (plan.n_ranks, plan.rank):
        raise LayoutMismatchError(
            f"the plan is for rank {plan.rank} of {plan.n_ranks}, but this is rank {rank} of {n_ranks} in the group",
            where=where,
        )
    if tuple(tensor.shape) != shape:
        raise LayoutMismatchError(
            f"the plan is for a tensor of shape {shape}, but it has shape {tuple(tensor.shape)}", where=where
        )
