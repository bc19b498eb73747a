"""Plans of migrations: who runs first, who runs at all."""

from __future__ import annotations

import pytest

from shardids.errors import BadArgument
from shardids.migrate.plan import Outcome, Position, Route, RunReport, Start, make_plan
from shardids.pg.notation import parse_duration_ms, parse_size_bytes, shown_shards


def at(shard: int, node: str, heads: Start = (), unfinished: str | None = None) -> Position:
    return Position(shard=shard, node=node, heads=heads, unfinished=unfinished)


def route_from(start: Start) -> Route:
    done = start == ("two",)
    return Route(start=start, end=("two",), target="two", revisions=() if done else ("one", "two"))


def test_canaries_are_of_each_node_in_turn_and_the_settled_cost_nothing() -> None:
    positions = [at(n, "a" if n < 4 else "b") for n in range(8)] + [at(9, "c", ("two",))]
    plan = make_plan(positions, route_from, canaries=3)
    assert [p.shard for p in plan.canaries] == [0, 4, 1]
    assert {node: [p.shard for p in queue] for node, queue in plan.queues.items()} == {
        "a": [2, 3],
        "b": [5, 6, 7],
    }
    assert [p.shard for p in plan.settled] == [9]
    assert [p.shard for p in plan.pending] == [0, 4, 1, 2, 3, 5, 6, 7]
    assert set(plan.routes) == {(), ("two",)}


def test_a_shard_that_is_half_way_is_first() -> None:
    positions = [at(1, "a"), at(2, "a"), at(3, "a", unfinished="up two 1 0")]
    assert [p.shard for p in make_plan(positions, route_from, canaries=0).queues["a"]] == [3, 1, 2]


def test_each_starting_point_is_asked_once() -> None:
    asked: list[Start] = []

    def ask(start: Start) -> Route:
        asked.append(start)
        return route_from(start)

    make_plan([at(n, "a", (None, (), ("one",))[n % 3]) for n in range(30)], ask, canaries=1)
    assert sorted(asked, key=str) == sorted([None, (), ("one",)], key=str)


@pytest.mark.parametrize(
    ("shards", "shown"), [([], ""), ([5], "5"), ([3, 1, 2], "1-3"), ([0, 1, 3, 7, 8, 9, 9], "0-1,3,7-9")]
)
def test_shards_as_the_option_takes_them(shards: list[int], shown: str) -> None:
    assert shown_shards(shards) == shown


def test_the_command_that_tries_again() -> None:
    outcomes = [
        Outcome(shard=n, node="a", start=None, end=None, status=status)
        for n, status in enumerate(("done", "failed", "not started", "done", "failed"))
    ]
    report = RunReport(outcomes=tuple(outcomes), seconds=1.0)
    assert not report.succeeded
    command = report.retry_command(["shardids", "migrate", "up", "--dir", "my app"])
    assert command == "shardids migrate up --dir 'my app' --shards 1-2,4"


@pytest.mark.parametrize(
    ("text", "milliseconds"), [("2s", 2000), ("500ms", 500), ("1min", 60_000), ("1.5s", 1500), ("0", 0)]
)
def test_durations(text: str, milliseconds: int) -> None:
    assert parse_duration_ms(text) == milliseconds


@pytest.mark.parametrize(
    ("text", "size"), [("1kB", 1000), ("1.5 MB", 1_500_000), ("20GB", 20 * 10**9), ("0.001kB", 1)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "20", "0MB", "-1MB", "1gb", "1 GiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(BadArgument):
        parse_size_bytes(text)


@pytest.mark.parametrize(
    "text", ["", "s", "-1s", "2 weeks", "1e3", "500", "1.5", "0.0", "9999999999s", "2000000h"]
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(BadArgument):
        parse_duration_ms(text)
