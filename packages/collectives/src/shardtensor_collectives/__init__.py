"""Uneven collectives over a process group, with NVTX ranges and a communication trace."""

from __future__ import annotations

__all__: list[str] = []
