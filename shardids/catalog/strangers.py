"""Tables that are left alone, because to read them would run code of others as this role."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Connection, text


def strangers_code(connection: Connection, tables: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Returns what code of others a query of each table, given with its schema, would run; none, no entry.

    To be called in the transaction that reads the others: it locks them until it ends, so that their owners
    add nothing meanwhile. The function of the engine says what counts: ``shardids.strangers_code``.
    """
    names = list(tables)
    found = connection.execute(
        text("""
            select t.schema, t.name, shardids.strangers_code(t.schema, t.name) as code
            from unnest(cast(:schemas as name[]), cast(:names as name[])) t (schema, name)"""),
        {"schemas": [schema for schema, _ in names], "names": [name for _, name in names]},
    )
    return {(row.schema, row.name): row.code for row in found if row.code is not None}
