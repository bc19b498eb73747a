"""Migrates one shard along its route, over one connection to its node."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final
from uuid import UUID

from alembic.runtime.migration import RevisionStep
from psycopg import sql
from sqlalchemy import Connection, Engine, event, text

from shardids.errors import ClusterConflict, RowsWouldBeLost, ShardBusy, UnknownShard, UnsupportedServer
from shardids.migrate import drops
from shardids.migrate.compiled import Compiled, Part, Stage, recorded
from shardids.migrate.environment import Direction, Environment
from shardids.migrate.plan import Heads, Position, Start
from shardids.pg.connections import has_own_session
from shardids.pg.locks import AdvisoryLock, session_lock

_SHARD: Final = "\0"
"""The mark of a shard's number in a statement that is the same for all: no other part of one can have it."""
_ENTER = sql.SQL(
    "select set_config('lock_timeout', {lock}, true), set_config('statement_timeout', {statement}, true),"
    " shardids.enter_revision({shard}, {table}, {expected}::text[], {epoch}::uuid),"
    " set_config('search_path', shardids.revision_path({shard}), true)"
)
_SESSION = sql.SQL(
    "select set_config('lock_timeout', {lock}, false), set_config('statement_timeout', {statement}, false),"
    " set_config('search_path', shardids.revision_path({shard}), false)"
)
_RETURN = sql.SQL("\nselect shardids.return_leases(array[{}], {}::uuid);")
_MARK = sql.SQL("comment on table {table} is {mark}")
_CONCURRENT_INDEX = re.compile(
    r"""^\s*(?P<verb>create\s+(?:unique\s+)?|drop\s+)index\s+concurrently\s+
        (?P<if>if\s+(?:not\s+)?exists\s+)?(?P<name>(?:"(?:[^"]|"")+"|[\w$]+))""",
    re.IGNORECASE | re.VERBOSE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a statement may wait for a lock, and run, in ms; 0 means no limit."""

    lock_timeout_ms: int = 2000
    statement_timeout_ms: int = 0


def enter(shard: int, version_table: str, expected: Start, limits: Limits, epoch: UUID | None = None) -> str:
    """Return the first statement of a transaction that migrates a shard, without its semicolon.

    ``epoch`` is that of the shard's lease; ``None``: nobody may have one.
    """
    return _entering(version_table, expected, limits, epoch).replace(_SHARD, str(shard))


@lru_cache(maxsize=64)
def _entering(version_table: str, expected: Start, limits: Limits, epoch: UUID | None) -> str:
    """Return the statement of :func:`enter`, with a mark in place of the shard."""
    return _ENTER.format(
        lock=str(limits.lock_timeout_ms),
        statement=str(limits.statement_timeout_ms),
        shard=sql.SQL(_SHARD),
        table=version_table,
        expected=None if expected is None else list(expected),
        epoch=None if epoch is None else str(epoch),
    ).as_string(None)


@lru_cache(maxsize=64)
def _returning(epoch: UUID) -> str:
    """Return the statement that returns the lease of an epoch, with a mark in place of the shard."""
    return _RETURN.format(sql.SQL(_SHARD), str(epoch)).as_string()


def enter_session(shard: int, limits: Limits, *, waits: bool) -> str:
    """Return what prepares a session for a statement outside a transaction, without its semicolon.

    ``waits`` says that the statement is CONCURRENTLY. It waits for other transactions and blocks none of
    them, so ``lock_timeout`` could only make it fail.
    """
    return _SESSION.format(
        lock="0" if waits else str(limits.lock_timeout_ms),
        statement=str(limits.statement_timeout_ms),
        shard=shard,
    ).as_string(None)


def mark(version_table: str, direction: Direction, stage: Stage, count: int) -> list[str]:
    """Return what records ``count`` parts of a revision as done, and after the last its hash.

    The mark is the comment of the version table, so it is moved, dumped and restored with the shard. A
    revision of one part needs none. The statements have no semicolon.
    """
    is_last = count == len(stage.parts)
    statements = recorded(version_table, direction, [stage]) if is_last else []
    if len(stage.parts) > 1:
        words = None if is_last else f"shardids: {direction} {stage.revision} {count} {stage.digest(count)}"
        statements.append(_MARK.format(table=sql.Identifier(version_table), mark=words).as_string(None))
    return statements


def is_concurrent(statement: str) -> bool:
    """Return whether a statement builds or drops an index CONCURRENTLY, which waits but blocks none."""
    return _CONCURRENT_INDEX.match(statement) is not None


def require_own_session(connection: Connection, node: str) -> None:
    """Refuse a pooler, which may send each statement to another session, without settings and locks.

    Raises:
        UnsupportedServer: the connection's server process is not the one that answers.
    """
    if not has_own_session(connection):
        raise UnsupportedServer(
            "revisions with statements outside of a transaction, with Python code or for nodes keep settings"
            f' in their session, and node "{node}" is behind a pooler',
            hint="While they run, give it the server's own address: column url of shardids_catalog.node.",
        )


_REREAD: Final = text("""
    select case when c.oid is not null then shardids.revisions_in(s.schema, c.relname) end as revisions,
           substring(obj_description(c.oid, 'pg_class') from '^shardids: (.*)$') as unfinished
    from shardids.shard s
    join pg_namespace n on n.nspname = s.schema
    left join pg_class c on c.relnamespace = n.oid and c.relname = :table and c.relkind = 'r'
    where s.state <> 'moved' and s.id = :shard""")


class Player:
    """Plays routes on the shards of one node. Threads must not share one.

    Args:
        engine: the node's engine, in autocommit mode.
        version_table: name of the version table in each shard's schema.
        limits: apply to every statement except CONCURRENTLY ones, which block nobody while they wait.
        environment: runs the routes that need Alembic, if there can be any.
        epoch: that of the shards' leases; ``None`` for shards that nobody else knows yet.
        guard: refuses to drop rows; without it, every drop is allowed.
    """

    def __init__(
        self,
        engine: Engine,
        version_table: str,
        limits: Limits,
        environment: Environment | None = None,
        *,
        epoch: UUID | None = None,
        guard: drops.DropGuard | None = None,
    ) -> None:
        self._engine = engine
        self._version_table = version_table
        self._limits = limits
        self._environment = environment
        self._epoch = epoch
        self._guard = guard
        self._admitted = set[drops.Dropped]()
        self._open: Connection | None = None

    def close(self) -> None:
        """Return the connection to the pool."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def play(self, position: Position, compiled: Compiled) -> None:
        """Run a route on a shard.

        Raises:
            RevisionChanged: the shard has left the route's start; nothing was changed.
            RowsWouldBeLost: the guard refused, and the transaction was rolled back.
            ShardBusy: another session is changing it.
            LeaseLost: another command took the shard's lease over.
            UnsupportedServer: the route needs its own session, and the node is behind a pooler.
            ClusterConflict: the shard is half way through another revision, or this one was edited since.
            ShardidsError: a statement failed; its transaction was rolled back.
        """
        self._admitted = set()
        if self._guard is not None:
            # All that the SQL names, before a part of it is committed.
            self._admitted = self._guard.admit(position.shard, named_drops(compiled))
        if compiled.way == "sql" and position.unfinished is None:
            # The lease ends with the transaction: the next command finds the shard free.
            ends = "" if self._epoch is None else _returning(self._epoch).replace(_SHARD, str(position.shard))
            parts = [part.sql for stage in compiled.stages for part in stage.parts]
            self._send_guarded(position.shard, position.heads, parts, compiled.sql, ends)
            return
        with self._locked(self._connection(), position):
            if compiled.way == "alembic":
                finished_parts(position, compiled)
                self._run_alembic(position.shard, position.heads, compiled, only_first=False)
            else:
                self._play_parts(position, compiled)

    def reread(self, position: Position) -> Position:
        """Return the shard's position as it is now.

        Raises:
            UnknownShard: the shard was moved to another node.
        """
        row = (
            self._connection()
            .execute(_REREAD, {"table": self._version_table, "shard": position.shard})
            .one_or_none()
        )
        if row is None:
            raise UnknownShard(
                f'shard {position.shard} has left node "{position.node}"',
                hint="It was moved during the run: run the migration again.",
            )
        heads = None if row.revisions is None else tuple(row.revisions)
        return Position(shard=position.shard, node=position.node, heads=heads, unfinished=row.unfinished)

    def _connection(self) -> Connection:
        if self._open is None or self._open.closed or self._open.invalidated:
            self.close()
            self._open = self._engine.connect()
            event.listen(self._open, "before_cursor_execute", _drop_invalid_index)
        return self._open

    def _send(self, statements: str) -> None:
        # Statements in one message are one transaction; with no_parameters, % is not a placeholder.
        self._connection().execution_options(no_parameters=True).exec_driver_sql(statements)

    def _send_guarded(
        self, shard: int, expected: Start, parts: Sequence[str], statements: str, ends: str
    ) -> None:
        """Send a transaction with the SQL of revisions, ``parts``, in its ``statements``; ``ends`` it.

        One that drops more than is admitted was rolled back, and is sent again once that is admitted.
        """
        opening = self._enter(shard, expected)
        guard = self._guard
        if guard is None or not any(map(drops.may_drop, parts)):
            self._send(opening + statements + ends)
            return
        while True:
            closing = drops.require(shard, self._admitted)
            try:
                self._send(f"{opening}{drops.note(shard)};\n{statements}\n{closing};{ends}")
            except RowsWouldBeLost as error:
                self._admitted |= guard.admit(shard, drops.dropped_in(error))
            else:
                return

    def _enter(self, shard: int, expected: Start) -> str:
        return enter(shard, self._version_table, expected, self._limits, self._epoch) + ";\n"

    @contextmanager
    def _locked(self, connection: Connection, position: Position) -> Iterator[None]:
        """Keep other sessions off the shard, those that this run has lost among them."""
        require_own_session(connection, position.node)
        busy = ShardBusy(
            f'shard {position.shard} is being changed by another session [node "{position.node}"]',
            hint="Wait until it has ended, and run the command again.",
        )
        with session_lock(connection, AdvisoryLock.LEASE, position.shard, taken=lambda: busy):
            yield

    def _play_parts(self, position: Position, compiled: Compiled) -> None:
        heads = position.heads
        done = finished_parts(position, compiled)
        if compiled.preface:
            self._send(self._enter(position.shard, heads) + compiled.preface)
            heads = ()
        for stage in compiled.stages:
            if stage.reason:
                self._run_alembic(position.shard, heads, compiled, only_first=True)
            else:
                self._play_stage(position.shard, heads, compiled.direction, stage, done)
            heads, done = stage.end, None

    def _play_stage(
        self, shard: int, heads: Start, direction: Direction, stage: Stage, done: int | None
    ) -> None:
        for number, part in enumerate(stage.parts):
            if number < (done or 0):
                continue
            if part.in_transaction:
                rest = self._mark(direction, stage, number + 1)
                self._send_guarded(shard, heads, [part.sql], part.sql + rest, "")
            else:
                if number == 0 and done is None:
                    self._send(self._enter(shard, heads) + self._mark(direction, stage, 0))
                self._play_outside(shard, part, resumed=number == done)
                self._send(self._enter(shard, heads) + self._mark(direction, stage, number + 1))

    def _mark(self, direction: Direction, stage: Stage, count: int) -> str:
        statements = mark(self._version_table, direction, stage, count)
        return "".join(f"\n{statement};" for statement in statements)

    def _play_outside(self, shard: int, part: Part, *, resumed: bool) -> None:
        self._send(enter_session(shard, self._limits, waits=is_concurrent(part.sql)))
        self._send(_if_still_needed(part.sql) if resumed else part.sql)

    def _run_alembic(self, shard: int, heads: Start, compiled: Compiled, *, only_first: bool) -> None:
        """Has Alembic run the route from ``heads``, or only its first step; in one transaction if it can."""
        environment = self._environment
        if environment is None:
            raise TypeError("a route that needs Alembic, and no environment to run it in")
        connection = self._connection()
        connection.exec_driver_sql(enter_session(shard, self._limits, waits=False))
        connection.commit()
        # Creates its own version table first: one of that name in the shared schema would be taken for it.
        opening = self._enter(shard, heads) + (compiled.preface if heads is None else "")

        def work(there: Heads, _context: object) -> list[RevisionStep]:
            steps = environment.steps(there, compiled.route.target, compiled.direction)
            return steps[:1] if only_first else steps

        while True:
            # Options stay on the connection. Alembic's statements are compiled for parameters: % is %%.
            connection.execution_options(isolation_level="READ COMMITTED", no_parameters=False)
            try:
                with self._guarding(connection, shard):
                    environment.run(
                        work,
                        connection=connection,
                        opening=lambda: connection.exec_driver_sql(opening),
                    )
            except RowsWouldBeLost as error:
                if self._guard is None:
                    raise
                dropped = drops.dropped_in(error)
            else:
                return
            finally:
                connection.rollback()
                connection.execution_options(isolation_level="AUTOCOMMIT")
            self._admitted |= self._guard.admit(shard, dropped)

    @contextmanager
    def _guarding(self, connection: Connection, shard: int) -> Iterator[None]:
        """Let the transactions of a revision in Python drop no more than is admitted."""
        guard = self._guard
        if guard is None:
            yield
            return
        driver: Any = connection.connection.driver_connection

        def begin(begun: Connection) -> None:
            if not driver.autocommit:
                begun.exec_driver_sql(drops.note(shard))

        def commit(ending: Connection) -> None:
            if driver.autocommit:
                return
            try:
                ending.exec_driver_sql(drops.require(shard, self._admitted))
            except RowsWouldBeLost:
                # For SQLAlchemy the transaction has ended here.
                driver.rollback()
                raise

        def execute(_on: object, _cursor: object, statement: str, *_rest: object) -> None:
            if driver.autocommit:
                guard.admit(shard, drops.dropped_by(statement))

        listeners: list[tuple[str, Callable[..., None]]] = [
            ("begin", begin),
            ("commit", commit),
            ("before_cursor_execute", execute),
        ]
        for name, listener in listeners:
            event.listen(connection, name, listener)
        try:
            yield
        finally:
            for name, listener in listeners:
                event.remove(connection, name, listener)


def named_drops(compiled: Compiled) -> dict[drops.Dropped, str]:
    """Return the tables and columns that the SQL of a route names as dropped, with the revision."""
    return {
        one: stage.revision
        for stage in compiled.stages
        for part in stage.parts
        for one in drops.dropped_by(part.sql)
    }


def finished_parts(position: Position, compiled: Compiled) -> int | None:
    """Return how many parts of the route's first revision the shard has finished; ``None`` if not begun.

    Raises:
        ClusterConflict: the shard is half way through another revision, or this one was edited since.
    """
    if position.unfinished is None:
        return None
    direction, revision, count, digest = (position.unfinished.split(" ") + [""] * 4)[:4]
    stage = compiled.stages[0] if compiled.stages else None
    if stage is not None and (direction, revision) == (compiled.direction, stage.revision):
        done = int(count)
        if done < len(stage.parts) and stage.digest(done) == digest:
            return done
        what = f"revision {revision}, which was edited since"
    else:
        what = f"revision {revision} ({direction})"
    raise ClusterConflict(
        f'shard {position.shard} is half way through {what} [node "{position.node}"]',
        hint=compiled.remedy,
    )


def _if_still_needed(statement: str) -> str:
    """Add IF [NOT] EXISTS to a CONCURRENTLY statement that an interrupted run may have completed."""
    index = _CONCURRENT_INDEX.match(statement)
    if index is None or index["if"]:
        return statement
    words = "if exists " if index["verb"].lower().startswith("drop") else "if not exists "
    return statement[: index.start("name")] + words + statement[index.start("name") :]


def _drop_invalid_index(
    connection: Connection,
    _cursor: object,
    statement: str,
    _parameters: object,
    _context: object,
    _many: bool,
) -> None:
    """Drop the invalid index that a failed CONCURRENTLY left, before one of its name is built again."""
    index = _CONCURRENT_INDEX.match(statement)
    if index is None or index["verb"].lower().startswith("drop"):
        return
    driver: Any = connection.connection.dbapi_connection
    with driver.cursor() as cursor:
        cursor.execute(
            "select 1 from pg_index where indexrelid = to_regclass(%s) and not indisvalid", [index["name"]]
        )
        if cursor.fetchone():
            cursor.execute(f"drop index concurrently {index['name']}".encode())
