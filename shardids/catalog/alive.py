"""Locks of the catalog that a command holds as long as its process lives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Lock, Thread
from typing import Final

from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError

from shardids.catalog.rows import Catalog
from shardids.errors import ShardidsError
from shardids.pg.connections import CONNECT_TIMEOUT_S, open_engine

_BEAT_S: Final = 5.0
_LOST_AFTER: Final = "25s"
"""How long the catalog keeps the locks of a process that it no longer hears from."""


class Alive:
    """A transaction of the catalog that only holds locks. A session that is lost is not replaced."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._ended = Event()
        self._in_use = Lock()

    def is_alive(self) -> bool:
        """Return whether the catalog still has the locks; it counts its patience anew then."""
        try:
            with self._in_use:
                # Without parameters: the portal of a statement with some would keep its snapshot, and a
                # CREATE INDEX CONCURRENTLY in this database would wait for it until the end.
                self._connection.exec_driver_sql(
                    f"set local idle_in_transaction_session_timeout = '{_LOST_AFTER}'"
                )
        except (ShardidsError, SQLAlchemyError):
            return False
        return True

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_S) and self.is_alive():
            pass

    @contextmanager
    def _beating(self) -> Iterator[None]:
        self.is_alive()
        thread = Thread(target=self._beat, name="shardids_run", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()


@contextmanager
def alive(catalog: Catalog, name: str, take: Callable[[Connection], None]) -> Iterator[Alive]:
    """Hold the locks that ``take`` takes until the end of the block; ``name`` is the session's.

    They have to be those of a transaction: it stays on one server connection, also behind a pooler. The
    server releases them with the session: it ends that of a process that was killed, or that it has not heard
    from for 25 seconds.
    """
    engine = open_engine(
        catalog.url,
        what="the catalog",
        administrative=True,
        connect_timeout_s=CONNECT_TIMEOUT_S,
        pool_size=1,
    )
    try:
        with engine.connect() as connection, _transaction(connection):
            # The server ends the session, and with it the locks, of a process that is out of reach.
            connection.execute(
                text("""select set_config('application_name', :name, true),
                               set_config('tcp_keepalives_idle', '10', true),
                               set_config('tcp_keepalives_interval', '3', true),
                               set_config('tcp_keepalives_count', '3', true)"""),
                {"name": name},
            )
            take(connection)
            living = Alive(connection)
            with living._beating():
                yield living
    finally:
        engine.dispose()


@contextmanager
def _transaction(connection: Connection) -> Iterator[None]:
    """Keep a transaction open that only holds locks: its loss does not fail the command."""
    transaction = connection.begin()
    try:
        yield
    finally:
        with suppress(ShardidsError, SQLAlchemyError):
            transaction.rollback()
