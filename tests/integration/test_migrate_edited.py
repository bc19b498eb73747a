"""A revision that is edited after some shards ran it is told, by hashes that are where the shards are."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path

import pytest
from alembic.migration import MigrationContext
from sqlalchemy import create_engine
from sqlalchemy.engine import URL
from sqlalchemy.pool import NullPool

from shardids.ids.layout import DEFAULT
from shardids.migrate.environment import Environment
from shardids.migrate.install import provision
from shardids.migrate.migration import Stamped
from shardids.pg.embedded import temporary_servers
from shardids.watch import doctor
from tests.conftest import dsn
from tests.support.client_programs import client_folder
from tests.support.clusters import catalog_at
from tests.support.migrations import App
from tests.support.moves import TwoNodes, two_nodes

ALL = range(8)
EDITED = 'op.create_table("users", key_column(), sa.Column("name", sa.Text, nullable=True))'
PLAIN = """
import os
from alembic import context
from sqlalchemy import create_engine
with create_engine(os.environ["PLAIN_URL"]).begin() as connection:
    connection.exec_driver_sql("set local search_path = shard_0003")
    context.configure(connection=connection)
    context.run_migrations()
"""


def recorded(app: App) -> dict[int, Mapping[str, str]]:
    """The hashes that each shard recorded."""
    with app.migration() as migration:
        there = migration.recorded(migration.nodes).all()
    return {shard: one.hashes for rows in there.values() for one in rows for shard in one.shards}


def of_files(app: App, *revisions: str) -> dict[str, str | None]:
    """The hashes of the revisions' files."""
    environment = Environment.at(app.folder)
    return {revision: environment.hash_of(revision) for revision in revisions}


def edited(url: URL) -> list[doctor.Finding]:
    """What the doctor says of revisions that were edited."""
    with catalog_at(url) as catalog:
        return list(doctor.examine(catalog, ["revision-edited"]).findings)


def test_a_revision_edited_between_shards_is_told_until_it_is_stamped(app: App) -> None:
    app.add_two()
    app.up("--shards", "0-2")
    before = (app.folder / "versions" / "one.py").read_text()
    assert (app("status").code, edited(app.url)) == (0, [])
    # Another layout of the file is no other revision.
    (app.folder / "versions" / "one.py").write_text(before.replace("    ", "  ") + "# Done.\n")
    assert app("status").code == 0
    app.add("one", EDITED + '\nop.execute("create table photos (id bigint)")', 'op.drop_table("users")')
    app.up("--shards", "3-7")

    said = app("status", "--json")
    (row,) = said.json["edited"]
    assert (said.code, row["revision"], row["shards"]) == (3, "one", "0-2"), said
    assert row["ran"] != row["now"] == of_files(app, "one")["one"]
    assert "Edited since it ran in shards 0-2: one do one\n" in app("status").out
    assert app("status", "--shards", "5-7").code == 0
    (found,) = edited(app.url)
    assert (found.thing, found.nodes, found.shards) == ("one", ("a",), (0, 1, 2))
    # It is the shards that differ: they are made alike by hand, and the remedy records that.
    (remedy,) = found.commands
    ran = app(*shlex.split(remedy.text)[2:])
    assert ran.code == 0, ran
    assert (app("status").code, edited(app.url)) == (0, [])
    assert set(app.revisions().values()) == {("two",)}


@pytest.mark.long
def test_every_way_to_run_a_revision_records_the_same(app: App) -> None:
    app.add_two()
    app.add("asks", 'op.get_bind().execute(sa.text("select 1"))', after="two")
    concurrently = """
        with op.get_context().autocommit_block():
            op.create_index("photos_user", "photos", ["user_id"], postgresql_concurrently=True)
        """
    app.add("parts", concurrently, 'op.drop_index("photos_user")', after="asks")
    app.add("left", "pass", after="parts")
    app.add("right", 'op.execute("comment on table photos is $$50%$$")', after="parts")
    app.add("merge", "pass", after=("left", "right"))
    # Compiled, through Alembic, in parts, and by psql.
    app.up("two", "--shards", "0-3")
    assert app("up", "base:two", "--sql", "--out", "files", "--shards", "4-7").code == 0
    _psql(app, "b")
    app.up("--shards", "0-6")
    app.up("asks", "--shards", "7")
    assert app("up", "asks:parts", "--sql", "--out", "files", "--shards", "7").code == 0
    _psql(app, "b")
    app.up()
    hashes = of_files(app, "one", "two", "asks", "parts", "left", "right", "merge")
    assert recorded(app) == dict.fromkeys(ALL, hashes)
    # What is undone is no longer recorded, whichever way.
    assert app("down", "asks").code == 0
    assert recorded(app) == dict.fromkeys(ALL, of_files(app, "one", "two", "asks"))
    assert app("down", "one", "--shards", "0").code == 0
    assert recorded(app)[0] == of_files(app, "one")
    assert app("stamp", "two", "--shards", "0").code == 0
    assert recorded(app)[0] == of_files(app, "one", "two")
    assert app("stamp", "one", "--shards", "0").code == 0
    assert app("down", "base").code == 0
    assert recorded(app) == {}


def _psql(app: App, node: str) -> None:
    """Runs the file for a node that ``sql`` wrote."""
    with catalog_at(app.url) as catalog:
        url = dsn(app.node_url({"a": 0, "b": 4}[node], catalog))
    file = app.folder.parent / "files" / f"{node}.sql"
    subprocess.run([str(client_folder(14) / "psql"), "-X", "-q", url, "-f", str(file)], check=True)


def test_a_failed_revision_records_nothing(app: App) -> None:
    app.add_two()
    app.up("one")
    before = recorded(app)
    app.ask(2, "alter table photos add likes text")
    assert app("up", "--continue-on-error").code == 1
    after = recorded(app)
    assert after[2] == before[2] == of_files(app, "one")
    assert {shard for shard in ALL if after[shard] == of_files(app, "one", "two")} == {*ALL} - {2}


@pytest.mark.long
def test_plain_alembic_works_beside_the_hashes(app: App) -> None:
    app.add_two()
    app.up("one")
    own = (app.folder / "env.py").read_text()
    (app.folder / "env.py").write_text(PLAIN)
    ini = app.folder.parent / "alembic.ini"
    ini.write_text(f"[alembic]\nscript_location = {app.folder}\n")

    def plain(*words: str) -> None:
        with catalog_at(app.url) as catalog:
            url = app.node_url(3, catalog).render_as_string(hide_password=False)
        environment = os.environ | {"PLAIN_URL": url}
        subprocess.run([sys.executable, "-m", "alembic", "-c", str(ini), *words], env=environment, check=True)

    plain("upgrade", "head")
    (app.folder / "env.py").write_text(own)
    app.up()
    # It has no hash of what plain Alembic ran, and nothing is said of that.
    assert recorded(app)[3] == of_files(app, "one")
    app.add("two", 'op.add_column("photos", sa.Column("likes", sa.BigInteger))', after="one")
    assert {row["shards"] for row in app("status", "--json").json["edited"]} == {"0-2,4-7"}


def test_a_stamp_leaves_branches_that_have_nothing_to_do_with_it(app: App) -> None:
    graph = {
        "one": None,
        "left": "one",
        "left_end": "left",
        "right": "one",
        "right_end": "right",
        "alone": None,
    }
    for name, parent in graph.items():
        app.add(name, "pass", after=parent)
    environment = Environment.at(app.folder)
    starts = (
        (),
        ("one",),
        ("left", "right"),
        ("left_end", "right"),
        ("left_end", "right_end"),
        ("alone", "left"),
        ("alone", "left_end", "right_end"),
    )
    # As Alembic's own context stamps one table.
    with create_engine(
        app.url.set(drivername="postgresql+psycopg"), poolclass=NullPool
    ).connect() as connection:
        context = MigrationContext.configure(connection)
        for start, target in product(starts, (*graph, "base")):
            connection.exec_driver_sql("drop table if exists alembic_version")
            context.stamp(environment.script, "base")
            for head in start:
                connection.exec_driver_sql("insert into alembic_version values (%s)", (head,))
            context.stamp(environment.script, target)
            expected = tuple(sorted(context.get_current_heads()))
            assert Stamped.of(environment, start, target).heads == expected, (start, target)

    for head in ("left_end", "right_end"):
        app.up(head)
    # A hash of what the other branch ran stays what it was.
    app.add("right_end", "op.execute('select 1')", after="right")
    assert app("stamp", "left").code == 0
    assert set(app.revisions().values()) == {("left", "right_end")}
    now = of_files(app, "one", "left", "right")
    for shard, hashes in recorded(app).items():
        assert {name: hashes[name] for name in now} == now, shard
        assert hashes.keys() - now == {"right_end"}
    assert {row["revision"] for row in app("status", "--json").json["edited"]} == {"right_end"}
    assert app("stamp", "left").out == "Nothing to do: 8 shards are at the target\n"
    assert app("stamp", "base").code == 0
    assert (set(app.revisions().values()), recorded(app)) == ({()}, {})


def test_a_hand_written_comment_is_no_hash(app: App) -> None:
    app.add_two()
    app.up()
    app.ask(1, "comment on column alembic_version.version_num is 'where we are'")
    app.ask(2, "comment on column alembic_version.version_num is 'shardids: {'")
    app.ask(3, 'comment on column alembic_version.version_num is \'shardids: {"one": 1, "x": "y"}\'')
    assert app("status").code == 0
    assert edited(app.url) == []


def test_a_revision_for_the_node_that_was_edited_is_told(app: App) -> None:
    for shard in (0, 4):
        app.ask(shard, "revoke create on schema public from public")
    more = 'branch_labels = ("node",)\n'
    app.add("n_one", "op.execute(\"create type mood as enum ('sad')\")", more=more)
    app.add_two()
    app.up("--nodes", "a")
    app.add("n_one", "op.execute(\"create type mood as enum ('happy')\")", more=more)
    app.up("--nodes", "b")
    said = app("status", "--json")
    assert (said.code, {row["node"]: row["edited"] for row in said.json["nodes"]}) == (
        3, {"a": ["n_one"], "b": []},
    )  # fmt: skip
    assert "Edited since it ran on node a: n_one\n" in app("status").out
    (found,) = edited(app.url)
    assert (found.thing, found.shards, len(found.nodes)) == ("n_one", (), 1)
    (remedy,) = found.commands
    app.ask(0 if remedy.node == "a" else 4, remedy.text)
    assert edited(app.url) == []


def test_new_shards_record_what_they_ran(
    blank_database: Callable[[], URL],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = blank_database()
    monkeypatch.setenv("SHARDIDS_CATALOG", dsn(url))
    app = App(tmp_path / "migrations", url, capsys)
    app.add_two()
    with catalog_at(url) as catalog:
        provision.init(catalog, DEFAULT, 8)
        provision.add_node(catalog, "a", dsn(url))
    made = app.command("shard", "create", "0-3", "--migrations", str(app.folder))
    assert made.code == 0, made
    assert recorded(app) == dict.fromkeys(range(4), of_files(app, "one", "two"))


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, 4)
        yield nodes
        nodes.catalog.close()


def test_a_shard_takes_its_hashes_along_when_it_moves(
    nodes: TwoNodes, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = nodes.new_shard("create table {s}.kept (id bigint primary key)")
    monkeypatch.setenv("SHARDIDS_CATALOG", dsn(nodes.catalog.url))
    monkeypatch.setenv("SHARDIDS_MIGRATIONS", str(tmp_path / "migrations"))
    app = App(tmp_path / "migrations", nodes.catalog.url, capsys)
    app.add_two()
    app.up()
    hashes = of_files(app, "one", "two")
    assert recorded(app)[shard] == hashes
    moved = app.command("shard", "move", str(shard), "--to", "b")
    assert moved.code == 0, moved
    assert nodes.catalog.node_of(shard).name == "b"
    assert recorded(app)[shard] == hashes
    assert app("status").code == 0
