"""Asks several shards one question: one statement a node, the nodes at once, their rows merged."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import psycopg
from sqlalchemy import ARRAY, Connection, Enum, TypeDecorator
from sqlalchemy.exc import DBAPIError
from sqlalchemy.util import await_only, greenlet_spawn

from shardids.client.routing.merging import MergePlan
from shardids.client.routing.replay import STAND_IN, Capture, Replay, Row

ANY_SHARD = "shardids_any_shard"
"""The schema that a statement is compiled with, to be replaced by each shard's."""

_PARAMETER = re.compile(r"%%|%\(([^)]+)\)s")
"""A parameter, its name the group, or a percent sign that stands for itself."""
_MOST_THREADS = 32

T = TypeVar("T")


class Question(NamedTuple):
    """What one shard is asked: compiled SQL, which questions may share, and the shard's schema."""

    schema: str
    compiled: Capture


def compiled(connection: Connection, statement: Any, parameters: Any) -> Capture:
    """Compiles a statement for any shard, with the engine's cache; nothing is sent."""
    capture = Capture()
    options = {STAND_IN: capture, "schema_translate_map": {None: ANY_SHARD}}
    options |= {"stream_results": False, "yield_per": None}
    connection.execute(statement, parameters, execution_options=options).close()
    return capture


def gather(plan: MergePlan, asked: Mapping[Connection, Sequence[Question]]) -> Replay:
    """Returns the answer of all shards, to be loaded as the result of the application's statement.

    Args:
        plan: how to combine the shards' rows.
        asked: the questions, by the session's connection to the node that holds the shards.
    """
    parts = [
        partial(fetched, connection, *node_statement(plan, questions))
        for connection, questions in asked.items()
    ]
    if plan.locks:
        # In one order, as others do: two that lock on all nodes at once would wait for each other for ever.
        answers = [part() for part in parts]
    else:
        answers = _awaited(parts) if next(iter(asked)).dialect.is_async else together(parts)
    places, kept, description = split_columns(plan, answers[0][1])
    rows = plan.merged([rows for rows, _ in answers], places)
    if places:
        rows = [[row[place] for place in kept] for row in rows]
    return Replay.of(rows, description)


def split_columns(plan: MergePlan, description: Sequence[Any]) -> tuple[list[int], list[int], list[Any]]:
    """Returns the places of the plan's keys, those of all else, and the description of that."""
    found = {column[0]: place for place, column in enumerate(description)}
    keys = [found[name] for name in plan.key_names]
    kept = [place for place in range(len(description)) if place not in keys]
    return keys, kept, [description[place] for place in kept]


def node_statement(plan: MergePlan, questions: Sequence[Question]) -> tuple[str, dict[str, Any]]:
    """One statement, and its parameters, for all shards of a node: the branches, joined by UNION ALL."""
    # PostgreSQL gives a parameter one type, and each shard has enums of its own.
    alike = len({id(one.compiled) for one in questions}) == 1 and not questions[0].compiled.sends_enums
    branches, parameters = _alike(questions) if alike else _unlike(questions)
    if len(branches) == 1:
        return branches[0], parameters
    columns = questions[0].compiled.columns
    # PostgreSQL locks rows in a part of FROM, not in a part of UNION.
    sql = "\nUNION ALL ".join(
        _with_types_in_common(branch, columns, always=plan.locks) for branch in branches
    )
    if plan.keys:
        names = (key.sql(name) for key, name in zip(plan.keys, plan.key_names, strict=True))
        sql += f"\nORDER BY {', '.join(names)}"
    if plan.limit is not None and not plan.folds:
        sql += f"\nLIMIT {plan.limit + plan.offset:d}"
    return sql, parameters


def _with_types_in_common(branch: str, columns: Sequence[tuple[str, Any]], *, always: bool) -> str:
    """Casts what each shard has a type of its own for: PostgreSQL takes no union of two shards' enums."""
    casts = [_cast(type_) for _, type_ in columns]
    if not (always or any(casts)):
        return branch
    names = ['"{}"'.format(name.replace('"', '""').replace("%", "%%")) for name, _ in columns]
    selected = ", ".join(
        f"c{n}{cast} AS {name}" for n, (name, cast) in enumerate(zip(names, casts, strict=True))
    )
    given = ", ".join(f"c{n}" for n in range(len(names)))
    return f"(SELECT {selected} FROM {branch} AS one ({given}))"  # noqa: S608 -- SQLAlchemy's own SQL


def _cast(type_: Any) -> str:
    while isinstance(type_, TypeDecorator):
        type_ = type_.impl_instance
    if isinstance(type_, ARRAY):
        return _cast(type_.item_type) and "::text[]"
    return "::text" if isinstance(type_, Enum) and type_.native_enum else ""


def _alike(questions: Sequence[Question]) -> tuple[list[str], dict[str, Any]]:
    sql, parameters = _without_integers(questions[0].compiled)
    before = f"{ANY_SHARD}."
    return [f"({sql.replace(before, f'{question.schema}.')})" for question in questions], parameters


def _unlike(questions: Sequence[Question]) -> tuple[list[str], dict[str, Any]]:
    """Branches whose parameters differ: each has its own names for them."""
    branches: list[str] = []
    parameters: dict[str, Any] = {}
    for number, question in enumerate(questions):
        sql, mine = _without_integers(question.compiled)
        prefix = f"shard_{number}_"
        sql = _PARAMETER.sub(lambda m, p=prefix: f"%({p}{m[1]})s" if m[1] else m[0], sql)  # type: ignore[misc]  # m is a match
        branches.append(f"({sql.replace(f'{ANY_SHARD}.', f'{question.schema}.')})")
        parameters |= {f"{prefix}{name}": value for name, value in mine.items()}
    return branches, parameters


def _without_integers(compiled: Capture) -> tuple[str, dict[str, Any]]:
    """Returns the SQL with its integers inlined: the driver's work grows with the number of parameters."""
    integers = {name: value for name, value in compiled.parameters.items() if type(value) is int}
    if not integers:
        return compiled.sql, compiled.parameters
    sql = _PARAMETER.sub(lambda m: f"({integers[m[1]]})" if m[1] in integers else m[0], compiled.sql)
    return sql, {name: value for name, value in compiled.parameters.items() if name not in integers}


def together(parts: Sequence[Callable[[], T]]) -> list[T]:
    """Does the parts at once, each in a thread, and returns what they do when the last is done.

    Each part has a connection to itself, and nobody else uses it meanwhile. Raises the first part's error.
    """
    futures = [_threads().submit(part) for part in parts[1:]]
    try:
        first = parts[0]()
    finally:
        wait(futures)
    return [first, *(future.result() for future in futures)]


def _awaited(parts: Sequence[Callable[[], T]]) -> list[T]:
    """Returns the same in the event loop, each part in a greenlet, for the connections of an async driver."""

    async def all_of_them() -> list[T | BaseException]:
        return await asyncio.gather(*map(greenlet_spawn, parts), return_exceptions=True)

    found: list[T] = []
    for one in await_only(all_of_them()):
        if isinstance(one, BaseException):
            raise one
        found.append(one)
    return found


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="shardids")


# The threads are the parent's: in the child of a fork nobody would do what they are given.
os.register_at_fork(after_in_child=_threads.cache_clear)


def sent_to(connection: Connection, sql: str, parameters: dict[str, Any], **options: Any) -> Any:
    """Executes a node's statement; ``options`` are execution options."""
    if parameters:
        return connection.exec_driver_sql(sql, parameters, execution_options=options)
    options["no_parameters"] = True
    return connection.exec_driver_sql(sql.replace("%%", "%"), execution_options=options)


def fetched(connection: Connection, sql: str, parameters: dict[str, Any]) -> tuple[list[Row], Any]:
    """Returns the rows of a statement as the driver gives them, and their description."""
    result = sent_to(connection, sql, parameters)
    cursor: Any = result.cursor
    try:
        return cursor.fetchall(), cursor.description
    except psycopg.Error as error:
        # A value that Python does not have, such as a date that is 'infinity'.
        raise DBAPIError.instance(
            sql, parameters, error, psycopg.Error, dialect=connection.dialect
        ) from error
    finally:
        result.close()
