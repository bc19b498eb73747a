"""Says which scheme suits whom, in words written by hand, with figures from the comparison.

The words therefore state how the schemes are made, never which was faster in a run: the figures say that,
and a figure whose scheme or measure is missing is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardids.compare.report.summary import (
    BULK,
    DISORDER,
    DRAW,
    FIRST,
    INDEX,
    LATE,
    MANY,
    OVER_SHARDS,
    OWN,
    SINGLE,
    TOLD,
    TWICE,
    WAL,
    Measure,
)
from shardids.compare.results import Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """Returns a scheme's figure, as text."""

    name: str
    text: str
    own: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Returns a measure of a few schemes, in words."""

    label: str
    values: Sequence[Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One piece of advice.

    Attributes:
        need: the reader's need or situation.
        choice: the recommended scheme.
        own: whether that is shardids.
        reason: why, and the price.
        figures: the comparison's figures for that, as far as it has them.
    """

    need: str
    choice: str
    own: bool
    reason: str
    figures: Sequence[Figure]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    need: str
    choice: str
    reason: str
    measures: tuple[Measure, ...]
    schemes: tuple[str, ...]
    own: bool = False


_WORDS = (
    _Words(
        own=True,
        need="Several PostgreSQL servers, or soon, and rows that should say where they belong",
        choice="shardids",
        reason=(
            "A bigint that any shard makes by itself: nothing central can fail, and the ID alone says "
            "when and in which shard its row was born. Clocks may jump, servers may crash or be "
            "replaced by a standby. The price is a function call a row instead of a bare counter, and "
            "PostgreSQL in the writing path."
        ),
        measures=(OVER_SHARDS, SINGLE, DRAW, TWICE),
        schemes=("shardids", "identity", "offsets", "published", "snowflake", "tickets", "uuid7"),
    ),
    _Words(
        own=True,
        need="The same, and rows that come in bulk",
        choice="shardids with next_ids(n), or blocks in the client",
        reason=(
            "One call reserves a block of consecutive IDs. What a block leaves unused is lost; that "
            "makes gaps, never duplicates."
        ),
        measures=(BULK, MANY),
        schemes=("shardids-blocks", "shardids", "identity", "redis-blocks", "ranges", "snowflake", "uuid7"),
    ),
    _Words(
        own=True,
        need="Instagram's published function is in use already",
        choice="shardids, with the preset of its layout",
        reason=(
            "The function reads its clock and its sequence one after the other, so it can issue a key "
            "twice: at full speed, and when a clock steps back. The preset keeps old IDs valid."
        ),
        measures=(TWICE, DRAW),
        schemes=("shardids", "published"),
    ),
    _Words(
        need="One PostgreSQL server is enough, and will stay so",
        choice="An identity column, or a sequence",
        reason=(
            "Nothing is simpler: small dense numbers, no function, nothing to install. The database "
            "makes them where the row is. Think of something else only on the day that a second "
            "server takes writes."
        ),
        measures=(BULK, INDEX, WAL),
        schemes=("identity", "sequence", "shardids"),
    ),
    _Words(
        need="128 bits are fine, and rows need not name their shard",
        choice="UUIDv7, by PostgreSQL 18 or by a library in the client",
        reason=(
            "No setup at all, nothing to coordinate, ordered by time well enough for an index. Every "
            "key, and every foreign key, takes 16 bytes instead of 8. A ULID in a uuid column is the "
            "same idea."
        ),
        measures=(INDEX, SINGLE, BULK),
        schemes=("uuid7", "uuid7-client", "ulid", "shardids"),
    ),
    _Words(
        need="Keys made offline, by clients you don't trust, or that must not tell when and where",
        choice="UUIDv4",
        reason=(
            "It tells nothing, and nobody has to be asked. Random keys land all over the index and split its "
            "pages. Use an ID of shardids inside, and a UUIDv4 where outsiders see it, if you need both."
        ),
        measures=(INDEX, WAL, BULK),
        schemes=("uuid4", "uuid4-client", "shardids"),
    ),
    _Words(
        need="One strict order over everything",
        choice="One database sequence",
        reason=(
            "Only one counter has one order, and it is one server that everybody waits for. Rows still "
            "appear in the order of their commits, under every scheme. shardids orders by time: strictly "
            "within a shard, and between servers as well as their clocks agree; for some seconds after a "
            "restart a server's IDs run ahead of its clock."
        ),
        measures=(DISORDER, LATE),
        schemes=("sequence", "shardids", "snowflake", "uuid7"),
    ),
    _Words(
        own=True,
        need="Rows that answer rows of other servers, and are to sort after them",
        choice="shardids, in sessions that name the row they answer: after=",
        reason=(
            "Keys made by the clocks of several servers sort as those do, and an answer from the slower "
            "one before its question. A shard that is told the question's ID goes on above it, as a "
            "hybrid logical clock does, and its IDs still tell the time. A Lamport clock does it without the "
            "time; one sequence for all without being told."
        ),
        measures=(FIRST, TOLD),
        schemes=("shardids", "hlc", "lamport", "sequence", "snowflake", "uuid7"),
    ),
    _Words(
        need="Numbers without gaps: invoices, say",
        choice="None of these",
        reason=(
            "Every scheme here leaves gaps when a transaction is rolled back, sequences included. "
            "Keep a row with the last number, and lock it in the transaction that uses the next."
        ),
        measures=(),
        schemes=(),
    ),
    _Words(
        need="No PostgreSQL in the writing path",
        choice="Snowflake in the process, or UUIDv7 in the client",
        reason=(
            "A process makes its keys without asking anybody. A Snowflake needs a worker number that "
            "nobody else holds, here leased from a table, and a plan for clocks that step back; a "
            "UUIDv7 needs neither, and 16 bytes. A counter in Redis can repeat itself when its last "
            "seconds are lost, unless each key waits for a replica."
        ),
        measures=(DRAW, TWICE),
        schemes=("snowflake", "uuid7-client", "redis", "redis-wait", "shardids"),
    ),
    _Words(
        need="A fixed handful of masters, and keys that need not sort by time",
        choice="Auto-increment offsets",
        reason=(
            "Bare sequences that count by k. Adding a master means new steps on all of them in the "
            "right order (shardids multimaster does it), and a key stops telling its master "
            "then."
        ),
        measures=(BULK, DISORDER),
        schemes=("offsets", "offsets-mariadb", "shardids"),
    ),
)


def advices(comparison: Comparison) -> list[Advice]:
    """Return who should take what: first the cases for shardids, then the others."""
    return [
        Advice(
            need=words.need,
            choice=words.choice,
            own=words.own,
            reason=words.reason,
            figures=[
                figure
                for measure in words.measures
                if (figure := _figure(comparison, measure, words.schemes)) is not None
            ],
        )
        for words in _WORDS
    ]


def _figure(comparison: Comparison, measure: Measure, names: Sequence[str]) -> Figure | None:
    found = {
        result.about.name: value
        for result in comparison.schemes
        if result.about.name in names and (value := measure.value(result)) is not None
    }
    if len(found) < 2:
        return None  # one figure alone compares nothing
    return Figure(
        label=measure.label,
        values=[
            Value(
                name=name,
                text=measure.text(found[name]),
                own=name in OWN,
            )
            for name in names
            if name in found
        ],
    )
