"""What a meter of OpenTelemetry is told of sessions: each thing once, and nothing without a meter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from sqlalchemy import event, select, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import IntegrityError, ProgrammingError
from sqlalchemy.orm import Session

from shardids import AsyncCluster, Cluster
from shardids.client.metering import Metered
from shardids.errors import ConnectionFailed, FanOutRefused, ShardFenced, WrongShard
from tests.conftest import dsn
from tests.support import moves_by_hand
from tests.support.clusters import connected
from tests.support.moves_by_hand import SHARD, Note, two_nodes
from tests.support.moves_by_hand import Base as NoteBase
from tests.support.signups import User, open_signups

Blank = Callable[[], URL]
Told = dict[tuple[str, ...], float]


class Telemetry:
    """A meter, and what it was told."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self._provider = MeterProvider(metric_readers=[self._reader])
        self.meter = self._provider.get_meter("shardids")

    def told(self) -> Told:
        """By name and attributes: the sum of a counter, the number of values of a histogram."""
        data = self._reader.get_metrics_data()
        return {
            (metric.name, *(str(value) for _, value in sorted(point.attributes.items()))): getattr(
                point, "count", None
            )
            or point.value
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
        }

    def close(self) -> None:
        self._provider.shutdown()


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    telemetry = Telemetry()
    yield telemetry
    telemetry.close()


@pytest.fixture
def url(blank_database: Blank) -> URL:
    nodes = {"a": blank_database(), "b": blank_database()}
    open_signups(nodes["a"], nodes, 4)
    return nodes["a"]


def new_user(cluster: Cluster, shard: int, email: str) -> User:
    name = next(name for n in range(1000) if cluster.shard_for(name := f"u{n}") == shard)
    return User(name=name, email=email)


def test_sessions_statements_refusals_and_fan_outs(url: URL, telemetry: Telemetry) -> None:
    with Cluster.connect(url, listen=False, meter=telemetry.meter) as cluster:
        with cluster.session(shard=1) as session:
            session.add(new_user(cluster, 1, "ann@example.com"))
            session.commit()
            other = new_user(cluster, 3, "bob@example.com")
            session.add(other)
            with pytest.raises(WrongShard):
                session.execute(select(User))  # flushes
            session.expunge(other)
            with pytest.raises(ProgrammingError):
                session.execute(text("select nonesuch"))
        with cluster.sharded_session() as session:
            assert len(session.scalars(select(User)).all()) == 1
        with cluster.sharded_session(fan_out="named") as session, pytest.raises(FanOutRefused):
            session.scalars(select(User))
    told = telemetry.told()
    assert told["shardids.client.sessions", "shard"] == 1
    assert told["shardids.client.sessions", "sharded"] == 2
    assert told["shardids.client.refused_statements", "WrongShard"] == 1
    assert told["shardids.client.refused_statements", "FanOutRefused"] == 1
    assert told["shardids.client.fan_out.duration", "all"] == 1
    assert told["db.client.operation.duration", "postgresql", "UndefinedColumn", "a"] == 1
    assert told["db.client.operation.duration", "postgresql", "a"] >= 2
    assert told["db.client.operation.duration", "postgresql", "b"] >= 1


def test_a_node_that_dies_on_its_first_connection(url: URL, telemetry: Telemetry) -> None:
    def connect_and_die(
        _dialect: object, _record: object, arguments: Any, options: Any
    ) -> psycopg.Connection:
        connection = psycopg.connect(*arguments, **options)
        with connected(url) as other:
            other.execute("select pg_terminate_backend(%s, 10000)", [connection.info.backend_pid])
        return connection

    with Cluster.connect(url, listen=False, meter=telemetry.meter) as cluster:
        engine = cluster.engine(cluster.node_of(1))
        event.listen(engine, "do_connect", connect_and_die)
        with (
            cluster.session(shard=1) as session,
            pytest.raises(ConnectionFailed, match='node "a" can\'t be reached'),
        ):
            session.execute(text("select 1"))
        event.remove(engine, "do_connect", connect_and_die)
        with cluster.session(shard=1) as session:
            assert session.execute(text("select 1")).scalar_one() == 1
            with pytest.raises(ProgrammingError):
                session.execute(text("select nonesuch"))
    told = {
        key[1:]: value for key, value in telemetry.told().items() if key[0] == "db.client.operation.duration"
    }
    assert told == {("postgresql", "a"): 1, ("postgresql", "UndefinedColumn", "a"): 1}


def test_a_fan_out_that_fails(url: URL, telemetry: Telemetry) -> None:
    with Cluster.connect(url, listen=False, meter=telemetry.meter) as cluster:
        with cluster.engine(cluster.node_of(3)).begin() as connection:
            connection.execute(text("drop table shard_0003.users cascade"))
        with cluster.sharded_session() as session, pytest.raises(ProgrammingError):
            session.scalars(select(User)).all()
    fan_outs = {key[1:]: value for key, value in telemetry.told().items() if "fan_out" in key[0]}
    assert fan_outs == {("ProgrammingError", "all"): 1}


def test_clashes_of_look_ups(url: URL, telemetry: Telemetry) -> None:
    with Cluster.connect(url, listen=False, meter=telemetry.meter) as cluster:
        for shard in (0, 1):
            with cluster.session(shard=shard) as session:
                session.add(new_user(cluster, shard, "ann@example.com"))
                if shard == 0:
                    session.commit()
                    continue
                with pytest.raises(IntegrityError):
                    session.commit()
        claiming: Any = cluster._claiming.of(cluster.node_of(1))
        listeners = {listener.__module__ for listener in claiming.dispatch.after_cursor_execute}
        assert "shardids.client.metering" in listeners
    told = telemetry.told()
    assert {key: value for key, value in told.items() if "clash" in key[0]} == {
        ("shardids.client.lookup_clashes", "users.email"): 1
    }


def test_a_transaction_that_is_run_again_after_a_move(blank_database: Blank, telemetry: Telemetry) -> None:
    nodes = two_nodes(blank_database)
    with Cluster.connect(nodes["catalog"], listen=False, meter=telemetry.meter) as cluster:
        cluster.at(shard=SHARD).run(lambda session: session.add(Note(words="x")))
        assert not [key for key in telemetry.told() if key[0] == "shardids.client.retries"]
        moves_by_hand.move_shard(nodes["catalog"], SHARD, "b", NoteBase.metadata)
        cluster.at(shard=SHARD).run(lambda session: session.add(Note(words="y")))
    assert telemetry.told()["shardids.client.retries", "moved"] == 1


def test_asyncio(url: URL, telemetry: Telemetry) -> None:
    async def use() -> None:
        async with await AsyncCluster.connect(dsn(url), listen=False, meter=telemetry.meter) as cluster:
            async with cluster.session(shard=1) as session:
                session.add(new_user(cluster.sync_cluster, 1, "ann@example.com"))
                await session.commit()
            async with cluster.sharded_session() as session:
                assert len((await session.scalars(select(User))).all()) == 1

    asyncio.run(use())
    told = telemetry.told()
    assert told["shardids.client.sessions", "shard"] == told["shardids.client.sessions", "sharded"] == 1
    assert told["shardids.client.fan_out.duration", "all"] == 1
    assert told["db.client.operation.duration", "postgresql", "b"] >= 1


def test_without_a_meter_nothing_is_in_the_way(url: URL) -> None:
    with Cluster.connect(url, listen=False) as cluster:
        with cluster.session(shard=1) as one, cluster.sharded_session() as all_:
            assert not isinstance(one, Metered)
            assert not isinstance(all_, Metered)
            one.execute(text("select 1"))
        engine: Any = cluster.engine(cluster.node_of(1))
        before = {listener.__module__ for listener in engine.dispatch.before_cursor_execute}
        assert "shardids.client.metering" not in before


def test_a_session_class_of_the_application(url: URL, telemetry: Telemetry) -> None:
    class Mine(Session):
        pass

    with (
        Cluster.connect(url, listen=False, meter=telemetry.meter) as cluster,
        cluster.at(shard=1).session(class_=Mine) as one,
        cluster.sharded_session(class_=Mine) as all_,
    ):
        assert isinstance(one, Mine)
        assert isinstance(all_, Mine)
    assert telemetry.told()["shardids.client.sessions", "shard"] == 1


def test_a_fence_that_holds_is_raised_after_its_retries(blank_database: Blank, telemetry: Telemetry) -> None:
    nodes = two_nodes(blank_database)
    with Cluster.connect(nodes["catalog"], listen=False, meter=telemetry.meter) as cluster:
        with cluster.engine(cluster.node_of(SHARD)).begin() as connection:
            connection.execute(text("select shardids.fence(:shard)"), {"shard": SHARD})
        with pytest.raises(ShardFenced):
            cluster.at(shard=SHARD).run(lambda session: session.add(Note(words="x")))
    assert telemetry.told()["shardids.client.retries", "fenced"] >= 1


def test_draws_and_commits_are_timed(blank_database: Blank, telemetry: Telemetry) -> None:
    catalog = moves_by_hand.two_nodes(blank_database)["catalog"]
    with Cluster.connect(dsn(catalog), listen=False, meter=telemetry.meter) as cluster:
        with cluster.session(shard=1) as session:
            session.add(Note(words="x"))
            session.commit()
            assert session.scalars(select(Note.words)).all() == ["x"]
        cluster.at(shard=1).reserve(100)
        told = telemetry.told()
        assert told["shardids.client.draw.duration", "postgresql", "a"] == 2
        assert told["shardids.client.commit.duration", "postgresql", "a"] == 2
        with (
            cluster.session(shard=1) as session,
            pytest.raises(ConnectionFailed),
        ):
            session.execute(text("select pg_terminate_backend(pg_backend_pid())"))
    assert telemetry.told()["shardids.client.commit.duration", "postgresql", "a"] == 2
