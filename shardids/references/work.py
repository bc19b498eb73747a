"""Who works at reference tables: one process at a time, with connections to the writer and to all readers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, text

from shardids.catalog.connections import on_connect
from shardids.catalog.locks import AdvisoryLock
from shardids.catalog.placing import lock_placement
from shardids.catalog.references import References, references_of, slot_of
from shardids.catalog.rows import Catalog, unknown_node
from shardids.errors import ClusterConflict, ConnectionFailed
from shardids.mover.held import HeldLock
from shardids.mover.sides import Side, move_nodes

LOCK_TIMEOUT: Final = "10s"
"""How long to wait for sessions that write to a reference table, or refer to a row that is deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is worked with.

    Attributes:
        known: what the catalog said of reference tables when the work began.
        writer: the node on which they are written to.
        readers: the other nodes, by name.
    """

    catalog: Catalog
    cluster: UUID
    known: References
    writer: Side
    readers: Mapping[str, Side]
    held: HeldLock

    @property
    def sides(self) -> tuple[Side, ...]:
        """All nodes, the writer first."""
        return (self.writer, *self.readers.values())

    def slot(self, reader: Side) -> str:
        """Returns the name of a reader's subscription, and of its slot on the writer."""
        return slot_of(self.cluster, reader.name)

    def record(self, statement: str, **parameters: Any) -> None:
        """Changes the catalog, under the lock."""
        with self.held.transaction() as connection:
            connection.execute(text(statement), parameters)


@contextmanager
def begun(catalog: Catalog, *, writer: str | None = None, moving: bool = False) -> Iterator[Work]:
    """Yields the work, which no other process does meanwhile; ``writer``: for a cluster that has none yet.

    ``moving``: the work resumes an interrupted move of the writer, or undoes it.

    Raises:
        ClusterConflict: another process is at it; or there is no writer, or another, or no such node; or a
            move of the writer was interrupted, and not ``moving``.
    """
    taken = ClusterConflict(
        "another process is changing reference tables or their nodes", hint="Wait until it has ended."
    )
    lost = ClusterConflict(
        "the connection to the catalog was lost, and with it the right to change reference tables",
        hint="Repeat the command: it goes on from there.",
    )
    with HeldLock.taken(catalog, AdvisoryLock.REFERENCES, 0, taken=taken, lost=lost) as held:
        known, placement = references_of(catalog), catalog.placement()
        if known.successor is not None and not moving:
            raise ClusterConflict(
                f'the move of reference tables\' writer to node "{known.successor}" was interrupted',
                hint=f"Complete it: shardids reference move --to {known.successor}, or undo it: shardids"
                " reference repair",
            )
        cluster = catalog.describe().cluster
        name = _writer(known, writer)
        if name not in placement.nodes:
            raise unknown_node(name, placement.nodes)
        session = f"shardids_references_{cluster.hex}"
        with move_nodes(placement, catalog.url, name=session) as nodes:
            sides = {one: Side(name=one, engine=nodes[one]) for one in nodes}
            for side in sides.values():
                # A process that slept, and lost the lock, finds its sessions ended. It is not to open others.
                on_connect(side.engine, lambda *_: held.require())
                with suppress(ConnectionFailed):  # Work that needs the node will report it.
                    side.end_sessions(session)
            yield Work(
                catalog=catalog,
                cluster=cluster,
                known=known,
                writer=sides.pop(name),
                readers=sides,
                held=held,
            )


def _writer(known: References, wanted: str | None) -> str:
    if known.writer is not None and wanted not in (None, known.writer):
        raise ClusterConflict(
            f'reference tables are written to on node "{known.writer}", not "{wanted}"',
            hint="All have one writer, for they may refer to each other. Leave --writer out.",
        )
    name = known.writer or wanted
    if name is None:
        raise ClusterConflict(
            "the cluster has no reference tables yet",
            hint="Choose the node to write them on: shardids reference create NAME --writer NODE",
        )
    return name


def let_through(connection: Connection) -> None:
    """Lets the guards of reference tables pass the rest of the transaction; waits briefly for locks."""
    connection.execute(
        text("""select set_config('shardids.reference_work', 'on', true),
                       set_config('lock_timeout', :timeout, true)"""),
        {"timeout": LOCK_TIMEOUT},
    )


def require_nothing_moves(connection: Connection, what: str) -> None:
    """Requires that no shard is being moved and no database adopted, and lets none begin before the COMMIT.

    To be called first in a transaction: it takes the lock of the placement.

    Raises:
        ClusterConflict: one is; ``what`` its message begins with.
    """
    lock_placement(connection)
    connection.execute(text("lock table shardids_catalog.move, shardids_catalog.adoption in share mode"))
    busy = connection.scalar(
        text("""
            select coalesce(
              (select format('shard %s is being moved', m.shard) from shardids_catalog.move m
               where m.ended_at is null order by m.shard limit 1),
              (select 'a database is being adopted' from shardids_catalog.adoption a
               where a.ended_at is null))""")
    )
    if busy is not None:
        raise ClusterConflict(
            f"{what}: {busy}, and rows that arrive that way are not checked against foreign keys",
            hint="Wait until that has ended.",
        )
