"""Turns migrations into SQL: runs them in an empty schema, writes down what is sent, and rolls it back.

Django's operations ask the database for names of constraints and sequences, so their SQL can't be had without
one. In the rehearsal's schema the tables are what the migrations before have made of them, without rows; next
to nothing is locked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, Final

from django.db import DEFAULT_DB_ALIAS, DatabaseError, connections
from django.db.backends.postgresql import base, schema
from django.db.migrations import Migration, RunPython
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState
from psycopg import sql
from sqlalchemy import Engine

from shardids.catalog.connections import translate
from shardids.django.backend import pools
from shardids.django.migrating.history import History
from shardids.django.router import REHEARSAL, runs_in_shards
from shardids.errors import BadArgument, ShardidsError
from shardids.migrate.compiled import has_transaction
from shardids.migrate.player import is_concurrent

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
    """A migration's statements, each with its semicolon, in the order in which they were sent."""

    name: str
    statements: tuple[str, ...]


class _Recorder(schema.DatabaseSchemaEditor):
    """Runs statements and writes them down."""

    def __init__(self, connection: Any, collect_sql: bool = False, atomic: bool = True) -> None:
        super().__init__(connection, collect_sql, atomic)
        self.recorded: list[str] = []
        self.operation: Operation | None = None
        """The operation that is run, for messages."""
        self._is_sending = False

    def execute(self, sql: Any, params: Any = ()) -> None:
        """Runs a statement; of an index that is built CONCURRENTLY, the plain form."""
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
        """Runs a statement that is not written down."""
        self._is_sending = True
        try:
            with self.connection.cursor() as cursor:
                cursor.execute(text)
        finally:
            self._is_sending = False

    def only_asks(self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        """Lets through what is written down, and questions to PostgreSQL's own catalogs."""
        if not self._is_sending and not _OF_CATALOGS.match(sql):
            raise BadArgument(f"it sends SQL that is not the schema editor's: {' '.join(sql.split())[:100]}")
        return execute(sql, params, many, context)


def rehearse(
    history: History, engine: Engine, applied: Collection[str], pending: Sequence[str]
) -> list[Rehearsed]:
    """Returns the SQL of the pending migrations, for shards that have run those ``applied``.

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
    editor = _Recorder(connection, atomic=False)
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
    """Refuses Python code that would run in shards."""
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
def _errors_named(migration: Migration, editor: _Recorder) -> Iterator[None]:
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
        """Returns psycopg's arguments."""
        params = super().get_connection_params()
        del params["dbname"]
        return {**params, **pools.arguments_of(self._engine.url)}


@contextmanager
def _empty_schema(engine: Engine) -> Iterator[Any]:
    """Yields a connection in a transaction that has made an empty schema; it is rolled back at the end."""
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
            what = "the node on which migrations are rehearsed"
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
