"""Migrations as SQL: they run in an empty schema, their statements are recorded, and all is rolled back.

Django's operations ask the database for names of constraints and sequences, so their SQL can't be had without
one. In the rehearsal's schema the tables are what the migrations before have made of them, without rows; next
to nothing is locked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from secrets import token_hex
from threading import Lock
from typing import Any, Final

from django.db import DEFAULT_DB_ALIAS, DatabaseError, connections
from django.db.backends.postgresql import base, schema
from django.db.migrations import Migration, RunPython
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState
from psycopg import sql
from sqlalchemy import Engine

from shardids.django.backend import pools
from shardids.django.migrating.history import ShardHistory
from shardids.django.router import REHEARSAL, runs_in_shards
from shardids.errors import BadArgument, ShardidsError
from shardids.migrate.compiled import Compiled, Part, Stage, has_transaction, recorded
from shardids.migrate.environment import VERSION_TABLE
from shardids.migrate.plan import Route
from shardids.migrate.player import is_concurrent
from shardids.pg.connections import translate

_CONCURRENTLY: Final = re.compile(r"\bconcurrently\b", re.IGNORECASE)
_OF_CATALOGS: Final = re.compile(
    r"\s*select\b(?!.*\binto\b).*\bfrom\s+(pg_catalog\.)?pg_\w+", re.IGNORECASE | re.DOTALL
)
_EMPTY_SCHEMA: Final = sql.SQL(
    "set local lock_timeout = '2s'; set local search_path = pg_catalog, pg_temp; create schema {schema};"
    " create sequence {schema}.id_counter;"
    " create function {schema}.next_id() returns bigint language sql as {next_id};"
    " select set_config('search_path', concat_ws(', ', {name},"
    " case when shardids.strangers_in_shared_schema() = '{{}}' then 'public' end), true)"
)
BETWEEN: Final = "SET CONSTRAINTS ALL IMMEDIATE;\nSET CONSTRAINTS ALL DEFERRED;"
"""Between two migrations: what would have been checked at the first one's COMMIT. ALTER TABLE refuses to run
while rows wait for a check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """A migration's statements, each with its semicolon, in the order of sending."""

    name: str
    statements: tuple[str, ...]


class _RecordingEditor(schema.DatabaseSchemaEditor):
    """Runs statements and writes them down."""

    def __init__(self, connection: Any, collect_sql: bool = False, atomic: bool = True) -> None:
        super().__init__(connection, collect_sql, atomic)
        self.recorded: list[str] = []
        self.operation: Operation | None = None
        """The operation that is run, for messages."""
        self._is_sending = False

    def execute(self, sql: Any, params: Any = ()) -> None:
        """Run a statement; of an index that is built CONCURRENTLY, the plain form."""
        text = str(sql if params is None else self.connection.ops.compose_sql(str(sql), params)).strip()
        if not text.strip(";"):
            return
        text = text.rstrip(";")
        # A comment at the end would take the semicolon in.
        text += "\n;" if "--" in text.rpartition("\n")[2] else ";"
        if has_transaction(text):
            raise BadArgument("it has BEGIN or COMMIT in its SQL")
        self.recorded.append(text)
        self.send(_CONCURRENTLY.sub("", text, count=1) if is_concurrent(text) else text)

    def send(self, text: str) -> None:
        """Run a statement that is not written down."""
        self._is_sending = True
        try:
            with self.connection.cursor() as cursor:
                cursor.execute(text)
        finally:
            self._is_sending = False

    def only_asks(self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        """Let recorded statements through, and questions to PostgreSQL's own catalogs."""
        if not self._is_sending and not _OF_CATALOGS.match(sql):
            raise BadArgument(f"it sends SQL that is not the schema editor's: {' '.join(sql.split())[:100]}")
        return execute(sql, params, many, context)


def rehearse(
    history: ShardHistory, engine: Engine, applied: Collection[str], pending: Sequence[str]
) -> list[Rehearsed]:
    """Return the SQL of the pending migrations, for shards that have run those ``applied``.

    Args:
        history: the migrations of the code.
        engine: a node's, whose role may create schemas there.
        applied: names of the migrations whose effect is there.
        pending: names of those to turn into SQL.

    Raises:
        BadArgument: a migration can't be turned into SQL; the message names it, the operation, and why.
        MissingPrivilege: the role may not create schemas.
        ConnectionFailed: the node is down.
    """
    state = ProjectState(real_apps=history.loader.unmigrated_apps)
    found = list[Rehearsed]()
    with _empty_schema(engine) as connection:
        left = {*applied, *pending}
        for migration in history:
            name = str(migration)
            if name not in history.of_shards:
                migration.mutate_state(state, preserve=False)
                continue
            if not left:
                break
            if name not in left:
                continue
            left.discard(name)
            statements = _run(migration, state, connection, is_past=name not in pending)
            if name in pending:
                found.append(Rehearsed(name=name, statements=statements))
    return found


def _run(migration: Migration, state: ProjectState, connection: Any, *, is_past: bool) -> tuple[str, ...]:
    editor = _RecordingEditor(connection, atomic=False)
    with _errors_named(migration, editor), connection.execute_wrapper(editor.only_asks):
        with editor:
            for operation in migration.operations:
                editor.operation = operation
                before = state.clone()
                operation.state_forwards(migration.app_label, state)
                if operation.reduces_to_sql or not is_past:  # else it changed rows, or was faked
                    _check(migration, operation)
                    operation.database_forwards(migration.app_label, editor, before, state)
            editor.operation = None
        if migration.atomic and any(map(is_concurrent, editor.recorded)):
            raise BadArgument(
                "an index is built CONCURRENTLY in a transaction", hint="Set atomic = False in it."
            )
        editor.send(BETWEEN)
    return tuple(editor.recorded)


def _check(migration: Migration, operation: Operation) -> None:
    """Refuse Python code that would run in shards."""
    for inner in getattr(operation, "database_operations", ()):
        _check(migration, inner)
    if operation.reduces_to_sql or getattr(operation, "code", None) is RunPython.noop:
        return
    if runs_in_shards(migration.app_label, **getattr(operation, "hints", {})):
        raise BadArgument(
            "it runs Python code",
            hint="Write it as RunSQL, or as a program over all shards. What is not for shards has"
            " hints={'shards': False}.",
        )


@contextmanager
def _errors_named(migration: Migration, editor: _RecordingEditor) -> Iterator[None]:
    try:
        yield
    except (ShardidsError, DatabaseError, ValueError, NotImplementedError) as error:
        doing = "" if editor.operation is None else f" ({editor.operation.describe()})"
        what = f"{migration}{doing} can't be turned into SQL for shards"
        if isinstance(error, ShardidsError):
            raise BadArgument(f"{what}: {error.message}", hint=error.hint) from error
        raise BadArgument(f"{what}: {str(error).strip().splitlines()[0]}") from error


class _Wrapper(base.DatabaseWrapper):
    """Django's own connection to PostgreSQL, to where an engine connects."""

    def __init__(self, engine: Engine) -> None:
        settings = connections.configure_settings({DEFAULT_DB_ALIAS: {}, REHEARSAL: {"NAME": REHEARSAL}})
        super().__init__(settings[REHEARSAL], REHEARSAL)
        self._engine = engine

    def get_connection_params(self) -> dict[str, Any]:
        """Return psycopg's arguments."""
        params = super().get_connection_params()
        del params["dbname"]
        return {**params, **pools.arguments_of(self._engine.url)}


@contextmanager
def _empty_schema(engine: Engine) -> Iterator[Any]:
    """Yield a connection in a transaction that has made an empty schema; it is rolled back at the end."""
    name = f"shardids_rehearsal_{token_hex(4)}"
    connection = _Wrapper(engine)
    try:
        try:
            connection.connect()
            connection.set_autocommit(False)
            with connection.cursor() as cursor:
                next_id = f"select pg_catalog.nextval('{name}.id_counter')"
                made = _EMPTY_SCHEMA.format(schema=sql.Identifier(name), name=name, next_id=next_id)
                cursor.execute(made.as_string(None))
        except DatabaseError as error:
            what = "the node that rehearses migrations"
            cause: Any = error.__cause__
            raise translate(cause, what=what, url=engine.url) or error from error
        # Operations look it up, to ask what it can do.
        connections[REHEARSAL] = connection
        try:
            yield connection
        finally:
            del connections[REHEARSAL]
    finally:
        # Its transaction ends with it, uncommitted.
        connection.close()


_PREFACE: Final = sql.SQL('create table {} (version_num text collate "C" primary key);')
_INSERT: Final = sql.SQL("insert into {} (version_num) values ({});")
_UNMARK: Final = sql.SQL("comment on table {} is null;")
_DELETE: Final = sql.SQL("delete from {} where version_num = any ({}::text[]);")


_REMEDY: Final = (
    "Run just that migration, with its file as it was: manage.py migrate_shards APP MIGRATION; or repair"
    " the shard by hand, and record the migration: manage.py migrate_shards APP MIGRATION --shards N --fake"
)


class _Stage(Stage):
    """A migration's parts. Its SQL may differ from run to run, as a default that is called does."""

    __slots__ = ()

    def digest(self, count: int) -> str:
        """Return a digest of the file and the number of parts; of their SQL without a file."""
        if self.hash is None:
            return super().digest(count)
        return sha256(f"{self.hash} {len(self.parts)}".encode()).hexdigest()[:12]


class RouteCompiler:
    """Compiles routes, each once. Safe to share between threads.

    Args:
        history: the migrations of the code.
        engine: that of the node that rehearses them.
        is_fake: whether migrations are only recorded.
    """

    def __init__(self, history: ShardHistory, engine: Engine, *, is_fake: bool = False) -> None:
        self._history = history
        self._engine = engine
        self._is_fake = is_fake
        self._made: dict[Route, Compiled] = {}
        self._lock = Lock()

    def compile(self, route: Route) -> Compiled:
        """Return the SQL of a route. Raises as :func:`shardids.django.migrating.rehearsal.rehearse` does."""
        with self._lock:
            if route not in self._made:
                self._made[route] = self._compile(route)
            return self._made[route]

    def _compile(self, route: Route) -> Compiled:
        stages = list(self._stages(route))
        preface = _PREFACE.format(_TABLE).as_string(None) if route.start is None else ""
        in_parts = any(len(stage.parts) > 1 for stage in stages)
        return Compiled(
            route=route,
            direction="up",
            way="sql, in parts" if in_parts else "sql",
            preface=preface,
            stages=tuple(stages),
            sql="" if in_parts else _as_one(preface, stages),
            remedy=_REMEDY,
        )

    def _stages(self, route: Route) -> Iterator[Stage]:
        there = set(route.start or ())
        for one in self._rehearsed(route):
            end = self._history.after(one.name, there)
            texts = list(_recording(one.name, there - end))
            if self._is_fake:
                texts.append(_UNMARK.format(_TABLE).as_string(None))
            yield _Stage(
                revision=one.name,
                end=tuple(sorted(end)),
                parts=tuple(_parts([*one.statements, *texts])),
                hash=self._history.hash_of(one.name),
            )
            there = end

    def _rehearsed(self, route: Route) -> Sequence[Rehearsed]:
        applied = self._history.having_run(route.start or ())
        pending = [] if self._is_fake else [name for name in route.revisions if name not in applied]
        known = {}
        if pending:
            known = {one.name: one for one in rehearse(self._history, self._engine, applied, pending)}
        return [known.get(name) or Rehearsed(name=name, statements=()) for name in route.revisions]


_TABLE: Final = sql.Identifier(VERSION_TABLE)


def _recording(name: str, replaced: Iterable[str]) -> Iterator[str]:
    if gone := sorted(replaced):
        yield _DELETE.format(_TABLE, gone).as_string(None)
    yield _INSERT.format(_TABLE, name).as_string(None)


def _parts(statements: Iterable[str]) -> Iterator[Part]:
    """Yield the parts of a migration: an index that is built CONCURRENTLY is one outside a transaction."""
    texts = list[str]()
    for statement in statements:
        if is_concurrent(statement):
            if texts:
                yield Part(sql="\n\n".join(texts), in_transaction=True)
            texts = []
            yield Part(sql=statement, in_transaction=False)
        else:
            texts.append(statement)
    yield Part(sql="\n\n".join(texts), in_transaction=True)


def _as_one(preface: str, stages: Sequence[Stage]) -> str:
    between = f"\n\n{BETWEEN}\n\n"
    texts = [
        preface,
        between.join(stage.parts[0].sql for stage in stages),
        *(f"{one};" for one in recorded(VERSION_TABLE, "up", stages)),
    ]
    return "\n\n".join(text for text in texts if text)
