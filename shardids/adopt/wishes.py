"""What the caller of a plan has said about tables, held against the source: names as SQL writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Final

from shardids.adopt.inventory import Inventory, Table
from shardids.adopt.paths import Wishes
from shardids.errors import BadArgument

_PART: Final = re.compile(r'"((?:[^"]|"")+)"|([^\W\d][\w$]*)')


def read_wishes(
    inventory: Inventory,
    *,
    root: str,
    keys: Sequence[str] = (),
    references: Sequence[str] = (),
    loose: Sequence[str] = (),
) -> Wishes:
    """Finds the tables and columns that are named.

    ``root``: a table, or a column of one that is unique. ``keys``: columns. The others: tables.

    Raises:
        BadArgument: a name is not found, or found twice; the root has no key that rows can be split by; or a
            table is named in two ways.
    """
    table, column = _root(inventory.tables, root)
    given = [_column(inventory.tables, text) for text in keys]
    wishes = Wishes(
        root=table,
        root_key=column,
        keys=dict(given),
        references=frozenset(_table(inventory.tables, text) for text in references),
        loose=frozenset(_table(inventory.tables, text) for text in loose),
    )
    named = [table, *(name for name, _ in given), *wishes.references, *wishes.loose]
    if twice := sorted({name for name in named if named.count(name) > 1}):
        raise BadArgument(
            f"{', '.join(twice)}: more than one of --root, --key, --reference and --loose name it",
            hint="Say of each table one thing.",
        )
    return wishes


def parse_name(text: str) -> list[str]:
    """Parses a name as SQL reads it: parts with dots between them; without quotes, capitals don't count.

    Raises:
        BadArgument: it is no such name.
    """
    parts, position = [], 0
    while match := _PART.match(text, position):
        parts.append(match[1].replace('""', '"') if match[1] else match[2].lower())
        position = match.end()
        if position == len(text):
            return parts
        if text[position] != ".":
            break
        position += 1
    raise BadArgument(
        f"{text!r} is not a name",
        hint="""Write names as in SQL: users, shop.users, '"Order Items"' with the quotes.""",
    )


def _root(tables: Mapping[str, Table], text: str) -> tuple[str, str]:
    parts = parse_name(text)
    if len(parts) == 1 or _matches(tables, parts):
        table = tables[_one(tables, text, parts)]
        if len(table.primary_key) != 1:
            raise BadArgument(
                f"{table.sql} has no primary key of one column to split by",
                hint=f"Name a column that is unique: --root {table.sql}.COLUMN",
            )
        column = table.primary_key[0]
    else:
        name, column = _column(tables, text)
        table = tables[name]
    plain = (key for key in table.keys if not (key.is_partial or key.is_exclusion or key.has_expression))
    if (column,) not in {key.columns for key in plain}:
        raise BadArgument(
            f"{table.sql}.{column} is not unique: rows of two keys could not be told apart",
            hint="Name the primary key, or a column with a unique index.",
        )
    if not table.columns[column].not_null:
        raise BadArgument(
            f"{table.sql}.{column} may be NULL: such rows have no shard", hint="Make it NOT NULL first."
        )
    if table.columns[column].family is None:
        raise BadArgument(
            f"{table.sql}.{column} is of type {table.columns[column].type}, which has no stable hash",
            hint="A key is smallint, integer, bigint, text, varchar or uuid.",
        )
    return table.sql, column


def _column(tables: Mapping[str, Table], text: str) -> tuple[str, str]:
    *parts, column = parse_name(text)
    if not parts:
        raise BadArgument(f"{text} is not a column", hint=f"Name a column with its table: TABLE.{text}")
    table = tables[_one(tables, text, parts)]
    if column not in table.columns:
        raise BadArgument(
            f"{table.sql} has no column {column!r}", hint="It has: " + ", ".join(sorted(table.columns))
        )
    return table.sql, column


def _table(tables: Mapping[str, Table], text: str) -> str:
    return _one(tables, text, parse_name(text))


def _one(tables: Mapping[str, Table], text: str, parts: Sequence[str]) -> str:
    found = _matches(tables, parts)
    if len(found) > 1:
        raise BadArgument(
            f"{text} is more than one table: {', '.join(found)}", hint="Name it with its schema."
        )
    if not found:
        near = get_close_matches(parts[-1], {table.name for table in tables.values()})
        like = [table.sql for table in tables.values() if table.name in near]
        raise BadArgument(
            f"the source has no table {'.'.join(parts)}",
            hint=f"Perhaps {' or '.join(like[:3])}?"
            if like
            else "Names are as in SQL: capitals need quotes.",
        )
    return found[0]


def _matches(tables: Mapping[str, Table], parts: Sequence[str]) -> list[str]:
    match list(parts):
        case [name]:
            return [table.sql for table in tables.values() if table.name == name]
        case [schema, name]:
            return [table.sql for table in tables.values() if (table.schema, table.name) == (schema, name)]
    return []
