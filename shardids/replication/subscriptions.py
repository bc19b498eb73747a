"""Publications, slots and subscriptions of one shard, the copy of its rows, and the servers' capacity."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from psycopg.conninfo import make_conninfo
from sqlalchemy import Connection, text

from shardids.errors import MoveFailed, ShardidsError, StatementFailed
from shardids.pg.connections import keep_out_of_logs, server_major
from shardids.pg.schemas import require_no_slot, require_own_replication
from shardids.replication.programs import Scripts, find_programs, naming_holders
from shardids.replication.sides import Side, Sides
from shardids.replication.steps import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One reason against a move or an adoption, and what to do about it."""

    reason: str
    remedy: str


Refused = TypeVar("Refused", bound=ShardidsError)


def refused(where: str, refusals: Sequence[Refusal], kind: type[Refused]) -> Refused:
    """Return the error with all reasons; ``where`` says against which move or adoption they are."""
    if len(refusals) == 1:
        return kind(f"{where}: {refusals[0].reason}", hint=refusals[0].remedy)
    remedies = dict.fromkeys(refusal.remedy for refusal in refusals)
    return kind(
        f"{where}:\n" + "\n".join(f"- {refusal.reason}" for refusal in refusals),
        hint="\n".join(f"→ {remedy}" for remedy in remedies),
    )


CAPACITY: Final = text("""
    select current_setting('wal_level') as wal_level,
           current_setting('max_replication_slots')::integer
             - (select count(*) from pg_replication_slots) as slots,
           current_setting('max_wal_senders')::integer
             - (select count(*) from pg_stat_activity where backend_type = 'walsender') as senders,
           current_setting('max_logical_replication_workers')::integer
             - (select count(*) from pg_stat_activity where backend_type ~ '^logical replication .*worker$')
             as workers,
           current_setting('max_worker_processes')::integer
             - (select count(*) from pg_stat_activity
                where backend_type not in (
                  'client backend', 'autovacuum launcher', 'autovacuum worker', 'walsender', 'walreceiver',
                  'checkpointer', 'background writer', 'walwriter', 'walsummarizer', 'archiver', 'startup',
                  'logger', 'slotsync worker', 'io worker')) as processes,
           coalesce(current_setting('max_active_replication_origins', true),
                    current_setting('max_replication_slots'))::integer
             - (select count(*) from pg_replication_origin) as origins,
           current_setting('max_sync_workers_per_subscription')::integer as sync_workers,
           (select rolsuper or rolreplication from pg_roles where rolname = current_user) as may_replicate,
           (select rolsuper from pg_roles where rolname = current_user)
             or exists (select from pg_roles where rolname = 'pg_create_subscription'
                        and pg_has_role(current_user, oid, 'usage')) as may_subscribe""")


_ENDS_COPIES = text("""
    select format('%s = %s%s', s.name, s.reset_val, s.unit) as setting,
           format('alter role %I in database %I set %s = 0', session_user, current_database(), s.name)
             as remedy
    from pg_settings s where s.name = any (:names) and s.reset_val <> '0' order by s.name""")


def ending_copies(connection: Connection, where: str, *, taking: bool = False) -> list[Refusal]:
    """Return reasons against copying rows from a server, or ``taking`` them there.

    ``where`` names the server. A table is copied in one statement and one transaction, in sessions that get
    the timeouts of the role, the database and the server, and can't set them themselves.
    """
    # Workers run no statements of clients: statement_timeout does not end them.
    names = ["transaction_timeout"] if taking else ["statement_timeout", "transaction_timeout"]
    return [
        Refusal(
            reason=f"{where} ends what lasts longer than {row.setting}, also the copying of a table",
            remedy=row.remedy,
        )
        for row in connection.execute(_ENDS_COPIES, {"names": names})
    ]


def unable_to_publish(connection: Connection, where: str, needed: int) -> list[Refusal]:
    """Return reasons against as many slots on a server as are needed; ``where`` names it."""
    there = connection.execute(CAPACITY).one()
    found = _too_few(where, needed, max_replication_slots=there.slots, max_wal_senders=there.senders)
    if there.wal_level != "logical":
        remedy = "alter system set wal_level = logical, and restart that server"
        found.append(Refusal(reason=f"{where} has wal_level = {there.wal_level}", remedy=remedy))
    return found + unable_to_replicate(connection, where)


def unable_to_replicate(connection: Connection, where: str) -> list[Refusal]:
    """Return the reason against making slots on a server as the connection's role; ``where`` names it."""
    if connection.execute(CAPACITY).one().may_replicate:
        return []
    reason = f"the role may not make replication slots on {where}"
    return [Refusal(reason=reason, remedy="alter role … replication")]


def unable_to_subscribe(connection: Connection, where: str, needed: int) -> list[Refusal]:
    """Return reasons against as many workers on a server as are needed; ``where`` names it."""
    here = connection.execute(CAPACITY).one()
    found = _too_few(
        where,
        needed,
        max_logical_replication_workers=here.workers,
        max_worker_processes=here.processes,
        max_active_replication_origins=here.origins,
    )
    if server_major(connection) < 18:
        # Until then another setting has room for origins, too.
        older = ("max_active_replication_origins", "max_replication_slots")
        found = [
            replace(one, reason=one.reason.replace(*older), remedy=one.remedy.replace(*older))
            for one in found
        ]
    if not here.may_subscribe:
        remedy = "Use a superuser's URL; from version 16 on, grant pg_create_subscription does."
        found.append(Refusal(reason=f"the role may not subscribe on {where}", remedy=remedy))
    return found


def _too_few(where: str, needed: int, **free: int) -> list[Refusal]:
    return [
        Refusal(
            reason=f"{where} has {max(found, 0)} free of {setting}; it takes {needed}",
            remedy=f"Raise {setting} there and restart that server.",
        )
        for setting, found in free.items()
        if found < needed
    ]


PATIENCE_S = 300.0
"""How long to retry for a lock that others hold, and to wait for rows while none arrive."""
_LOCK_MS = 500
_POLL_S = 0.1
_LOOK_S = 0.5
"""The time between looks at the progress of a copy, and at errors that may have stopped it."""
_SLOT_PATIENCE_S = 10.0
_ERRORS_TOLERATED = 3
"""The worker that applies changes and the two that copy may each report one from before a resume."""
LOCK_FAILURES = ("55P03", "57014", "40P01")
"""SQLSTATEs of a lock timeout, a statement timeout and a deadlock: another attempt may succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copying(Event):
    """Progress of the copy of the rows.

    ``bytes_done`` is the size of the tables on the target; ``seconds_left`` is ``None`` while it is unknown.
    """

    bytes_done: int
    bytes_total: int
    rows_done: int
    rows_total: int
    seconds_left: float | None


def play(connection: Connection, script: str) -> None:
    """Run a script of several statements in the connection's transaction.

    The connection must not return to a pool: pg_restore's scripts change settings of the session.
    """
    if script:
        connection.detach()
        connection.exec_driver_sql(script, execution_options={"no_parameters": True})


def make_tables(sides: Sides, scripts: Scripts) -> None:
    """Create the schema on the target, without what is quicker to create after the rows. Idempotent.

    Nobody can write there. An old copy that an earlier move left behind is replaced.
    """
    with sides.target.begin() as connection:
        if arrived(connection, sides.shard) is not None:
            return
        connection.execute(text("select shardids.drop_copy(:shard)"), {"shard": sides.shard})
        play(connection, scripts.tables)
        connection.execute(text("select shardids.enter_moved(:shard)"), {"shard": sides.shard})
        connection.execute(text("select shardids.add_barriers(:shard)"), {"shard": sides.shard})


def is_begun(sides: Sides) -> bool:
    """Return whether the target has the tables of the move's copy."""
    with sides.target.begin() as connection:
        return arrived(connection, sides.shard) is not None


def arrived(connection: Connection, shard: int) -> str | None:
    """Return how far a shard that is being moved here has come: see ``shardids.shard.arrived``."""
    found: str | None = connection.execute(
        text("select arrived from shardids.shard where id = :shard for update"), {"shard": shard}
    ).scalar_one_or_none()
    return found


def publish(sides: Sides, name: str) -> None:
    """Publish the shard's tables on the source from now on.

    Raises:
        MissingPrivilege, ClusterConflict: another role made a publication or a slot of this name.
    """
    with sides.source.begin() as connection:
        if not has_publication(connection, name):
            require_no_slot(connection, name)
        connection.execute(
            text("select shardids.publish(:shard, :name)"), {"shard": sides.shard, "name": name}
        )
        require_own_replication(connection, "publication", name)
    with sides.source.autocommit() as connection:
        make_slot(connection, name)


def has_publication(connection: Connection, name: str) -> bool:
    """Return whether a database has a publication."""
    there = text("select exists (select from pg_publication where pubname = :name)")
    return bool(connection.scalar(there, {"name": name}))


def make_slot(connection: Connection, name: str) -> None:
    """Make a replication slot, which keeps the log from now on. Idempotent."""
    connection.execute(
        text("""
            select pg_create_logical_replication_slot(:name, 'pgoutput')
            where not exists (select from pg_replication_slots where slot_name = :name)"""),
        {"name": name},
    )


def subscribe(sides: Sides, name: str) -> None:
    """Subscribe the target: it fetches the existing rows, and all changes since.

    Raises:
        MissingPrivilege: another role made a subscription of this name.
    """
    conninfo = make_conninfo("", **sides.source.parameters())
    with sides.source.autocommit() as source:
        version = server_major(source)
    with sides.target.begin() as connection:
        keep_out_of_logs(connection)
        connection.execute(
            text("select shardids.subscribe(:shard, :name, :conninfo, :version)"),
            {"shard": sides.shard, "name": name, "conninfo": conninfo, "version": version},
        )
        require_own_replication(connection, "subscription", name)


def copy_offline(sides: Sides) -> None:
    """Copy all rows by pg_dump; the source takes no writes. Idempotent."""
    with sides.target.begin() as connection:
        if arrived(connection, sides.shard) != "tables":
            return
    with sides.source.autocommit() as connection:
        programs = find_programs(server_major(connection))
    required = f"shardids.require_lease({sides.shard}, '{sides.epoch}'), " if sides.epoch else ""
    with naming_holders(sides):
        programs.copy_rows(
            sides.source.parameters(),
            sides.target.parameters(),
            sides.schema,
            first=f"select {required}shardids.take_rows({sides.shard})",
            last=f"select shardids.add_barriers({sides.shard})",
        )


_TABLES_LEFT = text("""
    select exists (select from pg_subscription s join pg_subscription_rel sr on sr.srsubid = s.oid
                   where s.subname = :name and sr.srsubstate not in ('r', 's'))""")

_COPIED = text("""
    select count(*) filter (where sr.srsubstate not in ('r', 's')) as tables_left,
           coalesce(sum(case when sr.srsubstate in ('i', 'd')
                             then pg_table_size(sr.srrelid) end), 0)::bigint as bytes,
           coalesce((select sum(p.tuples_processed) from pg_stat_progress_copy p
                     where p.relid = any (array_agg(sr.srrelid))), 0)::bigint as rows,
           array_agg(c.relname::text) filter (where sr.srsubstate not in ('i', 'd')) as whole
    from pg_subscription s
    join pg_subscription_rel sr on sr.srsubid = s.oid
    join pg_class c on c.oid = sr.srrelid
    where s.subname = :name""")

_SIZES = text("""
    select c.relname::text as table, pg_table_size(c.oid) as bytes, greatest(c.reltuples, 0)::bigint as rows
    from pg_class c where c.oid = any (shardids.tables_of(:shard)) and c.relkind = 'r'""")


def await_rows(sides: Sides, name: str, on_progress: Callable[[Copying], None]) -> None:
    """Wait until the target has the rows of each table, as they were when that table was copied.

    Raises:
        MoveFailed: the target's workers keep failing, make no progress for a long time, or have lost their
            replication slot.
    """
    with sides.source.autocommit() as source:
        amount = _Amount(source.execute(_SIZES, {"shard": sides.shard}).all())
    started = time.monotonic()
    arrival = _Arrival(sides)
    looked = 0.0
    with sides.target.autocommit() as target:
        # The cause of earlier failures may have been removed.
        failures_before = count_failures(target, name)
        while target.execute(_TABLES_LEFT, {"name": name}).scalar_one():
            elapsed = time.monotonic() - started
            time.sleep(min(_POLL_S, elapsed / 50 + 0.005))
            # Rarely, for it takes time from those that copy.
            if time.monotonic() - looked < _LOOK_S:
                continue
            looked = time.monotonic()
            _check_workers(target, sides.target, name, failures_before)
            _check_slot(sides.source, name)
            state = target.execute(_COPIED, {"name": name}).one()
            done, rows = amount.done(state)
            arrival.watch(state.tables_left, done, rows)
            on_progress(
                Copying(
                    bytes_done=done,
                    bytes_total=amount.bytes,
                    rows_done=rows,
                    rows_total=amount.rows,
                    seconds_left=elapsed / done * (amount.bytes - done) if done and elapsed > 1 else None,
                )
            )


class _Amount:
    """The amount to copy, by the sizes of the source."""

    def __init__(self, tables: Sequence[Any]) -> None:
        self._bytes = {table.table: table.bytes for table in tables}
        self._rows = {table.table: table.rows for table in tables}
        self.bytes, self.rows = sum(self._bytes.values()), sum(self._rows.values())

    def done(self, state: Any) -> tuple[int, int]:
        """Return the bytes and rows that are there; a table that is copied counts as on the source."""
        whole = state.whole or ()
        size = state.bytes + sum(self._bytes.get(table, 0) for table in whole)
        rows = state.rows + sum(self._rows.get(table, 0) for table in whole)
        return min(size, self.bytes), min(rows, self.rows)


class _Arrival:
    """A watch on the arrival of rows.

    A table whose copy starts over again and again leaves dead rows behind, so its file grows for ever: bytes
    count only up to the size of the source, and rows only when there are more of them than ever before.
    """

    def __init__(self, sides: Sides) -> None:
        self._sides = sides
        self._tables_left, self._bytes, self._rows = sys.maxsize, -1, -1
        self._changed = time.monotonic()

    def watch(self, tables_left: int, bytes_done: int, rows: int) -> None:
        """Record the progress; ``bytes_done`` is at most the size of the source."""
        if tables_left < self._tables_left:
            self._tables_left, self._bytes, self._rows = tables_left, bytes_done, rows
        elif bytes_done > self._bytes or rows > self._rows:
            self._bytes, self._rows = max(bytes_done, self._bytes), max(rows, self._rows)
        elif time.monotonic() - self._changed > PATIENCE_S:
            raise MoveFailed(
                f'shard {self._sides.shard}: node "{self._sides.target.name}" has received no rows for'
                f" {PATIENCE_S:.0f} s, and {tables_left} tables are not copied; its log may show the cause",
                hint="Remove the cause, then resume the move with --resume, or undo it with --abort.",
            )
        else:
            return
        self._changed = time.monotonic()


def _check_slot(side: Side, name: str) -> None:
    """Check that the slot exists: a promoted standby lacks it, and the target would wait for ever."""
    with side.autocommit() as source:
        state = source.execute(
            text("select coalesce(wal_status, '') from pg_replication_slots where slot_name = :name"),
            {"name": name},
        ).scalar_one_or_none()
    if state is None:
        raise MoveFailed(
            f'replication slot "{name}" of node "{side.name}" no longer exists',
            hint="Undo the move with --abort, then start it again.",
        )
    if state == "lost":
        raise MoveFailed(
            f'replication slot "{name}" of node "{side.name}" was invalidated (wal_status = lost)',
            hint="Undo the move with --abort, raise max_slot_wal_keep_size there, then start it again.",
        )


def count_failures(target: Connection, name: str) -> int:
    """Return how often the workers have failed; servers before version 15 do not count failures."""
    if server_major(target) < 15:
        return 0
    failures: int = target.execute(
        text("""
            select coalesce(sum(apply_error_count + sync_error_count), 0)::bigint
            from pg_stat_subscription_stats where subname = :name"""),
        {"name": name},
    ).scalar_one()
    return failures


def _check_workers(target: Connection, side: Side, name: str, before: int) -> None:
    failures = count_failures(target, name) - before
    if failures > _ERRORS_TOLERATED:
        raise MoveFailed(
            f'node "{side.name}" failed {failures} times to apply rows; its log shows the cause',
            hint="Remove the cause, then resume the move with --resume, or undo it with --abort.",
        )


def make_rest(sides: Sides, scripts: Scripts) -> None:
    """Create indexes, foreign keys, triggers and the rest on the target.

    Idempotent.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not _try_rest(sides, scripts):
        if time.monotonic() > deadline:
            raise MoveFailed(
                f'node "{sides.target.name}": the tables of shard {sides.shard} are still locked'
            )
        time.sleep(_POLL_S)


def analyze(target: Connection, shard: int) -> None:
    """Gather statistics of the copy, and fill its materialized views."""
    target.execute(text("select shardids.analyze(:shard)"), {"shard": shard})


def _try_rest(sides: Sides, scripts: Scripts) -> bool:
    try:
        with sides.target.begin() as connection:
            if arrived(connection, sides.shard) == "all":
                return True
            # Takes all locks at once, with a short timeout: the apply worker locks in an order of its own.
            connection.execute(text("select set_config('lock_timeout', :ms, true)"), {"ms": str(_LOCK_MS)})
            connection.execute(text("select shardids.lock_tables(:shard)"), {"shard": sides.shard})
            play(connection, scripts.rest)
            connection.execute(
                text("update shardids.shard set arrived = 'all' where id = :shard"), {"shard": sides.shard}
            )
    except StatementFailed as error:
        if error.sqlstate in LOCK_FAILURES:
            return False
        raise
    return True


def unsubscribe(target_side: Side, name: str) -> None:
    """Drop the subscription if it exists."""
    with target_side.autocommit() as target:
        target.execute(text("select shardids.unsubscribe(:name)"), {"name": name})


def unpublish(source_side: Side, name: str) -> None:
    """Drop the slot and the publication if they exist; the subscription was dropped before."""
    with source_side.autocommit() as source:
        drop_slot(source, source_side, name)
        play(source, f'drop publication if exists "{name}"')


def drop_slot(source: Connection, side: Side, name: str) -> None:
    """Drop a slot if it exists, and ends who uses it.

    Raises:
        MoveFailed: it is still in use after some seconds.
    """
    there = text("select active_pid from pg_replication_slots where slot_name = :name")
    dropping = text("""
        select case when active_pid is null then pg_drop_replication_slot(slot_name)::text
                    else pg_terminate_backend(active_pid)::text end
        from pg_replication_slots where slot_name = :name""")
    deadline = time.monotonic() + _SLOT_PATIENCE_S
    while source.execute(there, {"name": name}).one_or_none() is not None:
        if time.monotonic() > deadline:
            raise MoveFailed(f'node "{side.name}": replication slot "{name}" is still in use')
        with suppress(StatementFailed):  # The slot came into use meanwhile, or was dropped.
            source.execute(dropping, {"name": name})
        time.sleep(_POLL_S / 10)


def flush(connection: Connection) -> str:
    """Flush the server's log to disk by a commit; return the position in the log."""
    position = connection.execute(text("select pg_logical_emit_message(true, 'shardids', '')::text"))
    return str(position.scalar_one())
