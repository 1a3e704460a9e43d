"""Layer norm and RMS norm: rows over the last dims, which may be sharded."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from shardtensor import ShardTensorSpec
from shardtensor.extending import contiguous_meta, make_spec

from ._naming import shape_of
from ._norm_function import Norm, Saved, merge_over, metas_like, settled_layout
from ._rank_merge import accumulation_dtype, merged_moments

aten = torch.ops.aten


class RowNorm:
    """A norm over the last ``n_dims`` dims. See `Norm`."""

    def __init__(self, spec: ShardTensorSpec, n_dims: int, operator: str) -> None:
        first = spec.ndim - n_dims
        self.operator = operator
        self.dims = tuple(range(first, spec.ndim))
        self.operand = spec if _is_plain(spec) else settled_layout(spec, {})
        self.result = make_spec(spec.mesh, metas_like(self.operand), self.operand.grid)
        self.merge = merge_over(self.operand, self.dims, operator)
        self.parameter_sum = merge_over(self.operand, tuple(range(first)), operator)
        shape = shape_of(spec)
        self.row_shape = shape[first:]
        self.local_row_shape = tuple(self.operand.local_shape[first:])
        self.n_elements = math.prod(self.row_shape)
        self.n_local = math.prod(self.local_row_shape)
        grid = {dim - first: split for dim, split in self.operand.grid.items() if dim >= first}
        self.parameter = (
            make_spec(spec.mesh, contiguous_meta(self.row_shape, metas_like(spec).dtype), grid) if grid else None
        )
        self.counts = self.merge.counts(self.operand, self.dims)

    def _rows(self, local: Tensor) -> Tensor:
        """Rows in the dtype that sums are made in: (rows, n_local)."""
        n_rows = math.prod(local.shape[: local.ndim - len(self.dims)])
        return local.reshape(n_rows, self.n_local).to(accumulation_dtype(local.dtype))


class LocalLayerNorm(RowNorm):
    """Layer norm of whole rows: torch's own kernels."""

    def forward(self, local: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Saved]:
        """See `Norm`. No communication."""
        result, mean, rstd = torch.native_layer_norm(local, self.row_shape, weight, bias, eps)
        return result, (mean, rstd)

    def backward(
        self,
        gradient: Tensor,
        local: Tensor,
        weight: Tensor | None,
        saved: Saved,
        eps: float,
        needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """See `Norm`. No communication."""
        mean, rstd = saved
        # The kernel asks the bias for nothing but its dtype, so the weight does. Alone, a bias gets its gradient here.
        of_operand, of_weight, of_bias = aten.native_layer_norm_backward(
            gradient, local, self.row_shape, mean, rstd, weight, weight, (*needs[:2], needs[2] and weight is not None)
        )
        if needs[2] and weight is None:
            of_bias = gradient.reshape(-1, *self.row_shape).sum(0)
        return of_operand, of_weight, of_bias

    def backward_by_operators(self, gradient: Any, operand: Any, weight: Any, eps: float) -> tuple[Any, Any, Any]:
        """See `Norm`."""
        return layer_norm_backward(gradient, operand, weight, self.dims, eps)


class ShardedLayerNorm(RowNorm):
    """Layer norm of rows that are sharded: moments merged in one collective, their gradients in one."""

    def forward(self, local: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Saved]:
        """See `Norm`.

        Notes
        -----
        Communication: one all-gather of a mean and a variance per row.
        """
        rows = self._rows(local)
        if rows.numel():
            variance, mean = torch.var_mean(rows, 1, correction=0)
        else:
            mean = rows.new_zeros(rows.shape[0])
            variance = torch.zeros_like(mean)
        mean, squares = merged_moments(self.merge, mean, variance * self.n_local, self.counts)
        rstd = (squares / self.n_elements + eps).rsqrt_()
        result = ((rows - mean.unsqueeze(1)).mul_(rstd.unsqueeze(1))).view(rows.shape[0], *self.local_row_shape)
        return _scaled(result, weight, bias, local), (mean, rstd)

    def backward(
        self,
        gradient: Tensor,
        local: Tensor,
        weight: Tensor | None,
        saved: Saved,
        eps: float,
        needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """See `Norm`.

        Notes
        -----
        Communication: one all-reduce of two numbers per row.
        """
        mean, rstd = saved
        normalized = (self._rows(local) - mean.unsqueeze(1)).mul_(rstd.unsqueeze(1))
        rows = self._rows(gradient)
        of_weight = _row_sum(rows * normalized, self.local_row_shape, weight) if needs[1] else None
        of_bias = _row_sum(rows, self.local_row_shape, gradient) if needs[2] else None
        if not needs[0]:
            return None, of_weight, of_bias
        scaled = rows if weight is None else rows * weight.reshape(-1).to(rows.dtype)
        sums = torch.stack((scaled.sum(1), (scaled * normalized).sum(1)))
        of_scale, of_product = (self.merge.all_reduce(sums) / self.n_elements).unsqueeze(2).unbind(0)
        of_operand = (scaled - of_scale).sub_(normalized.mul_(of_product)).mul_(rstd.unsqueeze(1))
        return of_operand.to(local.dtype).view(local.shape), of_weight, of_bias

    def backward_by_operators(self, gradient: Any, operand: Any, weight: Any, eps: float) -> tuple[Any, Any, Any]:
        """See `Norm`."""
        return layer_norm_backward(gradient, operand, weight, self.dims, eps)


class RmsNorm(RowNorm):
    """RMS norm of rows, sharded or not."""

    def forward(self, local: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Saved]:
        """See `Norm`.

        Notes
        -----
        Communication: where rows are sharded, one all-reduce of a number per row.
        """
        rows = self._rows(local)
        squares = torch.linalg.vector_norm(rows, 2, 1).square_()
        rstd = (self.merge.all_reduce(squares) / self.n_elements + eps).rsqrt_()
        result = (rows * rstd.unsqueeze(1)).view(rows.shape[0], *self.local_row_shape)
        return _scaled(result, weight, None, local), (rstd,)

    def backward(
        self,
        gradient: Tensor,
        local: Tensor,
        weight: Tensor | None,
        saved: Saved,
        eps: float,
        needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """See `Norm`.

        Notes
        -----
        Communication: where rows are sharded, one all-reduce of a number per row.
        """
        (rstd,) = saved
        normalized = self._rows(local) * rstd.unsqueeze(1)
        rows = self._rows(gradient)
        of_weight = _row_sum(rows * normalized, self.local_row_shape, weight) if needs[1] else None
        if not needs[0]:
            return None, of_weight, None
        scaled = rows if weight is None else rows * weight.reshape(-1).to(rows.dtype)
        of_product = self.merge.all_reduce((scaled * normalized).sum(1)) / self.n_elements
        of_operand = (scaled - normalized.mul_(of_product.unsqueeze(1))).mul_(rstd.unsqueeze(1))
        return of_operand.to(local.dtype).view(local.shape), of_weight, None

    def backward_by_operators(self, gradient: Any, operand: Any, weight: Any, eps: float) -> tuple[Any, Any, Any]:
        """See `Norm`."""
        rstd = ((operand * operand).mean(self.dims, keepdim=True) + eps).rsqrt()
        normalized = operand * rstd
        scaled = gradient if weight is None else gradient * weight
        of_operand = rstd * (scaled - normalized * (scaled * normalized).mean(self.dims, keepdim=True))
        leading = tuple(range(self.dims[0]))
        of_weight = gradient * normalized
        return of_operand, of_weight.sum(leading) if leading else of_weight, None


def layer_norm_backward(
    gradient: Any, operand: Any, weight: Any, dims: tuple[int, ...], eps: float
) -> tuple[Any, Any, Any]:
    """Gradients of a layer norm over the last dims, by operators that have gradients themselves."""
    deviation = operand - operand.mean(dims, keepdim=True)
    rstd = ((deviation * deviation).mean(dims, keepdim=True) + eps).rsqrt()
    normalized = deviation * rstd
    scaled = gradient if weight is None else gradient * weight
    of_product = (scaled * normalized).mean(dims, keepdim=True)
    of_operand = rstd * (scaled - scaled.mean(dims, keepdim=True) - normalized * of_product)
    leading = tuple(range(dims[0]))
    if not leading:
        return of_operand, gradient * normalized, gradient
    return of_operand, (gradient * normalized).sum(leading), gradient.sum(leading)


def _scaled(normalized: Tensor, weight: Tensor | None, bias: Tensor | None, like: Tensor) -> Tensor:
    if weight is not None:
        normalized.mul_(weight)
    if bias is not None:
        normalized.add_(bias)
    return normalized.to(like.dtype).view(like.shape)


def _row_sum(rows: Tensor, shape: tuple[int, ...], like: Tensor | None) -> Tensor:
    total = rows.sum(0).view(shape)
    return total if like is None else total.to(like.dtype)


def _is_plain(spec: ShardTensorSpec) -> bool:
    return not spec.has_partial and not spec.is_folded


@functools.lru_cache(maxsize=1024)
def row_norm(spec: ShardTensorSpec, n_dims: int, is_rms: bool) -> Norm:
    """Make the norm for a layout."""
    if is_rms:
        return RmsNorm(spec, n_dims, "rms_norm")
    probe = LocalLayerNorm(spec, n_dims, "layer_norm")
    return probe if probe.parameter is None else ShardedLayerNorm(spec, n_dims, "layer_norm")
