"""Reference tables as the catalog records them, and the names that nodes follow their writer under."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from psycopg import sql
from sqlalchemy import Connection, text

from shardids.catalog.rows import Catalog
from shardids.catalog.topology import REFERENCE_SCHEMA
from shardids.errors import ClusterConflict
from shardids.pg.reader import Reader, Refused

PUBLICATION: Final = "shardids_ref"
"""The publication on the writer."""
WITHIN_S: Final = 30.0
"""How long to wait until a change has reached all nodes, if nothing else is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """A row that is being deleted on all nodes: its table, and its primary key by column."""

    table: str
    key: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """The catalog's record of reference tables.

    Attributes:
        writer: the node that they are written to on; ``None`` while there are none.
        states: ``creating``, ``active`` or ``dropping``, by table.
        deletions: rows that are being deleted.
        successor: the node that is becoming the writer, until it is open for writes.
    """

    writer: str | None
    states: Mapping[str, str]
    deletions: tuple[Deletion, ...] = ()
    successor: str | None = None


def references_of(catalog: Catalog) -> References:
    """Return the catalog's record of reference tables."""
    with catalog.engine.connect() as connection:
        return references_in(connection)


def references_in(connection: Connection) -> References:
    """Return the same as :func:`references_of`; none if the catalog is older than reference tables."""
    if connection.scalar(text("select to_regclass('shardids_catalog.reference_table') is null")):
        return References(writer=None, states={})
    tables = connection.execute(
        text("select name::text, state from shardids_catalog.reference_table order by name")
    )
    deletions = connection.execute(
        text("select table_name::text, key from shardids_catalog.reference_deletion order by started_at")
    )
    writer = connection.execute(
        text("select node, successor from shardids_catalog.reference_writer")
    ).one_or_none()
    return References(
        writer=None if writer is None else writer.node,
        successor=None if writer is None else writer.successor,
        states={row.name: row.state for row in tables},
        deletions=tuple(Deletion(table=row.table_name, key=row.key) for row in deletions),
    )


def require_none(catalog: Catalog, call: str) -> None:
    """Refuse a change that would leave a node without the reference tables; ``call`` makes it with them.

    Raises:
        ClusterConflict: the cluster has reference tables.
    """
    known = references_of(catalog)
    if known.writer is not None:
        raise ClusterConflict(
            f"the cluster has reference tables ({', '.join(known.states)}), which this leaves as they are",
            hint=f"Call shardids.tables.references.{call} instead.",
        )


def writer_of(catalog: Catalog) -> str | None:
    """Return the node that reference tables are written to on; ``None`` if there are none.

    It asks only what roles may read that were granted shards.
    """
    with catalog.engine.connect() as connection:
        writer: str | None = connection.scalar(text("select node from shardids_catalog.reference_writer"))
        return writer


def slot_of(cluster: UUID, node: str) -> str:
    """Return the name of a node's subscription to the writer, and of its replication slot there.

    Several nodes, also of several clusters, may be databases of one server, whose slots share their names.
    """
    return f"shardids_ref_{hashlib.md5(f'{cluster}/{node}'.encode(), usedforsecurity=False).hexdigest()[:20]}"


def slots_of(cluster: UUID, nodes: Iterable[str], writer: str) -> dict[str, str]:
    """Return the nodes that follow the writer, by their slots' names."""
    return {slot_of(cluster, node): node for node in nodes if node != writer}


MARK = text("select pg_logical_emit_message(true, 'shardids', '')::text")
"""Executed by itself, it commits; returns a position of the log past all that was committed before."""

AWAIT = text("select * from shardids.await_references(:slots, cast(:wanted as pg_lsn), :patience_s)")
"""Returns the slots whose followers have not confirmed a position in time."""


_DIGEST: Final = sql.SQL(
    "select count(*) as rows,"
    " coalesce(sum(hashtextextended(to_jsonb(t)::text, 0)::numeric), 0)::text as digest from only {} t"
)


def reference_digests(reader: Reader, names: Iterable[str]) -> dict[str, tuple[int, str] | Refused]:
    """Return the number of rows of each reference table of a node, and a hash of them in any order."""
    tables = list(names)
    queries = [_DIGEST.format(sql.Identifier(REFERENCE_SCHEMA, name)).as_string() for name in tables]
    answers = reader.read(queries, statement_timeout="0")
    return {
        name: answer if isinstance(answer, Refused) else (answer[0]["rows"], answer[0]["digest"])
        for name, answer in zip(tables, answers, strict=True)
    }
