"""Regions of tensors, given as boxes."""

from __future__ import annotations

from torch import Tensor

from shardtensor_spec import Box


def region(tensor: Tensor, box: Box) -> Tensor:
    """View of a box of the tensor; only dimensions that are really cut cost anything."""
    for dim, (start, stop) in enumerate(box):
        if stop - start != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor
