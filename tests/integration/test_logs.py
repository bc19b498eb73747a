"""What is logged of moves, migrations and retries, with which fields, and what never is."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from sqlalchemy import text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import IntegrityError

from shardids import AsyncCluster, Cluster, mover
from shardids.errors import MoveFailed
from shardids.mover.failover import Replacement, log_replacement
from shardids.pg.embedded import temporary_servers
from tests.conftest import dsn
from tests.support import moves_by_hand
from tests.support.clusters import environment
from tests.support.logged import of, run, told, with_times_as
from tests.support.migrations import App
from tests.support.moves import TwoNodes, two_nodes
from tests.support.moves_by_hand import SHARD, Note

Blank = Callable[[], URL]

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "logs.md"
SECRET = "pa55-w0rd"
LIVE = [
    "tables", "publish", "subscribe", "copy", "indexes", "barrier", "catch up", "cutover", "activate",
    "place", "clean",
]  # fmt: skip


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, 8)
        yield nodes
        nodes.catalog.close()


def test_a_move_tells_its_begin_its_steps_its_fence_and_its_end(
    nodes: TwoNodes, caplog: pytest.LogCaptureFixture
) -> None:
    shard = nodes.new_shard()
    with caplog.at_level(logging.DEBUG, "shardids.mover"):
        mover.move(nodes.catalog, shard, "b")
    records = [one for one in caplog.records if one.name == "shardids.mover" and not hasattr(one, "program")]
    (number,) = {one.move for one in records}  # type: ignore[attr-defined] # by extra
    assert isinstance(number, int)
    assert {(one.shard, one.node, one.target) for one in records} == {(shard, "a", "b")}  # type: ignore[attr-defined] # by extra
    steps = [one.step for one in records if one.levelno == logging.DEBUG]  # type: ignore[attr-defined] # by extra
    assert steps == LIVE
    states = [line for line in told(records, "mover") if line.startswith("INFO") and "waits" not in line]
    assert with_times_as(states) == [
        f'INFO shard {shard}: move from node "a" to "b" at step tables',
        f'INFO shard {shard}: fenced on node "a"',
        f'INFO shard {shard}: placed on node "b"',
        f"INFO shard {shard}: moved after N s, no writes for N ms",
    ]


def test_a_move_that_stops_says_where_and_how_it_was_undone(
    nodes: TwoNodes, caplog: pytest.LogCaptureFixture
) -> None:
    shard = nodes.new_shard()

    def fail(event: object) -> None:
        if event == mover.StepBegun(shard=shard, step="indexes"):
            raise MoveFailed("the test has failed")

    with caplog.at_level(logging.INFO, "shardids.mover"):
        with pytest.raises(MoveFailed):
            mover.move(nodes.catalog, shard, "b", on_event=fail)
        mover.abort(nodes.catalog, shard)
    states = [line for line in told(caplog.records, "mover") if "waits" not in line]
    assert with_times_as(states) == [
        f'INFO shard {shard}: move from node "a" to "b" at step tables',
        f"WARNING shard {shard}: stopped at step indexes: the test has failed",
        f'INFO shard {shard}: move from node "a" to "b" at step indexes',
        f"INFO shard {shard}: aborted after N s",
    ]


def test_records_of_a_move_as_json_hold_no_password(nodes: TwoNodes) -> None:
    shard = nodes.new_shard()
    for node in nodes.servers:
        with nodes.connected(node) as connection:
            connection.execute(f"create role keeper superuser login password '{SECRET}'")
    url = make_url(nodes.catalog_url).set(username="keeper", password=SECRET)
    words = ("shard", "move", str(shard), "--to", "b", "--json")
    result, stderr = run(url, "-vv", "--log-format", "json", *words)
    assert result[0]["outcome"] == "moved"
    assert SECRET not in stderr
    statements = of(stderr, "sql")
    assert {one.get("node") for one in statements} == {None, "a", "b"}
    assert all(one["seconds"] >= 0 and "\n" not in one["statement"] for one in statements)
    assert any("subscription" in one["statement"] for one in statements)
    assert {one["shard"] for one in of(stderr, "mover") if "program" not in one} == {shard}


@pytest.mark.long
def test_verbose_shows_the_steps_of_a_move_beside_clean_json(nodes: TwoNodes) -> None:
    shard = nodes.new_shard()
    result, stderr = run(nodes.catalog_url, "-v", "shard", "move", str(shard), "--to", "b", "--json")
    assert result[0]["shard"] == shard
    for step in LIVE:
        assert re.search(rf"DEBUG shardids\.mover: shard {shard}: step {step} took \d", stderr)
    assert "shardids.sql" not in stderr
    _, quiet = run(nodes.catalog_url, "shard", "move", str(shard), "--back", "--json")
    assert "shardids.mover" not in quiet


@pytest.mark.long
def test_a_run_of_migrations(app: App) -> None:
    app.add_two()
    app.add("three", "op.execute(\"insert into users (name) values ('classified')\")", after="two")
    app.add("four", "op.execute(\"select 'classified'::integer\")", after="three")
    logged = ("-vv", "--log-format", "json", "migrate", "up")
    _, stderr = run(app.url, *logged, "three", "--json")
    records = of(stderr, "migrate")
    shards = [one for one in records if "shard" in one]
    assert {(one["shard"], one["node"]) for one in shards} == {(s, "ab"[s // 4]) for s in range(8)}
    assert {(one["level"], one["status"], one["revision"]) for one in shards} == {("DEBUG", "done", "three")}
    assert with_times_as([one["message"] for one in records if "shard" not in one]) == [
        "8 shards are brought to three",
        "the run to three ended after N s: 8 done, 0 failed, 0 not started",
    ]
    assert any("insert into users" in one["statement"] for one in of(stderr, "sql"))
    assert "classified" not in stderr
    # The report tells what the server says, and the log what it can't quote.
    report, stderr = run(app.url, *logged, "four", "--json", code=1)
    assert "classified" in str(report)
    (failed,) = [one for one in of(stderr, "migrate") if "shard" in one]
    assert (failed["level"], failed["status"], failed["revision"]) == ("WARNING", "failed", "three")
    assert re.search(r"failed after .* s: StatementFailed 22P02$", failed["message"])
    assert "classified" not in "".join(line for line in stderr.splitlines() if line.startswith("{"))


def test_a_transaction_that_is_run_again_after_a_move(
    blank_database: Blank, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = moves_by_hand.two_nodes(blank_database)
    with (
        caplog.at_level(logging.DEBUG, "shardids.client"),
        caplog.at_level(logging.DEBUG, "shardids.sql"),
        Cluster.connect(nodes["catalog"], listen=False) as cluster,
    ):
        cluster.at(shard=SHARD).run(lambda session: session.add(Note(words="classified")))
        with pytest.raises(IntegrityError):
            cluster.at(shard=SHARD).run(lambda session: session.add(Note(words="classified")))
        assert told(caplog.records, "client") == []
        moves_by_hand.move_shard(nodes["catalog"], SHARD, "b", moves_by_hand.Base.metadata)
        cluster.at(shard=SHARD).run(lambda session: session.add(Note(words="again")))
    (record,) = [one for one in caplog.records if one.name == "shardids.client"]
    assert (record.levelname, record.shard, record.node, record.error) == ("INFO", SHARD, "b", "ShardMoved")  # type: ignore[attr-defined] # by extra
    assert record.getMessage().startswith(f'shard {SHARD}: a transaction is run again on node "b": ')
    statements = told(caplog.records, "sql")
    assert any(re.match(r'DEBUG node "b": took .* ms: INSERT INTO .*notes', one) for one in statements)
    assert any(
        re.match(r'DEBUG node "a": UniqueViolation 23505 after .* ms: INSERT', one) for one in statements
    )
    everything = json.dumps([vars(one) for one in caplog.records], default=str)
    assert "classified" not in everything
    assert str(nodes["catalog"].password) not in everything


def test_statements_under_asyncio(cluster_url: URL, caplog: pytest.LogCaptureFixture) -> None:
    async def use() -> None:
        async with (
            await AsyncCluster.connect(dsn(cluster_url), listen=False) as cluster,
            cluster.session(shard=1) as session,
        ):
            await session.execute(text("select 'classified', 5"))

    with caplog.at_level(logging.DEBUG, "shardids.sql"):
        asyncio.run(use())
    assert with_times_as(told(caplog.records, "sql"))[-2:] == [
        'DEBUG node "a": took N ms: select … , 5',
        'DEBUG node "a": took N ms: ROLLBACK',
    ]


def test_nothing_listens_to_an_engine_unless_statements_are_logged(cluster_url: URL) -> None:
    with Cluster.connect(cluster_url, listen=False) as cluster:
        engine: Any = cluster.engine(cluster.node_of(1))
        assert "shardids.pg.statement_log" not in {
            listener.__module__ for listener in engine.dispatch.before_cursor_execute
        }
        # Nor is what sends COMMIT and ROLLBACK another than SQLAlchemy's.
        assert not any(name.startswith("do_") for name in vars(engine.dialect))
        assert not any("log" in name for name in engine.get_execution_options())


def test_a_node_that_is_replaced_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    done = Replacement(node="a", url="postgresql://h/d", shards=3, fenced=(7,))
    with caplog.at_level(logging.INFO, "shardids.mover"):
        log_replacement(done)
    (record,) = caplog.records
    assert (record.levelname, record.node, record.fenced) == ("WARNING", "a", [7])  # type: ignore[attr-defined] # by extra
    assert record.getMessage() == 'node "a" is at postgresql://h/d now: 3 shards, 0 lost'


def test_the_page(cluster_url: URL) -> None:
    blocks = {one.info: one.content for one in MarkdownIt().parse(PAGE.read_text("utf-8")) if one.info}
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", blocks["python"]],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environment(SHARDIDS_CATALOG=cluster_url.render_as_string(hide_password=False)),
    )
    assert with_times_as(ran.stderr.splitlines())[-2:] == with_times_as(blocks["text"].splitlines())
