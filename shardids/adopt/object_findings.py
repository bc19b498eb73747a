"""What the server lacks, and what copying rows does not bring along: triggers, sequences, views."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from shardids.adopt.facts import Facts, column_name, find, id_column, quoted, some_names
from shardids.adopt.plan import Finding, Kind, Severity

_ROW_FILTERS: Final = 150000
"""The first version of PostgreSQL whose publications filter rows."""


def _server(facts: Facts) -> Iterator[Finding]:
    server = facts.inventory.server
    if server.version < _ROW_FILTERS:
        yield find(
            Severity.NEEDS_RELAY,
            f"PostgreSQL {server.version // 10000}",
            "its publications can't filter rows",
            "Plan again with --via, the URL of a relay; or upgrade the source to PostgreSQL 15 or later.",
        )
    if server.is_of_cluster:
        yield find(
            Severity.BLOCKS,
            "the source",
            "it belongs to a cluster of shardids already, as a node or its catalog",
            "Give the database of the application.",
        )
    if server.is_standby:
        yield find(
            Severity.BLOCKS,
            "the source",
            "it is a standby: nothing can be published there",
            "Plan again with the URL of the primary.",
        )
    if server.wal_level != "logical":
        yield find(
            Severity.BLOCKS,
            "wal_level",
            f"it is {server.wal_level}: changes can't be followed",
            "ALTER SYSTEM SET wal_level = 'logical'; and restart the source",
        )
    for name, most, used in (
        ("max_replication_slots", server.slots, server.used_slots),
        ("max_wal_senders", server.senders, server.used_senders),
    ):
        if used >= most:
            yield find(
                Severity.BLOCKS,
                name,
                f"all {most} are in use",
                f"ALTER SYSTEM SET {name} = {most + 10}; and restart the source",
            )
    if server.prepared_transactions:
        yield find(
            Severity.NOTE,
            "the source",
            f"{server.prepared_transactions:,} transactions are prepared: the copy begins"
            " when all have ended",
            "See pg_prepared_xacts.",
        )


def _large_objects(facts: Facts) -> Iterator[Finding]:
    count = facts.inventory.server.large_objects
    if not count:
        return
    columns = [
        column_name(table.sql, column.name)
        for table in facts.copied()
        for column in table.columns.values()
        if column.type in ("oid", "lo")
    ]
    yield find(
        Severity.BLOCKS if columns else Severity.NOT_KEPT,
        some_names(columns) or "large objects",
        f"the source has {count:,} large objects, which logical replication does not copy",
        "Keep what they hold in columns of type bytea, or outside the database.",
    )


def _sequences(facts: Facts) -> Iterator[Finding]:
    drawn = []
    for table, _ in facts.split():
        one = id_column(table)
        for column in table.columns.values():
            if column.sequence is None:
                continue
            if one is not None and column.name == one.name and one.family == "integer":
                drawn.append(column_name(table.sql, column.name))
            else:
                yield find(
                    Severity.NOT_KEPT,
                    column_name(table.sql, column.name),
                    f"it is numbered by sequence {column.sequence}: each shard numbers its own rows, after"
                    " the source's last number",
                    "Take the ID instead, or number rows within their key.",
                )
    if drawn:
        yield find(
            Severity.NOTE,
            some_names(drawn),
            "they draw from sequences; in the shards new rows draw from next_id()",
            "Inserts that call nextval themselves have to be changed.",
        )


def _generated(facts: Facts) -> Iterator[Finding]:
    columns = [
        column_name(table.sql, column.name)
        for table in facts.copied()
        for column in table.columns.values()
        if column.is_generated
    ]
    if columns:
        yield find(
            Severity.NOTE,
            some_names(columns),
            "generated columns are not copied: the shards generate them again",
            "What they call has to be on every node.",
        )


_OF_TABLES: Final = {
    "trigger": "Create it in the shards by a migration. Rows that are copied do not fire it.",
    "rule": "Do what it does in the application, or create it in the shards by a migration.",
    "row security policy": "Create it in the shards by a migration.",
}


def _of_tables(facts: Facts) -> Iterator[Finding]:
    for thing in facts.inventory.things:
        if thing.table is not None and facts.sorted.kind(thing.table) is not Kind.LOOSE:
            subject = f"{thing.table}, {quoted(thing.name)}"
            yield find(
                Severity.NOT_KEPT, subject, f"a {thing.kind} does not come along", _OF_TABLES[thing.kind]
            )


_OTHERS: Final = {
    "view": (
        Severity.NOT_KEPT,
        "views",
        "Create them in the shards by a migration; over all shards: the query node.",
    ),
    "materialized view": (
        Severity.NOT_KEPT,
        "materialized views",
        "Create them in the shards by a migration.",
    ),
    "sequence": (
        Severity.NOT_KEPT,
        "sequences that no column owns",
        "Draw IDs by next_id() instead; adopt prepare makes those that a default draws from, one in each"
        " shard.",
    ),
    "function": (Severity.NOT_KEPT, "functions", "Create them on every node, by a revision for nodes."),
    "event trigger": (
        Severity.NOT_KEPT,
        "event triggers",
        "Create them on every node, if they are needed there.",
    ),
    "enum": (Severity.NOTE, "enums", "shardids adopt prepare makes those of columns, on every node."),
    "domain": (Severity.NOTE, "domains", "shardids adopt prepare makes those of columns, on every node."),
    "range type": (Severity.NOTE, "range types", "Create them on every node before the tables."),
    "composite type": (Severity.NOTE, "composite types", "Create them on every node before the tables."),
    "extension": (Severity.NOTE, "extensions", "Install those that the tables need on every node."),
    "publication": (
        Severity.NOTE,
        "publications of the source",
        "Who follows them gets nothing of what is written after the switch.",
    ),
}


def _others(facts: Facts) -> Iterator[Finding]:
    names = defaultdict(list)
    for thing in facts.inventory.things:
        if thing.table is None:
            names[thing.kind].append(thing.name)
    for kind, (severity, what, remedy) in _OTHERS.items():
        if kind in names:
            yield find(severity, some_names(names[kind]), f"{what} do not come along", remedy)


OBJECT_FINDERS: Sequence[Callable[[Facts], Iterator[Finding]]] = (
    _server,
    _large_objects,
    _sequences,
    _generated,
    _of_tables,
    _others,
)
