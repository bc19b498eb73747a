"""The shard that a key leaves: the key's barrier, and the removal of its rows once they live elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from psycopg import sql
from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError

from shardids.errors import MoveFailed, ShardidsError, StatementFailed
from shardids.pg.locks import AdvisoryLock
from shardids.replication.barrier import LOCK_MS, OnWait, PutOff, with_locks
from shardids.replication.sides import Side
from shardids.replication.subscriptions import LOCK_FAILURES
from shardids.tenants.family import Family, Part, run

_BATCH: Final = 5_000
"""How many rows one transaction removes."""
_HELD_MS: Final = 10_000
"""How long the server keeps the barrier of a mover that it hears nothing from."""


class Leaving:
    """The source of one move.

    Args:
        side: the node, under the lease of the shard.
        shard: the shard.
        move: the number of the move.
        target: the shard that the key moves to.
        family: its tables, as the source has them.
    """

    def __init__(self, side: Side, shard: int, move: int, target: int, family: Family) -> None:
        self.side = side
        self.shard = shard
        self.move = move
        self._target = target
        self._family = family

    def guard(self, on_wait: OnWait) -> None:
        """Create the barrier of the key on every table, open. Idempotent.

        Others wait at most 0.1 s for each attempt to lock a table.
        """
        with self.side.begin() as connection:
            connection.execute(text("select shardids.make_gate(:move)"), {"move": self.move})
        for part in self._family.parts:
            values = {
                "move": self.move,
                "part": part.number,
                "name": self._name(part),
                "target": self._target,
                "key": self._family.key,
                "is_old": self._family.owns(part, "old", self._family.schema).as_string(),
                "is_new": self._family.owns(part, "new", self._family.schema).as_string(),
                "direct": part.is_direct,
                "keys": list(part.key),
                "is_fixed": part.is_fixed,
            }
            with_locks(self.side, _GUARD, values, on_wait=partial(_named, on_wait, part.name))

    def _name(self, part: Part) -> str:
        return sql.Identifier(self._family.schema, part.name).as_string()

    def reopen(self) -> None:
        """Let writers of the key pass. Idempotent."""
        with self.side.autocommit() as connection:
            connection.execute(_REOPEN, {"move": self.move})

    def version(self, connection: Connection) -> tuple[str, int]:
        """Return the version of the shard's schema, and how many triggers of the move are enabled."""
        found = connection.execute(_VERSION, {"shard": self.shard, "move": self.move}).one()
        return found.version, found.triggers

    def refuse_holders(self, connection: Connection) -> None:
        """Refuse while a session can get past the barrier.

        Raises:
            PutOff: it has disabled a trigger, or changes the schema.
        """
        holder = connection.scalar(_HOLDERS, {"schema": self._family.schema})
        if holder is not None:
            raise PutOff(f"{holder} changes the shard without passing the key's barrier")

    def unguard(self, *, refuses: bool) -> None:
        """Drop the barrier; with ``refuses`` the tables refuse the key from now on. Idempotent."""
        for part in self._family.parts:
            with_locks(
                self.side,
                "select shardids.unguard_key(:move, cast(:name as regclass), :refuses)",
                {"move": self.move, "name": self._name(part), "refuses": refuses},
            )
        with_locks(self.side, "select shardids.forget_key(:move)", {"move": self.move})

    def remove(self, on_removed: Callable[[int], None] = lambda _rows: None) -> int:
        """Remove the key's rows in batches, children first; return how many there were. Idempotent.

        They are found by paths to the root's row, which goes last.
        """
        return remove_rows(self.side, self._family, self._family.schema, [self.move], on_removed)


def _named(on_wait: OnWait, table: str, attempt: int) -> None:
    on_wait(attempt, f"writers keep table {table}")


def remove_rows(
    side: Side,
    family: Family,
    schema: str,
    moves: list[int],
    on_removed: Callable[[int], None] = lambda _rows: None,
) -> int:
    """Remove a key's rows from a schema in batches, children first; return how many there were.

    ``moves`` are those whose refusal of the key the removal passes.
    """
    total = 0
    for part in reversed(family.parts):
        table = sql.Identifier(schema, part.name)
        batch = sql.SQL(
            "delete from {} where ctid = any (array(select a.ctid from {} a where {} limit {}))"
        ).format(table, table, family.owns(part, "a", schema), sql.Literal(_BATCH))
        while True:
            with side.begin() as connection:
                # Seen by this transaction alone: the refusal lets it pass.
                connection.execute(_PASS, {"moves": moves})
                removed: int = run(connection, batch).rowcount
                connection.execute(_STOP, {"moves": moves})
            total += removed
            on_removed(total)
            if removed < _BATCH:
                break
    return total


class KeyBarrier:
    """A session that makes writers of the key wait, until it ends."""

    def __init__(self, leaving: Leaving, max_pause_s: float) -> None:
        self._leaving = leaving
        self._place = {"class": int(AdvisoryLock.KEY_BARRIER), "key": leaving.move}
        self._max_pause_s = max_pause_s
        self.connection = leaving.side.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        # Its lock and its settings end with it, and with no other.
        self.connection.detach()

    def close(self) -> float:
        """Make writers wait; those that had passed the barrier have ended. Returns since when they wait.

        Raises:
            PutOff: somebody keeps the barrier.
        """
        self.connection.execute(_LIMITS, {"lock_ms": str(LOCK_MS), "held_ms": str(_HELD_MS)})
        since = time.monotonic()
        try:
            self.connection.execute(text("select pg_advisory_lock(:class, :key)"), self._place)
        except StatementFailed as error:
            if error.sqlstate in LOCK_FAILURES:
                raise PutOff("a transaction that has written rows of the key is still open") from error
            raise
        return since

    def refuse(self) -> None:
        """Refuse the key from now on, in the session that has the lock: nobody has passed it since.

        Raises:
            MoveFailed: the server has ended the session.
        """
        try:
            self.connection.execute(
                text("select nextval(shardids.gate_of(:move)) where exists (" + _HAS_LOCK + ")"),
                self._place | {"move": self._leaving.move},
            ).one()
        except (ShardidsError, SQLAlchemyError) as error:
            raise MoveFailed("the barrier of the key was lost with its session") from error

    def release(self) -> None:
        """Let writers go on: they pass, or are refused if the gate is closed."""
        with suppress(ShardidsError, SQLAlchemyError):
            self.connection.execute(text("select pg_advisory_unlock_all()"))
        with suppress(ShardidsError, SQLAlchemyError):
            self.connection.close()


_GUARD: Final = """
    select shardids.guard_key(:move, :part, cast(:name as regclass), :target, :key, :is_old, :is_new, :direct,
                              cast(:keys as name[]), :is_fixed)"""
# Who disables a trigger, or makes a table that refers to others, holds such a lock until the COMMIT.
_HOLDERS: Final = text("""
    select coalesce(format('process %s of %s', a.pid, a.usename), 'a prepared transaction')
    from pg_locks l
    join pg_class c on c.oid = l.relation
    left join pg_stat_activity a on a.pid = l.pid
    where l.locktype = 'relation' and l.granted and l.pid is distinct from pg_backend_pid()
      and l.database = (select d.oid from pg_database d where d.datname = current_database())
      and c.relnamespace = to_regnamespace(quote_ident(:schema)) and c.relkind in ('r', 'p')
      and l.mode in ('ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
    limit 1""")
_REOPEN: Final = text("""
    select setval(g.gate, 1, false) from (select shardids.gate_of(:move) as gate) g
    where g.gate is not null and pg_sequence_last_value(g.gate) is not null""")
_VERSION: Final = text("""
    select shardids.schema_version(:shard) as version,
           (select count(*) from pg_trigger t
            where t.tgenabled = 'A'
              and starts_with(t.tgname, format('shardids_key_%s_', cast(:move as bigint)))) as triggers""")
_LIMITS: Final = text("""
    select set_config('lock_timeout', :lock_ms, false),
           set_config('idle_session_timeout', :held_ms, false)""")
_HAS_LOCK: Final = (
    "select from pg_locks where locktype = 'advisory' and pid = pg_backend_pid() and granted"
    " and classid = :class and objid = :key and objsubid = 2 and mode = 'ExclusiveLock'"
)
_PASS: Final = text("""
    insert into shardids.key_return (move) select unnest(cast(:moves as bigint[])) on conflict do nothing""")
_STOP: Final = text("delete from shardids.key_return where move = any (cast(:moves as bigint[]))")
