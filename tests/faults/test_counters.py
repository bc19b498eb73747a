"""Numbers for people over midnights, killed sessions, a move and a failover: each once, none missing."""

from __future__ import annotations

import random
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import psycopg
import pytest

from shardids import mover
from shardids.pg.embedded import EmbeddedServer, temporary_servers
from tests.faults.conftest import DURABLE
from tests.support.faults import connect, scaled
from tests.support.moves import TwoNodes, two_nodes
from tests.support.replicas import has_all_of, is_receiving
from tests.support.server_clock import Clock
from tests.support.standbys import standby_of
from tests.support.waiting import wait_for

CLIENTS = 16
AROUND_S = scaled(1.5, 20.0)
NUMBER = re.compile(r"ACME-(.*)-(\d+)")
KINDS = ("gapless", "quick")
TABLE = """
    create table {s}.{kind} (
      id bigint primary key default {s}.next_id(), tenant text, number text not null unique);
    select shardids.number_rows(
      '{s}.{kind}', 'number', 'tenant', '{kind}', 'day', 'America/Santiago',
      padding => 6, lanes => {lanes});"""
TABLES = "".join(
    TABLE.replace("{kind}", kind).replace("{lanes}", str(lanes))
    for kind, lanes in zip(KINDS, (1, 32), strict=True)
)


class Clients:
    """Threads that insert rows where ``url`` says, roll back now and then, and go on when they are killed."""

    def __init__(self, url: Callable[[], str], schema: str) -> None:
        self._url, self._schema = url, schema
        self._stop = threading.Event()
        self.acknowledged: dict[str, list[str]] = {kind: [] for kind in KINDS}
        self.failures: list[psycopg.Error] = []
        self._threads = [
            threading.Thread(target=self._run, args=(index,), daemon=True) for index in range(CLIENTS)
        ]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def go_on(self, more: int = 200) -> None:
        """Waits until they have so many more rows."""
        before = len(self.acknowledged["quick"])
        wait_for(lambda: len(self.acknowledged["quick"]) > before + more, "the clients write")

    def _run(self, index: int) -> None:
        chance = random.Random(index)
        while not self._stop.is_set():
            try:
                with psycopg.connect(self._url(), connect_timeout=5) as connection:
                    while not self._stop.is_set():
                        self._insert(connection, KINDS[index % 2], chance)
            except psycopg.Error as error:
                self.failures.append(error)
                time.sleep(0.01)

    def _insert(self, connection: psycopg.Connection, kind: str, chance: random.Random) -> None:
        query = f"insert into {self._schema}.{kind} (tenant) values ('ACME') returning number"
        (number,) = connection.execute(query.encode()).fetchone() or ("",)
        if chance.random() < 0.2:
            connection.rollback()
            return
        connection.commit()
        self.acknowledged[kind].append(number)


def assert_each_once(clients: Clients, url: str, schema: str) -> dict[str, set[int]]:
    """What is acknowledged is in a row; none is missing in the gapless kind. Returns the numbers by day."""
    by_day: dict[str, set[int]] = defaultdict(set)
    with connect(url) as db:
        for kind in KINDS:
            numbers = [
                text for (text,) in db.execute(f"select number from {schema}.{kind}".encode()).fetchall()
            ]
            acknowledged = clients.acknowledged[kind]
            assert len(set(acknowledged)) == len(acknowledged)
            assert set(acknowledged) <= set(numbers)
            assert len(numbers) == len(set(numbers)) > CLIENTS
            days: dict[str, set[int]] = defaultdict(set)
            for text in numbers:
                match = NUMBER.fullmatch(text)
                assert match is not None
                days[match[1]].add(int(match[2]))
            for day, drawn in days.items():
                if kind == "gapless":
                    assert drawn == set(range(1, len(drawn) + 1)), day
                by_day[day] |= drawn
    return by_day


@contextmanager
def killing(url: str) -> Iterator[None]:
    """Ends one of the clients' sessions every few ms."""
    stop = threading.Event()

    def kill() -> None:
        with connect(url) as admin:
            while not stop.wait(0.05):
                admin.execute(
                    """select pg_terminate_backend(pid) from pg_stat_activity
                       where datname = current_database() and pid <> pg_backend_pid()
                         and backend_type = 'client backend' order by random() limit 1"""
                )

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)


def test_midnights_and_a_change_to_summer_time(
    faked_server: EmbeddedServer, faked_node: str, clock: Clock
) -> None:
    """In Santiago the clock goes back from 24:00 to 23:00 on 3 April 2027: that day has two midnights."""
    with connect(faked_node) as db:
        db.execute(TABLES.replace("{s}", "shard_0000").encode())
    midnights = [
        datetime.fromisoformat(one).replace(tzinfo=UTC)
        for one in ("2027-04-03 03:00", "2027-04-04 03:00", "2027-04-04 04:00")
    ]

    def go_before(midnight: datetime) -> None:
        clock.set((midnight - datetime.now(UTC)).total_seconds() - AROUND_S)

    go_before(midnights[0])
    with Clients(lambda: faked_node, "shard_0000") as clients, killing(faked_node):
        for midnight in midnights:
            go_before(midnight)
            time.sleep(2 * AROUND_S)
            clients.go_on()
    assert len(clients.failures) > 10
    days = assert_each_once(clients, faked_node, "shard_0000")
    assert sorted(days) == ["2027-04-02", "2027-04-03", "2027-04-04"]
    # With this each client has drawn on both sides of a midnight.
    assert min(map(len, days.values())) > CLIENTS


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2, settings=DURABLE) as servers:
        nodes = two_nodes(servers, 4)
        yield nodes
        nodes.catalog.close()


def test_a_shard_moves_there_and_back(nodes: TwoNodes) -> None:
    shard = nodes.new_shard(TABLES)
    schema = f"shard_{shard:04}"

    def url() -> str:
        return nodes.servers[nodes.catalog.node_of(shard).name].url()

    with Clients(url, schema) as clients:
        for number, to in enumerate(("b", "a")):
            clients.go_on()
            mover.move(nodes.catalog, shard, to, back=number > 0)
        clients.go_on()
    assert {error.sqlstate for error in clients.failures} <= {"SI002", "SI003", None, "57P01"}
    assert_each_once(clients, url(), schema)


@contextmanager
def restored(server: EmbeddedServer) -> Iterator[None]:
    """Lets the server run alone again afterwards."""
    try:
        yield
    finally:
        server.start(attached=True)
        with connect(server.url()) as db:
            db.execute("alter system reset synchronous_standby_names")
            db.execute("select pg_reload_conf()")


def test_a_standby_is_promoted(durable_server: EmbeddedServer, durable_node: str) -> None:
    with connect(durable_node) as db:
        db.execute(TABLES.replace("{s}", "shard_0000").encode())
    with standby_of(durable_server) as standby, restored(durable_server):
        database = psycopg.conninfo.conninfo_to_dict(durable_node)["dbname"]
        here = [durable_node]
        with connect(durable_node) as primary, connect(standby.url(str(database))) as promoted:
            wait_for(lambda: is_receiving(promoted), "the standby receives WAL")
            with Clients(lambda: here[0], "shard_0000") as clients:
                clients.go_on()
                with connect(durable_node) as db:
                    db.execute("alter system set synchronous_standby_names = '*'")
                    db.execute("select pg_reload_conf()")
                clients.go_on()
                wait_for(lambda: has_all_of(promoted, primary), "the standby has what was written before")
                durable_server.kill()
                promoted.execute("select pg_promote()")
                here[0] = standby.url(str(database))
                clients.go_on()
            assert_each_once(clients, here[0], "shard_0000")
