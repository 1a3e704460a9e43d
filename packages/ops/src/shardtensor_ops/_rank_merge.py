"""Merging what the ranks found in their shards: sums, extremes and moments over the axes that a reduction crosses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardtensor import ShardTensorSpec
from shardtensor.extending import axis_group, axis_name, whole_group
from shardtensor_collectives import ReduceOp, all_gather_v, all_reduce, operator_range

_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype that sums of values of ``dtype`` are made in: contributions of short floats would be rounded twice."""
    return _WIDE.get(dtype, dtype)


@dataclass(frozen=True)
class RankMerge:
    """The ranks whose results are parts of one result.

    Attributes
    ----------
    mesh : DeviceMesh
        The mesh.
    axes : tuple of int
        The mesh axes that the reduced dims are sharded over, lowest first.
    operator : str
        Name in traces.
    """

    mesh: DeviceMesh
    axes: tuple[int, ...]
    operator: str

    def all_reduce(self, local: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce over the ranks; equal on all of them.

        Notes
        -----
        Communication: one all-reduce; one per axis where the reduction crosses some but not all of several axes.
        """
        with operator_range(self.operator):
            if len(self.axes) > 1 and len(self.axes) == self.mesh.ndim:
                return all_reduce(local, whole_group(self.mesh), op=op, axis=axis_name(self.mesh))
            for axis in self.axes:
                local = all_reduce(local, axis_group(self.mesh, axis), op=op, axis=axis_name(self.mesh, axis))
            return local

    def gather(self, local: Tensor) -> Tensor:
        """Stack what every rank has, in row-major order of the coordinates along `axes`.

        Parameters
        ----------
        local : Tensor, (...)
            Of the same shape on every rank.

        Returns
        -------
        Tensor, (n_ranks, ...)

        Notes
        -----
        Communication: one all-gather; one per axis where the reduction crosses some but not all of several axes.
        """
        stacked = local.unsqueeze(0)
        with operator_range(self.operator):
            if len(self.axes) > 1 and len(self.axes) == self.mesh.ndim:
                sizes = [1] * self.mesh.size()
                return all_gather_v(stacked, sizes, 0, whole_group(self.mesh), axis=axis_name(self.mesh))
            for axis in reversed(self.axes):  # the innermost first, so that the outermost ends up slowest
                n_rows = stacked.shape[0]
                sizes = [n_rows] * self.mesh.shape[axis]
                stacked = all_gather_v(stacked, sizes, 0, axis_group(self.mesh, axis), axis=axis_name(self.mesh, axis))
        return stacked

    def counts(self, spec: ShardTensorSpec, dims: Sequence[int]) -> list[int]:
        """Elements along ``dims`` that every rank holds, in the order of `gather`. No communication."""
        assert spec.coordinate is not None
        counts = []
        for indices in itertools.product(*(range(self.mesh.shape[axis]) for axis in self.axes)):
            coordinate = list(spec.coordinate)
            for axis, index in zip(self.axes, indices, strict=True):
                coordinate[axis] = index
            shape = spec.shape_at(coordinate)
            counts.append(math.prod(shape[dim] for dim in dims))
        return counts


def merged_moments(merge: RankMerge, mean: Tensor, squares: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Mean and sum of squared deviations over all ranks, from those of every rank.

    Parameters
    ----------
    merge : RankMerge
        The ranks.
    mean, squares : Tensor, (...)
        Mean of this rank's rows, and the sum of their squared deviations from it; zeros for no rows.
    counts : Sequence of int, (n_ranks,)
        Rows of every rank.

    Returns
    -------
    tuple of Tensor
        Of all rows.

    Notes
    -----
    Communication: one all-gather of both. Where its result would outgrow the two by more than sixteen times and
    64 KiB, two all-reduces.

    References
    ----------
    T. F. Chan, G. H. Golub, R. J. LeVeque, *Updating formulae and a pairwise algorithm for computing sample variances*,
    1979: deviations are taken from means, so nothing cancels for values that are large against their spread.
    """
    total = sum(counts)
    if len(counts) > 16 and len(counts) * mean.numel() * mean.element_size() > 65536:
        assert merge.mesh.get_coordinate() is not None
        mine = _own_count(merge, counts)
        global_mean = merge.all_reduce(mean * (mine / max(total, 1)))
        return global_mean, merge.all_reduce(squares + mine * (mean - global_mean) ** 2)
    means, all_squares = merge.gather(torch.stack((mean, squares))).unbind(1)
    weights = mean.new_tensor(counts).view(-1, *([1] * mean.ndim))
    # Deviations from one rank's mean are small numbers, whose weighted sum loses nothing.
    anchor = means[max(range(len(counts)), key=counts.__getitem__)]
    shares = weights / max(total, 1)
    global_mean = anchor + ((means - anchor) * shares).sum(0)
    global_mean = torch.where(torch.isfinite(global_mean), global_mean, (means * shares).sum(0))
    return global_mean, (all_squares + weights * (means - global_mean) ** 2).sum(0)


def _own_count(merge: RankMerge, counts: Sequence[int]) -> int:
    coordinate = merge.mesh.get_coordinate()
    assert coordinate is not None
    index = 0
    for axis in merge.axes:
        index = index * merge.mesh.shape[axis] + coordinate[axis]
    return counts[index]


def order_key(values: Tensor, largest: bool) -> Tensor:
    """Numbers whose maximum is that of the values (or their minimum, if not ``largest``), with NaN above everything.

    A reduction of floats by a backend may drop NaN; one of these integers cannot.
    """
    if not values.is_floating_point():
        return values if largest else ~values
    values = values + 0.0 if largest else 0.0 - values  # no negative zeros: they equal zero
    values = torch.where(torch.isnan(values), torch.full_like(values, math.nan), values)
    return _flipped(values.view(_BITS[values.element_size()]))


def from_order_key(keys: Tensor, largest: bool, dtype: torch.dtype) -> Tensor:
    """Undo `order_key`."""
    if not dtype.is_floating_point:
        return keys if largest else ~keys
    values: Tensor = _flipped(keys).view(dtype)
    return values if largest else 0.0 - values


def _flipped(bits: Tensor) -> Tensor:
    """Reverse the order of negative numbers: their bits grow with the magnitude. Its own inverse."""
    n_bits = 8 * bits.element_size()
    flipped: Tensor = bits ^ ((bits >> (n_bits - 1)) & (2 ** (n_bits - 1) - 1))
    return flipped


def order_identity(dtype: torch.dtype, largest: bool) -> float | int | bool:
    """Value that loses against every other: what an empty shard contributes."""
    if dtype is torch.bool:
        return not largest
    if dtype.is_floating_point:
        return -math.inf if largest else math.inf
    info = torch.iinfo(dtype)
    return info.min if largest else info.max
