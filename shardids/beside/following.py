"""A file of routes that follows the catalog, and the command that makes a pooler read it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from threading import Event
from typing import Final

from shardids.catalog.rows import Catalog
from shardids.client.placement import PlacementListener
from shardids.errors import ShardidsError
from shardids.logs import logger

log = logger("routes")

_FIRST_WAIT_S: Final = 0.5
_LONGEST_WAIT_S: Final = 30.0
_RUN_S: Final = 60.0
"""How long the command may take."""


class RoutesFile:
    """A file that is replaced in one step, and the command that is run afterwards.

    Args:
        path: the file.
        text: returns its contents.
        command: run by the shell after the first writing and after each change; empty for none.
    """

    def __init__(self, path: Path, text: Callable[[], str], command: str = "") -> None:
        self._path = path
        self._text = text
        self._command = command
        self._is_announced = False

    def write(self) -> bool:
        """Write the file if it differs, run the command unless it ran for this; return whether it differed.

        Raises:
            ShardidsError: the catalog did not answer, or the command failed. Calling it again repeats both.
            OSError: the file could not be written; the old one is as it was.
        """
        wanted = self._text()
        differs = not self._path.exists() or self._path.read_text(encoding="utf-8") != wanted
        if differs:
            self._is_announced = False
            _replace(self._path, wanted)
        if self._command and not self._is_announced:
            _run(self._command)
        self._is_announced = True
        return differs


def _replace(path: Path, text: str) -> None:
    """Replace a file in one step: readers find the old text or the new one. Its permissions stay."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with new.open("w", encoding="utf-8") as file:
            if path.exists():
                there = path.stat()
                new.chmod(there.st_mode & 0o777)
                # Only root may give a file away; another user's own file is as readable as before.
                with suppress(PermissionError):
                    os.chown(new, there.st_uid, there.st_gid)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _run(command: str) -> None:
    try:
        ran = subprocess.run(  # noqa: S602 -- the operator's own command line
            command, shell=True, capture_output=True, text=True, timeout=_RUN_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ShardidsError(
            f"the command of --run has not ended within {_RUN_S:g} s: {command}",
            hint="The file is written. Run the command by hand to see why it waits.",
        ) from None
    if ran.returncode != 0:
        reason = (ran.stderr or ran.stdout).strip() or "it printed nothing"
        raise ShardidsError(
            f"the command of --run exited {ran.returncode}: {command}: {reason}",
            hint="The file is written. Run the command by hand once it works.",
        )


class Follower:
    """Keeps a file of routes current, by LISTEN on the catalog."""

    def __init__(self, catalog: Catalog, file: RoutesFile) -> None:
        self._catalog = catalog
        self._file = file
        self._changed = Event()

    def run(
        self, on_write: Callable[[], object], on_error: Callable[[ShardidsError | OSError], object]
    ) -> None:
        """Write the file at each change of the placement, until interrupted.

        What fails is repeated, after waits that grow to 30 s, and at the next change.

        Args:
            on_write: called when the file was rewritten.
            on_error: called with each failure.
        """
        wait_s: float | None = None
        with closing(PlacementListener(self._catalog.url, self._heed, self._expect)) as listener:
            listener.start()
            while True:
                self._changed.wait(wait_s)
                self._changed.clear()
                try:
                    if self._file.write():
                        on_write()
                    wait_s = None
                except (ShardidsError, OSError) as error:
                    on_error(error)
                    wait_s = min((wait_s or _FIRST_WAIT_S / 2) * 2, _LONGEST_WAIT_S)

    def _heed(self) -> None:
        self._changed.set()

    def _expect(self, arrival: str) -> None:
        log.debug("a shard will soon be on another node: %s", arrival)
