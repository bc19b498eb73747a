"""A shard for one key: it comes after those that keys are hashed over, so no hash leads to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import text

from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog, lock_placement, read_placement, spread_by_region, unknown_node
from shardids.catalog.topology import schema_name
from shardids.errors import BadArgument, ClusterConflict
from shardids.migrate.install import provision
from shardids.pg.queries import AS_IS
from shardids.replication.steps import Noted, OnEvent, StepBegun, StepDone, ignore
from shardids.tables import lookups, views
from shardids.tables.counters.admin import define_kinds, read_kinds

MAKE: Final = "make"
"""The step that makes the shard; no journal has it: repeated, it goes on with the shard that it has made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewShard:
    """A shard to be made for a key.

    Attributes:
        node: the node; by default the one with the fewest shards.
        migrate: makes its tables, as :func:`shardids.migrate.migration.migrator_of_new_shards` does.
    """

    node: str | None = None
    migrate: Callable[[str, Sequence[int]], None] | None = None


def planned(catalog: Catalog, new: NewShard, source: int) -> tuple[int, str]:
    """Return the number and the node of the shard that :func:`make` would take; change nothing.

    Raises:
        ClusterConflict, BadArgument: as :func:`make` does.
    """
    return _taken(catalog, new, source, dry_run=True)


def make(catalog: Catalog, new: NewShard, source: int, on_event: OnEvent = ignore) -> int:
    """Make a shard like another one, or complete one that was made before and has no key; return its number.

    It gets the tables by the migrations, and from ``source`` the privileges and the kinds of numbers.

    Raises:
        BadArgument: nothing says how its tables are made.
        ClusterConflict: the layout has no number left, or the node does not exist, or is of a region.
    """
    number, node = _taken(catalog, new, source, dry_run=False)
    on_event(StepBegun(step=MAKE))
    provision.create_shards(catalog, [number], node=node, migrate=new.migrate or _nothing)
    _equip(catalog, source, number)
    for lookup in catalog.lookups().values():
        # Its claims may then be for this shard, in every shard that keeps some.
        lookups.create(catalog, str(lookup))
    for stale in views.follow(catalog):
        on_event(Noted(note=stale))
    on_event(StepDone(step=MAKE))
    return number


def require_unused(catalog: Catalog, number: int) -> None:
    """Require that no key has got a shard since it was made; the caller has its lease.

    Raises:
        ClusterConflict: one has.
    """
    with catalog.engine.connect() as connection:
        key = connection.scalar(_KEY_OF, {"shard": number})
    if key is not None:
        raise ClusterConflict(
            f"shard {number}, which was to be made for this key, was given to key {key!r} meanwhile",
            hint="Run the command again: it makes another one.",
        )


def _nothing(_node: str, _shards: Sequence[int]) -> None:
    """Make no tables: they are there."""


def _taken(catalog: Catalog, new: NewShard, source: int, *, dry_run: bool) -> tuple[int, str]:
    description = catalog.describe()
    count, limit = description.shard_count, description.layout.shard_limit
    with catalog.engine.connect() as connection, connection.begin() as transaction:
        lock_placement(connection)
        placement = read_placement(connection)
        if new.node is not None and new.node not in placement.nodes:
            raise unknown_node(new.node, placement.nodes)
        row = connection.execute(_UNUSED, {"count": count, "source": source, "node": new.node}).one_or_none()
        if row is not None and (row.state == "active" or new.migrate is not None):
            return int(row.shard), str(row.node)
        if new.migrate is None:
            raise BadArgument(
                "nothing says how the tables of a new shard are made",
                hint="Name the application's migrations: --migrations DIR",
            )
        number: int = connection.scalar(_NEXT, {"count": count})
        if number >= limit:
            raise ClusterConflict(
                f"layout {description.layout} has {limit} shards, and all are there",
                hint="Move the key to an empty one: --to-shard N",
            )
        if new.node is None:
            loads = {row.node: row.shards for row in connection.execute(_LOADS)}
            node = spread_by_region([number], loads, placement)[number]
        elif (region := placement.nodes[new.node].region) is not None:
            raise ClusterConflict(
                f'node "{new.node}" is of region "{region}", and a new shard is of none',
                hint="Name a node that is of no region: --to NODE",
            )
        else:
            node = new.node
        connection.execute(
            text("insert into shardids_catalog.placement (shard, node) values (:shard, :node)"),
            {"shard": number, "node": node},
        )
        if dry_run:
            transaction.rollback()
    return number, node


def _equip(catalog: Catalog, source: int, number: int) -> None:
    """Give a shard the privileges and the kinds of numbers that another one has. Idempotent."""
    prefix = catalog.describe().schema_prefix
    there, here = catalog.node_of(source), catalog.node_of(number)
    with Nodes({there.name: there}, catalog.url) as nodes, nodes[there.name].connect() as connection:
        schema, new = schema_name(prefix, source), schema_name(prefix, number)
        roles = connection.scalars(_ROLES, {"schema": schema}).all()
        grants = connection.scalars(_GRANTS, {"schema": schema, "new": new}).all()
        kinds = read_kinds(connection, schema)
    with Nodes({here.name: here}, catalog.url) as nodes, nodes[here.name].begin() as connection:
        for role in roles:
            connection.execute(
                text("select shardids.grant_usage(array[cast(:shard as integer)], :role)"),
                {"shard": number, "role": role},
            )
        for statement in grants:
            connection.exec_driver_sql(statement, execution_options=AS_IS)
        define_kinds(connection, number, kinds)


# Nobody lives there, and nobody is on the way: one that was made before a kill, or whose key has gone back.
_UNUSED: Final = text("""
    select p.shard, p.node, p.state from shardids_catalog.placement p
    where p.shard >= :count and p.shard <> :source and p.state <> 'lost'
      and (cast(:node as text) is null or p.node = :node)
      and not exists (select from shardids_catalog.key_home h where h.shard = p.shard)
      and not exists (select from shardids_catalog.key_move m
                      where p.shard in (m.source, m.target) and m.ended_at is null)
      and not exists (select from shardids_catalog.move m where m.shard = p.shard and m.ended_at is null)
    order by p.shard limit 1""")
_KEY_OF: Final = text("select key from shardids_catalog.key_home where shard = :shard limit 1")
_NEXT: Final = text("select greatest(:count, max(p.shard) + 1) from shardids_catalog.placement p")
_LOADS: Final = text("select p.node, count(*) as shards from shardids_catalog.placement p group by 1")
_ROLES: Final = text("""
    select distinct r.rolname::text from pg_namespace n, aclexplode(n.nspacl) a
    join pg_roles r on r.oid = a.grantee
    where n.nspname = :schema and a.privilege_type = 'USAGE' and a.grantee <> n.nspowner order by 1""")
_GRANTS: Final = text("""
    select format('grant %s on %s %I.%I to %s', a.privilege_type,
                  case c.relkind when 'S' then 'sequence' else 'table' end, cast(:new as text), c.relname,
                  case a.grantee when 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end)
    from pg_class c, aclexplode(c.relacl) a
    where c.relnamespace = to_regnamespace(quote_ident(:schema)) and c.relkind in ('r', 'p', 'v', 'S')
      and a.grantee <> c.relowner and not starts_with(c.relname, 'shardids_')
      and c.relname not in ('id_counter', 'id_offset')
    order by 1""")
