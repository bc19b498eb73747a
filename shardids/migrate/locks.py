"""One run over a cluster at a time, and who has it."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from sqlalchemy import Connection, text

from shardids.catalog.connections import open_engine
from shardids.catalog.locks import AdvisoryLock
from shardids.catalog.rows import Catalog
from shardids.errors import ClusterConflict

_LONGEST_NAME = 63


@contextmanager
def one_run(catalog: Catalog, what: str) -> Iterator[None]:
    """Holds the cluster's run lock; ``what`` is said to those who want it meanwhile.

    The lock goes with the session, so that a run that was killed holds it no longer than its connection.

    Raises:
        ClusterConflict: another run has it; the message says who and since when.
    """
    engine = open_engine(catalog.url, what="the catalog", administrative=True, pool_size=1)
    try:
        # A transaction, not a session lock: it stays on one server connection behind PgBouncer as well.
        with engine.connect() as connection, connection.begin():
            connection.execute(
                text("select set_config('application_name', :name, true)"), {"name": _session_name(what)}
            )
            if not connection.scalar(
                text("select pg_try_advisory_xact_lock(:key)"), {"key": AdvisoryLock.MIGRATE_RUN}
            ):
                raise _held_by_another(connection)
            # Last, and without parameters: the portal of the statement before would keep its snapshot, and a
            # CREATE INDEX CONCURRENTLY in this database would wait for it until the end of the run.
            connection.exec_driver_sql("set local idle_in_transaction_session_timeout = 0")
            yield
    finally:
        engine.dispose()


def _session_name(what: str) -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "?"
    since = f" since {datetime.now(UTC):%Y-%m-%d %H:%M:%SZ}"
    return f"shardids {what} by {user}@{socket.gethostname()}"[: _LONGEST_NAME - len(since)] + since


def _held_by_another(connection: Connection) -> ClusterConflict:
    holder = connection.execute(
        text("""
            select a.application_name, a.pid, a.client_addr
            from pg_locks l join pg_stat_activity a using (pid)
            where l.locktype = 'advisory' and l.granted
              and l.classid = 0 and l.objid = :key and l.objsubid = 1
              and l.database = (select oid from pg_database where datname = current_database())"""),
        {"key": AdvisoryLock.MIGRATE_RUN},
    ).first()
    who = "another session" if holder is None else f"{holder.application_name} (process {holder.pid})"
    return ClusterConflict(
        f"another run is changing the shards of this cluster: {who}",
        hint="Wait until it has ended. It holds the lock by its connection to the catalog: if it hangs, end"
        " that one there with pg_terminate_backend.",
    )
