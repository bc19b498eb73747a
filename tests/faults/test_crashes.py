"""The server, or one of its processes, dies under load."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from itertools import repeat
from typing import Any

import numpy as np
import psycopg
import pytest
from psycopg.pq import TransactionStatus

from shardids.migrate.install import trees
from shardids.pg.embedded import EmbeddedServer
from tests.faults.conftest import Finish, Record
from tests.support.faults import LAYOUT, Ids, clock_ms, connect, draw, scalar, scaled, ticks_of
from tests.support.recorder import Recorder, Session
from tests.support.waiting import wait_for

CRASHES = scaled(3, 20)
LOST_LEADS = scaled(4, 200)


class Writer(Session):
    """Inserts rows under IDs that the default draws, and knows which of its commits were acknowledged."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.acknowledged: list[Ids] = []
        self.in_doubt: list[Ids] = []

    def step(self, connection: psycopg.Connection[Any], cursor: psycopg.Cursor[Any]) -> None:
        begin(cursor)
        rows = []
        for _ in range(self.random.randint(1, 3)):
            asked = self.recorder.now()
            query = "insert into kept (note) select 'row' from generate_series(1, %s::integer) returning id"
            rows.append(np.array(cursor.execute(query, (self.random.randint(1, 100),)).fetchall())[:, 0])
            self.keep("default", asked, rows[-1])
        if self.random.random() < 0.2:
            cursor.execute("rollback")
            return
        self.in_doubt.append(np.concatenate(rows))
        cursor.execute("commit")
        self.acknowledged.append(self.in_doubt.pop())


class Lingerer(Session):
    """Draws in transactions that stay open for long, and are then rolled back."""

    def step(self, connection: psycopg.Connection[Any], cursor: psycopg.Cursor[Any]) -> None:
        begin(cursor)
        for _ in range(self.random.randint(1, 50)):
            if self.recorder.stopping:
                break
            self.draw(cursor)
        cursor.execute("rollback")


def begin(cursor: psycopg.Cursor[Any]) -> None:
    """Begins a transaction; one that ended in a refusal is rolled back."""
    if cursor.connection.info.transaction_status is TransactionStatus.INERROR:
        cursor.execute("rollback")
    cursor.execute("begin")


@pytest.fixture
def durable(durable_node: str) -> str:
    """A node with a table of rows to keep."""
    with connect(durable_node) as admin:
        admin.execute("create table kept (id bigint primary key default shard_0000.next_id(), note text)")
    return durable_node


def test_immediate_shutdowns_of_a_server(
    durable: str, durable_server: EmbeddedServer, record: Record, finish: Finish
) -> None:
    # The third restart within seconds waits for the clock.
    recorder = record(durable, expected=("SI005",))
    start_all(recorder)
    chance = random.Random(3)
    for _ in range(CRASHES):
        recorder.await_ids()
        time.sleep(chance.uniform(0.1, scaled(0.3, 1.0)))
        durable_server.restart("immediate")
    recorder.await_ids()
    finish(recorder)
    check_rows(durable, recorder)


def test_a_backend_that_is_killed(
    durable: str, durable_server: EmbeddedServer, record: Record, finish: Finish
) -> None:
    # The third restart within seconds waits for the clock.
    recorder = record(durable, expected=("SI005",))
    start_all(recorder)
    recorder.await_ids()
    for _ in range(CRASHES):
        run_ahead(durable, recorder)
        postmaster = durable_server.pid
        with psycopg.connect(durable) as victim:
            process = victim.info.backend_pid
            victim.execute("select shard_0000.next_id()")
            os.kill(process, signal.SIGKILL)
            with pytest.raises(psycopg.OperationalError):
                victim.execute("select pg_sleep(60)")
        recorder.await_ids()
        assert durable_server.pid == postmaster
    finish(recorder)
    check_rows(durable, recorder)


@pytest.mark.parametrize("activated", [False, True])
def test_ticks_set_aside_in_a_transaction_whose_wal_is_lost(
    activated: bool, durable: str, durable_server: EmbeddedServer
) -> None:
    """Less than half of safety_margin ahead; the first draw after an activation is no exception."""
    with closing(connect(durable)) as connection:
        # The lead is 20 s: much longer than the server takes to recover.
        connection.execute("update shardids.node set safety_margin = '60 seconds'")
        scalar(connection, "select shard_0000.next_id()")
        if activated:
            scalar(connection, "select shardids.fence(0)")
            connection.execute("select shardids.activate(0)")
        writer = scalar(connection, "select pid from pg_stat_activity where backend_type = 'walwriter'")
        os.kill(writer, signal.SIGSTOP)
        connection.execute("begin")
        for _ in range(5):
            _, last = connection.execute("select * from shardids.reserve(0, 4000000)").fetchone()
        end = scalar(connection, "select pg_current_wal_insert_lsn()")
        is_lost = scalar(connection, "select pg_current_wal_flush_lsn() < %s::pg_lsn", end)
        # The other processes end with it, and the log that was not written, as in a crash.
        os.kill(writer, signal.SIGKILL)
        assert is_lost, "somebody else has written the log"
        with pytest.raises(psycopg.OperationalError):
            connection.execute("select pg_sleep(60)")
    with connect_again(durable) as connection:
        first = int(ticks_of(draw(connection.cursor(binary=True), "one", 1))[0])
    assert first > last, f"{(last - first) >> LAYOUT.sequence_bits} ms below ticks that were set aside"


def connect_again(url: str) -> psycopg.Connection[Any]:
    """A connection as soon as the server has recovered."""
    found: list[psycopg.Connection[Any]] = []

    def is_back() -> bool:
        with suppress(psycopg.OperationalError):
            found.append(connect(url))
        return bool(found)

    wait_for(is_back, "the server has recovered")
    return found[0]


def test_a_lead_up_to_the_margin_that_a_crash_loses_is_not_issued_again(
    durable: str, durable_server: EmbeddedServer
) -> None:
    """What was stored last is older than the margin; the lead is that of two next_ids(2,000,000)."""
    chance = random.Random(7)
    twice = []
    with connect(durable) as connection:
        connection.execute("update shardids.node set safety_margin = '4 seconds'")
        connection.execute("alter system set wal_writer_delay = '10s'")
        connection.execute("select pg_reload_conf()")
        for shard in range(1, LOST_LEADS + 1):
            with connection.transaction():
                connection.execute("select shardids.enter_shard(%s)", (shard,))
                connection.execute("select set_config('search_path', shardids.schema_of(%s), true)", (shard,))
                connection.execute(trees.shard_sql())
    for first in range(1, LOST_LEADS + 1, 2):
        pair = (first, first + 1)
        with ExitStack() as stack, ThreadPoolExecutor(len(pair)) as pool:
            sessions = [stack.enter_context(closing(connect(durable))) for _ in pair]
            for session, shard in zip(sessions, pair, strict=True):
                block(session, shard, 1)
            time.sleep(chance.uniform(3, 6))
            for session in sessions:
                session.execute("begin")
            for _ in range(2):
                lost = list(pool.map(block, sessions, pair, repeat(2_000_000)))
            durable_server.restart("immediate")
        with closing(connect(durable)) as connection:
            found = [block(connection, shard, 2_000_000) for shard in pair]
        twice += [(old, new) for old, new in zip(lost, found, strict=True) if new[0] <= old[1]]
    with connect(durable) as connection:
        connection.execute("alter system reset wal_writer_delay")
    assert not twice, f"{len(twice)} of {LOST_LEADS} leads were issued again: {twice[:3]}"


def block(connection: psycopg.Connection[Any], shard: int, size: int) -> tuple[int, int]:
    """The first and the last tick of one call of the shard's ``next_ids``."""
    query = f"select min(id), max(id), count(*) from shard_{shard:04}.next_ids({size}) drawn (id)"
    first, last, count = connection.execute(query).fetchone()
    assert count == size
    low, high = ticks_of(np.array([first, last])).tolist()
    return low, high


def test_an_older_copy_of_the_files_in_the_place_of_a_server(
    durable: str, durable_server: EmbeddedServer
) -> None:
    """Both incarnations begin with what was stored at the stop, and are ahead of the clock."""

    def issued() -> set[int]:
        with connect(durable) as connection:
            return set(draw(connection.cursor(binary=True), "one", 50).tolist())

    data = durable_server.data_directory
    copy = data.with_name("copy")
    before = issued()
    durable_server.stop()
    subprocess.run(["cp", "-a", data, copy], check=True)
    durable_server.start(attached=True)
    original = issued()
    with connect(durable) as connection:
        assert min(ticks_of(np.array(list(original)))) >> LAYOUT.sequence_bits > clock_ms(connection) + 1000
    durable_server.kill()
    shutil.rmtree(data)
    copy.rename(data)
    durable_server.start(attached=True)
    assert not issued() & (original | before)


def start_all(recorder: Recorder) -> None:
    recorder.start(8)
    recorder.start(4, session=Writer)
    recorder.start(4, session=Lingerer)


def run_ahead(url: str, recorder: Recorder) -> None:
    """Sets ticks aside until the shard is 3 s ahead of the clock, so that no draw looks closer by itself."""
    with connect(url) as connection:
        ahead_ms = 0
        while ahead_ms < 3000:
            _, last = connection.execute("select * from shardids.reserve(0, 1000000)").fetchone()
            ahead_ms = (last >> LAYOUT.sequence_bits) - clock_ms(connection)
    recorder.await_ids()


def check_rows(url: str, recorder: Recorder) -> None:
    """Each acknowledged row is there, and no other, except for commits that the crash left in doubt."""
    with connect(url) as connection:
        rows = np.array(connection.cursor(binary=True).execute("select id from kept").fetchall())[:, 0]
    writers = [session for session in recorder.sessions if isinstance(session, Writer)]
    acknowledged = np.concatenate([ids for writer in writers for ids in writer.acknowledged])
    assert len(acknowledged)
    lost = np.setdiff1d(acknowledged, rows)
    assert not len(lost), f"{len(lost)} acknowledged rows are lost"
    others = np.setdiff1d(rows, acknowledged)
    for ids in (ids for writer in writers for ids in writer.in_doubt):
        there = np.isin(ids, others)
        assert there.all() or not there.any(), "half of a transaction was committed"
        others = np.setdiff1d(others, ids)
    assert not len(others), f"{len(others)} rows are there that nobody committed"
