"""Reads what numbers the rows of a PostgreSQL master: columns, their sequences, and how far those are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from shardids.catalog.sqlfiles import read_sql
from shardids.errors import BadArgument
from shardids.multimaster.postgresql_session import PostgreSqlSession

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Master:
    """A PostgreSQL database that takes writes; ``url`` may hold a password, which is shown nowhere.

    Raises:
        BadArgument: ``name`` is not a letter followed by letters, digits, _ and -, 40 at most.
    """

    name: str
    url: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise BadArgument(f"{self.name!r} is not a name for a master", hint="For example: a, b, east-1")


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceState:
    """A sequence on one master; ``next_value`` is what the next draw of a new session returns."""

    schema: str
    name: str
    increment: int
    maximum: int
    cycles: bool
    next_value: int
    last_value: int | None

    @property
    def identifier(self) -> sql.Identifier:
        """Returns its name, quoted for a statement."""
        return sql.Identifier(self.schema, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """A column that a sequence numbers, or an integer primary key that none does.

    Attributes:
        schema: the table's schema.
        table: the table.
        column: the column.
        sequence: its sequence, if it has one.
        type_limit: the greatest value that the column and its sequence can hold.
        highest: the greatest value in the table, ``None`` if there is none.
        highest_own: the greatest of the values that the master's offset gives, likewise.
    """

    schema: str
    table: str
    column: str
    sequence: SequenceState | None
    type_limit: int
    highest: int | None
    highest_own: int | None

    @property
    def key(self) -> tuple[str, str, str]:
        """Returns the counter's name, which is the same on every master."""
        return self.schema, self.table, self.column

    @property
    def title(self) -> str:
        """Returns the column in words."""
        return ".".join(self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterState:
    """The counters of one master; ``offset``, from 1, is its place among the masters."""

    name: str
    offset: int
    counters: tuple[Counter, ...]

    def get(self, key: tuple[str, str, str]) -> Counter | None:
        """Returns the counter of that name, if the master has it."""
        return next((counter for counter in self.counters if counter.key == key), None)


def read_masters(masters: Sequence[Master], schemas: Sequence[str] = ()) -> list[MasterState]:
    """Reads all masters, one after the other; their order gives their offsets.

    Raises:
        BadArgument: fewer than two, or two of one name.
        ConnectionFailed, MissingPrivilege: a master can't be reached, or its role may not read the tables.
    """
    check_masters(masters)
    states = []
    for offset, master in enumerate(masters, 1):
        session = PostgreSqlSession(master.url, what=f'master "{master.name}"')
        try:
            counters = _read(session, offset, len(masters), schemas)
        except psycopg.Error as error:
            session.fail(error)
        finally:
            session.close()
        states.append(MasterState(name=master.name, offset=offset, counters=tuple(counters)))
    return states


def check_masters(masters: Sequence[Master]) -> None:
    """Refuses lists that do not name several masters.

    Raises:
        BadArgument: fewer than two, or two of one name.
    """
    names = [master.name for master in masters]
    if len(names) < 2:
        raise BadArgument(f"{len(names)} masters need no offsets", hint="Name two or more: --master NAME=URL")
    for name in names:
        if names.count(name) > 1:
            raise BadArgument(f'two masters are named "{name}"')


def _read(session: PostgreSqlSession, offset: int, masters: int, schemas: Sequence[str]) -> list[Counter]:
    with session.connection.cursor(row_factory=dict_row) as cursor:
        cursor.execute("select set_config('shardids.schemas', %s, false)", (",".join(schemas),))
        cursor.execute(read_sql("multimaster/multimaster.v1").encode())
        found = cursor.fetchall()
    return [_counter(session, row, offset, masters) for row in found]


def _counter(session: PostgreSqlSession, row: dict[str, Any], offset: int, masters: int) -> Counter:
    table, column = sql.Identifier(row["schema"], row["table"]), sql.Identifier(row["column"])
    ((highest, highest_own),) = session.rows(
        sql.SQL(
            "select (select max({column})::bigint from {table}),"
            " (select {column}::bigint from {table} where mod({column}::bigint, %s) = mod(%s, %s)"
            " order by {column} desc limit 1)"
        ).format(column=column, table=table),
        (masters, offset, masters),
    )
    # Read after the table: its rows have drawn their values by then, so a sequence in use is never behind.
    sequence = _sequence(session, row) if row["sequence"] is not None else None
    return Counter(
        schema=row["schema"],
        table=row["table"],
        column=row["column"],
        sequence=sequence,
        type_limit=row["type_limit"],
        highest=highest,
        highest_own=highest_own,
    )


def _sequence(session: PostgreSqlSession, row: dict[str, Any]) -> SequenceState:
    identifier = sql.Identifier(row["sequence_schema"], row["sequence"])
    ((last_value, is_called),) = session.rows(
        sql.SQL("select last_value, is_called from {}").format(identifier)
    )
    return SequenceState(
        schema=row["sequence_schema"],
        name=row["sequence"],
        increment=row["increment"],
        maximum=row["maximum"],
        cycles=row["cycles"],
        next_value=last_value + row["increment"] if is_called else last_value,
        last_value=last_value if is_called else None,
    )
