"""MariaDB masters that replicate in a ring, each from the one before it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from shardids.compare.multimaster.mariadb import (
    CATCH_UP_S,
    MariaDbMaster,
    connect,
    last_written,
    lost_as_such,
    offset_settings,
    rows,
)
from shardids.errors import StatementFailed


def ring_settings(offset: int, masters: int) -> dict[str, str]:
    """The option file of the master with this offset, from 1, among so many."""
    return {
        **offset_settings(offset, masters),
        "server-id": str(offset),
        "gtid-domain-id": str(offset),
        "log-bin": "binlog",
        "binlog-format": "ROW",
        "log-slave-updates": "ON",
    }


def close_ring(masters: Sequence[MariaDbMaster]) -> None:
    """Makes each master replicate from the one before it, the first from the last.

    It can be repeated, also with further masters, which come last: each goes on from what it has. They may
    write meanwhile, except for new ones. Each needs :func:`ring_settings`.

    Raises:
        ConnectionFailed: as it says.
        StatementFailed: a master lacks, for too long, what the next one has.
    """
    pairs = list(zip([masters[-1], *masters[:-1]], masters, strict=True))
    # A new master comes last, and first gets its rows: then the first one can turn to it.
    for source, master in reversed(pairs):
        with (
            lost_as_such(master.login),
            connect(source.login) as there,
            connect(master.login) as here,
        ):
            _follow(here, there, source)


def _follow(here: Any, there: Any, source: MariaDbMaster) -> None:
    rows(here, "stop slave")
    ((own_domain,),) = rows(here, "select @@global.gtid_domain_id")
    start = last_written(here)
    start.pop(own_domain, None)
    deadline = time.monotonic() + CATCH_UP_S
    # A server refuses to go on from what it does not have.
    while not all(
        _number(last_written(there).get(domain)) >= _number(gtid) for domain, gtid in start.items()
    ):
        if time.monotonic() > deadline:
            raise StatementFailed(f'master "{source.name}" has not applied {start} within {CATCH_UP_S:g} s')
        time.sleep(0.05)
    # Its own writes need not come back to it.
    own = last_written(there).get(own_domain)
    position = ",".join([*start.values(), *([own] if own else [])])
    rows(here, "set global gtid_slave_pos = %s", (position,))
    rows(
        here,
        "change master to master_host = %s, master_port = %s, master_user = %s, master_password = %s,"
        " master_use_gtid = slave_pos, master_connect_retry = 1",
        (source.login.host, source.login.port, source.login.user, source.login.password),
    )
    rows(here, "start slave")


def _number(gtid: str | None) -> int:
    return int(gtid.rpartition("-")[2]) if gtid else 0
