"""Halos without a window: only the rows of the neighbours are fetched, as strips beside the shard.

A window buffer would copy the whole shard next to its halo, which costs as much time as the convolution of a narrow
layer and, kept for backward, as much memory again. Where an operator is linear, the strips' share can be added to the
result's edge rows instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from shardtensor_collectives import Pending, exchange, exchange_adjoint
from shardtensor_spec import Box, ExchangePlan, Message, Piece, ShardTensorSpec, on_new_world

from ._window import own_rows, shard_of, window_of


@dataclass(frozen=True)
class Halo:
    """Rows of others just before and after this rank's own, along one dim.

    Attributes
    ----------
    dim : int
        The dim.
    before, after : int
        Rows in the strips on this rank; fewer than the reach at the border of the tensor, none on an empty shard.
    """

    dim: int
    before: int
    after: int
    _n_edges: tuple[int, int]  # rows at both ends of the shard that others may want
    _forward: ExchangePlan  # shard -> strips, one behind the other
    _backward: ExchangePlan  # edges, one behind the other -> strips
    _group: dist.ProcessGroup
    _axis: str

    def post(self, local: torch.Tensor) -> Pending:
        """Start to fetch the strips: ``before`` rows and then ``after`` rows in one tensor.

        Notes
        -----
        Communication: one message to and from each rank whose rows are within reach, of exactly these rows.
        """
        return exchange(local, self._forward, self._group, axis=self._axis, async_op=True)

    def post_back(self, strips: torch.Tensor) -> Pending:
        """Start to send the strips' gradient back to the owners of the rows."""
        return exchange_adjoint(strips, self._backward, self._group, axis=self._axis, async_op=True)

    def add_edges(self, edges: torch.Tensor, local: torch.Tensor) -> None:
        """Add what others sent back to this rank's own gradient, in place."""
        head, tail = self._n_edges
        n_rows = local.shape[self.dim]
        local.narrow(self.dim, 0, head).add_(edges.narrow(self.dim, 0, head))
        if tail:
            local.narrow(self.dim, n_rows - tail, tail).add_(edges.narrow(self.dim, head, tail))


@functools.lru_cache(maxsize=512)
def halo_of(spec: ShardTensorSpec, dim: int, reach: int) -> Halo | None:
    """Plan the exchange of halos.

    Parameters
    ----------
    spec : ShardTensorSpec
        Layout of the input.
    dim : int
        The sharded dim.
    reach : int
        Rows wanted on each side of every shard that is not empty. They may belong to several ranks.

    Returns
    -------
    Halo or None
        None if nobody has a neighbour.
    """
    rows = own_rows(spec, dim)
    n_rows = rows[-1][1]
    windows = tuple(
        (max(start - reach, 0), min(stop + reach, n_rows)) if start < stop else (start, start) for start, stop in rows
    )
    window = window_of(spec, ((dim, windows),))
    plan = window.plan
    if plan.moves_nothing:
        return None
    shard = shard_of(spec, dim)
    (start, stop), (first, last) = rows[shard], windows[shard]
    before, after, n_local = start - first, last - stop, stop - start

    def behind_before(box: Box) -> Box:
        """Take the shard out of the window: what lies behind it moves up."""
        return _shifted(box, dim, -n_local) if box[dim][0] >= before + n_local else box

    shape = list(plan.window_shape)
    shape[dim] = before + after
    receives = tuple(_mapped(message, target=behind_before) for message in plan.receives)
    forward = replace(plan, window_shape=tuple(shape), receives=receives, copies=(), gaps=())

    is_long = n_local > 2 * reach
    head, tail = (reach, reach) if is_long else (n_local, 0)

    def behind_head(box: Box) -> Box:
        """Take the rows out of the shard that nobody can want."""
        return _shifted(box, dim, head + tail - n_local) if box[dim][0] >= head else box

    edges = list(plan.local_shape)
    edges[dim] = head + tail
    sends = tuple(_mapped(message, source=behind_head) for message in plan.sends)
    backward = replace(forward, local_shape=tuple(edges), sends=sends)
    return Halo(dim, before, after, (head, tail), forward, backward, window.group, window.axis)


def _same(box: Box) -> Box:
    return box


def _mapped(message: Message, *, source: Callable[[Box], Box] = _same, target: Callable[[Box], Box] = _same) -> Message:
    pieces = tuple(Piece(source(piece.source), target(piece.target)) for piece in message.pieces)
    return Message(message.peer, pieces, message.numel)


def _shifted(box: Box, dim: int, offset: int) -> Box:
    start, stop = box[dim]
    return (*box[:dim], (start + offset, stop + offset), *box[dim + 1 :])


on_new_world(halo_of.cache_clear)
