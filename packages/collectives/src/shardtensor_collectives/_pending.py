"""Handles of collectives in flight, and the one place that starts a collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardtensor_collectives import _trace
from shardtensor_collectives._trace import Span, current_operator, operator_range


class Pending:
    """A collective in flight.

    Call :meth:`wait` exactly where the result is needed; it may be called again. Do not write to the input
    before.

    Examples
    --------
    >>> import torch
    >>> Pending.done(torch.ones(2)).wait()
    tensor([1., 1.])
    """

    __slots__ = ("_finish", "_keep", "_link", "_result", "_span", "_works")

    def __init__(self, works: Sequence[Any], finish: Callable[[], Tensor], keep: object = None) -> None:
        self._works = works
        self._finish: Callable[[], Tensor] | None = finish
        self._keep = keep  # send buffers, which the backend reads until the end
        self._span: Span | None = None
        self._link: Callable[[Tensor], Tensor] | None = None
        self._result: Tensor | None = None

    @classmethod
    def done(cls, result: Tensor) -> Pending:
        """Return a handle whose result is already there."""
        pending = cls((), lambda: result)
        pending._result = result
        return pending

    def wait(self) -> Tensor:
        """Wait for the result. On CUDA the current stream waits, not the host.

        Returns
        -------
        Tensor
            The result, with its gradient history.
        """
        if self._result is None:
            if self._span is None:
                self._result = self._complete()
            else:
                with self._span:
                    self._result = self._complete()
        return self._result

    def _complete(self) -> Tensor:
        for work in self._works:
            work.wait()
        assert self._finish is not None
        result = self._finish()
        if self._link is not None:
            with torch.enable_grad():  # as it was when the collective was issued
                result = self._link(result)
        self._works, self._finish, self._keep, self._link = (), None, None, None
        return result


class _Adjoint(torch.autograd.Function):
    """Gives a finished result the adjoint collective as its backward."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, result: list[Tensor], adjoint: Callable[[Tensor], Tensor | None]) -> Tensor:
        # The result comes in a list, so that autograd takes it for a fresh tensor and not for an input.
        ctx.adjoint = adjoint
        ctx.operator = current_operator()
        return result[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        if ctx.operator is None:
            return ctx.adjoint(grads[0]), None, None
        # Autograd may call from a thread of its own, where no operator is current.
        with operator_range(f"{ctx.operator} backward"):
            return ctx.adjoint(grads[0]), None, None


def launch(
    collective: str,
    axis: str | None,
    source: Tensor,
    post: Callable[[Tensor], Pending],
    traffic: Callable[[], tuple[int, int]],
    adjoint: Callable[[Tensor], Tensor | None],
    async_op: bool,
    is_silent: bool = False,
) -> Tensor | Pending:
    """Run a collective with its range, its event and its gradient.

    Parameters
    ----------
    collective, axis : str
        Names for traces.
    source : Tensor
        The input.
    post : callable
        Starts the communication, given the input without its gradient history.
    traffic : callable
        Elements sent and received; called only while somebody listens.
    adjoint : callable
        Gradient of the input, given that of the result.
    async_op : bool
        Whether to return the handle.
    is_silent : bool
        Whether all ranks know that nothing travels, so that there is nothing to report.

    Returns
    -------
    Tensor or Pending
        According to `async_op`.
    """
    needs_grad = source.requires_grad and torch.is_grad_enabled()
    data = source.detach() if needs_grad else source
    if data.is_conj() or data.is_neg():  # lazily conjugated or negated: the memory holds other values
        data = data.resolve_conj().resolve_neg()
    if is_silent or not _trace.observed:
        pending = post(data)
        if needs_grad:
            _link(pending, source, adjoint)
        return pending if async_op else pending.wait()
    n_sent, n_received = traffic()
    item = data.element_size()
    span = Span(collective, axis, n_sent * item, n_received * item)
    with span:
        pending = post(data)
        if needs_grad:
            _link(pending, source, adjoint)
        if not async_op:
            return pending.wait()
    pending._span = span
    return pending


def _link(pending: Pending, source: Tensor, adjoint: Callable[[Tensor], Tensor | None]) -> None:
    pending._link = lambda result: _Adjoint.apply(source, [result], adjoint)


def finished(result: Tensor, async_op: bool) -> Tensor | Pending:
    """Return a result that needs no waiting in the form that `async_op` asks for."""
    return Pending.done(result) if async_op else result
