"""A network that swallows packets at a step of a move: writes go on soon, and no command hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import psycopg
import pytest
from sqlalchemy.engine import make_url

from shardids import mover
from shardids.catalog.rows import Catalog
from shardids.errors import ShardidsError
from shardids.mover.steps import LIVE
from shardids.pg.embedded import temporary_servers
from tests.support.faults import LONG
from tests.support.killed_moves import finish
from tests.support.moves import TwoNodes, assert_one_owner, proxies_of, schema, two_nodes
from tests.support.proxy import Proxy

WRITES_AGAIN_S = 30
ABORT_S = 60
TABLE = "create table {s}.users (id bigint primary key default {s}.next_id(), name text)"
NOTES = "; create table {s}.notes (body text primary key)"


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, 2 * 3 * len(LIVE))
        yield nodes
        nodes.catalog.close()


@pytest.fixture
def proxies(nodes: TwoNodes) -> Iterator[dict[str, Proxy]]:
    with proxies_of(nodes) as found:
        yield found


class Pulse:
    """Writes to a shard wherever it is placed, and remembers the longest time without a write."""

    def __init__(self, nodes: TwoNodes, shard: int) -> None:
        self._nodes, self._shard = nodes, shard
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.last = time.monotonic()
        self.longest_s = 0.0
        self.written: list[int] = []

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        statement = f"insert into {schema(self._shard)}.users (name) values ('p') returning id"
        catalog = psycopg.connect(self._nodes.catalog_url, autocommit=True)
        while not self._stop.wait(0.02):
            (node,) = catalog.execute(
                "select node from shardids_catalog.placement where shard = %s", [self._shard]
            ).fetchone()
            try:
                with self._nodes.connected(node) as connection:
                    connection.execute("set statement_timeout = '5s'")
                    self.written.append(connection.execute(statement).fetchone()[0])
            except psycopg.Error:
                continue
            finally:
                self.longest_s = max(self.longest_s, time.monotonic() - self.last)
            self.last = time.monotonic()
        catalog.close()


@pytest.mark.parametrize("silent", ["a", "b", "catalog"])
@pytest.mark.parametrize("step", [step.name for step in LIVE] if LONG else ["cutover"])
def test_writes_go_on_and_abort_ends(
    nodes: TwoNodes, proxies: dict[str, Proxy], silent: str, step: str
) -> None:
    shard = nodes.new_shard(TABLE + NOTES)
    url = make_url(nodes.catalog_url).set(host="127.0.0.1", port=proxies["catalog"].port)
    catalog = Catalog(url)

    def swallow(event: mover.Event) -> None:
        if event == mover.StepDone(shard=shard, step=step):
            proxies[silent].swallow()

    with Pulse(nodes, shard) as pulse:
        began = time.monotonic()
        with suppress(ShardidsError):
            mover.move(catalog, shard, "b", on_event=swallow)
        took_s = time.monotonic() - began
        began = time.monotonic()
        if mover.open_moves(nodes.catalog, [shard]):
            with suppress(ShardidsError):
                mover.abort(catalog, shard)
        abort_s = time.monotonic() - began
        proxies[silent].forward()
        catalog.close()
        if mover.open_moves(nodes.catalog, [shard]):
            # The catalog's server may still hold the lock of the mover whose end it has not heard of.
            nodes.catalog.engine.dispose()
            finish(nodes, shard, mover.abort)
        written = len(pulse.written)
        deadline = time.monotonic() + 10
        while len(pulse.written) < written + 5 and time.monotonic() < deadline:
            time.sleep(0.05)
    assert pulse.longest_s < WRITES_AGAIN_S, (
        f"{pulse.longest_s:.1f} s without a write; the move took {took_s:.1f} s"
    )
    assert abort_s < ABORT_S
    assert len(pulse.written) >= written + 5
    with nodes.connected(nodes.catalog.node_of(shard).name) as connection:
        there = connection.execute(f"select id from {schema(shard)}.users").fetchall()
    assert {id_ for (id_,) in there} >= set(pulse.written)
    clean_what_stayed(nodes, shard)
    assert_one_owner(nodes, shard)


def clean_what_stayed(nodes: TwoNodes, shard: int) -> None:
    """An abort that had no answer from the target leaves the copy there, which nobody can write to."""
    if nodes.catalog.node_of(shard).name == "a":
        with nodes.connected("b") as target:
            for (name,) in target.execute("select subname from pg_subscription").fetchall():
                target.execute("select shardids.unsubscribe(%s)", [name])
            target.execute("select shardids.drop_copy(%s)", [shard])
