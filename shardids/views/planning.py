"""What a view is to be, from the table as it is in all shards."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from shardids.catalog.connections import CONNECT_TIMEOUT_S
from shardids.catalog.queries import read
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import Node, Placement, schema_name
from shardids.errors import BadArgument, ClusterConflict
from shardids.install.provision import node_engine
from shardids.views import statements
from shardids.views.state import View
from shardids.views.statements import Column, Plan, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class _TableColumns:
    """The columns of the table in one shard: a row of ``views/columns.v1.sql``."""

    shard: int
    names: list[str]
    types: list[str]
    are_cast: list[bool]

    @property
    def columns(self) -> tuple[Column, ...]:
        rows = zip(self.names, self.types, self.are_cast, strict=True)
        return tuple(Column(name=name, type=type_, is_cast=is_cast) for name, type_, is_cast in rows)


def plan_of(catalog: Catalog, view: View, placement: Placement, prefix: str) -> Plan:
    """Plans a view that reads every shard where it is placed.

    Raises:
        BadArgument: the table has no such column of IDs.
        ClusterConflict: a shard has no such table, or with other columns; or there is no shard.
    """
    tables: dict[int, tuple[Column, ...]] = {}
    with ThreadPoolExecutor(max_workers=max(1, len(placement.nodes))) as pool:
        for name, found in pool.map(
            lambda node: (node.name, _table_columns(catalog, node, view.table_name)), placement.nodes.values()
        ):
            tables |= {one.shard: one.columns for one in found if placement.node_of.get(one.shard) == name}
    missing = sorted(placement.node_of.keys() - tables.keys())
    if missing:
        raise ClusterConflict(
            f'{len(missing)} shards have no table "{view.table_name}": shard {missing[0]} on node'
            f' "{placement.node_of[missing[0]]}", for one',
            hint="Make the table in all shards first: the view reads them all.",
        )
    if not tables:
        raise ClusterConflict("the cluster has no shard yet", hint="To make them: shardids shard create")
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
            hint="--id names the column with IDs of the shard that a row is in; the view finds shards by it.",
        )
    return Plan(
        name=view.name,
        table_name=view.table_name,
        id_column=view.id_column,
        columns=tables[first],
        sources=[
            Source(
                shard=shard,
                schema=schema_name(prefix, shard),
                server=None if node == view.node else statements.server_name(node),
            )
            for shard, node in sorted(placement.node_of.items())
        ],
    )


def _table_columns(catalog: Catalog, node: Node, table: str) -> list[_TableColumns]:
    engine = node_engine(node, catalog.url, connect_timeout_s=CONNECT_TIMEOUT_S)
    try:
        with engine.connect() as connection:
            return read(connection, "views/columns.v1", _TableColumns, table_name=table)
    finally:
        engine.dispose()
