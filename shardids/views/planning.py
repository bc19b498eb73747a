"""Plans a view from the table's columns in all shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Engine

from shardids.catalog.nodes import Nodes
from shardids.catalog.queries import read
from shardids.catalog.topology import Placement, schema_name
from shardids.errors import BadArgument, ClusterConflict
from shardids.views import statements
from shardids.views.state import View
from shardids.views.statements import ShardSource, ViewColumn, ViewPlan

_Columns = tuple[ViewColumn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _TableColumns:
    """The columns of the table in one shard: a row of ``views/columns.v1.sql``."""

    shard: int
    names: list[str]
    types: list[str]
    are_cast: list[bool]

    @property
    def columns(self) -> _Columns:
        rows = zip(self.names, self.types, self.are_cast, strict=True)
        return tuple(ViewColumn(name=name, type=type_, is_cast=is_cast) for name, type_, is_cast in rows)


def plan_of(nodes: Nodes, view: View, placement: Placement, prefix: str) -> ViewPlan:
    """Plans a view that reads every shard from its owner.

    Raises:
        BadArgument: the table has no such ID column.
        ClusterConflict: a shard lacks the table or has other columns, or there is no shard, or the cluster
            has old IDs.
        ShardLost: a shard was lost with its node.
    """
    if placement.old_ids is not None:
        raise ClusterConflict(
            "a view of one table finds shards by IDs, and IDs from before this cluster name none",
            hint="The query node's views don't need IDs: shardids view create --all",
        )
    placement.all_shards()
    return ViewPlan(
        name=view.name,
        table_name=view.table_name,
        id_column=view.id_column,
        columns=_common_columns(view, _tables(nodes, view.table_name, placement), placement),
        sources=[
            ShardSource(
                shard=shard,
                schema=schema_name(prefix, shard),
                server=None if node == view.node else statements.server_name(node),
            )
            for shard, node in sorted(placement.node_of.items())
        ],
    )


def _tables(nodes: Nodes, table: str, placement: Placement) -> dict[int, _Columns]:
    """Returns the table's columns in every shard that has the table."""

    def columns(_name: str, engine: Engine) -> list[_TableColumns]:
        with engine.connect() as connection:
            return read(connection, "views/columns.v1", _TableColumns, table_name=table)

    return {
        one.shard: one.columns
        for name, found in nodes.each(columns, placement.nodes).all().items()
        for one in found
        if placement.node_of.get(one.shard) == name
    }


def _common_columns(view: View, tables: Mapping[int, _Columns], placement: Placement) -> _Columns:
    """Returns the columns, which must be the same in all shards."""
    missing = sorted(placement.node_of.keys() - tables.keys())
    if missing:
        raise ClusterConflict(
            f'{len(missing)} shards have no table "{view.table_name}", for example shard {missing[0]} on node'
            f' "{placement.node_of[missing[0]]}"',
            hint="Create the table in all shards first: the view reads them all.",
        )
    if not tables:
        raise ClusterConflict("the cluster has no shards yet", hint="To create them: shardids shard create")
    first, *others = sorted(tables)
    for shard in others:
        if tables[shard] != tables[first]:
            raise ClusterConflict(
                f'table "{view.table_name}" has other columns in shard {shard} than in shard {first}',
                hint="Bring all shards to one revision first.",
            )
    types = {column.name: column.type for column in tables[first]}
    if types.get(view.id_column) != "bigint":
        raise BadArgument(
            f'"{view.table_name}" has no column "{view.id_column}" of type bigint',
            hint="--id names the column whose IDs belong to the row's shard; the view finds shards by it.",
        )
    return tables[first]
