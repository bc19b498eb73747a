"""Whether nodes are still the servers that have confirmed changes, or standbys that took their places.

A standby may lack what the server before it had confirmed. The source sends that to nobody again, so nothing
else would tell. Each subscription has the timeline of its server as comment, which a promotion changes.

On the way back the source is such a server. A node keeps its timeline, as comment of the publication.
"""

from __future__ import annotations

from collections.abc import Sequence

from psycopg import sql
from sqlalchemy import Connection, text

from shardids.adopt.definitions import AS_IS
from shardids.adopt.sides import Relay, Taker
from shardids.errors import AdoptionFailed

_NOW = text("""
    select case when not pg_is_in_recovery()
           then substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) end""")
_NOTED = text("select obj_description(oid, 'pg_publication') from pg_publication where pubname = :name")
_FOUND = text("""
    select substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) as now,
           (select obj_description(s.oid, 'pg_subscription') from pg_subscription s
            join pg_database d on d.oid = s.subdbid and d.datname = current_database()
            where s.subname = :name) as noted""")


def _read(connection: Connection, name: str) -> tuple[str, str | None]:
    found = connection.execute(_FOUND, {"name": name}).one()
    return found.now, found.noted


def note_timelines(followers: Sequence[Taker | Relay]) -> None:
    """Records on which timelines the servers are that have all rows up to now."""
    for follower in followers:
        with follower.side.autocommit() as connection:
            now, noted = _read(connection, follower.name)
            if now != noted:
                comment = sql.SQL("comment on subscription {} is {}").format(
                    sql.Identifier(follower.name), sql.Literal(now)
                )
                connection.exec_driver_sql(comment.as_string(), execution_options=AS_IS)


def require_timelines(followers: Sequence[Taker | Relay]) -> None:
    """Requires the servers that were recorded.

    Raises:
        AdoptionFailed: one was replaced by a standby, or restored.
    """
    for follower in followers:
        with follower.side.autocommit() as connection:
            now, noted = _read(connection, follower.name)
        if now != noted:
            raise AdoptionFailed(
                f'"{follower.side.name}" is another server than the one that took rows in: a promoted'
                " standby, or a restored backup. It may lack changes that the other had confirmed",
                hint="shardids adopt compare says whether it does; if so: shardids adopt abort.",
            )


def source_timeline(source: Connection) -> str | None:
    """Returns the timeline that the source is on; ``None`` of a standby."""
    now: str | None = source.scalar(_NOW)
    return now


def note_source(node: Connection, publication: str, timeline: str | None) -> None:
    """Records the source's timeline on a node, with the publication of the way back."""
    comment = sql.SQL("comment on publication {} is {}").format(
        sql.Identifier(publication), sql.Literal(timeline)
    )
    node.exec_driver_sql(comment.as_string(), execution_options=AS_IS)


def is_noted_source(node: Connection, publication: str, timeline: str | None) -> bool:
    """Returns whether a node has recorded this timeline as that of the source."""
    noted: str | None = node.scalar(_NOTED, {"name": publication})
    return noted is not None and noted == timeline
