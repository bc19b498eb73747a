"""An application with migrations, to try ``shardids migrate`` on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest
from psycopg import sql
from sqlalchemy.engine import URL

import shardids.migrate
from shardids.catalog.nodes import Nodes
from shardids.catalog.objects import by_shard, differences, read_objects
from shardids.cli import app
from shardids.migrate.environment import Environment
from shardids.migrate.migration import Migration
from tests.conftest import dsn
from tests.support.clusters import COMMAND, catalog_at, connected, environment

ENV = "from shardids.migrate import run_environment\n\nrun_environment()\n"
REVISION = '''\
"""{message}"""

import sqlalchemy as sa
from alembic import context, op
from shardids.migrate import key_column

revision = {revision!r}
down_revision = {down!r}
{more}

def upgrade() -> None:
{up}


def downgrade() -> None:
{downgrade}
'''


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a command ended with."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class App:
    """A folder of migrations, and a cluster of 8 shards: 0-3 on node a, 4-7 on node b."""

    def __init__(self, folder: Path, url: URL, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.url = url
        self._capsys = capsys
        (folder / "versions").mkdir(parents=True)
        (folder / "env.py").write_text(ENV, encoding="utf-8")
        template = Path(shardids.migrate.__file__).parent / "template" / "script.py.mako"
        (folder / "script.py.mako").write_bytes(template.read_bytes())

    def add(
        self,
        revision: str,
        up: str,
        downgrade: str = "pass",
        *,
        after: str | tuple[str, ...] | None = None,
        more: str = "",
    ) -> None:
        """Writes a revision with these bodies."""
        text = REVISION.format(
            message=f"do {revision}",
            revision=revision,
            down=after,
            more=more,
            up=indent(dedent(up).strip(), "    "),
            downgrade=indent(dedent(downgrade).strip(), "    "),
        )
        (self.folder / "versions" / f"{revision}.py").write_text(text, encoding="utf-8")

    def add_two(self) -> None:
        """A first revision with two tables, and a second that adds to one."""
        self.add(
            "one",
            """
            op.create_table("users", key_column(), sa.Column("name", sa.Text, nullable=False))
            user_id = sa.Column("user_id", sa.BigInteger, sa.ForeignKey("users.id"))
            op.create_table("photos", key_column(), user_id)
            """,
            'op.drop_table("photos"); op.drop_table("users")',
        )
        self.add(
            "two",
            """
            op.add_column("photos", sa.Column("likes", sa.Integer, server_default="0", nullable=False))
            op.execute("create index photos_likes on photos (likes) where likes > 0")
            """,
            'op.drop_column("photos", "likes")',
            after="one",
        )

    def __call__(self, *words: str) -> Ran:
        """Runs ``shardids migrate …`` in this process."""
        return self.command("migrate", *words)

    def command(self, *words: str) -> Ran:
        """Runs ``shardids …`` in this process."""
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            app([*words], prog_name="shardids")
        said = self._capsys.readouterr()
        return Ran(code=int(stopped.value.code or 0), out=said.out, err=said.err)

    def up(self, *words: str) -> dict[int, dict[str, Any]]:
        """``up --json``, which is to succeed: the rows by shard."""
        ran = self("up", "--json", *words)
        assert ran.code == 0, ran
        return {row["shard"]: row for row in ran.json["shards"]}

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Starts ``shardids migrate …`` as a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-c", COMMAND, "migrate", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(SHARDIDS_CATALOG=dsn(self.url), SHARDIDS_MIGRATIONS=str(self.folder)),
        )

    @contextmanager
    def migration(self) -> Iterator[Migration]:
        """The migrations and the cluster, closed afterwards."""
        with catalog_at(self.url) as catalog, Migration(catalog, Environment.at(self.folder)) as migration:
            yield migration

    def revisions(self) -> dict[int, tuple[str, ...] | None]:
        """What each shard's version table says."""
        with self.migration() as migration:
            state = migration.state(migration.choose())
        return {shard: position.heads for shard, position in sorted(state.positions.items())}

    def descriptions(self) -> dict[int, list[str]]:
        """What is in each shard's schema, in the same words for all."""
        found: dict[int, list[str]] = {}
        with catalog_at(self.url) as catalog:
            placement = catalog.placement()
            with Nodes(placement.nodes, catalog.url) as nodes:
                for name, shards in placement.by_node(placement.node_of).items():
                    with nodes[name].connect() as connection:
                        definitions = by_shard(read_objects(connection, shards), shards)
                    found |= {shard: differences({}, definitions[shard]) for shard in shards}
        return found

    def ask(self, shard: int, query: str, *, catalog: Any = None) -> list[tuple[Any, ...]]:
        """Runs a query on a shard's node, in its schema."""
        if catalog is None:
            with catalog_at(self.url) as opened:
                return self.ask(shard, query, catalog=opened)
        with connected(self.node_url(shard, catalog)) as connection:
            connection.execute(sql.SQL("set search_path = {}").format(sql.Identifier(f"shard_{shard:04d}")))
            cursor = connection.execute(query.encode())
            return cursor.fetchall() if cursor.description else []

    def node_url(self, shard: int, catalog: Any) -> URL:
        """The URL of the node that holds a shard, with the password."""
        from shardids.pg.urls import parse_url, with_password_of

        return with_password_of(parse_url(catalog.node_of(shard).url), self.url)
