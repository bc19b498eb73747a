"""Replaces a lost node: points its catalog entry at the server that took over, a promoted standby."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, text

from shardids import views
from shardids.catalog.connections import parse_url, shown_url
from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import Node
from shardids.errors import ClusterConflict, ConnectionFailed, UnsupportedServer
from shardids.mover.journal import open_moves

_PATIENCE_S = 3
"""How long to wait for the old server to show that it is not lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """What a node's new server holds.

    Attributes:
        node: the node's name.
        url: the node's new address, without the password.
        shards: how many shards the catalog places on it.
        fenced: shards that were active on it although they had moved away, because the standby was promoted
            before it had received the move. They were fenced there.
        stale_views: views over shards that could not be refreshed, and what to do, one line for each.
    """

    node: str
    url: str
    shards: int
    fenced: tuple[int, ...]
    stale_views: tuple[str, ...] = ()


def replace_node(catalog: Catalog, name: str, url: str, *, dry_run: bool = False) -> Replacement:
    """Points a node at the server that took over from it; routers follow as they do after a move.

    No ID is issued twice: a promoted standby is on a different timeline from the one on which its shards
    were activated, so each shard's first draw jumps one to two ``safety_margin`` past the clock and past all
    that the standby knows of.

    With ``dry_run`` it checks everything and changes nothing.

    Raises:
        ClusterConflict: the node is unknown; the old server still takes writes; or the new one is another
            database, still a standby, a copy rather than a standby, or lacks shards.
        ConnectionFailed: the new server does not answer.
    """
    old = catalog.existing_node(name)
    new = Node(name=name, url=shown_url(parse_url(url)))
    placement = catalog.placement()
    placed = {shard for shard, node in placement.node_of.items() if node == name}
    if shown_url(parse_url(old.url)) != new.url:
        _require_gone(catalog, old)
    # A move that is not over undoes or completes what it has done to its shard here.
    moves = open_moves(catalog)
    arriving = {move.shard for move in moves if move.target == name}
    leaving = {move.shard for move in moves if move.source == name}
    with (
        Nodes({name: Node(name=name, url=url)}, catalog.url) as nodes,
        nodes[name].connect() as connection,
        connection.begin() as transaction,
    ):
        _require_promoted(connection, new)
        _require_same_node(connection, catalog, new)
        _require_shards(connection, new, placed, leaving)
        elsewhere = {s: n for s, n in placement.node_of.items() if n != name and s not in arriving}
        fenced = _fence_moved(connection, elsewhere, dry_run=dry_run)
        if dry_run:
            transaction.rollback()
    if not dry_run:
        catalog.point_node(new)
    stale_views = () if dry_run else views.follow_placement(catalog)
    return Replacement(node=name, url=new.url, shards=len(placed), fenced=fenced, stale_views=stale_views)


def _require_gone(catalog: Catalog, old: Node) -> None:
    """Refuses while the old primary takes writes: its shards would take writes on two servers."""
    try:
        with (
            Nodes({old.name: old}, catalog.url, connect_timeout_s=_PATIENCE_S) as nodes,
            nodes[old.name].connect() as connection,
        ):
            is_standby = connection.execute(text("select pg_is_in_recovery()")).scalar_one()
    except (ConnectionFailed, UnsupportedServer):
        return
    if not is_standby:
        raise ClusterConflict(
            f'the server of node "{old.name}" at {old.url} still takes writes',
            hint="Stop it for good first, or its shards would be written to on two servers.",
        )


def _require_promoted(connection: Connection, new: Node) -> None:
    if connection.execute(text("select pg_is_in_recovery()")).scalar_one():
        raise ClusterConflict(f"{new.url} is a standby still", hint="Promote it first: select pg_promote()")


def _require_same_node(connection: Connection, catalog: Catalog, new: Node) -> None:
    there = text("select to_regclass('shardids.node') is not null")
    row = None
    if connection.execute(there).scalar_one():
        row = connection.execute(text("select name, cluster from shardids.node")).one()
    if row is None or (row.name, row.cluster) != (new.name, catalog.describe().cluster):
        found = "no node" if row is None else f'node "{row.name}" of cluster {row.cluster}'
        raise ClusterConflict(
            f'the database at {new.url} is {found}, not node "{new.name}" of this cluster',
            hint="Name the promoted standby's database, the one that was the node's.",
        )


def _require_shards(connection: Connection, new: Node, placed: set[int], leaving: set[int]) -> None:
    rows = connection.execute(
        text("""
            select id, server = shardids.server() as is_own from shardids.shard
            where id = any (:shards) and (state = 'active' or (state = 'moved' and id = any (:leaving)))"""),
        {"shards": sorted(placed), "leaving": sorted(leaving)},
    ).all()
    if missing := sorted(placed - {row.id for row in rows}):
        raise ClusterConflict(
            f'{new.url} does not have {_counted(missing)} of node "{new.name}" active',
            hint="It may be an old copy. Look at shardids.shard there.",
        )
    if copied := sorted(row.id for row in rows if not row.is_own):
        raise ClusterConflict(
            f'{new.url} is a copy of node "{new.name}", not its standby: {_counted(copied)} not activated',
            hint="If the original is gone for good: select shardids.activate(id) from shardids.shard"
            " where state = 'active'. Then again.",
        )


def _fence_moved(connection: Connection, elsewhere: dict[int, str], *, dry_run: bool) -> tuple[int, ...]:
    """Fences shards that the catalog places elsewhere. A fence survives a rollback of its transaction."""
    stale = connection.scalars(
        text("select id from shardids.shard where state = 'active' and id = any (:shards) order by id"),
        {"shards": sorted(elsewhere)},
    ).all()
    if not dry_run:
        for shard in stale:
            connection.execute(
                text("select shardids.fence(:shard, :node), shardids.add_barriers(:shard)"),
                {"shard": shard, "node": elsewhere[shard]},
            )
    return tuple(stale)


def _counted(shards: Sequence[int]) -> str:
    return f"shard {shards[0]}" if len(shards) == 1 else f"{len(shards)} shards ({shards[0]}, …)"
