"""``shardids …`` as processes of their own that can be killed, stopped and woken; each has a deadline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.clusters import environment

_SERVER = """
import json, os, signal, sys, traceback
from shardids.cli import app
import shardids.cli.nodes, shardids.cli.shards, shardids.cli.migrate, shardids.cli.watch
import sqlalchemy.dialects.postgresql.psycopg
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for the children: the kernel forgets them.
for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if child:
        print(child, flush=True)
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, end in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(order["path"] + end, os.O_CREAT | os.O_WRONLY), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(order["environment"])
    code = 70
    try:
        app(order["words"], prog_name="shardids")
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush(); sys.stderr.flush()
    with open(order["path"] + ".new", "w") as file:
        file.write(str(code))
    os.rename(order["path"] + ".new", order["path"] + ".code")
    os._exit(0)
"""


class Stuck(AssertionError):
    """Something neither ended nor was refused in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a command ended with; ``code`` is ``None`` if it was killed."""

    words: tuple[str, ...]
    code: int | None
    out: str
    err: str
    seconds: float
    number: str

    @property
    def reason(self) -> str:
        """The first line that says why it failed."""
        lines = [line for line in self.err.splitlines() if not line.startswith(("Warning", "To run"))]
        return " ".join(lines)[:400]

    def __str__(self) -> str:
        end = "killed" if self.code is None else f"exit {self.code}"
        why = f": {self.reason}" if self.code else ""
        return f"shardids {' '.join(self.words)}: {end} after {self.seconds:.1f} s{why} [{self.number}]"


@dataclass(slots=True, kw_only=True)
class Running:
    """A command that runs, or is stopped."""

    words: tuple[str, ...]
    pid: int
    path: str
    since: float = field(default_factory=time.monotonic)

    def is_alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, deadline_s: float) -> Ran:
        """What it ended with.

        Raises:
            Stuck: it has not ended ``deadline_s`` after this call; it is killed.
            AssertionError: it ended in a way that no user should see.
        """
        until = time.monotonic() + deadline_s
        while self.is_alive():
            if time.monotonic() > until:
                ran = self._ran()
                self.signal(signal.SIGKILL)
                raise Stuck(f"{ran} did not end within {deadline_s:g} s; it said: {ran.out}{ran.err}")
            time.sleep(0.02)
        ran = self._ran()
        assert ran.code in (0, None) or ran.err.strip() or ran.out.strip(), f"{ran}, and does not say why"
        assert "Traceback" not in ran.err, f"{ran}\n{ran.out}{ran.err}"
        return ran

    def _ran(self) -> Ran:
        code = None
        with suppress(FileNotFoundError):
            code = int(Path(f"{self.path}.code").read_text())
        texts = [Path(f"{self.path}.{end}") for end in ("out", "err")]
        out, err = (text.read_text(errors="replace") if text.exists() else "" for text in texts)
        seconds = time.monotonic() - self.since
        return Ran(
            words=self.words, code=code, out=out, err=err, seconds=seconds, number=Path(self.path).name
        )


class Launcher:
    """A process that has everything imported and forks children that run ``shardids``."""

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        self._folder, self._variables, self._numbers = folder, dict(variables), count()
        self._started: list[Running] = []
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for command in self._started:
            command.signal(signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(60)

    def start(self, *words: str) -> Running:
        path = str(self._folder / f"command-{next(self._numbers)}")
        order = {"words": words, "path": path, "environment": self._variables}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        command = Running(words=words, pid=int(self._process.stdout.readline()), path=path)
        self._started = [one for one in self._started if one.is_alive()] + [command]
        return command

    def run(self, *words: str, deadline_s: float) -> Ran:
        return self.start(*words).wait(deadline_s)
