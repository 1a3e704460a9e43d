"""Reductions: which dtype to reduce in, and the fixed order of local sums."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shardtensor_spec import UnsupportedShardingError

ReduceOp = Literal["sum", "mean", "max", "min", "product"]

OPS: tuple[ReduceOp, ...] = ("sum", "mean", "max", "min", "product")

_DIST_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # divided afterwards, alike on every backend
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}

# Dtypes that a backend cannot reduce in, and the nearest one that holds all their values.
_WIDER = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}

# Sums over ranks of short floats lose a digit per step; local sums use this one.
_ACCUMULATE_IN = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


def dist_op(op: ReduceOp, dtype: torch.dtype) -> dist.ReduceOp.RedOpType:
    """The backend's name of the reduction, for values in the dtype that :func:`widened` gives."""
    if dtype is torch.bool:  # sums and products of truth values are any and all
        return _DIST_OPS["min" if op in ("min", "product") else "max"]
    return _DIST_OPS[op]


def check_op(op: str, dtype: torch.dtype, differentiable: bool, where: str) -> None:
    """Check that the reduction exists for the dtype.

    Raises
    ------
    ValueError
        If there is no such reduction, or it has no gradient and one is needed.
    UnsupportedShardingError
        If no dtype that the backend can reduce in holds the values.
    """
    if op not in OPS:
        raise ValueError(f"unknown reduction {op!r} in {where}; known are {', '.join(OPS)}")
    if differentiable and op not in ("sum", "mean"):
        raise ValueError(f"{where} with op={op!r} has no gradient; detach the input first")
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise UnsupportedShardingError(
            f"the mean of {dtype} is not a {dtype}", where=where, advice="sum, or convert to a floating dtype first"
        )
    if dtype.is_complex and op in ("max", "min", "product"):
        raise UnsupportedShardingError(f"no backend has the {op} of complex numbers", where=where)
    if dtype is torch.uint64 and op in ("max", "min"):
        raise UnsupportedShardingError(
            f"no backend has the {op} of {dtype}, and no wider dtype holds it",
            where=where,
            advice="convert to int64 if the values are below 2**63",
        )
    if dtype not in _WIDER and not _is_reducible(dtype):
        raise UnsupportedShardingError(f"{dtype} cannot be reduced", where=where, advice="convert it first")


def widened(tensor: Tensor) -> Tensor:
    """The values in a dtype that backends reduce in: the tensor itself, a view of it, or a wider copy."""
    wider = _WIDER.get(tensor.dtype)
    if wider is not None:
        return tensor.to(wider)
    if tensor.dtype is torch.uint64:
        return tensor.view(torch.int64)  # sums and products modulo 2**64 have the same bits
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8)
    if tensor.is_complex():
        return torch.view_as_real(tensor)  # only sums and means exist, and these are pairwise
    return tensor


def narrowed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo :func:`widened`."""
    if tensor.dtype is dtype:
        return tensor
    if dtype is torch.uint64 or dtype is torch.bool:
        return tensor.view(dtype)
    if dtype.is_complex:
        return torch.view_as_complex(tensor)
    return tensor.to(dtype)


def reduce_in_order(pieces: list[Tensor], op: ReduceOp, untouched: int | None = None) -> Tensor:
    """Reduce equally shaped tensors from the first to the last, so that the result is the same each time.

    Parameters
    ----------
    pieces : list of Tensor
        At least two.
    op : str
        The reduction.
    untouched : int, optional
        The others may be overwritten; without it none is.
    """
    dtype = pieces[0].dtype
    values = [widened(piece) for piece in pieces]
    accumulator: Tensor | None = None
    if op in ("sum", "mean") and dtype in _ACCUMULATE_IN:
        values[0] = accumulator = values[0].to(_ACCUMULATE_IN[dtype])
    elif untouched is not None:
        accumulator = values[1 if untouched == 0 else 0]
    combine = _combination(op, dtype)
    result = values[0]
    for value in values[1:]:
        result = combine(result, value) if accumulator is None else combine(result, value, out=accumulator)
    if op == "mean":
        result = result.div_(len(pieces))
    return narrowed(result, dtype)


def _combination(op: ReduceOp, dtype: torch.dtype) -> Any:
    if dtype is torch.bool:
        return torch.minimum if op in ("min", "product") else torch.maximum
    return {
        "sum": torch.add,
        "mean": torch.add,
        "max": torch.maximum,
        "min": torch.minimum,
        "product": torch.mul,
    }[op]


def _is_reducible(dtype: torch.dtype) -> bool:
    if dtype.is_floating_point:
        return dtype.itemsize >= 2
    return dtype.is_complex or dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.uint64,
    )
