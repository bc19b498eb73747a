"""What the comparison counts: order, and duplicates."""

from __future__ import annotations

import itertools
import random

import pytest

from shardids.compare.measures.faults import FAULTS
from shardids.compare.measures.measuring import FULL, QUICK
from shardids.compare.measures.uniqueness import Draw, Tally, order_of
from shardids.compare.results import CASES


def draw(key: int, begun_ms: float, ended_ms: float | None = None) -> Draw:
    ended_ms = begun_ms + 0.5 if ended_ms is None else ended_ms
    return Draw(key=key, begun_ns=round(begun_ms * 1e6), ended_ns=round(ended_ms * 1e6), node=0)


def test_rising_keys_are_in_order() -> None:
    order = order_of([draw(number * 7, number) for number in range(100)])
    assert (order.keys, order.pairs, order.out_of_order_percent) == (100, 100 * 99 // 2, 0)
    assert (order.late_p99_ms, order.late_most_ms) == (0, 0)


def test_falling_keys_are_all_out_of_order() -> None:
    order = order_of([draw(1000 - number, number) for number in range(100)])
    assert order.out_of_order_percent == 100
    # The last begins 98.5 ms after the first, and greatest, was there.
    assert order.late_most_ms == pytest.approx(98.5)
    assert order.lasted_ms == pytest.approx(99.5)


def test_of_draws_at_the_same_time_neither_is_first() -> None:
    order = order_of([draw(2, 0, 10), draw(1, 5, 15), draw(3, 20, 21)])
    assert (order.pairs, order.out_of_order_percent, order.late_most_ms) == (2, 0, 0)


def test_a_late_key() -> None:
    order = order_of([draw(1, 0), draw(5, 1), draw(6, 2), draw(4, 40)])
    assert order.pairs == 6
    assert order.out_of_order_percent == pytest.approx(100 * 2 / 6)
    assert order.late_most_ms == pytest.approx(40 - 1.5)


def test_order_agrees_with_its_definition() -> None:
    chance = random.Random(5)
    draws = []
    for _ in range(150):
        begun_ms = chance.uniform(0, 50)
        draws.append(draw(chance.randrange(1000), begun_ms, begun_ms + chance.uniform(0.1, 5)))
    draws = list({each.key: each for each in draws}.values())
    apart = [(a, b) for a, b in itertools.permutations(draws, 2) if a.ended_ns < b.begun_ns]
    wrong = [(a, b) for a, b in apart if a.key > b.key]
    order = order_of(draws)
    assert order.pairs == len(apart)
    assert order.out_of_order_percent == pytest.approx(100 * len(wrong) / len(apart))
    assert order.late_most_ms == pytest.approx(max(b.begun_ns - a.ended_ns for a, b in wrong) / 1e6)


def test_one_draw_is_in_order() -> None:
    order = order_of([draw(7, 0)])
    assert (order.pairs, order.out_of_order_percent, order.points[0].key) == (0, 0, 0)


def test_the_points_of_a_picture_lie_within_it() -> None:
    points = order_of([draw(chance, number) for number, chance in enumerate(range(5000, 0, -1))]).points
    assert len(points) == 600
    assert all(0 <= point.key <= 1 for point in points)
    assert sorted(point.ms for point in points) == [point.ms for point in points]


def test_a_tally_counts_what_was_there_before() -> None:
    tally = Tally()
    tally.add("one", [1, 2, 3])
    tally.add("two", [3, 4, 4])
    tally.add("two", [], "no more", refused=1)
    tally.add("two", [5], "still no more", refused=1)
    assert (tally.cases["one"].keys, tally.cases["one"].twice) == (3, 0)
    two = tally.cases["two"]
    assert (two.keys, two.twice, two.refused, two.refusal) == (4, 2, 2, "no more")


def test_a_tally_counts_what_was_set_aside_before() -> None:
    tally = Tally()
    tally.add("drawn", [5, 50, 500])
    tally.set_aside("aside", range(10, 60))
    tally.add("drawn", [9, 10, 59, 60])
    tally.set_aside("again", range(40, 100))
    tally.set_aside("again", range(95, 105))
    tally.set_aside("all", range(200))
    assert {case: (found.keys, found.twice) for case, found in tally.cases.items()} == {
        "drawn": (7, 2),
        "aside": (50, 1),
        "again": (70, 20 + 1 + 5),
        "all": (200, 95 + 2),
    }
    tally.forget()
    tally.add("anew", [5, 50, 500])
    assert tally.cases["anew"].twice == 0


def test_equal_keys_are_in_order() -> None:
    order = order_of([draw(7, 0), draw(7, 50)])
    assert (order.pairs, order.out_of_order_percent, order.late_most_ms) == (1, 0, 0)


def test_the_sizes_say_what_they_are() -> None:
    for sizes in (QUICK, FULL):
        words = sizes.in_words()
        assert {"all", "draws", "inserts", "spread", "storage", "order", "causality", "faults"} <= set(words)
        assert set(CASES) - set(words) == set(FAULTS)
    assert "1,000,000 rows" in FULL.in_words()["storage"]
