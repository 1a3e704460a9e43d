"""``tensor.data = other``: the shards must be replaced too, not only what torch's core knows of the wrapper."""

from __future__ import annotations

from typing import Any

import torch

from shardtensor_spec import LayoutMismatchError, UnsupportedShardingError

from . import _tensor
from ._registry import register_function_handler


def _set_data(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let a ShardTensor hold the shards of another one, in the layout of that."""
    tensor, value = args
    if not isinstance(value, _tensor.ShardTensor):
        raise TypeError(f"the data of a ShardTensor must be a ShardTensor, not a {type(value).__name__}")
    before, after = tensor._spec, value._spec
    inputs = [before.describe(), after.describe()]
    if tensor.shape != value.shape:
        raise LayoutMismatchError(
            f"the data of a ShardTensor of shape {tuple(tensor.shape)} cannot become one of {tuple(value.shape)}",
            where="ShardTensor.data",
            inputs=inputs,
            advice="make a new tensor",
        )
    if (tensor.dtype, tensor.device, tensor.stride()) != (value.dtype, value.device, value.stride()):
        raise UnsupportedShardingError(
            "the data of a ShardTensor can only be replaced by one of the same dtype, device and strides, not "
            f"{tensor.dtype} on {tensor.device} by {value.dtype} on {value.device}",
            where="ShardTensor.data",
            inputs=inputs,
            advice="use the tensor that to() returns, or torch.utils.swap_tensors",
        )
    tensor._local_tensor, tensor._spec = value._local_tensor, after


register_function_handler(torch.Tensor.data.__set__, _set_data, promote=False)  # type: ignore[attr-defined]
