"""Nodes whose clocks differ and swing answer each other's rows: with ``after`` no answer sorts first."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import make_url, text

from shardids import Cluster
from shardids.pg.embedded import EmbeddedServer, temporary_server
from tests.conftest import found_cluster
from tests.faults.conftest import make_database
from tests.support.faults import connect, scaled
from tests.support.server_clock import Clock
from tests.support.standbys import public_folder

SHARDS = (0, 1)
"""One on each node."""
LEAD = """select (shardids.tick_of(:id) >> shardids.sequence_bits()) - shardids.ms_of(clock_timestamp())"""


@pytest.fixture
def other_clock() -> Iterator[Clock]:
    with public_folder() as folder:
        yield Clock(folder)


@pytest.fixture
def skewed(faked_server: EmbeddedServer, other_clock: Clock) -> Iterator[Cluster]:
    """A cluster whose nodes follow ``clock`` and ``other_clock``."""
    with temporary_server(env=other_clock.env) as other:
        databases = make_database(faked_server, "order"), make_database(other, "order")
        url, other_url = map(make_url, databases)
        nodes = {"a": url, "b": other_url}
        found_cluster(url, nodes, len(SHARDS))
        for database in databases:
            with connect(database) as admin:
                admin.execute("update shardids.node set max_past = max_ahead")
        with Cluster.connect(url) as cluster:
            assert {cluster.node_of(shard).name for shard in SHARDS} == {"a", "b"}
            yield cluster


def answered(cluster: Cluster, count: int, *, after: bool) -> tuple[int, int]:
    """How many answers sort before what they answer, and by how many ms the last one leads its clock."""
    before = latest = 0
    for number in range(count):
        shard = SHARDS[number % 2]
        with cluster.session(shard=shard, after=latest if after and latest else None) as session:
            drawn = session.execute(text(f"select shard_{shard:04}.next_id()")).scalar_one()
            lead_ms = session.execute(text(LEAD), {"id": drawn}).scalar_one()
            session.commit()
        before += drawn <= latest
        latest = drawn
    return before, lead_ms


def test_answers_under_skew(skewed: Cluster, clock: Clock) -> None:
    count = scaled(40, 2000)
    for ahead_ms in (50, 5_000):
        clock.set(ahead_ms / 1000)
        without, _ = answered(skewed, count, after=False)
        assert without >= count // 2 - 1
        told, lead_ms = answered(skewed, count, after=True)
        assert told == 0
        # The shard of the slower clock leads it by the skew: nothing is passed on but that.
        assert lead_ms < ahead_ms + 100


def test_answers_while_both_clocks_swing(skewed: Cluster, clock: Clock, other_clock: Clock) -> None:
    seconds, steps = scaled(2.0, 20.0), scaled(200, 4000)
    swings = [threading.Thread(target=one.swing, args=(seconds, steps)) for one in (clock, other_clock)]
    for swing in swings:
        swing.start()
    before = 0
    while any(swing.is_alive() for swing in swings):
        before += answered(skewed, 20, after=True)[0]
    assert before == 0
