"""Into and out of ShardTensors, and from layout to layout, as autograd sees it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement

from shardtensor_collectives import operator_range
from shardtensor_spec import LayoutMismatchError, ShardTensorSpec, chunk_grid, normalized_placements

from . import _debug, _tensor
from ._layout import without_partial
from ._torch_private import TensorMeta, make_wrapper
from ._transition import transition

wrap: Callable[[torch.Tensor, ShardTensorSpec], Any] = functools.partial(
    make_wrapper, _tensor.ShardTensor, requires_grad=False
)
"""Make a ShardTensor of a local tensor and its layout, outside of autograd.

No function of Python: it is called once per operator, and a frame costs a tenth of the cheapest one.
"""


class FromLocal(torch.autograd.Function):
    """Local -> sharded. Backward: the gradient in the same layout, pending reductions done, as a plain local tensor."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: ShardTensorSpec) -> Any:
        ctx.spec = spec
        return wrap(local.detach(), spec)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[torch.Tensor, None]:
        home = without_partial(ctx.spec)
        return ToLocal.apply(Redistribute.apply(gradient, home), None), None


class ToLocal(torch.autograd.Function):
    """Sharded -> local. Backward: the local gradients are shards of a gradient in the given layout."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, gradient_spec: ShardTensorSpec | None) -> torch.Tensor:
        ctx.gradient_spec = without_partial(tensor._spec) if gradient_spec is None else gradient_spec
        local: torch.Tensor = tensor._local_tensor
        return local.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, None]:
        spec = _of_dtype(ctx.gradient_spec, gradient.dtype)
        return FromLocal.apply(gradient, spec), None


class Redistribute(torch.autograd.Function):
    """Layout -> layout. Backward: the gradient in the layout that the input had, pending reductions done."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, target: ShardTensorSpec) -> Any:
        ctx.home = without_partial(tensor._spec)
        return redistribute_below_autograd(tensor, target)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
        return Redistribute.apply(gradient, ctx.home), None


def redistribute_below_autograd(tensor: Any, target: ShardTensorSpec) -> Any:
    """Bring a ShardTensor to a layout, keeping its own stride order and dtype."""
    source = tensor._spec
    if _debug.enabled:
        _debug.check_agreement("redistribute", (tensor, target), source.mesh)
    target = target.with_meta(source.tensor_meta)
    with operator_range("redistribute"):
        local = transition(tensor._local_tensor, source, target)
    if local is tensor._local_tensor:
        local = local.detach()
    elif local.numel() < tensor._local_tensor.numel() and local._is_view():
        # A slice of replicas would keep the whole tensor in memory.
        local = local.clone()
    return wrap(local, target)


def spec_from_dtensor(dtensor: DTensor) -> ShardTensorSpec:
    """Layout of a DTensor: its shards are ``torch.chunk``'s."""
    spec = dtensor._spec
    meta = TensorMeta(dtensor.shape, dtensor.stride(), dtensor.dtype)
    grid = chunk_grid(tuple(meta.shape), spec.mesh.shape, spec.placements)
    return ShardTensorSpec.of(spec.mesh, spec.placements, meta, grid)


class FromDTensor(torch.autograd.Function):
    """DTensor -> ShardTensor of the same shards."""

    @staticmethod
    def forward(ctx: Any, dtensor: Any) -> Any:
        ctx.spec = spec_from_dtensor(dtensor)
        return wrap(dtensor._local_tensor.detach(), ctx.spec)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return ToDTensor.apply(Redistribute.apply(gradient, without_partial(ctx.spec)))


class ToDTensor(torch.autograd.Function):
    """ShardTensor -> DTensor. The layout must be ``torch.chunk``'s already."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        spec = tensor._spec
        ctx.spec = spec
        meta = spec.tensor_meta
        return DTensor.from_local(
            tensor._local_tensor.detach(),
            spec.mesh,
            spec.placements,
            run_check=False,
            shape=meta.shape,
            stride=meta.stride,
        )

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return Redistribute.apply(FromDTensor.apply(gradient), without_partial(ctx.spec))


def chunked_spec(spec: ShardTensorSpec, placements: Sequence[Placement] | None = None) -> ShardTensorSpec:
    """Layout of the same tensor with other placements, every dim split as ``torch.chunk`` does."""
    assert spec.tensor_meta is not None
    wanted = spec.placements if placements is None else normalized_placements(placements, spec.ndim, spec.mesh.ndim)
    grid = chunk_grid(tuple(spec.tensor_meta.shape), spec.mesh.shape, wanted)
    return ShardTensorSpec.of(spec.mesh, wanted, spec.tensor_meta, grid)


def respelled(spec: ShardTensorSpec, placements: Sequence[Placement]) -> ShardTensorSpec:
    """Layout of the same tensor with other placements: a dim that stays sharded over the same axes keeps its sizes."""
    chunked = chunked_spec(spec, placements)
    grid = {
        dim: spec.grid[dim] if dim in spec.grid and spec.grid[dim].axes == split.axes else split
        for dim, split in chunked.grid.items()
    }
    return ShardTensorSpec.of(spec.mesh, chunked.placements, spec.tensor_meta, grid)


def gradient_spec(spec: ShardTensorSpec, placements: Sequence[Placement]) -> ShardTensorSpec:
    """Layout of what the gradients of the local tensors make up, for ``grad_placements``.

    Raises
    ------
    LayoutMismatchError
        If a shard of the gradient would have another shape than the local tensor, on whatever rank.
    """
    gradient = respelled(spec, placements)
    if gradient.shapes() != spec.shapes():
        raise LayoutMismatchError(
            "the gradient of a local tensor has its shape, so it is no shard of a gradient with these grad_placements",
            where="ShardTensor.to_local",
            inputs=[f"tensor    {spec.describe()}", f"gradient  {gradient.describe()}"],
            advice="redistribute the tensor before",
        )
    return gradient


def _of_dtype(spec: ShardTensorSpec, dtype: torch.dtype) -> ShardTensorSpec:
    meta = spec.tensor_meta
    assert meta is not None
    return spec if meta.dtype == dtype else spec.with_meta(meta._replace(dtype=dtype))
