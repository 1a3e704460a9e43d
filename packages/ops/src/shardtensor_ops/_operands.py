"""Operands of handlers that take plain tensors as they are."""

from __future__ import annotations

from typing import Any

import torch

from shardtensor import ShardTensor, TensorPromotionMode
from shardtensor.extending import promote

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})
_SILENT = TensorPromotionMode.SILENT


def takes_as_they_are(*operands: Any) -> bool:
    """Whether all are ShardTensors, plain tensors that may be mixed in without a word, or None."""
    for operand in operands:
        kind = type(operand)
        if kind is not ShardTensor and (kind not in _PLAIN or ShardTensor.get_promotion_mode() is not _SILENT):
            return False
    return True


def promoted(*operands: Any) -> tuple[Any, ...]:
    """Promote the plain tensors and DTensors among operands of which one is a ShardTensor."""
    mesh = next(operand._spec.mesh for operand in operands if isinstance(operand, ShardTensor))
    return tuple(
        promote(operand, mesh)
        if isinstance(operand, torch.Tensor) and not isinstance(operand, ShardTensor)
        else operand
        for operand in operands
    )
