"""Domain parallelism for PyTorch: one sample split over several devices, through unmodified modules.

Everything here is another package's: `shardtensor` and `shardtensor_parallel_utils` in full, and what a training
script needs of `shardtensor_spec` and `shardtensor_collectives`. `shardtensor_ops` is found by itself.
"""

from __future__ import annotations

from shardtensor import (
    FallbackMode,
    LayoutMismatchError,
    ManifestConflictError,
    ShardTensor,
    ShardTensorError,
    ShardTensorSpec,
    TensorPromotionMode,
    UnsupportedShardingError,
    get_fallback_mode,
    local_slices,
    scatter_tensor,
    served_names,
    set_fallback_mode,
)
from shardtensor_collectives import CommEvent, comm_trace
from shardtensor_parallel_utils import init_domain_mesh, sync_module_over_mesh
from shardtensor_spec import chunk_sizes, sizes_from_fractions

__all__ = [
    "CommEvent",
    "FallbackMode",
    "LayoutMismatchError",
    "ManifestConflictError",
    "ShardTensor",
    "ShardTensorError",
    "ShardTensorSpec",
    "TensorPromotionMode",
    "UnsupportedShardingError",
    "chunk_sizes",
    "comm_trace",
    "get_fallback_mode",
    "init_domain_mesh",
    "local_slices",
    "scatter_tensor",
    "served_names",
    "set_fallback_mode",
    "sizes_from_fractions",
    "sync_module_over_mesh",
]
