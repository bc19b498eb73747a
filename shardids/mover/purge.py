"""Lists and drops the old copies that moves have left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from sqlalchemy import Engine, text

from shardids.catalog.leases import OnBusy
from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import Placement
from shardids.errors import ClusterConflict, ShardBusy
from shardids.mover.journal import Journal
from shardids.replication.sides import Directory, move_nodes

_NAME = "shardids_purge"


@dataclass(frozen=True, slots=True, kw_only=True)
class OldCopy:
    """What a move left of a shard on its source."""

    shard: int
    node: str
    size_bytes: int


def old_copies(catalog: Catalog, shards: Iterable[int]) -> list[OldCopy]:
    """Return the old copies of these shards on any node, in the order of the shards."""
    placement = catalog.placement()
    with move_nodes(placement, catalog.url, name=_NAME) as nodes:
        return _old_copies(nodes, placement, shards)


def purge(
    catalog: Catalog,
    shards: Iterable[int],
    *,
    on_busy: OnBusy = OnBusy.WAIT,
    on_skip: Callable[[ShardBusy], object] = lambda _error: None,
    dry_run: bool = False,
) -> list[OldCopy]:
    """Drop the old copies of these shards; return what it dropped.

    With ``dry_run`` it finds out what it would drop, and whether it may, and drops nothing. ``on_skip``
    receives the error of each shard that is left out, because another command has its lease.

    Raises:
        ClusterConflict: a move of a shard is not over; or the shard is not active on its owner; or dropping a
            copy would drop something outside it that is not the shard's. No copy was dropped.
    """
    placement = catalog.placement()
    with move_nodes(placement, catalog.url, name=_NAME) as nodes:
        copies = _old_copies(nodes, placement, shards)
        _refuse_dependents(nodes, copies)
        purged = list[OldCopy]()
        for copy in copies:
            with Journal.opened(catalog, copy.shard, purpose="purge") as journal, ExitStack() as kept:
                journal.refuse_open()
                directory = Directory.read(catalog)
                both = {copy.node, directory.placement.locate(copy.shard).name}
                try:
                    if not dry_run:
                        kept.enter_context(journal.leased(directory, sorted(both), on_busy=on_busy))
                    elif on_busy is OnBusy.SKIP:
                        journal.refuse_leased(directory, both)
                except ShardBusy as error:
                    on_skip(error)
                    continue
                _require_owner(nodes, catalog.placement(), copy)
                purged.append(copy)
                if dry_run:
                    continue
                with nodes[copy.node].begin() as connection:
                    asked = {"shard": copy.shard, "epoch": journal.leases.epoch}
                    connection.execute(text("select shardids.require_lease(:shard, :epoch)"), asked)
                    connection.execute(text("select shardids.drop_copy(:shard)"), {"shard": copy.shard})
    return purged


def _old_copies(nodes: Nodes, placement: Placement, shards: Iterable[int]) -> list[OldCopy]:
    wanted = sorted(set(shards))

    def ask(name: str, engine: Engine) -> Sequence[OldCopy]:
        with engine.connect() as connection:
            return [
                OldCopy(shard=row.id, node=name, size_bytes=row.size_bytes)
                for row in connection.execute(_OLD, {"shards": wanted})
                if placement.node_of.get(row.id) not in (None, name)
            ]

    found = [copy for copies in nodes.each(ask).all().values() for copy in copies]
    return sorted(found, key=lambda copy: (copy.shard, copy.node))


_OLD = text("""
    select s.id, (select coalesce(sum(pg_total_relation_size(t.name)), 0)
                  from unnest(shardids.tables_of(s.id)) t (name))::bigint as size_bytes
    from shardids.shard s where s.state = 'moved' and s.id = any (:shards)""")


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


def _require_owner(nodes: Nodes, placement: Placement, copy: OldCopy) -> None:
    owner = placement.locate(copy.shard).name
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
