"""The clock of a server, to be stepped. ``server_clock.py FOLDER SECONDS STEPS AROUND`` lets it swing.

It is a program because the sessions of a test leave its own process too little time to step a clock every few
ms. Only the standard library is imported here, so that it starts quickly.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

SWING_S = 200


class Clock:
    """The clock of a server that is started with ``env``: the machine's, plus what :meth:`set` says.

    The server's account must be able to look into the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "clock"
        self.set(0)

    @property
    def env(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(faketime_library()),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def set(self, ahead_s: float) -> None:
        """Steps the clock, for all processes at once."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{ahead_s:+.3f}s\n")
        new.chmod(0o644)
        new.replace(self._file)

    def swing(self, duration_s: float, steps: int, *, around_s: float = 0.0) -> None:
        """Steps the clock to anywhere within 200 s every few ms, for so long and so often at least."""
        command = [sys.executable, __file__, self._folder, str(duration_s), str(steps), str(around_s)]
        subprocess.run(command, check=True, timeout=600)


def faketime_library() -> Path:
    folders = [
        *Path("/usr/lib").glob("*/faketime"),
        Path("/usr/lib/faketime"),
        Path("/usr/local/lib/faketime"),
    ]
    found = [path for folder in folders for path in folder.glob("libfaketimeMT*")]
    assert found, "libfaketimeMT is not there; install it: apt-get install libfaketime"
    return found[0]


def main(folder: str, duration_s: str, steps: str, around_s: str) -> None:
    clock = Clock(Path(folder))
    chance = random.Random(1)
    end = time.monotonic() + float(duration_s)
    taken = 0
    while time.monotonic() < end or taken < int(steps):
        clock.set(float(around_s) + chance.uniform(-SWING_S, SWING_S))
        taken += 1
        time.sleep(0.003)
    clock.set(float(around_s))


if __name__ == "__main__":
    main(*sys.argv[1:])
