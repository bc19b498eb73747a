"""Output of the metrics, over HTTP or to a file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest, make_asgi_app, write_to_textfile

from shardids.errors import BadArgument, ShardidsError
from shardids.watch import serving
from shardids.watch.facts.reading import INTERVAL_S
from shardids.watch.metrics.collector import ClusterCollector
from shardids.watch.serving import Address, serves


def serve(
    collector: ClusterCollector,
    address: Address,
    *,
    names: Collection[str] = (),
    on_start: Callable[[Address], object],
) -> None:
    """Serve ``/metrics`` until SIGINT or SIGTERM.

    Args:
        collector: gives the metrics.
        address: where to listen.
        names: names of hosts that clients may ask for, besides the address's own.
        on_start: called with the address once the server listens.

    Raises:
        ShardidsError: the system refuses the address.
    """
    serving.serve(_Metrics(_registry(collector), [*names, address.host]), address, on_start=on_start)


class _Metrics:
    """Return the application; ``names`` are the hosts that it answers for."""

    def __init__(self, registry: CollectorRegistry, names: Collection[str]) -> None:
        self._names = names
        self._of_prometheus: Callable[..., Coroutine[None, None, None]] = make_asgi_app(registry)

    async def __call__(
        self, scope: dict[str, Any], _receive: object, send: Callable[[_Message], Any]
    ) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            raise NotImplementedError
        for message in await self._answer(scope):
            await send(message)

    async def _answer(self, scope: dict[str, Any]) -> list[_Message]:
        host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
        if not serves(host, self._names):
            return _said(
                403,
                "The metrics are not served under this name. Ask by address, or start: shardids metrics"
                " --host NAME",
            )
        if scope["path"] not in ("/metrics", "/"):
            return _said(404, "The metrics are at /metrics.")
        answer: list[_Message] = []

        async def request() -> _Message:
            return {"type": "http.request"}

        async def keep(message: _Message) -> None:
            answer.append(message)

        # In a thread: a reading takes seconds, in which others are answered.
        await asyncio.to_thread(lambda: asyncio.run(self._of_prometheus(scope, request, keep)))
        return answer


_Message = dict[str, Any]


def _said(status: int, text: str) -> list[_Message]:
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    return [
        {"type": "http.response.start", "status": status, "headers": headers},
        {"type": "http.response.body", "body": f"{text}\n".encode()},
    ]


def text(collector: ClusterCollector) -> str:
    """Return the metrics in Prometheus' text format; see :func:`write`."""
    _look_before(collector)
    return generate_latest(_registry(collector)).decode()


def write(collector: ClusterCollector, path: Path) -> None:
    """Write the metrics to a file for node_exporter, under another name that then takes the file's place.

    Rates need two looks, so this takes half a second and more.

    Raises:
        BadArgument: the path exists and is not a regular file, such as a device or a link to one.
        ShardidsError: the system refuses to write; the file stays as it was.
    """
    if path.exists() and not path.is_file():
        raise BadArgument(f"{path} is not a regular file", hint="Give the name of a file: FILE.prom")
    _look_before(collector)
    try:
        write_to_textfile(str(path), _registry(collector))
    except OSError as error:
        # The system names the other file, which is gone, or none at all.
        raise ShardidsError(
            f"can't write {path}: {error.strerror or error}",
            hint="Check that its folder exists, has free space, and is writable by this user.",
        ) from error


def _look_before(collector: ClusterCollector) -> None:
    collector.read()
    time.sleep(INTERVAL_S)


def _registry(collector: ClusterCollector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry
