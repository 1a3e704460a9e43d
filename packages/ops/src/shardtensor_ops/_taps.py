"""Resampling along one dim: each output row is a weighted sum of a few input rows, its *taps*.

Which rows and which weights follows from coordinates of the whole tensor, by the formulas and in the precision of
torch's own kernels (``aten/src/ATen/native/UpSample.h``): a shard cannot be resampled as if it were a tensor of its
own, because positions are rounded from global ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ._torch_private import nearest_exact_1d, outside_modes


class Taps(NamedTuple):
    """Taps of some output rows.

    Attributes
    ----------
    rows : tuple of tuple of int, (n_taps, n_output)
        Input rows.
    weights : tuple of tuple of float, (n_taps, n_output), optional
        None where the one tap has weight 1.
    """

    rows: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[float, ...], ...] | None

    def part(self, first: int, stop: int, start: int) -> Taps:
        """Taps of the output rows from ``first`` to ``stop``, with input rows counted from ``start``."""
        rows = tuple(tuple(row - start for row in tap[first:stop]) for tap in self.rows)
        weights = None if self.weights is None else tuple(tap[first:stop] for tap in self.weights)
        return Taps(rows, weights)

    def span(self, first: int, last: int) -> tuple[int, int]:
        """Input rows that the output rows from ``first`` to ``last`` (inclusive) need."""
        needed = [row for tap in self.rows for row in tap[first : last + 1]]
        return min(needed), max(needed) + 1


def resample(window: torch.Tensor, dim: int, taps: Taps) -> torch.Tensor:
    """Sum the weighted taps.

    Parameters
    ----------
    window : Tensor
        Its rows along ``dim`` are those that the taps count.
    dim : int
        The dim.
    taps : Taps
        The taps of all rows of the result.
    """
    total: torch.Tensor | None = None
    for rows, weights in _tensors(window, dim, taps):
        share = window.index_select(dim, rows)
        if weights is not None:
            share *= weights
        total = share if total is None else total.add_(share)
    assert total is not None
    return total


def resample_adjoint(gradient: torch.Tensor, dim: int, taps: Taps, n_rows: int) -> torch.Tensor:
    """Run the adjoint of `resample`; the window has ``n_rows`` rows."""
    shape = list(gradient.shape)
    shape[dim] = n_rows
    window = gradient.new_zeros(shape)
    for rows, weights in _tensors(gradient, dim, taps):
        window.index_add_(dim, rows, gradient if weights is None else gradient * weights)
    return window


def _tensors(like: torch.Tensor, dim: int, taps: Taps) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    shape = [1] * like.ndim
    shape[dim] = -1
    return [
        (
            torch.tensor(rows, dtype=torch.int64, device=like.device),
            None
            if taps.weights is None
            else torch.tensor(taps.weights[index], dtype=like.dtype, device=like.device).view(shape),
        )
        for index, rows in enumerate(taps.rows)
    ]


# -- which taps -------------------------------------------------------------------------------------------------------


def nearest_taps(n_input: int, n_output: int, scale: float | None, dtype: torch.dtype, is_exact: bool) -> Taps:
    """Taps of ``mode="nearest"`` and ``"nearest-exact"``: torch's own kernel applied to row numbers."""
    kernel = nearest_exact_1d if is_exact else torch.ops.aten.upsample_nearest1d
    with outside_modes(), torch.no_grad():
        # Row numbers are exact in the precision in which the kernels compute positions.
        numbers = torch.arange(n_input, dtype=_position_dtype(dtype)).view(1, 1, -1)
        return Taps((tuple(map(int, kernel(numbers, [n_output], scale).flatten().tolist())),), None)


def linear_taps(n_input: int, n_output: int, align_corners: bool, scale: float | None, dtype: torch.dtype) -> Taps:
    """Taps of the linear modes."""
    with outside_modes(), torch.no_grad():
        position = _positions(n_input, n_output, align_corners, scale, dtype).clamp_(min=0)
        lower = position.long().clamp_(max=n_input - 1)
        upper = (lower + 1).clamp_(max=n_input - 1)
        share = (position - lower).clamp_(0, 1)
        return _taps([lower, upper], [1 - share, share])


def cubic_taps(n_input: int, n_output: int, align_corners: bool, scale: float | None, dtype: torch.dtype) -> Taps:
    """Taps of ``mode="bicubic"``: Keys' kernel with a = -0.75."""
    a = -0.75

    def near(x: torch.Tensor) -> torch.Tensor:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: torch.Tensor) -> torch.Tensor:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    with outside_modes(), torch.no_grad():
        position = _positions(n_input, n_output, align_corners, scale, dtype)
        lower = position.floor().clamp_(max=n_input - 1)
        share = (position - lower).clamp_(0, 1)
        rows = [(lower.long() + offset).clamp_(0, n_input - 1) for offset in (-1, 0, 1, 2)]
        return _taps(rows, [far(share + 1), near(share), near(1 - share), far(2 - share)])


def adaptive_average_taps(n_input: int, n_output: int) -> Taps:
    """Taps of an adaptive average: windows of almost equal lengths that cover the input."""
    bounds = [(row * n_input // n_output, -(-(row + 1) * n_input // n_output)) for row in range(n_output)]
    n_taps = max((stop - start for start, stop in bounds), default=0)
    rows, weights = [], []
    for tap in range(n_taps):
        rows.append(tuple(min(start + tap, stop - 1) for start, stop in bounds))
        weights.append(tuple(1 / (stop - start) if start + tap < stop else 0.0 for start, stop in bounds))
    return Taps(tuple(rows), tuple(weights))


def _position_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _positions(
    n_input: int, n_output: int, align_corners: bool, scale: float | None, dtype: torch.dtype
) -> torch.Tensor:
    """Place of each output row between the input rows."""
    rows = torch.arange(n_output, dtype=_position_dtype(dtype))
    if n_input == n_output:
        return rows
    if align_corners:
        return rows * ((n_input - 1) / (n_output - 1) if n_output > 1 else 0.0)
    step = 1 / scale if scale is not None and scale > 0 else n_input / n_output
    return (rows + 0.5) * step - 0.5


def _taps(rows: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> Taps:
    assert all(math.isfinite(value) for tap in weights for value in tap.tolist())
    return Taps(tuple(tuple(tap.tolist()) for tap in rows), tuple(tuple(tap.tolist()) for tap in weights))
