"""Matrix products: ``matmul``, ``einsum``, ``bilinear`` above autograd, the operators they fall into below.

A contracted dim that is sharded gives a pending sum, every other dim keeps its shards, folded ones included. Above
autograd a product is one operator with a backward of its own, whatever its dims; torch would go through views and
``bmm``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from shardtensor import ShardTensor, ShardTensorSpec
from shardtensor.extending import Call, Plan, axis_plan, register_function_handler, register_rule

from ._autocast import autocast_is_on, in_autocast_dtype
from ._contraction import Contraction, contract, contraction_of, holds_bias, plan_product
from ._kernels import Names
from ._operands import promoted, takes_as_they_are

# -- below autograd ---------------------------------------------------------------------------------------------------

_PRODUCTS: dict[str, tuple[str, str, str]] = {
    "mm": ("mk", "kn", "mn"),
    "bmm": ("bmk", "bkn", "bmn"),
    "mv": ("mk", "k", "m"),
    "dot": ("k", "k", ""),
    "vdot": ("k", "k", ""),
    "ger": ("m", "n", "mn"),
}
_SUMS: dict[str, tuple[str, str, str]] = {
    "addmm": ("mk", "kn", "mn"),
    "baddbmm": ("bmk", "bkn", "bmn"),
    "addbmm": ("bmk", "bkn", "mn"),
    "addmv": ("mk", "k", "m"),
    "addr": ("m", "n", "mn"),
}


@register_rule(*(f"aten.{name}" for name in _PRODUCTS))
def plan_matrix_product(call: Call) -> Plan | None:
    """``m k, k n -> m n`` and its like: a sharded name that is contracted leaves a pending sum."""
    first, second, result = _PRODUCTS[_packet(call)]
    return axis_plan(call, [tuple(first), tuple(second)], [tuple(result)], linear="each")


@register_rule(*(f"aten.{name}" for name in _SUMS))
def plan_sum_with_product(call: Call) -> Plan | None:
    """``beta * added + alpha * product``: where the product is pending, the first rank alone adds."""
    if call.writes:
        return None
    added, first, second = call.specs
    first_names, second_names, result = _SUMS[_packet(call)]
    (meta,) = call.global_metas
    assert meta is not None
    targets, layout = plan_product(
        (first, second), (first_names, second_names), result, meta, added, _broadcast(added, meta.shape, result)
    )
    target_first, target_second, target_added = targets
    assert target_added is not None
    op = _addmv if _packet(call) == "addmv" else call.op
    local = op if holds_bias(layout) else _adding_nothing(op)
    return Plan((target_added, target_first, target_second), layout, local)


def _addmv(added: torch.Tensor, matrix: torch.Tensor, vector: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """``addmv`` of any shard: torch itself returns one row where one row is added to a matrix of none."""
    return torch.addmv(added.expand(matrix.shape[0]), matrix, vector, **kwargs)


def _adding_nothing(op: Any) -> Callable[..., torch.Tensor]:
    """Return the operator with a beta of zero, for which torch does not even read the added tensor."""

    def run(*args: Any, beta: Any = 1, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = op(*args, beta=0, **kwargs)
        return result

    return run


def _broadcast(spec: ShardTensorSpec, shape: Sequence[int], names: str) -> tuple[Hashable, ...]:
    assert spec.tensor_meta is not None
    skipped = len(shape) - spec.ndim
    return tuple(
        None if extent == 1 and shape[skipped + dim] != 1 else names[skipped + dim]
        for dim, extent in enumerate(spec.tensor_meta.shape)
    )


@register_rule("aten.linear", "aten.matmul")
def plan_composite(call: Call) -> Plan | None:
    """``linear`` and ``matmul`` as inference mode sees them, which does not take them apart."""
    first, second, *rest = call.specs
    shapes = [spec.tensor_meta.shape for spec in (first, second) if spec.tensor_meta is not None]
    (meta,) = call.global_metas
    assert meta is not None
    if _packet(call) == "linear":
        rows = tuple(range(first.ndim - 1))
        out = ("out",) if second.ndim == 2 else ()
        first_names: Names = (*rows, "in")
        second_names: Names = (*out, "in")
        result: Names = (*rows, *out)
    else:
        first_names, second_names, result = matmul_names(*shapes)
    bias = rest[0] if rest else None
    targets, layout = plan_product((first, second), (first_names, second_names), result, meta, bias, result[-1:])
    local = None
    if bias is not None and not holds_bias(layout):
        local = _linear_without_bias
    return Plan(tuple(target for target in targets if target is not None), layout, local)


def _linear_without_bias(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(input, weight)


@register_rule("aten._trilinear")
def plan_trilinear(call: Call) -> Plan | None:
    """Product of three tensors, summed over some dims: what ``bilinear`` and its gradients are made of."""
    missing = [call.argument(f"expand{number}") for number in (1, 2, 3)]
    n_dims = call.specs[0].ndim + len(missing[0])
    names = [tuple(dim for dim in range(n_dims) if dim not in dims) for dims in missing]
    summed = {dim % n_dims for dim in call.argument("sumdim")}
    return axis_plan(call, names, [tuple(dim for dim in range(n_dims) if dim not in summed)], linear="each")


def _packet(call: Call) -> str:
    return str(call.op.overloadpacket).removeprefix("aten.")


# -- above autograd ---------------------------------------------------------------------------------------------------


def serve_matmul(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Serve ``matmul(input, other)`` and the operator ``@``."""
    out = kwargs.get("out")
    if out is not None:
        return out.copy_(matmul(*args, **{name: value for name, value in kwargs.items() if name != "out"}))
    return matmul(*args, **kwargs)


def serve_reversed_matmul(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Serve ``Tensor.__rmatmul__``."""
    return matmul(args[1], args[0])


def matmul(input: Any, other: Any) -> Any:
    """Matrix product with broadcast batch dims, as one operator.

    Parameters
    ----------
    input : Tensor, (*batch, m, k) or (k,)
        First operand. A plain one gets a plain, complete gradient.
    other : Tensor, (*batch, k, n) or (k,)
        Second operand, likewise.

    Returns
    -------
    ShardTensor, (*batch, m, n)

    Notes
    -----
    Communication: none if one operand is replicated or both are sharded along dims that correspond. A sharded
    contracted dim leaves the result pending. Else the smaller operand is brought to the larger one's layout.
    """
    if not takes_as_they_are(input, other) or not (type(input) is ShardTensor or type(other) is ShardTensor):
        input, other = promoted(input, other)
    contraction = _matmul_contraction(input.shape, other.shape)
    if autocast_is_on():
        return in_autocast_dtype(contract, contraction, input, other)
    return contract(contraction, input, other)


@functools.lru_cache(maxsize=4096)
def _matmul_contraction(first: Sequence[int], second: Sequence[int]) -> Contraction:
    return contraction_of(*matmul_names(first, second), kernel=torch.matmul)


def matmul_names(first: Sequence[int], second: Sequence[int]) -> tuple[Names, Names, Names]:
    """Name the dims of two operands of matmul and of the result: batch dims by their position from the last."""
    batches = (first[:-2], second[:-2])
    n_batch = max(map(len, batches))
    padded = [(1,) * (n_batch - len(batch)) + tuple(batch) for batch in batches]
    extents = [next((extent for extent in pair if extent != 1), 1) for pair in zip(*padded, strict=True)]
    named = [
        tuple(
            None if extent == 1 and extents[dim] != 1 else dim
            for dim, extent in enumerate(batch, start=n_batch - len(batch))
        )
        for batch in batches
    ]
    rows = ("m", "k") if len(first) > 1 else ("k",)
    columns = ("k", "n") if len(second) > 1 else ("k",)
    kept = (*rows[:-1], *columns[1:])
    return (*named[0], *rows), (*named[1], *columns), (*range(n_batch), *kept)


for _function in (torch.matmul, torch.linalg.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__):
    register_function_handler(_function, serve_matmul, promote=False)
register_function_handler(torch.Tensor.__rmatmul__, serve_reversed_matmul, promote=False)
