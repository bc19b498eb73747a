"""Spans of OpenTelemetry: what sessions, statements, retries, moves and migrations leave in a trace."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sqlalchemy import select, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from shardids import AsyncCluster, Cluster, mover
from shardids.client.routing.one_shard import ShardSession
from shardids.client.tracing import Traced
from shardids.pg.embedded import temporary_servers
from tests.conftest import dsn
from tests.support import moves_by_hand
from tests.support.migrations import App
from tests.support.moves import TwoNodes, two_nodes
from tests.support.moves_by_hand import SHARD, Note


class Telemetry:
    """A tracer, and its spans that have ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("tests")

    def spans(self, name: str | None = None) -> list[ReadableSpan]:
        """In the order in which they ended."""
        return [one for one in self._exporter.get_finished_spans() if name in (None, one.name)]


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    telemetry = Telemetry()
    yield telemetry
    telemetry.provider.shutdown()


@pytest.fixture
def of_the_process(telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch) -> Telemetry:
    """As if the process had been set up with it."""
    monkeypatch.setattr(trace, "get_tracer", telemetry.provider.get_tracer)
    return telemetry


def told(span: ReadableSpan) -> dict[str, Any]:
    return {key.removeprefix("shardids."): value for key, value in (span.attributes or {}).items()}


def parent(span: ReadableSpan) -> int | None:
    return span.parent and span.parent.span_id


def own(span: ReadableSpan) -> int:
    return span.get_span_context().span_id


def test_a_session_and_its_statements_are_in_the_trace_of_the_request(
    cluster_url: URL, telemetry: Telemetry
) -> None:
    with (
        Cluster.connect(dsn(cluster_url), tracer=telemetry.tracer) as cluster,
        telemetry.tracer.start_as_current_span("GET /"),
        cluster.at(shard=5).session() as session,
    ):
        session.scalar(text("select 1"))
    request = telemetry.spans("GET /")[0]
    (opened,) = telemetry.spans("shardids.session")
    (statement,) = telemetry.spans("shardids.statement")
    assert parent(opened) == own(request)
    assert parent(statement) == own(opened)
    assert {one.get_span_context().trace_id for one in telemetry.spans()} == {
        request.get_span_context().trace_id
    }
    assert told(opened) == {"kind": "shard", "shard": 5, "node": "b"}
    assert told(statement) == {"db.system.name": "postgresql", "node": "b", "shard": 5}


def test_a_statement_over_shards_has_a_span_for_each_node(cluster_url: URL, telemetry: Telemetry) -> None:
    with Cluster.connect(dsn(cluster_url), tracer=telemetry.tracer) as cluster:
        for shard in range(cluster.shard_count):
            with cluster.at(shard=shard).engine.begin() as connection:
                Note.metadata.create_all(connection)
        before = len(telemetry.spans("shardids.statement"))
        with cluster.sharded_session() as session:
            assert session.scalars(select(Note)).all() == []
    (asked,) = telemetry.spans("shardids.fan_out")
    (opened,) = telemetry.spans("shardids.session")
    assert told(asked) == {"shards": "all"}
    assert parent(asked) == own(opened)
    below = [one for one in telemetry.spans("shardids.statement")[before:] if parent(one) == own(asked)]
    assert {told(one)["node"] for one in below} == {"a", "b"}


def test_a_retry_is_told_with_its_attempts(blank_database: Callable[[], URL], telemetry: Telemetry) -> None:
    urls = moves_by_hand.two_nodes(blank_database)
    with Cluster.connect(dsn(urls["catalog"]), tracer=telemetry.tracer, listen=False) as cluster:
        fence = moves_by_hand.fence(urls["catalog"], SHARD, "b")
        moves_by_hand.copy(urls["catalog"], SHARD, "b", Note.metadata, fence)
        moves_by_hand.place(urls["catalog"], SHARD, "b")

        def write(session: Session) -> None:
            session.add(Note(words="x"))

        cluster.at(shard=SHARD).run(write)
    (ran,) = telemetry.spans("shardids.run")
    assert told(ran) == {"shard": SHARD, "attempts": 2, "node": "b"}
    assert [one.name for one in ran.events] == ["shardids.retry"]
    assert dict(ran.events[0].attributes or {}) == {"error.type": "ShardMoved SI003"}
    tried = [told(one)["node"] for one in telemetry.spans("shardids.session") if parent(one) == own(ran)]
    assert tried == ["a", "b"]


def test_an_error_is_told_without_its_text(cluster_url: URL, telemetry: Telemetry) -> None:
    with Cluster.connect(dsn(cluster_url), tracer=telemetry.tracer) as cluster, pytest.raises(DBAPIError):
        cluster.at(shard=1).run(lambda session: session.execute(text("select 'secret'::integer")))
    for name in ("shardids.run", "shardids.session", "shardids.statement"):
        (failed,) = telemetry.spans(name)
        assert failed.status.status_code is trace.StatusCode.ERROR
        assert "22P02" in told(failed)["error.type"]
        assert "secret" not in failed.to_json()


def test_tasks_have_their_own_spans(cluster_url: URL, telemetry: Telemetry) -> None:
    async def run() -> None:
        async with await AsyncCluster.connect(dsn(cluster_url), tracer=telemetry.tracer) as cluster:

            async def request(shard: int) -> None:
                with telemetry.tracer.start_as_current_span(f"request {shard}"):
                    await cluster.at(shard=shard).run(lambda session: session.scalar(text("select 1")))

            await asyncio.gather(*(request(shard) for shard in (1, 5)))

    asyncio.run(run())
    for shard in (1, 5):
        (request,) = telemetry.spans(f"request {shard}")
        (ran,) = [one for one in telemetry.spans("shardids.run") if parent(one) == own(request)]
        assert told(ran) == {"shard": shard, "attempts": 1, "node": "a" if shard == 1 else "b"}
        (opened,) = [one for one in telemetry.spans("shardids.session") if parent(one) == own(ran)]
        assert told(opened)["shard"] == shard


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, 8)
        yield nodes
        nodes.catalog.close()


def test_a_move_has_a_span_with_its_steps(nodes: TwoNodes, of_the_process: Telemetry) -> None:
    mover.move(nodes.catalog, 5, "a")
    (moved,) = of_the_process.spans("shardids.move")
    assert told(moved) == {"shard": 5, "source": "b", "target": "a"}
    steps = of_the_process.spans("shardids.step")
    assert len(steps) > 5
    assert {parent(step) for step in steps} == {own(moved)}


def test_a_run_of_migrations_has_a_span_for_each_shard(app: App, of_the_process: Telemetry) -> None:
    app.add_two()
    assert app("up").code == 0
    (ran,) = of_the_process.spans("shardids.migrate")
    shards = of_the_process.spans("shardids.migrate.shard")
    assert {parent(one) for one in shards} == {own(ran)}
    assert sorted(told(one)["shard"] for one in shards) == list(range(8))
    assert {(told(one)["attempts"], told(one)["status"]) for one in shards} == {(1, "done")}
    assert {told(one)["node"] for one in shards} == {"a", "b"}


def test_without_a_tracer_sessions_are_plain_and_nothing_is_imported(cluster_url: URL) -> None:
    with Cluster.connect(dsn(cluster_url)) as cluster, cluster.at(shard=1).session() as session:
        assert type(session) is ShardSession
        assert not isinstance(session, Traced)
    imports = "import sys, shardids.client, shardids.mover, shardids.traces"
    lazily = f"{imports}; assert 'opentelemetry' not in sys.modules"
    subprocess.run([sys.executable, "-c", lazily], check=True)
