"""What a comparison found: plain data, as the JSON of ``shardids compare --json`` holds it.

Keys of 128 bits and of 64 stand side by side, so no key is here as a number: where one is shown, it is text,
and where keys are plotted they are fractions of the range that the scheme's keys of that run span.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from shardids.compare.schemes import About

FORMAT = 1
"""Number of the JSON's form; it rises when a field changes its meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Drawing keys, without a table: as a client sees it, round trip included.

    Attributes:
        draws: how many single draws were timed, over all rounds.
        quantiles_us: its quantiles, from the 0th to the 100th percentile: 101 figures in µs.
        many_us: time a key in µs, when the client asks for ``many`` at once.
        many: how many that is.
    """

    draws: int
    quantiles_us: Sequence[float]
    many_us: float
    many: int

    @property
    def p50_us(self) -> float:
        """The median time of a single draw, in µs."""
        return self.quantiles_us[50]

    @property
    def p99_us(self) -> float:
        """What 99 of 100 single draws stay below, in µs."""
        return self.quantiles_us[99]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inserts:
    """Rows inserted and committed one by one, the drawing of their keys included.

    Attributes:
        rounds_per_s: rows a second in each round, by the number of clients.
    """

    rounds_per_s: Mapping[int, Sequence[float]]

    @property
    def per_s(self) -> Mapping[int, float]:
        """Rows a second in the median round, by the number of clients."""
        return {count: statistics.median(rounds) for count, rounds in self.rounds_per_s.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The size of the primary key's index when the table had so many rows."""

    rows: int
    index_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A table (key, integer) with its primary key, filled in bulk.

    Attributes:
        rows: how many rows it has at the end.
        rows_per_s: rows a second while it was filled, the drawing of their keys included.
        table_bytes_per_row: size of the table, without the index.
        index_bytes_per_row: size of the primary key's index.
        leaf_density_percent: how full the leaf pages of the index are (pgstatindex).
        wal_bytes_per_row: write-ahead log; with pages that are logged whole after checkpoints, of which
            there were four.
        growth: the index while the table grew.
    """

    rows: int
    rows_per_s: float
    table_bytes_per_row: float
    index_bytes_per_row: float
    leaf_density_percent: float
    wal_bytes_per_row: float
    growth: Sequence[Growth]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A key that was issued: when (ms from the start), where it lies (0 … 1), which node's client drew it."""

    ms: float
    key: float
    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order of the keys that clients of several nodes drew, against the time.

    A pair counts when one draw had ended before the other began: then the later should be the greater key.
    This is the order of draws; rows appear when their transactions are committed, in whatever order.

    Attributes:
        keys: how many were drawn, one by one.
        pairs: how many pairs count.
        out_of_order_percent: how many of those are the wrong way round, in percent.
        late_p99_ms: a key is late by the time since a greater one was there; 99 of 100 are less late.
        late_most_ms: the latest.
        lasted_ms: how long the run lasted, which no key can be later than.
        points: some of the keys, for a picture.
    """

    keys: int
    pairs: int
    out_of_order_percent: float
    late_p99_ms: float
    late_most_ms: float
    lasted_ms: float
    points: Sequence[Point]


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicates:
    """Keys that were issued while something happened.

    Attributes:
        keys: how many were drawn.
        twice: how many of them had been issued before, then or earlier in the same scenario.
        refused: how many draws raised an error instead; an empty string in ``refusal`` if none did.
        refusal: what the first of them said.
    """

    keys: int
    twice: int
    refused: int = 0
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """Clients that were at work when a server was killed, and what they drew before it came back.

    Attributes:
        server: what was killed.
        keys: how many keys each node's client drew, by the node's number; ``tried`` if it was not hindered.
        tried: how many it was to draw.
    """

    server: str
    keys: Mapping[int, int]
    tried: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One key, and what it tells to whoever reads it."""

    key: str
    time: datetime | None = None
    origin: int | None = None
    sequence: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeResult:
    """All that was found about a scheme.

    Attributes:
        about: the scheme in words, with its settings.
        key_bytes: the size of a key in a row: 8 or 16.
        duplicates: by the names of :data:`CASES`.
        left_out: why a measure is missing, by the name of the attribute, or of the case of duplicates.
    """

    about: About
    key_bytes: int
    draws: Draws | None = None
    inserts: Inserts | None = None
    storage: Storage | None = None
    order: Order | None = None
    duplicates: Mapping[str, Duplicates] = field(default_factory=dict)
    outage: Outage | None = None
    told: Told | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def twice(self) -> int:
        """Keys that were issued twice, over all cases."""
        return sum(case.twice for case in self.duplicates.values())


CASES: Mapping[str, str] = {
    "full speed": "many clients draw as fast as they can",
    "clock back": "the clocks of servers and clients step back again and again",
    "crash": "a server is killed, and comes back",
    "restart": "a server is stopped in order, and comes back",
    "lost server": "a server is lost, and replaced by a copy that lacks its last seconds",
    "added server": "a server, or for schemes without one a client, is added",
}
"""What keys are counted under, and what happens there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKind:
    """Servers of one kind that ran: how many, which version, with which settings."""

    kind: str
    version: str
    count: int
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What the figures were measured under.

    Attributes:
        made_at: when the run began.
        seconds: how long it took.
        command: what was typed.
        quick: whether it was the quick form, whose figures are rough.
        machine: cores, memory and system.
        versions: of Python, shardids and the drivers.
        servers: those that ran.
        sizes: how many rounds, keys, rows and seconds each measure took, in words.
    """

    made_at: datetime
    seconds: float
    command: str
    quick: bool
    machine: str
    versions: Mapping[str, str]
    servers: Sequence[ServerKind]
    sizes: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A whole run.

    Attributes:
        schemes: those that were measured, in the order of :data:`shardids.compare.schemes.SCHEMES`.
        left_out: why a scheme was not, by its name.
    """

    conditions: Conditions
    schemes: Sequence[SchemeResult]
    left_out: Mapping[str, str] = field(default_factory=dict)
    format: int = FORMAT
