"""Reads and writes the catalog: the layout of a cluster, its nodes, and the placement of its shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Engine, bindparam, text
from sqlalchemy.engine import URL

from shardids.catalog.connections import CONNECT_TIMEOUT_S, open_engine
from shardids.catalog.topology import Node, OldIdRule, OldIdRules, Placement, RegisteredLookup, lost_shard
from shardids.catalog.urls import parse_url, shown_url
from shardids.errors import BadArgument, ClusterConflict, UnknownShard
from shardids.ids.layout import Layout

SCHEMA_PREFIX = "shard_"
"""The default prefix of shards' schema names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The properties that are fixed when a cluster is made."""

    cluster: UUID
    layout: Layout
    shard_count: int
    schema_prefix: str


class Catalog:
    """The catalog in one database. Every method runs in its own transaction.

    Args:
        url: URL of the database that holds, or will hold, schema ``shardids_catalog``.
    """

    def __init__(self, url: str | URL) -> None:
        self.url = parse_url(url)
        self.engine: Engine = open_engine(
            self.url,
            what="the catalog",
            administrative=True,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            pool_size=1,
        )

    def close(self) -> None:
        """Closes the catalog's connections."""
        self.engine.dispose()

    def describe(self) -> Description:
        """Returns the cluster's fixed properties.

        Raises:
            ClusterConflict: the database holds no catalog.
        """
        with self.engine.connect() as connection:
            return describe_in(connection, self.url)

    def placement(self) -> Placement:
        """Returns which node holds which shard now; shards that are still being created are left out."""
        # One statement, so one snapshot: the version belongs to just these rows.
        found = self._rows("""
            select c.version, n.name, n.url, p.shard, p.state,
                   null as table_name, null as id_column, null as rule, null as below, null as negative
            from shardids_catalog.cluster c
            left join shardids_catalog.node n on true
            left join shardids_catalog.placement p on p.node = n.name and p.state <> 'creating'
            union all
            select c.version, null, null, null, null,
                   r.table_name, r.id_column, r.rule, c.old_ids_below,
                   c.time_bits + c.shard_bits + c.sequence_bits < 64
            from shardids_catalog.cluster c
            left join shardids_catalog.old_id_rule r on true
            where c.old_ids_below is not null
            order by name, shard""")
        rows, old = [row for row in found if row.below is None], [row for row in found if row.below]
        return Placement(
            version=rows[0].version,
            nodes={row.name: Node(name=row.name, url=row.url) for row in rows if row.name},
            node_of={row.shard: row.name for row in rows if row.state == "active"},
            lost={row.shard: row.name for row in rows if row.state == "lost"},
            old_ids=_old_ids(old),
            lookups=self.lookups(),
        )

    def lookups(self) -> dict[tuple[str, str], RegisteredLookup]:
        """Returns the columns that are unique over all shards, by table and column."""
        found = self._rows("""
            select table_name, column_name, claims, is_ready, is_strict from shardids_catalog.lookup
            order by table_name, column_name""")
        return {
            (row.table_name, row.column_name): RegisteredLookup(
                table=row.table_name,
                column=row.column_name,
                claims=row.claims,
                is_ready=row.is_ready,
                is_strict=row.is_strict,
            )
            for row in found
        }

    def nodes(self) -> dict[str, Node]:
        """Returns the nodes by name."""
        rows = self._rows("select name, url from shardids_catalog.node order by name")
        return {row.name: Node(name=row.name, url=row.url) for row in rows}

    def check_node(self, node: Node) -> None:
        """Checks that a node can be added, without adding it.

        Raises:
            ClusterConflict: another database has this name.
        """
        there, url = self.nodes().get(node.name), shown_url(parse_url(node.url))
        if there is not None and there.url != url:
            raise ClusterConflict(
                f'node "{node.name}" is {there.url} already, not {url}',
                hint="Choose another name, or remove that node first.",
            )

    def add_node(self, node: Node) -> None:
        """Adds a node, its URL without the password. Calls are idempotent.

        Raises:
            ClusterConflict: another database has this name.
        """
        if node.name not in self.nodes():
            with self.engine.begin() as connection:
                connection.execute(
                    text("""
                        insert into shardids_catalog.node (name, url) values (:name, :url)
                        on conflict (name) do nothing"""),
                    {"name": node.name, "url": shown_url(parse_url(node.url))},
                )
        self.check_node(node)

    def existing_node(self, name: str) -> Node:
        """Returns a node by name.

        Raises:
            ClusterConflict: there is no such node.
        """
        nodes = self.nodes()
        if name not in nodes:
            raise unknown_node(name, nodes)
        return nodes[name]

    def point_node(self, node: Node) -> None:
        """Changes the URL of an existing node; its password is left out."""
        with self.engine.begin() as connection:
            connection.execute(
                text("update shardids_catalog.node set url = :url where name = :name"),
                {"name": node.name, "url": shown_url(parse_url(node.url))},
            )

    def check_unused(self, name: str) -> None:
        """Checks that a node can be removed, without removing it.

        Raises:
            ClusterConflict: there is no such node, or it holds shards or a view over all shards.
        """
        if name not in (names := self._node_names()):
            raise unknown_node(name, names)
        held = self._rows("select count(*) from shardids_catalog.placement where node = :name", name=name)[0][
            0
        ]
        if held:
            raise ClusterConflict(
                f'node "{name}" holds {held} shards', hint="Move them to other nodes first."
            )
        views = self._rows(
            "select name from shardids_catalog.view where node = :node order by name", node=name
        )
        if views:
            raise ClusterConflict(
                f'node "{name}" has view "{views[0].name}" over all shards',
                hint=f"To drop it: shardids view drop {views[0].name}",
            )
        if self._rows("select from shardids_catalog.query_node where node = :node", node=name):
            raise ClusterConflict(
                f'node "{name}" is the query node', hint="To drop its views: shardids view drop --all"
            )

    def remove_node(self, name: str) -> None:
        """Forgets a node. Raises as :meth:`check_unused` does."""
        self.check_unused(name)
        with self.engine.begin() as connection:
            # The foreign key of placement refuses shards that were placed in between.
            connection.execute(text("delete from shardids_catalog.node where name = :name"), {"name": name})

    def plan_shards(
        self, shards: Iterable[int], node: str | None = None, *, dry_run: bool = False
    ) -> dict[int, str]:
        """Places shards that have no node yet, and returns all that are still to be created.

        Shards that are placed stay where they are. Without ``node``, new shards go to the nodes that have the
        fewest, in runs of neighbours. Their state ``creating`` in the catalog tells the next caller what is
        left to do if this one fails.

        Raises:
            BadArgument: a shard that is not in the cluster.
            ClusterConflict: no such node, or no node at all, or the shard is on another node.
        """
        wanted = sorted(set(shards))
        count = self.describe().shard_count
        outside = [shard for shard in wanted if not 0 <= shard < count]
        if outside:
            raise BadArgument(
                f"there is no shard {outside[0]} in this cluster",
                hint=f"Shards are numbered 0 to {count - 1}.",
            )
        with self.engine.connect() as connection, connection.begin() as transaction:
            # Planners take turns: each sees what the previous one placed.
            connection.execute(text("select 1 from shardids_catalog.cluster for update"))
            loads = dict.fromkeys(self._node_names(), 0)
            if node is not None and node not in loads:
                raise unknown_node(node, list(loads))
            if not loads:
                raise ClusterConflict(
                    "the cluster has no node yet",
                    hint="To add one: shardids node add NAME --url postgresql://…",
                )
            placed = {
                row.shard: row
                for row in connection.execute(
                    text("select shard, node, state from shardids_catalog.placement")
                )
            }
            for row in placed.values():
                loads[row.node] += 1
                if node is not None and row.shard in wanted and row.node != node:
                    raise ClusterConflict(
                        f'shard {row.shard} is on node "{row.node}", not "{node}"',
                        hint="A shard that exists can only be moved.",
                    )
            new = [shard for shard in wanted if shard not in placed]
            plan = dict.fromkeys(new, node) if node else spread(new, loads)
            if plan:
                connection.execute(
                    text("insert into shardids_catalog.placement (shard, node) values (:s, :n)"),
                    [{"s": shard, "n": name} for shard, name in plan.items()],
                )
            if dry_run:
                transaction.rollback()
        unfinished = {
            shard: placed[shard].node
            for shard in wanted
            if shard in placed and placed[shard].state == "creating"
        }
        return unfinished | {shard: str(name) for shard, name in plan.items()}

    def mark_active(self, shards: Sequence[int]) -> None:
        """Records that the shards have been created on their nodes."""
        if not shards:
            return
        with self.engine.begin() as connection:
            connection.execute(
                text("""
                    update shardids_catalog.placement set state = 'active'
                    where shard in :shards and state = 'creating'""").bindparams(
                    bindparam("shards", expanding=True)
                ),
                {"shards": list(shards)},
            )

    def node_of(self, shard: int) -> Node:
        """Returns the node that holds a shard.

        Raises:
            UnknownShard: no node holds it.
            ShardLost: it was lost with its node.
        """
        rows = self._rows(
            """select n.name, n.url, p.state from shardids_catalog.placement p
               join shardids_catalog.node n on n.name = p.node where p.shard = :shard""",
            shard=shard,
        )
        if not rows:
            raise UnknownShard(f"no node holds shard {shard}", hint="To make it: shardids shard create")
        if rows[0].state == "lost":
            raise lost_shard(shard, rows[0].name)
        return Node(name=rows[0].name, url=rows[0].url)

    def _node_names(self) -> list[str]:
        return list(self.nodes())

    def _rows(self, query: str, **parameters: object) -> Sequence[Any]:
        with self.engine.connect() as connection:
            return connection.execute(text(query), parameters).all()


def describe_in(connection: Connection, url: URL) -> Description:
    """Returns what :meth:`Catalog.describe` does, read in the connection's transaction."""
    row = connection.execute(text("select * from shardids_catalog.cluster")).one_or_none()
    if row is None:
        raise ClusterConflict(
            f"{shown_url(url)} holds a shardids catalog without a cluster",
            hint="Its table shardids_catalog.cluster was emptied: restore it from a backup.",
        )
    bits = {name: getattr(row, name) for name in ("time_bits", "shard_bits", "sequence_bits")}
    return Description(
        cluster=row.id,
        layout=Layout(epoch_ms=row.epoch_ms, name=row.layout_name, **bits),
        shard_count=row.shard_count,
        schema_prefix=row.schema_prefix,
    )


def _old_ids(rows: Sequence[Any]) -> OldIdRules | None:
    if not rows:
        return None
    rules = [OldIdRule(table=r.table_name, column=r.id_column, rule=r.rule) for r in rows if r.table_name]
    return OldIdRules(
        below=rows[0].below, negative=rows[0].negative, of_table={rule.table: rule for rule in rules}
    )


def spread(shards: Sequence[int], loads: dict[str, int]) -> dict[int, str]:
    """Assigns shards to nodes so that loads are as even as possible and neighbours stay together.

    ``loads`` is how many shards each node holds already.
    """
    totals = dict(loads)
    for _ in shards:
        totals[min(totals, key=lambda name: (totals[name], name))] += 1
    names = [name for name in sorted(totals) for _ in range(totals[name] - loads[name])]
    return dict(zip(shards, names, strict=True))


def unknown_node(name: str, names: Iterable[str]) -> ClusterConflict:
    """Returns the error for a node that is not in the catalog."""
    there = ", ".join(f'"{n}"' for n in names) or "none yet"
    return ClusterConflict(f'there is no node "{name}"', hint=f"Nodes: {there}.")
