"""A standby is promoted without the last WAL of its primary, whose clock is ahead."""

from __future__ import annotations

import time
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from shardids.embedded import EmbeddedServer
from tests.faults.conftest import Finish, Record
from tests.faults.recorder import Recorder
from tests.faults.replicas import has_all_of, is_receiving, standby_of, stop_receiving
from tests.faults.support import SLOW_KINDS, Clock, connect, scalar, scaled, until

SESSIONS = 8
AHEAD_S = 3


@pytest.fixture(autouse=True)
def _clock_ahead(clock: Clock) -> None:
    clock.set(AHEAD_S)


def test_a_standby_promoted_without_the_last_wal(
    faked_server: EmbeddedServer, faked_node: str, record: Record, finish: Finish
) -> None:
    recorder = record(faked_node)
    with standby_of(faked_server) as port, connect(make_conninfo(faked_node, port=port)) as standby:
        recorder.start(SESSIONS, kinds=SLOW_KINDS)
        recorder.await_ids()
        until(lambda: is_receiving(standby), "the standby receives WAL")
        time.sleep(scaled(0.3, 2.0))
        stop_receiving(standby)
        fail_over(faked_server, standby, recorder, port)
        finish(recorder)


@pytest.mark.parametrize("activated", ["before", "after"])
def test_a_standby_promoted_without_the_first_draws_after_a_fence(
    activated: str, faked_server: EmbeddedServer, faked_node: str, record: Record, finish: Finish
) -> None:
    """The activation is in the WAL that the standby got, or it is repeated after the promotion."""
    recorder = record(faked_node)
    with (
        standby_of(faked_server) as port,
        connect(make_conninfo(faked_node, port=port)) as standby,
        connect(faked_node) as primary,
    ):
        scalar(primary, "select shard_0000.next_id()")
        scalar(primary, "select shardids.fence(0)")
        if activated == "before":
            primary.execute("select shardids.activate(0)")
        until(lambda: has_all_of(standby, primary), "the standby has it all")
        stop_receiving(standby)
        if activated == "after":
            primary.execute("select shardids.activate(0)")
        recorder.start(SESSIONS, kinds=SLOW_KINDS)
        fail_over(faked_server, standby, recorder, port, activate=activated == "after")
        finish(recorder)


def fail_over(
    primary: EmbeddedServer,
    standby: psycopg.Connection[Any],
    recorder: Recorder,
    port: int,
    *,
    activate: bool = False,
) -> None:
    """Draws from the primary what the standby never hears of, and then from the promoted standby."""
    lost = recorder.next_phase()
    recorder.await_ids()
    time.sleep(scaled(0.5, 3.0))
    primary.kill()
    promoted = recorder.next_phase()
    assert scalar(standby, "select pg_promote()")
    if activate:
        standby.execute("select shardids.activate(0)")
    recorder.url = make_conninfo(recorder.url, port=port)
    recorder.await_ids()
    time.sleep(scaled(0.3, 5.0))
    recorder.stop()
    assert recorder.ticks_since(promoted).min() > recorder.ticks_until(promoted).max()
    assert len(recorder.ticks_since(lost)) > len(recorder.ticks_since(promoted))
