"""Slices and selected rows: every rank keeps what it has of them, so nothing moves.

``t[1:2]`` of rows 2,5,0,3 has rows 1,0,0,0, and ``t[1]`` lives on the first rank alone. Both share memory with ``t``,
so writes reach it. The gradients come home to the layout of what was sliced; see ``_homes``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from shardtensor import ShardTensor, ShardTensorSpec
from shardtensor.extending import (
    Call,
    Plan,
    contiguous_meta,
    register_dispatch_handler,
    register_rule,
    transition,
    without_partial,
    wrap,
)
from shardtensor_spec import DimSplit, chunk_sizes, on_new_world

from ._homes import handed_home, split_around
from ._kept_rows import RowRange, row_range
from ._naming import dtype_of, shape_of
from ._relabel import only_meta, relaid
from ._selection import Selection, local_select, selected, sliced

N_CACHED_EMBEDDINGS = 1024


@register_rule("aten.slice.Tensor", "aten.slice_copy.Tensor")
def plan_slice(call: Call) -> Plan | None:
    """Slice along one dim, with any positive step."""
    (spec,) = call.specs
    meta = only_meta(call)
    dim = call.argument("dim") % spec.ndim
    extent = shape_of(spec)[dim]
    rows = row_range(call.argument("start"), call.argument("end"), call.argument("step"), extent)
    source, grid, local_rows = sliced(spec, dim, rows)
    target = spec if source == spec.grid else relaid(spec, source)
    result = relaid(target, grid, meta)
    return Plan((target,), result, _local_slice(dim, local_rows), kind="native" if target is spec else "reshard")


def _local_slice(dim: int, rows: RowRange) -> Callable[..., torch.Tensor]:
    start, stop, step = rows

    def cut(local: torch.Tensor, *arguments: object, **keywords: object) -> torch.Tensor:
        return torch.ops.aten.slice.Tensor(local, dim, start, stop, step)  # type: ignore[no-any-return]

    return cut


def slice_backward(
    gradient: ShardTensor, input_sizes: Sequence[int], dim: int, start: int | None, end: int | None, step: int
) -> Any:
    """Put the gradient of a slice among zeros, in the layout of what was sliced."""
    shape = tuple(input_sizes)
    dim %= len(shape)
    rows = row_range(start, end, step, shape[dim])
    home = handed_home(gradient._spec, shape)
    return _embed(gradient, _slice_embedding(gradient._spec, home, shape, dim, rows))


@functools.lru_cache(maxsize=N_CACHED_EMBEDDINGS)
def _slice_embedding(
    gradient: ShardTensorSpec, home: ShardTensorSpec | None, shape: tuple[int, ...], dim: int, rows: RowRange
) -> Embedding:
    meta = contiguous_meta(shape, dtype_of(gradient))
    if home is None:
        grid = dict(gradient.grid)
        if dim in grid:
            grid[dim] = split_around(grid[dim], rows, shape[dim])
        home = relaid(without_partial(gradient), grid, meta)
    source, grid, local_rows = sliced(home, dim, rows)
    target = relaid(gradient, grid)
    place = _local_slice(dim, local_rows)
    return Embedding(target, relaid(target, source, meta), place, relaid(target, home.grid, meta))


class Embedding(NamedTuple):
    """How a gradient is put among zeros.

    Attributes
    ----------
    target : ShardTensorSpec
        The layout to bring the gradient to.
    result : ShardTensorSpec
        Layout of the result.
    place : callable or None
        Returns the part of the local result that the local gradient goes to; None on ranks that hold none of it.
    home : ShardTensorSpec
        The layout that the result is brought to: another one where a folded dim was unfolded for the purpose.
    """

    target: ShardTensorSpec
    result: ShardTensorSpec
    place: Callable[[torch.Tensor], torch.Tensor] | None
    home: ShardTensorSpec


def _embed(gradient: ShardTensor, embedding: Embedding) -> Any:
    local = transition(gradient._local_tensor, gradient._spec, embedding.target)
    result = local.new_zeros(embedding.result.local_shape)
    if embedding.place is not None:
        embedding.place(result).copy_(local)
    return wrap(transition(result, embedding.result, embedding.home), embedding.home)


@register_rule("aten.select.int", "aten.select_copy.int")
def plan_select(call: Call) -> Plan | None:
    """Select one row of a dim."""
    (spec,) = call.specs
    meta = only_meta(call)
    dim = call.argument("dim") % spec.ndim
    row = call.argument("index") % shape_of(spec)[dim]
    return _select_plan(spec, dim, row, meta)


def _select_plan(spec: ShardTensorSpec, dim: int, row: int, meta: Any) -> Plan:
    selection = selected(spec, dim, row)
    target = without_partial(spec) if selection.is_shared else spec
    result = relaid(target, selection.grid, meta)
    # A single number that its owner sent to the others is no view any more.
    kind = "reshard" if selection.is_shared else "native"
    return Plan((target,), result, local_select(spec, dim, selection, result), kind=kind)  # type: ignore[arg-type]


def select_backward(gradient: ShardTensor, input_sizes: Sequence[int], dim: int, index: int) -> Any:
    """Put the gradient of a row among zeros, in the layout of what it was selected from."""
    shape = tuple(input_sizes)
    dim %= len(shape)
    home = handed_home(gradient._spec, shape)
    return _embed(gradient, _row_embedding(gradient._spec, home, shape, dim, index % shape[dim]))


@functools.lru_cache(maxsize=N_CACHED_EMBEDDINGS)
def _row_embedding(
    gradient: ShardTensorSpec, home: ShardTensorSpec | None, shape: tuple[int, ...], dim: int, row: int
) -> Embedding:
    meta = contiguous_meta(shape, dtype_of(gradient))
    if home is None:
        grid = {other + (other >= dim): split for other, split in gradient.grid.items()}
        home = relaid(without_partial(gradient), grid, meta)
    selection = selected(home, dim, row)
    target = relaid(without_partial(gradient) if selection.is_shared else gradient, selection.grid)
    result = relaid(target, home.grid, meta)
    return Embedding(target, result, _row_of(dim, selection), result)


def _row_of(dim: int, selection: Selection) -> Callable[[torch.Tensor], torch.Tensor] | None:
    row = selection.local_row
    return None if row is None else lambda local: local.select(dim, row)


@register_rule("aten.unbind.int", "aten.unbind_copy.int")
def plan_unbind(call: Call) -> Plan | None:
    """Select every row of a dim."""
    (spec,) = call.specs
    dim = call.argument("dim") % spec.ndim
    metas = call.global_metas
    plans = [_select_plan(spec, dim, row, meta) for row, meta in enumerate(metas)]
    if not plans:
        return Plan((spec,), (), lambda local, *arguments: [])
    (target,) = plans[0].targets
    rows = [plan.local for plan in plans]

    def unbind(local: torch.Tensor, *arguments: object) -> list[torch.Tensor]:
        return [select(local) for select in rows if select is not None]

    return Plan((target,), tuple(plan.result for plan in plans), unbind, kind=plans[0].kind)  # type: ignore[misc]


@register_rule("aten.slice_scatter", "aten.select_scatter")
def plan_scatter(call: Call) -> Plan | None:
    """Copy with a slice, or a row, replaced."""
    spec, source = (without_partial(operand) for operand in call.specs)
    dim = call.argument("dim") % spec.ndim
    place: Callable[[torch.Tensor], torch.Tensor] | None
    if call.op.overloadpacket is torch.ops.aten.slice_scatter:
        extent = shape_of(spec)[dim]
        rows = row_range(call.argument("start"), call.argument("end"), call.argument("step"), extent)
        home, grid, local_rows = sliced(spec, dim, rows)
        place = _local_slice(dim, local_rows)
    else:
        home = dict(spec.grid)
        selection = selected(spec, dim, call.argument("index") % shape_of(spec)[dim])
        grid, place = selection.grid, _row_of(dim, selection)
    target = relaid(spec, home)

    def scatter(local: torch.Tensor, values: torch.Tensor, *arguments: object, **keywords: object) -> torch.Tensor:
        result = local.clone()
        if place is not None:
            place(result).copy_(values)
        return result

    return Plan((target, relaid(source, grid)), relaid(target, home, only_meta(call)), scatter)


@register_rule("aten.split.Tensor", "aten.split_with_sizes", "aten.unsafe_split.Tensor", "aten.unsafe_split_with_sizes")
def plan_split(call: Call) -> Plan | None:
    """Cut into pieces; along a sharded dim each is on the ranks that hold its rows."""
    (spec,) = call.specs
    dim = call.argument("dim") % spec.ndim
    metas = [meta for meta in call.global_metas if meta is not None]
    source = dict(spec.grid)
    split = source.get(dim)
    if split is not None and split.n_repeats != 1:
        source[dim] = DimSplit(split.axes, chunk_sizes(split.extent, len(split.sizes)))
    target = spec if source == spec.grid else relaid(spec, source)
    results, extents, first = [], [], 0
    for meta in metas:
        rows = RowRange(first, first + meta.shape[dim], 1)
        first = rows.stop
        _, grid, local_rows = sliced(target, dim, rows)
        results.append(relaid(target, grid, meta))
        extents.append(local_rows.n_rows)

    def cut(local: torch.Tensor, *arguments: object, **keywords: object) -> Any:
        return torch.ops.aten.split_with_sizes(local, extents, dim)

    return Plan((target,), tuple(results), cut, kind="native" if target is spec else "reshard")


@register_rule("aten.diagonal", "aten.diagonal_copy")
def plan_diagonal(call: Call) -> Plan | None:
    """Take the diagonal of two dims; one of them may be sharded: the diagonal is then split as its rows are."""
    (spec,) = call.specs
    meta = only_meta(call)
    layout = _diagonal(
        spec, call.argument("dim1") % spec.ndim, call.argument("dim2") % spec.ndim, call.argument("offset")
    )
    if layout is None:
        return None
    source, grid, local = layout
    target = spec if source == spec.grid else relaid(spec, source)
    result = relaid(target, grid, meta)
    return Plan((target,), result, local, kind="native" if target is spec else "reshard")


def _dims_of(call: Call, n_dims: int) -> tuple[int, int]:
    return call.argument("dim1") % n_dims, call.argument("dim2") % n_dims


def _diagonal(
    spec: ShardTensorSpec, first: int, second: int, offset: int
) -> tuple[dict[int, DimSplit], dict[int, DimSplit], Callable[..., torch.Tensor]] | None:
    source = dict(spec.grid)
    if first in source and second in source:
        return None
    for dim in (first, second):
        split = source.get(dim)
        if split is not None and split.n_repeats != 1:
            source[dim] = DimSplit(split.axes, chunk_sizes(split.extent, len(split.sizes)))
    kept = [dim for dim in range(spec.ndim) if dim not in (first, second)]
    grid = {kept.index(dim): split for dim, split in source.items() if dim in kept}
    shift = 0
    for dim, sign in ((first, 1), (second, -1)):
        if dim not in source:
            continue
        split = source[dim]
        # The element of row r is in column r + offset; a shard counts its rows (or columns) from its own first one.
        extent, other = shape_of(spec)[dim], shape_of(spec)[second if dim == first else first]
        begin = max(0, -sign * offset)
        end = max(begin, min(extent, other - sign * offset))
        assert spec.coordinate is not None
        _, on_diagonal, _ = sliced(relaid(spec, source), dim, RowRange(begin, end, 1))
        grid[len(kept)] = on_diagonal[dim]
        shift = sign * split.rows(spec.coordinate, spec.mesh.shape)[0]
    local_offset = offset + shift

    def diagonal(local: torch.Tensor, *arguments: object, **keywords: object) -> torch.Tensor:
        return local.diagonal(local_offset, first, second)

    return source, grid, diagonal


def diagonal_backward(gradient: ShardTensor, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> Any:
    """Put the gradient of a diagonal among zeros, in the layout of what it was taken of."""
    shape = tuple(input_sizes)
    home = handed_home(gradient._spec, shape)
    dims = (dim1 % len(shape), dim2 % len(shape))
    return _embed(gradient, _diagonal_embedding(gradient._spec, home, shape, *dims, offset))


@functools.lru_cache(maxsize=N_CACHED_EMBEDDINGS)
def _diagonal_embedding(
    gradient: ShardTensorSpec,
    home: ShardTensorSpec | None,
    shape: tuple[int, ...],
    first: int,
    second: int,
    offset: int,
) -> Embedding:
    meta = contiguous_meta(shape, dtype_of(gradient))
    kept = [dim for dim in range(len(shape)) if dim not in (first, second)]
    layout = None if home is None else _diagonal(home, first, second, offset)
    if home is None or layout is None:
        grid = {kept[dim]: split for dim, split in gradient.grid.items() if dim < len(kept)}
        home = relaid(without_partial(gradient), grid, meta)
        layout = _diagonal(home, first, second, offset)
    assert layout is not None
    source, grid, place = layout
    target = relaid(gradient, grid)
    return Embedding(target, relaid(target, source, meta), place, relaid(target, home.grid, meta))


def _forget() -> None:
    for cached in (_slice_embedding, _row_embedding, _diagonal_embedding):
        cached.cache_clear()


on_new_world(_forget)
register_dispatch_handler(torch.ops.aten.slice_backward.default, slice_backward)
register_dispatch_handler(torch.ops.aten.select_backward.default, select_backward)
register_dispatch_handler(torch.ops.aten.diagonal_backward.default, diagonal_backward)
