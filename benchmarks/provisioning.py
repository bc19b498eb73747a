"""Making 64, 1,024 and 4,096 shards on two nodes, beside the same statements in psql."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.report import Section, figure, interleaved, ratio, seconds
from shardids.catalog.rows import Catalog
from shardids.ids.layout import DEFAULT
from shardids.migrate.install import provision, trees
from shardids.pg.embedded import EmbeddedServer, find_binaries, temporary_servers

FEW, SHARDS, MANY = 64, 1024, 4096
LONGEST_S = 15.0


def run(rounds: int) -> Section:
    """Measure all sizes, each round on new servers."""
    cases = {
        f"{FEW} shards": lambda: _with_shardids(FEW),
        f"{SHARDS:,} shards": lambda: _with_shardids(SHARDS),
        f"{MANY:,} shards": lambda: _with_shardids(MANY),
        f"psql, {SHARDS:,} shards": _with_psql,
    }
    measures = interleaved(cases, rounds=rounds, unit="s")
    few, some, many, psql = measures.values()
    return Section(
        title="Provisioning shards on two nodes",
        conditions=f"Two servers on one machine, fsync off, {rounds} rounds, each on new servers."
        " psql: the same statements from a file, one connection and one transaction per shard.",
        measures=tuple(measures.values()),
        ratios=(
            ratio(some, psql, at_most=1.5),
            figure(f"{MANY:,} shards, s", many.median, at_most=LONGEST_S),
            figure(
                f"a shard of {MANY:,} / a shard of {SHARDS:,}",
                (many.median - few.median) / (MANY - FEW) / ((some.median - few.median) / (SHARDS - FEW)),
                at_most=1.25,
            ),
        ),
    )


@contextmanager
def _two_nodes() -> Iterator[tuple[list[EmbeddedServer], Catalog]]:
    with temporary_servers(2) as servers:
        catalog = Catalog(servers[0].url())
        try:
            provision.init(catalog, DEFAULT, MANY)
            for name, server in zip("ab", servers, strict=True):
                provision.add_node(catalog, name, server.url())
            yield servers, catalog
        finally:
            catalog.close()


def _with_shardids(count: int) -> float:
    with _two_nodes() as (_, catalog):
        return seconds(lambda: provision.create_shards(catalog, range(count)))


def _with_psql() -> float:
    with _two_nodes() as (servers, _), tempfile.TemporaryDirectory() as folder:
        half = SHARDS // 2
        files = [
            _script(Path(folder) / f"{number}.sql", range(number * half, (number + 1) * half))
            for number in range(2)
        ]
        return seconds(lambda: run_psql(servers, files))


def _script(path: Path, shards: range) -> Path:
    with path.open("w", encoding="utf-8") as script:
        for shard in shards:
            script.write(
                f"begin;\nselect shardids.enter_shard({shard});\n"
                f"select set_config('search_path', shardids.schema_of({shard}), true);\n"
                f"{trees.shard_sql()}\ncommit;\n"
            )
    return path


def run_psql(servers: Sequence[EmbeddedServer], files: Sequence[Path]) -> None:
    """Run a file on each server, all at once."""
    psql = str(find_binaries() / "psql")
    running = [
        subprocess.Popen(
            [psql, "-X", "-q", "-v", "ON_ERROR_STOP=1", "-o", "/dev/null", "-f", str(file), server.url()]
        )
        for server, file in zip(servers, files, strict=True)
    ]
    for process in running:
        if process.wait() != 0:
            raise RuntimeError("psql failed")
