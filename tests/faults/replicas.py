"""Copies that PostgreSQL itself keeps: a streaming standby, and a subscriber of logical replication."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from shardids.embedded import EmbeddedServer, find_binaries, server_version
from shardids.embedded.binaries import server_account, usable_binaries
from shardids.embedded.home import free_port
from shardids.embedded.postmaster import Postmaster
from shardids.embedded.watchdog import QUICK_STEPS, Watchdog
from tests.clients import client_folder
from tests.faults.support import public_folder, scalar, until


@contextmanager
def standby_of(primary: EmbeddedServer) -> Iterator[int]:
    """A hot standby that streams; its port. Its clock is the machine's."""
    account = server_account()
    port = free_port()
    with public_folder() as folder:
        data = folder / "data"
        _copy_files(primary, data)
        if account is not None:
            for path in (data, *data.rglob("*")):
                shutil.chown(path, account.uid, account.gid)
        programs = usable_binaries(find_binaries(), account, folder)
        command = [str(programs / "postgres"), "-D", str(data), "-p", str(port)]
        command += ["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]
        postmaster = Postmaster(data)
        watchdog = Watchdog()
        try:
            failure = postmaster.try_start(
                command, watchdog=watchdog, log_file=folder / "log", env={"LC_ALL": "C"}, account=account
            )
            assert failure is None, failure
            yield port
        finally:
            if postmaster.pid is not None:
                postmaster.end(postmaster.pid, QUICK_STEPS)
            watchdog.close()


def _copy_files(primary: EmbeddedServer, data: Path) -> None:
    major = int(server_version(find_binaries()).partition(".")[0])
    program = client_folder(major) / "pg_basebackup"
    command = [program, "-D", data, "-d", _conninfo(primary.url()), "--checkpoint=fast", "--no-sync"]
    subprocess.run(command, check=True)
    # As pg_basebackup -R does, which would name settings that an older server's libpq does not know.
    (data / "standby.signal").touch()
    with (data / "postgresql.auto.conf").open("a") as settings:
        settings.write(f"primary_conninfo = '{_conninfo(primary.url())}'\n")


def stop_receiving(standby: psycopg.Connection[Any]) -> None:
    """From here on the standby hears nothing of the primary."""
    standby.execute("alter system set primary_conninfo = ''")
    standby.execute("select pg_reload_conf()")
    until(lambda: not is_receiving(standby), "the standby receives no more WAL")


def is_receiving(standby: psycopg.Connection[Any]) -> bool:
    return scalar(standby, "select count(*) from pg_stat_wal_receiver where status = 'streaming'") > 0


def has_all_of(standby: psycopg.Connection[Any], primary: psycopg.Connection[Any]) -> bool:
    written = scalar(primary, "select pg_current_wal_flush_lsn()::text")
    return bool(scalar(standby, "select coalesce(pg_last_wal_replay_lsn() >= %s::pg_lsn, false)", written))


def subscribe(original: psycopg.Connection[Any], copy: psycopg.Connection[Any], url: str) -> None:
    """Replicates all tables of the original's database, and waits for the rows that are there."""
    original.execute("create publication everything for all tables")
    copy.execute(
        sql.SQL("create subscription copied connection {} publication everything").format(
            sql.Literal(_conninfo(url))
        )
    )
    pending = "select count(*) from pg_subscription_rel where srsubstate <> 'r'"
    until(lambda: scalar(copy, pending) == 0, "all tables are copied")


def unsubscribe(original: psycopg.Connection[Any], copy: psycopg.Connection[Any]) -> None:
    """Ends the replication on either side."""
    copy.execute("alter subscription copied disable")
    copy.execute("alter subscription copied set (slot_name = none)")
    copy.execute("drop subscription copied")
    slots = "select slot_name from pg_replication_slots where database = current_database() and not active"
    until(lambda: scalar(original, f"select count(*) from ({slots}) s") == 1, "the subscriber is gone")
    original.execute(f"select pg_drop_replication_slot(slot_name) from ({slots}) s")


def _conninfo(url: str) -> str:
    """The URL with its password in it."""
    parts = conninfo_to_dict(url)
    password = Path(str(parts.pop("passfile"))).read_text().strip().rsplit(":", 1)[1]
    return make_conninfo("", **parts, password=password)
