"""What one training step is. The same lines serve plain tensors on one process and ShardTensors on many."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def tissue_loss(logits: torch.Tensor, tissues: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropy plus soft Dice, both for soft targets.

    Parameters
    ----------
    logits, tissues : Tensor, (n_samples, n_tissues, x, y, z)
        Prediction and the true share of each tissue, from 0 to 1.

    Returns
    -------
    Tensor, ()
        The mean over samples of the loss of each.

    References
    ----------
    The Dice term has squares in the denominator, so that it is least where both are equal even if the target is soft:
    Milletari, Navab, Ahmadi, "V-Net", 3DV 2016.
    """
    voxels = (2, 3, 4)
    cross_entropy = F.binary_cross_entropy_with_logits(logits, tissues)
    probability = torch.sigmoid(logits)
    overlap = (probability * tissues).sum(dim=voxels)
    total = (probability.square() + tissues.square()).sum(dim=voxels)
    dice = 1 - (2 * overlap + 1) / (total + 1)
    return cross_entropy + dice.mean()


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, image: torch.Tensor, tissues: torch.Tensor
) -> torch.Tensor:
    """Forward, backward, update; gradients are gone afterwards.

    Returns
    -------
    Tensor, ()
        The loss before the update, without its graph.
    """
    loss = tissue_loss(model(image), tissues)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
