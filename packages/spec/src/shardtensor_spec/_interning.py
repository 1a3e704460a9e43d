"""One object per distinct layout, so that equality is identity and a cache lookup costs no comparison."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

from ._torch_private import default_process_group

_specs: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()
_forget_callbacks: list[Callable[[], None]] = []


def _no_world() -> None:
    return None


_last_world: Callable[[], Any] = _no_world


def on_new_world(forget: Callable[[], None]) -> None:
    """Register what to call when the default process group has been replaced.

    A mesh of the old world can equal one of the new world, but its process groups are gone. Whoever caches by
    mesh or spec registers here how to forget.

    Parameters
    ----------
    forget : callable
        Called without arguments, before the first spec of the new world is made, or by `forget_old_world`.
    """
    _forget_callbacks.append(forget)


def forget_old_world() -> None:
    """Empty all caches if the default process group is another one than the last time.

    `interned` does so itself. A cache that may be asked before the first spec of a world is made calls it first.
    """
    global _last_world
    world = default_process_group()
    if _last_world() is world and (world is not None or _last_world is _no_world):
        return
    _specs.clear()
    for forget in _forget_callbacks:
        forget()
    _last_world = _no_world if world is None else weakref.ref(world)


def interned(key: Hashable, build: Callable[[], Any]) -> Any:
    """Return the object that is known under ``key``, or build it.

    Parameters
    ----------
    key : Hashable
        Everything that makes two objects equal.
    build : callable
        Makes the object the first time.

    Returns
    -------
    object
        The same object for equal keys for as long as someone holds it.
    """
    forget_old_world()
    found = _specs.get(key)
    if found is None:
        found = build()
        _specs[key] = found
    return found
