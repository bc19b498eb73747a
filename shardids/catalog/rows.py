"""The catalog: the layout of a cluster, its nodes, and the placement of its shards, read and written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal
from uuid import UUID

from sqlalchemy import Connection, Engine, bindparam, text
from sqlalchemy.engine import URL

from shardids.catalog.regions import (
    Region,
    existing_region,
    in_region,
    leaving,
    no_node_of_region,
    require_region,
)
from shardids.catalog.topology import (
    Node,
    OldIdRule,
    OldIdRules,
    Placement,
    RegisteredLookup,
    lost_shard,
    no_shard,
    unplaced_shard,
)
from shardids.errors import ClusterConflict, UnknownShard
from shardids.ids.layout import Layout
from shardids.pg.connections import CONNECT_TIMEOUT_S, open_engine, reading
from shardids.pg.notation import counted
from shardids.pg.urls import parse_url, shown_url

# One statement, so one snapshot: the version belongs to just these rows.
_PLACEMENT: Final = text("""
    select c.version, c.homes_version, c.unsettled_version, n.name, n.url, n.region,
           null as first_shard, null as last_shard, p.shard, p.state,
           null as table_name, null as id_column, null as rule,
           cast(null as bigint) as below, cast(null as boolean) as negative
    from shardids_catalog.cluster c
    left join shardids_catalog.node n on true
    left join shardids_catalog.placement p on p.node = n.name and p.state <> 'creating'
    union all
    select c.version, c.homes_version, c.unsettled_version, null, null, r.name,
           r.first_shard, r.last_shard, null, null, null, null, null, null, null
    from shardids_catalog.cluster c
    join shardids_catalog.region r on true
    union all
    select c.version, c.homes_version, c.unsettled_version, null, null, null, null, null, null, null,
           r.table_name, r.id_column, r.rule, c.old_ids_below,
           c.time_bits + c.shard_bits + c.sequence_bits < 64
    from shardids_catalog.cluster c
    left join shardids_catalog.old_id_rule r on true
    where c.old_ids_below is not null
    order by name, shard, first_shard""")

_LOOKUPS: Final = text("""
    select table_name, column_name, claims, is_ready from shardids_catalog.lookup
    order by table_name, column_name""")


_UNSETTLED: Final = text("""
    select m.source from shardids_catalog.key_move m where m.ended_at is null and m.is_unsettled
    union all
    select m.target from shardids_catalog.key_move m where m.ended_at is null and m.is_unsettled""")


def read_placement(connection: Connection) -> Placement:
    """Return which node holds which shard now; shards that are still being created are left out."""
    found = connection.execute(_PLACEMENT).all()
    return Placement(
        version=found[0].version,
        homes_version=found[0].homes_version,
        unsettled_version=found[0].unsettled_version,
        nodes={row.name: Node(name=row.name, url=row.url, region=row.region) for row in found if row.name},
        node_of={row.shard: row.name for row in found if row.state == "active"},
        lost={row.shard: row.name for row in found if row.state == "lost"},
        old_ids=_old_ids([row for row in found if row.below]),
        lookups=read_lookups(connection),
        regions={
            row.region: Region(name=row.region, first_shard=row.first_shard, last_shard=row.last_shard)
            for row in found
            if row.first_shard is not None
        },
        unsettled=frozenset(connection.scalars(_UNSETTLED)),
    )


def read_lookups(connection: Connection) -> dict[tuple[str, str], RegisteredLookup]:
    """Return the columns that are unique over all shards, by table and column."""
    return {
        (row.table_name, row.column_name): RegisteredLookup(
            table=row.table_name,
            column=row.column_name,
            claims=row.claims,
            is_ready=row.is_ready,
        )
        for row in connection.execute(_LOOKUPS)
    }


def _old_ids(rows: Sequence[Any]) -> OldIdRules | None:
    if not rows:
        return None
    rules = [OldIdRule(table=r.table_name, column=r.id_column, rule=r.rule) for r in rows if r.table_name]
    return OldIdRules(
        below=rows[0].below, negative=rows[0].negative, of_table={rule.table: rule for rule in rules}
    )


def lock_placement(connection: Connection) -> None:
    """Wait for processes that change nodes, regions or placement, and keep others from it until the end of
    the transaction. To be taken before any other lock in the catalog."""
    connection.execute(text("select from shardids_catalog.cluster for update"))


def place_shard(connection: Connection, shard: int, *, source: str, target: str) -> None:
    """Place a shard on another node, in the connection's transaction: its commit is the switch.

    Raises:
        ClusterConflict: the shard is not placed on ``source``.
    """
    placed = connection.execute(
        text("""
            update shardids_catalog.placement set node = :target
            where shard = :shard and node = :source and state = 'active'"""),
        {"shard": shard, "source": source, "target": target},
    )
    if placed.rowcount != 1:
        raise ClusterConflict(f'shard {shard} is not placed on node "{source}" any more')


def place_lost_shard(connection: Connection, shard: int, *, lost_with: str, target: str) -> None:
    """Give a shard that was lost with a node a home, in the connection's transaction.

    Raises:
        ClusterConflict: the shard does not count as lost with that node.
    """
    placed = connection.execute(
        text("""
            update shardids_catalog.placement set node = :target, state = 'active'
            where shard = :shard and node = :source and state = 'lost'"""),
        {"shard": shard, "source": lost_with, "target": target},
    )
    if placed.rowcount != 1:
        raise ClusterConflict(f'shard {shard} does not count as lost with node "{lost_with}" any more')


def point_node(
    connection: Connection, old: Node, url: str, *, lost: Collection[int], found: Collection[int]
) -> None:
    """Change a node's URL, and which of its shards count as lost, in the connection's transaction.

    Raises:
        ClusterConflict: the node has another URL than ``old`` by now.
    """
    lock_placement(connection)
    changed = connection.execute(
        text("update shardids_catalog.node set url = :url where name = :name and url = :was"),
        {"name": old.name, "url": shown_url(parse_url(url)), "was": old.url},
    )
    if changed.rowcount != 1:
        raise ClusterConflict(
            f'node "{old.name}" was replaced by another process meanwhile', hint="See: shardids node list"
        )
    connection.execute(
        text("""
            update shardids_catalog.placement
            set state = case when shard = any (:lost) then 'lost' else 'active' end
            where node = :name and (shard = any (:lost) and state = 'active'
                                    or shard = any (:found) and state = 'lost')"""),
        {"name": old.name, "lost": sorted(lost), "found": sorted(found)},
    )


SCHEMA_PREFIX = "shard_"
"""The default prefix of shards' schema names."""


Engines = Literal["postgresql", "citus"]
"""The program that places shards: shardids on plain servers, or Citus on the workers of a coordinator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The properties that are fixed when a cluster is made.

    ``shard_count`` is the number of shards that keys are hashed over; :meth:`Catalog.shard_total` has more.
    """

    cluster: UUID
    layout: Layout
    shard_count: int
    schema_prefix: str
    engine: Engines = "postgresql"


class Catalog:
    """The catalog in one database. Every method runs in its own transaction.

    Args:
        url: URL of the database that holds, or will hold, schema ``shardids_catalog``.
        read_only: whether its transactions, and those of the doctor on the nodes, are read-only.
    """

    def __init__(self, url: str | URL, *, read_only: bool = False) -> None:
        self.url = parse_url(url)
        self.read_only = read_only
        engine = open_engine(
            self.url,
            what="the catalog",
            administrative=True,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            pool_size=1,
        )
        self.engine: Engine = reading(engine, only=read_only)

    def close(self) -> None:
        """Close the catalog's connections."""
        self.engine.dispose()

    def describe(self) -> Description:
        """Return the cluster's fixed properties.

        Raises:
            ClusterConflict: the database holds no catalog.
        """
        with self.engine.connect() as connection:
            return describe_in(connection, self.url)

    def shard_total(self) -> int:
        """Return the number of shards, also of those after the ones that keys are hashed over."""
        rows = self._rows("""
            select greatest(c.shard_count, max(p.shard) + 1) as total
            from shardids_catalog.cluster c left join shardids_catalog.placement p on true
            group by c.shard_count""")
        return int(rows[0].total) if rows else self.describe().shard_count

    def placement(self) -> Placement:
        """Return which node holds which shard now; shards that are still being created are left out."""
        with self.engine.connect() as connection:
            return read_placement(connection)

    def lookups(self) -> dict[tuple[str, str], RegisteredLookup]:
        """Return the columns that are unique over all shards, by table and column."""
        with self.engine.connect() as connection:
            return read_lookups(connection)

    def nodes(self) -> dict[str, Node]:
        """Return the nodes by name."""
        rows = self._rows("select name, url, region from shardids_catalog.node order by name")
        return {row.name: Node(name=row.name, url=row.url, region=row.region) for row in rows}

    def check_node(self, node: Node) -> None:
        """Check that a node can be added, without adding it.

        Raises:
            BadArgument: the region does not exist.
            ClusterConflict: another database has this name, or the node has another region.
        """
        with self.engine.connect() as connection:
            placement = read_placement(connection)
        if node.region is not None:
            existing_region(node.region, placement.regions)
        there, url = placement.nodes.get(node.name), shown_url(parse_url(node.url))
        if there is not None and there.url != url:
            raise ClusterConflict(
                f'node "{node.name}" is {there.url} already, not {url}',
                hint="Choose another name, or remove that node first.",
            )
        if there is not None and node.region not in (None, there.region):
            raise ClusterConflict(
                f'node "{node.name}" is {in_region(there.region)} already',
                hint=f"To change that: shardids region assign {node.region} {node.name}"
                + leaving(placement, node.name),
            )

    def add_node(self, node: Node) -> None:
        """Add a node, its URL without the password. Calls are idempotent, and leave the region as it is.

        Raises:
            BadArgument, ClusterConflict: as :meth:`check_node` does.
        """
        if node.name not in self.nodes():
            with self.engine.begin() as connection:
                lock_placement(connection)
                connection.execute(
                    text("""
                        insert into shardids_catalog.node (name, url, region) values (:name, :url, :region)
                        on conflict (name) do nothing"""),
                    {"name": node.name, "url": shown_url(parse_url(node.url)), "region": node.region},
                )
        self.check_node(node)

    def existing_node(self, name: str) -> Node:
        """Return a node by name.

        Raises:
            ClusterConflict: the node does not exist.
        """
        nodes = self.nodes()
        if name not in nodes:
            raise unknown_node(name, nodes)
        return nodes[name]

    def point_node(self, node: Node) -> None:
        """Change the URL of an existing node; its password is left out."""
        with self.engine.begin() as connection:
            lock_placement(connection)
            connection.execute(
                text("update shardids_catalog.node set url = :url where name = :name"),
                {"name": node.name, "url": shown_url(parse_url(node.url))},
            )

    def check_unused(self, name: str) -> None:
        """Check that a node can be removed, without removing it.

        Raises:
            ClusterConflict: the node does not exist, or it holds shards or is the query node.
        """
        if name not in (names := self._node_names()):
            raise unknown_node(name, names)
        held = self._rows("select count(*) from shardids_catalog.placement where node = :name", name=name)[0][
            0
        ]
        if held:
            raise ClusterConflict(
                f'node "{name}" holds {counted(held, "shard")}',
                hint=f"To move them to other nodes: shardids rebalance --drain {name}",
            )
        if self._rows("select from shardids_catalog.query_node where node = :node", node=name):
            raise ClusterConflict(
                f'node "{name}" is the query node',
                hint="To make another the query node: shardids query-node create --on NODE",
            )

    def remove_node(self, name: str) -> None:
        """Forget a node. Raises as :meth:`check_unused` does."""
        self.check_unused(name)
        with self.engine.begin() as connection:
            lock_placement(connection)
            # The foreign key of placement refuses shards that were placed in between.
            connection.execute(text("delete from shardids_catalog.node where name = :name"), {"name": name})

    def plan_shards(
        self, shards: Iterable[int], node: str | None = None, *, dry_run: bool = False
    ) -> dict[int, str]:
        """Place shards that have no node yet, and return all that are still to be created.

        Shards that are placed stay where they are. Without ``node``, new shards go to those nodes of their
        region that have the fewest, in runs of neighbours. Their state ``creating`` in the catalog shows the
        next caller the shards that are left to do if this one fails.

        Raises:
            BadArgument: a shard that is not in the cluster.
            ClusterConflict: no such node, or no node at all, or the shard is on another node; or the node is
                of another region than a shard, or a shard's region has none.
        """
        wanted = sorted(set(shards))
        count = self.shard_total()
        if outside := [shard for shard in wanted if not 0 <= shard < count]:
            raise no_shard(outside[0], count)
        with self.engine.connect() as connection, connection.begin() as transaction:
            # Planners take turns: each sees what the previous one placed.
            lock_placement(connection)
            placement = read_placement(connection)
            found = connection.execute(text("select shard, node, state from shardids_catalog.placement"))
            placed = {row.shard: row for row in found}
            new = [shard for shard in wanted if shard not in placed]
            if node is None:
                plan = spread_by_region(new, Counter(row.node for row in placed.values()), placement)
            else:
                _require_fit(placement, node, new, [placed[shard] for shard in wanted if shard in placed])
                plan = dict.fromkeys(new, node)
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
        return unfinished | plan

    def mark_active(self, shards: Sequence[int]) -> None:
        """Record that the shards have been created on their nodes."""
        if not shards:
            return
        with self.engine.begin() as connection:
            lock_placement(connection)
            connection.execute(
                text("""
                    update shardids_catalog.placement set state = 'active'
                    where shard in :shards and state = 'creating'""").bindparams(
                    bindparam("shards", expanding=True)
                ),
                {"shards": list(shards)},
            )

    def node_of(self, shard: int) -> Node:
        """Return the node that holds a shard.

        Raises:
            UnknownShard: no node holds it.
            ShardLost: it was lost with its node.
        """
        rows = self._rows(
            """select n.name, n.url, n.region, p.state from shardids_catalog.placement p
               join shardids_catalog.node n on n.name = p.node where p.shard = :shard""",
            shard=shard,
        )
        if not rows:
            count = self.shard_total()
            if not 0 <= shard < count:
                raise no_shard(shard, count, UnknownShard)
            raise unplaced_shard(shard)
        if rows[0].state == "lost":
            raise lost_shard(shard, rows[0].name)
        return Node(name=rows[0].name, url=rows[0].url, region=rows[0].region)

    def _node_names(self) -> list[str]:
        return list(self.nodes())

    def _rows(self, query: str, **parameters: object) -> Sequence[Any]:
        with self.engine.connect() as connection:
            return connection.execute(text(query), parameters).all()


def describe_in(connection: Connection, url: URL) -> Description:
    """Return what :meth:`Catalog.describe` does, read in the connection's transaction."""
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
        engine=row.engine,
    )


def _require_fit(placement: Placement, node: str, new: Iterable[int], placed: Iterable[Any]) -> None:
    """Require that a node may hold new shards, and that those which are placed are there already."""
    if node not in placement.nodes:
        raise unknown_node(node, placement.nodes)
    for row in placed:
        if row.node != node:
            raise ClusterConflict(
                f'shard {row.shard} is on node "{row.node}", not "{node}"',
                hint="A shard that exists can only be moved.",
            )
    for shard in new:
        require_region(placement, shard, node)


def spread_by_region(shards: Sequence[int], loads: Mapping[str, int], placement: Placement) -> dict[int, str]:
    """Assign shards to the nodes of their regions, as :func:`spread` does.

    Raises:
        ClusterConflict: the cluster has no node, or none of a shard's region.
    """
    if not placement.nodes:
        raise ClusterConflict(
            "the cluster has no node yet", hint="To add one: shardids node add NAME --url postgresql://…"
        )
    by_region: dict[str | None, list[int]] = {}
    for shard in shards:
        by_region.setdefault(placement.region_of(shard), []).append(shard)
    plan: dict[int, str] = {}
    for region, of_region in by_region.items():
        names = placement.nodes_of_region(region)
        if not names:
            raise no_node_of_region(region, of_region, undone="created")
        plan |= spread(of_region, {name: loads.get(name, 0) for name in names})
    return plan


def spread(shards: Sequence[int], loads: dict[str, int]) -> dict[int, str]:
    """Assign shards to nodes so that loads are as even as possible and neighbours stay together.

    ``loads`` is how many shards each node holds already.
    """
    totals = dict(loads)
    for _ in shards:
        totals[min(totals, key=lambda name: (totals[name], name))] += 1
    names = [name for name in sorted(totals) for _ in range(totals[name] - loads[name])]
    return dict(zip(shards, names, strict=True))


def unknown_node(name: str, names: Iterable[str]) -> ClusterConflict:
    """Return the error for a node that is not in the catalog."""
    there = ", ".join(f'"{n}"' for n in names) or "none yet"
    return ClusterConflict(f'there is no node "{name}"', hint=f"Nodes: {there}.")
