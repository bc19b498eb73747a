"""Reads the placement of a cluster, with all that clients know of it, in a caller's transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Connection, text

from shardids.catalog.regions import Region
from shardids.catalog.topology import Node, OldIdRule, OldIdRules, Placement, RegisteredLookup

# One statement, so one snapshot: the version belongs to just these rows.
_PLACEMENT: Final = text("""
    select c.version, n.name, n.url, n.region, null as first_shard, null as last_shard, p.shard, p.state,
           null as table_name, null as id_column, null as rule,
           cast(null as bigint) as below, cast(null as boolean) as negative
    from shardids_catalog.cluster c
    left join shardids_catalog.node n on true
    left join shardids_catalog.placement p on p.node = n.name and p.state <> 'creating'
    union all
    select c.version, null, null, r.name, r.first_shard, r.last_shard, null, null,
           null, null, null, null, null
    from shardids_catalog.cluster c
    join shardids_catalog.region r on true
    union all
    select c.version, null, null, null, null, null, null, null,
           r.table_name, r.id_column, r.rule, c.old_ids_below,
           c.time_bits + c.shard_bits + c.sequence_bits < 64
    from shardids_catalog.cluster c
    left join shardids_catalog.old_id_rule r on true
    where c.old_ids_below is not null
    order by name, shard, first_shard""")

_LOOKUPS: Final = text("""
    select table_name, column_name, claims, is_ready from shardids_catalog.lookup
    order by table_name, column_name""")


def read_placement(connection: Connection) -> Placement:
    """Returns which node holds which shard now; shards that are still being created are left out."""
    found = connection.execute(_PLACEMENT).all()
    return Placement(
        version=found[0].version,
        nodes={row.name: Node(name=row.name, url=row.url, region=row.region) for row in found if row.name},
        node_of={row.shard: row.name for row in found if row.state == "active"},
        lost={row.shard: row.name for row in found if row.state == "lost"},
        old_ids=_old_ids([row for row in found if row.below]),
        lookups=read_lookups(connection),
        regions={
            row.region: Region(name=row.region, first_shard=row.first_shard, last_shard=row.last_shard)
            for row in found
            if row.first_shard is not None
        },
    )


def read_lookups(connection: Connection) -> dict[tuple[str, str], RegisteredLookup]:
    """Returns the columns that are unique over all shards, by table and column."""
    return {
        (row.table_name, row.column_name): RegisteredLookup(
            table=row.table_name,
            column=row.column_name,
            claims=row.claims,
            is_ready=row.is_ready,
        )
        for row in connection.execute(_LOOKUPS)
    }


def _old_ids(rows: Sequence[Any]) -> OldIdRules | None:
    if not rows:
        return None
    rules = [OldIdRule(table=r.table_name, column=r.id_column, rule=r.rule) for r in rows if r.table_name]
    return OldIdRules(
        below=rows[0].below, negative=rows[0].negative, of_table={rule.table: rule for rule in rules}
    )
