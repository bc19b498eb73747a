"""Chooses the tables and columns that a query node shows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from sqlalchemy import Engine

from shardids.catalog.counters import COUNTER_TABLES
from shardids.catalog.lookups import PREFIX
from shardids.catalog.nodes import Nodes
from shardids.catalog.queries import read
from shardids.catalog.references import References
from shardids.catalog.topology import Placement
from shardids.errors import BadArgument, ClusterConflict

NODE_COLUMN: Final = "shardids_node"
"""The column that tells which node a row was read from, in schema ``shardids_nodes``."""
SHARD_COLUMN: Final = "shardids_shard"
"""The column that tells which shard a row is in."""
_OURS: Final = frozenset({"alembic_version", "shardids_version", "shardids_load", *COUNTER_TABLES})


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryColumn:
    """A column as the query node shows it.

    Attributes:
        name: its name.
        type: its type on the nodes, as SQL.
        is_cast: whether it has to be cast to that, since its own type is another in each shard.
        collation: its collation as SQL, if it is not the type's.
        enum: the name of its enum type, which the query node also has.
        labels: the labels of that, in order.
        is_array: whether it is an array of that.
    """

    name: str
    type: str
    is_cast: bool
    collation: str | None
    enum: str | None
    labels: tuple[str, ...]
    is_array: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryTable:
    """A table that the query node shows.

    Attributes:
        name: its name.
        columns: its columns.
        is_reference: whether all shards have the same rows, so that one is read.
        writer: of a table of the cluster's reference tables, the node that they are written to on.
    """

    name: str
    columns: tuple[QueryColumn, ...]
    is_reference: bool
    writer: str | None = None

    @property
    def enums(self) -> dict[str, tuple[str, ...]]:
        """Returns the enum types of its columns, and their labels."""
        return {column.enum: column.labels for column in self.columns if column.enum is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTable:
    """A table as some shards of a node define it: a row of ``views/tables.v1.sql``.

    ``shards`` is ``[None]`` for a reference table.
    """

    name: str
    columns: list[dict[str, Any]]
    has_ids: bool
    refers: list[str]
    shards: list[int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The tables to show, and a line about each that is left out."""

    tables: tuple[QueryTable, ...]
    left_out: tuple[str, ...]


def choose_tables(
    nodes: Nodes,
    placement: Placement,
    references: References,
    *,
    sharded: Collection[str],
    reference: Collection[str],
    shown: Collection[str],
    named: Collection[str] = (),
) -> Choice:
    """Returns the tables whose rows can be told apart by shard, with the columns that all shards have.

    Args:
        nodes: the nodes.
        placement: of the shards.
        references: the cluster's reference tables.
        sharded: tables whose rows are each in one shard, though no ID in them says so.
        reference: tables that have the same rows in every shard.
        shown: tables that the query node shows now.
        named: tables that some shard must have.

    Raises:
        BadArgument: no shard has a table of that name.
        ClusterConflict: a shard lacks a table that is shown.
    """
    by_name, of_writer = _found(nodes, placement, references.writer)
    for name in named:
        if name not in by_name:
            raise BadArgument(
                f'no shard has a table "{name}"', hint=f"Tables: {', '.join(by_name) or 'none'}."
            )
    located = _located(by_name, sharded) - set(reference)
    tables, left_out = [], []
    for name, definitions in by_name.items():
        missing = placement.node_of.keys() - {shard for one in definitions for shard in one.shards}
        reason = _reason(definitions, name in located or name in reference)
        if missing and name in shown:
            shard = min(missing)
            raise ClusterConflict(
                f'{len(missing)} shards have no table "{name}", for example shard {shard} on node'
                f' "{placement.node_of[shard]}"',
                hint="Bring all shards to one revision, then: shardids query-node refresh",
            )
        if name in _OURS or name.startswith(PREFIX):
            continue
        if missing:
            reason = f"{len(missing)} shards don't have it, for example shard {min(missing)}"
        if reason:
            left_out.append(f'table "{name}" is left out: {reason}')
        else:
            columns = _common_columns(definitions)
            shown_names = {column.name for column in columns}
            left_out += [
                f'column "{column}" of table "{name}" is left out: not all shards have it alike'
                for column in dict.fromkeys(c["name"] for one in definitions for c in one.columns)
                if column not in shown_names
            ]
            tables.append(QueryTable(name=name, columns=columns, is_reference=name in reference))
    for one in of_writer:
        if one.name in by_name:
            left_out.append(f'reference table "{one.name}" is left out: shards have a table of that name')
        elif references.states.get(one.name) == "active":
            columns = _common_columns([one])
            tables.append(
                QueryTable(name=one.name, columns=columns, is_reference=True, writer=references.writer)
            )
    return Choice(tables=tuple(tables), left_out=tuple(left_out))


def _found(
    nodes: Nodes, placement: Placement, writer: str | None
) -> tuple[dict[str, list[FoundTable]], list[FoundTable]]:
    """Returns the tables of the shards, of each from its owner, and the reference tables of their writer."""

    def ask(_name: str, engine: Engine) -> list[FoundTable]:
        with engine.connect() as connection:
            return read(connection, "views/tables.v1", FoundTable)

    asked = {*placement.node_of.values(), *([writer] if writer is not None else ())}
    of_writer: list[FoundTable] = []
    found: dict[str, list[FoundTable]] = {}
    for node, tables in sorted(nodes.each(ask, asked).all().items()):
        for one in tables:
            if None in one.shards:
                of_writer += [one] if node == writer else []
                continue
            shards = [s for s in one.shards if s is not None and placement.node_of.get(s) == node]
            if shards:
                found.setdefault(one.name, []).append(replace(one, shards=list(shards)))
    return dict(sorted(found.items())), of_writer


def _located(by_name: Mapping[str, Sequence[FoundTable]], sharded: Iterable[str]) -> set[str]:
    """Returns the tables of whose rows each is in one shard: it has an ID, or must refer to one that has."""
    located = {name for name, there in by_name.items() if all(one.has_ids for one in there)} | set(sharded)
    while True:
        new = {
            name
            for name, there in by_name.items()
            if name not in located and all(not located.isdisjoint(one.refers) for one in there)
        }
        if not new:
            return located
        located |= new


def _reason(definitions: Sequence[FoundTable], is_known: bool) -> str:
    names = {column["name"] for one in definitions for column in one.columns}
    if not is_known:
        return (
            "nothing says whether each shard has rows of its own (--sharded) or all have the same"
            " (--reference)"
        )
    if names & {NODE_COLUMN, SHARD_COLUMN}:
        return f"it has a column {NODE_COLUMN} or {SHARD_COLUMN}, as the query node's own are called"
    return "" if _common_columns(definitions) else "its shards have no column in common"


def _common_columns(definitions: Sequence[FoundTable]) -> tuple[QueryColumn, ...]:
    """Returns the columns that all shards define alike, but those of types that only a shard has."""
    first, *others = definitions
    return tuple(
        QueryColumn(
            name=column["name"],
            type=column["type"] or ("text[]" if column["is_array"] else "text"),
            is_cast=column["is_cast"],
            collation=column["collation"],
            enum=column["enum"],
            labels=tuple(column["labels"] or ()),
            is_array=column["is_array"],
        )
        for column in first.columns
        if (column["type"] or column["enum"])
        and not column["is_own"]
        and all(column in other.columns for other in others)
    )
