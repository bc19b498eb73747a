"""Changes of regions: which there are, and which nodes take their shards. No shard is moved by them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from shlex import quote
from typing import Final

from sqlalchemy import Connection, text

from shardids.catalog.moves import read_moves
from shardids.catalog.regions import Region, existing_region, in_region, leaving
from shardids.catalog.rows import Catalog, describe_in, lock_placement, read_placement, unknown_node
from shardids.catalog.topology import Placement, no_shard
from shardids.errors import ClusterConflict
from shardids.pg.notation import counted, named_shards

_MOST_NAMED: Final = 5

Change = Callable[[Connection, Placement], None]


def create_region(
    catalog: Catalog, region: Region, nodes: Collection[str] = (), *, dry_run: bool = False
) -> Placement:
    """Give shards that belong to no region yet a region, and assign nodes of none to it. Idempotent.

    Returns the placement with it: shards that lived elsewhere still do, as :meth:`Placement.outside` tells.
    With ``dry_run`` the transaction is rolled back.

    Raises:
        BadArgument: a shard that is not in the cluster.
        ClusterConflict: a shard belongs to another region, or the region has other shards already; a node is
            unknown, or of another region; or a shard is being moved to, or created on, a node that would not
            be of its region.
    """

    def change(connection: Connection, there: Placement) -> None:
        count = describe_in(connection, catalog.url).shard_count
        if region.last_shard >= count:
            raise no_shard(region.last_shard, count)
        if there.regions.get(region.name) != region:
            _refuse_taken(region, there)
            connection.execute(
                text("""
                    insert into shardids_catalog.region (name, first_shard, last_shard)
                    values (:name, :first, :last)"""),
                {"name": region.name, "first": region.first_shard, "last": region.last_shard},
            )
        _refuse_assigned(there, nodes, region.name)
        _assign(connection, there, nodes, region.name)

    return _changed(catalog, change, dry_run=dry_run)


def drop_region(catalog: Catalog, name: str, *, dry_run: bool = False) -> Placement:
    """Forget a region: its shards and its nodes belong to none. Returns the placement without it.

    Raises:
        BadArgument: the region does not exist.
        ClusterConflict: as :func:`create_region` does, of moves and shards that are being created; or keys
            of the region are in the directory of keys.
    """

    def change(connection: Connection, there: Placement) -> None:
        existing_region(name, there.regions)
        _refuse_keys(connection, name)
        _assign(connection, there, there.nodes_of_region(name), None)
        connection.execute(text("delete from shardids_catalog.region where name = :name"), {"name": name})

    return _changed(catalog, change, dry_run=dry_run)


def assign_nodes(
    catalog: Catalog, region: str | None, nodes: Collection[str], *, dry_run: bool = False
) -> Placement:
    """Let nodes take the shards of a region and no others; with ``None``, those of no region.

    Returns the placement with it; shards stay where they are.

    Raises:
        BadArgument: the region does not exist.
        ClusterConflict: as :func:`create_region` does, of nodes, moves and shards that are being created.
    """

    def change(connection: Connection, there: Placement) -> None:
        if region is not None:
            existing_region(region, there.regions)
        _assign(connection, there, nodes, region)

    return _changed(catalog, change, dry_run=dry_run)


def _changed(catalog: Catalog, change: Change, *, dry_run: bool) -> Placement:
    with catalog.engine.connect() as connection, connection.begin() as transaction:
        lock_placement(connection)
        change(connection, read_placement(connection))
        after = read_placement(connection)
        _refuse_moves_outside(connection, after)
        _refuse_creation_outside(connection, after)
        if dry_run:
            transaction.rollback()
    return after


def _assign(connection: Connection, there: Placement, nodes: Collection[str], region: str | None) -> None:
    for name in nodes:
        if name not in there.nodes:
            raise unknown_node(name, there.nodes)
    changed = sorted(name for name in set(nodes) if there.nodes[name].region != region)
    if changed:
        connection.execute(
            text("update shardids_catalog.node set region = :region where name = any (:names)"),
            {"region": region, "names": changed},
        )


def _refuse_assigned(there: Placement, nodes: Collection[str], region: str) -> None:
    """Refuse nodes of other regions: a region that is made takes none away from another in passing."""
    for name in nodes:
        if name in there.nodes and there.nodes[name].region not in (None, region):
            raise ClusterConflict(
                f'node "{name}" is {in_region(there.nodes[name].region)} already',
                hint=f"To take it from there: shardids region assign --none {name}{leaving(there, name)}",
            )


def _refuse_taken(region: Region, there: Placement) -> None:
    """Refuse another range for a region that is there, and shards of another region."""
    if (same := there.regions.get(region.name)) is not None:
        raise ClusterConflict(
            f'region "{region.name}" has {named_shards(same.shards)}, not {region}',
            hint="Its range is fixed, since keys would be looked for in other shards. Give the others another"
            " region.",
        )
    for other in there.regions.values():
        if taken := set(other.shards) & set(region.shards):
            raise ClusterConflict(
                f'{named_shards(taken)} of region "{other.name}" can\'t be of region "{region.name}", too',
                hint="A shard belongs to one region. See: shardids region list",
            )


def _refuse_keys(connection: Connection, region: str) -> None:
    """Refuse while keys of the region are in the directory, or are pinned: another may get its name."""
    count = connection.scalar(
        text("select count(*) from shardids_catalog.key_home where split_part(kind, '@', 2) = :region"),
        {"region": region},
    )
    if count:
        raise ClusterConflict(
            f'region "{region}" has {counted(count, "key")} in the directory of keys',
            hint="Move them back to the shards of their hashes first. See: shardids tenant list",
        )
    pinned = connection.execute(
        text("""
            select kind, key from shardids_catalog.key_pin where split_part(kind, '@', 2) = :region
            order by kind, key"""),
        {"region": region},
    ).all()
    if pinned:
        steps = [f"shardids tenant unpin {quote(row.key)} --kind {row.kind}" for row in pinned[:_MOST_NAMED]]
        raise ClusterConflict(
            f'region "{region}" has pins of {counted(len(pinned), "key")}',
            hint=f"Take them away first: {'; '.join(steps)}",
        )


def _refuse_moves_outside(connection: Connection, after: Placement) -> None:
    """Refuse while a shard is on its way to a node that would not be of its region.

    A move that begins later finds the change: it takes the same lock.
    """
    moves = [move for move in read_moves(connection) if move.is_on_its_way]
    for shard, target in sorted((move.shard, move.target) for move in moves):
        region, node = after.region_of(shard), after.nodes.get(target)
        if node is not None and node.region != region:
            raise ClusterConflict(
                f'shard {shard}, which would be {in_region(region)}, is being moved to node "{target}", which'
                f" would be {in_region(node.region)}",
                hint="Wait until the move is over. One that was interrupted:"
                f" shardids shard move {shard} --resume, or --abort",
            )


def _refuse_creation_outside(connection: Connection, after: Placement) -> None:
    """Refuse while a shard is being created on a node that would not be of its region.

    The placement leaves such shards out, so that :meth:`Placement.outside` would not tell them.
    """
    planned = connection.execute(
        text("select shard, node from shardids_catalog.placement where state = 'creating' order by shard")
    )
    for shard, node in planned:
        region = after.region_of(shard)
        if after.nodes[node].region != region:
            raise ClusterConflict(
                f'shard {shard}, which would be {in_region(region)}, is being created on node "{node}", which'
                f" would be {in_region(after.nodes[node].region)}",
                hint="Wait until it is created. If that was interrupted: shardids shard create",
            )
