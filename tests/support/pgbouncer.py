"""A real PgBouncer in front of a server, in transaction mode, for the length of a block."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row
from sqlalchemy.engine import URL

from shardids.pg.embedded.binaries import server_account
from tests.conftest import dsn

PATIENCE_S = 20.0

# Ends PgBouncer when the test run ends, however it ends: its end of the pipe is closed then.
_WATCH = '"$@" & read -r _; kill $! && wait'


@dataclass(frozen=True, slots=True, kw_only=True)
class PgBouncer:
    """One that runs: where, and whom it lets in."""

    port: int
    user: str
    password: str

    def url(self, database: str | None) -> URL:
        """The way through PgBouncer to a database of the server."""
        return URL.create(
            "postgresql+psycopg", self.user, self.password or None, "127.0.0.1", self.port, database
        )

    def show(self, what: str) -> list[dict[str, Any]]:
        """What PgBouncer's console tells, of POOLS for one."""
        with psycopg.connect(
            dsn(self.url("pgbouncer")),
            autocommit=True,
            # The console only knows the simple protocol.
            cursor_factory=psycopg.ClientCursor,
            row_factory=dict_row,
        ) as connection:
            return connection.execute(f"SHOW {what}".encode()).fetchall()


@contextmanager
def running(
    server_url: URL, settings: Mapping[str, object], databases: Path | None = None
) -> Iterator[PgBouncer]:
    """Starts PgBouncer for all databases of a server, with the settings of its section ``pgbouncer``.

    Where it listens, logs and finds its users is decided here. ``databases``: a file with the section of that
    name instead; the server's URL then only names the user.
    """
    program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if program is None:
        pytest.fail("PgBouncer is not installed: apt-get install pgbouncer")
    account = server_account()
    with TemporaryDirectory(prefix="shardids-pgbouncer-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        log = folder / "pgbouncer.log"
        with psycopg.connect(dsn(server_url)) as connection:
            # The password may come from a file.
            server = connection.info
            bouncer = PgBouncer(port=_free_port(), user=server.user, password=server.password)
            target = f"[databases]\n* = host={server.host} port={server.port}"
        if databases is not None:
            target = f"%include {databases}"
        _write_files(folder, bouncer, {**settings, "logfile": log}, target)
        if account is not None:
            for path in (folder, *folder.iterdir()):
                os.chown(path, account.uid, account.gid)
        process = subprocess.Popen(
            ["/bin/sh", "-c", _WATCH, "sh", program, "-q", str(folder / "pgbouncer.ini")],
            stdin=subprocess.PIPE,
            cwd="/",
            user=account.uid if account else None,
            group=account.gid if account else None,
            extra_groups=[] if account else None,
        )
        try:
            _wait_for(bouncer.port, log)
            yield bouncer
        finally:
            process.communicate(timeout=PATIENCE_S)


def _write_files(folder: Path, bouncer: PgBouncer, settings: Mapping[str, object], target: str) -> None:
    here: dict[str, object] = {
        "listen_addr": "127.0.0.1",
        "listen_port": bouncer.port,
        "unix_socket_dir": "",
        "auth_type": "scram-sha-256" if bouncer.password else "trust",
        "auth_file": folder / "users.txt",
        "admin_users": bouncer.user,
    }
    lines = [
        target,
        "[pgbouncer]",
        *(f"{name} = {value}" for name, value in {**settings, **here}.items()),
    ]
    (folder / "pgbouncer.ini").write_text("\n".join(lines) + "\n", encoding="utf-8")
    login = " ".join('"' + part.replace('"', '""') + '"' for part in (bouncer.user, bouncer.password))
    (folder / "users.txt").write_text(login + "\n", encoding="utf-8")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def _wait_for(port: int, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
    pytest.fail(f"PgBouncer did not start: {log.read_text('utf-8') if log.exists() else 'it left no log'}")
