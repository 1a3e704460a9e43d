"""One process, or many: the only difference between the two runs, behind one small interface."""

from __future__ import annotations

from typing import Protocol

import torch

from brain_mri._augment import Augmentation
from brain_mri._data import Bounds, make_sample
from brain_mri._options import Launch, Options

Batch = tuple[torch.Tensor, torch.Tensor]


class Workers(Protocol):
    """What the training loop asks of the processes it runs on.

    Attributes
    ----------
    device : torch.device
        Where this process computes.
    bounds : tuple of (int, int)
        Rows of the sample that this process reads.
    """

    device: torch.device
    bounds: Bounds

    def batch(self, step: int) -> Batch:
        """Image and tissue maps of a step, (n_samples, n_channels, x, y, z)."""

    def plain_batch(self) -> Batch:
        """The volume as it is, without augmentation."""

    def prepare(self, model: torch.nn.Module) -> torch.nn.Module:
        """Make a freshly built model ready for training."""

    def mean_loss(self, loss: torch.Tensor) -> float:
        """The loss of all samples of the step."""

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of a tensor that are in this process."""

    def close(self) -> None:
        """Take leave of the other processes."""


class SingleProcess:
    """The reference: plain tensors, whole volumes, all samples of a step in one batch."""

    def __init__(self, options: Options, launch: Launch) -> None:
        self._options = options
        self.device = choose_device(options, launch)
        self.bounds = whole_bounds(options)

    def batch(self, step: int) -> Batch:
        """Read and augment all samples of a step."""
        samples = [self._sample(Augmentation.draw(self._options.seed, step, n)) for n in range(self._options.n_samples)]
        images, tissues = zip(*samples, strict=True)
        return torch.cat(images), torch.cat(tissues)

    def plain_batch(self) -> Batch:
        """Read the volume."""
        return self._sample(None)

    def prepare(self, model: torch.nn.Module) -> torch.nn.Module:
        """Nothing to do."""
        return model

    def mean_loss(self, loss: torch.Tensor) -> float:
        """The batch held all samples."""
        return loss.item()

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """All rows are here."""
        return tensor

    def close(self) -> None:
        """Nobody else is there."""

    def _sample(self, augmentation: Augmentation | None) -> Batch:
        image, tissues = make_sample(self._options.resolution, self.bounds, augmentation)
        dtype = getattr(torch, self._options.dtype)
        return image.to(self.device, dtype), tissues.to(self.device, dtype)


def whole_bounds(options: Options) -> Bounds:
    """Rows of the whole sample."""
    x, y, z = options.shape
    return (0, x), (0, y), (0, z)


def choose_device(options: Options, launch: Launch) -> torch.device:
    """One GPU per process if the machine has enough of them, else the CPU.

    Parameters
    ----------
    options : Options
        Its ``device`` may insist.
    launch : Launch
        Which of the machine's GPUs is this process's.
    """
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= launch.local_world_size
    if options.device == "cpu" or (options.device == "auto" and not enough):
        return torch.device("cpu")
    if not enough:
        n_found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise ValueError(f"--device cuda: {launch.local_world_size} process(es) need a GPU each, {n_found} found")
    device = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(device)
    # TF32 keeps 10 bits of a factor: two runs that round at different places would differ by more than the tolerance.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    return device
