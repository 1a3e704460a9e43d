"""Arguments of functions that are served above autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardtensor import ShardTensor, ShardTensorSpec
from shardtensor.extending import replicated_spec, wrap

from ._torch_private import requires_grad, run_below_torch_function

below = run_below_torch_function
"""Call a function as it is, its handler passed over: ``below(func, types, args, kwargs)``."""

# The names that torch takes from users of numpy.
_ALIASES = {"axis": "dim", "keepdims": "keepdim", "x": "input", "self": "input"}


def bind(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str], keywords: Sequence[str] = ()
) -> dict[str, Any] | None:
    """Bind the arguments of a function that is written in C and has no signature.

    Parameters
    ----------
    args, kwargs
        The arguments.
    names : Sequence of str
        Names of the positional arguments.
    keywords : Sequence of str
        Names of arguments that are given by keyword only.

    Returns
    -------
    dict or None
        What was given, by name; None if torch itself is to say what is wrong.
    """
    if len(args) > len(names):
        return None
    bound = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        name = _ALIASES.get(name, name)
        if name == "out" and value is None:
            continue
        if name in bound or (name not in names and name not in keywords):
            return None
        bound[name] = value
    return bound if names[0] in bound else None


def is_in_graph(tensor: Any) -> bool:
    """Whether autograd records what is done to a tensor."""
    return torch.is_grad_enabled() and requires_grad(tensor)


def sharded_like(tensor: Any, spec: ShardTensorSpec) -> Any:
    """Take a plain gradient, which a caller may give, as replicated on the mesh of ``spec``."""
    return tensor if isinstance(tensor, ShardTensor) else wrap(tensor, replicated_spec(tensor, spec.mesh))
