"""Changes of the placement that other processes make: heard at once, without polling, whatever happens."""

from __future__ import annotations

import gc
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.engine import URL

from shardids import Cluster
from shardids.catalog.keys.homes import put_home
from shardids.client.placement import PlacementListener
from shardids.errors import ConnectionFailed
from shardids.pg.connections import open_engine
from tests.conftest import MakeDatabase, dsn, found_cluster
from tests.support.clusters import catalog_at, connected, environment, sessions
from tests.support.proxy import Proxy
from tests.support.waiting import PATIENCE_S, wait_for

LISTENING = (
    "select count(*) from pg_stat_activity where datname = %s and application_name = 'shardids listener'"
)


@pytest.fixture
def url(blank_database: Callable[[], URL]) -> URL:
    """The catalog of a cluster with its 4 shards on node a, which is in the same database, and none on b."""
    url, other = blank_database(), blank_database()
    found_cluster(url, {"a": url}, 4)
    with connected(url) as direct:
        direct.execute("insert into shardids_catalog.node values ('b', %s)", [dsn(other)])
    return url


@pytest.fixture
def cluster(url: URL, admin: psycopg.Connection) -> Iterator[Cluster]:
    """A cluster that listens."""
    with Cluster.connect(url) as cluster:
        start(cluster, admin, url)
        yield cluster


def start(cluster: Cluster, admin: psycopg.Connection, url: URL) -> None:
    assert cluster.node_of(2).name == "a"
    wait_for(
        lambda: admin.execute(LISTENING, [url.database]).fetchone() == (1,), "the catalog is listened to"
    )


def place(url: URL, node: str) -> None:
    with connected(url) as direct:
        direct.execute("update shardids_catalog.placement set node = %s where shard = 2", [node])


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shardids listener"]


@contextmanager
def soon(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def test_every_change_is_notified_when_it_is_committed(url: URL) -> None:
    with connected(url) as listening, psycopg.connect(dsn(url)) as changing:
        listening.execute("listen shardids_placement")

        def heard() -> list[str]:
            return [notification.payload for notification in listening.notifies(timeout=0.2)]

        def change(statement: str) -> str:
            changing.execute(statement)
            found = changing.execute("select version from shardids_catalog.cluster").fetchone()
            assert found is not None
            return str(found[0])

        change("update shardids_catalog.placement set node = 'b' where shard = 0")
        assert heard() == []
        changing.rollback()
        assert heard() == []
        first = change("update shardids_catalog.placement set node = 'b' where shard = 0")
        second = change("delete from shardids_catalog.placement where shard = 1")
        changing.commit()
        third = change("insert into shardids_catalog.node values ('c', 'postgresql://c')")
        changing.commit()
        assert heard() == [first, second, third]
        assert int(third) == int(second) + 1 == int(first) + 2


CHANGING = """
import psycopg, sys, time
with psycopg.connect(sys.argv[1], autocommit=True) as connection:
    for line in sys.stdin:
        connection.execute("update shardids_catalog.placement set node = %s where shard = 2", [line.strip()])
        print(time.time(), flush=True)
"""


def test_a_change_of_another_process_is_seen_within_100_ms(cluster: Cluster, url: URL) -> None:
    late_s = []
    with subprocess.Popen(
        [sys.executable, "-c", CHANGING, dsn(url)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for turn in range(20):
            node = "ba"[turn % 2]
            process.stdin.write(f"{node}\n")
            process.stdin.flush()
            wait_for(lambda node=node: cluster.node_of(2).name == node, "the change is seen")
            seen_at = time.time()
            late_s.append(seen_at - float(process.stdout.readline()))
        process.stdin.close()
    assert max(late_s) < 0.1, late_s


def test_it_sleeps_until_something_is_notified(cluster: Cluster, url: URL, admin: psycopg.Connection) -> None:
    (thread,) = threads()
    status = Path(f"/proc/self/task/{thread.native_id}/status")

    def activity() -> tuple[object, list[str]]:
        asked = (
            "select state_change, query from pg_stat_activity where application_name = 'shardids listener'"
        )
        wakings = status.read_text().splitlines() if status.exists() else []
        return admin.execute(asked).fetchall(), [line for line in wakings if "ctxt_switches" in line]

    place(url, "b")
    wait_for(lambda: cluster.node_of(2).name == "b", "the change is seen")
    time.sleep(0.1)
    before = activity()
    time.sleep(0.5)
    assert activity() == before


def test_it_starts_with_the_first_use_and_ends_with_close(
    url: URL, admin: psycopg.Connection, nobody_listens: None
) -> None:
    with Cluster.connect(url) as cluster:
        cluster.decode(cluster.layout.encode(ms=1, shard=2))
        assert threads() == []
        start(cluster, admin, url)
        for shard in range(4):
            cluster.at(shard=shard).reserve(1)
        assert len(threads()) == 1
        with soon(0.5):
            cluster.close()
        assert threads() == []
    wait_for(lambda: not sessions(admin, url), "no session is left")
    with Cluster.connect(url, listen=False) as deaf:
        deaf.at(shard=2).reserve(1)
        place(url, "b")
        assert threads() == []
        assert deaf.node_of(2).name == "a"
        assert deaf.refresh()
        assert deaf.node_of(2).name == "b"


def test_the_first_use_knows_what_changed_since_connect(url: URL) -> None:
    with Cluster.connect(url) as cluster:
        place(url, "b")
        assert cluster.node_of(2).name == "b"
    with Cluster.connect(url) as cluster:
        with catalog_at(url) as catalog:
            put_home(catalog, "text", "ann", 3)
        assert cluster.shard_for("ann") == 3


def test_the_first_use_goes_by_the_known_placement_where_the_catalog_is_gone(
    make_database: MakeDatabase,
    blank_database: Callable[[], URL],
    admin: psycopg.Connection,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url, node = make_database(), blank_database()
    found_cluster(url, {"a": node}, 4)
    with Cluster.connect(url) as cluster:
        admin.execute(f"drop database {url.database} with (force)")
        with soon(4):
            assert cluster.node_of(2).name == "a"
        assert "missed until the catalog answers" in caplog.text


def test_the_first_use_waits_a_bounded_time_for_a_catalog_that_is_silent(
    url: URL, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardids.client.placement._FIRST_READ_S", 0.2)
    with (
        Proxy(int(url.port or 5432)) as proxy,
        Cluster.connect(url.set(host="127.0.0.1", port=proxy.port)) as cluster,
    ):
        proxy.swallow()
        assert cluster.node_of(2).name == "a"
        assert "routing continues with the known placement" in caplog.text


def test_a_change_while_the_connection_is_lost_is_read_when_it_is_back(
    cluster: Cluster, url: URL, admin: psycopg.Connection
) -> None:
    ending = LISTENING.replace("count(*)", "pg_terminate_backend(pid, 5000)")
    assert admin.execute(ending, [url.database]).fetchall() == [(True,)]
    place(url, "b")
    wait_for(lambda: cluster.node_of(2).name == "b", "the change is seen")


@pytest.fixture
def nobody_listens() -> None:
    gc.collect()
    wait_for(lambda: not threads(), "no thread of another test is left")


def test_it_ends_with_a_cluster_that_is_forgotten(
    url: URL, admin: psycopg.Connection, nobody_listens: None
) -> None:
    cluster = Cluster.connect(url)
    start(cluster, admin, url)
    catalog = cluster._catalog
    del cluster
    gc.collect()
    wait_for(lambda: not threads(), "the thread ends")
    catalog.close()


def hide(admin: psycopg.Connection, name: str, hidden: str) -> None:
    """Ends all sessions of a database and gives it another name, before they come back."""
    admin.execute(f"alter database {name} allow_connections false")
    admin.execute("select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = %s", [name])
    admin.execute(f"alter database {name} rename to {hidden}")
    admin.execute(f"alter database {hidden} allow_connections true")


@pytest.mark.long
def test_it_comes_back_with_the_catalog(
    make_database: MakeDatabase,
    blank_database: Callable[[], URL],
    admin: psycopg.Connection,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url, node = make_database(), blank_database()
    found_cluster(url, {"a": node}, 4)
    name, hidden = str(url.database), f"{url.database}_away"
    with Cluster.connect(url) as cluster:
        start(cluster, admin, url)
        for turn in ("b", "c"):
            caplog.clear()
            hide(admin, name, hidden)
            try:
                with connected(url.set(database=hidden)) as direct:
                    direct.execute("insert into shardids_catalog.node values (%s, %s)", [turn, dsn(node)])
                    direct.execute("update shardids_catalog.placement set node = %s where shard = 2", [turn])
                time.sleep(0.5)
                assert cluster.shard_of(cluster.at(shard=2).reserve(1)[0]) == 2
                assert cluster.node_of(2).name != turn
            finally:
                admin.execute(f"alter database {hidden} rename to {name}")
            wait_for(lambda turn=turn: cluster.node_of(2).name == turn, "the change is seen")
            warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
            assert len(warned) == 1
            assert "missed until the catalog answers" in warned[0]
        place(url, "a")
        wait_for(lambda: cluster.node_of(2).name == "a", "it listens again")


def test_close_does_not_wait_for_a_catalog_that_is_gone(
    make_database: MakeDatabase, blank_database: Callable[[], URL], admin: psycopg.Connection
) -> None:
    url, node = make_database(), blank_database()
    found_cluster(url, {"a": node}, 4)
    with Cluster.connect(url) as cluster:
        start(cluster, admin, url)
        admin.execute(f"drop database {url.database} with (force)")
        time.sleep(0.5)
        with soon(0.5):
            cluster.close()


def test_close_does_not_wait_for_a_server_that_is_silent() -> None:
    class Told:
        def tell(self) -> None:
            raise AssertionError("nobody answers there")

    told = Told()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        listener = PlacementListener(
            URL.create("postgresql+psycopg", "ann", None, "127.0.0.1", port), told.tell, told.tell
        )
        listener.start()
        connecting, _ = silent.accept()
        with soon(2):
            listener.close()
        connecting.close()
    wait_for(lambda: not threads(), "the thread ends")


@pytest.mark.parametrize(("query", "connect_timeout_s"), [({}, 2), ({"connect_timeout": "2"}, 60)])
def test_a_server_that_is_silent_is_given_up_in_time(query: dict[str, str], connect_timeout_s: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = URL.create("postgresql+psycopg", "ann", None, "127.0.0.1", silent.getsockname()[1], query=query)
        engine = open_engine(url, what="the catalog", connect_timeout_s=connect_timeout_s)
        with soon(5), pytest.raises(ConnectionFailed, match="timeout"):
            engine.connect()


def test_notifications_of_anybody_do_no_harm(cluster: Cluster, url: URL) -> None:
    with connected(url) as direct:
        for payload in ("", "junk", "-1", "9" * 30):
            direct.execute("select pg_notify('shardids_placement', %s)", [payload])
    place(url, "b")
    wait_for(lambda: cluster.node_of(2).name == "b", "the change is seen")


def test_a_role_that_may_only_use_the_cluster_listens(
    url: URL, admin: psycopg.Connection, make_role: Callable[[], URL]
) -> None:
    role = make_role()
    with catalog_at(url) as catalog, catalog.engine.begin() as connection:
        connection.execute(text("select shardids_catalog.grant_usage(:role)"), {"role": role.username})
    with Cluster.connect(role.set(database=url.database)) as cluster:
        start(cluster, admin, url)
        place(url, "b")
        wait_for(lambda: cluster.node_of(2).name == "b", "the change is seen")
    with connected(url) as direct:
        direct.execute(f'drop owned by "{role.username}"')


def run_script(script: str, url: URL, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", script, dsn(url)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


FORKING = """
import os, sys, time
from shardids import Cluster
from sqlalchemy import text

def wait_for(node):
    deadline = time.monotonic() + 10
    while cluster.node_of(2).name != node:
        assert time.monotonic() < deadline, node
        time.sleep(0.001)

def backend():
    with cluster.at(shard=0).connection() as connection:
        return connection.execute(text("select pg_backend_pid()")).scalar_one()

def place(node):
    moving = text("update shardids_catalog.placement set node = :node where shard = 2")
    with cluster.engine(cluster.node_of(0)).begin() as connection:
        connection.execute(moving, {"node": node})

with Cluster.connect(sys.argv[1]) as cluster:
    mine = backend()
    time.sleep(0.2)
    child = os.fork()
    if not child:
        assert backend() != mine
        place("b")
        wait_for("b")
        print("child heard", flush=True)
        cluster.close()
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
    wait_for("b")
    assert backend() == mine
    place("a")
    wait_for("a")
    print("parent heard", flush=True)
    child = os.fork()
    if not child:
        time.sleep(60)
    began = time.monotonic()
    cluster.close()
    assert time.monotonic() - began < 0.5
    os.kill(child, 9)
    os.waitpid(child, 0)
"""


def test_a_fork_leaves_parent_and_child_with_connections_of_their_own(url: URL) -> None:
    ran = run_script(FORKING, url, "-W", "error", "-W", "ignore::DeprecationWarning")
    assert (ran.stderr, ran.returncode) == ("", 0)
    assert ran.stdout.splitlines() == ["child heard", "parent heard"]


@pytest.mark.parametrize("pause", ["", "import time; time.sleep(0.2)"])
def test_an_interpreter_exits_without_close(url: URL, pause: str) -> None:
    script = "import sys; from shardids import Cluster; c = Cluster.connect(sys.argv[1]); c.node_of(2);"
    ran = run_script(script + pause, url)
    assert (ran.stderr, ran.returncode) == ("", 0)
