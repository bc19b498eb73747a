"""The slots of a relay that copies tables: its workers make one for each table at the source.

If the relay is lost meanwhile, nobody drops them, and they keep the source's log for ever. Their names begin
with the subscription's OID and end with the number of the relay's server: both are the publication's comment,
written before the subscription is enabled.
"""

from __future__ import annotations

from typing import Final

from psycopg import sql
from sqlalchemy import text

from shardids.adopt.definitions import AS_IS
from shardids.adopt.events import Noted, OnEvent
from shardids.adopt.sides import Relay
from shardids.mover.replication import drop_slot
from shardids.mover.sides import Side

_OWN: Final = text("""
    select s.oid::bigint as subscription, (select system_identifier from pg_control_system()) as server
    from pg_subscription s join pg_database d on d.oid = s.subdbid and d.datname = current_database()
    where s.subname = :name""")
_NOTED: Final = text("""
    select obj_description(oid, 'pg_publication') from pg_publication where pubname = :name""")
_THERE: Final = text("""
    select slot_name::text as name, active from pg_replication_slots
    where database = current_database() and slot_name ~ :pattern order by slot_name""")


def note_copy_slots(source: Side, relay: Relay) -> None:
    """Records at the source what the names of the relay's slots are made of. Idempotent."""
    with relay.side.autocommit() as connection:
        own = connection.execute(_OWN, {"name": relay.name}).one()
    comment = sql.SQL("comment on publication {} is {}").format(
        sql.Identifier(relay.name), sql.Literal(f"{own.subscription} {own.server}")
    )
    with source.autocommit() as connection:
        connection.exec_driver_sql(comment.as_string(), execution_options=AS_IS)


def drop_copy_slots(source: Side, relay: Relay, on_event: OnEvent) -> None:
    """Drops what the relay's copies have left at the source. Idempotent.

    If it is not known which slots are the relay's, those that may be are reported, and stay.
    """
    with source.autocommit() as connection:
        found = connection.execute(_NOTED, {"name": relay.name}).all()
        if not found:
            return
        subscription, _, server = (found[0][0] or "").partition(" ")
        is_known = subscription.isdigit() and server.isdigit()
        pattern = (
            f"^pg_{subscription}_sync_[0-9]+_{server}$" if is_known else "^pg_[0-9]+_sync_[0-9]+_[0-9]+$"
        )
        slots = connection.execute(_THERE, {"pattern": pattern}).all()
        if is_known:
            for slot in slots:
                drop_slot(connection, source, slot.name)
        elif idle := [slot.name for slot in slots if not slot.active]:
            on_event(
                Noted(
                    note=f"the source keeps its log for slots {', '.join(idle)}, which may be the relay's: if"
                    " no other subscription copies tables from there, drop them (pg_drop_replication_slot)"
                )
            )
