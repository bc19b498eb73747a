"""Guesses of foreign keys that a schema lacks: columns called after a table, whose values it has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from shardids.adopt.plan.document import Kind
from shardids.adopt.plan.inventory import ForeignKey, Inventory, Table
from shardids.adopt.plan.paths import Sorted, Wishes
from shardids.adopt.plan.source import Source, is_sampled, named, only_row, sampled
from shardids.errors import MissingPrivilege, StatementFailed
from shardids.pg.definitions import Column
from shardids.pg.queries import statement

_MOST_ROOTS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """A column that may refer to a table, and what its rows say.

    ``rows``: how many were read that have a value; ``is_exact``: all of them. ``strays``: those whose value
    no row of the table has. ``problem``: why none were read.
    """

    key: ForeignKey
    rows: int = 0
    is_exact: bool = True
    strays: int = 0
    problem: str = ""

    @property
    def is_likely(self) -> bool:
        """Returns whether no row speaks against it."""
        return not self.strays and not self.problem

    def evidence(self) -> str:
        """Return what rows say, in words."""
        if self.problem:
            return f"its rows were not read: {self.problem}"
        said = "" if self.is_exact else "in a sample: "
        if not self.rows:
            return "no row has a value there"
        found = "all" if not self.strays else f"{self.rows - self.strays:,} of"
        return f"{said}{found} {self.rows:,} values are those of a row there"


def candidates(inventory: Inventory) -> Iterator[ForeignKey]:
    """Yield the columns that are called after a table, are of its key's type, and have no foreign key."""
    known = {(key.table, column) for key in inventory.foreign_keys for column in key.columns}
    by_name: dict[str, list[tuple[Table, Column]]] = {}
    for table in inventory.tables.values():
        if len(table.primary_key) == 1 and table.columns[table.primary_key[0]].family is not None:
            key = table.columns[table.primary_key[0]]
            for name in _names(table.name, key.name):
                by_name.setdefault(name, []).append((table, key))
    for table in inventory.tables.values():
        for column in table.columns.values():
            if (table.sql, column.name) in known or table.relkind == "f" or column.is_generated:
                continue
            named_so = by_name.get(_bare(column.name), [])
            near = [one for one in named_so if one[0].schema == table.schema] or named_so
            for target, key in near:
                if target.sql != table.sql and column.family == key.family:
                    yield ForeignKey(
                        name="",
                        table=table.sql,
                        columns=(column.name,),
                        referenced_table=target.sql,
                        referenced=(key.name,),
                        is_checked=False,
                    )


def _names(table: str, key: str) -> set[str]:
    """Return what columns that refer to a table are called, without underscores and capitals."""
    bare = _bare(table)
    singulars = {bare}
    if bare.endswith("ies"):
        singulars.add(bare[:-3] + "y")
    if bare.endswith("es"):
        singulars.add(bare[:-2])
    if bare.endswith("s"):
        singulars.add(bare[:-1])
    return {one + _bare(key) for one in singulars if not _bare(key).startswith(one)} | {
        # A key that has the table's name in it, as in film_id of film, is called the same elsewhere.
        _bare(key)
        for one in singulars
        if _bare(key).startswith(one)
    }


def _bare(name: str) -> str:
    return name.replace("_", "").lower()


def likely_roots(inventory: Inventory) -> list[tuple[str, int]]:
    """Return the tables that most others refer to, by foreign keys or names; with how many do."""
    users: dict[str, set[str]] = {}
    for key in (*inventory.foreign_keys, *candidates(inventory)):
        if key.table != key.referenced_table:
            users.setdefault(key.referenced_table, set()).add(key.table)
    found = sorted(users.items(), key=lambda item: (-len(item[1]), item[0]))
    return [(name, len(those)) for name, those in found[:_MOST_ROOTS]]


def verify(
    source: Source, inventory: Inventory, wishes: Wishes, sorted_: Sorted, sample_rows: int
) -> list[Guess]:
    """Return the guesses for tables that no foreign key leads from, each with what its rows say."""
    kept = {*wishes.references, *wishes.loose, *wishes.keys}
    wanted = [
        key
        for key in candidates(inventory)
        if sorted_.kind(key.table) is Kind.LOOSE
        and key.table not in kept
        and key.referenced_table not in kept
    ]
    return [_verified(source, inventory.tables, key, sample_rows) for key in wanted]


def _verified(source: Source, tables: Mapping[str, Table], key: ForeignKey, sample_rows: int) -> Guess:
    table, target = tables[key.table], tables[key.referenced_table]
    if not (table.is_readable and target.is_readable):
        return Guess(key=key, problem="the role may not read all rows")
    own, theirs = key.columns[0], key.referenced[0]
    query = statement(
        "select count(*), count(*) filter (where not exists (select from {} p where p.{} = t0.{}))"
        " from {} t0{} where t0.{} is not null",
        named(target.sql),
        theirs,
        own,
        named(table.sql),
        sampled(table, sample_rows),
        own,
    )
    try:
        with source.rows() as connection:
            rows, strays = only_row(connection, query)
    except (StatementFailed, MissingPrivilege) as error:
        return Guess(key=key, problem=error.message)
    return Guess(key=key, rows=rows, is_exact=not is_sampled(table, sample_rows), strays=strays)
