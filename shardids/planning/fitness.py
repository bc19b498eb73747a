"""Whether a layout and its shards hold a load, and what ends first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from shardids.errors import BadArgument
from shardids.ids.layout import Layout
from shardids.ids.text import checked_integer
from shardids.planning.load import SECONDS_A_YEAR, Load, Node

HEADROOM: Final = 0.5
"""How much of its IDs a second a shard uses in the busiest one: the rest is for shards that are not alike."""
MEASURED_SHARDS: Final = 1024
"""The most shards with tables on one node into which docs/benchmarks.md has measured inserts."""
_FURTHEST: Final = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Something that ends.

    Attributes:
        what: ``IDs a millisecond``, ``years``, ``shards a node``, ``rows a second``, ``disk`` or
            ``connections``.
        year: after how many years from now; infinite if not within a thousand.
        message: it in words.
    """

    what: str
    year: float
    message: str


def limits(load: Load, *, layout: Layout, shards: int, nodes: int, node: Node, now: datetime) -> list[Limit]:
    """Returns what ends when, the first first, if nothing is added.

    Raises:
        BadArgument: more shards than the layout has, or no shard or node; or ``now`` has no time zone.
    """
    require_aware(now)
    checked_integer("shards", shards, 1, layout.shard_limit)
    checked_integer("nodes", nodes, 1, 1 << 16)
    each = layout.ids_per_second
    found = [
        Limit(
            what="IDs a millisecond",
            year=_when(lambda year: load.peak_rate(year) > HEADROOM * each * shards),
            message=f"each of {shards:,} shards has {layout.sequence_limit:,} IDs a millisecond,"
            f" and uses {HEADROOM:.0%} of them at the peak",
        ),
        Limit(
            what="years",
            year=max(layout.years_left(now), 0.0),
            message=f"the layout's time ends at {layout.last_time:%Y-%m-%d}",
        ),
        Limit(
            what="shards a node",
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
    load: Load, *, layout: Layout, shards: int, now: datetime, node: Node | None = None
) -> list[str]:
    """Returns why a layout with so many shards does not hold a load until its end; nothing if it does.

    With ``node``, also whether there is a shard for each node that the load takes; without, nothing is said
    of nodes.

    Raises:
        BadArgument: no shard; or ``now`` has no time zone.
    """
    require_aware(now)
    checked_integer("shards", shards, 1, 1 << 16)
    why = []
    if shards > layout.shard_limit:
        why.append(f"{shards:,} shards: {layout.shard_bits} bits are for {layout.shard_limit:,}")
    left = layout.years_left(now)
    if left < load.years:
        ends = f"{layout.last_time:%Y-%m-%d}"
        why.append(f"years: its time ends at {ends}, in {max(left, 0):.1f} of {load.years:g} years")
    most = load.most() / shards
    if most > HEADROOM * layout.ids_per_second:
        why.append(
            f"IDs a millisecond: a shard of {shards:,} needs {most / 1000:,.4g} at the peak;"
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
    """Raises BadArgument if a time has no time zone."""
    if now.utcoffset() is None:
        raise BadArgument(f"{now.isoformat()} has no time zone: a time must be an aware datetime")


def _nodes_without_shards(load: Load, node: Node, shards: int) -> Iterator[str]:
    """A shard is on one node. Between these years, each part only rises or only falls."""
    ends = {0.0, load.years, min(load.keep_years or 0.0, load.years)}
    parts = [(part, year, what) for year in sorted(ends) for what, part in node.parts(load, year).items()]
    most, year, what = max(parts, key=lambda one: one[0])
    if most > shards:
        nodes = f"{math.ceil(most):,}" if most < 1e6 else f"{most:.3g}"
        yield f"nodes: after {year:g} years {what} takes {nodes}, and there are {shards:,} shards"


def _is_over(load: Load, node: Node, nodes: int, what: str, year: float) -> bool:
    return node.parts(load, year)[what] > nodes


def _when(is_over: Callable[[float], bool], *, turn: float | None = None) -> float:
    """The first time that something is over. Until ``turn`` it only rises or only falls, and so after it."""
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


def require_fit(load: Load, layout: Layout, shards: int, now: datetime) -> None:
    """Raises BadArgument with what :func:`validate` returns, if it returns something."""
    if why := validate(load, layout=layout, shards=shards, now=now):
        raise BadArgument(f"layout {layout} does not hold this load: {'; '.join(why)}")
