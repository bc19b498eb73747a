"""The shards: all as columns, an entry of each list for each shard; and one, with its tables and moves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Connection, text

from shardids.catalog.keys.homes import read_homes
from shardids.catalog.moves import read_moves
from shardids.catalog.pins import read_pins
from shardids.catalog.shards import Shard
from shardids.catalog.topology import no_shard, schema_name
from shardids.errors import ConnectionFailed, ShardidsError, UnknownShard
from shardids.ids.layout import Layout
from shardids.ids.text import to_decimal, to_text
from shardids.pg.locks import bounded_wait
from shardids.watch.console.changes import move_values, pin_values
from shardids.watch.console.databases import LOCK_WAIT, Databases, SlowFacts
from shardids.watch.console.figures import owner_of, region_of, rounded, short, told
from shardids.watch.console.inspector import bits
from shardids.watch.console.watching import History, Seen, SeenNode, rate_of
from shardids.watch.facts.reading import CatalogState

STATES: Final = (
    "active",
    "fenced",
    "arriving",
    "copy",
    "moved",
    "broken",
    "unreadable",
    "creating",
    "lost",
    "missing",
    "unknown",
    "none",
)
"""States of shards where the catalog places them: those of metrics; then ``creating`` and ``lost``, as the
catalog says; ``missing``: the node does not have it; ``unknown``: the node was not read; ``none``: it is
nowhere yet."""
_NUMBERS: Final = {state: number for number, state in enumerate(STATES)}

Columns = dict[str, list[Any]]


def columns(seen: Seen) -> Columns:
    """Return the columns of each reading: node, state, ticks per second, and lead."""
    count = seen.known.shard_total if seen.known else 0
    names = sorted(seen.nodes)
    found: Columns = {
        "nodes": names,
        "states": list(STATES),
        "node": [None] * count,
        "state": [_NUMBERS["none"]] * count,
        "ticks_per_s": [None] * count,
        "lead_s": [None] * count,
    }
    if seen.known is None:
        return found
    numbers = {name: number for number, name in enumerate(names)}
    for (name, placed_as), shards in seen.known.placed.items():
        if name in numbers:
            for shard in shards:
                found["node"][shard] = numbers[name]
                _fill(found, shard, placed_as, seen.nodes[name], seen.known)
    return found


def slow_columns(seen: Seen, facts: SlowFacts, lags: Mapping[int, int]) -> dict[str, Any]:
    """Return the columns that are read seldom: size, revision; and the lag of shards that are being moved."""
    known = seen.known
    shards = range(known.shard_total if known else 0)
    regions = sorted(known.regions) if known else []
    region: list[int | None] = [None for _ in shards]
    for place, name in enumerate(regions):
        for shard in known.regions[name] if known else ():
            region[shard] = place
    revisions = sorted({one for one in facts.revisions.values() if one is not None})
    places = {revision: place for place, revision in enumerate(revisions)}
    return {
        "revisions": revisions,
        "sizes_at": facts.at,
        "sizes_tried_at": facts.tried_at,
        "sizes_errors": facts.sentences,
        "size_bytes": [facts.sizes.get(shard) for shard in shards],
        "revision": [
            None if (revision := facts.revisions.get(shard)) is None else places[revision] for shard in shards
        ],
        "lag_bytes": [lags.get(shard) for shard in shards],
        "regions": regions,
        "region": region,
    }


def state_of(seen: Seen, shard: int) -> str:
    """Return the state of a shard on the node where the catalog places it."""
    for (name, placed_as), shards in (seen.known.placed if seen.known else {}).items():
        if shard in shards and name in seen.nodes:
            return _state(shard, placed_as, seen.nodes[name])
    return "none"


def _state(shard: int, placed_as: str, node: SeenNode) -> str:
    if placed_as != "active":
        return placed_as
    if not node.up:
        # What was read of it last may not be true now.
        return "unknown"
    if (there := node.shards.get(shard)) is not None:
        return there.state
    has_all = node.answer is not None and node.answer.has_all_shards
    return "missing" if has_all else "unknown"


def _fill(found: Columns, shard: int, placed_as: str, node: SeenNode, known: CatalogState) -> None:
    found["state"][shard] = _NUMBERS[_state(shard, placed_as, node)]
    there = node.shards.get(shard)
    if there is None or placed_as != "active" or not node.up:
        return
    if node.per_second is not None and there.offset_ms is not None:
        found["ticks_per_s"][shard] = short(node.per_second.get(shard, 0.0))
    lead_ms = there.lead_ms(known.layout)
    if lead_ms is not None:
        # Idle shards are hours behind: seconds are enough there.
        found["lead_s"][shard] = short(lead_ms / 1000) if abs(lead_ms) < 60_000 else lead_ms // 1000


Values = dict[str, Any]

_SCHEMA: Final = text("select schema::text from shardids.shard where id = :shard")
_TABLES: Final = text("""
    select c.relname as name, c.reltuples::bigint as rows_estimate,
           pg_total_relation_size(c.oid) as size_bytes
    from shardids.shard s
    join pg_namespace n on n.nspname = s.schema
    join pg_class c on c.relnamespace = n.oid and c.relkind in ('r', 'm')
    where s.id = :shard
    order by 3 desc, 1""")


_MOST_KEYS: Final = 50


def shard(number: int, seen: Seen, history: History, databases: Databases, facts: SlowFacts) -> Values:
    """Return the known values of a shard. Those that cannot be read now are ``None``: see ``errors``.

    ``last_state`` and ``highest_id`` are of ``read_at``, and no longer current unless ``is_read``.

    Raises:
        UnknownShard: this cluster has no shard of this number.
        ConnectionFailed: the catalog has never answered.
    """
    if seen.known is None:
        raise ConnectionFailed("the catalog has not answered yet")
    if not 0 <= number < seen.known.shard_total:
        raise no_shard(number, seen.known.shard_total, UnknownShard)
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
        "keys": _keys(number, databases, errors),
        "pins": _pins(number, databases, errors),
        "times": [round(point.time, 1) for point in points],
        "ticks_per_s": [rounded(rate_of(point, number)) for point in points],
        "errors": errors,
    }
    if values["tables"]:
        values["size_bytes"] = sum(table["size_bytes"] for table in values["tables"])
    return values


def highest_id(there: Shard, number: int, layout: Layout) -> Values | None:
    """Return the ID of the highest tick that an active shard may have used; all its IDs are lower or equal.

    ``None`` if it has drawn none singly since it came here. The ID itself was issued unless the last draw was
    a block, or the shard was fenced, or its server crashed since: each of them skips ticks.
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
        schemas = connection.scalars(_SCHEMA, {"shard": number}).all()
        where = f'shard {number}, node "{node}"'
        with bounded_wait(connection, where, schemas, ["AccessExclusiveLock"], patience=LOCK_WAIT):
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


def _keys(number: int, databases: Databases, errors: list[str]) -> list[Values] | None:
    """Return the keys that live in a shard by the directory, at most so many as are shown and one."""
    try:
        found = databases.of_catalog(
            lambda connection: read_homes(connection, shard=number, limit=_MOST_KEYS + 1)
        )
    except ShardidsError as error:
        errors.append(str(told(error)))
        return None
    return [{"key": one.key, "kind": one.kind, "since": one.since.timestamp()} for one in found]


def _pins(number: int, databases: Databases, errors: list[str]) -> list[Values] | None:
    try:
        found = databases.of_catalog(read_pins)
    except ShardidsError as error:
        errors.append(str(told(error)))
        return None
    return [pin_values(one) for one in found if one.shard == number]
