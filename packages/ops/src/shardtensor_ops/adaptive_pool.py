"""Adaptive pooling: the output size is that of the whole tensor.

An average over a sharded dim is made from windows, where there are more output rows than shards, and otherwise from
each rank's share of every output row, as a pending sum: so a global average moves nothing but its result. A maximum is
pooled where it is if the windows are regular; else the shards move to another dim first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial

from shardtensor import ShardTensor
from shardtensor.extending import contiguous_meta, make_spec
from shardtensor_spec import ShardTensorSpec, on_new_world

from ._linear import LinearOperator, brought_to
from ._meta import meta_like, meta_of_call
from ._naming import shape_of
from ._pool_plan import PoolingPlan
from ._resample import resampling
from ._supported import supported_layout
from ._taps import Taps, adaptive_average_taps
from ._torch_private import adaptive_average_2d_backward, adaptive_average_3d_backward
from ._window import is_alone, own_rows, shard_of, split_of, with_sizes
from .pool import max_pool

_AVERAGES: tuple[Callable[..., Any], ...] = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
_MAXIMA: tuple[Callable[..., Any], ...] = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)
_REGULAR_MAXIMA: tuple[Callable[..., Any], ...] = (F.max_pool1d, F.max_pool2d, F.max_pool3d)


def _average(n_spatial: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def call(input: Any, output_size: Any) -> Any:
        n_dims = len(shape_of(input._spec))
        pooled = tuple(range(n_dims - n_spatial, n_dims))
        source = supported_layout(input._spec, "adaptive_pool", unfolded=pooled)
        result = brought_to(input, source)
        for operator in _averages(source, n_spatial, _hashable(output_size)):
            result = operator(result)
        return result

    return call(*args, **kwargs)


@functools.lru_cache(maxsize=512)
def _averages(spec: ShardTensorSpec, n_spatial: int, output_size: Any) -> tuple[LinearOperator, ...]:
    """Return the operators to apply one after the other: all dims that give no pending sum, then the others."""
    meta = meta_of_call(_AVERAGES[n_spatial - 1], meta_like(spec), output_size)
    name = f"adaptive_avg_pool{n_spatial}d"
    before, after = shape_of(spec), list(meta.shape)
    pending = [
        dim
        for dim, split in spec.grid.items()
        if before[dim] != after[dim] <= len(split.sizes) and not is_alone(spec, dim)
    ]
    between = [before[dim] if dim in pending else after[dim] for dim in range(len(after))]

    def taps_of_dim(dim: int) -> Taps:
        return adaptive_average_taps(before[dim], after[dim])

    def kernel(tensor: torch.Tensor, result_shape: Sequence[int]) -> torch.Tensor:
        result: torch.Tensor = _AVERAGES[n_spatial - 1](tensor, list(result_shape[-n_spatial:]))
        return result

    def kernel_adjoint(gradient: torch.Tensor, result_shape: Sequence[int], input_shape: Sequence[int]) -> torch.Tensor:
        return _average_adjoint(gradient, input_shape, n_spatial)

    operators = []
    if tuple(between) != before or not pending:
        operators.append(
            resampling(name, spec, contiguous_meta(between, meta.dtype), taps_of_dim, kernel, kernel_adjoint)
        )
    for dim in pending:
        source = operators[-1].result if operators else spec
        operators.append(_pending_average(name, source, dim, after[dim]))
    return tuple(operators)


def _pending_average(name: str, spec: ShardTensorSpec, dim: int, n_output: int) -> LinearOperator:
    """Average along one dim as a matrix product with this rank's columns; the sum over ranks stays pending."""
    shape = list(shape_of(spec))
    taps = adaptive_average_taps(shape[dim], n_output)
    start, stop = own_rows(spec, dim)[shard_of(spec, dim)]
    assert taps.weights is not None
    matrix = [[0.0] * (stop - start) for _ in range(n_output)]
    for rows, weights in zip(taps.rows, taps.weights, strict=True):
        for output_row, (row, weight) in enumerate(zip(rows, weights, strict=True)):
            if start <= row < stop:
                matrix[output_row][row - start] += weight

    def matrix_like(tensor: torch.Tensor) -> torch.Tensor:
        return torch.tensor(matrix, dtype=tensor.dtype, device=tensor.device).view(n_output, stop - start)

    def forward(local: torch.Tensor) -> torch.Tensor:
        return (local.movedim(dim, -1) @ matrix_like(local).T).movedim(-1, dim)

    def adjoint(gradient: torch.Tensor) -> torch.Tensor:
        return (gradient.movedim(dim, -1) @ matrix_like(gradient)).movedim(-1, dim)

    assert spec.tensor_meta is not None
    shape[dim] = n_output
    meta = contiguous_meta(shape, spec.tensor_meta.dtype)
    grid = {other: split for other, split in spec.grid.items() if other != dim}
    pending = {axis: "sum" for axis in spec.grid[dim].axes}
    pending |= {axis: "sum" for axis, placement in enumerate(spec.placements) if isinstance(placement, Partial)}
    return LinearOperator(name, spec, make_spec(spec.mesh, meta, grid, pending), forward, adjoint)


def _average_adjoint(gradient: torch.Tensor, input_shape: Sequence[int], n_spatial: int) -> torch.Tensor:
    like = gradient.new_empty(()).expand(tuple(input_shape))
    if n_spatial == 1:
        return adaptive_average_2d_backward(gradient.unsqueeze(-2), like.unsqueeze(-2)).squeeze(-2)
    backward = adaptive_average_2d_backward if n_spatial == 2 else adaptive_average_3d_backward
    return backward(gradient, like)


def _maximum(n_spatial: int, returns_pair: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def call(input: Any, output_size: Any, return_indices: bool = False) -> Any:
        shape = shape_of(input._spec)
        pooled = tuple(range(len(shape) - n_spatial, len(shape)))
        function = _MAXIMA[n_spatial - 1]
        sizes = meta_of_call(function, meta_like(input._spec), output_size).shape[-n_spatial:]
        extents = shape[-n_spatial:]
        pairs = returns_pair or return_indices
        if all(rows and extent % rows == 0 for extent, rows in zip(extents, sizes, strict=True)):
            many = [
                dim not in input._spec.grid or rows > len(split_of(input._spec, dim).sizes)
                for dim, rows in zip(pooled, sizes, strict=True)
            ]
            if all(many):
                kernel = tuple(extent // rows for extent, rows in zip(extents, sizes, strict=True))
                return _REGULAR_MAXIMA[n_spatial - 1](input, kernel, return_indices=pairs)
        source = supported_layout(input._spec, "adaptive_pool", whole=pooled)
        plan = _whole_maximum(source, n_spatial, tuple(sizes))
        return max_pool(brought_to(input, source), plan, f"adaptive_max_pool{n_spatial}d", pairs)

    return call(*args, **kwargs)


@functools.lru_cache(maxsize=512)
def _whole_maximum(spec: ShardTensorSpec, n_spatial: int, sizes: tuple[int, ...]) -> PoolingPlan:
    """Plan a maximum over dims that every rank has whole."""
    meta = meta_of_call(_MAXIMA[n_spatial - 1], meta_like(spec), sizes)
    result = with_sizes(spec, meta, {})
    nothing = (0,) * n_spatial
    return PoolingPlan(
        n_spatial=n_spatial,
        source=spec,
        result=result,
        window=None,
        kernel=nothing,
        stride=nothing,
        padding=nothing,
        dilation=nothing,
        ceil_mode=False,
        window_shape=tuple(spec.local_shape[-n_spatial:]),
        window_start=nothing,
        shape=tuple(result.local_shape),
        counts=(),
        output_size=sizes,
    )


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else value


def _register() -> None:
    def average_handler(n_spatial: int) -> Callable[..., Any]:
        return lambda function, types, args, kwargs: _average(n_spatial, args, kwargs)

    def maximum_handler(n_spatial: int, returns_pair: bool) -> Callable[..., Any]:
        return lambda function, types, args, kwargs: _maximum(n_spatial, returns_pair, args, kwargs)

    for n_spatial in (1, 2, 3):
        ShardTensor.register_function_handler(_AVERAGES[n_spatial - 1], average_handler(n_spatial))
        ShardTensor.register_function_handler(_MAXIMA[n_spatial - 1], maximum_handler(n_spatial, False))
        with_indices = getattr(F, f"adaptive_max_pool{n_spatial}d_with_indices")
        ShardTensor.register_function_handler(with_indices, maximum_handler(n_spatial, True))
    ShardTensor.register_function_handler(torch.adaptive_max_pool1d, maximum_handler(1, True))


_register()
on_new_world(_averages.cache_clear)
on_new_world(_whole_maximum.cache_clear)
