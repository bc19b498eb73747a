"""Starts throw-away Redis servers, from the program that is installed on the machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from shardids.compare.schemes.scheme import library
from shardids.compare.testbed.private_server import (
    NOTHING,
    PrivateServer,
    ended,
    program_path,
    subfolder,
    workshop,
)
from shardids.dev.embedded.binaries import Account
from shardids.dev.embedded.watchdog import Watchdog
from shardids.errors import ServerStartFailed
from shardids.multimaster.mariadb_session import Login

_LINK_TIMEOUT_S: Final = 30.0
_LINK_POLL_MS: Final = 100


class RedisServer(PrivateServer):
    """A Redis server; ``settings`` are those of its configuration, and may be changed between starts.

    Without settings it keeps its data in memory only.
    """

    def __init__(
        self, folder: Path, watchdog: Watchdog, account: Account | None, settings: Mapping[str, str]
    ) -> None:
        super().__init__(folder, watchdog, account, "default")
        self.settings = {"save": '""', "appendonly": "no", **settings}
        self.follows: Login | None = None
        """The primary that it is a replica of from the next start on."""

    def _configure(self) -> None:
        fixed = {
            "bind": self.login.host,
            "port": str(self.login.port),
            "dir": str(self.folder),
            "requirepass": self.login.password,
            "daemonize": "no",
            # It changes its process title: the mark must be in that, too.
            "proc-title-template": '"{title} {config-file} {listen-addr}"',
        }
        if self.follows:
            fixed |= {"replicaof": f"{self.follows.host} {self.follows.port}"}
            fixed |= {"masterauth": self.follows.password}
        lines = [f"{name} {value}" for name, value in {**self.settings, **fixed}.items()]
        self._write("redis.conf", "\n".join([*lines, ""]))

    def _command(self) -> list[str]:
        return [program_path("redis-server", "redis-server"), self._mark()]

    def _mark(self) -> str:
        return str(self.folder / "redis.conf")

    def _answers(self) -> bool:
        with self.client() as client:
            try:
                return bool(client.ping())
            except library("redis").exceptions.RedisError:
                return False

    def client(self) -> Any:
        """Returns a client of redis-py, to be closed."""
        return library("redis").Redis(
            self.login.host, self.login.port, password=self.login.password, retry=None
        )


class RedisPair:
    """A primary and its replica; they change places when the primary is lost.

    What Sentinel does is done here: promoting the replica, and letting the old primary follow it.
    """

    def __init__(self, primary: RedisServer, replica: RedisServer) -> None:
        self.primary, self.replica = primary, replica

    @property
    def logins(self) -> tuple[Login, Login]:
        """Returns where both listen, the primary first."""
        return self.primary.login, self.replica.login

    def start(self) -> None:
        """Starts what does not run, and waits until the replica has all that the primary has.

        Raises:
            ServerStartFailed: a server does not start, or the replica does not follow within 30 s.
        """
        self.primary.start()
        self.replica.follows = self.primary.login
        self.replica.start()
        deadline = time.monotonic() + _LINK_TIMEOUT_S
        with self.primary.client() as client:
            while not client.wait(1, _LINK_POLL_MS):
                if time.monotonic() > deadline:
                    raise ServerStartFailed(
                        f"Redis at port {self.replica.login.port} does not follow its primary"
                    )

    def hold_up(self) -> None:
        """Stops the replica and cuts its link: from now on it receives nothing."""
        self.replica.pause()
        with self.primary.client() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "replica")

    def fail_over(self) -> None:
        """Kills the primary and promotes the replica, as it is; the old primary comes back as its replica."""
        self.primary.kill()
        self.replica.resume()
        self.replica.follows = None
        with self.replica.client() as client:
            client.replicaof("NO", "ONE")
        self.primary, self.replica = self.replica, self.primary
        self.start()


@contextlib.contextmanager
def temporary_redis(settings: Mapping[str, str] = NOTHING) -> Iterator[RedisServer]:
    """Starts a Redis server.

    Raises:
        ServerStartFailed: it does not start; says what to install if the program is missing.
    """
    with _servers([settings]) as (server,):
        server.start()
        yield server


@contextlib.contextmanager
def temporary_redis_pair(settings: Mapping[str, str] = NOTHING) -> Iterator[RedisPair]:
    """Starts a Redis server and its replica. Raises what :func:`temporary_redis` raises."""
    with _servers([{**settings, "repl-diskless-sync-delay": "0"}] * 2) as (primary, replica):
        pair = RedisPair(primary, replica)
        pair.start()
        yield pair


@contextlib.contextmanager
def _servers(settings: Sequence[Mapping[str, str]]) -> Iterator[list[RedisServer]]:
    program_path("redis-server", "redis-server")
    library("redis")
    with workshop() as (folder, watchdog, account):
        servers = [
            RedisServer(subfolder(folder, number, account), watchdog, account, each)
            for number, each in enumerate(settings, 1)
        ]
        with ended(servers, watchdog):
            yield servers
