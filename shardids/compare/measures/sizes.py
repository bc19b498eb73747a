"""The sizes of each measure, in the whole run and in the quick one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shardids.compare.results import SPREAD

CLIENTS: Final = 16
"""How many clients draw or insert at once, half of them on each node."""

PACED_CLIENTS: Final = (0, 0, 0, 1)
"""The nodes of the clients that draw at an even pace: the first node takes three times the load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a run.

    Attributes:
        rounds: interleaved rounds of draws and of inserts.
        draws: single draws per round.
        many: how many keys are drawn at once.
        insert_s: how long clients insert in each round.
        spread_rounds, spread_s: the same of inserts over many shards.
        spread_each: how many of the shards each client inserts into.
        rows, fills: how many rows the filled table has, and how often one is filled.
        fill_s: filling a table ends after this time, however many rows it has.
        paced_s: how long clients draw at an even pace.
        skews_ms, answers_s: how far clocks differ while clients answer each other, and how long they do.
        rush_s, rush_keys: how long clients draw as fast as they can, and how many keys each draws at most.
        steps, clock_keys: how often the clocks step back, and how many keys each client draws meanwhile.
        drawn: how many keys each client draws between faults.
        losses: how often the first servers are lost and replaced, in each of the two cases.
        settle_s: how long a server runs at least before a loss.
        lead_s: how long a client draws one key after the other before a loss.
        lead_keys, lead_many: how many keys a client sets aside before a loss in bulk, and how many it draws
            at once where its scheme can't do that.
        disk_mb: how much free disk space the run needs.
    """

    rounds: int
    draws: int
    many: int
    insert_s: float
    spread_rounds: int
    spread_s: float
    spread_each: int
    rows: int
    fills: int
    fill_s: float
    paced_s: float
    skews_ms: tuple[float, ...]
    answers_s: float
    rush_s: float
    rush_keys: int
    steps: int
    clock_keys: int
    drawn: int
    losses: int
    settle_s: float
    lead_s: float
    lead_keys: int
    lead_many: int
    disk_mb: int

    def in_words(self) -> Mapping[str, str]:
        """Returns what a report says of each measure, by its name."""
        first, second = (PACED_CLIENTS.count(node) for node in (0, 1))
        rounds, fills, spreads = (_times(count) for count in (self.rounds, self.fills, self.spread_rounds))
        losses = f"{self.losses} times" if self.losses > 1 else "once"
        words = {
            name: text.format(
                sizes=self,
                skews=", ".join(f"{skew_ms:g}" for skew_ms in self.skews_ms),
                clients=CLIENTS,
                first=first,
                second=second,
                rounds=rounds,
                fills=fills,
                spread=SPREAD,
                spreads=spreads,
                losses=losses,
            )
            for name, text in _WORDS.items()
        }
        return {name: " ".join(text.split()) for name, text in words.items()}


def _times(count: int) -> str:
    return "once" if count == 1 else f"in {count} interleaved rounds"


_WORDS: Final = {
    "all": """Servers and clients share the machine, its one clock and its disk, and talk over loopback.""",
    "draws": """One client draws {sizes.draws:,} keys one by one, and {sizes.many:,} at once, {rounds}.""",
    "inserts": """1 client, then {clients} on two nodes (on one for schemes of one server): draw, INSERT …
        RETURNING and COMMIT, for {sizes.insert_s:g} s, {rounds}; the median. Where a draw is a row
        of MariaDB, nothing else is inserted.""",
    "spread": """1 client, then {clients}, all on the first node, which has {spread} shards with a table each:
        draw, INSERT … RETURNING and COMMIT, each row in another of {sizes.spread_each} shards, with prepared
        statements, for {sizes.spread_s:g} s, {spreads}; the median. Where shards make keys, each makes its
        own; an identity column gives the same keys to every table.""",
    "storage": """One client fills a table (key, integer) by COPY up to {sizes.rows:,} rows, or for
        {sizes.fill_s:g} s, {fills}, with a checkpoint before each quarter. It brings the keys, drawn many at
        once, unless the server makes them. PostgreSQL copies row by row, with more WAL, where a function
        other than nextval makes the key.""",
    "order": """{first} clients of the first node and {second} of the second each draw a key every ms, or as
        fast as they can, for {sizes.paced_s:g} s; times are taken before and after each draw. Rows appear
        later still, when they are committed. The share is that of all pairs: where keys are late by a
        bounded time, it is lower in a longer run.""",
    "causality": """A client of each node draws a key for a row that answers the other's, as fast as it can,
        for
        {sizes.answers_s:g} s. The clock of the first node, its server's and its client's, is ahead by
        {skews} ms, simulated by libfaketime. Then again where the generator can be told the key that is
        answered.""",
    "full speed": """{clients} clients, half of them on each node, draw many at once for {sizes.rush_s:g} s,
        up to {sizes.rush_keys:,} keys each.""",
    "clock back": """4 clients on two nodes draw up to {sizes.clock_keys:,} keys each while their clocks,
        simulated by libfaketime, step back {sizes.steps} times by 0.1 s; so do those of PostgreSQL and
        MariaDB, but not that of Redis, which can't run under it.""",
    "faults": """The first server of each kind is stopped in order, copied and started. In each of
        two cases it is lost {losses}: clients of two nodes draw {sizes.drawn} keys each; then one of them
        draws one key after the other for {sizes.lead_s:g} s or, in bulk, sets {sizes.lead_keys:,}
        keys aside ({sizes.lead_many:,} drawn at once where its scheme can't do that); then the
        server is killed and replaced by the copy, which simulates a standby that lagged or a
        restored backup. Where the scheme has a replica, that is cut off, clients try to draw on,
        the primary is killed and the replica takes its place. After that, and counted by itself,
        the first server of each kind is killed and stays down while clients try to draw {sizes.drawn}
        keys each, and as many more as their scheme lets them hold in memory: for seconds, less than
        leases last. A PostgreSQL server is added.""",
}


FULL: Final = Sizes(
    rounds=5,
    draws=500,
    many=10_000,
    insert_s=0.3,
    spread_rounds=3,
    spread_s=0.3,
    spread_each=SPREAD,
    rows=1_000_000,
    fills=2,
    fill_s=10,
    paced_s=2.5,
    skews_ms=(0, 5, 50),
    answers_s=0.15,
    rush_s=1.5,
    rush_keys=50_000,
    steps=20,
    clock_keys=200_000,
    drawn=300,
    losses=2,
    settle_s=11,
    lead_s=0.5,
    lead_keys=8_000_000,
    lead_many=20_000,
    disk_mb=5500,
)
"""The whole run, which takes some minutes."""

QUICK: Final = Sizes(
    rounds=1,
    draws=100,
    many=1000,
    insert_s=0.06,
    spread_rounds=1,
    spread_s=0.03,
    spread_each=SPREAD // 8,
    rows=10_000,
    fills=1,
    fill_s=1,
    paced_s=0.1,
    skews_ms=(50,),
    answers_s=0.03,
    rush_s=0.08,
    rush_keys=2_000,
    steps=2,
    clock_keys=8_000,
    drawn=60,
    losses=1,
    settle_s=0,
    lead_s=0.05,
    lead_keys=100_000,
    lead_many=2_000,
    disk_mb=2500,
)
"""The quick run, which takes less than a minute and whose figures are rough."""
