"""Renews, in the child of a fork, what it must not share with its parent: locks and connections."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

_duties: WeakKeyDictionary[Any, Callable[[Any], object]] = WeakKeyDictionary()


def in_child(owner: T, do: Callable[[T], object]) -> None:
    """Lets ``do(owner)`` be called in the child of every fork, as long as ``owner`` lives.

    ``do`` must not hold ``owner``: pass a function, not a bound method.
    """
    _duties[owner] = do


def _do_all() -> None:
    for owner, do in list(_duties.items()):
        do(owner)


os.register_at_fork(after_in_child=_do_all)
