"""Compiles revisions to SQL, once for each starting point, to play on every shard that is there.

Alembic writes SQL in its offline mode. A revision that reads the database, or asks which mode it runs in,
can't be compiled: it needs a connection, and runs through Alembic on each shard.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from decimal import Decimal
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal
from uuid import UUID

from alembic.ddl.postgresql import PostgresqlImpl
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import HeadMaintainer, MigrationContext, RevisionStep
from alembic.util import sqla_compat
from sqlalchemy import Connection, Insert, Table, TableClause, text, types
from sqlalchemy.schema import CreateTable
from sqlalchemy.sql.ddl import DDLElement
from sqlalchemy.types import TypeEngine

from shardids.migrate.environment import Direction, Environment, record
from shardids.migrate.models import OWN_VERSION_TABLE
from shardids.migrate.plan import Heads, Route

Way = Literal["sql", "sql, in parts", "alembic", "sql and alembic"]
"""How a route runs: in one transaction and one round trip; with parts outside a transaction; through Alembic,
in one transaction; through Alembic where needed, the rest in parts."""

_WAYS: Mapping[tuple[bool, bool], Way] = {
    (False, False): "sql",
    (True, False): "sql, in parts",
    (False, True): "alembic",
    (True, True): "sql and alembic",
}
_TRANSACTION = re.compile(
    r"^\s*(begin|start\s+transaction|commit|rollback)(\s+(work|transaction))?\s*;",
    re.IGNORECASE | re.MULTILINE,
)
_BEGIN, _COMMIT = object(), object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """SQL that is sent in one message: in one transaction, or one statement outside any."""

    sql: str
    in_transaction: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One revision's parts; the last one sets the version table to ``end``.

    A revision that needs Alembic has no parts, and ``reason`` says why. ``hash`` is that of its source.
    """

    revision: str
    end: Heads
    parts: tuple[Part, ...]
    reason: str = ""
    hash: str | None = None

    def digest(self, count: int) -> str:
        """Return a digest of the SQL of the first ``count`` parts."""
        return sha256("\0".join(part.sql for part in self.parts[:count]).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A route and how it runs.

    A shard at its start is sent the ``preface``, which creates the version table where it is missing, then
    the ``stages``; ``sql`` is all of it as one text if ``way`` is ``sql``. ``reason`` says why the route
    needs Alembic, if it does. ``remedy`` is the hint for a shard that is half way through something else.
    """

    route: Route
    direction: Direction
    way: Way
    preface: str = ""
    stages: tuple[Stage, ...] = ()
    sql: str = ""
    reason: str = ""
    remedy: str = (
        "Run just that revision as it was: shardids migrate up … (or down …); or repair the shard by hand,"
        " and record where it is with: shardids migrate stamp"
    )


class NeedsConnection(Exception):
    """A revision used something that exists only with a connection."""


class _Recorder(PostgresqlImpl):
    """A recorder of statements, which refuses those that need an answer from the database."""

    def __init__(self, migration: MigrationContext) -> None:
        # Types such as Enum ask for a connection; it writes their DDL to this object, too.
        super().__init__(migration.dialect, migration.connection, True, True, None, migration.opts)
        self.recorded: list[object] = []

    def _exec(
        self, construct: Any, execution_options: Any = None, multiparams: Any = None,
        params: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:  # fmt: skip
        if multiparams is not None or params:
            raise NeedsConnection("it runs a statement with parameters")
        if isinstance(construct, str):
            construct = text(construct)
        if isinstance(construct, Insert):
            # Leaves RETURNING out: nobody reads the rows.
            construct = construct.inline()
        literal = {} if isinstance(construct, DDLElement) else {"compile_kwargs": {"literal_binds": True}}
        # Alembic would turn tabs into spaces, in literals too.
        self.static_output(str(construct.compile(dialect=self.dialect, **literal)).strip() + ";")

    def bulk_insert(
        self, table: TableClause | Table, rows: list[dict[str, Any]], multiinsert: bool = True
    ) -> None:
        """Write the rows as literals; a column without a type gets the value's type."""
        typed = [{name: _literal(table, name, value) for name, value in row.items()} for row in rows]
        super().bulk_insert(table, typed, multiinsert)

    def static_output(self, text: str) -> None:  # Alembic's name
        if text.strip():
            self.recorded.append(text)

    def emit_begin(self) -> None:
        self.recorded.append(_BEGIN)

    def emit_commit(self) -> None:
        self.recorded.append(_COMMIT)

    @property
    def bind(self) -> Connection | None:
        raise NeedsConnection("it calls op.get_bind()")


_LITERALS: Final[Mapping[type, Callable[[], TypeEngine[Any]]]] = {
    str: types.String,
    bool: types.Boolean,
    int: types.BigInteger,
    Decimal: types.Numeric,
    date: types.Date,
    datetime: types.DateTime,
    UUID: types.Uuid,
    type(None): types.String,
}
"""The values whose literal form PostgreSQL reads as it does the parameter that the driver would send."""


def _literal(table: TableClause | Table, name: str, value: object) -> object:
    if not isinstance(table.c[name].type, types.NullType):
        return value
    if type(value) not in _LITERALS:
        raise NeedsConnection(f"column {name} has no type for a value of type {type(value).__name__}")
    return sqla_compat._literal_bindparam(name, value, type_=_LITERALS[type(value)]())


class _Recording:
    """Records the steps of a route, one after the other, inside an environment."""

    def __init__(self, steps: list[RevisionStep], start: Heads) -> None:
        self.stages: list[Stage] = []
        self.version_table = ""
        self._steps = steps
        self._start = start
        self._in_revision = False

    def entered(self, environment: EnvironmentContext) -> None:
        """Intercept the question whether the mode is offline: ``env.py`` may ask it, a revision may not."""
        environment.is_offline_mode = self._is_offline_mode  # type: ignore[method-assign] # called through a proxy of this object

    def _is_offline_mode(self) -> bool:
        if self._in_revision:
            raise NeedsConnection("it asks whether the mode is offline")
        return True

    def work(self, _heads: object, migration: MigrationContext) -> Iterable[RevisionStep]:
        """Stand in for Alembic's own work: records every step, and return none to run."""
        self.version_table = str(CreateTable(migration._version).compile(dialect=migration.dialect)).strip()
        recorder = migration.impl
        if not isinstance(recorder, _Recorder):
            return ()
        maintainer = HeadMaintainer(migration, self._start)
        for step in self._steps:
            recorder.recorded.clear()
            reason = self._record_step(step, recorder)
            maintainer.update_to_step(step)
            self.stages.append(
                Stage(
                    revision=step.revision.revision,
                    end=tuple(sorted(maintainer.heads)),
                    parts=() if reason else tuple(_parts(recorder.recorded)),
                    reason=reason,
                )
            )
        return ()

    def _record_step(self, step: RevisionStep, recorder: _Recorder) -> str:
        """Record the SQL of a step; return an empty string, or why that is impossible."""
        self._in_revision = True
        try:
            if "as_sql" in Path(str(step.revision.module.__file__)).read_text(encoding="utf-8"):
                raise NeedsConnection("it asks whether the mode is offline (as_sql)")
            step.migration_fn()
            if any(isinstance(one, str) and has_transaction(one) for one in recorder.recorded):
                raise NeedsConnection("it has BEGIN or COMMIT in its SQL")
        except Exception as error:  # noqa: BLE001 -- a revision without a connection can raise anything
            message = str(error).strip().split("\n")[0]
            what = message if isinstance(error, NeedsConnection) else f"{type(error).__name__}: {message}"
            return f"revision {step.revision.revision} needs a connection: {what}"
        finally:
            self._in_revision = False
        return ""


def has_transaction(sql: str) -> bool:
    """Return whether SQL begins or ends a transaction, which would not be the shard's."""
    return _TRANSACTION.search(sql) is not None


def _record(migration: MigrationContext) -> None:
    migration.impl = _Recorder(migration)


class Compiler:
    """Compiles routes, each once.

    Args:
        environment: where the revisions are.
        direction: up or down.
    """

    def __init__(self, environment: Environment, direction: Direction) -> None:
        self.environment = environment
        self.direction = direction
        self._made: dict[Route, Compiled] = {}

    def compile(self, route: Route) -> Compiled:
        """Return the SQL of a route, or the reason why it has no SQL."""
        if route not in self._made:
            self._made[route] = self._compile(route)
        return self._made[route]

    def version_table_sql(self) -> str:
        """Return the statement that creates the version table."""
        recording = _Recording([], ())
        self.environment.run(recording.work)
        return recording.version_table + ";"

    def _compile(self, route: Route) -> Compiled:
        steps = self.environment.steps(route.start, route.target, self.direction)
        recording = _Recording(steps, route.start or ())
        self.environment.run(recording.work, entered=recording.entered, configured=_record)
        stages = recording.stages
        preface = recording.version_table + ";" if route.start is None else ""
        reason = next((stage.reason for stage in stages if stage.reason), "")
        in_parts = any(len(stage.parts) > 1 for stage in stages)
        stages = [replace(stage, hash=self.environment.hash_of(stage.revision)) for stage in stages]
        compiled = Compiled(
            route=route,
            direction=self.direction,
            preface=preface,
            way=_WAYS[in_parts, bool(reason)],
            stages=tuple(stages),
            reason=reason,
        )
        if compiled.way != "sql":
            return compiled
        texts = [
            preface,
            *(stage.parts[0].sql for stage in stages),
            *(f"{one};" for one in recorded(self.environment.version_table, self.direction, stages)),
        ]
        return replace(compiled, sql="\n\n".join(text for text in texts if text))


def recorded(version_table: str, direction: Direction, stages: Sequence[Stage]) -> list[str]:
    """Return the statement that records the hashes of revisions that were run; none for shardids' own."""
    if version_table == OWN_VERSION_TABLE or not stages:
        return []
    hashes = {stage.revision: stage.hash for stage in stages}
    return [record(version_table, hashes, {} if direction == "down" else hashes)]


def _parts(statements: Iterable[object]) -> Iterator[Part]:
    in_transaction, texts = True, list[str]()
    for one in [*statements, _COMMIT]:
        if one is _COMMIT:
            if texts:
                yield Part(sql="\n\n".join(texts), in_transaction=True)
            in_transaction, texts = False, []
        elif one is _BEGIN:
            in_transaction = True
        elif in_transaction:
            texts.append(str(one))
        else:
            yield Part(sql=str(one), in_transaction=False)
