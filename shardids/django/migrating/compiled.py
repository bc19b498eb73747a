"""What the runner plays on a shard: migrations as SQL, once for each set that shards have run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from threading import Lock
from typing import Final

from psycopg import sql
from sqlalchemy import Engine

from shardids.django.migrating.history import History
from shardids.django.migrating.rehearsal import BETWEEN, Rehearsed, rehearse
from shardids.migrate.compiled import Compiled, Part, Stage, recorded
from shardids.migrate.environment import VERSION_TABLE
from shardids.migrate.plan import Route
from shardids.migrate.player import is_concurrent

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
        """Returns a digest of the file and the number of parts; of their SQL if there is no file."""
        if self.hash is None:
            return super().digest(count)
        return sha256(f"{self.hash} {len(self.parts)}".encode()).hexdigest()[:12]


class Compiler:
    """Compiles routes, each once. Safe to share between threads.

    Args:
        history: the migrations of the code.
        engine: that of the node on which they are rehearsed.
        is_fake: whether migrations are only recorded.
    """

    def __init__(self, history: History, engine: Engine, *, is_fake: bool = False) -> None:
        self._history = history
        self._engine = engine
        self._is_fake = is_fake
        self._made: dict[Route, Compiled] = {}
        self._lock = Lock()

    def compile(self, route: Route) -> Compiled:
        """Returns the SQL of a route. Raises as :func:`shardids.django.migrating.rehearsal.rehearse` does."""
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
    """Yields the parts of a migration: an index that is built CONCURRENTLY is one outside a transaction."""
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
