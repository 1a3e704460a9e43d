"""Which part of a global array is this rank's own: what a reader asks before it opens a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from ._grid import grid_of_sizes, normalized_placements


def local_slices(
    global_shape: Sequence[int],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    sizes: Mapping[int, Sequence[int]] | None = None,
) -> tuple[slice, ...]:
    """Slices of the global array that this rank holds.

    Parameters
    ----------
    global_shape : Sequence of int, (ndim,)
        Shape of the whole array.
    mesh : DeviceMesh
        The mesh; this rank must be in it.
    placements : Sequence of Placement, (n_axes,)
        One placement per mesh axis. Negative shard dims count from the end.
    sizes : Mapping of int to Sequence of int, optional
        Tensor dimension -> rows of every shard. By default ``torch.chunk``'s.

    Returns
    -------
    tuple of slice, (ndim,)
        ``whole[local_slices(...)]`` is this rank's shard.

    Raises
    ------
    LayoutMismatchError
        If the sizes do not fit the shape, or the placements not the mesh.
    IndexError
        If a shard dim is out of range.
    RuntimeError
        If this rank is not in the mesh.

    Notes
    -----
    Communication: none.

    Examples
    --------
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.tensor import Shard
    >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("domain",))
    >>> local_slices((8, 6), mesh, [Shard(1)], sizes={1: (6,)})
    (slice(0, 8, None), slice(0, 6, None))
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise RuntimeError(f"this rank is not part of the mesh {mesh}, so it holds no slab")
    placements = normalized_placements(placements, len(global_shape), mesh.ndim)
    slices = [slice(0, extent) for extent in global_shape]
    for dim, split in grid_of_sizes(global_shape, mesh.shape, placements, sizes).items():
        slices[dim] = slice(*split.rows(coordinate, mesh.shape))
    return tuple(slices)
