"""The private names of torch that this package uses, all in one place.

`DTensorSpec` and `TensorMeta` describe a tensor over a mesh, `_StridedShard` is torch's placement for a folded
dimension, and the default process group is only compared for identity, never used.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard as FoldedShard

__all__ = ["DTensorSpec", "FoldedShard", "TensorMeta", "default_process_group"]


def default_process_group() -> Any:
    """Return the default process group, or None where there is none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
