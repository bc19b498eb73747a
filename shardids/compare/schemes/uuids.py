"""Keys of 128 bits, stored as ``uuid``: UUIDs of the versions 1, 4, 6 and 7, ULIDs, and Boundary's Flake.

The server makes UUIDs where PostgreSQL can; otherwise a library does. uuid-utils (Rust's ``uuid`` crate) has
all versions for every supported Python; the standard library has 1 and 4, and the others from Python 3.14 on.
No library for Flake is maintained, so its few lines are written here.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final, LiteralString
from uuid import UUID

from psycopg import sql

from shardids.compare.schemes.logical import SYSTEM, Clock
from shardids.compare.schemes.postgresql import SqlScheme
from shardids.compare.schemes.scheme import (
    About,
    Decoded,
    Key,
    KeyColumn,
    Needs,
    Scheme,
    Servers,
    Source,
    library,
    uuid_of,
)
from shardids.errors import ClockMovedBack

_GREGORIAN: Final = datetime(1582, 10, 15, tzinfo=UTC)
_UNIX: Final = datetime(1970, 1, 1, tzinfo=UTC)
_RANDOM: Final = "a random generator that repeats itself: its state copied in a snapshot of a machine"
_NODE_BITS: Final = 48
_SEQUENCE_BITS: Final = 16


class Drawn(Source):
    """Draws by calling a function in this process."""

    def __init__(self, make: Callable[[], Key]) -> None:
        self._make = make

    def draw(self) -> Key:
        return self._make()

    def _draw_many(self, count: int) -> list[Key]:
        make = self._make
        return [make() for _ in range(count)]


def decode_uuid(key: Key) -> Decoded | None:
    """Return the facts in a UUID; ``origin`` is the node of versions 1 and 6, a MAC or random one.

    Returns ``None`` for a version that tells nothing. See RFC 9562, sections 5.1, 5.6 and 5.7.
    """
    found = uuid_of(key)
    bits = found.int
    if found.version == 1:
        ticks = found.time
    elif found.version == 6:
        ticks = (bits >> 80) << 12 | (bits >> 64 & 0xFFF)
    elif found.version == 7:
        return Decoded(time=_UNIX + timedelta(milliseconds=bits >> 80))
    else:
        return None
    time = _GREGORIAN + timedelta(microseconds=ticks // 10)
    return Decoded(time=time, origin=found.node, sequence=found.clock_seq)


class _UuidOfServer(SqlScheme):
    expression: LiteralString

    def column(self, node: int = 0) -> KeyColumn:
        return KeyColumn(type="uuid", draw=sql.SQL(self.expression))

    def decode(self, key: Key) -> Decoded | None:
        return decode_uuid(key)


class _UuidOfLibrary(Scheme):
    function: str

    def _open(self, servers: Servers, node: int) -> Source:
        make: Callable[[], UUID] = getattr(library("uuid_utils.compat"), self.function)
        return Drawn(make)

    def column(self, node: int = 0) -> KeyColumn:
        return KeyColumn(type="uuid")

    def decode(self, key: Key) -> Decoded | None:
        return decode_uuid(key)


class Uuid1(_UuidOfLibrary):
    """Version 1: time in units of 100 ns with its low bits first, a clock sequence, a node."""

    function = "uuid1"
    about = About(
        name="uuid1",
        title="UUIDv1",
        safe_under="any number of machines; the clock sequence is to catch a clock that steps back",
        unsafe_under="processes of one machine, or machines with one MAC address, whose clock sequences meet",
        stops="nothing: every process makes its own",
        tells="time (100 ns), and the machine's MAC address",
        settings="uuid-utils: one clock sequence a process",
        described_at="https://www.rfc-editor.org/rfc/rfc9562#section-5.1",
    )


class Uuid4(_UuidOfServer):
    """Version 4, made by the server: 122 random bits."""

    expression = "gen_random_uuid()"
    about = About(
        name="uuid4",
        title="UUIDv4 (server)",
        needs=Needs(postgresql=1),
        safe_under="everything that leaves its randomness random; no clock, no server to ask",
        unsafe_under=_RANDOM,
        stops="nothing: every server makes its own",
        tells="nothing",
        settings="DEFAULT gen_random_uuid(), type uuid",
        described_at="https://www.postgresql.org/docs/current/functions-uuid.html",
    )


class Uuid4OfClient(_UuidOfLibrary):
    """Version 4, made by the client."""

    function = "uuid4"
    about = About(
        name="uuid4-client",
        title="UUIDv4 (client)",
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
        title="UUIDv6",
        safe_under="any number of machines; the clock sequence is to catch a clock that steps back",
        unsafe_under="processes of one machine, or machines with one node number, whose clock sequences meet",
        stops="nothing: every process makes its own",
        tells="time (100 ns), and the node's number",
        settings="uuid-utils: one clock sequence a process",
        described_at="https://www.rfc-editor.org/rfc/rfc9562#section-5.6",
    )


class Uuid7(_UuidOfServer):
    """Version 7, made by the server: milliseconds, then sub-millisecond time and 62 random bits."""

    expression = "uuidv7()"
    about = About(
        name="uuid7",
        title="UUIDv7 (server)",
        needs=Needs(postgresql=1, oldest_postgresql=18),
        safe_under="everything that leaves its 62 random bits random; clocks may jump",
        unsafe_under=_RANDOM,
        stops="nothing: every server makes its own",
        tells="time (ms)",
        settings="DEFAULT uuidv7(), type uuid; ordered within a session",
        described_at="https://www.postgresql.org/docs/18/functions-uuid.html",
    )


class Uuid7OfClient(_UuidOfLibrary):
    """Version 7, made by the client."""

    function = "uuid7"
    about = About(
        name="uuid7-client",
        title="UUIDv7 (client)",
        safe_under="everything that leaves its random bits random; clocks may jump",
        unsafe_under=_RANDOM,
        stops="nothing: every process makes its own",
        tells="time (ms)",
        settings="uuid-utils: ordered within a process by a counter of 42 bits",
        described_at="https://www.rfc-editor.org/rfc/rfc9562#section-5.7",
    )


class Ulid(Scheme):
    """ULIDs made by python-ulid, which increments within a millisecond."""

    about = About(
        name="ulid",
        title="ULID",
        safe_under="everything that leaves its 80 random bits random; clocks may jump",
        unsafe_under="a random generator that repeats itself: its state copied in a snapshot of a machine",
        stops="nothing: every process makes its own",
        tells="time (ms)",
        settings="python-ulid, monotonic within a ms and process; stored as uuid, 16 bytes, not as text, 26",
        described_at="https://github.com/ulid/spec",
    )

    def _open(self, servers: Servers, node: int) -> Source:
        ulid = library("ulid").ULID
        return Drawn(lambda: ulid().to_uuid())

    def column(self, node: int = 0) -> KeyColumn:
        return KeyColumn(type="uuid")

    def decode(self, key: Key) -> Decoded:
        return Decoded(time=library("ulid").ULID.from_uuid(uuid_of(key)).datetime)


class FlakeSource(Source):
    """Draws keys of 64 bits of Unix time in ms, 48 of node and 16 of sequence; thread-safe.

    Raises ClockMovedBack while the clock is behind the last key. Past 65,536 keys in a millisecond it
    waits for the next millisecond.
    """

    def __init__(self, node: int, clock: Clock = SYSTEM) -> None:
        self._node, self._clock = node, clock
        self._lock = threading.Lock()
        self._last_ms, self._sequence = -1, 0

    def draw(self) -> Key:
        with self._lock:
            ms = self._clock.unix_ms()
            if ms < self._last_ms:
                raise ClockMovedBack(
                    f"the clock went back by {self._last_ms - ms} ms", hint="Try again when it has caught up."
                )
            if ms > self._last_ms:
                self._last_ms, self._sequence = ms, 0
            elif self._sequence + 1 < 1 << _SEQUENCE_BITS:
                self._sequence += 1
            else:
                while (ms := self._clock.unix_ms()) <= self._last_ms:
                    self._clock.sleep(0.0005)
                self._last_ms, self._sequence = ms, 0
            bits = self._last_ms << _NODE_BITS | self._node
            return UUID(int=bits << _SEQUENCE_BITS | self._sequence)


class Flake128(Scheme):
    """Every process counts by itself; its node is a random number, as processes may share a MAC address."""

    about = About(
        name="flake128",
        title="Flake (Boundary), 128 bits",
        safe_under="up to 65,536 keys a ms and process; a clock that steps back while the process runs",
        unsafe_under="two processes with one node number (random ones: 1 in 2^47 for each pair); a restart"
        " with the same node number after the clock stepped back",
        stops="a process, as long as its clock is behind",
        tells="time (ms), node",
        settings="64 bits of Unix ms, 48 of node (random for each client, multicast bit set), 16 of sequence;"
        " stored as uuid",
        described_at="https://github.com/boundary/flake",
    )

    def _open(self, servers: Servers, node: int) -> Source:
        # RFC 9562, section 6.10: a random node sets the multicast bit, which no machine's MAC address has.
        return FlakeSource(uuid.uuid4().int >> (128 - _NODE_BITS) | 1 << 40)

    def column(self, node: int = 0) -> KeyColumn:
        return KeyColumn(type="uuid")

    def decode(self, key: Key) -> Decoded:
        bits = uuid_of(key).int
        return Decoded(
            time=_UNIX + timedelta(milliseconds=bits >> _NODE_BITS + _SEQUENCE_BITS),
            origin=bits >> _SEQUENCE_BITS & (1 << _NODE_BITS) - 1,
            sequence=bits & (1 << _SEQUENCE_BITS) - 1,
        )
