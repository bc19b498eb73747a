"""A primary restarts several times within seconds, then is lost; its standby lacks all of that."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from shardids.pg.embedded import temporary_server
from tests.faults.conftest import DURABLE, make_node
from tests.support.faults import LAYOUT, clock_ms, connect, draw, scaled, ticks_of
from tests.support.incarnations import reconnect
from tests.support.replicas import deafen
from tests.support.standbys import Server, standby_of

MARGIN_MS = scaled(3_000, 10_000)
RESERVED_MS = MARGIN_MS * 9 // 10
DRAWN = scaled(20_000, 100_000)
LONGEST_WAIT_S = 60
AWAY_MS = 2_000
"""What a few statements take on a busy machine, in which the clock or the shard goes on."""


class Issued:
    """The ticks of everything that was drawn or reserved, as ranges."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.waited = 0

    def draw(self, url: str, *, reserved_ms: int) -> None:
        """Draws from an incarnation that has just begun; waits where it refuses."""
        end = time.monotonic() + LONGEST_WAIT_S
        while True:
            try:
                with reconnect(url) as db:
                    self.draw_from(db, reserved_ms)
                    return
            except psycopg.Error as error:
                if error.sqlstate != "SI005" or "waits for the clock" not in str(error):
                    raise
                self.waited += 1
                assert time.monotonic() < end

    def draw_from(self, db: psycopg.Connection[Any], reserved_ms: int) -> None:
        cursor = db.cursor(binary=True)
        for kind, size in (("one", 1), ("many", DRAWN), ("block", 3000)):
            ticks = ticks_of(draw(cursor, kind, size))
            self.ranges += [(int(tick), int(tick)) for tick in ticks]
        while reserved_ms > 0:
            block_ms = min(reserved_ms, 1_000)
            query = "select first_tick, last_tick from shardids.reserve(0, %s)"
            first, last = cursor.execute(query, (block_ms << LAYOUT.sequence_bits,)).fetchone()
            self.ranges.append((first, last))
            reserved_ms -= block_ms

    def lead_ms(self, url: str) -> int:
        with reconnect(url) as db:
            return (max(last for _, last in self.ranges) >> LAYOUT.sequence_bits) - clock_ms(db)

    def twice(self) -> int:
        first, last = np.array(sorted(self.ranges)).T
        return int((np.maximum.accumulate(last)[:-1] >= first[1:]).sum())


def end(server: Server, how: str) -> None:
    if how == "kill":
        server.kill()
        server.start(attached=True)  # type: ignore[attr-defined]  # the primary is an EmbeddedServer
    else:
        server.restart("fast")


@pytest.mark.parametrize("reserved_ms", [0, RESERVED_MS])
@pytest.mark.parametrize("how", ["fast", "kill"])
@pytest.mark.parametrize("restarts", scaled([3], [0, 1, 2, 3, 4, 5, 6]))
def test_a_standby_that_lacks_several_restarts_issues_none_of_their_ids(
    restarts: int, how: str, reserved_ms: int
) -> None:
    with temporary_server(settings=DURABLE) as primary:
        url = make_node(primary, "restarts")
        with connect(url) as db:
            db.execute("update shardids.node set safety_margin = %s * interval '1 ms'", (MARGIN_MS,))
        issued = Issued()
        issued.draw(url, reserved_ms=0)
        with standby_of(primary) as standby:
            deafen(primary, standby)
            for _ in range(restarts):
                end(primary, how)
                issued.draw(url, reserved_ms=0)
            if reserved_ms:
                with connect(url) as db:
                    issued.draw_from(db, reserved_ms)
            assert issued.lead_ms(url) <= 4 * MARGIN_MS + AWAY_MS
            primary.kill()
            promoted = make_conninfo(url, port=standby.port)
            with connect(promoted) as db:
                db.execute("select pg_promote()")
            issued.draw(promoted, reserved_ms=0)
            for again in ("fast", "immediate"):
                standby.restart(again)  # type: ignore[arg-type]  # one of two literals
                issued.draw(promoted, reserved_ms=reserved_ms)
            assert issued.lead_ms(promoted) <= 5 * MARGIN_MS + AWAY_MS
        assert issued.twice() == 0
