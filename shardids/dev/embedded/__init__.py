"""Throw-away PostgreSQL servers for tests, demos and ``shardids dev``.

A server listens on 127.0.0.1 only, has one superuser ``postgres`` with a random password, and
keeps everything in one folder. The password is in a ``pgpass`` file there, which
:meth:`EmbeddedServer.url` names; it is in no URL, log or error.

Started *attached*, a server ends with the process that started it, however that ends; *detached*,
it stays until somebody stops it. It is quick rather than crash-safe: ``fsync`` is off.
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

from shardids.dev.embedded.binaries import (
    find_binaries,
    server_account,
    server_version,
    usable_binaries,
)
from shardids.dev.embedded.data import (
    environment,
    make_cluster,
    settings_text,
    write_settings,
)
from shardids.dev.embedded.home import (
    State,
    free_port,
    make_folder,
    new_temporary_path,
    remove_files,
    settle,
)
from shardids.dev.embedded.postmaster import STOP_STEPS, Postmaster
from shardids.dev.embedded.watchdog import QUICK_STEPS, Watchdog
from shardids.errors import MissingPrivilege, ServerStartFailed

__all__ = [
    "EmbeddedServer",
    "StopMode",
    "find_binaries",
    "server_version",
    "temporary_server",
    "temporary_servers",
]

StopMode = Literal["fast", "immediate"]
"""As of ``pg_ctl stop``: ``fast`` writes everything; ``immediate`` leaves that to recovery."""

_NOTHING: Mapping[str, str] = MappingProxyType({})
_RETRY_S = 5.0
_PORT_TAKEN = "could not create any TCP/IP sockets"
_NOT_YET_GONE = "pre-existing shared memory block"


class EmbeddedServer:
    """A PostgreSQL server in a folder of its own; made by :meth:`create`, found by :meth:`open`.

    Not for use by several threads at once.
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
        """The server of this folder, which is made if there is none; it is not started.

        ``port`` is a free one by default, and kept from then on. ``settings`` override the quick
        defaults from the next start on; ``ALTER SYSTEM`` overrides both. ``bindir`` is found by
        :func:`find_binaries`. ``env`` adds to the environment of the server, not of initdb.

        As root, the server runs as ``postgres`` or ``nobody``. If that user can't reach the folder,
        the data goes into one below the temporary folder, and this one remembers where.

        Raises ServerStartFailed if no server can be made, BadArgument for a setting that can't be.
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
        """The server that was made in this folder, perhaps by another process.

        Raises ServerStartFailed if there is none.
        """
        directory = directory.resolve()
        state = State.read(directory)
        if state is None:
            raise ServerStartFailed(f"There is no embedded server in {directory}")
        return cls(directory, state, _NOTHING, None)

    @property
    def directory(self) -> Path:
        """The server's folder."""
        return self._directory

    @property
    def data_directory(self) -> Path:
        """PostgreSQL's data directory: in the server's folder, unless root can't have it there."""
        return self._state.data

    @property
    def log_file(self) -> Path:
        """The log of initdb and of the server."""
        return self._directory / "server.log"

    @property
    def port(self) -> int:
        """The TCP port; it stays the same once the server has been started."""
        return self._state.port

    @property
    def pid(self) -> int | None:
        """Process ID of the postmaster, or ``None`` if it isn't running."""
        return self._postmaster.pid

    @property
    def is_running(self) -> bool:
        """Whether there is a postmaster, though perhaps still starting or already stopping."""
        return self.pid is not None

    def url(self, database: str = "postgres") -> str:
        """A URL of a database here for libpq and SQLAlchemy; it names the password's file."""
        passfile = quote(os.fsencode(self._directory / "pgpass"))
        name = quote(database, safe="")
        return f"postgresql://postgres@127.0.0.1:{self.port}/{name}?passfile={passfile}"

    def start(self, *, attached: bool) -> None:
        """Start the server and wait until it accepts connections; nothing happens if it runs.

        ``attached``: the server ends with this process. Otherwise it stays until :meth:`stop`.
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
            # What a former run leaves, memory after a crash and its port, is soon free again.
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
        """Stop the server and wait for its end; nothing happens if it isn't running.

        A server that doesn't heed a fast stop for 30 s gets an immediate one, and 10 s later is
        killed. Raises MissingPrivilege if it belongs to another user, and TimeoutError if even
        that doesn't end it.
        """
        self._end(STOP_STEPS if mode == "fast" else STOP_STEPS[1:])

    def kill(self) -> None:
        """Kill the postmaster, as in a crash; the next start recovers."""
        self._end(STOP_STEPS[-1:])

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop the server and start it again on the same port, attached if it was so."""
        self.stop(mode)
        self.start(attached=self._attached)

    def remove(self) -> None:
        """Stop the server, remove its data and files, and its folder if nothing else is in it."""
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
    """Start ``count`` servers at once in a temporary folder, and remove all of it at the end.

    The end is that of the block or of this process, be it by ``kill -9``. The arguments and the
    errors are those of :meth:`EmbeddedServer.create`. The folder is below ``TMPDIR``: on a file
    system in memory (``/dev/shm``) a server is there in half the time of a slow disk.
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
    """One server as of :func:`temporary_servers`."""
    with temporary_servers(1, settings=settings, bindir=bindir, env=env) as (server,):
        yield server
