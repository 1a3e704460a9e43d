"""Views that had to be copied: writing to them, or to what they are a view of, would silently change only one side."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from shardtensor_spec import UnsupportedShardingError

_first_copy_callbacks: list[Callable[[], None]] = []
_any_copied = False


def on_first_copied_view(forget: Callable[[], None]) -> None:
    """Register what to call when a view is copied for the first time: from then on writes are checked."""
    _first_copy_callbacks.append(forget)


def any_copied_views() -> bool:
    """Whether a view was ever copied in this process."""
    return _any_copied


def _root(tensor: Any) -> Any:
    return tensor._base if tensor._is_view() else tensor


def remember_copied_view(base: Any, view: Any) -> None:
    """Note that ``view`` holds a copy of rows of ``base``, not the rows themselves."""
    global _any_copied
    if not _any_copied:
        _any_copied = True
        for forget in _first_copy_callbacks:
            forget()
    root = _root(base)
    alive = [reference for reference in root.__dict__.get("_copied_views", ()) if reference() is not None]
    root.__dict__["_copied_views"] = [*alive, weakref.ref(view)]


def check_may_write(tensor: Any, operator: str) -> None:
    """Refuse a write that a copied view would not see, or that would stay in the copy.

    Raises
    ------
    UnsupportedShardingError
        If the tensor, or one that shares memory with it, is alive as a copy.
    """
    copied = _root(tensor).__dict__.get("_copied_views")
    if copied and any(reference() is not None for reference in copied):
        raise UnsupportedShardingError(
            "a view of this tensor cannot share its memory under this sharding and was copied, so a write would reach "
            "only one of the two",
            where=operator,
            inputs=[tensor._spec.describe()],
            advice="write before taking the view, or use the out-of-place operator",
        )
