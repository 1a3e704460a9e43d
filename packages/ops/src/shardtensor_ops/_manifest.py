"""Which module serves which operator. Light: nothing of torch is imported here."""

from __future__ import annotations

_FAMILIES = {
    "shardtensor_ops.pointwise": """
        tag:pointwise aten.where aten.prelu aten._prelu_kernel aten._prelu_kernel_backward aten.gelu_backward
        aten.silu_backward aten.threshold_backward aten.leaky_relu_backward aten.elu_backward aten.hardtanh_backward
        aten.hardsigmoid_backward aten.hardswish_backward aten.hardswish aten.hardswish_ aten.softplus_backward
        aten.softshrink_backward aten.hardshrink_backward aten.log_sigmoid_backward aten.mish_backward
        aten.sigmoid_backward aten.tanh_backward aten.logit_backward aten.rsub aten.masked_fill aten.masked_fill_
        aten.fill aten.fill_ aten.zero_ aten.isfinite aten.isnan aten.isinf aten.nan_to_num aten.clamp aten.clamp_
        aten.lerp aten.lerp_ aten.addcmul aten.addcmul_ aten.addcdiv aten.addcdiv_ aten.bernoulli
        aten.native_dropout_backward
    """,
}

MANIFEST: dict[str, str] = {name: module for module, names in _FAMILIES.items() for name in names.split()}
"""Operator name -> module. ``tag:pointwise`` stands for every operator that torch tags so."""


def names_served_by(module: str) -> list[str]:
    """Operators of one module, for a module that serves all of its operators by one rule."""
    return _FAMILIES[module].split()
