"""Deletion of a row of a reference table once no row of any node refers to it.

Each node deletes the row in an ordinary session, where PostgreSQL checks its foreign keys, and takes no
new reference from then on; the writer does so last, and nobody changes the row there meanwhile. So if one
node refuses, the others get the row back as it is, and follow as before. The deletion is in the catalog
before the first node is asked: an interrupted deletion is completed or undone later.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from psycopg import sql
from sqlalchemy import Connection, Transaction, text

from shardids.catalog.references import Deletion
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import REFERENCE_SCHEMA
from shardids.errors import BadArgument, ClusterConflict, ReferencesBehind, ShardidsError, StatementFailed
from shardids.replication.sides import Side
from shardids.replication.subscriptions import LOCK_FAILURES
from shardids.tables.references.following import (
    Contents,
    Work,
    begun,
    give_back,
    let_through,
    referring,
    require_nothing_moves,
    row_of,
    run,
)
from shardids.tables.references.state import await_all, has_arrived, referrers
from shardids.tables.references.tables import active


def delete_row(catalog: Catalog, name: str, key: Sequence[str], *, dry_run: bool = False) -> None:
    """Delete the row with a primary key, its values as text, on all nodes; or on none.

    Tables whose foreign key to it has no index are read whole. Calling it again completes a deletion that was
    interrupted. With ``dry_run`` every node deletes it and rolls back.

    Raises:
        BadArgument: the key has another number of columns.
        ClusterConflict: the table or row does not exist, rows of a node refer to it, or a shard is being
            moved or a database adopted. The row is there as before.
        ConnectionFailed: a node does not answer. If it did when the deletion began, that is open still.
        ReferencesBehind: a node has not followed yet; nothing was deleted. A deletion that was interrupted
            before is open still.
    """
    with begun(catalog) as work:
        if name not in active(work):
            raise ClusterConflict(
                f"reference table {name} does not exist", hint="To list them: shardids reference list"
            )
        wanted = _found(work, name, key)
        is_open = wanted in work.known.deletions
        for side in work.sides:
            if acting := [one for one in referrers(side, name) if one.acts]:
                raise ClusterConflict(
                    f'node "{side.name}": {acting[0].constraint} of {acting[0].table} would delete or change'
                    f" rows that refer to {name}, and can't be undone on one node if another refuses",
                    hint="Make it ON DELETE NO ACTION, by a migration of the shards.",
                )
        with _held(work, wanted) as row:
            if not dry_run:
                _begin(work, wanted)
            try:
                await_all(work, "the row is not deleted: earlier changes have not reached")
            except ReferencesBehind:
                if not dry_run and not is_open:
                    end_deletion(work, wanted)
                raise
            _delete(work, row, dry_run=dry_run, is_open=is_open)


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeldRow:
    """A row that nobody can change: the writer's transaction that holds it, and the row, if it is there."""

    deletion: Deletion
    holder: Connection
    transaction: Transaction
    contents: Contents


@contextmanager
def _held(work: Work, deletion: Deletion) -> Iterator[_HeldRow]:
    """Hold the writer's row in a transaction; rows may still come to refer to it.

    Raises:
        ClusterConflict: another transaction has changed the row, and not ended in time.
    """
    table, where = sql.Identifier(REFERENCE_SCHEMA, deletion.table), _where(deletion)
    with work.writer.engine.connect() as connection, connection.begin() as transaction:
        let_through(connection)
        # It waits for the other nodes. A process that sleeps finds it ended by the next one.
        connection.execute(text("select set_config('idle_in_transaction_session_timeout', '0', true)"))
        try:
            run(connection, sql.SQL("select from {} where {} for no key update").format(table, where))
        except StatementFailed as error:
            raise _refused(work.writer, deletion, error) from error
        row = row_of(connection, work.writer, deletion.table, where)
        yield _HeldRow(deletion=deletion, holder=connection, transaction=transaction, contents=row)


def _found(work: Work, name: str, key: Sequence[str]) -> Deletion:
    """Return the row as the catalog names it."""
    with work.writer.autocommit() as connection:
        columns = _key_columns(connection, name)
        if len(columns) != len(key):
            raise BadArgument(
                f"the primary key of {name} has {len(columns)} columns: {', '.join(columns)}",
                hint="Give a value for each, in this order.",
            )
        given = Deletion(table=name, key=dict(zip(columns, key, strict=True)))
        shown = sql.SQL(", ").join(sql.SQL("{}::text").format(sql.Identifier(column)) for column in columns)
        table = sql.Identifier(REFERENCE_SCHEMA, name)
        statement = sql.SQL("select {} from {} where {}").format(shown, table, _where(given))
        row = run(connection, statement).one_or_none()
    wanted = given if row is None else Deletion(table=name, key=dict(zip(columns, row, strict=True)))
    if row is None and wanted not in work.known.deletions:
        raise ClusterConflict(f"reference table {name} has no row {shown_key(wanted.key)}")
    return wanted


def _where(deletion: Deletion) -> sql.Composable:
    return sql.SQL(" and ").join(
        sql.SQL("{} = {}").format(sql.Identifier(column), sql.Literal(value))
        for column, value in deletion.key.items()
    )


def _key_columns(connection: Connection, name: str) -> list[str]:
    found = connection.scalars(
        text("""
            select a.attname::text
            from pg_class c join pg_index i on i.indrelid = c.oid and i.indisprimary
            cross join lateral unnest(i.indkey::smallint[]) with ordinality as k (attnum, place)
            join pg_attribute a on a.attrelid = c.oid and a.attnum = k.attnum and k.place <= i.indnkeyatts
            where c.relnamespace = to_regnamespace(:schema) and c.relname = :name
            order by k.place"""),
        {"schema": REFERENCE_SCHEMA, "name": name},
    )
    return list(found)


def shown_key(key: Mapping[str, object]) -> str:
    """Return a primary key for a message."""
    return ", ".join(f"{column} = {value}" for column, value in key.items())


def _begin(work: Work, wanted: Deletion) -> None:
    """Write the deletion into the catalog; from then on no move or adoption begins."""
    with work.held.transaction() as connection:
        require_nothing_moves(
            connection, f"row {shown_key(wanted.key)} of {wanted.table} can't be deleted now"
        )
        connection.execute(
            text("""insert into shardids_catalog.reference_deletion (table_name, key)
                    values (:table, cast(:key as jsonb)) on conflict do nothing"""),
            {"table": wanted.table, "key": json.dumps(wanted.key)},
        )


def end_deletion(work: Work, done: Deletion) -> None:
    """Take a deletion, carried out or undone on all nodes, out of the catalog."""
    work.record(
        """delete from shardids_catalog.reference_deletion
           where table_name = :table and key = cast(:key as jsonb)""",
        table=done.table,
        key=json.dumps(done.key),
    )


def _delete(work: Work, row: _HeldRow, *, dry_run: bool, is_open: bool) -> None:
    deletion = row.deletion
    statement = sql.SQL("delete from {} where {}").format(
        sql.Identifier(REFERENCE_SCHEMA, deletion.table), _where(deletion)
    )
    deleted: list[Side] = []
    side = work.writer
    try:
        for side in work.readers.values():
            with side.engine.connect() as connection, connection.begin() as transaction:
                let_through(connection)
                _delete_in(work, connection, transaction, statement, dry_run=dry_run)
            deleted.append(side)
        side = work.writer
        # Without the savepoint an error would let go of the row, which others need back as it is.
        with row.holder.begin_nested() as transaction:
            _delete_in(work, row.holder, transaction, statement, dry_run=dry_run)
        row.transaction.commit()
    except StatementFailed as error:
        refused = _refused(side, deletion, error)
        if not dry_run:
            _undo(work, row, list(work.readers.values()) if is_open else deleted, refused)
        raise refused from error
    if not dry_run:
        end_deletion(work, deletion)


def _delete_in(
    work: Work, connection: Connection, transaction: Transaction, statement: sql.Composable, *, dry_run: bool
) -> None:
    work.held.require()
    run(connection, statement)
    # Deferred foreign keys are checked now: not at a COMMIT that never comes, nor at one that lets go of all.
    connection.execute(text("set constraints all immediate"))
    if dry_run:
        transaction.rollback()
    else:
        work.held.require()


def _undo(work: Work, row: _HeldRow, readers: Sequence[Side], refused: ClusterConflict) -> None:
    """Give nodes the row back, which is held since they had all that was committed before."""
    for reader in readers:
        try:
            _give_back(work, reader, row)
        except ShardidsError as error:
            raise ClusterConflict(
                f'{refused.message}; and node "{reader.name}" could not restore the row: {error.message}',
                hint="To restore it: shardids reference repair",
            ) from error
    end_deletion(work, row.deletion)


def _give_back(work: Work, reader: Side, row: _HeldRow) -> None:
    with reader.begin() as connection:
        let_through(connection)
        work.held.require()
        give_back(connection, reader, row.contents)
        work.held.require()


def undo_deletion(work: Work, deletion: Deletion) -> None:
    """Give the row of an interrupted deletion back to the nodes that follow; the deletion stays open.

    Raises:
        ClusterConflict: another transaction has changed the row on the writer, and not ended in time.
    """
    with _held(work, deletion) as row:
        for reader in work.readers.values():
            if has_arrived(work, reader):
                _give_back(work, reader, row)


def _refused(side: Side, wanted: Deletion, error: StatementFailed) -> ClusterConflict:
    row = f"row {shown_key(wanted.key)} of reference table {wanted.table}"
    if (table := referring(error)) is not None:
        return ClusterConflict(
            f'{row} was not deleted: rows of {table} on node "{side.name}" refer to it',
            hint="Delete these rows, or change their references, first.",
        )
    if error.sqlstate in LOCK_FAILURES:
        return ClusterConflict(
            f'{row} was not deleted: an open transaction on node "{side.name}" refers to it or changes it',
            hint="Wait until it has ended, then repeat the command.",
        )
    return ClusterConflict(f"{row} was not deleted: {error.message}", hint=error.hint)
