"""Which shards a rebalance moves: compared with every way there is, for small clusters."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from shardids.mover.balance import Balance, balance


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


HOT = {0: 10.0} | dict.fromkeys(range(1, 16), 1.0)
"""Ten times the load of each of fifteen others; a node of three carries 8.3."""
SPREAD = {shard: "abc"[shard % 3] for shard in HOT}


def on(node: str, placed: dict[int, str], moves: Balance) -> set[int]:
    """The shards of a node after the moves."""
    now = placed | {one.shard: one.target for one in moves.transfers}
    return {shard for shard, name in now.items() if name == node}


def test_a_shard_that_is_more_than_a_node_s_share_gets_a_node_to_itself() -> None:
    moves = balance(HOT, SPREAD, "abc")
    assert on("a", SPREAD, moves) == {0}
    assert moves.after == {"a": 10.0, "b": 8.0, "c": 7.0}
    assert {one.shard for one in moves.transfers} == {3, 6, 9, 12, 15}
    now = SPREAD | {one.shard: one.target for one in moves.transfers}
    assert balance(HOT, now, "abc").transfers == ()


def test_the_hot_shard_leaves_if_that_is_less_data() -> None:
    placed = {shard: "a" if shard < 9 else "b" for shard in HOT}
    sizes = {shard: 1.0 if shard == 0 else 50.0 for shard in HOT}
    moves = balance(HOT, placed, "abc", sizes=lambda: sizes)
    assert on("c", placed, moves) == {0}
    assert len(moves.transfers) == 1
    # The other way round, its neighbours leave.
    sizes = {shard: 5000.0 if shard == 0 else 50.0 for shard in HOT}
    assert on("a", placed, balance(HOT, placed, "abc", sizes=lambda: sizes)) == {0}


def test_idle_neighbours_of_a_hot_shard_stay() -> None:
    weights = {0: 10.0, 1: 0.1, 2: 1.0, 3: 1.0}
    assert balance(weights, {0: "a", 1: "a", 2: "b", 3: "c"}, "abc").transfers == ()


def test_two_hot_shards_get_a_node_each_and_one_node_is_left_for_the_others() -> None:
    weights = {0: 30.0, 1: 20.0, 2: 20.0} | dict.fromkeys(range(3, 9), 1.0)
    moves = balance(weights, dict.fromkeys(weights, "a"), "abc")
    apart = [on(node, dict.fromkeys(weights, "a"), moves) for node in "abc"]
    assert {0} in apart
    assert max(moves.after.values()) == 30.0
    assert all(moves.after.values())


def test_fixed_shards_stay_or_come_home_and_count() -> None:
    weights, placed = dict.fromkeys(range(6), 1.0), dict.fromkeys(range(6), "a")
    moves = balance(weights, placed, "ab", fixed={0: "a", 1: "a", 2: "a"})
    assert {one.shard for one in moves.transfers} == {3, 4, 5}
    moves = balance(weights, placed, "ab", fixed={0: "b"}, margin=9)
    assert [(one.shard, one.target) for one in moves.transfers] == [(0, "b")]
    # A hot shard does not get the node of a shard that has to stay there.
    moves = balance(HOT, SPREAD, "abc", fixed={3: "a"})
    assert on("a", SPREAD, moves) >= {3}
    assert {0} in [on(node, SPREAD, moves) for node in "bc"]
    assert on("a", SPREAD, balance(HOT, SPREAD, "abc", fixed={0: "a"})) == {0}


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abc")), min_size=1, max_size=9),
    st.dictionaries(st.integers(0, 8), st.sampled_from("abc")),
)
def test_a_plan_that_was_carried_out_leaves_nothing_to_do(
    case: list[tuple[int, str]], fixed: dict[int, str]
) -> None:
    weights = {shard: float(weight) for shard, (weight, _) in enumerate(case)}
    placed = {shard: node for shard, (_, node) in enumerate(case)}
    moves = balance(weights, placed, "abc", fixed=fixed)
    now = placed | {one.shard: one.target for one in moves.transfers}
    assert all(now[shard] == node for shard, node in fixed.items() if shard in now)
    again = balance(weights, now, "abc", fixed=fixed)
    assert again.transfers == ()


def test_a_drain_takes_no_shards_from_other_nodes() -> None:
    drained = balance(HOT, SPREAD, "abc", margin=float("inf"), drained=["c"])
    assert {one.shard for one in drained.transfers} == {s for s, node in SPREAD.items() if node == "c"}
