"""Statements that SQLAlchemy compiles and loads as ever, but whose trip to the server is made by others.

A statement executed with the option :data:`STAND_IN` does not reach the server: a :class:`Capture` keeps its
SQL, and a :class:`Replay` answers it with rows that were fetched before. What is loaded from them, with which
loader options, stays SQLAlchemy's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

from sqlalchemy import ARRAY, Engine, Enum, TypeDecorator, event
from sqlalchemy.engine.cursor import FullyBufferedCursorFetchStrategy, ResultFetchStrategy

STAND_IN = "shardids_stand_in"
"""The execution option that holds a :class:`Capture` or a :class:`Replay`."""

Row = Sequence[Any]
"""A row as the driver gives it."""


def is_native_enum(type_: Any) -> bool:
    """Returns whether each shard has a type of its own for these values, or for their elements."""
    while isinstance(type_, TypeDecorator | ARRAY):
        type_ = type_.item_type if isinstance(type_, ARRAY) else type_.impl_instance
    return isinstance(type_, Enum) and type_.native_enum


class Capture:
    """Keeps what a statement would have sent.

    Attributes:
        sql: the SQL, in the driver's parameter style.
        parameters: their values by name.
        columns: names and types of its result's columns.
        compiled: what SQLAlchemy made of the statement; the same object for all that are compiled alike.
        multiplies_rows: whether collections are loaded by a join, so that one object is several rows.
        sends_enums: whether a parameter is a native enum, or an array of them.
        spent: whether statements with this option go to the server from now on.
    """

    spent = False
    sql: str
    parameters: dict[str, Any]
    columns: Sequence[tuple[str, Any]] = ()
    compiled: Any
    multiplies_rows: bool
    sends_enums: bool = False

    def answer(self, sql: str, parameters: dict[str, Any], context: Any) -> bool:
        """Takes the statement; there is no result."""
        self.sql, self.parameters, self.compiled = sql, parameters, context.compiled
        self.columns = [(str(column.keyname), column.type) for column in context.compiled._result_columns]
        self.sends_enums = any(map(is_native_enum, (bind.type for bind in context.compiled.binds.values())))
        self.multiplies_rows = getattr(context.compiled.compile_state, "multi_row_eager_loaders", False)
        return True


class Replay:
    """Answers one statement with rows; those that follow from it, such as its loaders', go to the server.

    Attributes:
        spent: whether it has answered.
    """

    def __init__(self, strategy: ResultFetchStrategy) -> None:
        self.spent = False
        self._strategy = strategy

    @classmethod
    def of(cls, rows: Iterable[Row], description: Any) -> Self:
        """Returns one that has all rows, as the driver gives them, with their description."""
        return cls(
            FullyBufferedCursorFetchStrategy(None, alternate_description=description, initial_buffer=rows)
        )

    def answer(self, _sql: str, _parameters: dict[str, Any], context: Any) -> bool:
        """Sets the rows as the statement's result, the first time."""
        if self.spent:
            return False
        self.spent = True
        context.cursor_fetch_strategy = self._strategy
        return True


def heed_stand_ins(engine: Engine) -> None:
    """Makes a new engine, and all that are derived from it, heed :data:`STAND_IN`.

    Once, and before it is used: a listener must not be added while another thread goes through the listeners.
    """
    event.listen(engine, "do_execute", _answer)


def _answer(_cursor: object, sql: str, parameters: Any, context: Any) -> bool:
    stand_in: Capture | Replay | None = context.execution_options.get(STAND_IN)
    return stand_in is not None and stand_in.answer(sql, parameters, context)
