"""Server-sent events: what was told last goes to every viewer, and who is slow gets only the newest."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any


def event(name: str, values: Any) -> bytes:
    """An event as it is sent."""
    return f"event: {name}\ndata: {json.dumps(values, separators=(',', ':'))}\n\n".encode()


class Broadcast:
    """Tells all streams of the event loop the newest event; any thread may tell."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._newest = b""
        self._changed = asyncio.Event()
        self._is_closed = False

    def begin(self) -> None:
        """Belongs to the running loop from now on."""
        self._loop = asyncio.get_running_loop()

    def tell(self, told: bytes) -> None:
        """Sends an event to whoever listens, from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._set, told)

    def end(self) -> None:
        """Ends all streams; call it in the loop."""
        self._is_closed = True
        self._set(b"")

    def _set(self, told: bytes) -> None:
        self._newest = told
        self._changed.set()
        self._changed = asyncio.Event()

    async def stream(self) -> AsyncIterator[bytes]:
        """Yields the newest event, then each that is newer by the time that it can be sent."""
        # The page tries again after this many milliseconds.
        yield b"retry: 2000\n\n"
        sent = b""
        while not self._is_closed:
            changed = self._changed
            if self._newest is not sent and self._newest:
                sent = self._newest
                yield sent
            else:
                await changed.wait()
