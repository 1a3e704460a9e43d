"""The network: MONAI's ``BasicUNet`` as it comes out of the package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from monai.networks.nets.basic_unet import BasicUNet

from brain_mri._data import TISSUES

N_FEATURES = 6


def build_model(features: Sequence[int], seed: int) -> torch.nn.Module:
    """A 3-D U-Net from one image to one logit per tissue.

    Parameters
    ----------
    features : Sequence of int, (6,)
        Channels of the five levels, and of the last block.
    seed : int
        Of the initial weights.

    Notes
    -----
    It calls ``conv3d``, ``instance_norm``, ``leaky_relu`` (in place), ``dropout`` (rate 0), ``max_pool3d``,
    ``conv_transpose3d``, ``cat`` and, where a level has an odd extent, ``F.pad(..., mode="replicate")``.
    """
    torch.manual_seed(seed)
    model = BasicUNet(spatial_dims=3, in_channels=1, out_channels=len(TISSUES), features=tuple(features))
    return cast(torch.nn.Module, model)
