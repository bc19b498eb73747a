"""A TCP proxy that can fall silent: connections stay open, and nobody hears anything any more."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self


class Proxy:
    """Forwards connections of a port of its own to another one, until :meth:`swallow` or :meth:`hold`.

    It acknowledges what it does not pass on, so TCP's own timers never notice.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._swallows = threading.Event()
        self._flows = threading.Event()
        self._flows.set()
        self._links: set[_Link] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._flows.set()
        for link in [*self._links]:
            link.cut()

    def lead_to(self, port: int) -> None:
        """New connections go to another server, as those of a service whose primary has changed."""
        self._to = port

    def swallow(self) -> None:
        """From now on nothing passes, of old connections and of new ones."""
        self._swallows.set()

    def hold(self) -> None:
        """From now on nothing passes before :meth:`forward`, and all of it then, late."""
        self._flows.clear()

    def forward(self) -> None:
        """Lets everything pass again. Connections of which something was swallowed are cut."""
        self._swallows.clear()
        self._flows.set()
        for link in [*self._links]:
            if link.has_lost:
                link.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._to))
                except OSError:
                    client.close()
                    continue
                link = _Link(client, server)
                self._links.add(link)
                for one, other in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=(link, one, other), daemon=True).start()

    def _pass_on(self, link: _Link, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(65536):
                self._flows.wait()
                if not self._loses(link):
                    other.sendall(data)
            self._flows.wait()
            if not self._loses(link):
                other.shutdown(socket.SHUT_WR)
        except OSError:
            # One end was reset, as by a server killed before it has read all: the other must hear of it.
            self._flows.wait()
            if not self._loses(link):
                link.cut()
        if link.has_ended():
            self._links.discard(link)

    def _loses(self, link: _Link) -> bool:
        """Whether what a connection sends is swallowed."""
        if not self._swallows.is_set():
            if link.has_lost:
                # What comes after a gap would be taken for what comes next.
                link.cut()
            return link.has_lost
        link.has_lost = True
        if not self._swallows.is_set():
            # Forwarding has begun meanwhile, and perhaps has not seen that this connection lost something.
            link.cut()
        return True


class _Link:
    """A connection to the proxy and the one that it made for it."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self._ends = (client, server)
        self._lock = threading.Lock()
        self._running = 2
        self.has_lost = False

    def cut(self) -> None:
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def has_ended(self) -> bool:
        """Whether both directions have ended, this one being the last; then both sockets are closed."""
        with self._lock:
            self._running -= 1
            if self._running:
                return False
        for end in self._ends:
            end.close()
        return True
