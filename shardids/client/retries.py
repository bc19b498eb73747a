"""Decides what ``run`` does when a shard's node refuses: retry on its new owner, wait, or give up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from logging import INFO
from threading import TIMEOUT_MAX, Event
from typing import NoReturn

from sqlalchemy.exc import DBAPIError

from shardids.catalog.connections import has_stale_plan, may_have_moved
from shardids.catalog.topology import Node
from shardids.client.listener import FollowedPlacement
from shardids.errors import ShardFenced, ShardidsError, ShardMoved
from shardids.logs import logger, shown_error

log = logger("client")

PATIENCE_S = 5.0
"""How long to wait for a shard that has moved. Its cutover takes less than ``--max-pause``, by default 2 s,
most of it before the old node refuses."""
_FENCED_PATIENCE_S = 0.25
"""How long to wait for a shard that is only fenced, as one in a cutover seems until that is committed."""
_LEAST_READ_S = 1.0
"""How long to wait for the catalog at least, even if the patience is shorter or used up."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class Attempts:
    """The attempts to run one transaction on the owner of a shard.

    For one thread or task, which calls :meth:`next_node` and, after a failure, :meth:`pause_after` in turn.

    Args:
        followed: the placement.
        shard: the shard.
        patience_s: how long to wait, from the first refusal on, for a shard that has moved, and for a catalog
            that does not answer.
    """

    def __init__(self, followed: FollowedPlacement, shard: int, patience_s: float) -> None:
        self._followed = followed
        self._shard = shard
        self._patience_s = patience_s
        self._node: Node | None = None
        self._refused_at: float | None = None
        self._fenced_at: float | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._could_read = True

    def next_node(self) -> Node:
        """Returns the node to try now.

        Raises:
            UnknownShard: no node holds the shard.
        """
        self._node = None
        self._node = self._followed.current.locate(self._shard)
        return self._node

    def pause_after(self, error: ShardidsError | DBAPIError) -> float:
        """Returns how many seconds to wait before the next attempt: 0 if the shard has a new owner.

        Reads the catalog.

        Raises:
            ShardidsError, DBAPIError: ``error``, with what was tried, if another attempt cannot help.
        """
        is_stale = has_stale_plan(error)
        if not (is_stale or may_have_moved(error)):
            raise error
        is_first = self._refused_at is None
        self._refused_at = self._refused_at or time.monotonic()
        if is_stale and (is_first or time.monotonic() < self._refused_at + self._patience_s):
            return 0.0
        left_s = self._refused_at + self._patience_s - time.monotonic()
        self._could_read = self._followed.try_refresh(min(max(left_s, _LEAST_READ_S), TIMEOUT_MAX))
        left_s = self._refused_at + self._patience_s - time.monotonic()
        if self._has_moved() and (is_first or left_s > 0):
            self._tell(error, "")
            return 0.0
        if not isinstance(error, ShardFenced):
            raise error
        left_s = min(left_s, self._left_of_a_fence_s(error))
        if left_s <= 0:
            self._give_up(error)
        pause_s, self._pause_s = min(self._pause_s, left_s), min(self._pause_s * 2, _LONGEST_PAUSE_S)
        self._tell(error, f" in {pause_s:g} s")
        return pause_s

    def _tell(self, error: ShardidsError | DBAPIError, when: str) -> None:
        if log.isEnabledFor(INFO):
            node = self._followed.current.node_of.get(self._shard)
            log.info(
                'shard %s: a transaction is run again on node "%s"%s: %s',
                self._shard,
                node,
                when,
                shown_error(error),
                extra={"shard": self._shard, "node": node, "error": type(error).__name__},
            )
        if self._followed.on_retry is not None:
            self._followed.on_retry(error)

    def wait(self, seconds: float) -> None:
        """Waits until the shard has another node than the one that was tried, or the time has passed."""
        until, changed = time.monotonic() + seconds, Event()
        with self._watched(changed.set):
            while not self._has_moved() and changed.wait(max(until - time.monotonic(), 0)):
                changed.clear()

    async def wait_in_loop(self, seconds: float) -> None:
        """Waits as :meth:`wait` does, without blocking a thread."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with suppress(RuntimeError):  # The loop has been closed.
                loop.call_soon_threadsafe(changed.set)

        with self._watched(tell), suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._has_moved():
                    await changed.wait()
                    changed.clear()

    def _watched(self, on_change: Callable[[], object]) -> AbstractContextManager[None]:
        """Calls ``on_change``, in any thread, whenever the placement has changed during the block."""
        return self._followed.watched(on_change)

    def _has_moved(self) -> bool:
        """Returns whether the shard has another node than the one that was tried last."""
        placement = self._followed.current
        name = placement.node_of.get(self._shard)
        return name is not None and placement.nodes[name] != self._node

    def _left_of_a_fence_s(self, error: ShardFenced) -> float:
        now = time.monotonic()
        if isinstance(error, ShardMoved):
            self._fenced_at = None
            return float("inf")
        self._fenced_at = self._fenced_at or now
        return self._fenced_at + _FENCED_PATIENCE_S - now

    def _give_up(self, error: ShardFenced) -> NoReturn:
        if not isinstance(error, ShardMoved) or self._patience_s <= 0:
            raise error
        if not self._could_read:
            raise ShardMoved(
                f"{error.message}, but the catalog, which has its new node, could not be read",
                hint="Check that the catalog's server is up and reachable, then run it again.",
            ) from error
        raise ShardMoved(
            f"{error.message}, but the catalog has not shown that for {self._patience_s:g} s",
            hint="Check whether its move was interrupted or takes longer: shardids shard moves",
        ) from error
