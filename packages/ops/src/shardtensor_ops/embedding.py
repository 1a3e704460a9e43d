"""Rows picked by index: embedding and index_select."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import torch

from shardtensor import ShardTensor, ShardTensorSpec
from shardtensor.extending import (
    Call,
    Plan,
    axis_plan,
    make_spec,
    register_function_handler,
    register_rule,
    transition,
    without_partial,
    wrap,
)

from ._kept_rows import RowRange
from ._naming import dtype_of, shape_of
from ._relabel import only_meta, relaid
from ._torch_private import below_torch_function, requires_grad, run_below_torch_function

aten = torch.ops.aten


@register_rule("aten.embedding")
def plan_embedding(call: Call) -> Plan | None:
    """Look rows of a table up. The ids may be sharded; a table whose rows are is split along its columns instead."""
    _, ids = call.specs
    places: list[Hashable] = [("id", dim) for dim in range(ids.ndim)]
    return axis_plan(call, [("row", "column"), places], [[*places, "column"]], whole={"row"}, linear="each")


@register_rule("aten.embedding_dense_backward")
def plan_embedding_backward(call: Call) -> Plan | None:
    """Sum the gradients of every use of a row: pending where the ids are sharded."""
    _, ids = call.specs
    places: list[Hashable] = [("id", dim) for dim in range(ids.ndim)]
    # Scaled by how often a row is used, a part of the uses says nothing.
    reduce_op = None if call.argument("scale_grad_by_freq") else "sum"
    return axis_plan(call, [[*places, "column"], places], [("row", "column")], reduce_op=reduce_op, linear="each")


@register_rule("aten.index_select")
def plan_index_select(call: Call) -> Plan | None:
    """Pick rows of a dim.

    Of a sharded dim each rank gives the rows that it has and zeros for the others, a sum that is pending, where that is
    little; else the shards move to another dim.
    """
    spec, index = call.specs
    meta = only_meta(call)
    if spec.ndim == 0:
        return None
    dim = call.argument("dim") % spec.ndim
    split = spec.grid.get(dim)
    is_number = dtype_of(spec) != torch.bool
    is_less = split is not None and math.prod(meta.shape) * len(split.sizes) <= math.prod(shape_of(spec))
    if split is not None and split.n_repeats == 1 and is_number and is_less and not spec.has_partial:
        grid = {other: place for other, place in spec.grid.items() if other != dim}
        result = make_spec(spec.mesh, meta, grid, dict.fromkeys(split.axes, "sum"))
        return Plan((spec, index.replicated()), result, _owned_rows(spec, dim))
    names: list[Hashable] = list(range(spec.ndim))
    picked: list[Hashable] = ["picked"] if index.ndim else []
    result_names = [("picked" if picked else None) if name == dim else name for name in names]
    return axis_plan(call, [names, picked], [result_names], whole={dim}, linear="each")


def _own_range(spec: ShardTensorSpec, dim: int) -> RowRange:
    assert spec.coordinate is not None
    split = spec.grid.get(dim)
    first, last = (0, shape_of(spec)[dim]) if split is None else split.rows(spec.coordinate, spec.mesh.shape)
    return RowRange(first, last, 1)


def _owned_rows(spec: ShardTensorSpec, dim: int) -> Callable[..., torch.Tensor]:
    first, last, _ = _own_range(spec, dim)

    def pick(local: torch.Tensor, _: int, index: torch.Tensor) -> torch.Tensor:
        n_picked = index.numel()
        shape = [n_picked if other == dim else extent for other, extent in enumerate(local.shape)]
        if first == last:
            return local.new_zeros(shape)
        index = index.reshape(-1)
        is_here = (index >= first) & (index < last)
        rows = local.index_select(dim, (index - first).clamp(0, last - first - 1))
        mask = is_here.view([-1 if other == dim else 1 for other in range(local.ndim)])
        return torch.where(mask, rows, torch.zeros_like(rows))

    return pick


class _IndexSelect(torch.autograd.Function):
    """Pick rows. Backward: add the gradients to the rows that were picked, in the layout of the tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardTensor, dim: int, index: ShardTensor) -> Any:
        ctx.dim, ctx.home = dim, without_partial(tensor._spec)
        ctx.save_for_backward(index)
        with below_torch_function():
            return aten.index_select.default(tensor, dim, index)

    @staticmethod
    def backward(ctx: Any, gradient: ShardTensor) -> Any:
        (index,) = ctx.saved_tensors
        return _IndexAdd.apply(gradient, ctx.dim, index, ctx.home), None, None


class _IndexAdd(torch.autograd.Function):
    """Add rows to zeros of a layout. Backward: pick them again."""

    @staticmethod
    def forward(ctx: Any, rows: ShardTensor, dim: int, index: ShardTensor, home: ShardTensorSpec) -> Any:
        ctx.dim = dim
        ctx.save_for_backward(index)
        gradient = rows._spec
        grid = {other: split for other, split in home.grid.items() if other != dim}
        target = relaid(without_partial(gradient), grid)
        local = transition(rows._local_tensor, gradient, target)
        places = transition(index._local_tensor, index._spec, index._spec.replicated()).reshape(-1)
        first, last, _ = _own_range(home, dim)
        meta = home.tensor_meta
        assert meta is not None
        home = home.with_meta(meta._replace(dtype=local.dtype))
        result = local.new_zeros(home.local_shape)
        if last > first and places.numel():
            is_here = (places >= first) & (places < last)
            mask = is_here.view([-1 if other == dim else 1 for other in range(local.ndim)])
            local = torch.where(mask, local, torch.zeros_like(local))
            result = result.index_add(dim, (places - first).clamp(0, last - first - 1), local)
        return wrap(result, home)

    @staticmethod
    def backward(ctx: Any, gradient: ShardTensor) -> Any:
        (index,) = ctx.saved_tensors
        return _IndexSelect.apply(gradient, ctx.dim, index), None, None, None


def index_select(func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Serve ``index_select``."""
    tensor, dim, index = _arguments(*args, **kwargs)
    is_plain = not requires_grad(tensor) or not torch.is_grad_enabled()
    if is_plain or type(dim) is not int or tensor._spec.ndim == 0 or not -tensor._spec.ndim <= dim < tensor._spec.ndim:
        return run_below_torch_function(func, types, args, kwargs)
    dim %= tensor._spec.ndim
    if any(place.n_repeats != 1 for place in tensor._spec.grid.values()):
        return run_below_torch_function(func, types, args, kwargs)
    return _IndexSelect.apply(tensor, dim, index)


def _arguments(tensor: Any = None, dim: Any = None, index: Any = None, *, input: Any = None) -> tuple[Any, Any, Any]:
    return (input if tensor is None else tensor), dim, index


register_function_handler(torch.index_select, index_select)
register_function_handler(torch.Tensor.index_select, index_select)
