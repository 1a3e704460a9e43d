"""The plain-tensor kernel of a contraction: the fastest call that its dim names allow."""

from __future__ import annotations

import string
from collections.abc import Callable, Hashable
from typing import Any

import torch

Kernel = Callable[..., torch.Tensor]
Names = tuple[Hashable, ...]


def kernel_of(first: Names, second: Names, result: Names) -> Kernel:
    """Return what contracts two plain tensors.

    Parameters
    ----------
    first, second, result : tuple of names
        Names of their dims, None for a dim of one row that is broadcast.

    Examples
    --------
    >>> kernel_of(("b", "k"), ("n", "k"), ("b", "n")) is torch.nn.functional.linear
    True
    """
    if None not in (*first, *second, *result):
        found = _matrix_kernel(first, second, result) or _rows_kernel(first, second, result)
        found = found or _batched_kernel(first, second, result)
        if found is not None:
            return found
        swapped = _matrix_kernel(second, first, result)
        if swapped is not None:
            return _swapped(swapped)
    return _einsum_kernel(first, second, result)


def _matrix_kernel(first: Names, second: Names, result: Names) -> Kernel | None:
    """Rows times a matrix: ``... k, n k -> ... n`` and ``... k, k n -> ... n``."""
    if len(second) != 2 or not first or first[:-1] != result[:-1] or set(second) & set(first[:-1]):
        return None
    if second == (result[-1], first[-1]):
        return torch.nn.functional.linear
    return torch.matmul if second == (first[-1], result[-1]) else None


def _rows_kernel(first: Names, second: Names, result: Names) -> Kernel | None:
    """All rows of two tensors against each other: ``... n, ... k -> n k``, the gradient of a weight."""
    if len(result) != 2 or len(first) < 2 or first[:-1] != second[:-1]:
        return None
    if result == (first[-1], second[-1]):
        return _rows_product
    return _swapped(_rows_product) if result == (second[-1], first[-1]) else None


def _rows_product(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    if first.ndim > 2:
        first, second = first.flatten(0, -2), second.flatten(0, -2)
    return first.t().mm(second)


def _batched_kernel(first: Names, second: Names, result: Names) -> Kernel | None:
    """Matrix products of a common batch, either operand transposed."""
    batch = result[:-2]
    if len(result) < 2 or len(first) != len(result) or len(second) != len(result):
        return None
    if first[:-2] != batch or second[:-2] != batch:
        return None
    rows, columns = result[-2:]
    (contracted,) = set(first[-2:]) - {rows, columns} or {None}
    if contracted is None:
        return None
    if first[-2:] in ((rows, contracted), (contracted, rows)):
        left_is_transposed = first[-2:] == (contracted, rows)
        if second[-2:] == (contracted, columns):
            return (lambda a, b: a.mT @ b) if left_is_transposed else torch.matmul
        if second[-2:] == (columns, contracted):
            return (lambda a, b: a.mT @ b.mT) if left_is_transposed else (lambda a, b: a @ b.mT)
        return None
    swapped = _batched_kernel(second, first, result) if rows in second else None
    return None if swapped is None else _swapped(swapped)


def _swapped(kernel: Kernel) -> Kernel:
    return lambda first, second: kernel(second, first)


def _einsum_kernel(first: Names, second: Names, result: Names) -> Kernel:
    names = dict.fromkeys(name for name in (*first, *second, *result) if name is not None)
    letters = dict(zip(names, string.ascii_letters, strict=False))
    text = ["".join(letters[name] for name in operand if name is not None) for operand in (first, second, result)]
    equation = f"{text[0]},{text[1]}->{text[2]}"
    squeezed = [tuple(dim for dim, name in enumerate(operand) if name is None) for operand in (first, second, result)]

    def run(a: Any, b: Any) -> torch.Tensor:
        product = torch.einsum(equation, a.squeeze(squeezed[0]), b.squeeze(squeezed[1]))
        for dim in squeezed[2]:
            product = product.unsqueeze(dim)
        return product

    return run
