"""Makes a plan: reads a source, changes nothing there, suggests shards, and says why of each table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy.engine import URL

from shardids.adopt.plan import guesses
from shardids.adopt.plan.document import Hop, Kind, OldIds, Plan, TablePlan
from shardids.adopt.plan.facts import GB, Facts, column_name, foreign_key_name, id_column, shown_size
from shardids.adopt.plan.findings import find_all, without_key
from shardids.adopt.plan.inventory import Inventory, Table, read_inventory
from shardids.adopt.plan.obstacles import Obstacles
from shardids.adopt.plan.paths import Way, parents_first, read_wishes, sort_tables
from shardids.adopt.plan.returning import way_back_at_source
from shardids.adopt.plan.source import (
    LARGEST_KEYS,
    SAMPLE_ROWS,
    Reader,
    Source,
    Spread,
    check_rows,
    highest_ids,
)
from shardids.errors import BadArgument
from shardids.pg.definitions import Definition, definitions_in
from shardids.pg.queries import batches
from shardids.pg.urls import parse_url, shown_url

HORIZON_DAYS: Final = 730
"""For how long the shards and nodes are to be enough."""
NODE_BYTES: Final = 500 * GB
"""The largest node that is backed up and restored within hours."""
SHARD_BYTES: Final = 10 * GB
"""The largest shard that moves within minutes."""
_LEAST_SHARDS: Final = 64
_MOST_SHARDS: Final = 4096
_TABLES_A_NODE: Final = 100_000
"""With more tables in one database, its catalogs are slow, and so is pg_dump."""
_LARGE_SHARE: Final = 0.01
"""From which part of a table's rows a key is a large one."""
COPIED_ROWS_PER_S: Final = 100_000
"""The least that ``make bench`` accepts, with all servers on one machine; rows are compared as fast."""
COPIED_ROW_BYTES: Final = 114
"""The size of its rows, with their indexes."""
_BATCH: Final = 64
"""Of how many tables one transaction reads the definitions."""
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
    """Sizes, the spread of rows, and suggestions.

    Attributes:
        split_rows, split_bytes: of the tables that are split.
        reference_bytes: of what every node gets.
        bytes_a_day: growth of the split tables, None if unknown. ``growth_from``: its source.
        node_count, shard_count: suggested, or as the caller wished. ``rules``: why as many.
        shard_rows: estimated number of rows by shard, of the tables in ``read_tables``.
        is_exact: all their rows were read.
        largest: the keys with the largest part of a table's rows.
        copy_s: estimated duration of the copy; a comparison of all rows takes no longer.
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
    copy_s: float


def forecast(facts: Facts, reader: Reader, shard_count: int | None) -> Forecast:
    """Read how rows are spread, and suggests how many shards and nodes to have.

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
    split_rows = sum(_rows(facts, name, spread) for name in tables)
    reference_bytes = sum(table.size_bytes for table in facts.copied() if table.sql not in tables)
    return Forecast(
        split_rows=split_rows,
        split_bytes=split_bytes,
        reference_bytes=reference_bytes,
        bytes_a_day=bytes_a_day,
        growth_from=growth_from,
        node_count=node_count,
        shard_count=shard_count,
        rules=rules,
        shard_rows={shard: shard_rows[shard] for shard in range(shard_count)} if shard_rows else {},
        read_tables=list(spread),
        is_exact=all(one.is_exact for one in spread.values()),
        largest=_largest(spread),
        copy_s=copy_duration(split_rows, split_bytes + reference_bytes),
    )


def _rows(facts: Facts, name: str, spread: Mapping[str, Spread]) -> int:
    """Return a table's number of rows: as they were counted, or else as the server estimates."""
    one = spread.get(name)
    return one.rows if one is not None and one.is_exact else facts.inventory.tables[name].rows


def copy_duration(rows: int, size_bytes: int) -> float:
    """Return how many seconds the copy takes where it was measured; large rows count as several."""
    return max(rows, size_bytes / COPIED_ROW_BYTES) / COPIED_ROWS_PER_S


def suggest_nodes(expected_bytes: float) -> tuple[int, list[str]]:
    """Return how many nodes a size needs, and the rule that says so."""
    count = max(2, -(-int(expected_bytes) // NODE_BYTES))
    return count, [
        f"{shown_size(expected_bytes)} are expected in {HORIZON_DAYS} days; a node is to hold"
        f" {shown_size(NODE_BYTES)} at most, and there are two at least: {count} nodes"
    ]


def suggest_shards(expected_bytes: float, tables: int, node_count: int) -> tuple[int, list[str]]:
    """Return how many shards are needed, a power of two, and the rules that say so."""
    count = _LEAST_SHARDS
    while count < _MOST_SHARDS and (expected_bytes / count > SHARD_BYTES or count < 16 * node_count):
        count *= 2
    rules = [
        f"a shard is to stay below {shown_size(SHARD_BYTES)}; 16 a node and {_LEAST_SHARDS} in all at least,"
        f" and {_MOST_SHARDS} at most: {count} shards"
    ]
    most = max(node_count, _TABLES_A_NODE * node_count // max(1, tables))
    if count > most:
        count = 1 << (most.bit_length() - 1)
        rules.append(f"a node is to have at most {_TABLES_A_NODE:,} tables: {count} shards")
    return count, rules


def _growth(facts: Facts, spread: Mapping[str, Spread]) -> tuple[float | None, str]:
    """Return by how many bytes a day the tables that were read grow, and what says so."""
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


def reasons(facts: Facts) -> dict[str, str]:
    """Return why each table is planned as it is."""
    users: dict[str, str] = {}
    for key in facts.inventory.foreign_keys:
        if facts.sorted.kind(key.table) is not Kind.LOOSE:
            users.setdefault(key.referenced_table, key.table)
    return {name: _reason(facts, name, users) for name in facts.inventory.tables}


def _reason(facts: Facts, name: str, users: Mapping[str, str]) -> str:
    if way := facts.sorted.ways.get(name):
        drawn = facts.drawn_keys(facts.inventory.tables[name], way)
        unowned = f" Rows without it: {way.unowned}." if way.unowned is not None else ""
        filled = [f"{one} from {default}" for one, default in drawn.items() if default is not None]
        guessed = "A guess by names. " if name in facts.sorted.guessed else ""
        return (
            guessed
            + _split(name, way)
            + unowned
            + (f" New rows draw {' and '.join(filled)}." if filled else "")
        )
    if facts.sorted.kind(name) is Kind.REFERENCE:
        why = "as wished" if name in facts.wishes.references else f"{users[name]} refers to it"
        return f"Reference: {why}. Every node gets all rows."
    why = (
        "as wished"
        if name in facts.wishes.loose
        else "no foreign key leads to the root or comes from a split table"
    )
    return f"Loose: {why}. It stays at the source."


def _split(name: str, way: Way) -> str:
    if way.kind is Kind.ROOT:
        return f"The root: its {way.key} decides the shard of every row that leads to it."
    if way.first is None:
        return f"Direct: as wished, {column_name(name, way.key)} holds the key."
    if way.kind is Kind.DIRECT:
        by = f", by foreign key {way.first.name}" if way.first.name else ""
        return f"Direct: {column_name(name, way.key)} holds the key{by}."
    hops = ", then ".join(key.referenced_table for key in way.path)
    return f"Derived: {foreign_key_name(way.first)} leads to the key by {hops}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, and why it is so: ``comments``, by the table's name, and by ``""`` those of the whole."""

    plan: Plan
    forecast: Forecast
    comments: Mapping[str, Sequence[str]]

    @property
    def is_blocked(self) -> bool:
        """Returns whether a finding keeps the plan from being run."""
        return any(self.plan.is_blocked_by(finding) for finding in self.plan.findings)


def make_plan(
    source: str | URL,
    *,
    root: str | None = None,
    keys: Sequence[str] = (),
    references: Sequence[str] = (),
    loose: Sequence[str] = (),
    unowned: Sequence[str] = (),
    guess: bool = False,
    shard_count: int | None = None,
    sample_rows: int = SAMPLE_ROWS,
    via: str | URL | None = None,
    reader: str | URL | None = None,
) -> Planned:
    """Read a source as of one moment, in transactions that can't write, and return a plan for it.

    ``root``, ``keys``, ``references``, ``loose`` and ``unowned`` name tables and columns as SQL writes them:
    see :func:`shardids.adopt.plan.paths.read_wishes`. ``sample_rows``: how many rows of a table are read.
    ``guess``: take columns for keys that are called so, unless a row speaks against it.
    ``via``: the relay's URL; it is not connected to. ``reader``: the source's URL with a role that can only
    read, and does. A role that can write reads no rows where other roles own objects: findings say so.

    Raises:
        BadArgument: a name is not found, no root is named (the hint proposes some), the root has no key that
            rows can be split by, or ``reader`` is another database.
        ConnectionFailed, StatementFailed: the source can't be read.
        UnsupportedServer: it is older than PostgreSQL 14.
    """
    with Source(source, reader) as opened:
        with opened.transaction() as connection:
            inventory = read_inventory(connection)
        if root is None:
            raise _no_root(inventory)
        wishes = read_wishes(
            inventory, root=root, keys=keys, references=references, loose=loose, unowned=unowned
        )
        tables = sort_tables(inventory, wishes)
        found = guesses.verify(opened, inventory, wishes, tables, sample_rows) if guess else []
        likely = [one.key for one in found if one.is_likely]
        tables = sort_tables(inventory, wishes, likely)
        if odd := sorted(name for name in wishes.unowned if not tables.is_direct(name)):
            raise BadArgument(
                f"--unowned names {odd[0]}, which has no column with the key",
                hint="It is for tables whose own column holds the key, and may be NULL.",
            )
        checked = check_rows(opened, inventory, tables, sample_rows)
        highest = highest_ids(
            opened,
            {
                name: one.name
                for name in tables.ways
                if (one := id_column(inventory.tables[name])) is not None and one.family == "integer"
            },
        )
        facts = Facts(
            inventory=inventory,
            wishes=wishes,
            sorted=tables,
            checked=checked,
            skips=opened.skips,
            guesses=found,
            highest=highest,
        )
        spread = Reader(source=opened, inventory=inventory, sorted=tables, sample_rows=sample_rows)
        expected = forecast(facts, spread, shard_count)
        order = parents_first(list(inventory.tables), tables, [*inventory.foreign_keys, *likely])
        plans = tuple(_table_plan(facts, inventory.tables[name]) for name in order)
        obstacles = Obstacles(
            tables=plans,
            there=_definitions(opened, facts),
            server=inventory.server,
            shard_count=expected.shard_count,
            guessed={
                one.key.table: one.evidence() for one in found if one.key == tables.first(one.key.table)
            },
            counted={table.sql: without_key(facts, table.sql) for table, _ in facts.split()},
        )
        with opened.transaction() as connection:
            lacking = list(obstacles.of_role(connection))
            back = list(way_back_at_source(connection, plans, obstacles.there, expected.node_count))
    plan = Plan(
        source=shown_url(parse_url(source)),
        server_version=inventory.server.version,
        root=wishes.root,
        shard_count=expected.shard_count,
        tables=plans,
        findings=tuple(find_all(facts, obstacles, lacking, back)),
        via=None if via is None else shown_url(parse_url(via)),
    )
    comments = {name: [why] for name, why in reasons(facts).items()}
    return Planned(plan=plan, forecast=expected, comments=comments | {"": _about(facts, expected)})


def _no_root(inventory: Inventory) -> BadArgument:
    """Return the error that no root is named, with those that most tables refer to."""
    roots = [
        f"--root {name} ({count} of {len(inventory.tables)} tables refer to it)"
        for name, count in guesses.likely_roots(inventory)
    ]
    return BadArgument(
        "which table is all else to be split by? It is that of customers, users, tenants or projects",
        hint=f"By foreign keys and names: {'; '.join(roots) or 'no table refers to another'}",
    )


def _definitions(source: Source, facts: Facts) -> dict[str, Definition]:
    """Read the definitions of the tables that are copied, as far as the role may use their schemas."""
    names = [table.sql for table in facts.copied() if table.is_usable]
    found: dict[str, Definition] = {}
    for some in batches(names, _BATCH):
        with source.transaction() as connection:
            found |= definitions_in(connection, some)
    return found


def _table_plan(facts: Facts, table: Table) -> TablePlan:
    way, one = facts.sorted.ways.get(table.sql), id_column(table)
    old_ids = None
    if way is not None and one is not None:
        # A number takes 2 bytes in the directory; a UUID, which has no order to be packed by, 16.
        others = OldIds.DIRECTORY if one.family == "integer" else OldIds.FAN_OUT
        old_ids = OldIds.KEY if not way.path and one.name == way.key else others
    return TablePlan(
        name=table.sql,
        kind=facts.sorted.kind(table.sql),
        key=None if way is None else way.key,
        path=()
        if way is None
        else tuple(
            Hop(columns=key.columns, table=key.referenced_table, referenced=key.referenced)
            for key in way.path
        ),
        is_guess=table.sql in facts.sorted.guessed,
        unowned=None if way is None else way.unowned,
        id=None if one is None else one.name,
        old_ids=old_ids,
        rows=table.rows,
        size_bytes=table.size_bytes,
    )


def _about(facts: Facts, expected: Forecast) -> list[str]:
    """Return the comments on the whole plan: its sources, and the reason for the number of shards."""
    read = [one for one in facts.checked.values() if not one.problem]
    exact = sum(one.is_exact for one in read)
    lines = [
        f"Foreign keys were checked on all rows of {exact} tables, and on a sample of"
        f" {len(read) - exact} larger ones.",
        *([f"No row was read: {facts.skips}."] if facts.skips is not None else []),
        f"Growth is computed from {expected.growth_from}."
        if expected.bytes_a_day
        else "Growth is not known.",
    ]
    return [*lines, *(f"Rule: {rule}." for rule in expected.rules)]
