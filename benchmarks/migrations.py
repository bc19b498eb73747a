"""Migrating 1,000 shards on two nodes, against the bare DDL in psql and a process of Alembic a shard."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from benchmarks.provisioning import run_psql
from benchmarks.report import Measure, Section, interleaved, ratio, seconds
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import schema_name
from shardids.dev.embedded import EmbeddedServer, temporary_servers
from shardids.ids.layout import DEFAULT
from shardids.install import provision
from shardids.migrate.environment import Environment
from shardids.migrate.migration import Migration
from shardids.migrate.runner import Observer, RunSettings, one_run

SHARDS = 1000
MANY_SHARDS = 4096
SAMPLE = 10
"""Shards on which a process of Alembic each is measured; its figure is of all, extrapolated."""

ENV = "from shardids.migrate import run_environment\n\nrun_environment()\n"
PLAIN_ENV = """\
import sqlalchemy as sa
from alembic import context

arguments = context.get_x_argument(as_dictionary=True)
engine = sa.create_engine(arguments["url"], connect_args={"options": "-c search_path=" + arguments["schema"]})
with engine.connect() as connection:
    context.configure(connection=connection)
    with context.begin_transaction():
        context.run_migrations()
"""
REVISIONS = {
    "one": """\
import sqlalchemy as sa
from alembic import op

revision, down_revision = "one", None


def upgrade():
    op.create_table(
        "users",
        sa.Column("id", sa.BigInteger, primary_key=True, server_default=sa.text("next_id()")),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("born", sa.Date),
    )
    op.create_table(
        "photos",
        sa.Column("id", sa.BigInteger, primary_key=True, server_default=sa.text("next_id()")),
        sa.Column("user_id", sa.BigInteger, sa.ForeignKey("users.id"), nullable=False),
        sa.Column("title", sa.Text),
    )


def downgrade():
    op.drop_table("photos")
    op.drop_table("users")
""",
    "two": """\
import sqlalchemy as sa
from alembic import op

revision, down_revision = "two", "one"


def upgrade():
    op.add_column("photos", sa.Column("likes", sa.Integer, server_default="0", nullable=False))
    op.create_index("photos_user_id", "photos", ["user_id"])


def downgrade():
    op.drop_index("photos_user_id")
    op.drop_column("photos", "likes")
""",
}
SECOND = Measure(name="1 s", unit="s", median=1, lowest=1, highest=1)
TWO_SECONDS = Measure(name="2 s", unit="s", median=2, lowest=2, highest=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A cluster on two servers, and the same revisions in two folders: shardids' and plain Alembic's."""

    servers: Sequence[EmbeddedServer]
    catalog: Catalog
    folder: Path

    def migration(self) -> Migration:
        """Returns the cluster with the revisions."""
        return Migration(self.catalog, Environment.at(self.folder / "ours"))

    def command(self, *words: str) -> float:
        """Returns how long a command takes as a separate process."""
        return seconds(lambda: self._command(*words))

    def _command(self, *words: str) -> None:
        subprocess.run(
            [sys.executable, "-c", "from shardids.cli import app; app()", "migrate", *words],
            env=os.environ
            | {
                "SHARDIDS_CATALOG": self.servers[0].url(),
                "SHARDIDS_MIGRATIONS": str(self.folder / "ours"),
                "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
            },
            check=True,
            stdout=subprocess.DEVNULL,
        )

    def run(self) -> None:
        """Does what ``migrate up`` does, in this process."""
        with one_run(self.catalog, "benchmark"), self.migration() as migration:
            prepared = migration.prepare("head", "up", migration.choose())
            report = migration.run(prepared, RunSettings(), Observer(), Event())
        if not report.succeeded:
            raise RuntimeError("the migration failed")

    def up(self) -> float:
        """Measures a run in this process on shards without tables."""
        self.reset()
        return seconds(self.run)

    def whole_command(self) -> float:
        """Measures ``migrate up`` on shards without tables."""
        self.reset()
        return self.command("up")

    def nothing_to_do(self) -> float:
        """Measures ``migrate up`` on shards that are up to date already."""
        return self.command("up")

    def psql(self) -> float:
        """Runs the same statements by psql: one transaction per shard, one connection per node."""
        self.reset()
        migration = self.migration()
        prepared = migration.prepare("head", "up", migration.choose(), canaries=0)
        (compiled,) = prepared.compiled()
        files = []
        for node in "ab":
            files.append(self.folder / f"{node}.sql")
            with files[-1].open("w", encoding="utf-8") as script:
                for shard in prepared.plan.queues[node]:
                    schema = schema_name("shard_", shard.shard)
                    script.write(f"begin;\nset local search_path = {schema};\n")
                    script.write(f"{compiled.sql}\ncommit;\n")
        return seconds(lambda: run_psql(self.servers, files))

    def alembic(self) -> float:
        """Runs a process of Alembic for each shard of a sample, and extrapolates to all shards."""
        self.reset()
        migration = self.migration()
        words = [sys.executable, "-m", "alembic", "-c", str(self.folder / "alembic.ini")]

        def run() -> None:
            for shard in migration.choose()[:SAMPLE]:
                url = migration.placement.locate(shard).url.replace("postgresql:", "postgresql+psycopg:")
                schema = schema_name("shard_", shard)
                subprocess.run(
                    [*words, "-x", f"url={url}", "-x", f"schema={schema}", "upgrade", "head"], check=True
                )

        return seconds(run) * SHARDS / SAMPLE

    def reset(self) -> None:
        """Drops all tables, including the version tables."""
        for server, node in zip(self.servers, "ab", strict=True):
            script = self.folder / f"reset-{node}.sql"
            with script.open("w", encoding="utf-8") as file:
                file.write("set client_min_messages = warning;\n")
                for shard, name in self.catalog.placement().node_of.items():
                    if name == node:
                        schema = schema_name("shard_", shard)
                        tables = ", ".join(
                            f"{schema}.{table}" for table in ("photos", "users", "alembic_version")
                        )
                        file.write(f"drop table if exists {tables};\n")
            run_psql([server], [script])


def run(rounds: int) -> Section:
    """Measures all ways on the same servers, round after round."""
    with two_nodes_with_shards(SHARDS) as bench:
        cases = {
            "migrate up, the run": bench.up,
            "migrate up, whole command": bench.whole_command,
            "migrate up, nothing to do": bench.nothing_to_do,
            "psql": bench.psql,
        }
        measures = interleaved(cases, rounds=rounds, unit="s")
        measures |= interleaved({"alembic, a process a shard": bench.alembic}, rounds=1, unit="s")
    with two_nodes_with_shards(MANY_SHARDS) as bench:
        bench.run()
        measures |= interleaved(
            {"migrate status, 4,096 shards": lambda: bench.command("status")}, rounds=rounds, unit="s"
        )
    command = measures["migrate up, whole command"]
    return Section(
        title=f"Migrating {SHARDS:,} shards on two nodes",
        conditions=f"Two servers on one machine, fsync off, {rounds} rounds on the same servers. Two"
        " revisions: two tables, a column, an index. A whole command is a process, whose start is counted."
        " psql: the same statements from a file, version tables included, one connection a node and one"
        f" transaction a shard. Alembic: extrapolated from {SAMPLE} shards.",
        measures=tuple(measures.values()),
        ratios=(
            ratio(measures["migrate up, the run"], measures["psql"], at_most=1.15),
            ratio(command, measures["psql"]),
            ratio(command, measures["alembic, a process a shard"], at_most=1 / 30),
            ratio(measures["migrate up, nothing to do"], SECOND, at_most=1),
            ratio(measures["migrate status, 4,096 shards"], TWO_SECONDS, at_most=1),
        ),
    )


@contextmanager
def two_nodes_with_shards(shard_count: int) -> Iterator[Bench]:
    """Yields a cluster of two servers whose shards have no tables."""
    with temporary_servers(2) as servers, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, env in (("ours", ENV), ("plain", PLAIN_ENV)):
            (folder / kind / "versions").mkdir(parents=True)
            (folder / kind / "env.py").write_text(env, encoding="utf-8")
            for revision, text in REVISIONS.items():
                (folder / kind / "versions" / f"{revision}.py").write_text(text, encoding="utf-8")
        (folder / "alembic.ini").write_text(
            f"[alembic]\nscript_location = {folder / 'plain'}\n", encoding="utf-8"
        )
        catalog = Catalog(servers[0].url())
        try:
            provision.init(catalog, DEFAULT, shard_count)
            for node, server in zip("ab", servers, strict=True):
                provision.add_node(catalog, node, server.url())
            provision.create_shards(catalog, range(shard_count))
            yield Bench(servers=servers, catalog=catalog, folder=folder)
        finally:
            catalog.close()
