"""Throw-away MariaDB and Redis servers: private, restartable, and gone whatever happens."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pymysql
import pytest
import redis

from shardids.compare.multimaster.mariadb import Login
from shardids.compare.testbed.servers import temporary_mariadbs, temporary_redis
from shardids.errors import ServerStartFailed

BOTH = """
import time
from shardids.compare.testbed.servers import temporary_mariadbs
from shardids.compare.testbed.servers import temporary_redis
with temporary_mariadbs([{}]) as (mariadb,), temporary_redis() as cache:
    print(mariadb.folder.parent, cache.folder.parent, flush=True)
    time.sleep(60)
"""
REDIS = """
import time
from shardids.compare.testbed.servers import temporary_redis
with temporary_redis() as cache:
    print(cache.folder.parent, flush=True)
    time.sleep(60)
"""


def mysql(login: Login) -> pymysql.Connection:
    return pymysql.connect(host=login.host, port=login.port, user=login.user, password=login.password)


def running_in(folder: str) -> list[tuple[int, str]]:
    """User and command of the servers in a folder."""
    listed = subprocess.run(
        ["ps", "-axww", "-o", "uid=,command="], capture_output=True, text=True, check=True
    )
    rows = [line.strip().partition(" ") for line in listed.stdout.splitlines() if folder in line]
    return [(int(uid), command) for uid, _, command in rows if "watchdog" not in command]


def test_servers_are_private_and_keep_their_data_over_a_restart() -> None:
    with temporary_mariadbs([{"server-id": "7"}, {"server-id": "8"}]) as servers:
        ids = []
        for server in servers:
            with mysql(server.login) as connection, connection.cursor() as cursor:
                cursor.execute("select @@server_id, @@bind_address, current_user()")
                ids.append(cursor.fetchone())
        assert ids == [(7, "127.0.0.1", "shardids@127.0.0.1"), (8, "127.0.0.1", "shardids@127.0.0.1")]
        first = servers[0]
        with mysql(first.login) as connection, connection.cursor() as cursor:
            cursor.execute("create database kept")
        for again in (first.restart, first.kill):
            again()
            first.start()
            with mysql(first.login) as connection, connection.cursor() as cursor:
                cursor.execute("show databases like 'kept'")
                assert cursor.fetchall() == (("kept",),)
        for user, password in (("root", ""), (first.login.user, "guess")):
            with pytest.raises(pymysql.err.OperationalError):
                pymysql.connect(host=first.login.host, port=first.login.port, user=user, password=password)
        ((owner, command),) = running_in(str(first.folder))
        assert first.login.password not in command + repr(first.login)
        assert owner != 0
        folder = first.folder.parent
    assert not folder.exists()
    assert running_in(str(folder)) == []


def test_redis_wants_the_password() -> None:
    with temporary_redis() as server:
        with (
            redis.Redis(server.login.host, server.login.port, retry=None) as client,
            pytest.raises(redis.exceptions.AuthenticationError),
        ):
            client.ping()
        assert len(running_in(str(server.folder))) == 1


@pytest.mark.parametrize(("script", "signum"), [(BOTH, signal.SIGKILL), (REDIS, signal.SIGINT)])
def test_nothing_is_left_when_the_owner_ends(script: str, signum: signal.Signals) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert owner.stdout
    folders = owner.stdout.readline().split()
    assert all(running_in(folder) for folder in folders)
    owner.send_signal(signum)
    owner.wait(30)
    owner.stdout.close()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        left = [folder for folder in folders if Path(folder).exists() or running_in(folder)]
        if not left:
            return
        time.sleep(0.05)
    raise AssertionError(left)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardids.compare.testbed.servers.shutil.which", lambda *_, **__: None)
    with pytest.raises(ServerStartFailed, match="mariadb-install-db is not installed") as missing:
        temporary_mariadbs([{}]).__enter__()
    assert "apt-get install --no-install-recommends mariadb-server" in missing.value.hint
    with pytest.raises(ServerStartFailed, match="redis-server is not installed"):
        temporary_redis().__enter__()


def test_a_server_that_can_not_start_says_why() -> None:
    with pytest.raises(ServerStartFailed, match="no-such-option"), temporary_redis({"no-such-option": "1"}):
        pass
    with (
        pytest.raises(ServerStartFailed, match="no-such-option"),
        temporary_mariadbs([{"no-such-option": "1"}]),
    ):
        pass
