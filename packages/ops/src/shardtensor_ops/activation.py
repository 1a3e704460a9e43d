"""Activations that are not pointwise in torch's eyes: those with a second result, and those that halve a dim."""

from __future__ import annotations

from typing import Any

import torch

from shardtensor.extending import Call, Plan, axis_plan, register_rule


@register_rule("aten.log_sigmoid_forward")
def plan_log_sigmoid(call: Call) -> Plan | None:
    """Every element on its own; the buffer that torch keeps for backward is laid out like the result."""
    (spec,) = call.specs
    names = tuple(range(spec.ndim))
    assert spec.tensor_meta is not None
    metas = [spec.tensor_meta, spec.tensor_meta]
    return axis_plan(call, [names], [names, names], metas=metas, local=_log_sigmoid)


def _log_sigmoid(input: torch.Tensor) -> Any:
    result, buffer = torch.ops.aten.log_sigmoid_forward(input)
    # On CUDA the buffer is empty and backward does not read it.
    return result, buffer if buffer.shape == input.shape else result.new_empty(()).expand(input.shape)


@register_rule("aten.rrelu_with_noise", "aten.rrelu_with_noise_", "aten.rrelu_with_noise_backward")
def plan_rrelu(call: Call) -> Plan | None:
    """Every element with a slope of its own; the noise that torch writes is laid out like the input."""
    names = tuple(range(call.specs[0].ndim))
    written = 0 if 0 in call.writes else None
    return axis_plan(call, [names] * len(call.specs), [names], pinned=written)


@register_rule("aten.glu")
def plan_glu(call: Call) -> Plan | None:
    """One half of a dim gates the other, so that dim is whole."""
    (spec,) = call.specs
    dim = call.argument("dim", -1) % spec.ndim
    names, halved = _names(spec.ndim, dim)
    return axis_plan(call, [names], [halved], whole=("both",))


@register_rule("aten.glu_backward")
def plan_glu_backward(call: Call) -> Plan | None:
    """As `plan_glu`."""
    _, spec = call.specs
    names, halved = _names(spec.ndim, call.argument("dim") % spec.ndim)
    return axis_plan(call, [halved, names], [names], whole=("both", "half"))


def _names(n_dims: int, dim: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    names: list[Any] = list(range(n_dims))
    return (*names[:dim], "both", *names[dim + 1 :]), (*names[:dim], "half", *names[dim + 1 :])
