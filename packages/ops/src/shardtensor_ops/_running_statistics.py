"""Running averages of batch and instance norm: the buffers of a module, equal on all ranks after every step."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardtensor import ShardTensor, ShardTensorSpec
from shardtensor.extending import transition

from ._channel_norm import BatchNorm, GroupNorm
from ._naming import shape_of
from ._norm_function import merge_over


class Buffers(NamedTuple):
    """What a module tracks. Plain tensors, or replicated ShardTensors; written in place."""

    mean: Tensor | None
    variance: Tensor | None
    momentum: float

    def update(self, mean: Tensor, variance: Tensor, channels: ShardTensorSpec | None) -> None:
        """Move towards the statistics of this step.

        Parameters
        ----------
        mean, variance : Tensor, (n_local_channels,)
            Merged over all ranks; the variance without bias.
        channels : ShardTensorSpec, optional
            Layout of the statistics where channels are sharded.

        Notes
        -----
        Communication: an all-gather where channels are sharded and the buffers whole.
        """
        for buffer, value in ((self.mean, mean), (self.variance, variance)):
            if buffer is None:
                continue
            target = buffer
            if isinstance(buffer, ShardTensor):
                target = buffer._local_tensor
                if channels is not None:
                    value = transition(value, channels, buffer._spec)
            elif channels is not None:
                value = transition(value, channels, channels.replicated())
            target.mul_(1 - self.momentum).add_(value.to(target.dtype), alpha=self.momentum)

    def local(self, channels: ShardTensorSpec | None) -> tuple[Tensor, Tensor]:
        """The statistics of this rank's channels."""
        assert self.mean is not None and self.variance is not None
        return _local(self.mean, channels), _local(self.variance, channels)


def _local(buffer: Any, channels: ShardTensorSpec | None) -> Tensor:
    if isinstance(buffer, ShardTensor):
        target = buffer._spec.replicated() if channels is None else channels
        return transition(buffer._local_tensor, buffer._spec, target)
    return buffer.detach() if channels is None else transition(buffer.detach(), channels.replicated(), channels)


class TrackingBatchNorm(BatchNorm):
    """Batch norm in training that updates buffers."""

    def __init__(self, norm: BatchNorm, buffers: Buffers) -> None:
        self.__dict__.update(norm.__dict__)
        self.buffers = buffers

    def see_moments(self, mean: Tensor, variance: Tensor) -> None:
        """Update the buffers. Communication: see `Buffers.update`."""
        unbiased = variance * (self.n_elements / max(self.n_elements - 1, 1))
        self.buffers.update(mean, unbiased, self.parameter)


class TrackingInstanceNorm(GroupNorm):
    """Instance norm that updates buffers by the average over the batch."""

    def __init__(self, norm: GroupNorm, buffers: Buffers) -> None:
        self.__dict__.update(norm.__dict__)
        self.buffers = buffers
        self.is_local = False  # torch's kernel for whole samples keeps no variance
        self.over_batch = merge_over(self.operand, (0,), self.operator)

    def see_moments(self, mean: Tensor, variance: Tensor) -> None:
        """Update the buffers.

        Notes
        -----
        Communication: one all-reduce where the batch is sharded; see `Buffers.update`.
        """
        unbiased = variance * (self.n_elements / max(self.n_elements - 1, 1))
        of_samples = torch.stack((mean, unbiased)).view(2, self.n_samples, self.n_channels).sum(1)
        n_samples = shape_of(self.operand)[0]
        mean, unbiased = (self.over_batch.all_reduce(of_samples) / max(n_samples, 1)).unbind(0)
        self.buffers.update(mean, unbiased, self.parameter)
