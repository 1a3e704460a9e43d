"""Who holds which rows of one dimension: the split of a sharded dimension over the mesh axes that shard it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch.distributed.tensor.placement_types import Placement, Shard

from ._errors import LayoutMismatchError
from ._sizes import check_sizes, chunk_sizes, offsets_of
from ._torch_private import FoldedShard


class DimSplit(NamedTuple):
    """How one tensor dimension is split over the mesh.

    A dimension of ``n_repeats * sum(sizes)`` rows. Two axes may shard one dimension (nested): ``sizes`` then lists
    the innermost shards in row-major order of ``axes``.

    Attributes
    ----------
    axes : tuple of int
        The mesh axes that shard the dimension, outermost first.
    sizes : tuple of int, (product of the axes' sizes,)
        Rows of every shard, zeros allowed.
    n_repeats : int
        1, or for a *folded* dimension the number of times that the split repeats: a ``[B, S]`` pair of dimensions,
        S sharded, seen as one dimension of ``B * S`` rows has ``n_repeats = B`` and the sizes of S. Each rank holds
        its rows of every repeat, one after the other.
    """

    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    n_repeats: int = 1

    @property
    def extent(self) -> int:
        """Rows of the whole dimension, all repeats counted."""
        return self.n_repeats * sum(self.sizes)

    def shard_index(self, coordinate: Sequence[int], mesh_shape: Sequence[int]) -> int:
        """Position in `sizes` of the shard that the rank at ``coordinate`` of the mesh holds."""
        index = 0
        for axis in self.axes:
            index = index * mesh_shape[axis] + coordinate[axis]
        return index

    def rows(self, coordinate: Sequence[int], mesh_shape: Sequence[int]) -> tuple[int, int]:
        """First and one-past-last row, within one repeat, of the rank at ``coordinate``."""
        index = self.shard_index(coordinate, mesh_shape)
        start = offsets_of(self.sizes)[index]
        return start, start + self.sizes[index]


Grid = dict[int, DimSplit]
"""Tensor dimension -> its split; dimensions that are not sharded are left out."""


def folded_placement(dim: int, n_repeats: int) -> Placement:
    """Placement of a folded dimension, which no plain ``Shard`` equals: whoever does not know folds fails loudly."""
    return FoldedShard(dim, split_factor=n_repeats)


def is_sharding(placement: Placement) -> bool:
    """Whether a placement splits a dimension, folded or not."""
    return isinstance(placement, (Shard, FoldedShard))


def sharded_dims(placements: Sequence[Placement]) -> dict[int, tuple[int, ...]]:
    """Tensor dimension -> the mesh axes that shard it, outermost (lowest) first."""
    axes_of_dim: dict[int, tuple[int, ...]] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, (Shard, FoldedShard)):
            axes_of_dim[placement.dim] = (*axes_of_dim.get(placement.dim, ()), axis)
    return axes_of_dim


def normalized_placements(
    placements: Sequence[Placement], ndim: int, n_axes: int | None = None
) -> tuple[Placement, ...]:
    """Check placements and count negative shard dimensions from the end.

    Parameters
    ----------
    placements : Sequence of Placement, (n_axes,)
        One placement per mesh axis.
    ndim : int
        Dimensions of the tensor.
    n_axes : int, optional
        Axes of the mesh, to check the number of placements against.

    Raises
    ------
    LayoutMismatchError
        If there are not as many placements as mesh axes.
    IndexError
        If a dimension is out of range.

    Examples
    --------
    >>> from torch.distributed.tensor import Shard
    >>> normalized_placements([Shard(-1)], ndim=3)
    (Shard(dim=2),)
    """
    if n_axes is not None and len(placements) != n_axes:
        raise LayoutMismatchError(
            f"{len(placements)} placements {tuple(placements)} are given for a mesh of {n_axes} axes",
            advice="give one placement per mesh axis",
        )
    normalized = []
    for placement in placements:
        if isinstance(placement, (Shard, FoldedShard)):
            if not -ndim <= placement.dim < ndim:
                raise IndexError(f"Shard({placement.dim}) is out of range for a tensor of {ndim} dims")
            if placement.dim < 0:
                placement = Shard(placement.dim + ndim)
        normalized.append(placement)
    return tuple(normalized)


def n_repeats_of(placements: Sequence[Placement], axes: Sequence[int], dim: int) -> int:
    """Number of repeats of a folded dimension, 1 for a plain one.

    Raises
    ------
    LayoutMismatchError
        If the axes that shard the dimension disagree about the number of repeats.
    """
    repeats = {placement.split_factor if isinstance(placement := placements[axis], FoldedShard) else 1 for axis in axes}
    if len(repeats) != 1:
        raise LayoutMismatchError(f"the mesh axes {tuple(axes)} fold dim {dim} differently: {sorted(repeats)} repeats")
    return int(repeats.pop())


def chunk_grid(global_shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]) -> Grid:
    """Split every sharded dimension as ``torch.chunk`` does; the inner axis splits what the outer one left.

    Parameters
    ----------
    global_shape : Sequence of int, (ndim,)
        Shape of the whole tensor.
    mesh_shape : Sequence of int, (n_axes,)
        Ranks along each mesh axis.
    placements : Sequence of Placement, (n_axes,)
        One placement per mesh axis.

    Examples
    --------
    >>> from torch.distributed.tensor import Shard
    >>> chunk_grid((5, 3), (2, 2), [Shard(0), Shard(0)])
    {0: DimSplit(axes=(0, 1), sizes=(2, 1, 1, 1), n_repeats=1)}
    """
    grid = {}
    for dim, axes in sharded_dims(placements).items():
        n_repeats = n_repeats_of(placements, axes, dim)
        if global_shape[dim] % n_repeats:
            raise LayoutMismatchError(f"dim {dim} of {global_shape[dim]} rows cannot repeat {n_repeats} times")
        sizes: tuple[int, ...] = (global_shape[dim] // n_repeats,)
        for axis in axes:
            sizes = tuple(part for size in sizes for part in chunk_sizes(size, mesh_shape[axis]))
        grid[dim] = DimSplit(axes, sizes, n_repeats)
    return grid


def grid_of_sizes(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    sizes: Mapping[int, Sequence[int]] | None,
) -> Grid:
    """Split every sharded dimension by the given sizes, those not given as ``torch.chunk`` does.

    Parameters
    ----------
    global_shape, mesh_shape, placements
        As in `chunk_grid`.
    sizes : Mapping of int to Sequence of int
        Tensor dimension (negative counts from the end) -> rows of every shard, innermost shards in row-major order
        where two axes shard the dimension.

    Raises
    ------
    LayoutMismatchError
        If the sizes of a dimension do not add up, or a dimension is given that no axis shards.
    """
    grid = chunk_grid(global_shape, mesh_shape, placements)
    for dim, given in (sizes or {}).items():
        dim = dim + len(global_shape) if dim < 0 else dim
        if dim not in grid:
            raise LayoutMismatchError(
                f"shard sizes are given for dim {dim}, but the placements {tuple(placements)} do not shard it",
                advice="give sizes for sharded dimensions only",
            )
        split = grid[dim]
        checked = check_sizes(tuple(given), global_shape[dim] // split.n_repeats, len(split.sizes), dim)
        grid[dim] = split._replace(sizes=checked)
    return grid
