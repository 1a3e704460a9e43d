"""Who serves which operator: handlers and rules, registered here or found through installed distributions.

A distribution offers operators by one entry point of the group ``shardtensor.ops`` that names a dict,
``MANIFEST = {"aten.mm": "shardtensor_ops.matmul", ...}``. A module is imported the first time one of its operators
meets a ShardTensor, and registers rules or handlers at import.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

import torch
from torch.overrides import resolve_name

from shardtensor_spec import ShardTensorError

from ._plan import Rule
from ._torch_private import OpOverload, OpOverloadPacket, is_composite

ENTRY_POINT_GROUP = "shardtensor.ops"
POINTWISE = "tag:pointwise"
"""Manifest key of what serves every operator that torch tags as pointwise and nobody names."""

logger = logging.getLogger("shardtensor")

Handler = Callable[..., Any]

_rules: dict[str, Rule] = {}
_dispatch_handlers: dict[OpOverload, Handler] = {}
_function_handlers: dict[Callable[..., Any], Handler] = {}
_named_function_handlers: dict[str, Handler] = {}
_takes_plain: set[Callable[..., Any]] = set()
_change_callbacks: list[Callable[[], None]] = []


class ManifestConflictError(ShardTensorError):
    """Two installed distributions claim the same operator."""


def on_registration(forget: Callable[[], None]) -> None:
    """Register what to call when a rule or handler is added, so that no cache serves an old answer."""
    _change_callbacks.append(forget)


def register_rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a function that plans operators.

    Parameters
    ----------
    *names : str
        Operators by packet (``"aten.mm"``, every overload) or overload (``"aten.add.Tensor"``), or `POINTWISE`.

    Examples
    --------
    >>> @register_rule("aten.trace_of_my_own")
    ... def plan_trace(call):
    ...     return None  # no plan for this layout: gather
    """

    def register(rule: Rule) -> Rule:
        for name in names:
            _rules[name] = rule
        _changed()
        return rule

    return register


def register_dispatch_handler(op: OpOverload, handler: Handler) -> None:
    """Serve an operator below autograd by ``handler(*args, **kwargs)``, in place of any rule."""
    _dispatch_handlers[op] = handler
    _changed()


def register_function_handler(function: Callable[..., Any], handler: Handler, *, promote: bool = True) -> None:
    """Serve a Python-level function above autograd by ``handler(func, types, args, kwargs)``.

    Parameters
    ----------
    function : callable
        For example ``torch.dot``; its aliases are separate.
    handler : callable
        What serves it.
    promote : bool
        Whether plain tensors and DTensors are promoted before. A handler that does without receives them as they
        are and gives plain operands that need a gradient a plain, complete one.
    """
    _function_handlers[function] = handler
    (_takes_plain.discard if promote else _takes_plain.add)(function)
    _changed()


def takes_plain_operands(function: Callable[..., Any]) -> bool:
    """Whether the handler of a function wants plain tensors and DTensors as they are."""
    return function in _takes_plain


def register_named_function_handler(name: str, handler: Handler) -> None:
    """Serve the function whose ``str`` is ``name`` (a custom operator, ``"ns.op.default"``)."""
    _named_function_handlers[name] = handler
    _changed()


def find_rule(op: OpOverload) -> Rule | None:
    """Find the rule of an operator: by overload, by packet, then for every pointwise operator."""
    names = [str(op), str(op.overloadpacket)]
    if torch.Tag.pointwise in op.tags:
        names.append(POINTWISE)
    for name in names:
        _import_for(name)
        if name in _rules:
            return _rules[name]
    return None


def find_dispatch_handler(op: OpOverload) -> Handler | None:
    """Find the handler of an operator below autograd: for a composite one that nobody serves, what takes it apart."""
    for name in (str(op), str(op.overloadpacket)):
        _import_for(name)
    handler = _dispatch_handlers.get(op)
    if handler is None and is_composite(op) and find_rule(op) is None:
        return op.decompose
    return None if handler is None else _with_visible_errors(handler, str(op))


def find_function_handler(function: Callable[..., Any]) -> Handler | None:
    """Find the handler of a Python-level function, by identity and then by name."""
    handler = _function_handlers.get(function)
    if handler is None:
        name = _name_of(function)
        if name is not None:
            _import_for(name)
        handler = _function_handlers.get(function) or _named_function_handlers.get(str(function))
    if handler is None and isinstance(function, OpOverloadPacket):
        handler = _named_function_handlers.get(f"{function}.default")
    if handler is not None and _serves_operator(function):
        return _with_visible_errors(handler, _name_of(function) or str(function))
    return handler


_BINARY = ("add", "sub", "mul", "div", "floor_divide", "remainder", "pow", "matmul")


def _serves_operator(function: Callable[..., Any]) -> bool:
    """Whether the function is what Python calls for an operator such as ``+``."""
    name = getattr(function, "__name__", "")
    is_operator = name.rstrip("_") in _BINARY or (name.startswith("__") and name.endswith("__"))
    return is_operator and bool(getattr(torch.Tensor, name, None) == function)


def _with_visible_errors(handler: Handler, name: str) -> Handler:
    """Keep the TypeErrors of a handler from becoming Python's "unsupported operand type(s) for +"."""

    @functools.wraps(handler)
    def serve(*args: Any, **kwargs: Any) -> Any:
        try:
            return handler(*args, **kwargs)
        except TypeError as error:
            raise RuntimeError(f"the handler of {name} raised TypeError: {error}") from error

    return serve


def served_names() -> list[str]:
    """Return every name that a manifest or a registration serves, sorted: the coverage table."""
    return sorted({*_manifest(), *_rules, *(str(op) for op in _dispatch_handlers), *_named_function_handlers})


def _name_of(function: Callable[..., Any]) -> str | None:
    try:
        name: str | None = resolve_name(function)
    except (AttributeError, TypeError):  # what is not from torch has no name there
        return None
    return name


@functools.cache
def _manifest() -> Mapping[str, str]:
    """Merge the manifests of all installed distributions."""
    merged: dict[str, str] = {}
    owner: dict[str, str] = {}
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        distribution = entry_point.dist.name if entry_point.dist is not None else entry_point.value
        for name, module in entry_point.load().items():
            if name in merged and merged[name] != module:
                raise ManifestConflictError(
                    f"{name} is served by both {owner[name]} ({merged[name]}) and {distribution} ({module})",
                    advice=f"uninstall one of {owner[name]} and {distribution}",
                )
            merged[name], owner[name] = module, distribution
    return merged


_imported: set[str] = set()


def _import_for(name: str) -> None:
    module = _manifest().get(name)
    if module is not None and module not in _imported:
        _imported.add(module)
        logger.debug("importing %s for %s", module, name)
        importlib.import_module(module)


def _changed() -> None:
    for forget in _change_callbacks:
        forget()
