"""A clock that can be stepped, for processes started under it; needs libfaketime."""

from __future__ import annotations

import contextlib
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from shardids.dev.embedded.binaries import server_account
from shardids.dev.embedded.home import make_folder, new_temporary_path
from shardids.dev.embedded.watchdog import Watchdog
from shardids.errors import MissingLibrary

_PLACES = ("/usr/lib/*/faketime", "/usr/lib/faketime", "/usr/local/lib/faketime", "/opt/*/lib/faketime")


class FakedClock:
    """The machine's clock plus all steps so far, for the processes that are started with :attr:`env`.

    The monotonic clock does not step.
    """

    def __init__(self, library: Path, folder: Path) -> None:
        self._library, self._file = library, folder / "clock"
        self._ahead_s = 0.0
        self.step(0)

    @property
    def env(self) -> Mapping[str, str]:
        """Returns what a process needs in its environment to follow this clock."""
        return {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def step(self, seconds: float) -> None:
        """Steps the clock of all its processes at once."""
        self._ahead_s += seconds
        # Replaced as a whole: a process may read it at any time.
        new = self._file.with_suffix(".new")
        new.write_text(f"{self._ahead_s:+.3f}s\n")
        new.chmod(0o644)
        new.replace(self._file)


def faketime_library() -> Path:
    """Returns the path of libfaketime; Debian's package is ``libfaketime``.

    Raises:
        MissingLibrary: libfaketime is not installed.
    """
    # If it is installed for several architectures, this one's.
    own = sysconfig.get_config_var("MULTIARCH") or "*"
    for place in (f"/usr/lib/{own}/faketime", *_PLACES):
        for path in sorted(Path("/").glob(f"{place[1:]}/libfaketimeMT*")):
            return path
    raise MissingLibrary("libfaketime is not installed", hint="On Debian: apt-get install libfaketime")


@contextlib.contextmanager
def faked_clock() -> Iterator[FakedClock]:
    """Makes a clock in a temporary folder, which is removed when the block or this process ends.

    Raises:
        MissingLibrary: libfaketime is not installed.
    """
    library = faketime_library()
    account = server_account()
    folder = new_temporary_path(account)
    watchdog = Watchdog(remove=folder)
    try:
        make_folder(folder, account)
        yield FakedClock(library, folder)
    finally:
        watchdog.close()
        shutil.rmtree(folder, ignore_errors=True)
