"""What the catalog and its node know of one shard."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection, text

from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog
from shardids.errors import UnknownShard


def inspect_shard(catalog: Catalog, shard: int) -> dict[str, object]:
    """Returns what the catalog and the owner node know about a shard, ready to be shown.

    Raises:
        UnknownShard: no node owns the shard, or its owner does not have it.
    """
    node, region = catalog.node_of(shard), catalog.placement().region_of(shard)
    with Nodes({node.name: node}, catalog.url) as nodes, nodes[node.name].connect() as connection:
        _require_there(connection, shard, node.name)
        row = connection.execute(
            text("""
                select schema,
                       case when state = 'active' and pg_sequence_last_value(id_offset) < 0
                                 and unfences is distinct from pg_sequence_last_value(id_offset)
                            then 'fenced by a transaction that was rolled back' else state end as state,
                       moved_to, server, activated_at,
                       shardids.time_of(shardids.id_of(
                         (shardids.offset_ms(pg_sequence_last_value(id_offset))
                          << shardids.sequence_bits())
                         + pg_sequence_last_value(id_counter), id)) as last_id_time
                from shardids.shard where id = :shard"""),
            {"shard": shard},
        ).one()
    facts = {"shard": shard, "node": node.name, "url": node.url, "region": region} | row._asdict()
    return {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in facts.items()
        if value is not None
    }


def _require_there(connection: Connection, shard: int, node: str) -> None:
    """Requires that the node's row of a shard has the sequences that it names: they may have been dropped."""
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
            f'shard {shard} on node "{node}" has not the sequences that it was activated with',
            hint="They, or the whole schema, were dropped and perhaps restored. See: shardids doctor",
        )
