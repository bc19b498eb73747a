"""The write barrier of the source (``sql/adopt/barrier.v1.sql``): created open, closed by the switch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from sqlalchemy import Connection, text

from shardids.adopt.definitions import Definition, definitions_in
from shardids.adopt.replication import Drain
from shardids.adopt.sides import Sides
from shardids.catalog.locks import AdvisoryLock
from shardids.catalog.schemas import is_ours, own_schema
from shardids.catalog.sqlfiles import read_sql
from shardids.errors import AdoptionFailed, StatementFailed
from shardids.mover.barrier import LOCK_MS, PAUSE_BETWEEN_S, OnWait, PutOff, with_locks
from shardids.mover.replication import LOCK_FAILURES, PATIENCE_S, play

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
    """Returns the tables of the source that need a barrier, partitions among them."""
    return sorted({part for table in there.values() for part in table.parts})


def make_barrier(sides: Sides, parts: Sequence[str], on_wait: OnWait) -> None:
    """Creates the barrier on the source's tables, open. Idempotent.

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
    """Drops the barrier from the source, wherever it is. Idempotent."""
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
    """Returns whether the source's tables take no writes."""
    with sides.source.autocommit() as connection:
        return _has_barrier(connection) and bool(connection.execute(_IS_CLOSED).scalar_one())


def reopen(sides: Sides) -> None:
    """Lets the source's tables take writes again. Safe only as long as the shards take none. Idempotent."""
    with sides.source.begin() as connection:
        if _has_barrier(connection):
            connection.execute(_SET, {"closed": 0})


def close(
    sides: Sides,
    shapes: Mapping[str, str],
    parts: Sequence[str],
    *,
    max_pause_s: float,
    on_wait: OnWait,
    catch_up: Callable[[], None],
    require: Callable[[], None],
) -> float:
    """Stops writes on the source once the nodes have all that was written before; returns since when.

    Retries until writers finish soon enough: live traffic waits at most 0.1 s for any attempt to lock.
    ``require`` raises what keeps the shards from taking over, once nothing changes any more.
    Idempotent: a barrier that was closed by a process that died stays closed.

    Raises:
        AdoptionFailed: writes could not be stopped in time, or a table was changed; the source takes writes.
    """
    deadline, attempt = time.monotonic() + PATIENCE_S, 0
    while True:
        attempt += 1
        try:
            with ExitStack() as kept:
                drain = Drain(sides, kept)
                return _try_close(drain, shapes, parts, max_pause_s, require)
        except PutOff as reason:
            on_wait(attempt, str(reason))
            if time.monotonic() > deadline:
                raise AdoptionFailed(
                    f"the source could not be stopped in {attempt} attempts: {reason}",
                    hint="shardids adopt switch again, perhaps with a longer --max-pause.",
                ) from reason
        time.sleep(PAUSE_BETWEEN_S)
        make_barrier(sides, parts, on_wait)
        catch_up()


def _try_close(
    drain: Drain,
    shapes: Mapping[str, str],
    parts: Sequence[str],
    max_pause_s: float,
    require: Callable[[], None],
) -> float:
    with drain.source.autocommit() as watching, drain.source.begin() as source:
        since = time.monotonic()
        _lock(source, watching, parts, max_pause_s)
        _require_stopped(source, parts, shapes)
        remaining_s = max(max_pause_s / 2 - (time.monotonic() - since), 0.05)
        if not drain.confirmed(drain.position(), seconds=remaining_s, on_lag=lambda _bytes: None):
            raise PutOff("the nodes did not catch up in time")
        require()
        # A second look: a transaction that wrote past the barrier since the first one has left traces.
        _require_stopped(source, parts, shapes)
        # Not transactional, so whoever waits sees it; the message makes COMMIT wait for the disk.
        source.execute(_SET, {"closed": 1})
    return since


def _lock(source: Connection, watching: Connection, parts: Sequence[str], max_pause_s: float) -> None:
    """Makes writers wait until the transaction ends; those that had passed the barrier have ended."""
    source.execute(
        # If this process hangs, the server ends the transaction, and the writers wait no longer.
        text("""
            select set_config('idle_in_transaction_session_timeout', :pause_ms, true),
                   set_config('lock_timeout', :lock_ms, true)"""),
        {"pause_ms": str(round(max_pause_s * 1000)), "lock_ms": str(LOCK_MS)},
    )
    try:
        source.execute(text("select pg_advisory_xact_lock(:class, 0)"), {"class": AdvisoryLock.ADOPT_BARRIER})
    except StatementFailed as error:
        if error.sqlstate in LOCK_FAILURES:
            raise PutOff(who_writes(watching, parts)) from error
        raise


_CHANGING = ("ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock")
"""Locks of those who disable triggers: whoever writes past a trigger holds one until the end."""


def _require_stopped(source: Connection, parts: Sequence[str], shapes: Mapping[str, str]) -> None:
    """Makes sure that the barrier stops all writers, and that the tables are as they were.

    Raises:
        PutOff: a session can get past the barrier.
        AdoptionFailed: a table was changed.
    """
    open_part = source.scalars(_WITHOUT, {"parts": list(parts)}).first()
    if open_part is not None:
        raise PutOff(f"table {open_part} has no write barrier, or a disabled one")
    holder = _holder(source, parts, _CHANGING)
    if holder is not None:
        raise PutOff(f"{holder} changes a table")
    require_shapes(definitions_in(source, shapes), shapes)


def require_shapes(there: Mapping[str, Definition], shapes: Mapping[str, str]) -> None:
    """Requires the tables of the source to be as they were when the adoption began.

    Raises:
        AdoptionFailed: one was changed: replication brings rows, not changes of tables.
    """
    changed = [name for name in sorted(shapes) if name not in there or there[name].shape() != shapes[name]]
    if changed:
        raise AdoptionFailed(
            f"{', '.join(changed[:5])} was changed at the source since the adoption began",
            hint="shardids adopt abort; change the shards' tables likewise; then start it again.",
        )


_HOLDER = text("""
    select case when l.pid is null then 'prepared transaction ' || coalesce(quote_literal(p.gid), '')
                else format('process %s of %s', a.pid, a.usename) end as holder,
           extract(epoch from clock_timestamp() - coalesce(a.xact_start, p.prepared))::integer as seconds
    from pg_locks l
    left join pg_stat_activity a on a.pid = l.pid
    left join pg_locks x on l.pid is null and x.pid is null and x.locktype = 'transactionid'
                            and x.virtualtransaction = l.virtualtransaction
    left join pg_prepared_xacts p on p.transaction = x.transactionid
    where l.granted and l.locktype = 'relation' and l.pid is distinct from pg_backend_pid()
      and l.database = (select d.oid from pg_database d where d.datname = current_database())
      and l.mode = any (cast(:modes as text[]))
      and l.relation in (select to_regclass(part) from unnest(cast(:parts as text[])) part)
    order by coalesce(a.xact_start, p.prepared) nulls last limit 1""")


def _holder(connection: Connection, parts: Sequence[str], modes: Sequence[str]) -> str | None:
    found = connection.execute(_HOLDER, {"parts": list(parts), "modes": list(modes)}).one_or_none()
    if found is None:
        return None
    since = "" if found.seconds is None else f", in a transaction for {found.seconds} s,"
    return f"{found.holder}{since}"


def who_writes(watching: Connection, parts: Sequence[str]) -> str:
    """Describes the oldest transaction that keeps the source's tables from being locked."""
    holder = _holder(watching, parts, ("RowExclusiveLock", *_CHANGING))
    return "somebody else was writing" if holder is None else f"{holder} writes"
