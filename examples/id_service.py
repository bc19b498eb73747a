"""An ID service over HTTP, for programs that do not talk to PostgreSQL: FastAPI on ``AsyncCluster``.

In this folder::

    SHARDIDS_CATALOG=postgresql://… uvicorn id_service:app

``POST /shards/5/ids?count=3`` answers with three IDs of shard 5, as JSON strings: numbers above 2^53 are
rounded in browsers. The service reserves a block of IDs per shard in one round trip to its node, and hands
them out from memory. For more throughput run several processes of it: each has blocks of its own. The IDs of
one process sort in the order in which they were handed out; between processes the order may differ by
``FRESH_S``.

It asks nobody for a password: let only your programs reach it.
"""

from __future__ import annotations

import os
import time
from asyncio import Lock
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import islice
from typing import Annotated

from fastapi import FastAPI, Path, Query, Request
from fastapi.responses import JSONResponse

from shardids import AsyncCluster, ShardId
from shardids.errors import ConnectionFailed, ShardFenced, ShardLost, TooFarAhead, UnknownShard

BLOCK = 1000
"""How many IDs are reserved at once."""

FRESH_S = 1.0
"""How long IDs of a block are handed out: an ID has the time at which its block was reserved."""

MOST = 10_000
"""The most IDs of one answer."""


class Dispenser:
    """Hands out the IDs of one shard, from one block after another."""

    def __init__(self, cluster: AsyncCluster, shard: int) -> None:
        self._shard = cluster.at(shard=shard)
        self._turn = Lock()
        self._left: Iterator[int] = iter(())
        self._fresh_until = 0.0

    async def take(self, count: int) -> list[int]:
        """Return so many IDs, in order."""
        async with self._turn:
            now = time.monotonic()
            ids = list(islice(self._left, count)) if now < self._fresh_until else []
            if missing := count - len(ids):
                self._left = iter(await self._shard.reserve(max(BLOCK, missing)))
                self._fresh_until = now + FRESH_S
                ids += islice(self._left, missing)
        return ids


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """One cluster and one dispenser per shard for the whole process."""
    async with await AsyncCluster.connect(os.environ["SHARDIDS_CATALOG"]) as cluster:
        app.state.dispensers = [Dispenser(cluster, shard) for shard in range(cluster.shard_count)]
        yield


app = FastAPI(title="IDs", lifespan=lifespan)


@app.post("/shards/{shard}/ids")
async def draw(
    shard: Annotated[int, Path(ge=0)], request: Request, count: Annotated[int, Query(ge=1, le=MOST)] = 1
) -> list[ShardId]:
    """Hand out IDs of a shard, which nobody else gets."""
    dispensers: list[Dispenser] = request.app.state.dispensers
    if shard >= len(dispensers):
        raise UnknownShard(f"the cluster has no shard {shard}")
    return await dispensers[shard].take(count)


@app.exception_handler(UnknownShard)
async def no_such_shard(_request: Request, error: UnknownShard) -> JSONResponse:
    """A shard that this cluster does not have, or that no node holds yet."""
    return JSONResponse({"detail": error.message}, 404)


@app.exception_handler(ConnectionFailed)
@app.exception_handler(ShardFenced)
@app.exception_handler(ShardLost)
@app.exception_handler(TooFarAhead)
async def try_again(_request: Request, error: Exception) -> JSONResponse:
    """The shard is on its way to another node, its node is down, or its IDs lead the clock by too much."""
    return JSONResponse({"detail": f"try again: {type(error).__name__}"}, 503, {"Retry-After": "1"})
