"""NVTX ranges in the domain ``domain_parallel``."""

from __future__ import annotations

from typing import Any

import nvtx

DOMAIN = "domain_parallel"

_domain: Any = nvtx.get_domain(DOMAIN)

#: Whether a tool (nsys, an injected library) takes the ranges. NVTX decides that once per process.
attached: bool = type(_domain).__name__ == "Domain"


def push(name: str, axis: str | None, n_bytes: int) -> None:
    """Open a range on this thread: its message, its category (the mesh axis) and its payload (bytes)."""
    _domain.push_range(_domain.get_event_attributes(message=name, category=axis, payload=n_bytes))


def pop() -> None:
    """Close the innermost range of this thread."""
    _domain.pop_range()
