"""Products above autograd: of the shards first, then of what the ranks found.

torch's own gradient of a product asks for the zeros of the whole tensor. The gradient of the shards' products is
local, and the product over the ranks is one of a small replicated tensor; autograd differentiates both again, zeros
included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardtensor import ShardTensor
from shardtensor.extending import (
    FromLocal,
    Redistribute,
    ToLocal,
    contiguous_meta,
    make_spec,
    register_function_handler,
    without_partial,
)
from shardtensor_spec import DimSplit

from ._arguments import below, bind, is_in_graph
from ._naming import shape_of
from ._reduced_dims import checked_dims


def _serve(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = bind(args, kwargs, ("input", "dim", "keepdim"), ("dtype",))
    if bound is None or not is_in_graph(bound["input"]):
        return below(func, types, args, kwargs)
    tensor, dim, dtype = bound["input"], bound.get("dim"), bound.get("dtype")
    if not isinstance(tensor, ShardTensor) or not (dim is None or isinstance(dim, int)):
        return below(func, types, args, kwargs)
    if dim is not None and not -tensor.ndim <= dim < tensor.ndim:
        return below(func, types, args, kwargs)
    return _product(tensor, checked_dims(dim, tensor.ndim), bool(bound.get("keepdim")), dtype)


def _product(tensor: Any, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype | None) -> Any:
    settled = without_partial(tensor._spec)
    if settled is not tensor._spec:
        tensor = Redistribute.apply(tensor, settled)
    mesh = settled.mesh
    local = _product_along(ToLocal.apply(tensor, None), dims, dtype)
    # Each rank's product is one row of a tensor that has a row for every shard.
    shape, grid = list(shape_of(settled)), dict(settled.grid)
    for dim in dims:
        split = grid.get(dim)
        shape[dim] = 1 if split is None else len(split.sizes)
        if split is not None:
            grid[dim] = DimSplit(split.axes, (1,) * len(split.sizes))
    meta = contiguous_meta(shape, local.dtype)
    rows = FromLocal.apply(local, make_spec(mesh, meta, grid))
    kept = {dim: split for dim, split in grid.items() if dim not in dims}
    rows = Redistribute.apply(rows, make_spec(mesh, meta, kept))
    local = _product_along(ToLocal.apply(rows, None), dims, None)
    result_shape = [1 if dim in dims else extent for dim, extent in enumerate(shape)]
    if not keepdim:
        local = local.reshape([extent for dim, extent in enumerate(local.shape) if dim not in dims])
        result_shape = [extent for dim, extent in enumerate(shape) if dim not in dims]
        left = [dim for dim in range(len(shape)) if dim not in dims]
        kept = {left.index(dim): split for dim, split in kept.items()}
    return FromLocal.apply(local, make_spec(mesh, contiguous_meta(result_shape, local.dtype), kept))


def _product_along(local: Tensor, dims: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
    if not dims:
        return local.prod(dtype=dtype)
    if len(dims) == 1:
        return local.prod(dims[0], True, dtype=dtype)
    shape = [1 if dim in dims else extent for dim, extent in enumerate(local.shape)]
    return local.prod(dtype=dtype).reshape(shape)  # several dims are all of them here


for _function in (torch.prod, torch.Tensor.prod):
    register_function_handler(_function, _serve, promote=False)
