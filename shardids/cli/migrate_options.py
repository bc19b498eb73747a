"""The options that the commands of ``shardids migrate`` share, and what reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from shardids.catalog.notation import parse_shards
from shardids.cli.common import opened
from shardids.migrate.environment import Environment
from shardids.migrate.migration import Migration

DirOption = Annotated[
    Path,
    typer.Option(
        "--dir", envvar="SHARDIDS_MIGRATIONS", metavar="DIR", help="The folder with env.py and versions/."
    ),
]
ShardsOption = Annotated[str | None, typer.Option(help="Only these: numbers and ranges, 0-31,40.")]
NodesOption = Annotated[str | None, typer.Option(help="Only shards on these nodes: a,b.")]
FOLDER = Path("migrations")
CanaryOption = Annotated[
    int, typer.Option(min=0, help="Migrate N shards first, one at a time; if one fails, begin no others.")
]
JobsOption = Annotated[int, typer.Option(min=1, max=64, help="Migrate N shards at once on each node.")]
LockTimeoutOption = Annotated[str, typer.Option(help="Longest wait for a lock before a retry: 2s, 500ms.")]
StatementTimeoutOption = Annotated[str, typer.Option(help="Longest time for a statement; 0 means no limit.")]
RetriesOption = Annotated[int, typer.Option(min=0, help="Retries after a lock timeout or a lost connection.")]
ContinueOption = Annotated[
    bool,
    typer.Option(
        "--continue-on-error/--stop",
        help="After a failure, continue with the other shards, or begin no more.",
    ),
]
ShowSqlOption = Annotated[
    bool, typer.Option("--show-sql", help="Print the SQL that will run, once for each starting point.")
]


@contextmanager
def migration_of(catalog: str, folder: Path) -> Iterator[Migration]:
    """Opens the cluster and the environment, and closes them."""
    environment = Environment.at(folder)
    with opened(catalog) as there, Migration(there, environment) as migration:
        yield migration


def chosen(migration: Migration, shards: str | None, nodes: str | None) -> list[int]:
    """Returns the shards that ``--shards`` and ``--nodes`` choose."""
    count = migration.catalog.describe().shard_count if shards is not None else 0
    numbers = None if shards in (None, "all") else parse_shards(str(shards), count)
    return migration.choose(numbers, None if nodes is None else [name.strip() for name in nodes.split(",")])
