"""Examining 1,024 shards on two nodes, each with an application's tables, rows and roles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from benchmarks.report import Section, figure, interleaved, seconds
from shardids import doctor
from shardids.catalog.rows import Catalog
from shardids.dev import devcluster
from shardids.dev.embedded import temporary_servers

SHARDS = 1024
MOST_SECONDS = 5.0
TABLES = 4
ROWS = 100

_SHARD = """
do $$
declare
  schema text;
begin
  execute 'create role reader';
  for schema in select s.schema from shardids.shard s loop
    execute format(
      'create table %1$I.users (id bigint primary key default %1$I.next_id(), name text);'
      'insert into %1$I.users (name) select ''user '' || n from generate_series(1, 100) n;'
      'create table %1$I.alembic_version (version_num varchar(32) primary key);'
      'insert into %1$I.alembic_version values (''0001'')', schema);
    for kind in 1..3 loop
      execute format(
        'create table %1$I.photos_%2$s (id bigint primary key default %1$I.next_id(), '
        'user_id bigint references %1$I.users);'
        'insert into %1$I.photos_%2$s (user_id) select id from %1$I.users', schema, kind);
    end loop;
    execute format('grant usage on schema %1$I to reader', schema);
    execute format('grant select on all tables in schema %1$I to reader', schema);
  end loop;
end
$$
"""


def run(rounds: int) -> Section:
    """Measures whole examinations with all checks."""
    with _cluster() as catalog:

        def examine() -> float:
            return seconds(lambda: _examine(catalog))

        measures = interleaved({"shardids doctor": examine}, rounds=rounds, unit="s")
        checks = len(doctor.CHECKS)
    return Section(
        title=f"An examination of {SHARDS:,} shards on two nodes",
        conditions=f"Two servers on one machine, fsync off, {TABLES} tables of {ROWS} rows and a role in"
        f" every shard, {checks} checks, {rounds} rounds. Half a second of it is the wait between the two"
        " looks at ticks.",
        measures=tuple(measures.values()),
        ratios=(figure("shardids doctor, s", measures["shardids doctor"].median, at_most=MOST_SECONDS),),
    )


@contextmanager
def _cluster() -> Iterator[Catalog]:
    with temporary_servers(2, settings={"max_locks_per_transaction": "1024"}) as servers:
        catalog = Catalog(devcluster.found(servers, SHARDS))
        try:
            for server in servers:
                with psycopg.connect(server.url(), autocommit=True) as connection:
                    connection.execute(_SHARD)
            yield catalog
        finally:
            catalog.close()


def _examine(catalog: Catalog) -> None:
    report = doctor.examine(catalog)
    if report.findings:
        raise RuntimeError(f"the cluster is not well: {report.findings[0].what}")
