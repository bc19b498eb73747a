"""Where rows of adopted tables belong: by their old IDs' rule, by their new IDs' bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from psycopg import sql

from shardids.catalog.old_ids import chunk_of, read_directory, shard_in
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import BY_DIRECTORY, BY_KEY, OldIdRule, OldIdRules

HASH: Final = sql.SQL("('x' || encode(substr(sha256({bytes}), 1, 8), 'hex'))::bit(64)::bigint")
"""The signed reading of a key's hash."""
MODULO: Final = sql.SQL("mod({hash} + case when {hash} < 0 then 18446744073709551616 else 0 end, {shards})")
"""The shard of a key's hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """The rules of a cluster's old IDs, if it has any; ``directory`` reads chunks of a table's."""

    rules: OldIdRules | None
    shard_count: int
    directory: Callable[[str, Sequence[int]], Mapping[int, bytes]]

    def rule(self, table: str, column: str) -> OldIdRule | None:
        """Returns the rule of a table's ID column."""
        found = None if self.rules is None else self.rules.of_table.get(table)
        return found if found is not None and found.column == column else None

    def is_by_directory(self, table: str, column: str) -> bool:
        """Returns whether the column's old IDs are in a directory."""
        rule = self.rule(table, column)
        return rule is not None and rule.rule == BY_DIRECTORY

    def is_old(self, value: sql.Composable) -> sql.Composed:
        """Returns a condition that an integer is an old ID."""
        assert self.rules is not None  # noqa: S101 -- there is a rule
        lowest = sql.SQL("") if self.rules.negative else sql.SQL("{} >= 0 and ").format(value)
        return sql.SQL("({}{} < {})").format(lowest, value, sql.Literal(self.rules.below))

    def belongs(self, rule: OldIdRule | None, value: sql.Composable) -> sql.Composed:
        """Returns an expression for the shard that an ID says; NULL where SQL can't tell."""
        new = sql.SQL("shardids.shard_of({})").format(value)
        if rule is None:
            return new
        old: sql.Composable = sql.SQL("null")
        if rule.rule == BY_KEY:
            bytes_ = sql.SQL("convert_to('i:' || {}, 'UTF8')").format(value)
            old = MODULO.format(hash=HASH.format(bytes=bytes_), shards=sql.Literal(self.shard_count))
        return sql.SQL("case when {} then {} else {} end::integer").format(self.is_old(value), old, new)

    def in_directory(self, table: str, ids: Sequence[int]) -> dict[int, int | None]:
        """Returns the shards that a table's directory has for old IDs."""
        chunks = self.directory(table, sorted({chunk_of(id_) for id_ in ids}))
        return {id_: shard_in(chunks.get(chunk_of(id_), b""), id_) for id_ in ids}


def adopted_in(catalog: Catalog, rules: OldIdRules | None, shard_count: int) -> Adopted:
    """Returns the rules, and how to read directories in the catalog."""

    def directory(table: str, chunks: Sequence[int]) -> Mapping[int, bytes]:
        with catalog.engine.connect() as connection:
            return read_directory(connection, table, chunks)

    return Adopted(rules=rules, shard_count=shard_count, directory=directory)
