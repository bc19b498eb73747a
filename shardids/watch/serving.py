"""HTTP for the console and the metrics: addresses, names of hosts, connections."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Self
from urllib.parse import urlsplit

from shardids.errors import BadArgument, MissingLibrary, ShardidsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where to listen: ``host`` is a name or an address; port 0 is any free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``HOST:PORT``, an IPv6 address in brackets.

        Raises:
            BadArgument: it has another form.
        """
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
        if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
            raise BadArgument(
                f"{text!r} is not an address to listen on", hint="Give HOST:PORT, such as 127.0.0.1:9187."
            )
        return cls(host=host, port=int(port))

    @property
    def is_loopback(self) -> bool:
        """Returns whether no other machine reaches it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @contextmanager
    def binding(self) -> Iterator[None]:
        """Hold the address for the block inside.

        Raises:
            ShardidsError: the system refuses it; the message names it.
        """
        try:
            yield
        except OSError as error:
            # What Python adds to the text of some has the address a second time.
            is_known = error.errno in errno.errorcode
            reason = os.strerror(error.errno or 0) if is_known else error.strerror or str(error)
            raise ShardidsError(f"can't listen on {self}: {reason}", hint=_hint(error.errno)) from error

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _hint(number: int | None) -> str:
    if number == errno.EADDRINUSE:
        return "Another process listens there: end it, or choose another port with --listen HOST:PORT."
    return "Choose an address of this machine and a port with --listen HOST:PORT."


def serves(host: str, names: Collection[str]) -> bool:
    """Return whether a request with this ``Host`` is for a server with these names.

    Addresses and ``localhost`` always are. Any other name can be made to lead here by the page that asks (DNS
    rebinding), so the server has to know it.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return name == "localhost" or name in {known.lower() for known in names}


try:
    import h11
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise MissingLibrary(
        "the HTTP server needs uvicorn", hint="To install it: pip install 'shardids[ops]'"
    ) from error

_PATIENCE_S: Final = 5
MOST_CONNECTIONS: Final = 200
"""Largest number of open connections: a process has 1,024 descriptors by default."""
REQUEST_S: Final = 10.0
"""How long a client may take for a request, from its connection or from the last answer on it."""
_BACKLOG: Final = 32
"""How many wait to be accepted. asyncio reports as many failures at once when descriptors have run out."""


class _Connection(H11Protocol):
    """A connection. One too many closes the oldest idle one, else a stream, else a request."""

    opened_s = 0.0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        # asyncio does so only where the listening socket names its protocol. Otherwise a body may wait 40 ms
        # for the acknowledgement of its head.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.opened_s = self.loop.time()
        self._expect_request()
        others = [
            one
            for one in self.connections
            if isinstance(one, _Connection) and one is not self and not one.transport.is_closing()
        ]
        if len(others) >= MOST_CONNECTIONS:
            min(others, key=lambda one: (one.importance, one.opened_s)).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._expect_nothing()

    def on_response_complete(self) -> None:
        self._expect_request()
        super().on_response_complete()

    @property
    def importance(self) -> int:
        """Returns 0 while the client has yet to send a request, 1 for a stream, 2 for a request."""
        if self._is_awaited:
            return 0
        return 1 if self.scope["state"].get(STREAM) else 2

    @property
    def _is_awaited(self) -> bool:
        # Before the first request there is no cycle, whatever uvicorn's annotation says.
        return not self.cycle or self.cycle.response_complete or self.conn.their_state is h11.SEND_BODY

    def _expect_request(self) -> None:
        self._expect_nothing()
        self._deadline = self.loop.call_later(REQUEST_S, self._give_up)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    def _give_up(self) -> None:
        if self.transport.get_write_buffer_size():
            self._expect_request()  # of a client that still reads the last answer
        elif self._is_awaited:
            self.transport.abort()


STREAM: Final = "is_stream"
"""The key in a request's state that marks an answer without an end."""


class _Server(uvicorn.Server):
    """End all that would keep the server running, first."""

    def __init__(self, config: uvicorn.Config, before_end: Callable[[], Awaitable[Any]] | None) -> None:
        super().__init__(config)
        self._before_end = before_end

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._before_end is not None:
            await self._before_end()
        await super().shutdown(sockets)


def serve(
    app: Any,
    address: Address,
    *,
    on_start: Callable[[Address], object],
    before_end: Callable[[], Awaitable[Any]] | None = None,
) -> None:
    """Serve an ASGI application until SIGINT or SIGTERM.

    Args:
        app: the application.
        address: where to listen.
        on_start: called with the address once the server listens.
        before_end: called in the server's loop before it waits for open requests.

    Raises:
        ShardidsError: the system refuses the address.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with address.binding():
        bound = socket.create_server((address.host, address.port), family=family)
    with closing(bound) as listening:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            http=_Connection,
            # Such a connection would count no more.
            ws="none",
            log_level="error",
            backlog=_BACKLOG,
            timeout_graceful_shutdown=_PATIENCE_S,
        )
        server = _Server(config, before_end)
        on_start(Address(host=address.host, port=listening.getsockname()[1]))
        # The server raises the signal again when it has ended, which would end the process.
        signal.signal(signal.SIGTERM, lambda _number, _frame: None)
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
