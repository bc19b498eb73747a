"""The alert rules, by promtool: what is made wrong on real servers raises its own alert, and no other."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
import yaml
from psycopg import sql
from sqlalchemy.engine import URL

import shardids.watch.metrics
from shardids.ids.layout import DEFAULT, Layout
from shardids.pg.embedded import EmbeddedServer, temporary_servers
from shardids.pg.gids import Gid
from shardids.testing import devcluster
from shardids.watch.metrics.samples import METRICS
from tests.conftest import found_cluster
from tests.support.clusters import connected
from tests.support.series import Series, collecting, read, scraped

RULES = Path(shardids.watch.metrics.__file__).parent / "alerts.yaml"
ALERTS = {
    rule["alert"]: rule["expr"]
    for group in yaml.safe_load(RULES.read_text("utf-8"))["groups"]
    for rule in group["rules"]
}
MINUTES = 20
Blank = Callable[[], URL]
MOST_TICKS = 4194304
"""What one call may reserve: it takes a shard 4 s ahead."""
REST = {"time_bits": DEFAULT.time_bits, "shard_bits": DEFAULT.shard_bits}


@pytest.fixture
def pair(blank_database: Blank) -> tuple[URL, URL]:
    urls = blank_database(), blank_database()
    found_cluster(urls[0], {"a": urls[0], "b": urls[1]}, 8)
    return urls


@pytest.fixture(scope="module")
def servers() -> Iterator[list[EmbeddedServer]]:
    settings = {"max_prepared_transactions": "5", "max_connections": "40"}
    with temporary_servers(3, settings=settings) as started:
        devcluster.create_cluster(started, 6)
        yield started


def firing(folder: Path, series: Series) -> set[str]:
    """The alerts that fire when things stay as they are for a while. What was left unfinished grows older."""
    told = []
    for (name, *labels), value in series.items():
        named = dict(
            zip(METRICS[name].labels, labels, strict=True), job="shardids", instance="127.0.0.1:9187"
        )
        inner = ",".join(f'{label}="{text}"' for label, text in named.items())
        growth = 60 if name.endswith("_oldest_seconds") and value else 0
        told.append({"series": f"{name}{{{inner}}}", "values": f"{float(value)}+{growth}x{MINUTES}"})
    fired: set[str] = set()
    # promtool compares, and does not tell: so each alert is asked for.
    for alert in sorted(ALERTS):
        asked = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)'
        question = {
            "expr": f"({asked}) > bool 0",
            "eval_time": f"{MINUTES}m",
            "exp_samples": [{"labels": "{}", "value": 1}],
        }
        test = {"interval": "1m", "input_series": told, "promql_expr_test": [question]}
        path = folder / "test.yaml"
        path.write_text(
            json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}), "utf-8"
        )
        ran = subprocess.run(
            ["promtool", "test", "rules", path], capture_output=True, text=True, check=False, timeout=60
        )
        assert "FAILED" in ran.stderr + ran.stdout or ran.returncode == 0, ran
        assert ran.returncode == 0 or "got:" in ran.stderr + ran.stdout, ran
        if ran.returncode == 0:
            fired.add(alert)
    return fired


def run(url: URL | str, *statements: str) -> None:
    with psycopg.connect(
        str(url)
        if isinstance(url, str)
        else url.set(drivername="postgresql").render_as_string(hide_password=False),
        autocommit=True,
    ) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def test_promtool_takes_the_rules() -> None:
    ran = subprocess.run(
        ["promtool", "check", "rules", RULES], capture_output=True, text=True, check=False, timeout=60
    )
    assert ran.returncode == 0, ran


def test_promtool_takes_the_metrics(pair: tuple[URL, URL]) -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    with collecting(pair[0]) as collector:
        registry.register(collector)
        given = generate_latest(registry)
    ran = subprocess.run(
        ["promtool", "check", "metrics"], input=given, capture_output=True, check=False, timeout=60
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")


def test_all_well(pair: tuple[URL, URL], tmp_path: Path) -> None:
    assert firing(tmp_path, scraped(pair[0])) == set()


@pytest.mark.parametrize(
    ("where", "statements", "alert"),
    [
        ("b", ["select shardids.fence(5)"], "ShardidsShardFenced"),
        ("b", ["update shardids.shard set server = 'another/1' where id = 5"], "ShardidsShardFenced"),
        ("a", ["update shardids_catalog.placement set state = 'lost' where shard = 3"], "ShardidsShardLost"),
        (
            "a",
            ["insert into shardids_catalog.region (name, first_shard, last_shard) values ('eu', 3, 4)"],
            "ShardidsShardOutsideRegion",
        ),
        (
            "a",
            [f"select shardids.reserve(1, {MOST_TICKS}) from generate_series(1, 35)"],
            "ShardidsShardAhead",
        ),
        (
            "a",
            [
                "insert into shardids_catalog.move (shard, source, target, offline, step)"
                " values (1, 'a', 'b', false, 'rows')"
            ],
            "ShardidsMoveInterrupted",
        ),
        (
            "b",
            [
                "create subscription shardids_move_test connection 'host=127.0.0.1' publication p"
                " with (connect = false, slot_name = none)"
            ],
            "ShardidsSubscriptionStopped",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_in_a_database(
    pair: tuple[URL, URL], tmp_path: Path, where: str, statements: list[str], alert: str
) -> None:
    url = pair["ab".index(where)]
    try:
        run(url, *statements)
        assert firing(tmp_path, scraped(pair[0])) == {alert}
    finally:
        run(url, "drop subscription if exists shardids_move_test")


def test_a_node_that_takes_no_writes(pair: tuple[URL, URL], tmp_path: Path) -> None:
    setting = sql.SQL("alter database {} set default_transaction_read_only = on").format(
        sql.Identifier(str(pair[1].database))
    )
    with connected(pair[1]) as connection:
        connection.execute(setting)
        try:
            assert firing(tmp_path, scraped(pair[0])) == {"ShardidsNodeReadOnly"}
        finally:
            connection.execute("set default_transaction_read_only = off")
            connection.execute(
                sql.SQL("alter database {} reset all").format(sql.Identifier(str(pair[1].database)))
            )


@pytest.mark.parametrize("top", [20, 0])
def test_a_shard_from_which_more_is_drawn_than_it_has(
    blank_database: Blank, tmp_path: Path, top: int
) -> None:
    url = blank_database()
    found_cluster(url, {"a": url}, 2, layout=Layout(epoch_ms=DEFAULT.epoch_ms, sequence_bits=1, **REST))
    with collecting(url, top=top) as collector:
        read(collector)
        run(url, "select pg_sleep(0.6)", "select shard_0001.next_id() from generate_series(1, 40000)")
        assert firing(tmp_path, read(collector)) == {"ShardidsShardHot"}


@pytest.mark.parametrize(
    "statement",
    [
        f"select shardids.reserve(1, {MOST_TICKS})",
        "select shardids.advance_past(1, ((shardids.ms_of(clock_timestamp()) + 2000) << 22) | (5 << 10))",
    ],
    ids=["a block", "after="],
)
def test_what_takes_a_shard_ahead_makes_it_not_hot(
    pair: tuple[URL, URL], tmp_path: Path, statement: str
) -> None:
    with collecting(pair[0]) as collector:
        run(pair[0], statement)
        read(collector)
        run(pair[0], "select pg_sleep(0.6)", statement)
        series = read(collector)
    assert series["shardids_advanced_seconds_total", "a"] > 0.5
    assert firing(tmp_path, series) == set()


def test_shards_that_can_not_be_read(pair: tuple[URL, URL], tmp_path: Path) -> None:
    with connected(pair[1]) as holding:
        holding.execute("begin")
        holding.execute("alter sequence shard_0005.id_counter increment 1")
        series = scraped(pair[0])
    assert firing(tmp_path, series) == {"ShardidsNodeIncomplete"}


def test_a_layout_that_ends_within_a_year(blank_database: Blank, tmp_path: Path) -> None:
    url = blank_database()
    epoch_ms = int((time.time() + 30 * 86400) * 1000) - (1 << 33)
    found_cluster(
        url, {"a": url}, 2, layout=Layout(epoch_ms=epoch_ms, time_bits=33, shard_bits=12, sequence_bits=10)
    )
    assert firing(tmp_path, scraped(url)) == {"ShardidsExhausted"}


@pytest.mark.parametrize(
    ("changed", "alert"),
    [
        # What takes days or gigabytes to make for real.
        ({("shardids_sequence_left_ratio", "b"): 0.04}, "ShardidsExhausted"),
        ({("shardids_clock_skew_seconds", "b"): -1.5}, "ShardidsClockSkewed"),
        ({("shardids_shards_on_two_nodes",): 1}, "ShardidsShardTwice"),
        ({("shardids_replication_kept_bytes", "a", "move"): 2.0**31}, "ShardidsReplicationLag"),
        ({("shardids_replication_slots_lost", "a", "reference"): 1}, "ShardidsReplicationLost"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_samples_as_they_would_be(pair: tuple[URL, URL], tmp_path: Path, changed: Series, alert: str) -> None:
    series = scraped(pair[0])
    assert changed.keys() <= series.keys()
    assert firing(tmp_path, series | changed) == {alert}


def test_the_skew_that_an_alert_tells_is_the_whole(tmp_path: Path) -> None:
    series = [
        {"series": f'shardids_clock_{name}_seconds{{node="{node}"}}', "values": str(value)}
        for node, skew, error in (("far", -2.0, 0.3), ("hidden", 1.5, 0.3))
        for name, value in (("skew", skew), ("error", error))
    ]
    question = {
        "expr": ALERTS["ShardidsClockSkewed"],
        "eval_time": "0m",
        "exp_samples": [{"labels": '{node="far"}', "value": 2}],
    }
    test = {"interval": "1m", "input_series": series, "promql_expr_test": [question]}
    path = tmp_path / "test.yaml"
    path.write_text(json.dumps({"rule_files": [str(RULES)], "tests": [test]}), "utf-8")
    subprocess.run(["promtool", "test", "rules", path], check=True, timeout=60)


def test_a_server_that_is_down(servers: list[EmbeddedServer], tmp_path: Path) -> None:
    with collecting(servers[0].url()) as collector:
        read(collector)
        servers[2].stop()
        try:
            assert firing(tmp_path, read(collector)) == {"ShardidsNodeDown"}
        finally:
            servers[2].start(attached=True)


def test_a_catalog_that_is_down(servers: list[EmbeddedServer], tmp_path: Path) -> None:
    with collecting(servers[0].url()) as collector:
        # As if the catalog had a server of its own.
        run(
            servers[0].url(),
            "delete from shardids_catalog.query_node",
            "delete from shardids_catalog.placement where node = 'a'",
            "delete from shardids_catalog.node where name = 'a'",
        )
        assert firing(tmp_path, read(collector)) == set()
        servers[0].stop()
        try:
            assert firing(tmp_path, read(collector)) == {"ShardidsCatalogDown"}
        finally:
            servers[0].start(attached=True)


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_transaction_that_stays_prepared(
    servers: list[EmbeddedServer], tmp_path: Path, is_ours: bool
) -> None:
    with psycopg.connect(servers[1].url(), autocommit=True) as connection:
        cluster = connection.execute("select cluster from shardids.node").fetchone()
        assert cluster is not None
        name = (
            str(Gid(cluster=cluster[0], transaction=uuid4(), number=2, count=2, decider="c"))
            if is_ours
            else "xa"
        )
        connection.execute("begin")
        connection.execute(sql.SQL("prepare transaction {}").format(name))
        try:
            series = scraped(servers[0].url())
        finally:
            connection.execute(sql.SQL("rollback prepared {}").format(name))
    assert firing(tmp_path, series) == {"ShardidsInDoubt" if is_ours else "ShardidsPreparedTransaction"}


def test_a_server_with_hardly_a_connection_left(servers: list[EmbeddedServer], tmp_path: Path) -> None:
    with ExitStack() as sessions:
        for _ in range(37):
            sessions.enter_context(psycopg.connect(servers[1].url()))
        series = scraped(servers[0].url())
    assert firing(tmp_path, series) == {"ShardidsConnections"}
