"""The facts that the catalog and its node have of one shard."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection, text

from shardids.catalog.leases import visible_leases
from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog
from shardids.catalog.shards import read_shard
from shardids.errors import UnknownShard


def inspect_shard(catalog: Catalog, shard: int) -> dict[str, object]:
    """Return the facts of the catalog and the owner node about a shard, ready to be shown.

    Raises:
        UnknownShard: no node owns the shard, or its owner does not have it.
    """
    node, region = catalog.node_of(shard), catalog.placement().region_of(shard)
    with Nodes({node.name: node}, catalog.url) as nodes, nodes[node.name].connect() as connection:
        _require_there(connection, shard, node.name)
        connection.commit()
        there = read_shard(connection, shard)
        row = connection.execute(
            text("""
                select schema, state, moved_to, server, activated_at,
                       shardids.time_of(shardids.id_of(
                         (shardids.offset_ms(pg_sequence_last_value(id_offset))
                          << shardids.sequence_bits())
                         + pg_sequence_last_value(id_counter), id)) as last_id_time
                from shardids.shard where id = :shard"""),
            {"shard": shard},
        ).one()
    with Nodes({node.name: node}, catalog.url) as nodes:
        leases = [lease for lease in visible_leases(catalog, nodes) if lease.shard == shard]
    facts = {"shard": shard, "node": node.name, "url": node.url, "region": region} | row._asdict()
    for lease in leases:
        facts["lease"] = f"{lease} ({lease.standing})"
    if row.state == "active" and there is not None and there.state == "fenced":
        facts["state"] = "fenced by a transaction that was rolled back"
    return {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in facts.items()
        if value is not None
    }


def _require_there(connection: Connection, shard: int, node: str) -> None:
    """Require that the node's row of a shard has the sequences that it names: they may have been dropped."""
    has_schema, has_sequences = connection.execute(
        text("""
            select coalesce(bool_or(to_regnamespace(quote_ident(s.schema)) is not null), false),
                   count(c.oid) = 2
            from shardids.shard s left join pg_class c on c.oid in (s.id_counter, s.id_offset)
            where s.id = :shard"""),
        {"shard": shard},
    ).one()
    if not has_schema:
        raise UnknownShard(
            f'the catalog places shard {shard} on node "{node}", which does not have it',
            hint="Restore its schema there from a backup, or see what else can be done: shardids doctor",
        )
    if not has_sequences:
        raise UnknownShard(
            f'shard {shard} on node "{node}" lacks the sequences that it was activated with',
            hint="They, or the whole schema, were dropped and perhaps restored. See: shardids doctor",
        )
