"""One shard: its tables, its highest ID, its moves."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, text

from shardids.catalog.topology import schema_name
from shardids.console.changes import move_values
from shardids.console.databases import Databases
from shardids.console.figures import owner_of, region_of, rounded, told
from shardids.console.history import History, rate_of
from shardids.console.inspector import bits
from shardids.console.placement_map import state_of
from shardids.console.slow_facts import SlowFacts
from shardids.console.watching import Seen
from shardids.errors import ConnectionFailed, ShardidsError, UnknownShard
from shardids.ids.layout import Layout
from shardids.ids.text import to_decimal, to_text
from shardids.metrics.facts import Shard
from shardids.mover.history import read_moves

Values = dict[str, Any]

_TABLES: Final = text("""
    select c.relname as name, c.reltuples::bigint as rows_estimate,
           pg_total_relation_size(c.oid) as size_bytes
    from shardids.shard s
    join pg_namespace n on n.nspname = s.schema
    join pg_class c on c.relnamespace = n.oid and c.relkind in ('r', 'm')
    where s.id = :shard
    order by 3 desc, 1""")


def shard(number: int, seen: Seen, history: History, databases: Databases, facts: SlowFacts) -> Values:
    """What is known of a shard. What its node or the catalog does not tell now is ``None``: see ``errors``.

    ``last_state`` and ``highest_id`` are of ``read_at``, which is over if not ``is_read``.

    Raises:
        UnknownShard: this cluster has no shard of this number.
        ConnectionFailed: the catalog has never answered.
    """
    if seen.known is None:
        raise ConnectionFailed("the catalog has not answered yet")
    if not 0 <= number < seen.known.shard_count:
        raise UnknownShard(
            f"there is no shard {number} in this cluster",
            hint=f"Its shards are 0 to {seen.known.shard_count - 1}.",
        )
    node = owner_of(seen, number)
    owner = seen.nodes.get(node) if node is not None else None
    there = owner.shards.get(number) if owner else None
    errors: list[str] = []
    points = history.points()
    values: Values = {
        "shard": number,
        "node": node,
        "state": state_of(seen, number),
        "is_read": owner is not None and owner.up and there is not None,
        "read_at": owner and owner.read_at,
        "last_state": there and there.state,
        "region": region_of(seen, number),
        "schema": schema_name(seen.known.schema_prefix, number),
        "highest_id": highest_id(there, number, seen.known.layout) if there else None,
        "tables": _tables(number, node, databases, errors) if node else None,
        "size_bytes": facts.sizes.get(number),
        "revision": facts.revisions.get(number),
        "moves": _moves(number, seen, databases, errors),
        "times": [round(point.time, 1) for point in points],
        "ticks_per_s": [rounded(rate_of(point, number)) for point in points],
        "errors": errors,
    }
    if values["tables"]:
        values["size_bytes"] = sum(table["size_bytes"] for table in values["tables"])
    return values


def highest_id(there: Shard, number: int, layout: Layout) -> Values | None:
    """The ID of the highest tick that an active shard may have used: it has issued none above. ``None`` if it
    has drawn none singly since it came here.

    The ID itself was issued unless the last draw was a block, or the shard was fenced, or its server crashed
    since: each of them skips ticks.
    """
    if there.state != "active" or there.offset_ms is None or not there.drawn:
        return None
    tick = (there.offset_ms << layout.sequence_bits) + there.drawn
    ms, sequence = tick >> layout.sequence_bits, tick & (layout.sequence_limit - 1)
    if ms >> layout.time_bits:
        return None
    id_ = layout.encode(ms=ms, shard=number, sequence=sequence)
    return {
        "id": to_decimal(id_),
        "text": to_text(id_),
        "time": layout.decode(id_).time.timestamp(),
        "sequence": sequence,
        "bits": bits(id_, layout),
    }


def _tables(number: int, node: str, databases: Databases, errors: list[str]) -> list[Values] | None:
    def ask(connection: Connection) -> list[Values]:
        return [dict(row._mapping) for row in connection.execute(_TABLES, {"shard": number})]

    try:
        return databases.of_node(node, ask)
    except ShardidsError as error:
        errors.append(str(told(error)))
        return None


def _moves(number: int, seen: Seen, databases: Databases, errors: list[str]) -> list[Values] | None:
    try:
        found = databases.of_catalog(lambda connection: read_moves(connection, [number], ended=True))
    except ShardidsError as error:
        errors.append(str(told(error)))
        return None
    return [move_values(move, seen) for move in reversed(found)]
