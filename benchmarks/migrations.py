"""Migrating shards on two nodes, against the bare DDL in psql and a process of Alembic a shard."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from benchmarks.provisioning import run_psql
from benchmarks.report import Measure, Ratio, Section, figure, interleaved, ratio, seconds
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import schema_name
from shardids.ids.layout import DEFAULT
from shardids.migrate.environment import Environment
from shardids.migrate.install import provision
from shardids.migrate.migration import Migration
from shardids.migrate.runner import Observer, RunSettings, one_run
from shardids.pg.embedded import EmbeddedServer, temporary_servers

SHARDS = 1000
MANY_SHARDS = 4096
COLUMN_SHARDS = (200, 1024)
"""Shards that get one column each, with fsync on."""
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
ADDED_COLUMN = """\
import sqlalchemy as sa
from alembic import op

revision, down_revision = "three", "two"


def upgrade():
    op.add_column("photos", sa.Column("rating", sa.Integer))


def downgrade():
    op.drop_column("photos", "rating")
"""
NOTHING_TO_DO_S = 0.65
"""Most seconds of a run with nothing to do; half of them are the start of Python with Alembic."""
SECOND = Measure(name="1 s", unit="s", median=1, lowest=1, highest=1)
TWO_SECONDS = Measure(name="2 s", unit="s", median=2, lowest=2, highest=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A cluster on two servers, and the same revisions in two folders: shardids' and plain Alembic's."""

    servers: Sequence[EmbeddedServer]
    catalog: Catalog
    folder: Path

    def migration(self) -> Migration:
        """Return the cluster with the revisions."""
        return Migration(self.catalog, Environment.at(self.folder / "ours"))

    def command(self, *words: str) -> float:
        """Return how long a command takes as a separate process."""
        return seconds(lambda: self._command(*words))

    def _command(self, *words: str) -> None:
        subprocess.run(
            [sys.executable, "-c", "from shardids.cli import app; app()", "migrate", *words],
            # A command that people run finds its bytecode.
            env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
            | {
                "SHARDIDS_CATALOG": self.servers[0].url(),
                "SHARDIDS_MIGRATIONS": str(self.folder / "ours"),
                "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
            },
            check=True,
            stdout=subprocess.DEVNULL,
        )

    def run(self) -> None:
        """Do what ``migrate up`` does, in this process."""
        with one_run(self.catalog, "benchmark") as leases, self.migration() as migration:
            prepared = migration.prepare("head", "up", migration.choose())
            report = migration.run(prepared, RunSettings(), Observer(), Event(), leases)
        if not report.succeeded:
            raise RuntimeError("the migration failed")

    def up(self) -> float:
        """Measure a run in this process on shards without tables."""
        self.reset()
        return seconds(self.run)

    def whole_command(self) -> float:
        """Measure ``migrate up`` on shards without tables."""
        self.reset()
        return self.command("up")

    def nothing_to_do(self) -> float:
        """Measure ``migrate up`` on shards that are up to date already."""
        return self.command("up")

    def psql(self) -> float:
        """Run the same statements by psql: one transaction per shard, one connection per node."""
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
        """Run a process of Alembic for each shard of a sample, and extrapolates to all shards."""
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

    def by_hand(self) -> float:
        """Add the column by psql, with the version rows: a transaction per shard, a connection per node."""
        self.without_column()
        files = self._files(
            "begin; set local search_path = {}; alter table photos add column rating integer;"
            " update alembic_version set version_num = 'three' where version_num = 'two'; commit;\n"
        )
        return seconds(lambda: run_psql(self.servers, files))

    def column(self) -> float:
        """Measure a run in this process that adds the column."""
        self.without_column()
        return seconds(self.run)

    def column_by_command(self) -> float:
        """Measure ``migrate up`` when it adds the column."""
        self.without_column()
        return self.command("up")

    def without_column(self) -> None:
        """Take the column back."""
        files = self._files(
            "begin; set local search_path = {}; alter table photos drop column if exists rating;"
            " update alembic_version set version_num = 'two'; commit;\n",
            before="set client_min_messages = warning;\n",
        )
        run_psql(self.servers, files)

    def _files(self, of_a_shard: str, before: str = "") -> list[Path]:
        node_of = self.catalog.placement().node_of
        files = []
        for node in "ab":
            files.append(self.folder / f"by-hand-{node}.sql")
            lines = [
                of_a_shard.format(schema_name("shard_", shard))
                for shard, name in node_of.items()
                if name == node
            ]
            files[-1].write_text(before + "".join(lines), encoding="utf-8")
        return files

    def reset(self) -> None:
        """Drop all tables, including the version tables."""
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
    """Measure all ways on the same servers, round after round."""
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
        " psql: the same statements from a file, version tables included, one connection per node and one"
        f" transaction a shard. Alembic: extrapolated from {SAMPLE} shards.",
        measures=tuple(measures.values()),
        ratios=(
            ratio(measures["migrate up, the run"], measures["psql"], at_most=1.25),
            ratio(command, measures["psql"]),
            ratio(command, measures["alembic, a process a shard"], at_most=1 / 30),
            ratio(measures["migrate up, nothing to do"], SECOND, at_most=1),
            ratio(measures["migrate status, 4,096 shards"], TWO_SECONDS, at_most=1),
        ),
    )


def add_column(rounds: int) -> Section:
    """Measure the least revision that there is, and none, with servers that write to the disk."""
    measures, ratios = dict[str, Measure](), list[Ratio]()
    for count in COLUMN_SHARDS:
        with two_nodes_with_shards(count, {"fsync": "on", "synchronous_commit": "on"}) as bench:
            bench.run()
            three = bench.folder / "ours" / "versions" / "three.py"
            three.write_text(ADDED_COLUMN, encoding="utf-8")
            names = {
                f"{what}, {count:,} shards": do
                for what, do in {
                    "psql": bench.by_hand,
                    "the run": bench.column,
                    "whole command": bench.column_by_command,
                    "nothing to do": bench.nothing_to_do,
                }.items()
            }
            found = interleaved(names, rounds=rounds, unit="s")
        by_hand, run_, command, nothing = found.values()
        measures |= found
        # Of few shards, most of the time is the start and the beginning of a run.
        ratios += [ratio(run_, by_hand, at_most=2 if count > 1000 else None), ratio(command, by_hand)]
        ratios.append(figure(f"nothing to do, {count:,} shards, s", nothing.median, at_most=NOTHING_TO_DO_S))
    return Section(
        title="Adding a column in 200 and 1,024 shards on two nodes",
        conditions=f"Two servers on one machine, fsync on, {rounds} rounds on the same servers. psql runs a"
        " file per node, both at the same time: five statements per shard, from begin to commit;"
        " one of them sets the version row. The run: in a process that has loaded everything. A whole"
        " command: with the start of its process.",
        measures=tuple(measures.values()),
        ratios=tuple(ratios),
    )


@contextmanager
def two_nodes_with_shards(shard_count: int, settings: Mapping[str, str] | None = None) -> Iterator[Bench]:
    """Yield a cluster of two servers whose shards have no tables."""
    with temporary_servers(2, settings=settings or {}) as servers, tempfile.TemporaryDirectory() as name:
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
