"""All shards as columns: an entry of each list a shard."""

from __future__ import annotations

from typing import Any, Final

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


def _fill(found: Columns, shard: int, placed_as: str, node: SeenNode, known: CatalogState) -> None:
    if placed_as != "active":
        found["state"][shard] = _NUMBERS[placed_as]
        return
    there = node.shards.get(shard)
    if there is None:
        is_read = node.up and node.answer is not None and node.answer.has_all_shards
        found["state"][shard] = _NUMBERS["missing" if is_read else "unknown"]
        return
    found["state"][shard] = _NUMBERS[there.state]
    if node.per_second is not None:
        found["ticks_per_s"][shard] = round(node.per_second.get(shard, 0.0), 1)
    lead_ms = there.lead_ms(known.layout)
    if lead_ms is not None:
        # Idle shards are hours behind: seconds are enough there.
        found["lead_s"][shard] = round(lead_ms / 1000, 1) if abs(lead_ms) < 60_000 else lead_ms // 1000
