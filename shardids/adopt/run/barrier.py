"""The write barrier of the source (``sql/adopt/barrier.v1.sql``): created open, closed by the switch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from sqlalchemy import Connection, text

from shardids.adopt.run.following import Drain, unpublished
from shardids.adopt.run.journal import Adoption
from shardids.adopt.run.sides import Sides
from shardids.errors import AdoptionFailed, StatementFailed
from shardids.pg.definitions import Definition, definitions_in
from shardids.pg.locks import AdvisoryLock, holders_of_tables
from shardids.pg.schemas import is_ours, own_schema
from shardids.pg.sqlfiles import read_sql
from shardids.replication.barrier import OnWait, PutOff, limit_pause, stop_in_a_quiet_moment, with_locks
from shardids.replication.subscriptions import LOCK_FAILURES, play

_SCHEMA = "shardids_adopt"
_WITHOUT = text("""
    select part from unnest(cast(:parts as text[])) part
    where not exists (
      select from pg_trigger t
      where t.tgrelid = to_regclass(part) and t.tgname = 'shardids_barrier' and t.tgenabled = 'A'
        and t.tgfoid = to_regprocedure('shardids_adopt.pass_barrier()'))
    order by 1""")
_CREATE = """
    create or replace trigger shardids_barrier before insert or update or delete or truncate on {part}
    for each statement execute function shardids_adopt.pass_barrier();
    alter table {part} enable always trigger shardids_barrier"""


def _has_barrier(connection: Connection) -> bool:
    """Return whether there is a barrier that no other role can open."""
    there = connection.scalar(text("select to_regprocedure('shardids_adopt.pass_barrier()') is not null"))
    return bool(there) and is_ours(connection, _SCHEMA)


def parts_of(there: Mapping[str, Definition]) -> list[str]:
    """Return the tables of the source that need a barrier, partitions among them."""
    return sorted({part for table in there.values() for part in table.parts})


def make_barrier(sides: Sides, parts: Sequence[str], on_wait: OnWait) -> None:
    """Create the barrier on the source's tables, open. Idempotent.

    Retries each table until its lock comes quickly: live traffic waits at most 0.1 s for any attempt.

    Raises:
        MissingPrivilege: another role has made schema ``shardids_adopt``, or an object in it.
    """
    with sides.source.begin() as connection:
        if not _has_barrier(connection):
            own_schema(connection, _SCHEMA)
            play(connection, read_sql("adopt/barrier.v1"))
    with sides.source.autocommit() as connection:
        missing = connection.scalars(_WITHOUT, {"parts": list(parts)}).all()
        for part in missing:
            with_locks(
                sides.source,
                _CREATE.format(part=part).replace(":", r"\:"),
                {},
                on_wait=lambda attempt, part=part: on_wait(attempt, who_writes(connection, [part])),  # type: ignore[misc]  # mypy can't type a default of a lambda
            )


def drop_barrier(sides: Sides) -> None:
    """Drop the barrier from the source, wherever it is. Idempotent."""
    with sides.source.autocommit() as connection:
        if not _has_barrier(connection):
            return
        found = connection.scalars(
            text("""
                select t.tgrelid::regclass::text from pg_trigger t
                where t.tgfoid = to_regprocedure('shardids_adopt.pass_barrier()')""")
        ).all()
    for part in found:
        with_locks(sides.source, f"drop trigger if exists shardids_barrier on {part}".replace(":", r"\:"), {})
    with sides.source.begin() as connection:
        play(connection, read_sql("adopt/barrier.v1.down"))


_SET = text("select setval('shardids_adopt.closed', :closed), pg_logical_emit_message(true, 'shardids', '')")
_IS_CLOSED = text("select coalesce(pg_sequence_last_value('shardids_adopt.closed'), 0) <> 0")


def is_closed(sides: Sides) -> bool:
    """Return whether the source's tables take no writes."""
    with sides.source.autocommit() as connection:
        return _has_barrier(connection) and bool(connection.execute(_IS_CLOSED).scalar_one())


def reopen(sides: Sides) -> None:
    """Let the source's tables take writes again. Safe only as long as the shards take none. Idempotent."""
    with sides.source.begin() as connection:
        if _has_barrier(connection):
            connection.execute(_SET, {"closed": 0})


def close(
    sides: Sides,
    adoption: Adoption,
    parts: Sequence[str],
    *,
    max_pause_s: float,
    on_wait: OnWait,
    catch_up: Callable[[], None],
    require: Callable[[], None],
) -> float:
    """Stop writes on the source once the nodes have all that was written before; returns since when.

    Retries until writers finish soon enough: live traffic waits at most 0.1 s for any attempt to lock.
    ``require`` raises what keeps the shards from taking over, once nothing changes any more.
    Idempotent: a barrier that was closed by a process that died stays closed.

    Raises:
        AdoptionFailed: writes could not be stopped in time, or a table was changed, or may have rows that
            replication did not bring; the source takes writes.
    """

    def attempt() -> float:
        with ExitStack() as kept:
            return _try_close(
                sides, Drain(sides, kept), adoption, parts, max_pause_s=max_pause_s, require=require
            )

    def again() -> None:
        make_barrier(sides, parts, on_wait)
        catch_up()

    return stop_in_a_quiet_moment(
        attempt,
        on_wait=on_wait,
        too_late=lambda reason: AdoptionFailed(
            f"the source could not be stopped {reason}",
            hint="shardids adopt switch again, perhaps with a longer --max-pause.",
        ),
        between=again,
    )


def _try_close(
    sides: Sides,
    drain: Drain,
    adoption: Adoption,
    parts: Sequence[str],
    *,
    max_pause_s: float,
    require: Callable[[], None],
) -> float:
    with drain.source.autocommit() as watching, drain.source.begin() as source:
        since = time.monotonic()
        _lock(source, watching, parts, max_pause_s)
        _require_stopped(source, sides, adoption, parts)
        remaining_s = max(max_pause_s / 2 - (time.monotonic() - since), 0.05)
        if not drain.confirmed(drain.position(), seconds=remaining_s):
            raise PutOff("the nodes did not catch up in time")
        require()
        # A second look: a transaction that wrote past the barrier since the first one has left traces.
        _require_stopped(source, sides, adoption, parts)
        # Not transactional, so whoever waits sees it; the message makes COMMIT wait for the disk.
        source.execute(_SET, {"closed": 1})
    return since


def _lock(source: Connection, watching: Connection, parts: Sequence[str], max_pause_s: float) -> None:
    """Make writers wait until the transaction ends; those that had passed the barrier have ended."""
    limit_pause(source, max_pause_s)
    try:
        source.execute(text("select pg_advisory_xact_lock(:class, 0)"), {"class": AdvisoryLock.ADOPT_BARRIER})
    except StatementFailed as error:
        if error.sqlstate in LOCK_FAILURES:
            raise PutOff(who_writes(watching, parts)) from error
        raise


_CHANGING = ("ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock")
"""Locks of sessions that disable triggers: a session that writes past a trigger holds one until the end."""


def _require_stopped(source: Connection, sides: Sides, adoption: Adoption, parts: Sequence[str]) -> None:
    """Make sure that the barrier stops all writers, and that replication brought all that they wrote.

    Raises:
        PutOff: a session can get past the barrier.
        AdoptionFailed: a table was changed, or may have rows that replication did not bring.
    """
    open_part = source.scalars(_WITHOUT, {"parts": list(parts)}).first()
    if open_part is not None:
        raise PutOff(f"table {open_part} has no write barrier, or a disabled one")
    holder = _holder(source, parts, _CHANGING)
    if holder is not None:
        raise PutOff(f"{holder} changes a table")
    require_brought(source, sides, adoption)


def require_brought(source: Connection, sides: Sides, adoption: Adoption) -> None:
    """Require that replication has brought, or brings, every change of the source's tables.

    Raises:
        AdoptionFailed: a table was changed or is not published, a subscription writes to it, rows were found
            different when they were last compared, or may have changed past the log since.
    """
    there = definitions_in(source, adoption.shapes)
    require_shapes(there, adoption.shapes)
    missing = unpublished(source, sides.relay, sorted(adoption.shapes))
    if missing:
        raise AdoptionFailed(
            f"the publication at the source lacks {', '.join(missing[:5])} now: the nodes lack later changes",
            hint="shardids adopt abort; then start it again.",
        )
    for name, table in sorted(there.items()):
        if table.subscriptions:
            raise AdoptionFailed(
                f"subscription {table.subscriptions[0]} writes to {name} at the source, past the barrier",
                hint=f"Once it has brought all, there: drop subscription {table.subscriptions[0]};"
                " then shardids adopt switch.",
            )
    if not adoption.shapes.keys() <= adoption.compared.keys():
        raise AdoptionFailed(
            "a comparison found rows in the shards that are not those of the source, and none since has found"
            " all rows the same",
            hint="shardids adopt run --compare names those that differ now; if any do: shardids adopt abort."
            " If none: shardids adopt switch.",
        )
    passed = [
        name for name, table in sorted(there.items()) if adoption.compared[name][0] != table.storage_version
    ]
    if passed:
        raise AdoptionFailed(
            f"rows of {', '.join(passed[:5])} may have changed at the source past its log since they were"
            " compared: a partition was truncated, written anew or detached, or a column was",
            hint="shardids adopt run --compare says whether the shards lack a change; if so: shardids adopt"
            " abort. If not: shardids adopt switch.",
        )


def require_shapes(there: Mapping[str, Definition], shapes: Mapping[str, str]) -> None:
    """Require the tables of the source to be as they were when the adoption began.

    Raises:
        AdoptionFailed: one was changed: replication brings rows, not changes of tables.
    """
    changed = [name for name in sorted(shapes) if name not in there or there[name].shape() != shapes[name]]
    if changed:
        raise AdoptionFailed(
            f"{', '.join(changed[:5])} was changed at the source since the adoption began",
            hint="shardids adopt abort; change the shards' tables likewise; then start it again.",
        )


def _holder(connection: Connection, parts: Sequence[str], modes: Sequence[str]) -> str | None:
    return next(map(str, holders_of_tables(connection, parts, modes)), None)


def who_writes(watching: Connection, parts: Sequence[str]) -> str:
    """Describe the oldest transaction that keeps the source's tables from being locked."""
    holder = _holder(watching, parts, ("RowExclusiveLock", *_CHANGING))
    return "somebody else was writing" if holder is None else f"{holder} writes"
