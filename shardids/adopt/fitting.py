"""Whether a table of the source can be followed, and whether tables of the cluster can take its rows in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from psycopg import sql
from sqlalchemy import Connection

from shardids.adopt.definitions import Column, Definition, has_rows, read_definitions
from shardids.adopt.filters import KEY_TYPES, ROUTE, family_of
from shardids.adopt.plan import Kind, TablePlan
from shardids.adopt.sides import Sides, Taker
from shardids.errors import BadArgument
from shardids.mover.requirements import Refusal

_WIDER = {
    "smallint": ("integer", "bigint"),
    "integer": ("bigint",),
    "real": ("double precision",),
    "character varying": ("text",),
}
"""Types that take every value of a type in as the same text."""
_RESERVED = ("shardids", "shardids_catalog", "shardids_query", "shardids_nodes", "shardids_adopt")
_FULL_NEEDS_ALL = 180000
"""From this version on a table with replica identity FULL and a generated column refuses its updates."""


def is_followable(
    table: TablePlan, there: Definition, version: int, *, is_filtered: bool
) -> Iterator[Refusal]:
    """Requires that every change of a table is logged with what tells the shard of its row.

    ``is_filtered``: the source itself tells the shard, by a row filter.
    """
    name = table.name
    if there.kind not in ("r", "p") or there.persistence != "p":
        yield Refusal(
            reason=f"{name} is not an ordinary, logged table",
            remedy="Leave it out of the plan, or: alter table … set logged",
        )
        return
    if there.is_inherited:
        yield Refusal(
            reason=f"table {name} inherits, or is inherited by another",
            remedy="Adopt partitioned tables by their root; end other inheritance: alter table … no inherit",
        )
    if not there.is_own:
        yield Refusal(
            reason=f"the role is not an owner of {name}", remedy="Use the owner's or a superuser's URL."
        )
    if there.schema in _RESERVED:
        yield Refusal(reason=f"schema {there.schema} is shardids' own", remedy="Rename it at the source.")
    if there.identity == ():
        yield Refusal(
            reason=f"table {name} has no replica identity: its updates can't be followed",
            remedy=f"Give it a primary key, or: alter table {name} replica identity full",
        )
    if there.has_full_identity and version >= _FULL_NEEDS_ALL and len(there.stored) < len(there.columns):
        yield Refusal(
            reason=f"table {name} has replica identity FULL and a generated column: updates would fail",
            remedy=f"alter table {name} replica identity using index …, a unique one with the key",
        )
    if table.kind in (Kind.ROOT, Kind.DIRECT):
        yield from _has_key(table, there, is_filtered=is_filtered)


def _has_key(table: TablePlan, there: Definition, *, is_filtered: bool) -> Iterator[Refusal]:
    key = there.columns.get(table.key or "")
    if key is None:
        yield Refusal(reason=f"table {table.name} has no column {table.key}", remedy="Write the plan again.")
        return
    try:
        is_hashed = family_of(key.type) is not None and key.is_deterministic
    except BadArgument:
        is_hashed = False
    if not is_hashed or key.is_generated:
        generated = ", generated" if key.is_generated else ""
        collation = "" if key.is_deterministic else ", of a nondeterministic collation"
        yield Refusal(
            reason=f"{table.name}.{key.name} can't be a key: it is {key.type}{generated}{collation}",
            remedy=f"A key is a stored column, {' or '.join(KEY_TYPES)}.",
        )
    if not key.not_null:
        yield Refusal(
            reason=f"{table.name}.{key.name} may be NULL, and a row without key has no shard",
            remedy=f"alter table {table.name} alter column {_quoted(key.name)} set not null",
        )
    if is_filtered and there.identity is not None and key.name not in there.identity:
        yield Refusal(
            reason=f"{table.name}.{key.name} is not logged when a row is updated or deleted: with the filter"
            " that the nodes need, every UPDATE and DELETE there would fail",
            remedy=f"alter table {table.name} replica identity full; to go back: … replica identity default;"
            " or bring the rows through a relay: --via URL",
        )
    elif is_filtered and table.kind is Kind.DIRECT and there.identity is not None and there.has_toast:
        yield Refusal(
            reason=f"{table.name} has columns whose large values are not logged by an UPDATE of others: a row"
            " whose key changes would arrive on another node without them",
            remedy=f"alter table {table.name} replica identity full; or bring the rows through a relay: --via"
            " URL",
        )


def fits_shards(
    connection: Connection, taker: Taker, sides: Sides, there: Mapping[str, Definition]
) -> Iterator[Refusal]:
    """Requires that the tables of a node's shards are there, are empty, and take the source's rows."""
    split = [there[table.name] for table in sides.split]
    in_shards = {sides.in_shard(table, shard) for table in split for shard in taker.shards}
    here = read_definitions(connection, in_shards | there.keys())
    node = f'node "{taker.side.name}"'
    for table in split:
        names = [sides.in_shard(table, shard) for shard in taker.shards]
        # One shard's fault is, as a rule, that of them all.
        faults = (list(_fits(table, here.get(name), name, connection, is_part=True)) for name in names)
        for reason, remedy in next(filter(None, faults), ()):
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
                reason=f"{node} has a table {table.name} of its own, where the rows are to arrive",
                remedy="Rename or drop it there.",
            )
    for plan in sides.reference:
        table = there[plan.name]
        for reason, remedy in _fits(table, here.get(table.name), table.name, connection, is_part=False):
            yield Refusal(reason=f"{node}: {reason}", remedy=remedy)


def _kinds(table: Definition, here: Definition) -> tuple[tuple[str, str, str | None], ...]:
    """Returns what the tables of all shards must have alike to be parts of one table."""
    return tuple(
        (c.name, c.type, c.default if c.is_generated or c.name not in table.columns else None)
        for c in here.columns.values()
    )


def _fits(
    table: Definition, here: Definition | None, name: str, connection: Connection, *, is_part: bool
) -> Iterator[tuple[str, str]]:
    """Yields reasons, each with its remedy, why a table can't take in the rows of another."""
    migrate = "Change it by a revision of the application: shardids migrate"
    if here is None:
        yield f"there is no table {name}", "Make it by a revision of the application: shardids migrate"
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
        yield f"{name} has no primary key, by which a changed row is found", migrate
    elif not set(here.identity or ()) <= table.columns.keys():
        yield f"{name} finds a changed row by columns that the source has not", migrate
    elif table.identity is not None and not set(here.identity or here.columns) <= set(table.identity):
        yield (
            f"{name} finds a changed row by columns that the source does not log",
            f"Give it the primary key of {table.name}, or: alter table {table.name} replica identity full",
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


def _quoted(name: str) -> str:
    return sql.Identifier(name).as_string()
