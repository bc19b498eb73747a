"""A clock that shows any time there is: nothing comes twice, and a shard goes on once the clock is right."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import numpy as np
import psycopg
import pytest

from shardids import Layout
from shardids.catalog.rows import Catalog
from shardids.migrate.install import provision
from shardids.pg.embedded import EmbeddedServer
from tests.faults.conftest import make_database, make_node
from tests.support.faults import ALL_KINDS, LAYOUT, Ids, connect, draw, scalar
from tests.support.server_clock import Clock
from tests.support.waiting import wait_for

Db = psycopg.Connection[Any]

YEAR_S = 365 * 86_400.0
RANGE_S = (1 << 42) / 1000
"""After so long an offset of one incarnation reads as one of another."""
DRAWN = 3_000


def until(year: int, month: int, day: int) -> float:
    """Seconds from now to a day."""
    return datetime(year, month, day, tzinfo=UTC).timestamp() - time.time()


def set_clock(clock: Clock, db: Db, ahead_s: float) -> None:
    clock.set(ahead_s)

    def is_set() -> bool:
        there = scalar(db, "select extract(epoch from clock_timestamp())::double precision")
        return abs(there - time.time() - ahead_s) < 5

    wait_for(is_set, f"the server's clock is stepped by {ahead_s} s")


def draw_all(db: Db, shard: int = 0) -> list[Ids]:
    cursor = db.cursor(binary=True)
    return [draw(cursor, kind, 1 if kind == "one" else DRAWN, shard) for kind in ALL_KINDS]


def assert_distinct(parts: list[Ids]) -> None:
    ids = np.concatenate(parts)
    assert len(np.unique(ids)) == len(ids)


@contextmanager
def refusing(db: Db, *states: str) -> Iterator[None]:
    """Each way to draw is refused with one of the states."""
    for kind in ALL_KINDS:
        with pytest.raises(psycopg.Error) as refused:
            draw(db.cursor(binary=True), kind, 10)
        assert refused.value.sqlstate in states, str(refused.value)
    yield


@pytest.mark.parametrize("day", [(2093, 9, 7), (2150, 1, 1), (2302, 9, 1), (9999, 1, 1)])
def test_a_draw_past_the_layouts_end_leaves_the_shard_as_it_was(
    day: tuple[int, int, int], clock: Clock, faked_node: str
) -> None:
    with connect(faked_node) as db:
        parts = draw_all(db)
        set_clock(clock, db, until(*day))
        with refusing(db, "SI006"):
            set_clock(clock, db, 0)
        parts += draw_all(db)
        time.sleep(0.4)
        parts += draw_all(db)
        ids = np.concatenate(parts)
        assert_distinct(parts)
        assert LAYOUT.decode(int(ids.max())).time.timestamp() < time.time() + 60


@pytest.mark.parametrize("ranges", [1, 2, 3, 1000])
def test_no_clock_past_the_end_brings_back_the_ids_of_today(
    ranges: int, clock: Clock, faked_node: str
) -> None:
    with connect(faked_node) as db:
        parts = draw_all(db)
        set_clock(clock, db, until(2150, 1, 1))
        with refusing(db, "SI006"):
            set_clock(clock, db, ranges * RANGE_S)
        with refusing(db, "SI006"):
            set_clock(clock, db, -ranges * RANGE_S if ranges < 40 else -50 * YEAR_S)
        for kind in ALL_KINDS:
            try:
                parts.append(draw(db.cursor(binary=True), kind, DRAWN))
            except psycopg.Error as error:
                if error.sqlstate != "SI005":
                    raise
        set_clock(clock, db, 0)
        parts += draw_all(db)
        assert_distinct(parts)


def test_a_small_layout_whose_time_only_goes_forward(clock: Clock, faked_server: EmbeddedServer) -> None:
    layout = Layout(
        time_bits=30, shard_bits=12, sequence_bits=21, epoch_ms=time.time_ns() // 1_000_000 - 86_400_000
    )
    url = make_database(faked_server, "a small layout")
    catalog = Catalog(url)
    try:
        provision.init(catalog, layout, 1)
        provision.add_node(catalog, "a", url)
        provision.create_shards(catalog, [0])
    finally:
        catalog.close()
    with connect(url) as db:
        parts = [np.array([scalar(db, "select shard_0000.next_id()") for _ in range(100)])]
        for ranges in range(1, 10):
            set_clock(clock, db, ranges * (1 << 30) / 1000)
            for _ in range(20):
                with pytest.raises(psycopg.Error) as refused:
                    scalar(db, "select shard_0000.next_id()")
                assert refused.value.sqlstate == "SI006"
        set_clock(clock, db, 0)
        parts.append(np.array([scalar(db, "select shard_0000.next_id()") for _ in range(100)]))
        assert_distinct(parts)


@pytest.mark.parametrize("wrong", [YEAR_S, 11 * YEAR_S])
def test_a_clock_a_year_ahead_is_followed_once_it_is_confirmed(
    wrong: float, clock: Clock, faked_server: EmbeddedServer
) -> None:
    url = make_node(faked_server, "a year ahead", shard=1)
    with connect(url) as db:
        catalog = Catalog(url)
        try:
            provision.create_shards(catalog, [0])
        finally:
            catalog.close()
        parts = draw_all(db, 0) + draw_all(db, 1)
        set_clock(clock, db, wrong)
        for shard in (0, 1):
            with pytest.raises(psycopg.Error, match="shardids node confirm-clock a") as refused:
                draw(db.cursor(binary=True), "one", 1, shard)
            assert refused.value.sqlstate == "SI012"
        set_clock(clock, db, 0)
        parts += draw_all(db, 0) + draw_all(db, 1)
        set_clock(clock, db, wrong)
        db.execute("update shardids.node set clock_confirmed_at = clock_timestamp()")
        parts += draw_all(db, 0) + draw_all(db, 1)
        assert_distinct(parts)
        assert LAYOUT.decode(int(parts[-1][-1])).time.timestamp() > time.time() + wrong - 60


def test_a_shard_that_slept_is_awake_where_another_was_not(
    clock: Clock, faked_server: EmbeddedServer
) -> None:
    url = make_node(faked_server, "one sleeps", shard=1)
    with connect(url) as db:
        catalog = Catalog(url)
        try:
            provision.create_shards(catalog, [0])
        finally:
            catalog.close()
        draw_all(db, 0)
        draw_all(db, 1)
        for months in (8, 16):
            set_clock(clock, db, months * 30 * 86_400)
            draw_all(db, 1)
        draw_all(db, 0)
