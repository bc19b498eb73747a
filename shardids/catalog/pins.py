"""Pins: shards, and the shards of keys, that no move takes away from their node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from sqlalchemy import Connection, text

from shardids.catalog.keys.homes import shard_of_key
from shardids.catalog.keys.known import key_text, parse_key
from shardids.catalog.regions import require_region
from shardids.catalog.rows import Catalog, lock_placement, read_placement, unknown_node
from shardids.errors import ClusterConflict


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A pin of a shard, or of the shard where a key lives.

    Attributes:
        shard: the shard; of a key the one where it lives now.
        node: the only node that the shard may be moved to; ``None``: it stays where it is.
        kind: the kind of the key; ``None`` for a pin of the shard itself.
        key: the key as text.
        since: when it was pinned.
    """

    shard: int
    node: str | None = None
    kind: str | None = None
    key: str | None = None
    since: datetime

    def __str__(self) -> str:
        """Say why the shard stays, as errors do."""
        if self.key is not None:
            return f"shard {self.shard} is pinned, since key {self.key[:60]!r} lives there, which is pinned"
        where = "where it is" if self.node is None else f'to node "{self.node}"'
        return f"shard {self.shard} is pinned {where}"

    @property
    def remedy(self) -> str:
        """Returns the command that takes the pin away."""
        if self.key is None:
            return f"shardids shard unpin {self.shard}"
        return "shardids tenant unpin KEY" + ("" if self.kind == "text" else f" --kind {self.kind}")


_SHARDS: Final = text("select shard, node, since from shardids_catalog.shard_pin order by shard")
_KEYS: Final = text("select kind, key, since from shardids_catalog.key_pin order by kind, key")


def read_pins(connection: Connection) -> list[Pin]:
    """Return all pins: those of shards, then those of keys."""
    found = [Pin(**row._mapping) for row in connection.execute(_SHARDS)]
    keys = connection.execute(_KEYS).all()
    return found + [Pin(shard=shard_of_key(connection, row.kind, row.key), **row._mapping) for row in keys]


def pins(catalog: Catalog) -> list[Pin]:
    """Return all pins: those of shards, then those of keys."""
    with catalog.engine.connect() as connection:
        return read_pins(connection)


def nodes_of(found: list[Pin], node_of: Mapping[int, str]) -> dict[int, str]:
    """Return the node of each pinned shard that has one: the pin's, or else the one where the shard is."""
    nodes = {one.shard: node_of[one.shard] for one in found if one.shard in node_of}
    return nodes | {one.shard: one.node for one in found if one.node is not None and one.shard in node_of}


def refuse_pinned(connection: Connection, shard: int, target: str) -> None:
    """Refuse to move a pinned shard to a node other than that of its pin.

    Raises:
        ClusterConflict: it is pinned, itself or by a key.
    """
    of_shard = [one for one in read_pins(connection) if one.shard == shard]
    if any(one.node == target for one in of_shard):
        return
    for one in of_shard:
        raise ClusterConflict(str(one), hint=f"To let it move: {one.remedy}")


def pin_shard(catalog: Catalog, shard: int, node: str | None = None, *, dry_run: bool = False) -> Pin:
    """Pin a shard where it is, or to a node, where the next rebalance brings it. Replaces its pin.

    Raises:
        UnknownShard, ShardLost: no node has the shard.
        ClusterConflict: the node is unknown, or of another region; or a move takes the shard elsewhere now.
    """
    with catalog.engine.begin() as connection:
        lock_placement(connection)
        placement = read_placement(connection)
        here = placement.locate(shard).name
        if node is not None:
            if node not in placement.nodes:
                raise unknown_node(node, placement.nodes)
            require_region(placement, shard, node)
        _refuse_leaving(connection, shard, node)
        row = connection.execute(
            text("""
                insert into shardids_catalog.shard_pin (shard, node) values (:shard, :node)
                on conflict (shard) do update set node = excluded.node
                returning shard, node, since"""),
            {"shard": shard, "node": node},
        ).one()
        if dry_run:
            connection.rollback()
        found = Pin(**row._mapping)
    return found if found.node is not None else replace(found, node=here)


def unpin_shard(catalog: Catalog, shard: int, *, dry_run: bool = False) -> bool:
    """Take away the pin of a shard; return whether it had one."""
    return _deleted(
        catalog, "delete from shardids_catalog.shard_pin where shard = :shard", dry_run, shard=shard
    )


def pin_key(catalog: Catalog, kind: str, key: str, *, dry_run: bool = False) -> Pin:
    """Pin the shard where a key lives, now and later, to the node where it is.

    Raises:
        BadArgument: no such kind or region, or not a key of the kind.
        ClusterConflict: a move takes the shard to another node now.
    """
    written = key_text(parse_key(key, kind))
    with catalog.engine.begin() as connection:
        lock_placement(connection)
        shard = shard_of_key(connection, kind, written)
        _refuse_leaving(connection, shard, None)
        row = connection.execute(
            text("""
                insert into shardids_catalog.key_pin as there (kind, key) values (:kind, :key)
                on conflict (kind, key) do update set since = there.since
                returning kind, key, since"""),
            {"kind": kind, "key": written},
        ).one()
        if dry_run:
            connection.rollback()
        return Pin(shard=shard, **row._mapping)


def unpin_key(catalog: Catalog, kind: str, key: str, *, dry_run: bool = False) -> bool:
    """Take away the pin of a key; return whether it had one."""
    statement = "delete from shardids_catalog.key_pin where kind = :kind and key = :key"
    return _deleted(catalog, statement, dry_run, kind=kind, key=key_text(parse_key(key, kind)))


def _deleted(catalog: Catalog, statement: str, dry_run: bool, **which: object) -> bool:
    with catalog.engine.begin() as connection:
        found = connection.execute(text(statement), which).rowcount
        if dry_run:
            connection.rollback()
        return found > 0


def _refuse_leaving(connection: Connection, shard: int, node: str | None) -> None:
    target = connection.scalar(
        text("select target from shardids_catalog.move where shard = :shard and ended_at is null"),
        {"shard": shard},
    )
    if target is not None and target != node:
        raise ClusterConflict(
            f'a move of shard {shard} to node "{target}" is not over',
            hint=f"Wait for its end, or undo it: shardids shard move {shard} --abort",
        )
