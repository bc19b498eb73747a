"""Logical clocks in PL/pgSQL: keys that sort after those that a node has seen; and the clock of clients."""

from __future__ import annotations

import select
import time
from datetime import UTC, datetime, timedelta
from typing import Final, LiteralString, Protocol

from psycopg import sql

from shardids.compare.schemes.postgresql import SqlScheme, SqlSource, install
from shardids.compare.schemes.scheme import About, Decoded, Key, KeyColumn, Needs, Servers, Source, integer_of


class Clock(Protocol):
    """The interface of a clock for a generator."""

    def unix_ms(self) -> int:
        """Return milliseconds since 1970 by the machine's clock, which may step back."""

    def sleep(self, seconds: float) -> None:
        """Wait for that long."""


class SystemClock:
    """The clock of the machine."""

    def unix_ms(self) -> int:
        """Return the system's time of day."""
        return time.time_ns() // 1_000_000

    def sleep(self, seconds: float) -> None:
        """Sleep in select(): time.sleep() sleeps until a point in time, which libfaketime gets wrong."""
        select.select((), (), (), seconds)


SYSTEM = SystemClock()
"""The machine's clock."""

_NODE_BITS: Final = 6
_COUNTER_BITS: Final = 10
_UNIX: Final = datetime(1970, 1, 1, tzinfo=UTC)
_KEPT: Final = (
    "kept in a sequence a node, which a draw sets under an advisory lock and flushes with its COMMIT; a"
    " message is the key that is answered"
)


class _LogicalClock(SqlScheme):
    function: LiteralString
    hears = True

    def install(self, servers: Servers) -> None:
        self.check(servers)
        for node, url in enumerate(servers.postgresql):
            install(url, "compare/clocks.v1", settings={"shardids.node": str(node)})

    def _open(self, servers: Servers, node: int) -> Source:
        function = sql.Identifier("shardids_clocks", self.function)
        return SqlSource.of(
            servers.postgresql[node],
            sql.SQL("{}()").format(function),
            after=sql.SQL("select {}(%s)").format(function),
        )

    def column(self, node: int = 0) -> KeyColumn:
        function = sql.Identifier("shardids_clocks", self.function)
        return KeyColumn(type="bigint", draw=sql.SQL("{}()").format(function))


class Lamport(_LogicalClock):
    """A counter a node, which is raised to that of each message."""

    function = "lamport"
    about = About(
        name="lamport",
        title="Lamport clocks",
        needs=Needs(postgresql=1),
        safe_under="any number of sessions, clocks that jump, crashes of the server",
        unsafe_under="a failover to a standby that lacks the last WAL, a restore, setval",
        stops="the rows of a server that is down",
        tells="its node, and nothing of the time",
        settings="57 bits of counter, 6 of node: max(own, heard) + 1, " + _KEPT,
        described_at="https://doi.org/10.1145/359545.359563",
    )

    def decode(self, key: Key) -> Decoded:
        counter, node = divmod(integer_of(key), 1 << _NODE_BITS)
        return Decoded(origin=node, sequence=counter)


class Hybrid(_LogicalClock):
    """A clock a node that follows physical time, and is raised to that of each message."""

    function = "hybrid"
    about = About(
        name="hlc",
        title="Hybrid logical clocks",
        needs=Needs(postgresql=1),
        safe_under="any number of sessions, clocks that jump either way, crashes of the server",
        unsafe_under="a standby or an older copy in the server's place, if the clock led the server's own, or"
        " that one is behind",
        stops="the rows of a server that is down",
        tells="time (ms), node",
        settings="48 bits of ms since 1970, and 16 that are 10 of counter and 6 of node; without a bound on"
        " what a message may raise; " + _KEPT,
        described_at="https://cse.buffalo.edu/tech-reports/2014-04.pdf",
    )

    def decode(self, key: Key) -> Decoded:
        ticks, node = divmod(integer_of(key), 1 << _NODE_BITS)
        ms, counter = divmod(ticks, 1 << _COUNTER_BITS)
        return Decoded(time=_UNIX + timedelta(milliseconds=ms), origin=node, sequence=counter)
