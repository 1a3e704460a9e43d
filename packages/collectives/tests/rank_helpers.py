"""Helpers that test bodies import, in the parent and on the ranks."""

from __future__ import annotations

import torch


def ramp(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """0, 1, 2, … in a given shape; equal on all ranks."""
    n = 1
    for extent in shape:
        n *= extent
    return torch.arange(n).reshape(shape).to(dtype)
