"""Servers that archive their logs, base backups of them, and servers restored to a restore point."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from urllib.parse import quote

import psycopg
from psycopg.conninfo import conninfo_to_dict

from shardids.pg.embedded import EmbeddedServer, find_binaries, server_version
from shardids.pg.embedded.binaries import Account, server_account, usable_binaries
from shardids.pg.embedded.data import free_port
from shardids.pg.embedded.postmaster import Postmaster
from shardids.pg.embedded.watchdog import QUICK_STEPS, Watchdog
from tests.support.client_programs import client_folder
from tests.support.faults import connect
from tests.support.standbys import with_password
from tests.support.waiting import wait_for


def start_archiving(server: EmbeddedServer, archive: Path) -> None:
    """Makes a server copy each finished segment of its log into a folder."""
    archive.mkdir()
    archive.chmod(0o777)
    with connect(server.url()) as admin:
        admin.execute("alter system set archive_mode = on")
        admin.execute(f"alter system set archive_command = 'cp %p {archive}/%f'".encode())
    server.restart()


def is_archived(server: EmbeddedServer, archive: Path, segment: str) -> bool:
    """Whether a segment, and all before it, are in the archive."""
    with connect(server.url()) as admin:
        row = admin.execute("select last_archived_wal >= %s from pg_stat_archiver", [segment]).fetchone()
    return bool(row and row[0]) and (archive / segment).exists()


def finish_segment(server: EmbeddedServer) -> str:
    """Ends the present segment of the log, so that it is archived; its name."""
    with connect(server.url()) as admin:
        row = admin.execute("select pg_walfile_name(pg_switch_wal())").fetchone()
    assert row is not None
    return str(row[0])


def base_backup(server: EmbeddedServer, data: Path) -> None:
    """Copies a running server's files, without its log."""
    major = int(server_version(find_binaries()).partition(".")[0])
    program = client_folder(major) / "pg_basebackup"
    command = [
        program,
        "-D",
        data,
        "-d",
        with_password(server.url()),
        "--checkpoint=fast",
        "--no-sync",
        "-X",
        "none",
    ]
    subprocess.run(command, check=True, capture_output=True)


def is_primary(url: str) -> bool:
    """Whether a server has ended its recovery."""
    with suppress(psycopg.OperationalError), connect(url) as admin:
        return admin.execute("select pg_is_in_recovery()").fetchone() == (False,)
    return False


@cache
def _programs(account: Account | None, folder: Path) -> Path:
    # Once a folder: a copy can't be written over while a server runs from it.
    return usable_binaries(find_binaries(), account, folder)


@contextmanager
def restored(server: EmbeddedServer, folder: Path, data: Path, archive: Path, point: str) -> Iterator[str]:
    """Starts a base backup of a server, restored to a point; the new server's URL."""
    (data / "recovery.signal").touch()
    with (data / "postgresql.auto.conf").open("a") as settings:
        settings.write(
            f"restore_command = 'cp {archive}/%f %p'\nrecovery_target_name = '{point}'\n"
            "recovery_target_action = 'promote'\narchive_mode = off\n"
        )
    account, port = server_account(), free_port()
    if account is not None:
        for path in (data, *data.rglob("*")):
            shutil.chown(path, account.uid, account.gid)
    programs = _programs(account, folder)
    command = [str(programs / "postgres"), "-D", str(data), "-p", str(port)]
    command += ["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]
    postmaster, watchdog = Postmaster(data), Watchdog()
    try:
        failure = postmaster.try_start(
            command, watchdog=watchdog, log_file=folder / f"log-{port}", env={"LC_ALL": "C"}, account=account
        )
        assert failure is None, failure
        passfile = quote(str(conninfo_to_dict(server.url())["passfile"]))
        url = f"postgresql://postgres@127.0.0.1:{port}/postgres?passfile={passfile}"
        wait_for(lambda: is_primary(url), "the server is restored")
        yield url
    finally:
        if postmaster.pid is not None:
            postmaster.end(postmaster.pid, QUICK_STEPS)
        watchdog.close()
