"""Operators that change the shape of a tensor object itself, and those that address memory, which is one per shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardtensor import ShardTensor, UnsupportedShardingError
from shardtensor.extending import dispatch, register_dispatch_handler

from ._meta import meta_like
from ._torch_private import change_shape_only

aten = torch.ops.aten


def _in_place(op: Any, view: Any) -> Callable[..., ShardTensor]:
    """Serve an in-place operator by its out-of-place view, whose shard and layout the object then takes."""

    def handler(tensor: ShardTensor, *arguments: Any) -> ShardTensor:
        result = dispatch(view, (tensor, *arguments), None)
        change_shape_only(op, tensor, *arguments)
        tensor._local_tensor, tensor._spec = result._local_tensor, result._spec
        return tensor

    return handler


for _op, _view in (
    (aten.unsqueeze_.default, aten.unsqueeze.default),
    (aten.squeeze_.default, aten.squeeze.default),
    (aten.squeeze_.dim, aten.squeeze.dim),
    (aten.squeeze_.dims, aten.squeeze.dims),
    (aten.t_.default, aten.t.default),
    (aten.transpose_.default, aten.transpose.int),
):
    register_dispatch_handler(_op, _in_place(_op, _view))


def as_strided(
    tensor: ShardTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """Address memory: only the strides that the tensor has already have an answer."""
    meta = meta_like(tensor._spec)
    is_same = tuple(size) == tuple(meta.shape) and tuple(stride) == tuple(meta.stride())
    if is_same and not storage_offset:
        return dispatch(aten.alias.default, (tensor,), None)  # type: ignore[no-any-return]
    raise UnsupportedShardingError(
        f"as_strided({tuple(size)}, {tuple(stride)}) addresses one memory, and each shard has its own",
        where="aten.as_strided",
        inputs=[tensor._spec.describe()],
        advice="use view, permute, slices, expand or unfold, or gather with full_tensor() first",
    )


register_dispatch_handler(aten.as_strided.default, as_strided)
