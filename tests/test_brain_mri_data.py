"""The brain-MRI job's data: every split of a sample is the same sample."""

from __future__ import annotations

import tracemalloc

import pytest

pytest.importorskip("nibabel")

import nibabel
import numpy as np
import torch

from brain_mri._augment import Augmentation, standard_noise
from brain_mri._data import Bounds, grid_shape, make_sample, n_levels, read_levels, volume_path


def slabs(shape: tuple[int, int, int], dim: int, sizes: tuple[int, ...]) -> list[Bounds]:
    """Bounds of consecutive slabs along a spatial dim; the last one takes what is left."""
    bounds = []
    start = 0
    for size in (*sizes, shape[dim] - sum(sizes)):
        slab = [(0, extent) for extent in shape]
        slab[dim] = (start, start + size)
        bounds.append((slab[0], slab[1], slab[2]))
        start += size
    return bounds


def whole(shape: tuple[int, int, int]) -> Bounds:
    return (0, shape[0]), (0, shape[1]), (0, shape[2])


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("seed", [1, 2, 4])
def test_slabs_of_an_augmented_sample_are_the_sample(dim: int, seed: int) -> None:
    shape = grid_shape(4)
    augmentation = Augmentation.draw(seed, step=3, index=1)
    image, tissues = make_sample(4, whole(shape), augmentation)
    parts = [make_sample(4, slab, augmentation) for slab in slabs(shape, dim, (7, 0, 1, 20))]
    assert torch.equal(torch.cat([part[0] for part in parts], dim + 2), image)
    assert torch.equal(torch.cat([part[1] for part in parts], dim + 2), tissues)


def test_the_seeds_above_cover_both_orientations() -> None:
    assert {Augmentation.draw(seed, step=3, index=1).mirror for seed in (1, 2, 4)} == {False, True}


def test_mirroring_exchanges_left_and_right() -> None:
    shape = grid_shape(4)
    mirrored = Augmentation(True, gain=1.0, gamma=1.0, bias=((0.0, 0.0),) * 3, noise=0.0, key=0)
    image, tissues = make_sample(4, whole(shape))
    mirrored_image, mirrored_tissues = make_sample(4, whole(shape), mirrored)
    torch.testing.assert_close(mirrored_image, image.flip(2))
    assert torch.equal(mirrored_tissues, tissues.flip(2))
    assert not torch.equal(image, image.flip(2))


def test_samples_differ_by_step_index_and_seed() -> None:
    draws = [Augmentation.draw(*key) for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0))]
    assert draws[0] == draws[4]
    assert len(set(draws)) == 4


@pytest.mark.parametrize("resolution", [1, 2, 4])
def test_levels_are_the_mean_of_cubes(resolution: int) -> None:
    shape = grid_shape(resolution)
    start, stop = shape[1] // 2, shape[1] // 2 + 2
    read = read_levels("gm", resolution, ((0, shape[0]), (start, stop), (0, shape[2]))) / n_levels(resolution)
    voxels = np.asanyarray(nibabel.load(volume_path("gm")).dataobj)[:, start * resolution : stop * resolution]
    # The mean of a cube that sticks out is that of its voxels inside, so pad with NaN and average without those.
    missing = [(0, -extent % resolution) for extent in voxels.shape]
    padded = np.pad(voxels.astype(float), missing, constant_values=np.nan)
    cubes = padded.reshape(shape[0], resolution, stop - start, resolution, shape[2], resolution)
    np.testing.assert_allclose(read, np.nanmean(cubes, axis=(1, 3, 5)) / 255, rtol=1e-12)


def test_a_thin_slab_is_read_without_holding_the_volume() -> None:
    shape = grid_shape(1)
    read_levels.cache_clear()
    tracemalloc.start()
    read_levels("t1", 1, ((0, shape[0]), (100, 104), (0, shape[2])))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    n_voxels = shape[0] * shape[1] * shape[2]  # one byte each in the file
    assert peak < n_voxels / 5


def test_noise_has_mean_0_and_variance_1_and_no_pattern() -> None:
    noise = standard_noise(5, ((0, 60), (0, 60), (0, 60)), (60, 60, 60)).astype(np.float64)
    n = noise.size
    assert abs(noise.mean()) < 5 / n**0.5
    assert abs(noise.var() - 1) < 5 * (2 / n) ** 0.5
    for dim in range(3):
        neighbours = (noise.take(range(59), dim) * noise.take(range(1, 60), dim)).mean()
        assert abs(neighbours) < 5 / n**0.5
    other = standard_noise(6, ((0, 60), (0, 60), (0, 60)), (60, 60, 60))
    assert abs((noise * other).mean()) < 5 / n**0.5
