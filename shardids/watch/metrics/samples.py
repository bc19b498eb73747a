"""Every metric, and samples of a cluster's answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from heapq import nlargest
from statistics import median
from typing import Final, Literal, get_args

from shardids.catalog.shards import Shard, ShardState
from shardids.watch.facts.reading import CatalogState, NodeAnswer, NodeRates, NodeState, Reading

TOP: Final = 20
"""The number of shards per node with their own series, by rate and by lead."""
MOST_TOP: Final = 200
"""With this many, a node has fewer than 500 series."""
_COUNTER_END: Final = 2**63 - 1
_PLACED: Final = ("active", "creating", "lost")
_SHARD_STATES: Final = get_args(ShardState)


@dataclass(frozen=True, slots=True)
class Sample:
    """The value of one series: the metric's name, and the values of its labels in their order."""

    name: str
    value: float
    labels: tuple[str, ...] = ()


def samples(reading: Reading, rates: Mapping[str, NodeRates], *, top: int, totals: bool) -> Iterator[Sample]:
    """Yield the samples of a reading, those of one metric not always together.

    Args:
        reading: the cluster's answers.
        rates: the rates of the nodes, by name.
        top: the number of shards per node with their own series, by rate and by lead.
        totals: whether to yield counters, which only a process with several readings has.
    """
    yield Sample("shardids_scrape_seconds", reading.seconds)
    yield Sample("shardids_catalog_up", reading.catalog_error is None)
    if reading.known is None:
        return
    if reading.catalog_error is None:
        yield from _of_catalog(reading.known)
    yield from _of_layout(reading.known)
    skew_of = skews(reading.nodes)
    for name, answer in reading.nodes.items():
        yield Sample("shardids_node_up", answer.is_up, (name,))
        yield Sample("shardids_node_complete", answer.error is None, (name,))
        yield Sample("shardids_node_scrape_seconds", answer.seconds, (name,))
        if answer.clock is not None:
            yield Sample("shardids_clock_offset_seconds", answer.clock.offset_s, (name,))
            yield Sample("shardids_clock_error_seconds", answer.clock.error_s, (name,))
        if name in skew_of:
            yield Sample("shardids_clock_skew_seconds", skew_of[name], (name,))
        if answer.state is not None:
            yield from _of_server(name, answer.state)
        if answer.shards is not None:
            yield from _of_shards(name, answer.shards, reading, has_all=answer.has_all_shards)
            yield from _of_rates(name, rates[name], top, totals=totals)
            yield from _of_leads(name, answer.shards, reading.known, top)
    if reading.catalog_error is None:
        yield Sample("shardids_shards_on_two_nodes", _twice(reading.nodes.values(), reading.known))


def _twice(answers: Iterable[NodeAnswer], known: CatalogState) -> int:
    moving = {move.shard for move in known.moves}
    active = Counter(
        shard.shard for answer in answers for shard in answer.shards or () if shard.state == "active"
    )
    return sum(count > 1 for shard, count in active.items() if shard not in moving)


def _of_catalog(known: CatalogState) -> Iterator[Sample]:
    yield Sample("shardids_catalog_version", known.version)
    for node in known.nodes:
        for state in _PLACED:
            placed = known.placed.get((node, state), ())
            yield Sample("shardids_catalog_shards", len(placed), (node, state))
        yield Sample("shardids_shards_outside_region", len(known.outside(node)), (node,))
    yield from _of_regions(known)
    states = Counter("running" if move.is_running else "interrupted" for move in known.moves)
    for state in ("running", "interrupted"):
        yield Sample("shardids_moves", states[state], (state,))
    yield Sample("shardids_move_oldest_seconds", max((move.age_s for move in known.moves), default=0))
    yield Sample("shardids_rebalance_running", known.rebalance is not None)
    for outcome, count in known.automatic_moves.items():
        yield Sample("shardids_rebalance_moves_total", count, (outcome,))
    for state in ("running", "paused", "waiting"):
        yield Sample("shardids_adoptions", known.adoption == state, (state,))


def _of_regions(known: CatalogState) -> Iterator[Sample]:
    placed: frozenset[int] = frozenset().union(*known.placed.values())
    for region, shards in known.regions.items():
        yield Sample("shardids_region_shards", len(placed & shards), (region,))
    for node, region in known.node_regions.items():
        yield Sample("shardids_node_region", 1, (node, region))


def _of_layout(known: CatalogState) -> Iterator[Sample]:
    left = known.layout.last_time - datetime.now(UTC)
    yield Sample("shardids_layout_seconds_left", left.total_seconds())
    yield Sample("shardids_shard_ticks_per_second_limit", known.layout.ids_per_second)


def skews(answers: Mapping[str, NodeAnswer]) -> dict[str, float]:
    """Return how far each clock is ahead of the median of the others, and so of most."""
    offsets = {name: answer.clock.offset_s for name, answer in answers.items() if answer.clock is not None}
    return {
        name: offset_s - median(other_s for other, other_s in offsets.items() if other != name)
        for name, offset_s in offsets.items()
        if len(offsets) > 1
    }


def _of_server(name: str, state: NodeState) -> Iterator[Sample]:
    yield Sample("shardids_node_writable", state.is_writable, (name,))
    yield Sample("shardids_max_ahead_seconds", state.max_ahead_s, (name,))
    yield Sample("shardids_safety_margin_seconds", state.safety_margin_s, (name,))
    yield Sample("shardids_connections", state.connections, (name,))
    yield Sample("shardids_connections_limit", state.most_connections, (name,))
    for kind in ("shardids", "other"):
        count, oldest_s = state.prepared.get(kind, (0, 0.0))
        yield Sample("shardids_prepared_transactions", count, (name, kind))
        yield Sample("shardids_prepared_oldest_seconds", oldest_s, (name, kind))
    for kind in ("move", "adoption", "reference", "other"):
        slots, lag_bytes, kept_bytes, lost = state.slots.get(kind, (0, None, None, 0))
        yield Sample("shardids_replication_slots", slots, (name, kind))
        yield Sample("shardids_replication_slots_lost", lost, (name, kind))
        yield Sample("shardids_replication_lag_bytes", lag_bytes or 0, (name, kind))
        yield Sample("shardids_replication_kept_bytes", kept_bytes or 0, (name, kind))
        subscriptions, stopped, silent_s = state.subscriptions.get(kind, (0, 0, None))
        yield Sample("shardids_subscriptions", subscriptions, (name, kind))
        yield Sample("shardids_subscriptions_stopped", stopped, (name, kind))
        yield Sample("shardids_subscription_silent_seconds", silent_s or 0, (name, kind))


def _of_shards(name: str, shards: Iterable[Shard], reading: Reading, *, has_all: bool) -> Iterator[Sample]:
    states = {shard.shard: shard.state for shard in shards}
    counts = Counter(states.values())
    for state in _SHARD_STATES:
        yield Sample("shardids_shards", counts[state], (name, state))
    drawn = max((shard.drawn for shard in shards), default=0)
    yield Sample("shardids_sequence_left_ratio", 1 - drawn / _COUNTER_END, (name,))
    known = reading.known
    if known is not None and reading.catalog_error is None:
        # An older placement would call a shard stopped that has moved since.
        moving = {move.shard for move in known.moves}
        placed = known.placed.get((name, "active"), frozenset()) - moving
        seen = placed if has_all else placed & states.keys()
        stopped = sum(states.get(shard) not in ("active", "unreadable") for shard in seen)
        yield Sample("shardids_stopped_shards", stopped, (name,))


def _of_rates(name: str, rates: NodeRates, top: int, *, totals: bool) -> Iterator[Sample]:
    if totals:
        yield Sample("shardids_ticks_drawn_total", rates.drawn, (name,))
        yield Sample("shardids_advanced_seconds_total", rates.advanced_ms / 1000, (name,))
    if rates.per_second is None:
        return
    yield Sample("shardids_ticks_drawn_per_second", sum(rates.per_second.values()), (name,))
    most = max(rates.per_second.values(), default=0)
    yield Sample("shardids_shard_ticks_drawn_per_second_max", most, (name,))
    for shard, rate in _largest(rates.per_second, top):
        yield Sample("shardids_shard_ticks_drawn_per_second", rate, (name, str(shard)))


def _of_leads(name: str, shards: Iterable[Shard], known: CatalogState, top: int) -> Iterator[Sample]:
    leads = {shard.shard: lead for shard in shards if (lead := shard.lead_ms(known.layout)) is not None}
    yield Sample("shardids_lead_max_seconds", max((0, *leads.values())) / 1000, (name,))
    yield Sample("shardids_lag_max_seconds", -min((0, *leads.values())) / 1000, (name,))
    for shard, lead_ms in _largest({shard: lead for shard, lead in leads.items() if lead > 0}, top):
        yield Sample("shardids_shard_lead_seconds", lead_ms / 1000, (name, str(shard)))


def _largest(values: Mapping[int, float], count: int) -> list[tuple[int, float]]:
    by_value: Callable[[tuple[int, float]], tuple[float, int]] = lambda pair: (pair[1], -pair[0])  # noqa: E731 -- typed
    return nlargest(count, values.items(), key=by_value)


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
        _of("shardids_scrape_seconds", (), "Time that the catalog and all nodes took to answer."),
        _of("shardids_catalog_up", (), "Whether the catalog answered."),
        _of("shardids_catalog_version", (), "Version of the placement, which grows with each change."),
        _of("shardids_catalog_shards", _STATE, "Shards that the catalog places on the node, by state."),
        _of(
            "shardids_shards_outside_region",
            _NODE,
            "Shards that the catalog places on the node although they are not of its region.",
        ),
        _of("shardids_region_shards", ("region",), "Shards of the region that have a node."),
        _of("shardids_node_region", ("node", "region"), "1 for each node that has a region."),
        _of("shardids_layout_seconds_left", (), "Time until the layout has no more IDs."),
        _of("shardids_shard_ticks_per_second_limit", (), "Ticks per second that the layout gives a shard."),
        _of("shardids_moves", ("state",), "Open moves, by whether a process works on them."),
        _of("shardids_move_oldest_seconds", (), "Time since the oldest open move began."),
        _of(
            "shardids_shards_on_two_nodes",
            (),
            "Shards that issue IDs on more than one node, so that IDs may repeat: 0 in a healthy cluster.",
        ),
        _of("shardids_rebalance_running", (), "Whether a rebalance runs, such as rebalance --watch."),
        _of(
            "shardids_rebalance_moves_total",
            ("outcome",),
            "Moves that rebalance --watch began, by outcome, since the cluster was created.",
        ),
        _of("shardids_adoptions", ("state",), "Open adoptions, by state."),
        # A node.
        _of("shardids_node_up", _NODE, "Whether the node answered, and is that node."),
        _of("shardids_node_complete", _NODE, "Whether the node could be read completely."),
        _of("shardids_node_scrape_seconds", _NODE, "Time that the node took to answer."),
        _of(
            "shardids_node_writable",
            _NODE,
            "Whether the node takes writes: it is not a standby, and not read-only by default.",
        ),
        _of(
            "shardids_ticks_drawn_total",
            _NODE,
            "Ticks drawn singly from the node's shards since the exporter began: one or two per ID.",
        ),
        _of(
            "shardids_ticks_drawn_per_second",
            _NODE,
            "Ticks drawn singly from the node's shards per second, without blocks.",
        ),
        _of(
            "shardids_shard_ticks_drawn_per_second_max",
            _NODE,
            "Ticks drawn singly per second from the busiest shard of the node.",
        ),
        _of(
            "shardids_advanced_seconds_total",
            _NODE,
            "Total time that blocks, after= and restarts moved the node's shards ahead of the clock.",
        ),
        _of("shardids_shards", _STATE, "Shards on the node, by state."),
        _of(
            "shardids_stopped_shards",
            _NODE,
            "Shards that should issue IDs on the node and do not, without those that are being moved.",
        ),
        _of("shardids_lead_max_seconds", _NODE, "Largest lead of a shard over its server's clock."),
        _of(
            "shardids_lag_max_seconds",
            _NODE,
            "Largest lag of a shard behind its server's clock; idle shards lag.",
        ),
        _of("shardids_max_ahead_seconds", _NODE, "next_id() fails at a lead larger than this."),
        _of("shardids_safety_margin_seconds", _NODE, "Least jump of shards ahead after a restart."),
        _of("shardids_sequence_left_ratio", _NODE, "Unused share of the most used sequence."),
        _of("shardids_clock_offset_seconds", _NODE, "Lead of the node's clock over the exporter's."),
        _of("shardids_clock_error_seconds", _NODE, "Error of that lead: half of a round trip."),
        _of("shardids_clock_skew_seconds", _NODE, "Lead of the node's clock over the other nodes'."),
        _of("shardids_connections", _NODE, "Sessions in the databases of the node's server."),
        _of("shardids_connections_limit", _NODE, "Setting max_connections of that server."),
        _of("shardids_prepared_transactions", _KIND, "Prepared transactions, by origin."),
        _of(
            "shardids_prepared_oldest_seconds",
            _KIND,
            "Time since the oldest prepared transaction was prepared.",
        ),
        _of("shardids_replication_slots", _KIND, "Replication slots, by purpose."),
        _of(
            "shardids_replication_slots_lost",
            _KIND,
            "Replication slots whose log was removed, or soon will be.",
        ),
        _of("shardids_replication_lag_bytes", _KIND, "Unconfirmed log of the slot that is farthest behind."),
        _of("shardids_replication_kept_bytes", _KIND, "Most log that the server keeps for one slot."),
        _of("shardids_subscriptions", _KIND, "Subscriptions, by purpose."),
        _of("shardids_subscriptions_stopped", _KIND, "Subscriptions without a worker."),
        _of(
            "shardids_subscription_silent_seconds",
            _KIND,
            "Longest time since a subscription last heard from its publisher.",
        ),
        # The shards that are first in something.
        _of(
            "shardids_shard_ticks_drawn_per_second",
            _SHARD,
            "Ticks drawn singly per second from the shard; only the busiest shards.",
        ),
        _of(
            "shardids_shard_lead_seconds",
            _SHARD,
            "Lead of the shard over the clock; only the shards farthest ahead.",
        ),
    )
}
"""All metrics by name, in the order of their output."""
