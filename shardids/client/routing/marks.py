"""Marks the statements whose writes of look-up keys a session claims: the server refuses others.

A session claims a value after its row is written, so the mark is part of the statement: see
``lookups/guard.v1.sql``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from sqlalchemy import Engine, event

from shardids.catalog.claims import MARK
from shardids.models.lookups import lookups_are_defined, lookups_of

_IS_CLAIMED: Final[ContextVar[bool]] = ContextVar("shardids_is_claimed", default=False)


@contextmanager
def writing() -> Iterator[None]:
    """The session claims what is written inside, once it is written."""
    token = _IS_CLAIMED.set(True)
    try:
        yield
    finally:
        _IS_CLAIMED.reset(token)


def mark_writes(engine: Engine) -> None:
    """Makes a new engine, and all that are derived from it, mark what sessions claim; before it is used."""
    event.listen(engine, "before_cursor_execute", _marked, retval=True)


def _marked(
    _connection: object, _cursor: object, sql: str, parameters: Any, context: Any, _is_many: object
) -> tuple[str, Any]:
    if _IS_CLAIMED.get() and lookups_are_defined() and (context.isinsert or context.isupdate):
        statement = getattr(context.compiled, "statement", None)
        if lookups_of(getattr(statement, "table", None)):
            return MARK + sql, parameters
    return sql, parameters
