"""Group, instance and batch norm: statistics per channel or group, over space (and batch) that may be sharded.

The local passes are torch's own batch-norm kernels, which read an activation once and write it once: statistics
(``batch_norm_update_stats``), application (batch norm in evaluation with the merged statistics) and the sums of the
backward pass. So memory is that of torch's norms: the operand, a result, and two numbers per channel.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from shardtensor import ShardTensorSpec
from shardtensor.extending import contiguous_meta, make_spec, wrap

from ._linear import memory_format_of
from ._naming import shape_of
from ._norm_function import Saved, merge_over, metas_like, settled_layout
from ._rank_merge import accumulation_dtype, merged_moments

aten = torch.ops.aten


class ChannelNorm:
    """What the norms over channels have in common. See `Norm`."""

    operator: str

    def __init__(self, spec: ShardTensorSpec, channels_per_group: int, dims: tuple[int, ...]) -> None:
        self.operand = settled_layout(spec, {1: channels_per_group})
        self.merge = merge_over(self.operand, dims, self.operator)
        self.dims = dims
        kept = tuple(dim for dim in (0, 1) if dim not in dims)
        self.parameter_sum = merge_over(self.operand, tuple(dim for dim in kept if dim != 1), self.operator)
        channels = self.operand.grid.get(1)
        n_channels = shape_of(spec)[1]
        meta = contiguous_meta((n_channels,), metas_like(spec).dtype)
        self.parameter = None if channels is None else make_spec(spec.mesh, meta, {0: channels})
        self.result = make_spec(spec.mesh, self._result_meta(), self.operand.grid)
        self.counts = [channels_per_group * n for n in self.merge.counts(self.operand, dims)]
        self.n_elements = sum(self.counts)

    def _result_meta(self) -> Any:
        return metas_like(self.operand)

    def backward_by_operators(self, gradient: Any, operand: Any, weight: Any, eps: float) -> tuple[Any, Any, Any]:
        """See `Norm`."""
        raise NotImplementedError


class GroupNorm(ChannelNorm):
    """Group norm; instance norm is the one with a group for every channel."""

    def __init__(self, spec: ShardTensorSpec, n_groups: int, operator: str) -> None:
        self.operator = operator
        self.channels_per_group = shape_of(spec)[1] // n_groups
        self.n_groups = n_groups
        super().__init__(spec, self.channels_per_group, tuple(range(2, spec.ndim)))
        n_samples, n_channels, *space = self.operand.local_shape
        self.n_samples, self.n_channels, self.n_local = n_samples, n_channels, math.prod(space)
        self.n_local_groups = n_channels // self.channels_per_group
        # torch's kernel for whole samples takes no empty ones.
        self.is_local = not self.merge.axes and math.prod(self.operand.local_shape) > 0
        self.mine = self.channels_per_group * self.n_local

    def forward(self, local: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Saved]:
        """See `Norm`.

        Notes
        -----
        Communication: where space is sharded, one all-gather of a mean and a variance per sample and group.
        """
        if self.is_local:
            result, mean, rstd = torch.native_group_norm(
                local.contiguous(), weight, bias, *self._extents(), self.n_local_groups, eps
            )
            return result, (mean, rstd)
        mean, squares = self.local_moments(local)
        mean, squares = merged_moments(self.merge, mean, squares, self.counts)
        variance = squares / self.n_elements
        self.see_moments(mean, variance)
        result = self._applied(local, self._per_channel(weight), self._per_channel(bias), mean, variance, eps)
        return result.view(local.shape), (mean, variance)

    def see_moments(self, mean: Tensor, variance: Tensor) -> None:
        """Do nothing: `TrackingInstanceNorm` keeps running averages."""

    def local_moments(self, local: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and sum of squared deviations of every sample and group on this rank: two of (n_samples * groups,)."""
        n_rows = self.n_samples * self.n_local_groups
        dtype = accumulation_dtype(local.dtype)
        if local.numel() == 0:
            return local.new_zeros(n_rows, dtype=dtype), local.new_zeros(n_rows, dtype=dtype)
        mean, variance = local_moments(local.contiguous().view(1, n_rows, self.mine))
        return mean, variance * self.mine

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
        Communication: where space is sharded, one all-reduce of two numbers per sample and channel.
        """
        mean, variance = saved
        if self.is_local:
            return aten.native_group_norm_backward(  # type: ignore[no-any-return]
                gradient.contiguous(),
                local.contiguous(),
                mean,
                variance,  # the reciprocal deviation here
                weight,
                *self._extents(),
                self.n_local_groups,
                list(needs),
            )
        n_rows = self.n_samples * self.n_channels
        rows, of_result = (t.contiguous().view(1, n_rows, self.n_local) for t in (local, gradient))
        mean_of, variance_of = self._per_group_channel(mean), self._per_group_channel(variance)
        products, sums = local_sums(of_result, rows, mean_of, variance_of, eps)
        products, sums = self.merge.all_reduce(torch.stack((products, sums))).unbind(0)
        of_weight = products.view(self.n_samples, self.n_channels).sum(0) if needs[1] else None
        of_bias = sums.view(self.n_samples, self.n_channels).sum(0) if needs[2] else None
        of_weight = of_weight if of_weight is None or weight is None else of_weight.to(weight.dtype)
        of_bias = of_bias if of_bias is None else of_bias.to(gradient.dtype if weight is None else weight.dtype)
        if not needs[0]:
            return None, of_weight, of_bias
        rstd = (variance + eps).rsqrt_()
        scale = self._per_channel(weight)
        if scale is not None:
            products, sums = products * scale, sums * scale
        shape = (self.n_samples * self.n_local_groups, self.channels_per_group)
        of_group = (products.view(shape).sum(1), sums.view(shape).sum(1))
        slope, shift = (self._per_group_channel(rstd * t / -self.n_elements) for t in of_group)
        rstd_of = self._per_group_channel(rstd)
        factor = rstd_of if scale is None else rstd_of * scale
        of_operand = combined(of_result, rows, factor, slope, shift, mean_of, variance_of, eps)
        return of_operand.view(local.shape), of_weight, of_bias

    def backward_by_operators(self, gradient: Any, operand: Any, weight: Any, eps: float) -> tuple[Any, Any, Any]:
        """See `Norm`."""
        shape = shape_of(self.operand)
        split = (shape[0], self.n_groups, self.channels_per_group, *shape[2:])
        dims = tuple(range(2, len(split)))
        scale = (
            None
            if weight is None
            else weight.reshape(1, self.n_groups, self.channels_per_group, *(1,) * (len(split) - 3))
        )
        of_operand, products = _norm_backward(gradient.reshape(split), operand.reshape(split), scale, dims, eps)
        sum_dims = (0, *range(3, len(split)))
        of_weight, of_bias = products.sum(sum_dims), gradient.reshape(split).sum(sum_dims)
        return of_operand.reshape(shape), of_weight.reshape(shape[1]), of_bias.reshape(shape[1])

    def _extents(self) -> tuple[int, int, int]:
        return self.n_samples, self.n_channels, self.n_local

    def _per_channel(self, parameter: Tensor | None) -> Tensor | None:
        """A weight for every sample and channel, in the dtype of the statistics."""
        if parameter is None:
            return None
        wide = parameter.to(accumulation_dtype(parameter.dtype))
        return wide if self.n_samples == 1 else wide.repeat(self.n_samples)

    def _per_group_channel(self, statistic: Tensor) -> Tensor:
        """A statistic of every sample and group, for every channel."""
        return statistic if self.channels_per_group == 1 else statistic.repeat_interleave(self.channels_per_group)

    def _applied(
        self, local: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
    ) -> Tensor:
        rows = local.contiguous().view(1, self.n_samples * self.n_channels, self.n_local)
        mean, variance = self._per_group_channel(mean), self._per_group_channel(variance)
        return applied(rows, weight, bias, mean, variance, eps)


class BatchNorm(ChannelNorm):
    """Batch norm in training: statistics of every channel over batch and space."""

    operator = "batch_norm"

    def __init__(self, spec: ShardTensorSpec) -> None:
        super().__init__(spec, 1, (0, *range(2, spec.ndim)))
        self.n_local = math.prod(self.operand.local_shape) // max(self.operand.local_shape[1], 1)

    def _result_meta(self) -> Any:
        meta = self.operand.tensor_meta
        assert meta is not None
        return metas_like(self.operand) if memory_format_of(meta.stride, meta.shape) is None else meta

    def moments(self, local: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of every channel over the whole batch.

        Notes
        -----
        Communication: where batch or space is sharded, one all-gather of a mean and a variance per channel.
        """
        n_channels, dtype = local.shape[1], accumulation_dtype(local.dtype)
        if local.numel() == 0:
            mean, squares = local.new_zeros(n_channels, dtype=dtype), local.new_zeros(n_channels, dtype=dtype)
        else:
            mean, variance = local_moments(local)
            squares = variance * self.n_local
        mean, squares = merged_moments(self.merge, mean, squares, self.counts)
        return mean, squares / self.n_elements

    def forward(self, local: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Saved]:
        """See `Norm`. Communication: as `moments`."""
        mean, variance = self.moments(local)
        self.see_moments(mean, variance)
        return applied(local, _wide(weight), _wide(bias), mean, variance, eps), (mean, variance)

    def see_moments(self, mean: Tensor, variance: Tensor) -> None:
        """Do nothing: `TrackingBatchNorm` keeps running averages."""

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
        Communication: where batch or space is sharded, one all-reduce of two numbers per channel.
        """
        mean, variance = saved
        products, sums = local_sums(gradient, local, mean, variance, eps)
        products, sums = self.merge.all_reduce(torch.stack((products, sums))).unbind(0)
        dtype = local.dtype if weight is None else weight.dtype
        of_weight = products.to(dtype) if needs[1] else None
        of_bias = sums.to(dtype) if needs[2] else None
        if not needs[0]:
            return None, of_weight, of_bias
        rstd = (variance + eps).rsqrt_()
        scale = rstd if weight is None else rstd * weight
        slope, shift = scale * products / -self.n_elements, scale * sums / -self.n_elements
        return combined(gradient, local, scale, slope, shift, mean, variance, eps), of_weight, of_bias

    def backward_by_operators(self, gradient: Any, operand: Any, weight: Any, eps: float) -> tuple[Any, Any, Any]:
        """See `Norm`."""
        shape = (1, -1, *(1,) * (self.operand.ndim - 2))
        scale = None if weight is None else weight.reshape(shape)
        of_operand, products = _norm_backward(gradient, operand, scale, self.dims, eps)
        return of_operand, products.sum(self.dims), gradient.sum(self.dims)


class FixedBatchNorm(ChannelNorm):
    """Batch norm in evaluation: pointwise, with given statistics."""

    operator = "batch_norm"

    def __init__(self, spec: ShardTensorSpec, mean: Tensor, variance: Tensor) -> None:
        super().__init__(spec, 1, ())
        # Nothing is merged: the gradients of weight and bias are sums over everything but channels.
        self.parameter_sum = merge_over(self.operand, (0, *range(2, spec.ndim)), self.operator)
        self.mean, self.variance = mean, variance

    _result_meta = BatchNorm._result_meta

    def forward(self, local: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Saved]:
        """See `Norm`. No communication."""
        mean, variance = _wide(self.mean), _wide(self.variance)
        assert mean is not None and variance is not None
        return applied(local, _wide(weight), _wide(bias), mean, variance, eps), ()

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
        mean, variance = _wide(self.mean), _wide(self.variance)
        assert mean is not None and variance is not None
        of_operand = of_weight = of_bias = None
        dtype = local.dtype if weight is None else weight.dtype
        if needs[1] or needs[2]:
            products, sums = local_sums(gradient, local, mean, variance, eps)
            of_weight = products.to(dtype) if needs[1] else None
            of_bias = sums.to(dtype) if needs[2] else None
        if needs[0]:
            rstd = (variance + eps).rsqrt_()
            scale = rstd if weight is None else rstd * weight
            of_operand = (gradient * scale.view(-1, *(1,) * (local.ndim - 2))).to(local.dtype)
        return of_operand, of_weight, of_bias

    def backward_by_operators(self, gradient: Any, operand: Any, weight: Any, eps: float) -> tuple[Any, Any, Any]:
        """See `Norm`."""
        shape = (-1, *(1,) * (self.operand.ndim - 2))
        layout = self.parameter or make_spec(self.operand.mesh, contiguous_meta(self.mean.shape, self.mean.dtype), {})
        mean = wrap(self.mean, layout).reshape(shape)
        rstd = wrap((self.variance + eps).rsqrt(), layout).reshape(shape)
        scaled = gradient if weight is None else gradient * weight.reshape(shape)
        dims = (0, *range(2, self.operand.ndim))
        return scaled * rstd, (gradient * (operand - mean) * rstd).sum(dims), gradient.sum(dims)


def local_moments(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance over all but dim 1, in the dtype that sums are made in; deviations are taken from the mean."""
    dtype = accumulation_dtype(rows.dtype)
    if dtype == rows.dtype:
        mean, variance = aten.batch_norm_update_stats(rows, None, None, 0.0)
        return mean, variance
    # Running statistics of a wider dtype make the kernel answer in that.
    wide = rows.new_zeros(rows.shape[1], dtype=dtype)
    mean, variance = aten.batch_norm_update_stats(rows, wide, torch.zeros_like(wide), 0.0)
    return mean, variance


def applied(
    rows: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    """Normalise with given statistics per channel (dim 1), in one pass."""
    if rows.numel() == 0:
        return torch.empty_like(rows)
    if weight is None and rows.dtype != mean.dtype:
        weight = torch.ones_like(mean)  # without it the kernel takes the statistics for the operand's dtype
    if bias is None and weight is not None:
        bias = torch.zeros_like(mean)
    result: Tensor = aten.native_batch_norm(rows, weight, bias, mean, variance, False, 0.0, eps)[0]
    return result


def local_sums(gradient: Tensor, rows: Tensor, mean: Tensor, variance: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Per channel: the sum of gradient times normalised operand, and that of the gradient, in one pass."""
    if rows.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    weight = torch.ones_like(mean)
    mask = [False, True, True]
    _, products, sums = aten.native_batch_norm_backward(
        gradient, rows, weight, mean, variance, None, None, False, eps, mask
    )
    return products, sums


def combined(
    gradient: Tensor,
    rows: Tensor,
    factor: Tensor,
    slope: Tensor,
    shift: Tensor,
    mean: Tensor,
    variance: Tensor,
    eps: float,
) -> Tensor:
    """``gradient * factor + normalised rows * slope + shift``, per channel, with no temporary but the result."""
    dtype = rows.dtype
    wide = rows.to(factor.dtype)  # short floats are rounded once, at the end
    result = applied(wide, slope, shift, mean, variance, eps)
    shape = (-1, *(1,) * (rows.ndim - 2))
    return result.addcmul_(gradient.to(factor.dtype), factor.view(shape)).to(dtype)


def _norm_backward(gradient: Any, operand: Any, scale: Any, dims: tuple[int, ...], eps: float) -> tuple[Any, Any]:
    deviation = operand - operand.mean(dims, keepdim=True)
    rstd = ((deviation * deviation).mean(dims, keepdim=True) + eps).rsqrt()
    normalized = deviation * rstd
    scaled = gradient if scale is None else gradient * scale
    of_product = (scaled * normalized).mean(dims, keepdim=True)
    return rstd * (scaled - scaled.mean(dims, keepdim=True) - normalized * of_product), gradient * normalized


def _wide(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.to(accumulation_dtype(parameter.dtype))


@functools.lru_cache(maxsize=1024)
def group_norm_of(spec: ShardTensorSpec, n_groups: int, operator: str) -> GroupNorm:
    """Make the group norm for a layout."""
    return GroupNorm(spec, n_groups, operator)


@functools.lru_cache(maxsize=1024)
def batch_norm_of(spec: ShardTensorSpec) -> BatchNorm:
    """Make the batch norm for a layout."""
    return BatchNorm(spec)
