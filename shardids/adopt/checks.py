"""What the rows of a source say about its foreign keys: whether all of them lead to the same key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from psycopg import sql
from sqlalchemy import Connection

from shardids.adopt.inventory import Inventory
from shardids.adopt.paths import Sorted
from shardids.adopt.source import Source
from shardids.adopt.statements import Joins, is_sampled, named, only_row, sampled, unreadable
from shardids.catalog.queries import batches
from shardids.errors import MissingPrivilege, StatementFailed

_BATCH: Final = 64
"""How many tables one transaction reads: it holds a lock on each, and on its indexes, until it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What the rows of a table say about its keys.

    ``rows``: how many were read; ``is_exact``: all of them. ``without_key``: rows that find no key.
    ``further``: by foreign key, how many rows it is filled in, and how many of these lead to another key.
    ``problem``: why the rows could not be read; then nothing else is known.
    """

    rows: int = 0
    is_exact: bool = True
    without_key: int = 0
    further: Mapping[str, tuple[int, int]]
    problem: str = ""


def check_rows(source: Source, inventory: Inventory, sorted_: Sorted, sample_rows: int) -> dict[str, Checked]:
    """Reads the tables of which foreign keys alone do not say that each row has one key."""
    wanted = [
        name
        for name, way in sorted_.ways.items()
        if (way.is_nullable or sorted_.further.get(name)) and inventory.tables[name].heap_bytes
    ]
    found: dict[str, Checked] = {}
    for some in batches(wanted, _BATCH):
        left = list(some)
        while left:
            try:
                with source.rows() as connection:
                    while left:
                        found[left[0]] = _checked(connection, inventory, sorted_, left[0], sample_rows)
                        left.pop(0)
            except (StatementFailed, MissingPrivilege) as error:
                # The transaction is over; what follows is read in another.
                found[left.pop(0)] = Checked(further={}, problem=error.message)
    return found


def _checked(
    connection: Connection, inventory: Inventory, sorted_: Sorted, name: str, sample_rows: int
) -> Checked:
    if problem := unreadable(inventory, sorted_, name):
        return Checked(further={}, problem=problem)
    table = inventory.tables[name]
    further = [key for key in sorted_.further.get(name, ()) if key.is_builtin]
    joins = Joins()
    own = joins.key_of(sorted_.ways[name])
    counts: list[sql.Composable] = [
        sql.SQL("count(*)"),
        sql.SQL("count(*) filter (where {} is null)").format(own),
    ]
    for foreign_key in further:
        theirs = joins.key_beyond(foreign_key, sorted_.ways[foreign_key.referenced_table])
        filled = sql.SQL(" and ").join(
            sql.SQL("t0.{} is not null").format(sql.Identifier(column)) for column in foreign_key.columns
        )
        counts.append(sql.SQL("count(*) filter (where {})").format(filled))
        # Of a row whose other row is not found, nothing says that it has the same key.
        crosses = sql.SQL("{} and {own} is not null and {own} is distinct from {}")
        counts.append(sql.SQL("count(*) filter (where {})").format(crosses.format(filled, theirs, own=own)))
    row = only_row(
        connection,
        sql.SQL("select {} from {} t0{}{}").format(
            sql.SQL(", ").join(counts), named(name), sampled(table, sample_rows), joins.text()
        ),
    )
    pairs = zip(row[2::2], row[3::2], strict=True)
    return Checked(
        rows=row[0],
        is_exact=not is_sampled(table, sample_rows),
        without_key=row[1],
        further={key.name: pair for key, pair in zip(further, pairs, strict=True)},
    )
