"""Findings of a plan: obstacles, losses, and notes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from shardids.adopt.plan import losses
from shardids.adopt.plan.document import Finding, Kind, Severity
from shardids.adopt.plan.facts import (
    Facts,
    blocks,
    column_name,
    foreign_key_name,
    id_column,
    not_kept,
    note,
    shown_name,
    shown_size,
    some_names,
)
from shardids.adopt.plan.guesses import candidates
from shardids.adopt.plan.inventory import ForeignKey, Key, Table
from shardids.adopt.plan.obstacles import Obstacles, never_null
from shardids.adopt.plan.paths import Way
from shardids.ids.layout import DEFAULT
from shardids.pg.reader import SOURCE_HINT
from shardids.replication.subscriptions import Refusal

_ROWS: Final = {True: "", False: "in a sample: "}


_CLOCKS_DIFFER: Final = timedelta(days=1)
_SAME_KEY: Final = "have the same key"
_CROSSING: Final = "they would cross shards"


def is_crossing(finding: Finding) -> bool:
    """Return whether a finding is of a foreign key that may refer to rows of other shards."""
    is_kept = finding.severity is not Severity.NOT_KEPT
    return not is_kept and finding.reason.endswith((_SAME_KEY, _CROSSING))


def _rows_without_key(facts: Facts) -> Iterator[Finding]:
    for table, way in facts.split():
        checked = facts.checked.get(table.sql)
        if checked is not None and checked.problem:
            yield blocks(
                table.sql,
                f"its rows were not checked: {checked.problem}",
                "Plan again with a role that may read them, or with a smaller --sample; or leave the table:"
                f" --loose {table.sql}",
            )
        elif way.path and way.is_nullable:
            yield _of_path(
                table, way, without_key(facts, table.sql), is_blocked=bool(checked and checked.without_key)
            )


def without_key(facts: Facts, name: str) -> str:
    """Return how many rows of a table have no key, in words."""
    if (checked := facts.checked.get(name)) is None:
        return "the table is empty: no row has none"
    if not checked.without_key:
        return f"{_ROWS[checked.is_exact]}no row of {checked.rows:,} has none"
    return f"{_ROWS[checked.is_exact]}{checked.without_key:,} of {checked.rows:,} rows have none"


def _of_path(table: Table, way: Way, counted: str, *, is_blocked: bool) -> Finding:
    """Judge a path that may leave rows without a key."""
    nullable = [name for name in way.path[0].columns if not table.columns[name].not_null]
    if way.path[0].sets_null:
        never = (
            f'Foreign key "{way.path[0].name}" sets it NULL on deletes: with SET NOT NULL these would fail.'
            f" Find another path, or leave the table: --loose {table.sql}"
        )
    elif nullable:
        never = never_null(table.sql, *nullable)
    else:
        never = "The same for the tables on its path, whose foreign keys are to be NOT NULL and validated."
    give = f"Give them one or delete them; or leave the table: --loose {table.sql}"
    return (blocks if is_blocked else note)(
        foreign_key_name(way.path[0]),
        f"a row may find no key, and then no shard; {counted}",
        give if is_blocked else never,
    )


def _foreign_keys(facts: Facts) -> Iterator[Finding]:
    for key in facts.inventory.foreign_keys:
        is_copied = facts.sorted.kind(key.table) is not Kind.LOOSE
        if key.is_to_partition and is_copied:
            yield not_kept(
                foreign_key_name(key),
                f'foreign key "{key.name}" refers to one partition only',
                "Leave it out in the shards; the application has to look there itself.",
            )
        elif key.is_of_partitions and is_copied:
            yield not_kept(
                foreign_key_name(key),
                f'foreign key "{key.name}" belongs to partitions: the tables of the shards have none',
                "Add it to the tables of the shards by a migration.",
            )
        if key in facts.sorted.further.get(key.table, ()):
            yield _further(facts, key)
        elif _is_separated(facts, key):
            yield not_kept(
                foreign_key_name(key),
                f'foreign key "{key.name}" refers to {key.referenced_table}, whose rows are elsewhere',
                "Leave it out in the shards; the application has to look there itself.",
            )
        if is_copied and not key.is_checked:
            yield note(
                foreign_key_name(key),
                f'foreign key "{key.name}" is NOT VALID, or not of all partitions: rows may not obey it'
                if key.is_of_partitions
                else f'foreign key "{key.name}" is NOT VALID: rows may not obey it',
                f"ALTER TABLE {key.table} VALIDATE CONSTRAINT {shown_name(key.name)};",
            )


def _is_separated(facts: Facts, key: ForeignKey) -> bool:
    """Return whether a foreign key's target is split where its own table is not, or stays behind."""
    if facts.is_split(key.referenced_table):
        return not facts.is_split(key.table)
    stays = facts.sorted.kind(key.referenced_table) is Kind.LOOSE
    return stays and facts.sorted.kind(key.table) is not Kind.LOOSE


def _further(facts: Facts, key: ForeignKey) -> Finding:
    """Judge a foreign key between tables that are split, which holds if both keys are the same."""
    checked, name = facts.checked.get(key.table), foreign_key_name(key)
    remedy = "Leave it out in the shards, and find such rows by their key"
    if key.referenced == (facts.wishes.root_key,) and key.referenced_table == facts.wishes.root:
        remedy += f"; or split by it: --key {name}"
    elif key.referenced_table != facts.wishes.root:
        remedy += f"; or keep its target on every node: --reference {key.referenced_table}"
    if checked is None or key.name not in checked.further:
        why = "no row tells" if checked is None else "its rows were not checked for"
        return not_kept(
            name,
            f"{why} whether the rows of {key.referenced_table} that it refers to {_SAME_KEY}",
            remedy,
        )
    filled, crossing = checked.further[key.name]
    said = _ROWS[checked.is_exact]
    if not crossing:
        return note(
            name,
            f"{said}all {filled:,} rows have the same key as the rows of {key.referenced_table} that they"
            " refer to",
            "The foreign key holds in the shards as long as the application keeps it so.",
        )
    return not_kept(
        name,
        f"{said}{crossing:,} of {filled:,} rows refer to rows of {key.referenced_table} with another key:"
        f" {_CROSSING}",
        remedy,
    )


def _uniques(facts: Facts) -> Iterator[Finding]:
    for table, way in facts.split():
        for key in table.keys:
            if not _is_kept(table, way, key):
                what = (
                    "exclusion constraint"
                    if key.is_exclusion
                    else "primary key"
                    if key.is_primary
                    else "unique index"
                )
                yield not_kept(
                    f"{table.sql}, {shown_name(key.name)}",
                    f"the {what} does not contain the key: each shard would keep it for its own rows only",
                    "Add the key to it, or let the application see to it.",
                )


def _is_kept(table: Table, way: Way, key: Key) -> bool:
    """Return whether rows in conflict would always be in one shard, or can't be in conflict."""
    columns = set(key.columns)
    one = id_column(table)
    return (
        (way.kind is not Kind.DERIVED and way.key in columns)
        or (way.kind is Kind.DERIVED and way.first is not None and columns.issuperset(way.first.columns))
        or (one is not None and one.name in columns)
    )


def _narrow(facts: Facts) -> Iterator[Finding]:
    """Find integers without room for new IDs: keys of split tables, and what refers to these."""
    narrow: dict[tuple[str, str], None] = {}
    ids = {}
    for table, _ in facts.split():
        one = id_column(table)
        ids[table.sql] = one.name if one else None
        if one is not None and one.is_narrow:
            narrow[table.sql, one.name] = None
    for key in facts.inventory.foreign_keys:
        own = facts.inventory.tables[key.table].columns
        for column, referenced in zip(key.columns, key.referenced, strict=True):
            if referenced == ids.get(key.referenced_table) and own[column].is_narrow:
                narrow[key.table, column] = None
    for name, column in narrow:
        type_ = facts.inventory.tables[name].columns[column].type
        yield not_kept(
            column_name(name, column),
            f"{type_} has no room for new IDs: it is bigint in the shards, and new rows can't go back to the"
            " source",
            f"ALTER TABLE {name} ALTER COLUMN {shown_name(column)} TYPE bigint; (rewrites the table)",
        )


def _high_ids(facts: Facts) -> Iterator[Finding]:
    """Find IDs that a cluster of the usual layout, made now, would take for its own."""
    lowest = DEFAULT.min_id(datetime.now(UTC) - _CLOCKS_DIFFER)
    for name, highest in facts.highest.items():
        if highest >= lowest:
            yield note(
                name,
                f"it has ID {highest}; of a cluster with the layout default, made now, IDs from {lowest} on"
                " are its own, and adopt run refuses the table",
                "Make the cluster with a layout whose IDs begin above it (shardids plan), or change the keys"
                " where they are: shardids key adopt",
            )


def _prepared(facts: Facts) -> Iterator[Finding]:
    if count := facts.inventory.server.prepared_transactions:
        yield note(
            "the source",
            f"{count:,} transactions are prepared: the copy begins when all have ended",
            "See pg_prepared_xacts.",
        )


_LARGE_REFERENCE_ROWS: Final = 100_000
_SMALL_REFERENCE_ROWS: Final = 100
"""A reference table with fewer rows does not count as growing with the root."""


def _is_large(facts: Facts, table: Table) -> bool:
    """Return whether a table has many rows or writes, or seems to grow with the root."""
    if max(table.rows, table.written) >= _LARGE_REFERENCE_ROWS:
        return True
    root = facts.inventory.tables[facts.wishes.root]
    return table.rows >= max(_SMALL_REFERENCE_ROWS, root.rows / 2)


def _writes(facts: Facts, table: Table) -> str:
    days = (facts.inventory.server.counted_s or 0) / 86_400
    if days >= 1:
        return f"{table.written / days:,.0f} rows a day lately"
    return f"{table.written:,} rows since the server counts"


def find_all(
    facts: Facts, obstacles: Obstacles, lacking: Sequence[Refusal] = (), back: Sequence[Refusal] = ()
) -> list[Finding]:
    """Return all findings: what blocks first, and then as the source's tables are ordered.

    ``lacking``: missing rights of the role, which only matter if the plan is also run as it. ``back``:
    obstacles of a way back.
    """
    found = [*obstacles.find(), *(one for finder in _FINDERS for one in finder(facts))]
    found += [note("switch --keep-back", one.reason, one.remedy) for one in back]
    found += [note("the role", one.reason, f"For adopt run: {one.remedy}") for one in lacking]
    return sorted(found, key=lambda one: list(Severity).index(one.severity))


def _rows(facts: Facts) -> Iterator[Finding]:
    """Name the checks that were skipped, with those of the keys for each table that needs one."""
    if facts.skips is not None:
        yield note(
            "rows",
            f"no row was read: {facts.skips}. Skipped: whether rows whose key can be NULL have one,"
            " whether other foreign keys stay in a shard, how rows are spread over shards",
            f"{SOURCE_HINT}.",
        )


def _storage(facts: Facts) -> Iterator[Finding]:
    for table in facts.copied():
        if table.relkind == "p":
            yield note(
                table.sql,
                f"its {table.parts:,} partitions are published as one table",
                "In the shards it may be partitioned in the same way, in another, or not at all.",
            )
        if facts.sorted.kind(table.sql) is Kind.REFERENCE and _is_large(facts, table):
            yield note(
                table.sql,
                f"it would be a reference table: every node gets all its about {table.rows:,} rows,"
                f" {shown_size(table.size_bytes)}, and each write goes to every node:"
                f" {_writes(facts, table)}",
                f"If a column of it holds the key: --key {table.sql}.COLUMN. If applications do without"
                f" it beside their rows: --loose {table.sql}",
            )


def _names(facts: Facts) -> Iterator[Finding]:
    """Find schemas whose tables come into one schema a shard."""
    if len(schemas := sorted({shown_name(table.schema) for table, _ in facts.split()})) > 1:
        yield note(
            some_names(schemas),
            "the tables of these schemas come into one schema a shard",
            "Statements that name a schema have to be changed.",
        )


def _left(facts: Facts) -> Iterator[Finding]:
    """Find tables that stay at the source, and of them those that seem to hold the key, or lead to it."""
    keys: dict[str, None] = {way.key: None for table, way in facts.split() if way.kind is Kind.DIRECT}
    called = {key.table: key for key in candidates(facts.inventory) if facts.is_split(key.referenced_table)}
    loose: list[str] = []
    for name, table in facts.inventory.tables.items():
        if facts.sorted.kind(name) is not Kind.LOOSE or name in facts.wishes.loose:
            continue
        family = facts.root_key.family
        likely = [key for key in keys if key in table.columns and table.columns[key].family == family]
        by_name = called.get(name)
        if by_name is not None and by_name.referenced_table == facts.wishes.root:
            likely.append(by_name.columns[0])
        if likely and table.relkind != "f":
            yield note(
                column_name(name, likely[0]),
                "the column seems to hold the key, but no foreign key says so: the table stays at the source"
                + facts.against(name),
                f"--key {column_name(name, likely[0])}; or --loose {name}, if it is to stay; or --guess, to"
                " go by such names where the rows agree",
            )
        elif by_name is not None:
            yield note(
                foreign_key_name(by_name),
                f"the column seems to lead to {by_name.referenced_table}, but no foreign key says so: the"
                " table stays at the source",
                f"--guess, to go by such names where the rows agree; or --loose {name}, if it is to stay",
            )
        else:
            loose.append(name)
    if loose:
        yield note(
            some_names(loose),
            "nothing leads from these to the root, or back: they stay at the source",
            "--key TABLE.COLUMN to split one, --reference TABLE to give it to every node, --loose TABLE if it"
            " is to stay.",
        )


_FINDERS: Sequence[Callable[[Facts], Iterator[Finding]]] = (
    _rows,
    _storage,
    _names,
    _left,
    _rows_without_key,
    _foreign_keys,
    _uniques,
    _narrow,
    _prepared,
    _high_ids,
    *losses.FINDERS,
)
