"""Revisions that drop tables and columns: no row goes before somebody has allowed it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time

import pytest

from tests.conftest import dsn
from tests.support.clusters import COMMAND, environment
from tests.support.migrations import App

ALL = range(8)
MODELS = """
import sqlalchemy as sa
import shardids
from shardids.migrate import run_environment

metadata = sa.MetaData()
TABLES
run_environment(metadata)
"""
USERS = """
sa.Table(
    "users", metadata, shardids.primary_key("id"), sa.Column("name", sa.Text, nullable=False),
    sa.Column("age", sa.Integer),
)
"""
PHOTOS = """
sa.Table("photos", metadata, shardids.primary_key("id"), sa.Column("title", sa.Text))
"""
IN_PYTHON = 'if op.get_bind().scalar(sa.text("select true")):\n    op.drop_table("users")'
HIDDEN = {
    "in Python": IN_PYTHON,
    "a column in Python": 'op.get_bind()\nop.drop_column("users", "age")',
    "in DO": "op.execute(\"do $$ begin execute 'drop table ' || quote_ident('users'); end $$\")",
    "by CASCADE": 'op.execute("drop type mood cascade")',
    "by a function": 'op.execute("create function f() returns void language sql as'
    " 'drop table users'; select f(); drop function f()\")",
    "and created again": 'op.get_bind()\nop.execute("drop table users; create table users (id bigint)")',
    "with the record of it": 'op.get_bind()\nop.execute("drop table users; reset shardids.columns")',
}
"""Bodies of revisions that drop something of table users, which their SQL does not name."""


def write_models(app: App, *tables: str) -> None:
    (app.folder / "env.py").write_text(MODELS.replace("TABLES", "".join(tables)))


def fill(app: App, *shards: int) -> None:
    for shard in shards:
        app.ask(shard, "insert into users (name, age) values ('ann', 7), ('ben', null)")


def with_users(app: App, *shards: int) -> None:
    """Users in all shards, with two rows in ``shards``, one of which has an age."""
    app.add(
        "one",
        """
        op.execute("create type mood as enum ('happy', 'sad')")
        op.create_table("users", key_column(), sa.Column("name", sa.Text), sa.Column("age", sa.Integer))
        op.execute("alter table users add mood mood default 'sad'")
        """,
        'op.drop_table("users"); op.execute("drop type mood")',
    )
    app.up()
    fill(app, *shards)


def counts(app: App, table: str = "users") -> list[int]:
    return [app.ask(shard, f"select count(*) from {table}")[0][0] for shard in ALL]


# What --autogenerate writes.


def test_autogenerate_says_what_it_removes_and_up_loses_no_row_of_it(app: App) -> None:
    write_models(app, USERS, PHOTOS)
    assert app("revision", "-m", "tables", "--autogenerate").code == 0
    app.up()
    fill(app, *ALL)
    app.ask(5, "insert into photos (title) values ('sea')")
    # The module that has photos is no longer imported, and a column of users went.
    write_models(app, USERS.replace('sa.Column("age", sa.Integer),', ""))
    ran = app("revision", "-m", "cleaning", "--autogenerate")
    assert ran.code == 0
    assert "Detected removed table 'photos'" in ran.err
    assert "Detected removed column 'users.age'" in ran.err
    assert "drops table photos, column users.age, with all rows" in ran.err
    (path,) = (app.folder / "versions").glob("*_cleaning.py")
    text = path.read_text()
    assert (
        "# It drops table photos.\n# It drops column users.age.\ndestructive = True\n\n\ndef upgrade" in text
    )
    assert "destructive" in app("revision", "--list").out

    ran = app("up")
    assert (ran.code, ran.out) == (1, "")
    assert "table photos (1 row in 1 shard: 5; revision " in ran.err
    assert "column users.age (8 rows in 8 shards: 0-7; revision " in ran.err
    assert "--allow-drop. To keep the rows, take the drop out of the revision. Autogenerate drops" in ran.err
    dry = app("up", "--dry-run")
    assert (dry.code, "the revisions drop table photos (1 row in 1 shard: 5" in dry.err) == (0, True)
    # Whoever removes the mark changes neither the question nor the revision's hash.
    path.write_text(text.replace("destructive = True\n", ""))
    assert "destructive" not in app("revision", "--list").out
    assert app("up").code == 1
    assert (counts(app), counts(app, "photos")[5]) == ([2] * 8, 1)
    app.up("--allow-drop", "--shards", "0-3")
    path.write_text(text)
    assert app("status").code == 0
    app.up("--yes")
    assert counts(app) == [2] * 8


def test_a_drop_of_what_has_no_rows_is_not_asked_about(app: App) -> None:
    with_users(app, 3)
    app.ask(3, "delete from users")
    app.add("two", 'op.drop_column("users", "age"); op.drop_table("users")', after="one")
    app.up()
    assert set(app.revisions().values()) == {("two",)}


def test_a_column_without_a_value_is_dropped_without_a_question(app: App) -> None:
    with_users(app, *ALL)
    for shard in ALL:
        app.ask(shard, "update users set age = null")
    app.add("two", 'op.drop_column("users", "age")', after="one")
    app.up()
    assert counts(app) == [2] * 8


@pytest.mark.parametrize(
    "body",
    [
        'op.drop_table("users")',
        'op.execute("DROP TABLE IF EXISTS nonesuch, Users CASCADE")',
        'op.execute("alter table if exists only users add x integer, drop age")',
        'op.execute("do $$ begin alter table users drop column age; end $$")',
        # In parts: nothing of the revision is committed before its drop is asked about.
        'op.execute("create table t ()")\nwith op.get_context().autocommit_block():\n'
        '    op.execute("create index concurrently i on users (name)")\nop.drop_column("users", "age")',
        'op.execute("create table t ()")\nwith op.get_context().autocommit_block():\n'
        '    op.execute("alter table users drop age")',
    ],
)
def test_drops_that_sql_names_are_counted_before_a_shard_is_begun(app: App, body: str) -> None:
    with_users(app, 2, 6)
    before = app.descriptions()
    app.add("two", body, after="one")
    ran = app("up")
    assert (ran.code, ran.out) == (1, ""), ran
    assert "nothing was changed: the revisions drop " in ran.err
    assert "2 shards: 2,6; revision two)" in ran.err
    assert (set(app.revisions().values()), app.descriptions()) == ({("one",)}, before)
    app.up("--allow-drop")


@pytest.mark.parametrize("body", HIDDEN.values(), ids=HIDDEN)
def test_drops_that_sql_hides_are_rolled_back_in_the_first_shard(app: App, body: str) -> None:
    # The rows are in other shards than the canary.
    with_users(app, 2, 6)
    before = app.descriptions()
    app.add("two", body, after="one")
    ran = app("up", "--json")
    rows = {row["shard"]: row for row in ran.json["shards"]}
    assert (ran.code, rows[0]["status"]) == (1, "failed")
    assert {row["status"] for shard, row in rows.items() if shard != 0} == {"not started"}
    if body != HIDDEN["with the record of it"]:
        assert "shard 0 is as it was: the revisions drop " in rows[0]["error"]
        assert "2 shards: 2,6)" in rows[0]["error"], rows[0]
    assert (set(app.revisions().values()), app.descriptions()) == ({("one",)}, before)
    assert counts(app) == [0, 0, 2, 0, 0, 0, 2, 0]
    app.up("--allow-drop")


@pytest.mark.parametrize("body", list(HIDDEN.values())[:-1], ids=list(HIDDEN)[:-1])
def test_drops_that_sql_hides_run_where_no_shard_has_rows(app: App, body: str) -> None:
    with_users(app)
    app.add("two", body, after="one")
    app.up()
    assert set(app.revisions().values()) == {("two",)}


def test_a_revision_in_python_that_drops_in_one_shard_stops_there(app: App) -> None:
    with_users(app, 3)
    body = 'if op.get_bind().scalar(sa.text("select count(*) from users")):\n    op.drop_table("users")'
    app.add("two", body, after="one")
    rows = {row["shard"]: row for row in app("up", "--json").json["shards"]}
    assert rows[3]["status"] == "failed"
    assert "table users (2 rows in 1 shard: 3)" in rows[3]["error"]
    assert counts(app)[3] == 2


@pytest.mark.parametrize("is_python", [False, True])
def test_parts_of_a_revision_in_python_are_guarded_each(app: App, is_python: bool) -> None:
    with_users(app, 0)
    first = (
        'op.execute("create table t ()")\n'
        if not is_python
        else 'op.get_bind()\nop.execute("create table t ()")\n'
    )
    for inside, after in (('op.execute("drop table users")', "pass"), ("pass", "op.execute(HIDDEN)")):
        body = f"{first}with op.get_context().autocommit_block():\n    {inside}\n{after}"
        body = body.replace("HIDDEN", "\"do $$ begin execute 'drop table users'; end $$\"")
        app.add("two", body, after="one")
        ran = app("up", "--shards", "0")
        assert (ran.code, "table users (2 rows in 1 shard: 0" in ran.err + ran.out) == (1, True), ran
        assert counts(app)[0] == 2
        app.ask(0, "drop table if exists t; comment on table alembic_version is null")


def test_a_partitioned_table_is_counted_by_its_parts(app: App) -> None:
    app.add(
        "one",
        """op.execute('''create table seen (day date, what text) partition by range (day);
        create table seen_1 partition of seen for values from ('2026-01-01') to ('2026-02-01');
        create table seen_2 partition of seen for values from ('2026-02-01') to ('2026-03-01')''')""",
    )
    app.up()
    app.ask(1, "insert into seen values ('2026-01-05', 'a'), ('2026-01-06', null)")
    app.add("two", 'op.execute("alter table seen drop what")', after="one")
    ran = app("up")
    assert (ran.code, "column seen_1.what (1 row in 1 shard: 1)" in ran.err) == (1, True), ran
    app.add("two", 'op.execute("drop table seen")', after="one")
    ran = app("up")
    assert (ran.code, "table seen_1 (2 rows in 1 shard: 1" in ran.err, "seen_2" in ran.err) == (
        1,
        True,
        False,
    )
    app.up("--allow-drop")


def test_rows_that_come_after_the_count_are_kept(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    with_users(app)
    app.add("two", 'op.drop_table("users")', after="one")
    from shardids.migrate.migration import Migration

    losses = Migration.losses

    def late(self: Migration, prepared: object) -> object:
        found = losses(self, prepared)  # type: ignore[arg-type] # what it is given
        fill(app, 4)
        return found

    monkeypatch.setattr(Migration, "losses", late)
    assert app("up").code == 1
    assert counts(app)[4] == 2


# On the way down.


def test_a_downgrade_asks_as_well(app: App) -> None:
    with_users(app, 2, 6)
    app.add(
        "two",
        'op.add_column("users", sa.Column("height", sa.Integer))',
        'op.drop_column("users", "height")',
        after="one",
    )
    app.up()
    # Nobody has written to the new column.
    assert app("down").code == 0
    assert counts(app)[2] == 2
    app.up()
    app.ask(6, "update users set height = 180")
    ran = app("down")
    assert (ran.code, "column users.height (2 rows in 1 shard: 6; revision two)" in ran.err) == (1, True), ran
    assert "stay at the present revision" in ran.err
    assert "Autogenerate" not in ran.err
    assert set(app.revisions().values()) == {("two",)}
    assert "the revisions drop table users (4 rows in 2 shards: 2,6" in app("down", "base", "--dry-run").err
    assert app("down", "base", "--allow-drop").code == 0
    assert set(app.revisions().values()) == {()}


# Who is asked.


def test_a_person_is_asked_with_the_counts(app: App) -> None:
    with_users(app, 2)
    app.add("two", 'op.drop_table("users")', after="one")
    app.add("three", "if op.get_bind(): op.execute('create table t ()')", after="two")
    for answer, code in (("n", 1), ("y", 0)):
        assert answered(app, answer) == code
        assert set(app.revisions().values()) == {("one",) if answer == "n" else ("three",)}


def answered(app: App, answer: str) -> int:
    """Runs ``up`` on a terminal, and answers its question."""
    ours, theirs = pty.openpty()
    run = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "migrate", "up"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(SHARDIDS_CATALOG=dsn(app.url), SHARDIDS_MIGRATIONS=str(app.folder), COLUMNS="200"),
    )
    os.close(theirs)
    said = b""
    try:
        while b"[y/N]" not in said:
            said += os.read(ours, 4096)
        assert b"Drop table users (2 rows in 1 shard: 2; revision two)?" in said
        os.write(ours, answer.encode() + b"\n")
        began = time.monotonic()
        while run.poll() is None and time.monotonic() - began < 60:
            try:
                os.read(ours, 4096)
            except OSError:  # the other side is closed
                break
        return run.wait(timeout=60)
    finally:
        run.kill()
        os.close(ours)


def test_lint_names_what_a_revision_drops(app: App) -> None:
    with_users(app)
    app.add("two", 'op.drop_column("users", "age")', after="one", more="destructive = True\n")
    ran = app("check", "--lint", "--json")
    (found,) = [row for row in ran.json if row["rule"] == "drops-rows"]
    assert (ran.code, found["revision"], found["message"]) == (
        3,
        "two",
        "It drops column users.age, with all rows.",
    )
