"""Citus: a coordinator and its workers, of a build that SHARDIDS_CITUS_BIN or a benchmark names."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
from psycopg import sql
from sqlalchemy import make_url

from shardids.pg.embedded import EmbeddedServer, temporary_servers
from shardids.pg.embedded.binaries import server_account

SETTINGS = {
    "wal_level": "logical",
    "max_connections": "300",
    "shared_buffers": "256MB",
    "max_wal_size": "4GB",
    "shared_preload_libraries": "citus",
    "citus.node_conninfo": "sslmode=prefer",
    "max_prepared_transactions": "300",
    "max_worker_processes": "32",
    "max_replication_slots": "32",
    "max_wal_senders": "32",
}


@dataclass
class Citus:
    """The coordinator and its workers; one password for all servers and roles, which is also in a file."""

    coordinator: EmbeddedServer
    workers: list[EmbeddedServer]
    passwords: Path
    password: str

    def url(self, server: EmbeddedServer | None = None, *, port: int | None = None) -> str:
        """The URL of the coordinator, or of another server, with the file of its password."""
        chosen = (server or self.coordinator).port if port is None else port
        return f"postgresql://postgres@127.0.0.1:{chosen}/postgres?passfile={quote(str(self.passwords))}"

    def connect(self, server: EmbeddedServer | None = None) -> psycopg.Connection[Any]:
        return psycopg.connect(self.url(server), autocommit=True)


@contextmanager
def running_citus(bindir: Path, settings: dict[str, str] | None = None) -> Iterator[Citus]:
    """Start a coordinator and two workers."""
    with tempfile.TemporaryDirectory(prefix="shardids-citus-") as name:
        passwords = Path(name, "passwords")
        passwords.touch(0o600)
        Path(name).chmod(0o755)
        environment = {"PGPASSFILE": str(passwords)}
        with temporary_servers(
            3, settings=SETTINGS | (settings or {}), bindir=bindir, env=environment
        ) as servers:
            first, *workers = servers
            password = _password(first)
            for server in servers:
                with psycopg.connect(server.url(), autocommit=True) as connection:
                    connection.execute(
                        sql.SQL("alter role postgres password {}").format(sql.Literal(password))
                    )
            # Citus logs in to the workers with it, as the server's account; this process reads it as itself.
            passwords.write_text(f"*:*:*:*:{password}\n", "utf-8")
            if (account := server_account()) is not None:
                os.chown(passwords, account.uid, account.gid)
            citus = Citus(first, workers, passwords, password)
            for server in servers:
                with citus.connect(server) as connection:
                    connection.execute("create extension citus")
            with citus.connect() as connection:
                connection.execute("select citus_set_coordinator_host('127.0.0.1', %s)", [first.port])
                for worker in workers:
                    connection.execute("select citus_add_node('127.0.0.1', %s)", [worker.port])
            yield citus


def _password(server: EmbeddedServer) -> str:
    file = Path(str(make_url(server.url()).query["passfile"]))
    return file.read_text("utf-8").strip().rpartition(":")[2]
