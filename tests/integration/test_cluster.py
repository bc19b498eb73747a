"""The front door of applications: routing, sessions, blocks of IDs, and what happens without the catalog."""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import Connection, event, select, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import IntegrityError, ProgrammingError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from shardids import Cluster, IdBlock, Layout, primary_key
from shardids.catalog.topology import Node, shard_for_key
from shardids.errors import (
    BadArgument,
    ClusterConflict,
    ConnectionFailed,
    ShardFenced,
    ShardidsError,
    ShardMoved,
    UnknownShard,
    UnsupportedKey,
)
from shardids.ids.layout import DEFAULT
from shardids.migrate.install import provision
from tests.conftest import BlankDatabases, MakeDatabase, dsn, found_cluster
from tests.support.clusters import catalog_at, connected, sessions
from tests.support.waiting import wait_for

Blank = Callable[[], URL]


class Base(DeclarativeBase):
    pass


class Note(Base):
    __tablename__ = "notes"

    id: Mapped[int] = primary_key()
    words: Mapped[str] = mapped_column(unique=True)


@pytest.fixture(scope="module")
def home(databases: BlankDatabases) -> Iterator[URL]:
    """The catalog's URL of a cluster that the tests share: 8 shards, with the table notes, on a and b."""
    urls = databases.take(), databases.take()
    found_cluster(urls[0], {"a": urls[0], "b": urls[1]}, 8)
    with Cluster.connect(urls[0]) as cluster:
        make_tables(cluster)
    yield urls[0]
    for url in urls:
        databases.give_back(url)


@pytest.fixture
def shared(home: URL) -> Iterator[Cluster]:
    with Cluster.connect(home) as cluster:
        yield cluster


def make_tables(cluster: Cluster) -> None:
    for shard in cluster.placement.node_of:
        with cluster.at(shard=shard).engine.begin() as connection:
            Base.metadata.create_all(connection)


def url_of(cluster: Cluster, home: URL, shard: int) -> URL:
    """The database of a shard."""
    return home.set(database=cluster.engine(cluster.node_of(shard)).url.database)


# Routing.


def test_what_the_catalog_says(shared: Cluster) -> None:
    assert (shared.layout, shared.shard_count) == (DEFAULT, 8)
    assert shared.placement.node_of == {shard: "ab"[shard // 4] for shard in range(8)}
    assert [shared.node_of(shard).name for shard in range(8)] == list("aaaabbbb")
    assert shared.schema_of(5) == "shard_0005"


@pytest.mark.parametrize("key", [0, -5, 2**70, "ann", "", b"ann", UUID(int=7)])
def test_a_key_belongs_to_one_shard(shared: Cluster, key: int | str | bytes | UUID) -> None:
    assert shared.shard_for(key) == shard_for_key(key, 8)
    with shared.session(key=key) as session:
        (drawn,) = session.execute(text(f"select {shared.schema_of(shared.shard_for(key))}.next_id()")).one()
    assert shared.shard_of(drawn) == shard_for_key(key, 8)


@pytest.mark.parametrize("key", [True, 1.5, None, ("a",), b"x".__class__])
def test_keys_without_a_stable_hash(shared: Cluster, key: object) -> None:
    with pytest.raises(UnsupportedKey, match=type(key).__name__):
        shared.shard_for(key)
    if key is not None:
        with pytest.raises(UnsupportedKey):
            shared.session(key=key)


def test_rows_lie_in_the_shard_of_their_session(shared: Cluster, home: URL) -> None:
    for number in range(8):
        word = f"routed {number}"
        shard = shared.shard_for(word)
        with shared.session(key=word) as session, session.begin():
            note = Note(words=word)
            session.add(note)
            session.flush()
            assert shared.shard_of(note.id) == shard
            made = note.id
        with shared.session(id=made) as session:
            assert session.get_one(Note, made).words == word
        with shared.session(shard=shard) as session:
            assert session.scalars(select(Note.words).where(Note.id == made)).one() == word
        with shared.at(shard=shard).connection() as connection:
            assert connection.scalars(select(Note.words).where(Note.id == made)).one() == word
        with connected(url_of(shared, home, shard)) as direct:
            found = direct.execute(f"select words from shard_{shard:04}.notes where id = %s", [made])
            assert found.fetchall() == [(word,)]
        other = (shard + 4) % 8
        with connected(url_of(shared, home, other)) as direct:
            found = direct.execute(f"select words from shard_{other:04}.notes where id = %s", [made])
            assert found.fetchall() == []


def test_a_shard_number_is_also_what_numpy_makes_of_it(shared: Cluster) -> None:
    import numpy

    (made,) = shared.at(shard=3).reserve(1)
    assert shared.shard_of(numpy.int64(made)) == 3
    assert shared.node_of(numpy.int64(3)).name == "a"


def test_a_session_takes_exactly_one_thing(shared: Cluster) -> None:
    for wanted in ({}, {"key": "a", "id": 1}, {"key": 1, "shard": 0}, {"id": 0, "shard": 0}, {"key": None}):
        with pytest.raises(BadArgument, match="exactly one of key=, id=, lookup= and shard="):
            shared.session(**wanted)
    for zero in ({"key": 0}, {"key": ""}, {"id": 0}, {"shard": 0}):
        with shared.session(**zero) as session:
            assert session.execute(text("select 1")).scalar_one() == 1


@pytest.mark.parametrize("id_", [True, 1.0, "5", b"5", -1, 1 << 63, 1 << 64, -(1 << 63) - 1, 1 << 5000])
def test_what_is_no_id(shared: Cluster, id_: object) -> None:
    for use in (shared.shard_of, shared.decode, lambda it: shared.session(id=it)):
        with pytest.raises(BadArgument, match="ID"):
            use(id_)


def test_an_id_of_a_shard_beyond_the_clusters(shared: Cluster) -> None:
    foreign = DEFAULT.encode(ms=1, shard=8)
    assert shared.decode(foreign).shard == 8
    for use in (shared.shard_of, lambda it: shared.session(id=it)):
        with pytest.raises(BadArgument, match="shard 8 does not exist in this cluster") as caught:
            use(foreign)
        assert "0 to 7" in caught.value.hint


@pytest.mark.parametrize("shard", [-1, 8, True, 1.0, "1"])
def test_what_is_no_shard(shared: Cluster, shard: object) -> None:
    for use in (shared.node_of, lambda it: shared.at(shard=it), lambda it: shared.session(shard=it)):
        with pytest.raises(BadArgument, match="shard"):
            use(shard)


def test_a_shard_that_no_node_holds_yet(blank_database: Blank) -> None:
    url = blank_database()
    with catalog_at(url) as catalog:
        provision.init(catalog, DEFAULT, 8)
        with Cluster.connect(url, listen=False) as cluster:
            assert not cluster.placement.node_of
            with pytest.raises(UnknownShard, match="shard 3"):
                cluster.session(shard=3)
            provision.add_node(catalog, "a", dsn(url))
            provision.create_shards(catalog, [3])
            with pytest.raises(UnknownShard, match="shard 3"):
                cluster.at(shard=3).reserve(1)
            assert cluster.refresh()
            assert cluster.shard_of(cluster.at(shard=3).reserve(1)[0]) == 3
            with pytest.raises(UnknownShard, match="shard 4"):
                cluster.session(shard=4)


def test_ids_that_turn_negative(blank_database: Blank) -> None:
    url = blank_database()
    layout = Layout.preset("instagram")
    found_cluster(url, {"a": url}, 2, layout)
    with Cluster.connect(url) as cluster:
        late = layout.encode(ms=1 << 40, shard=1)
        assert late < 0
        assert cluster.shard_of(late) == cluster.shard_of(late + (1 << 64)) == 1
        with cluster.session(id=late) as session:
            assert session.execute(text("select shardids.shard_of(:id)"), {"id": late}).scalar_one() == 1


# Blocks of IDs.


def test_a_block_is_a_sequence(shared: Cluster, home: URL) -> None:
    block = shared.at(shard=6).reserve(5000)
    ids = list(block)
    assert isinstance(block, IdBlock)
    assert len(block) == len(ids) == len(set(ids)) == 5000
    assert all(one < other for one, other in pairwise(ids))
    assert {shared.shard_of(one) for one in ids} == {6}
    assert [block[i] for i in range(5000)] == ids
    assert [block[-1], block[-5000], block[4999]] == [ids[-1], ids[0], ids[-1]]
    assert list(reversed(block)) == ids[::-1]
    for part in (
        slice(None),
        slice(3),
        slice(-3, None),
        slice(10, 4990, 997),
        slice(None, None, -1),
        slice(9, 3),
    ):
        assert list(block[part]) == ids[part]
    assert ids[1024] in block
    assert ids[-1] + 1 not in block
    assert (block.index(ids[77]), block.count(ids[77])) == (77, 1)
    for index in (5000, -5001):
        with pytest.raises(IndexError):
            block[index]
    with connected(url_of(shared, home, 6)) as direct:
        found = direct.execute(
            "select shardids.id_of(%s + i, 6) from generate_series(0, 4999) i order by i", [block.first_tick]
        ).fetchall()
    assert [one for (one,) in found] == ids
    assert list(pickle.loads(pickle.dumps(block))) == ids


def test_blocks_and_single_ids_never_meet(shared: Cluster) -> None:
    seen: list[int] = []
    with shared.at(shard=7).connection() as connection:
        for size in (1, 3, 1024, 7, 2000, 1):
            seen += shared.at(shard=7).reserve(size)
            seen += connection.scalars(text("select shard_0007.next_id() from generate_series(1, 50)"))
    assert len(set(seen)) == len(seen) == 3036 + 300
    assert {shared.shard_of(one) for one in seen} == {7}


@pytest.mark.parametrize("count", [0, -1, 4194305, 1 << 31, 1 << 40, 1 << 70, True, 1.5, "5", None])
def test_what_is_no_number_of_ids(shared: Cluster, count: object) -> None:
    with pytest.raises(BadArgument) as caught:
        shared.at(shard=0).reserve(count)
    assert caught.value.message


# Engines and statements.


def test_one_engine_and_one_pool_a_node(home: URL, admin: psycopg.Connection) -> None:
    tag = "one-pool"
    options = {
        "pool_size": 3,
        "max_overflow": 0,
        "pool_timeout": 0.2,
        "connect_args": {"application_name": tag},
    }
    with Cluster.connect(home, **options) as cluster:
        engines = {id(cluster.engine(cluster.node_of(shard))) for shard in range(8)}
        assert len(engines) == 2
        pool = cluster.engine(cluster.node_of(0)).pool
        assert all(cluster.at(shard=shard).engine.pool is pool for shard in range(4))
        for shard in range(8):
            with cluster.session(shard=shard) as session:
                assert session.scalars(select(Note).limit(1)).all() is not None
        counting = "select count(*) from pg_stat_activity where application_name = %s"
        assert admin.execute(counting, [tag]).fetchone() == (2,)
        held = [cluster.at(shard=shard).connection() for shard in (0, 1, 2)]
        assert pool.checkedout() == 3
        with pytest.raises(Exception, match="QueuePool limit"):
            cluster.at(shard=3).connection()
        for connection in held:
            connection.close()
        assert pool.checkedout() == 0
    wait_for(lambda: admin.execute(counting, [tag]).fetchone() == (0,), "no connection is left")


def test_no_session_setting_is_ever_sent(shared: Cluster) -> None:
    sent: list[str] = []
    for node in shared.placement.nodes.values():

        @event.listens_for(shared.engine(node), "before_cursor_execute")
        def _(_connection: Connection, _cursor: object, statement: str, *_rest: object) -> None:
            sent.append(statement)

    for shard in (0, 1, 5):
        with shared.session(shard=shard) as session, session.begin():
            session.add(Note(words=f"quiet {shard}"))
            session.flush()
            session.scalars(select(Note)).all()
        shared.at(shard=shard).reserve(2)
    told = "\n".join(sent).lower()
    assert "insert into shard_0005.notes" in told
    assert "search_path" not in told
    assert not re.search(r"\bset\b", told)


def test_closing_leaves_no_connection(cluster_url: URL, admin: psycopg.Connection) -> None:
    cluster = Cluster.connect(cluster_url, listen=False)
    other = cluster_url.set(database=cluster.engine(cluster.node_of(7)).url.database)
    for shard in range(8):
        cluster.at(shard=shard).reserve(1)
    assert cluster.refresh()
    assert sessions(admin, cluster_url) == 2
    assert sessions(admin, other) == 1
    cluster.close()
    cluster.close()
    for url in (cluster_url, other):
        wait_for(lambda url=url: not sessions(admin, url), "the sessions end")


def test_a_connect_that_fails_leaves_no_connection(blank_database: Blank, admin: psycopg.Connection) -> None:
    url = blank_database()
    with pytest.raises(ClusterConflict, match="holds no shardids catalog"):
        Cluster.connect(url)
    wait_for(lambda: not sessions(admin, url), "the session ends")


def test_threads_share_a_cluster(shared: Cluster) -> None:
    def work(number: int) -> list[int]:
        made = []
        for turn in range(6):
            with shared.session(key=f"thread {number}.{turn}") as session, session.begin():
                note = Note(words=f"thread {number}.{turn}")
                session.add(note)
                session.flush()
                made.append(note.id)
            made += shared.at(shard=turn).reserve(10)
            assert shared.refresh()
        return made

    with ThreadPoolExecutor(8) as pool:
        made = [one for part in pool.map(work, range(8)) for one in part]
    assert len(set(made)) == len(made) == 8 * 6 * 11


# Without the catalog, and without a node.


@pytest.fixture
def apart(make_database: MakeDatabase, blank_database: Blank) -> Iterator[tuple[Cluster, URL]]:
    """A cluster whose catalog is in a database without shards, and that catalog's URL."""
    url, node = make_database(), blank_database()
    found_cluster(url, {"a": node}, 4)
    with Cluster.connect(url, listen=False) as cluster:
        make_tables(cluster)
        yield cluster, url


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def write_everywhere(cluster: Cluster, words: str) -> None:
    for shard in cluster.placement.node_of:
        with cluster.session(shard=shard) as session, session.begin():
            session.add(Note(words=words))
        assert cluster.shard_of(cluster.at(shard=shard).reserve(1)[0]) == shard


def test_routing_goes_on_while_the_catalog_is_gone(
    apart: tuple[Cluster, URL], admin: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    cluster, url = apart
    known = cluster.placement
    write_everywhere(cluster, "before")
    name, hidden = str(url.database), f"{url.database}_away"
    admin.execute("select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = %s", [name])
    admin.execute(f"alter database {name} rename to {hidden}")
    try:
        for turn in ("at once", "later"):
            caplog.clear()
            assert cluster.refresh() is False
            assert cluster.placement == known
            (warned,) = warnings_of(caplog)
            assert "the catalog" in warned
            write_everywhere(cluster, turn)
        with pytest.raises(ConnectionFailed, match=name):
            Cluster.connect(url)
    finally:
        admin.execute(f"alter database {hidden} rename to {name}")
    caplog.clear()
    assert cluster.refresh() is True
    assert warnings_of(caplog) == []


def test_routing_goes_on_when_the_catalog_was_dropped(
    cluster: Cluster, cluster_url: URL, caplog: pytest.LogCaptureFixture
) -> None:
    make_tables(cluster)
    with connected(cluster_url) as connection:
        connection.execute("drop schema shardids_catalog cascade")
    assert cluster.refresh() is False
    # The listener may warn, too, if it was about to connect.
    assert ["routing continues" in one for one in warnings_of(caplog)].count(True) == 1
    write_everywhere(cluster, "orphaned")


def test_a_refresh_finds_new_nodes_and_shards(blank_database: Blank) -> None:
    url, other = blank_database(), blank_database()
    with catalog_at(url) as catalog:
        provision.init(catalog, DEFAULT, 4)
        provision.add_node(catalog, "a", dsn(url))
        provision.create_shards(catalog, [0, 1])
        with Cluster.connect(url, listen=False) as cluster:
            first = cluster.placement
            provision.add_node(catalog, "b", dsn(other))
            provision.create_shards(catalog, range(4))
            assert cluster.placement is first
            assert cluster.refresh() is True
            assert cluster.placement.version > first.version
            assert cluster.placement.node_of == {0: "a", 1: "a", 2: "b", 3: "b"}
            assert cluster.shard_of(cluster.at(shard=3).reserve(1)[0]) == 3


def test_a_node_that_is_down_is_named(cluster: Cluster, cluster_url: URL) -> None:
    with catalog_at(cluster_url) as catalog:
        catalog.add_node(Node(name="c", url="postgresql://ann:hidden-word@127.0.0.1:1/app"))
        with connected(cluster_url) as connection:
            connection.execute("update shardids_catalog.placement set node = 'c' where shard = 7")
    assert cluster.refresh()
    with cluster.session(shard=7) as session, pytest.raises(ConnectionFailed, match='node "c"') as caught:
        session.scalars(select(Note)).all()
    assert "hidden-word" not in str(caught.value)
    assert cluster.shard_of(cluster.at(shard=6).reserve(1)[0]) == 6


def test_a_session_that_the_server_ended(shared: Cluster, home: URL, admin: psycopg.Connection) -> None:
    other = url_of(shared, home, 7)
    with shared.session(shard=7) as session:
        assert session.scalars(select(Note).limit(1)).all() is not None
        admin.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = %s",
            [other.database],
        )
        with pytest.raises(ConnectionFailed, match='node "b"'):
            session.scalars(select(Note).limit(1)).all()
        session.rollback()
        assert session.scalars(select(Note).limit(1)).all() is not None


def test_a_session_that_the_server_ended_because_it_was_idle(
    shared: Cluster, admin: psycopg.Connection
) -> None:
    with shared.session(shard=7) as session:
        pid = session.scalar(text("select pg_backend_pid()"))
        session.execute(text("set idle_session_timeout = '50ms'"))
        session.commit()
        there = "select from pg_stat_activity where pid = %s"
        wait_for(lambda: admin.execute(there, [pid]).fetchone() is None, "the server to end it")
        with pytest.raises(ConnectionFailed, match='node "b"'):
            session.scalars(select(Note).limit(1)).all()
        session.rollback()
        assert session.scalars(select(Note).limit(1)).all() is not None


def test_a_connection_that_is_lost_in_a_function_names_the_reason_and_not_its_context(
    shared: Cluster,
) -> None:
    dying = "do $$ begin perform pg_terminate_backend(pg_backend_pid()); perform pg_sleep(60); end $$"
    with shared.session(shard=7) as session, pytest.raises(ConnectionFailed) as lost:
        session.execute(text(dying))
    assert lost.value.message.endswith(": terminating connection due to administrator command")


# Errors.


@pytest.mark.parametrize(
    ("moved_to", "kind", "words"), [(None, ShardFenced, "fenced"), ("b", ShardMoved, '"b"')]
)
def test_a_shard_that_issues_no_ids(
    cluster: Cluster, cluster_url: URL, moved_to: str | None, kind: type[ShardFenced], words: str
) -> None:
    make_tables(cluster)
    with cluster.session(shard=2) as session:
        session.add(Note(words="before"))
        session.commit()
        with connected(cluster_url) as direct:
            direct.execute("select shardids.fence(2, %s)", [moved_to])
        session.add(Note(words="refused"))
        with pytest.raises(ShardFenced) as caught:
            session.flush()
        assert type(caught.value) is kind
        assert "shard 2" in caught.value.message
        assert words in caught.value.message
        assert caught.value.hint
        assert isinstance(caught.value.__cause__, psycopg.Error)
        session.rollback()
        assert session.scalars(select(Note.words)).all() == ["before"]
        with pytest.raises(kind):
            cluster.at(shard=2).reserve(1)
        with connected(cluster_url) as direct:
            direct.execute("select shardids.activate(2)")
        session.add(Note(words="after"))
        session.commit()
        assert session.scalars(select(Note.words).order_by(Note.id)).all() == ["before", "after"]


def test_errors_of_ordinary_sql_stay_sqlalchemys(shared: Cluster) -> None:
    with shared.session(shard=1) as session:
        session.add(Note(words="twice"))
        session.commit()
        session.add(Note(words="twice"))
        with pytest.raises(IntegrityError):
            session.flush()
        session.rollback()
        with pytest.raises(ProgrammingError):
            session.execute(text("select * from no_such_table"))
        session.rollback()
        with pytest.raises(ProgrammingError, match="no_such_column"):
            session.execute(text("select no_such_column"))


def test_every_error_of_a_cluster_is_caught_by_its_root(shared: Cluster) -> None:
    for wrong in (
        lambda: shared.session(shard=99),
        lambda: shared.shard_of(-1),
        lambda: shared.shard_for(1.5),
        lambda: shared.at(shard=0).reserve(0),
    ):
        with pytest.raises(ShardidsError) as caught:
            wrong()
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), str(again), again.hint) == (
            type(caught.value),
            str(caught.value),
            caught.value.hint,
        )
