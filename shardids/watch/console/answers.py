"""Answers as JSON, refusals among them, requests as JSON, and server-sent events."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from shardids.errors import BadArgument, ConnectionFailed, ShardidsError, UnknownShard
from shardids.logs import logger, shown_error
from shardids.watch.serving import STREAM

log = logger("console")

_USER: Final = re.compile(r'((?:postgresql|postgres)(?:\+psycopg)?://)[^"/@\\]*@')
_OPTIONS: Final = re.compile(r"\?[\w.~%+-]+=[\w.~%+=&/-]*")


def as_json(values: Any) -> str:
    """Return values as JSON for the page, without users and options of databases' URLs."""
    # NaN is no JSON: a browser could not read it.
    written = json.dumps(values, separators=(",", ":"), allow_nan=False)
    if "://" not in written:
        return written
    return _OPTIONS.sub("?…", _USER.sub(r"\1…@", written))


def answer(values: Any, status: int = 200) -> Response:
    """Return values as JSON."""
    return Response(as_json(values), status, media_type="application/json")


def refusal(status: int, error: str, hint: str = "") -> Response:
    """Return an answer with the reason of a refusal, and the next step."""
    return answer({"error": error, "hint": hint}, status)


async def json_of(request: Request) -> dict[str, Any]:
    """Return the object that a request holds.

    Raises:
        BadArgument: it holds none, or does not say that it is JSON, as the forms of other pages can't.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise BadArgument("the request must be JSON", hint="Content-Type: application/json")
    body = await request.body()
    try:
        given = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        raise BadArgument("the request is not valid JSON") from None
    if not isinstance(given, dict):
        raise BadArgument("the request must be a JSON object")
    return given


async def refused(_request: Request, error: Exception) -> Response:
    """Return what one of shardids' own errors says."""
    if not isinstance(error, ShardidsError):
        raise error
    status = 409
    if isinstance(error, BadArgument):
        status = 400
    elif isinstance(error, UnknownShard):
        status = 404
    elif isinstance(error, ConnectionFailed):
        status = 503
    return refusal(status, error.message, error.hint)


async def no_such(_request: Request, error: Exception) -> Response:
    """Return the answer to a wrong address or method."""
    if not isinstance(error, HTTPException):
        raise error
    says = {404: "this page does not exist", 405: "this page does not support the method"}
    return refusal(error.status_code, says.get(error.status_code, error.detail))


async def too_long(_request: Request, _error: Exception) -> Response:
    """Return that a request is too long."""
    return refusal(413, "the request is longer than 1 MiB", "Send less at a time.")


async def gone(_request: Request, _error: Exception) -> Response:
    """Return an answer that nobody receives: the client closed the connection during its request."""
    return refusal(400, "the request ended early")


async def failed(request: Request, error: Exception) -> Response:
    """Return that the console itself failed; only its log has the error."""
    log.error("%s failed: %s", request.url.path, shown_error(error))
    return refusal(500, "the console failed to answer this", "Its log says more.")


async def too_many(_request: Request | None, _error: Exception) -> Response:
    """Return the answer to a token that was not looked at, since as many as may be wait to be judged."""
    refused = refusal(429, "too many tokens from here wait to be judged", "Try again in a second.")
    refused.headers["Retry-After"] = "1"
    return refused


MOST_STREAMS: Final = 100
"""How many streams there are at most."""


class Broadcast:
    """A channel for the newest event of each name, from any thread to all streams of the event loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._newest: dict[str, tuple[int, bytes]] = {}
        self._told = 0
        self._changed = asyncio.Event()
        self._is_closed = False
        self.streams = 0

    def begin(self) -> None:
        """Bind this to the running loop."""
        self._loop = asyncio.get_running_loop()

    def tell(self, name: str, values: Any) -> None:
        """Send an event to all listeners, from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            sent = f"event: {name}\ndata: {as_json(values)}\n\n".encode()
            self._loop.call_soon_threadsafe(self._set, name, sent)

    @property
    def is_full(self) -> bool:
        """Returns whether there are as many streams as there may be."""
        return self.streams >= MOST_STREAMS

    def end(self) -> None:
        """End all streams; call it in the loop."""
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
        """Yield the newest events, then those that are newer by the time that they can be sent."""
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
        """Send events until the viewer goes or the console ends."""
        scope["state"][STREAM] = True
        self._broadcast.streams += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._broadcast.streams -= 1
