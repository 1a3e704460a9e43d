"""Convolution of local tensors, empty ones included, and the strips' share of a convolution with halos."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ._halo import Halo


class LocalConvolution(NamedTuple):
    """Arguments of a convolution on this rank.

    Attributes
    ----------
    stride, padding, dilation, output_padding : tuple of int, (n_spatial,)
        As in ``aten.convolution``.
    transposed : bool
        Whether it is a transposed convolution.
    groups : int
        Groups of channels.
    frame : tuple of int, (2 * n_spatial,)
        Zero rows to add to the result (cut off where negative), in the order of ``F.pad``. Only a transposed
        convolution on a part of the rows needs it.
    shape : tuple of int
        Shape of this rank's result.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    transposed: bool
    groups: int
    frame: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """Whether this rank makes nothing."""
        return 0 in self.shape


def convolve(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: LocalConvolution) -> torch.Tensor:
    """Convolve local tensors.

    Returns
    -------
    Tensor, how.shape
    """
    if how.is_empty:
        return x.new_empty(how.shape)
    grows = max(how.frame) > 0
    y: torch.Tensor = torch.ops.aten.convolution(
        x,
        weight,
        None if grows else bias,
        how.stride,
        how.padding,
        how.dilation,
        how.transposed,
        how.output_padding,
        how.groups,
    )
    if any(how.frame):
        y = F.pad(y, how.frame)
    if grows and bias is not None:
        y += bias.view(-1, *[1] * len(how.stride))  # rows that no input reaches have the bias too
    return y


def gradients(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    how: LocalConvolution,
    mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of `convolve` for its input, weight and bias, where the mask asks for them."""
    if how.is_empty:
        n_channels = how.shape[1]
        return (
            torch.zeros_like(x, memory_format=torch.contiguous_format) if mask[0] else None,
            torch.zeros_like(weight, memory_format=torch.contiguous_format) if mask[1] else None,
            weight.new_zeros(n_channels) if mask[2] else None,
        )
    by_bias = None
    if any(how.frame):
        if mask[2]:
            by_bias = gradient.sum((0, *range(2, gradient.ndim)))
            mask = (mask[0], mask[1], False)
        gradient = F.pad(gradient, tuple(-n for n in how.frame))
    by_x, by_weight, by_bias_too = torch.ops.aten.convolution_backward(
        gradient,
        x,
        weight,
        [how.shape[1]],
        how.stride,
        how.padding,
        how.dilation,
        how.transposed,
        how.output_padding,
        how.groups,
        list(mask),
    )
    return by_x, by_weight, by_bias if by_bias is not None else by_bias_too


class Strip(NamedTuple):
    """One strip's share: the edge rows of the result that it reaches, through the outer taps of the kernel.

    Attributes
    ----------
    start, n_rows : int
        The strip in the tensor of both strips.
    frame : tuple of int, (2 * n_spatial,)
        Zero rows around the strip, in the order of ``F.pad``.
    first_tap, n_taps : int
        Taps of the kernel along the dim that touch the strip.
    edge, n_edge : int
        The rows of the result that get a share.
    skip : int
        Rows that the strip's convolution makes before these.
    """

    start: int
    n_rows: int
    frame: tuple[int, ...]
    first_tap: int
    n_taps: int
    edge: int
    n_edge: int
    skip: int


def strips_of(halo: Halo, kernel: int, dilation: int, n_local: int, n_spatial: int) -> list[Strip]:
    """Describe the shares of the strips of a convolution of stride 1 that keeps the extent.

    Output row ``o`` reads the rows ``o - reach + tap * dilation``, ``reach = dilation * (kernel - 1) / 2``. The strip
    before the shard is touched by the taps before the middle one only, and reaches the first ``reach`` rows.
    """
    n_taps = (kernel - 1) // 2
    reach = dilation * n_taps
    n_edge = min(reach, n_local)

    def frame(front: int, back: int) -> tuple[int, ...]:
        pads = [0] * (2 * n_spatial)
        position = 2 * (n_spatial - 1 - (halo.dim - 2))
        pads[position], pads[position + 1] = front, back
        return tuple(pads)

    strips = []
    if halo.before:
        around = frame(reach - halo.before, reach - dilation)
        strips.append(Strip(0, halo.before, around, 0, n_taps, 0, n_edge, 0))
    if halo.after:
        around = frame(reach - dilation, reach - halo.after)
        skip = reach - n_edge
        strips.append(Strip(halo.before, halo.after, around, kernel - n_taps, n_taps, n_local - n_edge, n_edge, skip))
    return strips


def _strip_convolution(how: LocalConvolution, dim: int, strip: Strip) -> LocalConvolution:
    padding = tuple(0 if position == dim - 2 else rows for position, rows in enumerate(how.padding))
    shape = (*how.shape[:dim], strip.skip + strip.n_edge, *how.shape[dim + 1 :])
    return how._replace(padding=padding, shape=shape)


def add_strips(
    y: torch.Tensor,
    halo_rows: torch.Tensor,
    weight: torch.Tensor,
    how: LocalConvolution,
    dim: int,
    strips: Sequence[Strip],
) -> None:
    """Add the strips' share to the edge rows of a result that was computed without them, in place."""
    for strip in strips:
        rows = _framed(halo_rows, dim, strip)
        taps = weight.narrow(dim, strip.first_tap, strip.n_taps)
        share = convolve(rows, taps, None, _strip_convolution(how, dim, strip))
        y.narrow(dim, strip.edge, strip.n_edge).add_(share.narrow(dim, strip.skip, strip.n_edge))


def strip_gradients(
    gradient: torch.Tensor,
    halo_rows: torch.Tensor,
    weight: torch.Tensor,
    how: LocalConvolution,
    dim: int,
    strips: Sequence[Strip],
    mask: Sequence[bool],
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Gradient for the strips, and for each strip that of the taps that touch it."""
    by_rows = torch.zeros_like(halo_rows) if mask[0] else None
    by_taps = []
    for strip in strips:
        rows = _framed(halo_rows, dim, strip)
        taps = weight.narrow(dim, strip.first_tap, strip.n_taps)
        edge = gradient.narrow(dim, strip.edge, strip.n_edge)
        reach = rows.shape[dim] - (strip.n_taps - 1) * how.dilation[dim - 2]
        if strip.n_edge < reach:  # on a thin shard the strip's convolution makes more rows than there are
            pads = [0] * (2 * len(how.stride))
            position = 2 * (len(how.stride) - 1 - (dim - 2))
            pads[position], pads[position + 1] = strip.skip, reach - strip.n_edge - strip.skip
            edge = F.pad(edge, pads)
        part = _strip_convolution(how, dim, strip)
        by_framed, by_part, _ = gradients(edge, rows, taps, part, (mask[0], mask[1], False))
        if by_rows is not None:
            assert by_framed is not None
            front = strip.frame[2 * (len(how.stride) - 1 - (dim - 2))]
            by_rows.narrow(dim, strip.start, strip.n_rows).copy_(by_framed.narrow(dim, front, strip.n_rows))
        if by_part is not None:
            by_taps.append(by_part)
    return by_rows, by_taps


def _framed(halo_rows: torch.Tensor, dim: int, strip: Strip) -> torch.Tensor:
    rows = halo_rows.narrow(dim, strip.start, strip.n_rows)
    return F.pad(rows, strip.frame) if any(strip.frame) else rows.contiguous()
