"""Convolutions and transposed convolutions on any split of batch and spatial dims.

Batch shards are convolved where they are. Along a sharded spatial dim every output row belongs to the rank that owns
the input row at the middle of its window (`_window`), and only the rows that a rank lacks travel:

- at stride 1 with padding that keeps the extent, the rows of the neighbours travel while the shard is convolved with
  zero padding, and their share is added to the edge rows after (`_halo`): no copy of the shard is made;
- else the window is put together in a buffer, unless it lies inside the shard.

Backward keeps the shard and the rows of others, never the window. The gradients of weight and bias are pending sums
over the mesh axes that shard the input; all three contractions of the trilinear form ``<conv(x, w), g>`` are Functions
whose backward are the other two, so gradients of any order exist.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from shardtensor import ShardTensor
from shardtensor.extending import Redistribute
from shardtensor_collectives import operator_range
from shardtensor_spec import box_slices, subtract

from ._autocast import autocast_is_on, in_autocast_dtype
from ._conv_local import add_strips, convolve, gradients, strip_gradients
from ._conv_plan import ConvolutionPlan, Geometry, plan_convolution
from ._linear import brought_to, in_layout
from ._meta import meta_like, meta_of_call
from ._naming import shape_of
from ._supported import supported_layout
from ._window import Window

# -- what a rank does -----------------------------------------------------------------------------------------------


def _run(
    plan: ConvolutionPlan, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Convolve; return the local result, and the rows of others that backward needs."""
    if plan.halo is not None:
        pending = plan.halo.post(x)
        y = convolve(x, weight, bias, plan.local)
        halo_rows = pending.wait()
        add_strips(y, halo_rows, weight, plan.local, plan.halo.dim, plan.strips)
        return y, [halo_rows]
    if plan.window is None:
        return convolve(x, weight, bias, plan.local), []
    window = plan.window.fill(x)
    return convolve(window, weight, bias, plan.local), [window[slab].clone() for slab in _slabs(plan.window)]


def _run_backward(
    plan: ConvolutionPlan,
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    others: Sequence[torch.Tensor],
    mask: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Local gradients of input, weight and bias."""
    if plan.halo is not None:
        halo, local = plan.halo, plan.local
        by_rows, by_taps = strip_gradients(gradient, others[0], weight, local, halo.dim, plan.strips, mask)
        pending = None if by_rows is None else halo.post_back(by_rows)
        by_x, by_weight, by_bias = gradients(gradient, x, weight, local, mask)
        if by_weight is not None:
            for strip, share in zip(plan.strips, by_taps, strict=True):
                by_weight.narrow(halo.dim, strip.first_tap, strip.n_taps).add_(share)
        if pending is not None:
            assert by_x is not None
            halo.add_edges(pending.wait(), by_x)
        return by_x, by_weight, by_bias
    if plan.window is None:
        return gradients(gradient, x, weight, plan.local, mask)
    window = _rebuilt(plan.window, x, others)
    by_window, by_weight, by_bias = gradients(gradient, window, weight, plan.local, mask)
    del window
    return None if by_window is None else plan.window.give_back(by_window), by_weight, by_bias


def _slabs(window: Window) -> list[tuple[slice, ...]]:
    """Regions of a window that are not this rank's own rows."""
    if window.view is not None:
        return []
    regions = [tuple((0, extent) for extent in window.plan.window_shape)]
    for piece in window.plan.copies:
        regions = [part for region in regions for part in subtract(region, piece.target)]
    return [box_slices(region) for region in regions]


def _rebuilt(window: Window, x: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """Put a window together again from the shard and the rows of others."""
    if window.view is not None:
        return x[window.view]
    buffer = x.new_empty(window.plan.window_shape)
    for piece in window.plan.copies:
        buffer[box_slices(piece.target)] = x[box_slices(piece.source)]
    for slab, rows in zip(_slabs(window), others, strict=True):
        buffer[slab] = rows
    return buffer


# -- the trilinear form and its three contractions ---------------------------------------------------------------------


class _Convolution(torch.autograd.Function):
    """Input, weight and bias -> result."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, plan: ConvolutionPlan) -> Any:
        ctx.plan, ctx.has_bias = plan, bias is not None
        with operator_range(plan.name):
            local_bias = None if bias is None else bias._local_tensor
            y, others = _run(plan, x._local_tensor, weight._local_tensor, local_bias)
        ctx.save_for_backward(x, weight, *others)
        return in_layout(y, plan.result)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, Any, Any, None]:
        plan: ConvolutionPlan = ctx.plan
        x, weight, *others = ctx.saved_tensors
        gradient = brought_to(gradient, plan.result)
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():
            by_bias = gradient.sum((0, *range(2, gradient.ndim))) if needs_bias else None
            return (
                _ByInput.apply(gradient, weight, plan) if needs_x else None,
                _ByWeight.apply(x, gradient, plan) if needs_weight else None,
                by_bias,
                None,
            )
        mask = (needs_x, needs_weight, needs_bias)
        with operator_range(f"{plan.name} backward"):
            by_x, by_weight, by_bias = _run_backward(
                plan, gradient._local_tensor, x._local_tensor, weight._local_tensor, others, mask
            )
        return (
            None if by_x is None else in_layout(by_x, plan.source),
            None if by_weight is None else in_layout(by_weight, plan.by_weight),
            None if by_bias is None else in_layout(by_bias, plan.by_bias),
            None,
        )


class _ByInput(torch.autograd.Function):
    """Gradient of the result and weight -> gradient of the input."""

    @staticmethod
    def forward(ctx: Any, gradient: Any, weight: Any, plan: ConvolutionPlan) -> Any:
        ctx.plan = plan
        ctx.save_for_backward(gradient, weight)
        local = gradient._local_tensor
        with operator_range(f"{plan.name} backward"):
            # Values of the input do not matter here, only shapes.
            x = local.new_zeros(()).expand(tuple(plan.source.local_shape))
            others = _shapes_of_others(plan, local)
            by_x, _, _ = _run_backward(plan, local, x, weight._local_tensor, others, (True, False, False))
        assert by_x is not None
        return in_layout(by_x, plan.source)

    @staticmethod
    def backward(ctx: Any, by_x: Any) -> tuple[Any, Any, None]:
        plan = ctx.plan
        gradient, weight = ctx.saved_tensors
        by_x = brought_to(by_x, plan.source)
        needs_gradient, needs_weight, _ = ctx.needs_input_grad
        return (
            _Convolution.apply(by_x, weight, None, plan) if needs_gradient else None,
            _ByWeight.apply(by_x, gradient, plan) if needs_weight else None,
            None,
        )


class _ByWeight(torch.autograd.Function):
    """Input and gradient of the result -> gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Any, gradient: Any, plan: ConvolutionPlan) -> Any:
        ctx.plan = plan
        ctx.save_for_backward(x, gradient)
        local = gradient._local_tensor
        with operator_range(f"{plan.name} backward"):
            weight = local.new_zeros(()).expand(tuple(plan.weight.local_shape))
            if plan.halo is not None:
                others = [plan.halo.post(x._local_tensor).wait()]
            elif plan.window is not None:
                window = plan.window.fill(x._local_tensor)
                others = [window[slab] for slab in _slabs(plan.window)]
            else:
                others = []
            _, by_weight, _ = _run_backward(plan, local, x._local_tensor, weight, others, (False, True, False))
        assert by_weight is not None
        return in_layout(by_weight, plan.by_weight)

    @staticmethod
    def backward(ctx: Any, by_weight: Any) -> tuple[Any, Any, None]:
        plan = ctx.plan
        x, gradient = ctx.saved_tensors
        by_weight = brought_to(by_weight, plan.weight)
        needs_x, needs_gradient, _ = ctx.needs_input_grad
        return (
            _ByInput.apply(gradient, by_weight, plan) if needs_x else None,
            _Convolution.apply(x, by_weight, None, plan) if needs_gradient else None,
            None,
        )


def _shapes_of_others(plan: ConvolutionPlan, like: torch.Tensor) -> list[torch.Tensor]:
    zero = like.new_zeros(())
    if plan.halo is not None:
        shape = list(plan.source.local_shape)
        shape[plan.halo.dim] = plan.halo.before + plan.halo.after
        return [zero.expand(shape)]
    if plan.window is None:
        return []
    return [zero.expand([part.stop - part.start for part in slab]) for slab in _slabs(plan.window)]


# -- arguments --------------------------------------------------------------------------------------------------------


def _tuple_of(value: Any, n_spatial: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return values * n_spatial if len(values) == 1 else values


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else value


@functools.lru_cache(maxsize=1024)
def _geometry(kernel: tuple[int, ...], stride: Any, padding: Any, dilation: Any, groups: int) -> Geometry:
    n_spatial = len(kernel)
    dilations = _tuple_of(dilation, n_spatial)
    pads: tuple[tuple[int, int], ...]
    if padding == "same":
        totals = [step * (extent - 1) for step, extent in zip(dilations, kernel, strict=True)]
        pads = tuple((total // 2, total - total // 2) for total in totals)
    elif padding == "valid":
        pads = ((0, 0),) * n_spatial
    else:
        pads = tuple((rows, rows) for rows in _tuple_of(padding, n_spatial))
    return Geometry(_tuple_of(stride, n_spatial), pads, dilations, (0,) * n_spatial, False, groups)


@functools.lru_cache(maxsize=1024)
def _transposed_geometry(
    n_spatial: int, stride: Any, padding: Any, output_padding: Any, dilation: Any, groups: int
) -> Geometry:
    pads = tuple((rows, rows) for rows in _tuple_of(padding, n_spatial))
    strides, dilations = _tuple_of(stride, n_spatial), _tuple_of(dilation, n_spatial)
    return Geometry(strides, pads, dilations, _tuple_of(output_padding, n_spatial), True, groups)


def _convolve(
    function: Callable[..., Any],
    x: Any,
    weight: Any,
    bias: Any,
    geometry_of: Callable[[tuple[int, ...]], Geometry],
    arguments: tuple[Any, ...],
) -> Any:
    x_shape, weight_shape = shape_of(x._spec), shape_of(weight._spec)
    if x._spec.tensor_meta.dtype.is_complex:
        return _convolve_complex(function, x, weight, bias, geometry_of, arguments)
    if len(x_shape) == len(weight_shape) - 1:  # one sample without a batch dim
        return _convolve(function, x.unsqueeze(0), weight, bias, geometry_of, arguments).squeeze(0)
    weight, bias = _replicated(weight), None if bias is None else _replicated(bias)
    if len(x_shape) != len(weight_shape):
        metas = [meta_like(tensor._spec) for tensor in (x, weight)]
        meta_of_call(function, *metas, None, *arguments)  # which raises torch's own error
    geometry = geometry_of(weight_shape[2:])
    spatial = tuple(range(2, len(x_shape)))
    x = brought_to(x, supported_layout(x._spec, "convolution", whole=(1,), unfolded=spatial))
    plan = plan_convolution(function, x._spec, weight._spec, None if bias is None else bias._spec, geometry, arguments)
    return _Convolution.apply(x, weight, bias, plan)


def _convolve_complex(
    function: Callable[..., Any], x: Any, weight: Any, bias: Any, geometry_of: Any, arguments: tuple[Any, ...]
) -> Any:
    def real(a: Any, b: Any) -> Any:
        return _convolve(function, a, b, None, geometry_of, arguments)

    x_real, x_imaginary = torch.real(x), torch.imag(x)
    w_real, w_imaginary = torch.real(weight), torch.imag(weight)
    y = torch.complex(
        real(x_real, w_real) - real(x_imaginary, w_imaginary), real(x_real, w_imaginary) + real(x_imaginary, w_real)
    )
    return y if bias is None else y + bias.view(-1, *[1] * (len(shape_of(weight._spec)) - 2))


def _replicated(tensor: Any) -> Any:
    spec = tensor._spec
    return tensor if not spec.grid and not spec.has_partial else Redistribute.apply(tensor, spec.replicated())


# -- handlers ---------------------------------------------------------------------------------------------------------


def _handle(function: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def call(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        arguments = (_hashable(stride), _hashable(padding), _hashable(dilation), groups)
        return _convolve(function, input, weight, bias, lambda kernel: _geometry(kernel, *arguments), arguments)

    return in_autocast_dtype(call, *_positional(call, args, kwargs)) if autocast_is_on() else call(*args, **kwargs)


def _handle_transposed(function: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def call(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Any:
        arguments = (_hashable(stride), _hashable(padding), _hashable(output_padding), groups, _hashable(dilation))
        stride, padding, output_padding, groups, dilation = arguments

        def geometry_of(kernel: tuple[int, ...]) -> Geometry:
            return _transposed_geometry(len(kernel), stride, padding, output_padding, dilation, groups)

        return _convolve(function, input, weight, bias, geometry_of, arguments)

    return in_autocast_dtype(call, *_positional(call, args, kwargs)) if autocast_is_on() else call(*args, **kwargs)


def _positional(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Order keyword arguments as the function takes them."""
    names = call.__code__.co_varnames[: call.__code__.co_argcount]
    defaults = dict(zip(names[-len(call.__defaults__ or ()) :], call.__defaults__ or (), strict=False))
    given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    return tuple(given[name] for name in names)


def _handle_general(function: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Serve ``torch.convolution``."""

    def call(
        input: Any,
        weight: Any,
        bias: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        transposed: bool,
        output_padding: Any,
        groups: int,
    ) -> Any:
        n_spatial = weight.ndim - 2
        if transposed:
            given = (input, weight, bias, stride, padding, output_padding, groups, dilation)
            return _handle_transposed(_TRANSPOSED[n_spatial - 1], (), given, {})
        return _handle(_CONVOLUTIONS[n_spatial - 1], (), (input, weight, bias, stride, padding, dilation, groups), {})

    return call(*args, **kwargs)


_CONVOLUTIONS: tuple[Callable[..., Any], ...] = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED: tuple[Callable[..., Any], ...] = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
for _function in _CONVOLUTIONS:
    ShardTensor.register_function_handler(_function, _handle)
for _function in _TRANSPOSED:
    ShardTensor.register_function_handler(_function, _handle_transposed)
ShardTensor.register_function_handler(torch.convolution, _handle_general)
