"""A shard that has moved: what its old node answers, and how an application comes to the new one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Timer

import psycopg
import pytest
from sqlalchemy import insert, select, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from shardids import Cluster
from shardids.catalog.topology import Node
from shardids.errors import (
    BadArgument,
    CommitUncertain,
    ConnectionFailed,
    ShardFenced,
    ShardMoved,
    UnknownShard,
)
from shardids.ids.layout import DEFAULT
from tests.conftest import dsn, found_cluster
from tests.support import moves_by_hand
from tests.support.clusters import catalog_at, connected
from tests.support.moves_by_hand import SHARD, Base, Note, draw_at_commit, two_nodes, words_on
from tests.support.waiting import wait_for

Blank = Callable[[], URL]


@pytest.fixture
def nodes(blank_database: Blank) -> dict[str, URL]:
    return two_nodes(blank_database)


@pytest.fixture
def cluster(nodes: dict[str, URL]) -> Iterator[Cluster]:
    """It does not listen: it learns of a move from errors."""
    with Cluster.connect(nodes["catalog"], listen=False) as cluster:
        yield cluster


def move(nodes: dict[str, URL], to: str = "b") -> None:
    moves_by_hand.move_shard(nodes["catalog"], SHARD, to, Base.metadata)


class Write:
    """Writes a note and counts its calls."""

    def __init__(self, words: str, then: Callable[[Session], object] = lambda _session: None) -> None:
        self.words = words
        self.then = then
        self.calls = 0

    def __call__(self, session: Session) -> Note:
        self.calls += 1
        note = Note(words=self.words)
        session.add(note)
        session.flush()
        self.then(session)
        return note


# What the old node answers.


def commit_late(session: Session) -> None:
    session.execute(insert(Note), [{"id": DEFAULT.encode(ms=1, shard=SHARD), "words": "at commit"}])
    session.commit()


def stream(session: Session) -> None:
    drawing = text("select shard_0002.next_id() from generate_series(1, 10)")
    session.execute(drawing, execution_options={"stream_results": True}).all()


DRAWS: dict[str, Callable[[Session], object]] = {
    "flush of one": lambda session: (session.add(Note(words="1")), session.flush()),
    "flush of many": lambda session: (session.add_all(Note(words=f"{n}") for n in range(9)), session.flush()),
    "flush in commit": lambda session: (session.add(Note(words="1")), session.commit()),
    "flush of a query": lambda session: (session.add(Note(words="1")), session.scalars(select(Note)).all()),
    "trigger in commit": commit_late,
    "core": lambda session: session.connection().execute(insert(Note).values(words="1")),
    "core, many": lambda session: session.execute(insert(Note), [{"words": "1"}, {"words": "2"}]),
    "text": lambda session: session.execute(text("select shard_0002.next_ids(3)")),
    "driver": lambda session: session.connection().exec_driver_sql("select shard_0002.next_id()"),
    "stream": stream,
}


@pytest.mark.parametrize(("moved_to", "kind"), [(None, ShardFenced), ("b", ShardMoved)])
def test_every_way_to_draw_says_that_the_shard_is_stopped(
    cluster: Cluster, nodes: dict[str, URL], moved_to: str | None, kind: type[ShardFenced]
) -> None:
    draw_at_commit(nodes["a"])
    moves_by_hand.fence(nodes["catalog"], SHARD, moved_to)
    for way, draw in DRAWS.items():
        with cluster.session(shard=SHARD) as session:
            with pytest.raises(ShardFenced) as caught:
                draw(session)
            assert type(caught.value) is kind, way
            assert f"shard {SHARD} " in caught.value.message, way
            assert 'node "a"' in caught.value.message, way
            session.rollback()
            assert session.scalars(select(Note)).all() == [], way
    with pytest.raises(kind):
        cluster.at(shard=SHARD).reserve(5)
    with cluster.at(shard=SHARD).connection() as connection, pytest.raises(kind):
        connection.execute(insert(Note).values(words="1"))


def test_a_connection_lost_during_commit_is_told_from_one_lost_before(
    cluster: Cluster, admin: psycopg.Connection
) -> None:
    for lose, kind in ((lambda it: it.scalars(select(Note)).all(), ConnectionFailed),
                       (lambda it: it.commit(), CommitUncertain)):  # fmt: skip
        with cluster.session(shard=SHARD) as session:
            session.add(Note(words="lost"))
            session.flush()
            end_backend(session, admin)
            with pytest.raises(ConnectionFailed, match='node "a"') as caught:
                lose(session)
            assert type(caught.value) is kind
            session.rollback()
            assert session.scalars(select(Note)).all() == []


def end_backend(session: Session, admin: psycopg.Connection) -> None:
    pid = session.execute(text("select pg_backend_pid()")).scalar_one()
    admin.execute("select pg_terminate_backend(%s, 5000)", [pid])


# Shard.run().


def test_run_commits_and_returns_what_the_function_does(cluster: Cluster, nodes: dict[str, URL]) -> None:
    write = Write("run")
    note = cluster.at(shard=SHARD).run(write)
    assert (note.words, cluster.shard_of(note.id), write.calls) == ("run", SHARD, 1)
    assert words_on(nodes["a"]) == ["run"]
    assert cluster.at(id=note.id).run(lambda session: session.get_one(Note, note.id).words) == "run"
    key = next(key for key in range(100) if cluster.shard_for(key) == SHARD)
    assert cluster.at(key=key).run(lambda session: session.scalars(select(Note.id)).one()) == note.id
    assert cluster.at(shard=0).run(lambda session: session.info, info={"of": "ours"}) == {"of": "ours"}
    with pytest.raises(BadArgument, match="exactly one of"):
        cluster.at(shard=SHARD, id=note.id).run(write)


def test_run_takes_back_what_fails_and_does_not_repeat_it(cluster: Cluster, nodes: dict[str, URL]) -> None:
    cluster.at(shard=SHARD).run(Write("there"))

    def fail(_session: Session) -> None:
        raise ValueError("the application's own")

    for write, error in (
        (Write("twice", fail), ValueError),
        (Write("there"), IntegrityError),
        (Write("old", lambda it: it.execute(text("select 1 / 0"))), Exception),
    ):
        with pytest.raises(error):
            cluster.at(shard=SHARD).run(write)
        assert write.calls == 1
    assert words_on(nodes["a"]) == ["there"]


def test_run_goes_to_the_new_node(cluster: Cluster, nodes: dict[str, URL]) -> None:
    before = cluster.at(shard=SHARD).run(Write("before"))
    move(nodes)
    write = Write("after")
    after = cluster.at(shard=SHARD).run(write)
    assert write.calls == 2
    assert after.id > before.id
    assert cluster.shard_of(after.id) == SHARD
    assert cluster.node_of(SHARD).name == "b"
    assert words_on(nodes["a"]) == ["before"]
    assert words_on(nodes["b"]) == ["before", "after"]
    again = Write("again")
    cluster.at(id=before.id).run(again)
    assert again.calls == 1


def test_run_goes_to_the_new_node_when_the_old_copy_is_gone(cluster: Cluster, nodes: dict[str, URL]) -> None:
    cluster.at(shard=SHARD).run(Write("before"))
    move(nodes)
    moves_by_hand.drop(nodes["catalog"], SHARD, "a")
    assert cluster.at(shard=SHARD).run(lambda session: session.scalars(select(Note.words)).all()) == [
        "before"
    ]


def test_run_goes_to_the_new_node_when_commit_refuses(cluster: Cluster, nodes: dict[str, URL]) -> None:
    draw_at_commit(nodes["a"])
    move(nodes)
    cluster.at(shard=SHARD).run(
        lambda session: session.execute(
            insert(Note), [{"id": DEFAULT.encode(ms=1, shard=SHARD), "words": "late"}]
        )
    )
    assert words_on(nodes["a"]) == []
    assert words_on(nodes["b"]) == ["late"]


def test_run_goes_to_the_new_node_when_the_connection_is_lost(
    cluster: Cluster, nodes: dict[str, URL], admin: psycopg.Connection
) -> None:
    cluster.at(shard=SHARD).run(Write("before"))
    move(nodes)

    def lose(session: Session) -> str:
        database = str(session.execute(text("select current_database()")).scalar_one())
        if database == nodes["a"].database:
            end_backend(session, admin)
        session.add(Note(words="after"))
        session.flush()
        return database

    assert cluster.at(shard=SHARD).run(lose) == nodes["b"].database
    assert words_on(nodes["b"]) == ["before", "after"]


@pytest.mark.parametrize("cure", ["another node", "another address"])
def test_run_goes_on_when_a_node_that_is_down_is_replaced(nodes: dict[str, URL], cure: str) -> None:
    move(nodes)
    with catalog_at(nodes["catalog"]) as catalog:
        catalog.add_node(Node(name="c", url="postgresql://127.0.0.1:1/down"))
        moves_by_hand.place(nodes["catalog"], SHARD, "c")
        with Cluster.connect(nodes["catalog"], listen=False) as cluster:
            with pytest.raises(ConnectionFailed, match='node "c"'):
                cluster.at(shard=SHARD).run(Write("too early"))
            if cure == "another node":
                moves_by_hand.place(nodes["catalog"], SHARD, "b")
            else:
                with connected(nodes["catalog"]) as connection:
                    connection.execute(
                        "update shardids_catalog.node set url = %s where name = 'c'",
                        [catalog.nodes()["b"].url],
                    )
            cluster.at(shard=SHARD).run(Write("in the end"))
    assert words_on(nodes["b"]) == ["in the end"]


@pytest.mark.parametrize(
    ("moved_to", "patience_s", "words"),
    [
        (None, 30, "is fenced and issues no IDs"),
        (
            "b",
            0.6,
            r'has moved to node "b" .*the catalog did not record that within 0\.6 s\n.*shard move --list',
        ),
        ("b", 0, 'has moved to node "b"'),
    ],
)
def test_run_gives_up_while_the_shard_has_no_new_node(
    cluster: Cluster, nodes: dict[str, URL], moved_to: str | None, patience_s: float, words: str
) -> None:
    moves_by_hand.fence(nodes["catalog"], SHARD, moved_to)
    write, began = Write("refused"), time.monotonic()
    with pytest.raises(ShardFenced, match=words) as caught:
        cluster.at(shard=SHARD).run(write, patience_s=patience_s)
    assert type(caught.value) is (ShardMoved if moved_to else ShardFenced)
    took_s = time.monotonic() - began
    # One that is only fenced is waited for no longer than a fence takes to be committed.
    assert min(patience_s, 0.25) <= took_s < min(patience_s, 0.6) + 2
    assert (write.calls == 1) == (patience_s == 0)
    assert words_on(nodes["a"]) == []


COULD_NOT_BE_READ = r'has moved to node "b" .*the catalog, which names its new node, could not be read'


def test_run_says_that_the_catalog_is_down(
    cluster: Cluster, nodes: dict[str, URL], admin: psycopg.Connection
) -> None:
    moves_by_hand.fence(nodes["catalog"], SHARD, "b")
    name = str(nodes["catalog"].database)
    admin.execute(f"alter database {name} allow_connections false")
    try:
        admin.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = %s", [name]
        )
        with pytest.raises(ShardMoved, match=COULD_NOT_BE_READ):
            cluster.at(shard=SHARD).run(Write("refused"), patience_s=0.3)
    finally:
        admin.execute(f"alter database {name} allow_connections true")


def test_run_is_patient_no_longer_with_a_catalog_that_hangs(
    cluster: Cluster, nodes: dict[str, URL], admin: psycopg.Connection
) -> None:
    moves_by_hand.fence(nodes["catalog"], SHARD, "b")
    clients = 20

    def refused_after_s(number: int) -> float:
        began = time.monotonic()
        with pytest.raises(ShardMoved, match=COULD_NOT_BE_READ):
            cluster.at(shard=SHARD).run(Write(f"refused {number}"), patience_s=1.5)
        return time.monotonic() - began

    reading = "select count(*) from pg_stat_activity where datname = %s and wait_event_type = 'Lock'"
    with psycopg.connect(dsn(nodes["catalog"])) as holder, ThreadPoolExecutor(clients) as pool:
        holder.execute("lock table shardids_catalog.placement in access exclusive mode")
        took_s = list(pool.map(refused_after_s, range(clients)))
        assert max(took_s) < 1.5 + 1 + 2
        assert admin.execute(reading, [nodes["catalog"].database]).fetchone() == (1,)
    assert cluster.refresh()


def test_a_read_for_many_finds_what_was_committed_before_each_asked(
    cluster: Cluster, nodes: dict[str, URL], admin: psycopg.Connection
) -> None:
    reading = "select count(*) from pg_stat_activity where datname = %s and wait_event_type = 'Lock'"
    name = nodes["catalog"].database
    with psycopg.connect(dsn(nodes["catalog"])) as holder, ThreadPoolExecutor(10) as pool:
        holder.execute("lock table shardids_catalog.placement in access exclusive mode")
        early = pool.submit(cluster.refresh)
        wait_for(lambda: admin.execute(reading, [name]).fetchone() == (1,), "a read is under way")
        holder.execute("update shardids_catalog.placement set node = 'b' where shard = %s", [SHARD])
        late = [pool.submit(cluster.refresh) for _ in range(9)]
        holder.commit()
        assert all(done.result() for done in [early, *late])
        assert cluster.node_of(SHARD).name == "b"


def test_a_read_that_brings_the_new_place_is_not_repeated(
    nodes: dict[str, URL], admin: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = "select count(*) from pg_stat_activity where datname = %s and wait_event_type = 'Lock'"
    name = nodes["catalog"].database
    reads: list[bool] = []
    with (
        Cluster.connect(nodes["catalog"], listen=False) as cluster,
        psycopg.connect(dsn(nodes["catalog"])) as holder,
        ThreadPoolExecutor(2) as pool,
    ):
        followed, refresh = cluster._followed, cluster._followed.refresh
        monkeypatch.setattr(followed, "refresh", lambda: (reads.append(True), refresh()))
        asked = threading.Event()

        def has_moved() -> bool:
            asked.set()
            return followed.current.node_of[SHARD] == "b"

        holder.execute("lock table shardids_catalog.placement in access exclusive mode")
        holder.execute("update shardids_catalog.placement set node = 'b' where shard = %s", [SHARD])
        early = pool.submit(cluster.refresh)
        wait_for(lambda: admin.execute(reading, [name]).fetchone() == (1,), "a read is under way")
        late = pool.submit(followed.try_refresh, 10, is_enough=has_moved)
        assert not asked.wait(0.2)
        holder.commit()
        assert early.result()
        assert late.result()
    assert reads == [True]


def test_watchers_are_told_of_newer_placements_only(cluster: Cluster, nodes: dict[str, URL]) -> None:
    told: list[int] = []
    with cluster._followed.watched(lambda: told.append(cluster.placement.version)):
        assert cluster.refresh()
        assert told == []
        moves_by_hand.place(nodes["catalog"], SHARD, "b")
        assert cluster.refresh()
        assert told == [cluster.placement.version]
        assert cluster.refresh()
    assert len(told) == 1


@pytest.mark.parametrize("listen", [True, False])
def test_run_waits_for_the_new_place(nodes: dict[str, URL], listen: bool) -> None:
    tick = moves_by_hand.fence(nodes["catalog"], SHARD, "b")
    moves_by_hand.copy(nodes["catalog"], SHARD, "b", Base.metadata, tick)
    placing = Timer(0.5, moves_by_hand.place, [nodes["catalog"], SHARD, "b"])
    placing.start()
    with Cluster.connect(nodes["catalog"], listen=listen) as cluster:
        write = Write("in the end")
        cluster.at(shard=SHARD).run(write)
        assert cluster.node_of(SHARD).name == "b"
    placing.join()
    assert 1 < write.calls < 10
    assert words_on(nodes["b"]) == ["in the end"]


def test_run_goes_on_where_it_was_when_a_move_is_taken_back(cluster: Cluster, nodes: dict[str, URL]) -> None:
    def take_back() -> None:
        with connected(nodes["a"]) as direct:
            direct.execute("select shardids.activate(%s)", [SHARD])

    moves_by_hand.fence(nodes["catalog"], SHARD, "b")
    taking_back = Timer(0.3, take_back)
    taking_back.start()
    cluster.at(shard=SHARD).run(Write("at home"))
    taking_back.join()
    assert words_on(nodes["a"]) == ["at home"]


def test_run_gives_up_where_the_new_node_refuses(cluster: Cluster, nodes: dict[str, URL]) -> None:
    move(nodes)
    with connected(nodes["b"]) as direct:
        direct.execute("select shardids.fence(%s)", [SHARD])
    write = Write("refused")
    with pytest.raises(ShardFenced, match='node "b"'):
        cluster.at(shard=SHARD).run(write)
    assert write.calls > 2


def test_run_does_not_repeat_what_may_be_committed(
    cluster: Cluster, nodes: dict[str, URL], admin: psycopg.Connection
) -> None:
    write = Write("perhaps", lambda session: (move(nodes), end_backend(session, admin)))
    with pytest.raises(CommitUncertain, match="COMMIT"):
        cluster.at(shard=SHARD).run(write)
    assert write.calls == 1


def test_run_finds_a_shard_that_was_made_meanwhile(blank_database: Blank) -> None:
    url = blank_database()
    found_cluster(url, {"a": url}, 1)
    with catalog_at(url) as catalog, connected(url) as direct:
        direct.execute("delete from shardids_catalog.placement")
        with Cluster.connect(url, listen=False) as cluster:
            with pytest.raises(UnknownShard, match="shard 0"):
                cluster.at(shard=0).run(lambda _session: None)
            direct.execute("insert into shardids_catalog.placement values (0, 'a', 'active')")
            assert cluster.at(shard=0).run(lambda _session: "made") == "made"
            assert catalog.placement() == cluster.placement
