"""What the keys of tables mean for a plan: how rows find their shards, and which keys can't be kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from shardids.adopt.facts import Facts, column_name, find, foreign_key_name, id_column, quoted
from shardids.adopt.inventory import ForeignKey, Key, Table
from shardids.adopt.paths import Way
from shardids.adopt.plan import Finding, Kind, Severity

_ROWS: Final = {True: "", False: "in a sample: "}


_SAME_KEY: Final = "have the same key"
_CROSSING: Final = "they would cross shards"


def is_crossing(finding: Finding) -> bool:
    """Returns whether a finding is of a foreign key that may refer to rows of other shards."""
    is_kept = finding.severity is not Severity.NOT_KEPT
    return not is_kept and finding.reason.endswith((_SAME_KEY, _CROSSING))


def _keys(facts: Facts) -> Iterator[Finding]:
    for table, way in facts.split():
        if way.kind is Kind.DERIVED:
            yield find(
                Severity.NEEDS_RELAY,
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
            yield find(
                Severity.BLOCKS,
                name,
                f"a key of type {column.type} is not hashed as one of {wanted}",
                f"ALTER TABLE {table.sql} ALTER COLUMN {quoted(way.key)} TYPE …;",
            )
        if column.family == "text" and facts.inventory.server.encoding != "UTF8":
            yield find(
                Severity.BLOCKS,
                name,
                f"the source's encoding is {facts.inventory.server.encoding}: text keys are hashed as UTF-8",
                "Restore the source into a database of encoding UTF8.",
            )
        if column.is_generated:
            yield find(
                Severity.BLOCKS,
                name,
                "a generated column is not replicated: the key would be missing",
                f"ALTER TABLE {table.sql} ALTER COLUMN {quoted(way.key)} DROP EXPRESSION;",
            )
        if not table.is_identity(way.key):
            yield find(
                Severity.NEEDS_RELAY,
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
            yield find(
                Severity.BLOCKS,
                table.sql,
                f"its rows were not checked: {checked.problem}",
                "Plan again with a role that may read them, or with a smaller --sample; or leave the table:"
                f" --loose {table.sql}",
            )
        elif checked is not None and checked.without_key:
            yield find(
                Severity.BLOCKS,
                _key_name(table, way),
                f"{_ROWS[checked.is_exact]}{checked.without_key:,} of {checked.rows:,} rows have no key,"
                " and so no shard",
                f"Give them one or delete them; or leave the table: --loose {table.sql}",
            )
        elif way.is_nullable:
            read = f"no row of {checked.rows:,}" if checked else "the table is empty: no row"
            yield find(
                Severity.NOTE,
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
    changes = ", ".join(f"ALTER COLUMN {quoted(name)} SET NOT NULL" for name in nullable)
    return f"ALTER TABLE {table.sql} {changes};"


def _foreign_keys(facts: Facts) -> Iterator[Finding]:
    for key in facts.inventory.foreign_keys:
        is_copied = facts.sorted.kind(key.table) is not Kind.LOOSE
        if key.is_of_partition and is_copied:
            yield find(
                Severity.NOT_KEPT,
                foreign_key_name(key),
                f'foreign key "{key.name}" is one of a partition alone',
                "Add it to the shards' partitions by a migration.",
            )
        elif key in facts.sorted.further.get(key.table, ()):
            yield _further(facts, key)
        elif _is_separated(facts, key):
            yield find(
                Severity.NOT_KEPT,
                foreign_key_name(key),
                f'foreign key "{key.name}" refers to {key.referenced_table}, whose rows are elsewhere',
                "Leave it out in the shards; the application has to look there itself.",
            )
        if is_copied and not key.is_checked:
            yield find(
                Severity.NOTE,
                foreign_key_name(key),
                f'foreign key "{key.name}" is NOT VALID: rows may not obey it',
                f"ALTER TABLE {key.table} VALIDATE CONSTRAINT {quoted(key.name)};",
            )


def _is_separated(facts: Facts, key: ForeignKey) -> bool:
    """Returns whether what a foreign key refers to is split where its own table is not, or stays behind."""
    if facts.is_split(key.referenced_table):
        return not facts.is_split(key.table)
    stays = facts.sorted.kind(key.referenced_table) is Kind.LOOSE
    return stays and facts.sorted.kind(key.table) is not Kind.LOOSE


def _further(facts: Facts, key: ForeignKey) -> Finding:
    """Judges a foreign key between tables that are split, which holds if both keys are the same."""
    checked, name = facts.checked.get(key.table), foreign_key_name(key)
    remedy = "Leave it out in the shards, and find such rows by their key"
    if key.referenced == (facts.wishes.root_key,) and key.referenced_table == facts.wishes.root:
        remedy += f"; or split by it: --key {name}"
    elif key.referenced_table != facts.wishes.root:
        remedy += f"; or give what it refers to to every node: --reference {key.referenced_table}"
    if checked is None or key.name not in checked.further:
        why = "no row tells" if checked is None else "its rows were not checked for"
        return find(
            Severity.NOT_KEPT,
            name,
            f"{why} whether the rows of {key.referenced_table} that it refers to {_SAME_KEY}",
            remedy,
        )
    filled, crossing = checked.further[key.name]
    said = _ROWS[checked.is_exact]
    if not crossing:
        return find(
            Severity.NOTE,
            name,
            f"{said}all {filled:,} rows have the same key as the rows of {key.referenced_table} that they"
            " refer to",
            "The foreign key holds in the shards as long as the application keeps it so.",
        )
    return find(
        Severity.NOT_KEPT,
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
                yield find(
                    Severity.NOT_KEPT,
                    f"{table.sql}, {quoted(key.name)}",
                    f"the {what} does not contain the key: each shard would keep it for its own rows only",
                    "Add the key to it, or let the application see to it.",
                )


def _is_kept(table: Table, way: Way, key: Key) -> bool:
    """Returns whether rows in conflict would always be in one shard, or can't be in conflict."""
    columns = set(key.columns)
    one = id_column(table)
    return (
        (way.kind is not Kind.DERIVED and way.key in columns)
        or (way.kind is Kind.DERIVED and way.first is not None and columns.issuperset(way.first.columns))
        or (one is not None and one.name in columns)
    )


def _narrow(facts: Facts) -> Iterator[Finding]:
    """Finds integers without room for new IDs: keys of split tables, and what refers to these."""
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
        yield find(
            Severity.NOT_KEPT,
            column_name(name, column),
            f"{type_} has no room for new IDs: it is bigint in the shards, and new rows can't go back to the"
            " source",
            f"ALTER TABLE {name} ALTER COLUMN {quoted(column)} TYPE bigint; (rewrites the table)",
        )


KEY_FINDERS: Sequence[Callable[[Facts], Iterator[Finding]]] = (
    _keys,
    _rows_without_key,
    _foreign_keys,
    _uniques,
    _narrow,
)
