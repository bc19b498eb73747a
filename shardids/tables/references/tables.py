"""Conversion of ordinary tables to reference tables, and their drop; each step can be repeated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from psycopg import sql
from sqlalchemy import Connection, MetaData, Table, text

from shardids.catalog.references import PUBLICATION
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import REFERENCE_SCHEMA
from shardids.errors import BadArgument, ClusterConflict
from shardids.models.columns import REFERENCE, is_reference
from shardids.pg.connections import server_major
from shardids.pg.schemas import require_own_replication
from shardids.replication.programs import find_programs
from shardids.replication.sides import Side
from shardids.replication.subscriptions import has_publication, play
from shardids.tables.references.following import Work, attach, begun, definitions, detach, in_order, run
from shardids.tables.references.state import (
    await_all,
    referrers,
    require_capacity,
    require_fit,
    require_unused_name,
)

_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,49}")


def create_table(
    catalog: Catalog,
    name: str,
    *,
    writer: str | None = None,
    models: MetaData | None = None,
    trusted: Sequence[str] = (),
    dry_run: bool = False,
) -> str:
    """Make a table of schema ``shardids_ref`` a reference table of all nodes; return the writer's name.

    On the writer it is there already, or is made as ``models`` say. Nodes that lack it get its definition.
    Calling it again completes an interrupted call. With ``dry_run`` everything is checked and nothing
    changed. ``trusted`` names roles whose code may run as the role that connects, on all nodes: see
    :mod:`shardids.pg.schemas`.

    Raises:
        MissingPrivilege: code of other roles would run.
        BadArgument: the name can't be one, or the models have no such reference table.
        ClusterConflict: it can't be a reference table, or a node can't follow; the message says why.
        ConnectionFailed: a node does not answer.
    """
    if not _NAME.fullmatch(name):
        raise BadArgument(
            f"{name!r} can't be the name of a reference table",
            hint="A lower-case letter or _, then lower-case letters, digits and _; 50 at most.",
        )
    model = None if models is None else _model(models, name)
    with begun(catalog, writer=writer) as work:
        if work.known.states.get(name) == "dropping":
            raise ClusterConflict(
                f"reference table {name} is being dropped",
                hint=f"Complete it: shardids reference drop {name}",
            )
        require_capacity(work)
        with work.writer.engine.connect() as connection, connection.begin() as transaction:
            if model is not None and not _exists(connection, name):
                options = connection.execution_options(**{REFERENCE: True})
                model.create(options)
            require_fit(connection, name, work, trusted)
            if dry_run:
                transaction.rollback()
        if name not in work.known.states:
            require_unused_name(work, name)
        if not dry_run:
            _make(work, name)
        return work.writer.name


def _model(models: MetaData, name: str) -> Table:
    table = models.tables.get(f"{REFERENCE_SCHEMA}.{name}")
    if table is None or not is_reference(table):
        raise BadArgument(
            f"the models have no reference table {name}",
            hint="Give its class __table_args__ = shardids.reference_table().",
        )
    return table


def _exists(connection: Connection, name: str) -> bool:
    there = text(
        "select to_regclass(format('%I.%I', cast(:schema as text), cast(:name as text))) is not null"
    )
    return bool(connection.scalar(there, {"schema": REFERENCE_SCHEMA, "name": name}))


def _make(work: Work, name: str) -> None:
    work.record(
        "insert into shardids_catalog.reference_writer (node) values (:node) on conflict do nothing",
        node=work.writer.name,
    )
    work.record(
        "insert into shardids_catalog.reference_table (name) values (:name) on conflict do nothing", name=name
    )
    with work.writer.begin() as connection:
        guard(connection, name, work.writer.name, is_writer=True)
    tables = sorted({name, *active(work)})
    for reader in work.readers.values():
        copy_definitions(work, reader, tables)
    # A node that follows already, and lacks a table of the publication, stops at its first row.
    with work.writer.begin() as connection:
        publish(connection, name)
    for reader in work.readers.values():
        attach(work, reader, tables)
    work.record("update shardids_catalog.reference_table set state = 'active' where name = :name", name=name)


def active(work: Work) -> list[str]:
    """Return the tables that every node has, or will have when interrupted work is completed."""
    return [name for name, state in work.known.states.items() if state == "active"]


def published(work: Work) -> list[str]:
    """Return the tables whose changes nodes are sent: those that are active, and that are being made."""
    with work.writer.autocommit() as connection:
        return [
            name
            for name, state in work.known.states.items()
            if state == "active" or (state == "creating" and _is_published(connection, name))
        ]


def guard(connection: Connection, name: str, writer: str, *, is_writer: bool) -> None:
    """Let writes to a table pass only on the writer."""
    connection.execute(
        text("""select shardids.guard_reference_table(
                         to_regclass(format('%I.%I', cast(:schema as text), cast(:name as text))),
                         :writer, :is_writer)"""),
        {"schema": REFERENCE_SCHEMA, "name": name, "writer": writer, "is_writer": is_writer},
    )


def publish(connection: Connection, name: str) -> None:
    """Publish a table on the writer. TRUNCATE is refused there, and not published.

    Raises:
        MissingPrivilege: another role made the publication.
    """
    table = sql.Identifier(REFERENCE_SCHEMA, name)
    publication = sql.Identifier(PUBLICATION)
    if not has_publication(connection, PUBLICATION):
        statement = sql.SQL("create publication {} with (publish = 'insert, update, delete')")
        run(connection, statement.format(publication))
    require_own_replication(connection, "publication", PUBLICATION)
    if not _is_published(connection, name):
        run(connection, sql.SQL("alter publication {} add table {}").format(publication, table))


def _is_published(connection: Connection, name: str) -> bool:
    published = text("""
        select exists (select from pg_publication_tables
                       where pubname = :publication and schemaname = :schema and tablename = :name)""")
    asked = {"publication": PUBLICATION, "schema": REFERENCE_SCHEMA, "name": name}
    return bool(connection.scalar(published, asked))


def _unpublish(connection: Connection, name: str) -> None:
    if _is_published(connection, name):
        statement = sql.SQL("alter publication {} drop table {}")
        table = sql.Identifier(REFERENCE_SCHEMA, name)
        run(connection, statement.format(sql.Identifier(PUBLICATION), table))


def copy_definitions(work: Work, reader: Side, tables: Sequence[str]) -> None:
    """Make those tables on a node that it lacks, as they are on the writer, and guards all of them."""
    missing = [name for name, definition in definitions(reader, tables).items() if definition is None]
    with work.writer.autocommit() as connection:
        ordered = in_order(connection, tables)
        programs = find_programs(server_major(connection)) if missing else None
    for name in ordered:
        script = ""
        if programs is not None and name in missing:
            script = programs.dump_table(work.writer.parameters(), REFERENCE_SCHEMA, name)
        with reader.begin() as connection:
            play(connection, script)
            guard(connection, name, work.writer.name, is_writer=False)


def drop_table(catalog: Catalog, name: str, *, dry_run: bool = False) -> None:
    """Drop a reference table on all nodes. Calling it again completes an interrupted call.

    Raises:
        ClusterConflict: the table does not exist, other tables refer to it, or the deletion of one of its
            rows was interrupted; the message says which.
        ConnectionFailed: a node does not answer; nothing was changed.
        ReferencesBehind: a node has not followed yet; nothing was dropped.
    """
    with begun(catalog) as work:
        if name not in work.known.states:
            raise ClusterConflict(
                f"reference table {name} does not exist", hint="To list them: shardids reference list"
            )
        for side in work.sides:
            if found := [one for one in referrers(side, name) if not one.is_own]:
                raise ClusterConflict(
                    f'node "{side.name}": {found[0].table} refers to reference table {name}'
                    + (f", and {len(found) - 1} more tables do" if len(found) > 1 else ""),
                    hint="Drop the foreign keys first, by a migration of the shards.",
                )
        if any(deletion.table == name for deletion in work.known.deletions):
            raise ClusterConflict(
                f"the deletion of a row of reference table {name} was interrupted",
                hint="Complete it by shardids reference delete, or undo it: shardids reference repair",
            )
        if dry_run:
            return
        _drop(work, name)


def _drop(work: Work, name: str) -> None:
    if work.known.states[name] == "creating":
        # Nodes may lack it. Before the state changes: afterwards nothing tells that it never was on all.
        with work.writer.begin() as connection:
            _unpublish(connection, name)
    work.record(
        "update shardids_catalog.reference_table set state = 'dropping' where name = :name", name=name
    )
    with work.writer.begin() as connection:
        if _exists(connection, name):
            # From here on nothing can be written that nodes would look for the table for.
            guard(connection, name, work.writer.name, is_writer=False)
    await_all(work, f"reference table {name} is not dropped: earlier changes have not reached")
    statement = sql.SQL("drop table if exists {}").format(sql.Identifier(REFERENCE_SCHEMA, name))
    for side in reversed(work.sides):
        with side.begin() as connection:
            connection.execute(text("select set_config('lock_timeout', '10s', true)"))
            run(connection, statement)
    if set(work.known.states) == {name}:
        for reader in work.readers.values():
            detach(work, reader)
        with work.writer.begin() as connection:
            run(connection, sql.SQL("drop publication if exists {}").format(sql.Identifier(PUBLICATION)))
    with work.held.transaction() as connection:
        connection.execute(
            text("delete from shardids_catalog.reference_table where name = :name"), {"name": name}
        )
        connection.execute(
            text("""delete from shardids_catalog.reference_writer
                    where not exists (select from shardids_catalog.reference_table)""")
        )
