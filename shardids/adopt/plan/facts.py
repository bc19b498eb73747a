"""Facts that findings of a plan follow from, and names for messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Final

from psycopg import sql

from shardids.adopt.plan.document import Finding, Kind, Severity
from shardids.adopt.plan.drawing import drawn_keys
from shardids.adopt.plan.guesses import Guess
from shardids.adopt.plan.inventory import ForeignKey, Inventory, Table
from shardids.adopt.plan.paths import Sorted, Way, Wishes
from shardids.adopt.plan.source import Checked
from shardids.pg.definitions import Column


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The inventory, how its tables are sorted, and what their rows say.

    ``skips``: why no rows were read. ``guesses``: what rows say of columns that are called like keys.
    ``highest``: the highest ID of tables that are split.
    """

    inventory: Inventory
    wishes: Wishes
    sorted: Sorted
    checked: Mapping[str, Checked]
    skips: str | None = None
    guesses: Sequence[Guess] = ()
    highest: Mapping[str, int] = field(default_factory=dict)

    def against(self, table: str) -> str:
        """Return what rows say against the guesses for a table, in words, if they say any."""
        found = [one.evidence() for one in self.guesses if one.key.table == table and not one.is_likely]
        return f"; {found[0]}" if found else ""

    def split(self) -> Iterator[tuple[Table, Way]]:
        """Yield the tables whose rows are split, with how these find their keys."""
        for name, way in self.sorted.ways.items():
            yield self.inventory.tables[name], way

    def copied(self) -> Iterator[Table]:
        """Yield the tables whose rows are copied: those that are split, and reference tables."""
        for name, table in self.inventory.tables.items():
            if self.sorted.kind(name) is not Kind.LOOSE:
                yield table

    def is_split(self, table: str) -> bool:
        """Return whether a table's rows are split."""
        return self.sorted.kind(table).is_split

    def drawn_keys(self, table: Table, way: Way) -> dict[str, str | None]:
        """Return the defaults in the shards of the columns that decide where clients look for a row."""
        one, root_key = id_column(table), way.key if way.kind is Kind.ROOT else None
        return drawn_keys(table.columns, one.name if one else None, root_key)

    def refers(self, table: Table, column: Column) -> bool:
        """Return whether a column holds what identifies a row of a table."""
        of_wish = self.wishes.keys.get(table.sql) == column.name
        keys = self.inventory.foreign_keys
        return of_wish or any(key.table == table.sql and column.name in key.columns for key in keys)

    @cached_property
    def root_key(self) -> Column:
        """Returns the column of the root that holds the key."""
        return self.inventory.tables[self.wishes.root].columns[self.wishes.root_key]


def find(severity: Severity, subject: str, reason: str, remedy: str) -> Finding:
    """Return a finding."""
    return Finding(severity=severity, subject=subject, reason=reason, remedy=remedy)


blocks = partial(find, Severity.BLOCKS)
not_kept = partial(find, Severity.NOT_KEPT)
note = partial(find, Severity.NOTE)


def column_name(table: str, *columns: str) -> str:
    """Return columns with their table's name, as SQL writes it."""
    if len(columns) == 1:
        return f"{table}.{shown_name(columns[0])}"
    return f"{table} ({', '.join(map(shown_name, columns))})"


def foreign_key_name(key: ForeignKey) -> str:
    """Return a foreign key's columns with their table's name."""
    return column_name(key.table, *key.columns)


def shown_name(name: str) -> str:
    """Return an identifier as SQL writes it, in quotes only if it needs them."""
    is_plain = name.isascii() and name.isidentifier() and name.islower()
    return name if is_plain else sql.Identifier(name).as_string()


def id_column(table: Table) -> Column | None:
    """Return the primary key's column, if it is one of an integer type or uuid."""
    if len(table.primary_key) != 1:
        return None
    column = table.columns[table.primary_key[0]]
    return column if column.family in ("integer", "uuid") else None


_MOST_NAMES = 8


def some_names(names: list[str]) -> str:
    """Return names for a message: some of them, and how many more there are."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")


GB: Final = 1_000_000_000


def shown_size(size_bytes: float) -> str:
    """Return a size as people read it."""
    for unit, size in (("TB", 1_000 * GB), ("GB", GB), ("MB", 1_000_000), ("kB", 1_000)):
        if size_bytes >= size:
            return f"{size_bytes / size:,.3g} {unit}"
    return f"{size_bytes:.0f} bytes"
