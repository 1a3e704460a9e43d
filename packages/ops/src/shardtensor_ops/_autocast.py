"""``torch.autocast`` for functions that are served above the dispatcher, where torch would cast their operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._torch_private import autocast_is_on

__all__ = ["autocast_is_on", "in_autocast_dtype"]


def in_autocast_dtype(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function with its tensors in the low precision that autocast chose for matrix products, and autocast off.

    Parameters
    ----------
    function : callable
        Called as ``function(*args)``. What it calls sees the tensors' own dtypes only.
    *args
        Tensors of float32 or narrower are cast, which autograd records; everything else passes.
    """
    device_type = next(arg.device.type for arg in args if isinstance(arg, torch.Tensor))
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        args = tuple(_cast(arg, dtype) for arg in args)
    with torch.autocast(device_type, enabled=False):
        return function(*args)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype not in (torch.float64, dtype):
        return value.to(dtype)
    return value
