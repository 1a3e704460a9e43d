"""The largest or smallest along one dim, with its global position: rule, and the gradient of the values.

The gradient of the values goes to the rows that they came from: every rank writes those that it holds into zeros of
its own shape. torch's own formula makes zeros of global shape.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardtensor import ShardTensor, ShardTensorSpec
from shardtensor.extending import (
    Call,
    Plan,
    contiguous_meta,
    dispatch,
    make_spec,
    register_function_handler,
    transition,
    without_partial,
    wrap,
)
from shardtensor_spec import offsets_of

from ._arguments import below, bind, is_in_graph, sharded_like
from ._naming import shape_of
from ._rank_merge import RankMerge, from_order_key, order_identity, order_key
from ._reduced_dims import Reduction, check_not_empty, checked_dims, reduction_plan

aten = torch.ops.aten
_NOWHERE = 2**63 - 1


class LocalRows(NamedTuple):
    """Where the rows of this rank's shard are in a whole dim."""

    start: int
    n_local: int  # of one repeat
    n_global: int  # of one repeat

    @classmethod
    def of(cls, spec: ShardTensorSpec, dim: int) -> LocalRows:
        """Rows that this rank holds of a dim, sharded or not."""
        extent = shape_of(spec)[dim]
        split = spec.grid.get(dim)
        if split is None:
            return cls(0, extent, extent)
        assert spec.coordinate is not None
        index = split.shard_index(spec.coordinate, spec.mesh.shape)
        return cls(offsets_of(split.sizes)[index], split.sizes[index], sum(split.sizes))

    def to_global(self, rows: Tensor) -> Tensor:
        """Turn local row numbers into global ones."""
        if self.n_local == self.n_global:
            return rows
        repeats = torch.div(rows, max(self.n_local, 1), rounding_mode="floor")
        return rows + self.start + repeats * (self.n_global - self.n_local)

    def to_local(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Turn global row numbers into local ones, and tell which of them this rank holds; the others become 0."""
        repeats = torch.div(rows, max(self.n_global, 1), rounding_mode="floor")
        within = rows - repeats * self.n_global - self.start
        is_here = (within >= 0) & (within < self.n_local)
        return torch.where(is_here, within + repeats * self.n_local, torch.zeros_like(rows)), is_here


def plan_argument(call: Call) -> Plan | None:
    """Plan ``max`` and ``min`` along a dim, ``argmax`` and ``argmin``."""
    packet = str(call.op.overloadpacket).removeprefix("aten.")
    largest, with_values = packet.endswith("max"), not packet.startswith("arg")
    (spec, *_) = call.specs
    keepdim = bool(call.argument("keepdim", False))
    dim = call.argument("dim")
    if spec.ndim == 0:
        dim = None

    def local_extreme(reduction: Reduction, local: Tensor, *args: Any, **kwargs: Any) -> Any:
        values, positions = _local_argument(reduction, local, dim, largest)
        values, positions = _merged_argument(reduction.merge, values, positions, largest)
        return (values, positions) if with_values else positions

    check_not_empty(call, checked_dims(dim, spec.ndim))
    return reduction_plan(call, checked_dims(dim, spec.ndim), keepdim, local_extreme)


def _local_argument(reduction: Reduction, local: Tensor, dim: int | None, largest: bool) -> tuple[Tensor, Tensor]:
    """Extreme of this rank's shard, and its global position: the row, or the flat index if ``dim`` is None."""
    spec, keepdim = reduction.spec, reduction.keepdim
    shape = reduction.shape_after(local.shape)
    if local.numel() == 0:
        nothing = local.new_full(shape, order_identity(local.dtype, largest))
        return nothing, torch.full(shape, _NOWHERE, dtype=torch.int64, device=local.device)
    function = torch.max if largest else torch.min
    if dim is not None:
        dim %= spec.ndim
        values, rows = function(local, dim, keepdim)
        return values, LocalRows.of(spec, dim).to_global(rows)
    values, flat = function(local.reshape(-1), 0)
    global_flat = torch.zeros_like(flat)
    stride = math.prod(local.shape)
    for d, extent in enumerate(local.shape):
        stride //= extent
        row = torch.div(flat, stride, rounding_mode="floor") % extent
        global_flat = global_flat * shape_of(spec)[d] + LocalRows.of(spec, d).to_global(row)
    return values.reshape(shape), global_flat.reshape(shape)


def _merged_argument(merge: RankMerge, values: Tensor, positions: Tensor, largest: bool) -> tuple[Tensor, Tensor]:
    """Join the extremes of the ranks; where several are equal the first position counts.

    Notes
    -----
    Communication: two all-reduces of the result's size.
    """
    keys = order_key(values, largest)
    best = merge.all_reduce(keys, "max")
    positions = torch.where(keys == best, positions, torch.full_like(positions, _NOWHERE))
    return from_order_key(best, largest, values.dtype), merge.all_reduce(positions, "min")


# -- the gradient of the values ----------------------------------------------------------------------------------------


class _Layouts(NamedTuple):
    """Layouts around the rows that were selected along one dim."""

    dim: int
    keepdim: bool
    rows: LocalRows
    operand: ShardTensorSpec
    result: ShardTensorSpec  # of the values, settled
    pending_result: ShardTensorSpec  # of the values as every rank has them, zero where it has not


@functools.lru_cache(maxsize=4096)
def _layouts(spec: ShardTensorSpec, dim: int, keepdim: bool) -> _Layouts:
    spec = without_partial(spec)
    shape = shape_of(spec)
    kept = [d for d in range(len(shape)) if d != dim]
    position = {d: d if keepdim else kept.index(d) for d in kept}
    assert spec.tensor_meta is not None
    result_shape = (
        tuple(1 if d == dim else n for d, n in enumerate(shape)) if keepdim else tuple(shape[d] for d in kept)
    )
    meta = contiguous_meta(result_shape, spec.tensor_meta.dtype)
    grid = {position[d]: split for d, split in spec.grid.items() if d != dim}
    crossed = {axis: "sum" for axis in spec.grid[dim].axes} if dim in spec.grid else {}
    operand = spec.with_meta(contiguous_meta(shape, meta.dtype))
    return _Layouts(
        dim,
        keepdim,
        LocalRows.of(spec, dim),
        operand,
        make_spec(spec.mesh, meta, grid),
        make_spec(spec.mesh, meta, grid, crossed),
    )


class _Values(torch.autograd.Function):
    """Values and positions. Backward: the gradient of the values at their positions, zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, op: Any, dim: int, keepdim: bool) -> tuple[Any, Any]:
        values, positions = dispatch(op, (tensor, dim, keepdim), None)
        ctx.layouts = _layouts(tensor._spec, dim % tensor._spec.ndim, keepdim)
        ctx.mark_non_differentiable(positions)
        ctx.save_for_backward(positions)
        ctx.set_materialize_grads(False)
        return values, positions

    @staticmethod
    def backward(ctx: Any, gradient: Any, _: Any) -> tuple[Any, None, None, None]:
        if gradient is None:
            return None, None, None, None
        (positions,) = ctx.saved_tensors
        return _Spread.apply(gradient, positions, ctx.layouts), None, None, None


class _Spread(torch.autograd.Function):
    """Values to their rows of the operand's layout, zeros elsewhere. Backward: what the gradient is there."""

    @staticmethod
    def forward(ctx: Any, gradient: Any, positions: Any, layouts: _Layouts) -> Any:
        ctx.save_for_backward(positions)
        ctx.layouts = layouts
        local, rows, is_here = _local_selection(gradient, positions, layouts)
        spread = local.new_zeros(layouts.operand.local_shape)
        if spread.numel():
            spread.scatter_(layouts.dim, rows, torch.where(is_here, local, torch.zeros_like(local)))
        return wrap(spread, layouts.operand)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None, None]:
        (positions,) = ctx.saved_tensors
        return _Collect.apply(gradient, positions, ctx.layouts), None, None


class _Collect(torch.autograd.Function):
    """The adjoint of `_Spread`: the rows at the positions."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, positions: Any, layouts: _Layouts) -> Any:
        ctx.save_for_backward(positions)
        ctx.layouts = layouts
        tensor = sharded_like(tensor, layouts.operand)
        local = transition(tensor._local_tensor, tensor._spec, layouts.operand)
        rows, is_here = layouts.rows.to_local(_local_positions(positions, layouts))
        picked = local.new_zeros(rows.shape)
        if local.numel():
            picked = torch.where(is_here, local.gather(layouts.dim, rows), picked)
        return wrap(picked if layouts.keepdim else picked.squeeze(layouts.dim), layouts.pending_result)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None, None]:
        (positions,) = ctx.saved_tensors
        return _Spread.apply(gradient, positions, ctx.layouts), None, None


def _local_positions(positions: Any, layouts: _Layouts) -> Tensor:
    local: Tensor = transition(positions._local_tensor, positions._spec, layouts.result)
    return local if layouts.keepdim else local.unsqueeze(layouts.dim)


def _local_selection(gradient: Any, positions: Any, layouts: _Layouts) -> tuple[Tensor, Tensor, Tensor]:
    gradient = sharded_like(gradient, layouts.result)
    local = transition(gradient._local_tensor, gradient._spec, layouts.result)
    local = local if layouts.keepdim else local.unsqueeze(layouts.dim)
    rows, is_here = layouts.rows.to_local(_local_positions(positions, layouts))
    return local, rows, is_here


_OPS = {
    "max": (aten.max.dim, torch.amax, torch.return_types.max),
    "min": (aten.min.dim, torch.amin, torch.return_types.min),
}


def _serve(name: str) -> Any:
    op, over_all, named = _OPS[name]

    def serve(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = bind(args, kwargs, ("input", "dim", "keepdim"))
        if bound is None or not is_in_graph(bound["input"]):
            return below(func, types, args, kwargs)
        tensor = bound["input"]
        if set(bound) == {"input"}:
            # The same values; its gradient needs no tensor of global shape.
            return over_all(tensor)
        dim = bound.get("dim")
        if not isinstance(tensor, ShardTensor) or not isinstance(dim, int) or not tensor._spec.ndim:
            return below(func, types, args, kwargs)
        return named(_Values.apply(tensor, op, dim, bool(bound.get("keepdim"))))

    return serve


for _name in ("max", "min"):
    for _function in (getattr(torch, _name), getattr(torch.Tensor, _name)):
        register_function_handler(_function, _serve(_name), promote=False)
