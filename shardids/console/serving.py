"""Serves the console until it is told to end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from shardids.console.app import Console
from shardids.console.events import MOST_STREAMS
from shardids.metrics.addresses import Address

_PATIENCE_S: Final = 5
MOST_CONNECTIONS: Final = 2 * MOST_STREAMS
"""How many connections are open at most: a process has 1,024 descriptors unless it was given more."""
_BACKLOG: Final = 32
"""How many wait to be accepted. asyncio reports as many failures at once when there is no descriptor left."""


class _Connection(H11Protocol):
    """A connection; the one too many closes the oldest that holds no stream, so that who is silent locks out
    nobody."""

    opened_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        # asyncio does so only where the listening socket names its protocol. Otherwise a body may wait 40 ms
        # for the acknowledgement of its head.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.opened_s = self.loop.time()
        others = [
            one for one in self.connections if isinstance(one, _Connection) and not one.transport.is_closing()
        ]
        if len(others) > MOST_CONNECTIONS:
            min((one for one in others if not one.is_stream), key=lambda one: one.opened_s).transport.abort()

    @property
    def is_stream(self) -> bool:
        """Whether events are sent on it now."""
        # Before the first request there is no cycle, whatever uvicorn's annotation says.
        return bool(self.cycle) and not self.cycle.response_complete and self.scope["path"] == "/api/events"


class _Server(uvicorn.Server):
    """Ends the streams and the action first: they would keep the server from ending."""

    left: str | None = None

    def __init__(self, config: uvicorn.Config, console: Console) -> None:
        super().__init__(config)
        self._console = console

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._console.broadcast.end()
        self.left = await asyncio.to_thread(self._console.actions.stop)
        await super().shutdown(sockets)


def serve(console: Console, address: Address, *, on_start: Callable[[Address], object]) -> str | None:
    """Serves until SIGINT or SIGTERM; ``on_start`` is called with the address once it listens.

    Returns what to say of an action that was interrupted, if one was.

    Raises:
        ShardidsError: it can't listen there.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with address.binding():
        bound = socket.create_server((address.host, address.port), family=family)
    with closing(bound) as listening:
        config = uvicorn.Config(
            console.app(),
            log_config=None,
            access_log=False,
            server_header=False,
            http=_Connection,
            # It speaks none, and such a connection would count no more.
            ws="none",
            log_level="error",
            backlog=_BACKLOG,
            timeout_graceful_shutdown=_PATIENCE_S,
        )
        server = _Server(config, console)
        on_start(Address(host=address.host, port=listening.getsockname()[1]))
        # The server raises the signal again when it has ended: without this, nothing is said of what is left.
        signal.signal(signal.SIGTERM, lambda _number, _frame: None)
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
    return server.left
