"""The making of a cluster on Citus: the requirements, the catalog, and the coordinator as the only node."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, text

from shardids.catalog.rows import SCHEMA_PREFIX, Catalog, Description
from shardids.errors import ClusterConflict, UnsupportedServer
from shardids.ids.layout import Layout
from shardids.migrate.install import provision

NODE: Final = "coordinator"
"""The name of the only node."""
_OLDEST: Final = 13

DECODING: Final = (
    *("schema_of", "id_of", "shard_of", "sequence_of", "time_of", "tick_of", "ms_of", "min_id", "max_id"),
    "shard_for_key",
)
"""The functions of schema shardids that workers have, with those that they call: queries hold them."""
_DECODING: Final = text("""
    select create_distributed_function(p.oid::regprocedure) from pg_proc p
    where p.pronamespace = 'shardids'::regnamespace and p.proname = any (:names)""")
_STATE: Final = text("""
    select (select e.extversion from pg_extension e where e.extname = 'citus') as version,
           current_database() as database""")
_COORDINATOR: Final = text("""
    select (select l.groupid = 0 from pg_dist_local_group l) as is_coordinator,
           (select count(*) from pg_dist_node n
            where n.noderole = 'primary' and n.shouldhaveshards) as workers""")


def init(
    catalog: Catalog,
    layout: Layout,
    shard_count: int,
    schema_prefix: str = SCHEMA_PREFIX,
    *,
    dry_run: bool = False,
) -> Description:
    """Create the catalog in a coordinator, and make the coordinator the only node. Idempotent.

    Raises:
        UnsupportedServer: the database is not a coordinator of Citus 13 or later.
        ClusterConflict: the coordinator does not know its own address, or has no worker for shards.
        ShardidsError: as :func:`shardids.migrate.install.provision.init` and ``add_node`` do.
    """
    with catalog.engine.connect() as connection:
        require_coordinator(connection)
    made = provision.init(catalog, layout, shard_count, schema_prefix, engine="citus", dry_run=dry_run)
    if not dry_run:
        provision.add_node(catalog, NODE, catalog.url.render_as_string(hide_password=False))
        with catalog.engine.begin() as connection:
            connection.execute(_DECODING, {"names": list(DECODING)})
    return made


def require_coordinator(connection: Connection) -> None:
    """Require that the database is the coordinator of a Citus that can hold shards.

    Raises:
        UnsupportedServer, ClusterConflict: as :func:`init` does.
    """
    state = connection.execute(_STATE).one()
    if state.version is None:
        raise UnsupportedServer(
            f'database "{state.database}" does not have the extension citus',
            hint="Install it on every server, then: create extension citus",
        )
    if int(state.version.partition(".")[0].partition("-")[0]) < _OLDEST:
        raise UnsupportedServer(
            f"Citus {state.version} is too old: shardids takes {_OLDEST} or later",
            hint="Upgrade it on every server, then: alter extension citus update",
        )
    citus = connection.execute(_COORDINATOR).one()
    if not citus.is_coordinator:
        raise UnsupportedServer(
            f'database "{state.database}" is a worker of Citus, not its coordinator',
            hint="Name the coordinator's database as --catalog.",
        )
    if not citus.workers:
        raise ClusterConflict(
            "this Citus has no worker that takes shards",
            hint="select citus_set_coordinator_host(host, port), then for each worker:"
            " select citus_add_node(host, port)",
        )
