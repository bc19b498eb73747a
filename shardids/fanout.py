"""Asks several shards one question: one statement a node, the nodes at once, their rows merged."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, islice
from typing import Any, TypeVar

from sqlalchemy import Connection

from shardids.plans import KEY_NAME, Plan
from shardids.replay import STAND_IN, Capture, Replay, Row, prepare

_ANY_SHARD = "shardids_any_shard"
"""The schema that a statement is compiled with, to be replaced by each shard's."""

_PARAMETER = re.compile(r"%%|%\(")
_MOST_THREADS = 32

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What one shard is asked: compiled SQL, which questions may share, and the shard's schema."""

    schema: str
    compiled: Capture


def compiled(connection: Connection, statement: Any, parameters: Any) -> Capture:
    """A statement's SQL for any shard; nothing is sent. The engine's cache of compiled statements is used."""
    prepare(connection.engine)
    capture = Capture()
    options = {STAND_IN: capture, "schema_translate_map": {None: _ANY_SHARD}}
    connection.execute(statement, parameters, execution_options=options).close()
    return capture


def gather(plan: Plan, asked: Mapping[Connection, Sequence[Question]]) -> Replay:
    """The answer of all shards, to be loaded as the result of the application's statement.

    Args:
        plan: how to combine the shards' rows.
        asked: the questions, by the session's connection to the node that holds the shards.
    """

    answers = together(
        [
            partial(_fetched, connection, *node_statement(plan, questions))
            for connection, questions in asked.items()
        ]
    )
    description = answers[0][1]
    places = {column[0]: place for place, column in enumerate(description)}
    keys = [places[KEY_NAME.format(n)] for n in range(len(plan.keys))]
    kept = [place for place in range(len(description)) if place not in keys]
    rows = combined(plan, [rows for rows, _ in answers], keys)
    if keys:
        rows = [[row[place] for place in kept] for row in rows]
    return Replay(rows, [description[place] for place in kept])


def node_statement(plan: Plan, questions: Sequence[Question]) -> tuple[str, dict[str, Any]]:
    """One statement, and its parameters, for all shards of a node: the branches, joined by UNION ALL."""
    shared = len({id(question.compiled) for question in questions}) == 1
    parameters: dict[str, Any] = {}
    branches = []
    for number, question in enumerate(questions):
        prefix = "" if shared else f"shard_{number}_"
        sql = question.compiled.sql.replace(f"{_ANY_SHARD}.", f"{question.schema}.")
        branches.append(f"({_PARAMETER.sub(partial(_renamed, prefix), sql) if prefix else sql})")
        parameters |= {f"{prefix}{name}": value for name, value in question.compiled.parameters.items()}
    if len(branches) == 1:
        return branches[0], parameters
    sql = "\nUNION ALL ".join(branches)
    if plan.keys:
        sql += "\nORDER BY " + ", ".join(
            key.sql(KEY_NAME.format(number)) for number, key in enumerate(plan.keys)
        )
    if plan.limit is not None:
        sql += f"\nLIMIT {plan.limit + plan.offset:d}"
    return sql, parameters


def combined(plan: Plan, answers: Sequence[Sequence[Row]], keys: Sequence[int]) -> list[Row]:
    """The rows of several answers, each in the plan's order, as one.

    Args:
        plan: says by what to merge and how many rows to keep.
        answers: of the nodes, or of the shards.
        keys: where in a row the plan's keys are.
    """
    if plan.folds:
        columns = zip(*chain.from_iterable(answers), strict=True)
        return [[_folded(fold, values) for fold, values in zip(plan.folds, columns, strict=True)]]

    def rank(row: Row) -> tuple[Any, ...]:
        return tuple(key.rank(row[place]) for key, place in zip(plan.keys, keys, strict=True))

    merged: Iterable[Row] = chain.from_iterable(answers)
    if plan.keys and len(answers) > 1:
        merged = heapq.merge(*answers, key=rank)
    end = None if plan.limit is None else plan.offset + plan.limit
    return list(islice(merged, plan.offset, end))


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


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="shardids")


def _fetched(connection: Connection, sql: str, parameters: dict[str, Any]) -> tuple[list[Row], Any]:
    result = connection.exec_driver_sql(sql, parameters)
    cursor: Any = result.cursor
    try:
        return cursor.fetchall(), cursor.description
    finally:
        result.close()


def _renamed(prefix: str, match: re.Match[str]) -> str:
    return match[0] + prefix if match[0] == "%(" else match[0]


def _folded(fold: Callable[[list[Any]], Any], values: Iterable[Any]) -> Any:
    known = [value for value in values if value is not None]
    return fold(known) if known else None
