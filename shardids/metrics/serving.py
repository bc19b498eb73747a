"""Serves the metrics over HTTP, or writes them to a file."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event

from prometheus_client import CollectorRegistry, generate_latest, start_http_server, write_to_textfile

from shardids.errors import BadArgument, ShardidsError
from shardids.metrics.addresses import Address
from shardids.metrics.collector import ClusterCollector
from shardids.metrics.rates import INTERVAL_S


def serve(collector: ClusterCollector, address: Address, *, on_start: Callable[[Address], object]) -> None:
    """Serves ``/metrics`` until SIGTERM; ``on_start`` is called with the address once it listens.

    Raises:
        ShardidsError: it can't listen there.
    """
    stop = Event()
    # The first process of a container has no default action for it.
    signal.signal(signal.SIGTERM, lambda _number, _frame: stop.set())
    with address.binding():
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

    Raises:
        BadArgument: something is there that is no file, such as a device or a link to one.
        ShardidsError: the system refuses to write; what was there stays as it was.
    """
    if path.exists() and not path.is_file():
        raise BadArgument(f"{path} is no file to be replaced", hint="Give the name of one: FILE.prom")
    _look_before(collector)
    try:
        write_to_textfile(str(path), _registry(collector))
    except OSError as error:
        # The system names the other file, which is gone, or none at all.
        raise ShardidsError(
            f"can't write {path}: {error.strerror or error}",
            hint="Its folder has to exist, to have room, and to take new files of this user.",
        ) from error


def _look_before(collector: ClusterCollector) -> None:
    collector.read()
    time.sleep(INTERVAL_S)


def _registry(collector: ClusterCollector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry
