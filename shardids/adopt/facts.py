"""All that is known of a source when findings are made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from psycopg import sql

from shardids.adopt.checks import Checked
from shardids.adopt.inventory import Column, ForeignKey, Inventory, Table
from shardids.adopt.paths import SPLIT, Sorted, Way, Wishes
from shardids.adopt.plan import Finding, Kind, Severity


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The inventory, how its tables are sorted, and what their rows say.

    ``skips``: why no rows were read.
    """

    inventory: Inventory
    wishes: Wishes
    sorted: Sorted
    checked: Mapping[str, Checked]
    skips: str | None = None

    def split(self) -> Iterator[tuple[Table, Way]]:
        """Yields the tables whose rows are split, with how these find their keys."""
        for name, way in self.sorted.ways.items():
            yield self.inventory.tables[name], way

    def copied(self) -> Iterator[Table]:
        """Yields the tables whose rows are copied: those that are split, and reference tables."""
        for name, table in self.inventory.tables.items():
            if self.sorted.kind(name) is not Kind.LOOSE:
                yield table

    def is_split(self, table: str) -> bool:
        """Returns whether a table's rows are split."""
        return self.sorted.kind(table) in SPLIT

    @cached_property
    def root_key(self) -> Column:
        """Returns the column of the root that holds the key."""
        return self.inventory.tables[self.wishes.root].columns[self.wishes.root_key]


def find(severity: Severity, subject: str, reason: str, remedy: str) -> Finding:
    """Returns a finding."""
    return Finding(severity=severity, subject=subject, reason=reason, remedy=remedy)


def column_name(table: str, *columns: str) -> str:
    """Returns columns with their table's name, as SQL writes it."""
    if len(columns) == 1:
        return f"{table}.{quoted(columns[0])}"
    return f"{table} ({', '.join(map(quoted, columns))})"


def foreign_key_name(key: ForeignKey) -> str:
    """Returns a foreign key's columns with their table's name."""
    return column_name(key.table, *key.columns)


def quoted(name: str) -> str:
    """Returns an identifier as SQL writes it, in quotes only if it needs them."""
    is_plain = name.isascii() and name.isidentifier() and name.islower()
    return name if is_plain else sql.Identifier(name).as_string()


def id_column(table: Table) -> Column | None:
    """Returns the primary key's column, if it is one of an integer type or uuid."""
    if len(table.primary_key) != 1:
        return None
    column = table.columns[table.primary_key[0]]
    return column if column.family in ("integer", "uuid") else None


_MOST_NAMES = 8


def some_names(names: list[str]) -> str:
    """Returns names for a message: some of them, and how many more there are."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")
