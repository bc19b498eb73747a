"""Migrations as SQL: they run in an empty schema, their statements are recorded, and all is rolled back.

Python code, and operations that send SQL past the schema editor, run on each shard instead.

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

from django.db import DatabaseError, router
from django.db.migrations import Migration, RunPython, SeparateDatabaseAndState
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState
from psycopg import sql
from sqlalchemy import Engine

from shardids.django.migrating.history import ShardHistory
from shardids.django.migrating.on_node import NodeConnection, ShardSchemaEditor
from shardids.django.router import REHEARSAL
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
    """A migration's statements, each with its semicolon, in the order of sending.

    With a ``reason`` they don't do: the migration runs on each shard, from models as they were ``before``.
    ``elsewhere`` describes its operations that are for other databases.
    """

    name: str
    statements: tuple[str, ...] = ()
    reason: str = ""
    before: ProjectState | None = None
    elsewhere: tuple[str, ...] = ()


class _RecordingEditor(ShardSchemaEditor):
    """Runs statements and writes them down."""

    def __init__(self, connection: Any, collect_sql: bool = False, atomic: bool = True) -> None:
        super().__init__(connection, collect_sql, atomic)
        self.recorded: list[str] = []
        self.reason = ""
        """Why the statements don't do, if they don't."""
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

    def watches(self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        """Note statements that are not recorded, except questions to PostgreSQL's own catalogs."""
        if not self._is_sending and not _OF_CATALOGS.match(sql):
            if has_transaction(f"{sql};"):
                raise BadArgument("it has BEGIN or COMMIT in its SQL")
            self.reason = "it sends SQL that is not the schema editor's"
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

    Python code does not run in it.

    Raises:
        BadArgument: a migration can't be for shards; the message names it, the operation, and why.
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
            rehearsed = _run(migration, state, connection)
            if name in pending:
                found.append(rehearsed)
    return found


def _run(migration: Migration, state: ProjectState, connection: NodeConnection) -> Rehearsed:
    editor = _RecordingEditor(connection, atomic=False)
    beginning = state.clone()
    elsewhere = list[str]()
    with _errors_named(migration, editor), connection.execute_wrapper(editor.watches):
        with editor:
            for operation in migration.operations:
                editor.operation = operation
                before = state.clone()
                operation.state_forwards(migration.app_label, state)
                connection.answers.clear()
                _run_operation(operation, migration.app_label, editor, before, state)
                if connection.answers and not any(connection.answers):
                    elsewhere.append(operation.describe())
            editor.operation = None
        if any(map(is_concurrent, editor.recorded)):
            if migration.atomic:
                raise BadArgument(
                    "an index is built CONCURRENTLY in a transaction", hint="Set atomic = False in it."
                )
            if editor.reason:
                raise BadArgument(
                    f"an index is built CONCURRENTLY, and {editor.reason}", hint="Make it two migrations."
                )
        editor.send(BETWEEN)
    return Rehearsed(
        name=str(migration),
        statements=tuple(editor.recorded),
        reason=editor.reason,
        before=beginning if editor.reason else None,
        elsewhere=tuple(elsewhere),
    )


def _run_operation(
    operation: Operation, label: str, editor: _RecordingEditor, before: ProjectState, after: ProjectState
) -> None:
    """Run an operation, except Python code: that runs on each shard."""
    if isinstance(operation, SeparateDatabaseAndState):
        for inner in operation.database_operations:
            then = before.clone()
            inner.state_forwards(label, then)
            _run_operation(inner, label, editor, before, then)
            before = then
    elif operation.reduces_to_sql or getattr(operation, "code", None) is RunPython.noop:
        operation.database_forwards(label, editor, before, after)
    elif router.allow_migrate(REHEARSAL, label, **getattr(operation, "hints", {})):
        editor.reason = "it runs Python code"


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


@contextmanager
def _empty_schema(engine: Engine) -> Iterator[NodeConnection]:
    """Yield a connection in a transaction that has made an empty schema; it is rolled back at the end."""
    name = f"shardids_rehearsal_{token_hex(4)}"
    with NodeConnection(engine, REHEARSAL).used() as connection:
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
        # Its transaction ends with it, uncommitted.
        yield connection


_PREFACE: Final = sql.SQL('create table {} (version_num text collate "C" primary key);')
_INSERT: Final = sql.SQL("insert into {} (version_num) values ({});")
_UNMARK: Final = sql.SQL("comment on table {} is null;")
_DELETE: Final = sql.SQL("delete from {} where version_num = any ({}::text[]);")


_REMEDY: Final = (
    "Run just that migration, with its file as it was: manage.py migrate_shards APP MIGRATION; or repair"
    " the shard by hand, and record the migration: manage.py migrate_shards APP MIGRATION --shards N --fake"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DjangoStage(Stage):
    """A migration's parts. Its SQL may differ from run to run, as a default that is called does.

    With a ``reason`` the last part only records it, and ``before`` is the state of the models that it begins
    with; an empty part before the last says that it needs statements outside a transaction.
    """

    before: ProjectState | None = None
    elsewhere: tuple[str, ...] = ()

    def digest(self, count: int) -> str:
        """Return a digest of the file and the number of parts; of their SQL without a file."""
        if self.hash is None:
            return Stage.digest(self, count)
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
        in_parts = any(len(stage.parts) > 1 or stage.reason for stage in stages)
        return Compiled(
            route=route,
            direction="up",
            way="sql, in parts" if in_parts else "sql",
            preface=preface,
            stages=tuple(stages),
            sql="" if in_parts else _as_one(preface, stages),
            reason=next((stage.reason for stage in stages if stage.reason), ""),
            remedy=_REMEDY,
        )

    def _stages(self, route: Route) -> Iterator[DjangoStage]:
        there = set(route.start or ())
        for one in self._rehearsed(route):
            end = self._history.after(one.name, there)
            texts = list(_recording(one.name, there - end))
            if self._is_fake:
                texts.append(_UNMARK.format(_TABLE).as_string(None))
            parts = tuple(_parts([*one.statements, *texts]))
            if one.reason:
                # The first stands for the Python code.
                recording = Part(sql="\n".join(texts), in_transaction=True)
                is_whole = self._history.of_shards[one.name].atomic
                parts = (recording,) if is_whole else (Part(sql="", in_transaction=False), recording)
            yield DjangoStage(
                revision=one.name,
                end=tuple(sorted(end)),
                parts=parts,
                reason=one.reason,
                hash=self._history.hash_of(one.name),
                before=one.before,
                elsewhere=one.elsewhere,
            )
            there = end

    def _rehearsed(self, route: Route) -> Sequence[Rehearsed]:
        applied = self._history.having_run(route.start or ())
        pending = [] if self._is_fake else [name for name in route.revisions if name not in applied]
        known = {}
        if pending:
            known = {one.name: one for one in rehearse(self._history, self._engine, applied, pending)}
        return [known.get(name) or Rehearsed(name=name) for name in route.revisions]


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
