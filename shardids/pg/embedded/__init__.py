"""Throw-away PostgreSQL servers for tests, demos and ``shardids dev``.

A server listens on 127.0.0.1 only, has one superuser ``postgres`` with a random password, and
keeps everything in one folder. The password is in a ``pgpass`` file there, which
:meth:`EmbeddedServer.url` names; it never appears in a URL, a log or an error.

A server that is started *attached* ends with the process that started it, however that process ends; a
*detached* one runs until somebody stops it. Servers are fast rather than crash-safe: ``fsync`` is off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Self
from urllib.parse import quote

from shardids.errors import MissingPrivilege, ServerStartFailed
from shardids.pg.embedded.binaries import find_binaries, server_account, server_version, usable_binaries
from shardids.pg.embedded.data import (
    State,
    environment,
    free_port,
    make_cluster,
    make_folder,
    new_temporary_path,
    remove_files,
    settings_text,
    settle,
    write_settings,
)
from shardids.pg.embedded.postmaster import STOP_STEPS, Postmaster
from shardids.pg.embedded.watchdog import QUICK_STEPS, Watchdog

__all__ = [
    "EmbeddedServer",
    "StopMode",
    "find_binaries",
    "server_version",
    "temporary_server",
    "temporary_servers",
]

StopMode = Literal["fast", "immediate"]
"""The modes of ``pg_ctl stop``: ``fast`` writes a checkpoint; ``immediate`` leaves the work to recovery."""

_NOTHING: Mapping[str, str] = MappingProxyType({})
_RETRY_S = 5.0
_PORT_TAKEN = "could not create any TCP/IP sockets"
_NOT_YET_GONE = "pre-existing shared memory block"


class EmbeddedServer:
    """A PostgreSQL server in a folder of its own; :meth:`create` makes it, :meth:`open` finds it again.

    Not thread-safe.
    """

    def __init__(
        self, directory: Path, state: State, env: Mapping[str, str], watchdog: Watchdog | None
    ) -> None:
        self._directory = directory
        self._state = state
        self._env = env
        self._folder_watchdog = watchdog
        self._own_watchdog: Watchdog | None = None
        self._postmaster = Postmaster(state.data)
        self._attached = False
        self._has_run = False
        self._port_may_change = False

    @classmethod
    def create(
        cls,
        directory: Path,
        *,
        port: int | None = None,
        settings: Mapping[str, str] = _NOTHING,
        bindir: Path | None = None,
        env: Mapping[str, str] = _NOTHING,
    ) -> Self:
        """Return the server of this folder, and create it if it is missing; does not start it.

        ``port`` defaults to a free one, which the server then keeps. ``settings`` override the fast
        defaults from the next start on; ``ALTER SYSTEM`` overrides both. ``bindir`` defaults to what
        :func:`find_binaries` returns. ``env`` adds to the environment of the server, not of initdb.

        For root, the server runs as ``postgres`` or ``nobody``. If that user cannot reach the folder,
        the data is placed in a new folder below the temporary folder, and this one records where.

        Raises ServerStartFailed if no server can be created, BadArgument for an invalid setting.
        """
        return cls._create(directory, port=port, settings=settings, bindir=bindir, env=env, watchdog=None)

    @classmethod
    def _create(
        cls,
        directory: Path,
        *,
        port: int | None,
        settings: Mapping[str, str],
        bindir: Path | None,
        env: Mapping[str, str],
        watchdog: Watchdog | None,
    ) -> Self:
        configuration = settings_text(settings)
        account = server_account()
        directory = directory.resolve()
        try:
            known = State.read(directory)
            if known and port not in {None, known.port} and Postmaster(known.data).pid:
                raise ServerStartFailed(
                    f"The server in {directory} is running on port {known.port}",
                    hint=f"Stop it first; then it can be given port {port}.",
                )
            state = settle(directory, known, account, bindir, port)
            if not state.data.exists():
                make_cluster(directory, state, account, watchdog)
            write_settings(state.data, configuration, account)
        except OSError as error:
            raise ServerStartFailed(f"No server can be made in {directory}: {error}") from error
        server = cls(directory, state, dict(env), watchdog)
        server._port_may_change = port is None and known is None
        return server

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Return the server that exists in this folder, perhaps created by another process.

        Raises ServerStartFailed if it is missing.
        """
        directory = directory.resolve()
        state = State.read(directory)
        if state is None:
            raise ServerStartFailed(f"{directory} has no embedded server")
        return cls(directory, state, _NOTHING, None)

    @property
    def directory(self) -> Path:
        """The server's folder."""
        return self._directory

    @property
    def data_directory(self) -> Path:
        """PostgreSQL's data directory: in the server's folder, unless its account cannot reach that."""
        return self._state.data

    @property
    def log_file(self) -> Path:
        """The log file of initdb and of the server."""
        return self._directory / "server.log"

    @property
    def port(self) -> int:
        """The TCP port; it does not change once the server has been started."""
        return self._state.port

    @property
    def pid(self) -> int | None:
        """The process ID of the postmaster, or ``None`` if it is not running."""
        return self._postmaster.pid

    @property
    def is_running(self) -> bool:
        """Whether there is a postmaster; it may still be starting, or already stopping."""
        return self.pid is not None

    def url(self, database: str = "postgres") -> str:
        """Return the URL of a database for libpq and SQLAlchemy; it names the password file."""
        passfile = quote(os.fsencode(self._directory / "pgpass"))
        name = quote(database, safe="")
        return f"postgresql://postgres@127.0.0.1:{self.port}/{name}?passfile={passfile}"

    def start(self, *, attached: bool) -> None:
        """Start the server and wait until it accepts connections; does nothing if it is running.

        With ``attached`` the server ends with this process; without, it runs until :meth:`stop`.
        Raises ServerStartFailed with the last lines of the log.
        """
        if self.is_running:
            return
        self._attached = attached
        retry_until = time.monotonic() + _RETRY_S
        while (failure := self._try_start()) is not None:
            if _PORT_TAKEN in failure and self._port_may_change:
                self._state = dataclasses.replace(self._state, port=free_port())
                self._state.write(self._directory)
            # The last incarnation's port, and its shared memory after a crash, are soon free again.
            port_may_pass = self._has_run or self._port_may_change
            passing = _NOT_YET_GONE in failure or (_PORT_TAKEN in failure and port_may_pass)
            if not passing or time.monotonic() > retry_until:
                self._close_watchdog()
                raise ServerStartFailed(
                    f"PostgreSQL did not start in {self._directory} on port {self.port}:\n{failure}"
                )
            time.sleep(0.05)
        self._has_run = True
        self._port_may_change = False

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server and wait for its end; do nothing if it is not running.

        A server that has not ended 30 s after a fast stop is stopped immediately, and killed 10 s
        after that. Raises MissingPrivilege if it belongs to another user, and TimeoutError if it
        survives even that.
        """
        self._end(STOP_STEPS if mode == "fast" else STOP_STEPS[1:])

    def kill(self) -> None:
        """Kill the postmaster, as in a crash; the next start recovers."""
        self._end(STOP_STEPS[-1:])

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop the server and start it again on the same port, attached if it was attached before."""
        self.stop(mode)
        self.start(attached=self._attached)

    def remove(self) -> None:
        """Stop the server; remove its data and files, and its folder if nothing else is in it."""
        self._end(QUICK_STEPS)
        remove_files(self._directory, self._state.place)

    def _try_start(self) -> str | None:
        state = self._state
        command = [str(state.bindir / "postgres"), "-D", str(state.data), "-p", str(state.port)]
        command += ["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]
        return self._postmaster.try_start(
            command,
            watchdog=self._watchdog() if self._attached else None,
            log_file=self.log_file,
            env=environment(self._env),
            account=server_account(),
        )

    def _end(self, steps: Sequence[tuple[signal.Signals, float]]) -> None:
        if (pid := self.pid) is not None:
            try:
                self._postmaster.end(pid, steps)
            except PermissionError as error:
                message = f"The server in {self._directory} belongs to another user"
                raise MissingPrivilege(message) from error
        self._close_watchdog()

    def _watchdog(self) -> Watchdog:
        if self._folder_watchdog is not None:
            return self._folder_watchdog
        if self._own_watchdog is None:
            self._own_watchdog = Watchdog()
        return self._own_watchdog

    def _close_watchdog(self) -> None:
        if self._own_watchdog is not None:
            self._own_watchdog.close()
            self._own_watchdog = None


@contextlib.contextmanager
def temporary_servers(
    count: int,
    *,
    settings: Mapping[str, str] = _NOTHING,
    bindir: Path | None = None,
    env: Mapping[str, str] = _NOTHING,
) -> Iterator[list[EmbeddedServer]]:
    """Start ``count`` servers in parallel in a temporary folder; stop and remove them at the end.

    The end is that of the block or of this process, even by ``kill -9``. Arguments and errors are
    those of :meth:`EmbeddedServer.create`. The folder is below ``TMPDIR``: on a file system in
    memory (``/dev/shm``) a server is ready in half the time that it takes on a slow disk.
    """
    account = server_account()
    folder = new_temporary_path(account)
    watchdog = Watchdog(remove=folder)
    servers: list[EmbeddedServer] = []
    try:
        make_folder(folder, account)
        programs = (bindir or find_binaries()).absolute()
        programs = usable_binaries(programs, account, folder)

        def launch(number: int) -> EmbeddedServer:
            home = folder / f"server-{number}"
            server = EmbeddedServer._create(
                home, port=None, settings=settings, bindir=programs, env=env, watchdog=watchdog
            )
            servers.append(server)
            server.start(attached=True)
            return server

        with ThreadPoolExecutor(max(count, 1)) as pool:
            started = list(pool.map(launch, range(1, count + 1)))
        yield started
    finally:
        if watchdog.is_ours:
            try:
                for server in servers:
                    server._end(QUICK_STEPS)
            finally:
                watchdog.close()
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def temporary_server(
    *,
    settings: Mapping[str, str] = _NOTHING,
    bindir: Path | None = None,
    env: Mapping[str, str] = _NOTHING,
) -> Iterator[EmbeddedServer]:
    """Start one server, as :func:`temporary_servers` does."""
    with temporary_servers(1, settings=settings, bindir=bindir, env=env) as (server,):
        yield server
