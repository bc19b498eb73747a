"""The breaker per node: a dead one is not asked again and again, and others do not notice."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import psycopg
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from sqlalchemy import text
from sqlalchemy.engine import make_url

from shardids import AsyncCluster, Cluster
from shardids.client import breaker
from shardids.client.breaker import FAILURES
from shardids.errors import ConnectionFailed, NodeDown
from shardids.pg.embedded import EmbeddedServer, temporary_servers
from shardids.testing import devcluster
from tests.support.clusters import environment
from tests.support.waiting import wait_for

A, B = 0, 7
"""A shard of node a, which has the catalog, too, and one of node b."""
QUICK_S = 0.005


@pytest.fixture(scope="module")
def servers() -> Iterator[list[EmbeddedServer]]:
    with temporary_servers(2) as servers:
        devcluster.create_cluster(servers, 8)
        yield servers


@contextmanager
def down(server: EmbeddedServer) -> Iterator[None]:
    server.stop("immediate")
    try:
        yield
    finally:
        server.start(attached=True)


@contextmanager
def stopped(server: EmbeddedServer) -> Iterator[None]:
    """A server that hangs: its machine accepts connections, and nobody answers on them."""
    os.kill(int(server.pid or 0), signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(int(server.pid or 0), signal.SIGCONT)


def ask(cluster: Cluster, shard: int) -> None:
    with cluster.at(shard=shard).session() as session:
        session.scalar(text("select 1"))


def failure(call: Callable[[], object]) -> tuple[float, ConnectionFailed]:
    begun = time.perf_counter()
    with pytest.raises(ConnectionFailed) as failed:
        call()
    return time.perf_counter() - begun, failed.value


def assert_refused(call: Callable[[], object]) -> None:
    """It fails at once, and says why."""
    found = [failure(call) for _ in range(21)]
    refused = [seconds for seconds, error in found if isinstance(error, NodeDown)]
    assert len(refused) >= 20  # one may be the probe
    assert median(refused) < QUICK_S
    reason = next(error for _, error in found if isinstance(error, NodeDown))
    assert 'not connecting to node "b": the last 5 attempts failed' in reason.message
    assert "can't be reached" in reason.message
    assert "shardids node replace b --dry-run" in reason.hint


def test_after_five_failures_calls_fail_at_once_until_the_node_is_back(
    servers: list[EmbeddedServer],
) -> None:
    with Cluster.connect(servers[0].url()) as cluster:
        ask(cluster, B)
        with down(servers[1]):
            for _ in range(FAILURES + 1):  # the first finds a connection that was lost
                _, error = failure(lambda: ask(cluster, B))
                assert not isinstance(error, NodeDown)
            assert_refused(lambda: ask(cluster, B))
            assert_refused(lambda: cluster.at(shard=B).run(lambda session: session.scalar(text("select 1"))))
            ask(cluster, A)
        wait_for(lambda: not _fails(cluster), "that node b is asked again")


def _fails(cluster: Cluster) -> bool:
    try:
        ask(cluster, B)
    except ConnectionFailed:
        return True
    return False


def test_calls_of_an_event_loop_fail_at_once(servers: list[EmbeddedServer]) -> None:
    async def run() -> None:
        async with await AsyncCluster.connect(servers[0].url()) as cluster:

            async def call(shard: int) -> None:
                async with cluster.at(shard=shard).session() as session:
                    await session.scalar(text("select 1"))

            with down(servers[1]):
                for _ in range(FAILURES):
                    with pytest.raises(ConnectionFailed):
                        await call(B)
                taken = []
                for _ in range(11):
                    begun = time.perf_counter()
                    with pytest.raises(ConnectionFailed):
                        await call(B)
                    taken.append(time.perf_counter() - begun)
                assert median(taken) < QUICK_S
                with pytest.raises(NodeDown):
                    await call(B)
                await call(A)
            for _ in range(200):
                try:
                    await call(B)
                    break
                except ConnectionFailed:
                    await asyncio.sleep(0.05)
            else:
                pytest.fail("node b was not asked again")

    asyncio.run(run())


def test_the_other_node_answers_as_before(servers: list[EmbeddedServer]) -> None:
    """The slowest of a hundred calls, with eight threads that call the dead node all the time."""

    def p99() -> float:
        taken = []
        for _ in range(400):
            begun = time.perf_counter()
            ask(cluster, A)
            taken.append(time.perf_counter() - begun)
        return sorted(taken)[int(len(taken) * 0.99)]

    with Cluster.connect(servers[0].url()) as cluster, down(servers[1]):
        ask(cluster, A)
        before, over = p99(), threading.Event()

        def call_again_and_again() -> None:
            while not over.wait(0.005):
                failure(lambda: ask(cluster, B))

        threads = [threading.Thread(target=call_again_and_again) for _ in range(8)]
        for thread in threads:
            thread.start()
        try:
            during = p99()
        finally:
            over.set()
            for thread in threads:
                thread.join()
        # Not the time of an attempt to connect, let alone of a timeout.
        assert during < before * 3 + 0.02


def test_one_call_at_a_time_is_the_probe(
    servers: list[EmbeddedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", 0.2)
    arguments = {"connect_timeout": 2}
    with Cluster.connect(servers[0].url(), connect_args=arguments) as cluster:
        with stopped(servers[1]):
            failures = [threading.Thread(target=failure, args=(lambda: ask(cluster, B),)) for _ in range(5)]
            for thread in failures:
                thread.start()
            for thread in failures:
                thread.join()
            time.sleep(0.6)  # a probe is due
            found: list[tuple[float, ConnectionFailed]] = []
            calls = [
                threading.Thread(target=lambda: found.append(failure(lambda: ask(cluster, B))))
                for _ in range(8)
            ]
            for thread in calls:
                thread.start()
            for thread in calls:
                thread.join()
            probes = [error for _, error in found if not isinstance(error, NodeDown)]
            assert len(probes) == 1
            assert_refused(lambda: ask(cluster, B))
        wait_for(lambda: not _fails(cluster), "that node b is asked again")


def test_a_node_that_took_its_place_is_asked_at_once(servers: list[EmbeddedServer]) -> None:
    live = servers[1].url()
    port = make_url(live).port
    dead = live.replace(f":{port}/", ":1/")

    def set_url(url: str) -> None:
        with psycopg.connect(servers[0].url(), autocommit=True) as connection:
            connection.execute("update shardids_catalog.node set url = %s where name = 'b'", [url])

    with Cluster.connect(servers[0].url(), listen=False) as cluster:
        set_url(dead)
        cluster.refresh()
        try:
            for _ in range(FAILURES):
                failure(lambda: ask(cluster, B))
            assert_refused(lambda: ask(cluster, B))
        finally:
            set_url(live)
        cluster.refresh()
        ask(cluster, B)


def test_a_login_that_is_refused_opens_nothing(servers: list[EmbeddedServer]) -> None:
    live = servers[1].url()
    with psycopg.connect(servers[0].url(), autocommit=True) as connection:
        rename = "update shardids_catalog.node set url = %s where name = 'b'"
        connection.execute(rename, [live.replace("/postgres?", "/nowhere?")])
        try:
            with Cluster.connect(servers[0].url()) as cluster:
                for _ in range(2 * FAILURES):
                    _, error = failure(lambda: ask(cluster, B))
                    assert not isinstance(error, NodeDown)
        finally:
            connection.execute(rename, [live])


def test_a_meter_shows_which_nodes_are_not_asked(servers: list[EmbeddedServer]) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])

    def read(name: str) -> dict[object, float]:
        data: Any = reader.get_metrics_data()
        return {
            point.attributes["shardids.node"]: point.value
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        }

    with Cluster.connect(servers[0].url(), meter=provider.get_meter("shardids")) as cluster:
        assert read("shardids.client.open_breakers") == {"a": 0, "b": 0}
        with down(servers[1]):
            for _ in range(FAILURES):
                failure(lambda: ask(cluster, B))
            assert read("shardids.client.open_breakers") == {"a": 0, "b": 1}
            assert_refused(lambda: ask(cluster, B))
            assert read("shardids.client.refused_calls")["b"] >= 20
        wait_for(lambda: not _fails(cluster), "that node b is asked again")
        assert read("shardids.client.open_breakers") == {"a": 0, "b": 0}
    provider.shutdown()


FORKED = """
import os, sys, warnings
from shardids import Cluster
from shardids.errors import ConnectionFailed, NodeDown
from sqlalchemy import text
warnings.simplefilter("ignore", DeprecationWarning)  # of forks in processes with threads

def ask():
    with cluster.at(shard=7).session() as session:
        session.scalar(text("select 1"))

cluster = Cluster.connect(os.environ["SHARDIDS_CATALOG"], listen=False)
for _ in range(5):
    try: ask()
    except NodeDown: raise
    except ConnectionFailed: pass
try: ask()
except NodeDown: pass
child = os.fork()
if child == 0:
    try: ask()
    except NodeDown: os._exit(1)
    except ConnectionFailed: os._exit(0)
    os._exit(2)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_the_child_of_a_fork_asks_anew(servers: list[EmbeddedServer]) -> None:
    with down(servers[1]):
        ran = subprocess.run(
            [sys.executable, "-c", FORKED],
            env=environment(SHARDIDS_CATALOG=servers[0].url()),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert ran.returncode == 0, ran.stderr
