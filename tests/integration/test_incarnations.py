"""A new incarnation of a server, or another server with its files, issues no ID of the one before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psycopg
import pytest
from sqlalchemy.engine import URL

from shardids.pg.embedded import EmbeddedServer, temporary_server
from shardids.pg.urls import parse_url
from tests.conftest import MakeRole, dsn
from tests.support.generator import (
    DEFAULT,
    at_once,
    connect,
    draw,
    increases,
    install,
    paused,
    refused,
    reserve,
    run_ahead,
    scalar,
    ticks,
)
from tests.support.incarnations import ENDS, begin_another_incarnation, reconnect

Db = psycopg.Connection[Any]

NEXT = "select shard_0005.next_id()"
MARGIN_MS = 3_000
"""Of the server's node. A lead of ten of them is none that restarts made: no draw waits for the clock."""
FIRST_THAT_FLUSHES = 170_000


def offset_ms(connection: Db) -> int:
    return scalar(connection, "select shardids.offset_ms(pg_sequence_last_value('shard_0005.id_offset'))")


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def lead_ms(tick: int) -> int:
    """How far a tick is ahead of the clock."""
    return (tick >> DEFAULT.sequence_bits) - (now_ms() - DEFAULT.epoch_ms)


def set_margin(connection: Db, ms: int) -> None:
    connection.execute("update shardids.node set safety_margin = %s * interval '1 ms'", (ms,))


def refuse_lost_leads(connection: Db, reserved: int) -> None:
    if connection.info.server_version < FIRST_THAT_FLUSHES and reserved >> DEFAULT.sequence_bits > MARGIN_MS:
        pytest.skip("before PostgreSQL 17 a lead above the margin can be lost: docs/explanation/generator.md")


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    """A server that writes no WAL to disk before a COMMIT, as far as that can be."""
    settings = {"fsync": "on", "wal_level": "minimal", "max_wal_senders": "0", "wal_writer_delay": "10s"}
    with temporary_server(settings=settings) as server:
        install(parse_url(server.url()), shards=(5, 6))
        with connect(server.url()) as connection:
            set_margin(connection, MARGIN_MS)
        yield server


def bases(url: str) -> set[int]:
    """What eight new sessions at once say of this incarnation of the server."""

    def session(_number: int) -> int:
        with reconnect(url) as connection:
            connection.execute(NEXT)
            return scalar(connection, "select shardids.offset_base()")

    return set(at_once(8, session))


@pytest.mark.parametrize("reserved", [3_000_000, 30_000_000])
@pytest.mark.parametrize("how", ENDS)
def test_a_new_incarnation_issues_no_id_of_an_earlier_one(
    how: str, reserved: int, server: EmbeddedServer
) -> None:
    """The transaction is open and its WAL not on disk; its ticks are ahead of the clock."""
    url = server.url()
    with reconnect(url) as observer, reconnect(url) as working:
        refuse_lost_leads(observer, reserved)
        draw(observer, 1000)
        before = scalar(working, "select shardids.offset_base()")
        assert scalar(observer, "select shardids.offset_base()") == before
        working.execute("begin")
        for _ in range(reserved // 1_000_000):
            _, last = reserve(working, 1_000_000)
        issued = max(last, ticks(draw(working, 5000)[-1]))
        stored = offset_ms(observer)
        assert issued >> DEFAULT.sequence_bits > now_ms() - DEFAULT.epoch_ms + reserved // 1024 // 2
        begin_another_incarnation(server, how, observer, working)
    with reconnect(url) as connection:
        found = offset_ms(connection)
        assert found == stored or how != "restart"
        ids = draw(connection, 1000)
    assert ticks(ids[0]) > issued
    assert increases(ids)


@pytest.mark.parametrize("how", ENDS)
def test_the_sessions_of_an_incarnation_agree_and_tell_it_from_the_last(
    how: str, server: EmbeddedServer
) -> None:
    url = server.url()
    before = bases(url)
    with reconnect(url) as observer, reconnect(url) as working:
        begin_another_incarnation(server, how, observer, working)
    after = bases(url)
    assert (len(before), len(after)) == (1, 1)
    assert before != after


@pytest.mark.parametrize("how", ENDS)
def test_ids_that_were_committed_are_not_issued_again(how: str, server: EmbeddedServer) -> None:
    url = server.url()
    with reconnect(url) as observer, reconnect(url) as working:
        last = run_ahead(working, 30_000)
        issued = draw(working, 5000)
        begin_another_incarnation(server, how, observer, working)
    with reconnect(url) as connection:
        ids = draw(connection, 5000)
    assert last < ticks(issued[0])
    assert increases(np.concatenate([issued, ids]))


def test_a_fence_right_after_a_crash_bounds_what_was_issued_before_it(server: EmbeddedServer) -> None:
    url = server.url()
    with reconnect(url) as observer, reconnect(url) as working:
        draw(observer, 10)
        working.execute("begin")
        _, last = reserve(working, 3_000_000)
        begin_another_incarnation(server, "immediate shutdown", observer, working)
    with reconnect(url) as connection:
        high_water = scalar(connection, "select shardids.fence(5)")
        connection.execute("select shardids.activate(5)")
        id_ = scalar(connection, NEXT)
    assert ticks(id_) > high_water
    assert high_water >= last


def test_a_fence_lasts_over_a_crash(server: EmbeddedServer) -> None:
    url = server.url()
    with reconnect(url) as observer, reconnect(url) as working:
        draw(working, 10)
        high_water = scalar(working, "select shardids.fence(5)")
        begin_another_incarnation(server, "kill of one backend", observer, working)
    with reconnect(url) as connection:
        with refused("SI002"):
            connection.execute(NEXT)
        connection.execute("select shardids.activate(5)")
        assert ticks(scalar(connection, NEXT)) > high_water


def test_a_lead_drawn_after_idleness_is_not_issued_again_after_a_crash(server: EmbeddedServer) -> None:
    """What was stored last is older than the margin: it says nothing of where the clock was."""
    url = server.url()
    with reconnect(url) as observer, reconnect(url) as working:
        set_margin(observer, 1_000)
        draw(observer, 10)
        time.sleep(3)
        working.execute("begin")
        _, last = reserve(working, 900_000)
        begin_another_incarnation(server, "immediate shutdown", observer, working)
    with reconnect(url) as connection:
        first = ticks(scalar(connection, NEXT))
        set_margin(connection, MARGIN_MS)
    assert first > last


def test_a_new_incarnation_leads_the_clock_by_the_margin_after_any_idleness(server: EmbeddedServer) -> None:
    """Shard 6 is drawn from by no other test."""
    url, draw_one = server.url(), "select shard_0006.next_id()"
    with reconnect(url) as observer, reconnect(url) as working:
        scalar(working, draw_one)
        begin_another_incarnation(server, "restart", observer, working)
    with reconnect(url) as connection:
        assert MARGIN_MS - 500 <= lead_ms(ticks(scalar(connection, draw_one))) <= 3 * MARGIN_MS + 500


def test_an_activation_released_and_lost_is_released_above_its_high_water_tick(
    server: EmbeddedServer,
) -> None:
    """The high-water tick, not the clock, is what the release began with."""
    url = server.url()
    with reconnect(url) as observer, reconnect(url) as working:
        above = run_ahead(working, 1) + 60_000 * 1024
        working.execute("select shardids.activate(5, %s)", [above])
        working.execute("begin")
        issued = draw(working, 5000)
        begin_another_incarnation(server, "immediate shutdown", observer, working)
    with reconnect(url) as connection:
        assert ticks(issued[0]) > above
        assert draw(connection)[0] > issued[-1]


# An offset far ahead of the clock is on disk before it is drawn from

AFTER_PENDING = r"\bsetval\([^;]*;"


@pytest.fixture
def flushing(blank_database: Callable[[], URL]) -> Iterator[tuple[Db, Db, Db]]:
    """Three sessions of a node whose shard is almost half a margin ahead of the clock."""
    url = blank_database()
    install(url)
    with connect(dsn(url)) as one, connect(dsn(url)) as two, connect(dsn(url)) as three:
        if one.info.server_version < FIRST_THAT_FLUSHES:
            pytest.skip("before PostgreSQL 17 nothing in SQL flushes the log but a COMMIT")
        for session in (two, three):
            session.execute(NEXT)
        yield one, two, three


def test_nobody_draws_from_an_offset_far_ahead_before_it_is_on_disk(flushing: tuple[Db, Db, Db]) -> None:
    owner, reserving, drawing = flushing
    drawing.execute("set statement_timeout = '300ms'")
    with paused(
        owner, "shardids.log_offset", AFTER_PENDING, reserving, lambda db: run_ahead(db, 6_000)
    ) as go_on:
        for _ in range(3):
            with pytest.raises(psycopg.errors.QueryCanceled):
                drawing.execute(NEXT)
        last = go_on()
    drawing.execute("set statement_timeout = 0")
    assert ticks(scalar(drawing, NEXT)) > last


def test_a_reservation_cancelled_while_it_flushes_costs_no_margin(flushing: tuple[Db, Db, Db]) -> None:
    owner, reserving, drawing = flushing
    with paused(
        owner, "shardids.log_offset", AFTER_PENDING, reserving, lambda db: run_ahead(db, 6_000)
    ) as go_on:
        owner.execute("select pg_cancel_backend(%s)", [reserving.info.backend_pid])
        with pytest.raises(psycopg.errors.QueryCanceled):
            go_on()
    for _ in range(3):
        assert 4_000 < lead_ms(ticks(scalar(drawing, NEXT))) < 10_000


# Rights of the owner that change


@pytest.mark.parametrize("change", ["grant", "revoke"])
def test_sessions_from_before_and_after_a_change_of_the_owners_rights_do_not_drive_each_other_ahead(
    change: str, admin: Db, make_role: MakeRole, make_database: Callable[[], URL]
) -> None:
    """What pg_read_all_stats shows tells incarnations apart: sessions that differ in it, too."""
    owner, database = make_role("owner"), make_database().database
    admin.execute(f'grant create on database "{database}" to "{owner.username}"')
    statements = [f'grant pg_read_all_stats to "{owner.username}"']
    if change == "revoke":
        admin.execute(statements[0])
        statements = [f'revoke pg_read_all_stats from "{owner.username}"']
    url = owner.set(database=database)
    install(url)
    with connect(dsn(url)) as old:
        last = draw(old, 10)[-1]
        admin.execute(statements[0])
        with connect(dsn(url)) as new:
            ids = np.array([scalar(connection, NEXT) for _ in range(50) for connection in (old, new)])
    assert increases(np.concatenate([[last], ids]))
    assert lead_ms(ticks(ids[-1])) < 30_000
