"""Worker numbers that processes lease from PostgreSQL, so that no two processes make the same IDs.

A lease expires unless its holder renews it, and its number then rests. Each lease of a number has a
token: a holder whose token is no longer in the row has lost the number.

A bound that the row stores with the number makes this safe: the holder issues no ID whose time is past
the bound, and raises the bound when it renews the lease; the next holder starts above it. So a process
that was suspended for an hour and then continues as if nothing had happened issues no ID twice, whatever
the clocks of processes and server show. Numbers rest so that the next holder need not wait for the bound
to pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardids.compare.schemes.postgresql import install
from shardids.errors import BadArgument, LeaseLost
from shardids.multimaster.postgresql_session import PostgreSqlSession


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTimes:
    """How long a lease lasts, how often it is renewed and how long its number then rests, in seconds.

    Raises:
        BadArgument: not 0 < renew_s < lasts_s <= rests_s.
    """

    lasts_s: float = 30.0
    renew_s: float = 10.0
    rests_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 < self.renew_s < self.lasts_s <= self.rests_s:
            raise BadArgument(
                f"a lease can't last {self.lasts_s} s, be renewed every {self.renew_s} s and rest for"
                f" {self.rests_s} s",
                hint="It is renewed before it ends, and its number rests for at least as long as it lasts.",
            )


class Lease:
    """A worker number of this process; call :meth:`renew` in time, and :meth:`release` at the end.

    Attributes:
        number: the worker number.
        used_until_ms: the bound, a Unix time in ms that no ID of this number is past, as of the last
            renewal; before the first one, the bound of the former holders.

    Raises:
        LeaseLost: all numbers below ``numbers`` are held or rest.
        ConnectionFailed: the server cannot be reached.
    """

    def __init__(self, url: str, *, numbers: int, times: LeaseTimes) -> None:
        self._url, self._times = url, times
        self._session = PostgreSqlSession(url)
        leased = self._session.rows(_LEASE, (numbers, times.lasts_s, times.rests_s))
        if not leased:
            self._session.close()
            raise LeaseLost(
                f"all {numbers} worker numbers are held, or rest for {times.rests_s} s after they were",
                hint="End a process, or wait.",
            )
        self.number: int
        self.used_until_ms: int
        ((self.number, self._token, self.used_until_ms),) = leased

    def renew(self, until_ms: int) -> None:
        """Renews the lease for its full time and raises the bound; reconnects if necessary.

        Raises:
            LeaseLost: another process holds the number by now.
            ConnectionFailed: the server cannot be reached. The bound stays where it was.
        """
        if self._session.connection.closed:
            self._session = PostgreSqlSession(self._url)
        renewed = self._session.rows(_RENEW, (self._times.lasts_s, until_ms, self.number, self._token))
        if not renewed:
            raise LeaseLost(
                f"worker number {self.number} was leased to another process",
                hint="This one was stopped or cut off for too long. Lease a number again.",
            )
        ((self.used_until_ms,),) = renewed

    def release(self, used_until_ms: int) -> None:
        """Ends the lease, and stores the time of the last ID as its bound; the number rests from now on."""
        try:
            if not self._session.connection.closed:
                self._session.rows(_RELEASE, (used_until_ms, self.number, self._token))
        finally:
            self._session.close()


def install_leases(url: str) -> None:
    """Creates the table of the worker numbers. Idempotent."""
    install(url, "compare/baselines.v1")


_LEASE = "select number, token, used_until_ms from shardids_baselines.lease_worker(%s, %s, %s)"
_RENEW = """
update shardids_baselines.worker
set expires_at = clock_timestamp() + make_interval(secs => %s), used_until_ms = greatest(used_until_ms, %s)
where number = %s and token = %s
returning used_until_ms
"""
_RELEASE = """
update shardids_baselines.worker set expires_at = clock_timestamp(), used_until_ms = %s
where number = %s and token = %s
returning number
"""
