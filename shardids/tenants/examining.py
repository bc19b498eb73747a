"""Reasons to refuse the move of a key. Each function returns its own and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from psycopg import sql
from sqlalchemy import Connection, text

from shardids.adopt.plan.inventory import ForeignKey
from shardids.catalog.topology import BY_DIRECTORY, OldIdRules
from shardids.pg.definitions import Column
from shardids.replication.subscriptions import Refusal
from shardids.tenants.family import COUNTERS, Family, Part, bare, run

_KEY_TYPES: Final = ("int2", "int4", "int8", "text", "varchar", "uuid", "date", "numeric", "bpchar")
"""Types of primary keys whose values JSON keeps."""
_NAMED: Final = 10
_MOST_GUARDS: Final = 200
"""How many keys a table refuses at most: each costs every writer the comparison of a value."""


def examine(
    family: Family, source: Connection, target: Connection, schema: str, old_ids: OldIdRules | None
) -> list[Refusal]:
    """Return every reason against a move to another schema; the connections are in open transactions.

    ``old_ids`` are the rules for IDs from before an adoption.
    """
    found = [*_roots(family), *_tables(family), *_lookups(family, source), *_old_ids(family, old_ids)]
    if found:
        # What counts rows needs tables that can be read as planned.
        return found
    return [
        *_references(family, source),
        *_target(family, source, target, schema),
        *_large(family, source),
        *_guards(family, source),
    ]


def _roots(family: Family) -> Iterator[Refusal]:
    if family.anchor is None:
        yield Refusal(
            reason=f"key {family.key!r} has no row in the root of schema {family.schema}",
            remedy="Look where it lives: shardids tenant show KEY.",
        )


def _tables(family: Family) -> Iterator[Refusal]:
    if family.strays:
        names = sorted(table.name for table in family.strays)
        yield Refusal(
            reason=f"{len(names)} tables have no path to the key: {_list(names)}",
            remedy="Name the column that holds the root's key with --key TABLE.COLUMN, or leave the table's"
            " rows where they are with --loose TABLE.",
        )
    for key in family.outside:
        yield Refusal(
            reason=f"table {key.table} is in another schema, and its foreign key {key.name} refers to"
            f" {key.referenced_table}: its rows would stay",
            remedy="Move the table into the shard, or drop the foreign key.",
        )
    for key in family.backward:
        yield Refusal(
            reason=f"foreign key {key.name} of table {key.table} and others go round in a circle: no order of"
            " the tables lets their rows arrive",
            remedy=f"alter table {key.table} drop constraint {key.name}, and add it again after the move.",
        )
    for part in family.parts:
        table = next((t for t in family.tables.values() if t.name == part.name), None)
        if table is not None and table.relkind != "r":
            yield Refusal(
                reason=f"table {part.name} is partitioned: its changes can't be followed row by row",
                remedy=f"Leave its rows where they are with --loose {part.name}.",
            )
        if not part.key:
            yield Refusal(
                reason=f"table {part.name} has no primary key: its rows have no name to be noted by",
                remedy=f"alter table {part.name} add primary key (…)",
            )
        odd = [
            column.name
            for column in part.columns
            if column.name in part.key and column.builtin_type not in _KEY_TYPES and part.name not in COUNTERS
        ]
        if odd:
            yield Refusal(
                reason=f"the primary key of table {part.name} has columns of types that can't be noted:"
                f" {_list(odd)}",
                remedy="Primary keys may be of integers, numeric, text, uuid and dates.",
            )


_LOOKUPS: Final = text("""
    select c.relname::text as name, t.tgname::text as trigger from pg_trigger t
    join pg_class c on c.oid = t.tgrelid
    where c.relnamespace = to_regnamespace(quote_ident(:schema)) and starts_with(t.tgname, 'shardids_lookup_')
    order by 1""")


def _lookups(family: Family, source: Connection) -> Iterator[Refusal]:
    names = {part.name for part in family.parts}
    found = {row.name for row in source.execute(_LOOKUPS, {"schema": family.schema}) if row.name in names}
    if found:
        yield Refusal(
            reason=f"tables have look-up columns, whose claims name shard by shard where a row is:"
            f" {_list(sorted(found))}",
            remedy="Their keys can't be moved yet. Drop the look-up, move the key, create it again.",
        )


def _old_ids(family: Family, rules: OldIdRules | None) -> Iterator[Refusal]:
    found = [
        part.name
        for part in family.parts
        if rules is not None
        and part.name in rules.of_table
        and rules.of_table[part.name].rule == BY_DIRECTORY
    ]
    if found:
        yield Refusal(
            reason=f"old IDs of tables are found by a directory of their shards: {_list(found)}",
            remedy="Their keys can't be moved yet.",
        )


def _references(family: Family, source: Connection) -> Iterator[Refusal]:
    """Require that no row refers from the key's rows to another key's, or the other way."""
    for keys in family.further.values():
        for key in keys:
            mine, theirs = family.part(bare(key.table)), family.part(bare(key.referenced_table))
            if theirs is None:
                # Whether the target has such rows, the copy finds out.
                continue
            for outward in (True, False):
                if mine is None and outward:
                    continue
                count = run(source, _crossing(family, key, mine, theirs, outward=outward)).scalar_one()
                if count:
                    a, b = (family.key, "another key") if outward else ("another key", family.key)
                    yield Refusal(
                        reason=f"{count} rows of table {bare(key.table)} of {a} refer by {key.name} to rows"
                        f" of {b} in {bare(key.referenced_table)}",
                        remedy="Rows of one key may refer to rows of that key only: change or delete them.",
                    )


def _crossing(
    family: Family, key: ForeignKey, mine: Part | None, theirs: Part, *, outward: bool
) -> sql.Composed:
    joined = sql.SQL(" and ").join(
        sql.SQL("b.{} = a.{}").format(sql.Identifier(there), sql.Identifier(here))
        for here, there in zip(key.columns, key.referenced, strict=True)
    )
    a = sql.SQL("false") if mine is None else family.owns(mine, "a", family.schema)
    b = family.owns(theirs, "b", family.schema)
    return sql.SQL("select count(*) from {} a join {} b on {} where {} and not coalesce({}, false)").format(
        sql.Identifier(family.schema, bare(key.table)),
        sql.Identifier(family.schema, theirs.name),
        joined,
        *((a, b) if outward else (b, a)),
    )


_COLUMNS: Final = text("""
    select c.relname::text as name, a.attname::text as column,
           replace(format_type(a.atttypid, a.atttypmod), :schema || '.', '') as type
    from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
    where c.relnamespace = to_regnamespace(quote_ident(:schema)) and c.relkind = 'r'""")
_FIRING: Final = text("""
    select c.relname::text as name, t.tgname::text as trigger from pg_trigger t
    join pg_class c on c.oid = t.tgrelid
    where c.relnamespace = to_regnamespace(quote_ident(:schema)) and not t.tgisinternal and t.tgenabled <> 'D'
      and not starts_with(t.tgname, 'shardids_key_')
    union all
    select c.relname, r.rulename from pg_rewrite r join pg_class c on c.oid = r.ev_class
    where c.relnamespace = to_regnamespace(quote_ident(:schema)) and c.relkind = 'r' and r.ev_enabled <> 'D'
    order by 1, 2""")


def _target(family: Family, source: Connection, target: Connection, schema: str) -> Iterator[Refusal]:
    """Require the same tables on the target, no code that would run on arrival, and no rows of the key."""
    there: dict[str, dict[str, str]] = {}
    for row in target.execute(_COLUMNS, {"schema": schema}):
        there.setdefault(row.name, {})[row.column] = row.type
    missing = [part.name for part in family.parts if part.name not in there]
    if missing:
        yield Refusal(
            reason=f"schema {schema} lacks {len(missing)} tables with rows of the key: {_list(missing)}",
            remedy="Bring both shards to one revision: shardids migrate up. Numbers need their kinds there:"
            " shardids counter create.",
        )
        return
    for part in family.parts:
        odd = [c.name for c in part.columns if there[part.name].get(c.name) != _plain(c, family.schema)]
        if odd:
            yield Refusal(
                reason=f"columns of table {part.name} differ in schema {schema}: {_list(odd)}",
                remedy="Bring both shards to one revision: shardids migrate up.",
            )
    yield from _kinds(family, source, target, schema)
    names = {part.name for part in family.parts}
    for row in target.execute(_FIRING, {"schema": schema}):
        if row.name in names:
            yield Refusal(
                reason=f"trigger or rule {row.trigger} of table {row.name} would run when rows arrive in"
                f" schema {schema}",
                remedy=f"Until the move has ended: alter table {schema}.{row.name} disable trigger"
                f" {row.trigger}",
            )
    for part in family.parts:
        owned = sql.SQL("select count(*) from {} a where {}").format(
            sql.Identifier(schema, part.name), family.owns(part, "a", schema)
        )
        if count := run(target, owned).scalar_one():
            yield Refusal(
                reason=f"{count} rows of the key are in table {part.name} of schema {schema} already",
                remedy="Compare them with the others, and delete the wrong ones.",
            )


def _kinds(family: Family, source: Connection, target: Connection, schema: str) -> Iterator[Refusal]:
    """Require the kinds of the key's numbers, with the same properties."""
    counter = family.part(COUNTERS[0])
    if counter is None:
        return
    used = sql.SQL("select distinct a.kind from {} a where {}").format(
        sql.Identifier(family.schema, counter.name), family.owns(counter, "a", family.schema)
    )
    names = run(source, used).scalars().all()
    there, here = (
        dict(
            run(
                connection,
                sql.SQL("select k.kind, to_jsonb(k) from {} k").format(
                    sql.Identifier(where, "shardids_counter_kind")
                ),
            ).all()
        )
        for connection, where in ((source, family.schema), (target, schema))
    )
    if odd := sorted(name for name in names if there.get(name) != here.get(name)):
        yield Refusal(
            reason=f"kinds of numbers are others in schema {schema}, or missing: {_list(odd)}",
            remedy="Bring both shards to one revision: shardids migrate up.",
        )


def _plain(column: Column, schema: str) -> str:
    return column.type.replace(f"{schema}.", "")


_LARGE_OBJECTS: Final = text("""
    select c.relname::text as name, a.attname::text as column from pg_class c
    join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
    join pg_type t on t.oid = a.atttypid
    where c.relnamespace = to_regnamespace(quote_ident(:schema)) and c.relkind = 'r'
      and 'oid'::regtype in (t.oid, t.typbasetype) and exists (select from pg_largeobject_metadata)""")


def _large(family: Family, source: Connection) -> Iterator[Refusal]:
    names = {part.name for part in family.parts}
    for row in source.execute(_LARGE_OBJECTS, {"schema": family.schema}):
        if row.name in names:
            yield Refusal(
                reason=f"column {row.column} of table {row.name} may refer to large objects, which stay",
                remedy="Store them as bytea, or remove them.",
            )


_GUARDS: Final = text("""
    select c.relname::text as name, count(*) as keys from pg_trigger t
    join pg_class c on c.oid = t.tgrelid
    where c.relnamespace = to_regnamespace(quote_ident(:schema)) and t.tgname ~ '^shardids_key_\\d+_insert$'
    group by 1 having count(*) >= :most order by 1""")
_POLICIES: Final = text("""
    select c.relname::text from pg_class c
    where c.relnamespace = to_regnamespace(quote_ident(:schema)) and c.relkind = 'r'
      and row_security_active(c.oid) order by 1""")


def _guards(family: Family, source: Connection) -> Iterator[Refusal]:
    for row in source.execute(_GUARDS, {"schema": family.schema, "most": _MOST_GUARDS}):
        yield Refusal(
            reason=f"table {row.name} refuses {row.keys} keys already that have left",
            remedy="Split the load in another way: each of them costs every writer a comparison.",
        )
        return
    names = {part.name for part in family.parts}
    hidden = [name for name in source.scalars(_POLICIES, {"schema": family.schema}) if name in names]
    if hidden:
        yield Refusal(
            reason=f"row security hides rows of {_list(hidden)} from the role that moves them",
            remedy="Use a role that owns the tables, or has BYPASSRLS.",
        )


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
