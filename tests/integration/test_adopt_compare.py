"""The comparison of an adoption, while rows are changed that it reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from sqlalchemy import text

from shardids.adopt import adoption
from shardids.adopt.run import comparing, following, sparing
from shardids.errors import AdoptionFailed, BadArgument
from shardids.pg.reader import Reader
from shardids.replication.steps import Event, Waiting
from tests.support.adoptions import Clients, Shop, home_of, schema
from tests.support.standbys import standby_of

NAMES = {"public.countries", "public.cities", "public.users", '"The Shop"."Orders"', "public.lines"}


@pytest.fixture(scope="module")
def shop(any_shop: Shop) -> Shop:
    if not any_shop.has_row_filters:
        pytest.skip("PostgreSQL 14 has no row filters, and is refused: test_adopt_run.py")
    adoption.run(any_shop.catalog, any_shop.plan)
    return any_shop


def test_rows_that_change_are_read_again_by_their_primary_keys(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes lag, and the source has other rows each time it is read."""
    asked: list[tuple[bool, str]] = []
    all_rows, await_confirmed = comparing.all_rows, following.await_confirmed

    def ask(reader: Reader, query: str) -> list[dict[str, Any]]:
        asked.append((reader._what == "the source", query))
        return all_rows(reader, query)

    with shop.connected("source") as source:
        follow = 'alter subscription "{}" {}'
        # The relay's, on a's server, is another database's.
        own = """select subname from pg_subscription where subdbid = (
                   select oid from pg_database where datname = current_database())"""
        names = {name: [row for (row,) in node.execute(own).fetchall()] for name, node in _nodes(shop)}

        def set_following(action: str) -> None:
            for name, subscriptions in names.items():
                with shop.connected(name) as node:
                    for subscription in subscriptions:
                        node.execute(follow.format(subscription, action).encode())

        def write() -> None:
            source.execute("update users set name = name || '+' where id <= 20")
            source.execute("update lines set what = what || '+' where user_id <= 20")

        rounds: list[int] = []

        def change(*given: Any, **options: Any) -> None:
            rounds.append(1)
            if len(rounds) % 4:
                write()
            else:
                set_following("enable")
                await_confirmed(*given, **options)

        monkeypatch.setattr(comparing, "all_rows", ask)
        monkeypatch.setattr(comparing, "await_confirmed", change)
        set_following("disable")
        write()
        try:
            adoption.compare(shop.catalog)
        finally:
            set_following("enable")
        assert len(rounds) > 4
        by_key = [query for is_source, query in asked if is_source and '"pg_catalog"' in query]
        whole = [query for is_source, query in asked if is_source and '"pg_catalog"' not in query]
        # Once for the digests, and once more for those that differ.
        assert max(sum(f"from {name} t" in query for query in whole) for name in ("users", "lines")) <= 2
        assert len(by_key) > 2
        source.execute("set enable_seqscan = off")
        for query in by_key:
            plan = "\n".join(row for (row,) in source.execute(f"explain {query}".encode()).fetchall())
            assert "Seq Scan" not in plan, plan


def test_rows_that_change_to_and_fro_are_the_same_in_the_end(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node is read while a row is another than before and after."""
    all_rows, await_confirmed, rounds = comparing.all_rows, comparing.await_confirmed, list[int]()
    with shop.connected("source") as source:
        (was,) = source.execute("select name from users where id = 7").fetchone()

        def name(is_now: str) -> None:
            if len(rounds) <= 5:
                source.execute("update users set name = %s where id = 7", [is_now])

        def confirm(*given: Any, **options: Any) -> None:
            rounds.append(1)
            name("fro")
            await_confirmed(*given, **options)

        def ask(reader: Reader, query: str) -> list[dict[str, Any]]:
            is_source = reader._what == "the source"
            if is_source and '"pg_catalog"' in query:
                name(was)
            found = all_rows(reader, query)
            if is_source and "group by" in query and "public.users t" in query:
                # All rows are to be read.
                found = [row | {"digest": "1"} for row in found]
            return found

        monkeypatch.setattr(comparing, "all_rows", ask)
        monkeypatch.setattr(comparing, "await_confirmed", confirm)
        adoption.compare(shop.catalog)
        assert len(rounds) > 5
        assert source.execute("select name from users where id = 7").fetchone() == (was,)


def test_any_two_rows_of_a_wide_table_have_other_texts(shop: Shop) -> None:
    names = [f"c{number}" for number in range(250)]
    rows: list[list[str | None]] = [["a"] * 250 for _ in range(5)]
    rows[1][249], rows[2][249], rows[3][0], rows[4][89] = "", None, "a','a", "b"
    with shop.connected("source") as source:
        values = ", ".join(f"({', '.join(['%s'] * 250)})" for _ in rows)
        found = psycopg.ClientCursor(source).execute(
            f"select distinct {comparing._text(names)} from (values {values}) t ({', '.join(names)})",
            [value for row in rows for value in row],
        )
        assert len(found.fetchall()) == len(rows)


@pytest.fixture
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each portion of a table is one block."""
    monkeypatch.setattr(sparing.Limits, "portion_bytes", 8192)


@pytest.mark.usefixtures("small_portions")
def test_rows_are_compared_by_portions_while_they_change(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    all_rows = comparing.all_rows

    def ask(reader: Reader, query: str) -> list[dict[str, Any]]:
        if "t.ctid >=" in query:
            asked.append(query)
            with shop.connected("source") as source:
                # The rows get behind the last block, and some are read twice.
                source.execute("update users set name = name || '-' where id <= 20")
        return all_rows(reader, query)

    monkeypatch.setattr(comparing, "all_rows", ask)
    events: list[Event] = []
    adoption.compare(shop.catalog, on_event=events.append)
    assert {one.table for one in events if isinstance(one, comparing.Compared)} == NAMES
    # Both partitions, by their own blocks.
    for name in ("users", "lines_low", "lines_high"):
        assert sum(f"from public.{name} t" in query for query in asked) > 2
    monkeypatch.setattr(comparing, "all_rows", all_rows)
    with planted(shop), pytest.raises(AdoptionFailed, match=r"rows of public\.users are not the same"):
        adoption.compare(shop.catalog)
    adoption.compare(shop.catalog)


@contextmanager
def planted(shop: Shop) -> Iterator[None]:
    """A row of the shards has another name meanwhile."""
    node = shop.catalog.node_of(home_of(7)).name
    named = f"update {schema(home_of(7))}.users set name = %s where id = 7 returning name"
    with shop.connected("source") as source, shop.connected(node) as there:
        (name,) = source.execute("select name from users where id = 7").fetchone() or ("",)
        # The barrier of the shards lets those pass that call themselves replicas.
        there.execute("set session_replication_role = replica")
        there.execute(named.encode(), ["other"])
        try:
            yield
        finally:
            there.execute(named.encode(), [name])


class Stopped(Exception):
    pass


def test_a_comparison_waits_while_the_source_is_slow(shop: Shop) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, Waiting):
            assert "ms for a statement" in event.reason
            raise Stopped

    with pytest.raises(Stopped):
        adoption.compare(shop.catalog, limits=sparing.Limits(max_latency_s=1e-9), on_event=stop)
    adoption.compare(shop.catalog, limits=sparing.Limits(max_latency_s=60.0))


def test_nodes_stop_reading_when_the_source_fails(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    all_rows = comparing.all_rows
    reading = threading.Barrier(3)

    def ask(reader: Reader, query: str) -> list[dict[str, Any]]:
        reading.wait(30)
        if reader._what == "the source":
            raise Stopped
        return all_rows(reader, "select pg_sleep(300)::text as slept")

    monkeypatch.setattr(comparing, "all_rows", ask)
    started = time.monotonic()
    with pytest.raises(Stopped):
        adoption.compare(shop.catalog)
    assert time.monotonic() - started < 60
    monkeypatch.setattr(comparing, "all_rows", all_rows)
    adoption.compare(shop.catalog)


@pytest.mark.usefixtures("small_portions")
def test_a_comparison_keeps_to_its_rate(shop: Shop) -> None:
    with shop.connected("source") as source:
        (size,) = source.execute("""
            select sum(pg_relation_size(r)) from unnest(array['users', '"The Shop"."Orders"', 'lines_low',
              'lines_high']::regclass[]) r""").fetchone() or (0,)
    started = time.monotonic()
    adoption.compare(shop.catalog, limits=sparing.Limits(rate_bytes_s=int(size)))
    assert time.monotonic() - started >= 1.0


@pytest.mark.long
def test_rows_are_compared_with_a_standby_of_the_source(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[str] = []
    all_rows = comparing.all_rows

    def ask(reader: Reader, query: str) -> list[dict[str, Any]]:
        if reader._what == "the source":
            readers.append(
                reader._connection.exec_driver_sql("select pg_is_in_recovery()::text").scalar_one()
            )
            reader._connection.rollback()
        return all_rows(reader, query)

    monkeypatch.setattr(comparing, "all_rows", ask)
    with standby_of(shop.servers["source"]) as standby:
        with Clients(shop):
            adoption.compare(shop.catalog, reader=standby.url())
            assert {*readers} == {"true"}
        with planted(shop), pytest.raises(AdoptionFailed, match=r"rows of public\.users are not the same"):
            adoption.compare(shop.catalog, reader=standby.url())
        # What it has not replayed is waited for.
        with psycopg.connect(standby.url(), autocommit=True) as there, shop.connected("source") as source:
            there.execute("select pg_wal_replay_pause()")
            source.execute("update users set name = name || '!' where id <= 20")
            resuming = threading.Timer(2, there.execute, ["select pg_wal_replay_resume()"])
            resuming.start()
            started = time.monotonic()
            adoption.compare(shop.catalog, reader=standby.url())
            resuming.join()
        assert time.monotonic() - started >= 1.5
    with (
        standby_of(shop.servers["b"]) as other,
        pytest.raises(BadArgument, match="another database or server"),
    ):
        adoption.compare(shop.catalog, reader=other.url())


def interrupted(shop: Shop) -> list[str]:
    """The tables that a comparison has compared which is interrupted after its second."""
    compared: list[str] = []

    def stop(event: Event) -> None:
        if isinstance(event, comparing.Compared):
            compared.append(event.table)
            if len(compared) == 2:
                raise Stopped

    with pytest.raises(Stopped):
        adoption.compare(shop.catalog, on_event=stop)
    return compared


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_comparison_goes_on_with_the_next_table(shop: Shop, is_replaced: bool) -> None:
    before = interrupted(shop)
    with shop.catalog.engine.begin() as catalog:
        catalog.execute(
            text("""
                update shardids_catalog.adoption set step = 'compare', compared = (
                  select jsonb_object_agg(key, replace(value::text, :old, :new)::jsonb)
                  from jsonb_each(compared) where key = any(:before))
                where ended_at is null"""),
            {"old": "0000000" if is_replaced else "", "new": "0000009", "before": before},
        )
    events: list[Event] = []
    assert adoption.resume(shop.catalog, on_event=events.append).step == "follow"
    after = {one.table for one in events if isinstance(one, comparing.Compared)}
    assert after == NAMES if is_replaced else NAMES - {*before}
    # One that a person asks for begins anew.
    interrupted(shop)
    events.clear()
    adoption.compare(shop.catalog, on_event=events.append)
    assert {one.table for one in events if isinstance(one, comparing.Compared)} == NAMES


def test_a_server_that_is_replaced_during_a_comparison_stops_the_switch(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare, read = comparing.compare, following._read

    def compare_and_promote(*given: Any, **options: Any) -> int:
        rows = compare(*given, **options)
        monkeypatch.setattr(following, "_read", lambda *which: ("0000000F", read(*which)[1]))
        return rows

    monkeypatch.setattr(comparing, "compare", compare_and_promote)
    adoption.compare(shop.catalog)
    with pytest.raises(AdoptionFailed, match="is another server than the one that took rows in"):
        adoption.switch(shop.catalog)


def _nodes(shop: Shop) -> Iterator[tuple[str, psycopg.Connection]]:
    for name in "ab":
        with shop.connected(name) as node:
            yield name, node
