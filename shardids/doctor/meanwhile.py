"""What others change in the cluster while it is examined: open moves, and runs of migrations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy import Connection, text

from shardids.catalog.locks import AdvisoryLock
from shardids.doctor.cluster_facts import Move


def read_moves(connection: Connection) -> list[Move]:
    """Returns the open moves; the process that runs one holds an advisory lock with the shard's number."""
    if connection.scalar(text("select to_regclass('shardids_catalog.move') is null")):
        return []
    found = connection.execute(
        text("""
            select m.shard, m.source, m.target, m.step, exists (
                     select from pg_locks l
                     where l.locktype = 'advisory' and l.granted
                       and l.classid = :lock and l.objid = m.shard ::oid and l.objsubid = 2
                       and l.database = (select oid from pg_database where datname = current_database())
                   ) as is_running
            from shardids_catalog.move m where m.ended_at is null order by m.shard"""),
        {"lock": AdvisoryLock.MOVE},
    )
    return [Move(**row._mapping) for row in found]


def is_migrating_now(connection: Connection) -> bool:
    """Returns whether a run of the application's migrations holds its lock, whose key is one number."""
    return bool(
        connection.scalar(
            text("""
                select exists (
                  select from pg_locks l
                  where l.locktype = 'advisory' and l.granted
                    and l.classid = 0 and l.objid = :lock and l.objsubid = 1
                    and l.database = (select oid from pg_database where datname = current_database()))"""),
            {"lock": AdvisoryLock.MIGRATE_RUN},
        )
    )


def moves_meanwhile(before: Sequence[Move], after: Sequence[Move]) -> list[Move]:
    """Returns the moves that were open at some time between two readings; one that ended was running."""
    later = {move.shard: move for move in after}
    ended = [replace(move, is_running=True) for move in before if move.shard not in later]
    return [*ended, *after]
