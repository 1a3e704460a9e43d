"""The private names of torch that this package uses, all in one place.

`make_wrapper` is the constructor of wrapper subclasses that DTensor uses (0.8 µs against 2.7 µs for
``_make_wrapper_subclass``); `run_below_torch_function` calls a function with ``__torch_function__`` of subclasses
switched off (a context manager costs 1 µs more); `outside_modes` hides meta computations from fake, proxy and
functional modes while ``torch.compile`` traces; `StorageWeakRef` tells whether memory is still in use.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes as outside_modes

make_wrapper: Callable[..., Any] = torch.Tensor._dtensor__new__
run_below_torch_function: Callable[..., Any] = torch._C._disabled_torch_function_impl


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return ``function.apply`` without what it does for functorch and for dead wrappers: 5.5 µs against 9.2 µs a call.

    Parameters
    ----------
    function : type
        A subclass of ``torch.autograd.Function`` without ``setup_context``, called outside of ``torch.func`` transforms
        or with operands that no transform has wrapped.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


__all__ = [
    "OpOverload",
    "OpOverloadPacket",
    "StorageWeakRef",
    "TensorMeta",
    "below_has_torch_function",
    "current_mesh",
    "direct_apply",
    "flattened_mesh",
    "make_wrapper",
    "outside_modes",
    "run_below_torch_function",
]


def _never(*args: object) -> bool:
    return False


# What a Python function of torch asks before it runs its own body, and what it calls when the answer is yes.
_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@functools.cache
def below_has_torch_function(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return ``function`` with its own ``has_torch_function`` check answering no, or None if it has no such check.

    The calls inside its body still reach ``__torch_function__``, so that the handlers of a composite's parts are found.

    Parameters
    ----------
    function : callable
        For example ``torch.nn.functional.multi_head_attention_forward``.
    """
    if not isinstance(function, types.FunctionType):
        return None
    if "super" in function.__code__.co_names:
        # The method of the base class is dispatched under the name of this one: it would come back here without end.
        return None
    used = [name for name in _CHECKS if name in function.__code__.co_names and name in function.__globals__]
    if not used:
        return None
    namespace = _namespace_below(function.__module__, function.__globals__)
    below = types.FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
    )
    below.__kwdefaults__ = function.__kwdefaults__
    return below


_namespaces: dict[str, dict[str, Any]] = {}


def _namespace_below(module: str, namespace: dict[str, Any]) -> dict[str, Any]:
    """Copy a module's names once, with the checks replaced; the functions in it keep their own namespace."""
    if module not in _namespaces:
        _namespaces[module] = {**namespace, **{name: _never for name in _CHECKS if name in namespace}}
    return _namespaces[module]


def schema_writes(op: OpOverload) -> tuple[int, ...]:
    """Positions of the arguments that an operator writes to."""
    return tuple(
        position
        for position, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@functools.cache
def schema_argument_names(op: OpOverload) -> Sequence[str]:
    """Names of an operator's arguments, in order."""
    return [argument.name for argument in op._schema.arguments]


def is_composite(op: OpOverload) -> bool:
    """Whether an operator is written in terms of others, whose parts meet rules of their own.

    Autograd takes such operators apart; below it, in handlers and in inference mode, they arrive whole.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def returns_alias(op: OpOverload) -> bool:
    """Whether a result of the operator shares memory with an argument (views and in-place operators)."""
    return any(result.alias_info is not None for result in op._schema.returns)


def flattened_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of one axis over the same ranks, row-major. All ranks call; torch makes it once."""
    return mesh._flatten()


def current_mesh() -> DeviceMesh:
    """Return the mesh of the innermost ``with mesh:`` block.

    Raises
    ------
    RuntimeError
        If there is none.
    """
    return _mesh_resources.get_current_mesh()
