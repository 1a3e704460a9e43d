"""Layout arithmetic of sharded tensors: integers only, no process group is ever touched."""

from __future__ import annotations

from ._boxes import (
    Box,
    are_disjoint,
    box_numel,
    box_of_shape,
    box_shape,
    box_slices,
    contains,
    intersect,
    merge_adjacent,
    relative_to,
    shift,
    subtract,
)
from ._errors import LayoutMismatchError, ShardTensorError, UnsupportedShardingError
from ._exchange import lower_bound_elements, plan_exchange
from ._exchange_plan import AdjointPlan, ExchangePlan, Message, Piece
from ._grid import (
    DimSplit,
    Grid,
    chunk_grid,
    folded_placement,
    grid_of_sizes,
    is_sharding,
    normalized_placements,
    sharded_dims,
)
from ._interning import forget_old_world, on_new_world
from ._sizes import check_sizes, chunk_sizes, offsets_of, sizes_from_fractions
from ._slabs import local_slices
from ._spec import ShardTensorSpec, contiguous_stride, describe_placement

__all__ = [
    "AdjointPlan",
    "Box",
    "DimSplit",
    "ExchangePlan",
    "Grid",
    "LayoutMismatchError",
    "Message",
    "Piece",
    "ShardTensorError",
    "ShardTensorSpec",
    "UnsupportedShardingError",
    "are_disjoint",
    "box_numel",
    "box_of_shape",
    "box_shape",
    "box_slices",
    "check_sizes",
    "chunk_grid",
    "chunk_sizes",
    "contains",
    "contiguous_stride",
    "describe_placement",
    "folded_placement",
    "forget_old_world",
    "grid_of_sizes",
    "intersect",
    "is_sharding",
    "local_slices",
    "lower_bound_elements",
    "merge_adjacent",
    "normalized_placements",
    "offsets_of",
    "on_new_world",
    "plan_exchange",
    "relative_to",
    "sharded_dims",
    "shift",
    "sizes_from_fractions",
    "subtract",
]
