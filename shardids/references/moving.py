"""Lets reference tables be written to on another node.

The writer is closed first; from then on nobody writes, until the new one is open. So the other nodes need
nothing of the old one's log: they are brought to the new one's rows, and follow it from there on. The catalog
says from the first step to the last that the writer is being moved: what was interrupted is completed by the
same call, or undone by :func:`shardids.references.repair`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from psycopg import sql
from sqlalchemy import Connection, text

from shardids.catalog.references import PUBLICATION, REFERENCE_SCHEMA
from shardids.catalog.rows import Catalog, unknown_node
from shardids.errors import ClusterConflict, StatementFailed
from shardids.mover.replication import LOCK_FAILURES, drop_slot
from shardids.mover.sides import Side
from shardids.references.fitness import require_capacity
from shardids.references.following import attach, detach, require_alike, run
from shardids.references.state import differs, has_arrived
from shardids.references.tables import active, guard, publish
from shardids.references.work import Work, begun, let_through, require_nothing_moves

_SEQUENCES: Final = text("""
    select c.relname::text from pg_class c
    where c.relnamespace = to_regnamespace(:schema) and c.relkind = 'S' order by 1""")


def move_writer(catalog: Catalog, node: str, *, dry_run: bool = False) -> str:
    """Lets reference tables be written to on another node; returns the one before. Repeatable.

    While it runs, writes to them are refused as on any other node, by
    :class:`~shardids.errors.ReferenceRefused`; reading goes on. With ``dry_run`` everything is checked and
    nothing changed.

    Raises:
        ClusterConflict: there is no such node; a table or a row is being made, deleted or dropped; a shard
            is being moved or a database adopted; the other nodes can't follow the new one; a transaction
            writes to a reference table and does not end; or the new one has not the same rows. All is as
            before.
        ConnectionFailed: a node does not answer. If it did before, the move is open: repeat it, or undo it
            by :func:`~shardids.references.repair`.
    """
    with begun(catalog, moving=True) as work:
        before, successor = work.writer.name, work.known.successor
        if node not in {side.name for side in work.sides}:
            raise unknown_node(node, sorted(side.name for side in work.sides))
        if successor not in (None, node):
            raise ClusterConflict(
                f'the writer of reference tables is being moved to node "{successor}"',
                hint=f"Complete that: shardids reference move --to {successor}, or undo it: shardids"
                " reference repair",
            )
        if node == before:
            if successor is not None and not dry_run:
                open_writer(work)
            return before
        later = seen_from(work, node)
        _require_ready(work, later)
        if not dry_run:
            _begin(work, node)
            try:
                _close(work, later)
            except ClusterConflict:
                if successor is None:
                    _end(work)
                raise
            try:
                _require_same(work, later.writer)
            except ClusterConflict:
                undo_move(work, node)
                raise
            _carry_sequences(work.writer, later.writer)
            _turn(work, later)
            work.record("update shardids_catalog.reference_writer set node = :node", node=node)
            open_writer(later)
        return before


def seen_from(work: Work, node: str) -> Work:
    """Returns the same work with another node as the writer."""
    readers = {side.name: side for side in work.sides if side.name != node}
    return replace(work, writer=work.readers[node], readers=readers)


def _require_ready(work: Work, later: Work) -> None:
    unfinished = [
        f"table {name} is {state}" for name, state in work.known.states.items() if state != "active"
    ]
    unfinished += [f"a row of {deletion.table} is being deleted" for deletion in work.known.deletions]
    if unfinished:
        raise ClusterConflict(
            f"the writer of reference tables can't be moved: {unfinished[0]}",
            hint="Complete that first. See: shardids doctor",
        )
    require_capacity(later)
    for reader in work.readers.values():
        require_alike(work, reader, active(work))


def _begin(work: Work, node: str) -> None:
    with work.held.transaction() as connection:
        require_nothing_moves(connection, "the writer of reference tables can't be moved now")
        connection.execute(
            text("update shardids_catalog.reference_writer set successor = :node"), {"node": node}
        )


def _close(work: Work, later: Work) -> None:
    """Lets nobody write any more. Whoever has written has ended then."""
    try:
        with work.writer.begin() as connection:
            let_through(connection)
            for table in active(work):
                guard(connection, table, later, is_writer=False)
    except StatementFailed as error:
        if error.sqlstate not in LOCK_FAILURES:
            raise
        raise ClusterConflict(
            f'a transaction on node "{work.writer.name}" that writes to a reference table has not ended',
            hint="Wait until it has ended (pg_stat_activity, pg_prepared_xacts), then repeat the command.",
        ) from error


def _require_same(work: Work, side: Side) -> None:
    """Requires that a node has the rows of the writer, which don't change any more."""
    tables = active(work)
    found = differs(work.writer, side, tables)
    if found is not None and has_arrived(work, side):
        found = differs(work.writer, side, tables)
    if found is not None:
        raise ClusterConflict(
            f'node "{side.name}" has not the same rows of reference table {found} as the writer',
            hint="See shardids reference status. To bring it there: shardids reference repair",
        )


def _carry_sequences(before: Side, after: Side) -> None:
    with before.autocommit() as source, after.autocommit() as target:
        for name in source.scalars(_SEQUENCES, {"schema": REFERENCE_SCHEMA}).all():
            sequence = sql.Identifier(REFERENCE_SCHEMA, name)
            value = run(source, sql.SQL("select last_value, is_called from {}").format(sequence)).one()
            target.execute(
                text("select setval(to_regclass(:sequence), :last_value, :is_called)"),
                {"sequence": sequence.as_string(), **value._asdict()},
            )


def _turn(work: Work, later: Work) -> None:
    """Lets all nodes follow the new writer."""
    tables = active(work)
    detach(work, later.writer)
    with later.writer.begin() as connection:
        for table in tables:
            publish(connection, table)
    for reader in later.readers.values():
        if reader.name != work.writer.name:
            # Slots of databases of one server share their names: the old one goes first.
            detach(work, reader)
        with reader.begin() as connection:
            let_through(connection)
            for table in tables:
                guard(connection, table, later, is_writer=False)
        attach(later, reader, tables)


def open_writer(work: Work) -> None:
    """Lets the node that the catalog names take writes, which ends the move."""
    for reader in work.readers.values():
        with reader.begin() as connection:
            _unpublish(connection)
    _open(work)


def undo_move(work: Work, successor: str) -> None:
    """Lets the old writer take writes again; nodes that follow the new one already are left to repair."""
    later = seen_from(work, successor)
    with later.writer.autocommit() as connection:
        for reader in later.readers.values():
            here = text("""
                select exists (select from pg_replication_slots
                               where slot_name = :name and database = current_database())""")
            if connection.scalar(here, {"name": later.slot(reader)}):
                drop_slot(connection, later.writer, later.slot(reader))
        _unpublish(connection)
    _open(work)


def _unpublish(connection: Connection) -> None:
    run(connection, sql.SQL("drop publication if exists {}").format(sql.Identifier(PUBLICATION)))


def _open(work: Work) -> None:
    with work.writer.begin() as connection:
        let_through(connection)
        for table in active(work):
            guard(connection, table, work, is_writer=True)
    _end(work)


def _end(work: Work) -> None:
    work.record("update shardids_catalog.reference_writer set successor = null")
