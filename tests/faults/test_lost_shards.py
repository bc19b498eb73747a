"""``node replace`` where the standby lacks shards: the others live on it, and the lost get a home again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from sqlalchemy import text

from shardids import Cluster, mover
from shardids.errors import BadArgument, ClusterConflict, ShardBusy, ShardLost
from shardids.mover import failover, homes
from shardids.pg.embedded import temporary_servers
from shardids.tables import views
from shardids.watch import doctor
from tests.support.clusters import Nursery, command
from tests.support.killed_moves import finish, killed_move
from tests.support.moves import TwoNodes, schema, two_nodes
from tests.support.replicas import deafen
from tests.support.standbys import standby_of
from tests.support.waiting import wait_for

SHARDS = 26
"""Node b has 13 of them; with the one that moves there, 14."""
PHOTOS = """
    create table {s}.photos (id bigint primary key default {s}.next_id(), title text);
    insert into {s}.photos (title) values ('sea')"""


@pytest.fixture
def nodes(request: pytest.FixtureRequest) -> Iterator[TwoNodes]:
    count = getattr(request, "param", SHARDS)
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, count)
        for node in "ab":
            with nodes.connected(node) as connection:
                for shard in range(count):
                    if nodes.catalog.node_of(shard).name == node:
                        connection.execute(PHOTOS.replace("{s}", schema(shard)))
        yield nodes
        nodes.catalog.close()


@contextmanager
def promoted(nodes: TwoNodes, standby: Any) -> Iterator[psycopg.Connection]:
    """Node b's server is lost, and its standby takes over; the catalog does not know yet."""
    nodes.servers["b"].kill()
    nodes.servers["b"] = standby
    with nodes.connected("b") as connection:
        connection.execute("select pg_promote()")
        yield connection


def take(nodes: TwoNodes, node: str, shard: int, title: str) -> int:
    """Adds a photo on a node; its ID."""
    with nodes.connected(node) as connection:
        row = connection.execute(
            f"insert into {schema(shard)}.photos (title) values (%s) returning id", [title]
        ).fetchone()
    return int(row[0])


def titles(nodes: TwoNodes, shard: int) -> list[str]:
    """The photos of a shard at its home, which takes writes and IDs."""
    home = nodes.catalog.node_of(shard).name
    take(nodes, home, shard, "new")
    with nodes.connected(home) as connection:
        rows = connection.execute(f"select title from {schema(shard)}.photos order by id").fetchall()
    return [title for (title,) in rows]


def accepted(nodes: TwoNodes, standby: Any, *shards: int) -> failover.Replacement:
    return failover.replace_node(nodes.catalog, "b", standby.url(), accept_loss=shards)


def losses(nodes: TwoNodes, shard: int) -> list[tuple[str, str, bool]]:
    """The homes that a shard was given: lost with, home, whether it is completed."""
    with nodes.catalog.engine.connect() as connection:
        rows = connection.execute(
            text(
                "select node, home, completed_at is not null from shardids_catalog.loss"
                " where shard = :shard order by id"
            ),
            {"shard": shard},
        )
        return [tuple(row) for row in rows]


def test_one_shard_that_the_standby_lacks_does_not_hold_up_the_others(nodes: TwoNodes) -> None:
    views.create_query_node(nodes.catalog, node="a", store_password=True)
    with standby_of(nodes.servers["b"]) as standby:
        deafen(nodes.servers["b"], standby)
        mover.move(nodes.catalog, 0, "b")
        last = take(nodes, "b", 0, "given up")
        words = ("node", "replace", "b", "--url", standby.url())

        def replace(*more: str, verbose: bool = False) -> tuple[int, str, str]:
            done = command(*["-v"] * verbose, *words, *more, SHARDIDS_CATALOG=nodes.catalog_url)
            return done.returncode, done.stdout, done.stderr

        with promoted(nodes, standby):
            before = nodes.catalog.placement()
            code, said, _ = replace("--dry-run")
            assert (code, nodes.catalog.placement()) == (3, before)
            assert "would be at" in said
            assert ", with 13 shards\nShard 0 would be lost: it is not there;" in said
            code, said, told = replace(verbose=True)
            assert code == 3
            assert 'Shard 0 is lost: it is not there; node "a" has it as it was when it left there' in said
            assert "--accept-loss 0 --yes" in told
            assert 'WARNING shardids.mover: node "b" is at postgresql://' in told
            assert "may refuse sessions: shard 0 was lost" in told
            for shard in range(13, SHARDS):
                assert titles(nodes, shard) == ["sea", "new"]
            nobody_is_sent_to_it(nodes)
            assert mover.purge(nodes.catalog, [0]) == []
            found = [f for f in doctor.examine(nodes.catalog).findings if f.check == "shard-lost"]
            assert [(f.shards, f.nodes) for f in found] == [((0,), ("b",))]
            assert replace("--accept-loss", "0")[0] == 2
            assert "shard 20 is not lost: nothing to accept" in replace("--accept-loss", "0,20", "--yes")[2]
            code, said, _ = replace("--accept-loss", "0", "--dry-run", "--json")
            assert code == 0
            planned = json.loads(said)
            assert planned["lost"] == []
            assert [(row["shard"], row["home"]) for row in planned["accepted"]] == [(0, "a")]
            with pytest.raises(ShardLost):
                nodes.catalog.node_of(0)
            a_reader_is_named(nodes, standby)
            another_that_gives_it_a_home_is_named(nodes, standby)
            code, said, told = replace("--accept-loss", "0", "--yes")
            assert (code, told) == (0, "")
            assert 'Shard 0 is on node "a": it is not there; node "a" has it as it was' in said
            assert titles(nodes, 0) == ["sea", "new"]
            assert take(nodes, "a", 0, "above all that node b has issued") > last
            assert losses(nodes, 0) == [("b", "a", True)]
            assert replace("--accept-loss", "0", "--yes")[0] == 0
            assert losses(nodes, 0) == [("b", "a", True)]
            assert [move.outcome for move in mover.all_moves(nodes.catalog)] == ["moved"]
            with nodes.connected("a") as home:
                counted = home.execute(
                    "select count(distinct shardids_shard) from shardids_nodes.photos"
                ).fetchone()
            assert counted == (SHARDS,)
            assert nodes.leftovers() == []
            assert {f.check for f in doctor.examine(nodes.catalog).findings} == {"schema-unrecorded"}


def a_reader_is_named(nodes: TwoNodes, standby: Any) -> None:
    """Whoever keeps the old copy locked: the shard is lost still, and nothing is left open."""
    with nodes.connected("a") as reader, pytest.MonkeyPatch.context() as patch:
        patch.setattr(homes, "LOCK_MS", 200)
        reader.execute(f"begin; select count(*) from {schema(0)}.photos")
        with pytest.raises(ClusterConflict, match=f"are locked by process {reader.info.backend_pid} of role"):
            accepted(nodes, standby, 0)
    assert losses(nodes, 0) == []


def another_that_gives_it_a_home_is_named(nodes: TwoNodes, standby: Any) -> None:
    """Two at once: one has the shard's lease."""
    with (
        homes.failover_nodes(nodes.catalog.placement(), nodes.catalog) as engines,
        homes.Homes.opened(nodes.catalog, engines) as other,
        other.leases.held({"a": engines["a"]}, 0),
        pytest.raises(ShardBusy, match=r'being changed by another command \[node "a"\]: failover by'),
    ):
        accepted(nodes, standby, 0)
    assert losses(nodes, 0) == []


def nobody_is_sent_to_it(nodes: TwoNodes) -> None:
    """Not by the name of the shard, not by asking all shards, and no move takes it away."""
    with Cluster.connect(nodes.catalog_url, listen=False) as cluster:
        with pytest.raises(ShardLost, match='shard 0 was lost: the server that took over node "b"'):
            cluster.node_of(0)
        with pytest.raises(ShardLost):
            cluster.placement.all_shards()
    for attempt in (
        lambda: mover.move(nodes.catalog, 0, "a"),
        lambda: mover.resume(nodes.catalog, 0),
        lambda: mover.abort(nodes.catalog, 0),
    ):
        with pytest.raises(ShardLost):
            attempt()
    listed = command("shard", "list", "--json", SHARDIDS_CATALOG=nodes.catalog_url)
    states = {row["shard"]: row["state"] for row in json.loads(listed.stdout)}
    assert (states[0], states[13]) == ("lost", "active")


def test_an_old_copy_that_was_active_once_is_not_taken_for_the_shard(nodes: TwoNodes) -> None:
    """The standby had heard nothing of two moves: its rows are those from before the shard left."""
    with standby_of(nodes.servers["b"]) as standby:
        deafen(nodes.servers["b"], standby)
        mover.move(nodes.catalog, 13, "a")
        take(nodes, "a", 13, "on a")
        mover.move(nodes.catalog, 13, "b", back=True)
        last = take(nodes, "b", 13, "given up")
        with promoted(nodes, standby) as there:
            first = failover.replace_node(nodes.catalog, "b", standby.url())
            assert [(lost.shard, lost.reason, lost.home) for lost in first.lost] == [
                (13, "there is an old copy of it, from before it was moved there", "a")
            ]
            assert first.fenced == (13,)
            with pytest.raises(psycopg.Error, match='has moved to node "a"'):
                there.execute(f"insert into {schema(13)}.photos (title) values ('lost')")
            # What it says of itself by now is no reason to trust it.
            assert [lost.shard for lost in accepted(nodes, standby).lost] == [13]
            assert accepted(nodes, standby, 13).lost == ()
            assert titles(nodes, 13) == ["sea", "on a", "new"]
            assert take(nodes, "a", 13, "above") > last
            assert mover.move(nodes.catalog, 13, "b", back=True).outcome == "moved"
            assert nodes.leftovers() == []


def test_a_shard_of_which_no_copy_is_left_is_made_anew(nodes: TwoNodes) -> None:
    with standby_of(nodes.servers["b"]) as standby:
        deafen(nodes.servers["b"], standby)
        mover.move(nodes.catalog, 0, "b")
        mover.purge(nodes.catalog, [0])
        last = take(nodes, "b", 0, "given up")
        with promoted(nodes, standby) as there:
            planned = failover.replace_node(nodes.catalog, "b", standby.url(), dry_run=True)
            assert planned.lost[0].remains() == "no node has a copy of it, so it would be empty"
            done = accepted(nodes, standby, 0)
            assert (done.shards, nodes.catalog.node_of(0).name) == (14, "b")
            assert there.execute("select shard_0000.next_id()").fetchone()[0] > last
            assert losses(nodes, 0) == [("b", "b", True)]


def test_an_incomplete_copy_is_kept_and_a_restored_shard_found(nodes: TwoNodes) -> None:
    """The one of shard 0 lacks indexes; of shard 1 its owner has a backup."""
    nursery = Nursery()
    with standby_of(nodes.servers["b"]) as standby:
        assert killed_move(nodes, nursery, 0, "copy", kind="StepDone")
        deafen(nodes.servers["b"], standby)
        finish(nodes, 0, mover.resume)
        mover.purge(nodes.catalog, [0])
        assert killed_move(nodes, nursery, 1, "place", kind="StepDone")
        nursery.close()
        with promoted(nodes, standby) as there:
            assert [s.shard for s in accepted(nodes, standby, 0).lost] == [1]
            kept = there.execute("select title from shard_0000_left_1.photos").fetchall()
            assert kept == [("sea",)]
            assert there.execute("select count(*) from pg_subscription").fetchone() == (0,)
            with pytest.raises(ShardLost):
                finish(nodes, 1, mover.abort)
            there.execute("create schema shard_0001")
            there.execute("create table shard_0001.photos (title text)")
            for sequence in ("id_counter", "id_offset minvalue -9223372036854775808 start -1"):
                there.execute(f"create sequence shard_0001.{sequence}")
            there.execute("select shardids.activate(1)")
            assert accepted(nodes, standby).lost == ()
            assert nodes.catalog.node_of(1).name == "b"
            assert finish(nodes, 1, mover.abort).outcome == "moved"
            assert nodes.leftovers() == []


@pytest.mark.parametrize("nodes", [2], indirect=True)
def test_a_server_without_any_shard_of_the_node_is_refused(nodes: TwoNodes) -> None:
    with standby_of(nodes.servers["b"]) as standby:
        mover.move(nodes.catalog, 1, "a")
        deafen(nodes.servers["b"], standby)
        mover.move(nodes.catalog, 0, "b")
        with promoted(nodes, standby):
            before = nodes.catalog.placement()
            with pytest.raises(
                ClusterConflict, match=r'has no shard of node "b" as it was; shard 0: it is not there'
            ):
                failover.replace_node(nodes.catalog, "b", standby.url())
            assert nodes.catalog.placement() == before
            assert accepted(nodes, standby, 0).shards == 0
            assert titles(nodes, 0) == ["sea", "new"]


DYING = """
import os
from shardids.catalog.rows import Catalog
from shardids.mover import failover, homes
from shardids.mover.homes import subscriptions
def die(*_, **__):
    print("dying", flush=True)
    os.kill(os.getpid(), 9)
def then_die(work):
    def done(*arguments, **options):
        work(*arguments, **options)
        die()
    return done
def committed(record):
    def done(connection, *arguments, **options):
        record(connection, *arguments, **options)
        connection.commit()
        die()
    return done
{patch}
failover.replace_node(Catalog({url!r}), "b", {standby!r}, accept_loss=[{shard}])
"""
KILLS = (
    "failover.point_node = die",
    "homes.Homes.give = die",
    "subscriptions.unsubscribe = then_die(subscriptions.unsubscribe)",
    "homes._activate = then_die(homes._activate)",
    "homes.accept_loss = committed(homes.accept_loss)",
    "subscriptions.unpublish = die",
    "homes.complete_loss = die",
)


def test_killed_anywhere_it_is_completed_when_it_is_run_again(nodes: TwoNodes) -> None:
    """A shard for each place to be killed at: each has one home at the end, with the rows that are left."""
    nursery = Nursery()
    shards = range(len(KILLS))
    with standby_of(nodes.servers["b"]) as standby:
        deafen(nodes.servers["b"], standby)
        for shard in shards:
            mover.move(nodes.catalog, shard, "b")
        last = {shard: take(nodes, "b", shard, "given up") for shard in shards}
        with promoted(nodes, standby) as there:
            for shard, patch in zip(shards, KILLS, strict=True):
                nursery.start(
                    DYING.format(patch=patch, url=nodes.catalog_url, standby=standby.url(), shard=shard)
                )
                assert nursery.line() == "dying", patch
                at_most_one_home(nodes, shard)
                if losses(nodes, shard):
                    an_unfinished_home_keeps_its_lease(nodes, shard)
                done = accepted(nodes, standby, shard)
                assert shard not in [lost.shard for lost in done.lost], patch
                assert nodes.catalog.node_of(shard).name == "a"
                assert titles(nodes, shard) == ["sea", "new"], patch
                assert take(nodes, "a", shard, "above") > last[shard]
                assert losses(nodes, shard) == [("b", "a", True)]
                assert mover.open_moves(nodes.catalog) == []
            assert there.execute("select count(*) from shardids.shard where id < 13").fetchone() == (0,)
            assert nodes.leftovers() == []
    nursery.close()


def an_unfinished_home_keeps_its_lease(nodes: TwoNodes, shard: int) -> None:
    """No other command changes the shard; doctor names it, and the command that completes it."""
    assert losses(nodes, shard) == [("b", "a", False)]
    with pytest.raises(ShardBusy, match=f"shard {shard}, which was lost, is kept by a command"):
        mover.move(nodes.catalog, shard, "b")
    wait_for(lambda: unfinished(nodes), "the session of the killed process ends")
    (found,) = unfinished(nodes)
    assert found.shards == (shard,)
    assert "node replace b --url" in found.commands[0].text


def unfinished(nodes: TwoNodes) -> list[doctor.Finding]:
    found = doctor.examine(nodes.catalog, ["shard-lost"]).findings
    return [one for one in found if "was interrupted" in one.what]


def at_most_one_home(nodes: TwoNodes, shard: int) -> None:
    """A shard takes writes on no node but the one where it is placed."""
    try:
        home = nodes.catalog.node_of(shard).name
    except ShardLost:
        home = None
    for node in "ab":
        with nodes.connected(node) as connection:
            active = "select count(*) from shardids.shard where id = %s and state = 'active'"
            assert connection.execute(active, [shard]).fetchone() == (0,) or node == home


def test_what_cannot_be_accepted_is_refused(nodes: TwoNodes) -> None:
    with standby_of(nodes.servers["b"]) as standby:
        deafen(nodes.servers["b"], standby)
        mover.move(nodes.catalog, 0, "b")
        with nodes.connected("a") as home:
            home.execute("select shardids.activate(0)")
        with promoted(nodes, standby):
            before = nodes.catalog.placement()
            with pytest.raises(ClusterConflict, match='shard 0 is active on node "a", although'):
                accepted(nodes, standby, 0)
            assert nodes.catalog.placement() == before
            words = ("node", "replace", "b", "--url", standby.url(), "--yes", "--accept-loss")
            refused = command(*words, "99", SHARDIDS_CATALOG=nodes.catalog_url)
            assert (refused.returncode, BadArgument.sqlstate) == (2, "SI007")
