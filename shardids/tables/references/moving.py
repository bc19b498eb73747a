"""The change of the node that takes writes to reference tables.

The writer is closed first; from then on nobody writes, until the new one is open. So the other nodes need
nothing of the old one's log: they are brought to the new one's rows, and follow it from there on. The catalog
says from the first step to the last that the writer is being moved: an interrupted move is completed by the
same call, or undone by :func:`shardids.tables.references.repair`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from psycopg import sql
from sqlalchemy import text

from shardids.catalog.references import PUBLICATION
from shardids.catalog.rows import Catalog, unknown_node
from shardids.catalog.topology import REFERENCE_SCHEMA
from shardids.errors import ClusterConflict, ConnectionFailed, ShardidsError, StatementFailed
from shardids.replication.sides import Side
from shardids.replication.subscriptions import LOCK_FAILURES, drop_slot, unsubscribe
from shardids.tables.references.following import (
    LOCK_TIMEOUT,
    Work,
    attach,
    begun,
    detach,
    let_through,
    require_alike,
    require_nothing_moves,
    require_slot,
    run,
)
from shardids.tables.references.state import differs, has_arrived, require_capacity, require_same_rules
from shardids.tables.references.tables import active, guard, publish

# A sequence that no column owns goes by its own name.
_SEQUENCES: Final = text("""
    select array[n.nspname::text, s.relname::text] as name,
           coalesce((select format('%I.%I.%I', n.nspname, t.relname, a.attname)
                     from pg_depend d join pg_class t on t.oid = d.refobjid
                     join pg_attribute a on a.attrelid = t.oid and a.attnum = d.refobjsubid
                     where d.classid = 'pg_class'::regclass and d.objid = s.oid and d.deptype in ('a', 'i')
                       and d.refclassid = 'pg_class'::regclass),
                    format('%I.%I', n.nspname, s.relname)) as of
    from pg_class s join pg_namespace n on n.oid = s.relnamespace
    where s.relkind = 'S'
      and (n.nspname = :schema
           or exists (select from pg_depend u join pg_attrdef f on f.oid = u.objid
                      join pg_class t on t.oid = f.adrelid
                      where u.classid = 'pg_attrdef'::regclass and u.refclassid = 'pg_class'::regclass
                        and u.refobjid = s.oid and t.relnamespace = to_regnamespace(:schema)))
    order by 2""")


def move_writer(catalog: Catalog, node: str, *, dry_run: bool = False) -> str:
    """Let reference tables be written to on another node; return the one before. Repeatable.

    While it runs, writes to them are refused as on any other node, by
    :class:`~shardids.errors.ReferenceRefused`; reading goes on. With ``dry_run`` everything is checked and
    nothing changed.

    Raises:
        ClusterConflict: the node does not exist; a table or a row is being made, deleted or dropped; a shard
            is being moved or a database adopted; the other nodes can't follow the new one, or it does not
            enforce the rules of the old one; a transaction writes to a reference table and does not end; or
            the new one does not have the same rows. All is as before.
        ClusterConflict: other nodes could not be turned to the new one. The old one takes writes again;
            :func:`~shardids.tables.references.repair` lets all follow it.
        ConnectionFailed: a node does not answer. If the writer or the catalog did before, the move may be
            open: repeat it, or undo it by :func:`~shardids.tables.references.repair`.
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
        if successor is None:
            _require_arrived(work, later.writer)
            require_slot(later.writer, later.slot(work.writer))
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
            except ShardidsError:
                undo_move(work, node)
                raise
            try:
                _carry_sequences(work, later.writer)
                _turn(work, later)
            except ShardidsError as error:
                undo_move(work, node)
                raise ClusterConflict(
                    f'node "{before}" is still the writer of reference tables: {error.message}',
                    hint="Let all nodes follow it again: shardids reference repair. Then repeat the command.",
                ) from error
            work.record("update shardids_catalog.reference_writer set node = :node", node=node)
            open_writer(later)
        return before


def seen_from(work: Work, node: str) -> Work:
    """Return the same work with another node as the writer."""
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
    tables = active(work)
    for reader in work.readers.values():
        require_alike(work, reader, tables)
    require_same_rules(work.writer, later.writer, tables)
    _matched_sequences(work, later.writer)


def _require_arrived(work: Work, side: Side) -> None:
    if not has_arrived(work, side):
        raise ClusterConflict(
            f'node "{side.name}" has not received all changes from the writer of reference tables',
            hint="See shardids reference list. If it does not follow: shardids reference repair",
        )


def _begin(work: Work, node: str) -> None:
    with work.held.transaction() as connection:
        require_nothing_moves(connection, "the writer of reference tables can't be moved now")
        connection.execute(
            text("update shardids_catalog.reference_writer set successor = :node"), {"node": node}
        )


def _close(work: Work, later: Work) -> None:
    """Stop all writers, and return when earlier writers have ended."""
    try:
        with work.writer.begin() as connection:
            let_through(connection)
            for table in active(work):
                guard(connection, table, later.writer.name, is_writer=False)
    except StatementFailed as error:
        if error.sqlstate not in LOCK_FAILURES:
            raise
        raise ClusterConflict(
            f'a transaction on node "{work.writer.name}" that writes to a reference table has not ended',
            hint="Wait until it has ended (pg_stat_activity, pg_prepared_xacts), then repeat the command.",
        ) from error


def _require_same(work: Work, side: Side) -> None:
    """Require that a node has the rows of the writer, which don't change any more."""
    tables = active(work)
    found = differs(work.writer, side, tables)
    if found is not None and has_arrived(work, side):
        found = differs(work.writer, side, tables)
    if found is not None:
        raise ClusterConflict(
            f'node "{side.name}" does not have the same rows of reference table {found} as the writer',
            hint="See shardids reference list. To copy the rows there: shardids reference repair",
        )


def _matched_sequences(work: Work, successor: Side) -> list[tuple[sql.Identifier, str]]:
    """Return the writer's sequences, each with the name of the successor's that takes its place.

    Raises:
        ClusterConflict: the successor lacks one.
    """
    there, here = (_sequences(side) for side in (work.writer, successor))
    if missing := sorted(there.keys() - here.keys()):
        raise ClusterConflict(
            f'node "{successor.name}" lacks the sequence of {missing[0]}, which node'
            f' "{work.writer.name}" has',
            hint="Create it there, for example by a revision for the node (shardids migrate up).",
        )
    return [
        (sql.Identifier(*one.name), sql.Identifier(*here[of].name).as_string()) for of, one in there.items()
    ]


def _sequences(side: Side) -> dict[str, Any]:
    """Return the sequences that numbers of reference tables come from, by the columns that own them."""
    with side.autocommit() as connection:
        rows = connection.execute(_SEQUENCES, {"schema": REFERENCE_SCHEMA})
        return {row.of: row for row in rows}


def _carry_sequences(work: Work, successor: Side) -> None:
    matched = _matched_sequences(work, successor)
    with work.writer.autocommit() as source, successor.autocommit() as target:
        for sequence, own in matched:
            value = run(source, sql.SQL("select last_value, is_called from {}").format(sequence)).one()
            target.execute(
                text("select setval(cast(:own as regclass), :last_value, :is_called)"),
                {"own": own, **value._asdict()},
            )


def _turn(work: Work, later: Work) -> None:
    """Let all nodes follow the new writer."""
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
                guard(connection, table, later.writer.name, is_writer=False)
        # Writes are refused meanwhile. Transactions that were open at the trial have ended.
        attach(later, reader, tables, patience=LOCK_TIMEOUT)


def open_writer(work: Work) -> None:
    """Let the node that the catalog names take writes, which ends the move.

    A node that does not answer keeps its objects of a writer; :func:`clear` removes them.
    """
    _open(work)
    for reader in work.readers.values():
        with suppress(ConnectionFailed):
            clear(work, reader)
    _end(work)


def undo_move(work: Work, successor: str) -> None:
    """Let the old writer take writes again; nodes that follow the new one already are left to repair."""
    later = seen_from(work, successor)
    # First: what is repaired on the successor must not come back to it.
    unsubscribe(work.writer, later.slot(work.writer))
    _open(work)
    with suppress(ConnectionFailed):
        clear(work, later.writer)
    _end(work)


def clear(work: Work, reader: Side) -> None:
    """Remove the objects of a writer from any other node: its publication, and slots of nodes."""
    with reader.autocommit() as connection:
        here = text("""
            select slot_name::text from pg_replication_slots
            where slot_name = any(:names) and database = current_database()""")
        for name in connection.scalars(here, {"names": [work.slot(side) for side in work.sides]}).all():
            drop_slot(connection, reader, name)
        run(connection, sql.SQL("drop publication if exists {}").format(sql.Identifier(PUBLICATION)))


def _open(work: Work) -> None:
    with work.writer.begin() as connection:
        let_through(connection)
        for table in active(work):
            guard(connection, table, work.writer.name, is_writer=True)


def _end(work: Work) -> None:
    work.record("update shardids_catalog.reference_writer set successor = null")
