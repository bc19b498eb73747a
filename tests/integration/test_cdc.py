"""Change capture: slots on all nodes, and a consumer that sees each change once while shards move."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from itertools import cycle, islice

import psycopg
import pytest

from shardids import mover
from shardids.beside import capture
from shardids.pg.embedded import temporary_servers
from shardids.watch import doctor
from tests.support.capture import Change, Consumer, read
from tests.support.clusters import command_here
from tests.support.moves import TwoNodes, Writers, schema, two_nodes
from tests.support.standbys import Standby, standby_of
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, 8)
        yield nodes
        nodes.catalog.close()


@pytest.fixture(autouse=True)
def _dropped(nodes: TwoNodes) -> Iterator[None]:
    yield
    capture.drop(nodes.catalog)


@pytest.fixture
def new_enough(nodes: TwoNodes) -> None:
    with nodes.connected("a") as db:
        if db.info.server_version < 160000:
            pytest.skip("PostgreSQL 14 and 15 are refused: test_servers_without_origins_are_refused")


def run(nodes: TwoNodes, *words: str) -> tuple[int, str, str]:
    ran = command_here("cdc", *words, SHARDIDS_CATALOG=nodes.catalog_url)
    return ran.returncode, ran.stdout, ran.stderr


def test_servers_without_origins_are_refused(nodes: TwoNodes) -> None:
    with nodes.connected("a") as db:
        major = db.info.server_version // 10000
    code, out, err = run(nodes, "create")
    if major < 16:
        assert (code, out) == (1, "")
        assert f"has PostgreSQL {major}, whose pgoutput has no option origin" in err
        assert nodes.leftovers() == []
    else:
        assert code == 0, err


@pytest.mark.usefixtures("new_enough")
def test_each_node_gets_one_publication_and_one_slot(nodes: TwoNodes) -> None:
    code, out, err = run(nodes, "create", "--dry-run")
    assert (code, err.count("Would create slot")) == (0, 2)
    assert nodes.leftovers() == []
    assert run(nodes, "status")[0] == 3
    for _ in range(2):
        code, out, err = run(nodes, "create")
        assert code == 0, err
    slots = {name for name in nodes.leftovers() if name != capture.PUBLICATION}
    assert len(slots) == 2
    assert nodes.leftovers().count(capture.PUBLICATION) == 2
    connectors = json.loads(out)
    assert {one["config"]["slot.name"] for one in connectors} == slots
    for one in connectors:
        assert one["config"]["slot.stream.params"] == "origin=none"
        assert re.fullmatch(one["config"]["schema.include.list"], "shard_0005")
        assert re.fullmatch(one["config"]["table.exclude.list"], "shard_0005.shardids_version")
        topic = f"{one['name']}.shard_0005.users"
        assert re.sub(one["config"]["transforms.shards.regex"], r"shardids.\1", topic) == "shardids.users"
    code, out, err = run(nodes, "status", "--json")
    assert (code, err) == (0, "")
    assert {one["slot"] for one in json.loads(out)} == slots
    assert all(one["publication"] and one["origin"] == "unknown" for one in json.loads(out))
    found = {finding.check for finding in doctor.examine(nodes.catalog).findings}
    assert not found & {"leftover-slot", "leftover-publication", "slot-inactive", "capture-incomplete"}
    with nodes.connected("b") as db:
        db.execute("select pg_drop_replication_slot(%s)", [capture.status(nodes.catalog)[1].slot])
    assert 'node "b" has no slot' in run(nodes, "status")[2]
    (broken,) = (one for one in doctor.examine(nodes.catalog).findings if one.check == "capture-incomplete")
    assert broken.nodes == ("b",)
    # As after a run that was interrupted between the nodes.
    assert run(nodes, "create")[0] == 0
    assert run(nodes, "status")[0] == 0
    # PostgreSQL can't decode what was written while there was no publication.
    with nodes.connected("b") as db:
        db.execute("drop publication shardids_cdc")
    for word in ("create", "status"):
        assert "publication shardids_cdc was dropped" in run(nodes, word)[2]
    code, out, _ = run(nodes, "drop", "--yes")
    assert (code, out.count("Dropped slot")) == (0, 2)
    assert run(nodes, "drop", "--yes")[:2] == (0, "There is nothing to drop\n")
    assert nodes.leftovers() == []


@pytest.mark.usefixtures("new_enough")
def test_a_table_without_a_key_is_refused_before_anything_is_made(nodes: TwoNodes) -> None:
    with nodes.connected("b") as db:
        db.execute("create table public.keyless (body text)")
        try:
            code, _, err = run(nodes, "create")
            assert code == 1
            assert 'node "b" has tables without a replica identity: public.keyless' in err
            assert nodes.leftovers() == []
            db.execute("alter table public.keyless replica identity full")
            assert run(nodes, "create")[0] == 0
        finally:
            db.execute("drop table public.keyless")


@pytest.mark.usefixtures("new_enough")
@pytest.mark.parametrize(("origin", "code"), [("", 3), (", origin 'any'", 3), (", origin 'none'", 0)])
def test_status_sees_what_a_connected_consumer_asked_for(nodes: TwoNodes, origin: str, code: int) -> None:
    assert run(nodes, "create")[0] == 0
    (slot,) = (one.slot for one in capture.status(nodes.catalog) if one.node == "a")
    start = (
        f"START_REPLICATION SLOT {slot} LOGICAL 0/0"
        f" (proto_version '1', publication_names '{capture.PUBLICATION}'{origin})"
    )
    with closing(
        psycopg.connect(nodes.servers["a"].url(), autocommit=True, replication="database")
    ) as consumer:
        consumer.pgconn.send_query(start.encode())
        wait_for(lambda: capture.status(nodes.catalog)[0].pid is not None, "the consumer is connected")
        found, out, err = run(nodes, "status")
        assert (found, "did not ask for origin = none" in err) == (code, code == 3), out
        assert "a consumer reads slot" in run(nodes, "drop", "--yes")[2]
    wait_for(lambda: capture.status(nodes.catalog)[0].pid is None, "the consumer is gone")


def replay(changes: list[Change], table: str) -> dict[int, dict[str, str | None]]:
    """The rows that the changes make; each must be possible: no insert twice, no change before its insert."""
    rows: dict[int, dict[str, str | None]] = {}
    turns: Counter[int] = Counter()
    for change in changes:
        if change.table != table:
            continue
        id_ = int(change.row["id"] or 0)
        if change.kind == "insert":
            assert id_ not in rows, f"{id_} twice"
            rows[id_] = change.row
        elif change.kind == "update":
            turn = int((change.row["name"] or "").rpartition("/")[2])
            assert turn > turns[id_], f"{id_}: {turn} after {turns[id_]}"
            turns[id_] = turn
            rows[id_] |= change.row
        else:
            del rows[id_]
    return rows


@pytest.mark.usefixtures("new_enough")
@pytest.mark.parametrize("moves", [2, pytest.param(10, marks=pytest.mark.long)])
def test_each_change_comes_once_and_in_order_while_a_shard_moves(nodes: TwoNodes, moves: int) -> None:
    shard = nodes.new_shard()
    s = schema(shard)
    assert run(nodes, "create")[0] == 0
    with nodes.connected(nodes.catalog.node_of(shard).name) as db:
        ids = f"select id from {s}.users union all select id from {s}.photos"
        before = {id_ for (id_,) in db.execute(ids).fetchall()}
    with nodes.connected("b") as plain:
        plain.execute("select pg_create_logical_replication_slot('plain', 'pgoutput')")
        with closing(Consumer(nodes)) as consumer, Writers(nodes, shard, every_s=0.002) as writers:
            for target in islice(cycle("ba"), moves):
                seen = writers.rows
                mover.move(nodes.catalog, shard, target, back=True)
                consumer.poll()
                wait_for(lambda seen=seen: writers.rows > seen + 20, "all write on")
            mover.move(nodes.catalog, shard, "b", back=True)
            drained = command_here("rebalance", "--drain", "b", SHARDIDS_CATALOG=nodes.catalog_url)
            assert drained.returncode == 0, drained.stderr
            writers.stop()
            consumer.poll()
            assert consumer.waiting() == []
            assert consumer.copies == 0
            merged = consumer.merged
        copied = [one for one in read(plain, "plain", "any") if one.table == f"{s}.users"]
        plain.execute("select pg_drop_replication_slot('plain')")
    # A consumer that does not ask for origin = none sees the rows of the copies again.
    again = Counter(one.row["id"] for one in copied if one.kind == "insert")
    assert max(again.values()) > 1
    with nodes.connected(nodes.catalog.node_of(shard).name) as db:
        users = dict(db.execute(f"select id, name from {s}.users").fetchall())
        photos = {id_ for (id_,) in db.execute(f"select id from {s}.photos").fetchall()}
    new = [one for one in merged if int(one.row["id"] or 0) not in before]
    found = replay(new, f"{s}.users")
    assert {id_: row["name"] for id_, row in found.items()} == {
        id_: name for id_, name in users.items() if id_ not in before
    }
    assert found
    assert replay(new, f"{s}.photos").keys() == photos - before
    written = sum(len(one.users) + len(one.deleted) for one in writers.written)
    assert sum(one.kind == "insert" and one.table == f"{s}.users" for one in merged) == written


SYNCHRONISING = {
    "primary_slot_name": "standby",
    "hot_standby_feedback": "on",
    "sync_replication_slots": "on",
}
"""Settings of a standby that keeps the slots of its primary, as docs/how-to/capture-changes.md lists them."""


@pytest.fixture
def with_standby(new_enough: None) -> Iterator[tuple[TwoNodes, Standby]]:
    """Two nodes, and a standby of node b that keeps its slots."""
    with temporary_servers(2) as servers, standby_of(servers[1]) as standby:
        nodes = two_nodes(servers, 2)
        with nodes.connected("b") as primary, psycopg.connect(standby.url(), autocommit=True) as db:
            if primary.info.server_version < 170000:
                pytest.skip("PostgreSQL 16 does not synchronise slots")
            primary.execute("select pg_create_physical_replication_slot('standby')")
            for name, value in SYNCHRONISING.items():
                db.execute(f"alter system set {name} = '{value}'")
            primary.execute("alter system set synchronized_standby_slots = 'standby'")
            for each in (db, primary):
                each.execute("select pg_reload_conf()")
        yield nodes, standby
        nodes.catalog.close()


@pytest.mark.long
def test_the_stream_goes_on_from_a_promoted_standby(with_standby: tuple[TwoNodes, Standby]) -> None:
    nodes, standby = with_standby
    table = f"{schema(1)}.notes"
    more = f"insert into {table} (n) select n from generate_series(1, 200) n"
    assert run(nodes, "create")[0] == 0
    (slot,) = (one.slot for one in capture.status(nodes.catalog) if one.node == "b")
    merged, position = list[Change](), ""
    with nodes.connected("b") as primary, psycopg.connect(standby.url(), autocommit=True) as db:
        key = f"id bigint primary key default {schema(1)}.next_id()"
        primary.execute(f"create table {table} ({key}, n integer)")

        def is_there() -> bool:
            primary.execute("select pg_log_standby_snapshot()")
            merged.extend(read(primary, slot))
            query = (
                "select count(*) from pg_replication_slots where slot_name = %s and synced and not temporary"
            )
            return db.execute(query, [slot]).fetchone() == (1,)

        wait_for(is_there, "the standby has the slot")
        for _ in range(5):
            primary.execute(more)
            merged += read(primary, slot)
        query = "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s"
        (position,) = primary.execute(query, [slot]).fetchone()
        primary.execute(more)
        nodes.servers["b"].kill()
        db.execute("select pg_promote()")
        words = ("node", "replace", "b", "--url", standby.url())
        replaced = command_here(*words, SHARDIDS_CATALOG=nodes.catalog_url)
        assert replaced.returncode == 0, replaced.stderr
        code, out, err = run(nodes, "status")
        assert (code, slot in out) == (0, True), (out, err)
        db.execute(more)
        # As START_REPLICATION does with the position that a consumer has stored.
        db.execute("select pg_replication_slot_advance(%s, %s)", [slot, position])
        merged += read(db, slot)
        ids = Counter(int(one.row["id"] or 0) for one in merged if one.table == table)
        assert ids == Counter(id_ for (id_,) in db.execute(f"select id from {table}"))
        assert len(ids) >= 1200
