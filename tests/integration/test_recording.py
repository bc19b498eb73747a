"""Commands record the state that shards and nodes must have, and the doctor compares both with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.engine import URL

from shardids import mover
from shardids.errors import ClusterConflict, ConnectionFailed
from shardids.ids.layout import DEFAULT
from shardids.migrate import recording
from shardids.migrate.install import provision
from shardids.pg.embedded import temporary_servers
from shardids.pg.urls import parse_url
from shardids.tables import lookups
from shardids.testing import devcluster
from shardids.watch import doctor
from shardids.watch.doctor.findings import Finding
from tests.conftest import MakeRole, dsn
from tests.support.clusters import catalog_at
from tests.support.migrations import App

JUDGED = ["schema-differs", "role-rights", "schema-unrecorded", "revisions-apart", "node-contract"]
UNLOGGED = "alter table photos set unlogged"
EVERY = tuple(range(8))


def findings(url: URL) -> list[Finding]:
    with catalog_at(url) as catalog:
        return list(doctor.examine(catalog, JUDGED).findings)


def seen(app: App) -> list[tuple[str, tuple[int, ...]]]:
    return [(one.check, one.shards) for one in findings(app.url)]


def everywhere(app: App, statement: str) -> None:
    for shard in EVERY:
        app.ask(shard, statement)


def records(app: App) -> list[tuple[Any, ...]]:
    with catalog_at(app.url) as catalog, catalog.engine.connect() as connection:
        rows = connection.exec_driver_sql(
            "select revision, recorded_by from shardids_catalog.recorded_schema order by 1"
        )
        return [tuple(row) for row in rows]


def test_a_migration_records_the_schema_that_it_makes(app: App) -> None:
    app.add_two()
    app.up()
    assert records(app) == [("two", "migrate")]
    assert seen(app) == []
    everywhere(app, UNLOGGED)
    assert seen(app) == [("schema-differs", EVERY)]


def test_a_migration_does_not_record_damage_that_was_there(app: App) -> None:
    app.add_two()
    app.up("one")
    everywhere(app, UNLOGGED)
    everywhere(app, "grant delete on users to public")
    app.up()
    assert seen(app) == [("schema-differs", EVERY), ("role-rights", EVERY)]
    everywhere(app, "alter table photos set logged")
    everywhere(app, "revoke delete on users from public")
    assert seen(app) == []


def test_shards_of_two_revisions_are_compared_with_their_own_record(app: App) -> None:
    app.add_two()
    app.up("one")
    app.up("--shards", "2-3")
    assert {check for check, _ in seen(app)} == {"revisions-apart"}
    everywhere(app, UNLOGGED)
    differing = [shards for check, shards in seen(app) if check == "schema-differs"]
    assert sorted(differing) == [(0, 1, 4, 5, 6, 7), (2, 3)]
    app.up()
    assert seen(app) == [("schema-differs", EVERY)]


def test_a_downgrade_takes_along_what_was_accepted_meanwhile(app: App) -> None:
    app.add_two()
    app.up("one")
    app.up()
    everywhere(app, "create index users_name on users (name)")
    assert app.command("shard", "accept-schema", "--yes").code == 0
    assert app("down", "one").code == 0
    assert seen(app) == []
    app.up()
    assert seen(app) == []
    everywhere(app, "drop index users_name")
    assert seen(app) == [("schema-differs", EVERY)]


def half_way(app: App, *shards: int) -> None:
    """Brings shards half way through revision "two", and then repairs what stopped them."""
    table = 'op.create_table("t", sa.Column("id", sa.BigInteger))'
    app.add("one", table + '\nop.create_index("t_old", "t", ["id"])')
    index = 'op.create_index("t_id", "t", ["id"], unique=True, postgresql_concurrently=True)'
    first = [
        'op.add_column("t", sa.Column("c", sa.Text))',
        'op.drop_index("t_old")',
        'op.execute("grant select on t to public")',
    ]
    block = f"with op.get_context().autocommit_block():\n    {index}"
    app.add("two", "\n".join([*first, block]), after="one")
    app.up("one")
    for shard in shards:
        app.ask(shard, "insert into t (id) values (1), (1)")
        # One by one: a run ends after a few that fail.
        assert app("up", "--shards", str(shard)).code == 1
        assert app.ask(shard, "select attname::text from pg_attribute where attname = 'c'"), "part 1 is there"
        app.ask(shard, "truncate t")


def test_a_shard_that_is_half_way_through_a_revision_is_not_what_is_recorded(app: App) -> None:
    half_way(app, 0)
    app.up()
    assert seen(app) == []
    app.ask(3, "alter table t drop column c")
    app.ask(5, "revoke select on t from public")
    assert seen(app) == [("schema-differs", (3,)), ("role-rights", (5,))]


def test_nothing_is_recorded_if_all_shards_were_half_way_through_a_revision(app: App) -> None:
    half_way(app, *EVERY)
    app.up()
    assert [key for key, _ in records(app)] == ["one"]
    assert seen(app) == [("schema-unrecorded", EVERY)]


IN_PYTHON = """
with op.get_context().autocommit_block():
    op.execute("create index concurrently if not exists t_id on t (id)")
if op.get_bind().scalar(sa.text("select count(*) from t")):
    raise Exception("it has rows")
op.add_column("t", sa.Column("c", sa.Text))
"""
"""A revision that leaves no mark half way."""


def test_a_shard_half_way_through_a_revision_in_python_is_not_what_is_recorded(app: App) -> None:
    app.add("one", 'op.create_table("t", sa.Column("id", sa.BigInteger))')
    app.add("two", IN_PYTHON, after="one")
    app.up("one")
    for shard in (0, 1, 2):
        app.ask(shard, "insert into t (id) values (1)")
        assert app("up", "--shards", str(shard)).code == 1
        index = "select relname::text from pg_class where relname = 't_id'"
        assert app.ask(shard, index), "the first part is there"
        app.ask(shard, "truncate t")
    # Alone it says nothing.
    app.up("--shards", "0")
    assert [key for key, _ in records(app)] == ["one"]
    app.up()
    assert seen(app) == []
    app.ask(3, "drop index t_id")
    assert seen(app) == [("schema-differs", (3,))]


def test_damage_of_one_shard_does_not_keep_a_revision_from_its_record(app: App) -> None:
    app.add_two()
    app.up("one")
    app.ask(0, UNLOGGED)
    app.up()
    assert [key for key, _ in records(app)] == ["one", "two"]
    assert seen(app) == [("schema-differs", (0,))]


def test_what_no_command_recorded_is_named_and_accepted_after_it_was_shown(app: App) -> None:
    everywhere(app, "create table users (id bigint primary key default next_id())")
    assert seen(app) == [("schema-unrecorded", EVERY)]
    words = ("shard", "accept-schema")
    shown = app.command(*words, "--dry-run")
    assert (shown.code, records(app)) == (0, [])
    assert "nothing was recorded yet" in shown.out
    refused = app.command(*words)
    assert (refused.code, records(app)) == (2, [])
    assert "--yes" in refused.err
    assert app.command(*words, "--yes").code == 0
    assert seen(app) == []
    everywhere(app, "alter table users add name text")
    assert seen(app) == [("schema-differs", EVERY)]
    (row,) = json.loads(app.command(*words, "--dry-run", "--json").out)
    assert row["differences"] == [
        "+ column users.name text",
        "- column order users id",
        "+ column order users id, name",
    ]
    assert app.command(*words, "--yes").code == 0
    assert seen(app) == []
    again = app.command(*words, "--yes")
    assert (again.code, again.out) == (0, "")


def test_shards_that_differ_are_not_accepted_unless_one_is_named(app: App) -> None:
    everywhere(app, "create table users (id bigint primary key default next_id())")
    app.ask(6, "alter table users add name text")
    with catalog_at(app.url) as catalog:
        with pytest.raises(ClusterConflict, match=r"shard 6 differ.* from shard 0"):
            recording.plan_acceptance(catalog)
        recording.accept(catalog, recording.plan_acceptance(catalog, 6), "test")
    assert seen(app) == [("schema-differs", (0, 1, 2, 3, 4, 5, 7))]


def test_look_ups_and_grants_are_recorded(app: App, make_role: MakeRole) -> None:
    app.add(
        "one",
        'op.create_table("users", key_column(), sa.Column("email", sa.Text, nullable=False, unique=True))',
    )
    app.up()
    role = str(make_role("drawer").username)
    with catalog_at(app.url) as catalog:
        provision.grant(catalog, role, dry_run=True)
        provision.grant(catalog, role)
        assert seen(app) == []
        lookups.create(catalog, "users.email")
        lookups.backfill(catalog, "users.email")
        assert seen(app) == []
        lookups.drop(catalog, "users.email")
    assert seen(app) == []
    everywhere(
        app,
        f'grant usage on sequence id_counter to public; revoke execute on function next_id() from "{role}"',
    )
    assert sorted(one.what.partition(" in ")[0] for one in findings(app.url)) == [
        f'role "{role}" lacks rights',
        'role "public" has rights',
    ]
    everywhere(
        app,
        f'revoke usage on sequence id_counter from public; grant execute on function next_id() to "{role}"',
    )
    with catalog_at(app.url) as catalog:
        for shard in EVERY:
            app.ask(shard, f"select shardids.revoke_usage(array[{shard}], '{role}')", catalog=catalog)


def test_new_shards_record_the_first_schema(
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
        provision.init(catalog, DEFAULT, 4)
        provision.add_node(catalog, "a", dsn(url))
    assert app.command("shard", "create", "0-1", "--migrations", str(app.folder)).code == 0
    assert records(app) == [("two", "migrate")]
    assert seen(app) == []
    app.ask(0, UNLOGGED)
    app.ask(1, UNLOGGED)
    assert app.command("shard", "create", "2", "--migrations", str(app.folder)).code == 0
    assert seen(app) == [("schema-differs", (0, 1))]


def test_a_record_that_cannot_be_written_does_not_stop_a_migration(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ConnectionFailed("the catalog is gone")

    app.add_two()
    with monkeypatch.context() as patch:
        patch.setattr(recording, "write_schemas", refuse)
        app.up("one")
    assert (records(app), seen(app)) == ([], [("schema-unrecorded", EVERY)])
    app.up()
    assert records(app) == []
    assert app.command("shard", "accept-schema", "--yes").code == 0
    assert seen(app) == []


def test_a_revision_for_the_node_changes_the_contract(app: App) -> None:
    app.add_two()
    # As from PostgreSQL 15 on: elsewhere the node's contract has the right of PUBLIC in this schema.
    app.ask(0, "revoke create on schema public from public")
    app.add("node1", 'op.execute("create extension citext")', more='branch_labels = ("node",)')
    app.up()
    assert seen(app) == []
    app.ask(0, "create extension btree_gist schema public")
    (found,) = findings(app.url)
    assert (found.check, found.nodes, found.thing) == ("node-contract", ("a",), "extension btree_gist")
    words = (
        "node",
        "accept-contract",
        "a",
        "--yes",
        "--catalog",
        app.url.render_as_string(hide_password=False),
    )
    assert app.command(*words).code == 0
    assert seen(app) == []


@pytest.mark.long
def test_a_move_to_another_major_version_records_the_schema_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with temporary_servers(2, settings={"wal_level": "logical"}) as servers:
        url = parse_url(devcluster.create_cluster(servers, 2))
        monkeypatch.setenv("SHARDIDS_CATALOG", dsn(url))
        monkeypatch.setenv("SHARDIDS_MIGRATIONS", str(tmp_path / "migrations"))
        app = App(tmp_path / "migrations", url, capsys)
        app.add_two()
        app.up()
        with catalog_at(url) as catalog:
            source = catalog.node_of(0)
            # As if that server had written what is recorded.
            older = "update shardids_catalog.recorded_schema set server_version = 13"
            with catalog.engine.begin() as connection:
                connection.exec_driver_sql(older)
            real = recording.major_of
            monkeypatch.setattr(
                recording, "major_of", lambda engine: 13 if is_on(engine, source.url) else real(engine)
            )
            assert [one.check for one in findings(url)] == ["schema-unrecorded"]
            mover.move(catalog, 0, "b")
        assert seen(app) == []
        assert len(records(app)) == 2


def is_on(engine: Engine, url: str) -> bool:
    """Whether an engine leads to the server of a URL."""
    there = parse_url(url)
    return (engine.url.host, engine.url.port) == (there.host, there.port)
