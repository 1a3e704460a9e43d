"""Random changes of a sample, defined voxel by voxel in the coordinates of the whole volume.

A rank that makes one slab gets exactly the numbers that another process gets there for the whole volume: each voxel
depends on the seed and on its own global position, never on where the slab begins. Only operations that round alike
for every element are done on slabs (additions, multiplications, integer arithmetic); powers and cosines come from
tables, because the vectorised forms of those may differ in the last digit between the middle and the end of an array.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from brain_mri._data import Bounds


@dataclass(frozen=True)
class Augmentation:
    """What is done to one sample.

    Attributes
    ----------
    mirror : bool
        Whether left and right are exchanged.
    gain, gamma : float
        A voxel of brightness ``v`` becomes ``gain * v**gamma``.
    bias : tuple of (amplitude, phase) per dimension
        The image is multiplied by a smooth field, as an uneven receive coil does:
        ``1 + sum_d amplitude cos(pi x_d / n_d + phase)``.
    noise : float
        Standard deviation of what is added to every voxel.
    key : int
        Seed of that noise.
    """

    mirror: bool
    gain: float
    gamma: float
    bias: tuple[tuple[float, float], ...]
    noise: float
    key: int

    @classmethod
    def draw(cls, seed: int, step: int, index: int) -> Augmentation:
        """The augmentation of sample ``index`` of a step; a pure function of its arguments."""
        random = np.random.default_rng([seed, step, index])
        return cls(
            mirror=bool(random.integers(2)),
            gain=float(random.uniform(0.8, 1.2)),
            gamma=float(np.exp(random.uniform(-0.25, 0.25))),
            bias=tuple((float(random.uniform(0, 0.12)), float(random.uniform(0, 2 * np.pi))) for _ in range(3)),
            noise=float(random.uniform(0.0, 0.03)),
            key=int(random.integers(2**63)),
        )

    def source_bounds(self, bounds: Bounds, shape: tuple[int, int, int]) -> Bounds:
        """Rows of the stored volume that the rows ``bounds`` of the sample are made of."""
        if not self.mirror:
            return bounds
        (start, stop), y, z = bounds
        return (shape[0] - stop, shape[0] - start), y, z

    def tissue(self, levels: NDArray[np.uint16], top: int) -> NDArray[np.float32]:
        """A slab of a tissue map; the level ``top`` is 1.

        Parameters
        ----------
        levels : ndarray of uint16, (x, y, z)
            The rows `source_bounds` of the stored map.
        """
        share: NDArray[np.float32] = np.ascontiguousarray(self._oriented(levels)) / np.float32(top)
        return share

    def image(
        self, levels: NDArray[np.uint16], top: int, bounds: Bounds, shape: tuple[int, int, int]
    ) -> NDArray[np.float32]:
        """A slab of the image.

        Parameters
        ----------
        levels : ndarray of uint16, (x, y, z)
            The rows `source_bounds` of the stored image.
        top : int
            The highest level.
        bounds : tuple of (int, int)
            Rows of the sample that are made.
        shape : tuple of int
            The whole sample.
        """
        brightness = self.gain * np.linspace(0, 1, top + 1) ** self.gamma
        image: NDArray[np.float32] = brightness.astype(np.float32)[self._oriented(levels)]
        image *= self._field(bounds, shape)
        image += np.float32(self.noise) * standard_noise(self.key, bounds, shape)
        return image

    def _oriented(self, levels: NDArray[np.uint16]) -> NDArray[np.uint16]:
        return levels[::-1] if self.mirror else levels

    def _field(self, bounds: Bounds, shape: tuple[int, int, int]) -> NDArray[np.float32]:
        waves = []
        for (start, stop), extent, (amplitude, phase) in zip(bounds, shape, self.bias, strict=True):
            whole = amplitude * np.cos(np.pi * np.arange(extent) / extent + phase)
            waves.append(whole.astype(np.float32)[start:stop])
        x, y, z = np.ix_(*waves)
        field: NDArray[np.float32] = np.float32(1) + x + y + z
        return field


def standard_noise(key: int, bounds: Bounds, shape: tuple[int, int, int]) -> NDArray[np.float32]:
    """Noise of mean 0 and variance 1, nearly normal: a hash of the key and of every voxel's number in the whole volume.

    Parameters
    ----------
    key : int
        Another key is another noise.
    bounds : tuple of (int, int)
        The slab to make.
    shape : tuple of int
        The whole volume.

    Returns
    -------
    ndarray of float32, (rows of the slab)
        The centred sum of four uniform 16-bit numbers, which lies within 3.5 standard deviations.

    References
    ----------
    The mixing function is SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014.

    Examples
    --------
    >>> whole = standard_noise(7, ((0, 4), (0, 3), (0, 2)), (4, 3, 2))
    >>> part = standard_noise(7, ((1, 3), (2, 3), (0, 2)), (4, 3, 2))
    >>> bool((part == whole[1:3, 2:3]).all())
    True
    """
    x, y, z = np.ix_(*(np.arange(start, stop, dtype=np.uint64) for start, stop in bounds))
    state: NDArray[np.uint64] = (x * np.uint64(shape[1]) + y) * np.uint64(shape[2]) + z
    state *= np.uint64(0x9E3779B97F4A7C15)
    state += np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state ^= state >> np.uint64(shift)
        state *= np.uint64(factor)
    state ^= state >> np.uint64(31)
    total = np.zeros(state.shape, dtype=np.int32)
    for shift in (0, 16, 32, 48):
        total += ((state >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int32)
    mean, deviation = 2 * 0xFFFF, np.sqrt(4 * (2.0**32 - 1) / 12)
    noise: NDArray[np.float32] = (total - np.int32(mean)).astype(np.float32) / np.float32(deviation)
    return noise
