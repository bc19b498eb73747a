"""Numbers for people: rows a second of one tenant and of 64, without gaps and without waiting, by pgbench."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from benchmarks.oltp import pgbench
from benchmarks.report import Section, Table, Timed, figure, interleaved
from benchmarks.schemes import version_of
from shardids.pg.embedded import temporary_server
from shardids.testing.devcluster import create_cluster

CLIENTS = 16
SLICE_S = 2
OLD_SNAPSHOT_S = 10
TENANTS = (1, 64)
NONE, GAPLESS, QUICK = "no number", "gapless", "quick"
_TABLES = """
create table shard_0000.rows (
  id bigint primary key default shard_0000.next_id(), tenant text not null, number text);
create table shard_0000.gapless (like shard_0000.rows including all);
create table shard_0000.quick (like shard_0000.rows including all);
select shardids.number_rows('shard_0000.gapless', 'number', 'tenant', 'gapless', 'day', padding => 9);
select shardids.number_rows(
  'shard_0000.quick', 'number', 'tenant', 'quick', 'day', padding => 9, lanes => 32)"""
TABLES = {NONE: "rows", GAPLESS: "gapless", QUICK: "quick"}


def run(rounds: int) -> Section:
    """Measure a row and its COMMIT; ``quick`` again while an old snapshot is open."""
    with _server() as (url, monitor), tempfile.TemporaryDirectory() as folder:
        m = interleaved(
            {
                f"{scheme}, {tenants} tenant{'s' * (tenants > 1)}": _loaded(
                    url, Path(folder), scheme, tenants
                )
                for tenants in TENANTS
                for scheme in TABLES
            },
            rounds=rounds,
            unit="rows/s",
        )
        slowed = {scheme: _beside_an_old_snapshot(url, Path(folder), scheme) for scheme in (GAPLESS, QUICK)}
        version = version_of(monitor)
    one = f"{QUICK}, 1 tenant"
    return Section(
        title="Numbers for people",
        conditions=f"PostgreSQL {version}, fsync on, pgbench, {CLIENTS} clients, prepared statements; a"
        f" row (id, tenant, number) and its COMMIT, in one shard; {rounds} rounds of {SLICE_S} s.",
        measures=tuple(m.values()),
        table=Table(
            columns=(f"rows/s, 1 tenant, after {OLD_SNAPSHOT_S} s beside a snapshot that stays open",),
            rows={scheme: (rate,) for scheme, rate in slowed.items()},
        ),
        ratios=(
            figure("quick, rows/s of one tenant", m[one].median, at_least=3000),
            figure("quick / gapless, one tenant", m[one].median / m[f"{GAPLESS}, 1 tenant"].median),
            figure("quick / no number, one tenant", m[one].median / m[f"{NONE}, 1 tenant"].median),
            *(
                figure(
                    f"{scheme} beside an open snapshot / without",
                    slowed[scheme] / m[f"{scheme}, 1 tenant"].median,
                    # A gapless counter is one row: a draw reads all of its versions that a snapshot keeps.
                    at_least=0.5 if scheme == QUICK else None,
                )
                for scheme in (GAPLESS, QUICK)
            ),
            figure(
                "gapless / no number, 64 tenants",
                m[f"{GAPLESS}, 64 tenants"].median / m[f"{NONE}, 64 tenants"].median,
            ),
        ),
    )


@contextmanager
def _server() -> Iterator[tuple[str, psycopg.Connection]]:
    with temporary_server(settings={"fsync": "on", "max_wal_size": "8GB"}) as server:
        create_cluster([server], 1)
        with psycopg.connect(server.url(), autocommit=True) as monitor:
            monitor.execute(_TABLES)
            yield server.url(), monitor


def _loaded(url: str, folder: Path, scheme: str, tenants: int) -> Timed:
    script = folder / f"{scheme}-{tenants}.sql"
    script.write_text(
        f"\\set t random(1, {tenants})\n"
        f"insert into shard_0000.{TABLES[scheme]} (tenant) values (:t::text || '/{tenants}');\n",
        encoding="utf-8",
    )
    command = [pgbench(), "--no-vacuum", "--protocol=prepared", f"--client={CLIENTS}", f"--time={SLICE_S}"]

    def rows_per_s() -> float:
        ran = subprocess.run(
            [*command, f"--file={script}", url], check=True, capture_output=True, text=True, timeout=120
        )
        rate = re.search(r"^tps = ([\d.]+) \(without", ran.stdout, re.MULTILINE)
        if rate is None:
            raise RuntimeError(f"pgbench says no rate: {ran.stdout}")
        return float(rate[1])

    return rows_per_s


def _beside_an_old_snapshot(url: str, folder: Path, scheme: str) -> float:
    rows_per_s = _loaded(url, folder, scheme, 1)
    with psycopg.connect(url) as old:
        old.execute("set transaction isolation level repeatable read")
        old.execute("select 1")
        until = time.monotonic() + OLD_SNAPSHOT_S
        while time.monotonic() < until:
            rate = rows_per_s()
        return rate
