"""Conversion of a reading to values for JSON: times in seconds since 1970, no 64-bit numbers."""

from __future__ import annotations

import time
from collections import Counter
from datetime import UTC, datetime
from heapq import nlargest
from statistics import median
from typing import Any, Final

import shardids
from shardids.errors import ShardidsError
from shardids.pg.urls import parse_url
from shardids.watch.console.watching import HISTORY_S, History, Seen, SeenNode, rate_of
from shardids.watch.facts.reading import CatalogState

TOP: Final = 10
"""How many of the shards that draw most over the last hour are shown, and of those that draw most now."""

Values = dict[str, Any]


def cluster(seen: Seen, catalog_url: str, *, interval_s: float, actions: bool) -> Values:
    """Return the values of the whole cluster."""
    known = seen.known
    return {
        "version": shardids.__version__,
        "placement_version": known and known.version,
        "catalog": catalog(seen, catalog_url),
        "layout": None if known is None else _layout(known),
        "shard_count": known and known.shard_total,
        "regions": _regions(known) if known else [],
        "moves_open": moves_open(seen),
        "adoption": known and known.adoption,
        "actions": actions,
        "interval_s": interval_s,
        "history_s": HISTORY_S,
        "clock_offset_s": clock_offset_s(seen),
        "read_at": seen.at,
        "now": time.time(),
    }


def clock_offset_s(seen: Seen) -> float:
    """Return how far the nodes' clocks are ahead of this machine's: the median of those that were read.

    The times in IDs are those of the nodes' clocks.
    """
    known = [one.answer.clock.offset_s for one in seen.nodes.values() if one.answer and one.answer.clock]
    return round(median(known), 4) if known else 0.0


def moves_open(seen: Seen) -> int | None:
    """Return the number of open moves in the catalog's last answer; ``None`` if it never answered."""
    return len(seen.known.moves) if seen.known else None


def _regions(known: CatalogState) -> list[Values]:
    return [
        {
            "name": name,
            "first": min(shards),
            "last": max(shards),
            "nodes": sorted(node for node, region in known.node_regions.items() if region == name),
        }
        for name, shards in sorted(known.regions.items())
    ]


def region_of(seen: Seen, shard: int) -> str | None:
    """Return the region that a shard belongs to, if it belongs to one."""
    regions = seen.known.regions if seen.known else {}
    return next((name for name, shards in regions.items() if shard in shards), None)


def catalog(seen: Seen, url: str) -> Values:
    """Where the catalog is, and whether it answers."""
    return host_of(url) | {
        "up": seen.catalog_error is None,
        "error": told(seen.catalog_error),
        "answered_at": seen.known_at,
    }


def _layout(known: CatalogState) -> Values:
    layout = known.layout
    return {
        "name": layout.name,
        "time_bits": layout.time_bits,
        "shard_bits": layout.shard_bits,
        "sequence_bits": layout.sequence_bits,
        "epoch": layout.epoch_ms / 1000,
        "ends": layout.last_time.timestamp(),
        "max_shards": layout.shard_limit,
        "ticks_per_s": layout.ids_per_second,
    }


def host_of(url: str) -> Values:
    """Where a URL leads, without user and password; of several hosts, all of them."""
    parsed = parse_url(url)
    hosts = parsed.query.get("host", "")
    host = parsed.host or (hosts if isinstance(hosts, str) else ",".join(hosts)) or "local"
    return {"host": f"{host}:{parsed.port}" if parsed.port else host, "dbname": parsed.database}


def told(error: ShardidsError | None) -> str | None:
    """Return an error as a line for the page, or None."""
    return None if error is None else error.in_a_line()


def owner_of(seen: Seen, shard: int) -> str | None:
    """Return the node that the catalog places a shard on; ``None`` if it lives nowhere now."""
    placed = seen.known.placed if seen.known else {}
    return next(
        (node for (node, state), shards in placed.items() if state == "active" and shard in shards), None
    )


def nodes(seen: Seen) -> list[Values]:
    """Return the known values of each node, by name."""
    return [_node(node, seen) for _, node in sorted(seen.nodes.items())]


def _node(node: SeenNode, seen: Seen) -> Values:
    known, state = seen.known, node.answer.state if node.answer else None
    leads = [
        lead for shard in node.shards.values() if known and (lead := shard.lead_ms(known.layout)) is not None
    ]
    placed = (
        sum(len(shards) for (name, _), shards in known.placed.items() if name == node.name) if known else 0
    )
    values: Values = {
        "name": node.name,
        "up": node.up,
        "error": node.error and node.error.message,
        "host": host_of(node.url)["host"],
        "dbname": host_of(node.url)["dbname"],
        "region": known and known.node_regions.get(node.name),
        "outside_region": len(known.outside(node.name)) if known and node.name in known.nodes else 0,
        "answered_at": node.answered_at,
        "read_at": node.read_at,
        "shards": dict(Counter(shard.state for shard in node.shards.values())),
        "placed": placed,
        "ticks_per_s": None if node.per_second is None else short(sum(node.per_second.values())),
        "lead_s": max((0, *leads)) / 1000 if node.shards or not placed else None,
        "clock_skew_s": None if node.skew_s is None else round(node.skew_s, 4),
        "years_left": None if known is None else round(known.layout.years_left(datetime.now(UTC)), 2),
    }
    if state is None:
        return values
    return values | {
        "connections": state.connections,
        "max_connections": state.most_connections,
        "replication_lag_bytes": max((lag or 0 for _, lag, _, _ in state.slots.values()), default=0),
        "in_doubt": state.prepared.get("shardids", (0, 0.0))[0],
        "in_doubt_oldest_s": round(state.prepared.get("shardids", (0, 0.0))[1], 1),
        "standby": state.is_standby,
        "writable": state.is_writable,
    }


def rates(seen: Seen, history: History) -> Values:
    """Return the rates of the last hour: of all nodes, and of the first shards."""
    points = history.points()
    names = sorted(seen.nodes)
    return {
        "times": [round(point.time, 1) for point in points],
        "nodes": {name: [rounded(point.nodes.get(name)) for point in points] for name in names},
        "shards": {
            str(shard): [rounded(rate_of(point, shard)) for point in points]
            for shard in first_shards(seen, history)
        },
        "source": "memory",
    }


def first_shards(seen: Seen, history: History) -> list[int]:
    """Return the shards that draw most over the last hour or now, by number: those with series."""
    now = _now(seen)
    return sorted({*history.busiest(TOP), *nlargest(TOP, now, key=lambda shard: now[shard])})


def newest_rates(seen: Seen, history: History) -> Values:
    """Return the nodes' rates in the last reading, and the shards with a series in :func:`rates`."""
    return {
        "time": round(seen.at, 1),
        "nodes": {
            name: None if node.per_second is None else short(sum(node.per_second.values()))
            for name, node in sorted(seen.nodes.items())
        },
        "first": first_shards(seen, history),
    }


def _now(seen: Seen) -> dict[int, float]:
    found: dict[int, float] = {}
    for node in seen.nodes.values():
        for shard, rate in (node.per_second or {}).items():
            found[shard] = found.get(shard, 0.0) + rate
    return found


def short(value: float) -> float:
    """Return a value with one decimal, or as an integer if it is whole: thousands of them are sent."""
    rounded = round(value, 1)
    return int(rounded) if rounded == int(rounded) else rounded


def rounded(rate: float | None) -> float | None:
    """Return the same of a rate that may not be known."""
    return None if rate is None else short(rate)
