"""Random operators, dropout: replicas draw the same numbers, shards different ones, whatever the ranks' own seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardtensor.extending import (
    Call,
    Plan,
    axis_plan,
    contiguous_meta,
    make_spec,
    register_function_handler,
    register_rule,
    without_partial,
    wrap,
)

from ._manifest import names_served_by

_RULED = [name for name in names_served_by(__name__) if name.startswith("aten.")]


@register_rule(*_RULED)
def plan_random(call: Call) -> Plan | None:
    """Fill a tensor, or draw a mask for it: every shard on its own, seeded by the engine."""
    names = [tuple(range(spec.ndim)) for spec in call.specs]
    pinned = 0 if call.writes else None
    return axis_plan(call, names, [names[0]] * len(call.op._schema.returns), pinned=pinned)


def _serve_feature_dropout(is_alpha: bool, in_place: bool) -> Callable[..., Any]:
    """Serve the dropout of whole channels: torch would draw its mask from the rank's own seed."""

    def serve(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return feature_dropout(*args, **kwargs, is_alpha=is_alpha, in_place=in_place)

    return serve


def feature_dropout(input: Any, p: float, train: bool, *, is_alpha: bool = False, in_place: bool = False) -> Any:
    """Drop whole channels.

    Parameters
    ----------
    input : ShardTensor, (batch, channels, ...)
        Any layout; ranks that share a channel drop it together.
    p : float
        Probability to drop.
    train : bool
        Whether to drop at all.
    is_alpha : bool
        Whether to keep mean and variance of a self-normalising network (``feature_alpha_dropout``).
    in_place : bool
        Whether to write to ``input``.

    Notes
    -----
    Communication: one broadcast of 8 bytes.
    """
    if not train or p == 0 or input.numel() == 0:
        return input
    keep = _channel_mask(input).bernoulli_(1 - p)
    if is_alpha:
        alpha = 1.7580993408473766
        scale = 0.0 if p == 1 else (alpha**2 * p + 1) ** -0.5 * (1 - p) ** -0.5
        shift = (keep - 1) * (alpha * scale) + alpha * scale * p
        return input.mul_(keep * scale).add_(shift) if in_place else input * (keep * scale) + shift
    if p < 1:
        keep = keep / (1 - p)
    return input.mul_(keep) if in_place else input * keep


def _channel_mask(input: Any) -> Any:
    """An empty tensor of one row per channel, laid out as the channels of a tensor are."""
    spec = without_partial(input._spec)
    shape = (*input.shape[:2], *(1 for _ in input.shape[2:]))
    mask = make_spec(spec.mesh, contiguous_meta(shape, input.dtype), {d: s for d, s in spec.grid.items() if d < 2})
    return wrap(torch.empty(mask.local_shape, dtype=input.dtype, device=input.device), mask)


for _alpha, _in_place, _function in (
    (False, False, torch.feature_dropout),
    (False, True, torch.feature_dropout_),
    (True, False, torch.feature_alpha_dropout),
    (True, True, torch.feature_alpha_dropout_),
):
    register_function_handler(_function, _serve_feature_dropout(_alpha, _in_place))
