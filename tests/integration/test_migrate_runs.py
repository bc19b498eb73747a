"""Runs of ``shardids migrate`` that are stopped, killed, locked out or under load: no shard is half done."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from itertools import islice
from threading import Event, Thread

import psycopg
import pytest
from sqlalchemy.engine import URL

from shardids.cli.migrate import shown
from shardids.errors import StatementFailed
from shardids.migrate.compiled import Compiled, Part
from shardids.migrate.plan import Position
from shardids.migrate.player import Player
from shardids.migrate.runner import one_run
from shardids.migrate.status import unlike
from shardids.pg.locks import AdvisoryLock
from tests.conftest import dsn, found_cluster
from tests.support.client_programs import client_folder
from tests.support.clusters import catalog_at, connected
from tests.support.lengths import sampled
from tests.support.migrations import App
from tests.support.waiting import wait_for

ALL = range(8)
LONG = os.environ.get("SHARDIDS_FAULTS") == "long"
KILLS, KILLED_SHARDS = (50, 200) if LONG else (2, 8)
"""How often a run is killed, and over how many shards."""

IN_PARTS = """
    op.execute("alter table users add age integer")
    with op.get_context().autocommit_block():
        op.create_index("users_name", "users", ["name"], unique=True, postgresql_concurrently=True)
        op.create_index("users_age", "users", ["age"], postgresql_concurrently=True)
    op.execute("alter table users add height integer")
    """
IN_PARTS_DOWN = """
    with op.get_context().autocommit_block():
        op.drop_index("users_age", postgresql_concurrently=True)
        op.drop_index("users_name", postgresql_concurrently=True)
    op.execute("alter table users drop age, drop height")
    """


def alike(app: App) -> bool:
    with app.migration() as migration:
        shards = migration.choose()
        return not unlike(migration.nodes, migration.placement, shards[0], shards)


def marks(app: App) -> dict[int, str]:
    """The shards that are half way through a revision."""
    with app.migration() as migration:
        positions = migration.state(migration.choose()).positions
    return {shard: position.unfinished for shard, position in positions.items() if position.unfinished}


# Outside a transaction.


@pytest.mark.parametrize("way", ["sql, in parts", "alembic"])
def test_an_index_that_was_left_invalid_is_built_again(app: App, way: str) -> None:
    app.add_two()
    body = IN_PARTS if way != "alembic" else 'op.get_bind().execute(sa.text("select 1"))\n' + IN_PARTS
    app.add("three", body.replace("\n    ", "\n"), IN_PARTS_DOWN, after="two")
    app.up("two")
    app.ask(5, "insert into users (name) values ('ann'), ('ann')")
    ran = app("up", "--json", "--continue-on-error")
    rows = {row["shard"]: row for row in ran.json["shards"]}
    assert (ran.code, {row["way"] for row in rows.values()}) == (1, {way})
    assert {shard for shard, row in rows.items() if row["status"] == "done"} == set(ALL) - {5}
    assert "could not create unique index" in rows[5]["error"]
    assert any("users_name" in line and "(invalid)" in line for line in app.descriptions()[5])
    app.ask(5, "delete from users where ctid = '(0,2)'")
    if way == "alembic":
        # What it did before its first COMMIT it would do again, as Alembic does.
        app.ask(5, "alter table users drop age")
    else:
        assert list(marks(app)) == [5]
    words = shlex.split(ran.json["retry"])
    again = app(*words[2:])
    assert again.code == 0, again
    assert alike(app)
    assert marks(app) == {}
    assert app("down").code == 0
    assert alike(app)
    assert not any("users_name" in line for line in app.descriptions()[0])


@pytest.mark.parametrize("after", sampled(range(1, 5), every=2))
def test_a_revision_in_parts_resumes_where_it_was_killed(
    app: App, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.add_two()
    app.add("three", IN_PARTS, IN_PARTS_DOWN, after="two")
    app.up("two")
    outside = Player._play_outside
    with monkeypatch.context() as patch:
        left = after

        def killed(self: Player, shard: int, part: Part, *, resumed: bool) -> None:
            nonlocal left
            # Odd: before the statement, even: after it, before anybody has written down that it was done.
            left -= 1
            if left == 0:
                raise StatementFailed("killed")
            outside(self, shard, part, resumed=resumed)
            left -= 1
            if left == 0:
                raise StatementFailed("killed")

        patch.setattr(Player, "_play_outside", killed)
        assert app("up", "--shards", "5").code == 1
    assert list(marks(app)) == [5]
    assert app("up", "--canary", "0").code == 0
    assert marks(app) == {}
    assert alike(app)


def test_a_first_revision_in_parts_resumes_where_it_was_killed(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a version table before it, and with one after it.
    app.add("one", 'op.execute("create table users (name text)")\n' + IN_PARTS.replace("\n    ", "\n"))

    def killed(_self: Player, _shard: int, _part: Part, *, resumed: bool) -> None:
        raise StatementFailed("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Player, "_play_outside", killed)
        assert app("up", "--shards", "5").code == 1
    assert list(marks(app)) == [5]
    assert app("up", "--canary", "0").code == 0
    assert marks(app) == {}
    assert alike(app)


def test_a_revision_that_was_changed_half_way(app: App) -> None:
    app.add_two()
    app.add("three", IN_PARTS, after="two")
    app.up("two")
    app.ask(5, "insert into users (name) values ('ann'), ('ann')")
    assert app("up", "--continue-on-error").code == 1
    app.add("three", IN_PARTS.replace("age integer", "age bigint"), after="two")
    for words in (("up",), ("down", "one", "--shards", "5")):
        ran = app(*words)
        assert (ran.code, "shard 5 is half way through revision three" in ran.err) == (1, True), ran
    assert app("stamp", "three", "--shards", "5").code == 0
    assert marks(app) == {}
    assert app("up").out == "Nothing to do: 8 shards are at the target\n"


# Locks.


@pytest.mark.long
def test_nobody_waits_longer_than_the_lock_timeout(app: App) -> None:
    app.add_two()
    app.up("one")
    longest_s, ended = [0.0], Event()
    with catalog_at(app.url) as catalog:
        url = app.node_url(5, catalog)

    def application() -> None:
        with connected(url) as connection:
            while not ended.is_set():
                began = time.monotonic()
                connection.execute("insert into shard_0005.photos (user_id) values (null)")
                longest_s[0] = max(longest_s[0], time.monotonic() - began)
                time.sleep(0.002)

    threads = [Thread(target=application) for _ in range(4)]
    for thread in threads:
        thread.start()
    run = app.start("up", "--shards", "5", "--lock-timeout", "500ms", "--retries", "50")
    try:
        with connected(url) as connection, connection.transaction():
            connection.execute("select from shard_0005.photos")  # a report that takes its time
            assert run.stderr is not None
            refused = list(islice((line for line in run.stderr if "attempt" in line), 3))
        out, err = run.communicate(timeout=60)
    finally:
        run.kill()
        ended.set()
        for thread in threads:
            thread.join()
    assert run.returncode == 0, err
    for number, line in enumerate(refused, 1):
        assert line.startswith(f"shard 5: attempt {number}: ")
        assert "table photos is locked by process " in line
    assert "done" in out
    assert app.revisions()[5] == ("two",)
    # The timeout, and what a busy machine adds to it; without it they had waited for the report.
    assert longest_s[0] < 0.5 + 0.7


def test_a_lock_timeout_names_the_table_and_who_holds_it(app: App) -> None:
    app.add_two()
    app.up("one")
    with catalog_at(app.url) as catalog:
        url = app.node_url(5, catalog)
    words = ("up", "--shards", "5", "--lock-timeout", "100ms", "--retries", "0")
    with connected(url) as holder:
        with holder.transaction():
            holder.execute("select from shard_0005.photos")
            ran = app(*words)
        pid = holder.info.backend_pid
        assert ran.code == 1
        assert f'node "b": table photos is locked by process {pid} of role' in ran.err
        assert f"or end it: select pg_terminate_backend({pid})" in ran.err
    assert app(*words).code == 0


def test_one_run_at_a_time(app: App) -> None:
    app.add_two()
    with catalog_at(app.url) as catalog, one_run(catalog, "migrate up"):
        for words in (("up",), ("stamp", "one")):
            ran = app(*words)
            assert (ran.code, ran.out) == (1, "")
            assert "another run is changing the shards of this cluster: shardids migrate up by " in ran.err
            assert f" since {time.strftime('%Y-%m-%d', time.gmtime())} " in ran.err
        assert app("status").code == 0
        assert app("up", "--dry-run").code == 0
    assert set(app.revisions().values()) == {None}
    app.up()


def test_a_shard_that_somebody_is_at(app: App) -> None:
    app.add_two()
    with catalog_at(app.url) as catalog:
        url = app.node_url(5, catalog)
    with psycopg.connect(dsn(url), autocommit=True, application_name="a DBA") as connection:
        connection.execute("select pg_advisory_lock(%s, 5)", [AdvisoryLock.LEASE])
        ran = app("up", "--retries", "0", "--continue-on-error", "--json")
        (failed,) = [row for row in ran.json["shards"] if row["status"] == "failed"]
        assert failed["error"] == (
            f"shard 5 is being changed by another session (a DBA, process {connection.info.backend_pid})"
            ' [node "b"]. Wait until it has ended, and run the command again.'
        )
    app.up()


def test_a_shard_that_another_run_has_migrated_meanwhile(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    app.add_two()
    app.up("one")
    play = Player.play

    def late(self: Player, position: Position, compiled: Compiled) -> None:
        # Plain Alembic, which takes no lease, was quicker between this run's look at the shard and its turn.
        monkeypatch.setattr(Player, "play", play)
        with catalog_at(app.url) as catalog, connected(app.node_url(position.shard, catalog)) as alembic:
            alembic.execute(f"set search_path to shard_{position.shard:04}")
            alembic.execute(compiled.sql.encode())
        play(self, position, compiled)

    monkeypatch.setattr(Player, "play", late)
    rows = app.up("--jobs", "1")
    assert {row["to"] for row in rows.values()} == {"two"}
    assert alike(app)


# Interruptions.


SLOW = """op.execute("create table t (); select pg_sleep(0.3)")"""


@pytest.mark.long
def test_an_interruption_finishes_the_shards_that_run(app: App) -> None:
    app.add("one", SLOW)
    run = app.start("up", "--json")
    wait_for(lambda: any(app.revisions().values()), "the first shard is done")
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=30)
    assert run.returncode == 1, err
    assert "Stopping" in err
    assert "Traceback" not in err
    report = json.loads(out)
    rows = {row["shard"]: row for row in report["shards"]}
    done = {shard for shard, row in rows.items() if row["status"] == "done"}
    assert {row["status"] for row in rows.values()} == {"done", "not started"}
    assert {shard for shard, heads in app.revisions().items() if heads == ("one",)} == done
    assert app(*shlex.split(report["retry"])[2:]).code == 0
    assert alike(app)


@pytest.mark.long
def test_a_second_interruption_ends_the_run_at_once(app: App) -> None:
    app.add("one", 'op.execute("create table t (); select pg_sleep(4)")')
    run = app.start("up", "--shards", "0-1")
    assert run.stderr is not None
    wait_for(lambda: _asleep(app), "the first shard is at it")
    run.send_signal(signal.SIGINT)
    assert run.stderr.readline().startswith("Stopping")
    run.send_signal(signal.SIGINT)
    code, said = finish(run)
    assert (code, "Interrupted" in said) == (1, True)
    assert _asleep(app)
    # The server may still be at it: the next run waits, and finds the shard done or takes it on.
    assert app("up", "--retries", "20", "--shards", "0").code == 0
    assert app.revisions()[0] == ("one",)


def _asleep(app: App) -> bool:
    with connected(app.url) as connection:
        return bool(
            connection.execute("select from pg_stat_activity where wait_event = 'PgSleep'").fetchall()
        )


def four_ways(app: App, blank_database: Callable[[], URL]) -> None:
    """Four revisions over many shards, that run both ways in one round trip, in parts and through Alembic."""
    app.add_two()
    app.add("three", IN_PARTS, IN_PARTS_DOWN, after="two")
    in_python = "op.get_bind().execute(sa.text('{}'))"
    app.add(
        "four",
        in_python.format("create table four ()") + "; op.execute('alter table four add x int')",
        in_python.format("drop table four"),
        after="three",
    )
    if len(ALL) != KILLED_SHARDS:
        app.url = blank_database()
        found_cluster(app.url, {"a": app.url, "b": blank_database()}, KILLED_SHARDS)


@pytest.mark.long
@pytest.mark.parametrize(("way", "back"), [("up", "down"), ("down", "up")])
def test_a_run_that_is_killed_is_continued_by_the_next(
    app: App, blank_database: Callable[[], URL], way: str, back: str
) -> None:
    """Killed at random moments, however long its start takes: another run ends at the target everywhere."""
    four_ways(app, blank_database)
    ends = {"up": "head", "down": "base"}
    assert finish(app.start("up", "--jobs", "2"))[0] == 0
    began = time.monotonic()
    assert finish(app.start("down", "base", "--jobs", "2"))[0] == 0
    usual_s = time.monotonic() - began
    dice = random.Random(11)
    for _ in range(KILLS):
        assert finish(app.start(back, ends[back], "--jobs", "2"))[0] == 0
        target = dice.choice(("two", "three", ends[way]))
        run = app.start(way, target, "--jobs", "2")
        time.sleep(dice.uniform(0.2, 1.0) * usual_s)
        run.kill()
        finish(run)
        code, said = finish(app.start(way, ends[way], "--jobs", "2", "--canary", "0"))
        assert code == 0, said
        assert set(app.revisions().values()) == {("four",) if way == "up" else ()}
        assert alike(app)
        assert marks(app) == {}


@pytest.mark.parametrize("after", sampled(range(1, 5), every=2))
def test_a_downgrade_in_parts_resumes_where_it_was_killed(
    app: App, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.add_two()
    app.add("three", IN_PARTS, IN_PARTS_DOWN, after="two")
    app.up()
    outside = Player._play_outside
    with monkeypatch.context() as patch:
        left = after

        def killed(self: Player, shard: int, part: Part, *, resumed: bool) -> None:
            nonlocal left
            # Odd: before the statement, even: after it, before it was recorded as done.
            left -= 1
            if left == 0:
                raise StatementFailed("killed")
            outside(self, shard, part, resumed=resumed)
            left -= 1
            if left == 0:
                raise StatementFailed("killed")

        patch.setattr(Player, "_play_outside", killed)
        assert app("down", "two", "--shards", "5").code == 1
    assert list(marks(app)) == [5]
    # Neither the other direction nor a revision further down skips the rest of it.
    ran = app("up", "--shards", "5")
    assert (ran.code, "shard 5 is half way through revision three (down)" in ran.err + ran.out) == (
        1,
        True,
    ), ran
    assert app("down", "base", "--canary", "0").code == 0
    assert marks(app) == {}
    assert alike(app)
    assert set(app.revisions().values()) == {()}


def finish(run: subprocess.Popen[str]) -> tuple[int, str]:
    said = "".join(run.communicate(timeout=120))
    return run.returncode, said


# By hand.


def test_a_file_for_psql_counts_as_applied(app: App) -> None:
    app.add_two()
    app.add("three", IN_PARTS, IN_PARTS_DOWN, after="two")
    app.up("one", "--shards", "0-5")
    app.up("three", "--shards", "6")
    for way, between, left in (
        ("up", "base:head", "0-6"),
        ("up", "one:three", "6"),
        ("down", "three:base", ""),
    ):
        ran = app(way, between, "--sql", "--out", "files")
        assert ran.code == 0, ran
        if left:
            assert f"left out: {left}" in ran.err
        for node, shard in (("a", 0), ("b", 4)):
            path = app.folder.parent / "files" / f"{node}.sql"
            if path.exists():
                assert _psql(app, shard, path.read_text()) == (0, "")
                # Once more: each shard refuses, for it is not where it was.
                code, said = _psql(app, shard, path.read_text())
                assert (code, "is at revision" in said) == (3, True), said
                path.unlink()
        assert alike(app) == (between != "base:head")
    assert set(app.revisions().values()) == {()}
    app.add("four", "op.get_bind().execute(sa.text('select 1'))", after="three")
    ran = app("up", "base:head", "--sql", "--nodes", "a")
    assert (ran.code, "revision four needs a connection" in ran.err) == (1, True)


def test_a_file_is_of_one_direction(app: App) -> None:
    app.add_two()
    app.up()
    for way, between, other in (
        ("up", "two:one", "down"),
        ("up", "two:base", "down"),
        ("down", "one:two", "up"),
    ):
        ran = app(way, between, "--sql", "--nodes", "a")
        assert (ran.code, f"shardids migrate {other} {between} --sql" in ran.err) == (2, True), ran
    ran = app("down", "two:base", "--sql", "--nodes", "a")
    assert "-- It drops column photos.likes, with all rows.\n-- It drops table photos, with" in ran.out, ran


@pytest.mark.long
def test_a_file_on_the_way_down_that_is_killed_is_written_again(
    app: App, blank_database: Callable[[], URL], monkeypatch: pytest.MonkeyPatch
) -> None:
    """psql is killed at random moments; new files, and the commands that they name, bring all shards down."""
    four_ways(app, blank_database)
    monkeypatch.setenv("SHARDIDS_CATALOG", dsn(app.url))
    (app.folder / "versions" / "four.py").unlink()
    dice = random.Random(7)
    usual_s = 0.5
    for _ in range(1 + KILLS // 10):
        assert finish(app.start("up", "--jobs", "2"))[0] == 0
        for start in ("three", "three", "two", "one"):
            while "half way" in (ran := app("down", f"{start}:base", "--sql", "--out", "files")).err:
                words = re.findall(r"shardids (migrate down .*)", ran.err)[-1]
                assert app.command(*shlex.split(words)).code == 0
            if ran.code != 0:
                assert "no shard is at" in ran.err, ran
                continue
            for node, shard in (("a", 0), ("b", KILLED_SHARDS - 1)):
                path = app.folder.parent / "files" / f"{node}.sql"
                if path.exists():
                    began = time.monotonic()
                    _psql(
                        app, shard, path.read_text(), dice.uniform(0, usual_s) if start == "three" else None
                    )
                    usual_s = max(usual_s, time.monotonic() - began)
                    path.unlink()
        assert app("down", "base").code == 0
        assert set(app.revisions().values()) == {()}
        assert alike(app)
        assert marks(app) == {}


def _psql(app: App, shard: int, script: str, killed_after_s: float | None = None) -> tuple[int, str]:
    with catalog_at(app.url) as catalog:
        url = dsn(app.node_url(shard, catalog))
    words = [str(client_folder(14) / "psql"), "-X", "-q", url]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, text=True, **pipes) as run:
        try:
            out, err = run.communicate(script, timeout=killed_after_s)
        except subprocess.TimeoutExpired:
            run.kill()
            out, err = run.communicate()
    return run.returncode, out + err


# Contracts.


def test_a_contract_waits_until_every_shard_is_past_its_expand(app: App) -> None:
    app.add_two()
    app.add("three", "op.execute('alter table users drop name')", after="two", more='contract = "two"\n')
    ran = app("up", "--shards", "0-5")
    assert (ran.code, "Stopped before three, a contract" in ran.err) == (0, True), ran
    ran = app("up", "--contract", "--shards", "0-3")
    assert (ran.code, "shards 6-7: not past revision two" in ran.err) == (1, True), ran
    app.up()
    assert set(app.revisions().values()) == {("two",)}
    assert app("up", "--contract").code == 0
    assert set(app.revisions().values()) == {("three",)}
    assert "contract" in app("revision", "--list").out
    app.add("four", "pass", after="three", more='contract = "nonesuch"\n')
    assert "revision four is marked as the contract of 'nonesuch'" in app("up").err


# Many shards.


def test_lines_of_progress_and_groups_of_shards_that_are_alike(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.add("one", SLOW)
    monkeypatch.setattr(shown, "_MOST_ROWS", 4)
    monkeypatch.setattr(shown, "_LINE_EVERY_S", 0.02)
    ran = app("up")
    assert [line.split()[:5] for line in ran.out.splitlines()[1:3]] == [
        ["a", "0-3", "base", "one", "done"],
        ["b", "4-7", "base", "one", "done"],
    ]
    assert re.search(r"node [ab]: \d of 4 done, 1 running, 0 failed", ran.err)
    assert "8 done, 0 failed, 0 not started" in ran.out
