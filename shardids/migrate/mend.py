"""Indexes that are built or dropped CONCURRENTLY: what a failed or killed one leaves behind is put right."""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy import Connection, Engine, event

_INDEX = re.compile(
    r"""^\s*(?P<verb>create\s+(?:unique\s+)?|drop\s+)index\s+concurrently\s+
        (?P<if>if\s+(?:not\s+)?exists\s+)?(?P<name>(?:"(?:[^"]|"")+"|[\w$]+))""",
    re.IGNORECASE | re.VERBOSE,
)


def is_concurrent(statement: str) -> bool:
    """Whether a statement builds or drops an index CONCURRENTLY: it waits for others, and nobody for it."""
    return _INDEX.match(statement) is not None


def if_still_needed(statement: str) -> str:
    """Such a statement, so that it does nothing if a killed run has done it; others as they are."""
    index = _INDEX.match(statement)
    if index is None or index["if"]:
        return statement
    words = "if exists " if index["verb"].lower().startswith("drop") else "if not exists "
    return statement[: index.start("name")] + words + statement[index.start("name") :]


def mend_indexes(engine: Engine) -> None:
    """Has an engine drop an invalid index before it builds one of the same name CONCURRENTLY."""
    event.listen(engine, "before_cursor_execute", _drop_if_invalid)


def _drop_if_invalid(
    connection: Connection,
    _cursor: object,
    statement: str,
    _parameters: object,
    _context: object,
    _many: bool,
) -> None:
    index = _INDEX.match(statement)
    if index is None or index["verb"].lower().startswith("drop"):
        return
    driver: Any = connection.connection.dbapi_connection
    with driver.cursor() as cursor:
        cursor.execute(
            "select 1 from pg_index where indexrelid = to_regclass(%s) and not indisvalid", [index["name"]]
        )
        if cursor.fetchone():
            cursor.execute(f"drop index concurrently {index['name']}".encode())
