"""Products of two tensors, told by the names of their dims: the common ground of linear, matmul and einsum.

A contraction with its two derivatives is closed: the gradient of ``b k, n k -> b n`` by its first operand is
``b n, n k -> b k``, by its second ``b n, b k -> n k``, and so on to any order. So one `torch.autograd.Function` serves
them all; its layouts follow from `axis_plan`, and the gradients of plain operands are completed in it, a bias's
together with its weight's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Partial, Replicate

from shardtensor import LayoutMismatchError, ShardTensor, ShardTensorSpec
from shardtensor.extending import (
    Call,
    Redistribute,
    TensorMeta,
    axis_group,
    axis_name,
    axis_plan,
    contiguous_meta,
    direct_apply,
    make_spec,
    meta_of,
    replicated_spec,
    run_on_meta,
    transition,
    without_partial,
    wrap,
)
from shardtensor_collectives import all_reduce, operator_range
from shardtensor_spec import DimSplit, is_sharding, on_new_world

from ._kernels import Kernel, Names, kernel_of
from ._torch_private import autocast_is_on, requires_grad

N_CACHED_STEPS = 4096


class Contraction:
    """Two operands, and the names of their dims and of the result's; None marks a dim of one row that is broadcast.

    Built by `contraction_of`, so equal ones are one object. Every name of an operand is in the other one or in the
    result.

    Attributes
    ----------
    first, second, result : tuple of names
        For example ``("m", "k")``, ``("k", "n")``, ``("m", "n")``.
    kernel : callable
        Computes it on plain tensors: ``kernel(first, second)``.
    """

    def __init__(self, first: Names, second: Names, result: Names, kernel: Kernel | None) -> None:
        self.first, self.second, self.result = first, second, result
        self.kernel = kernel_of(first, second, result) if kernel is None else kernel

    @functools.cached_property
    def for_first(self) -> Contraction:
        """Gradient of the first operand, from the result's and the second operand."""
        return contraction_of(self.result, self.second, self.first)

    @functools.cached_property
    def for_second(self) -> Contraction:
        """Gradient of the second operand, from the result's and the first operand."""
        return contraction_of(self.result, self.first, self.second)

    def __repr__(self) -> str:
        return f"Contraction({self.first}, {self.second} -> {self.result})"


@functools.lru_cache(maxsize=1024)
def contraction_of(first: Names, second: Names, result: Names, kernel: Kernel | None = None) -> Contraction:
    """Return the contraction of these names, computed by a kernel if one is better than what the names suggest."""
    return Contraction(first, second, result, kernel)


class _Step(NamedTuple):
    """What one rank does for one contraction of operands in given layouts."""

    run: Callable[[Any, Any, Any], torch.Tensor]
    result: ShardTensorSpec
    moves: tuple[tuple[ShardTensorSpec, ShardTensorSpec] | None, ...] | None  # None: all operands stay as they are


_steps: dict[Any, _Step] = {}


def contract(contraction: Contraction, first: Any, second: Any, bias: Any = None) -> Any:
    """Contract two tensors of which at least one is a ShardTensor, and add a bias to the last dim.

    Parameters
    ----------
    contraction : Contraction
        What to compute.
    first, second : Tensor
        The operands; a plain one is the same on all ranks, and its gradient is plain and complete.
    bias : Tensor, (n,), optional
        Added once, although the product may be pending.

    Notes
    -----
    Communication: what brings the operands to layouts that correspond; none if only one of them is sharded, or
    both along names that they share. In backward one all-reduce for the plain operands that need a gradient.
    """
    if torch.is_grad_enabled() and requires_grad(first, second, bias):
        return _apply(contraction, first, second, bias)
    return contract_below_autograd(contraction, first, second, bias)


def contract_below_autograd(
    contraction: Contraction, first: Any, second: Any, bias: Any = None, like: ShardTensorSpec | None = None
) -> Any:
    """Contract without recording for autograd, sharded like another tensor where the operands leave it open.

    See `contract`.
    """
    key = (
        contraction,
        first._spec if type(first) is ShardTensor else first.shape,
        second._spec if type(second) is ShardTensor else second.shape,
        None if bias is None else bias._spec if type(bias) is ShardTensor else bias.shape,
        like,
    )
    try:
        step = _steps.get(key)
    except TypeError:  # a symbolic size cannot be hashed, so the step is planned anew
        step = _plan_step(contraction, first, second, bias, like)
    if step is None:
        step = _remember(key, _plan_step(contraction, first, second, bias, like))
    local_first = first._local_tensor if type(first) is ShardTensor else first
    local_second = second._local_tensor if type(second) is ShardTensor else second
    local_bias = bias._local_tensor if type(bias) is ShardTensor else bias
    if step.moves is not None:
        with operator_range("linear" if bias is not None else "matmul"):
            local_first, local_second, local_bias = (
                local if move is None else transition(local, *move)
                for local, move in zip((local_first, local_second, local_bias), step.moves, strict=True)
            )
    return wrap(step.run(local_first, local_second, local_bias), step.result)


class _Contract(torch.autograd.Function):
    """`contract` as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, contraction: Contraction, first: Any, second: Any, bias: Any) -> Any:
        ctx.contraction = contraction
        ctx.bias_is_plain = type(bias) is not ShardTensor
        ctx.save_for_backward(first, second)
        result = contract_below_autograd(contraction, first, second, bias)
        ctx.result = result._spec
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        if autocast_is_on():
            with torch.autocast(gradient.device.type, enabled=False):
                return _Contract._gradients(ctx, gradient)
        return _Contract._gradients(ctx, gradient)

    @staticmethod
    def _gradients(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        contraction = ctx.contraction
        first, second = ctx.saved_tensors
        _, first_needs, second_needs, bias_needs = ctx.needs_input_grad
        if type(gradient) is not ShardTensor:
            mesh = (first if type(first) is ShardTensor else second)._spec.mesh
            gradient = wrap(gradient, replicated_spec(gradient, mesh))
        if gradient._spec.tensor_meta.dtype.is_complex:
            first, second = first.conj(), second.conj()
        is_recorded = torch.is_grad_enabled()
        settled = _settled(gradient._spec, ctx.result)
        if settled is not gradient._spec:
            gradient = Redistribute.apply(gradient, settled)
        for_first = for_second = None
        if first_needs:
            like = first._spec if type(first) is ShardTensor else None
            for_first = _gradient(contraction.for_first, gradient, second, like, is_recorded)
        if second_needs:
            like = second._spec if type(second) is ShardTensor else None
            for_second = _gradient(contraction.for_second, gradient, first, like, is_recorded)
        for_bias = None
        if bias_needs:
            for_bias = _sum_rows_recorded(gradient) if is_recorded else _sum_rows(gradient)
        plain = (type(first) is not ShardTensor, type(second) is not ShardTensor, ctx.bias_is_plain)
        return None, *_completed((for_first, for_second, for_bias), plain, is_recorded)


_apply = direct_apply(_Contract)


def _gradient(contraction: Contraction, gradient: Any, other: Any, like: Any, is_recorded: bool) -> Any:
    if is_recorded:
        return contract(contraction, gradient, other)
    return contract_below_autograd(contraction, gradient, other, None, like)


@functools.lru_cache(maxsize=1024)
def _settled(spec: ShardTensorSpec, result: ShardTensorSpec) -> ShardTensorSpec:
    """Layout of a gradient whose pending sums are done where the result was sharded: once, not in every use of it."""
    is_open = any(
        isinstance(placement, Partial) and is_sharding(wanted)
        for placement, wanted in zip(spec.placements, result.placements, strict=True)
    )
    if not is_open:
        return spec
    assert spec.tensor_meta is not None
    return without_partial(result).with_meta(spec.tensor_meta)


def _completed(gradients: Sequence[Any], plain: Sequence[bool], is_recorded: bool) -> Sequence[Any]:
    """Make the gradients of plain operands plain and complete; two that are pending alike travel together."""
    if not any(plain):
        return gradients
    completed = list(gradients)
    wanted = [index for index, gradient in enumerate(gradients) if gradient is not None and plain[index]]
    if not wanted:
        return completed
    if is_recorded:
        for index in wanted:
            completed[index] = gradients[index].full_tensor()
        return completed
    specs = [gradients[index]._spec for index in wanted]
    locals_ = [gradients[index]._local_tensor for index in wanted]
    lines = _pending_lines(specs[0])
    with operator_range("linear backward"):
        if lines is not None and len(specs) > 1 and _pending_lines(specs[1]) == lines:
            locals_ = _reduced_together(locals_, lines)
        else:
            locals_ = [transition(*each, each[1].replicated()) for each in zip(locals_, specs, strict=True)]
    for index, local in zip(wanted, locals_, strict=True):
        completed[index] = local
    return completed


@functools.lru_cache(maxsize=1024)
def _pending_lines(spec: ShardTensorSpec) -> tuple[Any, ...] | None:
    """Groups and names of the axes of several ranks along which a sum is pending; None for any other layout."""
    lines: tuple[Any, ...] = ()
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, Partial) and placement.reduce_op == "sum":
            if spec.mesh.shape[axis] > 1:
                lines = (*lines, (axis_group(spec.mesh, axis), axis_name(spec.mesh, axis)))
        elif not isinstance(placement, Replicate):
            return None
    return lines


def _reduced_together(locals_: list[torch.Tensor], lines: tuple[Any, ...]) -> list[torch.Tensor]:
    """Sum contributions as one vector: on a slow link a message costs more than its bytes."""
    if not lines:
        return locals_
    flat = torch.cat([local.reshape(-1) for local in locals_])
    for group, name in lines:
        flat = all_reduce(flat, group, axis=name)
    parts = torch.split_with_sizes(flat, [local.numel() for local in locals_])
    return [part.view(local.shape) for part, local in zip(parts, locals_, strict=True)]


def _sum_rows_recorded(gradient: Any) -> Any:
    rows = list(range(gradient.ndim - 1))
    return gradient.sum(rows) if rows else gradient


def _sum_rows(gradient: Any) -> Any:
    """Sum a gradient over all dims but the last: that of a bias. No communication, the sum stays pending."""
    local = gradient._local_tensor
    # No dim at all would mean all of them to sum().
    rows = tuple(range(local.ndim - 1))
    return wrap(local.sum(rows) if rows else local, _row_sum_layout(gradient._spec))


@functools.lru_cache(maxsize=1024)
def _row_sum_layout(spec: ShardTensorSpec) -> ShardTensorSpec:
    assert spec.tensor_meta is not None
    names = tuple(range(spec.ndim))
    meta = contiguous_meta(spec.tensor_meta.shape[-1:], spec.tensor_meta.dtype)
    call = Call(torch.ops.aten.sum.dim_IntList, (spec,), {})
    plan = axis_plan(call, [names], [names[-1:]], linear="each", metas=[meta])
    assert plan is not None and isinstance(plan.result, ShardTensorSpec) and plan.targets == (spec,)
    return plan.result


def _plan_step(contraction: Contraction, first: Any, second: Any, bias: Any, like: ShardTensorSpec | None) -> _Step:
    mesh = _common_mesh([first, second, bias])
    specs = [
        None if tensor is None else tensor._spec if type(tensor) is ShardTensor else replicated_spec(tensor, mesh)
        for tensor in (first, second, bias)
    ]
    first_spec, second_spec, bias_spec = specs
    assert first_spec is not None and second_spec is not None
    with_bias = _with_bias(contraction.kernel)
    # What torch says to shapes that do not fit, it says here.
    whole = run_on_meta(with_bias, *specs)
    targets, result = plan_product(
        (first_spec, second_spec),
        (contraction.first, contraction.second),
        contraction.result,
        meta_of(whole),
        bias_spec,
        contraction.result[-1:],
        like,
    )
    is_direct = all(target is spec for target, spec in zip(targets, specs, strict=True))
    moves = tuple(
        None if spec is None or target is None or target is spec else (spec, target)
        for spec, target in zip(specs, targets, strict=True)
    )
    run = with_bias if bias is not None and holds_bias(result) else _without_bias(contraction.kernel)
    return _Step(run, result, None if is_direct else moves)


def plan_product(
    specs: tuple[ShardTensorSpec, ShardTensorSpec],
    names: tuple[Sequence[Hashable], Sequence[Hashable]],
    result: Sequence[Hashable],
    meta: TensorMeta,
    bias: ShardTensorSpec | None,
    bias_names: Sequence[Hashable],
    like: ShardTensorSpec | None = None,
) -> tuple[tuple[ShardTensorSpec, ShardTensorSpec, ShardTensorSpec | None], ShardTensorSpec]:
    """Choose layouts for ``bias + product``.

    Parameters
    ----------
    specs, names
        Layouts and dim names of the two operands.
    result, meta
        Dim names, and shape, stride and dtype of the result.
    bias, bias_names
        Layout and dim names of what is added.
    like : ShardTensorSpec, optional
        Of the result's shape. Axes that no operand shards shard the result as they do here: a gradient is not
        computed whole on every rank where its operand is sharded.

    Returns
    -------
    tuple
        Layouts to bring the two operands and the bias to, and the layout of the result. A bias is never pending: where
        the product is, the first rank adds it alone (`holds_bias`).
    """
    operands, operand_names = list(specs), list(names)
    if bias is not None:
        operands.append(without_partial(bias))
        operand_names.append(tuple(bias_names))
    call = Call(torch.ops.aten.mm.default, tuple(operands), {})
    plan = axis_plan(call, operand_names, [tuple(result)], linear="each", metas=[meta])
    open_splits = {} if like is None or plan is None else _open_splits(plan.targets, operand_names, like, result)
    if open_splits and like is not None:
        wanted = make_spec(like.mesh, meta, open_splits)
        call = Call(call.op, (*operands, wanted), {})
        plan = axis_plan(call, [*operand_names, tuple(result)], [tuple(result)], linear="each", metas=[meta])
    assert plan is not None and isinstance(plan.result, ShardTensorSpec)
    first, second, *rest = plan.targets[: len(operands)]
    return (first, second, rest[0] if rest else None), plan.result


def _open_splits(
    targets: Sequence[ShardTensorSpec],
    names: Sequence[Sequence[Hashable]],
    like: ShardTensorSpec,
    result: Sequence[Hashable],
) -> dict[int, DimSplit]:
    """Splits of a wanted layout that contradict nothing: neither their names nor their axes are in use."""
    used_axes = {axis for target in targets for split in target.grid.values() for axis in split.axes}
    used_names = {operand[dim] for target, operand in zip(targets, names, strict=True) for dim in target.grid}
    return {
        dim: split
        for dim, split in like.grid.items()
        if result[dim] is not None and result[dim] not in used_names and used_axes.isdisjoint(split.axes)
    }


def holds_bias(result: ShardTensorSpec) -> bool:
    """Whether this rank adds the bias to its contribution to a pending product: the first of every pending sum does."""
    assert result.coordinate is not None
    return not any(
        isinstance(placement, Partial) and placement.reduce_op == "sum" and result.coordinate[axis] != 0
        for axis, placement in enumerate(result.placements)
    )


def _with_bias(kernel: Kernel) -> Callable[[Any, Any, Any], torch.Tensor]:
    if kernel is torch.nn.functional.linear:
        return kernel

    def run(first: Any, second: Any, bias: Any) -> torch.Tensor:
        return kernel(first, second) if bias is None else kernel(first, second) + bias

    return run


def _without_bias(kernel: Kernel) -> Callable[[Any, Any, Any], torch.Tensor]:
    return lambda first, second, bias: kernel(first, second)


def _common_mesh(tensors: Sequence[Any]) -> Any:
    sharded = [tensor for tensor in tensors if type(tensor) is ShardTensor]
    mesh = sharded[0]._spec.mesh
    for other in sharded[1:]:
        if other._spec.mesh != mesh:
            raise LayoutMismatchError(
                f"ShardTensors on two meshes meet: {mesh} and {other._spec.mesh}",
                where="a matrix product",
                inputs=[tensor._spec.describe() for tensor in sharded],
                advice="gather one of them with full_tensor() and make it a ShardTensor on the other mesh",
            )
    return mesh


def _remember(key: Any, step: _Step) -> _Step:
    if len(_steps) >= N_CACHED_STEPS:  # e.g. a new length at every step: forget the oldest quarter
        for old in list(_steps)[: N_CACHED_STEPS // 4]:
            del _steps[old]
    _steps[key] = step
    return step


on_new_world(_steps.clear)
on_new_world(_row_sum_layout.cache_clear)
on_new_world(_pending_lines.cache_clear)
on_new_world(_settled.cache_clear)
