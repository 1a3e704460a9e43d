"""Rows that change places: roll, flip, rot90, repeat, pixel and channel shuffles.

A rolled or flipped dim that is sharded costs one exchange of the rows that change their owner. A repeated one stays
where it is, folded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardtensor import ShardTensor, ShardTensorSpec
from shardtensor.extending import (
    Call,
    Plan,
    axis_group,
    axis_name,
    register_dispatch_handler,
    register_rule,
    whole_group,
)
from shardtensor_collectives import exchange
from shardtensor_spec import DimSplit, chunk_sizes, plan_exchange

from ._grouping import FlatSplit, simplified
from ._naming import shape_of
from ._relabel import only_meta, relaid

Window = Callable[[int, int, int], tuple[int, int]]
"""First and one-past-last row of a shard, and the extent -> the rows that it wants."""


@register_rule("aten.roll")
def plan_roll(call: Call) -> Plan | None:
    """Shift rows along dims, around the end."""
    (spec,) = call.specs
    only_meta(call)
    shape = shape_of(spec)
    dims = [dim % spec.ndim for dim in _listed(call.argument("dims"))]
    shifts = _listed(call.argument("shifts"))
    if math.prod(shape) == 0 or (spec.ndim == 0 and not dims):
        return Plan((spec,), relaid(spec, spec.grid, only_meta(call)))
    if not dims and spec.ndim > 1:
        return _plan_flat_roll(call, spec, shifts[0])
    dims = dims or [0]
    target = _unfolded(spec, [dim for dim in dims if dim in spec.grid])

    def roll(local: torch.Tensor, *arguments: object) -> torch.Tensor:
        for dim, shift in zip(dims, shifts, strict=True):
            if dim in target.grid:
                local = _shifted(local, target, dim, shift)
            else:
                local = local.roll(shift, dim)
        return local

    return Plan((target,), relaid(target, target.grid, only_meta(call)), roll, kind=_kind(spec, target))


def _plan_flat_roll(call: Call, spec: ShardTensorSpec, shift: int) -> Plan:
    """Shift elements along the flattened tensor, of which each rank is given a run."""
    shape = shape_of(spec)
    axes = tuple(sorted(axis for split in spec.grid.values() for axis in split.axes))
    first = spec.grid.get(0)
    if first is None or first.axes != axes or first.n_repeats != 1:
        n_shards = math.prod(spec.mesh.shape[axis] for axis in axes)
        first = DimSplit(axes, chunk_sizes(shape[0], n_shards)) if axes else None
    target = relaid(spec, {} if first is None else {0: first})
    n_inner = math.prod(shape[1:])
    meta = only_meta(call)
    flat_meta = meta._replace(shape=torch.Size((math.prod(shape),)), stride=(1,))
    grid = {} if first is None else {0: first._replace(sizes=tuple(size * n_inner for size in first.sizes))}
    flat = relaid(target, grid, flat_meta)

    def roll(local: torch.Tensor, *arguments: object) -> torch.Tensor:
        rows = local.reshape(-1)
        rows = rows.roll(shift) if first is None else _shifted(rows, flat, 0, shift)
        return rows.view(local.shape)

    return Plan((target,), relaid(target, target.grid, meta), roll, kind=_kind(spec, target))


def _shifted(local: torch.Tensor, spec: ShardTensorSpec, dim: int, shift: int) -> torch.Tensor:
    def window(start: int, stop: int, extent: int) -> tuple[int, int]:
        first = (start - shift) % extent
        return first, first + stop - start

    return exchange_rows(local, spec, dim, window, is_circular=True)


@register_rule("aten.flip")
def plan_flip(call: Call) -> Plan | None:
    """Reverse rows along dims."""
    (spec,) = call.specs
    meta = only_meta(call)
    dims = [dim % spec.ndim for dim in _listed(call.argument("dims"))]
    target = _unfolded(spec, [dim for dim in dims if dim in spec.grid])

    def flip(local: torch.Tensor, *arguments: object) -> torch.Tensor:
        for dim in dims:
            if dim in target.grid:
                local = exchange_rows(local, target, dim, lambda start, stop, extent: (extent - stop, extent - start))
        return local.flip(dims)

    return Plan((target,), relaid(target, target.grid, meta), flip, kind=_kind(spec, target))


def exchange_rows(
    local: torch.Tensor, spec: ShardTensorSpec, dim: int, window: Window, *, is_circular: bool = False
) -> torch.Tensor:
    """Fetch other rows of a sharded dim than those that the rank has.

    Parameters
    ----------
    local : Tensor, spec.local_shape
        This rank's shard.
    spec : ShardTensorSpec
        Its layout.
    dim : int
        The dim, sharded and not folded.
    window : callable
        What each rank wants instead of its rows.
    is_circular : bool
        Whether windows wrap around.

    Notes
    -----
    Communication: one exchange of the rows that a rank wants and lacks.
    """
    mesh, split = spec.mesh, spec.grid[dim]
    extent = split.extent
    assert spec.coordinate is not None
    here = spec.coordinate
    if len(split.axes) == 1:
        (axis,) = split.axes
        line = [(*here[:axis], index, *here[axis + 1 :]) for index in range(mesh.shape[axis])]
        group, label, rank = axis_group(mesh, axis), axis_name(mesh, axis), here[axis]
        # All ranks of the line have the same rows of the other dims, folded or not.
        shape = [extent if other == dim else n for other, n in enumerate(local.shape)]
        owned = [tuple(split.rows(c, mesh.shape) if d == dim else (0, n) for d, n in enumerate(shape)) for c in line]
    else:
        line = spec.coordinates()
        group, label, rank = whole_group(mesh), axis_name(mesh), line.index(here)
        shape = list(shape_of(spec))
        owned = [spec.box_at(coordinate) for coordinate in line]
    wanted = [(*box[:dim], window(*box[dim], extent), *box[dim + 1 :]) for box in owned]
    plan = plan_exchange(owned, wanted, rank, global_shape=shape, circular=(dim,) if is_circular else ())
    return exchange(local, plan, group, axis=label)


@register_rule("aten.repeat")
def plan_repeat(call: Call) -> Plan | None:
    """Repeat a tensor along its dims: a sharded dim becomes a folded one, each rank with its rows of every repeat."""
    (spec,) = call.specs
    meta = only_meta(call)
    repeats = call.argument("repeats")
    n_new = len(repeats) - spec.ndim
    grid = {}
    for dim, split in spec.grid.items():
        n_times = repeats[n_new + dim]
        if n_times == 0:
            grid[n_new + dim] = DimSplit(split.axes, (0,) * len(split.sizes))
            continue
        flat = simplified(FlatSplit(split.n_repeats * n_times, split.sizes))
        grid[n_new + dim] = DimSplit(split.axes, flat.sizes, flat.n_repeats)
    return Plan((spec,), relaid(spec, grid, meta))


def _unfolded(spec: ShardTensorSpec, dims: Sequence[int]) -> ShardTensorSpec:
    """Layout with the given dims split without folds, and all of them where an exchange spans several axes."""
    is_nested = any(len(spec.grid[dim].axes) > 1 for dim in dims)
    grid = {
        dim: DimSplit(split.axes, chunk_sizes(split.extent, len(split.sizes)))
        if split.n_repeats != 1 and (dim in dims or is_nested)
        else split
        for dim, split in spec.grid.items()
    }
    return spec if grid == spec.grid else relaid(spec, grid)


def _kind(spec: ShardTensorSpec, target: ShardTensorSpec) -> Any:
    return "native" if target is spec else "reshard"


def _listed(value: Any) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def rot90(tensor: ShardTensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> torch.Tensor:
    """Rotate in the plane of two dims."""
    first, second = dims
    turns = k % 4
    if turns == 0:
        return tensor.clone()
    if turns == 2:
        return tensor.flip((first, second))
    return tensor.flip(second if turns == 1 else first).transpose(first, second)


def pixel_shuffle(tensor: ShardTensor, upscale_factor: int) -> torch.Tensor:
    """Spread channels over finer rows and columns: a view, whose rows stay with the rows that they refine."""
    r = upscale_factor
    *batch, channels, height, width = tensor.shape
    parts = tensor.reshape(*batch, channels // r**2, r, r, height, width)
    n = len(batch)
    order = (*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return parts.permute(order).reshape(*batch, channels // r**2, height * r, width * r)


def pixel_unshuffle(tensor: ShardTensor, downscale_factor: int) -> torch.Tensor:
    """Gather blocks of rows and columns into channels."""
    r = downscale_factor
    *batch, channels, height, width = tensor.shape
    parts = tensor.reshape(*batch, channels, height // r, r, width // r, r)
    n = len(batch)
    order = (*range(n), n, n + 2, n + 4, n + 1, n + 3)
    return parts.permute(order).reshape(*batch, channels * r**2, height // r, width // r)


def channel_shuffle(tensor: ShardTensor, groups: int) -> torch.Tensor:
    """Deal channels of groups out in turn."""
    n, channels, *rest = tensor.shape
    return tensor.reshape(n, groups, channels // groups, *rest).transpose(1, 2).reshape(n, channels, *rest)


def _checked(op: Any, compose: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Let torch complain about arguments that do not fit, then compose."""

    def handler(tensor: ShardTensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        _ = Call(op, (tensor._spec, *arguments), keywords).global_result
        return compose(tensor, *arguments, **keywords)

    return handler


aten = torch.ops.aten
for _op, _compose in (
    (aten.rot90.default, rot90),
    (aten.pixel_shuffle.default, pixel_shuffle),
    (aten.pixel_unshuffle.default, pixel_unshuffle),
    (aten.channel_shuffle.default, channel_shuffle),
    (aten.native_channel_shuffle.default, channel_shuffle),
):
    register_dispatch_handler(_op, _checked(_op, _compose))
