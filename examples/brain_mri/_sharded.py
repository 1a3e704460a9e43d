"""Many processes: each reads its slab, and the slabs of one sample are a ShardTensor."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from brain_mri._augment import Augmentation
from brain_mri._data import Bounds, make_sample
from brain_mri._options import Launch, Options
from brain_mri._workers import Batch, choose_device
from domain_parallel import ShardTensor, init_domain_mesh, local_slices, sync_module_over_mesh


class ShardedProcesses:
    """``--ddp D`` samples at a time, each over ``--domain N`` ranks.

    Parameters
    ----------
    options : Options
        The job.
    launch : Launch
        This process's place among the others.

    Notes
    -----
    Communication: makes the process groups of the mesh.
    """

    def __init__(self, options: Options, launch: Launch) -> None:
        self._options = options
        self.device = choose_device(options, launch)
        dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        mesh = init_domain_mesh(ddp=options.n_samples, domain=options.n_shards, device_type=self.device.type)
        self._samples, self._domain = mesh["ddp"], mesh["domain"]
        self.bounds = self._own_bounds()

    def batch(self, step: int) -> Batch:
        """Read and augment this rank's slab of its sample."""
        return self._sample(Augmentation.draw(self._options.seed, step, self._samples.get_local_rank()))

    def plain_batch(self) -> Batch:
        """Read this rank's slab of the volume."""
        return self._sample(None)

    def prepare(self, model: torch.nn.Module) -> torch.nn.Module:
        """Equal weights everywhere, and gradients averaged over the samples.

        Notes
        -----
        Communication: one broadcast of the weights over the domain, and DDP's own over the samples.
        """
        sync_module_over_mesh(model, self._domain)
        if self._options.n_samples == 1:
            return model
        return DistributedDataParallel(model, process_group=self._samples.get_group())

    def mean_loss(self, loss: torch.Tensor) -> float:
        """The mean over the samples of the step.

        Notes
        -----
        Communication: one number, all-reduced over the samples.
        """
        value = loss.full_tensor() if isinstance(loss, ShardTensor) else loss
        if self._options.n_samples > 1:
            value = value.clone()
            dist.all_reduce(value, group=self._samples.get_group())
            value /= self._options.n_samples
        return value.item()

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of this rank."""
        return tensor.to_local() if isinstance(tensor, ShardTensor) else tensor

    def close(self) -> None:
        """End the process group."""
        dist.destroy_process_group()

    def _own_bounds(self) -> Bounds:
        spatial_dim = self._options.shard_dim - 2
        slices = local_slices(
            self._options.shape, self._domain, [Shard(spatial_dim)], sizes={spatial_dim: self._options.rows}
        )
        x, y, z = ((rows.start, rows.stop) for rows in slices)
        return x, y, z

    def _sample(self, augmentation: Augmentation | None) -> Batch:
        image, tissues = make_sample(self._options.resolution, self.bounds, augmentation)
        return self._shard(image), self._shard(tissues)

    def _shard(self, slab: torch.Tensor) -> ShardTensor:
        dim = self._options.shard_dim
        # Everyone knows everyone's shape, so nothing has to be asked over the network.
        shapes = [(*slab.shape[:dim], rows, *slab.shape[dim + 1 :]) for rows in self._options.rows]
        local = slab.to(self.device, getattr(torch, self._options.dtype))
        tensor: ShardTensor = ShardTensor.from_local(local, self._domain, [Shard(dim)], sharding_shapes={0: shapes})
        return tensor
