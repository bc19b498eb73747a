"""One postmaster process: launches it, tells whether it is running and ready, and signals it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from shardids.pg.embedded.binaries import Account
from shardids.pg.embedded.data import data_mark, log_tail, open_log
from shardids.pg.embedded.watchdog import Watchdog, command_line, has_mark

STOP_STEPS = ((signal.SIGINT, 30.0), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 10.0))
"""The signals for a fast, an immediate and a forced stop, with the seconds that each is given."""

_READY = ("ready", "standby")
_START_TIMEOUT_S = 60.0
_POLL_S = 0.005
_BACKGROUND = 'exec "$@" </dev/null >&2 & printf "%s" "$!"'


class Postmaster:
    """The postmaster of a data directory, running or not, whichever process started it."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self._mark = data_mark(data)
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Its process ID, or ``None`` if it is not running."""
        if self._child is not None and self._child.poll() is None:
            pid: int | None = self._child.pid
        else:
            pid = _number(self._pid_file())
        # A stale file may name a process of another program or of another server.
        return pid if pid is not None and has_mark(pid, self._mark) else None

    def try_start(
        self,
        command: Sequence[str],
        *,
        watchdog: Watchdog | None,
        log_file: Path,
        env: Mapping[str, str],
        account: Account | None,
    ) -> str | None:
        """Start the postmaster, as a child process if there is a ``watchdog``, and wait until it is ready.

        Returns ``None`` if it accepts connections; otherwise it has ended, and the end of its log is
        returned.
        """
        self._remove_stale_pid_file()
        try:
            with open_log(log_file) as log:
                offset = log.tell()
                if watchdog is None:
                    pid = _spawn_alone(command, log=log, env=env, account=account)
                else:
                    self._child = watchdog.spawn(command, mark=self._mark, log=log, env=env, account=account)
                    pid = self._child.pid
        except OSError as error:
            return str(error)
        if self._is_ready_within(_START_TIMEOUT_S, pid):
            return None
        self.end(pid, STOP_STEPS[1:])
        return log_tail(log_file, offset) or "(nothing in the log)"

    def end(self, pid: int, steps: Sequence[tuple[signal.Signals, float]]) -> None:
        """Signal the process and wait for its end, one step after another until it has ended.

        Raises PermissionError if it belongs to another user, TimeoutError if it survives all steps.
        """
        for signum, patience_s in steps:
            if not self._has_ended(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)
            if self._has_ended_within(patience_s, pid):
                return
        raise TimeoutError(f"process {pid} outlived signal {steps[-1][0].name}")

    def _is_ready_within(self, timeout_s: float, pid: int) -> bool:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            lines = self._pid_file()
            if _number(lines) == pid and len(lines) >= 8 and lines[7].strip() in _READY:
                return True
            if self._has_ended(pid):
                return False
            time.sleep(_POLL_S)
        return False

    def _has_ended_within(self, timeout_s: float, pid: int) -> bool:
        deadline = time.monotonic() + timeout_s
        while not (ended := self._has_ended(pid)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return ended

    def _has_ended(self, pid: int) -> bool:
        if self._child is not None and self._child.pid == pid:
            return self._child.poll() is not None
        return not has_mark(pid, self._mark)

    def _pid_file(self) -> list[str]:
        try:
            return os.fsdecode((self.data / "postmaster.pid").read_bytes()).splitlines()
        except OSError:
            return []

    def _remove_stale_pid_file(self) -> None:
        # PostgreSQL takes any running process of the same user for the former postmaster. But the file
        # is also its protection against two postmasters on one directory: in doubt, it is kept.
        pid = _number(self._pid_file())
        if pid is not None and _is_other_program(command_line(pid)):
            (self.data / "postmaster.pid").unlink(missing_ok=True)


def _spawn_alone(
    command: Sequence[str], *, log: IO[bytes], env: Mapping[str, str], account: Account | None
) -> int:
    # A shell that ends at once leaves it to init, so it outlives this process and never is its zombie.
    shell = subprocess.run(  # noqa: S603  -- a constant script; the command is its argument
        ["/bin/sh", "-c", _BACKGROUND, "sh", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        check=True,
        start_new_session=True,
        cwd="/",
        env=env,
        user=account.uid if account else None,
        group=account.gid if account else None,
        extra_groups=[] if account else None,
    )
    return int(shell.stdout)


def _is_other_program(command: str) -> bool:
    """Return whether a command without the directory's mark surely is not its postmaster.

    A server that was started by hand may have got its directory as a relative path or from PGDATA.
    """
    if not command:
        return False
    is_backend = command.startswith("postgres: ")
    is_server = re.search(r"postgres|postmaster", command) is not None
    return is_backend or not is_server


def _number(lines: Sequence[str]) -> int | None:
    return int(lines[0]) if lines and lines[0].isdecimal() else None
