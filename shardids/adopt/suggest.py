"""How many shards and nodes a source needs, by stated rules, from its size and growth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shardids.adopt.facts import Facts
from shardids.adopt.spread import LARGEST_KEYS, Reader, Spread

_GB: Final = 1_000_000_000
HORIZON_DAYS: Final = 730
"""For how long the shards and nodes are to be enough."""
NODE_BYTES: Final = 500 * _GB
"""The size up to which a node can be backed up and restored within hours."""
SHARD_BYTES: Final = 10 * _GB
"""The size up to which a shard moves within minutes."""
_LEAST_SHARDS: Final = 64
_MOST_SHARDS: Final = 4096
_TABLES_A_NODE: Final = 100_000
"""With more tables in one database, its catalogs are slow, and so is pg_dump."""
_LARGE_SHARE: Final = 0.01
"""From which part of a table's rows a key is a large one."""
_READ_TABLES: Final = 20
"""Of how many tables, the largest ones and the root, rows are read to see how they are spread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeKey:
    """A key with many rows: of all rows of a table, which part it has."""

    table: str
    key: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Sizes, how rows are spread, and what is suggested.

    Attributes:
        split_rows, split_bytes: of the tables that are split.
        reference_bytes: of what every node gets.
        bytes_a_day: growth of what is split; None if nothing tells. ``growth_from``: what told.
        node_count, shard_count: suggested, or as the caller wished. ``rules``: why as many.
        shard_rows: estimated number of rows by shard, of the tables in ``read_tables``.
        is_exact: all their rows were read.
        largest: the keys with the largest part of a table's rows.
    """

    split_rows: int
    split_bytes: int
    reference_bytes: int
    bytes_a_day: float | None
    growth_from: str
    node_count: int
    shard_count: int
    rules: Sequence[str]
    shard_rows: Mapping[int, int]
    read_tables: Sequence[str]
    is_exact: bool
    largest: Sequence[LargeKey]


def forecast(facts: Facts, reader: Reader, shard_count: int | None) -> Forecast:
    """Reads how rows are spread, and suggests how many shards and nodes to have.

    ``shard_count``: as the caller wishes; None for as many as the rules say.
    """
    tables = {table.sql: table for table, _ in facts.split()}
    by_size = sorted(tables, key=lambda name: tables[name].size_bytes, reverse=True)
    names = dict.fromkeys([facts.wishes.root, *by_size[:_READ_TABLES]])
    buckets = shard_count or _MOST_SHARDS
    spread = {name: one for name in names if (one := reader.read(name, buckets))}
    split_bytes = sum(table.size_bytes for table in tables.values())
    bytes_a_day, growth_from = _growth(facts, spread)
    expected = split_bytes + (bytes_a_day or 0) * HORIZON_DAYS
    node_count, rules = suggest_nodes(expected)
    if shard_count is None:
        shard_count, more = suggest_shards(expected, len(tables), node_count)
        rules += more
    else:
        rules.append(f"as wished: {shard_count} shards")
    shard_rows: Counter[int] = Counter()
    for name, one in spread.items():
        scale = 1.0 if one.is_exact else tables[name].rows / one.rows
        for bucket, count in one.shards.items():
            # Whatever the hash is modulo a multiple of the count, it says the shard.
            shard_rows[bucket % shard_count] += round(count * scale)
    return Forecast(
        split_rows=sum(_rows(facts, name, spread) for name in tables),
        split_bytes=split_bytes,
        reference_bytes=sum(table.size_bytes for table in facts.copied() if table.sql not in tables),
        bytes_a_day=bytes_a_day,
        growth_from=growth_from,
        node_count=node_count,
        shard_count=shard_count,
        rules=rules,
        shard_rows={shard: shard_rows[shard] for shard in range(shard_count)} if shard_rows else {},
        read_tables=list(spread),
        is_exact=all(one.is_exact for one in spread.values()),
        largest=_largest(spread),
    )


def _rows(facts: Facts, name: str, spread: Mapping[str, Spread]) -> int:
    """Returns a table's number of rows: as they were counted, or else as the server estimates."""
    one = spread.get(name)
    return one.rows if one is not None and one.is_exact else facts.inventory.tables[name].rows


def suggest_nodes(expected_bytes: float) -> tuple[int, list[str]]:
    """Returns how many nodes a size needs, and the rule that says so."""
    count = max(2, -(-int(expected_bytes) // NODE_BYTES))
    return count, [
        f"{_size(expected_bytes)} are expected in {HORIZON_DAYS} days; a node is to hold"
        f" {_size(NODE_BYTES)} at most, and there are two at least: {count} nodes"
    ]


def suggest_shards(expected_bytes: float, tables: int, node_count: int) -> tuple[int, list[str]]:
    """Returns how many shards are needed, a power of two, and the rules that say so."""
    count = _LEAST_SHARDS
    while count < _MOST_SHARDS and (expected_bytes / count > SHARD_BYTES or count < 16 * node_count):
        count *= 2
    rules = [
        f"a shard is to stay below {_size(SHARD_BYTES)}; 16 a node and {_LEAST_SHARDS} in all at least, and"
        f" {_MOST_SHARDS} at most: {count} shards"
    ]
    most = max(node_count, _TABLES_A_NODE * node_count // max(1, tables))
    if count > most:
        count = 1 << (most.bit_length() - 1)
        rules.append(f"a node is to have at most {_TABLES_A_NODE:,} tables: {count} shards")
    return count, rules


def _growth(facts: Facts, spread: Mapping[str, Spread]) -> tuple[float | None, str]:
    """Returns by how many bytes a day the tables that were read grow, and what says so."""
    counted_s = facts.inventory.server.counted_s
    total, columns, counters = 0.0, 0, 0
    for name, one in spread.items():
        table = facts.inventory.tables[name]
        rows_a_day = one.rows_a_day
        if rows_a_day is not None:
            columns += 1
        elif counted_s is not None and counted_s > 86_400:
            rows_a_day = table.inserted / counted_s * 86_400
            counters += 1
        else:
            continue
        total += rows_a_day * table.size_bytes / max(1, _rows(facts, name, spread))
    said = [f"{columns} columns such as created_at"] if columns else []
    said += [f"the server's counters of inserts, for {counters} tables"] if counters else []
    return (total, " and ".join(said)) if said else (None, "nothing tells")


def _largest(spread: Mapping[str, Spread]) -> list[LargeKey]:
    found = [
        LargeKey(table=name, key=key, share=count / one.rows)
        for name, one in spread.items()
        for key, count in one.largest
        if count > 1 and count / one.rows >= _LARGE_SHARE
    ]
    return sorted(found, key=lambda one: one.share, reverse=True)[:LARGEST_KEYS]


def _size(size_bytes: float) -> str:
    """Returns a size as people read it."""
    for unit, size in (("TB", 1_000 * _GB), ("GB", _GB), ("MB", 1_000_000), ("kB", 1_000)):
        if size_bytes >= size:
            return f"{size_bytes / size:,.3g} {unit}"
    return f"{size_bytes:.0f} bytes"
