"""MariaDB masters in a ring, with auto_increment_increment and auto_increment_offset."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pymysql
import pytest
from click.testing import Result
from typer.testing import CliRunner

from shardids.cli import app
from shardids.compare.testbed.mariadb_servers import MariaDbServer, temporary_mariadbs
from shardids.errors import BadArgument, ConnectionFailed, StatementFailed
from shardids.multimaster import mariadb
from shardids.multimaster.mariadb import MariaDbMaster
from shardids.multimaster.mariadb_session import Login, connect, rows
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
    return CliRunner().invoke(app, ["baseline", "multimaster", *words])


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


def test_two_masters_then_one_then_three(trio: Ring) -> None:
    servers, masters = trio
    a, b, c = masters
    pair = [a, b]
    eventually(lambda: faults(pair) == set())

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
    eventually(lambda: faults(masters) == {("a", "wrong-increment"), ("b", "wrong-increment")})
    with application(b) as began_before:
        write(began_before, 1)
        grown = command("grow", "--master", url(a), "--master", url(b), "--new", url(c))
        assert (grown.exit_code, grown.stdout) == (
            0,
            "15 steps taken: 3 masters, each counting by 3 from its own offset\n",
        )
        with pytest.raises(pymysql.err.MySQLError):
            write(began_before, 1)
    assert faults(masters) == set()
    assert command("verify", *(word for m in masters for word in ("--master", url(m)))).exit_code == 0
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
        # All but the end of the sessions that began before.
        steps = [step for step in mariadb.plan_ring(masters) if step.phase != "end-sessions"]
        mariadb.carry_out_ring(masters, steps)
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
    with pytest.raises(BadArgument, match="1 masters need no offsets"):
        mariadb.plan_ring([a])
    assert faults([b, a]) == {("a", "wrong-offset"), ("b", "wrong-offset")}
    with connect(b.login) as connection:
        rows(connection, "stop slave")
    with application(a) as connection:
        write(connection, 1)
    monkeypatch.setattr(mariadb, "CATCH_UP_S", 0.5)
    with pytest.raises(StatementFailed, match=r'catch-up on master "b".*within 0\.5 s') as late:
        mariadb.carry_out_ring([a, b], mariadb.plan_ring([a, b]))
    assert "take writes again, with their old offsets" in late.value.hint
    assert faults([a, b]) == {("b", "replication")}
    with application(a) as connection:
        write(connection, 1)
    with connect(b.login) as connection:
        rows(connection, "start slave")

    # A switch that fails leaves nobody writing, until the steps were taken again.
    steps = mariadb.plan_ring([a, b])
    broken = [
        dataclasses.replace(s, statement="SET GLOBAL no_such = 1") if s.phase == "switch" else s
        for s in steps
    ]
    with pytest.raises(StatementFailed, match=r'switch on master "a".*no_such') as halfway:
        mariadb.carry_out_ring([a, b], broken)
    assert "The masters are read-only" in halfway.value.hint
    assert faults([a, b]) == {("a", "limited"), ("b", "limited")}
    with application(a) as connection, pytest.raises(pymysql.err.MySQLError, match="read-only"):
        write(connection, 1)
    mariadb.carry_out_ring([a, b], steps)
    with application(a) as connection:
        write(connection, 1)
    with connect(b.login) as connection:
        rows(connection, "stop slave")
    servers[2].stop()
    with pytest.raises(ConnectionFailed):
        mariadb.carry_out_ring(masters, mariadb.plan_ring(masters))
    assert faults([a, b]) == {("b", "replication")}
