"""A watchdog that ends throw-away servers once the process that started them has ended, in any way.

:class:`Watchdog` is the side of that process, the *parent*. The other side is this same file, run as a
script in a separate session. It is Python rather than ``/bin/sh`` because it waits on pipes with a
time limit, checks which process it signals, and removes folders that another user may write to; its
start-up of 30 ms overlaps with ``initdb``. It runs with ``-I -S``, so this file may import only the
standard library.

Two pipes carry all that the watchdog knows, and the kernel closes both correctly even on ``kill -9``:

- The *lifeline*: only the parent holds its write end, so end-of-file means that the parent has ended.
- The *servers'* pipe: every server process inherits its write end. Each one writes its process ID
  before it becomes ``initdb`` or ``postgres``, so that none is missed, and end-of-file means that
  the last of them has exited.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from shardids.pg.embedded.binaries import Account

QUICK_STEPS = ((signal.SIGINT, 4.0), (signal.SIGQUIT, 2.0), (signal.SIGKILL, 2.0))
"""The signals for a fast, an immediate and a forced stop, with the seconds that each is given.

Even a throw-away server is first stopped fast: a backend that receives SIGQUIT while it creates a
shared-memory segment leaks the segment.
"""

_ANNOUNCE = 'printf "%s %s\\000" "$$" "$0" >&0 && exec "$@" </dev/null'

_open: set[Watchdog] = set()


def _let_go() -> None:
    # A forked child that kept the pipes open would keep the servers alive after the parent's end.
    while _open:
        _open.pop().release()


def _close_all() -> None:
    while _open:
        next(iter(_open)).close()


os.register_at_fork(after_in_child=_let_go)
atexit.register(_close_all)


class Watchdog:
    """A process that ends all servers started through it once this process has ended.

    ``remove`` names a folder that it then removes with all its contents; it need not exist yet. The
    watchdog belongs to the process that created it: in a forked child it does nothing.
    """

    def __init__(self, *, remove: Path | None = None) -> None:
        self._owner = os.getpid()
        parent, self._lifeline = os.pipe()
        servers, self._servers = os.pipe()
        self._children: list[subprocess.Popen[bytes]] = []
        _open.add(self)
        try:
            self._process = subprocess.Popen(  # noqa: S603  -- this interpreter and this file
                [sys.executable, "-I", "-S", __file__, str(servers), str(remove or "")],
                stdin=parent,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(servers,),
                start_new_session=True,
                cwd="/",
            )
        except BaseException:
            _open.discard(self)
            self.release()
            raise
        finally:
            os.close(parent)
            os.close(servers)

    @property
    def is_ours(self) -> bool:
        """Whether this process created the watchdog; a forked child must not stop its parent's servers."""
        return self._owner == os.getpid()

    def spawn(
        self,
        command: Sequence[str],
        *,
        mark: str,
        log: IO[bytes],
        env: Mapping[str, str],
        account: Account | None,
    ) -> subprocess.Popen[bytes]:
        """Start a server process under this watchdog.

        ``mark`` distinguishes its command from every other: one argument or several consecutive ones,
        such as ``-D`` and the data folder. Raises OSError if the process cannot be started.
        """
        if not self.is_ours:
            raise OSError("a forked process can't start servers for its parent")
        child = subprocess.Popen(  # noqa: S603  -- a constant script; the command is its argument
            ["/bin/sh", "-c", _ANNOUNCE, mark, *command],
            stdin=self._servers,
            stdout=log,
            stderr=log,
            pass_fds=(self._servers,),
            start_new_session=True,
            cwd="/",
            env=dict(env),
            user=account.uid if account else None,
            group=account.gid if account else None,
            extra_groups=[] if account else None,
        )
        self._children.append(child)
        return child

    def close(self) -> None:
        """Make the watchdog act now, as if this process had ended, and wait until it is done."""
        if self.is_ours and self in _open:
            _open.remove(self)
            self.release()
            if self._process.wait() != 0:
                # Somebody has killed the watchdog.
                for child in self._children:
                    child.send_signal(signal.SIGQUIT)
            for child in self._children:
                child.wait()

    def release(self) -> None:
        """Close this process's ends of the pipes."""
        os.close(self._lifeline)
        os.close(self._servers)


def command_line(pid: int) -> str:
    """Return a process's command line, joined by spaces; empty if it has ended or is a zombie."""
    process = Path(f"/proc/{pid}")
    if not Path("/proc/self/stat").exists():
        ps = ["ps", "-ww", "-o", "command=", "-p", str(pid)]
        run = subprocess.run(ps, capture_output=True, check=False)  # noqa: S603  -- constants and a number
        return run.stdout.decode(errors="replace").rstrip("\n")
    # During exec and exit a process has no command line: look again until it has one, or has ended.
    for _ in range(50):
        try:
            command = (process / "cmdline").read_bytes()
            state = (process / "stat").read_bytes().rpartition(b") ")[2][:1]
        except OSError:
            return ""
        if command or state in b"ZX":
            return os.fsdecode(command.replace(b"\0", b" "))
        time.sleep(0.002)
    return ""


def has_mark(pid: int, mark: str) -> bool:
    """Return whether a process has these arguments in its command line (a PID may be reused)."""
    return f" {mark} " in f"{command_line(pid)} "


class _Servers:
    """The processes that have announced themselves, and the pipe that ends with the last of them."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._signal: signal.Signals | None = None
        self._processes: set[tuple[int, str]] = set()
        self._partial = b""

    def read(self) -> bool:
        """Read the pipe's contents; return False at its end."""
        got = os.read(self.fd, 65536)
        *announcements, self._partial = (self._partial + got).split(b"\0")
        for announcement in announcements:
            number, _, mark = announcement.partition(b" ")
            process = (int(number), os.fsdecode(mark))
            self._processes.add(process)
            if self._signal is not None:
                self._send(*process, self._signal)
        return bool(got)

    def end(self, signum: signal.Signals) -> None:
        """Signal every process; those announced later get the same signal at once."""
        self._signal = signum
        for pid, mark in self._processes:
            self._send(pid, mark, signum)

    @staticmethod
    def _send(pid: int, mark: str, signum: signal.Signals) -> None:
        # Each process leads a group: initdb's child processes are in it, a postmaster's backends are not.
        if has_mark(pid, mark):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signum)


def _watch(parent_fd: int, servers: _Servers) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(parent_fd, selectors.EVENT_READ)
        selector.register(servers.fd, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            # The parent holds the write end of both pipes, so the servers' pipe cannot end before it does.
            if servers.fd in ready and not servers.read():
                selector.unregister(servers.fd)
            if parent_fd in ready:
                return


def _end(servers: _Servers) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(servers.fd, selectors.EVENT_READ)
        for signum, patience_s in QUICK_STEPS:
            servers.end(signum)
            deadline = time.monotonic() + patience_s
            while (left := deadline - time.monotonic()) > 0:
                if selector.select(left) and not servers.read():
                    return


def _remove(folder: str) -> None:
    for _ in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        if not Path(folder).exists():
            return
        time.sleep(0.1)


def main(servers_fd: str, remove: str) -> None:
    """Wait for the parent's end; then ends the servers, and remove the folder if one is named."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    servers = _Servers(int(servers_fd))
    _watch(sys.stdin.fileno(), servers)
    _end(servers)
    if remove:
        _remove(remove)


if __name__ == "__main__":
    main(*sys.argv[1:])
