"""Below autograd: find the plan of an operator and run it.

The first of these that applies serves an operator: a handler; a rule, whose plan is native or moves shards; a gather,
which is right but not scalable and is reported (`set_fallback_mode`).

A plan depends only on the operator, the layouts and the static arguments, so it is cached on these. The commonest
plans (operands as they are, one result) are kept in a table of their own, and a hit does nothing but call the operator
on the local tensors and wrap the result: this path must stay below DTensor's own cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from shardtensor_collectives import operator_range
from shardtensor_spec import LayoutMismatchError, ShardTensorError, ShardTensorSpec, on_new_world

from . import _debug, _tensor
from ._fallback_mode import report_gather
from ._layout import replicated_spec, without_partial
from ._lost_alias import any_copied_views, check_may_write, on_first_copied_view, remember_copied_view
from ._operands import argument_at, common_mesh, key_of, local_of, locals_of, map_operands, operands_of, spec_of
from ._plan import Call, Plan
from ._promotion import check_may_promote, promote_all
from ._random import seeded_by_shard
from ._registry import Handler, find_dispatch_handler, find_rule, on_registration
from ._torch_private import make_wrapper, returns_alias, schema_writes
from ._transition import transition

N_CACHED_PLANS = 4096

Key = tuple[Any, ...]

_direct: dict[Key, tuple[Callable[..., Any], ShardTensorSpec | None]] = {}
"""Key -> what to call on the local tensors, and the layout of the result (None: it wrote to its first operand)."""
_direct_many: dict[Key, tuple[Callable[..., Any], tuple[ShardTensorSpec, ...]]] = {}
"""The same for operators that return several tensors."""
_plans: dict[Key, Plan] = {}
_handlers: dict[Any, Handler | None] = {}


def dispatch(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """Run an operator on ShardTensors, below autograd.

    Parameters
    ----------
    op : OpOverload
        The operator.
    args, kwargs
        Its arguments; plain tensors among them are taken as replicated.

    Notes
    -----
    Communication: what the operator's plan says; none on the direct path.
    """
    return torch_dispatch(ShardTensor, op, (), args, kwargs)


def torch_dispatch(
    cls: type[torch.Tensor], op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Be ``ShardTensor.__torch_dispatch__``."""
    # Specialised by arity: generic key building costs as much as the operator itself.
    if not kwargs:
        n_args = len(args)
        if n_args == 2:
            first, second = args
            kind = type(second)
            if type(first) is ShardTensor:
                if kind is ShardTensor:
                    hit = _direct.get((op, first._spec, second._spec))
                    if hit is not None:
                        local = hit[0](first._local_tensor, second._local_tensor)
                        return (
                            first if hit[1] is None else make_wrapper(ShardTensor, local, hit[1], requires_grad=False)
                        )
                elif kind is float or kind is int:
                    hit = _direct.get((op, first._spec, float if kind is float else second))
                    if hit is not None:
                        local = hit[0](first._local_tensor, second)
                        return (
                            first if hit[1] is None else make_wrapper(ShardTensor, local, hit[1], requires_grad=False)
                        )
        elif n_args == 1:
            (first,) = args
            if type(first) is ShardTensor:
                hit = _direct.get((op, first._spec))
                if hit is not None:
                    local = hit[0](first._local_tensor)
                    return first if hit[1] is None else make_wrapper(ShardTensor, local, hit[1], requires_grad=False)
        key, locals_ = [op], []
        for argument in args:
            kind = type(argument)
            if kind is ShardTensor:
                key.append(argument._spec)
                locals_.append(argument._local_tensor)
            elif kind is int or argument is None:
                key.append(argument)
                locals_.append(argument)
            else:
                key.append(key_of(argument))
                locals_.append(locals_of(argument))
        found = _find_direct(tuple(key))
        if found is not None:
            return _run_direct(found, locals_, args)
    return _dispatch_generally(op, args, kwargs or {})


def _find_direct(key: Key) -> Any:
    try:
        return _direct.get(key) or _direct_many.get(key)
    except TypeError:  # a symbolic size cannot be hashed
        return None


def _run_direct(found: Any, locals_: list[Any], args: tuple[Any, ...]) -> Any:
    call, layout = found
    outcome = call(*locals_)
    if layout is None:
        return args[0]
    if type(layout) is ShardTensorSpec:
        return make_wrapper(ShardTensor, outcome, layout, requires_grad=False)
    wrapped = [
        make_wrapper(ShardTensor, local, spec, requires_grad=False) for local, spec in zip(outcome, layout, strict=True)
    ]
    return wrapped if type(outcome) is list else tuple(wrapped)


def _dispatch_generally(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _debug.enabled:  # before anything that one rank alone could raise
        _debug.check_agreement(str(op), (args, kwargs), common_mesh(op, args, kwargs))
    handler = _handlers[op] if op in _handlers else _handlers.setdefault(op, find_dispatch_handler(op))
    if handler is not None:
        mesh = common_mesh(op, args, kwargs)
        return handler(*promote_all(args, mesh), **promote_all(kwargs, mesh))
    key = (op, *map(key_of, args), *((name, key_of(value)) for name, value in kwargs.items()))
    try:
        plan = _plans.get(key)
    except TypeError:  # a symbolic size cannot be hashed, so the plan is made anew
        return _execute(_make_plan(op, args, kwargs), op, args, kwargs)
    if plan is None:
        plan = _make_plan(op, args, kwargs)
        _remember(key, plan, op, args, kwargs)
    return _execute(plan, op, args, kwargs)


def _make_plan(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    mesh = common_mesh(op, args, kwargs)
    call = Call(
        op,
        map_operands(lambda tensor: spec_of(tensor, mesh), args),
        map_operands(lambda tensor: spec_of(tensor, mesh), kwargs),
    )
    try:
        rule = find_rule(op)
        plan = rule(call) if rule is not None else None
    except ShardTensorError as error:
        error.add_context(where=str(op), inputs=[spec.describe() for spec in call.specs])
        raise
    return plan if plan is not None else Plan(tuple(spec.replicated() for spec in call.specs), None, kind="gather")


def _remember(key: Key, plan: Plan, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for table in (_plans, _direct, _direct_many):
        if len(table) >= N_CACHED_PLANS:  # e.g. a new length at every step: forget the oldest quarter
            for old in list(table)[: N_CACHED_PLANS // 4]:
                del table[old]
    _plans[key] = plan
    operands = operands_of(args)
    writes = schema_writes(op)
    layouts = plan.result if isinstance(plan.result, tuple) else (plan.result,)
    is_direct = (
        not _debug.enabled
        and not kwargs
        and plan.kind == "native"
        and plan.final is None
        and all(isinstance(layout, ShardTensorSpec) for layout in layouts)
        and torch.Tag.nondeterministic_seeded not in op.tags
        and all(type(t) is ShardTensor and t._spec is target for t, target in zip(operands, plan.targets, strict=True))
        and (not writes or (writes == (0,) and not _returns_new(op) and not any_copied_views()))
    )
    if not is_direct:
        return
    call = _with_replaced(plan, op) if plan.replaced else plan.local or op
    if isinstance(plan.result, tuple):
        if not writes:
            _direct_many[key] = call, cast("tuple[ShardTensorSpec, ...]", plan.result)
    else:
        _direct[key] = call, None if writes else cast(ShardTensorSpec, plan.result)


def _with_replaced(plan: Plan, op: Any) -> Callable[..., Any]:
    """Return the plan's local call with the local values of shape arguments put in place."""
    call = plan.local or op

    def call_localized(*args: Any) -> Any:
        local_args, local_kwargs = plan.localize(op, args, {})
        return call(*local_args, **local_kwargs)

    return call_localized


def _returns_new(op: Any) -> bool:
    """Whether the operator returns something else than the operand that it writes to."""
    return not (len(op._schema.returns) == 1 and op._schema.returns[0].alias_info is not None)


def _execute(plan: Plan, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mesh = common_mesh(op, args, kwargs)
    operands = operands_of(args) + operands_of(kwargs)
    written = [
        operand for position in schema_writes(op) for operand in operands_of(argument_at(op, position, args, kwargs))
    ]
    for operand in written:
        if isinstance(operand, ShardTensor):
            check_may_write(operand, str(op))
    for operand in operands:
        if not isinstance(operand, ShardTensor):
            _check_plain_operand(operand, op, mesh)
    with operator_range(str(op)):
        if plan.kind == "gather":
            report_gather(str(op), tuple(t._spec for t in operands if isinstance(t, ShardTensor)))
        locals_ = [
            transition(local_of(operand), spec_of(operand, mesh), target)
            for operand, target in zip(operands, plan.targets, strict=True)
        ]
        stream = iter(locals_)
        local_args, local_kwargs = (
            map_operands(lambda _: next(stream), args),
            map_operands(lambda _: next(stream), kwargs),
        )
        local_args, local_kwargs = plan.localize(op, local_args, local_kwargs)
        call = plan.local or op
        if torch.Tag.nondeterministic_seeded in op.tags:
            layout = plan.result[0] if isinstance(plan.result, tuple) else plan.result
            with seeded_by_shard(layout, plan.targets[0], locals_[0].device):
                outcome = call(*local_args, **local_kwargs)
        else:
            outcome = call(*local_args, **local_kwargs)
        if written:
            by_id = {id(operand): index for index, operand in enumerate(operands)}
            for operand in written:
                index = by_id[id(operand)]
                _write_home(operand, locals_[index], plan.targets[index], mesh)
        results = _wrap_results(plan, op, outcome, written, operands, mesh)
    if not written and returns_alias(op) and not _takes_as_it_is(plan, operands[0]):
        for view in results if isinstance(results, (list, tuple)) else [results]:
            if isinstance(view, ShardTensor) and isinstance(operands[0], ShardTensor):
                remember_copied_view(operands[0], view)
    return results


def _takes_as_it_is(plan: Plan, operand: Any) -> bool:
    """Whether what a view operator returns can share memory with its operand: no rows were moved."""
    return plan.kind == "native" and isinstance(operand, ShardTensor) and operand._spec is plan.targets[0]


def _wrap_results(plan: Plan, op: Any, outcome: Any, written: list[Any], operands: list[Any], mesh: Any) -> Any:
    if written and not _returns_new(op):
        return written[0]
    if isinstance(outcome, (list, tuple)):
        layouts = plan.result if isinstance(plan.result, tuple) else (None,) * len(outcome)
        finals = plan.final if isinstance(plan.final, tuple) else (None,) * len(outcome)
        wrapped = [
            _wrap(local, layout, final, mesh) for local, layout, final in zip(outcome, layouts, finals, strict=True)
        ]
        # Results that are written operands (an out= form) are these operands themselves.
        for index, result in enumerate(op._schema.returns):
            if result.alias_info is not None and result.alias_info.is_write and index < len(written):
                wrapped[index] = written[index]
        return type(outcome)(wrapped) if type(outcome) in (list, tuple) else tuple(wrapped)
    layout = plan.result if isinstance(plan.result, ShardTensorSpec) else None
    final = plan.final if isinstance(plan.final, ShardTensorSpec) else None
    return _wrap(outcome, layout, final, mesh)


def _wrap(local: Any, layout: ShardTensorSpec | None, final: ShardTensorSpec | None, mesh: Any) -> Any:
    if not isinstance(local, torch.Tensor):
        return local
    if layout is None:
        layout = replicated_spec(local, mesh)
    assert tuple(local.shape) == tuple(layout.local_shape), (tuple(local.shape), layout)
    assert layout.tensor_meta is not None and local.dtype == layout.tensor_meta.dtype, (local.dtype, layout.tensor_meta)
    if final is not None and final is not layout:
        local, layout = transition(local, layout, final), final
    return make_wrapper(ShardTensor, local, layout, requires_grad=False)


def _write_home(operand: Any, local: torch.Tensor, layout: ShardTensorSpec, mesh: Any) -> None:
    """Bring what an operator wrote back into the operand that it was asked to write to."""
    if not isinstance(operand, ShardTensor):
        if local is not operand:
            operand.copy_(transition(local, layout, replicated_spec(operand, mesh)))
        return
    spec = operand._spec
    if local is operand._local_tensor:
        return
    if spec.has_partial:
        # Contributions were reduced before the write: the tensor now holds the value itself.
        home = without_partial(spec)
        operand._local_tensor = transition(local, layout, home)
        operand._spec = home
        return
    if layout is spec:
        operand._local_tensor.copy_(local)
    else:
        operand._local_tensor.copy_(transition(local, layout, spec))


def _check_plain_operand(tensor: torch.Tensor, op: Any, mesh: Any) -> None:
    check_may_promote(tensor, mesh)
    if tensor.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise LayoutMismatchError(
            f"a plain tensor of shape {tuple(tensor.shape)} that requires a gradient meets a ShardTensor inside {op}: "
            "its gradient would be a ShardTensor",
            where=str(op),
            advice="make it a ShardTensor first, e.g. ShardTensor.from_local(tensor, mesh, [Replicate()])",
        )


def forget_plans() -> None:
    """Empty the caches."""
    _direct.clear()
    _direct_many.clear()
    _plans.clear()
    _handlers.clear()


on_new_world(forget_plans)
on_registration(forget_plans)
on_first_copied_view(forget_plans)

ShardTensor = _tensor.ShardTensor
