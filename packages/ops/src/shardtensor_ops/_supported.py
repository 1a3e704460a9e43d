"""The nearest layout that an operator can work on."""

from __future__ import annotations

import functools

from torch.distributed.tensor import Partial

from shardtensor.extending import make_spec, report_gather
from shardtensor_spec import DimSplit, ShardTensorSpec, chunk_sizes

from ._naming import shape_of


def supported_layout(
    spec: ShardTensorSpec, operator: str, *, whole: tuple[int, ...] = (), unfolded: tuple[int, ...] = ()
) -> ShardTensorSpec:
    """Return the layout nearest to ``spec`` with nothing pending, some dims whole and some not folded.

    Parameters
    ----------
    spec : ShardTensorSpec
        The layout that a tensor has.
    operator : str
        Who asks, for the report of a gather.
    whole : tuple of int
        Dims that may not be sharded. Their shards move to the largest dim that is free, so memory stays divided.
    unfolded : tuple of int
        Dims that may be sharded, but not folded.

    Returns
    -------
    ShardTensorSpec
        ``spec`` itself if it will do.

    Raises
    ------
    UnsupportedShardingError
        If shards have nowhere to move to, and gathers are forbidden (`set_fallback_mode`).
    """
    layout = _nearest(spec, whole, unfolded)
    if _sharding_axes(layout) < _sharding_axes(spec):
        report_gather(operator, (spec,))
    return layout


@functools.lru_cache(maxsize=1024)
def _nearest(spec: ShardTensorSpec, whole: tuple[int, ...], unfolded: tuple[int, ...]) -> ShardTensorSpec:
    shape = shape_of(spec)
    grid = {dim: split for dim, split in spec.grid.items() if dim not in whole}
    for dim in unfolded:
        if dim in grid and grid[dim].n_repeats != 1:
            grid[dim] = _chunked(grid[dim], shape[dim])
    for dim in whole:
        if dim not in spec.grid:
            continue
        free = [home for home in range(len(shape)) if home not in whole and home not in grid and shape[home] > 1]
        if free:
            home = max(free, key=lambda candidate: shape[candidate])
            grid[home] = _chunked(spec.grid[dim], shape[home])
    if grid == spec.grid and not any(isinstance(placement, Partial) for placement in spec.placements):
        return spec
    assert spec.tensor_meta is not None
    return make_spec(spec.mesh, spec.tensor_meta, grid)


def _sharding_axes(spec: ShardTensorSpec) -> set[int]:
    return {axis for split in spec.grid.values() for axis in split.axes}


def _chunked(split: DimSplit, extent: int) -> DimSplit:
    return DimSplit(split.axes, chunk_sizes(extent, len(split.sizes)))
