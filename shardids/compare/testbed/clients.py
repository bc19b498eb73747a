"""Client processes, which draw and insert concurrently as an application's processes do."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from multiprocessing import resource_tracker, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar

from shardids.errors import ShardidsError
from shardids.pg.embedded.data import new_temporary_path
from shardids.pg.embedded.watchdog import Watchdog

Result = TypeVar("Result")

Job: TypeAlias = Callable[..., AbstractContextManager[Callable[[], Result]]]
"""A client's job: on entry it gets ready and returns a function, which all clients then call at once."""

_PATIENCE_S: Final = 120.0
_END_S: Final = 5.0
_PRELOAD: Final = [
    "shardids.compare.measures.uniqueness",
    "shardids.compare.measures.draws",
    "shardids.compare.measures.uniqueness",
    "shardids.compare.measures.storage",
]
_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Client:
    process: BaseProcess
    pipe: Connection

    def send(self, what: object) -> None:
        """Send a message; whether the process still exists shows when it should answer."""
        with contextlib.suppress(OSError):
            self.pipe.send(what)

    def answer(self) -> Any:
        """Return the answer, or raise it if it is an error; ShardidsError if the process ended or hangs."""
        if not self.pipe.poll(_PATIENCE_S):
            # A late answer would be taken for the answer to the next job.
            self.process.kill()
            raise ShardidsError(f"a client process does not answer for {_PATIENCE_S:g} s")
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(_END_S)
            how = f"a client process ended with exit code {self.process.exitcode}"
            raise ShardidsError(how, hint="Is there enough memory?") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        """End the process, whatever it is doing."""
        self.process.terminate()
        self.process.join(_END_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()


class Clients:
    """A fixed number of processes; see :func:`client_processes`."""

    def __init__(self, clients: Sequence[_Client]) -> None:
        self._clients = clients

    def begin(self, job: Job[Result], arguments: Sequence[tuple[Any, ...]]) -> Callable[[], list[Result]]:
        """Let as many clients as there are tuples of arguments get ready, and start them at once.

        Returns a function that waits for them and returns their results. Both raise the error of a client,
        after all have answered, and ShardidsError for a client that ended.
        """
        if len(arguments) > len(self._clients):
            raise ValueError(f"there are {len(self._clients)} clients, not {len(arguments)}")
        chosen = self._clients[: len(arguments)]
        for client, each in zip(chosen, arguments, strict=True):
            client.send((job, each))
        try:
            _answers(chosen)
        except Exception:
            _tell(chosen, go=False)
            with contextlib.suppress(Exception):
                _answers(chosen)
            raise
        _tell(chosen, go=True)
        return lambda: _answers(chosen)

    def run(self, job: Job[Result], arguments: Sequence[tuple[Any, ...]]) -> list[Result]:
        """Call :meth:`begin`, and wait for the results."""
        return self.begin(job, arguments)()


@contextlib.contextmanager
def client_processes(count: int, envs: Sequence[Mapping[str, str]] = (_NOTHING,)) -> Iterator[Clients]:
    """Start ``count`` processes; they end with the block.

    ``envs`` are added to their environments: in turn, if there are several.
    """
    # Forked not from this process, which has threads and connections, but from one that has only imported.
    context = multiprocessing.get_context("spawn") if any(envs) else multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    clients: list[_Client] = []
    try:
        with _without_interrupts(), _temporary_files_in(_folder()):
            for number in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs,), daemon=True)
                with _environment(envs[number % len(envs)]):
                    process.start()
                theirs.close()
                clients.append(_Client(process, ours))
        yield Clients(clients)
    finally:
        for client in clients:
            client.end()


def _answers(clients: Sequence[_Client]) -> list[Any]:
    answers, failures = [], []
    for client in clients:
        try:
            answers.append(client.answer())
        except Exception as error:  # noqa: BLE001  -- the others' answers must not be left for the next job
            failures.append(error)
    if failures:
        raise failures[0]
    return answers


def _tell(clients: Sequence[_Client], *, go: bool) -> None:
    for client in clients:
        client.send(go)


def _serve(pipe: Connection) -> None:
    """Run a client's jobs, until the other end of the pipe is closed.

    For each job it receives two messages, the job and whether to start, and answers twice: when it is ready,
    and when the job is done.
    """
    with contextlib.suppress(EOFError, OSError):
        while True:
            job, arguments = pipe.recv()
            stack = contextlib.ExitStack()
            ready = _attempt(lambda: stack.enter_context(job(*arguments)))  # noqa: B023  -- called at once
            pipe.send(ready if isinstance(ready, Exception) else None)
            answer = _attempt(ready) if pipe.recv() else None
            closed = _attempt(stack.close)
            pipe.send(closed if isinstance(closed, Exception) else answer)


def _attempt(function: Callable[[], Any]) -> Any:
    """Return the function's result, or its error."""
    try:
        return function()
    except Exception as error:  # noqa: BLE001  -- whatever it is, it is the answer
        return error


@contextlib.contextmanager
def _environment(env: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@cache
def _folder() -> Path:
    """Make the folder of multiprocessing's fork-server socket, removed however this process ends."""
    folder = new_temporary_path(None)
    Watchdog(remove=folder)
    folder.mkdir(mode=0o700)
    # What is registered last runs first: multiprocessing removes its files, then the watchdog the folder.
    atexit.register(util._exit_function)  # type: ignore[attr-defined]  # nothing public does it in time
    return folder


@contextlib.contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Keep Ctrl-C from the processes started in the block; this process receives it after the block."""
    # Started first: multiprocessing unblocks the signal when it does that.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
