"""What the reader of a plan has to know: what blocks it, what needs a relay, and what is not kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from shardids.adopt.facts import Facts, column_name, find, quoted, some_names
from shardids.adopt.key_findings import KEY_FINDERS
from shardids.adopt.object_findings import OBJECT_FINDERS
from shardids.adopt.plan import Finding, Kind, Severity
from shardids.catalog.counters import COUNTER_TABLES
from shardids.catalog.reader import SOURCE_HINT

_RESERVED: Final = frozenset(
    {"shardids_version", "shardids_load", "id_counter", "id_offset", "alembic_version", *COUNTER_TABLES}
)
_LARGE_REFERENCE_ROWS: Final = 1_000_000


def find_all(facts: Facts) -> list[Finding]:
    """Returns all findings: what blocks first, and then as the source's tables are ordered."""
    found = [one for finder in (*_FINDERS, *KEY_FINDERS, *OBJECT_FINDERS) for one in finder(facts)]
    return sorted(found, key=lambda one: list(Severity).index(one.severity))


def _rows(facts: Facts) -> Iterator[Finding]:
    """Names the checks that were skipped, with those of :data:`KEY_FINDERS` for each table that needs one."""
    if facts.skips is not None:
        yield find(
            Severity.NOTE,
            "rows",
            f"no row was read: {facts.skips}. Skipped: whether rows whose key can be NULL have one,"
            " whether other foreign keys stay in a shard, how rows are spread over shards",
            f"{SOURCE_HINT}.",
        )


def _identities(facts: Facts) -> Iterator[Finding]:
    for table in facts.copied():
        if any(columns is not None and not columns for columns in table.identities):
            yield find(
                Severity.BLOCKS,
                table.sql,
                "it has neither a primary key nor another replica identity: as soon as it is published, the"
                " source refuses to update and delete its rows",
                f"ALTER TABLE {table.sql} ADD PRIMARY KEY (…); or"
                f" ALTER TABLE {table.sql} REPLICA IDENTITY FULL;",
            )
        elif not table.primary_key and table.relkind != "f":
            yield find(
                Severity.NOTE,
                table.sql,
                "it has no primary key: each row that is updated or deleted is looked for in the whole table",
                f"ALTER TABLE {table.sql} ADD PRIMARY KEY (…);",
            )


def _storage(facts: Facts) -> Iterator[Finding]:
    for table in facts.copied():
        if table.is_foreign and table.relkind == "p":
            yield find(
                Severity.BLOCKS,
                table.sql,
                "a partition of it is a foreign table, and can't be published",
                f"ALTER TABLE {table.sql} DETACH PARTITION …; or leave it: --loose {table.sql}",
            )
        if table.relkind == "f":
            yield find(
                Severity.NOT_KEPT,
                table.sql,
                "it is a foreign table: its rows are not copied",
                "Create it on every node.",
            )
        if table.persistence == "u":
            yield find(
                Severity.BLOCKS,
                table.sql,
                "it is unlogged, and can't be published",
                f"ALTER TABLE {table.sql} SET LOGGED; or leave it: --loose {table.sql}",
            )
        if table.is_inherited:
            yield find(
                Severity.BLOCKS,
                table.sql,
                "it inherits from a table or is inherited by one: their rows are read"
                " together, and would be copied apart",
                f"ALTER TABLE … NO INHERIT …; or leave it: --loose {table.sql}",
            )
        if table.relkind == "p":
            yield find(
                Severity.NOTE,
                table.sql,
                f"its {table.parts:,} partitions are published as one table",
                "In the shards it may be partitioned in the same way, in another, or not at all.",
            )
        if table.name in _RESERVED:
            yield find(
                Severity.BLOCKS,
                table.sql,
                "a shard has a table or sequence of this name already",
                f"Rename it, or leave it: --loose {table.sql}",
            )
        if table.rows > _LARGE_REFERENCE_ROWS and not facts.is_split(table.sql):
            yield find(
                Severity.NOTE,
                table.sql,
                f"it is a reference table of about {table.rows:,} rows: every node gets all",
                f"If a column of it holds the key: --key {table.sql}.COLUMN",
            )


def _names(facts: Facts) -> Iterator[Finding]:
    """Finds tables of several schemas, which come into one schema a shard."""
    by_name = defaultdict(list)
    for table, _ in facts.split():
        by_name[table.name].append(table.sql)
    for name, tables in by_name.items():
        if len(tables) > 1:
            yield find(
                Severity.BLOCKS,
                ", ".join(sorted(tables)),
                f"a shard is one schema, and can't have two tables {quoted(name)}",
                "Rename all but one, or leave it: --loose.",
            )
    if len(schemas := sorted({quoted(table.schema) for table, _ in facts.split()})) > 1:
        yield find(
            Severity.NOTE,
            some_names(schemas),
            "the tables of these schemas come into one schema a shard",
            "Statements that name a schema have to be changed.",
        )


def _left(facts: Facts) -> Iterator[Finding]:
    """Finds tables that stay at the source, and among them those that seem to hold the key."""
    keys: dict[str, None] = {way.key: None for table, way in facts.split() if way.kind is Kind.DIRECT}
    loose: list[str] = []
    for name, table in facts.inventory.tables.items():
        if facts.sorted.kind(name) is not Kind.LOOSE or name in facts.wishes.loose:
            continue
        family = facts.root_key.family
        likely = [key for key in keys if key in table.columns and table.columns[key].family == family]
        if likely and table.relkind != "f":
            yield find(
                Severity.NOTE,
                column_name(name, likely[0]),
                "the column seems to hold the key, but no foreign key says so: the table stays at the source",
                f"--key {column_name(name, likely[0])}; or --loose {name}, if it is to stay",
            )
        else:
            loose.append(name)
    if loose:
        yield find(
            Severity.NOTE,
            some_names(loose),
            "nothing leads from these to the root, or back: they stay at the source",
            "--key TABLE.COLUMN to split one, --reference TABLE to give it to every node, --loose TABLE if it"
            " is to stay.",
        )


_FINDERS: Sequence[Callable[[Facts], Iterator[Finding]]] = (_rows, _identities, _storage, _names, _left)
