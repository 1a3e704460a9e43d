"""Above autograd: promote plain tensors that need a gradient, and find the handlers of Python-level functions.

Under ``torch.compile`` none of this runs while Dynamo traces: the call goes into the graph as it is, and this module
serves it when AOT autograd runs the graph on fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardtensor_spec import on_new_world

from . import _debug, _tensor
from ._promotion import promote, promote_all
from ._registry import Handler, find_function_handler, on_registration, takes_plain_operands
from ._torch_private import below_has_torch_function, run_below_torch_function

# These act on the tensors as objects: a promoted copy would receive the hook or the gradient in place of the original.
_ON_OBJECTS: frozenset[Callable[..., Any]] = frozenset(
    {
        torch.autograd.backward,
        torch.autograd.grad,
        torch.Tensor.backward,
        torch.Tensor.register_hook,
        torch.Tensor.register_post_accumulate_grad_hook,
        torch.Tensor.retain_grad,
        torch.Tensor.requires_grad_,
    }
)

_is_traced_by_dynamo = torch.compiler.is_dynamo_compiling

_INERT = frozenset({int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.Size, slice})

_served: dict[Callable[..., Any], Handler | None] = {}
"""Function -> what serves it; None for what runs as it is, once plain operands that need a gradient are promoted."""


def torch_function(
    cls: type[torch.Tensor],
    func: Callable[..., Any],
    types: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Be ``ShardTensor.__torch_function__``."""
    if _is_traced_by_dynamo():
        return run_below_torch_function(func, types, args, kwargs if kwargs is not None else {})
    try:
        serve = _served[func]
    except KeyError:
        serve = _served.setdefault(func, _find(func))
    if serve is not None:
        return serve(func, types, args, kwargs if kwargs is not None else {})
    for argument in args:
        kind = type(argument)
        if kind is not ShardTensor and kind not in _INERT:
            args = _promote_differentiable(args, args, kwargs)
            break
    if kwargs:
        kwargs = _promote_differentiable(kwargs, args, kwargs)
        return run_below_torch_function(func, types, args, kwargs)
    return run_below_torch_function(func, types, args, {})


def _find(func: Callable[..., Any]) -> Handler | None:
    handler = find_function_handler(func)
    if handler is not None:
        served = handler if takes_plain_operands(func) else _with_promotion(handler)
        return _with_check(served) if _debug.enabled else served
    below = below_has_torch_function(func)
    if func in _ON_OBJECTS:
        return _as_it_is(below)
    return None if below is None else _composite(below)


def _with_promotion(handler: Handler) -> Handler:
    def serve(func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mesh = _first_mesh(args, kwargs)
        if mesh is not None:
            args, kwargs = promote_all(args, mesh), promote_all(kwargs, mesh)
        return handler(func, types, args, kwargs)

    return serve


def _with_check(serve: Handler) -> Handler:
    """Let all ranks compare the call first, for ``SHARDTENSOR_DEBUG``."""

    def check_and_serve(func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mesh = _first_mesh(args, kwargs)
        if mesh is not None:
            _debug.check_agreement(torch.overrides.resolve_name(func) or str(func), (args, kwargs), mesh)
        return serve(func, types, args, kwargs)

    return check_and_serve


def _as_it_is(below: Callable[..., Any] | None) -> Handler:
    def serve(func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run_below_torch_function(func, types, args, kwargs) if below is None else below(*args, **kwargs)

    return serve


def _composite(below: Callable[..., Any]) -> Handler:
    def serve(func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        promoted = _promote_differentiable(args, args, kwargs)
        return below(*promoted, **_promote_differentiable(kwargs, args, kwargs))

    return serve


def _promote_differentiable(values: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Promote the DTensors, and the plain tensors that need a gradient; dispatch takes the other plain ones itself."""
    if not _needs_promotion(values):
        return values
    mesh = _first_mesh(args, kwargs)
    return values if mesh is None else _promoted(values, mesh)


def _needs_promotion(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        if isinstance(value, ShardTensor):
            return False
        return isinstance(value, DTensor) or (value.requires_grad and torch.is_grad_enabled())
    if isinstance(value, dict):
        return any(map(_needs_promotion, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_needs_promotion, value))


def _promoted(value: Any, mesh: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return promote(value, mesh) if _needs_promotion(value) else value
    if isinstance(value, dict):
        return {name: _promoted(item, mesh) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_promoted(item, mesh) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _first_mesh(args: Any, kwargs: dict[str, Any] | None) -> Any:
    for value in (*args, *(kwargs or {}).values()):
        if isinstance(value, ShardTensor):
            return value._spec.mesh
        if isinstance(value, (list, tuple)):
            mesh = _first_mesh(value, None)
            if mesh is not None:
                return mesh
        elif isinstance(value, dict):
            mesh = _first_mesh(tuple(value.values()), None)
            if mesh is not None:
                return mesh
    return None


on_registration(_served.clear)
on_new_world(_served.clear)

ShardTensor = _tensor.ShardTensor
