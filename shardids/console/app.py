"""Answers requests: the page, JSON of what was read, and events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from shardids.console import figures
from shardids.console.events import Broadcast, event
from shardids.console.placement_map import columns
from shardids.console.watching import Seen, Watcher
from shardids.errors import MissingLibrary

try:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles
except ImportError as error:
    raise MissingLibrary(
        "the console needs Starlette", hint="To install it: pip install 'shardids[console]'"
    ) from error

STATIC: Final = Path(__file__).parent / "static"


def answer(values: Any, status: int = 200) -> Response:
    """Values as JSON."""
    return Response(
        json.dumps(values, separators=(",", ":"), allow_nan=False),
        status,
        media_type="application/json",
    )


class Console:
    """The application of one cluster.

    Args:
        catalog_url: the catalog.
        watcher: reads the cluster; it is started and closed with the application.
    """

    def __init__(self, catalog_url: str, watcher: Watcher) -> None:
        self._catalog_url = catalog_url
        self._watcher = watcher
        self.broadcast = Broadcast()
        watcher.listen(self._tell)

    def app(self) -> Starlette:
        """Returns the application."""
        return Starlette(
            routes=[
                Route("/healthz", self._health),
                Route("/api/cluster", self._cluster),
                Route("/api/nodes", self._nodes),
                Route("/api/rates", self._rates),
                Route("/api/map", self._map),
                Route("/api/events", self._events),
                Mount("/", StaticFiles(directory=STATIC, html=True)),
            ],
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        self.broadcast.begin()
        self._watcher.start()
        try:
            yield
        finally:
            self._watcher.close()

    def _health(self, _request: Request) -> Response:
        return PlainTextResponse("ok\n")

    def _cluster(self, _request: Request) -> Response:
        seen = self._watcher.seen()
        return answer(
            figures.cluster(seen, self._catalog_url, interval_s=self._watcher.interval_s, actions=False)
        )

    def _nodes(self, _request: Request) -> Response:
        return answer(figures.nodes(self._watcher.seen()))

    def _rates(self, _request: Request) -> Response:
        return answer(figures.rates(self._watcher.seen(), self._watcher.history))

    def _map(self, _request: Request) -> Response:
        return answer({"first": 0} | columns(self._watcher.seen()))

    async def _events(self, _request: Request) -> Response:
        return StreamingResponse(
            self.broadcast.stream(), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )

    def _tell(self, seen: Seen) -> None:
        self.broadcast.tell(
            event(
                "tick",
                {
                    "read_at": seen.at,
                    "nodes": figures.nodes(seen),
                    "rates": figures.newest_rates(seen),
                    "map": columns(seen),
                },
            )
        )
