"""A server is lost while a shard leads the clock by nearly the margin; a copy of its files replaces it."""

from __future__ import annotations

import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg

from shardids.pg.embedded import EmbeddedServer, temporary_servers
from tests.faults.conftest import DURABLE, make_node
from tests.support.faults import LAYOUT, clock_ms, connect, draw, scaled, ticks_of

MARGIN_MS = 10_000
SHORT_OF_MARGIN_MS = 400
"""The lead must still be below the margin when it is reserved; the clock then gains on it until the kill."""
TRIALS = scaled(3, 200)
SIDE_BY_SIDE = scaled(3, 8)
AFTER = 3000


class Issued:
    """Ticks that were drawn, ranges of ticks that were reserved, and how many of either came twice."""

    def __init__(self) -> None:
        self.drawn: set[int] = set()
        self.reserved: list[range] = []
        self.twice = 0

    def draw(self, ticks: list[int]) -> None:
        known = len(self.drawn)
        self.drawn.update(ticks)
        self.twice += len(ticks) - (len(self.drawn) - known)
        self.twice += sum(tick in before for tick in ticks for before in self.reserved)

    def reserve(self, ticks: range) -> None:
        self.twice += sum(tick in ticks for tick in self.drawn)
        for before in self.reserved:
            self.twice += max(0, min(ticks.stop, before.stop) - max(ticks.start, before.start))
        self.reserved.append(ticks)


class Lineage:
    """A server whose files are copied once, and which is lost and replaced by that copy again and again."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.server, self.issued = server, Issued()
        self.url = make_node(server, "lost leads")
        self.leads_ms: list[int] = []
        with connect(self.url) as connection:
            self._draw(connection.cursor(binary=True))
        server.stop()
        self.copy = server.data_directory.with_name("copy")
        copy_files(server.data_directory, self.copy)
        server.start(attached=True)

    def lose_and_replace(self) -> None:
        with connect(self.url) as connection:
            cursor = connection.cursor(binary=True)
            self._draw(cursor)
            # The margin of this incarnation is behind the clock by then: all of the lead is reserved.
            time.sleep(MARGIN_MS / 1000)
            self.leads_ms.append(self._lead(cursor))
            self.server.kill()
        shutil.rmtree(self.server.data_directory)
        copy_files(self.copy, self.server.data_directory)
        self.server.start(attached=True)
        with connect(self.url) as connection:
            self._draw(connection.cursor(binary=True))

    def _draw(self, cursor: psycopg.Cursor[Any]) -> None:
        for kind, size in (("one", 1), ("many", AFTER), ("block", AFTER)):
            self.issued.draw(ticks_of(draw(cursor, kind, size)).tolist())

    def _lead(self, cursor: psycopg.Cursor[Any]) -> int:
        """Reserves ticks until the shard leads its clock by nearly the margin; gives the lead in ms."""
        lead_ms = 0
        while (room_ms := MARGIN_MS - SHORT_OF_MARGIN_MS - lead_ms) > 100:
            ticks = min(2_000_000, room_ms << LAYOUT.sequence_bits)
            first, last = cursor.execute("select * from shardids.reserve(0, %s)", (ticks,)).fetchone()
            self.issued.reserve(range(first, last + 1))
            lead_ms = (last >> LAYOUT.sequence_bits) - clock_ms(cursor.connection)
        return lead_ms


def copy_files(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-a", source, target], check=True)


def test_no_id_of_a_lost_lead_is_issued_again() -> None:
    with (
        temporary_servers(SIDE_BY_SIDE, settings=DURABLE) as servers,
        ThreadPoolExecutor(SIDE_BY_SIDE) as pool,
    ):

        def lose(server: EmbeddedServer) -> Lineage:
            lineage = Lineage(server)
            for _ in range(TRIALS // SIDE_BY_SIDE):
                lineage.lose_and_replace()
            return lineage

        lineages = list(pool.map(lose, servers))
    leads_ms = [lead for lineage in lineages for lead in lineage.leads_ms]
    assert len(leads_ms) == TRIALS
    assert min(leads_ms) > MARGIN_MS * 0.9
    twice = [lineage.issued.twice for lineage in lineages]
    assert sum(twice) == 0, (
        f"{sum(twice):,} IDs came twice, in {sum(map(bool, twice))} of {SIDE_BY_SIDE} servers"
    )
