"""Which tables a query node shows, and with which columns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Engine

from shardids.catalog.counters import COUNTER_TABLES
from shardids.catalog.lookups import PREFIX
from shardids.catalog.nodes import Nodes
from shardids.catalog.queries import read
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
        enum: the name of its enum type, which the query node has, too.
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
    """A table that the query node shows; a reference table is read from one shard."""

    name: str
    columns: tuple[QueryColumn, ...]
    is_reference: bool

    @property
    def enums(self) -> dict[str, tuple[str, ...]]:
        """Returns the enum types of its columns, and their labels."""
        return {column.enum: column.labels for column in self.columns if column.enum is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTable:
    """A table as some shards of a node define it: a row of ``views/tables.v1.sql``."""

    name: str
    columns: list[dict[str, Any]]
    has_ids: bool
    refers: list[str]
    shards: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The tables to show, and a line about each that is left out."""

    tables: tuple[QueryTable, ...]
    left_out: tuple[str, ...]


def choose_tables(
    nodes: Nodes,
    placement: Placement,
    *,
    sharded: Collection[str],
    reference: Collection[str],
    shown: Collection[str],
) -> Choice:
    """Returns the tables whose rows can be told apart by shard, with the columns that all shards have.

    Args:
        nodes: the nodes.
        placement: of the shards.
        sharded: tables whose rows are each in one shard, though no ID in them says so.
        reference: tables that have the same rows in every shard.
        shown: tables that the query node shows now.

    Raises:
        BadArgument: no shard has a table of that name.
        ClusterConflict: there is no shard, or one lacks a table that is shown.
    """
    if not placement.node_of:
        raise ClusterConflict("the cluster has no shards yet", hint="To create them: shardids shard create")
    by_name = _found(nodes, placement)
    for name in (*sharded, *reference):
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
                hint="Bring all shards to one revision, then: shardids view refresh",
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
    return Choice(tables=tuple(tables), left_out=tuple(left_out))


def _found(nodes: Nodes, placement: Placement) -> dict[str, list[FoundTable]]:
    """Returns the tables of the shards, of each from its owner."""

    def ask(_name: str, engine: Engine) -> list[FoundTable]:
        with engine.connect() as connection:
            return read(connection, "views/tables.v1", FoundTable)

    owners = set(placement.node_of.values())
    found: dict[str, list[FoundTable]] = {}
    for node, tables in sorted(nodes.each(ask, owners).all().items()):
        for one in tables:
            shards = [shard for shard in one.shards if placement.node_of.get(shard) == node]
            if shards:
                mine = FoundTable(
                    name=one.name, columns=one.columns, has_ids=one.has_ids, refers=one.refers, shards=shards
                )
                found.setdefault(one.name, []).append(mine)
    return dict(sorted(found.items()))


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
