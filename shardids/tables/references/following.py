"""A node that follows the writer: first its rows as they are at one position of the log, then all changes.

PostgreSQL's own initial copy would add rows to those that are there, and rows that shards refer to can't be
emptied out first. So the rows are compared, and differences are changed in an ordinary session, where
foreign keys are checked. One process at a time works at reference tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final, LiteralString
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo
from sqlalchemy import Connection, CursorResult, text

from shardids.catalog.losses import unsettled
from shardids.catalog.references import PUBLICATION, References, references_of, slot_of
from shardids.catalog.rows import Catalog, lock_placement, unknown_node
from shardids.catalog.topology import REFERENCE_SCHEMA
from shardids.errors import ClusterConflict, ConnectionFailed, ShardidsError, StatementFailed
from shardids.pg.connections import driver_connection, keep_out_of_logs, on_connect
from shardids.pg.locks import AdvisoryLock
from shardids.pg.statement_log import logged_copy
from shardids.replication.barrier import HeldLock
from shardids.replication.sides import Side, move_nodes
from shardids.replication.subscriptions import drop_slot, flush, unsubscribe

LOCK_TIMEOUT: Final = "10s"
"""How long to wait for sessions that write to a reference table, or refer to a row that is deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The servers and tables of the work.

    Attributes:
        known: the catalog's reference tables when the work began.
        writer: the node that takes their writes.
        readers: the other nodes, by name.
    """

    catalog: Catalog
    cluster: UUID
    known: References
    writer: Side
    readers: Mapping[str, Side]
    held: HeldLock

    @property
    def sides(self) -> tuple[Side, ...]:
        """All nodes, the writer first."""
        return (self.writer, *self.readers.values())

    def slot(self, reader: Side) -> str:
        """Return the name of a reader's subscription, and of its slot on the writer."""
        return slot_of(self.cluster, reader.name)

    def record(self, statement: str, **parameters: Any) -> None:
        """Change the catalog, under the lock."""
        with self.held.transaction() as connection:
            connection.execute(text(statement), parameters)


@contextmanager
def begun(catalog: Catalog, *, writer: str | None = None, moving: bool = False) -> Iterator[Work]:
    """Yield the work, which no other process does meanwhile; ``writer``: for a cluster that has none yet.

    ``moving``: the work resumes an interrupted move of the writer, or undoes it.

    Raises:
        ClusterConflict: another process is at it; the writer is missing or another; the node does not exist;
            or a move of the writer was interrupted, and not ``moving``.
    """
    taken = ClusterConflict(
        "another process is changing reference tables or their nodes", hint="Wait until it has ended."
    )
    lost = ClusterConflict(
        "the connection to the catalog was lost, and with it the right to change reference tables",
        hint="Repeat the command to continue.",
    )
    with HeldLock.taken(catalog, AdvisoryLock.REFERENCES, 0, taken=taken, lost=lost) as held:
        known, placement = references_of(catalog), catalog.placement()
        if known.successor is not None and not moving:
            raise ClusterConflict(
                f'the move of reference tables\' writer to node "{known.successor}" was interrupted',
                hint=f"Complete it: shardids reference move --to {known.successor}, or undo it: shardids"
                " reference repair",
            )
        cluster = catalog.describe().cluster
        name = _writer(known, writer)
        if name not in placement.nodes:
            raise unknown_node(name, placement.nodes)
        session = f"shardids_references_{cluster.hex}"
        with move_nodes(placement, catalog.url, name=session) as nodes:
            sides = {one: Side(name=one, engine=nodes[one]) for one in nodes}
            for side in sides.values():
                # A process that slept, and lost the lock, finds its sessions ended. It is not to open others.
                on_connect(side.engine, lambda *_: held.require())
                with suppress(ConnectionFailed):  # Work that needs the node will report it.
                    side.end_sessions(session)
            yield Work(
                catalog=catalog,
                cluster=cluster,
                known=known,
                writer=sides.pop(name),
                readers=sides,
                held=held,
            )


def _writer(known: References, wanted: str | None) -> str:
    if known.writer is not None and wanted not in (None, known.writer):
        raise ClusterConflict(
            f'the writer of reference tables is node "{known.writer}", not "{wanted}"',
            hint="All reference tables have the same writer. Leave --writer out.",
        )
    name = known.writer or wanted
    if name is None:
        raise ClusterConflict(
            "the cluster has no reference tables yet",
            hint="To create one, and choose the writer: shardids reference create NAME --writer NODE",
        )
    return name


def let_through(connection: Connection) -> None:
    """Let the guards of reference tables pass the rest of the transaction; wait briefly for locks."""
    connection.execute(
        text("""select set_config('shardids.reference_work', 'on', true),
                       set_config('lock_timeout', :timeout, true)"""),
        {"timeout": LOCK_TIMEOUT},
    )


def require_nothing_moves(connection: Connection, what: str) -> None:
    """Require that no shard is being moved and no database adopted, and lets none begin before the COMMIT.

    To be called first in a transaction: it takes the lock of the placement.

    Raises:
        ClusterConflict: one is; ``what`` its message begins with.
    """
    lock_placement(connection)
    tables = "shardids_catalog.move, shardids_catalog.loss, shardids_catalog.adoption"
    connection.execute(text(f"lock table {tables} in share mode"))
    busy = [f"shard {shard} is being moved" for shard in unsettled(connection)]
    if connection.scalar(
        text("select exists (select from shardids_catalog.adoption where ended_at is null)")
    ):
        busy.append("a database is being adopted")
    if busy:
        raise ClusterConflict(
            f"{what}: {busy[0]}, and rows that arrive that way are not checked against foreign keys",
            hint="Wait until that has ended.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The rows of a table on the writer, as COPY gives them."""

    table: str
    columns: tuple[str, ...]
    key: tuple[str, ...]
    rows: bytes


def attach(work: Work, reader: Side, tables: Sequence[str], *, patience: str | None = None) -> None:
    """Bring a node's reference tables to the writer's rows, and let it follow from there on. Repeatable.

    Writers of reference tables wait while they are read. Rows that only the node has are deleted
    there. ``patience`` is how long to wait for transactions on the writer's server, 60 s if nothing is said.

    Raises:
        ClusterConflict: the tables' definitions differ; or rows on the node refer to one that the writer
            lacks; or transactions that write on the writer's server don't end.
        StatementFailed: a session keeps a reference table locked.
    """
    name = work.slot(reader)
    require_alike(work, reader, tables)
    unsubscribe(reader, name)
    with work.writer.autocommit() as connection:
        drop_slot(connection, work.writer, name)
    with _early_slot(work.writer, name, patience=patience) as session:
        contents = _read(work.writer, session, name, tables)
    with reader.begin() as connection:
        let_through(connection)
        _write(connection, reader, contents)
    _subscribe(work, reader, name)


def require_alike(work: Work, reader: Side, tables: Sequence[str]) -> None:
    """Refuse tables whose columns differ: rows of the writer would not fit in.

    Raises:
        ClusterConflict: a table differs or is missing.
    """
    there, here = (definitions(side, tables) for side in (work.writer, reader))
    for table in tables:
        if there[table] == here[table]:
            continue
        what = f'node "{reader.name}" lacks reference table {table}'
        if here[table] is not None:
            what = (
                f'reference table {table} differs: on node "{work.writer.name}" ({there[table]}),'
                f' on "{reader.name}" ({here[table]})'
            )
        raise ClusterConflict(
            what, hint="Run the revisions for the node (shardids migrate up), then: shardids reference repair"
        )


def definitions(side: Side, tables: Sequence[str]) -> Mapping[str, str | None]:
    """Return the columns of each table, as ``shardids.reference_columns`` has them; ``None`` if missing."""
    with side.autocommit() as connection:
        rows = connection.execute(
            text("select name::text, definition from shardids.reference_columns(cast(:tables as name[]))"),
            {"tables": list(tables)},
        )
        return {row.name: row.definition for row in rows}


def detach(work: Work, reader: Side) -> None:
    """End that a node follows the writer. Idempotent."""
    name = work.slot(reader)
    unsubscribe(reader, name)
    with work.writer.autocommit() as connection:
        drop_slot(connection, work.writer, name)


@contextmanager
def _early_slot(writer: Side, name: str, *, patience: str | None = None) -> Iterator[Connection]:
    """Yield a session with a temporary slot; PostgreSQL waits for all transactions that write there."""
    timeout = patience or _SLOT_TIMEOUT
    with writer.autocommit() as connection:
        connection.execute(text("select set_config('statement_timeout', :t, false)"), {"t": timeout})
        try:
            connection.execute(
                text("select pg_create_logical_replication_slot(:name, 'pgoutput', true)"),
                {"name": _early_name(name)},
            )
        except StatementFailed as error:
            if error.sqlstate != "57014":
                raise
            with writer.autocommit() as other:
                writing = "; ".join(other.scalars(_WRITING)) or "they have ended just now"
            raise ClusterConflict(
                f'node "{writer.name}": transactions that were open when the replication slot was to be made'
                f" have not ended within {timeout}: {writing}",
                hint="End them (pg_terminate_backend(pid), rollback prepared), then repeat the command.",
            ) from error
        finally:
            connection.execute(text("reset statement_timeout"))
        try:
            yield connection
        finally:
            with suppress(ShardidsError):
                connection.execute(
                    text("select pg_drop_replication_slot(:name)"), {"name": _early_name(name)}
                )


def _early_name(slot: str) -> str:
    return f"{slot[:57]}_early"


# The oldest first. Locks are seen by everybody; pg_stat_activity hides the transactions of others.
_WRITING: Final = text("""
    select case when l.pid is null then format('prepared transaction %L in ', min(x.gid))
                else format('process %s of role "%s" in ', l.pid, min(a.usename)) end
           || format('database "%s"', coalesce(min(x.database), min(a.datname)))
    from pg_locks l
    left join pg_stat_activity a on a.pid = l.pid
    left join pg_prepared_xacts x on x.transaction = l.transactionid and l.pid is null
    where l.locktype = 'transactionid' and l.mode = 'ExclusiveLock' and l.granted
      and l.pid is distinct from pg_backend_pid()
    group by l.pid, x.transaction order by max(age(l.transactionid)) desc limit 3""")


def require_slot(writer: Side, name: str) -> None:
    """Require that a slot can be made on a node, by making one that is dropped at once.

    Raises:
        ClusterConflict: transactions that write on that server don't end.
    """
    with _early_slot(writer, name):
        pass


_SLOT_TIMEOUT: Final = "60s"
_WHOLE: Final = sql.SQL("true")

_COLUMNS = text("""
    select a.attname::text as name,
           exists (select from pg_index i
                   where i.indrelid = c.oid and i.indisprimary
                     and a.attnum = any ((i.indkey::int2[])[0:i.indnkeyatts - 1])) as is_key
    from pg_class c join pg_attribute a on a.attrelid = c.oid
    where c.relnamespace = to_regnamespace(:schema) and c.relname = :table
      and a.attnum > 0 and not a.attisdropped and a.attgenerated = ''
    order by a.attnum""")


def _read(writer: Side, session: Connection, slot: str, tables: Sequence[str]) -> list[Contents]:
    """Return the rows, those that are referred to first, and make the slot at the position that they are of.

    Earlier writers to the tables have ended when the lock is granted, and are in the log before the position.
    ``session`` has the early slot. A server that crashes forgets how far a slot was advanced, and not where
    one was made: the slot is a copy of the early one.
    """
    both = {"early": _early_name(slot), "slot": slot}
    copy = text("select pg_copy_logical_replication_slot(:early, :slot, false)")
    if not tables:
        session.execute(copy, both)
        return []
    with writer.begin() as connection:
        connection.execute(text("select set_config('lock_timeout', :t, true)"), {"t": LOCK_TIMEOUT})
        names = sql.SQL(", ").join(sql.Identifier(REFERENCE_SCHEMA, table) for table in sorted(tables))
        run(connection, sql.SQL("lock table {} in share mode").format(names))
        position = flush(session)
        session.execute(
            text("select pg_replication_slot_advance(:early, cast(:position as pg_lsn))"),
            {"early": both["early"], "position": position},
        )
        session.execute(copy, both)
        with _copying(writer):
            return [_copied_out(connection, table) for table in in_order(connection, tables)]


def row_of(connection: Connection, side: Side, table: str, where: sql.Composable) -> Contents:
    """Return the row of a table that meets a condition."""
    with _copying(side):
        return _copied_out(connection, table, where)


def _copied_out(connection: Connection, table: str, where: sql.Composable = _WHOLE) -> Contents:
    found = connection.execute(_COLUMNS, {"schema": REFERENCE_SCHEMA, "table": table}).all()
    columns = tuple(row.name for row in found)
    statement = sql.SQL("copy (select {} from {} where {}) to stdout").format(
        _listed("{}", columns), sql.Identifier(REFERENCE_SCHEMA, table), where
    )
    with logged_copy(connection, statement) as copy:
        rows = b"".join(bytes(part) for part in copy)
    key = tuple(row.name for row in found if row.is_key)
    return Contents(table=table, columns=columns, key=key, rows=rows)


def in_order(connection: Connection, tables: Sequence[str]) -> list[str]:
    """Return tables in an order that puts each after those that it refers to.

    Raises:
        ClusterConflict: two refer to each other.
    """
    found = connection.execute(
        text("""
            select own.relname::text as own, target.relname::text as target
            from pg_constraint k
            join pg_class own on own.oid = k.conrelid join pg_class target on target.oid = k.confrelid
            where k.contype = 'f' and own.oid <> target.oid
              and own.relnamespace = to_regnamespace(:schema) and target.relnamespace = own.relnamespace"""),
        {"schema": REFERENCE_SCHEMA},
    )
    graph: dict[str, set[str]] = {table: set() for table in sorted(tables)}
    for row in found:
        if row.own in graph and row.target in graph:
            graph[row.own].add(row.target)
    try:
        return list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise ClusterConflict(
            f"reference tables refer to each other in a circle: {', '.join(error.args[1])}",
            hint="Drop one of the foreign keys.",
        ) from None


def _write(connection: Connection, reader: Side, contents: Sequence[Contents]) -> None:
    """Make a node's tables equal.

    Rows that the writer lacks go first: they may have values of a unique column that others get. If rows
    refer to them that are to be changed, they go last.
    """
    _load(connection, reader, contents)
    with suppress(ClusterConflict), connection.begin_nested():
        _delete_others(connection, reader, contents)
    _upsert(connection, contents)
    _delete_others(connection, reader, contents)


def give_back(connection: Connection, reader: Side, row: Contents) -> None:
    """Give a node a row that it deleted, as :func:`row_of` has it from the writer."""
    _load(connection, reader, [row])
    _upsert(connection, [row])


def _load(connection: Connection, reader: Side, contents: Sequence[Contents]) -> None:
    """Bring rows to the node, into temporary tables."""
    for number, one in enumerate(contents):
        fresh, names = _fresh(number), _listed("{}", one.columns)
        there = sql.Identifier(REFERENCE_SCHEMA, one.table)
        run(connection, sql.SQL("create temporary table {} (like {}) on commit drop").format(fresh, there))
        copying = sql.SQL("copy {} ({}) from stdin").format(fresh, names)
        with _copying(reader), logged_copy(connection, copying) as copy:
            copy.write(one.rows)


def _upsert(connection: Connection, contents: Sequence[Contents]) -> None:
    """Insert and change rows, those that are referred to first."""
    for number, one in enumerate(contents):
        names = _listed("{}", one.columns)
        statement = sql.SQL(
            "insert into {} as old ({}) overriding system value select {} from {} on conflict ({}) do {}"
        ).format(
            sql.Identifier(REFERENCE_SCHEMA, one.table),
            names,
            names,
            _fresh(number),
            _listed("{}", one.key),
            _change([column for column in one.columns if column not in one.key]),
        )
        run(connection, statement)


def _change(columns: Sequence[str]) -> sql.Composable:
    """Return what to do with a row that is there: as text, for a type may lack an operator =."""
    if not columns:
        return sql.SQL("nothing")
    return sql.SQL("update set {} where ({}) is distinct from ({})").format(
        _listed("{0} = excluded.{0}", columns),
        _listed("old.{}::text", columns),
        _listed("excluded.{}::text", columns),
    )


def _listed(form: LiteralString, columns: Sequence[str]) -> sql.Composable:
    return sql.SQL(", ").join(sql.SQL(form).format(sql.Identifier(column)) for column in columns)


def _delete_others(connection: Connection, reader: Side, contents: Sequence[Contents]) -> None:
    """Delete rows that the writer lacks, referenced rows last."""
    for number, one in reversed(list(enumerate(contents))):
        same = sql.SQL(" and ").join(
            sql.SQL("old.{0} = fresh.{0}").format(sql.Identifier(name)) for name in one.key
        )
        statement = sql.SQL("delete from {} old where not exists (select from {} fresh where {})").format(
            sql.Identifier(REFERENCE_SCHEMA, one.table), _fresh(number), same
        )
        try:
            run(connection, statement)
        except StatementFailed as error:
            if (table := referring(error)) is None:
                raise
            raise ClusterConflict(
                f'node "{reader.name}": rows of {table} refer to a row of reference table {one.table} that'
                f" the writer lacks: {error.message}",
                hint="Insert it on the writer again, or delete the rows that refer to it. Then:"
                " shardids reference repair",
            ) from error


def _fresh(number: int) -> sql.Identifier:
    return sql.Identifier("pg_temp", f"shardids_fresh_{number}")


def _subscribe(work: Work, reader: Side, name: str) -> None:
    conninfo = make_conninfo("", **work.writer.parameters())
    with reader.begin() as connection:
        keep_out_of_logs(connection)
        connection.execute(
            text("select shardids.follow_writer(:name, :conninfo, :publication)"),
            {"name": name, "conninfo": conninfo, "publication": PUBLICATION},
        )


def run(connection: Connection, statement: sql.Composable) -> CursorResult[Any]:
    """Execute a statement that was put together; errors are shardids' own."""
    written = statement.as_string(driver_connection(connection))
    return connection.exec_driver_sql(written, execution_options={"no_parameters": True})


def referring(error: StatementFailed) -> str | None:
    """Return the table whose rows refer to one that was to be deleted; ``None`` if it was another error."""
    cause = error.__cause__
    if not isinstance(cause, psycopg.errors.ForeignKeyViolation):
        return None
    return f"{cause.diag.schema_name}.{cause.diag.table_name}"


@contextmanager
def _copying(side: Side) -> Iterator[None]:
    """Make errors of COPY shardids' own."""
    try:
        yield
    except psycopg.Error as error:
        message = error.diag.message_primary or str(error)
        raise StatementFailed(f'node "{side.name}": {message}', sqlstate=error.sqlstate) from error
