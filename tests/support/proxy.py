"""A TCP proxy that can swallow what it is sent: connections stay open, and nobody hears anything any more."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self


class Proxy:
    """Forwards connections of a port of its own to another one, until :meth:`swallow`.

    It acknowledges what it swallows, so TCP's own timers never notice.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._swallows = threading.Event()
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for end in (self._listener, *self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def swallow(self) -> None:
        """From now on nothing passes, of old connections and of new ones."""
        self._swallows.set()

    def forward(self) -> None:
        """Lets everything pass again. What was swallowed is gone."""
        self._swallows.clear()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._to))
                self._ends += [client, server]
                for one, other in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(65536):
                if not self._swallows.is_set():
                    other.sendall(data)
            if not self._swallows.is_set():
                other.shutdown(socket.SHUT_WR)
