"""Reference tables on nodes that are added or removed, and their repair."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from psycopg import sql
from sqlalchemy import text

from shardids.catalog.nodes import Nodes
from shardids.catalog.references import references_of
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import REFERENCE_SCHEMA
from shardids.errors import ClusterConflict, ShardidsError
from shardids.migrate.install import provision
from shardids.migrate.recording import recording_node
from shardids.mover import failover
from shardids.tables.references.deleting import end_deletion, undo_deletion
from shardids.tables.references.following import Work, attach, begun, definitions, detach, let_through, run
from shardids.tables.references.moving import clear, open_writer, undo_move
from shardids.tables.references.state import REFUSES, differing, referrers, require_capacity, taking_writes
from shardids.tables.references.tables import active, copy_definitions, guard, publish, published


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """A node that was, or would be, repaired: its fault, and the error and hint if it persists."""

    node: str
    wrong: str
    error: str = ""
    hint: str = ""


def repair(catalog: Catalog, *, anyway: Collection[str] = (), dry_run: bool = False) -> list[Repaired]:
    """Bring nodes that don't follow the writer, or whose rows differ, to its rows, and let them follow.

    Nodes of ``anyway`` are brought there whatever they seem to be. Undoes interrupted deletions, once all
    nodes have the writer's rows, and before that an interrupted move of the writer: once the catalog names
    the new one, it opens that. A writer that was promoted or restored gets the right to be written to again.
    Nodes that fail are in the answer; the others are repaired.

    Raises:
        ClusterConflict: another process is at it.
        ClusterConflict: the writer lacks a table.
        ConnectionFailed: the writer does not answer.
    """
    if references_of(catalog).writer is None:
        return []
    with begun(catalog, moving=True) as work:
        _require_tables(work)
        if not dry_run:
            _undo(work)
        tables = published(work)
        is_open = _takes_writes(work, tables)
        wrong = {name: "it was replaced" for name in anyway if name in work.readers} | dict(
            differing(work, tables)
        )
        done = [] if is_open else [Repaired(node=work.writer.name, wrong=f"it {REFUSES}")]
        if (wrong or not is_open) and not dry_run:
            _open(work, tables)
        for name, reason in sorted(wrong.items()):
            one = Repaired(node=name, wrong=reason)
            done.append(one if dry_run else _repaired(work, one, tables))
        if not dry_run and not any(one.error for one in done):
            for deletion in work.known.deletions:
                end_deletion(work, deletion)
    return done


def _require_tables(work: Work) -> None:
    """Require that the writer has the tables, which a server that took over from it may lack."""
    there = definitions(work.writer, active(work))
    if missing := [name for name, definition in there.items() if definition is None]:
        raise ClusterConflict(
            f'node "{work.writer.name}", the writer of reference tables, lacks table {missing[0]}',
            hint=f"Copy it there from a node that has it: pg_dump --table {REFERENCE_SCHEMA}.{missing[0]}."
            " Then: shardids reference repair",
        )


def _undo(work: Work) -> None:
    """End interrupted work."""
    if work.known.successor == work.writer.name:
        open_writer(work)
    elif work.known.successor is not None:
        undo_move(work, work.known.successor)
    for deletion in work.known.deletions:
        with suppress(ClusterConflict):  # The node that lacks the row differs, and is repaired.
            undo_deletion(work, deletion)


def _takes_writes(work: Work, tables: Sequence[str]) -> bool:
    with work.writer.autocommit() as connection:
        return taking_writes(connection, tables) == set(tables)


def _open(work: Work, tables: Sequence[str]) -> None:
    with work.writer.begin() as connection:
        let_through(connection)
        for table in tables:
            guard(connection, table, work.writer.name, is_writer=True)
            publish(connection, table)


def _repaired(work: Work, found: Repaired, tables: Sequence[str]) -> Repaired:
    """Bring a node to the writer's rows, and let it follow."""
    reader = work.readers[found.node]
    try:
        require_capacity(replace(work, readers={found.node: reader}))
        copy_definitions(work, reader, tables)
        clear(work, reader)
        attach(work, reader, tables)
    except ShardidsError as failure:
        return replace(found, error=failure.message, hint=failure.hint)
    return found


def add_node(
    catalog: Catalog,
    name: str,
    url: str,
    *,
    region: str | None = None,
    migrate: Callable[[], None] = lambda: None,
    dry_run: bool = False,
) -> None:
    """Add a node as :func:`~shardids.migrate.install.provision.add_node`, and its tables. Repeatable.

    ``migrate`` runs the application's revisions for the node, before it gets the tables. With ``dry_run``
    nothing changes, and whether the node can follow is not looked at.

    Raises:
        ClusterConflict: as there; or the node is added, and can't follow the writer; the message says why.
    """
    provision.add_node(catalog, name, url, region=region, with_references=True, dry_run=dry_run)
    if dry_run:
        return
    with (
        Nodes(catalog.nodes(), catalog.url) as nodes,
        recording_node(catalog, name, nodes[name], "node add"),
    ):
        migrate()
    known = references_of(catalog)
    if known.writer in (None, name):
        return
    with begun(catalog) as work:
        require_capacity(work)
        tables = published(work)
        copy_definitions(work, work.readers[name], tables)
        attach(work, work.readers[name], tables)


def replace_node(
    catalog: Catalog, name: str, url: str, *, accept_loss: Collection[int] = (), dry_run: bool = False
) -> tuple[failover.Replacement, tuple[str, ...]]:
    """Replace a lost node as :func:`shardids.mover.failover.replace_node` does; then all follow the writer.

    An interrupted move of the writer is undone, or completed, before shards of ``accept_loss`` get a home.
    Returns the same, and the remaining steps for reference tables, a line each.
    """
    done = failover.replace_node(
        catalog, name, url, accept_loss=accept_loss, with_references=True, dry_run=dry_run
    )
    left = () if dry_run else follow(catalog, name)
    if any(shard.shard in accept_loss for shard in done.lost) and references_of(catalog).successor is None:
        again = failover.replace_node(catalog, name, url, accept_loss=accept_loss, with_references=True)
        done = replace(again, fenced=tuple(sorted({*done.fenced, *again.fenced})))
    return done, left


def remove_node(catalog: Catalog, name: str, *, dry_run: bool = False) -> None:
    """Remove a node as :func:`shardids.migrate.install.provision.remove_node`, and its reference tables.

    Raises:
        ClusterConflict: as there; or they are written to on this node, or a table of the node refers to one.
    """
    provision.require_no_shards(catalog, name)
    _take_tables(catalog, name, dry_run=dry_run)
    provision.remove_node(catalog, name, with_references=True, dry_run=dry_run)


def _take_tables(catalog: Catalog, name: str, *, dry_run: bool) -> None:
    known = references_of(catalog)
    if known.writer == name:
        raise ClusterConflict(
            f'node "{name}" is the writer of reference tables: {", ".join(known.states)}',
            hint="Choose another writer first: shardids reference move --to NODE",
        )
    if known.writer is None:
        return
    own = {f"{REFERENCE_SCHEMA}.{table}" for table in known.states}
    with begun(catalog) as work:
        reader = work.readers[name]
        for table in known.states:
            if found := [one.table for one in referrers(reader, table) if one.table not in own]:
                raise ClusterConflict(
                    f'node "{name}": {found[0]} refers to reference table {table}',
                    hint="Purge the old copies of shards there (shardids shard purge), or drop the table.",
                )
        if dry_run:
            return
        detach(work, reader)
        with reader.begin() as connection:
            if known.states:
                tables = sql.SQL(", ").join(sql.Identifier(REFERENCE_SCHEMA, table) for table in known.states)
                connection.execute(text("select set_config('lock_timeout', '10s', true)"))
                run(connection, sql.SQL("drop table if exists {}").format(tables))


def follow(catalog: Catalog, *replaced: str) -> tuple[str, ...]:
    """Repair damage from a migration of nodes, or from replacing some by their promoted standbys.

    A standby may lack changes that the old server had confirmed, and the writer's replication slots. Returns
    the remaining steps, a line each.
    """
    try:
        done = repair(catalog, anyway=replaced)
    except ShardidsError as error:
        return (f"reference tables: {error.message}; then: shardids reference repair",)
    return tuple(
        f'reference tables of node "{one.node}": {one.error}; then: shardids reference repair'
        for one in done
        if one.error
    )
