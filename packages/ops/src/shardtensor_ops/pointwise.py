"""Pointwise operators: every dim corresponds, by broadcasting.

Served are all operators that torch tags as pointwise, in-place and out forms included, and those that it forgets to tag
(the manifest lists them). Which of them are linear, and so carry a pending sum, is a list of its own: everything else
reduces first.
"""

from __future__ import annotations

from shardtensor.extending import Call, Linearity, Plan, axis_plan, register_rule

from ._manifest import names_served_by
from ._naming import broadcast_names

EACH = frozenset({"mul", "neg", "positive"})
"""Linear in each operand alone: a product with one pending operand is pending."""

JOINTLY = frozenset({"add", "sub", "subtract", "rsub"})
"""Linear in all operands together: a sum of pending operands is pending."""


@register_rule(*names_served_by(__name__))
def plan_pointwise(call: Call) -> Plan | None:
    """Every dim keeps its split; operands that are cut elsewhere come to the largest one's split."""
    names, result = broadcast_names(call.specs)
    packet = str(call.op.overloadpacket).removeprefix("aten.").rstrip("_")
    linear = _linearity(call, packet)
    pinned = _written_operand(call)
    return axis_plan(call, names, [result] * len(call.op._schema.returns), linear=linear, pinned=pinned)


def _linearity(call: Call, packet: str) -> Linearity:
    n_operands = len(call.specs)
    if packet in JOINTLY:
        # x + 1 adds the number once, not once per contribution.
        return "jointly" if n_operands == 2 else "no"
    if packet in ("div", "true_divide"):
        # Linear in the dividend only, and not at all with rounding.
        dividend_is_pending = call.specs[0].has_partial and not any(s.has_partial for s in call.specs[1:])
        return "each" if dividend_is_pending and call.argument("rounding_mode") is None else "no"
    return "each" if packet in EACH else "no"


def _written_operand(call: Call) -> int | None:
    """Position among the operands of the one that is written to."""
    if not call.writes:
        return None
    name = call.op._schema.arguments[call.writes[0]].name
    if name in call.kwargs:
        return len(call.specs) - 1
    return sum(1 for value in call.args[: call.writes[0]] if value in call.specs)
