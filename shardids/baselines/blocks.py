"""A source that takes keys by the block and hands them out from memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from shardids.baselines.scheme import Key, Source


class Blocks(Source):
    """Hands out the keys of one block after the other; those of the last that are not used are lost.

    ``source`` is what a block of ``size`` keys is drawn from at once; it is closed with this.
    """

    def __init__(self, source: Source, size: int) -> None:
        self._source, self._size = source, size
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

    def close(self) -> None:
        self._source.close()
