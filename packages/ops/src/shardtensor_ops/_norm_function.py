"""Normalisation with the statistics merged over ranks, as one autograd function for every kind of norm.

A `Norm` knows how one kind of norm runs on this rank's shard for one layout: forward, backward, and where the
gradients of weight and bias are still contributions. Weights may be plain tensors, which get plain and complete
gradients.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch import Tensor

from shardtensor import ShardTensor, ShardTensorSpec
from shardtensor.extending import TensorMeta, contiguous_meta, direct_apply, make_spec, promote, transition, wrap
from shardtensor_spec import DimSplit, chunk_sizes, on_new_world

from ._linear import brought_to
from ._operands import promoted, takes_as_they_are
from ._rank_merge import RankMerge
from ._torch_private import requires_grad

Saved = tuple[Tensor, ...]


class Norm(Protocol):
    """One kind of norm on one layout.

    Attributes
    ----------
    operator : str
        Name in traces.
    operand : ShardTensorSpec
        The layout that the operand is brought to.
    result : ShardTensorSpec
        The layout of the result.
    parameter : ShardTensorSpec or None
        The layout that weight and bias are brought to; None if they are whole on every rank.
    parameter_sum : RankMerge
        The ranks over which the gradients of weight and bias are contributions.
    """

    operator: str
    operand: ShardTensorSpec
    result: ShardTensorSpec
    parameter: ShardTensorSpec | None
    parameter_sum: RankMerge

    def __hash__(self) -> int: ...

    def forward(self, local: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Saved]:
        """Return the local result and the statistics to save."""

    def backward(
        self,
        gradient: Tensor,
        local: Tensor,
        weight: Tensor | None,
        saved: Saved,
        eps: float,
        needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the local gradients of operand, weight and bias."""

    def backward_by_operators(self, gradient: Any, operand: Any, weight: Any, eps: float) -> tuple[Any, Any, Any]:
        """Return the gradients of operand, weight and bias by operators that have gradients themselves."""


def normalize(norm: Norm, operand: Any, weight: Any, bias: Any, eps: float) -> Any:
    """Apply a norm to a ShardTensor, with gradients.

    Parameters
    ----------
    norm : Norm
        Made for the operand's layout.
    operand : ShardTensor
        The operand.
    weight, bias : Tensor or ShardTensor, optional
        Plain tensors, whole on every rank, or ShardTensors.
    eps : float
        Added to the variance.
    """
    if operand._spec is not norm.operand:
        operand = brought_to(operand, norm.operand)
    if weight is not None:
        weight = _parameter(norm, weight)
    if bias is not None:
        bias = _parameter(norm, bias)
    if torch.is_grad_enabled() and requires_grad(operand, weight, bias):
        return _apply(operand, weight, bias, norm, eps)
    return wrap(norm.forward(operand._local_tensor, _local(weight), _local(bias), eps)[0], norm.result)


def _parameter(norm: Norm, parameter: Any) -> Any:
    if type(parameter) is not ShardTensor:
        if norm.parameter is None:
            return parameter
        parameter = promote(parameter, norm.operand.mesh)
    return brought_to(parameter, norm.parameter or parameter._spec.replicated())


def _local(parameter: Any) -> Tensor | None:
    return parameter._local_tensor if type(parameter) is ShardTensor else parameter  # type: ignore[no-any-return]


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operand: Any, weight: Any, bias: Any, norm: Norm, eps: float) -> Any:
        local, saved = norm.forward(operand._local_tensor, _local(weight), _local(bias), eps)
        ctx.save_for_backward(operand, weight, *saved)
        ctx.norm, ctx.eps, ctx.bias_kind = norm, eps, type(bias)
        return wrap(local, norm.result)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        norm: Norm = ctx.norm
        operand, weight, *saved = ctx.saved_tensors
        if gradient is None:
            return None, None, None, None, None
        if type(gradient) is not ShardTensor:
            gradient = promote(gradient, norm.operand.mesh)
        if torch.is_grad_enabled():
            gradients = norm.backward_by_operators(gradient, operand, weight, ctx.eps)
            needed = [g if needs else None for g, needs in zip(gradients, ctx.needs_input_grad, strict=False)]
            kinds = (ShardTensor, type(weight), ctx.bias_kind)
            return *(_of_kind(g, kind) for g, kind in zip(needed, kinds, strict=True)), None, None
        local = transition(gradient._local_tensor, gradient._spec, norm.result)
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2])
        of_operand, of_weight, of_bias = norm.backward(
            local, operand._local_tensor, _local(weight), tuple(saved), ctx.eps, needs
        )
        wrapped = None if of_operand is None else wrap(of_operand, _with_dtype(norm.operand, of_operand))
        of_weight, of_bias = _finished(norm, of_weight, type(weight), of_bias, ctx.bias_kind)
        return wrapped, of_weight, of_bias, None, None


_apply = direct_apply(_Normalize)


def _finished(norm: Norm, of_weight: Any, weight_kind: type, of_bias: Any, bias_kind: type) -> tuple[Any, Any]:
    """Give plain parameters their complete gradients, in one collective, and wrap those of ShardTensors."""
    plain = [
        gradient
        for gradient, kind in ((of_weight, weight_kind), (of_bias, bias_kind))
        if gradient is not None and kind is not ShardTensor
    ]
    if plain and norm.parameter_sum.axes:
        if len(plain) == 2 and plain[0].dtype == plain[1].dtype:
            of_weight, of_bias = norm.parameter_sum.all_reduce(torch.stack(plain)).unbind(0)
            return of_weight, of_bias
        if of_weight is not None and weight_kind is not ShardTensor:
            of_weight = norm.parameter_sum.all_reduce(of_weight)
        if of_bias is not None and bias_kind is not ShardTensor:
            of_bias = norm.parameter_sum.all_reduce(of_bias)
    if of_weight is not None and weight_kind is ShardTensor:
        of_weight = _contribution(norm, of_weight)
    if of_bias is not None and bias_kind is ShardTensor:
        of_bias = _contribution(norm, of_bias)
    return of_weight, of_bias


def _contribution(norm: Norm, local: Tensor) -> Any:
    try:
        layout = _contribution_layout(norm, local.shape, local.dtype)
    except TypeError:  # a symbolic size cannot be hashed
        layout = _contribution_layout.__wrapped__(norm, local.shape, local.dtype)
    return wrap(local, layout)


@functools.lru_cache(maxsize=1024)
def _contribution_layout(norm: Any, shape: torch.Size, dtype: torch.dtype) -> ShardTensorSpec:
    pending = {axis: "sum" for axis in norm.parameter_sum.axes}
    if norm.parameter is None:
        return make_spec(norm.operand.mesh, contiguous_meta(shape, dtype), {}, pending)
    assert norm.parameter.tensor_meta is not None
    meta = contiguous_meta(norm.parameter.tensor_meta.shape, dtype)
    return make_spec(norm.operand.mesh, meta, norm.parameter.grid, pending)


on_new_world(_contribution_layout.cache_clear)


def _of_kind(gradient: Any, kind: type) -> Any:
    if gradient is None or kind is ShardTensor or type(gradient) is not ShardTensor:
        return gradient
    return gradient.full_tensor()


def _with_dtype(spec: ShardTensorSpec, local: Tensor) -> ShardTensorSpec:
    """Layout of a contiguous gradient (or one in the operand's own memory format)."""
    meta = spec.tensor_meta
    assert meta is not None
    return spec if meta.dtype is local.dtype else spec.with_meta(meta._replace(dtype=local.dtype))


def as_operands(operand: Any, *parameters: Any) -> tuple[Any, ...]:
    """Promote what cannot be taken as it is: DTensors, a plain operand, plain parameters where mixing is not silent."""
    if type(operand) is ShardTensor and takes_as_they_are(*parameters):
        return (operand, *parameters)
    return promoted(operand, *parameters)


def settled_layout(spec: ShardTensorSpec, whole: dict[int, int]) -> ShardTensorSpec:
    """Layout to bring an operand to: pending sums done, folds undone, dims in ``whole`` cut at multiples."""
    assert spec.tensor_meta is not None
    shape = spec.tensor_meta.shape
    grid = {}
    for dim, split in spec.grid.items():
        sizes = split.sizes
        if split.n_repeats != 1:
            sizes = chunk_sizes(shape[dim], len(sizes))
        step = whole.get(dim, 1)
        if any(size % step for size in sizes):
            sizes = tuple(step * n for n in chunk_sizes(shape[dim] // step, len(sizes)))
        grid[dim] = DimSplit(split.axes, sizes)
    return make_spec(spec.mesh, spec.tensor_meta, grid)


def merge_over(spec: ShardTensorSpec, dims: tuple[int, ...], operator: str) -> RankMerge:
    """The ranks that hold parts of some dims; axes of one rank are left out."""
    axes = sorted(axis for dim in dims if dim in spec.grid for axis in spec.grid[dim].axes)
    return RankMerge(spec.mesh, tuple(axis for axis in axes if spec.mesh.shape[axis] > 1), operator)


def metas_like(spec: ShardTensorSpec) -> TensorMeta:
    """Contiguous meta data of a layout's tensor."""
    assert spec.tensor_meta is not None
    return contiguous_meta(spec.tensor_meta.shape, spec.tensor_meta.dtype)
