"""Keys that a service hands out over HTTP: ``examples/id_service.py``, in front of shardids."""

from __future__ import annotations

import json
from http.client import HTTPConnection, HTTPException
from typing import Final

from shardids.compare.multimaster.mariadb import Login
from shardids.compare.schemes.scheme import About, Key, KeyColumn, Needs, Servers, Source
from shardids.compare.schemes.shards import REFUSES, SAFE, UNSAFE, Shardids
from shardids.errors import ConnectionFailed

BLOCK: Final = 1000
"""The number of IDs that the service reserves at once."""

_MOST: Final = 10_000
_PATIENCE_S: Final = 5.0


class HttpSource(Source):
    """Draws IDs of shard 0 from the service, in one request per draw, on one connection."""

    holds = BLOCK

    def __init__(self, login: Login) -> None:
        self._login = login
        self._connection = HTTPConnection(login.host, login.port, timeout=_PATIENCE_S)

    def draw(self) -> Key:
        return self._ask(1)[0]

    def _draw_many(self, count: int) -> list[Key]:
        keys: list[Key] = []
        while missing := count - len(keys):
            keys += self._ask(min(missing, _MOST))
        return keys

    def _ask(self, count: int) -> list[Key]:
        at = f"the ID service at {self._login.host}:{self._login.port}"
        try:
            self._connection.request("POST", f"/shards/0/ids?count={count}")
            answer = self._connection.getresponse()
            body = answer.read()
        except (OSError, HTTPException) as error:
            self._connection.close()
            raise ConnectionFailed(f"{at} does not answer: {error}") from error
        if answer.status != 200:
            raise ConnectionFailed(f"{at} gives no ID: {answer.status} {body.decode(errors='replace')}")
        return [int(key) for key in json.loads(body)]

    def close(self) -> None:
        self._connection.close()


class IdService(Shardids):
    """One request for each key, answered from the block of a shard that the service has reserved."""

    about = About(
        name="id-service",
        title="shardids, ID service over HTTP",
        central=True,
        needs=Needs(postgresql=1, id_service=True),
        safe_under=SAFE,
        unsafe_under=UNSAFE,
        stops="all keys, when the one service is down, or its shard's server for over a second; " + REFUSES,
        tells="time (s), shard",
        settings=f"examples/id_service.py: FastAPI and uvicorn, one process, blocks of {BLOCK:,};"
        " http.client, one connection per client",
        described_at="examples/id_service.py",
    )

    hears = False

    def _open(self, servers: Servers, node: int) -> Source:
        return HttpSource(servers.id_service[0])

    def column(self, node: int = 0) -> KeyColumn:
        return KeyColumn(type="bigint")

    def column_of(self, shard: int) -> KeyColumn:
        return self.column()
