"""The plan of a cluster: widths, shards, nodes by year, bytes of keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from shardids.errors import BadArgument
from shardids.ids.layout import DEFAULT, Layout
from shardids.ids.text import checked_integer
from shardids.planning.fitness import HEADROOM, Limit, limits, require_aware, require_fit
from shardids.planning.load import Load, Node

_SPREADS: Final = (8, 4, 2, 1)
_LEAST_SHARDS: Final = 64
_MOST_BITS: Final = 63
_TIME_BITS: Final = range(30, 43)
_MOST_SHARD_BITS, _MOST_SEQUENCE_BITS = 16, 22
_INDEX_BYTES: Final = {"bigint": 22.5, "UUIDv7": 31.6, "UUIDv4": 39.6}
_COLUMN_BYTES: Final = {"bigint": 8, "UUIDv7": 16, "UUIDv4": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Year:
    """What is there after so many years, how many nodes that takes, and because of what."""

    year: float
    peak_rate: float
    rows: float
    disk: float
    nodes: int
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A cluster that holds a load.

    Attributes:
        layout: widths for the whole time; they can't be changed later.
        shards: how many logical shards to make.
        years: what is needed today, after each year, and when the first row is deleted. Nodes are added, and
            shards moved, as they fill.
        limits: what ends when if no node is added to those of today, the first first.
    """

    layout: Layout
    shards: int
    years: list[Year]
    limits: list[Limit]


def plan(load: Load, *, node: Node | None = None, now: datetime | None = None) -> Plan:
    """Returns a cluster that holds a load: the default layout if that does, else widths of 63 bits in all.

    Raises:
        BadArgument: there is no such layout, and the message says what is missing; or ``now`` has no time
            zone.
    """
    node, now = node or Node(), now or datetime.now(UTC)
    require_aware(now)
    years = [_year(load, node, at) for at in _steps(load)]
    most_nodes = max(one.nodes for one in years)
    layout, shards = _default(load, most_nodes, now) or _own(load, most_nodes, now)
    require_fit(load, layout, shards, now)
    first = limits(load, layout=layout, shards=shards, nodes=min(years[0].nodes, 1 << 16), node=node, now=now)
    return Plan(layout=layout, shards=shards, years=years, limits=first)


def _steps(load: Load) -> list[float]:
    """Each year, the end, and when the first row is deleted: a load that shrinks has most rows then."""
    steps = {*map(float, range(math.ceil(load.years))), load.years}
    if load.keep_years is not None and load.keep_years < load.years:
        steps.add(load.keep_years)
    return sorted(steps)


def _year(load: Load, node: Node, at: float) -> Year:
    parts = node.parts(load, at)
    because, most = max(parts.items(), key=lambda one: one[1])
    if most > 1 << 16:
        raise BadArgument(
            f"after {at:g} years {because} takes {most:.3g} nodes; no cluster has more than 65,536"
        )
    return Year(
        year=at,
        peak_rate=load.peak_rate(at),
        rows=load.rows_after(at),
        disk=load.bytes_after(at),
        nodes=max(1, math.ceil(most)),
        because=because,
    )


def _shards(load: Load, nodes: int, each: int) -> int:
    """A power of two: enough for the peak, and for so many nodes."""
    needed = max(load.most() / (HEADROOM * each), nodes, _LEAST_SHARDS)
    return int(1 << max(0, math.ceil(math.log2(needed))))


def _default(load: Load, nodes: int, now: datetime) -> tuple[Layout, int] | None:
    """Eight shards a node, so that they spread evenly and a full node has some to give; two at least."""
    for spread in _SPREADS[:-1] if DEFAULT.years_left(now) >= load.years else ():
        shards = _shards(load, nodes * spread, DEFAULT.ids_per_second)
        if shards <= DEFAULT.shard_limit:
            return DEFAULT, shards
    return None


def _own(load: Load, nodes: int, now: datetime) -> tuple[Layout, int]:
    epoch = datetime(now.year, 1, 1, tzinfo=UTC)
    needed_ms = (now - epoch) / timedelta(milliseconds=1) + load.years * 365.2425 * 86_400_000
    time_bits = next((bits for bits in _TIME_BITS if 1 << bits > needed_ms + 1), None)
    if time_bits is None:
        raise BadArgument(f"no layout lasts for {load.years:g} years: 42 bits of milliseconds are 139 years")
    rest = _MOST_BITS - time_bits
    widths = ((spread, bits) for spread in _SPREADS for bits in range(1, _MOST_SHARD_BITS + 1))
    for spread, shard_bits in widths:
        sequence_bits = min(rest - shard_bits, _MOST_SEQUENCE_BITS)
        if sequence_bits >= 1 and _shards(load, nodes * spread, 1000 << sequence_bits) <= 1 << shard_bits:
            layout = Layout(
                time_bits=time_bits,
                shard_bits=shard_bits,
                sequence_bits=sequence_bits,
                epoch_ms=int(epoch.timestamp()) * 1000,
            )
            return layout, _shards(load, nodes * spread, layout.ids_per_second)
    raise BadArgument(
        f"no layout of {_MOST_BITS} bits holds {load.most():.3g} IDs a second and {nodes:,} nodes"
        f" for {load.years:g} years: time takes {time_bits} bits",
        hint="Plan for fewer years or less growth, or for several clusters.",
    )


def key_bytes(load: Load, *, years: float = 10.0, foreign_keys: int = 1) -> dict[str, float]:
    """Returns the bytes of keys and of their indexes after so many years, by the type of key.

    Each row has its key, and ``foreign_keys`` that refer to others; each has an index. Indexes have the bytes
    a row that docs/comparison.md publishes, foreign keys' the same as keys'.

    Raises:
        BadArgument: years or foreign keys below zero, or more than a thousand.
    """
    checked_integer("foreign_keys", foreign_keys, 0, 1000)
    if not 0 <= years <= 1000:
        raise BadArgument(f"years must be at least 0 and at most 1000, not {years:g}")
    rows = load.rows_after(years) * (1 + foreign_keys)
    return {kind: rows * (_COLUMN_BYTES[kind] + _INDEX_BYTES[kind]) for kind in _INDEX_BYTES}
