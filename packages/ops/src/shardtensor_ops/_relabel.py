"""Plans of operators that only rename dims, and what local views need."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial

from shardtensor import ShardTensorSpec
from shardtensor.extending import Call, Plan, TensorMeta, make_spec
from shardtensor_spec import DimSplit


def pending_of(spec: ShardTensorSpec) -> dict[int, str]:
    """Mesh axis -> operation of a pending reduction."""
    return {axis: str(p.reduce_op) for axis, p in enumerate(spec.placements) if isinstance(p, Partial)}


def only_meta(call: Call) -> TensorMeta:
    """Global shape, stride and dtype of the one result."""
    (meta,) = call.global_metas
    assert meta is not None
    return meta


def relaid(spec: ShardTensorSpec, grid: Mapping[int, DimSplit], meta: TensorMeta | None = None) -> ShardTensorSpec:
    """Layout with another grid (and meta), the pending reductions kept on axes that shard nothing."""
    meta = spec.tensor_meta if meta is None else meta
    assert meta is not None
    taken = {axis for split in grid.values() for axis in split.axes}
    pending = {axis: operation for axis, operation in pending_of(spec).items() if axis not in taken}
    return make_spec(spec.mesh, meta, grid, pending)


def relabel_plan(
    call: Call, sources: Sequence[int | None], local: Callable[..., Any] | None = None, *, allow_folded: bool = True
) -> Plan:
    """Plan an operator each of whose result dims is an input dim or a new one. A pending reduction stays pending.

    Parameters
    ----------
    call : Call
        An operator of one tensor with one result.
    sources : Sequence of int or None
        For each dim of the result the input dim that it is, None for a new one. Splits of input dims that are in no
        result dim are undone first.
    local : callable, optional
        What runs on the local tensor.
    allow_folded : bool
        Whether a folded dim may stay so.
    """
    (spec,) = call.specs
    grid: dict[int, DimSplit] = {}
    kept: dict[int, DimSplit] = {}
    for position, source in enumerate(sources):
        split = spec.grid.get(source) if source is not None else None
        if split is not None and source is not None and (allow_folded or split.n_repeats == 1):
            grid[position] = kept[source] = split
    target = spec if len(kept) == len(spec.grid) else relaid(spec, kept)
    return Plan((target,), relaid(spec, grid, only_meta(call)), local)


def local_view(shape: Sequence[int]) -> Callable[..., torch.Tensor]:
    """Return what views a local tensor as ``shape``, whatever the arguments of the operator say."""
    shape = tuple(shape)

    def view(local: torch.Tensor, *arguments: object, **keywords: object) -> torch.Tensor:
        try:
            return local.view(shape)
        except RuntimeError:
            return _rebound(local).view(shape)

    return view


def local_reshape(shape: Sequence[int]) -> Callable[..., torch.Tensor]:
    """Return what reshapes a local tensor, for operators that promise no alias."""
    shape = tuple(shape)

    def reshape(local: torch.Tensor, *arguments: object, **keywords: object) -> torch.Tensor:
        return local.reshape(shape)

    return reshape


def _rebound(local: torch.Tensor) -> torch.Tensor:
    """Make a local tensor contiguous where the whole one is, so that it and its view share memory as those do.

    The strides of a shard may differ from those of the whole tensor, e.g. where rows were received: a view that the
    whole tensor allows is then impossible on the shard. Its memory moves, the object stays.
    """
    if type(local) is torch.Tensor:
        local.set_(local.contiguous())  # type: ignore[call-overload]
        return local
    return local.contiguous()  # while torch.compile traces, aliases are its business


def numel(shape: Sequence[int]) -> int:
    """Elements of a shape."""
    return math.prod(shape)
