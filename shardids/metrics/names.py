"""Every metric: its name, its labels, and what it says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric as Prometheus knows it; ``kind`` ``counter`` has ``_total`` in its name."""

    name: str
    says: str
    labels: tuple[str, ...] = ()
    kind: Literal["gauge", "counter"] = "gauge"


_NODE: Final = ("node",)
_KIND: Final = ("node", "kind")
_STATE: Final = ("node", "state")
_SHARD: Final = ("node", "shard")


def _of(name: str, labels: tuple[str, ...], says: str) -> Metric:
    kind: Literal["gauge", "counter"] = "counter" if name.endswith("_total") else "gauge"
    return Metric(name=name, says=says, labels=labels, kind=kind)


METRICS: Final = {
    metric.name: metric
    for metric in (
        # The cluster.
        _of("shardids_scrape_seconds", (), "How long it took to ask the catalog and all nodes."),
        _of("shardids_catalog_up", (), "Whether the catalog answered."),
        _of("shardids_catalog_version", (), "The version of the placement, which grows with each change."),
        _of("shardids_catalog_shards", _STATE, "Shards that the catalog places on the node, by state."),
        _of(
            "shardids_shards_outside_region",
            _NODE,
            "Shards that the catalog places on the node, and that are not of its region.",
        ),
        _of("shardids_region_shards", ("region",), "Shards of the region that have a node."),
        _of("shardids_node_region", ("node", "region"), "1 for each node that has a region."),
        _of("shardids_layout_seconds_left", (), "Time until the layout has no more IDs."),
        _of(
            "shardids_shard_ticks_per_second_limit", (), "Ticks that the layout has for a shard each second."
        ),
        _of("shardids_moves", ("state",), "Moves that are not over, by whether a process works at them."),
        _of("shardids_move_oldest_seconds", (), "Time since the oldest of these moves was begun."),
        _of("shardids_adoptions", ("state",), "Adoptions that are not over, by state."),
        # A node.
        _of("shardids_node_up", _NODE, "Whether the node answered, and is that node."),
        _of("shardids_node_complete", _NODE, "Whether all of the node could be read."),
        _of("shardids_node_scrape_seconds", _NODE, "How long it took to ask the node."),
        _of(
            "shardids_node_writable",
            _NODE,
            "Whether the node takes writes: no standby, nor read-only by default.",
        ),
        _of(
            "shardids_ticks_drawn_total",
            _NODE,
            "Ticks drawn one by one from the node's shards since this began to ask: one an ID, two if late.",
        ),
        _of(
            "shardids_ticks_drawn_per_second",
            _NODE,
            "Ticks that are drawn one by one from the node's shards a second: no blocks.",
        ),
        _of(
            "shardids_shard_ticks_drawn_per_second_max",
            _NODE,
            "Ticks that are drawn one by one from the quickest of them a second.",
        ),
        _of(
            "shardids_advanced_seconds_total",
            _NODE,
            "Time that blocks, after= and restarts took the node's shards ahead of the clock, all together.",
        ),
        _of("shardids_shards", _STATE, "Shards on the node, by state."),
        _of(
            "shardids_stopped_shards",
            _NODE,
            "Shards that the catalog places here, that are not being moved, and that issue no IDs.",
        ),
        _of("shardids_lead_max_seconds", _NODE, "How far the foremost shard is ahead of the clock."),
        _of(
            "shardids_lag_max_seconds",
            _NODE,
            "How far the hindmost shard is behind the clock: idle ones are.",
        ),
        _of("shardids_max_ahead_seconds", _NODE, "The lead from which on draws are refused."),
        _of("shardids_safety_margin_seconds", _NODE, "How far shards jump ahead after a restart, at least."),
        _of("shardids_sequence_left_ratio", _NODE, "What is left of the sequence that was drawn from most."),
        _of("shardids_clock_offset_seconds", _NODE, "How far the node's clock is ahead of this machine's."),
        _of("shardids_clock_error_seconds", _NODE, "How far off that may be: half of a round trip."),
        _of("shardids_clock_skew_seconds", _NODE, "How far the node's clock is ahead of the other nodes'."),
        _of("shardids_connections", _NODE, "Sessions in the databases of the node's server."),
        _of("shardids_connections_limit", _NODE, "The setting max_connections of that server."),
        _of("shardids_prepared_transactions", _KIND, "Prepared transactions, by who prepared them."),
        _of("shardids_prepared_oldest_seconds", _KIND, "Time since the oldest of them was prepared."),
        _of("shardids_replication_slots", _KIND, "Replication slots, by what they are for."),
        _of(
            "shardids_replication_slots_lost", _KIND, "Those of them whose log was removed, or soon will be."
        ),
        _of("shardids_replication_lag_bytes", _KIND, "Log that the slot farthest behind has not confirmed."),
        _of("shardids_replication_kept_bytes", _KIND, "Log that the server keeps for one of them, at most."),
        _of("shardids_subscriptions", _KIND, "Subscriptions, by what they are for."),
        _of("shardids_subscriptions_stopped", _KIND, "Those of them that no worker serves."),
        _of("shardids_subscription_silent_seconds", _KIND, "Time since one of them heard of its publisher."),
        # The shards that are first in something.
        _of(
            "shardids_shard_ticks_drawn_per_second",
            _SHARD,
            "Ticks that are drawn one by one from the shard a second: the quickest shards.",
        ),
        _of("shardids_shard_lead_seconds", _SHARD, "How far the shard is ahead of the clock: the foremost."),
    )
}
"""All metrics by name, in the order in which they are shown."""
