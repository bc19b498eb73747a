"""Snowflakes: leases of worker numbers, the clock, and the sequence, with a clock that the test moves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from sqlalchemy.engine import URL

from shardids.compare.schemes.blocks import Lease, LeaseTimes, install_leases
from shardids.compare.schemes.snowflake import MOST_WAITED_MS, Rollback, SnowflakeSource
from shardids.errors import BadArgument, ClockMovedBack, LeaseLost, TimeExhausted
from shardids.ids.layout import TWITTER, Layout
from shardids.pg.embedded import temporary_server
from tests.conftest import dsn
from tests.support.fake_clock import FakeClock

START_MS = 1_800_000_000_000
LASTS_MS = 30_000
QUICK = LeaseTimes(lasts_s=1.5, renew_s=0.1, rests_s=1.5)


@pytest.fixture
def url(blank_database: Callable[[], URL]) -> str:
    url = dsn(blank_database())
    install_leases(url)
    return url


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(START_MS)


@pytest.fixture
def make(url: str, clock: FakeClock) -> Iterator[Callable[..., SnowflakeSource]]:
    """Opens sources on the fake clock, without a heartbeat."""
    opened = []

    def make(rollback: Rollback = "wait", **options: Any) -> SnowflakeSource:
        opened.append(SnowflakeSource(url, rollback=rollback, clock=clock, heartbeat=False, **options))
        return opened[-1]

    yield make
    for source in opened:
        source.close()


def read(key: object) -> tuple[int, int, int]:
    """Unix ms, worker and sequence of a key."""
    assert isinstance(key, int)
    decoded = TWITTER.decode(key)
    return decoded.ms + TWITTER.epoch_ms, decoded.shard, decoded.sequence


def expire(url: str, seconds: float = 3600) -> None:
    """As if the time had passed on the server since every lease was last renewed."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "update shardids_baselines.worker set expires_at = expires_at - make_interval(secs => %s)",
            (seconds,),
        )


def test_processes_hold_numbers_of_their_own(make: Callable[..., SnowflakeSource]) -> None:
    sources = [make() for _ in range(5)]
    assert [source.worker for source in sources] == [0, 1, 2, 3, 4]
    with ThreadPoolExecutor(10) as pool:
        # Two threads share each process.
        keys = [k for drawn in pool.map(lambda s: s.draw_many(3000), [*sources, *sources]) for k in drawn]
    assert len(set(keys)) == len(keys) == 30_000
    assert {read(key)[1] for key in keys} == {0, 1, 2, 3, 4}


def test_leasing_at_once_gives_each_number_once(url: str) -> None:
    def lease(_: int) -> Lease | None:
        try:
            return Lease(url, numbers=12, times=LeaseTimes())
        except LeaseLost:
            return None

    with ThreadPoolExecutor(16) as pool:
        leases = [one for one in pool.map(lease, range(16)) if one]
    assert sorted(one.number for one in leases) == list(range(12))
    for one in leases:
        one.release(0)


def test_the_sequence_fills_a_millisecond_and_waits_for_the_next(
    make: Callable[..., SnowflakeSource], clock: FakeClock
) -> None:
    source = make()
    parts = [read(key) for key in source.draw_many(4096)]
    assert parts == [(START_MS, 0, sequence) for sequence in range(4096)]
    assert clock.slept_s == 0
    assert read(source.draw()) == (START_MS + 1, 0, 0)
    assert clock.slept_s > 0


def test_wait_sleeps_until_the_clock_has_caught_up(
    make: Callable[..., SnowflakeSource], clock: FakeClock
) -> None:
    source = make("wait")
    first = read(source.draw())
    clock.ms -= 400
    assert read(source.draw()) == (START_MS, 0, first[2] + 1)
    assert clock.slept_s == pytest.approx(0.4)
    clock.ms -= MOST_WAITED_MS + 1
    with pytest.raises(ClockMovedBack, match=f"worker 0 went back by {MOST_WAITED_MS + 1} ms"):
        source.draw()
    assert clock.slept_s == pytest.approx(0.4)


def test_offset_counts_on_from_the_last_time_and_drops_it_when_the_clock_is_ahead_again(
    make: Callable[..., SnowflakeSource], clock: FakeClock
) -> None:
    source = make("offset")
    source.draw()
    clock.ms -= 3_600_000
    assert read(source.draw()) == (START_MS, 0, 1)
    clock.ms += 7
    assert read(source.draw()) == (START_MS + 7, 0, 0)
    clock.ms -= 100
    assert read(source.draw()) == (START_MS + 7, 0, 1)
    assert clock.slept_s == 0
    clock.ms = START_MS + 500
    assert read(source.draw()) == (START_MS + 500, 0, 0)


def test_fail_refuses_until_the_clock_has_caught_up(
    make: Callable[..., SnowflakeSource], clock: FakeClock
) -> None:
    source = make("fail")
    source.draw()
    clock.ms -= 1
    with pytest.raises(ClockMovedBack, match="went back by 1 ms"):
        source.draw()
    clock.ms += 1
    assert read(source.draw()) == (START_MS, 0, 1)


@pytest.mark.parametrize("rollback", ["wait", "offset", "fail"])
def test_no_strategy_repeats_itself_while_the_clock_jumps(
    rollback: Rollback, make: Callable[..., SnowflakeSource], clock: FakeClock
) -> None:
    source = make(rollback)
    drawn = []
    for jump_ms in (-3, 2, -900, 40, 0, -MOST_WAITED_MS, 6000, -1, 1, 1) * 20:
        for _ in range(50):
            try:
                drawn.append(source.draw())
            except ClockMovedBack:
                clock.ms += 250
        clock.ms += jump_ms
        source.renew()
    assert len(drawn) > 5000
    assert len(set(drawn)) == len(drawn)
    assert drawn == sorted(drawn)


def test_a_lease_that_is_not_renewed_ends(make: Callable[..., SnowflakeSource], clock: FakeClock) -> None:
    source = make()
    clock.ms += LASTS_MS
    assert read(source.draw())[0] == START_MS + LASTS_MS
    clock.ms += 1
    with pytest.raises(LeaseLost, match="not renewed for 30"):
        source.draw()
    source.renew()
    assert read(source.draw())[0] == START_MS + LASTS_MS + 1


def test_a_number_rests_before_it_is_used_again(make: Callable[..., SnowflakeSource], url: str) -> None:
    few = {"layout": Layout(time_bits=41, shard_bits=1, sequence_bits=12, epoch_ms=TWITTER.epoch_ms)}
    first, second = make(**few), make(**few)
    with pytest.raises(LeaseLost, match="all 2 worker numbers are held, or rest for 60"):
        make(**few)
    second.close()
    with pytest.raises(LeaseLost, match="given back"):
        second.draw()
    expire(url, 59)
    first.renew()
    with pytest.raises(LeaseLost):
        make(**few)
    expire(url, 1.1)
    first.renew()
    assert make(**few).worker == 1


def test_a_process_that_was_stopped_is_fenced_and_repeats_nothing(
    make: Callable[..., SnowflakeSource], url: str, clock: FakeClock
) -> None:
    one = {"layout": Layout(time_bits=41, shard_bits=1, sequence_bits=12, epoch_ms=TWITTER.epoch_ms)}
    stopped, other = make("offset", **one), make("offset", **one)
    before = [stopped.draw() for _ in range(5)]
    expire(url)
    other.renew()
    # Its successor's clock is an hour behind, too: what the row keeps counts, not the clock.
    clock.ms -= 3_600_000
    successor = make("offset", **one)
    assert successor.worker == stopped.worker == 0
    drawn = [successor.draw() for _ in range(5000)]
    # It wakes up. What it still draws, up to the bound that it set, is of times below its successor's.
    woken = [stopped.draw() for _ in range(5000)]
    assert len({*before, *drawn, *woken}) == 10_005
    with pytest.raises(LeaseLost, match="leased to another process"):
        stopped.renew()
    with pytest.raises(LeaseLost, match="leased to another process"):
        stopped.draw()
    assert successor.draw() not in drawn


def test_a_restart_after_the_clock_stepped_back_repeats_nothing(
    make: Callable[..., SnowflakeSource], url: str, clock: FakeClock
) -> None:
    first = make("fail")
    drawn = first.draw_many(5000)
    first.close()
    expire(url)
    with psycopg.connect(url, autocommit=True) as connection:
        # Take up the numbers that nobody had: the next process gets the same one.
        connection.execute(
            "insert into shardids_baselines.worker"
            " select n, 1, clock_timestamp(), 0 from generate_series(1, 1023) n"
        )
    clock.ms -= 60_000
    again = make("fail")
    assert again.worker == 0
    with pytest.raises(ClockMovedBack):
        again.draw()
    clock.ms += 60_000
    assert not set(again.draw_many(5000)) & set(drawn)


def test_the_heartbeat_outlives_a_server_that_is_down_for_a_moment() -> None:
    with temporary_server() as server:
        install_leases(server.url())
        with SnowflakeSource(server.url(), times=QUICK) as source:
            drawn = [source.draw()]
            time.sleep(1.8)
            drawn.append(source.draw())
            server.kill()
            time.sleep(1.6)
            with pytest.raises(LeaseLost, match="not renewed"):
                source.draw()
            server.start(attached=True)
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                try:
                    drawn.append(source.draw())
                    break
                except LeaseLost:
                    time.sleep(0.05)
            assert len(set(drawn)) == 3
            assert abs(read(drawn[-1])[0] - datetime.now(UTC).timestamp() * 1000) < 5000


def test_refusals(make: Callable[..., SnowflakeSource], clock: FakeClock) -> None:
    for lasts_s, renew_s, rests_s in ((10, 10, 20), (10, 0, 20), (10, 5, 9)):
        with pytest.raises(BadArgument, match="lease can't last"):
            LeaseTimes(lasts_s=lasts_s, renew_s=renew_s, rests_s=rests_s)
    source = make()
    clock.ms = TWITTER.epoch_ms + (1 << 41)
    source.renew()
    with pytest.raises(TimeExhausted):
        source.draw()
