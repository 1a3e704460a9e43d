"""What a rule sees of an operator call, and the plan that it answers with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardtensor_spec import ShardTensorSpec

from ._torch_private import OpOverload, TensorMeta, outside_modes, schema_argument_names, schema_writes

PlanKind = Literal["native", "reshard", "gather"]
Result = ShardTensorSpec | None | tuple["ShardTensorSpec | None", ...]
"""Layout of what an operator returns: one tensor, several, or nothing that is a tensor (None)."""


@dataclass(frozen=True)
class Call:
    """An operator call with the layouts in place of the tensors: all that a plan may depend on.

    Attributes
    ----------
    op : OpOverload
        The operator.
    args, kwargs
        Its arguments; every tensor, also one in a list, is replaced by its `ShardTensorSpec`. A plain tensor is there
        as a replicated one.
    """

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @functools.cached_property
    def specs(self) -> tuple[ShardTensorSpec, ...]:
        """Layouts of all tensor operands, in the order of the arguments."""
        return tuple(iterate_specs((*self.args, *self.kwargs.values())))

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh that all operands are on."""
        return self.specs[0].mesh

    def argument(self, name: str, default: Any = None) -> Any:
        """Value of an argument by its name in the operator's schema, wherever the caller put it."""
        if name in self.kwargs:
            return self.kwargs[name]
        for position, argument in enumerate(self.op._schema.arguments):
            if argument.name == name:
                if position < len(self.args):
                    return self.args[position]
                return argument.default_value if argument.has_default_value() else default
        return default

    @functools.cached_property
    def writes(self) -> tuple[int, ...]:
        """Positions of the arguments that the operator writes to."""
        return schema_writes(self.op)

    @property
    def returns_many(self) -> bool:
        """Whether the operator returns several values or a list."""
        returns = self.op._schema.returns
        return len(returns) != 1 or "[]" in str(returns[0].type)

    @functools.cached_property
    def global_result(self) -> Any:
        """What the operator returns for the whole tensors: meta tensors of global shape, so no memory.

        Raises
        ------
        Exception
            What torch raises for these shapes, on every rank alike.
        """
        return run_on_meta(self.op, *self.args, **_without_device(dict(self.kwargs)))

    @functools.cached_property
    def global_metas(self) -> tuple[TensorMeta | None, ...]:
        """Shape, stride and dtype of every result, None where it is no tensor."""
        result = self.global_result
        results = result if isinstance(result, (tuple, list)) else (result,)
        return tuple(TensorMeta(r.shape, r.stride(), r.dtype) if isinstance(r, torch.Tensor) else None for r in results)


@dataclass(frozen=True)
class Plan:
    """How every rank computes its part of an operator's result.

    Attributes
    ----------
    targets : tuple of ShardTensorSpec
        The layout to bring each tensor operand to, in the order of `Call.specs`.
    result : ShardTensorSpec, None, or tuple of these
        Layout of what ``local`` returns.
    local : callable, optional
        Called with the local tensors in place of the operands; the operator itself by default.
    replaced : Mapping of str to object
        Arguments, by schema name, whose local value differs from the global one (shapes, offsets).
    final : as ``result``, optional
        The layouts that the results are brought to afterwards, where they differ.
    kind : {"native", "reshard", "gather"}
        How dear it is: nothing of global size, shards moved to another dim, or a tensor of global size on a rank.
    """

    targets: tuple[ShardTensorSpec, ...]
    result: Result
    local: Callable[..., Any] | None = None
    replaced: Mapping[str, Any] = field(default_factory=dict)
    final: Result = None
    kind: PlanKind = "native"

    def localize(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Put the local values of shape arguments in place of the global ones."""
        if not self.replaced:
            return args, kwargs
        names = schema_argument_names(op)
        arguments = list(args)
        kwargs = dict(kwargs)
        for name, value in self.replaced.items():
            position = names.index(name)
            if position < len(arguments):
                arguments[position] = value
            else:
                kwargs[name] = value
        return tuple(arguments), kwargs


Rule = Callable[[Call], "Plan | None"]
"""Answers a call with a plan, or with None where it knows none and the operands are to be gathered."""


def iterate_specs(values: Sequence[Any]) -> list[ShardTensorSpec]:
    """Collect the layouts among the arguments, those in lists included."""
    found: list[ShardTensorSpec] = []
    for value in values:
        if isinstance(value, ShardTensorSpec):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(iterate_specs(value))
    return found


def run_on_meta(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function with a meta tensor of global shape in place of every `ShardTensorSpec`.

    Raises
    ------
    Exception
        What torch raises for these shapes, on every rank alike.
    """
    with outside_modes():
        return function(*_to_meta(args), **_to_meta(kwargs))


def _to_meta(value: Any) -> Any:
    if isinstance(value, ShardTensorSpec):
        meta = value.tensor_meta
        assert meta is not None
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return type(value)(_to_meta(item) for item in value)
    if isinstance(value, dict):
        return {name: _to_meta(item) for name, item in value.items()}
    return value


def _without_device(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Let operators that make a tensor on a device make it on the meta device."""
    changed = {name: torch.device("meta") if isinstance(v, torch.device) else v for name, v in kwargs.items()}
    changed.pop("pin_memory", None)
    if changed.get("generator") is not None:
        changed["generator"] = None
    return changed
