"""The detector: what is planted in an ordinary week is found, and in an ordinary week nothing is."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import numpy as np
import pytest

from shardids.errors import BadArgument
from shardids.ids.arrays import encode_array
from shardids.ids.layout import DEFAULT, Layout
from shardids.watch import stats
from shardids.watch.stats import Anomaly, Kind, Series
from shardids.watch.stats.detector import rate
from shardids.watch.stats.series import series_of
from tests.support.planted import DAY_MS, HOUR_MS, MINUTE_MS, MONDAY, Week

SEEDS = range(8)
START_MS = int(MONDAY.timestamp() * 1000)


def found_in(week: Week) -> list[Anomaly]:
    return stats.of(week.ids(), now=week.end + timedelta(seconds=3)).anomalies


@pytest.mark.long
@pytest.mark.parametrize(("shards", "rows"), [(4, 5_000), (8, 20_000), (32, 100_000), (1024, 200_000)])
def test_an_ordinary_week_raises_no_alarm(shards: int, rows: int) -> None:
    for seed in range(6):
        assert found_in(Week(seed=seed, shards=shards, rows=rows)) == []


def hot(week: Week, shard: int) -> None:
    of_peers = week.ms.size // week.shards
    week.drop(lambda _, shards: shards == shard)
    more = Week(seed=week.seed + 1000, rows=int(of_peers * week.chance.uniform(6, 12)))
    week.ms, week.clock_ms = np.r_[week.ms, more.ms], np.r_[week.clock_ms, more.clock_ms]
    week.shard = np.r_[week.shard, np.full(more.ms.size, shard)]


def start_of(week: Week) -> int:
    return int(week.chance.integers(HOUR_MS, 6 * DAY_MS))


def burst(week: Week, shard: int) -> None:
    first = start_of(week)
    week.add(shard, first, first + int(week.chance.integers(MINUTE_MS, HOUR_MS)), 120)


def burst_of_all(week: Week, _: int) -> None:
    first = start_of(week) // DAY_MS * DAY_MS + 12 * HOUR_MS
    week.add(None, first, first + HOUR_MS, int(week.chance.integers(2000, 6000)))


def silence(week: Week, shard: int) -> None:
    first = int(week.chance.integers(0, 3)) * DAY_MS + HOUR_MS
    last = first + int(week.chance.integers(36, 48)) * HOUR_MS
    week.drop(lambda ms, shards: (shards == shard) & (ms >= first) & (ms < last))


def silence_of_all(week: Week, _: int) -> None:
    first = start_of(week)
    last = first + int(week.chance.integers(3, 6)) * HOUR_MS
    week.drop(lambda ms, _: (ms >= first) & (ms < last))


def clock(week: Week, shard: int) -> None:
    """Set forward, and later right again: then the ticks wait for the clock. Or set back, for a day."""
    first = start_of(week)
    by_ms = int(week.chance.integers(2000, 30 * MINUTE_MS)) * int(week.chance.choice([-1, 1]))
    its = np.flatnonzero((week.shard == shard) & (week.ms >= first) & (week.ms < first + DAY_MS))
    week.clock_ms[its] += by_ms
    its = np.flatnonzero(week.shard == shard)
    if by_ms > 0:
        week.clock_ms[its] = np.maximum.accumulate(week.ms[its] + week.clock_ms[its]) - week.ms[its]


def future(week: Week, shard: int) -> None:
    its = np.flatnonzero(week.shard == shard)[-4:]
    week.clock_ms[its] += 20 * DAY_MS


PLANTED: dict[str, tuple[Kind, bool, Callable[[Week, int], None]]] = {
    "hot shard": (Kind.HOT, True, hot),
    "burst of a shard": (Kind.BURST, True, burst),
    "burst of all": (Kind.BURST, False, burst_of_all),
    "silence of a shard": (Kind.SILENCE, True, silence),
    "silence of all": (Kind.SILENCE, False, silence_of_all),
    "clock jump": (Kind.CLOCK, True, clock),
    "from the future": (Kind.FUTURE, True, future),
}


@pytest.mark.parametrize("what", PLANTED)
def test_what_is_planted_is_found_and_nothing_else(what: str) -> None:
    kind, is_of_one, plant = PLANTED[what]
    found = 0
    others: list[str] = []
    for seed in SEEDS:
        week = Week(seed=seed, rows=60_000, differ=0.2)
        shard = int(week.chance.integers(0, week.shards))
        plant(week, shard)
        anomalies = found_in(week)
        wanted = [
            one for one in anomalies if one.kind is kind and one.shard == (shard if is_of_one else None)
        ]
        found += bool(wanted)
        others += [f"{seed}: {one}" for one in anomalies if one not in wanted]
    assert found == len(SEEDS)
    assert others == []


def hour_with_a_burst(seed: int) -> Week:
    hour = Week(seed=seed, shards=16, rows=0)
    hour.days = 1
    hour.add(None, 0, HOUR_MS, 200_000)
    hour.add(5, 20 * MINUTE_MS, 21 * MINUTE_MS, 5_000)
    return hour


@pytest.mark.parametrize(("where", "count"), [("before", 1), ("before", 5), ("after", 1), ("now", 1)])
def test_a_few_ids_far_away_hide_nothing(where: str, count: int) -> None:
    hour = hour_with_a_burst(1)
    ids = hour.ids()
    plain = stats.of(ids, now=hour.end)
    (planted,) = plain.anomalies
    assert (planted.kind, planted.shard) == (Kind.BURST, 5)
    assert plain.per_second == pytest.approx(205_000 / 3600, rel=0.01)
    if where == "before":
        far = np.arange(7, 7 + count)
    else:
        far = np.array([DEFAULT.encode(at=hour.end + timedelta(days=400 if where == "now" else 0), shard=5)])
    told = stats.of(np.r_[far, ids], now=hour.end)
    assert told.count == 205_000 + count
    assert told.series.interval_ms == plain.series.interval_ms == 10_000
    assert told.per_second == pytest.approx(plain.per_second)
    (burst, other) = told.anomalies
    assert (burst.kind, burst.shard, burst.start, burst.end) == (
        planted.kind,
        planted.shard,
        planted.start,
        planted.end,
    )
    assert other.kind is (Kind.FUTURE if where == "now" else Kind.OUTSIDE)
    if where != "now":
        assert (other.value, f"{count} ID" in other.message, where in other.message) == (count, True, True)


def test_there_are_never_over_a_million_counts() -> None:
    every = np.arange(1 << 16)
    years = np.linspace(START_MS, START_MS + 20 * 365 * DAY_MS, every.size).astype(np.int64)
    counted = series_of(every, every, years, int(years[0]), int(years[-1]))
    assert counted.counts.size <= 1 << 20
    assert counted.counts.sum() == every.size
    assert counted.interval_ms % (7 * DAY_MS) == 0
    assert counted.intervals > 8


@pytest.mark.parametrize("statements", [500, 2_000, 8_000])
@pytest.mark.parametrize("spread", [False, True])
def test_an_ordinary_day_of_batches_raises_no_alarm(statements: int, spread: bool) -> None:
    """Statements of 20 to 200 rows at random times, of up to 20 ms, each into one shard or over all."""
    alarms = []
    for seed in range(3):
        chance = np.random.default_rng(seed)
        day = Week(seed=seed, shards=16, rows=0)
        rows = chance.integers(20, 201, statements)
        day.ms = np.repeat(np.sort(chance.integers(0, DAY_MS, statements)), rows)
        day.ms += np.concatenate([np.arange(count) // 10 for count in rows])
        day.shard = (
            chance.integers(0, 16, day.ms.size)
            if spread
            else np.repeat(chance.integers(0, 16, statements), rows)
        )
        day.clock_ms = np.zeros_like(day.ms)
        alarms += stats.of(np.sort(day.ids()), now=MONDAY + timedelta(days=1)).anomalies
    assert alarms == []


def test_a_burst_and_a_silence_among_batches_are_found() -> None:
    chance = np.random.default_rng(1)
    day = Week(seed=1, shards=16, rows=0)
    at, shard = np.sort(chance.integers(0, DAY_MS, 20_000)), chance.integers(0, 16, 20_000)
    at[shard == 3] = np.sort(np.r_[chance.integers(0, 10 * HOUR_MS, (shard == 3).sum())])
    more = chance.integers(12 * HOUR_MS, 13 * HOUR_MS, 400)
    at, shard = np.r_[at, more], np.r_[shard, np.full(400, 7)]
    rows = chance.integers(20, 201, at.size)
    day.ms, day.shard = np.repeat(at, rows), np.repeat(shard, rows)
    day.clock_ms = np.zeros_like(day.ms)
    found = {(one.kind, one.shard) for one in stats.of(np.sort(day.ids()), now=day.end).anomalies}
    assert {(Kind.BURST, 7), (Kind.SILENCE, 3)} <= found
    assert not {one for one in found if one[1] not in (3, 7)}


def series(counts: object, interval_ms: int = 1000) -> Series:
    array = np.asarray(counts)
    return Series(shards=np.arange(len(array)), counts=array, start_ms=START_MS, interval_ms=interval_ms)


def find(one: Series, *, layout: Layout = DEFAULT, **options: object) -> list[Anomaly]:
    return stats.find(one, layout=layout, now=MONDAY, **options)  # type: ignore[arg-type]


def test_live_rates_and_leads() -> None:
    rates = np.random.default_rng(1).poisson(100, (8, 60))
    assert find(series(rates), leads_ms=[3, 4, 2, 5, 9, 1, 16, 0]) == []
    rates[3, 40:43] *= 5
    (burst,) = find(series(rates))
    assert (burst.kind, burst.shard, burst.start) == (Kind.BURST, 3, MONDAY + timedelta(seconds=40))
    assert burst.end == MONDAY + timedelta(seconds=43)
    (ahead,) = find(series(rates[4:]), leads_ms=[3, 4, 2000, 5])
    assert (ahead.kind, ahead.shard, ahead.message) == (Kind.CLOCK, 6 - 4, "2.0 s ahead of the others")
    with pytest.raises(BadArgument, match="leads_ms must be 8 numbers"):
        find(series(rates), leads_ms=[1])


def test_a_silence_that_has_not_ended() -> None:
    rates = np.random.default_rng(2).poisson(20, (6, 60))
    rates[2, 50:] = 0
    (silence,) = find(series(rates))
    assert (silence.kind, silence.shard, silence.end) == (Kind.SILENCE, 2, None)
    assert silence.message.endswith("it has not ended")


def test_what_is_silent_every_night_is_not_silent() -> None:
    rates = np.random.default_rng(3).poisson(20, (6, 24 * 7))
    rates[2].reshape(7, 24)[:, :6] = 0
    assert find(series(rates, HOUR_MS)) == []


def test_the_busiest_second_against_what_a_shard_has() -> None:
    layout = Layout(time_bits=41, shard_bits=6, sequence_bits=1, epoch_ms=DEFAULT.epoch_ms)
    rates = np.random.default_rng(4).poisson(1000, (5, 60))
    assert find(series(rates), layout=layout) == []
    rates[1, 7] = 1601
    (busy,) = find(series(rates), layout=layout)
    assert (busy.kind, busy.shard, busy.value, busy.expected) == (Kind.SEQUENCE, 1, 1601, 2000)
    assert busy.start == MONDAY + timedelta(seconds=7)


def test_growth_is_told_after_four_weeks_and_four_times_as_far() -> None:
    layout = Layout(time_bits=41, shard_bits=6, sequence_bits=1, epoch_ms=DEFAULT.epoch_ms)
    day = 86_400
    weeks = np.repeat(1.15 ** np.arange(8), 7)
    rates = np.random.default_rng(5).poisson(500 * day * weeks, (5, 56))
    (growing,) = find(series(rates, DAY_MS), layout=layout)
    assert growing.kind is Kind.SEQUENCE
    assert growing.value == pytest.approx(np.log(2000 / (500 * 1.15**7)) / np.log(1.15), rel=0.05)
    assert "reach 2,000 in 3 weeks" in growing.message
    assert find(series(rates[:, :27], DAY_MS), layout=layout) == []
    assert find(series(rates, DAY_MS)) == []
    steady = np.random.default_rng(6).poisson(500 * day, (5, 56))
    assert find(series(steady, DAY_MS), layout=layout) == []


def test_a_layout_that_ends() -> None:
    short = Layout(time_bits=31, shard_bits=6, sequence_bits=4, epoch_ms=START_MS)
    (ends,) = find(series(np.ones((4, 4), int)), layout=short)
    assert (ends.kind, ends.message) == (Kind.LAYOUT, "the layout's time ends at 2026-04-09, in 0.07 years")


def test_counts_that_are_no_counts() -> None:
    with pytest.raises(BadArgument, match="must not be negative"):
        series([[1, -1]])
    with pytest.raises(BadArgument, match="at least 1"):
        series([[1, 1]], 0)
    with pytest.raises(BadArgument, match="must have 2 rows"):
        Series(shards=np.arange(2), counts=np.ones((3, 3), int), start_ms=0, interval_ms=1)


def test_a_shard_whose_peers_have_none_is_hot() -> None:
    counts = np.zeros((4, 4), np.int64)
    counts[1] = 100
    series = Series(shards=np.arange(4), counts=counts, start_ms=START_MS, interval_ms=MINUTE_MS, unit="tick")
    (found,) = stats.find(series, layout=DEFAULT, now=MONDAY)
    assert (found.kind, found.shard) == (Kind.HOT, 1)
    assert found.message == "100.00% of all ticks, its peers have none"


def test_of_a_few_ids_neither_bursts_nor_silences_are_told() -> None:
    chance = np.random.default_rng(1)
    newest = (MONDAY - DEFAULT.first_time) // timedelta(milliseconds=1)
    for few in range(3, 20):
        for _ in range(20):
            groups = chance.integers(1, 5)
            group = chance.integers(0, groups, few)
            ms = newest - (
                chance.integers(1, 3e9, groups)[group] + chance.integers(0, 10 ** (few % 8 + 1), few)
            )
            shard = np.where(chance.random(few) < 0.5, group, chance.integers(0, 64, few))
            ids = encode_array(DEFAULT, ms=ms, shard=shard, sequence=np.arange(few))
            kinds = {one.kind for one in stats.of(ids, now=MONDAY).anomalies}
            assert not kinds & {Kind.BURST, Kind.SILENCE}


@pytest.mark.parametrize(
    ("per_second", "said"),
    [
        (12_345.6, "12,346 IDs a second"),
        (1e7, "10,000,000 IDs a second"),
        (1.5, "1.5 IDs a second"),
        (0.05, "3 IDs a minute"),
        (4.96032e-06, "0.43 IDs a day"),
        (0.0, "0 IDs a day"),
    ],
)
def test_rates_are_plain_numbers(per_second: float, said: str) -> None:
    assert rate(per_second, "ID") == said


@pytest.mark.parametrize("used", [2, 10, 70])
def test_shards_that_are_used_are_not_hot_because_most_are_empty(used: int) -> None:
    counts = np.zeros((1024, 60), np.int64)
    rows = np.random.default_rng(used).choice(1024, used, replace=False)
    counts[rows] = np.random.default_rng(used).poisson(60, (used, 60))
    assert find(series(counts)) == []
    if used > 2:
        counts[rows[0]] *= 40
        (found,) = find(series(counts))
        assert (found.kind, found.shard) == (Kind.HOT, rows[0])
