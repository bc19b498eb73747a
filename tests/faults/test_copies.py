"""Copies of a shard under load: each refuses until it is activated, and then issues nothing again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from shardids.pg.embedded import EmbeddedServer
from tests.faults.conftest import Finish, Record, make_database, make_node
from tests.support.client_programs import Dumper
from tests.support.faults import (
    ALL_KINDS,
    SLOW_KINDS,
    assert_refused,
    connect,
    end_sessions,
    scalar,
    scaled,
)
from tests.support.recorder import Recorder
from tests.support.replicas import subscribe, unsubscribe
from tests.support.server_clock import Clock
from tests.support.waiting import wait_for

SESSIONS = scaled(4, 8)
AHEAD_S = 3
TakeOver = Callable[..., None]
NOT_ACTIVATED = "is a copy that was not activated here"


@pytest.fixture(autouse=True)
def _clock_of_the_original(clock: Clock) -> None:
    clock.set(AHEAD_S)


@pytest.fixture(params=["told", "untold"])
def high_water_is_told(request: pytest.FixtureRequest) -> bool:
    """Whether the original is fenced, and its high-water tick told to the copy; or it is lost."""
    return bool(request.param == "told")


@pytest.mark.parametrize("make_copy", ["template", "dump", "dump of the schema"], indirect=True)
def test_a_copy_refuses_until_it_is_activated(
    make_copy: Callable[[Recorder], str],
    high_water_is_told: bool,
    faked_node: str,
    record: Record,
    take_over: TakeOver,
) -> None:
    recorder = record(faked_node, expected=("SI002",))
    recorder.start(SESSIONS, kinds=ALL_KINDS if high_water_is_told else SLOW_KINDS)
    recorder.await_ids()
    url = make_copy(recorder)
    with connect(faked_node) as original, connect(url) as copy:
        recorder.await_ids()
        assert_refused(copy, "SI004", NOT_ACTIVATED)
        recorder.await_ids()
        high_water = scalar(original, "select shardids.fence(0)") if high_water_is_told else -1
        take_over(recorder, url, high_water)


def test_a_subscriber_refuses_until_it_is_activated(
    high_water_is_told: bool, faked_node: str, empty_database: str, record: Record, take_over: TakeOver
) -> None:
    recorder = record(faked_node, expected=("SI002",))
    recorder.start(SESSIONS, kinds=ALL_KINDS if high_water_is_told else SLOW_KINDS)
    with connect(faked_node) as original, connect(empty_database) as copy:
        copy_by_dump(faked_node, empty_database, "--schema-only")
        subscribe(original, copy, faked_node)
        recorder.await_ids()
        assert_refused(copy, "SI004", NOT_ACTIVATED)
        recorder.await_ids()
        high_water = -1
        if high_water_is_told:
            high_water = scalar(original, "select shardids.fence(0)")
            wait_for(lambda: is_fenced(copy), "the row is replicated")
            assert_refused(copy, "SI002", "shard 0 is fenced")
        unsubscribe(original, copy)
        take_over(recorder, empty_database, high_water)


def test_a_copy_of_active_sequences_with_the_row_of_a_fenced_shard(
    faked_node: str, empty_database: str, record: Record, take_over: TakeOver
) -> None:
    """As replication of all tables leaves it when the sequences were copied a moment before the fence."""
    recorder = record(faked_node, expected=("SI002",))
    recorder.start(SESSIONS)
    recorder.await_ids()
    copy_by_dump(faked_node, empty_database)
    with connect(faked_node) as original, connect(empty_database) as copy:
        recorder.await_ids()
        assert_refused(copy, "SI004", NOT_ACTIVATED)
        high_water = scalar(original, "select shardids.fence(0)")
        send_rows(original, copy, "shardids.shard")
        assert_refused(copy, "SI002", "shard 0 is fenced")
        take_over(recorder, empty_database)
    assert recorder.ticks_since(recorder.phase).min() > high_water


@pytest.fixture
def take_over(clock: Clock, finish: Finish) -> TakeOver:
    """Activates the copy and has the sessions draw from there, by a clock that is behind the original's."""

    def go_on(recorder: Recorder, url: str, above_tick: int = -1) -> None:
        clock.set(0)
        with recorder.paused(), connect(url) as copy:
            end_sessions(recorder.url)
            recorder.url = url
            copy.execute("select shardids.activate(0, %s)", (above_tick,))
        recorder.await_ids()
        time.sleep(scaled(0.1, 2.0))
        finish(recorder)

    return go_on


@pytest.fixture
def empty_database(server: EmbeddedServer, request: pytest.FixtureRequest) -> str:
    """The URL of a database on a server other than the original's."""
    return make_database(server, request.node.name)


@pytest.fixture
def make_copy(
    server: EmbeddedServer, faked_server: EmbeddedServer, request: pytest.FixtureRequest
) -> Callable[[Recorder], str]:
    """Copies the database of a recorder, whose sessions stay connected where that is possible."""

    def clone(recorder: Recorder) -> str:
        with recorder.paused():
            end_sessions(recorder.url)
            return make_database(faked_server, "copy", template=str(conninfo_to_dict(recorder.url)["dbname"]))

    def restore(recorder: Recorder) -> str:
        url = make_database(server, request.node.name)
        copy_by_dump(recorder.url, url)
        return url

    def restore_schema(recorder: Recorder) -> str:
        url = make_node(server, request.node.name, shard=1)
        copy_by_dump(recorder.url, url, "--schema=shard_0000")
        return url

    return {"template": clone, "dump": restore, "dump of the schema": restore_schema}[request.param]


ROLES = """
    do $$
    begin
      if to_regrole('shardids_reader') is null then
        create role shardids_reader nologin bypassrls;
        grant pg_read_all_data to shardids_reader;
      end if;
    end
    $$"""
"""What ``pg_dumpall --roles-only`` brings: pg_dump names roles and does not create them."""


def copy_by_dump(source: str, target: str, *options: str) -> None:
    with connect(source) as connection, connect(target) as copy:
        copy.execute(ROLES)
        dumper = Dumper(connection.info.server_version)
    dumper.restore(target, dumper.dump(source, *options))


def is_fenced(connection: psycopg.Connection[Any]) -> bool:
    return bool(scalar(connection, "select state = 'fenced' from shardids.shard where id = 0"))


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
