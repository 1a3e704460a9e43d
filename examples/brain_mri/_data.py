"""The MNI152 brain and its tissue maps, read slab by slab from the files inside the ``nilearn`` package.

The maps are stored as bytes on a 1 mm grid. A coarser grid is the mean of cubes of voxels. Those means are kept as
whole numbers ("levels"), so a slab has exactly the values that the whole volume has there.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path

import nibabel
import numpy as np
import torch
from numpy.typing import NDArray

from brain_mri._augment import Augmentation

#: First and last-but-one row per spatial dimension: a hashable form of three slices.
Bounds = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]

#: The input, and the two maps that the network learns.
IMAGE, TISSUES = "t1", ("gm", "wm")

RESOLUTIONS = (1, 2, 4)


def volume_path(name: str) -> Path:
    """File of one map; ``nilearn`` is found but not imported, which would take seconds.

    Parameters
    ----------
    name : str
        ``"t1"``, ``"gm"`` (grey matter) or ``"wm"`` (white matter).

    Raises
    ------
    FileNotFoundError
        If ``nilearn`` is not installed, or no longer holds the file.
    """
    package = importlib.util.find_spec("nilearn")
    if package is None or package.origin is None:
        raise FileNotFoundError("the MNI152 volume ships inside nilearn, which is not installed: pip install nilearn")
    path = Path(package.origin).parent / "datasets" / "data" / f"mni_icbm152_{name}_tal_nlin_sym_09a_converted.nii.gz"
    if not path.is_file():
        raise FileNotFoundError(f"this version of nilearn does not hold {path.name}: try nilearn 0.14")
    return path


def grid_shape(resolution: int) -> tuple[int, int, int]:
    """Voxels of the whole volume (left-right, back-front, foot-head) with cubes of ``resolution`` mm.

    Examples
    --------
    >>> grid_shape(1), grid_shape(2)
    ((197, 233, 189), (99, 117, 95))
    """
    x, y, z = (-(-extent // resolution) for extent in nibabel.load(volume_path(IMAGE)).shape)
    return x, y, z


def n_levels(resolution: int) -> int:
    """The level of a voxel whose cube is all at the brightest byte."""
    return 255 * resolution**3


@lru_cache(maxsize=2 * (1 + len(TISSUES)))  # every map, as it is and mirrored
def read_levels(name: str, resolution: int, bounds: Bounds) -> NDArray[np.uint16]:
    """Read one slab of one map.

    Parameters
    ----------
    name : str
        See `volume_path`.
    resolution : int
        Edge of a voxel in mm, one of `RESOLUTIONS`.
    bounds : tuple of (int, int)
        Half-open range of rows per dimension, on the grid of this resolution.

    Returns
    -------
    ndarray of uint16, (rows of the slab)
        Levels from 0 to ``n_levels(resolution)``. Cached, so not writeable.

    Notes
    -----
    The file is a gzip stream and has to be read from its start. One plane of it is held at a time, and the slab.
    """
    # Else nibabel opens the stream anew, and so decompresses everything up to the plane, for every plane.
    stored = nibabel.load(volume_path(name), keep_file_open=True)
    levels = np.empty([stop - start for start, stop in bounds], dtype=np.uint16)
    if levels.size:
        fine = [
            (start * resolution, min(stop * resolution, n))
            for (start, stop), n in zip(bounds, stored.shape, strict=True)
        ]
        cubes = [np.arange(0, stop - start, resolution) for start, stop in fine]
        widths = [
            np.minimum(first + resolution, stop - start) - first
            for first, (start, stop) in zip(cubes, fine, strict=True)
        ]
        # A cube that sticks out of the volume has fewer voxels: scale its sum to that of a whole one.
        missing = (resolution**2 // np.multiply.outer(widths[0], widths[1])).astype(np.uint16)
        for z, (first, width) in enumerate(zip(cubes[2], widths[2], strict=True)):
            total = np.zeros(levels.shape[:2], dtype=np.uint16)
            for plane in range(fine[2][0] + first, fine[2][0] + first + width):
                voxels = stored.dataobj[:, :, plane][slice(*fine[0]), slice(*fine[1])].astype(np.uint16)
                total += np.add.reduceat(np.add.reduceat(voxels, cubes[0], axis=0), cubes[1], axis=1)
            levels[:, :, z] = total * missing * np.uint16(resolution // width)
    levels.flags.writeable = False
    return levels


def make_sample(
    resolution: int, bounds: Bounds, augmentation: Augmentation | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One slab of one sample, read from the files and augmented.

    Parameters
    ----------
    resolution : int
        Edge of a voxel in mm.
    bounds : tuple of (int, int)
        The slab, as half-open rows of the whole sample.
    augmentation : Augmentation, optional
        By default the volume as it is.

    Returns
    -------
    image : Tensor of float32, (1, 1, x, y, z)
        The T1-weighted volume; 1 is its brightest voxel, before augmentation.
    tissues : Tensor of float32, (1, 2, x, y, z)
        Share of grey and of white matter in each voxel, from 0 to 1.
    """
    shape = grid_shape(resolution)
    top = n_levels(resolution)
    if augmentation is None:
        image = read_levels(IMAGE, resolution, bounds) / np.float32(top)
        tissues = [read_levels(name, resolution, bounds) / np.float32(top) for name in TISSUES]
    else:
        source = augmentation.source_bounds(bounds, shape)
        image = augmentation.image(read_levels(IMAGE, resolution, source), top, bounds, shape)
        tissues = [augmentation.tissue(read_levels(name, resolution, source), top) for name in TISSUES]
    return torch.from_numpy(image)[None, None], torch.from_numpy(np.stack(tissues))[None]
