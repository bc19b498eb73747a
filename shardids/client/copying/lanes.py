"""Brings blocks of rows to their shards: a thread and a connection a node, a transaction a block."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import Any, Final, Generic, TypeVar, cast

import psycopg
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from shardids.catalog.connections import translate
from shardids.catalog.topology import Node
from shardids.client.blocks import IdBlock
from shardids.client.listener import FollowedPlacement
from shardids.client.retries import Attempts
from shardids.errors import ShardidsError

Item = TypeVar("Item")

ROWS_A_TRANSACTION: Final = 50_000
"""How many rows of a shard one transaction copies at most."""
_BLOCKS_IN_MEMORY: Final = 10
"""How many full blocks' worth of rows wait for their shards at most."""
_AHEAD: Final = 2
"""How many blocks of a node are under way or next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """The rows that one transaction has copied.

    Attributes:
        shard: the shard.
        node: the name of its node.
        rows: which rows, by their numbers in the order given, from 1.
        ids: their IDs, in that order; ``None`` if the rows brought theirs.
    """

    shard: int
    node: str
    rows: Sequence[int]
    ids: IdBlock | None


def quietly(_copied: Copied) -> None:
    """Tells nobody of what is copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block(Generic[Item]):
    """Rows of one shard, and their numbers."""

    shard: int
    items: list[Item] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)


class BlockFailed(Exception):
    """A block was not copied, and nothing of it is in the shard, unless ``is_uncertain``."""

    def __init__(self, block: Block[Any], node: Node | None, error: Exception) -> None:
        super().__init__(str(error))
        self.block, self.node, self.error = block, node, error


class Stopped(Exception):
    """Another block has failed, or the caller: this one is rolled back."""


Send = Callable[[Connection, Block[Item], Node, Callable[[], None]], Copied]
"""Copies a block over the open transaction of a connection; calls the last argument now and then."""


class Lanes(Generic[Item]):
    """Sends blocks to the nodes of their shards; each node has one thread and one connection.

    The blocks of a shard are committed in order, so that what is there after a failure is the first of its
    rows. A shard's blocks stay in the lane in which they began, even if it moves: a block that its node
    refuses because of that is rolled back and sent to the new owner.

    Args:
        followed: the placement.
        engine_of: returns the engine of a node.
        send: copies a block.
        rows_a_transaction: how many rows a block has at most.
        patience_s: how long to wait for a shard that has moved; see :meth:`shardids.Cluster.run`.
        on_copied: called in the caller's thread after each commit, until a block fails.
        stop: ends the run early when it is set.
    """

    def __init__(
        self,
        *,
        followed: FollowedPlacement,
        engine_of: Callable[[Node], Engine],
        send: Send[Item],
        rows_a_transaction: int,
        patience_s: float,
        on_copied: Callable[[Copied], object],
        stop: Event | None = None,
    ) -> None:
        self._followed, self._engine_of, self._send_block = followed, engine_of, send
        self._rows, self._patience_s, self._on_copied = rows_a_transaction, patience_s, on_copied
        self._blocks: dict[int, Block[Item]] = {}
        self._buffered = 0
        self._lane_of: dict[int, str] = {}
        self._lanes: dict[str, ThreadPoolExecutor] = {}
        self._sent: dict[str, deque[Future[Copied]]] = {}
        self._stop = stop or Event()
        self._failures: list[BlockFailed] = []
        self.copied: dict[int, int] = {}
        """How many rows of each shard are committed."""

    def run(self, routed: Iterable[tuple[Sequence[int], Sequence[Item], Sequence[int]]]) -> None:
        """Sends all rows: lists of their shards, the rows themselves, and their numbers.

        Raises:
            BlockFailed: the first block that failed; :attr:`copied` says what is committed.
        """
        try:
            for shards, items, numbers in routed:
                self._check()
                self._take(shards, items, numbers)
            for shard in list(self._blocks):
                self._flush(shard)
            for lane in self._sent:
                self._collect(lane, most=0)
        except (BlockFailed, Stopped):
            # Which of several comes first does not matter, but one that only stopped says nothing.
            self._end()
            raise self._failures[0] if self._failures else Stopped() from None
        finally:
            self._end()

    def _take(self, shards: Sequence[int], items: Sequence[Item], numbers: Sequence[int]) -> None:
        first = shards[0]
        if shards.count(first) == len(shards):
            block = self._block(first)
            block.items.extend(items)
            block.numbers.extend(numbers)
            touched: Iterable[int] = (first,)
        else:
            for shard, item, number in zip(shards, items, numbers, strict=True):
                block = self._blocks.get(shard) or self._block(shard)
                block.items.append(item)
                block.numbers.append(number)
            touched = set(shards)
        self._buffered += len(items)
        for shard in touched:
            if len(self._blocks[shard].items) >= self._rows:
                self._flush(shard)
        if self._buffered >= self._rows * _BLOCKS_IN_MEMORY:
            fullest = sorted(self._blocks.values(), key=lambda block: -len(block.items))
            for block in fullest[: len(fullest) // 2 + 1]:
                self._flush(block.shard)

    def _block(self, shard: int) -> Block[Item]:
        return self._blocks.setdefault(shard, Block(shard=shard))

    def _flush(self, shard: int) -> None:
        """Sends a shard's rows on; waits while its node has enough to do."""
        whole = self._blocks.pop(shard)
        self._buffered -= len(whole.items)
        for start in range(0, len(whole.items), self._rows):
            end = start + self._rows
            block = Block(shard=shard, items=whole.items[start:end], numbers=whole.numbers[start:end])
            lane = self._lane_of.get(shard)
            if lane is None:
                lane = self._lane_of[shard] = self._located(block)
            if lane not in self._lanes:
                self._lanes[lane] = ThreadPoolExecutor(1, thread_name_prefix=f"shardids copy {lane}")
                self._sent[lane] = deque()
            self._collect(lane, most=_AHEAD - 1)
            self._sent[lane].append(self._lanes[lane].submit(self._copy, block))

    def _located(self, block: Block[Item]) -> str:
        try:
            return self._followed.current.locate(block.shard).name
        except ShardidsError as error:
            raise BlockFailed(block, None, error) from error

    def _collect(self, lane: str, *, most: int) -> None:
        """Waits until a lane has at most so many blocks, and tells of those that are done."""
        sent = self._sent[lane]
        while sent and (len(sent) > most or sent[0].done()):
            copied = sent.popleft().result()
            self._count(copied)
            self._on_copied(copied)

    def _end(self) -> None:
        self._stop.set()
        for pool in self._lanes.values():
            pool.shutdown()
        self._count_the_rest()

    def _count(self, copied: Copied) -> None:
        self.copied[copied.shard] = self.copied.get(copied.shard, 0) + len(copied.rows)

    def _count_the_rest(self) -> None:
        for sent in self._sent.values():
            for future in sent:
                if future.exception() is None:
                    self._count(future.result())
            sent.clear()

    def _copy(self, block: Block[Item]) -> Copied:
        """Copies a block into its shard, wherever that is by then; runs in the lane's thread."""
        attempts = Attempts(self._followed, block.shard, self._patience_s)
        node = None
        try:
            while True:
                self._check()
                try:
                    node = attempts.next_node()
                    with transaction(self._engine_of(node), node) as connection:
                        return self._send_block(connection, block, node, self._check)
                except (ShardidsError, DBAPIError) as error:
                    pause_s = attempts.pause_after(error)
                attempts.wait(pause_s)
        except Stopped:
            raise
        except Exception as error:
            failed = BlockFailed(block, node, error)
            self._failures.append(failed)
            self._stop.set()
            raise failed from error

    def _check(self) -> None:
        if self._stop.is_set():
            raise Stopped


@contextmanager
def transaction(engine: Engine, node: Node) -> Iterator[Connection]:
    """Opens a transaction, and makes the driver's errors in it those that the engine would raise."""
    with engine.connect() as connection, connection.begin():
        try:
            yield connection
        except psycopg.Error as error:
            if of_driver(connection).broken or of_driver(connection).closed:
                # Nothing is left to be rolled back.
                connection.invalidate(error)
            ours = translate(error, what=f'node "{node.name}"', url=engine.url)
            raise (ours or DBAPIError(None, None, error)) from error


def of_driver(connection: Connection) -> psycopg.Connection[Any]:
    """Returns psycopg's connection under one of a cluster's engines."""
    return cast(psycopg.Connection[Any], connection.connection.driver_connection)
