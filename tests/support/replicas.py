"""Copies that PostgreSQL itself keeps: what a standby receives, and a subscriber of logical replication."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from tests.support.faults import scalar
from tests.support.standbys import Server, Standby, with_password
from tests.support.waiting import wait_for


def stop_receiving(standby: psycopg.Connection[Any]) -> None:
    """From here on the standby hears nothing of the primary."""
    standby.execute("alter system set primary_conninfo = ''")
    standby.execute("select pg_reload_conf()")
    wait_for(lambda: not is_receiving(standby), "the standby receives no more WAL")


def deafen(primary: Server, standby: Standby) -> None:
    """From here on the standby hears nothing; what was said before it has."""
    with (
        psycopg.connect(primary.url(), autocommit=True) as speaking,
        psycopg.connect(standby.url(), autocommit=True) as hearing,
    ):
        # One that has not begun to receive has what its files held, and would receive yet.
        wait_for(lambda: is_receiving(hearing) and has_all_of(hearing, speaking), "the standby has it all")
        stop_receiving(hearing)


def is_receiving(standby: psycopg.Connection[Any]) -> bool:
    return scalar(standby, "select count(*) from pg_stat_wal_receiver where status = 'streaming'") > 0


def has_all_of(standby: psycopg.Connection[Any], primary: psycopg.Connection[Any]) -> bool:
    written = scalar(primary, "select pg_current_wal_flush_lsn()::text")
    return bool(scalar(standby, "select coalesce(pg_last_wal_replay_lsn() >= %s::pg_lsn, false)", written))


def subscribe(original: psycopg.Connection[Any], copy: psycopg.Connection[Any], url: str) -> None:
    """Replicates all tables of the original's database, and waits for the rows that are there."""
    original.execute("create publication everything for all tables")
    copy.execute(
        sql.SQL("create subscription copied connection {} publication everything").format(
            sql.Literal(with_password(url))
        )
    )
    pending = "select count(*) from pg_subscription_rel where srsubstate <> 'r'"
    wait_for(lambda: scalar(copy, pending) == 0, "all tables are copied")


def unsubscribe(original: psycopg.Connection[Any], copy: psycopg.Connection[Any]) -> None:
    """Ends the replication on either side."""
    copy.execute("alter subscription copied disable")
    copy.execute("alter subscription copied set (slot_name = none)")
    copy.execute("drop subscription copied")
    slots = "select slot_name from pg_replication_slots where database = current_database() and not active"
    wait_for(lambda: scalar(original, f"select count(*) from ({slots}) s") == 1, "the subscriber is gone")
    original.execute(f"select pg_drop_replication_slot(slot_name) from ({slots}) s")
