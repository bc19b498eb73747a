"""What the commands of ``shardids migrate`` share: their options, and how those are read."""

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
        "--dir", envvar="SHARDIDS_MIGRATIONS", metavar="DIR", help="The folder of env.py and versions/."
    ),
]
ShardsOption = Annotated[str | None, typer.Option(help="Only these: numbers and ranges, 0-31,40.")]
NodesOption = Annotated[str | None, typer.Option(help="Only shards on these nodes: a,b.")]
FOLDER = Path("migrations")
CanaryOption = Annotated[
    int, typer.Option(min=0, help="Shards that run first, alone; if one fails, none follows.")
]
JobsOption = Annotated[int, typer.Option(min=1, max=64, help="Shards at once on each node.")]
LockTimeoutOption = Annotated[
    str, typer.Option(help="Longest wait for a lock, before another attempt: 2s, 500ms.")
]
StatementTimeoutOption = Annotated[str, typer.Option(help="Longest time for a statement; 0 is for ever.")]
RetriesOption = Annotated[
    int, typer.Option(min=0, help="Further attempts after a lock timeout or a lost connection.")
]
GoOnOption = Annotated[
    bool,
    typer.Option(
        "--continue-on-error/--stop", help="After a failure, go on with other shards, or begin no more."
    ),
]
ShowSqlOption = Annotated[
    bool, typer.Option("--show-sql", help="Print the SQL that is run, once for each starting point.")
]


@contextmanager
def migration_of(catalog: str, folder: Path) -> Iterator[Migration]:
    """The cluster and the environment, closed afterwards."""
    environment = Environment.at(folder)
    with opened(catalog) as there:
        yield Migration(there, environment)


def chosen(migration: Migration, shards: str | None, nodes: str | None) -> list[int]:
    """The shards of the options ``--shards`` and ``--nodes``."""
    count = migration.catalog.describe().shard_count if shards is not None else 0
    numbers = None if shards in (None, "all") else parse_shards(str(shards), count)
    return migration.choose(numbers, None if nodes is None else [name.strip() for name in nodes.split(",")])
