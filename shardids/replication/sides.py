"""The source and the target of a move: connections to both, and comparison of the shard's copies there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self
from uuid import UUID

import psycopg
from psycopg import sql
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.engine import URL

from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog, unknown_node
from shardids.catalog.topology import Placement, schema_name
from shardids.errors import MoveFailed, MoveRefused, from_database
from shardids.pg.connections import driver_connection, is_autocommit, on_connect
from shardids.pg.notation import counted
from shardids.pg.reader import Reader, Refused, reading_as_reader

_CONNECTIONS = 6
"""Connections to one node that a move may have open at once."""
SESSION = {
    "idle_in_transaction_session_timeout": "15s",
    # What is repeated in the pause is planned before it.
    "plan_cache_mode": "force_generic_plan",
    # Rows that one node writes as text mean the same to another, whatever is set for role and database.
    "intervalstyle": "postgres",
    "extra_float_digits": "1",
    "client_connection_check_interval": "5s",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "3",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "20s",
}
"""Settings that let the server end a session, and free its locks, once it can't reach the mover.

They also make it plan each statement of a function once.
"""
_PASSED_ON = ("host", "hostaddr", "port", "user", "dbname", "sslmode", "application_name")
"""Parameters that mean the same on another machine, unlike the paths of certificates and password files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One node of a move."""

    name: str
    engine: Engine

    def begin(self) -> AbstractContextManager[Connection]:
        """Begin a transaction, which is committed at the end of the block."""
        return self.engine.begin()

    @contextmanager
    def autocommit(self) -> Iterator[Connection]:
        """Yield a connection in autocommit mode: each statement is a transaction."""
        with self.engine.connect() as connection:
            yield connection.execution_options(isolation_level="AUTOCOMMIT")

    def parameters(self) -> dict[str, str]:
        """Return libpq's parameters to connect from another process, with the password if one was used."""
        with self.engine.connect() as connection:
            info = driver_connection(connection).info
            found = {name: value for name, value in info.get_parameters().items() if name in _PASSED_ON}
            found |= {"host": info.host, "port": str(info.port), "dbname": info.dbname, "user": info.user}
            return found | ({"password": info.password} if info.password else {})

    def end_sessions(self, name: str, *, dry_run: bool = False) -> None:
        """End other clients' sessions with this name, and wait for their end; a dry run connects."""
        with self.autocommit() as connection:
            if dry_run:
                return
            connection.execute(
                text("""
                    select pg_terminate_backend(pid, 10000) from pg_stat_activity
                    where application_name = :name and pid <> pg_backend_pid()
                      and backend_type = 'client backend'"""),
                {"name": name},
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """The nodes that a shard is moved from and to.

    ``schema`` is the shard's schema on both, ``epoch`` that of the lease that their sessions require.
    """

    shard: int
    schema: str
    source: Side
    target: Side
    epoch: UUID | None = None

    def __str__(self) -> str:
        return f'shard {self.shard} from node "{self.source.name}" to "{self.target.name}"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """The catalog's records that a move needs, read once."""

    cluster: UUID
    schema_prefix: str
    placement: Placement
    login: URL

    @classmethod
    def read(cls, catalog: Catalog) -> Self:
        """Read the directory as it is now."""
        description = catalog.describe()
        return cls(
            cluster=description.cluster,
            schema_prefix=description.schema_prefix,
            placement=catalog.placement(),
            login=catalog.url,
        )

    @contextmanager
    def sides(
        self,
        shard: int,
        source: str,
        target: str,
        *,
        name: str,
        epoch: UUID | None = None,
        lock_timeout_ms: int | None = None,
    ) -> Iterator[Sides]:
        """Yield both nodes of a move, not connected yet. Sessions there are called ``name``.

        With ``epoch`` they work under the shard's lease: see :func:`guard`. ``lock_timeout_ms``: how long
        they wait for a lock; by default as long as it takes.

        Raises:
            ClusterConflict: a node was removed from the catalog.
        """
        for node in (source, target):
            if node not in self.placement.nodes:
                raise unknown_node(node, self.placement.nodes)
        settings = {} if lock_timeout_ms is None else {"lock_timeout": f"{lock_timeout_ms}ms"}
        with move_nodes(self.placement, self.login, name=name, settings=settings) as nodes:
            if epoch is not None:
                for node in (source, target):
                    guard(nodes[node], shard, epoch)
            yield Sides(
                shard=shard,
                schema=schema_name(self.schema_prefix, shard),
                source=Side(name=source, engine=nodes[source]),
                target=Side(name=target, engine=nodes[target]),
                epoch=epoch,
            )


def move_nodes(
    placement: Placement, login: URL, *, name: str, settings: Mapping[str, str] | None = None
) -> Nodes:
    """Return the nodes of a cluster for a mover to work on, not connected yet; with further settings."""
    return Nodes(
        placement.nodes,
        login,
        application_name=name,
        connections=_CONNECTIONS,
        durable=True,
        settings=SESSION | dict(settings or {}),
    )


def guard(engine: Engine, shard: int, epoch: UUID) -> None:
    """Let an engine's transactions, and each new connection, require the shard's lease by its epoch.

    A statement in autocommit mode is guarded by its connection: a command that takes the lease over ends the
    sessions that are connected then.
    """

    def require(connection: psycopg.Connection[Any], _record: object) -> None:
        autocommit, connection.autocommit = connection.autocommit, True
        try:
            connection.execute(_REQUIRE, [shard, epoch])
        except psycopg.Error as error:
            ours = from_database(
                error.sqlstate, error.diag.message_primary or "", error.diag.message_hint or ""
            )
            raise (ours or error) from None
        connection.autocommit = autocommit

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        if not is_autocommit(connection):
            # Not by a cursor of the server, whatever the statement to come asks for.
            plainly = {"stream_results": False}
            connection.exec_driver_sql(_REQUIRE, (shard, epoch), execution_options=plainly).close()

    on_connect(engine, require)


_REQUIRE: Final = "select shardids.require_lease(%s, %s::uuid)"


_COPY = text("""
    select state, arrived, timeline is not distinct from shardids.timeline() as is_own
    from shardids.shard where id = :shard for update""")


def refuse_other_copy(sides: Sides, *, is_begun: bool) -> None:
    """Refuse a target whose copy of the shard is not this move's, or is from before a promotion.

    A promoted standby may lack changes, or all of the copy, that the old server had confirmed and that the
    source does not send again. In place of the copy it may have the old copy that an earlier move left
    behind, with the rows of that time.

    ``is_begun`` says that the move's copy was created, in place of any old one.

    Raises:
        MoveRefused: the target has such a copy.
    """
    with sides.target.autocommit() as target:
        copy = target.execute(_COPY, {"shard": sides.shard}).one_or_none()
    if copy is None or copy.state == "moved":
        if is_begun:
            raise _promoted(sides)
    elif not copy.is_own:
        raise _promoted(sides)


def refuse_partial_copy(target: Connection, sides: Sides) -> None:
    """Refuse a target that does not have all of this move's copy; locks the shard's row.

    Call it in the transaction that activates the target: within it, the server can't turn into another one.

    Raises:
        MoveRefused: the target lacks part of the copy.
    """
    copy = target.execute(_COPY, {"shard": sides.shard}).one_or_none()
    is_whole = copy is not None and (
        copy.state == "active" or (copy.state == "fenced" and copy.arrived == "all")
    )
    if copy is None or not is_whole or not copy.is_own:
        raise _promoted(sides)


def _promoted(sides: Sides) -> MoveRefused:
    return MoveRefused(
        f'the move of shard {sides.shard} can\'t be resumed: on node "{sides.target.name}" a standby'
        " was promoted meanwhile, which may lack a part of the copy",
        hint="Undo the move with --abort, then start it again.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """The number of rows of a table, and a hash of them; no hash of a partitioned table."""

    rows: int
    digest: str | None


class RowComparison:
    """The target's rows as they are now, to compare later with the source's, which no longer change.

    Create it after writes have stopped on the source and before they start on the target: it takes a
    snapshot of the target, and keeps it until the end of the block.
    """

    def __init__(self, sides: Sides) -> None:
        self._sides = sides
        self._kept = ExitStack()
        self._target = self._kept.enter_context(
            reading_as_reader(
                sides.target.engine, f'node "{sides.target.name}"', isolation_level="REPEATABLE READ"
            )
        )
        self._target.take_snapshot()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._kept.close()

    def rows(self) -> int:
        """Return how many rows were compared; all are the same on both nodes.

        Raises:
            MoveFailed: a table differs.
        """
        source = self._sides.source
        with reading_as_reader(source.engine, f'node "{source.name}"') as reader:
            original = digests(reader, source, self._sides.shard)
        copy = digests(self._target, self._sides.target, self._sides.shard)
        for table in sorted(original.keys() | copy.keys()):
            there, here = original.get(table), copy.get(table)
            if there != here:
                a, b = self._sides.source.name, self._sides.target.name
                raise MoveFailed(
                    f'table {table} differs: {_shown(there)} on node "{a}", {_shown(here)} on "{b}"',
                    hint=f'The shard has moved. Its old copy on "{a}" is as it was then; don\'t purge it.',
                )
        return sum(row.rows for row in original.values() if row.digest is not None)


# Through a partitioned table rows are only counted, so that a partition which is missing is noticed.
_COUNT = sql.SQL("select count(*) as rows, null as digest from {}")
_DIGEST = sql.SQL(
    "select count(*) as rows,"
    " coalesce(sum(hashtextextended(format('%s', t.*), 0)::numeric), 0)::text as digest from only {} t"
)
_TABLES = text("""
    select n.nspname::text as schema, c.relname::text as name, c.relkind = 'p' as is_parent
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where c.oid = any (shardids.tables_of(:shard))""")


def digests(reader: Reader, side: Side, shard: int) -> Mapping[str, Digest]:
    """Return the number of rows of each table of a shard, and a hash of them in any order.

    Raises:
        MissingPrivilege, StatementFailed: a table can't be read.
    """
    with side.autocommit() as connection:
        tables = connection.execute(_TABLES, {"shard": shard}).all()
    queries = [
        (_COUNT if one.is_parent else _DIGEST).format(sql.Identifier(one.schema, one.name)).as_string()
        for one in tables
    ]
    answers = reader.read(queries, statement_timeout="0")
    found: dict[str, Digest] = {}
    for one, answer in zip(tables, answers, strict=True):
        if isinstance(answer, Refused):
            raise reader.error(answer, f"{one.schema}.{one.name}")
        found[f"{one.schema}.{one.name}"] = Digest(**answer[0])
    return found


def _shown(row: Any) -> str:
    if row is None:
        return "no table"
    return counted(row.rows, "row") + (f" (digest {row.digest})" if row.digest is not None else "")
