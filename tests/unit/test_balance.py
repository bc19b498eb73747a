"""Which shards a rebalance moves: compared with every way there is, for small clusters."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from shardids.mover.balance import balance


def test_a_new_node_gets_its_part() -> None:
    even = balance(dict.fromkeys(range(12), 1.0), {s: "ab"[s % 2] for s in range(12)}, ["a", "b", "c"])
    assert len(even.transfers) == 4
    assert even.before == {"a": 6, "b": 6, "c": 0}
    assert even.after == {"a": 4, "b": 4, "c": 4}
    assert {t.target for t in even.transfers} == {"c"}


def test_what_is_balanced_stays() -> None:
    weights = {0: 10.0, 1: 9.5, 2: 0.0}
    assert balance(weights, {0: "a", 1: "b", 2: "a"}, ["a", "b"]).transfers == ()
    assert balance({}, {}, ["a", "b"]).transfers == ()


def test_one_large_shard_goes_rather_than_many_small_ones() -> None:
    weights = {0: 50.0, 1: 40.0} | dict.fromkeys(range(2, 12), 4.0)  # 130: 65 on each, give or take 6.5
    moves = balance(weights, dict.fromkeys(weights, "a"), ["a", "b"]).transfers
    assert sorted(t.weight for t in moves) == [4.0, 4.0, 4.0, 50.0]


def test_a_drained_node_keeps_nothing_and_others_nothing_more_than_needed() -> None:
    weights = {s: float(1 + s % 3) for s in range(30)}
    homes = {s: "abc"[s % 3] for s in range(30)}
    drained = balance(weights, homes, ["a", "b", "c"], drained=["c"])
    assert drained.after["c"] == 0
    assert sum(drained.after.values()) == sum(weights.values())
    # a begins with 10, b with 20, c with 30: the mean of two is 30.
    assert abs(drained.after["a"] - 30) <= 3
    assert {t.shard for t in drained.transfers} == {s for s in range(30) if homes[s] == "c"}


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5).flatmap(
        lambda weights: st.tuples(
            st.just(weights), st.lists(st.sampled_from("abc"), min_size=len(weights), max_size=len(weights))
        )
    )
)
def test_no_more_moves_than_needed_by_two(case: tuple[list[int], list[str]]) -> None:
    weights, homes = dict(enumerate(map(float, case[0]))), dict(enumerate(case[1]))
    mean = sum(weights.values()) / 3
    found = balance(weights, homes, "abc", margin=0.25)

    def distance(placed: dict[int, str]) -> float:
        loads = [sum(weights[s] for s in placed if placed[s] == node) for node in "abc"]
        return max(abs(load - mean) for load in loads)

    ways = [dict(enumerate(way)) for way in product("abc", repeat=len(weights))]
    within = [sum(way[s] != homes[s] for s in way) for way in ways if distance(way) <= 0.25 * mean + 1e-9]
    now = {**homes} | {t.shard: t.target for t in found.transfers}
    assert found.after == {node: sum(weights[s] for s in now if now[s] == node) for node in "abc"}
    assert distance(now) <= distance(homes) + 1e-9 or not found.transfers
    if within and distance(now) <= 0.25 * mean + 1e-9:
        assert len(found.transfers) <= min(within) + 2
