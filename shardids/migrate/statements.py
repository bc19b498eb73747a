"""The SQL around a revision on one shard: how its transaction opens, and the mark of an unfinished one."""

from __future__ import annotations

from dataclasses import dataclass

from psycopg import sql

from shardids.migrate.compiled import Stage
from shardids.migrate.environment import Direction
from shardids.migrate.plan import Start

_ENTER = sql.SQL(
    "select set_config('lock_timeout', {lock}, true), set_config('statement_timeout', {statement}, true),"
    " shardids.enter_revision({shard}, {table}, {expected}::text[]),"
    " set_config('search_path', shardids.schema_of({shard}), true)"
)
_SESSION = sql.SQL(
    "select set_config('lock_timeout', {lock}, false), set_config('statement_timeout', {statement}, false),"
    " set_config('search_path', shardids.schema_of({shard}), false)"
)
_MARK = sql.SQL("comment on table {table} is {mark};")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a statement waits for a lock and runs, in ms; 0 is for ever."""

    lock_timeout_ms: int = 2000
    statement_timeout_ms: int = 0


def enter(shard: int, version_table: str, expected: Start, limits: Limits) -> str:
    """The first statement of a transaction that migrates a shard, without its semicolon."""
    return _ENTER.format(
        lock=str(limits.lock_timeout_ms),
        statement=str(limits.statement_timeout_ms),
        shard=shard,
        table=version_table,
        expected=None if expected is None else list(expected),
    ).as_string(None)


def enter_session(shard: int, limits: Limits, *, waits: bool) -> str:
    """What prepares a session for a statement outside a transaction, without its semicolon.

    ``waits``: the statement is CONCURRENTLY. It waits for other transactions, and nobody for it, so that
    ``lock_timeout`` would only end it in vain.
    """
    return _SESSION.format(
        lock="0" if waits else str(limits.lock_timeout_ms),
        statement=str(limits.statement_timeout_ms),
        shard=shard,
    ).as_string(None)


def mark(version_table: str, direction: Direction, stage: Stage, count: int) -> str:
    """The statement that says that ``count`` parts of a revision are done; empty if it has only one.

    The mark is a comment on the version table: it goes where the shard goes.
    """
    if len(stage.parts) == 1:
        return ""
    words = f"shardids: {direction} {stage.revision} {count} {stage.digest(count)}"
    return _MARK.format(
        table=sql.Identifier(version_table), mark=None if count == len(stage.parts) else words
    ).as_string(None)
