"""Client processes, which draw and insert at once as an application's processes do."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from multiprocessing.synchronize import Barrier
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar

Result = TypeVar("Result")

Job: TypeAlias = Callable[..., AbstractContextManager[Callable[[], Result]]]
"""What a client does: entered, it gets ready; what it gives is then called in all clients at once."""

_PATIENCE_S: Final = 120.0
_PRELOAD: Final = ["shardids.compare.duplicates", "shardids.compare.inserts", "shardids.compare.order"]
_NOTHING: Mapping[str, str] = MappingProxyType({})

_start: Barrier


class Clients:
    """A fixed number of processes; see :func:`client_processes`."""

    def __init__(self, pool: Any, count: int) -> None:
        self._pool, self._count = pool, count

    def begin(self, job: Job[Result], arguments: Sequence[tuple[Any, ...]]) -> Callable[[], list[Result]]:
        """Runs the job in as many clients as there are tuples of arguments.

        What it gives waits for them, and gives what they return; it raises what one of them raised.
        """
        if len(arguments) > self._count:
            raise ValueError(f"there are {self._count} clients, not {len(arguments)}")
        # The others take part in the start, so that no client takes two of the jobs.
        idle = [None] * (self._count - len(arguments))
        tasks = [(job, each) for each in (*arguments, *idle)]
        running = self._pool.starmap_async(_work, tasks, chunksize=1)
        return lambda: list(running.get(_PATIENCE_S)[: len(arguments)])

    def run(self, job: Job[Result], arguments: Sequence[tuple[Any, ...]]) -> list[Result]:
        """:meth:`begin`, and waits."""
        return self.begin(job, arguments)()


@contextlib.contextmanager
def client_processes(count: int, env: Mapping[str, str] = _NOTHING) -> Iterator[Clients]:
    """``count`` processes, started with ``env`` in addition to the environment; they end with the block."""
    # Not forked from this process, which has threads and connections, but from one that has only imported.
    context = multiprocessing.get_context("spawn" if env else "forkserver")
    context.set_forkserver_preload(_PRELOAD)
    start = context.Barrier(count)
    with _environment(env), _without_interrupts():
        pool = context.Pool(count, _enter, (start,))
    with pool:
        yield Clients(pool, count)


@contextlib.contextmanager
def _environment(env: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """What is started here never sees Ctrl-C, which reaches all of a terminal; this process sees it later."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _enter(start: Barrier) -> None:
    global _start  # noqa: PLW0603  -- what a process is given once, when it starts
    _start = start


def _work(job: Job[Result], arguments: tuple[Any, ...] | None) -> Result | None:
    with contextlib.ExitStack() as stack:
        try:
            go = stack.enter_context(job(*arguments)) if arguments is not None else None
        finally:
            # Also one that failed: the others wait for it.
            _start.wait(_PATIENCE_S)
        return go() if go is not None else None
