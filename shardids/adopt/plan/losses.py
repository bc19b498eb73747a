"""Findings of a plan about objects and values that rows do not bring along."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from shardids.adopt.plan.belongings import FUNCTION, POLICY, TRIGGER, VIEW, sort_belongings
from shardids.adopt.plan.document import Finding, Kind, Severity
from shardids.adopt.plan.drawing import NEXT_ID
from shardids.adopt.plan.facts import (
    Facts,
    column_name,
    find,
    id_column,
    not_kept,
    note,
    shown_name,
    some_names,
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
        "Keep their contents in columns of type bytea, or outside the database.",
    )


def _drawn(facts: Facts) -> Iterator[Finding]:
    """Find the defaults of keys and of numbered columns, at the source and in the shards."""
    by_sequence, brought = [], []
    for table, way in facts.split():
        drawn, one = facts.drawn_keys(table, way), id_column(table)
        for name, default in drawn.items():
            column, subject = table.columns[name], column_name(table.sql, name)
            if default is None:
                yield not_kept(
                    subject,
                    f"its default is {column.default}; in the shards it has none: the key decides the shard",
                    "Make the key in the application, and open the session by it: cluster.session(key=KEY)",
                )
            elif column.sequences or column.is_identity:
                by_sequence.append(subject)
            else:
                yield note(
                    subject,
                    f"it draws from {column.default}; in the shards new rows draw from {default}",
                    "Statements that call the function themselves have to be changed.",
                )
        if (
            one is not None
            and one.family == "integer"
            and one.name not in drawn
            and not facts.refers(table, one)
        ):
            brought.append(column_name(table.sql, one.name))
        for column in table.columns.values():
            if column.sequences and column.name not in drawn:
                yield not_kept(
                    column_name(table.sql, column.name),
                    f"it is numbered by sequence {column.sequences[0]}: each shard numbers its own rows,"
                    " after the source's last number",
                    "Take the ID instead, or number rows within their key.",
                )
    if by_sequence:
        yield note(
            some_names(by_sequence),
            f"they draw from sequences; in the shards new rows draw from {NEXT_ID}",
            "Inserts that call nextval themselves have to be changed.",
        )
    if brought:
        yield note(
            some_names(brought),
            "the source fills none of them: applications bring the IDs of new rows",
            f"They draw them from {NEXT_ID} of the row's shard: other IDs name no shard.",
        )


def _generated(facts: Facts) -> Iterator[Finding]:
    columns = [
        column_name(table.sql, column.name)
        for table in facts.copied()
        for column in table.columns.values()
        if column.is_generated
    ]
    if columns:
        yield note(
            some_names(columns),
            "generated columns are not copied: the shards generate them again",
            "Every node needs the functions that they call.",
        )


def _rules(facts: Facts) -> Iterator[Finding]:
    for thing in facts.inventory.things:
        if thing.table is not None and facts.sorted.kind(thing.table) is not Kind.LOOSE:
            yield not_kept(
                f"{thing.table}, {shown_name(thing.name)}",
                f"a {thing.kind} does not come along",
                "Do what it does in the application, or create it in the shards by a migration.",
            )


_MADE: Final = {
    FUNCTION: (
        "functions that shardids adopt prepare makes on every node",
        "They find tables by the session's search_path, as at the source.",
    ),
    VIEW: (
        "views that shardids adopt prepare makes",
        "In a shard they show its rows only; over all shards: the query node.",
    ),
    TRIGGER: (
        "triggers that shardids adopt prepare makes in each shard",
        "Rows that are copied do not fire them, and they see the rows of their shard only.",
    ),
    POLICY: (
        "row security policies that shardids adopt prepare makes",
        "Their roles have to be on every node.",
    ),
}
_LEFT: Final = {
    FUNCTION: "Create it on every node, by a revision for nodes.",
    VIEW: "Create it in the shards by a migration; over all shards: the query node.",
    TRIGGER: "Create it in the shards by a migration. Rows that are copied do not fire it.",
    POLICY: "Create it in the shards by a migration: until then clients see no row.",
}


def _belongings(facts: Facts) -> Iterator[Finding]:
    kinds = {name: facts.sorted.kind(name) for name in facts.inventory.tables}
    sorting = sort_belongings(facts.inventory.belongings, kinds)
    left = defaultdict(list)
    for one, reason in sorting.left:
        left[one.kind, reason].append(one.shown)
    for (kind, reason), names in left.items():
        yield not_kept(some_names(names), f"a {kind} that does not come along: {reason}", _LEFT[kind])
    made = defaultdict(list)
    for one in (*sorting.on_nodes, *sorting.in_shards):
        made[one.kind].append(one.shown)
    for kind, (reason, remedy) in _MADE.items():
        if kind in made:
            yield note(some_names(made[kind]), reason, remedy)


_OTHERS: Final = {
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
        "Their subscribers receive no writes after the switch.",
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


FINDERS: Sequence[Callable[[Facts], Iterator[Finding]]] = (
    _large_objects,
    _drawn,
    _generated,
    _rules,
    _belongings,
    _others,
)
