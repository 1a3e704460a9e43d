"""Who communicated, what, how much and for how long: ``comm_trace`` and the ranges that feed it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType

from shardtensor_collectives import _nvtx

#: Whether anybody listens. Collectives read this first, so that an unobserved one costs one attribute look-up.
observed: bool = _nvtx.attached

_lock = threading.Lock()
_traces: tuple[comm_trace, ...] = ()


class _CurrentOperator(threading.local):
    name: str | None = None


_current = _CurrentOperator()


@dataclass
class CommEvent:
    """One collective, as this rank saw it.

    Attributes
    ----------
    operator : str or None
        The operator that caused it, as named by :class:`operator_range`; ``" backward"`` is appended for the
        adjoint collective that autograd runs. ``None`` outside any operator.
    collective : str
        Name of the function of this package.
    axis : str or None
        The mesh axis.
    bytes_sent, bytes_received : int
        Payload that leaves this rank (once per receiver) and that arrives here from others. An all-reduce
        counts its tensor once in each direction, whatever the algorithm.
    seconds : float
        Host time inside the call and inside ``Pending.wait``; compute in between is not counted. On CUDA the
        device may still be busy.
    """

    operator: str | None
    collective: str
    axis: str | None
    bytes_sent: int
    bytes_received: int
    seconds: float = 0.0


@dataclass(frozen=True)
class Summary:
    """Sums over the events of one operator and collective."""

    operator: str | None
    collective: str
    axis: str | None
    n_calls: int
    bytes_sent: int
    bytes_received: int
    seconds: float


class comm_trace:
    """Collect a :class:`CommEvent` for every collective of this process, on all threads.

    Attributes
    ----------
    events : list of CommEvent
        In the order in which the collectives were issued.

    Notes
    -----
    Traces nest; each sees everything that happens while it is open. A collective over a group of one rank issues
    nothing and makes no event. Collectives inside a compiled region (``torch.compile``) belong to its graph and make
    no event either.

    Examples
    --------
    >>> with comm_trace() as trace:
    ...     pass
    >>> trace.events
    []
    """

    def __init__(self) -> None:
        self.events: list[CommEvent] = []

    def __enter__(self) -> comm_trace:
        global _traces, observed
        with _lock:
            _traces = (*_traces, self)
            observed = True
        return self

    def __exit__(self, *_: object) -> None:
        global _traces, observed
        with _lock:
            _traces = tuple(trace for trace in _traces if trace is not self)
            observed = bool(_traces) or _nvtx.attached

    def __iter__(self) -> Iterator[CommEvent]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that left this rank."""
        return sum(event.bytes_sent for event in self.events)

    @property
    def bytes_received(self) -> int:
        """Payload bytes that arrived on this rank."""
        return sum(event.bytes_received for event in self.events)

    def by_operator(self) -> dict[str | None, Summary]:
        """Sums per operator; ``collective`` and ``axis`` list all that it used, joined by ``+``."""
        groups: dict[str | None, list[CommEvent]] = {}
        for event in self.events:
            groups.setdefault(event.operator, []).append(event)
        return {operator: _summary(operator, events) for operator, events in groups.items()}

    def by_collective(self) -> dict[tuple[str | None, str, str | None], Summary]:
        """Sums per operator, collective and mesh axis."""
        groups: dict[tuple[str | None, str, str | None], list[CommEvent]] = {}
        for event in self.events:
            groups.setdefault((event.operator, event.collective, event.axis), []).append(event)
        return {key: _summary(key[0], events) for key, events in groups.items()}

    def table(self) -> str:
        """Plain text, one line per operator, collective and axis, the largest payload first."""
        header = ("operator", "collective", "axis", "calls", "sent", "received", "ms")
        summaries = sorted(self.by_collective().values(), key=lambda s: -(s.bytes_sent + s.bytes_received))
        rows = [
            (
                s.operator or "-",
                s.collective,
                s.axis or "-",
                str(s.n_calls),
                format_bytes(s.bytes_sent),
                format_bytes(s.bytes_received),
                f"{1e3 * s.seconds:.2f}",
            )
            for s in summaries
        ]
        return align_columns([header, *rows], right=range(3, 7))


class operator_range:
    """Attribute the collectives inside to an operator, and open its NVTX range.

    Parameters
    ----------
    name : str
        For example ``"aten.convolution"``. The innermost range of the calling thread counts.

    Examples
    --------
    >>> with operator_range("aten.convolution"):
    ...     current_operator()
    'aten.convolution'
    """

    __slots__ = ("_name", "_outer")

    def __init__(self, name: str | None) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._outer = _current.name
        _current.name = self._name
        if _nvtx.attached:
            _nvtx.push(self._name or "(no operator)", None, 0)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.name = self._outer
        if _nvtx.attached:
            _nvtx.pop()


def current_operator() -> str | None:
    """Name of the innermost :class:`operator_range` on this thread."""
    return _current.name


class Span:
    """The observed part of one collective. May be entered again when its handle is waited for.

    Made only while somebody listens; see ``observed``.
    """

    __slots__ = ("_axis", "_event", "_label", "_n_bytes", "_start")

    def __init__(self, collective: str, axis: str | None, bytes_sent: int, bytes_received: int) -> None:
        self._label, self._axis, self._n_bytes = collective, axis, bytes_sent + bytes_received
        self._event = CommEvent(_current.name, collective, axis, bytes_sent, bytes_received)
        for trace in _traces:
            trace.events.append(self._event)

    def __enter__(self) -> None:
        if _nvtx.attached:
            _nvtx.push(self._label, self._axis, self._n_bytes)
        self._start = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._event.seconds += time.perf_counter() - self._start
        if _nvtx.attached:
            _nvtx.pop()
        self._label = f"{self._event.collective}.wait"  # what a second entry is


def format_bytes(n_bytes: int) -> str:
    """Bytes with a binary unit, three significant digits.

    Examples
    --------
    >>> format_bytes(0), format_bytes(1536), format_bytes(64 * 2**20)
    ('0 B', '1.5 KiB', '64 MiB')
    """
    value, units = float(n_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.3g} {units[0]}"


def align_columns(rows: Iterable[tuple[str, ...]], right: Iterable[int] = ()) -> str:
    """Lay rows out as a plain text table; the first is the header.

    Examples
    --------
    >>> print(align_columns([("a", "n"), ("bcd", "10")], right=[1]))
    a     n
    bcd  10
    """
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    to_right = set(right)
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in to_right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _summary(operator: str | None, events: list[CommEvent]) -> Summary:
    return Summary(
        operator=operator,
        collective="+".join(sorted({event.collective for event in events})),
        axis="+".join(sorted({event.axis for event in events if event.axis is not None})) or None,
        n_calls=len(events),
        bytes_sent=sum(event.bytes_sent for event in events),
        bytes_received=sum(event.bytes_received for event in events),
        seconds=sum(event.seconds for event in events),
    )
