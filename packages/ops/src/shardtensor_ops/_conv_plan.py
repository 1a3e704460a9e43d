"""What every rank does in a convolution, from the layouts alone: its window or halo, its local call, its result."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardtensor.extending import TensorMeta, make_spec
from shardtensor_spec import ShardTensorSpec, on_new_world

from ._conv_local import LocalConvolution, Strip, strips_of
from ._halo import Halo, halo_of
from ._meta import meta_like, meta_of_call
from ._window import (
    DimWindows,
    Rows,
    Window,
    dim_windows,
    is_alone,
    own_rows,
    shard_of,
    split_of,
    window_of,
    with_sizes,
)


class Geometry(NamedTuple):
    """Arguments of a convolution in global terms, one entry per spatial dim.

    Attributes
    ----------
    stride, dilation, output_padding : tuple of int, (n_spatial,)
        As in ``torch.nn.functional.conv2d``.
    padding : tuple of (int, int), (n_spatial,)
        Rows before and after; they differ for ``padding="same"`` with an even kernel.
    transposed : bool
        Whether it is a transposed convolution.
    groups : int
        Groups of channels.
    """

    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    transposed: bool
    groups: int


@dataclass(frozen=True, eq=False)
class ConvolutionPlan:
    """A convolution on one layout.

    Attributes
    ----------
    name : str
        For traces.
    source, weight, result : ShardTensorSpec
        Layouts of the input, of the weight (replicated) and of the result.
    by_weight, by_bias : ShardTensorSpec
        Layouts of the gradients of weight and bias: pending sums over the mesh axes that shard the input.
    local : LocalConvolution
        The call on this rank, on the window or on the shard itself.
    window : Window or None
        What is convolved in place of the shard.
    halo : Halo or None
        Instead of a window, where the share of the neighbours' rows can be added.
    strips : list of Strip
        The shares, where there is a halo.
    """

    name: str
    source: ShardTensorSpec
    weight: ShardTensorSpec
    result: ShardTensorSpec
    by_weight: ShardTensorSpec
    by_bias: ShardTensorSpec
    local: LocalConvolution
    window: Window | None
    halo: Halo | None
    strips: list[Strip]


@functools.lru_cache(maxsize=1024)
def plan_convolution(
    function: Callable[..., Any],
    source: ShardTensorSpec,
    weight: ShardTensorSpec,
    bias: ShardTensorSpec | None,
    geometry: Geometry,
    arguments: tuple[Any, ...],
) -> ConvolutionPlan:
    """Plan a convolution.

    Parameters
    ----------
    function : callable
        What the user called; run on meta tensors for the result's shape, and for torch's own errors.
    source, weight, bias : ShardTensorSpec
        Layouts. Channels are whole, weight and bias replicated, and no spatial dim is folded.
    geometry : Geometry
        The arguments.
    arguments : tuple
        The same as ``function`` takes them, after the bias.

    Raises
    ------
    RuntimeError
        torch's own, for shapes that do not fit, on every rank alike.
    """
    meta = meta_of_call(
        function, meta_like(source), meta_like(weight), None if bias is None else meta_like(bias), *arguments
    )
    kernel = _shape(weight)[2:]
    windows = {
        dim: _dim_windows(source, dim, kernel[dim - 2], geometry, meta.shape[dim])
        for dim in range(2, len(meta.shape))
        if dim in source.grid or geometry.padding[dim - 2][0] != geometry.padding[dim - 2][1]
    }
    sizes = {dim: found.sizes for dim, found in windows.items()}
    result = with_sizes(source, meta, sizes)
    windowed = {dim: found for dim, found in windows.items() if _needs_window(source, dim, found, geometry)}
    halo, strips = None, []
    if len(windowed) == 1:
        (dim,) = windowed
        if _keeps_extent(kernel[dim - 2], dim - 2, geometry) and dim in source.grid:
            dilation = geometry.dilation[dim - 2]
            halo = halo_of(source, dim, dilation * (kernel[dim - 2] - 1) // 2)
            if halo is not None:
                n_local = source.local_shape[dim]
                strips = strips_of(halo, kernel[dim - 2], dilation, n_local, len(kernel))
            windowed = {}
    window = window_of(source, tuple((dim, found.rows) for dim, found in windowed.items())) if windowed else None
    if window is not None and window.is_own:
        window = None
    local = _local_call(source, result, kernel, geometry, windowed)
    pending = {axis: "sum" for split in source.grid.values() for axis in split.axes}
    weight_meta = weight.tensor_meta
    assert weight_meta is not None
    by_weight = make_spec(source.mesh, weight_meta, {}, pending)
    bias_meta = TensorMeta(torch.Size((meta.shape[1],)), (1,), weight_meta.dtype)
    by_bias = make_spec(source.mesh, bias_meta, {}, pending)
    name = getattr(function, "__name__", "convolution")
    return ConvolutionPlan(name, source, weight, result, by_weight, by_bias, local, window, halo, strips)


def _dim_windows(source: ShardTensorSpec, dim: int, kernel: int, geometry: Geometry, n_output: int) -> DimWindows:
    position = dim - 2
    stride, dilation = geometry.stride[position], geometry.dilation[position]
    before, _ = geometry.padding[position]
    reach = dilation * (kernel - 1)
    middle = reach // 2
    n_input = _shape(source)[dim]
    sizes = split_of(source, dim).sizes
    if not geometry.transposed:
        return dim_windows(
            sizes,
            n_output,
            lambda row: row * stride - before + middle,
            lambda first, last: (first * stride - before, last * stride - before + reach + 1),
        )

    def needed(first: int, last: int) -> Rows:
        start = max(-((reach - first - before) // stride), 0)  # rounded up
        stop = min((last + before) // stride + 1, n_input)
        # Where no input row reaches these output rows, one is taken all the same, so that there is something to call.
        start = min(start, max(n_input - 1, 0))
        return start, max(stop, start + 1)

    return dim_windows(sizes, n_output, lambda row: (row + before - middle) // stride, needed)


def _needs_window(source: ShardTensorSpec, dim: int, found: DimWindows, geometry: Geometry) -> bool:
    before, after = geometry.padding[dim - 2]
    if before != after:
        return True
    # A transposed convolution of one of several shards is cut at other places than that of the whole.
    return not is_alone(source, dim) and (found.rows != own_rows(source, dim) or before > 0 or geometry.transposed)


def _keeps_extent(kernel: int, position: int, geometry: Geometry) -> bool:
    before, after = geometry.padding[position]
    reach = geometry.dilation[position] * (kernel - 1)
    is_same = kernel % 2 == 1 and before == after == reach // 2
    return is_same and geometry.stride[position] == 1 and not geometry.transposed


def _local_call(
    source: ShardTensorSpec,
    result: ShardTensorSpec,
    kernel: tuple[int, ...],
    geometry: Geometry,
    windowed: dict[int, DimWindows],
) -> LocalConvolution:
    n_spatial = len(kernel)
    padding = [before for before, _ in geometry.padding]
    output_padding = list(geometry.output_padding)
    frame = [0] * (2 * n_spatial)
    for dim, found in windowed.items():
        position = dim - 2
        padding[position] = 0
        if geometry.transposed:
            shard = shard_of(source, dim)
            first, n_rows = found.start(shard), found.sizes[shard]
            padding[position], output_padding[position], front, back = _cut(
                found.rows[shard], (first, first + n_rows), kernel[position], position, geometry
            )
            frame[2 * (n_spatial - 1 - position) : 2 * (n_spatial - position)] = [front, back]
    return LocalConvolution(
        stride=geometry.stride,
        padding=tuple(padding),
        dilation=geometry.dilation,
        output_padding=tuple(output_padding),
        transposed=geometry.transposed,
        groups=geometry.groups,
        frame=tuple(frame),
        shape=tuple(result.local_shape),
    )


def _cut(window: Rows, wanted: Rows, kernel: int, position: int, geometry: Geometry) -> tuple[int, int, int, int]:
    """Padding, output padding, and rows to add in front and behind, so that a window gives the wanted output rows."""
    stride, dilation = geometry.stride[position], geometry.dilation[position]
    before, _ = geometry.padding[position]
    if wanted[0] == wanted[1]:
        return 0, 0, 0, 0
    first = window[0] * stride - before
    last = (window[1] - 1) * stride - before + dilation * (kernel - 1)
    in_front, behind = wanted[0] - first, last + 1 - wanted[1]
    padding = max(in_front, 0)
    output_padding = padding - behind
    if output_padding >= max(stride, dilation) or output_padding < 0:
        padding, output_padding = max(min(in_front, behind), 0), 0
    return padding, output_padding, padding - in_front, padding - behind - output_padding


def _shape(spec: ShardTensorSpec) -> tuple[int, ...]:
    assert spec.tensor_meta is not None
    return tuple(spec.tensor_meta.shape)


on_new_world(plan_convolution.cache_clear)
