"""``--dry-run``: each command that has it, without its change and then with it, on two servers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import typer.main
from sqlalchemy.engine import URL

import shardids.migrate
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import shard_for_key
from shardids.cli import app
from shardids.mover.journal import Journal
from shardids.pg.urls import parse_url
from shardids.testing import devcluster
from tests.conftest import dsn
from tests.support.clusters import catalog_at, command_here, connected, everything
from tests.support.migrations import ENV

TEMPLATE = Path(shardids.migrate.__file__).parent / "template/script.py.mako"
REVISION = """\
from alembic import op

revision, down_revision = "one", None

def upgrade():
    op.execute("create table photo (id bigint primary key default next_id(), name text not null unique)")

def downgrade():
    op.execute("drop table photo")
"""


def leaves(command: object, *path: str) -> Iterator[tuple[str, set[str]]]:
    for name in getattr(command, "commands", ()):
        yield from leaves(command.get_command(None, name), *path, name)  # type: ignore[attr-defined]  # a group
    if not hasattr(command, "commands"):
        yield " ".join(path), {option for one in command.params for option in one.opts}  # type: ignore[attr-defined]  # a command


OPTIONS = dict(leaves(typer.main.get_command(app)))


def without_times(text: str) -> str:
    return re.sub(r"-?\d+ ms", "", text)


@dataclass
class Story:
    """A cluster, and the commands that were tried on it."""

    folder: Path
    urls: dict[str, URL] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    _seen: dict[str, list[object]] = field(default_factory=dict)

    def run(self, *words: str) -> CompletedProcess[str]:
        catalog = {"SHARDIDS_CATALOG": dsn(self.urls["a"])} if "a" in self.urls else {}
        folder = self.folder / "migrations"
        migrations = {"SHARDIDS_MIGRATIONS": str(folder)} if folder.exists() else {}
        return command_here(*words, **catalog, **migrations)

    def both(self, text: str, *more: str, code: int = 0) -> None:
        """Runs a command without its change, then with it: the same refusal and exit code, or none."""
        words = [*text.split(), *more]
        path = next(name for name in OPTIONS if words[: len(name.split())] == name.split())
        self.tried.add(path)
        databases = [url for name, url in self.urls.items() if name in "ab" or dsn(url) in " ".join(words)]
        before = self._seen.get(str(databases)) or everything(*databases)
        dry = self.run(*words, "--dry-run")
        unchanged = everything(*databases) == before
        # A refusal is compared with what the next command finds.
        self._seen = {str(databases): before} if code else {}
        real = self.run(*words, *(["--yes"] if "--yes" in OPTIONS[path] and path != "node replace" else []))
        says = without_times(dry.stderr) == without_times(real.stderr) if code else dry.stdout + dry.stderr
        if not (unchanged and says and (dry.returncode, real.returncode) == (code, code)):
            self.problems.append(f"{text}: unchanged: {unchanged}\ndry run: {dry}\ncommand: {real}\n")

    def database(self, name: str, statements: str = "") -> str:
        self.execute("a", f"create database {name}")
        self.urls[name] = self.urls["a"].set(database=name)
        self.execute(name, statements)
        return dsn(self.urls[name])

    def execute(self, name: str, *statements: str) -> None:
        self._seen = {}
        with connected(self.urls[name]) as connection:
            for statement in statements:
                connection.execute(statement)

    @contextmanager
    def catalog(self) -> Iterator[Catalog]:
        with catalog_at(self.urls["a"]) as catalog:
            yield catalog

    def interrupt_a_move(self, shard: int, target: str) -> None:
        with self.catalog() as catalog, Journal.opened(catalog, shard) as journal:
            journal.enter(target, offline=False)


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Story]:
    story = Story(tmp_path)
    with ExitStack() as left:
        left.callback(lambda: devcluster.down(tmp_path / "dev", remove=True))
        yield story


@pytest.mark.long
def test_a_dry_run_is_the_command_up_to_its_change(story: Story) -> None:
    dev = ("--dir", str(story.folder / "dev"))
    story.both("dev down", *dev, code=1)
    story.both("dev up --nodes 2 --shards 4", *dev)
    for name, server in devcluster.servers_in(story.folder / "dev").items():
        story.urls[name] = parse_url(server.url())
    build(story)
    operate(story)
    tables(story)
    tenants(story)
    adopt(story)
    story.urls = {}
    story.both("dev down --remove", *dev)
    assert not story.problems, "\n".join(story.problems)
    assert story.tried == {name for name, options in OPTIONS.items() if "--dry-run" in options}


def build(story: Story) -> None:
    story.both("init --shards 4 --catalog", story.database("blank"))
    story.both("init --shards 8 --catalog", dsn(story.urls["blank"]), code=1)
    for node in "ab":
        story.execute(node, "create role app")
    story.both("grant app")
    story.both("grant nobody", code=1)
    story.both("grant app --query-node")
    story.both("upgrade")
    story.both("node add c --url", story.database("c"))
    story.both("node add c --url postgresql://127.0.0.1:1/none", code=1)
    story.both("node confirm-clock a")
    story.execute("a", "create publication everything for all tables")
    story.both("node accept-contract a")
    # It would be in the way of moves.
    story.execute("a", "drop publication everything")
    story.both("node accept-contract nonesuch", code=1)
    story.both("node replace nonesuch --url postgresql://127.0.0.1:1/none", code=1)
    story.both("node remove a", code=1)
    story.both("node remove c")
    story.both("shard create")
    story.both("shard create 9", code=2)
    story.both("region create eu --shards 0-1 --node a")
    story.both("region create us --shards 1-2", code=1)
    story.both("region assign eu b")
    story.both("region assign us b", code=2)
    story.both("region assign --none b")
    story.both("region drop eu")
    story.both("region drop eu", code=2)
    (story.folder / "migrations/versions").mkdir(parents=True)
    (story.folder / "migrations/env.py").write_text(ENV)
    (story.folder / "migrations/script.py.mako").write_text(TEMPLATE.read_text())
    (story.folder / "migrations/versions/one.py").write_text(REVISION)
    story.both("migrate up")
    story.both("migrate up two", code=2)
    story.both("shard accept-schema")
    story.both("shard accept-schema --like 9", code=1)
    story.both("migrate down")
    story.both("migrate stamp head")
    story.both("migrate stamp base")
    assert story.run("migrate", "up").returncode == 0


def operate(story: Story) -> None:
    story.both("query-node create --on b --store-password")
    story.both("query-node create", code=2)
    story.both("query-node refresh --store-password")
    story.both("query-node drop")
    story.both("query-node refresh", code=1)
    story.both("shard move 0 --to b")
    story.both("shard move 0 --to b", code=1)
    story.both("shard move 0 --resume", code=1)
    story.both("shard move 0 --abort", code=1)
    story.both("shard move --resume")
    story.both("shard move 0 --abort --verify", code=2)
    story.both("shard purge 0")
    story.interrupt_a_move(0, "a")
    story.both("rebalance", code=1)
    story.both("shard move 0 --to a", code=1)
    story.both("shard move 0 --resume")
    story.interrupt_a_move(0, "b")
    story.both("shard move --abort")
    story.both("shard move 0 --back")
    story.both("rebalance --drain a --margin 1", code=2)
    story.both("rebalance --drain nonesuch", code=1)
    story.both("shard pin 0")
    story.both("rebalance --drain b", code=1)
    story.both("shard unpin 0")
    story.both("shard unpin 0")
    story.both("shard pin 0 --node nonesuch", code=1)
    story.both("rebalance")
    with story.catalog() as catalog:
        home = catalog.node_of(0).name
    story.execute(home, "select shardids.fence(0)")
    story.both("shard activate 0")
    story.both("shard activate 9", code=2)
    other = "b" if home == "a" else "a"
    story.execute("a", f"update shardids_catalog.placement set node = '{other}' where shard = 0")
    story.both(f"shard place 0 --node {home}")
    story.both(f"shard place 0 --node {other}", code=1)
    story.both("shard reset-clock 0", code=2)
    story.both("transactions --resolve")
    story.both("restore-point noon")
    story.execute("b", "create table public.keyless (body text)")
    story.both("cdc create", code=1)
    story.execute("b", "drop table public.keyless")
    story.both("cdc create")
    story.both("cdc drop")


def tables(story: Story) -> None:
    rows = story.folder / "rows.csv"
    rows.write_text("name\nann\nbob\n")
    story.both("load --table photo --shard 1", str(rows))
    story.both("load --table nonesuch --shard 1", str(rows), code=2)
    story.both("lookup create photo.name")
    story.both("lookup backfill photo.name")
    story.both("lookup sweep photo.name")
    story.both("lookup drop photo.name")
    story.both("lookup drop photo.name", code=1)
    why = ("--reason", "a test")
    story.both("counter define order --per day")
    story.both("counter define order --per year", code=2)
    story.both("counter set ann order 5 --shard 1", *why)
    story.both("counter set ann order 3", *why, code=2)
    story.both("counter set ann order +3", *why)
    story.both("counter zone ann Europe/Berlin")
    story.both("counter zone ann Nowhere", code=2)
    story.execute(
        "a",
        "create schema if not exists shardids_ref",
        "create table shardids_ref.country (code text primary key)",
        "insert into shardids_ref.country values ('de')",
    )
    story.both("reference create country --writer a")
    story.both("reference create nonesuch", code=1)
    story.both("reference delete country fr", code=1)
    story.both("reference delete country de")
    story.both("reference move --to b")
    story.both("reference repair")
    story.both("reference drop country")
    story.both("reference drop country", code=1)
    masters = [
        f"{name}={story.database(name, 'create table t (id serial primary key)')}" for name in ("x", "y")
    ]
    story.both("multimaster", "--master", masters[0], "--master", masters[1])
    story.both("multimaster", "--master", masters[0], "--yes")
    story.both("multimaster", "--master", masters[0], "--leaving", masters[0], code=2)


def tenants(story: Story) -> None:
    with story.catalog() as catalog:
        home = shard_for_key("cat", 4)
        node = catalog.node_of(home).name
    story.execute(node, f"insert into shard_000{home}.photo (name) values ('cat')")
    there, quick = str((home + 1) % 4), ("--root", "photo.name", "--settle", "100ms")
    story.both("tenant move nobody --to-shard", there, *quick, code=1)
    story.both("tenant move cat --to-shard", there, *quick)
    story.both("tenant pin cat")
    story.both("tenant unpin cat")
    story.both("tenant sync")
    story.both("tenant move cat --back --settle 100ms")


def adopt(story: Story) -> None:
    source = story.database(
        "source", "create table users (id bigint primary key, name text); insert into users values (1, 'ann')"
    )
    plan = str(story.folder / "plan.toml")
    planned = story.run("adopt", "plan", source, "--root", "users", "--shards", "4", "-o", plan)
    assert planned.returncode == 0, planned
    story.both("adopt prepare --source", source, "--dir", str(story.folder), plan, code=2)
    story.both("adopt prepare --source", source, plan)
    story.both("adopt run --source", source, plan, code=2)
    story.both("adopt run --via", story.database("relay"), "--source", source, plan, code=1)
    for words in ("run --resume", "run --stop", "abort", "switch", "switch --keep-back", "back", "finish"):
        story.both(f"adopt {words}", code=1)
    story.both("adopt run --resume --trust nobody", code=2)
    story.both("adopt run", code=2)
    story.both("key adopt public.nonesuch --shard 1", code=2)
    story.both("key function public.nonesuch --shard 1", code=2)
