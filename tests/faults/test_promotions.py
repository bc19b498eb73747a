"""A standby is promoted without the last WAL of its primary, whose clock is ahead."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from shardids.pg.embedded import EmbeddedServer
from tests.faults.conftest import Finish, Record
from tests.support.faults import SLOW_KINDS, connect, scalar, scaled
from tests.support.recorder import Recorder
from tests.support.replicas import has_all_of, is_receiving, stop_receiving
from tests.support.server_clock import Clock
from tests.support.standbys import standby_of
from tests.support.waiting import wait_for

SESSIONS = 8
AHEAD_S = 3


class Pair(NamedTuple):
    """A primary and its standby, with connections to the same database of each."""

    server: EmbeddedServer
    primary: psycopg.Connection[Any]
    standby: psycopg.Connection[Any]
    primary_url: str
    standby_url: str


@pytest.fixture
def pair(faked_server: EmbeddedServer, faked_node: str) -> Iterator[Pair]:
    with standby_of(faked_server) as standby_server:
        url = make_conninfo(faked_node, port=standby_server.port)
        with connect(faked_node) as primary, connect(url) as standby:
            yield Pair(faked_server, primary, standby, faked_node, url)


def test_a_standby_promoted_without_the_last_wal(
    pair: Pair, clock: Clock, record: Record, finish: Finish
) -> None:
    clock.set(AHEAD_S)
    recorder = record(pair.primary_url)
    recorder.start(SESSIONS, kinds=SLOW_KINDS)
    recorder.await_ids()
    wait_for(lambda: is_receiving(pair.standby), "the standby receives WAL")
    time.sleep(scaled(0.3, 2.0))
    stop_receiving(pair.standby)
    draw_what_is_lost(recorder, pair.server)
    promote(recorder, pair)
    finish(recorder)


@pytest.mark.parametrize("heard", ["a draw", "a fence", "an activation"])
def test_a_standby_promoted_without_a_draw_of_the_last_minute(
    heard: str, pair: Pair, clock: Clock, record: Record, finish: Finish
) -> None:
    """That is the last that it heard of. A fence is lifted on the primary, and on the standby again."""
    clock.set(-60)
    scalar(pair.primary, "select shard_0000.next_id()")
    if heard != "a draw":
        scalar(pair.primary, "select shardids.fence(0)")
    if heard == "an activation":
        pair.primary.execute("select shardids.activate(0)")
    wait_for(lambda: has_all_of(pair.standby, pair.primary), "the standby has it all")
    stop_receiving(pair.standby)
    if heard == "a fence":
        pair.primary.execute("select shardids.activate(0)")
    clock.set(AHEAD_S)
    recorder = record(pair.primary_url)
    recorder.start(SESSIONS, kinds=SLOW_KINDS)
    draw_what_is_lost(recorder, pair.server)
    promote(recorder, pair, activate=heard == "a fence")
    finish(recorder)


def draw_what_is_lost(recorder: Recorder, server: EmbeddedServer) -> None:
    """Draws from a primary whose standby receives nothing more, until it dies."""
    recorder.await_ids()
    time.sleep(scaled(0.3, 3.0))
    server.kill()
    # Sessions under way outlive the postmaster for a moment.
    dead = recorder.next_phase()
    wait_for(
        lambda: all(one.refusals and one.refusals[-1].asked.phase >= dead for one in recorder.sessions),
        "the sessions have lost the primary",
    )


def promote(recorder: Recorder, pair: Pair, *, activate: bool = False) -> None:
    """Makes the standby the primary, and the sessions draw there."""
    promoted = recorder.next_phase()
    assert scalar(pair.standby, "select pg_promote()")
    if activate:
        pair.standby.execute("select shardids.activate(0)")
    recorder.url = pair.standby_url
    recorder.await_ids()
    time.sleep(scaled(0.3, 5.0))
    recorder.stop()
    assert recorder.ticks_since(promoted).min() > recorder.ticks_until(promoted).max()
