"""The write barrier on the source (see ``sql/mover/moving.v1.sql``): created open, closed for the cutover."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from sqlalchemy import Connection, text

from shardids.catalog.locks import AdvisoryLock
from shardids.errors import StatementFailed
from shardids.mover.replication import LOCK_FAILURES, PATIENCE_S
from shardids.mover.sides import Side, Sides

LOCK_MS = 100
"""How long writers may queue behind one attempt to lock a table or the barrier."""
PAUSE_BETWEEN_S = 0.25
"""How long to wait between two attempts."""

OnWait = Callable[[int, str], None]
"""Called with the number of the attempt that failed, and why."""


class PutOff(Exception):
    """The cutover can't happen now, and nothing was changed; the text says why."""


def make_barrier(sides: Sides, on_wait: OnWait) -> None:
    """Creates the barrier on each table of the source, open, so that it stops no writes yet. Idempotent.

    Retries each table until its lock comes quickly: live traffic waits at most 0.1 s for any attempt.
    """
    shard = {"shard": sides.shard}
    with sides.source.autocommit() as source:
        tables = source.scalars(
            text("select oid::bigint from shardids.without_barrier(:shard, true) oid"), shard
        ).all()
        release_offset(source, sides)
        for table in tables:
            with_locks(
                sides.source,
                "select shardids.add_barrier(:shard, cast(:table as oid), true)",
                shard | {"table": table},
                on_wait=lambda attempt: on_wait(attempt, who_writes(source, sides)),
            )


def drop_barrier(side: Side, shard: int) -> None:
    """Drops the barrier of each table. Waits for readers too; each attempt holds others up only briefly."""
    with_locks(side, "select shardids.drop_barriers(:shard)", {"shard": shard})


def close_barrier(source: Connection, watching: Connection, sides: Sides, max_pause_s: float) -> None:
    """Makes writers wait until the source's transaction ends; those that had passed the barrier have ended.

    Raises:
        PutOff: another session writes to the shard, or migrates it.
    """
    # If this process hangs, the server ends the transaction, and the writers wait no longer.
    is_mine, *_ = source.execute(
        text("""
            select pg_try_advisory_xact_lock(:schema_lock, :shard),
                   set_config('idle_in_transaction_session_timeout', :pause_ms, true),
                   set_config('lock_timeout', :lock_ms, true)"""),
        {
            "schema_lock": AdvisoryLock.SHARD_SCHEMA,
            "shard": sides.shard,
            "pause_ms": str(round(max_pause_s * 1000)),
            "lock_ms": str(LOCK_MS),
        },
    ).one()
    if not is_mine:
        raise PutOff("a migration of the shard is running")
    try:
        source.execute(
            text("select pg_advisory_xact_lock(:class, :shard)"),
            {"class": AdvisoryLock.WRITE_BARRIER, "shard": sides.shard},
        )
    except StatementFailed as error:
        if error.sqlstate in LOCK_FAILURES:
            raise PutOff(who_writes(watching, sides)) from error
        raise


_WAYS_PAST = text("""
    select (select min(name::text) from shardids.without_barrier(:shard, true) name) as open_table,
           (select holder from shardids.barrier_holders(:shard, false) limit 1) as holder,
           shardids.schema_version(:shard) as version""")


def prepare_to_require(source: Connection, sides: Sides) -> None:
    """Lets the session read what :func:`require_closed` reads, which takes longer the first time."""
    source.execute(_WAYS_PAST, {"shard": sides.shard})


def require_closed(source: Connection, sides: Sides, schema_version: str) -> None:
    """Makes sure that the closed barrier stops all writers, and that the schema still has the given version.

    A transaction that the barrier does not stop can disable triggers, create tables or change the schema.
    What such a transaction has committed shows in the triggers and in the version; one that is still open
    holds locks.

    Raises:
        PutOff: a session can get past the barrier, or the schema has another version.
    """
    found = source.execute(_WAYS_PAST, {"shard": sides.shard}).one()
    if found.open_table is not None:
        raise PutOff(f"table {found.open_table} has no write barrier, or a disabled one")
    if found.holder is not None:
        raise PutOff(f"{found.holder} changes the shard without passing its write barrier")
    if found.version != schema_version:
        raise PutOff("the shard's schema was changed")


def release_offset(source: Connection, sides: Sides) -> None:
    """Draws an ID if none was drawn since the shard was activated: until then its offset is negative."""
    source.execute(text("select shardids.release(:shard)"), {"shard": sides.shard})


def who_writes(watching: Connection, sides: Sides) -> str:
    """Describes the transaction that keeps the shard's tables or barrier on the source from being locked."""
    oldest = watching.execute(
        text("select holder, seconds from shardids.barrier_holders(:shard, true) limit 1"),
        {"shard": sides.shard},
    ).one_or_none()
    if oldest is None:
        return "somebody else was writing to it"
    return f"{oldest.holder} has been in a writing transaction for {oldest.seconds} s"


def with_locks(
    side: Side,
    statement: str,
    parameters: Mapping[str, object],
    *,
    on_wait: Callable[[int], None] = lambda _attempt: None,
) -> None:
    """Retries a statement that locks tables until it succeeds; no attempt keeps others waiting for long."""
    deadline, attempt = time.monotonic() + PATIENCE_S, 0
    while True:
        attempt += 1
        try:
            with side.begin() as connection:
                connection.execute(text("select set_config('lock_timeout', :ms, true)"), {"ms": str(LOCK_MS)})
                connection.execute(text(statement), parameters)
                return
        except StatementFailed as error:
            if error.sqlstate not in LOCK_FAILURES or time.monotonic() > deadline:
                raise
        on_wait(attempt)
        time.sleep(PAUSE_BETWEEN_S)
