"""The state of a cluster on Citus, as the doctor judges it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, text

from shardids.pg.queries import prepare


@dataclass(frozen=True, slots=True, kw_only=True)
class CitusFacts:
    """What Citus has of the shards.

    Attributes:
        local_schemas: shards whose schema is not distributed.
        local_tables: tables of shards that are on the coordinator only, by shard.
        issuers: workers that have sequences of shards' generators, with the schemas that hold them.
        unheard: workers that did not answer, with their words.
        inactive: workers that Citus does not use.
    """

    local_schemas: tuple[int, ...]
    local_tables: Mapping[int, tuple[str, ...]]
    issuers: Mapping[str, tuple[str, ...]]
    unheard: Mapping[str, str]
    inactive: tuple[str, ...]


_SCHEMAS: Final = text("""
    select s.id from shardids.shard s join pg_namespace n on n.nspname = s.schema
    where not exists (select from pg_catalog.pg_dist_schema d where d.schemaid = n.oid) order by s.id""")
_TABLES: Final = text("""
    select s.id, array_agg(c.relname::text order by c.relname) as tables
    from shardids.shard s join pg_namespace n on n.nspname = s.schema
    join pg_class c on c.relnamespace = n.oid and c.relkind in ('r', 'p') and not c.relispartition
    where not exists (select from pg_catalog.pg_dist_partition p where p.logicalrelid = c.oid)
    group by s.id order by s.id""")
_INACTIVE: Final = text("""
    select n.nodename || ':' || n.nodeport from pg_catalog.pg_dist_node n
    where n.noderole = 'primary' and not n.isactive order by 1""")
# A server that has the sequences of a shard can draw its IDs. Workers do not have schema shardids.
_ISSUERS: Final = text("""
    select r.nodename || ':' || r.nodeport as worker, r.success, r.result
    from pg_catalog.run_command_on_workers(
      'select coalesce(string_agg(distinct n.nspname, '' '' order by n.nspname), '''') from pg_class c'
      ' join pg_namespace n on n.oid = c.relnamespace where c.relkind = ''S'''
      ' and c.relname in (''id_counter'', ''id_offset'') and starts_with(n.nspname, '
      || quote_literal(shardids.schema_prefix()) || ')') r
    join pg_catalog.pg_dist_node w on w.nodename = r.nodename and w.nodeport = r.nodeport and w.groupid <> 0
    order by 1""")


def read_facts(connection: Connection) -> CitusFacts:
    """Return what Citus has of the shards, of all workers that answer."""
    with connection.begin():
        prepare(connection)
        answers = connection.execute(_ISSUERS).all()
        return CitusFacts(
            local_schemas=tuple(connection.scalars(_SCHEMAS)),
            local_tables={row.id: tuple(row.tables) for row in connection.execute(_TABLES)},
            issuers={row.worker: tuple(row.result.split()) for row in answers if row.success and row.result},
            unheard={row.worker: row.result for row in answers if not row.success},
            inactive=tuple(connection.scalars(_INACTIVE)),
        )
