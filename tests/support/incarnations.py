"""The ways in which an incarnation of a server ends and another begins."""

from __future__ import annotations

import os
import signal
from typing import Any

import psycopg

from shardids.pg.embedded import EmbeddedServer
from tests.support.generator import connect
from tests.support.waiting import wait_for

Db = psycopg.Connection[Any]

ENDS = ("restart", "immediate shutdown", "kill of one backend")


def begin_another_incarnation(server: EmbeddedServer, how: str, observer: Db, working: Db) -> None:
    """Ends the server as told, with the sessions still there, and has it started again."""
    if how == "kill of one backend":
        postmaster = server.pid
        os.kill(working.info.backend_pid, signal.SIGKILL)
        wait_for(lambda: is_cut_off(observer), "the server ends all sessions")
        assert server.pid == postmaster
    else:
        server.restart("fast" if how == "restart" else "immediate")
    observer.close()
    working.close()


def is_cut_off(connection: Db) -> bool:
    try:
        connection.execute("select 1")
    except psycopg.OperationalError:
        return True
    return False


def reconnect(url: str) -> Db:
    found: list[Db] = []

    def connected() -> bool:
        try:
            found.append(connect(url))
        except psycopg.OperationalError:
            return False
        return True

    wait_for(connected, "the server answers")
    return found[0]
