"""Where a throw-away server is: its folder, the folder of its data, its programs and its port."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from shardids.dev.embedded.binaries import (
    Account,
    can_reach,
    find_binaries,
    server_version,
    usable_binaries,
)
from shardids.errors import ServerStartFailed

_MARKER = "shardids-home"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The contents of ``server.json`` in a server's folder, by which other processes find the server.

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
        """Returns the state stored in this folder, or ``None``; raises ServerStartFailed if it is damaged."""
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
        """Writes the state to this folder, atomically."""
        place = "." if self.place == folder else str(self.place)
        fields = {"place": place, "bindir": str(self.bindir), "port": self.port}
        draft = folder / "server.json.new"
        draft.write_text(json.dumps(fields, indent=2) + "\n", "ascii")
        draft.replace(folder / "server.json")


def make_folder(folder: Path, account: Account | None, *, exist_ok: bool = False) -> None:
    """Creates a folder that only the current user can list; the account can pass through it to its data.

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
    """Returns a name for a new folder, in the first temporary folder that the account can reach.

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
    """Removes the server's data and files; then the folder, if it holds nothing else."""
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
    """Chooses a server's data folder, programs and port, and records them in its folder.

    Raises ServerStartFailed, and OSError if the folder cannot be created or written to.
    """
    if known is not None and not known.place.is_dir():
        raise ServerStartFailed(
            f"The data of {directory} was in {known.place}, which is gone",
            hint=f"Remove {directory / 'server.json'} to begin again.",
        )
    make_folder(directory, account, exist_ok=True)
    if known is None and (directory / "data").exists():
        raise ServerStartFailed(f"{directory / 'data'} is there already, and is no embedded server")
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
    """Returns a TCP port that is free now; another program may take it before the server does."""
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
