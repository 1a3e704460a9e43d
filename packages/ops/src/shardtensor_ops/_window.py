"""Windows: which input rows a rank needs for its output rows, and the exchange that brings them.

One rule decides who makes which output rows, for convolution, pooling, interpolation and padding alike: **an output row
belongs to the rank that owns the input row at the middle of its window** (the lower one of two; clamped into the
tensor). So what is near stays near, and an operator that keeps the extent at stride 1 keeps the sizes of all shards.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from shardtensor.extending import TensorMeta, axis_group, axis_name, make_spec, whole_group
from shardtensor_collectives import exchange, exchange_adjoint
from shardtensor_spec import (
    Box,
    DimSplit,
    ExchangePlan,
    ShardTensorSpec,
    box_slices,
    offsets_of,
    on_new_world,
    plan_exchange,
)

Rows = tuple[int, int]
"""First and one-past-last row along one dim, in global coordinates."""


def anchored_sizes(input_sizes: Sequence[int], n_output: int, anchor: Callable[[int], int]) -> tuple[int, ...]:
    """Rows of the output on every shard, by the rule of this module.

    Parameters
    ----------
    input_sizes : Sequence of int, (n_shards,)
        Rows of the input on every shard.
    n_output : int
        Rows of the whole output.
    anchor : callable
        Output row -> the input row at the middle of its window; never decreasing, and clamped here.

    Examples
    --------
    Pooling by 2 with an odd cut: output row 1 covers the rows 2 and 3, and belongs to the owner of row 2.

    >>> anchored_sizes((3, 4), 3, lambda row: 2 * row)
    (2, 1)
    """
    n_input = sum(input_sizes)
    if n_input == 0:
        return (n_output, *[0] * (len(input_sizes) - 1))
    cuts = [0]
    for stop in itertools.accumulate(input_sizes):
        cuts.append(bisect_left(range(n_output), stop, key=lambda row: min(max(anchor(row), 0), n_input - 1)))
    return tuple(stop - start for start, stop in itertools.pairwise(cuts))


@dataclass(frozen=True)
class DimWindows:
    """Along one dim: the output rows that every shard makes, and the input rows that it needs for them.

    Attributes
    ----------
    sizes : tuple of int, (n_shards,)
        Output rows of every shard.
    rows : tuple of Rows, (n_shards,)
        Input rows that each shard wants. They may stick out of the tensor; a shard without output wants none.
    """

    sizes: tuple[int, ...]
    rows: tuple[Rows, ...]

    def start(self, shard: int) -> int:
        """First output row of a shard."""
        return sum(self.sizes[:shard])


def dim_windows(
    input_sizes: Sequence[int], n_output: int, anchor: Callable[[int], int], needed: Callable[[int, int], Rows]
) -> DimWindows:
    """Windows along one dim.

    Parameters
    ----------
    input_sizes, n_output, anchor
        As in `anchored_sizes`.
    needed : callable
        ``needed(first, last)``: the input rows that the output rows from first to last (inclusive) depend on.
    """
    sizes = anchored_sizes(input_sizes, n_output, anchor)
    own_starts = offsets_of(input_sizes)
    rows = []
    first = 0
    for size, own_start in zip(sizes, own_starts, strict=False):
        rows.append(needed(first, first + size - 1) if size else (own_start, own_start))
        first += size
    return DimWindows(sizes, tuple(rows))


def split_of(spec: ShardTensorSpec, dim: int) -> DimSplit:
    """How a dim is split; an unsharded one is a single shard."""
    assert spec.tensor_meta is not None
    return spec.grid.get(dim, DimSplit((), (int(spec.tensor_meta.shape[dim]),)))


def shard_of(spec: ShardTensorSpec, dim: int) -> int:
    """Index of this rank's shard along a dim."""
    assert spec.coordinate is not None
    return split_of(spec, dim).shard_index(spec.coordinate, spec.mesh.shape)


def own_rows(spec: ShardTensorSpec, dim: int) -> tuple[Rows, ...]:
    """Rows of every shard along a dim."""
    sizes = split_of(spec, dim).sizes
    return tuple((start, start + size) for start, size in zip(offsets_of(sizes), sizes, strict=False))


def with_sizes(spec: ShardTensorSpec, meta: TensorMeta, sizes: Mapping[int, Sequence[int]]) -> ShardTensorSpec:
    """Layout of a result whose dims are split as those of ``spec``, but for the rows of some sharded dims."""
    grid = {dim: split._replace(sizes=tuple(sizes[dim])) if dim in sizes else split for dim, split in spec.grid.items()}
    return make_spec(spec.mesh, meta, grid)


def is_alone(spec: ShardTensorSpec, dim: int) -> bool:
    """Whether at most one shard along a dim has rows, so that nobody has a neighbour."""
    return sum(size > 0 for size in split_of(spec, dim).sizes) <= 1


@dataclass(frozen=True)
class Window:
    """The exchange that fills this rank's window.

    Attributes
    ----------
    plan : ExchangePlan
        From the local tensor to the window.
    group : ProcessGroup
        The ranks that it runs among.
    axis : str
        Name of the mesh axis or axes, for traces.
    view : tuple of slice, optional
        Where the window lies in the local tensor, if it lies there.
    """

    plan: ExchangePlan
    group: dist.ProcessGroup
    axis: str
    view: tuple[slice, ...] | None
    _only_sends: ExchangePlan

    @property
    def is_own(self) -> bool:
        """Whether the window is the local tensor and nothing moves."""
        return self.plan.moves_nothing and self.plan.is_identity

    def fill(self, local: torch.Tensor, value: float = 0) -> torch.Tensor:
        """Fetch the window.

        Parameters
        ----------
        local : Tensor, plan.local_shape
            This rank's shard.
        value : number
            What stands outside of the tensor.

        Returns
        -------
        Tensor, plan.window_shape
            A view of ``local`` where the window lies inside.

        Notes
        -----
        Communication: one message to and from each rank whose rows others need, of exactly these rows.
        """
        if self.view is None:
            return exchange(local, self.plan, self.group, fill=value, axis=self.axis)
        if not self.plan.moves_nothing:
            exchange(local, self._only_sends, self.group, axis=self.axis)
        return local[self.view]

    def give_back(self, window: torch.Tensor) -> torch.Tensor:
        """Send what belongs to others back and add where windows overlap: the adjoint of `fill`."""
        if self.is_own:
            return window
        return exchange_adjoint(window, self.plan, self.group, axis=self.axis)


@functools.lru_cache(maxsize=512)
def window_of(
    spec: ShardTensorSpec, rows_of_dim: tuple[tuple[int, tuple[Rows, ...]], ...], circular: tuple[int, ...] = ()
) -> Window:
    """Plan the exchange of windows.

    Parameters
    ----------
    spec : ShardTensorSpec
        Layout of the input. Dims without windows may be split in any way, folded ones included.
    rows_of_dim : tuple of (dim, rows of every shard)
        The windows.
    circular : tuple of int
        Dims that wrap around.

    Notes
    -----
    Communication: none here. The exchange will run among the ranks along the mesh axes that shard a dim of which some
    rank needs rows of another, and along no other axis.
    """
    mesh, here = spec.mesh, spec.coordinate
    assert here is not None and spec.tensor_meta is not None
    axes = sorted(
        {axis for dim, rows in rows_of_dim for axis in _axes_with_neighbours(spec, dim, rows, dim in circular)}
    )
    shape = list(spec.local_shape)
    for dim, _ in rows_of_dim:
        shape[dim] = int(spec.tensor_meta.shape[dim])
    group, label, line, rank = _line(spec, axes)
    owned, wanted = [], []
    nothing: Box = ((0, 0),) * len(shape)
    for coordinate in line:
        if coordinate is None:
            owned.append(nothing)
            wanted.append(nothing)
            continue
        own, window = [[(0, extent) for extent in shape] for _ in range(2)]
        for dim, rows in rows_of_dim:
            split = split_of(spec, dim)
            shard = split.shard_index(coordinate, mesh.shape)
            own[dim] = own_rows(spec, dim)[shard]
            window[dim] = rows[shard]
        owned.append(tuple(own))
        wanted.append(tuple(window))
    plan = plan_exchange(tuple(owned), tuple(wanted), rank, global_shape=tuple(shape), circular=circular)
    only_sends = replace(plan, window_shape=(0,) * len(shape), copies=(), gaps=())
    view = None
    if 0 in plan.window_shape:
        view = tuple(slice(0, extent) for extent in _smaller(plan.local_shape, plan.window_shape))
        view = view if _smaller(plan.local_shape, plan.window_shape) == plan.window_shape else None
    elif not plan.receives and not plan.repeats and not plan.gaps and len(plan.copies) == 1:
        view = box_slices(plan.copies[0].source)
    return Window(plan, group, label, view, only_sends)


def _smaller(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(min, first, second))


def _axes_with_neighbours(spec: ShardTensorSpec, dim: int, rows: Sequence[Rows], is_circular: bool) -> tuple[int, ...]:
    split = split_of(spec, dim)
    n_rows = sum(split.sizes)
    for (start, stop), (own_start, own_stop) in zip(rows, own_rows(spec, dim), strict=True):
        if not is_circular:
            start, stop = max(start, 0), min(stop, n_rows)
        if start < stop and (start < own_start or stop > own_stop):
            return split.axes
    return ()


def _line(
    spec: ShardTensorSpec, axes: Sequence[int]
) -> tuple[dist.ProcessGroup, str, list[tuple[int, ...] | None], int]:
    """Return the group that spans some axes through this rank, its name, its members' coordinates, this rank's
    position.

    A coordinate is None where the group is larger than needed and its member has no part in the exchange.
    """
    mesh, here = spec.mesh, spec.coordinate
    assert here is not None
    if len(axes) <= 1:
        axis = axes[0] if axes else 0
        line: list[tuple[int, ...] | None] = [
            (*here[:axis], index, *here[axis + 1 :]) for index in range(mesh.shape[axis])
        ]
        return axis_group(mesh, axis), axis_name(mesh, axis), line, here[axis]
    coordinates = spec.coordinates()
    fixed = [axis for axis in range(mesh.ndim) if axis not in axes]
    line = [c if all(c[axis] == here[axis] for axis in fixed) else None for c in coordinates]
    return whole_group(mesh), axis_name(mesh), line, coordinates.index(here)


on_new_world(window_of.cache_clear)
