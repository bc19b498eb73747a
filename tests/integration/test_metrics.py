"""The metrics of clusters that are well, and of clusters in which something is wrong."""

from __future__ import annotations

import logging
import re
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import httpx
import psycopg
import pytest
from markdown_it import MarkdownIt
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from psycopg import sql
from sqlalchemy import MetaData, event
from sqlalchemy.engine import URL

import shardids.watch.metrics
from shardids.catalog.topology import Node
from shardids.errors import BadArgument
from shardids.ids.layout import Layout
from shardids.pg import clock
from shardids.pg.clock import LocalClock
from shardids.pg.embedded import temporary_server, temporary_servers
from shardids.pg.gids import Gid
from shardids.pg.queries import BATCH
from shardids.testing import devcluster
from shardids.watch.metrics import ClusterCollector
from shardids.watch.metrics import collector as collector_module
from shardids.watch.metrics.samples import METRICS, MOST_TOP
from tests.conftest import MakeRole, dsn, found_cluster
from tests.support import moves_by_hand
from tests.support.clusters import catalog_at, command_here, connected
from tests.support.proxy import Proxy
from tests.support.series import collecting, read, scraped, served
from tests.support.waiting import PATIENCE_S, wait_for

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "metrics.md").read_text("utf-8")

Blank = Callable[[], URL]
Pair = tuple[URL, URL]


@pytest.fixture
def pair(cluster_urls: dict[str, URL]) -> Pair:
    """A cluster of 8 shards, the lower half on node a, which holds the catalog too, the rest on node b."""
    return cluster_urls["a"], cluster_urls["b"]


def run(url: URL, *statements: str) -> None:
    with connected(url) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def test_a_cluster_that_is_well(pair: Pair) -> None:
    series = scraped(pair[0])
    assert series["shardids_catalog_up",] == 1
    assert series["shardids_shard_ticks_per_second_limit",] == 1_024_000
    assert series["shardids_layout_seconds_left",] > 60 * 365 * 86400
    for node in ("a", "b"):
        assert series["shardids_node_up", node] == series["shardids_node_complete", node] == 1
        assert series["shardids_node_writable", node] == 1
        assert series["shardids_shards", node, "active"] == 4
        assert series["shardids_catalog_shards", node, "active"] == 4
        assert series["shardids_stopped_shards", node] == 0
        assert series["shardids_max_ahead_seconds", node] == 3600
        assert 0 < series["shardids_connections", node] < series["shardids_connections_limit", node]
        assert abs(series["shardids_clock_skew_seconds", node]) < 1
    assert series["shardids_moves", "interrupted"] == series["shardids_adoptions", "running"] == 0
    assert series["shardids_shards_on_two_nodes",] == 0


def test_a_shard_that_two_nodes_issue_ids_of(pair: Pair) -> None:
    moves_by_hand.copy(pair[0], 2, "b", MetaData(), 0)
    assert scraped(pair[0])["shardids_shards_on_two_nodes",] == 1
    with connected(pair[0]) as connection:
        connection.execute("select shardids.fence(2)")
    assert scraped(pair[0])["shardids_shards_on_two_nodes",] == 0


def test_regions_have_series_and_what_is_outside_of_them(pair: Pair) -> None:
    a = pair[0]
    assert ("shardids_region_shards", "eu") not in scraped(a)
    run(
        a,
        "insert into shardids_catalog.region values ('eu', 0, 2), ('us', 7, 7)",
        "update shardids_catalog.node set region = 'eu' where name = 'a'",
    )
    series = scraped(a)
    assert (series["shardids_region_shards", "eu"], series["shardids_region_shards", "us"]) == (3, 1)
    assert series["shardids_node_region", "a", "eu"] == 1
    assert ("shardids_node_region", "b", "us") not in series
    outside = {node: series["shardids_shards_outside_region", node] for node in ("a", "b")}
    assert outside == {"a": 1, "b": 1}  # Shard 3, which is of none, and 7.


@pytest.mark.long
def test_a_scrape_writes_nothing() -> None:
    with temporary_server() as server:
        url = devcluster.create_cluster([server], 300)
        with collecting(url) as collector, psycopg.connect(url, autocommit=True) as watch:
            state = """
                select pg_current_wal_insert_lsn()::text, pg_snapshot_xmax(pg_current_snapshot())::text,
                       (select sum(pg_sequence_last_value(oid)) from pg_class where relkind = 'S')::text"""
            read(collector)

            def is_the_same_after_a_scrape() -> bool:
                # The server itself writes now and then; a scrape that wrote would do so each time.
                before = watch.execute(state).fetchone()
                read(collector)
                return before == watch.execute(state).fetchone()

            wait_for(is_the_same_after_a_scrape, "a scrape that leaves the log as it was")
            assert watch.execute(
                "select sum(pg_sequence_last_value(oid)) from pg_class where relname = 'id_counter'"
            ).fetchone() == (None,)


def test_rates_come_from_the_sequences_and_only_the_quickest_have_series(pair: Pair) -> None:
    a, b = pair
    with collecting(a, top=2) as collector:
        first = read(collector)
        assert first["shardids_ticks_drawn_total", "a"] == 0
        assert {"shardids_ticks_drawn_per_second", "shardids_shard_ticks_drawn_per_second_max"}.isdisjoint(
            name for name, *_ in first
        )
        run(a, *(f"select shard_000{n}.next_id() from generate_series(1, {100 * (n + 1)})" for n in range(4)))
        run(b, "select pg_sleep(0.6)")
        second = read(collector)
        taken = used_by_shards(a)
        assert second["shardids_ticks_drawn_total", "a"] == sum(taken.values())
        rates = {
            int(key[2]): value
            for key, value in second.items()
            if key[0] == "shardids_shard_ticks_drawn_per_second"
        }
        assert list(rates) == sorted(taken, key=taken.__getitem__, reverse=True)[:2]
        assert second["shardids_shard_ticks_drawn_per_second_max", "a"] == rates[3]
        assert second["shardids_shard_ticks_drawn_per_second_max", "b"] == 0
        assert rates[3] / rates[2] == pytest.approx(taken[3] / taken[2])
        assert second["shardids_ticks_drawn_per_second", "a"] == pytest.approx(
            rates[3] * sum(taken.values()) / taken[3]
        )
        run(a, "select shard_0000.next_id()", "select pg_sleep(0.6)")
        third = read(collector)
        assert third["shardids_ticks_drawn_total", "a"] == sum(used_by_shards(a).values())
        assert {key[2] for key in third if key[0] == "shardids_shard_ticks_drawn_per_second"} == {"0"}


def used_by_shards(url: URL) -> dict[int, int]:
    with connected(url) as connection:
        return dict(
            connection.execute("select id, pg_sequence_last_value(id_counter) from shardids.shard").fetchall()
        )


def test_a_look_too_soon_after_another_keeps_the_rates(pair: Pair) -> None:
    with collecting(pair[0]) as collector:
        read(collector)
        run(pair[0], "select shard_0001.next_id()", "select pg_sleep(0.6)")
        rate = read(collector)["shardids_shard_ticks_drawn_per_second", "a", "1"]
        assert read(collector)["shardids_shard_ticks_drawn_per_second", "a", "1"] == rate


def test_shards_that_are_fenced_moved_copied_and_broken(pair: Pair) -> None:
    a, b = pair
    run(a, "select shardids.fence(0)", "select shardids.fence(1, 'b')")
    run(
        b,
        "update shardids.shard set server = 'another/1' where id = 5",
        "drop sequence shard_0006.id_offset cascade",
    )
    with psycopg.connect(dsn(b)) as fencing:
        fencing.execute("select shardids.fence(7)")
        fencing.rollback()
    series = scraped(a)
    states = {key[1:]: value for key, value in series.items() if key[0] == "shardids_shards" and value}
    assert states == {
        ("a", "active"): 2,
        ("a", "fenced"): 1,
        ("a", "moved"): 1,
        ("b", "active"): 1,
        ("b", "copy"): 1,
        ("b", "broken"): 1,
        ("b", "fenced"): 1,
    }
    assert series["shardids_stopped_shards", "a"] == 2
    assert series["shardids_stopped_shards", "b"] == 3


def test_moves_that_run_and_moves_that_were_interrupted(pair: Pair) -> None:
    a, _ = pair
    run(
        a,
        "insert into shardids_catalog.move (shard, source, target, offline, step, started_at)"
        " values (1, 'a', 'b', false, 'rows', now() - interval '1 hour'),"
        " (2, 'a', 'b', false, 'rows', now())",
        "select shardids.fence(1), shardids.fence(3)",
        "select pg_create_logical_replication_slot('shardids_move_x_1_1', 'pgoutput')"
        " from pg_settings where name = 'wal_level' and setting = 'logical'",
    )
    with connected(a) as mover:
        mover.execute(
            "select pg_advisory_lock(1936220520, ('x' || left(epoch::text, 8))::bit(32)::integer)"
            " from shardids_catalog.move where shard = 2"
        )
        series = scraped(a)
        slots = mover.execute(
            "select count(pg_drop_replication_slot(slot_name)) from pg_replication_slots"
            " where slot_name = 'shardids_move_x_1_1'"
        ).fetchone()
    assert series["shardids_moves", "running"] == series["shardids_moves", "interrupted"] == 1
    assert series["shardids_move_oldest_seconds",] == pytest.approx(3600, abs=600)
    # A shard that is being moved stops for a moment.
    assert series["shardids_stopped_shards", "a"] == 1
    assert (series["shardids_replication_slots", "a", "move"],) == slots


def test_a_slot_that_keeps_the_log_and_then_loses_it() -> None:
    with temporary_server(settings={"max_slot_wal_keep_size": "32MB"}) as server:
        url = devcluster.create_cluster([server], 2)
        with collecting(url) as collector, psycopg.connect(url, autocommit=True) as connection:
            connection.execute("select pg_create_physical_replication_slot('shardids_move_x', true)")

            def write() -> None:
                connection.execute("select pg_logical_emit_message(false, '', ''), pg_switch_wal()")

            write()
            series = read(collector)
            assert 0 < series["shardids_replication_kept_bytes", "a", "move"] <= 2**26
            assert series["shardids_replication_slots_lost", "a", "move"] == 0
            for _ in range(8):
                write()
            connection.execute("checkpoint")
            assert read(collector)["shardids_replication_slots_lost", "a", "move"] == 1


def test_writable_is_what_holds_for_everybody(pair: Pair, make_role: MakeRole) -> None:
    role = make_role().set(database=pair[0].database)
    name = sql.Identifier(str(role.username))
    with connected(pair[0]) as connection:
        for statement in (
            "grant pg_read_all_data to {}",
            "alter role {} set default_transaction_read_only = on",
        ):
            connection.execute(sql.SQL(statement).format(name))
        database = sql.Identifier(str(pair[0].database))
        with collecting(role) as collector:

            def writable() -> float:
                return read(collector)["shardids_node_writable", "a"]

            assert writable() == 1
            # While the exporter's session lasts.
            for value, writes in (("on", 0), ("off", 1), ("on", 0)):
                setting = sql.SQL("alter database {} set default_transaction_read_only = {}")
                connection.execute(setting.format(database, sql.SQL(value)))
                assert writable() == writes
            connection.execute(sql.SQL("alter database {} reset all").format(database))
            assert writable() == 1


def test_transactions_in_doubt(pair: Pair) -> None:
    with temporary_server(settings={"max_prepared_transactions": "5"}) as server:
        url = devcluster.create_cluster([server], 2)
        with catalog_at(url) as catalog:
            cluster = catalog.describe().cluster
        gids = [
            Gid(cluster=cluster, transaction=uuid4(), number=2, count=2, decider="a"),
            Gid(cluster=uuid4(), transaction=uuid4(), number=2, count=2, decider="a"),
        ]
        with psycopg.connect(url, autocommit=True) as connection:
            for gid in gids:
                connection.execute("begin")
                connection.execute(sql.SQL("prepare transaction {}").format(str(gid)))
        series = scraped(url)
        assert series["shardids_prepared_transactions", "a", "shardids"] == 1
        assert series["shardids_prepared_transactions", "a", "other"] == 1
        assert 0 < series["shardids_prepared_oldest_seconds", "a", "shardids"] < PATIENCE_S


def test_a_layout_that_ends_soon(blank_database: Blank) -> None:
    url = blank_database()
    days = 34.8  # a layout of 33 bits lasts 99.4 days
    found_cluster(url, {"a": url}, 2, layout=_ending_in(days))
    assert scraped(url)["shardids_layout_seconds_left",] == pytest.approx(days * 86400, abs=600)


def _ending_in(days: float) -> Layout:
    epoch_ms = int((time.time() + days * 86400) * 1000) - (1 << 33)
    return Layout(epoch_ms=epoch_ms, time_bits=33, shard_bits=12, sequence_bits=10)


@pytest.mark.long
def test_a_node_that_stops_and_comes_back_while_the_others_are_read(caplog: pytest.LogCaptureFixture) -> None:
    with temporary_servers(2) as servers, caplog.at_level(logging.INFO, "shardids.metrics"):
        url = devcluster.create_cluster(servers, 4)
        with collecting(url) as collector:
            assert read(collector)["shardids_node_up", "b"] == 1
            servers[1].stop()
            for _ in range(2):
                series = read(collector)
                assert series["shardids_node_up", "b"] == series["shardids_node_complete", "b"] == 0
                assert series["shardids_node_up", "a"] == 1
                assert {key[0] for key in series if key[1:2] == ("b",)} == {
                    "shardids_node_up",
                    "shardids_node_complete",
                    "shardids_node_scrape_seconds",
                    "shardids_catalog_shards",
                    "shardids_shards_outside_region",
                }
            servers[1].start(attached=True)
            assert read(collector)["shardids_node_up", "b"] == 1
    told = [record.getMessage() for record in caplog.records if record.name == "shardids.metrics"]
    assert len(told) == 2
    assert told[0].startswith('node "b" could not be read: node "b" can\'t be reached at postgresql://')
    assert told[1] == 'node "b" can be read again'


def test_the_catalog_down_leaves_the_nodes_and_takes_what_only_it_says() -> None:
    with temporary_servers(2) as servers, temporary_server() as other:
        url = devcluster.create_cluster([other, *servers], 6)
        with collecting(url) as collector:
            before = read(collector)
            other.stop()
            series = read(collector)
            assert series["shardids_catalog_up",] == 0
            assert [series["shardids_node_up", node] for node in "abc"] == [0, 1, 1]
            gone = {key[0] for key in before} - {key[0] for key in series}
            assert gone == {
                "shardids_stopped_shards",
                "shardids_catalog_version",
                "shardids_catalog_shards",
                "shardids_shards_outside_region",
                "shardids_moves",
                "shardids_move_oldest_seconds",
                "shardids_adoptions",
                "shardids_shards_on_two_nodes",
                "shardids_rebalance_running",
                "shardids_rebalance_moves_total",
            }
        # From the beginning.
        assert {key: value for key, value in scraped(url).items() if key[0] != "shardids_scrape_seconds"} == {
            ("shardids_catalog_up",): 0
        }


@pytest.mark.long
def test_a_silent_node_takes_no_longer_than_the_timeout() -> None:
    with temporary_servers(2) as servers, Proxy(servers[1].port) as proxy:
        url = devcluster.create_cluster(servers, 4)
        with catalog_at(url) as catalog:
            catalog.point_node(
                Node(name="b", url=servers[1].url().replace(str(servers[1].port), str(proxy.port)))
            )
        with collecting(url, timeout_s=2.0) as collector:
            assert read(collector)["shardids_node_up", "b"] == 1
            proxy.swallow()
            threads = threading.active_count()
            for _ in range(2):
                series = read(collector)
                assert [series["shardids_node_up", node] for node in "ab"] == [1, 0]
                assert 2 <= series["shardids_scrape_seconds",] < 4
                assert threading.active_count() <= threads + 1
            proxy.forward()
            wait_for(lambda: read(collector)["shardids_node_up", "b"], "the node is read again")


@pytest.mark.long
def test_who_asks_during_a_reading_is_given_it() -> None:
    with temporary_servers(2) as servers, Proxy(servers[1].port) as proxy:
        url = devcluster.create_cluster(servers, 4)
        with catalog_at(url) as catalog:
            catalog.point_node(
                Node(name="b", url=servers[1].url().replace(str(servers[1].port), str(proxy.port)))
            )
        with collecting(url, timeout_s=2.0) as collector, ThreadPoolExecutor() as pool:
            read(collector)
            proxy.swallow()
            first, second = [pool.submit(collector.read) for _ in range(2)]
            assert first.result() is second.result()
            assert collector.read() is not first.result()


@pytest.mark.parametrize("bad", ["mysql://h/x", "postgresql://h:port/x", "postgresql://h/x?nonesuch=1"])
def test_a_node_whose_url_is_none_leaves_the_others(
    pair: Pair, bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    with connected(pair[0]) as connection:
        connection.execute("update shardids_catalog.node set url = %s where name = 'b'", [bad])
    series = scraped(pair[0])
    assert series["shardids_catalog_up",] == 1
    assert [series["shardids_node_up", node] for node in "ab"] == [1, 0]
    assert [series["shardids_node_complete", node] for node in "ab"] == [1, 0]
    assert 'node "b" could not be read: ' in caplog.text


@pytest.mark.long
def test_what_was_read_before_a_failure_is_kept(blank_database: Blank) -> None:
    url = blank_database()
    found_cluster(url, {"a": url}, BATCH + 4)
    with psycopg.connect(dsn(url)) as holding:
        holding.execute(f"alter sequence shard_0{BATCH + 1}.id_counter increment 1")
        holding.execute("select shardids.fence(3)")
        # Not committed: the second batch of shards waits for the sequence's lock.
        series = scraped(url)
        holding.rollback()
    assert (series["shardids_node_up", "a"], series["shardids_node_complete", "a"]) == (1, 0)
    assert sum(value for key, value in series.items() if key[0] == "shardids_shards") == BATCH
    # Shard 3 was fenced, though that was rolled back. Those that were not read are not called stopped.
    assert series["shardids_stopped_shards", "a"] == 1
    assert scraped(url)["shardids_node_complete", "a"] == 1


def test_a_database_that_is_not_the_node(pair: Pair) -> None:
    a, _ = pair
    with connected(a) as connection:
        connection.execute("update shardids_catalog.node set url = %s where name = 'b'", [dsn(a)])
    series = scraped(a)
    assert [series["shardids_node_up", node] for node in "ab"] == [1, 0]


def test_the_series_of_a_node_are_bounded(blank_database: Blank) -> None:
    url = blank_database()
    found_cluster(url, {"a": url}, MOST_TOP + 8)
    with collecting(url, top=MOST_TOP) as collector:
        read(collector)
        with connected(url) as connection:
            schemas = [schema for (schema,) in connection.execute("select schema from shardids.shard")]
            for schema in schemas:
                connection.execute(sql.SQL("select {}.next_id()").format(sql.Identifier(schema)))
            connection.execute(
                "select max(r.last_tick) from shardids.shard s, shardids.reserve(s.id, 4000000) r"
            )
            connection.execute("select pg_sleep(0.6)")
        series = read(collector)
    assert sum(key[0] == "shardids_shard_ticks_drawn_per_second" for key in series) == MOST_TOP
    assert sum(key[0] == "shardids_shard_lead_seconds" for key in series) == MOST_TOP
    assert len(series) <= 500
    with pytest.raises(BadArgument, match="0 to 200"):
        ClusterCollector(url, top=MOST_TOP + 1)


def test_the_registry_gives_what_parsers_and_promtool_take(pair: Pair) -> None:
    with collecting(pair[0]) as collector:
        registry = CollectorRegistry()
        registry.register(collector)
        given = generate_latest(registry).decode()
    names = set(re.findall(r"^# HELP (\S+) \S", given, re.MULTILINE))
    assert names <= {*METRICS}
    assert not re.search(r"postgres(ql)?://|password", given)


# The command.


def test_serve_until_sigterm(pair: Pair) -> None:
    with served(pair[0]) as (process, address, said):
        assert address.startswith("http://127.0.0.1:")
        assert "Warning" not in said
        request = urllib.request.Request(
            address, headers={"Accept": "application/openmetrics-text; version=1.0.0"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            families = {
                family.name: family for family in text_string_to_metric_families(answer.read().decode())
            }
        assert families["shardids_ticks_drawn"].type == "counter"
        assert [sample.value for sample in families["shardids_node_up"].samples] == [1, 1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_another_address_than_loopback_is_warned_of(pair: Pair) -> None:
    with served(pair[0], listen="0.0.0.0:0") as (_, _, said):
        assert "Warning: other machines may reach 0.0.0.0:0; nothing asks who they are" in said


def test_names_that_others_could_make_lead_here_are_refused(pair: Pair) -> None:
    with served(pair[0], "--host", "Metrics.Internal") as (_, address, _):
        for host, page, status in (
            ("127.0.0.1:9187", "metrics", 200),
            ("localhost", "metrics", 200),
            ("[::1]:9187", "", 200),
            ("metrics.internal:9187", "metrics", 200),
            ("evil.example", "metrics", 403),
            ("127.0.0.1.evil.example:9187", "metrics", 403),
            ("", "metrics", 403),
            ("127.0.0.1", "other", 404),
        ):
            answer = httpx.get(f"{address.removesuffix('metrics')}{page}", headers={"Host": host}, timeout=60)
            assert answer.status_code == status, host
            assert ("shardids_node_up" in answer.text) == (status == 200)
            assert status != 403 or "--host NAME" in answer.text


def test_once_prints_or_writes_a_file(pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "shardids.prom"
    ran = [
        command_here("metrics", "--once", *more, SHARDIDS_CATALOG=dsn(pair[0]))
        for more in ([], ["--textfile", str(file)])
    ]
    assert [one.returncode for one in ran] == [0, 0]
    assert [one.stderr for one in ran] == ["", ""]
    assert ran[1].stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    for text in (ran[0].stdout, file.read_text("utf-8")):
        assert 'shardids_ticks_drawn_per_second{node="a"} 0.0' in text
        # The catalog counts the moves; a process that ends has nothing to count.
        assert "_total" not in text.replace("shardids_rebalance_moves_total", "")


def test_the_clock_of_a_server_far_away_is_read_less_often(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    with catalog_at(pair[0]) as catalog, catalog.engine.connect() as connection:
        event.listen(catalog.engine, "before_cursor_execute", lambda *given: asked.append(given[2]))
        # It is looked at thrice a reading: before, after, and to see how long they took.
        for step_s, readings in ((0.0, 8), (0.05, 2), (0.15, 1)):
            shown = count(step=step_s).__next__
            monkeypatch.setattr(clock, "time", SimpleNamespace(time=time.time, monotonic=shown))
            asked.clear()
            LocalClock().compare(connection)
            assert sum("clock_timestamp" in statement for statement in asked) == readings


def test_a_file_that_can_t_be_written_is_named_and_stays(pair: Pair, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    there = tmp_path / ("s" * 250)  # as long as a name may be: the other one has no room
    there.write_text("as it was")
    for path, code, words in (
        (full, 2, f"{full} is not a regular file"),
        (tmp_path, 2, f"{tmp_path} is not a regular file"),
        (tmp_path / "none" / "x.prom", 1, f"can't write {tmp_path}/none/x.prom: No such file or directory"),
        (there, 1, f"can't write {there}: File name too long"),
    ):
        ran = command_here("metrics", "--once", "--textfile", str(path), SHARDIDS_CATALOG=dsn(pair[0]))
        assert (ran.returncode, ran.stdout) == (code, "")
        assert words in ran.stderr
    assert full.is_symlink()
    assert there.read_text() == "as it was"
    assert set(tmp_path.iterdir()) == {full, there}


def test_a_scrape_may_ask_for_some_metrics_alone(pair: Pair) -> None:
    with served(pair[0]) as (_, address, _):
        wanted = "name[]=shardids_node_up&name[]=shardids_ticks_drawn_total"
        with urllib.request.urlopen(f"{address}?{wanted}", timeout=PATIENCE_S) as answer:
            text = answer.read().decode()
    names = {line.split("{")[0] for line in text.splitlines() if not line.startswith("#")}
    assert names == {"shardids_node_up", "shardids_ticks_drawn_total"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--textfile", "x.prom"], "--textfile is for --once"),
        (["--listen", "9187"], "'9187' is not an address to listen on"),
        (["--listen", "127.0.0.1:70000"], "'127.0.0.1:70000' is not an address"),
        (["--once", "--top", "201"], "the number of shards with series must be 0 to 200, not 201"),
        (["--once", "--timeout", "0"], "the timeout must be above 0 and at most 60 s, not 0"),
    ],
)
def test_options_that_are_refused(pair: Pair, options: list[str], words: str) -> None:
    ran = command_here("metrics", *options, SHARDIDS_CATALOG=dsn(pair[0]))
    assert (ran.returncode, ran.stdout) == (2, "")
    assert words in ran.stderr


@pytest.mark.parametrize("command", [["metrics"], ["console"]])
def test_where_nothing_can_listen_is_named(pair: Pair, command: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        ran = command_here(*command, "--listen", address, SHARDIDS_CATALOG=dsn(pair[0]))
    assert (ran.returncode, ran.stdout) == (1, "")
    assert f"can't listen on {address}: Address already in use\n" in ran.stderr
    assert "choose another port with --listen HOST:PORT" in " ".join(ran.stderr.split())
    ran = command_here(*command, "--listen", "no.such.invalid:9187", SHARDIDS_CATALOG=dsn(pair[0]))
    assert ran.returncode == 1
    assert "can't listen on no.such.invalid:9187: " in ran.stderr
    assert "Traceback" not in ran.stderr


def test_what_a_role_has_to_be_allowed(
    pair: Pair, make_role: MakeRole, caplog: pytest.LogCaptureFixture
) -> None:
    role = make_role("metrics").set(database=pair[0].database)
    fences = [token.content for token in MarkdownIt().parse(PAGE) if token.info == "postgresql"]
    in_catalog, on_nodes = (text.replace("to metrics", f'to "{role.username}"') for text in fences)
    tables, sequences = on_nodes.split("do $$")
    run(pair[0], in_catalog)
    for url in pair:
        run(url, tables)
    try:
        series = scraped(role)
        assert [series["shardids_node_up", node] for node in "ab"] == [1, 1]
        assert [series["shardids_node_complete", node] for node in "ab"] == [0, 0]
        assert series["shardids_shards", "a", "unreadable"] == 4
        assert series["shardids_stopped_shards", "a"] == 0
        assert "the role may not read the sequences of shards 0-3" in caplog.text
        for url in pair:
            run(url, "do $$" + sequences)
        series = scraped(role)
        assert [series["shardids_node_complete", node] for node in "ab"] == [1, 1]
    finally:
        for url in pair:
            run(url, f'drop owned by "{role.username}"')


@pytest.mark.parametrize(("command", "name"), [("alerts", "alerts.yaml"), ("dashboard", "dashboard.json")])
def test_files_are_printed_as_they_are(command: str, name: str) -> None:
    ran = command_here("metrics", "--print", command)
    assert (ran.stdout, ran.stderr) == (
        (Path(shardids.watch.metrics.__file__).parent / name).read_text("utf-8"),
        "",
    )


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ("tight", "> 0.1 + 2 *"),
        ("usual", "> 1 + 2 *"),
        ("loose", "> 5 + 2 *"),
        ("250ms", "> 0.25 + 2 *"),
        ("2s", "> 2 + 2 *"),
    ],
)
def test_the_skew_that_raises_an_alert_is_chosen(given: str, rule: str) -> None:
    ran = command_here("metrics", "--print", "alerts", "--max-skew", given)
    assert f"abs(shardids_clock_skew_seconds) {rule} shardids_clock_error_seconds" in ran.stdout
    plain = command_here("metrics", "--print", "alerts").stdout.splitlines()
    changed = [one for one, other in zip(ran.stdout.splitlines(), plain, strict=True) if one != other]
    assert len(changed) == (given != "usual")


@pytest.mark.parametrize(
    "words",
    [
        ["--print", "alerts", "--max-skew", "soon"],
        ["--print", "alerts", "--max-skew", "0"],
        ["--print", "dashboard", "--max-skew", "1s"],
        ["--max-skew", "1s"],
        ["--print", "alerts", "--once"],
    ],
)
def test_a_skew_that_is_none_is_refused(words: list[str]) -> None:
    ran = command_here("metrics", *words)
    assert ran.returncode == 2, ran.stderr


def test_connections_are_closed_when_nobody_asks(
    cluster_urls: dict[str, URL], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector_module, "IDLE_S", 0.5)
    collector = ClusterCollector(dsn(cluster_urls["a"]))

    def sessions() -> int:
        with connected(cluster_urls["a"]) as connection:
            names = [one.database for one in cluster_urls.values()]
            return int(
                connection.execute(
                    "select count(*) from pg_stat_activity where application_name = 'shardids metrics'"
                    " and datname = any(%s)",
                    [names],
                ).fetchone()[0]
            )

    try:
        for _ in range(2):
            assert any(one.name == "shardids_node_up" and one.value for one in collector.read())
            assert sessions() == 3  # of the catalog and of both nodes
            wait_for(lambda: sessions() == 0, "that the connections are closed")
    finally:
        collector.close()
