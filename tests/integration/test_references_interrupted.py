"""Commands on reference tables that are killed at a step: repeated or repaired, all nodes are alike."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from shardids import mover
from shardids.errors import ClusterConflict, ReferenceRefused
from shardids.pg.embedded import EmbeddedServer, temporary_server
from shardids.tables import references
from shardids.watch import doctor
from tests.support.clusters import Nursery
from tests.support.faults import scaled
from tests.support.lengths import long, sampled
from tests.support.referring import Country, Nodes, database, nodes_at

pytestmark = pytest.mark.long

MAKING = [
    ("tables", "guard", 1),
    ("tables", "copy_definitions", 1),
    ("tables", "copy_definitions", 2),
    ("following", "unsubscribe", 1),
    ("following", "flush", 1),
    ("following", "_read", 1),
    ("following", "_write", 2),
    ("following", "_subscribe", 1),
    ("following", "_subscribe", 2),
]
DELETING = [
    ("deleting", "_begin", 1),
    ("deleting", "await_all", 1),
    *(("deleting", "let_through", n) for n in (1, 2, 3)),
    *(("deleting", "_delete_in", n) for n in (2, 3)),
]
MOVING = [
    ("moving", "_begin", 1),
    ("moving", "_close", 1),
    ("moving", "_require_same", 1),
    *(("moving", "detach", n) for n in (1, 2)),
    ("moving", "publish", 1),
    *(("moving", "attach", n) for n in (1, 2)),
    ("moving", "clear", 1),
    ("moving", "guard", 5),
    ("moving", "guard", 7),
]
DROPPING = [("tables", "guard", 1), ("tables", "await_all", 1), ("tables", "detach", 1)]


def some(steps: list[tuple[str, str, int]]) -> list[Any]:
    """One of three steps is usual."""
    return sampled([pytest.param(step) for step in steps], every=3)


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with temporary_server() as server:
        yield server


@pytest.fixture(scope="module")
def nodes(server: EmbeddedServer) -> Iterator[Nodes]:
    with nodes_at({name: database(server, f"node_{name}") for name in "abc"}) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery("import shardids.tables.references")
    yield nursery
    nursery.close()


def killed(
    nodes: Nodes, nursery: Nursery, work: str, step: tuple[str, str, int], by: signal.Signals = signal.SIGKILL
) -> int:
    """Runs ``references.<work>`` in a process that gets a signal after so many calls of a function."""
    url, (module, function, call) = nodes.environment["SHARDIDS_CATALOG"], step
    process = nursery.start(
        "import os\n"
        "from importlib import import_module\nfrom shardids.tables import references\n"
        "from shardids.replication import barrier\n"
        "barrier._BEAT_S, barrier._LOST_AFTER = 0.5, '2s'\n"
        f"module = import_module('shardids.tables.references.{module}')\n"
        f"whole, calls = module.{function}, []\n"
        "def dying(*given, **more):\n"
        "  result = whole(*given, **more)\n"
        "  calls.append(1)\n"
        f"  if len(calls) == {call}:\n"
        "    print('dying', flush=True)\n"
        f"    os.kill(os.getpid(), {int(by)})\n"
        "  return result\n"
        f"module.{function} = dying\n"
        f"references.{work.replace('catalog', f'Catalog({url!r})', 1)}"
    )
    assert nursery.line() == "dying"
    return process


def finished(work: Callable[[], Any]) -> Any:
    """Repeats work as soon as the lock of who was killed is gone."""
    deadline = time.monotonic() + 40
    while True:
        try:
            return work()
        except ClusterConflict as error:
            if "another process" not in error.message or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def assert_alike(nodes: Nodes) -> None:
    assert nodes.codes("a") == nodes.codes("b") == nodes.codes("c")
    assert nodes.dangling() == []
    assert references.repair(nodes.catalog) == []
    assert [one.state for one in references.status(nodes.catalog)] == ["is written to", "follows", "follows"]
    found = [
        one.check for one in doctor.examine(nodes.catalog).findings if one.check.startswith("reference-")
    ]
    assert found == []


@pytest.mark.parametrize("step", some(scaled([MAKING[1], MAKING[4], MAKING[8]], MAKING)))
def test_a_table_whose_making_was_killed(nodes: Nodes, nursery: Nursery, step: tuple[str, str, int]) -> None:
    with nodes.connected("a") as connection:
        connection.execute("create table shardids_ref.units (code text primary key)")
        connection.execute("insert into shardids_ref.units values ('m'), ('s')")
    killed(nodes, nursery, "create_table(catalog, 'units')", step)
    assert finished(lambda: [one.error for one in references.repair(nodes.catalog) if one.error]) == []
    references.create_table(nodes.catalog, "units")
    for node in "abc":
        assert nodes.codes(node, "units") == ["m", "s"]
    assert_alike(nodes)
    references.drop_table(nodes.catalog, "units")


@pytest.mark.parametrize("step", scaled([DROPPING[0]], DROPPING[:2]))
def test_a_table_whose_dropping_was_killed(
    nodes: Nodes, nursery: Nursery, step: tuple[str, str, int]
) -> None:
    with nodes.connected("a") as connection:
        connection.execute("create table shardids_ref.units (code text primary key)")
    references.create_table(nodes.catalog, "units")
    killed(nodes, nursery, "drop_table(catalog, 'units')", step)
    with pytest.raises(ClusterConflict, match="is being dropped"):
        finished(lambda: references.create_table(nodes.catalog, "units"))
    references.drop_table(nodes.catalog, "units")
    assert_alike(nodes)


@pytest.mark.parametrize("how", ["repeated", long("repaired")])
@pytest.mark.parametrize("step", some(scaled([MOVING[1], MOVING[6], MOVING[8]], MOVING)))
def test_a_move_of_the_writer_that_was_killed(
    nodes: Nodes, nursery: Nursery, how: str, step: tuple[str, str, int]
) -> None:
    killed(nodes, nursery, "move_writer(catalog, 'b')", step)
    shard = nodes.shard_on("c")
    with pytest.raises(ReferenceRefused, match='writer of reference tables is being moved to node "b"'):
        mover.move(nodes.catalog, shard, "a")
    with pytest.raises(ClusterConflict, match='writer to node "b" was interrupted'):
        finished(lambda: references.delete_row(nodes.catalog, "countries", ["FR"]))
    (found,) = doctor.examine(nodes.catalog, ["reference-unfinished"]).findings
    assert 'writer to node "b" was interrupted' in found.what
    if how == "repeated":
        assert references.move_writer(nodes.catalog, "b") in "ab"
        assert_written_to(nodes, "b")
    else:
        assert [one.error for one in references.repair(nodes.catalog) if one.error] == []
        assert_written_to(nodes, "b" if step[1] in ("clear", "guard") and step != MOVING[9] else "a")
    references.move_writer(nodes.catalog, "a")
    assert_written_to(nodes, "a")


def assert_written_to(nodes: Nodes, node: str) -> None:
    """Its writes arrive, those on other nodes are refused, and nothing of the other direction is left."""
    assert references.status(nodes.catalog)[0].node == node
    nodes.cluster.refresh()
    nodes.write(Country(code="MV", name=f"written on {node}"))
    assert_alike(nodes)
    for one in "abc":
        with nodes.connected(one) as connection:
            published = connection.execute("select count(*) from pg_publication").fetchone()
            assert published == (int(one == node),)
            query = "select name from shardids_ref.countries where code = 'MV'"
            assert connection.execute(query).fetchone() == (f"written on {node}",)
            if one != node:
                with pytest.raises(psycopg.Error, match=f'is written to on node "{node}" alone'):
                    connection.execute("update shardids_ref.countries set name = 'x'")
            slots = connection.execute(
                "select count(*) from pg_replication_slots where database = current_database()"
            )
            assert slots.fetchone() == (2 * int(one == node),)
    references.delete_row(nodes.catalog, "countries", ["MV"])


@pytest.mark.parametrize("step", some([MOVING[2], MOVING[7], MOVING[8]]))
def test_a_node_that_is_down_keeps_no_writer_closed(
    nodes: Nodes, nursery: Nursery, step: tuple[str, str, int]
) -> None:
    killed(nodes, nursery, "move_writer(catalog, 'b')", step)
    writer = "b" if step == MOVING[8] else "a"
    with nodes.connected(writer) as connection:
        connection.execute("alter database node_c allow_connections false")
        try:
            connection.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = 'node_c'"
            )
            (failed,) = [one for one in finished(lambda: references.repair(nodes.catalog)) if one.error]
            assert (failed.node, "node_c" in failed.error) == ("c", True)
            connection.execute("update shardids_ref.countries set name = 'Allemagne' where code = 'DE'")
        finally:
            connection.execute("alter database node_c allow_connections true")
    assert [one.error for one in references.repair(nodes.catalog) if one.error] == []
    assert_written_to(nodes, writer)
    references.move_writer(nodes.catalog, "a")
    assert_written_to(nodes, "a")


def test_a_move_whose_readers_can_not_turn_is_undone(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardids.tables.references.following.LOCK_TIMEOUT", "300ms")
    with nodes.connected("c") as connection, connection.transaction():
        connection.execute("lock table shardids_ref.countries in share mode")
        with pytest.raises(ClusterConflict, match='"a" is still the writer of reference tables') as refused:
            references.move_writer(nodes.catalog, "b")
    assert "shardids reference repair" in refused.value.hint
    with nodes.connected("a") as connection:
        connection.execute("update shardids_ref.countries set name = 'Allemagne' where code = 'DE'")
        own = """select count(*) from pg_subscription
                 where subdbid = (select oid from pg_database where datname = current_database())"""
        assert connection.execute(own).fetchone() == (0,)
    assert [one.error for one in references.repair(nodes.catalog)] == ["", ""]
    assert_written_to(nodes, "a")


@pytest.mark.parametrize("how", ["repeated", "repaired", "referred to"])
@pytest.mark.parametrize("step", some(scaled([DELETING[0], DELETING[4]], DELETING)))
def test_a_deletion_that_was_killed(
    nodes: Nodes, nursery: Nursery, how: str, step: tuple[str, str, int]
) -> None:
    nodes.write(Country(code="ZZ", name="nowhere"))
    followed = nodes.following()
    killed(nodes, nursery, "delete_row(catalog, 'countries', ['ZZ'])", step)
    if how == "repeated":
        finished(lambda: references.delete_row(nodes.catalog, "countries", ["ZZ"]))
        assert "ZZ" not in nodes.codes("a")
    elif how == "repaired":
        finished(lambda: references.repair(nodes.catalog))
        assert "ZZ" in nodes.codes("a")
    else:
        refused_when_referred_to(nodes)
    assert nodes.following() == followed
    assert_alike(nodes)


def refused_when_referred_to(nodes: Nodes) -> None:
    """The writer's shards come to refer to the row, which other nodes have deleted already."""
    users = f"shard_{nodes.shard_on('a'):04}.users"
    with nodes.connected("a") as connection:
        connection.execute(f"insert into {users} (name, country_code) values ('late', 'ZZ')")
        with pytest.raises(ClusterConflict, match='on node "a" refer to it'):
            finished(lambda: references.delete_row(nodes.catalog, "countries", ["ZZ"]))
        assert "ZZ" in nodes.codes("c")
        connection.execute(f"delete from {users} where name = 'late'")


@pytest.mark.parametrize("step", scaled([DELETING[4]], DELETING))
def test_a_deletion_that_sleeps_and_wakes_up_deletes_nothing_more(
    nodes: Nodes, nursery: Nursery, step: tuple[str, str, int]
) -> None:
    """Another process has given the row back meanwhile, and a row has come to refer to it."""
    nodes.write(Country(code="ZZ", name="nowhere"))
    process = killed(nodes, nursery, "delete_row(catalog, 'countries', ['ZZ'])", step, signal.SIGSTOP)
    users = f"shard_{nodes.shard_on('b'):04}.users"
    with nodes.connected("b") as connection:
        try:
            finished(lambda: references.repair(nodes.catalog))
            connection.execute(f"insert into {users} (name, country_code) values ('late', 'ZZ')")
        finally:
            os.kill(process, signal.SIGCONT)
        said = nursery.line()
        assert said != "done", said
        assert all("ZZ" in nodes.codes(node) for node in "abc")
        assert_alike(nodes)
        connection.execute(f"delete from {users} where name = 'late'")
