"""Reasons of a source that does not answer: locks on its tables, and its recovery after a crash."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

from sqlalchemy import Engine

from shardids.errors import ConnectionFailed, ShardidsError, StatementFailed
from shardids.pg.queries import read

_NO_LOCK: Final = "55P03"
_MOST_HOLDERS: Final = 5
_RECOVERY: Final = re.compile(
    r"the database system is (starting up|in recovery mode|not (yet )?accepting connections)"
)
_RECOVERY_S: Final = 120.0
"""How long to wait for a server that replays its log after a crash."""
_POLL_S: Final = 0.2


def await_recovered(engine: Engine) -> None:
    """Wait while a server recovers; whatever else is wrong with it is left to the next that connects."""
    deadline = time.monotonic() + _RECOVERY_S
    while True:
        try:
            with engine.connect():
                return
        except ConnectionFailed as error:
            if _RECOVERY.search(error.message) is None or time.monotonic() > deadline:
                return
        except ShardidsError:
            return
        time.sleep(_POLL_S)


def explained(error: StatementFailed, again: str, engines: Iterable[tuple[str, Engine]]) -> StatementFailed:
    """Return an error that names who keeps a table locked, if that is why a statement failed.

    ``again``: what to do then. ``engines``: the databases that may be meant, each with its name.
    """
    # One with a hint names them itself.
    if error.sqlstate != _NO_LOCK or error.hint:
        return error
    for name, engine in engines:
        with suppress(ShardidsError), engine.connect() as connection:
            if holders := read(connection, "adopt/lock_holders.v1", dict[str, Any]):
                steps = dict.fromkeys(_remedy(holder) for holder in holders if holder["is_granted"])
                return StatementFailed(
                    f"tables of {name} are locked: " + "; ".join(map(_holder, holders[:_MOST_HOLDERS])),
                    hint=f"{again}, once that has ended; or end it: {'; '.join([*steps][:_MOST_HOLDERS])}",
                    sqlstate=error.sqlstate,
                )
    return StatementFailed(error.message, hint=f"The lock is gone by now. {again}.", sqlstate=error.sqlstate)


def _holder(row: dict[str, Any]) -> str:
    if row["gid"] is not None:
        who = f"prepared transaction {row['gid']!r}"
    else:
        application = f" ({row['application']})" if row["application"] else ""
        who = f"process {row['pid']}{application}"
    what = "locked by" if row["is_granted"] else "waited for, to lock it, by"
    return f"{row['table']} is {what} {who} of role {row['role']}"


def _remedy(row: dict[str, Any]) -> str:
    if row["gid"] is not None:
        gid = row["gid"].replace("'", "''")
        return f"commit prepared '{gid}', or rollback prepared '{gid}'"
    return f"select pg_terminate_backend({row['pid']})"
