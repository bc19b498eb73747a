"""Copies that PostgreSQL itself makes: a standby that is promoted, a subscriber of logical replication."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg import sql

from shardids.embedded import EmbeddedServer, find_binaries
from tests.faults.conftest import Finish, Record
from tests.faults.support import (
    ALL_KINDS,
    LAYOUT,
    Clock,
    Recorder,
    connect,
    draw,
    scalar,
    scaled,
    until,
)
from tests.integration.standbys import password_of, standby_of

SESSIONS = 8
AHEAD_S = 3


def test_a_standby_promoted_without_the_last_wal(
    clock: Clock, own_faked_server: EmbeddedServer, record: Record, finish: Finish
) -> None:
    clock.set(AHEAD_S)
    recorder = record(own_faked_server.url())
    with standby_of(own_faked_server) as url, connect(url) as standby:
        recorder.start(SESSIONS, kinds=("one", "many"))
        recorder.await_ids()
        until(lambda: is_receiving(standby), "the standby receives WAL")
        time.sleep(scaled(0.5, 2.0))
        stop_receiving(standby)
        fail_over(own_faked_server, standby, url, recorder)
        finish(recorder)


@pytest.mark.parametrize("activated", ["before", "after"])
def test_a_standby_promoted_without_the_first_draws_after_a_fence(
    activated: str, clock: Clock, own_faked_server: EmbeddedServer, record: Record, finish: Finish
) -> None:
    """The activation is in the WAL that the standby got, or it is repeated after the promotion."""
    clock.set(AHEAD_S)
    recorder = record(own_faked_server.url())
    with (
        standby_of(own_faked_server) as url,
        connect(url) as standby,
        connect(own_faked_server.url()) as primary,
    ):
        scalar(primary, "select shard_0000.next_id()")
        scalar(primary, "select shardids.fence(0)")
        if activated == "before":
            primary.execute("select shardids.activate(0)")
        until(lambda: has_all_of(standby, primary), "the standby has it all")
        stop_receiving(standby)
        if activated == "after":
            primary.execute("select shardids.activate(0)")
        recorder.start(SESSIONS, kinds=("one", "many"))
        fail_over(own_faked_server, standby, url, recorder, activate=activated == "after")
        finish(recorder)


def fail_over(
    primary: EmbeddedServer,
    standby: psycopg.Connection[Any],
    url: str,
    recorder: Recorder,
    *,
    activate: bool = False,
) -> None:
    """Draws from the primary what the standby never hears of, and then from the promoted standby."""
    lost = recorder.next_phase()
    recorder.await_ids()
    time.sleep(scaled(0.5, 5.0))
    primary.kill()
    promoted = recorder.next_phase()
    assert scalar(standby, "select pg_promote()")
    if activate:
        standby.execute("select shardids.activate(0)")
    recorder.url = url
    recorder.await_ids()
    time.sleep(scaled(0.5, 5.0))
    recorder.stop()
    old = recorder.ticks(lambda batch: batch.after < promoted)
    new = recorder.ticks(lambda batch: batch.before >= promoted)
    assert len(recorder.ticks(lambda batch: batch.before >= lost and batch.after < promoted))
    assert new.min() > old.max(), (
        f"{(old.max() - new.min()) >> LAYOUT.sequence_bits} ms below the old primary's"
    )


def test_a_subscriber_refuses_until_it_is_activated(
    own_server: EmbeddedServer, subscriber: EmbeddedServer, record: Record, finish: Finish
) -> None:
    recorder = record(own_server.url(), expected=("SI002",))
    recorder.start(SESSIONS)
    copy_schema(own_server, subscriber)
    with connect(own_server.url()) as original, connect(subscriber.url()) as copy:
        subscribe(original, copy, own_server)
        recorder.await_ids()
        assert_refused(copy, "SI004", "is a copy that was not activated here")
        recorder.await_ids()
        high_water = scalar(original, "select shardids.fence(0)")
        fenced = recorder.next_phase()
        until(lambda: is_fenced(copy), "the row is replicated")
        assert_refused(copy, "SI002", "shard 0 is fenced")
        copy.execute("alter subscription copied disable")
        copy.execute("alter subscription copied set (slot_name = none)")
        copy.execute("drop subscription copied")
        original.execute(
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots where not active"
        )
        copy.execute("select shardids.activate(0, %s)", (high_water,))
        own_server.kill()
        recorder.url = subscriber.url()
        recorder.await_ids()
        time.sleep(scaled(0.5, 10.0))
        finish(recorder)
    new = recorder.ticks(lambda batch: batch.before >= fenced)
    assert new.min() > high_water
    assert recorder.ticks(lambda batch: batch.after < fenced).max() <= high_water


def test_a_copy_of_active_sequences_with_the_row_of_a_fenced_shard(
    node: str, duplicate: Callable[[str], str], record: Record, finish: Finish
) -> None:
    """As replication of all tables leaves it when the sequences were copied a moment before the fence."""
    recorder = record(node, expected=("SI002",))
    recorder.start(1)
    recorder.await_ids()
    with recorder.paused():
        end_sessions(node)
        url = duplicate(node)
    with connect(node) as original, connect(url) as copy:
        recorder.start(SESSIONS - 1)
        recorder.await_ids()
        assert_refused(copy, "SI004", "is a copy that was not activated here")
        high_water = scalar(original, "select shardids.fence(0)")
        fenced = recorder.next_phase()
        send_rows(original, copy, "shardids.shard")
        assert_refused(copy, "SI002", "shard 0 is fenced")
        copy.execute("select shardids.activate(0)")
        recorder.url = url
        recorder.start(SESSIONS)
        recorder.await_ids(SESSIONS)
        finish(recorder)
    assert recorder.ticks(lambda batch: batch.before >= fenced).min() > high_water


def is_receiving(standby: psycopg.Connection[Any]) -> bool:
    return scalar(standby, "select count(*) from pg_stat_wal_receiver where status = 'streaming'") > 0


def stop_receiving(standby: psycopg.Connection[Any]) -> None:
    standby.execute("alter system set primary_conninfo = ''")
    standby.execute("select pg_reload_conf()")
    until(lambda: not is_receiving(standby), "the standby receives no more WAL")


def has_all_of(standby: psycopg.Connection[Any], primary: psycopg.Connection[Any]) -> bool:
    written = scalar(primary, "select pg_current_wal_flush_lsn()::text")
    return scalar(standby, "select coalesce(pg_last_wal_replay_lsn() >= %s::pg_lsn, false)", written)


def is_fenced(connection: psycopg.Connection[Any]) -> bool:
    return scalar(connection, "select state from shardids.shard where id = 0") == "fenced"


def copy_schema(source: EmbeddedServer, target: EmbeddedServer) -> None:
    """Everything but rows and the values of sequences."""
    programs = find_binaries()
    dump = subprocess.run(
        [programs / "pg_dump", "--schema-only", source.url()], check=True, capture_output=True
    ).stdout
    command = [programs / "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-o", os.devnull, target.url()]
    subprocess.run(command, input=dump, check=True)


def subscribe(
    original: psycopg.Connection[Any], copy: psycopg.Connection[Any], source: EmbeddedServer
) -> None:
    """Replicates all tables, and waits for the rows that are there."""
    original.execute("create publication everything for all tables")
    conninfo = (
        f"host=127.0.0.1 port={source.port} user=postgres dbname=postgres password={password_of(source)}"
    )
    copy.execute(
        sql.SQL("create subscription copied connection {} publication everything").format(
            sql.Literal(conninfo)
        )
    )
    pending = "select count(*) from pg_subscription_rel where srsubstate <> 'r'"
    until(lambda: scalar(copy, pending) == 0, "all tables are copied")


def send_rows(original: psycopg.Connection[Any], copy: psycopg.Connection[Any], table: str) -> None:
    """Replaces the rows of a table in the copy."""
    copy.execute(f"delete from {table}")
    with (
        original.cursor() as source,
        copy.cursor() as target,
        source.copy(f"copy {table} to stdout") as rows,
        target.copy(f"copy {table} from stdin") as sink,
    ):
        for row in rows:
            sink.write(row)


def end_sessions(url: str) -> None:
    """Ends the other sessions of a database."""
    with connect(url) as admin:
        admin.execute(
            """select pg_terminate_backend(pid, 5000) from pg_stat_activity
               where datname = current_database() and pid <> pg_backend_pid()"""
        )


def assert_refused(connection: psycopg.Connection[Any], state: str, message: str) -> None:
    for kind in ALL_KINDS:
        with pytest.raises(psycopg.Error, match=message) as refused:
            draw(connection.cursor(binary=True), kind, 10)
        assert refused.value.sqlstate == state
