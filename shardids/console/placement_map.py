"""All shards as columns: an entry of each list a shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from shardids.console.figures import short
from shardids.console.slow_facts import SlowFacts
from shardids.console.watching import Seen, SeenNode
from shardids.metrics.facts import CatalogState

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
    """The columns that each reading has: node, state, ticks a second, and lead."""
    count = seen.known.shard_count if seen.known else 0
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
    """The columns that are read seldom: size, revision; and the lag of shards that are being moved."""
    known = seen.known
    shards = range(known.shard_count if known else 0)
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
    """The state of a shard where the catalog places it."""
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
