"""What throw-away MariaDB and Redis servers share: a folder of their own, and an end whatever happens.

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
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from shardids.dev.embedded.binaries import Account, server_account
from shardids.dev.embedded.data import environment, log_tail, open_log, write_private
from shardids.dev.embedded.home import free_port, make_folder, new_temporary_path
from shardids.dev.embedded.watchdog import Watchdog
from shardids.errors import ServerStartFailed
from shardids.multimaster.mariadb_session import Login

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
        """Returns the file with what the server prints."""
        return self.folder.parent / f"{self.folder.name}.log"

    @property
    def is_running(self) -> bool:
        """Returns whether its process exists."""
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """Starts the server and waits until it answers; does nothing if it runs already.

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
        """Shuts the server down and waits for its end; kills it after 30 s."""
        if self._child is None:
            return
        self._child.send_signal(signal.SIGTERM)
        try:
            self._child.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kills the server, as in a crash."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def pause(self) -> None:
        """Stops the server's process where it is, as an overloaded machine does; :meth:`resume` ends that."""
        if self._child is not None:
            self._child.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets a paused server go on."""
        if self._child is not None:
            self._child.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """Shuts the server down and starts it again, on the same port."""
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
        """Writes the configuration for the next start."""

    @abstractmethod
    def _command(self) -> list[str]:
        """Returns the command that starts the server."""

    @abstractmethod
    def _mark(self) -> str:
        """Returns the argument that tells its command from all others."""

    @abstractmethod
    def _answers(self) -> bool:
        """Returns whether its user can log in."""


@contextlib.contextmanager
def workshop() -> Iterator[tuple[Path, Watchdog, Account | None]]:
    """Makes a temporary folder for servers, and a watchdog that removes it."""
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
    """Ends the servers with the block."""
    try:
        yield
    finally:
        # Their files are removed: there is no need to let them finish.
        for server in servers if watchdog.is_ours else ():
            server.kill()


def subfolder(folder: Path, number: int, account: Account | None) -> Path:
    """Makes the folder of one server."""
    path = folder / f"server-{number}"
    path.mkdir(mode=0o700)
    if account is not None:
        os.chown(path, account.uid, account.gid)
    return path


def program_path(name: str, package: str) -> str:
    """Returns where a program is.

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
