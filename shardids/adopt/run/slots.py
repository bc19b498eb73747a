"""Replication slots of an adoption's followers, and of the copies that these make of tables.

A subscription's workers make one more slot for each table that they copy. Its name begins with the
subscription's OID and ends with the number of the follower's server. If the follower is lost meanwhile,
nobody drops it, and it keeps the publisher's log for ever. So a pattern for these names is the publication's
comment: that of the relay is written before its subscription is enabled, that of a node once it follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, text

from shardids.adopt.run.sides import Follower
from shardids.errors import AdoptionFailed
from shardids.pg.queries import comment_on
from shardids.replication.sides import Side
from shardids.replication.steps import Noted, OnEvent
from shardids.replication.subscriptions import drop_slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A replication slot of a follower.

    Attributes:
        name: its name.
        lag_bytes: how much of the log is not confirmed; ``None`` if the server has given it up.
        kept_bytes: how much of the log the server keeps for it, or for a slot of a copy of the follower.
        kept_by: the name of that one of them that keeps most.
    """

    name: str
    lag_bytes: int | None
    kept_bytes: int | None
    kept_by: str | None


_SLOTS = text("""
    select s.slot_name::text as name, most.bytes as kept_bytes, most.name as kept_by,
           case when s.wal_status is distinct from 'lost'
                then (pg_current_wal_lsn() - s.confirmed_flush_lsn)::bigint end as lag_bytes
    from pg_replication_slots s
    left join pg_publication p on p.pubname = s.slot_name
    left join lateral (
      select c.slot_name::text as name, (pg_current_wal_lsn() - c.restart_lsn)::bigint as bytes
      from pg_replication_slots c
      where (c.slot_name = s.slot_name or c.slot_name ~ obj_description(p.oid, 'pg_publication'))
        and c.restart_lsn is not null
      order by 2 desc limit 1) most on true
    where s.slot_name = any(:names)""")


def slots(publisher: Side, followers: Sequence[Follower]) -> dict[str, Slot]:
    """Return the slots of followers that a server has, by name."""
    with publisher.autocommit() as connection:
        rows = connection.execute(_SLOTS, {"names": [follower.name for follower in followers]})
        return {row.name: Slot(**row._asdict()) for row in rows}


def require_slots(source: Connection, publisher: Side, followers: Sequence[Follower]) -> None:
    """Require the slots: a promoted standby lacks them, and the followers would wait for ever.

    Raises:
        AdoptionFailed: one is missing, or the server has given it up.
    """
    rows = source.execute(
        text("select slot_name::text, wal_status from pg_replication_slots where slot_name = any(:names)"),
        {"names": [taker.name for taker in followers]},
    )
    found = {row.slot_name: row.wal_status for row in rows}
    for taker in followers:
        if found.get(taker.name, "lost") == "lost":
            raise AdoptionFailed(
                f'the {publisher.name} has no replication slot "{taker.name}" any more, or has given it up',
                hint="shardids adopt abort; see max_slot_wal_keep_size there; then start it again.",
            )


_COPIES: Final = text("""
    select format('^pg_%s_sync_[0-9]+_%s$', s.oid, (select system_identifier from pg_control_system()))
    from pg_subscription s
    where s.subname = :name
      and s.subdbid = (select d.oid from pg_database d where d.datname = current_database())""")


def copy_slots(follower: Follower) -> str | None:
    """Return a pattern for the names of the slots of a follower's copies, if it has a subscription."""
    with follower.side.autocommit() as connection:
        pattern: str | None = connection.scalar(_COPIES, {"name": follower.name})
        return pattern


_NOTED: Final = text("""
    select obj_description(oid, 'pg_publication') from pg_publication where pubname = :name""")
_ANY_COPY_SLOT: Final = "^pg_[0-9]+_sync_[0-9]+_[0-9]+$"
_THERE: Final = text("""
    select slot_name::text as name, active from pg_replication_slots
    where database = current_database() and slot_name ~ :pattern order by slot_name""")


def note_copy_slots(publisher: Side, follower: Follower) -> None:
    """Record a pattern for the names of the slots of a follower's copies. Idempotent."""
    with publisher.autocommit() as connection:
        comment_on(connection, "publication", follower.name, copy_slots(follower))


def drop_copy_slots(source: Side, name: str, on_event: OnEvent) -> None:
    """Drop the objects that the copies of the relay, called ``name``, have left at the source. Idempotent.

    If it is not known which slots are the relay's, those that may be are reported, and stay.
    """
    with source.autocommit() as connection:
        found = connection.execute(_NOTED, {"name": name}).all()
        if not found:
            return
        pattern = found[0][0]
        slots = connection.execute(_THERE, {"pattern": pattern or _ANY_COPY_SLOT}).all()
        if pattern is not None:
            for slot in slots:
                drop_slot(connection, source, slot.name)
        elif idle := [slot.name for slot in slots if not slot.active]:
            on_event(
                Noted(
                    note=f"the source keeps its log for slots {', '.join(idle)}, which may be the relay's: if"
                    " no other subscription copies tables from there, drop them (pg_drop_replication_slot)"
                )
            )
