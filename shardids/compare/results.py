"""The results of a comparison: plain data, as the JSON of ``shardids compare --json`` holds it.

Keys of 128 bits and of 64 bits are compared, so no key is stored as a number here: a key that is shown is
text, and keys that are plotted are fractions of the range that the scheme's keys span in that run.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from shardids.compare.schemes import About
from shardids.compare.schemes.scheme import library
from shardids.errors import BadArgument

SPREAD = 64
"""How many shards, each with its own table, the rows of :attr:`SchemeResult.spread` go to."""

FORMAT = 1
"""The version of the JSON's format; it rises when a field changes its meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """The times of draws without a table, as a client sees them, round trip included.

    Attributes:
        draws: how many single draws were timed, over all rounds.
        quantiles_us: the times' quantiles, from the 0th to the 100th percentile: 101 figures in µs.
        many_us: the time per key in µs when the client asks for ``many`` keys at once.
        many: how many keys that is.
    """

    draws: int
    quantiles_us: Sequence[float]
    many_us: float
    many: int

    @property
    def p50_us(self) -> float:
        """Returns the median time of a single draw, in µs."""
        return self.quantiles_us[50]

    @property
    def p99_us(self) -> float:
        """Returns the time that 99 of 100 single draws stay below, in µs."""
        return self.quantiles_us[99]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inserts:
    """The rates at which rows are inserted and committed one by one, the drawing of their keys included.

    Attributes:
        rounds_per_s: rows per second in each round, by the number of clients.
    """

    rounds_per_s: Mapping[int, Sequence[float]]

    @property
    def per_s(self) -> Mapping[int, float]:
        """Returns the rows per second of the median round, by the number of clients."""
        return {count: statistics.median(rounds) for count, rounds in self.rounds_per_s.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The size of the primary key's index when the table had this many rows."""

    rows: int
    index_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A table (key, integer) with its primary key, filled in bulk.

    Attributes:
        rows: how many rows it has at the end.
        rows_per_s: rows per second while it was filled, the drawing of their keys included.
        table_bytes_per_row: the table's size, without the index.
        index_bytes_per_row: the size of the primary key's index.
        leaf_density_percent: how full the leaf pages of the index are (pgstatindex).
        wal_bytes_per_row: write-ahead log, including the pages that are logged whole after each of the four
            checkpoints.
        growth: the index's size while the table grew.
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
    """An issued key: when (ms from the start), where in the range (0 … 1), and the node of its client."""

    ms: float
    key: float
    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How the order of keys that clients of several nodes drew agrees with the time of the draws.

    A pair counts when one draw had ended before the other began: the later draw should have the greater key.
    This is the order of draws; rows become visible when their transactions commit, in any order.

    Attributes:
        keys: how many were drawn, one by one.
        pairs: how many pairs count.
        out_of_order_percent: how many of those are in the wrong order, in percent.
        late_p99_ms: a key is late by the time since a greater one existed; 99 of 100 are less late.
        late_most_ms: the greatest such delay.
        lasted_ms: how long the run lasted; no key can be later than that.
        points: some of the keys, for a chart.
    """

    keys: int
    pairs: int
    out_of_order_percent: float
    late_p99_ms: float
    late_most_ms: float
    lasted_ms: float
    points: Sequence[Point]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Rows of two nodes that answer each other, the clock of one ahead of the other's.

    Attributes:
        skew_ms: how far it is ahead.
        answers: how many keys were drawn for a row that answers one of the other node.
        first: how many of them sort before the key that they answer, or are the same.
        told: how many were drawn by a generator that received that key; ``None`` if it can't use one.
        told_first: how many of those sort before it.
    """

    skew_ms: float
    answers: int
    first: int
    told: int | None = None
    told_first: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicates:
    """The keys that were issued while something happened.

    Attributes:
        keys: how many were drawn.
        twice: how many of them had been issued before, in this case or earlier in the same scenario.
        refused: how many draws raised an error instead.
        refusal: the first error's message; empty if no draw raised one.
    """

    keys: int
    twice: int
    refused: int = 0
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """What clients drew between the moment a server was killed and the moment it came back.

    Attributes:
        server: the killed server.
        keys: how many keys each node's client drew, by the node's number; ``tried`` if nothing stopped it.
        tried: how many keys it tried to draw.
    """

    server: str
    keys: Mapping[int, int]
    tried: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One key, and the facts that its readers can decode from it."""

    key: str
    time: datetime | None = None
    origin: int | None = None
    sequence: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeResult:
    """All results of one scheme.

    Attributes:
        about: the scheme's description, with its settings.
        key_bytes: the size of a key in a row: 8 or 16.
        spread: like ``inserts``, but each row goes to another of :data:`SPREAD` shards of one server.
        causality: for one difference of the clocks after another.
        duplicates: by the names of :data:`CASES`.
        left_out: why a measure is missing, by the name of the attribute or of the case of duplicates.
    """

    about: About
    key_bytes: int
    draws: Draws | None = None
    inserts: Inserts | None = None
    spread: Inserts | None = None
    storage: Storage | None = None
    order: Order | None = None
    causality: Sequence[Answers] = ()
    duplicates: Mapping[str, Duplicates] = field(default_factory=dict)
    outage: Outage | None = None
    told: Told | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def twice(self) -> int:
        """Returns how many keys were issued twice, over all cases."""
        return sum(case.twice for case in self.duplicates.values())


CASES: Mapping[str, str] = {
    "full speed": "many clients draw as fast as they can",
    "clock back": "the clocks of servers and clients step back again and again",
    "crash": "a server is killed, and comes back",
    "restart": "a server is stopped in order, and comes back",
    "lost server": "a server is lost, and replaced by a copy that lacks its last seconds",
    "lost in bulk": "the same, when the last keys were drawn many at once",
    "added server": "a server, or for schemes without one a client, is added",
}
"""The cases that keys are counted under, and the events of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKind:
    """The servers of one kind: their number, version and settings."""

    kind: str
    version: str
    count: int
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The conditions of the measurement.

    Attributes:
        made_at: when the run began.
        seconds: how long it took.
        command: the command line.
        quick: whether it was the quick run, whose figures are rough.
        machine: cores, memory and operating system.
        versions: the versions of Python, shardids and the drivers.
        servers: the servers that ran.
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
    """The results of a whole run.

    Attributes:
        schemes: the measured schemes, in the order of :data:`shardids.compare.schemes.SCHEMES`.
        left_out: why a scheme was not measured, by its name.
    """

    conditions: Conditions
    schemes: Sequence[SchemeResult]
    left_out: Mapping[str, str] = field(default_factory=dict)
    format: int = FORMAT


_MADE_BY = "Make one with: shardids compare --json"


def check_libraries() -> None:
    """Refuse to continue without the library that JSON needs.

    Raises:
        MissingLibrary: pydantic is not installed.
    """
    library("pydantic")


def to_json(comparison: Comparison, *, indent: int | None = 2) -> str:
    """Return the comparison as JSON, with the names of the dataclasses' attributes.

    Raises:
        MissingLibrary: pydantic is not installed.
    """
    return str(_adapter().dump_json(comparison, indent=indent).decode())


def from_json(text: str) -> Comparison:
    """Return the comparison that :func:`to_json` wrote.

    Raises:
        BadArgument: the text is not a comparison, or one of another :data:`~shardids.compare.results.FORMAT`.
        MissingLibrary: pydantic is not installed.
    """
    pydantic_core = library("pydantic_core")
    try:
        value = pydantic_core.from_json(text)
    except ValueError as error:
        raise BadArgument(f"this is no JSON: {error}", hint=_MADE_BY) from None
    if not isinstance(value, dict) or not isinstance(value.get("format"), int):
        raise BadArgument("this JSON is not a comparison: it names no format", hint=_MADE_BY)
    if value["format"] != FORMAT:
        raise BadArgument(
            f"this comparison has format {value['format']}, but this version of shardids reads {FORMAT}",
            hint="Read it with the version that wrote it, or measure again.",
        )
    try:
        comparison: Comparison = _adapter().validate_json(text)
    except ValueError as error:
        raise BadArgument(f"this comparison can't be read: {error}", hint=_MADE_BY) from None
    return comparison


def _adapter() -> Any:
    return library("pydantic").TypeAdapter(Comparison)
