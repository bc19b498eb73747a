"""MariaDB masters in a ring, with auto_increment_increment and auto_increment_offset."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pymysql
import pytest
from click.testing import Result
from typer.testing import CliRunner

from shardids.cli import app
from shardids.compare.multimaster import mariadb
from shardids.compare.multimaster.mariadb import Login, MariaDbMaster, connect, rows
from shardids.compare.multimaster.postgresql import OffsetStep
from shardids.compare.testbed.servers import MariaDbServer, temporary_mariadbs
from shardids.errors import ConnectionFailed, StatementFailed
from tests.baselines.ring import close_ring, ring_settings

PATIENCE_S = 30.0
ROWS = 200

SETTINGS = [ring_settings(1, 2), ring_settings(2, 2), ring_settings(3, 3)]

Ring = tuple[list[MariaDbServer], list[MariaDbMaster]]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[MariaDbServer]]:
    with temporary_mariadbs(SETTINGS) as servers:
        yield servers


@pytest.fixture
def trio(servers: list[MariaDbServer]) -> Ring:
    """Three servers as if new. The first two replicate to each other, and have a table and a user."""
    masters = [MariaDbMaster(name=n, login=s.login) for n, s in zip("abc", servers, strict=True)]
    for server, settings in zip(servers, SETTINGS, strict=True):
        server.start()
        with connect(server.login) as connection:
            for statement in ("stop slave", "reset slave all", "drop database if exists app"):
                rows(connection, statement)
            for statement in ("drop user if exists app@'127.0.0.1'", "reset master"):
                rows(connection, statement)
            rows(connection, "set global gtid_slave_pos = ''")
            for name, value in offset_settings_of(settings).items():
                rows(connection, f"set global {name} = {value}")
    close_ring(masters[:2])
    with connect(masters[0].login) as connection:
        rows(connection, "create database app")
        rows(
            connection,
            "create table app.photo (id bigint auto_increment primary key, born int not null)",
        )
        rows(connection, "create user app@'127.0.0.1' identified by 'app'")
        rows(connection, "grant select, insert on app.* to app@'127.0.0.1'")
    eventually(lambda: can_log_in(masters[1]))
    return servers, masters


def offset_settings_of(settings: dict[str, str]) -> dict[str, str]:
    return {name.replace("-", "_"): value for name, value in settings.items() if name.startswith("auto")}


def url(master: MariaDbMaster) -> str:
    login = master.login
    return f"{master.name}=mariadb://{login.user}:{login.password}@{login.host}:{login.port}"


def command(*words: str) -> Result:
    return CliRunner().invoke(app, ["multimaster", *words])


def application(master: MariaDbMaster) -> Any:
    login = Login(host=master.login.host, port=master.login.port, user="app", password="app")
    return connect(login, "app")


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def photos(master: MariaDbMaster) -> list[tuple[int, int]]:
    with application(master) as connection:
        return rows(connection, "select id, born from photo order by id")


def can_log_in(master: MariaDbMaster) -> bool:
    try:
        photos(master)
    except (ConnectionFailed, pymysql.err.MySQLError):
        return False
    return True


def write(connection: Any, count: int = ROWS) -> list[int]:
    keys = []
    with connection.cursor() as cursor:
        for _ in range(count):
            cursor.execute("insert into photo (born) values (@@server_id)")
            keys.append(cursor.lastrowid)
    return keys


def write_together(masters: Sequence[MariaDbMaster], count: int = ROWS) -> None:
    def session(master: MariaDbMaster) -> None:
        with application(master) as connection:
            write(connection, count)

    with ThreadPoolExecutor(len(masters)) as pool:
        list(pool.map(session, masters))


def all_have(masters: Sequence[MariaDbMaster], count: int) -> Callable[[], bool]:
    return lambda: all(len(photos(master)) == count for master in masters)


def faults(masters: Sequence[MariaDbMaster]) -> set[tuple[str, str]]:
    return {(f.master, f.problem) for f in mariadb.verify_ring(mariadb.read_ring(masters))}


def apply(masters: Sequence[MariaDbMaster], *, skip: Sequence[str] = ()) -> list[str]:
    """Takes the steps of a plan but for some phases, and gives their phases."""
    steps = [step for step in mariadb.plan_ring(mariadb.read_ring(masters)) if step.phase not in skip]
    mariadb.carry_out_ring(masters, steps)
    return [step.phase for step in steps]


def test_two_masters_then_one_then_three(trio: Ring) -> None:
    servers, masters = trio
    a, b, c = masters
    pair = [a, b]
    # Their option files hold the offsets; only the guards are missing.
    eventually(lambda: faults(pair) == {("a", "guard"), ("b", "guard")})
    assert apply(pair) == ["guard", "guard"]
    assert faults(pair) == set()

    write_together(pair)
    eventually(all_have(pair, 2 * ROWS))
    assert photos(a) == photos(b)
    assert {(key % 2, born) for key, born in photos(a)} == {(1, 1), (0, 2)}

    # One is lost; the other goes on, and the first takes over what it missed.
    servers[0].kill()
    with application(b) as connection:
        write(connection, ROWS)
    with pytest.raises(ConnectionFailed):
        application(a)
    servers[0].start()
    with application(a) as connection:
        write(connection, 10)
    eventually(all_have(pair, 3 * ROWS + 10))
    assert photos(a) == photos(b)
    assert faults(pair) == set()

    # A third joins: first its rows, then the offsets of all, and only then its own writes.
    close_ring(masters)
    eventually(lambda: can_log_in(c))
    eventually(all_have([c], 3 * ROWS + 10))
    eventually(
        lambda: (
            faults(masters)
            == {("a", "wrong-increment"), ("b", "wrong-increment"), *((name, "guard") for name in "abc")}
        )
    )
    with application(b) as began_before:
        write(began_before, 1)
        grown = command("--master", url(a), "--master", url(b), "--new", url(c))
        assert (grown.exit_code, grown.stdout) == (
            0,
            "18 steps taken: 3 masters, each counting by 3 from its own offset\n",
        )
        with pytest.raises(pymysql.err.MySQLError):
            write(began_before, 1)
    assert faults(masters) == set()
    assert command("--verify", *(word for m in masters for word in ("--master", url(m)))).exit_code == 0
    write_together(masters)
    total = 3 * ROWS + 11 + 3 * ROWS
    eventually(all_have(masters, total))
    assert photos(a) == photos(b) == photos(c)
    assert {(key % 3, born) for key, born in photos(a)[-3 * ROWS + 50 :]} == {(1, 1), (2, 2), (0, 3)}


def test_what_collides_when_a_step_is_skipped(trio: Ring) -> None:
    _, masters = trio
    close_ring(masters)
    eventually(lambda: can_log_in(masters[2]))
    a, b, _ = masters
    with application(b) as began_before:
        write(began_before, 1)
        eventually(all_have(masters, 1))
        # All but the end of the sessions that began before, and the guards.
        apply(masters, skip=("end-sessions", "guard"))
        for master in masters:
            with connect(master.login) as connection:
                rows(connection, "stop slave")
        old = write(began_before, 6)
        with application(a) as connection:
            new = write(connection, 6)
    assert {key % 2 for key in old} == {0}
    assert {key % 3 for key in new} == {1}
    assert set(old) & set(new)
    for master in masters:
        with connect(master.login) as connection:
            rows(connection, "start slave")
    eventually(lambda: any("Duplicate entry" in s.replication_error for s in mariadb.read_ring(masters)))
    assert ("a", "replication") in faults(masters)


def test_refusals_leave_the_masters_writing(trio: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    servers, masters = trio
    a, b, _ = masters
    apply([a, b])
    assert faults([b, a]) == {(name, fault) for name in "ab" for fault in ("wrong-offset", "guard")}
    with connect(b.login) as connection:
        rows(connection, "stop slave")
    with application(a) as connection:
        write(connection, 1)
    # It waits for longer than the driver does for one answer.
    monkeypatch.setattr(mariadb, "_ANSWER_TIMEOUT_S", 1)
    monkeypatch.setattr(mariadb, "CATCH_UP_S", 1.5)
    with connect(a.login) as connection:
        rows(connection, "set global auto_increment_increment = 4")
    with pytest.raises(StatementFailed, match=r'catch-up on master "b".*within 1\.5 s') as late:
        apply([a, b])
    monkeypatch.undo()
    with connect(a.login) as connection:
        rows(connection, "set global auto_increment_increment = 2")
    assert "take writes again, with their old offsets" in late.value.hint
    assert faults([a, b]) == {("b", "replication")}
    with application(a) as connection:
        write(connection, 1)
    with connect(b.login) as connection:
        rows(connection, "start slave")

    # A switch that fails leaves nobody writing, until the steps were taken again.
    with connect(a.login) as connection:
        rows(connection, "set global auto_increment_increment = 4")
    steps = mariadb.plan_ring(mariadb.read_ring([a, b]))
    broken = [
        dataclasses.replace(s, statement="SET GLOBAL no_such = 1") if s.phase == "switch" else s
        for s in steps
    ]
    with pytest.raises(StatementFailed, match=r'switch on master "a".*no_such') as halfway:
        mariadb.carry_out_ring([a, b], broken)
    assert "The masters are read-only" in halfway.value.hint
    assert faults([a, b]) == {("a", "wrong-increment"), ("a", "limited"), ("b", "limited")}
    with application(a) as connection, pytest.raises(pymysql.err.MySQLError, match="read-only"):
        write(connection, 1)
    apply([a, b])
    with application(a) as connection:
        write(connection, 1)
    with connect(b.login) as connection:
        rows(connection, "stop slave")
    servers[2].stop()
    with pytest.raises(ConnectionFailed):
        mariadb.carry_out_ring(masters, steps)
    assert faults([a, b]) == {("b", "replication")}


def start_with(server: MariaDbServer, settings: Mapping[str, str], master: MariaDbMaster) -> None:
    """Restarts a server after a crash, with an option file that holds nothing but these settings."""
    server.kill()
    server.settings = {k: v for k, v in server.settings.items() if k.startswith("innodb")} | dict(settings)
    server.start()
    eventually(lambda: can_log_in(master))


def test_a_master_without_its_option_file_takes_no_rows_until_it_has_its_offsets(trio: Ring) -> None:
    servers, masters = trio
    pair = masters[:2]
    b = pair[1]
    apply(pair)
    with application(b) as connection:
        write(connection, 1)
    try:
        start_with(servers[1], {}, b)
        with application(b) as connection, pytest.raises(pymysql.err.MySQLError, match="restart, or run"):
            write(connection, 1)
        with connect(b.login, "app") as connection:
            for statement in (
                "insert into photo (born) values (9)",
                "insert ignore into photo (born) values (9)",
                "replace into photo (born) select 9",
                "insert into photo (id, born) values (2, 9) on duplicate key update born = 9",
            ):
                with pytest.raises(pymysql.err.MySQLError, match="shardids: this master counts with"):
                    rows(connection, statement)
        assert ("b", "no-offset") in faults(pair)
        # SET GLOBAL in its place is enough, for sessions that begin afterwards; and so is the option file.
        with connect(b.login) as connection:
            rows(connection, "set global auto_increment_increment = 2, global auto_increment_offset = 2")
        with application(b) as connection:
            assert write(connection, 1)[0] % 2 == 0
        start_with(servers[1], SETTINGS[1], b)
        with application(b) as connection:
            assert write(connection, 1)[0] % 2 == 0
        assert "guard" not in {fault for _, fault in faults(pair)}
    finally:
        start_with(servers[1], SETTINGS[1], b)


def test_guards_let_pass_only_rows_that_are_counted_right(trio: Ring) -> None:
    _, masters = trio
    pair = a, b = masters[:2]
    with application(b) as began_before:
        with connect(a.login) as connection:
            rows(connection, "set global auto_increment_increment = 4")
        apply(pair, skip=["end-sessions"])
        began_before.ping(reconnect=False)
        rows(began_before, "set auto_increment_increment = 1")
        with pytest.raises(pymysql.err.MySQLError, match="this session does not"):
            write(began_before, 1)
    # A replica repeats statements with the offset of the master that they come from.
    for master in pair:
        with connect(master.login) as connection:
            rows(connection, "set global binlog_format = 'STATEMENT'")
    write_together(pair, 20)
    eventually(all_have(pair, 40))
    for master in pair:
        with connect(master.login) as connection:
            rows(connection, "set global binlog_format = 'ROW'")
    # A table of later has no guard until the command runs again, which stops nobody for it.
    with connect(a.login) as connection:
        rows(connection, "rename table app.photo to app.`old photo`")
        rows(connection, "create table app.photo like app.`old photo`")
    eventually(lambda: faults(pair) == {("a", "guard"), ("b", "guard")})
    names = [word for master in pair for word in ("--master", url(master))]
    assert "app.photo" in command("--verify", *names).stdout
    assert command(*names).stdout.startswith("2 steps taken: 2 masters")
    assert command(*names).stdout.startswith("Nothing to do")
    eventually(lambda: can_log_in(b))
    write_together(pair, 5)
    eventually(all_have(pair, 10))


def test_a_guard_that_waits_for_too_long_leaves_the_masters_read_only(
    trio: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, masters = trio
    pair = a, b = masters[:2]
    monkeypatch.setattr(mariadb, "_LOCK_WAIT_S", 1)
    with connect(a.login) as connection:
        rows(connection, "set global auto_increment_increment = 4")
    readers = []

    def read(step: OffsetStep) -> None:
        if (step.phase, step.master) == ("end-sessions", "b"):
            reader = application(b)
            rows(reader, "begin")
            rows(reader, "select * from photo")
            readers.append(reader)

    steps = mariadb.plan_ring(mariadb.read_ring(pair))
    with pytest.raises(StatementFailed, match=r'guard on master "b".*[Ll]ock wait timeout') as halfway:
        mariadb.carry_out_ring(pair, steps, read)
    assert "must stay so" in halfway.value.hint
    assert {("a", "limited"), ("b", "limited"), ("b", "guard")} <= faults(pair)
    assert apply(pair)[-1] == "resume"
    assert faults(pair) == set()
    readers[0].close()


def test_offsets_are_taken_back_to_one_master(trio: Ring) -> None:
    servers, masters = trio
    pair = a, b = masters[:2]
    apply(pair)
    write_together(pair, 20)
    alone = ("--master", url(a))
    refused = command(*alone)
    assert refused.exit_code == 2
    assert "A master counts by 2, and 1 is named" in refused.stderr
    assert faults(pair) == set()

    words = (*alone, "--leaving", url(b))
    planned = json.loads(command(*words, "--dry-run", "--json").stdout)
    assert [step["master"] for step in planned if step["phase"] == "resume"] == ["a"]
    done = command(*words)
    assert done.stdout == "9 steps taken: one master, counting by 1\n"
    assert 'option file of master "a", before its next start:\n[mariadbd]\n' in done.stderr
    assert command("--verify", *alone).stdout == "No faults found: one master, counting by 1\n"
    assert command(*words).stdout == "Nothing to do: one master, counting by 1\n"
    with application(a) as connection:
        first, second = write(connection, 2)
    assert second == first + 1
    assert first > max(key for key, _ in photos(b)[:40])
    eventually(all_have(pair, 42))
    # The one that left takes no rows, nor after a restart, which undoes read_only.
    with application(b) as connection, pytest.raises(pymysql.err.MySQLError, match="read-only"):
        write(connection, 1)
    servers[1].kill()
    servers[1].start()
    with application(b) as connection, pytest.raises(pymysql.err.MySQLError, match="has left the others"):
        write(connection, 1)
    # It may come back.
    assert command(*alone, "--new", url(b)).exit_code == 0
    eventually(lambda: faults(pair) == set())
    write_together(pair, 5)
    eventually(all_have(pair, 52))
