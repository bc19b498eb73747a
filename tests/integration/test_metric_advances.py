"""What takes a shard ahead of the clock and draws nothing: it shows as lead and advances, and in no rate."""

from __future__ import annotations

from contextlib import closing
from itertools import pairwise

import pytest
from sqlalchemy import text
from sqlalchemy.engine import URL, make_url

from shardids import Cluster
from shardids.pg.embedded import temporary_server
from shardids.testing import devcluster
from shardids.watch.console.watching import Watcher, rate_of
from tests.conftest import dsn
from tests.support.clusters import connected
from tests.support.series import Series, collecting, read
from tests.support.waiting import wait_for

HERE, THERE = 2, 5
"""A shard of node a, and one whose IDs lead."""
AHEAD_MS = 2000
TURNS = 6
STEP_S = 0.2


def answer(cluster: Cluster, ahead_ms: int = AHEAD_MS) -> None:
    """A session that answers a row of a shard that leads: it draws one ID, some time after the last."""
    with cluster.session(shard=THERE) as session:
        now_ms = session.scalar(text(f"select shardids.ms_of(clock_timestamp()), pg_sleep({STEP_S})"))
    assert now_ms is not None
    read_id = cluster.layout.encode(ms=now_ms + ahead_ms, shard=THERE, sequence=0)
    with cluster.session(shard=HERE, after=read_id) as session:
        session.execute(text(f"select shard_000{HERE}.next_id()"))
        session.commit()


def total(series: Series, name: str) -> float:
    return series[f"shardids_{name}_total", "a"]


def test_sessions_that_answer_rows_that_lead_have_the_rate_of_their_draws(
    cluster: Cluster, cluster_url: URL
) -> None:
    with collecting(cluster_url) as collector:
        answer(cluster)
        before = read(collector)
        for _ in range(TURNS):
            answer(cluster)
        after = read(collector)
    assert total(after, "ticks_drawn") == TURNS
    assert 0 < after["shardids_shard_ticks_drawn_per_second", "a", str(HERE)] <= 1 / STEP_S
    assert after["shardids_shard_ticks_drawn_per_second_max", "a"] <= 1 / STEP_S
    # It went on with the clock, and stayed as far ahead.
    assert total(before, "advanced_seconds") == 0
    assert total(after, "advanced_seconds") >= TURNS * STEP_S
    assert 0.5 < after["shardids_shard_lead_seconds", "a", str(HERE)] <= AHEAD_MS / 1000


def test_a_crash_of_a_server_whose_shard_leads_adds_no_more_than_what_sequences_skip() -> None:
    with temporary_server() as server:
        url = devcluster.create_cluster([server], 2)
        statement = "select shard_0001.next_id()"
        with collecting(url) as collector:
            with connected(make_url(url)) as connection:
                connection.execute("select shardids.reserve(1, 4194304)")
                connection.execute(statement)
            before = read(collector)
            server.kill()
            server.start(attached=True)
            with connected(make_url(url)) as connection:
                connection.execute(statement)
                connection.execute("select pg_sleep(0.6)")
            wait_for(lambda: read(collector)["shardids_node_complete", "a"], "the node to be read again")
            after = read(collector)
    # Up to 32 are skipped, and the first draw of an incarnation takes three.
    assert 1 <= total(after, "ticks_drawn") - total(before, "ticks_drawn") <= 32 + 3
    # The margin is 10 s, and the shard led before.
    assert total(after, "advanced_seconds") - total(before, "advanced_seconds") >= 5


def test_blocks_beyond_what_the_layout_holds_are_a_lead_that_grows(cluster_url: URL) -> None:
    leads, advanced = [], []
    with collecting(cluster_url) as collector, connected(cluster_url) as connection:
        for _ in range(3):
            connection.execute("select shardids.reserve(2, 4194304)")
            series = read(collector)
            leads.append(series["shardids_shard_lead_seconds", "a", "2"])
            assert leads[-1] == series["shardids_lead_max_seconds", "a"]
            advanced.append(total(series, "advanced_seconds"))
            assert total(series, "ticks_drawn") == 0
            assert series.get(("shardids_ticks_drawn_per_second", "a"), 0) == 0
            connection.execute("select pg_sleep(0.6)")
    assert 0 < leads[0] < leads[1] < leads[2]
    assert advanced[0] == 0
    assert [b - a for a, b in pairwise(advanced)] == [pytest.approx(4.096, abs=0.01)] * 2


def test_the_console_has_none_of_it_in_its_rates(cluster: Cluster, cluster_url: URL) -> None:
    with closing(Watcher(dsn(cluster_url))) as watcher:
        answer(cluster)
        watcher.look()
        for _ in range(TURNS):
            answer(cluster)
        with connected(cluster_url) as connection:
            connection.execute("select shardids.reserve(1, 4194304)")
        node = watcher.look().nodes["a"]
        assert node.per_second is not None
        assert node.per_second.keys() == {HERE}
        assert 0 < node.per_second[HERE] <= 1 / STEP_S
        leads = {shard: node.shards[shard].lead_ms(cluster.layout) or 0 for shard in (1, HERE)}
        assert all(lead > 500 for lead in leads.values())
        (point,) = list(watcher.history.points())[-1:]
        assert rate_of(point, 1) == 0
