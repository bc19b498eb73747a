"""Revisions for the node run once on each, before its shards', which may hold nothing node-wide."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from sqlalchemy.engine import URL

from shardids.migrate import scaffold
from tests.conftest import MakeRole, dsn
from tests.support.clusters import connected
from tests.support.lengths import sampled
from tests.support.migrations import App

ALL = range(8)
IMPORTS = "from sqlalchemy.dialects import postgresql\n"


def close_public(app: App) -> None:
    """As it is from version 15 on; before, any role may create in public."""
    for shard in (0, 4):
        app.ask(shard, "revoke create on schema public from public")


@pytest.fixture
def shop(app: App) -> App:
    """An application whose shards use two extensions and a type of their node."""
    close_public(app)
    app.add(
        "n_one",
        """
        op.execute("create extension citext")
        op.execute("create extension btree_gist")
        op.execute("create type mood as enum ('happy', 'sad')")
        """,
        'op.execute("drop type mood; drop extension btree_gist; drop extension citext")',
        more='branch_labels = ("node",)\n',
    )
    app.add(
        "s_one",
        """
        mood = postgresql.ENUM(name="mood", create_type=False)
        op.create_table("users", key_column(), sa.Column("email", postgresql.CITEXT, unique=True),
                        sa.Column("mood", mood))
        op.execute("create table bookings (room integer, during tsrange,"
                   " constraint no_double_booking exclude using gist (room with =, during with &&))")
        """,
        'op.drop_table("bookings"); op.drop_table("users")',
        more=IMPORTS + 'depends_on = "n_one"\n',
    )
    return app


def with_metadata(app: App) -> None:
    env = "import sqlalchemy as sa\nfrom shardids.migrate import run_environment\n"
    (app.folder / "env.py").write_text(env + "run_environment(sa.MetaData())\n")


def node_versions(app: App) -> list[list[tuple[str]]]:
    return [
        app.ask(shard, "select version_num from public.alembic_node_version order by 1") for shard in (0, 4)
    ]


def test_extensions_of_the_node_serve_every_shard(shop: App) -> None:
    planned = shop("up", "--dry-run", "--json").json
    assert [(row["shards"], row["revisions"]) for row in planned[:2]] == [
        ("node a", "n_one"),
        ("node b", "n_one"),
    ]
    shown = shop("status", "--json").json
    assert [(row["node"], row["revision"], row["pending"]) for row in shown["nodes"]] == [
        ("a", "base", ["n_one"]),
        ("b", "base", ["n_one"]),
    ]
    ran = shop("up", "--json")
    assert ran.code == 0, ran
    assert [(row["node"], row["to"], row["status"]) for row in ran.json["nodes"]] == [
        ("a", "n_one", "done"),
        ("b", "n_one", "done"),
    ]
    assert {row["way"] for row in ran.json["shards"]} == {"sql"}
    assert node_versions(shop) == [[("n_one",)]] * 2
    assert set(shop.revisions().values()) == {("s_one",)}
    assert shop("up").out == "Nothing to do: 8 shards are at the target\n"
    described = shop.descriptions()
    assert all(described[shard] == described[0] for shard in ALL)
    for shard in ALL:
        # As an application asks: by the default search_path, with the operators of citext.
        schema = f"shard_{shard:04d}"
        assert shop.ask(
            shard,
            f"""select set_config('search_path', '"$user", public', false);
                insert into {schema}.users (email, mood) values ('Ann@x', 'happy');
                select count(*) from {schema}.users where email = 'aNN@X'""",
        )
        with pytest.raises(psycopg.errors.ExclusionViolation):
            shop.ask(
                shard, "insert into bookings values (1, '[2026-01-01, 2026-01-03)'), (1, '[2026-01-02,)')"
            )
    # A shard takes nothing of the node along.
    shop.ask(0, "drop schema shard_0001 cascade")
    assert shop.ask(2, "select count(*) from pg_constraint where conname = 'no_double_booking'") == [(3,)]


def test_the_shards_have_what_plain_alembic_gives_one_database(
    shop: App, blank_database: Callable[[], URL]
) -> None:
    """The same folder, run by Alembic itself with both branches, is the oracle."""
    shop.up()
    plain = blank_database()
    env = """
import os
from alembic import context
from sqlalchemy import create_engine
with create_engine(os.environ["PLAIN_URL"]).begin() as connection:
    connection.exec_driver_sql("set local search_path = plain, public")
    context.configure(connection=connection)
    context.run_migrations()
"""
    (shop.folder / "env.py").write_text(env)
    (shop.folder.parent / "alembic.ini").write_text(f"[alembic]\nscript_location = {shop.folder}\n")
    with connected(plain) as connection:
        connection.execute(
            "create schema plain; create function plain.next_id() returns bigint language sql"
            " as 'select 1::bigint'"
        )
    subprocess.run(
        [sys.executable, "-m", "alembic", "-c", str(shop.folder.parent / "alembic.ini"), "upgrade", "heads"],
        env=os.environ | {"PLAIN_URL": plain.render_as_string(hide_password=False)},
        check=True,
    )
    query = """select a.attrelid::regclass::text, a.attname, t.typname from pg_attribute a
               join pg_type t on t.oid = a.atttypid join pg_class c on c.oid = a.attrelid
               where c.relname in ('users', 'bookings') and a.attnum > 0
                 and c.relnamespace = '{}'::regnamespace
               order by 1, 2"""
    with connected(plain) as connection:
        connection.execute("set search_path = plain")
        expected = connection.execute(query.format("plain").encode()).fetchall()
    for shard in ALL:
        assert shop.ask(shard, query.format(f"shard_{shard:04d}")) == expected


def test_a_node_that_fails_keeps_its_shards_back(shop: App) -> None:
    shop.ask(4, "create type public.mood as enum ('somebody else''s')")
    ran = shop("up", "--json")
    assert ran.code == 1
    assert {row["node"]: row["status"] for row in ran.json["nodes"]} == {"a": "done", "b": "failed"}
    assert 'type "mood" already exists' in ran.json["nodes"][1]["error"]
    assert all(heads is None for shard, heads in shop.revisions().items() if shard >= 4)
    # What the node's transaction had done is rolled back.
    assert shop.ask(4, "select count(*) from pg_extension where extname = 'citext'") == [(0,)]
    ran = shop("up", "--json", "--continue-on-error")
    assert {row["shard"] for row in ran.json["shards"] if row["status"] == "done"} | {
        shard for shard, heads in shop.revisions().items() if heads == ("s_one",)
    } == {0, 1, 2, 3}
    shop.ask(4, "drop type public.mood")
    shop.up()
    assert set(shop.revisions().values()) == {("s_one",)}


def test_nodes_of_chosen_shards_only(shop: App) -> None:
    shop.up("--nodes", "a")
    assert shop.ask(4, "select to_regclass('public.alembic_node_version')") == [(None,)]
    shown = shop("status")
    assert "Pending on node b: n_one" in shown.out


def test_no_shard_moves_to_a_node_that_lacks_the_nodes_revisions(shop: App) -> None:
    shop.up("--nodes", "a")
    refused = shop.command("shard", "move", "0", "--to", "b", "--dry-run")
    assert refused.code == 1
    assert 'node "b" is at node revision base, and "a" at n_one' in refused.err
    assert "Bring every node to the newest: shardids migrate up\n" in refused.err
    # What somebody has planted in its place is not run.
    shop.ask(4, "create function public.planted() returns text language sql as 'select 1/0'")
    shop.ask(4, "create view public.alembic_node_version as select public.planted() as version_num")
    assert (
        'node "b" is at node revision base'
        in shop.command("shard", "move", "0", "--to", "b", "--dry-run").err
    )
    shop.ask(4, "drop view public.alembic_node_version")
    shop.up()
    assert "node revision" not in shop.command("shard", "move", "0", "--to", "b", "--dry-run").err


def test_the_shared_schema_must_not_be_that_of_others(shop: App, make_role: MakeRole) -> None:
    role, engine = str(make_role().username), str(make_role().username)
    shop.ask(4, f'grant create on schema public to public, "{role}"')
    # Whoever acts for the owner of the engine may.
    shop.ask(0, f'grant "{shop.url.username}" to "{engine}"; grant create on schema public to "{engine}"')
    ran = shop("up")
    assert ran.code == 1
    said = " ".join((ran.out + ran.err).split())
    assert f'node "b": every role, role "{role}" may create objects in schema public' in said
    assert f'REVOKE CREATE ON SCHEMA public FROM PUBLIC, "{role}";' in said
    shop.ask(4, "revoke create on schema public from public")
    assert shop.ask(4, "select shardids.revision_path(4)") == [("shard_0004",)]
    assert shop.ask(0, "select shardids.revision_path(0)") == [("shard_0000, public",)]
    shop.ask(4, f'revoke create on schema public from "{role}"')
    assert shop("up").code == 0
    shop.ask(0, f'revoke create on schema public from "{engine}"')


def test_a_version_table_in_the_shared_schema_is_not_the_shards(shop: App) -> None:
    """What a plain Alembic left in public, before there were shards."""
    for shard in (0, 4):
        shop.ask(
            shard,
            "create table public.alembic_version (version_num text);"
            " insert into public.alembic_version values ('old')",
        )
    shop.add(
        "s_two",
        "op.get_bind().execute(sa.text('create table two ()'))",
        'op.drop_table("two")',
        after="s_one",
    )
    assert {row["way"] for row in shop.up().values()} == {"alembic"}
    assert set(shop.revisions().values()) == {("s_two",)}
    assert shop("down", "base").code == 0
    for shard in (0, 4):
        assert shop.ask(shard, "select version_num from public.alembic_version") == [("old",)]


def test_new_nodes_and_new_shards_get_the_nodes_revisions(
    shop: App, blank_database: Callable[[], URL], monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.up()
    c, d = blank_database(), blank_database()
    for url in (c, d):
        with connected(url) as connection:
            connection.execute("revoke create on schema public from public")
    added = shop.command("node", "add", "c", "--url", dsn(c), "--migrations", str(shop.folder))
    assert added.code == 0, added
    with connected(c) as connection:
        assert connection.execute("select version_num from public.alembic_node_version").fetchall() == [
            ("n_one",)
        ]
    # Added without: the next run finds the empty node.
    monkeypatch.delenv("SHARDIDS_MIGRATIONS")
    assert shop.command("node", "add", "d", "--url", dsn(d)).code == 0
    monkeypatch.setenv("SHARDIDS_MIGRATIONS", str(shop.folder))
    assert "Pending on node d: n_one" in shop("status").out
    ran = shop("up", "--json")
    assert [row["node"] for row in ran.json["nodes"]] == ["d"]
    with connected(shop.url) as connection:
        connection.execute(
            "update shardids_catalog.placement set node = 'c', state = 'creating' where shard = 7"
        )
    with connected(c) as connection:
        connection.execute("drop table public.alembic_node_version; drop type mood")
        connection.execute("drop extension btree_gist; drop extension citext")
    made = shop.command("shard", "create", "7", "--migrations", str(shop.folder))
    assert made.code == 0, made
    assert shop.revisions()[7] == ("s_one",)


def test_revisions_are_written_in_their_branch(app: App) -> None:
    close_public(app)
    assert app("revision", "-m", "first of nodes", "--node").code == 0
    assert app("revision", "-m", "first of shards").code == 0
    assert app("revision", "-m", "second of nodes", "--node").code == 0
    assert app("revision", "-m", "second of shards").code == 0
    rows = app("revision", "--list", "--json").json
    assert [(row["message"], row[""]) for row in rows] == [
        ("second of nodes", "node head"),
        ("first of nodes", "node"),
        ("second of shards", "head"),
        ("first of shards", ""),
    ]
    assert app("revision", "-m", "x", "--node", "--autogenerate").code == 2
    app.up()
    assert len(set(app.revisions().values())) == 1
    with_metadata(app)
    # What all shards of a node share is none of a shard's revision.
    for shard in (0, 4):
        app.ask(shard, "create table public.countries (code text primary key)")
    checked = app("check")
    assert (checked.code, checked.out, checked.err) == (0, "", "No difference\n")
    added = app("revision", "-m", "by comparison", "--autogenerate")
    assert added.code == 0, added
    (written,) = (app.folder / "versions").glob("*_by_comparison.py")
    assert "drop_table" not in written.read_text()
    # A model of that name is to be made in the shards.
    env = "import sqlalchemy as sa\nfrom shardids.migrate import run_environment\n"
    model = "sa.Table('countries', sa.MetaData(), sa.Column('code', sa.Text, primary_key=True){}).metadata"
    (app.folder / "env.py").write_text(f"{env}run_environment({model.format('')})\n")
    app.up()
    assert "add table: countries" in app("check").out
    shared = model.format(", schema='public'").replace("countries", "currencies")
    (app.folder / "env.py").write_text(f"{env}run_environment({shared})\n")
    assert app("check").err == "No difference\n"


def test_the_first_revision_leaves_out_what_is_not_of_a_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models_of_init.py").write_text(
        "import sqlalchemy as sa\n"
        "metadata = sa.MetaData()\n"
        "code = sa.Column('code', sa.Text, primary_key=True)\n"
        "sa.Table('countries', metadata, code, schema='public')\n"
        "sa.Table('users', metadata, sa.Column('id', sa.BigInteger, primary_key=True),"
        " sa.Column('country', sa.ForeignKey('public.countries.code')))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    written = scaffold.init(tmp_path / "migrations", "models_of_init:metadata").read_text()
    assert "create_table('users'" in written
    assert "create_table('countries'" not in written


def test_the_two_branches_stay_apart(app: App) -> None:
    app.add("n", "pass", more='branch_labels = ("node",)\n')
    app.add("s", "pass")
    app.add("both", "pass", after=("n", "s"))
    assert "merges the node's branch with the shards'" in app("up").err
    (app.folder / "versions" / "both.py").unlink()
    app.add("n", "pass", more='branch_labels = ("node",)\ndepends_on = "s"\n')
    assert "depends on a shard's revision" in app("up").err


@pytest.mark.parametrize(
    ("body", "what"),
    sampled([
        ('op.execute("create extension if not exists citext")', "an extension"),
        ('op.execute("/* x */ CREATE\\n EXTENSION citext -- y")', "an extension"),
        ('op.execute("select 1; drop extension citext")', "an extension"),
        ('op.execute("do $$ begin if true then create extension citext; end if; end $$")', "an extension"),
        ('op.get_bind().execute(sa.text("create extension citext"))', "an extension"),
        ('op.execute("create role reader")', "a role"),
        ('op.execute("alter user reader set search_path = x")', "a role"),
        ('op.execute("grant reader to writer")', "a role"),
        ('op.execute("drop owned by reader")', "a role"),
        ('op.execute("grant connect on database x to reader")', "a database"),
        ('op.execute("alter database x set work_mem = 1")', "a database"),
        ('op.execute("create publication p for all tables")', "a publication or subscription"),
        ('op.execute("create event trigger e on ddl_command_end execute function f()")', "an event trigger"),
        ('op.execute("create schema more")', "a schema"),
        ('op.execute("create server s foreign data wrapper postgres_fdw")', "a foreign server"),
        ('op.create_table("t", sa.Column("n", sa.Integer), schema="public")', "an object of another schema"),
        ('op.execute("create function public.f() returns int return 1")', "an object of another schema"),
        ('op.execute("create index i on public.t (n)")', "an object of another schema"),
        ('op.execute("alter table if exists only \\"Other\\".t add n int")', "an object of another schema"),
        ('op.execute("drop view other.v")', "an object of another schema"),
        ('op.execute("alter table t set schema public")', "an object of another schema"),
        ('op.execute("alter default privileges grant select on tables to x")', "default privileges"),
    ], every=3),
)  # fmt: skip
def test_what_concerns_the_node_is_refused_in_a_shards_revision(app: App, body: str, what: str) -> None:
    app.add("one", "pass")
    app.up()
    app.add("two", body, after="one")
    ran = app("up")
    assert (ran.code, f"revision two changes {what}" in ran.err) == (2, True), ran
    assert "shardids migrate revision --node" in ran.err
    assert set(app.revisions().values()) == {("one",)}


def test_check_names_what_concerns_the_node(app: App) -> None:
    with_metadata(app)
    app.add("one", 'op.execute("create extension citext schema pg_catalog")')
    assert app("stamp", "head").code == 0
    found = app("check", "--json")
    assert found.code == 3
    assert "revision one changes an extension" in found.json[0]["difference"]


def test_what_is_a_shards_own_passes(app: App) -> None:
    app.add(
        "create_user_table",
        """
        op.create_table("users", key_column(), sa.Column("name", sa.Text), comment="create user, drop role")
        op.create_index("users_name", "users", ["name"])
        op.execute("create type mood as enum ('create extension', 'x.y')")
        op.execute("create view v as select u.name from users u")
        op.execute("create function f() returns trigger language plpgsql as $$ begin return new; end $$")
        op.execute("create trigger t before insert on users for each row execute function f()")
        op.execute("create sequence s owned by users.name")
        op.execute("comment on column users.name is 'create role x'")
        op.execute("insert into users (name) values ('a; create role b')")
        op.execute("grant select on users to public")
        op.execute("do $$ begin perform 1; end $$")
        """,
    )
    app.up()
