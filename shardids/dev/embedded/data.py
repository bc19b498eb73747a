"""What makes up a throw-away server: ``initdb``, settings, password, environment and log."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import re
import secrets
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO

from shardids.dev.embedded.binaries import Account
from shardids.dev.embedded.home import State, make_folder
from shardids.dev.embedded.watchdog import Watchdog
from shardids.errors import BadArgument, ServerStartFailed
from shardids.logs import log_program

DEFAULT_SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "fsync": "off",
        "full_page_writes": "off",
        "wal_level": "logical",
        "max_connections": "200",
        "max_prepared_transactions": "200",
        "shared_buffers": "64MB",
        "wal_retrieve_retry_interval": "200ms",
        "timezone": "UTC",
        "log_timezone": "UTC",
    }
)
"""Fast settings; commits stay as visible and as ordered as ever. Only a crash of the machine loses data."""

_FIXED = frozenset({"data_directory", "listen_addresses", "port", "unix_socket_directories"})
_SCRAM_ITERATIONS = 4096  # The minimum that some clients, pgjdbc among them, accept.
_QUICK_SCRAM_ITERATIONS = 1  # 192 random bits cannot be guessed, however fast each try is.
_TAIL_LINES = 15


def make_cluster(folder: Path, state: State, account: Account | None, watchdog: Watchdog | None) -> None:
    """Runs initdb; the data directory appears complete or, whatever happens, not at all.

    ``watchdog`` is that of a temporary folder; a server in one is set up for fast logins.
    Raises ServerStartFailed with the last lines of initdb's output, and OSError.
    """
    workshop = state.place / f"initdb-{secrets.token_hex(4)}"
    password = secrets.token_urlsafe(24)
    iterations = _SCRAM_ITERATIONS if watchdog is None else _QUICK_SCRAM_ITERATIONS
    with _guarded(workshop, watchdog) as guard:
        make_folder(workshop, account)
        data = workshop / "data"
        data.mkdir(mode=0o700)
        if account is not None:
            os.chown(data, account.uid, account.gid)
        password_file = workshop / "password"
        # The server gets only the verifier, so the password cannot end up in a log or a backup.
        write_private(password_file, _scram_verifier(password, iterations), account)
        _run_initdb(
            folder=folder,
            bindir=state.bindir,
            data=data,
            password_file=password_file,
            account=account,
            guard=guard,
        )
        configuration = data / "postgresql.conf"
        text = configuration.read_text("utf-8")
        write_private(configuration, f"{text}\ninclude_if_exists 'shardids.conf'\n", account)
        write_private(folder / "pgpass", f"127.0.0.1:*:*:postgres:{password}\n", None)
        data.rename(state.data)


def data_mark(data: Path) -> str:
    """Returns the arguments that only PostgreSQL commands working on this data directory have."""
    return f"-D {data}"


def settings_text(settings: Mapping[str, str]) -> str:
    """Returns the lines of a configuration file with the defaults, overridden by ``settings``.

    Raises BadArgument for a name that cannot be a setting's, or one that is fixed (address and port).
    """
    lines = []
    for name, value in {**DEFAULT_SETTINGS, **settings}.items():
        if name.lower() in _FIXED or not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?", name):
            raise BadArgument(f"{name!r} can't be set for an embedded server")
        quoted = value.replace("\\", "\\\\").replace("'", "''").replace("\n", "\\n")
        lines.append(f"{name} = '{quoted}'\n")
    return "".join(lines)


def write_settings(data: Path, text: str, account: Account | None) -> None:
    """Writes these configuration lines to the file that the server reads at its next start."""
    write_private(data / "shardids.conf", text, account)


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a server process: no libpq settings, and messages in English."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return {**inherited, "LC_ALL": "C", **extra}


def open_log(log: Path) -> IO[bytes]:
    """Opens the log at its end; only the current user and the server itself may read it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    file = os.fdopen(os.open(log, flags, 0o600), "ab")
    file.seek(0, os.SEEK_END)
    return file


def log_tail(log: Path, offset: int) -> str:
    """Returns the last lines of the log that were written after this offset."""
    with log.open("rb") as file:
        file.seek(offset)
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-_TAIL_LINES:])


@contextlib.contextmanager
def _guarded(workshop: Path, watchdog: Watchdog | None) -> Iterator[Watchdog]:
    # A temporary folder's watchdog removes all of it; without one, initdb gets one for its working folder.
    guard = watchdog or Watchdog(remove=workshop)
    try:
        yield guard
    finally:
        shutil.rmtree(workshop, ignore_errors=True)
        if watchdog is None:
            guard.close()


def _run_initdb(
    *,
    folder: Path,
    bindir: Path,
    data: Path,
    password_file: Path,
    account: Account | None,
    guard: Watchdog,
) -> None:
    command = [str(bindir / "initdb"), "-D", str(data), "--username=postgres"]
    command += ["--auth=scram-sha-256", f"--pwfile={password_file}", "--encoding=UTF8"]
    command += ["--locale=C", "--no-sync", "--no-instructions"]
    log_path = folder / "server.log"
    with open_log(log_path) as log:
        offset, began = log.tell(), time.perf_counter()
        process = guard.spawn(command, mark=data_mark(data), log=log, env=environment({}), account=account)
        try:
            code = process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise
        finally:
            log_program("dev", command, began, process.returncode)
    if code != 0:
        tail = log_tail(log_path, offset)
        raise ServerStartFailed(f"{bindir / 'initdb'} failed with exit code {code}:\n{tail}")


def _scram_verifier(password: str, iterations: int) -> str:
    salt = secrets.token_bytes(16)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, iterations)
    client_key = hmac.digest(salted, b"Client Key", "sha256")
    server_key = hmac.digest(salted, b"Server Key", "sha256")
    stored_key = hashlib.sha256(client_key).digest()
    encoded = [base64.b64encode(part).decode() for part in (salt, stored_key, server_key)]
    return f"SCRAM-SHA-256${iterations}:{encoded[0]}${encoded[1]}:{encoded[2]}"


def write_private(path: Path, text: str, account: Account | None) -> None:
    """Writes a file that only the account may read, or without one the current user."""
    # The folder may belong to another user, who must not redirect the write by a symbolic link.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        if account is not None:
            os.fchown(descriptor, account.uid, account.gid)
        file.write(text)
