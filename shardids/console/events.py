"""Server-sent events: what was told last goes to every viewer, and who is slow gets only the newest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from shardids.console.answers import as_json
from shardids.serving.server import STREAM

MOST_STREAMS: Final = 100
"""How many streams there are at most."""


class Broadcast:
    """Tells all streams of the event loop the newest event of each name; any thread may tell."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._newest: dict[str, tuple[int, bytes]] = {}
        self._told = 0
        self._changed = asyncio.Event()
        self._is_closed = False
        self.streams = 0

    def begin(self) -> None:
        """Belongs to the running loop from now on."""
        self._loop = asyncio.get_running_loop()

    def tell(self, name: str, values: Any) -> None:
        """Sends an event to whoever listens, from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            sent = f"event: {name}\ndata: {as_json(values)}\n\n".encode()
            self._loop.call_soon_threadsafe(self._set, name, sent)

    @property
    def is_full(self) -> bool:
        """Returns whether there are as many streams as there may be."""
        return self.streams >= MOST_STREAMS

    def end(self) -> None:
        """Ends all streams; call it in the loop."""
        self._is_closed = True
        self._wake()

    def _set(self, name: str, sent: bytes) -> None:
        self._told += 1
        self._newest[name] = self._told, sent
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def stream(self) -> AsyncIterator[bytes]:
        """Yields the newest events, then those that are newer by the time that they can be sent."""
        # The page tries again after this many milliseconds.
        yield b"retry: 2000\n\n"
        seen = 0
        while not self._is_closed:
            changed = self._changed
            newer = sorted(one for one in self._newest.values() if one[0] > seen)
            for number, sent in newer:
                seen = number
                yield sent
            if not newer:
                await changed.wait()


class EventStream(StreamingResponse):
    """A stream to one viewer. It counts from its admission, before a byte of it is sent."""

    def __init__(self, broadcast: Broadcast) -> None:
        # A proxy that collects answers would keep the events.
        headers = {"X-Accel-Buffering": "no"}
        super().__init__(broadcast.stream(), media_type="text/event-stream", headers=headers)
        self._broadcast = broadcast

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends events until the viewer goes or the console ends."""
        scope["state"][STREAM] = True
        self._broadcast.streams += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._broadcast.streams -= 1
