"""The drill: a hot shard gets a node to itself, unattended, while all shards are written to."""

from __future__ import annotations

import signal
import time

import pytest

from benchmarks.watching import Drill
from tests.support.waiting import wait_for


@pytest.mark.long
def test_a_hot_shard_gets_a_node_to_itself_and_no_write_is_lost() -> None:
    with Drill.opened(rows=200, writers=4, writes_a_second=100.0) as drill:
        assert not drill.is_alone()
        with drill.writing(), drill.watching("--over", "4s", "--max-latency", "5s") as watch:
            drill.await_alone()
            wait_for(lambda: len(drill.moments("moved")) == len(drill.moments("moving")), "the last move")
            watch.send_signal(signal.SIGTERM)
            assert watch.wait(60) == 0
        assert drill.is_alone()
        assert drill.missing() == 0
        assert drill.moments("failed") == []
        assert len(drill.written) > 200


@pytest.mark.long
def test_killed_at_each_move_it_still_gets_there() -> None:
    quick = ("--over", "3s", "--max-latency", "5s")
    with Drill.opened(rows=5000) as drill:
        with drill.writing():
            for killed in range(1, 5):
                with drill.watching(*quick) as watch:
                    wait_for(lambda: drill.begun() >= killed, "a move", 300)  # noqa: B023 -- of this round
                    time.sleep(0.3 * killed)
                    watch.kill()
            with drill.watching(*quick) as watch:
                drill.await_alone()
                watch.send_signal(signal.SIGTERM)
                assert watch.wait(60) == 0
        assert drill.missing() == 0
