"""The relay's tables and triggers as SQL: the source's columns, and the shard of rows without an own key.

A row of a derived table has the shard of the row that it refers to, as both are on the relay at that moment.
One trigger computes it when the row is written; another, on the table that is referred to, computes it again
when that row comes later, goes, or finds another shard. They fire for the apply worker alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from psycopg import sql

from shardids.adopt.definitions import Column, Definition
from shardids.adopt.filters import ROUTE
from shardids.adopt.plan import Hop, Kind, TablePlan
from shardids.adopt.sides import Sides

_KEPT: Final = frozenset(
    {
        "boolean",
        "smallint",
        "integer",
        "bigint",
        "real",
        "double precision",
        "numeric",
        "uuid",
        "date",
        "timestamp without time zone",
        "timestamp with time zone",
        "text",
        "character varying",
        "bytea",
        "jsonb",
    }
)
"""Types that a relay has, too. What is of any other, an enum for example, it stores as its text."""
REFERRED: Final = frozenset({"smallint", "integer", "bigint", "uuid", "date", "text", "character varying"})
"""Types of columns by which a row finds the one with its key."""


def base_type(type_name: str) -> str:
    """Returns a type without its length: ``numeric`` for ``numeric(10,2)``."""
    head, _, rest = type_name.partition("(")
    return head + rest.partition(")")[2]


def relay_type(column: Column) -> str:
    """Returns the type that a column has on the relay."""
    return column.type if column.labels is None and base_type(column.type) in _KEPT else "text"


def identity_of(table: Definition) -> Sequence[str]:
    """Returns the columns by which the relay finds a row that is updated or deleted; none: the whole row."""
    return table.primary_key if table.identity is None else table.identity


def create_table(number: int, plan: TablePlan, table: Definition) -> str:
    """Returns the statements that make a table; ``number`` is its place in the plan."""
    columns = [f"{_quoted(column.name)} {relay_type(column)}" for column in table.stored]
    if plan.kind is Kind.DERIVED:
        columns.append(f"{ROUTE} integer")
    identity = [name for name in identity_of(table) if not table.columns[name].is_generated]
    if identity:
        columns.append(f"constraint {_index(number, 'identity')} primary key ({_list(identity)})")
    return f"create table {table.name} ({', '.join(columns)}); alter table {table.name} replica identity full"


def fill(sides: Sides, plan: TablePlan, there: Mapping[str, Definition]) -> Iterator[str]:
    """Yields the statements that compute the shards of all rows of a derived table, parents' being right."""
    home, hop = home_of_parent(sides, plan, there, "p."), plan.path[0]
    yield (
        f"update {plan.name} c set {ROUTE} = {home} from {hop.table} p"  # noqa: S608 -- quoted
        f" where {_joined(hop, 'p', 'c')} and c.{ROUTE} is distinct from {home}"
    )
    yield (
        f"update {plan.name} c set {ROUTE} = null where c.{ROUTE} is not null"  # noqa: S608 -- quoted
        f" and not exists (select from {hop.table} p where {_joined(hop, 'p', 'c')})"
    )


def home_of_parent(sides: Sides, plan: TablePlan, there: Mapping[str, Definition], of: str) -> str:
    """Returns an expression for the shard of the row that one of a derived table refers to, on the relay."""
    if len(plan.path) > 1:
        return f"{of}{ROUTE}"
    key = there[plan.path[0].table].columns[plan.key or ""]
    return sides.shard_of_key(key, of=of)


def index_paths(
    number: int, parent_number: int, plan: TablePlan, there: Mapping[str, Definition]
) -> Iterator[str]:
    """Yields the statements that index the way from derived rows to what they refer to, and back."""
    hop = plan.path[0]
    make = "create index if not exists"
    yield f"{make} {_index(number, 'path')} on {plan.name} ({_list(hop.columns)})"
    yield f"{make} {_index(number, 'lost')} on {plan.name} ({_list(hop.columns)}) where {ROUTE} is null"
    parent = there[hop.table]
    if tuple(identity_of(parent)) != hop.referenced:
        yield f"{make} {_index(number, f'of_{parent_number}')} on {hop.table} ({_list(hop.referenced)})"


def triggers(number: int, plan: TablePlan, sides: Sides, there: Mapping[str, Definition]) -> Iterator[str]:
    """Yields the statements that make the triggers of a derived table and of the one that it refers to."""
    hop = plan.path[0]
    place, pass_on = f"place_{number}", f"pass_on_{number}"
    yield _function(
        place,
        f"select {home_of_parent(sides, plan, there, 'p.')} into new.{ROUTE} from {hop.table} p"  # noqa: S608 -- quoted
        f" where {_joined(hop, 'p', 'new')}; return new;",
    )
    again = f"update {plan.name} c set {ROUTE} = null where"  # noqa: S608 -- quoted
    old, new = (_joined(hop, row, "c") for row in ("old", "new"))
    yield _function(
        pass_on,
        f"if tg_op = 'INSERT' then {again} {new} and c.{ROUTE} is null; else {again} {old};"
        f" if tg_op = 'UPDATE' and {_differ(hop.referenced)} then {again} {new}; end if;"
        " end if; return null;",
    )
    # An update of the apply worker leaves the shard as it was; those of the other trigger have it computed.
    moved = f"{_differ(hop.columns)} or pg_trigger_depth() > 0"
    yield from _trigger(plan.name, f"{place}_new", "before insert", "", place)
    yield from _trigger(plan.name, f"{place}_moved", "before update", moved, place)
    home = (ROUTE,) if len(plan.path) > 1 else (plan.key or "",)
    yield from _trigger(hop.table, f"{pass_on}_new", "after insert or delete", "", pass_on)
    yield from _trigger(
        hop.table, f"{pass_on}_moved", "after update", _differ((*hop.referenced, *home)), pass_on
    )


def _function(name: str, body: str) -> str:
    return (
        f"create or replace function shardids_relay.{name}() returns trigger language plpgsql"
        f" set search_path = pg_catalog, pg_temp as {_literal(f'begin {body} end')};"
        f" revoke execute on function shardids_relay.{name}() from public"
    )


def _trigger(table: str, name: str, when: str, condition: str, function: str) -> Iterator[str]:
    only = f"when ({condition}) " if condition else ""
    yield (
        f"create or replace trigger shardids_{name} {when} on {table}"
        f" for each row {only}execute function shardids_relay.{function}()"
    )
    yield f"alter table {table} enable replica trigger shardids_{name}"


def _joined(hop: Hop, parent: str, child: str) -> str:
    return " and ".join(
        f"{parent}.{_quoted(theirs)} = {child}.{_quoted(own)}"
        for own, theirs in zip(hop.columns, hop.referenced, strict=True)
    )


def _differ(columns: Sequence[str]) -> str:
    return "({})".format(
        " or ".join(f"old.{_quoted(name)} is distinct from new.{_quoted(name)}" for name in columns)
    )


def _index(number: int, what: str) -> str:
    return f"shardids_{number}_{what}"


def _list(names: Sequence[str]) -> str:
    return ", ".join(map(_quoted, names))


def _literal(value: str) -> str:
    return sql.Literal(value).as_string()


def _quoted(name: str) -> str:
    return sql.Identifier(name).as_string()
