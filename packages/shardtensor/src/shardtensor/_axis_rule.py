"""Axis rules: say which dims of an operator correspond, and the layouts of operands and results follow.

A rule gives every dim of every operand and result a *name*, in the spirit of einops: ``mm`` is ``m k, k n -> m n``.
A sharded name keeps its sizes wherever it goes, operands that share a name are brought to the same sizes, and a name
that a result does not have is contracted, so that result is a partial sum. See `axis_plan` for the whole of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch.distributed.tensor import Partial

from shardtensor_spec import DimSplit, ShardTensorSpec, chunk_sizes

from ._layout import make_spec
from ._plan import Call, Plan, PlanKind, Result
from ._torch_private import TensorMeta

DimNames = Sequence[Hashable]
"""One name per dim. None marks a dim of size one that is broadcast: it is never sharded."""

Linearity = Literal["no", "each", "jointly"]


class _Split(NamedTuple):
    """How the dims of one name are split in every operand and result."""

    split: DimSplit
    is_moved: bool  # the shards were moved here from a dim that must be whole


def axis_plan(
    call: Call,
    operands: Sequence[DimNames],
    results: Sequence[DimNames | None],
    *,
    whole: Collection[Hashable] = (),
    reduce_op: str | None = "sum",
    linear: Linearity = "no",
    pinned: int | None = None,
    allow_folded: bool = True,
    local: Callable[..., Any] | None = None,
    localize: Callable[[Mapping[Hashable, int]], Mapping[str, Any]] | None = None,
    metas: Sequence[TensorMeta | None] | None = None,
) -> Plan | None:
    """Plan an operator whose dims correspond by name.

    Parameters
    ----------
    call : Call
        The operator call.
    operands : Sequence of dim names
        For each tensor operand, in the order of ``call.specs``, a name for each dim.
    results : Sequence of dim names or None
        For each result the same; None for one that is no tensor.
    whole : Collection of names
        Dims that the operator needs whole. Shards along them are moved to another named dim before (one exchange),
        and the results moved back after; where no dim can take them the operands are gathered.
    reduce_op : str, optional
        The pending reduction of the results where a sharded name is contracted. None if the operator cannot be
        computed from parts: contracted names are then whole.
    linear : {"no", "each", "jointly"}
        Whether a pending sum passes through: ``"each"``, in one operand at a time (products); ``"jointly"``, if all
        operands are pending (sums). Otherwise pending operands are reduced first.
    pinned : int, optional
        Operand whose layout stays as it is, because the operator writes to it.
    allow_folded : bool
        Whether the operator can run on a folded dim.
    local : callable, optional
        What to run on the local tensors; the operator itself by default.
    localize : callable, optional
        Gets the local extent of every name and returns the local values of shape arguments by schema name.
    metas : Sequence of TensorMeta, optional
        Global shape, stride and dtype of the results; computed on the meta device by default.

    Returns
    -------
    Plan or None
        None if a contracted name is sharded and ``reduce_op`` is None even after moving.

    Notes
    -----
    For every mesh axis the largest operand that is sharded along it decides; ties go to the first. The others are cut
    (replicas, for free) or exchanged to the same sizes.
    """
    specs = call.specs
    assert len(specs) == len(operands), (call.op, len(specs), operands)
    # First of all, so that shapes that do not fit are refused in torch's own words.
    metas = call.global_metas if metas is None else metas
    whole = set(whole)
    result_names = {name for names in results if names is not None for name in names}
    if reduce_op is None:
        whole |= {name for names in operands for name in names if name not in result_names and name is not None}
    by_name, is_gathered = _choose_splits(specs, operands, whole, pinned, allow_folded)
    partial_operands, partial_results = _carry_partials(specs, by_name, linear, pinned)
    targets = tuple(
        _target(spec, names, by_name, partial_operands[index])
        for index, (spec, names) in enumerate(zip(specs, operands, strict=True))
    )

    def contracted(names: DimNames) -> dict[int, str]:
        """Axes along which a result is pending: they shard a name that it does not have."""
        if reduce_op is None:
            return {}
        missing = [chosen.split for name, chosen in by_name.items() if name not in names]
        return {axis: reduce_op for split in missing for axis in split.axes}

    layouts = [
        None
        if names is None or meta is None
        else _result(call, meta, names, by_name, partial_results | contracted(names))
        for names, meta in zip(results, metas, strict=True)
    ]
    final = _moved_home(call, layouts, results, metas, operands, by_name)
    kind: PlanKind = "gather" if is_gathered else "reshard" if any(c.is_moved for c in by_name.values()) else "native"
    replaced = {} if localize is None else localize(_local_extents(specs, operands, by_name))
    return Plan(targets, _packed(layouts, call), local, replaced, final, kind)


def _choose_splits(
    specs: Sequence[ShardTensorSpec],
    operands: Sequence[DimNames],
    whole: Collection[Hashable],
    pinned: int | None,
    allow_folded: bool,
) -> tuple[dict[Hashable, _Split], bool]:
    """Choose for every mesh axis the name that it shards, and for every such name the sizes."""
    order = sorted(range(len(specs)), key=lambda index: -_numel(specs[index]))
    if pinned is not None:
        order = [pinned]
    by_name: dict[Hashable, _Split] = {}
    taken: set[int] = set()
    homeless: list[tuple[int, tuple[int, ...]]] = []
    for index in order:
        for dim, split in specs[index].grid.items():
            name = operands[index][dim]
            if name is None or name in by_name or taken & set(split.axes):
                continue
            if name in whole:
                homeless.append((index, split.axes))
                continue
            if split.n_repeats != 1 and not allow_folded:
                n_shards = len(split.sizes)
                split = DimSplit(split.axes, chunk_sizes(split.extent, n_shards))
            by_name[name] = _Split(split, is_moved=False)
            taken |= set(split.axes)
    is_gathered = False
    for index, axes in homeless:
        if taken & set(axes):
            continue
        new_home = _roomiest(specs, operands, index, by_name, whole)
        if new_home is None:
            is_gathered = True
            continue
        name, extent = new_home
        n_shards = math.prod(specs[index].mesh.shape[axis] for axis in axes)
        by_name[name] = _Split(DimSplit(axes, chunk_sizes(extent, n_shards)), is_moved=True)
        taken |= set(axes)
    return by_name, is_gathered


def _roomiest(
    specs: Sequence[ShardTensorSpec],
    operands: Sequence[DimNames],
    index: int,
    by_name: Mapping[Hashable, _Split],
    whole: Collection[Hashable],
) -> tuple[Hashable, int] | None:
    """Find the largest dim of an operand that can be sharded instead of one that must be whole."""
    candidates = [
        (extent, name)
        for name, extent in zip(operands[index], _shape(specs[index]), strict=True)
        if name is not None and name not in whole and name not in by_name and extent > 1
    ]
    if not candidates:
        return None
    extent, name = max(candidates, key=lambda candidate: candidate[0])
    return name, extent


def _carry_partials(
    specs: Sequence[ShardTensorSpec], by_name: Mapping[Hashable, _Split], linear: Linearity, pinned: int | None
) -> tuple[list[dict[int, str]], dict[int, str]]:
    """Decide along which axes the operands stay pending, and the results with them."""
    sharded = {axis for chosen in by_name.values() for axis in chosen.split.axes}
    kept: list[dict[int, str]] = [{} for _ in specs]
    carried: dict[int, str] = {}
    for axis in range(specs[0].mesh.ndim):
        pending = [index for index, spec in enumerate(specs) if isinstance(spec.placements[axis], Partial)]
        if not pending or axis in sharded or linear == "no":
            continue
        operations = {_reduce_op(specs[index], axis) for index in pending}
        if len(operations) != 1 or not operations <= {"sum", "avg"}:
            continue
        if len(pending) == 1 if linear == "each" else len(pending) == len(specs):
            (operation,) = operations
            carried[axis] = operation
            for index in pending:
                kept[index][axis] = operation
    if pinned is not None and kept[pinned] != {a: o for a, o in carried.items()}:
        # The target of a write cannot become a contribution in mid-air.
        return [{} for _ in specs], {}
    return kept, carried


def _target(
    spec: ShardTensorSpec, names: DimNames, by_name: Mapping[Hashable, _Split], partial: Mapping[int, str]
) -> ShardTensorSpec:
    grid = {dim: by_name[name].split for dim, name in enumerate(names) if name is not None and name in by_name}
    assert spec.tensor_meta is not None
    return make_spec(spec.mesh, spec.tensor_meta, grid, partial)


def _result(
    call: Call, meta: TensorMeta, names: DimNames, by_name: Mapping[Hashable, _Split], partial: Mapping[int, str]
) -> ShardTensorSpec:
    grid = {dim: by_name[name].split for dim, name in enumerate(names) if name is not None and name in by_name}
    return make_spec(call.mesh, meta, grid, partial)


def _moved_home(
    call: Call,
    layouts: Sequence[ShardTensorSpec | None],
    results: Sequence[DimNames | None],
    metas: Sequence[TensorMeta | None],
    operands: Sequence[DimNames],
    by_name: Mapping[Hashable, _Split],
) -> Result:
    """Layouts of the results after the shards went back to the dim that had to be whole; None if none was moved."""
    moved = {axis for chosen in by_name.values() if chosen.is_moved for axis in chosen.split.axes}
    if not moved:
        return None
    final: list[ShardTensorSpec | None] = []
    for layout, names, meta in zip(layouts, results, metas, strict=True):
        if layout is None or names is None or meta is None:
            final.append(None)
            continue
        grid = {dim: split for dim, split in layout.grid.items() if not moved & set(split.axes)}
        for spec, operand in zip(call.specs, operands, strict=True):
            for dim, split in spec.grid.items():
                name = operand[dim]
                if name in names and moved & set(split.axes):
                    position = list(names).index(name)
                    if meta.shape[position] == split.extent and not _axes(grid) & set(split.axes):
                        grid[position] = split
        left = {dim: s for dim, s in layout.grid.items() if dim not in grid and not _axes(grid) & set(s.axes)}
        partial = {a: _reduce_op(layout, a) for a, p in enumerate(layout.placements) if isinstance(p, Partial)}
        final.append(make_spec(call.mesh, meta, grid | left, partial))
    return _packed(final, call)


def _axes(grid: Mapping[int, DimSplit]) -> set[int]:
    return {axis for split in grid.values() for axis in split.axes}


def _local_extents(
    specs: Sequence[ShardTensorSpec], operands: Sequence[DimNames], by_name: Mapping[Hashable, _Split]
) -> dict[Hashable, int]:
    extents: dict[Hashable, int] = {}
    for spec, names in zip(specs, operands, strict=True):
        assert spec.coordinate is not None
        for name, extent in zip(names, _shape(spec), strict=True):
            if name is None:
                continue
            if name in by_name:
                split = by_name[name].split
                extent = split.n_repeats * split.sizes[split.shard_index(spec.coordinate, spec.mesh.shape)]
            extents[name] = extent
    return extents


def _packed(layouts: Sequence[ShardTensorSpec | None], call: Call) -> Result:
    return tuple(layouts) if call.returns_many else layouts[0]


def _reduce_op(spec: ShardTensorSpec, axis: int) -> str:
    placement = spec.placements[axis]
    assert isinstance(placement, Partial)
    return str(placement.reduce_op)


def _shape(spec: ShardTensorSpec) -> tuple[int, ...]:
    assert spec.tensor_meta is not None
    return tuple(spec.tensor_meta.shape)


def _numel(spec: ShardTensorSpec) -> int:
    return math.prod(_shape(spec))
