"""Drops the copies that moves have left behind."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass

from sqlalchemy import text

from shardids.catalog.rows import Catalog
from shardids.catalog.topology import Placement
from shardids.errors import ClusterConflict
from shardids.mover.journal import Journal
from shardids.mover.sides import Side, side_of

_NAME = "shardids_purge"


@dataclass(frozen=True, slots=True, kw_only=True)
class OldCopy:
    """What a move left behind on the node that the shard was moved away from."""

    shard: int
    node: str
    size_bytes: int


def old_copies(catalog: Catalog, shards: Iterable[int]) -> list[OldCopy]:
    """The copies of these shards that moves have left on any node, in the order of the shards."""
    wanted, found = sorted(set(shards)), []
    placement = catalog.placement()
    for node in placement.nodes:
        with closing(side_of(catalog, node, name=_NAME)) as side, side.autocommit() as connection:
            found += [
                OldCopy(shard=row.id, node=node, size_bytes=row.size_bytes)
                for row in connection.execute(_OLD, {"shards": wanted})
                if placement.node_of.get(row.id) not in (None, node)
            ]
    return sorted(found, key=lambda copy: (copy.shard, copy.node))


_OLD = text("""
    select s.id, (select coalesce(sum(pg_total_relation_size(t.name)), 0)
                  from unnest(shardids.tables_of(s.id)) t (name))::bigint as size_bytes
    from shardids.shard s where s.state = 'moved' and s.id = any (:shards)""")


def purge(catalog: Catalog, shards: Iterable[int]) -> list[OldCopy]:
    """Drops the copies of these shards that moves have left behind; returns what it dropped.

    Raises:
        ClusterConflict: a move of a shard is not over, or the shard's node does not have it active: the old
            copy stays.
    """
    copies = old_copies(catalog, shards)
    for copy in copies:
        with Journal.opened(catalog, copy.shard) as journal:
            journal.refuse_open()
            _require_home(catalog, catalog.placement(), copy)
            with closing(side_of(catalog, copy.node, name=_NAME)) as side, side.engine.begin() as connection:
                connection.execute(text("select shardids.drop_copy(:shard)"), {"shard": copy.shard})
    return copies


def _require_home(catalog: Catalog, placement: Placement, copy: OldCopy) -> None:
    home = placement.locate(copy.shard).name
    with closing(side_of(catalog, home, name=_NAME)) as side:
        state = _state(side, copy.shard)
    if home == copy.node or state != "active":
        raise ClusterConflict(
            f'the copy of shard {copy.shard} on node "{copy.node}" stays: on node "{home}", where the catalog'
            f" places the shard, it is {state or 'missing'}",
            hint=f"Look at both with: shardids shard show {copy.shard}",
        )


def _state(side: Side, shard: int) -> str | None:
    with side.autocommit() as connection:
        found: str | None = connection.execute(
            text("select state from shardids.shard where id = :shard"), {"shard": shard}
        ).scalar_one_or_none()
    return found
