"""The simulator's own promises; tests/integration/test_simulator_agrees.py compares it with a server."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shardids.errors import BadArgument
from shardids.ids.layout import DEFAULT, Layout
from shardids.ids.planning.simulator import Shards, play

SMALL = Layout(time_bits=41, shard_bits=6, sequence_bits=2, epoch_ms=DEFAULT.epoch_ms)


def one(**options: int) -> Shards:
    return Shards(node_of=[0], skew_ms=[0.0], start_ms=1000.0, layout=SMALL, **options)


@pytest.mark.parametrize(
    ("idle", "ms"), [(0.0, 0), (1.9, 0), (2.1, 16), (17.9, 16), (18.0, 32), (255.5, 256), (400, 400)]
)
def test_a_late_draw_takes_steps_of_16_ms_or_goes_to_the_clock(idle: float, ms: int) -> None:
    shards = one()
    given, tick = shards.draw(1000 + idle, [1])
    assert (given.tolist(), int(tick[0]) >> 2) == ([1], 1000 + ms)


def test_a_clock_that_steps_back_is_not_followed() -> None:
    shards = one()
    shards.draw(1400.0, [4])
    ticks = [int(shards.draw(1000.0, [2])[1][0]) for _ in range(3)]
    assert np.diff(ticks).tolist() == [2, 2]
    assert shards.lead_ms(1000.0)[0] >= 400


def test_past_a_minute_each_draw_takes_two_ticks_and_past_the_limit_it_is_refused() -> None:
    shards = one(max_ahead_ms=60_100)
    given, _ = shards.draw(1000.0, [250_000])
    until_minute = 60_000 * 4 - 1
    assert given.tolist() == [until_minute + 100 * 4 // 2]
    assert shards.lead_ms(1000.0)[0] < 60_100
    assert shards.draw(1000.0, [2])[0].tolist() == [0]


def test_a_restart_goes_past_clock_and_lead() -> None:
    shards = one()
    shards.draw(1000.0, [100])
    before = int(shards.draw(1000.0, [1])[1][0])
    shards.restart(0)
    after = int(shards.draw(1000.0, [1])[1][0])
    assert after - before >= 10_000 * 4


def test_only_shards_that_lead_go_further_by_the_mark() -> None:
    shards = Shards(node_of=[0, 0, 0], skew_ms=[0.0], start_ms=1000.0, layout=SMALL)
    shards.offset_ms[2] += 70_000
    shards.restart(0, mark=0.5)
    shards.draw(61_000.0, [1, 1, 1])
    assert shards.lead_ms(61_000.0).tolist() == [10_000, 10_000, 25_000]


def test_a_shard_that_restarts_took_ahead_waits_for_the_clock() -> None:
    shards = Shards(node_of=[0, 0], skew_ms=[0.0], start_ms=1000.0, layout=SMALL)
    shards.offset_ms += [25_000, 90_000]
    shards.restart(0, mark=0.0)
    assert shards.draw(1000.0, [1, 1])[0].tolist() == [0, 1]
    assert shards.draw(5_999.0, [1, 1])[0].tolist() == [0, 1]
    assert shards.draw(6_000.0, [1, 1])[0].tolist() == [1, 1]
    assert shards.lead_ms(6_000.0)[0] == 30_000


def test_a_new_incarnation_is_seen_by_the_next_draw_and_by_that_alone() -> None:
    shards = Shards(node_of=[0, 1], skew_ms=[0.0, 0.0], start_ms=1000.0, layout=SMALL)
    shards.restart(0)
    shards.draw(400_000.0, [0, 1])
    assert shards.lead_ms(400_000.0).tolist() == [-399_000, 0]
    for _ in range(2):
        given, _ = shards.draw(500_000.0, [1, 1])
        assert given.tolist() == [1, 1]
        assert shards.lead_ms(500_000.0) == pytest.approx([10_000, 0], abs=1)


def test_the_first_of_an_incarnation_takes_one_tick_at_any_lead_unless_it_is_refused() -> None:
    shards = Shards(node_of=[0, 0], skew_ms=[0.0], start_ms=1000.0, layout=SMALL, max_ahead_ms=90_000)
    shards.offset_ms += [60_000, 80_000]
    shards.restart(0, mark=0.25)
    counter = shards.counter.copy()
    given, _ = shards.draw(1000.0, [3, 3])
    # Two are lost, the next is the first ID, and two ticks each the others.
    assert (given.tolist(), (shards.counter - counter).tolist()) == ([3, 0], [2 + 1 + 4, 2])


def test_a_run_is_the_same_again_and_ticks_increase() -> None:
    run = {
        "shards": 32,
        "nodes": 4,
        "ids_per_second": 50_000.0,
        "seconds": 0.5,
        "layout": SMALL,
        "restart": (1, 0.2),
    }
    first, again, other = (play(seed=seed, **run) for seed in (1, 1, 2))  # type: ignore[arg-type]
    assert first == again != other
    assert first.increasing
    assert first.refused == 0
    assert 10_000 <= first.lead_ms <= 20_100


def test_more_than_the_sequence_has_runs_ahead_by_what_is_too_much() -> None:
    # 32 shards of 4 a millisecond: 128,000 a second.
    over = play(shards=32, nodes=4, ids_per_second=256_000, seconds=0.5, seed=1, layout=SMALL)
    assert over.last_lead_ms == pytest.approx(500, abs=60)
    under = play(shards=32, nodes=4, ids_per_second=64_000, seconds=0.5, seed=1, layout=SMALL, skew_ms=0)
    assert under.lead_ms < 32
    burst = play(
        shards=32, nodes=4, ids_per_second=32_000, seconds=0.5, seed=1, layout=SMALL, burst=(0.1, 0.2, 8)
    )
    assert 60 < burst.lead_ms < 140
    assert burst.last_lead_ms < 60


def test_what_can_not_be_played() -> None:
    for options in (
        {"shards": 65},
        {"nodes": 5},
        {"seconds": 0.0},
        {"seconds": math.inf},
        {"ids_per_second": -1.0},
        {"ids_per_second": math.inf},
        {"ids_per_second": 1e16},
        {"ids_per_second": math.nan},
        {"seconds": 0.0001},
        {"seed": -1},
        {"skew_ms": -1.0},
        {"skew_ms": math.nan},
        {"max_ahead_ms": 59_999},
        {"burst": (0.0, 0.1, -1.0)},
        {"burst": (0.0, 0.1, math.inf)},
        {"restart": (4, 0.01)},
        {"restart": (-1, 0.01)},
        {"restart": (0, 0.1)},
    ):
        with pytest.raises(BadArgument):
            play(
                **{
                    "shards": 4,
                    "nodes": 4,
                    "ids_per_second": 1.0,
                    "seconds": 0.1,
                    "seed": 1,
                    "layout": SMALL,
                    **options,
                }
            )  # type: ignore[arg-type]
