"""What each version installs: the dump ``VERSION/database.sql``, which a test brings to the present version.

Until a version is released its dump follows the code: ``python -m tests.releases VERSION`` writes it. With
``--release``, once, the version is frozen: ``VERSION/SHA256SUMS`` holds the sums of the dump and of all SQL
files, none of which may change from then on.
"""

from __future__ import annotations

import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Final

import psycopg
from alembic import command
from sqlalchemy.engine import URL

from shardids.ids.layout import DEFAULT
from shardids.migrate.install import trees
from shardids.migrate.install.trees import Tree
from shardids.pg.connections import open_engine
from shardids.pg.embedded import find_binaries, temporary_server
from shardids.pg.sqlfiles import data_folder
from shardids.pg.urls import parse_url

HERE: Final = Path(__file__).parent
REVISIONS: Final[dict[str, dict[Tree, str]]] = {
    "0.1": {"catalog": "catalog_0001", "node": "node_0001", "shard": "shard_0001"},
}
"""The newest revision of each tree in a version."""
SHARDS: Final = 2
_SETTINGS: Final = trees.layout_settings(DEFAULT, "shard_") | {
    "cluster": "00000000-0000-4000-8000-000000000001",
    "node": "a",
    "shard_count": str(SHARDS),
}
_NOT_FOR_ALL: Final = ("\\", "SET transaction_timeout")
"""Lines of psql, or of servers newer than the oldest supported one."""
_SUMS: Final = "SHA256SUMS"


def install_version(version: str, url: str | URL) -> None:
    """Installs catalog, node and shards in one empty database, up to the revisions of a version."""
    engine = open_engine(parse_url(url), what="the server")
    try:
        for tree, revision in REVISIONS[version].items():
            for shard in range(SHARDS if tree == "shard" else 1):
                config = trees.tree_config(tree)
                settings = {"shard": str(shard)} if tree == "shard" else _SETTINGS
                with engine.begin() as connection:
                    config.attributes.update(connection=connection, settings=settings)
                    command.upgrade(config, revision)
    finally:
        engine.dispose()


def write_dump(version: str) -> None:
    """Writes the dump of a version that is not released.

    Raises:
        SystemExit: it is released.
    """
    if is_released(version):
        raise SystemExit(f"{version} is released, so its dump is frozen: a change needs a revision")
    with temporary_server() as server:
        install_version(version, server.url())
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


def is_released(version: str, folder: Path = HERE) -> bool:
    """Whether a version is frozen."""
    return (folder / version / _SUMS).exists()


def release(version: str, folder: Path = HERE, sql: Path | None = None) -> None:
    """Freezes a version: from now on neither its dump nor the SQL files that exist now may change."""
    files = sorted((sql or data_folder("sql")).rglob("*.sql"))
    lines = [f"{_sum_of(folder / version / 'database.sql')}  database.sql"]
    lines += [f"{_sum_of(path)}  {path.relative_to(sql or data_folder('sql'))}" for path in files]
    (folder / version / _SUMS).write_text("\n".join(lines) + "\n", encoding="utf-8")


def changed_since_release(version: str, folder: Path = HERE, sql: Path | None = None) -> list[str]:
    """Returns the files of a released version that were changed or removed since; none before its release."""
    if not is_released(version, folder):
        return []
    changed = []
    for line in (folder / version / _SUMS).read_text(encoding="utf-8").splitlines():
        expected, name = line.split("  ", 1)
        path = (folder / version if name == "database.sql" else sql or data_folder("sql")) / name
        if not path.is_file() or _sum_of(path) != expected:
            changed.append(name)
    return changed


def _sum_of(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()
