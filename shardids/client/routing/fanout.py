"""One question to several shards: one statement per node, the nodes at once, their rows merged.

A statement executed with the option :data:`STAND_IN` does not reach the server: a :class:`Capture` keeps its
SQL, and a :class:`Replay` answers it with rows that nodes gave. SQLAlchemy compiles and loads it as ever.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from heapq import merge
from itertools import chain, count, islice, takewhile
from typing import Any, Final, NamedTuple, TypeVar

import psycopg
from sqlalchemy import (
    ARRAY,
    BindParameter,
    Connection,
    Engine,
    Integer,
    Select,
    TypeDecorator,
    bindparam,
    event,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.elements import Label
from sqlalchemy.util import await_only, greenlet_spawn

from shardids.client.routing.aggregates import Fold, folds_of
from shardids.client.routing.orders import OrderKey, Row, in_order, order_keys, ranks, require_selected
from shardids.client.routing.sent import clauses_of, is_native_enum
from shardids.errors import CannotCombine

T = TypeVar("T")

STAND_IN = "shardids_stand_in"
"""The execution option that holds a :class:`Capture` or a :class:`Replay`."""
ANY_SHARD = "shardids_any_shard"
"""The schema that a statement is compiled with, to be replaced by each shard's."""

_PARAMETER = re.compile(r"%%|%\(([^)]+)\)s")
"""A parameter, its name the group, or a percent sign that stands for itself."""
_MOST_THREADS = 32


class Capture:
    """A record of a statement that is not sent.

    Attributes:
        sql: the SQL as the driver takes it.
        parameters: their values by name.
        columns: labels and types of its result's columns.
        compiled: the statement as SQLAlchemy compiled it; the same object for all that are compiled alike.
        names: of the parameters in the SQL, by their keys in the statement.
        multiplies_rows: whether collections are loaded by a join, so that one object is several rows.
        sends_enums: whether a parameter is a native enum, or an array of them.
        spent: whether statements with this option go to the server from now on.
    """

    spent = False
    sql: str
    parameters: dict[str, Any]
    columns: Sequence[tuple[str, Any]] = ()
    compiled: Any
    names: Mapping[str, str]
    multiplies_rows: bool = False
    sends_enums: bool = False

    def answer(self, _cursor: Any, sql: str, parameters: dict[str, Any], context: Any) -> bool:
        """Take the statement without a result."""
        self.sql, self.parameters, self.compiled = _unescaped(sql, parameters), parameters, context.compiled
        state = self.compiled.compile_state
        columns = (one for *_, one, _ in getattr(state, "columns_plus_names", ()))
        self.columns = [(one.name if isinstance(one, Label) else "", one.type) for one in columns]
        self.sends_enums = any(map(is_native_enum, (bind.type for bind in self.compiled.binds.values())))
        self.multiplies_rows = getattr(state, "multi_row_eager_loaders", False)
        self.names = {bind.key: name for bind, name in self.compiled.bind_names.items()}
        if context.extracted_parameters:
            # Those of the statement that was compiled first, whose SQL is used again.
            pairs = zip(context.extracted_parameters, self.compiled.cache_key.bindparams, strict=True)
            self.names = {mine.key: self.names.get(its.key, "") for mine, its in pairs}
        return True

    def narrowed(self, lists: Mapping[str, Sequence[int]]) -> str:
        """Return the SQL with only those values of IN lists that are in these places."""
        sql = self.sql
        for key, places in lists.items():
            # So SQLAlchemy names them. Where it does otherwise, each shard gets the whole list.
            names = (f"{self.names.get(key)}_{number}" for number in count(1))
            values = [f"%({name})s" for name in takewhile(self.parameters.__contains__, names)]
            if len(values) > 1:
                # A cast stands after each of them.
                between = sql[sql.find(values[0]) + len(values[0]) : sql.find(values[1])]
                mine = between.join(values[place] for place in places if place < len(values))
                sql = sql.replace(between.join(values), mine or "NULL")
        return sql


class Replay:
    """An answer of rows to one statement; those that follow from it, such as its loaders', go to the server.

    It is the cursor of the statement's result.

    Args:
        rows: as the driver gives them.
        description: of their columns, as the driver gives it.
        sources: the results that the rows are read from meanwhile.

    Attributes:
        spent: whether it has answered.
    """

    def __init__(self, rows: Iterable[Row], description: Any, sources: Sequence[Any] = ()) -> None:
        self.spent = False
        self.description = description
        self._rows = iter(rows)
        self._sources = sources

    def answer(self, cursor: Any, _sql: str, _parameters: dict[str, Any], context: Any) -> bool:
        """Set the rows as the statement's result, the first time."""
        if self.spent:
            return False
        self.spent = True
        cursor.close()
        context.cursor = self
        return True

    def fetchone(self) -> Row | None:
        """Return the next row."""
        return next(self._rows, None)

    def fetchmany(self, size: int | None = None) -> list[Row]:
        """Return the next rows."""
        return list(islice(self._rows, size))

    def fetchall(self) -> list[Row]:
        """Return the rest of the rows."""
        return list(self._rows)

    def close(self) -> None:
        """End the results on the nodes."""
        for source in self._sources:
            source.close()


def heed_stand_ins(engine: Engine) -> None:
    """Make a new engine, and all that are derived from it, heed :data:`STAND_IN`.

    Once, and before it is used: a listener must not be added while another thread goes through the listeners.
    """

    def answer(cursor: Any, sql: str, parameters: Any, context: Any) -> bool:
        stand_in: Capture | Replay | None = context.execution_options.get(STAND_IN)
        return stand_in is not None and stand_in.answer(cursor, sql, parameters, context)

    event.listen(engine, "do_execute", answer)


# How the rows of several shards become the answer to one SELECT.


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePlan:
    """The way to combine the rows of several shards.

    Attributes:
        branch: the statement for each shard: all rows that can be among the first ``offset + limit``.
        keys: what to merge rows by; none if any order does.
        key_name: the names of the columns that a branch has for merging only, with their number.
        limit, offset: applied to the merged rows.
        folds: for a statement of aggregates, how to fold each column's values; otherwise empty.
        locks: whether it locks rows.
    """

    branch: Select[Any]
    keys: tuple[OrderKey, ...] = ()
    key_name: str = "shardids_key_{}"
    limit: int | None = None
    offset: int = 0
    folds: tuple[Fold, ...] = ()
    locks: bool = False

    @property
    def key_names(self) -> list[str]:
        """The names of the columns to merge by."""
        return [self.key_name.format(number) for number in range(len(self.keys))]

    def merged(
        self, streams: Iterable[Iterable[Row]], places: Sequence[int], *, is_sorted: bool
    ) -> Iterator[Row]:
        """Return the rows of all nodes as one, in the plan's order; ``places`` has the keys.

        If each stream ``is_sorted``, they are read no further than needed.
        """
        if self.folds:
            columns = zip(*chain.from_iterable(streams), strict=True)
            known = ([value for value in values if value is not None] for values in columns)
            folded = [
                fold(values) if values else None for fold, values in zip(self.folds, known, strict=True)
            ]
            rows: Iterator[Row] = iter([folded])
        elif not places:
            rows = chain.from_iterable(streams)
        else:
            keys = list(zip(self.keys, places, strict=True))
            rows = merge(*streams, key=partial(ranks, keys)) if is_sorted else in_order(streams, keys)
        return islice(rows, self.offset, None if self.limit is None else self.offset + self.limit)


def plan(statement: Any, parameters: Any) -> MergePlan:
    """Plan a SELECT that asks several shards; whether its shape is right is for :mod:`shapes` to say.

    Raises:
        CannotCombine: Python can't order, limit or fold the answers; the hint says what to do.
    """
    if not isinstance(statement, Select):
        raise CannotCombine(
            f"a {type(statement).__name__} can't be sent to several shards",
            hint='Name the shard: bind_arguments={"shard_id": number}; or write one select() per part.',
        )
    clauses = clauses_of(statement)
    if clauses.fetch is not None:
        raise CannotCombine("FETCH over several shards is not supported", hint="Use limit().")
    limit = _number(clauses.limit, parameters, "LIMIT")
    offset = _number(clauses.offset, parameters, "OFFSET") or 0
    folds = folds_of(statement)
    if folds:
        # One row a shard, and one in the end: there is nothing to sort, and limits are for that one.
        branch = statement.order_by(None).limit(None).offset(None)
        return MergePlan(branch=branch, folds=folds, limit=limit, offset=offset)
    keys = tuple(order_keys(statement))
    if clauses.distinct and not clauses.distinct_on:
        require_selected(statement, keys)
    if offset and not keys:
        raise CannotCombine("OFFSET over several shards needs an order", hint="Add order_by().")
    name = "shardids_key_{}"
    while any(str(column).startswith(name[:-2]) for column in list(statement.selected_columns.keys())):
        name = f"x{name}"
    branch = statement
    if limit is not None or offset:
        branch = branch.limit(None if limit is None else _written_out(limit + offset)).offset(None)
    branch = branch.add_columns(*(key.compared().label(name.format(n)) for n, key in enumerate(keys)))
    return MergePlan(branch=branch, keys=keys, key_name=name, limit=limit, offset=offset, locks=clauses.locks)


def _written_out(number: int) -> Any:
    # PostgreSQL plans for a number that it knows.
    return bindparam("shardids_limit", number, type_=Integer, unique=True, literal_execute=True)


def _number(clause: Any, parameters: Any, what: str) -> int | None:
    if clause is None:
        return None
    value = None
    if isinstance(clause, BindParameter):
        value = (parameters or {}).get(clause.key, clause.effective_value)
    if not isinstance(value, int):
        raise CannotCombine(f"{what} over several shards must be a number, not an expression")
    return value


class Asked(NamedTuple):
    """A question to a node: the schemas of its shards, and the places of each one's values in IN lists."""

    schemas: tuple[str, ...]
    lists: Sequence[Mapping[str, Sequence[int]]] = ()


def compiled(connection: Connection, statement: Any, parameters: Any) -> Capture:
    """Compile a statement for any shard, with the engine's cache; nothing is sent."""
    capture = Capture()
    options = {STAND_IN: capture, "schema_translate_map": {None: ANY_SHARD}}
    options |= {"stream_results": False, "yield_per": None}
    connection.execute(statement, parameters, execution_options=options).close()
    return capture


def answer(
    plan: MergePlan,
    compiled: Capture,
    asked: Mapping[Connection, Asked],
    check: Callable[[], object],
    chunk: int = 0,
) -> Replay:
    """Return the answer of all shards, to be loaded as the result of the application's statement.

    Args:
        plan: how to combine the shards' rows.
        compiled: the statement for each shard.
        asked: the shards, by the session's connection to the node that holds them.
        check: is called before each node is asked, and raises if the node must not be asked any more.
        chunk: how many rows of a node to read at once, by a server-side cursor, as they are used; 0 for all.
    """
    parts = [(connection, *node_statement(plan, compiled, some)) for connection, some in asked.items()]
    results: list[Any] = []
    streams: list[Iterable[Row]]
    if chunk:
        try:
            for part in parts:
                check()
                results.append(sent_to(*part, stream_results=True))
        except BaseException:
            for one in results:
                one.close()
            raise
        streams = [chain.from_iterable(iter(partial(one.fetchmany, chunk), [])) for one in results]
        description = results[0].cursor.description
    else:

        def ask(*part: Any) -> tuple[list[Row], Any]:
            check()
            return fetched(*part)

        fetch = [partial(ask, *part) for part in parts]
        if plan.locks:
            # In one order, as others do: two that lock on all nodes at once would wait for each other.
            answers = [one() for one in fetch]
        else:
            answers = at_once(fetch, is_async=parts[0][0].dialect.is_async)
        streams, description = [rows for rows, _ in answers], answers[0][1]
    found = {column[0]: place for place, column in enumerate(description)}
    places = [found[name] for name in plan.key_names]
    # PostgreSQL's sort leaves equal rows in any order, and those of one object have the order of a branch.
    is_sorted = bool(chunk) or (len(streams) == 1 and not compiled.multiplies_rows)
    rows = plan.merged(streams, places, is_sorted=is_sorted)
    if places:
        kept = [place for place in range(len(description)) if place not in places]
        rows = ([row[place] for place in kept] for row in rows)
        description = [description[place] for place in kept]
    return Replay(rows, description, results)


def node_statement(plan: MergePlan, compiled: Capture, asked: Asked) -> tuple[str, dict[str, Any]]:
    """One statement, and its parameters, for all shards of a node: the branches, joined by UNION ALL."""
    form = _Form.of(plan, compiled) if len(asked.schemas) > 1 else _ALONE
    if not (asked.lists or compiled.sends_enums):
        return _of_equal_branches(form, compiled.sql, asked.schemas), compiled.parameters
    branches: list[str] = []
    parameters: dict[str, Any] = {}
    for number, schema in enumerate(asked.schemas):
        # PostgreSQL gives a parameter one type, and each shard has enums of its own.
        prefix = f"shard_{number}_" if compiled.sends_enums else ""
        lists = asked.lists[number] if asked.lists else {}
        sql, mine = _written(compiled.narrowed(lists), compiled.parameters, prefix)
        parameters |= mine
        branches.append(_in_schema(sql, schema))
    return _unescaped(form.union(branches), parameters), parameters


def _unescaped(sql: str, parameters: Mapping[str, Any]) -> str:
    """Return SQL as the driver takes it: a percent sign stands for itself where there are no parameters."""
    return sql if parameters else sql.replace("%%", "%")


class _Form(NamedTuple):
    """The form of a node's branches as one statement.

    Attributes:
        columns: the name of each of a branch's columns, with its cast; empty if a branch is left as it is.
        end: ORDER BY and LIMIT of them all.
    """

    columns: tuple[str, ...] = ()
    end: str = ""

    @classmethod
    def of(cls, plan: MergePlan, compiled: Capture) -> _Form:
        # PostgreSQL takes no union of two shards' enums, and locks rows in a part of FROM, not of UNION.
        casts = [_cast(type_) for _, type_ in compiled.columns]
        columns: tuple[str, ...] = ()
        if plan.locks or any(casts):
            given = (
                name if name in plan.key_names else f"c{n}" for n, (name, _) in enumerate(compiled.columns)
            )
            columns = tuple(
                f"c{n}{cast} AS {name}" for n, (name, cast) in enumerate(zip(given, casts, strict=True))
            )
        end = ""
        if plan.keys and not compiled.multiplies_rows:
            names = (key.sql(name) for key, name in zip(plan.keys, plan.key_names, strict=True))
            end += f"\nORDER BY {', '.join(names)}"
        if plan.limit is not None and not plan.folds:
            end += f"\nLIMIT {plan.limit + plan.offset:d}"
        return cls(columns, end)

    def union(self, branches: Iterable[str]) -> str:
        """Return one statement of all branches."""
        if self.columns:
            given = ", ".join(f"c{n}" for n in range(len(self.columns)))
            selected = ", ".join(self.columns)
            branches = (f"(SELECT {selected} FROM {one} AS one ({given}))" for one in branches)  # noqa: S608 -- own names
        return "\nUNION ALL ".join(branches) + self.end


_ALONE: Final = _Form()
_MOST_KEPT: Final = 64
"""Statements of nodes that are kept: that of 512 shards has 150 KB."""


@lru_cache(_MOST_KEPT)
def _of_equal_branches(form: _Form, sql: str, schemas: tuple[str, ...]) -> str:
    return form.union(_in_schema(sql, schema) for schema in schemas)


def _in_schema(sql: str, schema: str) -> str:
    return f"({sql.replace(f'{ANY_SHARD}.', f'{schema}.')})"


def _written(sql: str, given: Mapping[str, Any], prefix: str) -> tuple[str, dict[str, Any]]:
    """Return SQL whose parameters' names have a prefix, and the parameters.

    Integers are inlined: the driver's work grows with the number of parameters.
    """

    def name(found: re.Match[str]) -> str:
        if found[1] not in given:
            return found[0]
        value = given[found[1]]
        return f"({value})" if type(value) is int else f"%({prefix}{found[1]})s"

    sql = _PARAMETER.sub(name, sql) if given else sql
    return sql, {f"{prefix}{name}": value for name, value in given.items() if type(value) is not int}


def _cast(type_: Any) -> str:
    while isinstance(type_, TypeDecorator):
        type_ = type_.impl_instance
    if not is_native_enum(type_):
        return ""
    return "::text[]" if isinstance(type_, ARRAY) else "::text"


def at_once(parts: Sequence[Callable[[], T]], *, is_async: bool) -> list[T]:
    """Do the parts at once, and return their results when the last is done.

    Each part has a connection to itself, and nobody else uses it meanwhile; connections of an async driver
    are used in the event loop, others in threads. Raises the first part's error.
    """
    if is_async:
        return _awaited(parts)
    futures = [_threads().submit(copy_context().run, part) for part in parts[1:]]
    try:
        first = parts[0]()
    finally:
        wait(futures)
    return [first, *(future.result() for future in futures)]


def _awaited(parts: Sequence[Callable[[], T]]) -> list[T]:
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
    """Execute a node's statement; ``options`` are execution options."""
    if parameters:
        return connection.exec_driver_sql(sql, parameters, execution_options=options)
    options["no_parameters"] = True
    return connection.exec_driver_sql(sql, execution_options=options)


def fetched(connection: Connection, sql: str, parameters: dict[str, Any]) -> tuple[list[Row], Any]:
    """Return the rows of a statement as the driver gives them, and their description."""
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
