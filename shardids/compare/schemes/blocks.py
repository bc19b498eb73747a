"""Keys drawn in blocks: a source that hands out blocks of another source, and range tickets."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

from shardids.compare.schemes.postgresql import SqlScheme, install
from shardids.compare.schemes.scheme import About, Key, KeyColumn, Needs, Servers, Source
from shardids.multimaster.postgresql_session import PostgreSqlSession

BLOCK = 1000
"""The number of keys in a range."""

_NAME = "all"


class Blocks(Source):
    """Hands out the keys of one block after another; unused keys of the last block are lost.

    Draws each block of ``size`` keys from ``source`` at once, and closes ``source`` when it is closed.
    """

    def __init__(self, source: Source, size: int) -> None:
        self._source, self._size = source, size
        self.sets_aside, self.holds = source.sets_aside, size
        self._left: Iterator[Key] = iter(())

    def draw(self) -> Key:
        for key in self._left:
            return key
        self._left = iter(self._source.draw_many(self._size))
        return next(self._left)

    def _draw_many(self, count: int) -> list[Key]:
        keys = list(islice(self._left, count))
        if missing := count - len(keys):
            keys += self._source.draw_many(missing)
        return keys

    def _set_aside(self, count: int) -> range:
        return self._source.set_aside(count)

    def close(self) -> None:
        self._source.close()


class RangeSource(Source):
    """Hands out one range while its own thread fetches the next.

    A draw waits only if the next range has not arrived when this one is used up; ``stalls`` counts how
    often. If the server is down, draws continue until both ranges are used up.
    """

    def __init__(self, url: str, block: int = BLOCK) -> None:
        self.stalls = 0
        self._block, self.holds = block, 2 * block
        self._session = PostgreSqlSession(url)
        self._fetcher = ThreadPoolExecutor(1, "range-tickets")
        self._left: Iterator[int] = iter(self._take(block))
        self._next = self._fetch(block)

    def draw(self) -> Key:
        for key in self._left:
            return key
        self._refill()
        return next(self._left)

    def _draw_many(self, count: int) -> list[Key]:
        keys: list[Key] = list(islice(self._left, count))
        missing = count - len(keys)
        if missing > self._block:
            return keys + list(self._fetch(missing).result())
        if missing:
            self._refill()
            keys += islice(self._left, missing)
        return keys

    sets_aside = True

    def _set_aside(self, count: int) -> range:
        return self._fetch(count).result()

    def _refill(self) -> None:
        self.stalls += not self._next.done()
        try:
            self._left = iter(self._next.result())
        finally:
            # Also after a failure, so that the next draw tries again.
            self._next = self._fetch(self._block)

    def _fetch(self, size: int) -> Future[range]:
        return self._fetcher.submit(self._take, size)

    def _take(self, size: int) -> range:
        ((first,),) = self._session.rows(
            "update shardids_baselines.key_range set next_key = next_key + %s where name = %s"
            " returning next_key - %s",
            (size, _NAME, size),
        )
        return range(first, first + size)

    def close(self) -> None:
        self._fetcher.shutdown()
        self._session.close()


class Ranges(SqlScheme):
    """A row that records which keys are taken, and clients that take whole ranges of them."""

    about = About(
        name="ranges",
        title="Leaf segments, double-buffered",
        central=True,
        needs=Needs(postgresql=1),
        safe_under="any number of clients, clocks that jump, crashes of the server and of clients",
        unsafe_under="a failover to a standby that lacks the last COMMIT, a restore",
        stops="all keys, when the one server is down and the client's two ranges are used up",
        tells="nothing: clients use up their ranges at their own pace",
        settings=f"ranges of {BLOCK:,}; the next is fetched as soon as one is begun",
        described_at="https://github.com/Meituan-Dianping/Leaf",
    )

    def install(self, servers: Servers) -> None:
        self.check(servers)
        install(servers.postgresql[0], "compare/baselines.v1")
        session = PostgreSqlSession(servers.postgresql[0])
        session.rows(
            "insert into shardids_baselines.key_range values (%s, 1) on conflict do nothing returning 1",
            (_NAME,),
        )
        session.close()

    def _open(self, servers: Servers, node: int) -> Source:
        return RangeSource(servers.postgresql[0])

    def column(self, node: int = 0) -> KeyColumn:
        return KeyColumn(type="bigint")
