"""Examining 1,024 shards with tables, rows and roles, and up to 4,096 without, on two nodes."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg
from sqlalchemy import Engine, text

from benchmarks.report import Measure, Section, figure
from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog
from shardids.migrate import recording
from shardids.pg.embedded import temporary_servers
from shardids.tables.views import drop_query_node
from shardids.testing import devcluster
from shardids.watch import doctor

SHARDS = 1024
MOST_SECONDS = 5.0
SIZES = (64, 4096)
"""Numbers of shards that are measured without tables."""
MOST_SECONDS_OF_ALL = 3.0
TABLES = 20
ROWS = 20

_SHARD = f"""
do $$
declare
  schema text;
begin
  execute 'create role reader';
  for schema in select s.schema from shardids.shard s loop
    execute format(
      'create table %1$I.users (id bigint primary key default %1$I.next_id(), '
      'name text not null, age integer);'
      'insert into %1$I.users (name) select ''user '' || n from generate_series(1, {ROWS}) n;'
      'create table %1$I.alembic_version (version_num varchar(32) primary key);'
      'insert into %1$I.alembic_version values (''0001'')', schema);
    for kind in 2..{TABLES} loop
      execute format(
        'create table %1$I.photos_%2$s (id bigint primary key default %1$I.next_id(), '
        'user_id bigint not null references %1$I.users, title varchar(80), at timestamptz default now());'
        'create index photos_%2$s_user on %1$I.photos_%2$s (user_id);'
        'insert into %1$I.photos_%2$s (user_id) select id from %1$I.users', schema, kind);
    end loop;
    execute format('grant usage on schema %1$I to reader', schema);
    execute format('grant select on all tables in schema %1$I to reader', schema);
    commit;
  end loop;
end
$$
"""


def run(rounds: int) -> Section:
    """Measure whole examinations with all checks."""
    with _cluster(SHARDS, _SHARD) as catalog:
        section = measured(catalog, rounds)
    measures = list(section.measures)
    for shards in SIZES:
        with _cluster(shards) as catalog:
            measures.append(_measure(f"{shards:,} shards without tables", _walls(catalog, rounds)))
    most = measures[-1]
    return replace(
        section,
        measures=tuple(measures),
        ratios=(*section.ratios, figure(f"{most.name}, s", most.median, at_most=MOST_SECONDS_OF_ALL)),
    )


def _walls(catalog: Catalog, rounds: int) -> list[float]:
    """Return how long examinations take, without the first, which warms up."""
    walls = []
    for _ in range(rounds + 1):
        begun_s = time.perf_counter()
        _examine(catalog)
        walls.append(time.perf_counter() - begun_s)
    return walls[1:]


def measured(catalog: Catalog, rounds: int) -> Section:
    """Measure a cluster that is there: how long an examination takes, and the CPU time it needs."""
    with Nodes(catalog.nodes(), catalog.url) as nodes:
        postmasters = [_postmaster(engine) for engine in nodes.values()]
    walls, cpus = list[float](), list[float]()
    for round_ in range(rounds + 1):
        before = [_cpu_s(one) for one in postmasters]
        begun_s, own_s = time.perf_counter(), time.process_time()
        _examine(catalog)
        wall_s, own_s = time.perf_counter() - begun_s, time.process_time() - own_s
        busier_s = max(_cpu_s(one) - was for one, was in zip(postmasters, before, strict=True))
        if round_:  # the first one warms up
            walls.append(wall_s)
            cpus.append(busier_s + own_s)
    measures = (
        _measure("shardids doctor", walls),
        _measure("CPU of its process and of the busier node", cpus),
    )
    checks = len(doctor.CHECKS)
    return Section(
        title=f"An examination of {SHARDS:,} shards on two nodes",
        conditions=f"Two servers on one machine, fsync off, {TABLES} tables of {ROWS} rows and a role in"
        f" every shard, {checks} checks, {rounds} rounds. Half a second of it is the wait between the two"
        " looks at ticks. The CPU time is the least that it takes where nothing else runs.",
        measures=measures,
        ratios=tuple(figure(f"{one.name}, s", one.median, at_most=MOST_SECONDS) for one in measures),
    )


def _measure(name: str, figures: list[float]) -> Measure:
    median, lowest, highest = statistics.median(figures), min(figures), max(figures)
    return Measure(name=name, unit="s", median=median, lowest=lowest, highest=highest)


def _postmaster(engine: Engine) -> Path:
    with engine.connect() as connection:
        pid = str(connection.scalar(text("select pg_read_file('postmaster.pid')"))).split()[0]
    return Path(f"/proc/{pid}/stat")


def _cpu_s(postmaster: Path) -> float:
    """Return the CPU time of the sessions that have ended, in seconds."""
    user, system = postmaster.read_text(encoding="ascii").rpartition(")")[2].split()[13:15]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _cluster(shards: int, tables: str = "") -> Iterator[Catalog]:
    with temporary_servers(2, settings={"max_locks_per_transaction": "1024"}) as servers:
        catalog = Catalog(devcluster.create_cluster(servers, shards))
        try:
            # It would lack the tables.
            drop_query_node(catalog)
            for server in servers if tables else ():
                with psycopg.connect(server.url(), autocommit=True) as connection:
                    connection.execute(tables.encode())
            if tables:
                recording.accept(catalog, recording.plan_acceptance(catalog), "benchmark")
            yield catalog
        finally:
            catalog.close()


def _examine(catalog: Catalog) -> None:
    report = doctor.examine(catalog)
    if report.findings:
        raise RuntimeError(f"the cluster is not well: {report.findings[0].what}")
