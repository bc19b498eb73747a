"""UUIDs of the versions 1, 4, 6 and 7: made by the server where PostgreSQL can, else by a library.

uuid-utils (the ``uuid`` crate of Rust) gives all versions to every supported Python; the standard
library has 1 and 4, and the others from Python 3.14 on.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final, LiteralString
from uuid import UUID

from psycopg import sql

from shardids.baselines.postgresql import SqlScheme
from shardids.baselines.scheme import (
    About,
    Column,
    Decoded,
    Key,
    Needs,
    Scheme,
    Servers,
    Source,
    library,
    uuid_of,
)

_GREGORIAN: Final = datetime(1582, 10, 15, tzinfo=UTC)
_UNIX: Final = datetime(1970, 1, 1, tzinfo=UTC)
_RANDOM: Final = "a random generator that repeats itself: its state copied in a snapshot of a machine"


class Drawn(Source):
    """Draws by calling a function of this process."""

    def __init__(self, make: Callable[[], Key]) -> None:
        self._make = make

    def draw(self) -> Key:
        return self._make()

    def _draw_many(self, count: int) -> list[Key]:
        make = self._make
        return [make() for _ in range(count)]


def decode(key: Key) -> Decoded | None:
    """What a UUID tells; ``origin`` is the node of versions 1 and 6: a MAC address, or a random number.

    ``None`` for a version that tells nothing. RFC 9562, sections 5.1, 5.6 and 5.7.
    """
    uuid = uuid_of(key)
    bits = uuid.int
    if uuid.version == 1:
        ticks = uuid.time
    elif uuid.version == 6:
        ticks = (bits >> 80) << 12 | (bits >> 64 & 0xFFF)
    elif uuid.version == 7:
        return Decoded(time=_UNIX + timedelta(milliseconds=bits >> 80))
    else:
        return None
    time = _GREGORIAN + timedelta(microseconds=ticks // 10)
    return Decoded(time=time, origin=uuid.node, sequence=uuid.clock_seq)


class _UuidOfServer(SqlScheme):
    expression: LiteralString

    def column(self, node: int = 0) -> Column:
        return Column(type="uuid", draw=sql.SQL(self.expression))

    def decode(self, key: Key) -> Decoded | None:
        return decode(key)


class _UuidOfLibrary(Scheme):
    function: str

    def _open(self, servers: Servers, node: int) -> Source:
        make: Callable[[], UUID] = getattr(library("uuid_utils.compat"), self.function)
        return Drawn(make)

    def column(self, node: int = 0) -> Column:
        return Column(type="uuid")

    def decode(self, key: Key) -> Decoded | None:
        return decode(key)


class Uuid1(_UuidOfLibrary):
    """Version 1: 100 ns of time with its low bits first, a clock sequence, a node."""

    function = "uuid1"
    about = About(
        name="uuid1",
        title="UUID 1",
        safe_under="any number of machines; the clock sequence is to catch a clock that steps back",
        unsafe_under="processes of one machine, or machines with one MAC address, whose clock sequences meet",
        stops="nothing: every process makes its own",
        tells="time (100 ns), and the machine's MAC address",
        settings="uuid-utils: one clock sequence a process",
        described_at="https://www.rfc-editor.org/rfc/rfc9562#section-5.1",
    )


class Uuid4(_UuidOfServer):
    """Version 4, by the server: 122 random bits."""

    expression = "gen_random_uuid()"
    about = About(
        name="uuid4",
        title="UUID 4 (server)",
        needs=Needs(postgresql=1),
        safe_under="everything that leaves its randomness random; no clock, no server to ask",
        unsafe_under=_RANDOM,
        stops="nothing: every server makes its own",
        tells="nothing",
        settings="DEFAULT gen_random_uuid(), type uuid",
        described_at="https://www.postgresql.org/docs/current/functions-uuid.html",
    )


class Uuid4OfClient(_UuidOfLibrary):
    """Version 4, by the client."""

    function = "uuid4"
    about = About(
        name="uuid4-client",
        title="UUID 4 (client)",
        safe_under="everything that leaves its randomness random; no clock, no server to ask",
        unsafe_under=_RANDOM,
        stops="nothing: every process makes its own",
        tells="nothing",
        settings="uuid-utils",
        described_at="https://www.rfc-editor.org/rfc/rfc9562#section-5.4",
    )


class Uuid6(_UuidOfLibrary):
    """Version 6: version 1 with the high bits of the time first, so that it sorts."""

    function = "uuid6"
    about = About(
        name="uuid6",
        title="UUID 6",
        safe_under="any number of machines; the clock sequence is to catch a clock that steps back",
        unsafe_under="processes of one machine, or machines with one node number, whose clock sequences meet",
        stops="nothing: every process makes its own",
        tells="time (100 ns), and the node's number",
        settings="uuid-utils: one clock sequence a process",
        described_at="https://www.rfc-editor.org/rfc/rfc9562#section-5.6",
    )


class Uuid7(_UuidOfServer):
    """Version 7, by the server: milliseconds, then sub-millisecond time and 62 random bits."""

    expression = "uuidv7()"
    about = About(
        name="uuid7",
        title="UUID 7 (server)",
        needs=Needs(postgresql=1, oldest_postgresql=18),
        safe_under="everything that leaves its 62 random bits random; clocks may jump",
        unsafe_under=_RANDOM,
        stops="nothing: every server makes its own",
        tells="time (ms)",
        settings="DEFAULT uuidv7(), type uuid; ordered within a session",
        described_at="https://www.postgresql.org/docs/18/functions-uuid.html",
    )


class Uuid7OfClient(_UuidOfLibrary):
    """Version 7, by the client."""

    function = "uuid7"
    about = About(
        name="uuid7-client",
        title="UUID 7 (client)",
        safe_under="everything that leaves its random bits random; clocks may jump",
        unsafe_under=_RANDOM,
        stops="nothing: every process makes its own",
        tells="time (ms)",
        settings="uuid-utils: ordered within a process by a counter of 42 bits",
        described_at="https://www.rfc-editor.org/rfc/rfc9562#section-5.7",
    )
