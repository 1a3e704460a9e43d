"""What an author of operators needs: rules, layouts, transitions. The guide has an operator in 20 lines.

A *rule* plans an operator below autograd from the layouts alone (`register_rule`, `axis_plan`); torch's own autograd
formula then runs on ShardTensors. A *function handler* (``ShardTensor.register_function_handler``) serves a
Python-level function above autograd, where the backward must be our own: it calls a ``torch.autograd.Function`` whose
forward and backward take the local tensors (``tensor._local_tensor``), communicate through
``shardtensor_collectives``, and `wrap` the result.
"""

from __future__ import annotations

from ._axis_rule import DimNames, Linearity, axis_plan
from ._convert import FromLocal, Redistribute, ToLocal, wrap
from ._dispatch import dispatch
from ._fallback_mode import report_gather
from ._groups import axis_group, axis_name, whole_group
from ._layout import contiguous_meta, make_spec, meta_of, placements_of, replicated_spec, without_partial
from ._plan import Call, Plan, PlanKind, Result, Rule, run_on_meta
from ._promotion import promote
from ._registry import register_dispatch_handler, register_function_handler, register_rule
from ._torch_private import TensorMeta, direct_apply
from ._transition import transition

__all__ = [
    "Call",
    "DimNames",
    "FromLocal",
    "Linearity",
    "Plan",
    "PlanKind",
    "Redistribute",
    "Result",
    "Rule",
    "TensorMeta",
    "ToLocal",
    "axis_group",
    "axis_name",
    "axis_plan",
    "contiguous_meta",
    "direct_apply",
    "dispatch",
    "make_spec",
    "meta_of",
    "placements_of",
    "promote",
    "register_dispatch_handler",
    "register_function_handler",
    "register_rule",
    "replicated_spec",
    "report_gather",
    "run_on_meta",
    "transition",
    "whole_group",
    "without_partial",
    "wrap",
]
