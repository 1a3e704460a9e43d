"""Operators that resample some dims by taps and the others by torch's own kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shardtensor.extending import TensorMeta
from shardtensor_spec import ShardTensorSpec

from ._linear import LinearOperator
from ._taps import Taps, resample, resample_adjoint
from ._window import Rows, Window, dim_windows, shard_of, split_of, window_of, with_sizes


@dataclass(frozen=True)
class _Resampling:
    """What a rank does: windows, taps along sharded dims, then the kernel for the others.

    Attributes
    ----------
    window : Window or None
        What is resampled in place of the shard.
    taps : tuple of (dim, Taps)
        The taps of this rank's output rows, counted in the window.
    kernel, kernel_adjoint : callable or None
        Resample the other dims; get the tensor and its extents along all resampled dims after (before) that.
    shape, window_shape : tuple of int
        Shape of this rank's result and of its window.
    """

    window: Window | None
    taps: tuple[tuple[int, Taps], ...]
    kernel: Callable[[torch.Tensor], torch.Tensor] | None
    kernel_adjoint: Callable[[torch.Tensor], torch.Tensor] | None
    shape: tuple[int, ...]
    window_shape: tuple[int, ...]

    def forward(self, local: torch.Tensor) -> torch.Tensor:
        result = local if self.window is None else self.window.fill(local)
        if 0 in self.shape:
            return local.new_empty(self.shape)
        for dim, taps in self.taps:
            result = resample(result, dim, taps)
        result = result if self.kernel is None else self.kernel(result)
        return result.clone() if result is local else result

    def adjoint(self, gradient: torch.Tensor) -> torch.Tensor:
        if 0 in self.shape:
            window = gradient.new_zeros(self.window_shape)
        else:
            window = gradient if self.kernel_adjoint is None else self.kernel_adjoint(gradient.contiguous())
            for dim, taps in reversed(self.taps):
                window = resample_adjoint(window, dim, taps, self.window_shape[dim])
        return window if self.window is None else self.window.give_back(window)


def resampling(
    name: str,
    spec: ShardTensorSpec,
    meta: TensorMeta,
    taps_of_dim: Callable[[int], Taps],
    kernel: Callable[[torch.Tensor, Sequence[int]], torch.Tensor],
    kernel_adjoint: Callable[[torch.Tensor, Sequence[int], Sequence[int]], torch.Tensor],
) -> LinearOperator:
    """Build the operator.

    Parameters
    ----------
    name : str
        For traces.
    spec : ShardTensorSpec
        Layout of the input.
    meta : TensorMeta
        Of the whole result.
    taps_of_dim : callable
        Taps of all output rows along a dim; asked for sharded dims only.
    kernel : callable
        ``kernel(tensor, result_shape)``: resample where the shapes differ.
    kernel_adjoint : callable
        ``kernel_adjoint(gradient, result_shape, input_shape)``.
    """
    assert spec.tensor_meta is not None
    before, after = tuple(spec.tensor_meta.shape), tuple(meta.shape)
    resampled = [dim for dim in range(len(before)) if before[dim] != after[dim]]
    windows, local_taps, sizes = {}, [], {}
    for dim in resampled:
        if dim not in spec.grid:
            continue
        taps = taps_of_dim(dim)
        sizes_before = split_of(spec, dim).sizes

        def anchor(row: int, dim: int = dim) -> int:
            return (2 * row + 1) * before[dim] // (2 * after[dim])

        def needed(first: int, last: int, taps: Taps = taps) -> Rows:
            return taps.span(first, last)

        found = dim_windows(sizes_before, after[dim], anchor, needed)
        shard = shard_of(spec, dim)
        first = found.start(shard)
        local_taps.append((dim, taps.part(first, first + found.sizes[shard], found.rows[shard][0])))
        windows[dim], sizes[dim] = found, found.sizes
    window = window_of(spec, tuple((dim, found.rows) for dim, found in windows.items())) if windows else None
    result = with_sizes(spec, meta, sizes)
    shape = tuple(result.local_shape)
    window_shape = tuple(spec.local_shape) if window is None else window.plan.window_shape
    has_kernel = any(dim not in windows for dim in resampled)
    between = tuple(shape[dim] if dim in windows else extent for dim, extent in enumerate(window_shape))
    local = _Resampling(
        None if window is not None and window.is_own else window,
        tuple(local_taps),
        (lambda tensor: kernel(tensor, shape)) if has_kernel else None,
        (lambda gradient: kernel_adjoint(gradient, shape, between)) if has_kernel else None,
        shape,
        tuple(window_shape),
    )
    return LinearOperator(name, spec, result, local.forward, local.adjoint)
