"""``node replace``: which servers may take a lost node's place, and what is mended on the way."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator

import psycopg
import pytest
from psycopg import sql
from sqlalchemy.engine import URL, make_url

from shardids import mover
from shardids.catalog.topology import Node
from shardids.errors import ClusterConflict, ConnectionFailed, MoveRefused
from shardids.mover import failover
from shardids.pg.embedded import temporary_servers
from shardids.tables import views
from shardids.watch import doctor
from tests.conftest import MakeDatabase, dsn, found_cluster
from tests.support.clusters import Nursery, catalog_at, command, connected, everything
from tests.support.killed_moves import finish, killed_move
from tests.support.moves import TwoNodes, two_nodes
from tests.support.replicas import deafen
from tests.support.standbys import standby_of
from tests.support.waiting import wait_for

PHOTOS = """
    create table {s}.photos (id bigint primary key default {s}.next_id(), title text);
    insert into {s}.photos (title) values ('sea')"""
SHARDS = 4
MOVED, STAYS = 2, 3
"""Shards of node b."""


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    """Four shards with photos, and the query node is node a."""
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, SHARDS)
        for shard in range(SHARDS):
            with nodes.connected(nodes.catalog.node_of(shard).name) as connection:
                connection.execute(PHOTOS.replace("{s}", f"shard_{shard:04}"))
        views.create_query_node(nodes.catalog, node="a", store_password=True)
        yield nodes
        nodes.catalog.close()


def test_a_shard_that_had_moved_away_unnoticed_is_stopped_there(nodes: TwoNodes) -> None:
    with standby_of(nodes.servers["b"]) as standby:
        deafen(nodes.servers["b"], standby)
        mover.move(nodes.catalog, MOVED, "a")
        with nodes.connected("a") as home:
            home.execute(f"insert into shard_{MOVED:04}.photos (title) values ('after the move')")
        nodes.servers["b"].kill()
        words = ("node", "replace", "b", "--url", standby.url())
        refused = command(*words, SHARDIDS_CATALOG=nodes.catalog_url)
        assert refused.returncode == 1
        assert "is a standby still\nPromote it first: select pg_promote()" in refused.stderr
        with psycopg.connect(standby.url(), autocommit=True) as promoted:
            promoted.execute("select pg_promote()")
            states = "select id, state, moved_to from shardids.shard order by id"
            unaware = promoted.execute(states).fetchall()
            assert unaware == [(MOVED, "active", None), (STAYS, "active", None)]
            planned = command(*words, "--dry-run", SHARDIDS_CATALOG=nodes.catalog_url)
            assert planned.returncode == 0, planned.stderr
            assert f"Would fence shard {MOVED} there" in planned.stderr
            assert promoted.execute(states).fetchall() == unaware
            done = command(*words, SHARDIDS_CATALOG=nodes.catalog_url)
            assert done.returncode == 0, done.stderr
            assert done.stderr == (
                f"Fenced shard {MOVED} there: it had moved away, and the standby had not heard of it\n"
            )
            assert promoted.execute(states).fetchall() == [(MOVED, "moved", "a"), (STAYS, "active", None)]
            for statement in (
                f"insert into shard_{MOVED:04}.photos (title) values ('lost')",
                f"update shard_{MOVED:04}.photos set title = 'lost'",
                f"select shard_{MOVED:04}.next_id()",
            ):
                with pytest.raises(psycopg.Error, match='has moved to node "a"') as caught:
                    promoted.execute(statement)
                assert caught.value.sqlstate == "SI003"
            promoted.execute(f"insert into shard_{STAYS:04}.photos (title) values ('after the promotion')")
        with nodes.connected("a") as home:
            home.execute(f"insert into shard_{MOVED:04}.photos (title) values ('goes on')")
            # The query node reads the promoted standby.
            counted = "select shardids_shard, count(*) from shardids_nodes.photos group by 1 order by 1"
            assert home.execute(counted).fetchall() == [(0, 1), (1, 1), (MOVED, 3), (STAYS, 2)]
        found = doctor.examine(nodes.catalog).findings
        wrong = [(f.check, f.shards) for f in found if f.check != "schema-unrecorded"]
        assert wrong == [("old-copy", (MOVED,))]
        assert [copy.node for copy in mover.purge(nodes.catalog, [MOVED])] == ["b"]


Blank = Callable[[], URL]
Pair = tuple[URL, URL]


@pytest.fixture
def pair(blank_database: Blank, make_database: MakeDatabase) -> Pair:
    """A cluster of 8 shards, the lower half on node a, which holds the catalog, the rest on b."""
    a, b = blank_database(), make_database()
    found_cluster(a, {"a": a, "b": b}, 8)
    return a, b


def lose(database: URL, admin: psycopg.Connection) -> None:
    """The node's address leads nowhere from now on."""
    admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(str(database.database))))


def test_a_copy_is_refused_until_it_is_activated(
    pair: Pair, make_database: MakeDatabase, admin: psycopg.Connection
) -> None:
    a, b = pair
    copy = make_database(str(b.database))
    with catalog_at(a) as catalog:
        with pytest.raises(ClusterConflict, match=r'the server of node "b" at .* still takes writes'):
            failover.replace_node(catalog, "b", dsn(copy))
        lose(b, admin)
        before = everything(a, copy)
        with pytest.raises(
            ClusterConflict, match=r"is a copy .* not its standby, and shards 4-7 not activated"
        ) as caught:
            failover.replace_node(catalog, "b", dsn(copy))
        assert everything(a, copy) == before
        activation = shlex.split(caught.value.hint.partition(": ")[2].partition(". ")[0])
        assert activation[:3] == ["shardids", "shard", "activate"]
        done = command(*activation[1:], "--yes", SHARDIDS_CATALOG=dsn(a))
        assert done.returncode == 0, done.stderr
        assert failover.replace_node(catalog, "b", dsn(copy)).shards == 4
        assert f"/{copy.database}" in catalog.node_of(5).url
    with connected(copy) as connection:
        connection.execute("select shard_0005.next_id()")


def test_what_is_not_the_node_is_refused(
    pair: Pair, make_database: MakeDatabase, admin: psycopg.Connection
) -> None:
    a, b = pair
    empty, other = make_database(), make_database()
    found_cluster(other, {"b": other}, 8)
    lose(b, admin)
    with catalog_at(a) as catalog:
        before = everything(a, empty, other)
        for url, error, words in (
            (dsn(empty), ClusterConflict, 'is no node, not node "b" of this cluster'),
            (dsn(a), ClusterConflict, 'is node "a" of cluster .*, not node "b" of this cluster'),
            (dsn(other), ClusterConflict, 'is node "b" of cluster .*, not node "b" of this cluster'),
            ("postgresql://127.0.0.1:1/none", ConnectionFailed, 'node "b" can\'t be reached'),
        ):
            with pytest.raises(error, match=words):
                failover.replace_node(catalog, "b", url)
        assert everything(a, empty, other) == before


@pytest.mark.parametrize(("how", "home"), [(mover.abort, "b"), (mover.resume, "a")])
def test_a_node_that_was_lost_when_a_shard_had_just_stopped_there(
    nodes: TwoNodes, how: Callable[..., mover.Result], home: str
) -> None:
    """The shard was placed there still, and took writes nowhere."""
    with standby_of(nodes.servers["b"]) as standby:
        nursery = Nursery()
        assert killed_move(nodes, nursery, MOVED, "cutover", kind="StepDone")
        nursery.close()
        with nodes.connected("b") as primary, psycopg.connect(standby.url(), autocommit=True) as copy:
            has_it = "select pg_last_wal_replay_lsn() >= %s::pg_lsn"
            written = primary.execute("select pg_current_wal_flush_lsn()::text").fetchone()
            wait_for(lambda: copy.execute(has_it, written).fetchone() == (True,), "the standby has it all")
            nodes.servers["b"].kill()
            copy.execute("select pg_promote()")
        nodes.servers["b"] = standby
        assert failover.replace_node(nodes.catalog, "b", standby.url()).fenced == ()
        finish(nodes, MOVED, how)
        assert nodes.catalog.node_of(MOVED).name == home
        with nodes.connected(home) as connection:
            connection.execute(f"insert into shard_{MOVED:04}.photos (title) values ('there')")
        assert nodes.leftovers() == []


def test_a_move_to_a_node_that_was_lost_is_undone_not_resumed(nodes: TwoNodes) -> None:
    """Its copy was active, but not placed: the promoted standby's is the move's to take away."""
    nursery = Nursery()
    mover.move(nodes.catalog, 1, "b")
    mover.move(nodes.catalog, 1, "a", back=True)
    assert killed_move(nodes, nursery, 0, "activate", kind="StepDone")
    with standby_of(nodes.servers["b"]) as standby:
        nodes.servers["b"].kill()
        nodes.servers["b"] = standby
        with nodes.connected("b") as promoted:
            promoted.execute("select pg_promote()")
            assert failover.replace_node(nodes.catalog, "b", standby.url()).fenced == ()
            with pytest.raises(MoveRefused, match=r'on node "b" a standby was promoted .*\n.*--abort'):
                finish(nodes, 0, mover.resume)
            assert mover.abort(nodes.catalog, 0).outcome == "aborted"
            there = promoted.execute("select count(*) from shardids.shard where id = 0").fetchone()
            assert there == (0,)
        with nodes.connected("a") as home:
            home.execute("insert into shard_0000.photos (title) values ('at home')")
        assert mover.move(nodes.catalog, 0, "b").outcome == "moved"
        # A move that is only to replace an old copy from before the promotion can be resumed.
        assert killed_move(nodes, nursery, 1, "tables")
        nursery.close()
        assert finish(nodes, 1, mover.resume).outcome == "moved"
        assert nodes.leftovers() == []


@pytest.mark.parametrize("step", ["publish", "cutover"])
def test_an_old_copy_is_not_taken_for_that_of_the_move(nodes: TwoNodes, step: str) -> None:
    """The standby had not heard that it was replaced: its rows are those from before the shard left."""
    nursery = Nursery()
    mover.move(nodes.catalog, MOVED, "a")
    with nodes.connected("a") as home:
        home.execute(f"insert into shard_{MOVED:04}.photos (title) values ('acknowledged')")
    with standby_of(nodes.servers["b"]) as standby:
        deafen(nodes.servers["b"], standby)
        assert killed_move(nodes, nursery, MOVED, step, kind="StepDone")
        nursery.close()
        nodes.servers["b"].kill()
        nodes.servers["b"] = standby
        with nodes.connected("b") as promoted:
            promoted.execute("select pg_promote()")
        assert failover.replace_node(nodes.catalog, "b", standby.url()).fenced == ()
        with pytest.raises(MoveRefused, match=r'on node "b" a standby was promoted .*\n.*--abort'):
            finish(nodes, MOVED, mover.resume)
        assert mover.abort(nodes.catalog, MOVED).outcome == "aborted"
        assert_at_home(nodes, 2)
        assert mover.move(nodes.catalog, MOVED, "b", back=True).outcome == "moved"
        assert nodes.leftovers() == []


def test_a_running_mover_does_not_make_an_old_copy_the_owner(nodes: TwoNodes) -> None:
    """By a URL that leads to whichever server takes writes it comes to the promoted standby unawares."""
    mover.move(nodes.catalog, MOVED, "a")
    with standby_of(nodes.servers["b"]) as standby:
        deafen(nodes.servers["b"], standby)
        servers = [make_url(server.url()) for server in (nodes.servers["b"], standby)]
        hosts = [f"{server.host}:{server.port}" for server in servers]
        either = URL.create(
            "postgresql",
            username=servers[0].username,
            database=servers[0].database,
            query=dict(servers[0].query) | {"host": hosts, "target_session_attrs": "read-write"},
        )
        nodes.catalog.point_node(Node(name="b", url=either.render_as_string()))

        def fail_over(event: mover.Event) -> None:
            if event == mover.StepDone(shard=MOVED, step="cutover"):
                nodes.servers["b"].kill()
                nodes.servers["b"] = standby
                with nodes.connected("b") as promoted:
                    promoted.execute("select pg_promote()")

        # The copy was opened in a transaction that ended with its server.
        with pytest.raises(ConnectionFailed):
            mover.move(nodes.catalog, MOVED, "b", back=True, on_event=fail_over)
        assert_at_home(nodes, 1)
        with pytest.raises(MoveRefused, match='on node "b" a standby was promoted'):
            mover.resume(nodes.catalog, MOVED)
        assert_at_home(nodes, 1)
        assert mover.abort(nodes.catalog, MOVED).outcome == "aborted"
        assert nodes.leftovers() == []


def assert_at_home(nodes: TwoNodes, photos: int) -> None:
    """The shard that was to leave node a takes writes there, has all photos, and takes none on b."""
    assert nodes.catalog.node_of(MOVED).name == "a"
    with nodes.connected("a") as home:
        home.execute(f"begin; insert into shard_{MOVED:04}.photos (title) values ('x'); rollback")
        assert home.execute(f"select count(*) from shard_{MOVED:04}.photos").fetchone() == (photos,)
    with nodes.connected("b") as old, pytest.raises(psycopg.Error) as refused:
        old.execute(f"insert into shard_{MOVED:04}.photos (title) values ('x')")
    assert refused.value.sqlstate == "SI003"
