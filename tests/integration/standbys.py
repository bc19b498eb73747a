"""Standbys: streaming copies of an embedded server, as PostgreSQL itself makes them."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardids.embedded import EmbeddedServer, find_binaries
from shardids.embedded.binaries import server_account, usable_binaries
from shardids.embedded.home import free_port
from shardids.embedded.postmaster import Postmaster
from shardids.embedded.watchdog import QUICK_STEPS, Watchdog


@contextmanager
def standby_of(primary: EmbeddedServer) -> Iterator[str]:
    """A hot standby that streams; its URL. Its clock is the machine's."""
    account = server_account()
    with public_folder() as folder:
        home = folder / "home"
        home.mkdir(mode=0o700)
        if account is not None:
            os.chown(home, account.uid, account.gid)
        programs = usable_binaries(find_binaries(), account, folder)
        data = home / "data"
        source = f"host=127.0.0.1 port={primary.port} user=postgres"
        subprocess.run(
            [programs / "pg_basebackup", "-D", data, "-d", source, "-R", "--checkpoint=fast", "--no-sync"],
            env={**os.environ, "PGPASSWORD": password_of(primary)},
            user=account.uid if account else None,
            group=account.gid if account else None,
            extra_groups=[] if account else None,
            cwd="/",
            check=True,
        )
        port = free_port()
        command = [str(programs / "postgres"), "-D", str(data), "-p", str(port)]
        command += ["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]
        postmaster = Postmaster(data)
        watchdog = Watchdog()
        try:
            failure = postmaster.try_start(
                command, watchdog=watchdog, log_file=folder / "log", env={"LC_ALL": "C"}, account=account
            )
            assert failure is None, failure
            yield primary.url().replace(f":{primary.port}/", f":{port}/")
        finally:
            if postmaster.pid is not None:
                postmaster.end(postmaster.pid, QUICK_STEPS)
            watchdog.close()


@contextmanager
def public_folder() -> Iterator[Path]:
    """A temporary folder that the server's account can look into."""
    with tempfile.TemporaryDirectory(prefix="shardids-faults-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def password_of(server: EmbeddedServer) -> str:
    return (server.directory / "pgpass").read_text().strip().rsplit(":", 1)[1]
