"""Views that had to be copied: writing to them, or to what they are a view of, would silently change only one side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardtensor_spec import UnsupportedShardingError

from ._torch_private import StorageWeakRef

_first_copy_callbacks: list[Callable[[], None]] = []
_any_copied = False
_partners: dict[StorageWeakRef, list[StorageWeakRef]] = {}
"""Memory of a shard -> the memory of other shards that a program takes for the same."""


def on_first_copied_view(forget: Callable[[], None]) -> None:
    """Register what to call when a view is copied for the first time: from then on writes are checked."""
    _first_copy_callbacks.append(forget)


def any_copied_views() -> bool:
    """Whether a view was ever copied in this process."""
    return _any_copied


def remember_copied_view(base: Any, view: Any) -> None:
    """Note that ``view`` holds a copy of rows of ``base``, not the rows themselves.

    Memory is what counts, not the two tensors: their detached aliases must not be written to either.
    """
    global _any_copied
    first, second = _memory(base), _memory(view)
    if first == second:  # the base is whole on every rank, so its view is a view
        return
    if not _any_copied:
        _any_copied = True
        for forget in _first_copy_callbacks:
            forget()
    for memory in [memory for memory in _partners if memory.expired()]:
        del _partners[memory]
    for memory, partner in ((first, second), (second, first)):
        alive = [other for other in _partners.get(memory, ()) if not other.expired()]
        _partners[memory] = [*alive, partner]


def check_may_write(tensor: Any, operator: str) -> None:
    """Refuse a write that a copied view would not see, or that would stay in the copy.

    Raises
    ------
    UnsupportedShardingError
        If the tensor shares its memory with a copied view, or with what one is a copy of, and the other is in use.
    """
    if not _any_copied:
        return
    if any(not other.expired() for other in _partners.get(_memory(tensor), ())):
        raise UnsupportedShardingError(
            "a view of this tensor cannot share its memory under this sharding and was copied, so a write would reach "
            "only one of the two",
            where=operator,
            inputs=[tensor._spec.describe()],
            advice="write before taking the view, or use the out-of-place operator",
        )


def _memory(tensor: Any) -> StorageWeakRef:
    return StorageWeakRef(tensor._local_tensor.untyped_storage())
