"""Serves the metrics over HTTP, or writes them to a file."""

from __future__ import annotations

import ipaddress
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Self

from prometheus_client import CollectorRegistry, generate_latest, start_http_server, write_to_textfile

from shardids.errors import BadArgument
from shardids.metrics.collector import ClusterCollector
from shardids.metrics.rates import INTERVAL_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where to listen: ``host`` is a name or an address; port 0 is any free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads ``HOST:PORT``, an IPv6 address in brackets.

        Raises:
            BadArgument: it has another form.
        """
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
        if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
            raise BadArgument(
                f"{text!r} is no address to listen at", hint="It looks like this: 127.0.0.1:9187"
            )
        return cls(host=host, port=int(port))

    @property
    def is_loopback(self) -> bool:
        """Returns whether no other machine reaches it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def serve(collector: ClusterCollector, address: Address, *, on_start: Callable[[Address], object]) -> None:
    """Serves ``/metrics`` until SIGTERM; ``on_start`` is called with the address once it listens.

    Raises:
        OSError: it can't listen there.
    """
    stop = Event()
    # The first process of a container has no default action for it.
    signal.signal(signal.SIGTERM, lambda _number, _frame: stop.set())
    server, thread = start_http_server(address.port, address.host, registry=_registry(collector))
    try:
        on_start(Address(host=address.host, port=server.server_port))
        stop.wait()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def text(collector: ClusterCollector) -> str:
    """Returns the metrics in Prometheus' text format; see :func:`write`."""
    _look_before(collector)
    return generate_latest(_registry(collector)).decode()


def write(collector: ClusterCollector, path: Path) -> None:
    """Writes the metrics to a file for node_exporter, under another name that then takes the file's place.

    Rates need two looks, so this takes half a second and more.
    """
    _look_before(collector)
    write_to_textfile(str(path), _registry(collector))


def _look_before(collector: ClusterCollector) -> None:
    collector.read()
    time.sleep(INTERVAL_S)


def _registry(collector: ClusterCollector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry
