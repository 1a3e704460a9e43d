"""The tensors among the arguments of an operator: found, replaced, and told apart by what a plan may depend on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardtensor_spec import LayoutMismatchError, ShardTensorSpec

from . import _tensor
from ._layout import meta_of, replicated_spec


def operands_of(value: Any) -> list[Any]:
    """Collect the tensors among arguments, those in lists included, in the order of `Call.specs`."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in operands_of(item)]
    return []


def map_operands(function: Callable[[Any], Any], value: Any) -> Any:
    """Replace every tensor among arguments, in the order of `operands_of`; all else stays."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {name: map_operands(function, item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_operands(function, item) for item in value)
    return value


def argument_at(op: Any, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Value of the argument at a position of the operator's schema."""
    return args[position] if position < len(args) else kwargs.get(op._schema.arguments[position].name)


def common_mesh(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the mesh of all ShardTensors among the arguments.

    Raises
    ------
    LayoutMismatchError
        If there are two.
    """
    sharded = [t for t in operands_of(args) + operands_of(kwargs) if isinstance(t, ShardTensor)]
    mesh = sharded[0]._spec.mesh
    for tensor in sharded[1:]:
        other = tensor._spec.mesh
        if other is not mesh and other != mesh:
            raise LayoutMismatchError(
                f"ShardTensors on two meshes meet: {mesh} and {other}",
                where=str(op),
                inputs=[tensor._spec.describe() for tensor in sharded],
                advice="gather one of them with full_tensor() and make it a ShardTensor on the other mesh",
            )
    return mesh


def local_of(value: Any) -> Any:
    """Shard of a ShardTensor, or the value itself."""
    return value._local_tensor if isinstance(value, ShardTensor) else value


def locals_of(value: Any) -> Any:
    """Replace ShardTensors by their shards, in lists too; anything else stays."""
    if isinstance(value, ShardTensor):
        return value._local_tensor
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
        return [locals_of(item) for item in value]
    return value


def spec_of(tensor: Any, mesh: Any) -> ShardTensorSpec:
    """Layout of a tensor; a plain one is taken as replicated."""
    return tensor._spec if isinstance(tensor, ShardTensor) else replicated_spec(tensor, mesh)


def key_of(value: Any) -> Any:
    """Return what a plan may depend on: the layout of a tensor, the type of a float, the value of anything else."""
    kind = type(value)
    if kind is ShardTensor:
        return value._spec
    if kind is float:
        return float
    if kind is bool:
        return (bool, value)
    if isinstance(value, ShardTensor):
        return value._spec
    if isinstance(value, torch.Tensor):
        return ("plain", meta_of(value))
    if isinstance(value, (list, tuple)):
        return tuple(map(key_of, value))
    return value


ShardTensor = _tensor.ShardTensor
