"""Layer, RMS, group, instance and batch norm for any layout.

===========================  ===============================================  ==================================
norm                         local where                                      else, forward; backward
===========================  ===============================================  ==================================
``layer_norm``, ``rms_norm``  the normalised dims are whole                    one all-gather (RMS: all-reduce) of
                                                                              statistics; one all-reduce
``group_norm``,               space is whole; batch and channels may be        one all-gather of two numbers per
``instance_norm``             sharded                                          sample and group; one all-reduce
``batch_norm``, training      only channels are sharded                        the same, per channel
``batch_norm``, evaluation    always                                           none
===========================  ===============================================  ==================================

Statistics are merged by counts, as deviations from means. Plain weights get plain, complete gradients: from the
backward's own all-reduce where that covers the ranks that hold contributions, else by one all-reduce for weight and
bias together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardtensor import ShardTensor, ShardTensorSpec
from shardtensor.extending import Call, Plan, axis_plan, register_function_handler, register_rule
from shardtensor_spec import on_new_world

from ._autocast import autocast_is_on
from ._channel_norm import FixedBatchNorm, batch_norm_of, group_norm_of
from ._naming import shape_of
from ._norm_function import Norm, as_operands, normalize
from ._rank_merge import accumulation_dtype
from ._row_norm import row_norm
from ._running_statistics import Buffers, TrackingBatchNorm, TrackingInstanceNorm
from ._torch_private import outside_modes

_N_CACHED = 2048
_row_norms: dict[Any, Norm] = {}
_checked: set[Any] = set()


def layer_norm(input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    """Normalise the last dims. See ``torch.nn.functional.layer_norm`` and the table of the module."""
    if type(input) is not ShardTensor or not _are_usual(weight, bias):
        input, weight, bias = as_operands(input, weight, bias)
    if autocast_is_on():
        input, weight, bias = _in_float32(input, weight, bias)
    if type(normalized_shape) is not tuple:
        normalized_shape = tuple(normalized_shape)
    norm = _row_norm(torch.nn.functional.layer_norm, input, normalized_shape, weight, bias)
    return normalize(norm, input, weight, bias, eps)


def rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """Normalise the last dims by their root mean square. See ``torch.nn.functional.rms_norm``."""
    input, weight = as_operands(input, weight)
    if autocast_is_on():
        input, weight = _in_float32(input, weight)
    norm = _row_norm(torch.nn.functional.rms_norm, input, tuple(normalized_shape), weight)
    if eps is None:
        eps = torch.finfo(accumulation_dtype(input.dtype)).eps
    return normalize(norm, input, weight, None, eps)


def group_norm(input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    """Normalise groups of channels. See ``torch.nn.functional.group_norm`` and the table of the module."""
    input, weight, bias = as_operands(input, weight, bias)
    if autocast_is_on():
        input, weight, bias = _in_float32(input, weight, bias)
    _check(torch.nn.functional.group_norm, input, num_groups, weight, bias)
    return normalize(group_norm_of(input._spec, num_groups, "group_norm"), input, weight, bias, eps)


def instance_norm(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Normalise every channel of every sample. See ``torch.nn.functional.instance_norm`` and the module's table."""
    input, weight, bias = as_operands(input, weight, bias)
    buffers = Buffers(running_mean, running_var, momentum)
    _check(torch.nn.functional.instance_norm, input, running_mean, running_var, weight, bias, use_input_stats)
    if not use_input_stats:
        return _fixed_batch_norm(input, weight, bias, buffers, eps)
    norm = group_norm_of(input._spec, shape_of(input._spec)[1], "instance_norm")
    if running_mean is not None or running_var is not None:
        norm = TrackingInstanceNorm(norm, buffers)
    return normalize(norm, input, weight, bias, eps)


def batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Normalise every channel over the whole batch. See ``torch.nn.functional.batch_norm`` and the module's table."""
    input, weight, bias = as_operands(input, weight, bias)
    buffers = Buffers(running_mean, running_var, momentum)
    _check(torch.nn.functional.batch_norm, input, running_mean, running_var, weight, bias, training)
    if not training:
        return _fixed_batch_norm(input, weight, bias, buffers, eps)
    norm = batch_norm_of(input._spec)
    if running_mean is not None or running_var is not None:
        norm = TrackingBatchNorm(norm, buffers)
    return normalize(norm, input, weight, bias, eps)


def _fixed_batch_norm(input: Any, weight: Any, bias: Any, buffers: Buffers, eps: float) -> Any:
    layout = batch_norm_of(input._spec)
    mean, variance = buffers.local(layout.parameter)
    return normalize(FixedBatchNorm(input._spec, mean, variance), input, weight, bias, eps)


def _are_usual(weight: Any, bias: Any) -> bool:
    """Whether weight and bias are ShardTensors or None: the quickest way to take them as they are."""
    return (weight is None or type(weight) is ShardTensor) and (bias is None or type(bias) is ShardTensor)


def _row_norm(function: Callable[..., Any], input: Any, normalized_shape: tuple[int, ...], *parameters: Any) -> Norm:
    key = (function, input._spec, normalized_shape, *map(_shape_key, parameters))
    norm = _row_norms.get(key)
    if norm is None:
        _run_on_meta(function, input, normalized_shape, *parameters)
        if len(_row_norms) >= _N_CACHED:
            _row_norms.clear()
        is_rms = function is torch.nn.functional.rms_norm
        norm = _row_norms[key] = row_norm(input._spec, len(normalized_shape), is_rms)
    return norm


def _check(function: Callable[..., Any], *args: Any) -> None:
    """Let torch raise its own errors for the global shapes, once for every combination of layouts."""
    key = (function, *map(_shape_key, args))
    if key not in _checked:
        _run_on_meta(function, *args)
        if len(_checked) >= _N_CACHED:
            _checked.clear()
        _checked.add(key)


def _shape_key(value: Any) -> Any:
    if type(value) is ShardTensor:
        return value._spec
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else value


def _run_on_meta(function: Callable[..., Any], *args: Any) -> None:
    with outside_modes(), torch.no_grad():
        function(*map(_on_meta, args))


def _on_meta(value: Any) -> Any:
    if isinstance(value, ShardTensor):
        return torch.empty(shape_of(value._spec), dtype=value.dtype, device="meta")
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, torch.Tensor) else value


def _in_float32(*operands: Any) -> tuple[Any, ...]:
    """Autocast runs these norms in float32 on accelerators, and leaves them alone on the CPU."""
    device_type = operands[0].device.type
    if device_type == "cpu" or not torch.is_autocast_enabled(device_type):
        return operands
    return tuple(
        t.float() if isinstance(t, Tensor) and t.dtype in (torch.float16, torch.bfloat16) else t for t in operands
    )


def _handler(serve: Callable[..., Any]) -> Callable[..., Any]:
    def handler(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return serve(*args, **kwargs)

    return handler


for _serve in (layer_norm, rms_norm, group_norm, instance_norm, batch_norm):
    register_function_handler(getattr(torch.nn.functional, _serve.__name__), _handler(_serve), promote=False)


# -- below autograd: for who calls the operators themselves ------------------------------------------------------------


@register_rule("aten.native_layer_norm", "aten._fused_rms_norm")
def plan_row_norm(call: Call) -> Plan | None:
    """Local; shards of the normalised dims move to another dim meanwhile."""
    spec = call.specs[0]
    n_rows = spec.ndim - len(call.argument("normalized_shape"))
    names = tuple(range(spec.ndim))
    parameters = [names[n_rows:] for _ in call.specs[1:]]
    statistic = tuple(name if name < n_rows else None for name in names)
    results = [names, *[statistic for _ in call.global_metas[1:]]]
    return axis_plan(call, [names, *parameters], results, whole=names[n_rows:])


@register_rule("aten.native_layer_norm_backward", "aten._fused_rms_norm_backward")
def plan_row_norm_backward(call: Call) -> Plan | None:
    """Local; the gradients of weight and bias are contributions."""
    gradient = call.specs[0]
    n_rows = gradient.ndim - len(call.argument("normalized_shape"))
    names = tuple(range(gradient.ndim))
    statistic = tuple(name if name < n_rows else None for name in names)
    is_statistic = ["mean", "rstd"]
    operands = []
    for argument in call.op._schema.arguments:
        value = call.argument(argument.name)
        if isinstance(value, ShardTensorSpec):
            is_parameter = argument.name in ("weight", "bias")
            operands.append(statistic if argument.name in is_statistic else names[n_rows:] if is_parameter else names)
    results = [names, *[names[n_rows:]] * (len(call.global_metas) - 1)]
    return axis_plan(call, operands, results, whole=names[n_rows:])


@register_rule("aten.native_group_norm")
def plan_group_norm(call: Call) -> Plan | None:
    """Local where only the batch is sharded; other shards move there meanwhile."""
    spec = call.specs[0]
    names = tuple(range(spec.ndim))
    statistic = (0, "groups")
    results = [names, statistic, statistic]
    parameters = [(1,) for _ in call.specs[1:]]
    return axis_plan(
        call, [names, *parameters], results, whole=names[1:], allow_folded=False, localize=lambda n: {"N": n[0]}
    )


@register_rule("aten.native_group_norm_backward")
def plan_group_norm_backward(call: Call) -> Plan | None:
    """Likewise; the gradients of weight and bias are contributions."""
    names = tuple(range(call.specs[0].ndim))
    statistic = (0, "groups")
    operands = [names, names, statistic, statistic, *[(1,) for _ in call.specs[4:]]]
    results = [names, (1,), (1,)]
    return axis_plan(call, operands, results, whole=names[1:], allow_folded=False, localize=lambda n: {"N": n[0]})


on_new_world(_row_norms.clear)
on_new_world(_checked.clear)
on_new_world(row_norm.cache_clear)
on_new_world(group_norm_of.cache_clear)
on_new_world(batch_norm_of.cache_clear)
