"""``python -m tests.releases VERSION``: dumps a database, as this code makes it up to a release.

To be run once for a version, with the code that is released, and then never again.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psycopg
from alembic import command

from shardids.catalog.connections import open_engine, parse_url
from shardids.dev.embedded import find_binaries, temporary_server
from shardids.ids.layout import DEFAULT
from shardids.install import trees
from shardids.install.trees import Tree

HERE = Path(__file__).parent
REVISIONS: dict[str, dict[Tree, str]] = {
    "0.1": {"catalog": "catalog_0001", "node": "node_0001", "shard": "shard_0001"},
}
SETTINGS = trees.layout_settings(DEFAULT, "shard_") | {
    "cluster": "00000000-0000-4000-8000-000000000001",
    "node": "a",
    "shard_count": "2",
}
# Of psql, or of servers newer than the oldest that is supported.
_NOT_FOR_ALL = ("\\", "SET transaction_timeout")


def main(version: str) -> None:
    """Writes the dump of a version."""
    with temporary_server() as server:
        engine = open_engine(parse_url(server.url()), what="the server")
        for tree, revision in REVISIONS[version].items():
            for shard in range(2 if tree == "shard" else 1):
                config = trees.tree_config(tree)
                settings = {"shard": str(shard)} if tree == "shard" else SETTINGS
                with engine.begin() as connection:
                    config.attributes.update(connection=connection, settings=settings)
                    command.upgrade(config, revision)
        engine.dispose()
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute("insert into shardids_catalog.node values ('a', 'postgresql://somewhere')")
            connection.execute(
                "insert into shardids_catalog.placement values (0, 'a', 'active'), (1, 'a', 'active')"
            )
            connection.execute(
                "create table shard_0000.kept (id bigint primary key default shard_0000.next_id())"
            )
            connection.execute("insert into shard_0000.kept select from generate_series(1, 3)")
        dump = subprocess.run(
            [str(find_binaries() / "pg_dump"), "--no-owner", "--inserts", server.url()],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    lines = [line for line in dump.splitlines() if not line.startswith(_NOT_FOR_ALL)]
    (HERE / version / "database.sql").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
