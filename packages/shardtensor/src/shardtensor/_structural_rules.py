"""The few operators that every program meets and that need no ops package: copies and aliases of one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import Replicate

from shardtensor_spec import ShardTensorSpec

from ._axis_rule import axis_plan
from ._layout import without_partial
from ._plan import Call, Plan
from ._registry import register_dispatch_handler, register_rule

aten = torch.ops.aten


@register_rule(
    "aten.detach",
    "aten.alias",
    "aten.clone",
    "aten.lift_fresh",
    "aten.positive",
    "aten.contiguous",
    "aten._conj",
    "aten._conj_physical",
    "aten._neg_view",
    "aten.resolve_conj",
    "aten.resolve_neg",
)
def plan_same(call: Call) -> Plan | None:
    """One tensor in, the same rows out: nothing moves, and a pending sum stays pending."""
    (spec,) = call.specs
    names = tuple(range(spec.ndim))
    return axis_plan(call, [names], [names], linear="each")


@register_rule("aten._to_copy")
def plan_to_copy(call: Call) -> Plan | None:
    """Another dtype, device or memory format. A cast to an integer dtype is not linear, so it ends a pending sum."""
    (spec,) = call.specs
    names = tuple(range(spec.ndim))
    dtype = call.argument("dtype")
    assert spec.tensor_meta is not None
    is_linear = dtype is None or dtype == spec.tensor_meta.dtype or dtype.is_floating_point or dtype.is_complex
    is_linear = is_linear and (spec.tensor_meta.dtype.is_floating_point or spec.tensor_meta.dtype.is_complex)
    return axis_plan(call, [names], [names], linear="each" if is_linear else "no")


@register_rule(
    "aten.zeros_like",
    "aten.ones_like",
    "aten.empty_like",
    "aten.full_like",
    "aten.rand_like",
    "aten.randn_like",
    "aten.randint_like",
)
def plan_like(call: Call) -> Plan | None:
    """A new tensor in the layout of another one; a pending sum says nothing about it."""
    (spec,) = call.specs
    names = tuple(range(spec.ndim))
    plan = axis_plan(call, [names], [names])
    if plan is None or not spec.has_partial:
        return plan
    # Only the shape is read, so there is no reason to reduce first.
    return Plan((spec,), plan.result, plan.local, plan.replaced)


@register_rule("aten.new_empty", "aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.new_empty_strided")
def plan_new(call: Call) -> Plan | None:
    """A new tensor on the device of another one: laid out like it if it has its shape, else replicated."""
    (spec,) = call.specs
    (meta,) = call.global_metas
    assert meta is not None and spec.tensor_meta is not None
    if tuple(meta.shape) != tuple(spec.tensor_meta.shape):
        return Plan((spec,), ShardTensorSpec.of(spec.mesh, (Replicate(),) * spec.mesh.ndim, meta, {}))
    result = without_partial(spec).with_meta(meta)
    replaced: dict[str, object] = {"size": list(result.local_shape)}
    if call.argument("stride") is not None:
        replaced["stride"] = _dense_stride(result.local_shape, meta.stride)
    return Plan((spec,), result, replaced=replaced)


def _dense_stride(shape: Sequence[int], like: Sequence[int]) -> list[int]:
    """Strides of a dense tensor whose dims lie in memory in the order of other strides."""
    stride = [1] * len(shape)
    step = 1
    for dim in sorted(range(len(shape)), key=lambda dim: (like[dim], -dim)):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return stride


@register_rule("aten.copy_")
def plan_copy(call: Call) -> Plan | None:
    """Write one tensor over another: the source comes to the layout of the target."""
    target, source = call.specs
    names = tuple(range(target.ndim))
    return axis_plan(call, [names, _broadcast(source, target)], [names], pinned=0)


def _broadcast(spec: ShardTensorSpec, target: ShardTensorSpec) -> tuple[int | None, ...]:
    assert spec.tensor_meta is not None and target.tensor_meta is not None
    skipped = target.ndim - spec.ndim
    return tuple(
        None if extent == 1 and target.tensor_meta.shape[skipped + dim] != 1 else skipped + dim
        for dim, extent in enumerate(spec.tensor_meta.shape)
    )


def _is_same_size(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return a Python bool that all ranks agree on."""
    return first.shape == second.shape and first.dtype == second.dtype and bool((first == second).all())


def _local_scalar_dense(tensor: torch.Tensor) -> object:
    return tensor.item()


register_dispatch_handler(aten.is_same_size.default, _is_same_size)
register_dispatch_handler(aten.equal.default, _equal)
register_dispatch_handler(aten._local_scalar_dense.default, _local_scalar_dense)
