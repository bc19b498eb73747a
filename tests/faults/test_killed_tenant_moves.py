"""Moves of a key whose process is killed at random moments: none of its rows is lost or there twice."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy.orm import DeclarativeBase, Mapped

from shardids import Cluster, lookup_key, primary_key, tenants
from shardids.errors import ClusterConflict
from shardids.pg.embedded import temporary_servers
from shardids.tables import lookups
from shardids.tables.views import refresh_query_node
from tests.support.clusters import Nursery
from tests.support.faults import LONG
from tests.support.moves import TwoNodes, schema, two_nodes
from tests.support.tenants import (
    CHOICES,
    QUICK,
    TenantWriters,
    assert_once,
    home,
    make_tables,
    neighbour_in,
    new_tenant,
    other_shard,
    rows_of,
)

SHARDS = 4
ROWS = int(os.environ.get("SHARDIDS_FAULTS_ROWS", "1000000" if LONG else "5000"))
KILLS = 20 if LONG else 3
STEPS = ("guard", "copy", "announce", "switch", "settle", "remove", "clean")

LOOKUP = "tenants.name"


class Base(DeclarativeBase):
    pass


class Tenant(Base):
    __tablename__ = "tenants"

    id: Mapped[int] = primary_key()
    name: Mapped[str] = lookup_key(unique=True)


KILLED = """
import os, random, threading
from shardids import tenants
from shardids.catalog.rows import Catalog
def watch(event):
    if isinstance(event, tenants.{kind}) and event.step == {step!r}:
        def die():
            print("dying", flush=True)
            os.kill(os.getpid(), 9)
        threading.Timer({delay_s}, die).start() if {delay_s} else die()
options = tenants.Options(settle_s=0.3)
{call}
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, SHARDS)
        make_tables(nodes, SHARDS)
        refresh_query_node(nodes.catalog)
        yield nodes
        nodes.catalog.close()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def looked_up(nodes: TwoNodes) -> Iterator[Callable[[], object]]:
    """What makes the tenants' names a look-up key, for the test."""

    def create() -> None:
        lookups.create(nodes.catalog, LOOKUP)
        lookups.backfill(nodes.catalog, LOOKUP)

    yield create
    lookups.drop(nodes.catalog, LOOKUP)


def finish(nodes: TwoNodes, name: str, how: str) -> None:
    """Resumes or undoes a move as soon as the lock of its process is gone."""
    deadline = time.monotonic() + 60
    while True:
        try:
            getattr(tenants, how)(nodes.catalog, name, options=QUICK)
            return
        except ClusterConflict as conflict:
            if "by another process" not in conflict.message or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def test_killed_at_random_steps(nodes: TwoNodes, nursery: Nursery, looked_up: Callable[[], object]) -> None:
    """The tenant goes there and back, and is written to all the while."""
    seed = int(os.environ.get("SHARDIDS_FAULTS_SEED", "1"))
    choose = random.Random(seed)
    name = "whale"
    tenant = new_tenant(nodes, name, users=ROWS // 5, photos=4)
    source, other = home(nodes, name), other_shard(nodes, name)
    looked_up()
    kills, began = 0, time.monotonic()
    with TenantWriters(nodes, name, tenant, 2, every_s=0.004) as writers:
        while kills < KILLS:
            target = other if home(nodes, name) == source else source
            step, kind = choose.choice(STEPS), choose.choice(("StepBegun", "StepDone"))
            delay_s = choose.choice((0.0, choose.uniform(0.01, 0.4)))
            call = (
                f"tenants.move(Catalog({nodes.catalog_url!r}), {name!r}, {target},"
                f" tenants.Choices(root={CHOICES.root!r}), options=options, on_event=watch)"
            )
            nursery.start(KILLED.format(kind=kind, step=step, delay_s=delay_s, call=call))
            said = nursery.line()
            assert said in ("dying", "done"), f"{said} (seed {seed}, {kind} {step}, {delay_s})"
            if said == "done":
                # The timer may still have run out at the end.
                continue
            kills += 1
            how = choose.choice(("resume", "abort"))
            if tenants.open_key_moves(nodes.catalog):
                finish(nodes, name, how)
    assert nodes.catalog.placement().unsettled == frozenset()
    total = assert_once(nodes, name, tenant, writers)
    assert total > ROWS
    assert all(one.refusals <= {"SI017"} for one in writers.written)
    there = rows_of(nodes, home(nodes, name), tenant)
    ids = [row[0] for table in there.values() for row in table]
    with nodes.catalog.engine.connect() as connection:
        from shardids.catalog.keys.moved_ids import keys_of_ids

        listed = keys_of_ids(connection, ids)
    layout = nodes.catalog.describe().layout
    sys.stdout.write(
        f"{KILLS} kills in {time.monotonic() - began:.0f} s (seed {seed}); {total:,} rows, each once;"
        f" {len(ids):,} IDs looked for, {len(listed):,} of them in the list\n"
    )
    for id_ in ids:
        assert (listed[id_].shard if id_ in listed else layout.shard_of(id_)) == home(nodes, name)
    with Cluster.connect(nodes.catalog_url, listen=False) as cluster:
        assert cluster.at(lookup=Tenant.name == name).number == home(nodes, name)
    for node in nodes.servers:
        with nodes.connected(node) as connection:
            assert connection.execute("select count(*) from shardids.lease").fetchone() == (0,)
            assert connection.execute("select count(*) from shardids.key_change").fetchone() == (0,)


@pytest.mark.skipif(not LONG, reason="a million rows: SHARDIDS_FAULTS=long")
def test_a_million_rows_under_500_writes_a_second(nodes: TwoNodes) -> None:
    """The key waits for a second at most, and the other keys of the shard do not notice."""
    name = "million"
    tenant, source = new_tenant(nodes, name, users=200_000, photos=4), home(nodes, name)
    neighbour = neighbour_in(nodes, source)
    other = new_tenant(nodes, neighbour)
    with nodes.connected(nodes.catalog.node_of(source).name) as connection:
        for table in ("tenants", "users", "photos"):
            connection.execute(f"analyze {schema(source)}.{table}")
    with (
        TenantWriters(nodes, name, tenant, 4, every_s=0.006) as writers,
        TenantWriters(nodes, neighbour, other, 1, every_s=0.006) as beside,
    ):
        time.sleep(10)
        before = sorted(beside.written[0].took_s)
        beside.written[0].took_s.clear()
        began = time.monotonic()
        written = sum(len(one.took_s) for one in writers.written)
        done = tenants.move(nodes.catalog, name, other_shard(nodes, name), CHOICES)
        made = sum(len(one.took_s) for one in writers.written) - written
        rate = made / (time.monotonic() - began)
        during = sorted(beside.written[0].took_s)
    p99 = [some[int(len(some) * 0.99)] * 1000 for some in (before, during)]
    sys.stdout.write(
        f"{done.seconds:.1f} s, {rate:.0f} writes/s; pause {done.pause_ms:.0f} ms; several shards refused for"
        f" {done.unsettled_ms:.0f} ms; p99 of another key {p99[0]:.1f} ms before, {p99[1]:.1f} ms meanwhile\n"
    )
    assert done.pause_ms is not None
    assert done.pause_ms <= 1000
    assert_once(nodes, name, tenant, writers)
    assert_once(nodes, neighbour, other, beside)
