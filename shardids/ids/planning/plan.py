"""The plan of a cluster: widths, shards, nodes by year, bytes of keys, and the first limit reached."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

from shardids.errors import BadArgument
from shardids.ids.layout import DEFAULT, ForeignLayout, Layout
from shardids.ids.planning.load import SECONDS_A_YEAR, Load, Node
from shardids.ids.text import checked_integer

HEADROOM: Final = 0.5
"""The share of its IDs per second that a shard uses in the busiest one: the rest is for uneven loads."""
MEASURED_SHARDS: Final = 1024
"""The most shards with tables on one node into which docs/benchmarks.md has measured inserts."""
_FURTHEST: Final = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A limit of a cluster.

    Attributes:
        what: ``IDs per millisecond``, ``years``, ``shards per node``, ``rows per second``, ``disk`` or
            ``connections``.
        year: after how many years from now it is reached; infinite if not within a thousand.
        message: the limit in words.
    """

    what: str
    year: float
    message: str


def limits(load: Load, *, layout: Layout, shards: int, nodes: int, node: Node, now: datetime) -> list[Limit]:
    """Return what ends when, the first first, if nothing is added.

    Raises:
        BadArgument: more shards than the layout has, or no shard or node; or ``now`` has no time zone.
    """
    require_aware(now)
    checked_integer("shards", shards, 1, layout.shard_limit)
    checked_integer("nodes", nodes, 1, 1 << 16)
    each = layout.ids_per_second
    found = [
        Limit(
            what="IDs per millisecond",
            year=_when(lambda year: load.peak_rate(year) > HEADROOM * each * shards),
            message=f"each of {shards:,} shards has {layout.sequence_limit:,} IDs per millisecond,"
            f" and uses {HEADROOM:.0%} of them at the peak",
        ),
        Limit(
            what="years",
            year=max(layout.years_left(now), 0.0),
            message=f"the layout's time ends at {layout.last_time:%Y-%m-%d}",
        ),
        Limit(
            what="shards per node",
            year=0.0 if shards > MEASURED_SHARDS * nodes else math.inf,
            message=f"{math.ceil(shards / nodes):,}; no more than {MEASURED_SHARDS:,} have been measured",
        ),
    ]
    found += [
        Limit(
            what=what,
            year=_when(partial(_is_over, load, node, nodes, what), turn=load.keep_years),
            message=f"{what} of {nodes:,} node{'s' * (nodes > 1)}",
        )
        for what in node.parts(load, 0)
    ]
    return sorted(found, key=lambda one: one.year)


def validate(
    load: Load, *, layout: Layout | ForeignLayout, shards: int, now: datetime, node: Node | None = None
) -> list[str]:
    """Return why a layout with so many shards does not hold a load until its end; nothing if it does.

    With ``node``, also whether there is a shard for each node that the load takes; without, nothing is said
    of nodes. The machines of a layout of another generator count as its shards.

    Raises:
        BadArgument: no shard; or ``now`` has no time zone.
    """
    require_aware(now)
    checked_integer("shards", shards, 1, max(1 << 16, layout.shard_limit))
    why = []
    if shards > layout.shard_limit:
        why.append(f"{shards:,} shards: {layout.shard_bits} bits are for {layout.shard_limit:,}")
    left = layout.years_left(now)
    if left < load.years:
        ends = f"{layout.last_time:%Y-%m-%d}"
        why.append(f"years: its time ends at {ends}, in {max(left, 0):.1f} of {load.years:g} years")
    most = load.most() / shards
    unit_ms = layout.unit_ms if isinstance(layout, ForeignLayout) else 1
    if most > HEADROOM * layout.ids_per_second:
        unit = "per millisecond" if unit_ms == 1 else f"in {unit_ms:,} ms"
        why.append(
            f"IDs {unit}: a shard of {shards:,} needs {most / 1000 * unit_ms:,.4g} at the peak;"
            f" half of its {layout.sequence_limit:,} are {layout.sequence_limit // 2:,}"
        )
    negative = layout.negative_from
    if negative is not None and (negative - now) / timedelta(seconds=SECONDS_A_YEAR) < load.years:
        why.append(f"sign: its IDs turn negative at {negative:%Y-%m-%d}")
    if layout.first_time > now:
        why.append(f"years: its time begins at {layout.first_time:%Y-%m-%d}")
    if node is not None:
        why += _nodes_without_shards(load, node, shards)
    return why


def require_aware(now: datetime) -> None:
    """Raise BadArgument if a time has no time zone."""
    if now.utcoffset() is None:
        raise BadArgument(f"{now.isoformat()} has no time zone: a time must be an aware datetime")


def _nodes_without_shards(load: Load, node: Node, shards: int) -> Iterator[str]:
    """Yield a message if a part takes more nodes than there are shards: a shard is on one node.

    Between these years, each part only rises or only falls.
    """
    ends = {0.0, load.years, min(load.keep_years or 0.0, load.years)}
    parts = [(part, year, what) for year in sorted(ends) for what, part in node.parts(load, year).items()]
    most, year, what = max(parts, key=lambda one: one[0])
    if most > shards:
        nodes = f"{math.ceil(most):,}" if most < 1e6 else f"{most:.3g}"
        yield f"nodes: after {year:g} years {what} takes {nodes}, and there are {shards:,} shards"


def _is_over(load: Load, node: Node, nodes: int, what: str, year: float) -> bool:
    return node.parts(load, year)[what] > nodes


def _when(is_over: Callable[[float], bool], *, turn: float | None = None) -> float:
    """Return the first time that a value is over its limit; it is monotonic until ``turn``, and after it."""
    low = 0.0
    if is_over(low):
        return low
    for high in (_FURTHEST,) if turn is None else (min(turn, _FURTHEST), _FURTHEST):
        if is_over(high):
            break
        low = high
    else:
        return math.inf
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if is_over(middle) else (middle, high)
    return high


_SPREADS: Final = (8, 4, 2, 1)
_LEAST_SHARDS: Final = 64
_MOST_BITS: Final = 63
_TIME_BITS: Final = range(30, 43)
_MOST_SHARD_BITS, _MOST_SEQUENCE_BITS = 16, 22
_MOST_SHARDS: Final = 1 << _MOST_SHARD_BITS
_INDEX_BYTES: Final = {"bigint": 22.5, "UUIDv7": 31.6, "UUIDv4": 39.6}
_COLUMN_BYTES: Final = {"bigint": 8, "UUIDv7": 16, "UUIDv4": 16}
_RANDOM_BITS: Final = {"random bigint": 64, "UUIDv4": 122}
_UUID7_RANDOM_BITS: Final = 74
"""Beside 48 bits of milliseconds; some make a part of them a finer time, which is as good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Year:
    """The rows and bytes after so many years, and the nodes for them, with the part that needs most."""

    year: float
    peak_rate: float
    rows: float
    disk: float
    nodes: int
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A cluster that holds a load, or comes closest to it.

    Attributes:
        layout: widths for the whole time; they can't be changed later.
        shards: the number of logical shards to make.
        years: the needs today, after each year, and when the first row is deleted. Nodes are added, and
            shards moved, as they fill.
        limits: the limits of today's nodes, the earliest first.
        lacking: why the cluster does not hold the load, as :func:`validate` says; empty if it does.
    """

    layout: Layout
    shards: int
    years: list[Year]
    limits: list[Limit]
    lacking: list[str]


def plan(load: Load, *, node: Node | None = None, now: datetime | None = None) -> Plan:
    """Return a cluster that holds a load: the default layout if that does, else widths of 63 bits in all.

    If no cluster does, the widths have as much time as the load takes, and as many shards as a cluster can
    have, and ``lacking`` names each limit that the load exceeds.

    Raises:
        BadArgument: the load takes more nodes than can be counted, or ``now`` has no time zone.
    """
    node, now = node or Node(), now or datetime.now(UTC)
    require_aware(now)
    years = [_year(load, node, at) for at in _steps(load)]
    most_nodes = min(max(one.nodes for one in years), _MOST_SHARDS)
    layout, shards = _default(load, most_nodes, now) or _own(load, most_nodes, now)
    first = limits(
        load, layout=layout, shards=shards, nodes=min(years[0].nodes, _MOST_SHARDS), node=node, now=now
    )
    lacking = validate(load, layout=layout, shards=shards, now=now, node=node)
    return Plan(layout=layout, shards=shards, years=years, limits=first, lacking=lacking)


def _steps(load: Load) -> list[float]:
    """Each year, the end, and when the first row is deleted: a load that shrinks has most rows then."""
    steps = {*map(float, range(math.ceil(load.years))), load.years}
    if load.keep_years is not None and load.keep_years < load.years:
        steps.add(load.keep_years)
    return sorted(steps)


def _year(load: Load, node: Node, at: float) -> Year:
    parts = node.parts(load, at)
    because, most = max(parts.items(), key=lambda one: one[1])
    if not math.isfinite(most):
        raise BadArgument(
            f"after {at:g} years {because} takes more nodes than can be counted",
            hint="Plan for fewer years or less growth.",
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
    """Return a power of two: enough for the peak, and for so many nodes."""
    needed = max(load.most() / (HEADROOM * each), nodes, _LEAST_SHARDS)
    return int(1 << max(0, math.ceil(math.log2(needed))))


def _default(load: Load, nodes: int, now: datetime) -> tuple[Layout, int] | None:
    """Return the default layout and its number of shards; ``None`` if it does not hold the load.

    It plans eight shards per node, which spread evenly and let a full node give some away; at least two.
    """
    for spread in _SPREADS[:-1] if DEFAULT.years_left(now) >= load.years else ():
        shards = _shards(load, nodes * spread, DEFAULT.ids_per_second)
        if shards <= DEFAULT.shard_limit:
            return DEFAULT, shards
    return None


def _own(load: Load, nodes: int, now: datetime) -> tuple[Layout, int]:
    """Return a layout with the fewest bits of time, and its fewest shards; at most the widest of both."""
    epoch = datetime(now.year, 1, 1, tzinfo=UTC)
    needed_ms = (now - epoch) / timedelta(milliseconds=1) + load.years * 365.2425 * 86_400_000
    time_bits = next((bits for bits in _TIME_BITS if 1 << bits > needed_ms + 1), _TIME_BITS[-1])

    def with_shards(shard_bits: int) -> Layout:
        return Layout(
            time_bits=time_bits,
            shard_bits=shard_bits,
            sequence_bits=min(_MOST_BITS - time_bits - shard_bits, _MOST_SEQUENCE_BITS),
            epoch_ms=int(epoch.timestamp()) * 1000,
        )

    for spread in _SPREADS:
        for layout in map(with_shards, range(1, _MOST_SHARD_BITS + 1)):
            shards = _shards(load, nodes * spread, layout.ids_per_second)
            if shards <= layout.shard_limit:
                return layout, shards
    return with_shards(_MOST_SHARD_BITS), _MOST_SHARDS


def collisions(load: Load, *, years: float = 10.0) -> dict[str, float]:
    """Return the chance that two of the keys of so many years are the same, by the kind of random key.

    Keys of deleted rows count. Of UUIDv7 two must be of one millisecond: for them it is an upper bound, with
    all of the time as busy as the busiest second.

    Raises:
        BadArgument: years below zero, or more than a thousand.
    """
    _check_years(years)
    keys = replace(load, keep_years=None).rows_after(years)
    pairs = keys * max(keys - 1, 0) / 2
    chances = {kind: -math.expm1(-pairs / 2.0**bits) for kind, bits in _RANDOM_BITS.items()}
    others_a_ms = max(load.peak_rate(0), load.peak_rate(years)) / 1000
    return chances | {"UUIDv7": -math.expm1(-keys * others_a_ms / 2 / 2.0**_UUID7_RANDOM_BITS)}


def _check_years(years: float) -> None:
    if not 0 <= years <= 1000:
        raise BadArgument(f"years must be at least 0 and at most 1000, not {years:g}")


def key_bytes(load: Load, *, years: float = 10.0, foreign_keys: int = 1) -> dict[str, float]:
    """Return the bytes of keys and of their indexes after so many years, by the type of key.

    Each row has its key, and ``foreign_keys`` that refer to others; each has an index. Indexes have the bytes
    a row that docs/comparison.md publishes, foreign keys' the same as keys'.

    Raises:
        BadArgument: years or foreign keys below zero, or more than a thousand.
    """
    checked_integer("foreign_keys", foreign_keys, 0, 1000)
    _check_years(years)
    rows = load.rows_after(years) * (1 + foreign_keys)
    return {kind: rows * (_COLUMN_BYTES[kind] + _INDEX_BYTES[kind]) for kind in _INDEX_BYTES}
