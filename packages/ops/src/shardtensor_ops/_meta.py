"""Global shapes, found by running functions on meta tensors: no memory, and torch's own errors for what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardtensor.extending import TensorMeta, meta_of
from shardtensor_spec import ShardTensorSpec

from ._torch_private import outside_modes


def meta_like(spec: ShardTensorSpec) -> torch.Tensor:
    """Meta tensor of the global shape, strides and dtype of a layout."""
    meta = spec.tensor_meta
    assert meta is not None
    with outside_modes():
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")


def metas_of_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[TensorMeta]:
    """Shapes, strides and dtypes of what a function returns for meta tensors.

    Raises
    ------
    Exception
        What torch raises for these arguments, on every rank alike.
    """
    with outside_modes(), torch.no_grad():
        try:
            result = function(*args, **kwargs)
        except RuntimeError:
            # The meta kernels say less than the real ones, which check their arguments before they read a value.
            function(*map(_without_memory, args), **kwargs)
            raise
    return [meta_of(tensor) for tensor in (result if isinstance(result, (list, tuple)) else [result])]


def meta_of_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> TensorMeta:
    """As `metas_of_call`, for a function with one result."""
    return metas_of_call(function, *args, **kwargs)[0]


def _without_memory(value: Any) -> Any:
    """Tensor of the shape of a meta tensor whose elements are all the same one."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.zeros((), dtype=value.dtype).expand(value.shape)
