"""Serves the console until it is told to end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from contextlib import closing, suppress

import uvicorn

from shardids.console.app import Console
from shardids.metrics.addresses import Address

_PATIENCE_S = 5


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
        OSError: it can't listen there.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with closing(socket.create_server((address.host, address.port), family=family)) as listening:
        config = uvicorn.Config(
            console.app(),
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_PATIENCE_S,
        )
        server = _Server(config, console)
        on_start(Address(host=address.host, port=listening.getsockname()[1]))
        # The server raises the signal again when it has ended: without this, nothing is said of what is left.
        signal.signal(signal.SIGTERM, lambda _number, _frame: None)
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
    return server.left
