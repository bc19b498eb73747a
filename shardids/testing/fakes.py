"""IDs that are the same in every run, for tests without a server; on SQLite as the function ``next_id()``."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from threading import Lock
from typing import TYPE_CHECKING, Final

from shardids.errors import BadArgument
from shardids.ids.layout import DEFAULT, Layout
from shardids.ids.text import checked_integer

if TYPE_CHECKING:
    from sqlite3 import Connection

    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

_A_DAY_MS: Final = 86_400_000


class FakeIds(Iterator[int]):
    """IDs of one shard, one after another; see :func:`fake_ids`. Safe to share between threads."""

    def __init__(self, layout: Layout, shard: int, first_tick: int) -> None:
        self.layout = layout
        self.shard = shard
        self._first_tick = self._tick = first_tick
        self._lock = Lock()

    def __next__(self) -> int:
        """Return the next ID.

        Raises:
            TimeExhausted: the layout has no later ID.
        """
        with self._lock:
            tick, self._tick = self._tick, self._tick + 1
        ms, sequence = divmod(tick, self.layout.sequence_limit)
        return self.layout.encode(ms=ms, shard=self.shard, sequence=sequence)

    __call__ = __next__

    def restart(self) -> None:
        """Begin again with the first ID."""
        with self._lock:
            self._tick = self._first_tick

    def register(self, database: Engine | AsyncEngine | Connection) -> None:
        """Make ``next_id()`` on SQLite return these IDs, on an engine's connections or on one of sqlite3.

        Models with :func:`shardids.primary_key` then work there: CREATE TABLE, INSERT and its RETURNING. All
        shards are one there: a ``schema_translate_map`` names the schema of tables, and not of ``next_id()``.

        Raises:
            BadArgument: it is neither, it is not SQLite's, or the engine has other fake IDs.
        """
        from shardids.testing.sqlite import register  # noqa: PLC0415 -- SQLAlchemy is not for everybody

        register(self, database)


def fake_ids(
    layout: Layout = DEFAULT, *, shard: int = 0, start: datetime | None = None, sequence: int = 0
) -> FakeIds:
    """Return IDs of a shard that are the same in every run, for tests; never insert them into a real shard.

    The first is of the millisecond of ``start``, by default a day after the layout's epoch, and of
    ``sequence``. The others take the ticks that follow: each is higher than the one before, until IDs of the
    layout turn negative. They decode as real ones do. Call the result or iterate over it::

        ids = fake_ids(shard=5)
        user, photo = ids(), next(ids)

    Raises:
        BadArgument: no layout, a shard or a sequence beyond it, or a naive ``start`` or one before the epoch.
        TimeExhausted: ``start`` is past the last time of the layout.
    """
    if not isinstance(layout, Layout):
        raise BadArgument(
            f"a layout must be a Layout, not {type(layout).__name__}",
            hint='Write Layout.parse("js53"), for one.',
        )
    shard = checked_integer("shard", shard, 0, layout.shard_limit - 1)
    sequence = checked_integer("sequence", sequence, 0, layout.sequence_limit - 1)
    ms = _A_DAY_MS if start is None else layout.decode(layout.min_id(start)).ms
    return FakeIds(layout, shard, ms * layout.sequence_limit + sequence)
