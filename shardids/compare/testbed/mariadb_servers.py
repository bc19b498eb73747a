"""Starts throw-away MariaDB servers, from the programs that are installed on the machine."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shardids.compare.testbed.private_server import (
    NOTHING,
    PrivateServer,
    ended,
    program_path,
    subfolder,
    workshop,
)
from shardids.dev.embedded.binaries import Account
from shardids.dev.embedded.data import log_tail
from shardids.dev.embedded.watchdog import Watchdog
from shardids.errors import ServerStartFailed
from shardids.multimaster.mariadb_session import pymysql


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
        """Creates the system tables."""
        program = program_path("mariadb-install-db", "mariadb-server")
        options = ["--no-defaults", f"--datadir={self._data}", "--skip-name-resolve", "--skip-test-db"]
        options += ["--auth-root-authentication-method=socket", "--innodb-log-file-size=32M"]
        child = self._spawn([program, *options])
        if code := child.wait():
            tail = log_tail(self.log_file, 0)
            raise ServerStartFailed(f"{program} failed with exit code {code}:\n{tail}")

    def copy_from(self, other: MariaDbServer) -> None:
        """Copies the files of another server, which must never have run."""
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
    """Starts a MariaDB server for each of the settings, with ``env`` added to their environment.

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
