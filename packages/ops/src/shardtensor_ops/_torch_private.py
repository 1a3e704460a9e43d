"""The private names of torch that this package uses, all in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes as outside_modes

autocast_is_on: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any device: 40 ns, against 300 ns to ask for one device."""

requires_grad: Callable[..., bool] = torch._C._any_requires_grad
"""Whether any argument is a tensor that requires a gradient.

0.1 µs, against 1.5 µs for the attribute of a subclass with ``__torch_function__``.
"""

run_below_torch_function: Callable[..., Any] = torch._C._disabled_torch_function_impl
"""Call a function with ``__torch_function__`` of subclasses switched off: ``(func, types, args, kwargs)``."""

below_torch_function: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass
"""Context in which ``__torch_function__`` of subclasses is switched off."""

nearest_exact_1d: Callable[..., torch.Tensor] = torch.ops.aten._upsample_nearest_exact1d
"""Kernel of ``mode="nearest-exact"``: ``(tensor, output_size, scale)``."""

adaptive_average_2d_backward: Callable[..., torch.Tensor] = torch.ops.aten._adaptive_avg_pool2d_backward
adaptive_average_3d_backward: Callable[..., torch.Tensor] = torch.ops.aten._adaptive_avg_pool3d_backward
"""Adjoint of an adaptive average: ``(gradient, input)``; of the input only the shape is read."""

UPSAMPLING = {
    "nearest": "upsample_nearest{}d",
    "nearest-exact": "_upsample_nearest_exact{}d",
    "linear": "upsample_linear{}d",
    "bilinear": "upsample_bilinear{}d",
    "bicubic": "upsample_bicubic{}d",
    "trilinear": "upsample_trilinear{}d",
    "bilinear antialias": "_upsample_bilinear{}d_aa",
    "bicubic antialias": "_upsample_bicubic{}d_aa",
    "lanczos antialias": "_upsample_lanczos{}d_aa",
}
"""Mode of interpolation -> name of its operator, to be formatted with the number of spatial dims."""


def change_shape_only(op: torch._ops.OpOverload, wrapper: torch.Tensor, *arguments: Any) -> None:
    """Run an in-place view operator on what a subclass shows of itself, without dispatching to the subclass."""
    with no_dispatch():
        op(wrapper, *arguments)


__all__ = [
    "UPSAMPLING",
    "adaptive_average_2d_backward",
    "adaptive_average_3d_backward",
    "autocast_is_on",
    "below_torch_function",
    "change_shape_only",
    "nearest_exact_1d",
    "outside_modes",
    "requires_grad",
    "run_below_torch_function",
]
