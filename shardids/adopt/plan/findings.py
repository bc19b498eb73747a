"""Findings of a plan: obstacles, needs of a relay, losses, and notes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from shardids.adopt.plan import losses
from shardids.adopt.plan.document import Finding, Kind, Severity
from shardids.adopt.plan.facts import (
    Facts,
    blocks,
    column_name,
    foreign_key_name,
    id_column,
    needs_relay,
    not_kept,
    note,
    shown_name,
    some_names,
)
from shardids.adopt.plan.inventory import ForeignKey, Key, Table
from shardids.adopt.plan.paths import Way
from shardids.catalog.counters import COUNTER_TABLES
from shardids.pg.reader import SOURCE_HINT

_ROWS: Final = {True: "", False: "in a sample: "}


_SAME_KEY: Final = "have the same key"
_CROSSING: Final = "they would cross shards"


def is_crossing(finding: Finding) -> bool:
    """Return whether a finding is of a foreign key that may refer to rows of other shards."""
    is_kept = finding.severity is not Severity.NOT_KEPT
    return not is_kept and finding.reason.endswith((_SAME_KEY, _CROSSING))


def _keys(facts: Facts) -> Iterator[Finding]:
    for table, way in facts.split():
        if way.kind is Kind.DERIVED:
            yield needs_relay(
                table.sql,
                "its key is in another table, where a publication's row filter can't look",
                f"Plan again with --via, the URL of a relay. Or add a column with the key to {table.sql}, NOT"
                " NULL, kept by the application or a trigger; then plan again, with --key if it has no"
                " foreign key.",
            )
            continue
        column, name = table.columns[way.key], column_name(table.sql, way.key)
        if column.family is None or column.family != facts.root_key.family:
            wanted = facts.root_key.family or "integer, text or uuid"
            yield blocks(
                name,
                f"a key of type {column.type} is not hashed as one of {wanted}",
                f"ALTER TABLE {table.sql} ALTER COLUMN {shown_name(way.key)} TYPE …;",
            )
        if column.family == "text" and facts.inventory.server.encoding != "UTF8":
            yield blocks(
                name,
                f"the source's encoding is {facts.inventory.server.encoding}: text keys are hashed as UTF-8",
                "Restore the source into a database of encoding UTF8.",
            )
        if column.is_generated:
            yield blocks(
                name,
                "a generated column is not replicated: the key would be missing",
                f"ALTER TABLE {table.sql} ALTER COLUMN {shown_name(way.key)} DROP EXPRESSION;",
            )
        if not table.is_identity(way.key):
            yield needs_relay(
                name,
                "the key is not in the replica identity: with a row filter on it, the source would refuse to"
                " update and delete rows",
                f"ALTER TABLE {table.sql} REPLICA IDENTITY FULL; or REPLICA IDENTITY USING INDEX …, if one is"
                " unique, and its columns are NOT NULL and contain the key. Or plan again with --via, the URL"
                " of a relay.",
            )


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
        elif checked is not None and checked.without_key:
            yield blocks(
                _key_name(table, way),
                f"{_ROWS[checked.is_exact]}{checked.without_key:,} of {checked.rows:,} rows have no key,"
                " and so no shard",
                f"Give them one or delete them; or leave the table: --loose {table.sql}",
            )
        elif way.is_nullable:
            read = f"no row of {checked.rows:,}" if checked else "the table is empty: no row"
            yield note(
                _key_name(table, way),
                f"a row may have no key, and then no shard; {read} has none",
                _never_null(table, way),
            )


def _key_name(table: Table, way: Way) -> str:
    return foreign_key_name(way.path[0]) if way.path else column_name(table.sql, way.key)


def _never_null(table: Table, way: Way) -> str:
    columns = way.path[0].columns if way.path else (way.key,)
    nullable = [name for name in columns if not table.columns[name].not_null]
    if not nullable:
        return "The same for the tables on its path, whose foreign keys are to be NOT NULL and validated."
    changes = ", ".join(f"ALTER COLUMN {shown_name(name)} SET NOT NULL" for name in nullable)
    return f"ALTER TABLE {table.sql} {changes};"


def _foreign_keys(facts: Facts) -> Iterator[Finding]:
    for key in facts.inventory.foreign_keys:
        is_copied = facts.sorted.kind(key.table) is not Kind.LOOSE
        if key.is_of_partition and is_copied:
            yield not_kept(
                foreign_key_name(key),
                f'foreign key "{key.name}" belongs to one partition only',
                "Add it to the shards' partitions by a migration.",
            )
        elif key in facts.sorted.further.get(key.table, ()):
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
                f'foreign key "{key.name}" is NOT VALID: rows may not obey it',
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


_ROW_FILTERS: Final = 150000
"""The first version of PostgreSQL whose publications filter rows."""


def _server(facts: Facts) -> Iterator[Finding]:
    server = facts.inventory.server
    if server.version < _ROW_FILTERS:
        yield needs_relay(
            f"PostgreSQL {server.version // 10000}",
            "its publications can't filter rows",
            "Plan again with --via, the URL of a relay; or upgrade the source to PostgreSQL 15 or later.",
        )
    if server.is_of_cluster:
        yield blocks(
            "the source",
            "it belongs to a cluster of shardids already, as a node or its catalog",
            "Give the database of the application.",
        )
    if server.is_standby:
        yield blocks(
            "the source",
            "it is a standby: nothing can be published there",
            "Plan again with the URL of the primary.",
        )
    if server.wal_level != "logical":
        yield blocks(
            "wal_level",
            f"it is {server.wal_level}: changes can't be followed",
            "ALTER SYSTEM SET wal_level = 'logical'; and restart the source",
        )
    for name, most, used in (
        ("max_replication_slots", server.slots, server.used_slots),
        ("max_wal_senders", server.senders, server.used_senders),
    ):
        if used >= most:
            yield blocks(
                name,
                f"all {most} are in use",
                f"ALTER SYSTEM SET {name} = {most + 10}; and restart the source",
            )
    if server.prepared_transactions:
        yield note(
            "the source",
            f"{server.prepared_transactions:,} transactions are prepared: the copy begins"
            " when all have ended",
            "See pg_prepared_xacts.",
        )


_RESERVED: Final = frozenset(
    {"shardids_version", "shardids_load", "id_counter", "id_offset", "alembic_version", *COUNTER_TABLES}
)
_LARGE_REFERENCE_ROWS: Final = 1_000_000


def find_all(facts: Facts) -> list[Finding]:
    """Return all findings: what blocks first, and then as the source's tables are ordered."""
    found = [one for finder in _FINDERS for one in finder(facts)]
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


def _identities(facts: Facts) -> Iterator[Finding]:
    for table in facts.copied():
        if any(columns is not None and not columns for columns in table.identities):
            yield blocks(
                table.sql,
                "it has neither a primary key nor another replica identity: as soon as it is published, the"
                " source refuses to update and delete its rows",
                f"ALTER TABLE {table.sql} ADD PRIMARY KEY (…); or"
                f" ALTER TABLE {table.sql} REPLICA IDENTITY FULL;",
            )
        elif not table.primary_key and table.relkind != "f":
            yield note(
                table.sql,
                "it has no primary key: each row that is updated or deleted is looked for in the whole table",
                f"ALTER TABLE {table.sql} ADD PRIMARY KEY (…);",
            )


def _storage(facts: Facts) -> Iterator[Finding]:
    for table in facts.copied():
        if table.is_foreign and table.relkind == "p":
            yield blocks(
                table.sql,
                "a partition of it is a foreign table, and can't be published",
                f"ALTER TABLE {table.sql} DETACH PARTITION …; or leave it: --loose {table.sql}",
            )
        if table.relkind == "f":
            yield not_kept(
                table.sql,
                "it is a foreign table: its rows are not copied",
                "Create it on every node.",
            )
        if table.persistence == "u":
            yield blocks(
                table.sql,
                "it is unlogged, and can't be published",
                f"ALTER TABLE {table.sql} SET LOGGED; or leave it: --loose {table.sql}",
            )
        if table.is_inherited:
            yield blocks(
                table.sql,
                "it inherits from a table or is inherited by one: their rows are read"
                " together, and would be copied apart",
                f"ALTER TABLE … NO INHERIT …; or leave it: --loose {table.sql}",
            )
        if table.relkind == "p":
            yield note(
                table.sql,
                f"its {table.parts:,} partitions are published as one table",
                "In the shards it may be partitioned in the same way, in another, or not at all.",
            )
        if table.name in _RESERVED:
            yield blocks(
                table.sql,
                "a shard has a table or sequence of this name already",
                f"Rename it, or leave it: --loose {table.sql}",
            )
        if table.rows > _LARGE_REFERENCE_ROWS and not facts.is_split(table.sql):
            yield note(
                table.sql,
                f"it is a reference table of about {table.rows:,} rows: every node gets all",
                f"If a column of it holds the key: --key {table.sql}.COLUMN",
            )


def _names(facts: Facts) -> Iterator[Finding]:
    """Find tables of several schemas, which come into one schema a shard."""
    by_name = defaultdict(list)
    for table, _ in facts.split():
        by_name[table.name].append(table.sql)
    for name, tables in by_name.items():
        if len(tables) > 1:
            yield blocks(
                ", ".join(sorted(tables)),
                f"a shard is one schema, and can't have two tables {shown_name(name)}",
                "Rename all but one, or leave it: --loose.",
            )
    if len(schemas := sorted({shown_name(table.schema) for table, _ in facts.split()})) > 1:
        yield note(
            some_names(schemas),
            "the tables of these schemas come into one schema a shard",
            "Statements that name a schema have to be changed.",
        )


def _left(facts: Facts) -> Iterator[Finding]:
    """Find tables that stay at the source, and among them those that seem to hold the key."""
    keys: dict[str, None] = {way.key: None for table, way in facts.split() if way.kind is Kind.DIRECT}
    loose: list[str] = []
    for name, table in facts.inventory.tables.items():
        if facts.sorted.kind(name) is not Kind.LOOSE or name in facts.wishes.loose:
            continue
        family = facts.root_key.family
        likely = [key for key in keys if key in table.columns and table.columns[key].family == family]
        if likely and table.relkind != "f":
            yield note(
                column_name(name, likely[0]),
                "the column seems to hold the key, but no foreign key says so: the table stays at the source",
                f"--key {column_name(name, likely[0])}; or --loose {name}, if it is to stay",
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
    _identities,
    _storage,
    _names,
    _left,
    _keys,
    _rows_without_key,
    _foreign_keys,
    _uniques,
    _narrow,
    _server,
    *losses.FINDERS,
)
