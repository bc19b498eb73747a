"""The folders of a throw-away server: its home, its data, its programs, its settings and its port."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO

from shardids.errors import BadArgument, ServerStartFailed
from shardids.logs import log_program
from shardids.pg.embedded.binaries import Account, can_reach, find_binaries, server_version, usable_binaries
from shardids.pg.embedded.watchdog import Watchdog

_MARKER = "shardids-home"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The contents of ``server.json`` in a server's folder, where other processes find the server.

    ``place`` is the folder that holds the data: the server's folder itself, or one elsewhere if the
    account that runs the server cannot reach that. ``bindir`` holds the server's programs.
    """

    place: Path
    bindir: Path
    port: int

    @property
    def data(self) -> Path:
        """PostgreSQL's data directory."""
        return self.place / "data"

    @classmethod
    def read(cls, folder: Path) -> State | None:
        """Return the state stored in this folder, or ``None``; raise ServerStartFailed if it is damaged."""
        file = folder / "server.json"
        try:
            fields = json.loads(file.read_text("ascii"))
            place, bindir = folder / fields["place"], Path(fields["bindir"])
            return cls(place=place, bindir=bindir, port=int(fields["port"]))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ServerStartFailed(f"{file} is damaged: {error!r}") from error

    def write(self, folder: Path) -> None:
        """Write the state to this folder, atomically."""
        place = "." if self.place == folder else str(self.place)
        fields = {"place": place, "bindir": str(self.bindir), "port": self.port}
        draft = folder / "server.json.new"
        draft.write_text(json.dumps(fields, indent=2) + "\n", "ascii")
        draft.replace(folder / "server.json")


def make_folder(folder: Path, account: Account | None, *, exist_ok: bool = False) -> None:
    """Create a folder that only the current user can list; the account can pass through it to its data.

    With ``exist_ok``, a folder that exists keeps its permissions.
    """
    try:
        folder.mkdir(mode=0o700, parents=exist_ok)
    except FileExistsError:
        if not exist_ok:
            raise
    else:
        if account is not None:
            folder.chmod(0o711)


def new_temporary_path(account: Account | None) -> Path:
    """Return a name for a new folder, in the first temporary folder that the account can reach.

    Raises ServerStartFailed if it can reach none.
    """
    for folder in (tempfile.gettempdir(), "/var/tmp", "/tmp"):  # noqa: S108  -- the name is random, and mkdir refuses one that exists
        if can_reach(Path(folder), account):
            return Path(folder).resolve() / f"shardids-{secrets.token_hex(8)}"
    raise ServerStartFailed(
        f"The user that runs PostgreSQL can't reach {tempfile.gettempdir()}",
        hint="Set TMPDIR to a folder open to all users, or run this as an ordinary user.",
    )


def remove_files(folder: Path, place: Path) -> None:
    """Remove the server's data and files; then the folder, if it holds nothing else."""
    if place == folder:
        for path in (place / "data", place / "binaries", *place.glob("initdb-*")):
            shutil.rmtree(path, ignore_errors=True)
    elif _points_back(place, folder):
        shutil.rmtree(place, ignore_errors=True)
    for name in ("pgpass", "server.log", "server.json"):
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def settle(
    directory: Path,
    known: State | None,
    account: Account | None,
    bindir: Path | None,
    port: int | None,
) -> State:
    """Choose a server's data folder, programs and port, and record them in its folder.

    Raises ServerStartFailed, and OSError if the folder cannot be created or written to.
    """
    if known is not None and not known.place.is_dir():
        raise ServerStartFailed(
            f"The data of {directory} was in {known.place}, which is gone",
            hint=f"Remove {directory / 'server.json'} to begin again.",
        )
    make_folder(directory, account, exist_ok=True)
    if known is None and (directory / "data").exists():
        raise ServerStartFailed(f"{directory / 'data'} exists, and is not an embedded server")
    place = known.place if known else _choose_place(directory, account)
    programs = bindir or (known.bindir if known and known.bindir.is_dir() else find_binaries())
    programs = programs.absolute()
    server_version(programs)
    state = State(
        place=place,
        bindir=usable_binaries(programs, account, place),
        port=port or (known.port if known else free_port()),
    )
    state.write(directory)
    return state


def free_port() -> int:
    """Return a TCP port that is free now; another program may take it before the server does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _choose_place(folder: Path, account: Account | None) -> Path:
    if can_reach(folder, account):
        return folder
    place = new_temporary_path(account)
    make_folder(place, account)
    (place / _MARKER).write_bytes(os.fsencode(folder))
    return place


def _points_back(place: Path, folder: Path) -> bool:
    # server.json may have been edited: a folder without the marker file is never removed.
    try:
        return (place / _MARKER).read_bytes() == os.fsencode(folder)
    except OSError:
        return False


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
    """Run initdb; the data directory appears complete or, whatever happens, not at all.

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
    """Return the arguments that only PostgreSQL commands working on this data directory have."""
    return f"-D {data}"


def settings_text(settings: Mapping[str, str]) -> str:
    """Return the lines of a configuration file with the defaults, overridden by ``settings``.

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
    """Write these configuration lines to the file that the server reads at its next start."""
    write_private(data / "shardids.conf", text, account)


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a server process: no libpq settings, and messages in English."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return {**inherited, "LC_ALL": "C", **extra}


def open_log(log: Path) -> IO[bytes]:
    """Open the log at its end; only the current user and the server itself may read it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    file = os.fdopen(os.open(log, flags, 0o600), "ab")
    file.seek(0, os.SEEK_END)
    return file


def log_tail(log: Path, offset: int) -> str:
    """Return the last lines of the log that were written after this offset."""
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
    """Write a file that only the account may read, or without one the current user."""
    # The folder may belong to another user, who must not redirect the write by a symbolic link.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        if account is not None:
            os.fchown(descriptor, account.uid, account.gid)
        file.write(text)
