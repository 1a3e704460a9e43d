"""Linear operators on shards and their adjoints: each is the other's backward, so that gradients of any order work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardtensor.extending import Redistribute, without_partial, wrap
from shardtensor_collectives import operator_range
from shardtensor_spec import ShardTensorSpec

LocalMap = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class LinearOperator:
    """A linear map from one layout to another.

    Attributes
    ----------
    name : str
        For traces.
    source, result : ShardTensorSpec
        Layouts of what goes in and comes out.
    forward : callable
        Local tensor in ``source`` -> local tensor in ``result``, communication included.
    adjoint : callable
        Local tensor in ``result`` (its pending sums done) -> local tensor in ``source``. It may return what it got.
    derivative : LinearOperator, optional
        Where ``forward`` adds a constant, the same operator without it.
    """

    name: str
    source: ShardTensorSpec
    result: ShardTensorSpec
    forward: LocalMap
    adjoint: LocalMap
    derivative: LinearOperator | None = None

    def __call__(self, tensor: Any) -> Any:
        """Apply to a ShardTensor, with gradients."""
        return _Forward.apply(brought_to(tensor, self.source), self)


def brought_to(tensor: Any, spec: ShardTensorSpec) -> Any:
    """Bring a ShardTensor into the shards of a layout, whatever its strides and dtype; differentiable."""
    found = tensor._spec
    if found is spec or (found.placements == spec.placements and found.grid == spec.grid):
        return tensor
    return Redistribute.apply(tensor, spec)


def in_layout(local: torch.Tensor, spec: ShardTensorSpec) -> Any:
    """Make a ShardTensor of a local result; its strides become those that the layout promises."""
    meta = spec.tensor_meta
    assert meta is not None
    if local.dtype != meta.dtype:
        spec = spec.with_meta(meta._replace(dtype=local.dtype))
    memory_format = memory_format_of(meta.stride, meta.shape)
    if memory_format is not None:
        local = local.contiguous(memory_format=memory_format)
    return wrap(local, spec)


def memory_format_of(stride: Any, shape: Any) -> torch.memory_format | None:
    """Memory format that strides follow, None if neither of the two that operators make."""
    if all(n == 1 or s == c for n, s, c in zip(shape, stride, _dense_stride(shape, range(len(shape))), strict=True)):
        return torch.contiguous_format
    n_dims = len(shape)
    if n_dims in (4, 5):
        order = (0, *range(2, n_dims), 1)
        dense = _dense_stride(shape, order)
        if all(n == 1 or s == c for n, s, c in zip(shape, stride, dense, strict=True)):
            return torch.channels_last if n_dims == 4 else torch.channels_last_3d
    return None


def _dense_stride(shape: Any, order: Any) -> list[int]:
    """Strides of a tensor without holes whose dims lie in memory in this order, the outermost first."""
    stride = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        stride[dim] = step
        step *= max(int(shape[dim]), 1)
    return stride


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, operator: LinearOperator) -> Any:
        ctx.operator = operator.derivative or operator
        with operator_range(operator.name):
            return in_layout(operator.forward(tensor._local_tensor), operator.result)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        operator = ctx.operator
        return _Adjoint.apply(brought_to(gradient, without_partial(operator.result)), operator), None


class _Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Any, operator: LinearOperator) -> Any:
        ctx.operator = operator
        local = gradient._local_tensor
        with operator_range(f"{operator.name} backward"):
            result = operator.adjoint(local)
        return in_layout(result.detach() if result is local else result, without_partial(operator.source))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        operator = ctx.operator
        result = _Forward.apply(brought_to(gradient, operator.source), operator)
        return brought_to(result, without_partial(operator.result)), None
