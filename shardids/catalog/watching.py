"""Connections that notice when nobody answers any more, whatever the network pretends."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any, Final, TypeVar

import psycopg
from psycopg.abc import PQGen

SILENT_S: Final = 5.0
"""How long a statement runs before the server is asked whether it still does."""
_PROBE_S: Final = 3
_GRACE_S: Final = 1.0
"""For an answer that was sent when the server was asked."""

_SILENCE_S: Final = 20
"""How long a network may drop packets before TCP gives a connection up, idle or not."""
_KEEPALIVES: Final[Mapping[str, int]] = {
    "keepalives": 1,
    "keepalives_idle": _SILENCE_S // 2,
    "keepalives_interval": _SILENCE_S // 8,
    "keepalives_count": 4,
    "tcp_user_timeout": _SILENCE_S * 1000,
}

T = TypeVar("T")


class WatchedConnection(psycopg.Connection[Any]):
    """A connection that is given up when the server has stopped working for it.

    TCP's own timers find a network that drops packets, but not a proxy or firewall that keeps a connection
    open and forwards nothing. So a second connection asks the server, every few seconds of a statement,
    whether this session is at work. A statement may take as long as it likes; one whose answer can't arrive
    raises :class:`psycopg.OperationalError` within 10 seconds.
    """

    server_pid: int | None = None
    """The process that serves the connection; ``None`` behind a pooler, where it may be another each time."""

    def wait(self, gen: PQGen[T], *arguments: Any, **options: Any) -> T:
        """Waits as psycopg does."""
        return super().wait(self._watched(gen), *arguments, **options)

    def _watched(self, work: PQGen[T]) -> PQGen[T]:
        heard, is_last_chance = monotonic(), False
        try:
            wanted = next(work)
            while True:
                ready = yield wanted
                if ready:
                    heard, is_last_chance = monotonic(), False
                elif monotonic() - heard > (_GRACE_S if is_last_chance else SILENT_S):
                    if is_last_chance or (is_at_work := self._is_at_work()) is None:
                        self.pgconn.finish()
                        raise psycopg.OperationalError("the server no longer answers on this connection")
                    heard, is_last_chance = monotonic(), not is_at_work
                wanted = work.send(ready)
        except StopIteration as end:
            result: T = end.value
            return result

    def _is_at_work(self) -> bool | None:
        """Whether the server runs a statement for this connection; ``None`` if the server can't be asked."""
        info = self.info
        try:
            with _Probe.connect(
                info.dsn,
                password=info.password or None,
                host=info.host,
                port=info.port,
                connect_timeout=_PROBE_S,
                autocommit=True,
            ) as probe:
                if self.server_pid is None:
                    return True
                row = probe.execute(
                    "select state operator(pg_catalog.=) 'active' from pg_catalog.pg_stat_activity"
                    " where pid operator(pg_catalog.=) %s",
                    [self.server_pid],
                ).fetchone()
        except psycopg.Error:
            return None
        return row is not None and row[0] is not False


class _Probe(psycopg.Connection[Any]):
    """A connection for a single question: it is given up when it takes long."""

    def wait(self, gen: PQGen[T], *arguments: Any, **options: Any) -> T:
        return super().wait(self._bounded(gen), *arguments, **options)

    def _bounded(self, work: PQGen[T]) -> PQGen[T]:
        began = monotonic()
        try:
            wanted = next(work)
            while True:
                ready = yield wanted
                if not ready and monotonic() - began > _PROBE_S:
                    self.pgconn.finish()
                    raise psycopg.OperationalError("no answer")
                wanted = work.send(ready)
        except StopIteration as end:
            result: T = end.value
            return result


def connect_watched(*arguments: Any, **options: Any) -> WatchedConnection:
    """Connects, and finds out who serves the connection. Options of the URL are used before TCP's of here."""
    connection = WatchedConnection.connect(*arguments, **{**_KEEPALIVES, **options})
    try:
        row = connection.execute("select pg_catalog.pg_backend_pid()").fetchone()
        connection.rollback()
    except BaseException:
        connection.close()
        raise
    if row is not None and row[0] == connection.info.backend_pid:
        connection.server_pid = row[0]
    return connection
