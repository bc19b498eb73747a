"""The web application: the page, and JSON of readings and of questions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from shardids.errors import BadArgument, ConnectionFailed, ShardidsError, UnknownShard
from shardids.watch.console import answers, changes, figures
from shardids.watch.console.acting import Actions
from shardids.watch.console.answers import Broadcast, EventStream, answer, json_of, refusal
from shardids.watch.console.databases import Databases, SlowReader
from shardids.watch.console.examining import Examiner
from shardids.watch.console.guard import Access, Guard, Login, TooLong, TooManyAttempts
from shardids.watch.console.hot import HotKeys, is_hot
from shardids.watch.console.inspector import inspect
from shardids.watch.console.prometheus import Prometheus
from shardids.watch.console.shards import columns, shard, slow_columns
from shardids.watch.console.todo import ToDo
from shardids.watch.console.unusual import Unusual
from shardids.watch.console.watching import INTERVAL_S, Seen, Watcher

STATIC: Final = Path(__file__).parent / "static"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a console.

    Attributes:
        catalog_url: the catalog; its user also logs in to the nodes.
        access: the clients with access.
        interval_s: the least time between readings.
        allow_actions: whether the page can begin moves, rebalances and fences.
        prometheus: the source of the rates of the last hour, if not memory.
        keys: the columns that hold sharding keys, as ``users.name``, to name the busiest of a hot shard.
    """

    catalog_url: str = field(repr=False)
    access: Access
    interval_s: float = INTERVAL_S
    allow_actions: bool = False
    prometheus: Prometheus | None = None
    keys: tuple[str, ...] = ()


class Console:
    """The application of one cluster; see :class:`Settings`.

    Attributes:
        left: how to resume the action that the console's end interrupted; ``None`` if there was none.
    """

    left: str | None = None

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._watcher = Watcher(settings.catalog_url, interval_s=settings.interval_s)
        self._databases = Databases(settings.catalog_url, self._watcher)
        self._slow = SlowReader(self._databases)
        self._journal = changes.Journal(self._databases)
        self._examiner = Examiner(settings.catalog_url)
        self.broadcast = Broadcast()
        self.actions = Actions(settings.catalog_url, lambda job: self.broadcast.tell("job", job))
        self._unusual = Unusual()
        self._todo = ToDo(settings.catalog_url)
        self._hot = HotKeys(settings.catalog_url, settings.keys)
        self._watcher.listen(self._judge)
        self._watcher.listen(self._tell)

    def app(self) -> ASGIApp:
        """Return the application."""
        login = Login(self._settings.access, STATIC / "login.html")
        inner = Starlette(
            routes=[
                Route("/healthz", self._health),
                *login.routes(),
                Route("/api/cluster", self._cluster),
                Route("/api/nodes", self._nodes),
                Route("/api/rates", self._rates),
                Route("/api/map", self._map),
                Route("/api/map", self._map_again, methods=["POST"]),
                Route("/api/shards/{number}", self._shard),
                Route("/api/inspect", self._inspect, methods=["POST"]),
                Route("/api/doctor", self._doctor),
                Route("/api/doctor", self._examine, methods=["POST"]),
                Route("/api/moves", self._moves),
                Route("/api/rebalance", self._rebalance),
                Route("/api/migrations", self._migrations),
                Route("/api/job", self._job),
                Route("/api/actions/{action}", self._act, methods=["POST"]),
                Route("/api/events", self._events),
                Mount("/", StaticFiles(directory=STATIC, html=True)),
            ],
            exception_handlers={
                ShardidsError: answers.refused,
                HTTPException: answers.no_such,
                TooLong: answers.too_long,
                TooManyAttempts: answers.too_many,
                ClientDisconnect: answers.gone,
                Exception: answers.failed,
            },
            lifespan=self._lifespan,
        )
        return Guard(inner, access=self._settings.access)

    async def end(self) -> None:
        """End the streams and the action, which would keep the server from ending; call it in the loop."""
        self.broadcast.end()
        # Not among the threads that answer, which may all wait for a server.
        self.left = await asyncio.to_thread(self.actions.stop)

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        self.broadcast.begin()
        self._watcher.start()
        try:
            yield
        finally:
            await run_in_threadpool(self._watcher.close)
            self._databases.close()

    def _health(self, _request: Request) -> Response:
        return PlainTextResponse("ok\n")

    def _cluster(self, _request: Request) -> Response:
        settings = self._settings
        seen = self._watcher.seen()
        return answer(
            figures.cluster(
                seen,
                settings.catalog_url,
                interval_s=self._watcher.interval_s,
                actions=settings.allow_actions,
            )
            | {
                "login": settings.access.token is not None,
                "todo": self._to_do(),
            }
        )

    def _nodes(self, _request: Request) -> Response:
        return answer(figures.nodes(self._watcher.seen()))

    def _rates(self, _request: Request) -> Response:
        seen, prometheus = self._watcher.seen(), self._settings.prometheus
        if prometheus is None:
            return answer(figures.rates(seen, self._watcher.history))
        try:
            return answer(
                prometheus.rates(sorted(seen.nodes), figures.first_shards(seen, self._watcher.history))
            )
        except ConnectionFailed as error:
            return answer(figures.rates(seen, self._watcher.history) | {"note": error.message})

    def _map(self, _request: Request) -> Response:
        return answer(self._map_values(again=False))

    async def _map_again(self, request: Request) -> Response:
        await json_of(request)
        return answer(await run_in_threadpool(self._map_values, again=True))

    def _map_values(self, *, again: bool) -> dict[str, Any]:
        seen = self._watcher.seen()
        facts = self._slow.facts(seen, again=again)
        lags = changes.lags(seen, self._databases)
        return {"first": 0} | columns(seen) | slow_columns(seen, facts, lags)

    def _shard(self, request: Request) -> Response:
        seen = self._watcher.seen()
        number = request.path_params["number"]
        if not (number.isascii() and number.isdigit() and len(number) < 6):
            raise UnknownShard(f"{number[:40]!r} is not the number of a shard")
        facts = self._slow.facts(seen)
        return answer(shard(int(number), seen, self._watcher.history, self._databases, facts))

    async def _inspect(self, request: Request) -> Response:
        given = await json_of(request)
        if not isinstance(written := given.get("text"), str):
            raise BadArgument("'text' must be a string with IDs")
        rows = given.get("look") is True
        seen = await run_in_threadpool(self._watcher.seen)
        return answer(await run_in_threadpool(inspect, written, seen, self._databases, rows=rows))

    def _doctor(self, _request: Request) -> Response:
        return answer(self._examiner.values())

    async def _examine(self, request: Request) -> Response:
        await json_of(request)
        begun = self._examiner.begin()
        return answer(self._examiner.values(), 202 if begun else 200)

    def _moves(self, _request: Request) -> Response:
        return answer(self._journal.moves(self._watcher.seen()))

    def _rebalance(self, _request: Request) -> Response:
        return answer(self._journal.rebalance(self._watcher.seen()))

    def _migrations(self, _request: Request) -> Response:
        seen = self._watcher.seen()
        return answer(self._journal.migrations(seen, self._slow.facts(seen)))

    def _job(self, _request: Request) -> Response:
        return answer(self.actions.job())

    async def _act(self, request: Request) -> Response:
        if not self._settings.allow_actions:
            return refusal(403, "this console changes nothing", "To let it: shardids console --allow-actions")
        if request.headers.get("x-shardids-action") != "1":
            return refusal(403, "the request does not say that it is an action", "X-Shardids-Action: 1")
        given, action = await json_of(request), str(request.path_params["action"])
        if "confirm" in given:
            return answer(await run_in_threadpool(self.actions.start, str(given["confirm"])), 202)
        return answer(await run_in_threadpool(self.actions.plan, action, given))

    async def _events(self, _request: Request) -> Response:
        if self.broadcast.is_full:
            return refusal(503, "too many pages are open", "Close some of them: each is sent what changes.")
        # Nothing is awaited between this look and the stream's beginning, which counts it.
        return EventStream(self.broadcast)

    def _tell(self, seen: Seen) -> None:
        self.broadcast.tell(
            "tick",
            {
                "read_at": seen.at,
                "now": time.time(),
                "clock_offset_s": figures.clock_offset_s(seen),
                "catalog": figures.catalog(seen, self._settings.catalog_url),
                "placement_version": seen.known and seen.known.version,
                "todo": self._to_do(),
                "nodes": figures.nodes(seen),
                "rates": figures.newest_rates(seen, self._watcher.history),
                "map": columns(seen),
                "sizes_tried_at": self._slow.known.tried_at,
                "moves_open": figures.moves_open(seen),
                "moves": self._journal.open_now(seen),
                "doctor": self._examiner.state,
                "job": self.actions.job(),
            },
        )

    def _to_do(self) -> dict[str, Any]:
        def commands(one: dict[str, Any]) -> list[dict[str, Any]]:
            return self._hot.commands(one["shard"], self._watcher.seen()) if is_hot(one) else []

        return self._todo.values(
            self._examiner.findings, self._examiner.read_at, self._unusual.values, commands
        )

    def _judge(self, seen: Seen) -> None:
        self._todo.look(seen)
        self._unusual.look(seen, self._watcher.history.points(), self._watcher.interval_s)
        self._hot.look(self._unusual.values)
