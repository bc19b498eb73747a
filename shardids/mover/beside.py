"""Work that runs in a session of its own, beside the steps of a move, and ends with them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import psycopg
from sqlalchemy import Connection

from shardids.mover.sides import Side, driver_connection

_CANCEL_S = 10.0
"""How long to try to cancel a statement."""


class Beside:
    """One session on a node, in a thread; its last transaction is committed when the work ends."""

    def __init__(self, side: Side, work: Callable[[Connection], None]) -> None:
        self._side = side
        self._work = work
        self._error: BaseException | None = None
        self._session: psycopg.Connection[object] | None = None
        self._is_cancelled = False
        self._lock = threading.Lock()
        # An interrupted process does not wait for it.
        self._thread = threading.Thread(target=self._run, name="shardids_beside", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits for the end of the work.

        Raises:
            ShardidsError: it failed.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Ends the work if it is still under way: its last transaction is rolled back."""
        with self._lock:
            self._is_cancelled = True
            if self._session is not None and self._thread.is_alive():
                with suppress(psycopg.Error):
                    self._session.cancel_safe(timeout=_CANCEL_S)
        self._thread.join(_CANCEL_S)

    def _run(self) -> None:
        try:
            with self._side.engine.connect() as connection:
                with self._lock:
                    if self._is_cancelled:
                        return
                    self._session = driver_connection(connection)
                try:
                    self._work(connection)
                    connection.commit()
                finally:
                    with self._lock:
                        self._session = None
        except BaseException as error:  # noqa: BLE001 -- raised by wait()
            self._error = error
