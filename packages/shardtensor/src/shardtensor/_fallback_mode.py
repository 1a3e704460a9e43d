"""What happens when an operator has to gather: silently, with one warning per operator, or not at all."""

from __future__ import annotations

import logging
from typing import Literal, get_args

from shardtensor_spec import LayoutMismatchError, ShardTensorSpec, UnsupportedShardingError

FallbackMode = Literal["silent", "warn", "error"]

logger = logging.getLogger("shardtensor")

_mode: FallbackMode = "warn"
_warned: set[str] = set()


def set_fallback_mode(mode: FallbackMode) -> None:
    """Choose what a gather that no rule could avoid does.

    Parameters
    ----------
    mode : {"silent", "warn", "error"}
        ``"warn"``, the default, logs once per operator with the bytes gathered; ``"error"`` raises instead of
        gathering.

    Raises
    ------
    LayoutMismatchError
        If the mode is none of the three.
    """
    global _mode
    if mode not in get_args(FallbackMode):
        raise LayoutMismatchError(f"fallback mode {mode!r} is none of {', '.join(map(repr, get_args(FallbackMode)))}")
    _mode = mode
    _warned.clear()


def get_fallback_mode() -> FallbackMode:
    """Return the mode in force."""
    return _mode


def report_gather(operator: str, operands: tuple[ShardTensorSpec, ...]) -> None:
    """Say that an operator is about to gather its operands, or refuse.

    Parameters
    ----------
    operator : str
        For example ``"aten.sort.default"``.
    operands : tuple of ShardTensorSpec
        Their layouts.

    Raises
    ------
    UnsupportedShardingError
        In mode ``"error"``, on all ranks alike.
    """
    gathered = [spec for spec in operands if spec.grid]
    if _mode == "silent" or not gathered:
        return
    n_bytes = sum(_n_bytes(spec) for spec in gathered)
    what = (
        f"{operator} has no rule for this layout, so its operands are gathered whole on every rank ({n_bytes:,} bytes)"
    )
    advice = (
        "shard another dim, register a handler (ShardTensor.register_dispatch_handler), or allow it with "
        "ShardTensor.set_fallback_mode('silent')"
    )
    if _mode == "error":
        raise UnsupportedShardingError(
            what, where=operator, inputs=[spec.describe() for spec in operands], advice=advice
        )
    is_first_rank = not any(operands[0].coordinate or ())
    if operator not in _warned and is_first_rank:  # every rank gathers alike, so one of them says it
        _warned.add(operator)
        logger.warning(
            "%s\n  input   %s\n  try     %s", what, "\n  input   ".join(s.describe() for s in operands), advice
        )


def _n_bytes(spec: ShardTensorSpec) -> int:
    assert spec.tensor_meta is not None
    n_elements = 1
    for extent in spec.tensor_meta.shape:
        n_elements *= extent
    return n_elements * int(spec.tensor_meta.dtype.itemsize)
