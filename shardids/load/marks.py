"""How many rows of a load each shard has taken: the table ``shardids_load`` in the shard."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import psycopg
from psycopg import sql
from sqlalchemy import Connection, text

from shardids import Cluster
from shardids.catalog.queries import batches
from shardids.catalog.sqlfiles import read_sql
from shardids.client.copying.lanes import of_driver
from shardids.errors import ClusterConflict

TABLE = "shardids_load"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """How far a load has come in a shard: its first so many rows are copied, or were rejected."""

    rows: int
    rejected: int


def read_marks(cluster: Cluster, load: str, source: str) -> dict[int, Mark]:
    """Returns the marks of a load, by shard.

    Raises:
        ClusterConflict: a load of this name was of another file, or read in another way.
    """
    found: dict[int, Mark] = {}
    for name, shards in cluster.placement.by_node().items():
        schemas = {cluster.schema_of(shard): shard for shard in shards}
        with cluster.engine(cluster.placement.nodes[name]).connect() as connection:
            there = connection.scalars(
                text(
                    "select n.nspname from pg_catalog.pg_class c"
                    " join pg_catalog.pg_namespace n on n.oid operator(pg_catalog.=) c.relnamespace"
                    " join pg_catalog.pg_roles r on r.oid operator(pg_catalog.=) c.relowner"
                    " where c.relname operator(pg_catalog.=) :table and c.relkind operator(pg_catalog.=) 'r'"
                    # A table of another role is refused before rows are sent: its policies would run here.
                    " and (r.rolname operator(pg_catalog.=) current_user"
                    "  or r.oid operator(pg_catalog.=) (select e.nspowner from pg_catalog.pg_namespace e"
                    "                                   where e.nspname operator(pg_catalog.=) 'shardids'))"
                ),
                {"table": TABLE},
            ).all()
            for some in batches([schema for schema in there if schema in schemas]):
                for schema, of, rows, rejected in _read(connection, some, load):
                    _check_source(load, of, source)
                    found[schemas[schema]] = Mark(rows=rows, rejected=rejected)
    return found


def _read(connection: Connection, schemas: Iterable[str], load: str) -> list[tuple[str, str, int, int]]:
    branches = sql.SQL(" union all ").join(
        sql.SQL("select {}, source, rows, rejected from {} where load = %(load)s").format(
            sql.Literal(schema), sql.Identifier(schema, TABLE)
        )
        for schema in schemas
    )
    return of_driver(connection).execute(branches, {"load": load}).fetchall()


def _check_source(load: str, found: str, source: str) -> None:
    if found != source:
        raise ClusterConflict(
            f'a load "{load}" was of another file, or read in another way: {found}, now {source}',
            hint="Give this one another name: --name. A load is done once.",
        )


def make_table(connection: Connection, schema: str) -> None:
    """Makes the table in a shard. Idempotent."""
    connection.execute(text("select set_config('shardids.schema', :schema, true)"), {"schema": schema})
    of_driver(connection).execute(read_sql("load/marks.v1").encode())


def advance(
    driver: psycopg.Connection, schema: str, load: str, *, source: str, before: Mark, after: Mark
) -> None:
    """Moves a shard's mark on, in the transaction that copies the rows.

    Raises:
        ClusterConflict: the mark is not where this process left it: another one runs the same load.
    """
    values = {
        "load": load,
        "source": source,
        "before": before.rows,
        "rows": after.rows,
        "rejected": after.rejected,
    }
    table = sql.Identifier(schema, TABLE)
    statement = sql.SQL(
        "update {} set rows = %(rows)s, rejected = rejected + %(rejected)s, at = default"
        " where load = %(load)s and rows = %(before)s"
    )
    if before.rows == 0:
        statement = sql.SQL(
            "insert into {} (load, source, rows, rejected)"
            " values (%(load)s, %(source)s, %(rows)s, %(rejected)s) on conflict do nothing"
        )
    if driver.execute(statement.format(table), values).rowcount != 1:
        raise ClusterConflict(
            f'another process is running the load "{load}": it has copied rows into {schema} meanwhile',
            hint="Wait for it, or end it and start the load again: it goes on where it ended.",
        )
