"""Lists and drops the old copies that moves have left behind, and schemas that only look like shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from sqlalchemy import Connection, Engine, text

from shardids.catalog.leases import OnBusy
from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog, unknown_node
from shardids.catalog.topology import Placement
from shardids.errors import ClusterConflict, ShardBusy
from shardids.mover.journal import Journal
from shardids.pg.locks import bounded_wait
from shardids.replication.sides import Directory, move_nodes

_NAME = "shardids_purge"


@dataclass(frozen=True, slots=True, kw_only=True)
class OldCopy:
    """A copy of a shard that a move has left, or a schema that its node does not know as a shard."""

    shard: int
    node: str
    size_bytes: int
    is_known: bool = True


def old_copies(catalog: Catalog, shards: Iterable[int]) -> list[OldCopy]:
    """Return the old copies of these shards on any node, in the order of the shards."""
    placement = catalog.placement()
    with move_nodes(placement, catalog.url, name=_NAME) as nodes:
        return _old_copies(nodes, placement, shards)


def purge(
    catalog: Catalog,
    shards: Iterable[int],
    *,
    node: str | None = None,
    on_busy: OnBusy = OnBusy.WAIT,
    on_skip: Callable[[ShardBusy], object] = lambda _error: None,
    dry_run: bool = False,
) -> list[OldCopy]:
    """Drop the old copies of these shards; return the copies that it dropped.

    With ``node`` it only drops those on this node, and also schemas that have a shard's name and are no
    shards of the node, and old copies of shards that were lost with this node.

    With ``dry_run`` it finds the copies that it would drop, and whether it may, and drops nothing.
    ``on_skip`` receives the error of each shard that is left out, because another command has its lease.

    Raises:
        ClusterConflict: the node does not exist; or dropping a copy would drop something outside it that is
            not the shard's: no copy was dropped. Or a move of a shard has begun, or the shard is not active
            on its owner: copies of shards before it were dropped, and a repeated call drops the rest.
        StatementFailed: a table stays locked; the message names by whom. The same holds.
    """
    placement = catalog.placement()
    if node is not None and node not in placement.nodes:
        raise unknown_node(node, placement.nodes)
    with move_nodes(placement, catalog.url, name=_NAME) as nodes:
        copies = _old_copies(nodes, placement, shards, named=node)
        copies = [copy for copy in copies if node in (None, copy.node)]
        _refuse_created(catalog, copies)
        _refuse_dependents(nodes, copies)
        purged = list[OldCopy]()
        for copy in copies:
            with Journal.opened(catalog, copy.shard, purpose="purge") as journal, ExitStack() as kept:
                journal.refuse_open()
                directory = Directory.read(catalog)
                owner = _owner(directory.placement, copy)
                both = {copy.node, owner or copy.node}
                try:
                    if not dry_run:
                        kept.enter_context(journal.leased(directory, sorted(both), on_busy=on_busy))
                    elif on_busy is OnBusy.SKIP:
                        journal.refuse_leased(directory, both)
                except ShardBusy as error:
                    on_skip(error)
                    continue
                owner = _owner(catalog.placement(), copy)
                if owner is not None:
                    _require_active(nodes, owner, copy)
                purged.append(copy)
                if not dry_run:
                    where = f'shard {copy.shard}, node "{copy.node}"'
                    with nodes[copy.node].begin() as connection:
                        asked = {"shard": copy.shard, "epoch": journal.leases.epoch}
                        connection.execute(text("select shardids.require_lease(:shard, :epoch)"), asked)
                        with bounded_wait(connection, where, _schemas(connection, [copy.shard])):
                            connection.execute(_DROP if copy.is_known else _DROP_UNKNOWN, asked)
    return purged


def _old_copies(
    nodes: Nodes, placement: Placement, shards: Iterable[int], *, named: str | None = None
) -> list[OldCopy]:
    wanted = sorted(set(shards))

    def ask(name: str, engine: Engine) -> Sequence[OldCopy]:
        is_named = name == named
        with engine.connect() as connection:
            schemas = _schemas(connection, wanted)
            with bounded_wait(connection, f'node "{name}"', schemas, ["AccessExclusiveLock"]):
                rows = connection.execute(_OLD, {"shards": wanted, "named": is_named}).all()
            return [
                OldCopy(shard=row.id, node=name, size_bytes=row.size_bytes, is_known=row.is_known)
                for row in rows
                if not row.is_known
                or placement.node_of.get(row.id) not in (None, name)
                or (is_named and placement.lost.get(row.id) == name)
            ]

    found = [copy for copies in nodes.each(ask).all().values() for copy in copies]
    return sorted(found, key=lambda copy: (copy.shard, copy.node))


def _schemas(connection: Connection, shards: Sequence[int]) -> Sequence[str]:
    return connection.scalars(_SCHEMAS, {"shards": list(shards)}).all()


_SCHEMAS = text("select shardids.schema_of(w.id)::text from unnest(cast(:shards as integer[])) w (id)")
_OLD = text("""
    select w.id, s.id is not null as is_known,
           (select coalesce(sum(pg_total_relation_size(t.name)), 0)
            from unnest(shardids.tables_of(w.id)) t (name))::bigint as size_bytes
    from unnest(cast(:shards as integer[])) w (id)
    left join shardids.shard s using (id)
    where s.state = 'moved'
       or (:named and s.state is distinct from 'active'
           and to_regnamespace(quote_ident(shardids.schema_of(w.id))) is not null)""")
_DROP = text("select shardids.drop_copy(:shard)")
_DROP_UNKNOWN = text("select shardids.drop_unknown(:shard)")


def _owner(placement: Placement, copy: OldCopy) -> str | None:
    """Return the owner of a copy's shard; ``None`` if the catalog has no such shard, or it was lost there.

    Raises:
        ShardLost: the shard was lost with another node: the copy may be all that is left of it.
    """
    if copy.shard not in placement.owners() or placement.lost.get(copy.shard) == copy.node:
        return None
    return placement.locate(copy.shard).name


def _refuse_created(catalog: Catalog, copies: Sequence[OldCopy]) -> None:
    """Refuse schemas of shards whose creation is under way, or was interrupted: they may be the shard."""
    with catalog.engine.connect() as connection:
        found = connection.scalar(
            text("""
                select min(shard) from shardids_catalog.placement
                where state = 'creating' and shard = any (:shards)"""),
            {"shards": [copy.shard for copy in copies]},
        )
    if found is not None:
        raise ClusterConflict(
            f"shard {found} is being created", hint=f"Finish that first: shardids shard create {found}"
        )


def _refuse_dependents(nodes: Nodes, copies: Sequence[OldCopy]) -> None:
    found = []
    for copy in copies:
        with nodes[copy.node].connect() as connection:
            found += [
                f'{dependent} on node "{copy.node}" (with shard {copy.shard})'
                for dependent in connection.scalars(
                    text("select * from shardids.dependents_of(:shard)"), {"shard": copy.shard}
                )
            ]
    if found:
        raise ClusterConflict(
            "these are not the shard's and would be dropped with it:\n"
            + "\n".join(f"- {line}" for line in found),
            hint="Drop them, or let them depend on something outside of the shard's schema;"
            " an extension: ALTER EXTENSION … SET SCHEMA public.",
        )


def _require_active(nodes: Nodes, owner: str, copy: OldCopy) -> None:
    with nodes[owner].connect() as connection:
        state = connection.execute(
            text("select state from shardids.shard where id = :shard"), {"shard": copy.shard}
        ).scalar_one_or_none()
    if owner == copy.node or state != "active":
        raise ClusterConflict(
            f'the copy of shard {copy.shard} on node "{copy.node}" stays: on its owner, node "{owner}", the'
            f" shard is {state or 'missing'}",
            hint=f"Look at both with: shardids shard list {copy.shard}",
        )
