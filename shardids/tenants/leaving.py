"""The shard that a key leaves: the key's barrier, and the removal of its rows once they live elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from psycopg import sql
from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError

from shardids.adopt.plan.inventory import ForeignKey
from shardids.errors import MoveFailed, ShardidsError, StatementFailed
from shardids.pg.locks import AdvisoryLock
from shardids.pg.queries import batches
from shardids.replication.barrier import LOCK_MS, OnWait, PutOff, with_locks
from shardids.replication.sides import Side
from shardids.replication.subscriptions import LOCK_FAILURES, Refusal
from shardids.tenants.examining import (
    code_of_others,
    deferrable,
    firing_on_removal,
    references,
    referring,
    takers,
)
from shardids.tenants.family import Family, Part, bare, run

_BATCH: Final = 5_000
"""How many rows one transaction removes."""
_FOUND: Final = 200_000
"""How many rows are looked for at once: each search passes by the rows that were removed before."""
_HELD_MS: Final = 10_000
"""How long the server keeps the barrier of a mover that it hears nothing from, or as long as it may last."""


class Leaving:
    """The source of one move.

    Args:
        side: the node, under the lease of the shard.
        shard: the shard.
        move: the number of the move.
        target: the shard that the key moves to.
        family: its tables, as the source has them.
        trusted: roles whose code may run as the role that moves.
    """

    def __init__(
        self,
        side: Side,
        shard: int,
        move: int,
        target: int,
        family: Family,
        *,
        trusted: Sequence[str],
    ) -> None:
        self._trusted = trusted
        self.side = side
        self.shard = shard
        self.move = move
        self._target = target
        self._family = family

    def guard(self, on_wait: OnWait) -> None:
        """Create the barrier of the key on every table, open, and keep others from referring to its rows.

        Idempotent. Others wait at most 0.1 s for each attempt to lock a table.

        Raises:
            MoveFailed: since the plan, a row of others has come to refer to them, or code that would run.
        """
        with self.side.begin() as connection:
            connection.execute(text("select shardids.make_gate(:move)"), {"move": self.move})
            late = deferrable(connection, self._family.schema)
        referred = {theirs.name for _, _, theirs in referring(self._family)}
        whole = self._family.is_whole("new")
        for part in self._family.parts:
            values = {
                "move": self.move,
                "part": part.number,
                "name": self._name(part),
                "target": self._target,
                "key": self._family.key,
                "is_old": self._family.guards(part, "old").as_string(),
                "is_new": self._family.guards(part, "new").as_string(),
                "direct": part.is_direct,
                "keys": list(part.key),
                "is_fixed": part.is_fixed or part.name in {*referred, self._family.root},
                "links": list(part.way.path[0].columns) if _is_late(part, late) else None,
                "is_whole": whole.as_string() if whole and part.name == self._family.root else None,
                "takes": self._takes(part, late),
            }
            with_locks(self.side, _GUARD, values, on_wait=partial(_named, on_wait, part.name))
        for number, (key, mine, theirs) in enumerate(referring(self._family)):
            ends = [end for end in (mine, theirs) if end is not None]
            name = bare(key.table)
            values = {
                "move": self.move,
                "number": number,
                "name": sql.Identifier(self._family.schema, name).as_string(),
                "key": self._family.key,
                "is_own": self._family.owns(mine, "new", self._family.schema).as_string()
                if mine
                else "false",
                "refers": _refers(self._family, key, theirs).as_string(),
                "columns": list(key.columns),
                "direct": mine is None or mine.is_direct,
                "late": (name, key.name) in late or any(_is_late(end, late) for end in ends),
            }
            with_locks(self.side, _GUARD_REFERENCE, values, on_wait=partial(_named, on_wait, name))
        self._look_again()

    def _takes(self, part: Part, late: Collection[tuple[str, str]]) -> str | None:
        """Return statements of a trigger that note rows which find the key by a new row, and are older."""
        found = []
        for other, path in takers(self._family, part, late):
            columns = [sql.Identifier(name) for name in path[-1].referenced]
            taken = sql.SQL(
                "if tg_op = 'INSERT' or ({}) is distinct from ({}) then"
                " insert into shardids.key_change (move, part, key)"
                " select {}, {}, jsonb_build_object({}) from {} a where {}; end if;"
            ).format(
                sql.SQL(", ").join(sql.SQL("old.{}").format(column) for column in columns),
                sql.SQL(", ").join(sql.SQL("new.{}").format(column) for column in columns),
                sql.Literal(self.move),
                sql.Literal(other.number),
                sql.SQL(", ").join(
                    sql.SQL("{}, a.{}").format(sql.Literal(name), sql.Identifier(name)) for name in other.key
                ),
                sql.Identifier(self._family.schema, other.name),
                self._family.leads_to(path, "a", "new"),
            )
            found.append(taken.as_string())
        return " ".join(found) or None

    def _look_again(self) -> None:
        """Refuse references, code and another row with the key since the plan; none is half-way any more."""
        names = [part.name for part in self._family.parts]
        tables = sorted({*map(self._name, self._family.parts), *self._referring()})
        with self.side.begin() as connection:
            for refusal in (
                *code_of_others(connection, tables, self._trusted),
                *firing_on_removal(connection, self._family.schema, names),
                *references(self._family, connection),
            ):
                raise MoveFailed(refusal.reason, hint=f"{refusal.remedy} Then resume the move, or undo it.")
            self._require_root(connection)

    def _require_root(self, connection: Connection) -> None:
        """Require that no row of the root has the key under another primary key, or another key under its."""
        root, whole = self._family.part(self._family.root), self._family.is_whole("a")
        if root is None or whole is None:
            return
        others = sql.SQL("select count(*) from {} a where {} and {} is not true").format(
            sql.Identifier(self._family.schema, root.name),
            self._family.guards(root, "a"),
            whole,
        )
        if run(connection, others).scalar_one():
            raise MoveFailed(
                f"another row of table {root.name} has key {self._family.key!r}, or its row has another key,"
                " than at the plan",
                hint="Undo the move with --abort, then start it again.",
            )

    def _referring(self) -> Iterator[str]:
        for key, _, _ in referring(self._family):
            yield sql.Identifier(self._family.schema, bare(key.table)).as_string()

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

    def unguard(self, on_wait: OnWait, *, refuses: bool) -> None:
        """Drop the barrier; with ``refuses`` the tables refuse the key from now on. Idempotent."""
        unguard(self.side, self._family.schema, self.move, on_wait, refuses=refuses)
        with_locks(self.side, "select shardids.forget_key(:move)", {"move": self.move})

    def remove(self, on_removed: Callable[[int], None] = lambda _rows: None) -> int:
        """Remove the key's rows in batches, children first; return how many there were. Idempotent.

        They are found by paths to the root's row, which goes last.

        Raises:
            MoveFailed: see :func:`remove_rows`.
        """
        return remove_rows(
            self.side, self._family, self._family.schema, [self.move], on_removed, trusted=self._trusted
        )


def unguard(side: Side, schema: str, move: int, on_wait: OnWait, *, refuses: bool) -> None:
    """Drop a move's triggers from all tables of a shard; with ``refuses`` all but the refusal. Idempotent."""
    with side.begin() as connection:
        guarded = connection.scalars(_GUARDED, {"schema": schema, "move": move}).all()
    for name in guarded:
        with_locks(
            side,
            "select shardids.unguard_key(:move, cast(:name as regclass), :refuses)",
            {"move": move, "name": name, "refuses": refuses},
            on_wait=partial(_used, on_wait, name),
        )


def has_left(side: Side, schema: str, move: int) -> bool:
    """Return whether a shard refuses the key of a move for good.

    Of a move that is on its way there is a gate as long as there are triggers.
    """
    with side.begin() as connection:
        return bool(connection.scalar(_HAS_LEFT, {"schema": schema, "move": move}))


def _named(on_wait: OnWait, table: str, attempt: int) -> None:
    on_wait(attempt, f"writers keep table {table}")


def _used(on_wait: OnWait, table: str, attempt: int) -> None:
    on_wait(attempt, f"transactions read or write table {table}, whose triggers are to be dropped")


def _is_late(part: Part, late: Collection[tuple[str, str]]) -> bool:
    """Return whether a transaction may write a row of a part before it sees the way to its key."""
    return any((bare(key.table), key.name) in late for key in part.way.path)


def _refers(family: Family, key: ForeignKey, theirs: Part) -> sql.Composed:
    joined = sql.SQL(" and ").join(
        sql.SQL("b.{} = new.{}").format(sql.Identifier(there), sql.Identifier(here))
        for here, there in zip(key.columns, key.referenced, strict=True)
    )
    return sql.SQL("exists (select from {} b where {} and {})").format(
        sql.Identifier(family.schema, theirs.name), joined, family.owns(theirs, "b", family.schema)
    )


def remove_rows(
    side: Side,
    family: Family,
    schema: str,
    moves: list[int],
    on_removed: Callable[[int], None] = lambda _rows: None,
    *,
    trusted: Sequence[str] = (),
) -> int:
    """Remove a key's rows from a schema in batches, children first; return how many there were.

    ``moves`` are those whose refusal of the key the removal passes. Rows of a table that refers to itself go
    in one statement: no batch of them need be free of references from the next.

    Raises:
        MoveFailed: other rows would be deleted or changed with them, code of others would run, or some stay.
    """
    total = 0
    for part in reversed(family.parts):
        removal = _Removal(side=side, family=family, part=part, schema=schema, moves=moves, trusted=trusted)
        for removed in removal.batches():
            total += removed
            on_removed(total)
        removal.require_none()
    return total


class _Removal:
    """The removal of a key's rows from one table."""

    def __init__(
        self,
        *,
        side: Side,
        family: Family,
        part: Part,
        schema: str,
        moves: list[int],
        trusted: Sequence[str],
    ) -> None:
        self._side = side
        self._family = family
        self._part = part
        self._schema = schema
        self._moves = {"moves": moves}
        self._trusted = trusted
        self._table = sql.Identifier(schema, part.name)
        self._owned = family.owns(part, "a", schema)

    def batches(self) -> Iterator[int]:
        """Remove the rows, and yield how many each transaction has removed."""
        find = sql.SQL("select a.ctid::text from {} a where {} limit {}").format(
            self._table, self._owned, sql.Literal(_FOUND)
        )
        found = _FOUND
        while found == _FOUND:
            with self._side.begin() as connection:
                places = run(connection, find).scalars().all()
                is_tree = any(key.is_own for key in self._keys(connection))
            found = len(places)
            if is_tree and found:
                yield self._take(self._owned)
                return
            for some in batches(places, _BATCH):
                # Nobody writes them any more, so they are where they were found.
                there = sql.Literal("{" + ",".join(f'"{place}"' for place in some) + "}")
                yield self._take(
                    sql.SQL("a.ctid = any ({}::tid[]) and {}").format(there, self._owned), len(some)
                )

    def _take(self, which: sql.Composed, expected: int | None = None) -> int:
        with self._side.begin() as connection:
            connection.execute(_ALL_ROWS)
            # From here on nobody makes a trigger, a rule or a foreign key.
            run(connection, sql.SQL("lock table {} in row exclusive mode").format(self._table))
            keys = self._keys(connection)
            self._refuse_code(connection, [key.referring for key in keys])
            if keys:
                # Who is about to refer to one of them waits, and then finds it gone.
                locked = sql.SQL("select count(*) from (select from {} a where {} for update) locked")
                run(connection, locked.format(self._table, which))
            for key in keys:
                self._refuse_reference(connection, key, which)
            # Seen by this transaction alone: the refusal lets it pass.
            connection.execute(_PASS, self._moves)
            removed: int = run(
                connection, sql.SQL("delete from {} a where {}").format(self._table, which)
            ).rowcount
            if expected is not None and removed != expected:
                raise MoveFailed(
                    f"only {removed} of {expected} rows of table {self._part.name} could be removed from"
                    f" schema {self._schema}",
                    hint="They were changed meanwhile. Resume the move.",
                )
            connection.execute(_STOP, self._moves)
        return removed

    def _keys(self, connection: Connection) -> Sequence[Any]:
        return connection.execute(_REFERRING, {"table": self._table.as_string()}).all()

    def _refuse_code(self, connection: Connection, referring: Sequence[str]) -> None:
        tables = sorted({self._table.as_string(), *referring})
        for refusal in (
            *code_of_others(connection, tables, self._trusted),
            *firing_on_removal(connection, self._schema, [self._part.name]),
        ):
            raise self._stays(refusal)

    def _refuse_reference(self, connection: Connection, key: Any, which: sql.Composed) -> None:
        """Refuse rows of others that refer to the rows: the foreign key would delete, change or keep them."""
        if not key.is_builtin:
            raise self._stays(
                Refusal(
                    reason=f"foreign key {key.name} of table {key.referring} does not compare by PostgreSQL's"
                    " own equality: the rows that refer to them can't be found",
                    remedy="Drop it for the move.",
                )
            )
        joined = sql.SQL(" and ").join(
            sql.SQL("a.{} = r.{}").format(sql.Identifier(there), sql.Identifier(here))
            for here, there in zip(key.columns, key.referenced, strict=True)
        )
        other = (
            sql.SQL("{} is not true").format(self._family.owns(self._part, "r", self._schema))
            if key.is_own
            else sql.SQL("true")
        )
        count = run(
            connection,
            sql.SQL("select count(*) from {} a join {} r on {} where {} and {}").format(
                self._table, sql.SQL(key.referring), joined, which, other
            ),
        ).scalar_one()
        if count:
            raise self._stays(
                Refusal(
                    reason=f"{count} rows of table {key.referring} refer to them by {key.name}, and would be"
                    " deleted or changed with them",
                    remedy="Let them refer to other rows, or delete them.",
                )
            )

    def _stays(self, refusal: Refusal) -> MoveFailed:
        return MoveFailed(
            f"rows of key {self._family.key!r} in table {self._part.name} can't be removed from schema"
            f" {self._schema}: {refusal.reason}",
            hint=f"{refusal.remedy} Then resume the move: --resume",
        )

    def require_none(self) -> None:
        """Require that no row is left."""
        with self._side.begin() as connection:
            query = sql.SQL("select count(*) from {} a where {}").format(self._table, self._owned)
            count = run(connection, query).scalar_one()
        if count:
            raise MoveFailed(
                f"{count} rows of key {self._family.key!r} are left in table {self._part.name} of schema"
                f" {self._schema}, which were to be removed",
                hint="Find out who keeps or enters them, then resume the move: --resume",
            )


class KeyBarrier:
    """A session that makes writers of the key wait, until it ends."""

    def __init__(self, leaving: Leaving, max_pause_s: float) -> None:
        self._leaving = leaving
        self._place = {"class": int(AdvisoryLock.KEY_BARRIER), "key": leaving.move}
        self._held_ms = max(_HELD_MS, round(max_pause_s * 1000))
        self.connection = leaving.side.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        # Its lock and its settings end with it, and with no other.
        self.connection.detach()

    def close(self) -> float:
        """Make writers wait; those that had passed the barrier have ended. Returns since when they wait.

        Raises:
            PutOff: somebody keeps the barrier.
        """
        self.connection.execute(_LIMITS, {"lock_ms": str(LOCK_MS), "held_ms": str(self._held_ms)})
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
                              cast(:keys as name[]), :is_fixed, cast(:links as name[]), :is_whole, :takes)"""
_GUARD_REFERENCE: Final = """
    select shardids.guard_key_reference(:move, :number, cast(:name as regclass), :key, :is_own, :refers,
                                    cast(:columns as name[]), :direct, :late)"""
_GUARDED: Final = text("""
    select distinct t.tgrelid::regclass::text from pg_trigger t join pg_class c on c.oid = t.tgrelid
    where c.relnamespace = to_regnamespace(quote_ident(:schema)) and t.tgparentid = 0
      and starts_with(t.tgname, format('shardids_key_%s_', cast(:move as bigint)))
    order by 1""")
_HAS_LEFT: Final = text("""
    select shardids.gate_of(:move) is null and exists (
      select from pg_trigger t join pg_class c on c.oid = t.tgrelid
      where c.relnamespace = to_regnamespace(quote_ident(:schema))
        and t.tgname = format('shardids_key_%s_insert', cast(:move as bigint)))""")
# Of a partitioned table that refers to it, one; of its partitions none.
_REFERRING: Final = text("""
    select k.conname::text as name, k.conrelid::regclass::text as referring,
           k.conrelid = k.confrelid as is_own,
           not exists (select from unnest(k.conpfeqop) u (operator) join pg_operator o on o.oid = u.operator
                       where o.oprnamespace <> 'pg_catalog'::regnamespace) as is_builtin,
           (select array_agg(a.attname::text order by u.n)
            from unnest(k.conkey) with ordinality u (attnum, n)
            join pg_attribute a on a.attrelid = k.conrelid and a.attnum = u.attnum) as columns,
           (select array_agg(a.attname::text order by u.n)
            from unnest(k.confkey) with ordinality u (attnum, n)
            join pg_attribute a on a.attrelid = k.confrelid and a.attnum = u.attnum) as referenced
    from pg_constraint k
    where k.contype = 'f' and k.conparentid = 0 and k.confrelid = to_regclass(:table)""")
_ALL_ROWS: Final = text("select set_config('row_security', 'off', true)")
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
