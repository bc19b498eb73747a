"""The detector on the console's readings: what is planted in an hour, and nothing of an ordinary one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pytest

from shardids.catalog.shards import Shard
from shardids.ids.layout import DEFAULT
from shardids.pg.clock import ClockSample
from shardids.watch.console.unusual import Unusual
from shardids.watch.console.watching import History, Point, Seen, SeenNode
from shardids.watch.facts.reading import CatalogState, NodeAnswer, NodeState
from shardids.watch.stats.detector import Kind

SHARDS, NODES = 64, 4
END_S = 1_800_000_007.0
NOW_MS = int(END_S * 1000) - DEFAULT.epoch_ms
STATE = NodeState(
    name="",
    cluster=UUID(int=1),
    on_copy="refuse",
    read_only_source="default",
    database="a",
    role="postgres",
    max_ahead_s=60,
    safety_margin_s=20,
    is_standby=False,
    is_writable=True,
    connections=1,
    most_connections=100,
    prepared={},
    slots={},
    subscriptions={},
)

Rates = npt.NDArray[np.float64]
IsRead = Callable[[float, int], bool]


def node_of(shard: int) -> str:
    return f"n{shard % NODES}"


def always(_since_s: float, _node: int) -> bool:
    return True


def hour(
    plant: Callable[[float, Rates], None] = lambda _since_s, _rates: None,
    *,
    is_read: IsRead = always,
    seed: int = 0,
    spread: float = 0.3,
    mean: float = 20.0,
    batch: int = 1,
    lasts_s: float = 3600,
    interval_s: float = 5.0,
) -> list[Point]:
    """Points of shards that draw by chance, each at a rate of its own; ``plant`` changes them by the time."""
    chance = np.random.default_rng(seed)
    usual = mean * np.exp(chance.normal(0, spread, SHARDS))
    history = History()
    for since_s in np.arange(0, lasts_s, interval_s).tolist():
        rates = usual.copy()
        plant(since_s, rates)
        drawn = chance.poisson(rates * interval_s / batch) * batch / interval_s
        nodes = {f"n{node}": 1.0 if is_read(since_s, node) else None for node in range(NODES)}
        kept = {
            shard: float(drawn[shard])
            for shard in np.flatnonzero(drawn).tolist()
            if nodes[node_of(shard)] is not None
        }
        history.add(END_S - lasts_s + since_s, nodes, kept)
    return list(history.points())


def seen(
    *,
    offsets_s: Mapping[str, float] | None = None,
    leads_ms: Mapping[int, int] | None = None,
    states: Mapping[int, str] | None = None,
) -> Seen:
    nodes: dict[str, SeenNode] = {}
    placed: dict[tuple[str, str], frozenset[int]] = {}
    for number in range(NODES):
        name = f"n{number}"
        own = range(number, SHARDS, NODES)
        shards = {
            shard: Shard(
                shard,
                (states or {}).get(shard, "active"),  # type: ignore[arg-type] # a state by its name
                1,
                0,
                NOW_MS + (leads_ms or {}).get(shard, 0),
                NOW_MS,
            )
            for shard in own
        }
        placed[name, "active"] = frozenset(own)
        clock = ClockSample(offset_s=(offsets_s or {}).get(name, 0.0), error_s=0.001)
        answer = NodeAnswer(seconds=0.1, clock=clock, state=replace(STATE, name=name), has_all_shards=True)
        nodes[name] = SeenNode(name=name, url="", up=True, answer=answer, shards=shards)
    known = CatalogState(
        cluster=UUID(int=1),
        version=1,
        layout=DEFAULT,
        shard_count=SHARDS,
        schema_prefix="shard_",
        nodes=dict.fromkeys(nodes, ""),
        placed=placed,
        moves=[],
        adoption=None,
        node_regions={},
        regions={},
    )
    return Seen(at=END_S, known=known, catalog_error=None, known_at=END_S, nodes=nodes)


def told(
    points: list[Point], now: Seen | None = None, *, interval_s: float = 5.0
) -> list[tuple[str, object]]:
    """The kind and the shard of each sentence."""
    unusual = Unusual()
    unusual.look(now or seen(), points, interval_s)
    assert unusual.values["looked_s"] is not None
    return [(one["kind"], one["shard"]) for one in unusual.values["found"]]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("spread", "mean", "batch"), [(1.0, 20.0, 1), (2.0, 0.2, 1), (1.0, 0.02, 1), (1.0, 20.0, 50)]
)
def test_an_ordinary_hour_has_nothing_unusual(seed: int, spread: float, mean: float, batch: int) -> None:
    assert told(hour(seed=seed, spread=spread, mean=mean, batch=batch)) == []


def hot(_since_s: float, rates: Rates) -> None:
    rates[5] = 2000.0


def burst(since_s: float, rates: Rates) -> None:
    if 1800 <= since_s < 2100:
        rates[5] *= 10


def burst_of_all(since_s: float, rates: Rates) -> None:
    if 1800 <= since_s < 2100:
        rates *= 10


def silence(since_s: float, rates: Rates) -> None:
    if since_s >= 2700:
        rates[5] = 0


def silence_of_all(since_s: float, rates: Rates) -> None:
    if 1800 <= since_s < 2400:
        rates *= 0


@pytest.mark.parametrize(
    ("plant", "kind", "shard"),
    [
        (hot, Kind.HOT, 5),
        (burst, Kind.BURST, 5),
        (burst_of_all, Kind.BURST, None),
        (silence, Kind.SILENCE, 5),
        (silence_of_all, Kind.SILENCE, None),
    ],
)
@pytest.mark.parametrize("interval_s", [5.0, 14.0])
def test_what_is_planted_is_told_and_nothing_else(
    plant: Callable[[float, Rates], None], kind: Kind, shard: int | None, interval_s: float
) -> None:
    for seed in range(3):
        assert told(hour(plant, seed=seed, interval_s=interval_s), interval_s=interval_s) == [(kind, shard)]


def test_a_shard_that_was_seldom_used_is_neither_silent_nor_in_a_burst() -> None:
    def one_user(since_s: float, rates: Rates) -> None:
        rates[5] = 5.0 if since_s < 600 else 0.0

    assert told(hour(one_user)) == []


@pytest.mark.parametrize(
    "is_read",
    [
        lambda since_s, node: not (node == 1 and 1000 < since_s < 1800),
        lambda since_s, node: not (node == 1 and since_s > 1900),
        lambda since_s, node: not (node < 2 and since_s > 2900),
        lambda since_s, _: not 1000 < since_s < 1800,
        lambda since_s, _: since_s % 60 > 8,
    ],
    ids=["a node for a while", "a node until now", "two nodes", "all nodes", "one in every minute"],
)
def test_missing_readings_are_nothing_unusual(is_read: IsRead) -> None:
    assert told(hour(is_read=is_read)) == []


def test_what_happens_beside_missing_readings_is_told() -> None:
    points = hour(silence, is_read=lambda since_s, node: not (node == 2 and since_s > 1000))
    assert told(points) == [(Kind.SILENCE, 5)]


def test_a_node_that_told_of_some_shards_was_not_read() -> None:
    def lost(since_s: float, rates: Rates) -> None:
        if 1000 < since_s < 1800:
            rates[1::NODES] = 0

    points = hour(lost)
    assert told(points) != []
    during = [1000 < at.time - points[0].time < 1800 for at in points]
    partly = [
        replace(at, incomplete=frozenset({"n1"})) if is_lost else at
        for at, is_lost in zip(points, during, strict=True)
    ]
    assert told(partly) == []


def test_the_first_reading_after_a_gap_is_no_burst() -> None:
    """A console that slept, or whose clock was set, reads a mean over a time that nobody knows."""
    points = [at for at in hour() if not 1000 < at.time - END_S + 3600 < 1800]
    assert told(points) == []
    assert told([replace(at, time=at.time - 900) if at.time > END_S - 900 else at for at in hour()]) == []


def test_a_shard_that_was_moved_is_nothing_unusual() -> None:
    def moved(since_s: float, rates: Rates) -> None:
        # Its new generator has a rate from the second look on.
        if 1800 <= since_s < 1815:
            rates[5] = 0

    assert told(hour(moved)) == []


def test_a_fenced_shard_is_not_told_to_be_silent() -> None:
    assert told(hour(silence), seen(states={5: "fenced"})) == []


def test_shards_ahead_and_nodes_with_another_time_are_told() -> None:
    assert told(hour(), seen(leads_ms={9: 30_000})) == [(Kind.CLOCK, 9)]
    unusual = Unusual()
    unusual.look(seen(offsets_s={"n2": -5.0}), hour(), 5.0)
    (found,) = unusual.values["found"]
    assert (found["kind"], found["node"], found["shards"]) == (Kind.CLOCK, "n2", SHARDS // NODES)
    assert found["says"] == "5.0 s behind the others"
    assert "at the time service of the node's machine" in found["to_do"]
    assert "sessions with after= went past an ID that led" in found["to_do"]


def test_idle_shards_are_not_behind() -> None:
    assert told(hour(), seen(leads_ms=dict.fromkeys(range(10), -86_400_000), offsets_s={"n1": 0.3})) == []


def test_one_shard_that_alone_is_used_is_hot() -> None:
    def alone(_since_s: float, rates: Rates) -> None:
        rates[:] = 0
        rates[5] = 20

    unusual = Unusual()
    unusual.look(seen(), hour(alone), 5.0)
    (found,) = unusual.values["found"]
    assert (found["kind"], found["says"]) == (Kind.HOT, "100.00% of all IDs, its peers have none")


def test_nothing_is_said_before_ten_minutes() -> None:
    unusual = Unusual()
    for points in ([], hour(lasts_s=5), hour(hot, lasts_s=600)):
        unusual = Unusual()
        unusual.look(seen(), points, 5.0)
        assert unusual.values == {"looked_s": None, "found": []}
    unusual = Unusual()
    unusual.look(seen(), hour(lasts_s=720), 5.0)
    assert unusual.values == {"looked_s": 660, "found": []}


def test_it_judges_once_a_minute() -> None:
    unusual = Unusual()
    unusual.look(seen(), hour(hot), 5.0)
    before = unusual.values
    assert before["found"]
    at_once = replace(seen(), at=END_S + 5, known_at=datetime.now(UTC).timestamp())
    unusual.look(at_once, hour(), 5.0)
    assert unusual.values is before
    unusual.look(replace(at_once, at=END_S + 60), hour(), 5.0)
    assert unusual.values["found"] == []
