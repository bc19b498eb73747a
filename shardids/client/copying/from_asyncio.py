"""The copy of an ``AsyncCluster``: the same, in a thread, whose connections are its own."""

from __future__ import annotations

from asyncio import (
    AbstractEventLoop,
    CancelledError,
    create_task,
    run_coroutine_threadsafe,
    shield,
    to_thread,
    wait,
)
from collections.abc import AsyncIterator, Callable, Iterator
from threading import Event
from typing import Any

from shardids.client.copying.copy import CopyReport
from shardids.client.copying.sources import CHUNK
from shardids.client.engines import NodeEngines


async def copied_in_thread(copy: Callable[[Event], CopyReport], engines: NodeEngines) -> CopyReport:
    """Runs the copy in a thread, and waits for its end even when the task is cancelled."""
    stop = Event()
    copying = create_task(to_thread(copy, stop))
    try:
        return await shield(copying)
    except CancelledError:
        stop.set()
        await wait([copying])
        # What stopped it is the cancellation.
        copying.exception()
        raise
    finally:
        await to_thread(engines.dispose)


def pulled(rows: Any, loop: AbstractEventLoop) -> Iterator[Any]:
    """Yields the rows of an async iterable, which runs in its loop, in another thread."""
    source = aiter(rows)
    while chunk := run_coroutine_threadsafe(_some(source), loop).result():
        yield from chunk


async def _some(rows: AsyncIterator[Any]) -> list[Any]:
    chunk: list[Any] = []
    async for row in rows:
        chunk.append(row)
        if len(chunk) == CHUNK:
            break
    return chunk
