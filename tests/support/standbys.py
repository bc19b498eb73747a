"""Standbys: streaming copies of a server, as PostgreSQL itself makes them."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from shardids.pg.embedded import StopMode, find_binaries, server_version
from shardids.pg.embedded.binaries import server_account, usable_binaries
from shardids.pg.embedded.data import free_port
from shardids.pg.embedded.postmaster import STOP_STEPS, Postmaster
from shardids.pg.embedded.watchdog import QUICK_STEPS, Watchdog
from tests.support.client_programs import client_folder


class Server(Protocol):
    """An embedded server, or the standby of one."""

    @property
    def log_file(self) -> Path: ...

    def url(self, database: str = "postgres") -> str: ...

    def kill(self) -> None: ...

    def restart(self, mode: StopMode = "fast") -> None: ...


class Standby:
    """A hot standby that streams. Its clock is the machine's; its postmaster dies with the test."""

    def __init__(
        self, primary_url: str, port: int, postmaster: Postmaster, log_file: Path, start: Callable[[], None]
    ) -> None:
        self._primary_url = primary_url
        self._postmaster = postmaster
        self._start = start
        self.port = port
        self.log_file = log_file

    def url(self, database: str = "postgres") -> str:
        """A URL of a database here; the password's file is the primary's."""
        passfile = quote(str(conninfo_to_dict(self._primary_url)["passfile"]))
        return f"postgresql://postgres@127.0.0.1:{self.port}/{quote(database, safe='')}?passfile={passfile}"

    def kill(self) -> None:
        """Kills the postmaster, as in a crash."""
        if self._postmaster.pid is not None:
            self._postmaster.end(self._postmaster.pid, STOP_STEPS[-1:])

    def restart(self, mode: StopMode = "fast") -> None:
        """Stops the server and starts it again."""
        if self._postmaster.pid is not None:
            self._postmaster.end(self._postmaster.pid, STOP_STEPS if mode == "fast" else STOP_STEPS[1:])
        self._start()


@contextmanager
def standby_of(primary: Server, env: Mapping[str, str] | None = None) -> Iterator[Standby]:
    """A standby, as ``pg_basebackup`` makes one; it ends with the block. ``env`` adds to its environment."""
    account = server_account()
    port = free_port()
    with public_folder() as folder:
        data = folder / "data"
        _copy_files(primary.url(), data)
        if account is not None:
            for path in (data, *data.rglob("*")):
                shutil.chown(path, account.uid, account.gid)
        programs = usable_binaries(find_binaries(), account, folder)
        command = [str(programs / "postgres"), "-D", str(data), "-p", str(port)]
        command += ["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]
        postmaster = Postmaster(data)
        watchdog = Watchdog()

        def start() -> None:
            failure = postmaster.try_start(
                command,
                watchdog=watchdog,
                log_file=folder / "log",
                env={"LC_ALL": "C", **(env or {})},
                account=account,
            )
            assert failure is None, failure

        try:
            start()
            yield Standby(primary.url(), port, postmaster, folder / "log", start)
        finally:
            if postmaster.pid is not None:
                postmaster.end(postmaster.pid, QUICK_STEPS)
            watchdog.close()


def _copy_files(primary_url: str, data: Path) -> None:
    major = int(server_version(find_binaries()).partition(".")[0])
    program = client_folder(major) / "pg_basebackup"
    source = with_password(primary_url)
    subprocess.run([program, "-D", data, "-d", source, "--checkpoint=fast", "--no-sync"], check=True)
    # As pg_basebackup -R does, which would name settings that an older server's libpq does not know.
    (data / "standby.signal").touch()
    with (data / "postgresql.auto.conf").open("a") as settings:
        settings.write(f"primary_conninfo = '{source}'\n")


def with_password(url: str) -> str:
    """The URL as connection string, with the password of its file in it."""
    parts = conninfo_to_dict(url)
    password = Path(str(parts.pop("passfile"))).read_text().strip().rsplit(":", 1)[1]
    return make_conninfo("", **parts, password=password)


@contextmanager
def public_folder() -> Iterator[Path]:
    """A temporary folder that the server's account can look into."""
    with tempfile.TemporaryDirectory(prefix="shardids-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
