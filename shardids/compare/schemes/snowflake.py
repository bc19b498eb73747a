"""Snowflakes made in the process, with a worker number that is leased from PostgreSQL.

Libraries leave out the safeguards of a snowflake: where the worker number comes from, and what happens
when the clock steps back or the sequence overflows. That is why the generator is written here.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Final, Literal, TypeAlias

from shardids.compare.schemes.blocks import Lease, LeaseTimes, install_leases
from shardids.compare.schemes.logical import SYSTEM, Clock
from shardids.compare.schemes.scheme import (
    About,
    Decoded,
    Key,
    KeyColumn,
    Needs,
    Scheme,
    Servers,
    Source,
    integer_of,
)
from shardids.errors import ClockMovedBack, ConnectionFailed, LeaseLost, TimeExhausted
from shardids.ids.layout import TWITTER, Layout

Rollback: TypeAlias = Literal["wait", "offset", "fail"]
"""What to do when the clock steps back: wait for it, continue from the last time, or raise."""

MOST_WAITED_MS: Final = 5000
"""How far the clock may step back for ``wait`` to wait; beyond that, it raises as well."""

_RETRY_S: Final = 1.0
_OVERFLOW_SLEEP_S: Final = 0.0001


class SnowflakeSource(Source):
    """Draws IDs of milliseconds, worker number and sequence; all threads of a process may share it.

    Past the last sequence number of a millisecond it waits for the next millisecond. A thread renews the
    lease; if ``heartbeat`` is off, the caller does, by :meth:`renew`.

    Raises:
        LeaseLost: no worker number is free.
        ConnectionFailed: the server of the leases cannot be reached.
    """

    def __init__(
        self,
        url: str,
        *,
        rollback: Rollback = "wait",
        times: LeaseTimes | None = None,
        clock: Clock = SYSTEM,
        layout: Layout = TWITTER,
        heartbeat: bool = True,
    ) -> None:
        self._rollback, self._clock, self._layout = rollback, clock, layout
        self._times = times or LeaseTimes()
        self._lock = threading.Lock()
        self._lost: LeaseLost | None = None
        self._offset_ms = 0
        self._lease = Lease(url, numbers=layout.shard_limit, times=self._times)
        # The first ID gets a later millisecond than any ID of the number's former holders.
        self._last_ms, self._sequence = self._lease.used_until_ms, layout.sequence_limit - 1
        self._ending = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="snowflake lease", daemon=True)
        self.renew()
        if heartbeat:
            self._heart.start()

    @property
    def worker(self) -> int:
        """The worker number."""
        return self._lease.number

    def draw(self) -> Key:
        """Draw one ID.

        Raises:
            LeaseLost: the lease was not renewed in time, or another process holds the worker number.
            ClockMovedBack: the clock stepped back, and the strategy is to fail or the wait would be too long.
            TimeExhausted: the layout cannot hold the time.
        """
        layout = self._layout
        with self._lock:
            ms, sequence = self._now_ms(), 0
            if ms == self._last_ms:
                sequence = self._sequence + 1
                if sequence == layout.sequence_limit:
                    ms, sequence = self._next_ms(), 0
            self._check(ms)
            self._last_ms, self._sequence = ms, sequence
            return ((ms - layout.epoch_ms) << layout.shard_bits | self._lease.number) << (
                layout.sequence_bits
            ) | sequence

    def renew(self) -> None:
        """Renew the lease; the bound of the IDs' times is then ahead of the clock by the lease's duration.

        Raises:
            LeaseLost: another process holds the worker number; all draws raise this from now on.
            ConnectionFailed: the server cannot be reached; draws continue up to the bound.
        """
        now_ms = max(self._clock.unix_ms(), self._last_ms)
        try:
            self._lease.renew(now_ms + round(self._times.lasts_s * 1000))
        except LeaseLost as error:
            self._lost = error
            raise

    def close(self) -> None:
        """Release the worker number."""
        self._ending.set()
        if self._heart.is_alive():
            self._heart.join()
        with self._lock:
            self._lost = LeaseLost(f"worker number {self._lease.number} was given back")
            with contextlib.suppress(ConnectionFailed):
                self._lease.release(self._last_ms)

    def _now_ms(self) -> int:
        """Return the time for the next ID, never before that of the last one."""
        while True:
            ms = self._clock.unix_ms()
            if ms > self._last_ms:
                self._offset_ms = 0
                return ms
            ms += self._offset_ms
            behind_ms = self._last_ms - ms
            if behind_ms <= 0:
                return ms
            if self._rollback == "offset":
                self._offset_ms += behind_ms
                return self._last_ms
            if self._rollback == "fail" or behind_ms > MOST_WAITED_MS:
                raise ClockMovedBack(
                    f"the clock of worker {self._lease.number} went back by {behind_ms} ms",
                    hint="IDs come again when it has caught up.",
                )
            self._clock.sleep(behind_ms / 1000)

    def _next_ms(self) -> int:
        while (ms := self._now_ms()) <= self._last_ms:
            self._clock.sleep(_OVERFLOW_SLEEP_S)
        return ms

    def _check(self, ms: int) -> None:
        if self._lost is not None:
            raise self._lost
        if ms > self._lease.used_until_ms:
            raise LeaseLost(
                f"worker number {self._lease.number} was not renewed for {self._times.lasts_s} s",
                hint="Draws go on when PostgreSQL answers again, unless another process has the number.",
            )
        if ms - self._layout.epoch_ms >> self._layout.time_bits:
            raise TimeExhausted(f"the layout can't hold {ms} ms since 1970")

    def _beat(self) -> None:
        pause_s = self._times.renew_s
        while not self._ending.wait(pause_s):
            pause_s = self._times.renew_s
            try:
                self.renew()
            except ConnectionFailed:
                pause_s = min(_RETRY_S, pause_s)
            except LeaseLost:
                return


class Snowflake(Scheme):
    """Twitter's layout, one source per process, with one of three strategies for a clock that steps back."""

    def __init__(self, rollback: Rollback) -> None:
        self._rollback: Rollback = rollback
        self.about = About(
            name="snowflake" if rollback == "wait" else f"snowflake-{rollback}",
            title=f"Snowflake in the process, {_STRATEGIES[rollback][0]}",
            needs=Needs(postgresql=1),
            safe_under="clocks that jump, processes that sleep for any time, crashes of either side",
            unsafe_under="a lease table that is restored to an older state; a failover that loses a COMMIT",
            stops="a process, when PostgreSQL is down for longer than a lease lasts"
            + _STRATEGIES[rollback][1],
            tells="time (ms), worker",
            settings="41 bits of ms since 1288834974657, 10 of worker, 12 of sequence; leases of 30 s renewed"
            " every 10 s, numbers rest for 60 s",
            described_at="https://blog.x.com/engineering/en_us/a/2010/announcing-snowflake",
        )

    def install(self, servers: Servers) -> None:
        self.check(servers)
        install_leases(servers.postgresql[0])

    def _open(self, servers: Servers, node: int) -> Source:
        return SnowflakeSource(servers.postgresql[0], rollback=self._rollback)

    def column(self, node: int = 0) -> KeyColumn:
        return KeyColumn(type="bigint")

    def decode(self, key: Key) -> Decoded:
        decoded = TWITTER.decode(integer_of(key))
        return Decoded(time=decoded.time, origin=decoded.shard, sequence=decoded.sequence)


_STRATEGIES: Final[dict[Rollback, tuple[str, str]]] = {
    "wait": ("waits for its clock", f"; while its clock is behind, for good if by over {MOST_WAITED_MS} ms"),
    "offset": ("counts on when its clock steps back", ""),
    "fail": ("refuses while its clock is behind", "; while its clock is behind"),
}
