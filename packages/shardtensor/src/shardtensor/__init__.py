"""`ShardTensor`: a ``torch.Tensor`` whose rows live on several ranks, as many on each as its layout says."""

from __future__ import annotations

from shardtensor_spec import (
    LayoutMismatchError,
    ShardTensorError,
    ShardTensorSpec,
    UnsupportedShardingError,
    local_slices,
)

from . import _set_data as _set_data
from . import _structural_rules as _structural_rules
from ._fallback_mode import FallbackMode, get_fallback_mode, set_fallback_mode
from ._promotion import TensorPromotionMode
from ._registry import ManifestConflictError, served_names
from ._scatter import scatter_tensor
from ._tensor import ShardTensor

__all__ = [
    "FallbackMode",
    "LayoutMismatchError",
    "ManifestConflictError",
    "ShardTensor",
    "ShardTensorError",
    "ShardTensorSpec",
    "TensorPromotionMode",
    "UnsupportedShardingError",
    "get_fallback_mode",
    "local_slices",
    "scatter_tensor",
    "served_names",
    "set_fallback_mode",
]
