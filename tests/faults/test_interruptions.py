"""Statements are cancelled and sessions terminated at random."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import psycopg

from tests.faults.conftest import Finish, Record
from tests.support.faults import connect, scalar, scaled
from tests.support.recorder import Session
from tests.support.waiting import wait_for

CANCELLED = "57014"
TERMINATED = "57P01"
SESSIONS = 12
LONGEST_TIMEOUT_MS = 5
INTERRUPTIONS = scaled(200, 2000)


def test_sessions_that_are_cancelled_and_terminated_at_random(
    node: str, record: Record, finish: Finish
) -> None:
    recorder = record(node, expected=(CANCELLED,))
    recorder.start(SESSIONS)
    for timeout_ms in range(1, LONGEST_TIMEOUT_MS + 1):
        recorder.start(1, most=20_000, options=f"-c statement_timeout={timeout_ms}")
    undisturbed = record(node)
    with connect(node) as admin:
        noticed = interrupt(admin, recorder.sessions[:SESSIONS])
        wait_for(lambda: all(one.refusals for one in recorder.sessions), "each session is refused")
        undisturbed.start(1)
        undisturbed.await_ids()
        with recorder.paused(), undisturbed.paused():
            assert scalar(admin, "select count(*) from pg_locks where locktype = 'advisory'") == 0
        recorder.await_ids(SESSIONS)
        undisturbed.await_ids()
    assert noticed[CANCELLED] > INTERRUPTIONS / 2
    assert noticed[TERMINATED] > INTERRUPTIONS / 20
    undisturbed.stop()
    recorder.sessions += undisturbed.sessions
    finish(recorder)


def interrupt(admin: psycopg.Connection[Any], sessions: list[Session]) -> Counter[str]:
    """Cancels statements and terminates sessions until enough of it was noticed; what was noticed."""
    chance = random.Random(2)
    noticed: Counter[str] = Counter()
    while noticed.total() < INTERRUPTIONS:
        function = "pg_terminate_backend" if chance.random() < 0.2 else "pg_cancel_backend"
        admin.execute(
            f"""select {function}(pid) from pg_stat_activity
                where datname = current_database() and state = 'active' and pid <> pg_backend_pid()
                order by random() limit 2"""
        )
        time.sleep(chance.uniform(0, 0.01))
        noticed = Counter(refusal.reason for session in sessions for refusal in list(session.refusals))
    return noticed
