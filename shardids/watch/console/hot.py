"""What to do about a hot shard: its busiest keys, and where they, or the shard, can go."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from threading import Thread
from typing import Any, Final

from shardids.catalog.rows import Catalog
from shardids.errors import ShardidsError
from shardids.logs import logger
from shardids.tenants.rows import BusyKey, busy_keys
from shardids.watch.console.figures import region_of
from shardids.watch.console.unusual import nodes_of
from shardids.watch.console.watching import Seen
from shardids.watch.stats.detector import Kind

_LAST_MS: Final = 3_600_000
"""Keys are counted by the rows of the last hour, as rates are."""
_FRESH_S: Final = 300.0
"""How long the keys of a shard count as known."""
_MOST_SHARDS: Final = 3
_LEAST_SHARE: Final = 0.2
"""A key that has less of a shard's new rows does not make it hot."""

log = logger("console")

Values = dict[str, Any]


class HotKeys:
    """The busiest keys of hot shards, read in a separate thread, and the commands that help.

    Args:
        catalog_url: the catalog.
        columns: the columns that hold keys, as ``users.name``; without any, the commands say how to look.
    """

    def __init__(self, catalog_url: str, columns: Sequence[str]) -> None:
        self._catalog_url = catalog_url
        self._columns = list(columns)
        self._known: dict[int, tuple[float, list[BusyKey]]] = {}
        self._thread: Thread | None = None

    def look(self, unusual: Mapping[str, Any]) -> None:
        """Read the keys of the shards that are hot now, unless they were read lately, or are being read."""
        hot = [one["shard"] for one in unusual["found"] if is_hot(one)][:_MOST_SHARDS]
        now = time.monotonic()
        self._known = {shard: kept for shard, kept in self._known.items() if shard in hot}
        wanted = [
            shard for shard in hot if shard not in self._known or now - self._known[shard][0] > _FRESH_S
        ]
        if not self._columns or not wanted or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = Thread(target=self._read, args=(wanted,), name="shardids console keys", daemon=True)
        self._thread.start()

    def _read(self, shards: Iterable[int]) -> None:
        for shard in shards:
            found: list[BusyKey] = []
            try:
                with closing(Catalog(self._catalog_url)) as catalog:
                    found = busy_keys(catalog, shard, self._columns, last_ms=_LAST_MS, limit=3)
            except ShardidsError as error:
                log.warning("the keys of shard %s could not be read: %s", shard, error.in_a_line())
            except Exception:
                log.exception("the keys of shard %s could not be read", shard)
            self._known[shard] = time.monotonic(), found

    def commands(self, shard: int, seen: Seen) -> list[Values]:
        """Return the steps against a hot shard, each with its command, what helps most first."""
        steps: list[Values] = []
        rates = _rates(seen)
        quiet = _quietest_shard(shard, seen, rates)
        for one in self._known.get(shard, (0.0, []))[1]:
            if one.share >= _LEAST_SHARE and quiet is not None:
                root = self._columns[0] if len(self._columns) == 1 else "TABLE.COLUMN"
                says = f"Key {one.key[:60]!r} has {one.share:.0%} of the shard's new rows: move it"
                words = f"shardids tenant move {shlex.quote(one.key)} --to-shard {quiet} --root {root}"
                steps.append(_step(says, words))
        if not steps:
            columns = self._columns or ["TABLE.COLUMN"]
            keys = " ".join(f"--key {shlex.quote(column)}" for column in columns)
            steps.append(_step("See which keys make it hot", f"shardids tenant top {shard} {keys}"))
        if (node := _quietest_node(shard, seen, rates)) is not None:
            move = f"shardids shard move {shard} --to {shlex.quote(node)}"
            steps.append(_step("Or move the whole shard to the node that does least", move))
        return steps


def is_hot(one: Mapping[str, Any]) -> bool:
    """Return whether an unusual rate is of a hot shard."""
    return one["kind"] == Kind.HOT.value and one["shard"] is not None


def _step(says: str, line: str) -> Values:
    return {"place": "in a shell", "text": line, "step": says}


def _rates(seen: Seen) -> dict[int, float]:
    """Return the rates of the shards that issue IDs."""
    return {
        shard: (seen.nodes[node].per_second or {}).get(shard, 0.0) for shard, node in nodes_of(seen).items()
    }


def _quietest_shard(hot: int, seen: Seen, rates: Mapping[int, float]) -> int | None:
    """Return the quietest other shard of the region, rather on another node."""
    node_of, region = nodes_of(seen), region_of(seen, hot)
    others = [shard for shard in rates if shard != hot and region_of(seen, shard) == region]
    return min(
        others,
        key=lambda shard: (node_of.get(shard) == node_of.get(hot), rates[shard], shard),
        default=None,
    )


def _quietest_node(hot: int, seen: Seen, rates: Mapping[int, float]) -> str | None:
    """Return the node of the region that draws least, if it draws less than the shard's neighbours do."""
    node_of, regions = nodes_of(seen), seen.known.node_regions if seen.known else {}
    if hot not in node_of:
        return None
    loads = {
        name: sum(rate for shard, rate in rates.items() if node_of[shard] == name and shard != hot)
        for name, node in seen.nodes.items()
        if node.up and regions.get(name) == region_of(seen, hot)
    }
    here = loads.pop(node_of[hot], 0.0)
    best = min(loads, key=lambda name: (loads[name], name), default=None)
    return best if best is not None and loads[best] < here else None
