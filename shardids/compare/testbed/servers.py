"""Throw-away MariaDB and Redis servers, and an ID service, from the machine's own programs.

They run like the embedded PostgreSQL servers: on 127.0.0.1, on a free port, with a random password, in a
temporary folder, as an unprivileged user if root starts them. They and all their files are removed when
the block or the process that started them ends, even by ``kill -9``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from shardids.compare.multimaster.mariadb import Login, pymysql
from shardids.compare.schemes.scheme import library
from shardids.errors import ServerStartFailed
from shardids.pg.embedded.binaries import Account, server_account
from shardids.pg.embedded.data import (
    environment,
    free_port,
    log_tail,
    make_folder,
    new_temporary_path,
    open_log,
    write_private,
)
from shardids.pg.embedded.watchdog import Watchdog
from shardids.pg.sqlfiles import data_folder

NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
"""No settings, no variables."""

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.02
_PORT_TRIES = 5
_PORT_TAKEN = "Address already in use"


class PrivateServer(ABC):
    """A server in its own folder, which may be stopped, killed and started again."""

    def __init__(self, folder: Path, watchdog: Watchdog, account: Account | None, user: str) -> None:
        self.folder = folder
        self.env: Mapping[str, str] = NOTHING
        """The variables that are added to the environment at the next start."""
        self.login = Login(host="127.0.0.1", port=free_port(), user=user, password=secrets.token_urlsafe(24))
        self._watchdog, self._account = watchdog, account
        self._child: subprocess.Popen[bytes] | None = None
        self._has_run = False

    @property
    def log_file(self) -> Path:
        """Returns the file with the server's output."""
        return self.folder.parent / f"{self.folder.name}.log"

    @property
    def is_running(self) -> bool:
        """Returns whether its process exists."""
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """Start the server and wait until it answers; does nothing if it runs already.

        Raises:
            ServerStartFailed: it does not start; with the last lines of the log.
        """
        if self.is_running:
            return
        tries = 1 if self._has_run else _PORT_TRIES
        for left in reversed(range(tries)):
            failure = self._try_start()
            if failure is None:
                self._has_run = True
                return
            if not left or _PORT_TAKEN not in failure:
                raise ServerStartFailed(
                    f"{self._command()[0]} did not start on port {self.login.port}:\n{failure}"
                )
            self.login = dataclasses.replace(self.login, port=free_port())

    def _try_start(self) -> str | None:
        self._configure()
        offset = self.log_file.stat().st_size if self.log_file.exists() else 0
        self._child = self._spawn(self._command())
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            if self._child.poll() is not None or time.monotonic() > deadline:
                self.kill()
                return log_tail(self.log_file, offset) or "(nothing in the log)"
            time.sleep(_POLL_S)
        # Another program may have taken the port, but it does not know the password.
        return None

    def stop(self) -> None:
        """Shut the server down and wait for its end; kill it after 30 s."""
        if self._child is None:
            return
        self._child.send_signal(signal.SIGTERM)
        try:
            self._child.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill the server, as in a crash."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def pause(self) -> None:
        """Stop the server's process where it is, as an overloaded machine does; :meth:`resume` ends that."""
        if self._child is not None:
            self._child.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused server go on."""
        if self._child is not None:
            self._child.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """Shut the server down and start it again, on the same port."""
        self.stop()
        self.start()

    def _spawn(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with open_log(self.log_file) as log:
            return self._watchdog.spawn(
                command, mark=self._mark(), log=log, env=environment(self.env), account=self._account
            )

    def _write(self, name: str, text: str) -> Path:
        path = self.folder / name
        write_private(path, text, self._account)
        return path

    @abstractmethod
    def _configure(self) -> None:
        """Write the configuration for the next start."""

    @abstractmethod
    def _command(self) -> list[str]:
        """Return the command that starts the server."""

    @abstractmethod
    def _mark(self) -> str:
        """Return the argument that distinguishes its command from all others."""

    @abstractmethod
    def _answers(self) -> bool:
        """Return whether its user can log in."""


@contextlib.contextmanager
def workshop() -> Iterator[tuple[Path, Watchdog, Account | None]]:
    """Make a temporary folder for servers, and a watchdog that removes it."""
    account = server_account()
    folder = new_temporary_path(account)
    watchdog = Watchdog(remove=folder)
    try:
        make_folder(folder, account)
        yield folder, watchdog, account
    finally:
        if watchdog.is_ours:
            watchdog.close()
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def ended(servers: Sequence[PrivateServer], watchdog: Watchdog) -> Iterator[None]:
    """End the servers with the block."""
    try:
        yield
    finally:
        # Their files are removed: there is no need to let them finish.
        for server in servers if watchdog.is_ours else ():
            server.kill()


def subfolder(folder: Path, number: int, account: Account | None) -> Path:
    """Make the folder of one server."""
    path = folder / f"server-{number}"
    path.mkdir(mode=0o700)
    if account is not None:
        os.chown(path, account.uid, account.gid)
    return path


def program_path(name: str, package: str) -> str:
    """Return where a program is.

    Raises:
        ServerStartFailed: it is not installed; the hint names the package.
    """
    # Daemons are in sbin, which is not on every user's PATH.
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
    found = shutil.which(name, path=path)
    if found is None:
        raise ServerStartFailed(
            f"{name} is not installed",
            hint=f"On Debian: apt-get install --no-install-recommends {package}",
        )
    return found


class MariaDbServer(PrivateServer):
    """A MariaDB server; ``settings`` are those of its option file, and may be changed between starts.

    It is fast rather than durable: a commit is in the system's memory, not on the disk, so it survives a
    crash of the server but not of the machine.
    """

    def __init__(
        self, folder: Path, watchdog: Watchdog, account: Account | None, settings: Mapping[str, str]
    ) -> None:
        super().__init__(folder, watchdog, account, "shardids")
        self.settings = {
            "innodb-flush-log-at-trx-commit": "2",
            "innodb-buffer-pool-size": "64M",
            "innodb-log-file-size": "32M",
            "performance-schema": "OFF",
            **settings,
        }

    def install(self) -> None:
        """Create the system tables."""
        program = program_path("mariadb-install-db", "mariadb-server")
        options = ["--no-defaults", f"--datadir={self._data}", "--skip-name-resolve", "--skip-test-db"]
        options += ["--auth-root-authentication-method=socket", "--innodb-log-file-size=32M"]
        child = self._spawn([program, *options])
        if code := child.wait():
            tail = log_tail(self.log_file, 0)
            raise ServerStartFailed(f"{program} failed with exit code {code}:\n{tail}")

    def copy_from(self, other: MariaDbServer) -> None:
        """Copy the files of another server, which must never have run."""
        shutil.copytree(other._data, self._data)
        if self._account is not None:
            for path in (self._data, *self._data.rglob("*")):
                os.chown(path, self._account.uid, self._account.gid, follow_symlinks=False)

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _configure(self) -> None:
        user = f"'{self.login.user}'@'{self.login.host}'"
        # One statement per line; kept out of the binary log, from which other servers would replay them.
        init = self._write(
            "init.sql",
            "set sql_log_bin = 0;\n"
            f"create or replace user {user} identified by '{self.login.password}';\n"
            f"grant all on *.* to {user} with grant option;\n",
        )
        fixed = {
            "datadir": str(self._data),
            "port": str(self.login.port),
            "bind-address": self.login.host,
            "socket": str(self.folder / "socket"),
            "pid-file": str(self.folder / "pid"),
            "init-file": str(init),
        }
        lines = [f"{name} = {value}" for name, value in {**self.settings, **fixed}.items()]
        self._write("my.cnf", "\n".join(["[mariadbd]", "skip-name-resolve", *lines, ""]))

    def _command(self) -> list[str]:
        program = program_path("mariadbd", "mariadb-server")
        # --debug-gdb: shut down on SIGINT, too, which the watchdog tries first.
        return [program, f"--defaults-file={self.folder / 'my.cnf'}", self._mark(), "--debug-gdb"]

    def _mark(self) -> str:
        return f"--datadir={self._data}"

    def _answers(self) -> bool:
        driver = pymysql()
        try:
            driver.connect(
                host=self.login.host,
                port=self.login.port,
                user=self.login.user,
                password=self.login.password,
                connect_timeout=5,
            ).close()
        except driver.err.OperationalError:
            return False
        return True


@contextlib.contextmanager
def temporary_mariadbs(
    settings: Sequence[Mapping[str, str]], *, env: Mapping[str, str] = NOTHING
) -> Iterator[list[MariaDbServer]]:
    """Start a MariaDB server for each of the settings, with ``env`` added to their environment.

    Raises:
        ServerStartFailed: a server does not start; says what to install if the programs are missing.
    """
    program_path("mariadb-install-db", "mariadb-server")
    pymysql()
    with workshop() as (folder, watchdog, account):
        servers = [
            MariaDbServer(subfolder(folder, number, account), watchdog, account, each)
            for number, each in enumerate(settings, 1)
        ]
        with ended(servers, watchdog):
            for number, server in enumerate(servers):
                if number:
                    server.copy_from(servers[0])
                else:
                    server.install()
                server.env = env
            with ThreadPoolExecutor(max(len(servers), 1)) as pool:
                list(pool.map(MariaDbServer.start, servers))
            yield servers


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
        """Return a client of redis-py, to be closed."""
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
        """Start the servers that do not run, and wait until the replica has all that the primary has.

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
        """Stop the replica and cuts its link: from now on it receives nothing."""
        self.replica.pause()
        with self.primary.client() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "replica")

    def fail_over(self) -> None:
        """Kill the primary and promotes the replica, as it is; the old primary comes back as its replica."""
        self.primary.kill()
        self.replica.resume()
        self.replica.follows = None
        with self.replica.client() as client:
            client.replicaof("NO", "ONE")
        self.primary, self.replica = self.replica, self.primary
        self.start()


@contextlib.contextmanager
def temporary_redis(settings: Mapping[str, str] = NOTHING) -> Iterator[RedisServer]:
    """Start a Redis server.

    Raises:
        ServerStartFailed: it does not start; says what to install if the program is missing.
    """
    with _servers([settings]) as (server,):
        server.start()
        yield server


@contextlib.contextmanager
def temporary_redis_pair(settings: Mapping[str, str] = NOTHING) -> Iterator[RedisPair]:
    """Start a Redis server and its replica. Raises what :func:`temporary_redis` raises."""
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


class IdServiceServer(PrivateServer):
    """The ID service of ``examples/``, as this process's user, in front of the cluster with this catalog."""

    def __init__(self, folder: Path, watchdog: Watchdog, catalog_url: str) -> None:
        super().__init__(folder, watchdog, None, "")
        self.env = {"SHARDIDS_CATALOG": catalog_url}

    def _configure(self) -> None:
        shutil.copy(data_folder("examples") / "id_service.py", self.folder)

    def _command(self) -> list[str]:
        options = ["--host", self.login.host, "--port", str(self.login.port), "--no-access-log"]
        return [sys.executable, "-m", "uvicorn", "id_service:app", self._mark(), *options]

    def _mark(self) -> str:
        return f"--app-dir={self.folder}"

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((self.login.host, self.login.port), 5):
            return True
        return False


@contextlib.contextmanager
def temporary_id_service(catalog_url: str) -> Iterator[IdServiceServer]:
    """Start the ID service in front of a cluster that has its shards already.

    Raises:
        ServerStartFailed: it does not start.
        MissingLibrary: FastAPI or uvicorn is not installed.
    """
    for needed in ("fastapi", "uvicorn"):
        library(needed)
    with workshop() as (folder, watchdog, _):
        server = IdServiceServer(subfolder(folder, 1, None), watchdog, catalog_url)
        with ended([server], watchdog):
            server.start()
            yield server
