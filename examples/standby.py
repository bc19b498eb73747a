"""A standby of an embedded server: python standby.py make b | kill b | promote | remove

Ordinary servers get theirs by pg_basebackup, as here, and are watched by Patroni, repmgr or a provider.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psycopg

from shardids.pg.embedded import EmbeddedServer, find_binaries

STANDBY = Path("standby")


def primary(node: str) -> EmbeddedServer:
    """Return the server of a node of the cluster in .shardids."""
    return EmbeddedServer.open(Path(".shardids") / node)


def make(node: str) -> None:
    """Make a standby, and let commits of the node wait for it."""
    source = primary(node)
    standby = EmbeddedServer.create(STANDBY)
    data = standby.data_directory
    owner = data.stat()
    shutil.rmtree(data)
    password = (source.directory / "pgpass").read_text().strip().rpartition(":")[2]
    # With the password, since the server's account may not be able to read the file.
    conninfo = f"host=127.0.0.1 port={source.port} user=postgres password={password}"
    program = str(find_binaries() / "pg_basebackup")
    command = [program, "-D", str(data), "-d", conninfo, "-R", "--checkpoint=fast"]
    subprocess.run(command, check=True)  # noqa: S603 -- a program of the server's, by its path
    for path in (data, *data.rglob("*")):
        os.chown(path, owner.st_uid, owner.st_gid)
    shutil.copyfile(source.directory / "pgpass", standby.directory / "pgpass")
    standby.start(attached=False)
    with psycopg.connect(source.url(), autocommit=True) as connection:
        while not connection.execute(
            "select 1 from pg_stat_replication where state = 'streaming'"
        ).fetchone():
            time.sleep(0.1)
        connection.execute("alter system set synchronous_standby_names = '*'")
        connection.execute("select pg_reload_conf()")
    print(f"export STANDBY='{standby.url()}'")


def promote() -> None:
    """Make a primary of the standby."""
    with psycopg.connect(EmbeddedServer.open(STANDBY).url(), autocommit=True) as connection:
        connection.execute("select pg_promote()")
    print("promoted")


def main() -> None:
    """Do what the first argument says."""
    match sys.argv[1:]:
        case ["make", node]:
            make(node)
        case ["kill", node]:
            primary(node).kill()
        case ["promote"]:
            promote()
        case ["remove"]:
            EmbeddedServer.open(STANDBY).remove()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
