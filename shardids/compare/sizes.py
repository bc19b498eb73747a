"""How much each measure draws and inserts, in the whole run and in the quick one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

CLIENTS: Final = 16
"""Clients that draw or insert at once, half of them on each node."""

PACED_CLIENTS: Final = (0, 0, 0, 1)
"""The nodes of the clients that draw at an even pace: the first node has three times the load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a run consists of.

    Attributes:
        rounds: interleaved rounds of draws and of inserts.
        draws: single draws a round.
        many: keys that are drawn at once.
        insert_s: how long clients insert, each round.
        rows: rows of the table that is filled.
        fill_s: filling a table ends after so long, however many rows it has.
        paced_s: how long clients draw at an even pace.
        rush_s, rush_keys: how long clients draw as fast as they can, and how many keys each at most.
        steps, clock_keys: how often the clocks step back, and how many keys each client draws meanwhile.
        disk_mb: free disk that it takes.
    """

    rounds: int
    draws: int
    many: int
    insert_s: float
    rows: int
    fill_s: float
    paced_s: float
    rush_s: float
    rush_keys: int
    steps: int
    clock_keys: int
    disk_mb: int

    def in_words(self) -> Mapping[str, str]:
        """What a report says of each measure, by its name."""
        first, second = (PACED_CLIENTS.count(node) for node in (0, 1))
        rounds = "one round" if self.rounds == 1 else f"{self.rounds} interleaved rounds"
        return {
            "draws": f"{rounds} of {self.draws:,} single draws by one client, and of one of"
            f" {self.many:,} at once",
            "inserts": f"{rounds} of {self.insert_s} s: draw, INSERT … RETURNING and COMMIT, by 1 client and"
            f" by {CLIENTS} on two nodes; the median round",
            "storage": f"one client fills a table (key, integer) by COPY, up to {self.rows:,} rows, or for"
            f" {self.fill_s:g} s; it brings the keys, drawn many at once, unless the server makes them",
            "order": f"{first} clients of the first node and {second} of the second each draw a key about"
            f" every ms for {self.paced_s:g} s; times are taken before and after each draw",
            "full speed": f"{CLIENTS} clients, half of them on each node, draw many at once for"
            f" {self.rush_s:g} s, up to {self.rush_keys:,} keys each",
            "clock back": f"4 clients on two nodes draw up to {self.clock_keys:,} keys each while their"
            f" clocks, simulated by libfaketime, step back {self.steps} times by 0.1 s; so do those of"
            " PostgreSQL and MariaDB, but not Redis', which can't run under it",
            "faults": "the first server of each kind is killed, then stopped in order, then replaced by a"
            " copy of its files from before its last keys, which simulates a standby that lagged or a"
            " restored backup; a PostgreSQL server is added. Meanwhile clients of two nodes draw one by one",
        }


FULL: Final = Sizes(
    rounds=7,
    draws=500,
    many=10_000,
    insert_s=0.5,
    rows=1_000_000,
    fill_s=12,
    paced_s=3,
    rush_s=2,
    rush_keys=50_000,
    steps=20,
    clock_keys=200_000,
    disk_mb=6000,
)
"""The whole run: some minutes."""

QUICK: Final = Sizes(
    rounds=1,
    draws=200,
    many=1000,
    insert_s=0.15,
    rows=50_000,
    fill_s=1,
    paced_s=0.3,
    rush_s=0.2,
    rush_keys=5_000,
    steps=6,
    clock_keys=40_000,
    disk_mb=3000,
)
"""The quick run: below a minute, and rough."""
