"""128 bits of time, node and sequence, as Boundary's Flake laid them out.

No library for Python is kept up, so the few lines are here.
"""

from __future__ import annotations

import threading
import uuid
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

from shardids.baselines.clock import SYSTEM, Clock
from shardids.baselines.scheme import About, Column, Decoded, Key, Scheme, Servers, Source, uuid_of
from shardids.errors import ClockMovedBack

_NODE_BITS: Final = 48
_SEQUENCE_BITS: Final = 16
_UNIX: Final = datetime(1970, 1, 1, tzinfo=UTC)


class FlakeSource(Source):
    """64 bits of Unix time in ms, 48 of node, 16 of sequence; for several threads at once.

    Raises ClockMovedBack while the clock shows less than it did. Past 65,536 keys in a millisecond
    it waits for the next.
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
    """Every process counts for itself: its node is a random number, as processes may share a MAC address."""

    about = About(
        name="flake128",
        title="128-bit time + node + sequence",
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
        # RFC 9562, section 6.10: a random node sets the bit that no MAC address of a machine has.
        return FlakeSource(uuid.uuid4().int >> (128 - _NODE_BITS) | 1 << 40)

    def column(self, node: int = 0) -> Column:
        return Column(type="uuid")

    def decode(self, key: Key) -> Decoded:
        bits = uuid_of(key).int
        return Decoded(
            time=_UNIX + timedelta(milliseconds=bits >> _NODE_BITS + _SEQUENCE_BITS),
            origin=bits >> _SEQUENCE_BITS & (1 << _NODE_BITS) - 1,
            sequence=bits & (1 << _SEQUENCE_BITS) - 1,
        )
