"""Every advisory lock that shardids takes: number, place, and meaning; and who holds a lock.

The numbers are written out in ``sql/`` too, which psql must be able to run; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum, unique
from typing import Final

from sqlalchemy import Connection, Engine, text

from shardids.errors import ShardidsError, StatementFailed

_MOST_NAMED: Final = 5


@unique
class AdvisoryLock(IntEnum):
    """The class of a two-part lock whose second part is the shard, or the key of a single lock."""

    GENERATOR = 1936220516
    """(class, shard) on a node: raises or stops the shard's clock; held for microseconds."""
    SHARD_SCHEMA = 1936220517
    """(class, shard) on a node: changes the shard's schema; until the end of the transaction."""
    INSTALL = 1936220518
    """Key, on a node and in the catalog: installs shardids' own objects, or changes grants."""
    CATALOG_GRANTS = 1936220519
    """Key, in the catalog: changes the catalog's grants; until the end of the transaction."""
    LEASE_HOLDER = 1936220520
    """(class, first 32 bits of an epoch) in the catalog: holds leases of that epoch; as long as it lives."""
    WRITE_BARRIER = 1936220521
    """(class, shard) on a node: shared by every writer of its tables; the mover waits for all."""
    VIEWS = 1936220522
    """(class, 0) in the database of views over all shards: changes views there."""
    ADOPT = 1936220523
    """(class, 0) in the catalog: works at the adoption; as long as the process lives."""
    ADOPT_BARRIER = 1936220524
    """(class, 0) in a database that is adopted: shared by every writer; the switch waits for all."""
    REFERENCES = 1936220527
    """(class, 0) in the catalog: changes which reference tables there are, or who follows the writer."""
    MIGRATE_NODE = 1936220530
    """(class, -1) on a node: runs the node's own revisions."""
    MIGRATE_RUN = 1936220531
    """Key, in the catalog: the one run that changes many shards; as long as its connection lives."""
    LEASE = 1936220533
    """(class, shard) on a node: works under the shard's lease; the sessions of a move share it."""
    KEY_CHANGE = 1936220532
    """(class, table's oid) on a node: changes the table's key in place; as long as the session lives."""
    REBALANCE = 1936220534
    """(class, 0) in the catalog: the one rebalance; as long as its process lives."""
    COUNTER_LANE = 1936220540
    """(class, hash) on a node: begins a lane of a counter; nobody waits; until the transaction ends."""
    KEY_BARRIER = 1936220545
    """(class, key's move) on a node: shared by every writer of the key's rows; the mover waits for all."""
    LOAD = 1936220546
    """(class, hash of the name) in the catalog: runs the load of that name; as long as its process lives."""
    # Transactions over several nodes take 64-bit keys of their own beside these: shardids.pg.gids.lock_of.


@contextmanager
def session_lock(
    connection: Connection, lock: AdvisoryLock, key: int, *, taken: Callable[[], Exception]
) -> Iterator[None]:
    """Hold ``(lock, key)`` until the block ends or the session dies, over any number of transactions.

    It only tries: a statement that waits holds a snapshot, and CREATE INDEX CONCURRENTLY in the session that
    holds the lock would wait for that snapshot in turn.

    Raises:
        Exception: the one that ``taken`` returns: another session holds the lock.
    """
    place = {"class": int(lock), "key": key - (1 << 32) if key >> 31 > 0 else key}
    if not _committed(connection, "select pg_try_advisory_lock(:class, :key)", place):
        raise taken()
    try:
        yield
    finally:
        if not connection.closed and not connection.invalidated:
            _committed(connection, "select pg_advisory_unlock(:class, :key)", place)


def _committed(connection: Connection, statement: str, place: dict[str, int]) -> bool:
    """Run a statement about a lock in its own transaction, so that it leaves none open."""
    if connection.in_transaction():
        return bool(connection.scalar(text(statement), place))
    with connection.begin():
        return bool(connection.scalar(text(statement), place))


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A session, or a prepared transaction, that holds a lock.

    Attributes:
        pid: its process; ``None`` of a prepared transaction, which has a ``gid``.
        role: who it works as; ``None`` if it has just ended.
        application: the name of the session.
        since_s: how long its transaction has been open, as far as this role may see it.
        statement: the last that it began, as far as this role may see it.
        table: the name of the relation that it locks, without its schema; ``None`` of an advisory lock.
        is_waiting: it only waits for the lock, and others wait behind it.
    """

    pid: int | None
    role: str | None
    application: str
    since_s: float | None
    statement: str
    gid: str | None
    table: str | None
    is_waiting: bool = False

    def __str__(self) -> str:
        """Name it as errors do."""
        who = f"prepared transaction '{self.gid or ''}'" if self.pid is None else f"process {self.pid}"
        who += f" ({self.application})" if self.application else ""
        who += f' of role "{self.role}"' if self.role else ""
        return who if self.since_s is None else f"{who} (in a transaction for {self.since_s:.0f} s)"

    @property
    def remedy(self) -> str:
        """The SQL that ends it."""
        if self.pid is not None:
            return f"select pg_terminate_backend({self.pid})"
        gid = (self.gid or "").replace("'", "''")
        return f"commit prepared '{gid}', or rollback prepared '{gid}'"


def holders_of_key(connection: Connection, key: int) -> list[Holder]:
    """Return the other sessions that hold an advisory lock with one key, longest first."""
    return _holders(connection, number=key >> 32 & 0xFFFFFFFF, object=key & 0xFFFFFFFF, parts=1)


def holders_of(connection: Connection, lock: AdvisoryLock, key: int) -> list[Holder]:
    """Return the other sessions that hold an advisory lock with two keys, longest first."""
    return _holders(connection, number=int(lock), object=key & 0xFFFFFFFF, parts=2)


def holders_of_tables(
    connection: Connection, names: Collection[str], modes: Collection[str] | None = None
) -> list[Holder]:
    """Return who else holds a lock, in one of the modes if given, on relations with these names in SQL."""
    return _holders(connection, names=list(names), modes=modes and list(modes))


_PATIENCE: Final = "10s"
_EXCLUSIVE: Final = ("AccessExclusiveLock",)
_LOCK_TIMEOUT: Final = "55P03"
_AGAIN: Final = "Run the command again"


@contextmanager
def bounded_wait(
    connection: Connection,
    where: str,
    schemas: Collection[str],
    modes: Collection[str] | None = None,
    *,
    patience: str | None = None,
) -> Iterator[None]:
    """Let the open transaction wait 10 s at most, or ``patience``, for each lock of these schemas' tables.

    ``where`` and ``modes``: as :func:`locked` takes them.

    Raises:
        StatementFailed: it did not get one; the message names the table, and who keeps it locked.
    """
    connection.execute(
        text("select pg_catalog.set_config('lock_timeout', :patience, true)"),
        {"patience": patience or _PATIENCE},
    )
    try:
        # Its engine may have no other connection to look by.
        with connection.begin_nested():
            yield
    except StatementFailed as error:
        # Those of advisory locks have a hint, and name who holds them.
        if error.sqlstate != _LOCK_TIMEOUT or error.hint:
            raise
        raise _naming(error, where, _held(connection, schemas, modes), _AGAIN) from error


def locked(
    error: StatementFailed,
    where: str,
    engine: Engine,
    schemas: Collection[str] = (),
    modes: Collection[str] | None = None,
    *,
    names: Collection[str] = (),
    again: str = _AGAIN,
) -> StatementFailed:
    """Return an error that names who keeps which tables locked: why a statement failed.

    The tables are those of the schemas, and those with the names in SQL. ``where``: the shard or the node, as
    the message begins. ``modes``: the locks that it could not pass, also those that others only wait for: the
    sessions before these count as well. ``again``: the next step, once the locks are gone.
    """
    holders: list[Holder] = []
    with suppress(ShardidsError), engine.connect() as connection:
        holders = _held(connection, schemas, modes, names)
    return _naming(error, where, holders, again)


def unread(
    error: StatementFailed, places: Iterable[tuple[str, Engine]], again: str = _AGAIN
) -> StatementFailed:
    """Return an error that names who keeps tables of a database from being read, if that is why it came.

    ``places``: the databases that may be meant, each with the name that the message begins with. All tables
    count but the server's own. ``again``: as :func:`locked` takes it.
    """
    if error.sqlstate != _LOCK_TIMEOUT or error.hint:
        return error
    for where, engine in places:
        with suppress(ShardidsError), engine.connect() as connection:
            if holders := _held(connection, None, _EXCLUSIVE):
                return _naming(error, where, holders, again)
    return StatementFailed(error.message, hint=f"The lock is gone by now. {again}.", sqlstate=error.sqlstate)


def _held(
    connection: Connection,
    schemas: Collection[str] | None,
    modes: Collection[str] | None,
    names: Collection[str] = (),
) -> list[Holder]:
    """Return who holds locks, and who waits for one of the modes. Without ``schemas``, on all tables."""
    by = {"schemas": list(schemas or ()), "names": list(names), "modes": modes and list(modes)}
    found = _holders(connection, **by, is_everywhere=schemas is None, queued=True)
    return found if any(not one.is_waiting for one in found) else []


def _naming(error: StatementFailed, where: str, holders: Sequence[Holder], again: str) -> StatementFailed:
    if not holders:
        message = error.message if error.message.startswith(where) else f"{where}: {error.message}"
        hint = f"The lock is gone by now. {again}."
        return StatementFailed(message, hint=hint, sqlstate=error.sqlstate)
    by_table: dict[str | None, list[Holder]] = {one.table: [] for one in holders if not one.is_waiting}
    for one in holders:
        by_table.get(one.table, []).append(one)
    tables = [_locked(table, them) for table, them in by_table.items()][:_MOST_NAMED]
    steps = [*dict.fromkeys(one.remedy for one in holders if not one.is_waiting)][:_MOST_NAMED]
    return StatementFailed(
        f"{where}: {'; '.join(tables)}",
        hint=f"{again}, once that has ended; or end it: {'; '.join(steps)}",
        sqlstate=error.sqlstate,
    )


def _locked(table: str | None, them: Iterable[Holder]) -> str:
    waiting = [one for one in them if one.is_waiting]
    by = f"table {table} is locked by {named(one for one in them if not one.is_waiting)}"
    return f"{by}, which {named(waiting)} waits for, to lock it" if waiting else by


def named(holders: Iterable[Holder], otherwise: str = "a session that has just ended") -> str:
    """Name the holders of a lock; of many only the first."""
    return ", ".join(list(dict.fromkeys(map(str, holders)))[:_MOST_NAMED]) or otherwise


def _holders(connection: Connection, **by: object) -> list[Holder]:
    nothing: dict[str, object] = {
        "number": None,
        "object": None,
        "parts": None,
        "names": [],
        "schemas": [],
        "is_everywhere": False,
        "modes": None,
        "queued": False,
    }
    return [Holder(**row._mapping) for row in connection.execute(_HOLDERS, nothing | by)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTransaction:
    """A transaction that another session of the database has open, not one of autovacuum.

    Attributes:
        id: its number while the server runs; a session's next transaction has another one.
        pid: the process.
        role: who the session has logged in as.
        application: the name of the session.
        backend: the kind of process, as ``pg_stat_activity`` names it; ``None`` if this role may not see it.
        state: the state of the session, as far as this role may see it.
        since: when it began, as far as this role may see it.
    """

    id: str
    pid: int
    role: str
    application: str
    backend: str | None
    state: str | None
    since: str | None

    def __str__(self) -> str:
        """Name it as errors do."""
        seen = f", {self.state}, since {self.since}" if self.state and self.since else ""
        return f'process {self.pid} of role "{self.role}"{seen}'


def open_transactions(connection: Connection) -> list[OpenTransaction]:
    """Return the transactions that other sessions have open in the database, the oldest known one first."""
    return [OpenTransaction(**row._mapping) for row in connection.execute(_OPEN)]


# Each transaction locks its virtual ID from its beginning, and pg_locks shows that to every role. Few roles
# see in pg_stat_activity when one began, by a clock that may have been wrong. Autovacuum has no role.
_OPEN: Final = text("""
    select l.virtualtransaction as id, a.pid, a.usename::text as role,
           coalesce(a.application_name, '') as application, a.state, a.xact_start::text as since,
           coalesce(a.backend_type,
                    case when a.pid in (select r.pid from pg_catalog.pg_stat_replication r) then 'walsender'
                         when a.pid in (select s.pid from pg_catalog.pg_stat_subscription s)
                         then 'logical replication worker' end) as backend
    from pg_catalog.pg_locks l join pg_catalog.pg_stat_activity a on a.pid = l.pid
    where l.locktype = 'virtualxid' and l.granted and l.mode = 'ExclusiveLock'
      and l.pid <> pg_catalog.pg_backend_pid() and a.usename is not null
      and a.datid = (select d.oid from pg_catalog.pg_database d
                     where d.datname = pg_catalog.current_database())
    order by a.xact_start nulls last, a.pid""")
# A prepared transaction has no process; it also locks its own ID, by which it is known.
_HOLDERS: Final = text("""
    select l.pid, coalesce(a.usename, p.owner)::text as role, coalesce(a.application_name, '') as application,
           extract(epoch from pg_catalog.clock_timestamp() - coalesce(a.xact_start, p.prepared))::float8
             as since_s,
           coalesce(a.query, '') as statement, p.gid, c.relname::text as "table", not l.granted as is_waiting
    from pg_catalog.pg_locks l
    left join pg_catalog.pg_stat_activity a on a.pid = l.pid
    left join pg_catalog.pg_locks x on l.pid is null and x.pid is null and x.locktype = 'transactionid'
      and x.virtualtransaction = l.virtualtransaction
    left join pg_catalog.pg_prepared_xacts p on p.transaction = x.transactionid
    left join pg_catalog.pg_class c on l.locktype = 'relation' and c.oid = l.relation
    where (l.granted or :queued and l.locktype = 'relation' and l.mode = any (cast(:modes as text[])))
      and l.pid is distinct from pg_catalog.pg_backend_pid()
      and l.database = (select d.oid from pg_catalog.pg_database d
                        where d.datname = pg_catalog.current_database())
      and case l.locktype
            when 'advisory' then l.classid::bigint = cast(:number as bigint)
                                 and l.objid::bigint = cast(:object as bigint) and l.objsubid = :parts
            when 'relation' then
              (l.relation in (select pg_catalog.to_regclass(name)
                              from pg_catalog.unnest(cast(:names as text[])) name)
               or c.relkind in ('r', 'p', 'm', 'f', 'v')
                  and c.relnamespace in (select n.oid from pg_catalog.pg_namespace n
                                         where n.nspname = any (cast(:schemas as text[]))
                                           or :is_everywhere and n.nspname !~ '^pg_'
                                              and n.nspname <> 'information_schema'))
              and (cast(:modes as text[]) is null or l.mode = any (cast(:modes as text[]))
                   or :queued and exists (
                     select from pg_catalog.pg_locks w
                     where w.locktype = 'relation' and w.database = l.database and w.relation = l.relation
                       and w.mode = any (cast(:modes as text[])) and not w.granted))
            else false
          end
    order by coalesce(a.xact_start, p.prepared) nulls last, l.pid""")
