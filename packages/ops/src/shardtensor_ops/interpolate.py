"""``torch.nn.functional.interpolate`` in every mode, in coordinates of the whole tensor.

Sharded dims are resampled by taps (`_taps`), the others by torch's own kernel. An output row belongs to the rank that
owns the input row under its centre. With ``antialias`` the resampled dims are made whole by moving the shards to
another dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from shardtensor import ShardTensor
from shardtensor_spec import ShardTensorSpec, on_new_world

from ._linear import LinearOperator, brought_to
from ._meta import meta_like, meta_of_call
from ._naming import shape_of
from ._resample import resampling
from ._supported import supported_layout
from ._taps import Taps, cubic_taps, linear_taps, nearest_taps
from ._torch_private import UPSAMPLING


@functools.lru_cache(maxsize=512)
def _plan(
    spec: ShardTensorSpec,
    size: Any,
    scale_factor: Any,
    mode: str,
    align_corners: bool | None,
    recompute_scale_factor: bool | None,
    antialias: bool,
) -> LinearOperator:
    meta = meta_of_call(
        F.interpolate, meta_like(spec), size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
    )
    before, after = shape_of(spec), tuple(meta.shape)
    n_spatial = len(before) - 2
    scales: list[float | None] = [None] * n_spatial
    if scale_factor is not None and not recompute_scale_factor:
        given = scale_factor if isinstance(scale_factor, tuple) else (scale_factor,) * n_spatial
        scales = [float(scale) for scale in given]
    is_nearest = mode.startswith("nearest")
    aligned = bool(align_corners)
    flags = [] if is_nearest else [aligned]
    kernel_name = UPSAMPLING[f"{mode} antialias" if antialias else mode].format(n_spatial)

    def taps_of_dim(dim: int) -> Taps:
        n_input, n_output, scale, dtype = before[dim], after[dim], scales[dim - 2], meta.dtype
        if is_nearest:
            return nearest_taps(n_input, n_output, scale, dtype, mode == "nearest-exact")
        make = cubic_taps if mode == "bicubic" else linear_taps
        return make(n_input, n_output, aligned, scale, dtype)

    def local_scales(result_shape: Sequence[int]) -> list[float | None]:
        # A dim that the taps did already is kept as it is, which is scale 1.
        return [
            None if dim in spec.grid and before[dim] != after[dim] else scales[dim - 2]
            for dim in range(2, len(result_shape))
        ]

    def kernel(tensor: torch.Tensor, result_shape: Sequence[int]) -> torch.Tensor:
        call = getattr(torch.ops.aten, kernel_name)
        result: torch.Tensor = call(tensor, list(result_shape[2:]), *flags, *local_scales(result_shape))
        return result

    def kernel_adjoint(gradient: torch.Tensor, result_shape: Sequence[int], input_shape: Sequence[int]) -> torch.Tensor:
        call = getattr(torch.ops.aten, f"{kernel_name}_backward")
        scales_here = local_scales(result_shape)
        result: torch.Tensor = call(gradient, list(result_shape[2:]), list(input_shape), *flags, *scales_here)
        return result

    return resampling("interpolate", spec, meta, taps_of_dim, kernel, kernel_adjoint)


def _handle(function: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def call(
        input: Any,
        size: Any = None,
        scale_factor: Any = None,
        mode: str = "nearest",
        align_corners: bool | None = None,
        recompute_scale_factor: bool | None = None,
        antialias: bool = False,
    ) -> Any:
        size, scale_factor = _hashable(size), _hashable(scale_factor)
        n_dims = len(shape_of(input._spec))
        if mode == "area":
            meta = meta_of_call(F.interpolate, meta_like(input._spec), size, scale_factor, mode, align_corners)
            return getattr(F, f"adaptive_avg_pool{n_dims - 2}d")(input, tuple(meta.shape[2:]))
        spatial = tuple(range(2, n_dims))
        whole = spatial if antialias else ()
        source = supported_layout(input._spec, "interpolate", whole=whole, unfolded=spatial)
        operator = _plan(source, size, scale_factor, mode, align_corners, recompute_scale_factor, bool(antialias))
        return operator(brought_to(input, source))

    return call(*args, **kwargs)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else value


ShardTensor.register_function_handler(F.interpolate, _handle)
on_new_world(_plan.cache_clear)
