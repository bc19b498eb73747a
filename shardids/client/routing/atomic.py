"""A transaction over nodes fails as one: what fails on one node fails on all, as in one database."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final, TypeVar

from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, SessionTransaction

from shardids.errors import ShardidsError

T = TypeVar("T")

_FAIL: Final = """
    do $$begin
      raise exception 'a statement of this transaction has failed on another node';
    end$$"""
_FAILED: Final = (TransactionStatus.INERROR, TransactionStatus.UNKNOWN)


class Atomic(Session):
    """A session of several connections whose transaction, or savepoint, fails on all of them or on none.

    A node whose part has failed refuses each statement until ROLLBACK, or ROLLBACK TO SAVEPOINT. The session
    makes the other parts fail before it sends or commits anything else.
    """

    _levels: dict[SessionTransaction, list[Connection]]
    """The connections that the transaction uses, and each of its savepoints."""

    @property
    def begun(self) -> list[Connection]:
        """The connections that the session's transaction uses."""
        root = self.get_transaction()
        return [] if root is None else self._levels.get(root, [])

    def fail_together(self) -> None:
        """Makes the transaction fail on all nodes if it has failed on one."""
        if any(map(_has_failed, self.begun)):
            self._fail()

    def in_each(self, shards: Iterable[int], do: Callable[[int], T]) -> list[T]:
        """Returns ``do(shard)`` of each shard; an error after the first fails the transaction."""
        results: list[T] = []
        try:
            for shard in shards:
                results.append(do(shard))
        except BaseException:
            if results:
                self._fail()
            raise
        return results

    def _fail(self) -> None:
        level = self.get_nested_transaction() or self.get_transaction()
        # What a savepoint has not touched must survive its end: it has none on those connections.
        for connection in self._levels.get(level, ()):  # type: ignore[arg-type]  # None is not among them
            if not _has_failed(connection):
                with suppress(DBAPIError, ShardidsError):
                    connection.exec_driver_sql(_FAIL)


def _has_failed(connection: Connection) -> bool:
    if connection.closed or connection.invalidated:
        return True
    # libpq knows it: nothing is sent.
    driver: Any = connection.connection.driver_connection
    return driver.info.transaction_status in _FAILED


@event.listens_for(Atomic, "after_begin", propagate=True)
def _note(session: Any, transaction: SessionTransaction, connection: Connection) -> None:
    level = session._levels.setdefault(transaction, [])
    if connection not in level:
        level.append(connection)
    session.fail_together()


@event.listens_for(Atomic, "before_flush", propagate=True)
@event.listens_for(Atomic, "before_commit", propagate=True)
def _before(session: Any, *_: object) -> None:
    session.fail_together()


@event.listens_for(Atomic, "after_transaction_end", propagate=True)
def _forget(session: Any, transaction: SessionTransaction) -> None:
    session._levels.pop(transaction, None)
