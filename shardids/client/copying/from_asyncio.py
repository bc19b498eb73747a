"""The copy of an ``AsyncCluster``: the same, in a thread, whose connections are its own."""

from __future__ import annotations

from asyncio import (
    AbstractEventLoop,
    CancelledError,
    create_task,
    get_running_loop,
    run_coroutine_threadsafe,
    shield,
    to_thread,
    wait,
)
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Any

from shardids.client.copying.copy import CopyReport, CopySettings, Shards, copy_rows
from shardids.client.copying.sources import CHUNK
from shardids.client.engines import NodeEngines
from shardids.client.listener import FollowedPlacement


async def copied_in_thread(
    shards: Shards,
    table: Any,
    rows: Any,
    settings: CopySettings,
    *,
    followed: FollowedPlacement,
    engines: NodeEngines,
) -> CopyReport:
    """Copies in a thread, and waits for its end even when the task is cancelled; disposes of ``engines``.

    Raises what :meth:`shardids.Cluster.copy` says.
    """
    loop, stop = get_running_loop(), Event()
    on_progress = settings.on_progress
    settings = replace(settings, on_progress=lambda copied: loop.call_soon_threadsafe(on_progress, copied))
    given = _pulled(rows, loop) if hasattr(rows, "__aiter__") else rows
    copy = partial(
        copy_rows, shards, table, given, settings, followed=followed, engine_of=engines.of, stop=stop
    )
    copying = create_task(to_thread(copy))
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


def _pulled(rows: Any, loop: AbstractEventLoop) -> Iterator[Any]:
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
