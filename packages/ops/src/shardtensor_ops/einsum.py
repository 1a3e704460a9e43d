"""``torch.einsum``: pairs of operands contracted from left to right, each pair as one operator on the shards."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import torch

from shardtensor.extending import register_function_handler

from ._autocast import autocast_is_on, in_autocast_dtype
from ._contraction import contract, contraction_of
from ._kernels import Names
from ._torch_private import run_below_torch_function


def serve_einsum(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Serve ``einsum(equation, *operands)``.

    Notes
    -----
    Communication: that of every pair's product. A sharded name that no result has leaves the result pending. Equations
    with a name twice in one operand, and operands given with lists of dims, run operator by operator.
    """
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    parsed = _parse(equation, operands) if isinstance(equation, str) and len(operands) > 1 else None
    if parsed is None:
        return run_below_torch_function(func, types, args, kwargs)
    return _contract_all(operands, *parsed)


def _parse(equation: str, operands: Sequence[Any]) -> tuple[list[Names], Names] | None:
    """Names of all dims of the operands and of the result, an ellipsis spelled out; None for what is not served."""
    text, arrow, output = equation.replace(" ", "").partition("->")
    terms = text.split(",")
    if len(terms) != len(operands):
        return None
    names: list[Names] = []
    n_ellipsis = 0
    for term, operand in zip(terms, operands, strict=True):
        letters = term.replace("...", "")
        n_dims = operand.ndim - len(letters) if "..." in term else 0
        if len(set(letters)) != len(letters) or n_dims < 0 or len(letters) + n_dims != operand.ndim:
            return None
        if not set(letters) <= set(string.ascii_letters):
            return None
        n_ellipsis = max(n_ellipsis, n_dims)
        names.append(_spelled_out(term, n_dims))
    if not arrow:
        # Without an arrow: the ellipsis, then the letters that occur once, in alphabetical order.
        once = sorted(letter for letter in set(text) & set(string.ascii_letters) if text.count(letter) == 1)
        output = "..." + "".join(once)
    result = _spelled_out(output, n_ellipsis)
    known = {name for operand_names in names for name in operand_names}
    if len(set(result)) != len(result) or not set(result) <= known:
        return None
    return names, result


def _spelled_out(term: str, n_dims: int) -> Names:
    """One name per dim; the dims of an ellipsis are counted from the last."""
    before, ellipsis, after = term.partition("...")
    dims = tuple(range(-n_dims, 0)) if ellipsis else ()
    return (*before, *dims, *after)


def _contract_all(operands: Sequence[Any], names: list[Names], result: Names) -> Any:
    extents: dict[Any, int] = {}
    for operand, operand_names in zip(operands, names, strict=True):
        for name, extent in zip(operand_names, operand.shape, strict=True):
            extents[name] = extent if extents.get(name, 1) == 1 else extents[name]
    left, left_names = operands[0], names[0]
    for position in range(1, len(operands)):
        right, right_names = operands[position], names[position]
        needed = {*result, *(name for later in names[position + 1 :] for name in later)}
        left, left_names = _without_lonely(left, left_names, needed | _present(right, right_names, extents))
        right, right_names = _without_lonely(right, right_names, needed | _present(left, left_names, extents))
        together = dict.fromkeys((*left_names, *right_names))
        last = position == len(operands) - 1
        kept = result if last else tuple(name for name in together if name in needed)
        left = _contract_pair(left, right, left_names, right_names, kept, extents)
        left_names = kept
    return left


def _present(operand: Any, names: Names, extents: dict[Any, int]) -> set[Any]:
    """Names whose dim is not broadcast in an operand."""
    return {name for name, extent in zip(names, operand.shape, strict=True) if extent == extents[name]}


def _without_lonely(operand: Any, names: Names, needed: set[Any]) -> tuple[Any, Names]:
    """Sum over the names that nothing else has."""
    lonely = [dim for dim, name in enumerate(names) if name not in needed]
    if not lonely:
        return operand, names
    return operand.sum(lonely), tuple(name for name in names if name in needed)


def _contract_pair(
    left: Any, right: Any, left_names: Names, right_names: Names, kept: Names, extents: dict[Any, int]
) -> Any:
    def named(operand: Any, names: Names) -> Names:
        # A dim of one row where the others have more is broadcast.
        pairs = zip(names, operand.shape, strict=True)
        return tuple(None if extent == 1 and extents[name] != 1 else name for name, extent in pairs)

    first, second = named(left, left_names), named(right, right_names)
    # Broadcast in every operand so far: the result has one row there too.
    kept_here = tuple(name if name in first or name in second else None for name in kept)
    contraction = contraction_of(first, second, kept_here)
    if autocast_is_on():
        return in_autocast_dtype(contract, contraction, left, right)
    return contract(contraction, left, right)


register_function_handler(torch.functional.einsum, serve_einsum)
