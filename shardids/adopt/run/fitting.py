"""Whether the tables of a node and of its shards take the rows of the source, and new ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, text

from shardids.adopt.plan.document import TablePlan
from shardids.adopt.plan.drawing import NEXT_ID, drawn_keys
from shardids.adopt.plan.obstacles import ROUTE
from shardids.adopt.run.sides import Sides, Taker
from shardids.pg.definitions import Column, Definition, has_rows, read_definitions
from shardids.pg.queries import quoted
from shardids.replication.subscriptions import Refusal

_WIDER = {
    "smallint": ("integer", "bigint"),
    "integer": ("bigint",),
    "character varying": ("text",),
}
"""Types that take every value of a type in as the same text."""


_REFERRING = text("""
    select k.conrelid::regclass::text as table, quote_ident(k.conname) as constraint
    from pg_constraint k
    where k.contype = 'f' and k.conparentid = 0 and k.confrelid = to_regclass(:name)
      and k.conrelid <> all (select to_regclass(own) from unnest(cast(:own as text[])) own
                             where to_regclass(own) is not null)
      and k.conrelid <> all (select part from unnest(cast(:closed as integer[])) shard,
                                              unnest(shardids.tables_of(shard)) part)
    order by 1, 2 limit 1""")


_UNRESOLVED = text("""
    select n.name, u.what, u.problem
    from unnest(cast(:names as text[])) with ordinality n (name, number)
    cross join shardids.unresolved(to_regclass(n.name)) u
    order by n.number, u.what""")


def computes_rows(
    connection: Connection, taker: Taker, sides: Sides, there: Mapping[str, Definition]
) -> Iterator[Refusal]:
    """Require tables whose expressions replication computes: without a search_path, as queries of ours do."""
    split = [[sides.in_shard(there[table.name], shard) for shard in taker.shards] for table in sides.split]
    for names in [*split, *([table.name] for table in sides.reference)]:
        found = connection.execute(_UNRESOLVED, {"names": names}).all()
        # One shard's fault is, as a rule, that of them all.
        for one in [one for one in found if one.name == found[0].name]:
            yield Refusal(
                reason=f'node "{taker.side.name}": replication can\'t compute {one.what} of {one.name},'
                f" since it has no search_path: {one.problem}",
                remedy="On the nodes: alter function … set search_path = …, of the function that uses this.",
            )


def fits_shards(
    connection: Connection, taker: Taker, sides: Sides, there: Mapping[str, Definition]
) -> Iterator[Refusal]:
    """Require that the tables of a node's shards are there, are empty, and take the source's rows."""
    plans = {table.name: table for table in sides.split}
    split = [there[name] for name in plans]
    in_shards = {sides.in_shard(table, shard) for table in split for shard in taker.shards}
    here = read_definitions(connection, in_shards | there.keys())
    node = f'node "{taker.side.name}"'
    for table in split:
        names = [sides.in_shard(table, shard) for shard in taker.shards]
        # One shard's fault is, as a rule, that of them all.
        faults = (list(_fits(table, here.get(name), name, connection, is_part=True)) for name in names)
        for reason, remedy in next(filter(None, faults), ()):
            yield Refusal(reason=f"{node}: {reason}", remedy=remedy)
        undrawn = (list(_draws(plans[table.name], table, here.get(name), name)) for name in names)
        for reason, remedy in next(filter(None, undrawn), ()):
            yield Refusal(reason=f"{node}: {reason}", remedy=remedy)
        if any(ROUTE in here[name].columns for name in names if name in here):
            yield Refusal(
                reason=f"{node}: tables {table.table} of its shards have a column {ROUTE}",
                remedy="Drop it by a revision of the application: shardids migrate",
            )
        if len({_kinds(table, here[name]) for name in names if name in here}) > 1:
            yield Refusal(
                reason=f"{node}: columns of {table.name} have another type or default in each shard",
                remedy="Make types that shards use on the node: shardids migrate, with node revisions.",
            )
        if table.name in here:
            yield Refusal(
                reason=f"{node} already has a table {table.name}, where the rows are to arrive",
                remedy="Rename or drop it there.",
            )
        for name, shard in zip(names, taker.shards, strict=True):
            parts = [sides.in_shard(one, shard) for one in split]
            if found := _referring(connection, name, parts, closed=()):
                yield _referred(node, name, found, "empty the shard")
                break
    for plan in sides.reference:
        table = there[plan.name]
        own = [one.name for one in sides.reference]
        if found := _referring(connection, plan.name, own, closed=taker.shards):
            prevented = f"empty {plan.name}, or would delete rows of {found.table}"
            yield _referred(node, plan.name, found, prevented)
        for reason, remedy in _fits(table, here.get(table.name), table.name, connection, is_part=False):
            yield Refusal(reason=f"{node}: {reason}", remedy=remedy)


def _referring(
    connection: Connection, name: str, own: Sequence[str], *, closed: Sequence[int]
) -> Row[Any] | None:
    """Return a foreign key to a table, if any; none of ``own``, or of shards that are closed before."""
    return connection.execute(
        _REFERRING, {"name": name, "own": list(own), "closed": list(closed)}
    ).one_or_none()


def _referred(node: str, name: str, found: Row[Any], prevented: str) -> Refusal:
    return Refusal(
        reason=f"{node}: {found.table} refers to {name} ({found.constraint}), and is not in the plan: an"
        f" abort could not {prevented}",
        remedy=f"alter table {found.table} drop constraint {found.constraint}; add it again when the adoption"
        " is over.",
    )


def _draws(
    plan: TablePlan, table: Definition, here: Definition | None, name: str
) -> Iterator[tuple[str, str]]:
    """Yield reasons, each with its remedy, why new rows of a shard would not be where their IDs say."""
    columns = here.columns if here is not None else {}
    for drawn, default in drawn_keys(table.columns, plan.id, plan.root_key).items():
        column = columns.get(drawn)
        if column is None or column.default == default or (default and _is_next_id(column, here)):
            continue
        subject = f"{name}.{quoted(drawn)}"
        alter = f"By a revision: alter table {table.table_sql} alter column {quoted(drawn)}"
        has = f"has the default {column.default}" if column.default is not None else "has no default"
        if default is None:
            yield (
                f"{subject} {has}: a key that a shard makes up is, as a rule, that of another shard",
                f"{alter} drop default; applications make the key, and open the session by it.",
            )
        else:
            yield (
                f"{subject} {has}: clients look for its new rows in the shards that IDs name",
                f"{alter} set default next_id()",
            )


def _is_next_id(column: Column, table: Definition | None) -> bool:
    return table is not None and column.default == f"{table.schema_sql}.{NEXT_ID}"


def _kinds(table: Definition, here: Definition) -> tuple[tuple[str, str, str | None], ...]:
    """Return the properties that the tables of all shards must share to be parts of one table."""
    return tuple(
        (c.name, c.type, c.default if c.is_generated or c.name not in table.columns else None)
        for c in here.columns.values()
    )


def _fits(
    table: Definition, here: Definition | None, name: str, connection: Connection, *, is_part: bool
) -> Iterator[tuple[str, str]]:
    """Yield reasons, each with its remedy, why a table can't take in the rows of another."""
    migrate = "Change it by a revision of the application: shardids migrate"
    if here is None:
        yield (
            f"table {name} does not exist",
            "Make the tables: shardids adopt prepare PLAN, then shardids migrate up",
        )
        return
    if here.kind != "r" or here.is_inherited or here.persistence != "p":
        yield f"{name} is not an ordinary table", migrate
        return
    for column in table.columns.values():
        yield from (
            (f"{name}.{column.name} {why}", migrate) for why in _takes(column, here.columns.get(column.name))
        )
    for column in here.stored:
        if column.name not in table.columns and column.not_null and column.default is None:
            yield f"{name}.{column.name} is NOT NULL, and the source has no such column", migrate
        if is_part and column.is_identity:
            yield f"{name}.{column.name} is an identity column", f"{migrate}; a default does as well"
    if here.identity == ():
        yield f"{name} has no primary key to find a changed row", migrate
    elif not set(here.identity or ()) <= table.columns.keys():
        yield f"{name} finds a changed row by columns that the source has not", migrate
    if here.hides_rows:
        yield (
            f"{name} has row security that binds the role, also as rows arrive",
            f"alter table {name} no force row level security; or use a role with BYPASSRLS",
        )
    if has_rows(connection, name):
        yield f"{name} has rows already", "Empty the tables of the shards."
    connection.rollback()


def _takes(there: Column, here: Column | None) -> Iterator[str]:
    if here is None:
        yield "is missing"
    elif there.is_generated != here.is_generated:
        yield "is generated on one side only"
    elif not _is_as_wide(there, here):
        yield f"is {here.type}, and {there.type} at the source"
    elif here.not_null and not there.not_null and not there.is_generated:
        yield "is NOT NULL, and may be NULL at the source"


def _is_as_wide(there: Column, here: Column) -> bool:
    if there.labels is not None or here.labels is not None:
        # The schema of an enum may be another.
        return there.short_type == here.short_type and set(there.labels or ()) <= set(here.labels or ())
    base, _, length = there.type.partition("(")
    if there.type == here.type or here.type in _WIDER.get(base, ()):
        return True
    # Without a length it takes any.
    return bool(length) and here.type == base and base in ("character varying", "numeric")
