"""``shardids migrate``: revisions over all shards, by either way, past failures, to the same tables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy.engine import URL

from shardids.ids.layout import DEFAULT
from shardids.migrate.compiled import Compiled, Compiler
from shardids.migrate.install import provision
from shardids.migrate.plan import Route
from tests.conftest import dsn
from tests.support.clusters import catalog_at, connected, contents
from tests.support.migrations import App

Blank = Callable[[], URL]
ALL = range(8)
MODELS = """
from sqlalchemy import ForeignKey, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from shardids import primary_key


class Base(DeclarativeBase):
    pass


class User(Base):
    __tablename__ = "users"
    id: Mapped[int] = primary_key()
    name: Mapped[str] = mapped_column(String(80), index=True)


class Photo(Base):
    __tablename__ = "photos"
    id: Mapped[int] = primary_key()
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
"""


# Writing revisions.


def test_from_models_to_tables_and_back_to_models(
    app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "shop_models.py").write_text(MODELS, encoding="utf-8")
    monkeypatch.setenv("SHARDIDS_MIGRATIONS", str(tmp_path / "shop"))
    made = app("init", "shop", "--models", "shop_models:Base")
    assert (made.code, "the_models.py" in made.out) == (0, True), made
    assert len((tmp_path / "shop" / "env.py").read_text().splitlines()) < 8
    assert {row["way"] for row in app.up().values()} == {"sql"}
    for shard in ALL:
        # From another schema, names are shown whole.
        assert app.ask(
            shard,
            f"""select set_config('search_path', 'pg_catalog', false), pg_get_expr(adbin, adrelid)
                from pg_attrdef where adrelid = 'shard_{shard:04d}.users'::regclass""",
        ) == [("pg_catalog", f"shard_{shard:04d}.next_id()")]
        assert app.ask(shard, "insert into users (name) values ('ann') returning shardids.shard_of(id)") == [
            (shard,)
        ]
    for words in (("check",), ("check", "--shard", "5", "--all")):
        assert (app(*words).code, app(*words).out) == (0, "")

    # Nothing but what the models ask for: shardids' own objects are not seen.
    (tmp_path / "shop_models.py").write_text(
        MODELS + "    likes: Mapped[int] = mapped_column(server_default='0')\n"
    )
    monkeypatch.delitem(__import__("sys").modules, "shop_models")
    drift = app("check", "--json")
    assert (drift.code, [row["difference"] for row in drift.json]) == (3, ["add column: photos likes"])
    assert app("revision", "-m", "likes", "--autogenerate", "--shard", "6").code == 0
    (path,) = (tmp_path / "shop" / "versions").glob("*_likes.py")
    body = path.read_text()
    assert re.findall(r"op\.\w+\(.*", body) == [
        "op.add_column('photos', sa.Column('likes', sa.Integer(), server_default='0', nullable=False))",
        "op.drop_column('photos', 'likes')",
    ]
    app.up()
    assert app("check", "--all").code == 0
    # A key that lost its default is drift, in that shard.
    app.ask(3, "alter table users alter id drop default; create table odd ()")
    assert app("check").code == 0
    found = app("check", "--all", "--json")
    assert (found.code, sorted(row["difference"] for row in found.json)) == (
        3,
        [
            "+ column users.id bigint not null",
            "+ table odd",
            "- column users.id bigint not null default {shard}.next_id()",
        ],
    )
    assert {row["shard"] for row in found.json} == {3}
    assert app("check", "--shard", "3").code == 3


def test_what_is_no_models(app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "empty_models.py").write_text("import sqlalchemy as sa\nm = sa.MetaData()\nx = 1\n")
    for models, word in (
        ("nonesuch_models:Base", "nonesuch_models"),
        ("empty_models", "package.module:Base"),
        ("empty_models:y", "'empty_models:y'"),
        ("empty_models:x", "neither"),
        ("empty_models:m", "no tables"),
    ):
        ran = app("init", "new", "--models", models)
        assert (ran.code, word in ran.err) == (2, True), ran
        assert not (tmp_path / "new").exists()
    assert app("init", str(app.folder), "--models", "empty_models:m").code == 2


# Two ways, one result.


def by_alembic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every route run through Alembic."""
    plain = Compiler.compile

    def compile_(self: Compiler, route: Route) -> Compiled:
        return replace(plain(self, route), way="alembic", reason="it is told to")

    monkeypatch.setattr(Compiler, "compile", compile_)


def test_both_ways_give_the_same(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    app.add_two()
    app.add(
        "three",
        """
        op.execute("insert into users (name) values ('tab\\there, 100 %, a\\\\:b')")
        op.bulk_insert(sa.table("users", sa.column("name", sa.Text)), [{"name": "it's"}])
        op.create_check_constraint("positive", "photos", sa.column("likes") >= 0)
        op.execute("comment on table photos is 'what users show'")
        """,
        'op.drop_constraint("positive", "photos")',
        after="two",
    )
    assert {row["way"] for row in app.up("--shards", "0,1,4,5").values()} == {"sql"}
    with monkeypatch.context() as patch:
        by_alembic(patch)
        assert {row["way"] for row in app.up().values()} == {"alembic"}
        assert app.up() == {}
    assert app.up() == {}
    described = app.descriptions()
    assert all(described[shard] == described[0] for shard in ALL)
    names = [app.ask(shard, "select name from users order by name") for shard in ALL]
    assert names == [[("it's",), ("tab\there, 100 %, a:b",)]] * 8
    # And back, each by the other way.
    assert app("down", "base", "--shards", "2,3,6,7", "--allow-drop").code == 0
    by_alembic(monkeypatch)
    assert app("down", "base", "--allow-drop").code == 0
    described = app.descriptions()
    assert all(described[shard] == described[0] for shard in ALL)
    assert set(app.revisions().values()) == {()}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('op.get_bind().execute(sa.text("create table t ()"))', "op.get_bind()"),
        ('sa.inspect(op.get_bind()).has_table("x"); op.execute("create table t ()")', "op.get_bind()"),
        ('context.is_offline_mode() or op.execute("create table t ()")', "offline"),
        ('op.get_context().as_sql or op.execute("create table t ()")', "as_sql"),
        (
            'op.get_context().connection.execute(sa.text("select 1")).one(); op.execute("create table t ()")',
            "one",
        ),
    ],
)
def test_a_revision_that_needs_a_connection(app: App, body: str, reason: str) -> None:
    app.add("one", "pass")
    app.add("two", body, after="one")
    planned = app("up", "--dry-run", "--json").json
    assert [(row["way"], row["shards"]) for row in planned] == [("alembic", "0-7")]
    assert "revision two" in planned[0]["reason"]
    assert reason in planned[0]["reason"]
    ran = app("up")
    assert (ran.code, "Through Alembic" in ran.err) == (0, True), ran
    assert all("+ table t" in lines for lines in app.descriptions().values())
    assert set(app.revisions().values()) == {("two",)}


# What goes wrong.


def fails_in(shard: int) -> str:
    condition = f"if current_setting('shardids.shard') = '{shard}' then raise 'no such luck'; end if;"
    return f"""
        op.execute("create table t ()")
        op.execute("do $$ begin {condition} end $$")
        """


def test_a_revision_that_fails_in_one_shard(app: App) -> None:
    app.add_two()
    app.add("three", fails_in(5), after="two")
    app.up("two")
    ran = app("up", "--json", "--canary", "2")
    assert ran.code == 1
    rows = {row["shard"]: row for row in ran.json["shards"]}
    assert rows[0]["status"] == rows[4]["status"] == "done"  # the canaries, one a node
    assert (rows[5]["status"], rows[5]["from"], rows[5]["to"]) == ("failed", "two", "two")
    assert 'node "b": no such luck' in rows[5]["error"]
    assert {rows[shard]["status"] for shard in (6, 7)} == {"not started"}
    for shard, heads in app.revisions().items():
        assert (heads == ("three",)) == (rows[shard]["status"] == "done")
        assert ("+ table t" in app.descriptions()[shard]) == (heads == ("three",))
    # The command that it names does just the rest.
    app.add("three", 'op.execute("create table t ()")', after="two")
    words = shlex.split(ran.json["retry"])
    assert words[:3] == ["shardids", "migrate", "up"]
    assert words[-1].endswith("5-7")
    assert app(*words[2:]).code == 0
    assert set(app.revisions().values()) == {("three",)}


def test_continuing_after_an_error(app: App) -> None:
    app.add("one", fails_in(5))
    ran = app("up", "--continue-on-error", "--retries", "2", "--canary", "0", "--jobs", "2")
    assert ran.code == 1
    assert "7 done, 1 failed, 0 not started" in ran.out
    assert "shardids migrate up --jobs 2 --retries 2 --canary 0 --continue-on-error --shards 5" in ran.err
    assert {shard for shard, heads in app.revisions().items() if heads == ("one",)} == set(ALL) - {5}


def test_a_node_that_is_down(app: App) -> None:
    app.add_two()
    with connected(app.url) as connection:
        connection.execute(
            "update shardids_catalog.node set url = 'postgresql://127.0.0.1:1/x' where name = 'b'"
        )
    stopped = app("up")
    assert (stopped.code, stopped.out) == (1, "")
    assert 'node "b" can\'t be reached' in stopped.err
    ran = app("up", "--json", "--continue-on-error")
    rows = {row["shard"]: row for row in ran.json["shards"]}
    assert (ran.code, [row["status"] for row in rows.values()]) == (1, ["done"] * 4 + ["failed"] * 4)
    assert all('node "b"' in rows[shard]["error"] for shard in range(4, 8))
    assert ran.json["retry"].endswith("--continue-on-error --shards 4-7")
    shown = app("status", "--json")
    assert (shown.code, list(shown.json["down"]), shown.json["pending"]) == (1, ["b"], [])
    assert app.up("--nodes", "a") == {}


def test_bad_input_changes_nothing(app: App) -> None:
    app.add_two()
    app.up("one", "--shards", "0-3")
    with catalog_at(app.url) as catalog:
        urls = [app.node_url(shard, catalog) for shard in (0, 4)]
    before = [contents(url) for url in urls]
    for words, code, said in (
        (["up", "nonesuch"], 2, ["nonesuch", "shardids migrate revision --list"]),
        (["down", "nonesuch"], 2, ["nonesuch"]),
        (["down", "-1", "--shards", "7"], 2, ["no way leads down from base"]),
        (["up", "--shards", "8"], 2, ["'8'", "0 to 7"]),
        (["up", "--shards", ""], 2, ["''"]),
        (["up", "--shards", "0-3", "--nodes", "b"], 2, ["no shard is chosen"]),
        (["up", "--nodes", "nonesuch"], 1, ['"nonesuch"', '"a", "b"']),
        (["up", "--lock-timeout", "soon"], 2, ["'soon'", "500ms"]),
        (["up", "--jobs", "0"], 2, ["--jobs"]),
        (["stamp", "nonesuch"], 2, ["nonesuch"]),
        (["up", "one", "--sql"], 2, ["'one'", "base:head"]),
        (["up", "two:head", "--sql", "--nodes", "a"], 2, ["no shard is at two"]),
        (["up", "--dir", "/nonexistent"], 2, ["/nonexistent", "migrate init"]),
        (["revision", "-m", "x", "--autogenerate", "--shard", "7"], 1, ["shard 7 is at base", "two"]),
    ):  # fmt: skip
        ran = app(*words)
        assert (ran.code, ran.out) == (code, ""), ran
        assert "Traceback" not in ran.err
        assert all(word in ran.err for word in said), ran
    app.add("three", "pass", after="one")
    ran = app("up")
    assert (ran.code, "2 heads: three, two" in ran.err, "--merge" in ran.err) == (2, True, True), ran
    assert [contents(url) for url in urls] == before
    assert app("revision", "-m", "both", "--merge").code == 0
    app.up()
    (app.folder / "versions" / "broken.py").write_text("revision = 'x'\ndown_revision = 'gone'\n")
    assert app("up").code == 2


def test_a_revision_that_the_code_does_not_have(app: App) -> None:
    app.add_two()
    app.up("one")
    app.ask(2, "update alembic_version set version_num = 'later'")
    ran = app("up")
    assert (ran.code, ran.out) == (1, "")
    assert 'shard 2 is at revision later, which this code does not have [node "a"]' in ran.err
    assert set(app.revisions().values()) == {("one",), ("later",)}
    assert app("up", "--continue-on-error").code == 1
    assert app.revisions() == {shard: ("later",) if shard == 2 else ("two",) for shard in ALL}
    assert [row["revision"] for row in app("status", "--json").json["revisions"]] == ["later", "two", "two"]
    assert app("stamp", "one", "--shards", "2").code == 0
    app.up()
    assert set(app.revisions().values()) == {("two",)}


def test_a_relative_target_is_the_same_for_all_shards(app: App) -> None:
    app.add_two()
    app.up("--shards", "0-5")
    # A run to one back that was stopped, and is repeated: none goes further than the others.
    assert app("down", "--shards", "0-3").code == 0
    assert app("down").code == 0
    assert app.revisions() == {shard: None if shard in {6, 7} else ("one",) for shard in ALL}
    app.up("+1")
    assert set(app.revisions().values()) == {("one",)}
    assert app("down", "two").out == "Nothing to do: 8 shards are at the target\n"


# New shards.


def test_new_shards_begin_at_the_revision_of_the_others(
    blank_database: Blank, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, other = blank_database(), blank_database()
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("SHARDIDS_CATALOG", dsn(url))
    app = App(tmp_path / "migrations", url, capsys)
    app.add_two()
    with catalog_at(url) as catalog:
        provision.init(catalog, DEFAULT, 8)
        provision.add_node(catalog, "a", dsn(url))

    def create(*words: str) -> None:
        made = app.command("shard", "create", *words, "--migrations", str(app.folder))
        assert made.code == 0, made

    create("0-3")
    monkeypatch.setenv("SHARDIDS_MIGRATIONS", str(app.folder))
    assert set(app.revisions().values()) == {("two",)}
    # The code is ahead of the cluster, which has not been deployed yet.
    app.add("three", "op.get_bind().execute(sa.text('create table three ()'))", after="two")
    with catalog_at(url) as catalog:
        provision.add_node(catalog, "b", dsn(other))
    create("4,5")
    assert app.revisions() == dict.fromkeys(range(6), ("two",))
    app.up()
    create("6-7")
    assert app.revisions() == dict.fromkeys(ALL, ("three",))
    described = app.descriptions()
    assert all(described[shard] == described[0] for shard in ALL)
    assert app("status").out.endswith("All shards are at the newest revision\n")


def test_a_new_shard_without_its_tables_is_not_handed_out(app: App) -> None:
    app.add("one", fails_in(3))
    with connected(app.url) as connection:
        connection.execute("update shardids_catalog.placement set state = 'creating'")
    words = ("all", "--migrations", str(app.folder))
    assert "no such luck" in app.command("shard", "create", *words).err
    with catalog_at(app.url) as catalog:
        assert set(catalog.placement().node_of) <= {4, 5, 6, 7}
    app.add("one", "op.execute('create table t ()')")
    assert app.command("shard", "create", *words).code == 0
    assert set(app.revisions()) == set(ALL)
    assert set(app.revisions().values()) == {("one",)}


# Lint.


def test_what_is_not_safe_under_load_is_said_before_it_runs(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.add_two()
    app.add(
        "three",
        """
        op.create_index("users_name", "users", ["name"])
        op.alter_column("photos", "likes", type_=sa.BigInteger)
        """,
        after="two",
    )
    found = app("check", "--lint", "--json")
    assert (found.code, [(row["revision"], row["rule"]) for row in found.json]) == (
        3,
        [("three", "require-concurrent-index-creation"), ("three", "changing-column-type")],
    )
    assert "concurrently" in found.json[0]["instead"]
    assert found.json[0]["statement"] == "CREATE INDEX users_name ON users (name);"
    # Tables that the same run makes hold nobody up.
    assert app("check", "--lint", "base:one").code == 0
    ran = app("up")
    assert (ran.code, "Warning: revision three: " in ran.err) == (0, True), ran
    monkeypatch.setattr("shardids.migrate.lint.squawk_path", lambda: None)
    missing = app("check", "--lint")
    assert (missing.code, "pip install 'shardids[ops]'" in missing.err) == (2, True), missing


def test_a_version_table_that_cannot_be_read_hides_no_other(app: App) -> None:
    app.add_two()
    app.up("--shards", "0-6")
    app.ask(7, "create table alembic_version (other text)")
    app.ask(6, "insert into alembic_version values ('elsewhere')")
    shown = app("status", "--json").json
    assert list(shown["missing"]) == ["7"]
    assert "version_num" in shown["missing"]["7"]
    counts = {(row["node"], row["revision"]): row["shards"] for row in shown["revisions"]}
    assert counts == {("a", "two"): 4, ("b", "two"): 2, ("b", "elsewhere, two"): 1}
