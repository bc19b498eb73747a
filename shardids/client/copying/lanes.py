"""Transport of blocks of rows to their shards: a thread and connection per node, a transaction per block."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress, islice
from threading import Event, Lock
from typing import Any, Final, Generic, TypeVar, cast

import psycopg
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from shardids.catalog.topology import Node
from shardids.client.blocks import Computed, IdBlock
from shardids.client.placement import Attempts, FollowedPlacement
from shardids.errors import CommitUncertain, ShardidsError
from shardids.pg.connections import translate

Item = TypeVar("Item")

ROWS_A_TRANSACTION: Final = 50_000
"""The most rows that one transaction copies."""
_ROWS_A_BLOCK: Final = 4_000
"""Rows per shard: a COPY of as many takes much longer than the statements around it."""
_TRANSACTIONS_IN_MEMORY: Final = 10
"""The most rows that wait for their shards, in transactions."""
_AHEAD: Final = 2
"""How many transactions of a node are under way or next."""


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
    """Report no progress."""


class Gathered:
    """The numbers of rows that were gathered: by shard only once they are asked for, which is seldom."""

    def __init__(self) -> None:
        self._chunks: list[tuple[Sequence[int], Sequence[int]]] = []
        self._by_shard: dict[int, list[int]] = {}
        self._lock = Lock()
        self.last = 0
        """The number of the last row."""

    def add(self, shards: Sequence[int], numbers: Sequence[int]) -> None:
        """Add rows, at least one, with their shards."""
        self._chunks.append((shards, numbers))
        self.last = numbers[-1]

    def number(self, shard: int, place: int) -> int:
        """Return the number of one row of a shard, once all are added."""
        with self._lock:
            if self._by_shard:
                return self._by_shard[shard][place]
            for shards, numbers in self._chunks:
                count = shards.count(shard)
                if place < count:
                    return next(islice(compress(numbers, map(shard.__eq__, shards)), place, None))
                place -= count
        raise IndexError(place)

    def of(self, shard: int) -> list[int]:
        """Return the numbers of a shard's rows, once all are added."""
        with self._lock:
            for shards, numbers in self._chunks:
                for one in set(shards).difference(self._by_shard):
                    self._by_shard[one] = []
                deque(map(list.append, map(self._by_shard.__getitem__, shards), numbers), maxlen=0)
            self._chunks = []
            return self._by_shard[shard]


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers(Computed):
    """The numbers of a block's rows, from a place among those that were gathered for its shard."""

    gathered: Gathered
    shard: int
    start: int
    size: int

    def _at(self, places: range) -> list[int]:
        found = self.gathered.of(self.shard)
        return [found[self.start + place] for place in places]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block(Generic[Item]):
    """Rows of one shard, and their numbers.

    ``before`` is how many of the shard's rows came before. All its rows with numbers up to ``through`` are in
    this block or came before it.
    """

    shard: int
    before: int
    through: int
    items: Sequence[Item]
    numbers: Numbers


class BlockFailed(Exception):
    """A block was not copied, and nothing of it is in the shard, unless ``is_uncertain``."""

    def __init__(self, block: Block[Any], node: Node | None, error: Exception) -> None:
        super().__init__(str(error))
        self.block, self.node, self.error = block, node, error


class Stopped(Exception):
    """Another block has failed, or the caller: this one is rolled back."""


Send = Callable[[Connection, Sequence[Block[Item]], Node, Callable[[], None]], list[Copied]]
"""Copies blocks of different shards over the open transaction of a connection, and calls the last argument
between them."""


class Lanes(Generic[Item]):
    """The ways of blocks to the nodes of their shards; each node has one thread and one connection.

    A transaction has blocks of several shards of a node. If it fails, each block is sent again by itself.

    The blocks of a shard are committed in order, so that a failure leaves the first of its rows. A shard's
    blocks stay in their first lane, even if the shard moves: a block that its node refuses because of the
    move is rolled back and sent to the new owner.

    Args:
        followed: the placement.
        engine_of: returns the engine of a node.
        send: copies blocks.
        rows_a_transaction: the most rows of a transaction.
        patience_s: how long to wait for a shard that has moved; see :meth:`shardids.Shard.run`.
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
        self._followed, self._engine_of, self._send_blocks = followed, engine_of, send
        self._rows, self._patience_s, self._on_copied = rows_a_transaction, patience_s, on_copied
        self._waiting: dict[int, list[Item]] = {}
        self._gathered = Gathered()
        self._buffered = 0
        self._rows_of: dict[int, int] = {}
        self._lane_of: dict[int, str] = {}
        self._lanes: dict[str, ThreadPoolExecutor] = {}
        self._sent: dict[str, deque[Future[list[Copied]]]] = {}
        self._stop = stop or Event()
        self._failures: list[BlockFailed] = []
        self.copied: dict[int, int] = {}
        """How many rows of each shard are committed."""

    def run(self, routed: Iterable[tuple[Sequence[int], Sequence[Item], Sequence[int]]]) -> None:
        """Send all rows: lists of their shards, the rows themselves, and their numbers.

        Raises:
            BlockFailed: the first block that failed; :attr:`copied` counts the committed rows.
        """
        try:
            for shards, items, numbers in routed:
                self._check()
                self._take(shards, items, numbers)
            self._flush()
            for lane in self._sent:
                self._collect(lane, most=0)
        except (BlockFailed, Stopped):
            # Which of several comes first does not matter, but one that only stopped says nothing.
            self._end()
            raise self._failures[0] if self._failures else Stopped() from None
        finally:
            self._end()

    def _take(self, shards: Sequence[int], items: Sequence[Item], numbers: Sequence[int]) -> None:
        if not shards:
            return
        waiting = self._waiting
        for shard in set(shards).difference(waiting):
            waiting[shard] = []
        if len(waiting) == 1:
            waiting[shards[0]].extend(items)
        else:
            # Calls in C: a loop would take twice as long.
            deque(map(list.append, map(waiting.__getitem__, shards), items), maxlen=0)
        self._gathered.add(shards, numbers)
        self._buffered += len(items)
        wanted = max(self._rows, _ROWS_A_BLOCK * len(waiting))
        if self._buffered >= min(wanted, self._rows * _TRANSACTIONS_IN_MEMORY):
            self._flush()

    def _flush(self) -> None:
        """Send on all rows; wait while their nodes have enough to do."""
        transactions: dict[str, list[Block[Item]]] = {}
        for shard, items in self._waiting.items():
            for block in self._cut(shard, items):
                lane = self._lane_of.get(shard)
                if lane is None:
                    lane = self._lane_of[shard] = self._located(block)
                blocks = transactions.setdefault(lane, [])
                if blocks and sum(len(one.items) for one in blocks) + len(block.items) > self._rows:
                    self._submit(lane, blocks)
                    blocks = transactions[lane] = []
                blocks.append(block)
            self._rows_of[shard] = self._rows_of.get(shard, 0) + len(items)
        self._waiting, self._gathered, self._buffered = {}, Gathered(), 0
        for lane, blocks in transactions.items():
            self._submit(lane, blocks)

    def _cut(self, shard: int, items: Sequence[Item]) -> Iterator[Block[Item]]:
        before = self._rows_of.get(shard, 0)
        for start in range(0, len(items), self._rows):
            some = items[start : start + self._rows]
            end = start + len(some)
            is_last = end == len(items)
            yield Block(
                shard=shard,
                before=before + start,
                through=self._gathered.last if is_last else self._gathered.number(shard, end - 1),
                items=some,
                numbers=Numbers(gathered=self._gathered, shard=shard, start=start, size=len(some)),
            )

    def _submit(self, lane: str, blocks: list[Block[Item]]) -> None:
        if lane not in self._lanes:
            self._lanes[lane] = ThreadPoolExecutor(1, thread_name_prefix=f"shardids copy {lane}")
            self._sent[lane] = deque()
        self._collect(lane, most=_AHEAD - 1)
        self._sent[lane].append(self._lanes[lane].submit(self._copy, blocks))

    def _located(self, block: Block[Item]) -> str:
        try:
            return self._followed.current.locate(block.shard).name
        except ShardidsError as error:
            raise self._failed(block, None, error) from error

    def _collect(self, lane: str, *, most: int) -> None:
        """Wait until a lane has at most so many transactions, and report those that are done."""
        sent = self._sent[lane]
        while sent and (len(sent) > most or sent[0].done()):
            for copied in sent.popleft().result():
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
                    for copied in future.result():
                        self._count(copied)
            sent.clear()

    def _copy(self, blocks: Sequence[Block[Item]]) -> list[Copied]:
        """Copy blocks into their shards, wherever those are by then; runs in the lane's thread."""
        if len(blocks) > 1 and (copied := self._together(blocks)) is not None:
            return copied
        done: list[Copied] = []
        for block in blocks:
            try:
                done += self._alone(block)
            except BlockFailed:
                for one in done:
                    self._count(one)
                raise
        return done

    def _together(self, blocks: Sequence[Block[Item]]) -> list[Copied] | None:
        """Copy blocks in one transaction; None if that was rolled back."""
        node = None
        try:
            self._check()
            placement = self._followed.current
            node, *others = {placement.locate(block.shard) for block in blocks}
            if others:
                return None
            with transaction(self._engine_of(node), node) as connection:
                return self._send_blocks(connection, blocks, node, self._check)
        except (Stopped, CommitUncertain) as error:
            raise self._failed(blocks[0], node, error) from error
        except Exception:  # noqa: BLE001 -- the block that it came from raises it again
            return None

    def _alone(self, block: Block[Item]) -> list[Copied]:
        """Copy one block in one transaction, on the node that its shard moves to, if it moves."""
        attempts = Attempts(self._followed, block.shard, self._patience_s)
        node = None
        try:
            while True:
                self._check()
                try:
                    node = attempts.next_node()
                    with transaction(self._engine_of(node), node) as connection:
                        return self._send_blocks(connection, [block], node, self._check)
                except (ShardidsError, DBAPIError) as error:
                    pause_s = attempts.pause_after(error)
                attempts.wait(pause_s)
        except Exception as error:
            raise self._failed(block, node, error) from error

    def _failed(self, block: Block[Item], node: Node | None, error: Exception) -> Exception:
        if isinstance(error, Stopped):
            return error
        failed = BlockFailed(block, node, error)
        self._failures.append(failed)
        self._stop.set()
        return failed

    def _check(self) -> None:
        if self._stop.is_set():
            raise Stopped


@contextmanager
def transaction(engine: Engine, node: Node) -> Iterator[Connection]:
    """Open a transaction, and make the driver's errors in it those that the engine would raise."""
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
    """Return psycopg's connection under one of a cluster's engines."""
    return cast(psycopg.Connection[Any], connection.connection.driver_connection)
