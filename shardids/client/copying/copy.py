"""The work of :meth:`shardids.Cluster.copy`, for both kinds of clusters."""

from __future__ import annotations

import re
from asyncio import (
    AbstractEventLoop,
    CancelledError,
    create_task,
    get_running_loop,
    run_coroutine_threadsafe,
    shield,
    to_thread,
    wait,
)
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from operator import length_hint
from threading import Event
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypedDict

import psycopg
from sqlalchemy import Connection, Dialect, Engine
from sqlalchemy.exc import DBAPIError

from shardids.catalog.topology import Node
from shardids.client import blocks
from shardids.client.copying import sources
from shardids.client.copying.lanes import (
    ROWS_A_TRANSACTION,
    Block,
    BlockFailed,
    Copied,
    Lanes,
    quietly,
)
from shardids.client.copying.sources import CHUNK, Row, RowSource
from shardids.client.copying.target import CopyTarget, Router, refuse_lookups, target_of
from shardids.client.placement import PATIENCE_S
from shardids.errors import BadArgument, CommitUncertain, CopyFailed, ShardidsError
from shardids.ids.text import checked_integer
from shardids.pg.statement_log import logged_copy

if TYPE_CHECKING:
    from shardids.client.cluster import Cluster

_MOST_ROWS: Final = 1 << 22
_ROWS_BETWEEN_CHECKS: Final = 1_000
_NUMBERS: Final = "CopyFailed.copied has their numbers."
_LINE: Final = re.compile(r"^COPY .*?, \S+ (\d+)(?:$|[:,])", re.DOTALL)
"""How PostgreSQL says which row of a COPY failed, in any language that puts a word before the number."""


class RowRefused(Exception):
    """A row that can't be sent; nothing of its block is in the shard."""

    def __init__(self, row: int, error: Exception) -> None:
        super().__init__(str(error))
        self.row, self.error = row, error


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """The result of :meth:`shardids.Cluster.copy`.

    Attributes:
        by_shard: the number of rows, by shard.
    """

    by_shard: Mapping[int, int]

    @property
    def rows(self) -> int:
        """How many rows in all."""
        return sum(self.by_shard.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySettings:
    """Parameters of :meth:`shardids.Cluster.copy`."""

    columns: Sequence[Any] | None = None
    key: Any = None
    region: str | None = None
    id: Any = None
    shard: int | None = None
    on_progress: Callable[[Copied], object] = quietly
    rows_a_transaction: int = ROWS_A_TRANSACTION
    patience_s: float = PATIENCE_S


class CopyOptions(TypedDict, total=False):
    """The keywords of :meth:`shardids.Cluster.copy`, as type checkers see them."""

    columns: Sequence[Any] | None
    key: Any
    region: str | None
    id: Any
    shard: int | None
    on_progress: Callable[[Copied], object]
    rows_a_transaction: int
    patience_s: float


def copy_rows(
    cluster: Cluster,
    table: Any,
    rows: Any,
    settings: CopySettings,
    *,
    engine_of: Callable[[Node], Engine],
    stop: Event | None = None,
) -> CopyReport:
    """Copy rows into their shards; ``engine_of`` gives the engine of a node, and ``stop`` ends it early.

    Raises what :meth:`shardids.Cluster.copy` says.
    """
    most = checked_integer("rows_a_transaction", settings.rows_a_transaction, 1, _MOST_ROWS)
    source = sources.read(rows, settings.columns)
    if not source.names:
        return CopyReport(by_shard=MappingProxyType({}))
    target = target_of(
        table,
        source.names,
        key=settings.key,
        region=settings.region,
        id_=settings.id,
        shard=settings.shard,
    )
    refuse_lookups(target, cluster.placement.lookups.values())
    lanes: Lanes[Row] = Lanes(
        followed=cluster._followed,
        engine_of=engine_of,
        send=_Sender(target=target, cluster=cluster).send,
        rows_a_transaction=most,
        patience_s=settings.patience_s,
        on_copied=settings.on_progress,
        stop=stop,
    )
    try:
        lanes.run(_routed(source, target, Router(target, cluster, settings.shard)))
    except BlockFailed as failed:
        raise copy_failed(target.name, failed, lanes.copied) from failed.error
    except Exception as error:
        raise _ended(target.name, error, lanes.copied) from error
    return CopyReport(by_shard=MappingProxyType(lanes.copied))


def _routed(
    source: RowSource, target: CopyTarget, router: Router
) -> Iterator[tuple[Sequence[int], Sequence[Row], Sequence[int]]]:
    number = 1
    for chunk in source.chunks:
        rows = target.completed(chunk)
        numbers = range(number, number + len(rows))
        shards = router.shards([[row[at] for row in rows] for at in target.telling], len(rows))
        if shards is None:
            shards = [_shard(router, target, row, at) for at, row in zip(numbers, rows, strict=True)]
        yield shards, rows, numbers
        number += len(rows)


def _shard(router: Router, target: CopyTarget, row: Row, number: int) -> int:
    try:
        return router.shard([row[at] for at in target.telling])
    except BadArgument as error:
        raise type(error)(f"row {number}: {error.message}", hint=error.hint) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sender:
    """Sender of blocks of tuples into a table."""

    target: CopyTarget
    cluster: Cluster

    def send(
        self, connection: Connection, blocks: Sequence[Block[Row]], node: Node, check: Callable[[], None]
    ) -> list[Copied]:
        """Copy blocks over the open transaction."""
        return [self._send(connection, block, node, check) for block in blocks]

    def _send(
        self, connection: Connection, block: Block[Row], node: Node, check: Callable[[], None]
    ) -> Copied:
        ids = None
        if self.target.id_column is not None:
            ids = blocks.reserve(connection, block.shard, len(block.items), self.cluster.layout)
        statement = self.target.statement(self.cluster.schema_of(block.shard))
        values = self.target.values(block.items, ids, connection.dialect)
        with logged_copy(connection, statement) as copy:
            for first in range(0, len(block.items), _ROWS_BETWEEN_CHECKS):
                check()
                try:
                    some = list(islice(values, _ROWS_BETWEEN_CHECKS))
                except Exception as error:
                    raise self._refused(block, first, connection.dialect, error) from error
                left = iter(some)
                try:
                    deque(map(copy.write_row, left), maxlen=0)
                except psycopg.OperationalError:
                    raise
                except Exception as error:
                    row = first + len(some) - length_hint(left) - 1
                    raise RowRefused(block.numbers[row], error) from error
        return Copied(shard=block.shard, node=node.name, rows=[*block.numbers], ids=ids)

    def _refused(self, block: Block[Row], first: int, dialect: Dialect, error: Exception) -> RowRefused:
        """Return the error for the first row, from that place on, whose values can't be had."""
        for row in range(first, len(block.items)):
            try:
                list(self.target.values([block.items[row]], None, dialect))
            except Exception as its_own:  # noqa: BLE001 -- whatever it is, it is what is told
                return RowRefused(block.numbers[row], its_own)
        return RowRefused(block.numbers[first], error)


def copy_failed(
    table: str, failed: BlockFailed, copied: Mapping[int, int], then: str = _NUMBERS
) -> CopyFailed:
    """Return the error for a block that failed; ``then`` says what follows for rows that are committed."""
    block, error = failed.block, failed.error
    row = error.row if isinstance(error, RowRefused) else failed_row(error, block)
    first, last = block.numbers[0], block.numbers[-1]
    what = f"row {row if row is not None else first}"
    if row is None and last > first:
        what = f"rows {first} to {last}, as far as they belong there,"
    node = failed.node.name if failed.node is not None else None
    where = f'shard {block.shard} [node "{node}"]' if node is not None else f"shard {block.shard}"
    done = "may have been copied or not" if isinstance(error, CommitUncertain) else "could not be copied"
    reason, hint = in_words(error)
    return CopyFailed(
        f"{what} of {table} {done} into {where}: {reason}",
        hint=f"{hint} {_before(copied, then)}".strip(),
        copied=copied,
        shard=block.shard,
        node=node,
        row=row,
    )


def failed_row(error: BaseException, block: Block[Any]) -> int | None:
    """Return the number of the row that PostgreSQL says it failed at; ``None`` if it names none."""
    line = failed_line(error)
    return block.numbers[line - 1] if line and line <= len(block.numbers) else None


def failed_line(error: BaseException) -> int | None:
    """Return the line of a COPY that PostgreSQL names, from 1."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, psycopg.Error):
        cause = cause.__cause__
    context = cause.diag.context if cause is not None else None
    found = _LINE.match(context or "")
    return int(found[1]) if found else None


def in_words(error: BaseException) -> tuple[str, str]:
    """Return the message of an error, and its hint."""
    if isinstance(error, RowRefused):
        error = error.error
    if isinstance(error, ShardidsError):
        return error.message, error.hint
    driver = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(driver, psycopg.Error) and driver.diag.message_primary:
        detail = driver.diag.message_detail
        return driver.diag.message_primary + (
            f" ({detail})" if detail else ""
        ), driver.diag.message_hint or ""
    return f"{type(error).__name__}: {error}", ""


def _ended(table: str, error: Exception, copied: Mapping[int, int]) -> CopyFailed:
    reason, hint = in_words(error)
    return CopyFailed(
        f"the copy into {table} ended: {reason}", hint=f"{hint} {_before(copied)}".strip(), copied=copied
    )


def _before(copied: Mapping[int, int], then: str = _NUMBERS) -> str:
    if not copied:
        return "Nothing was copied."
    return f"{sum(copied.values()):,} rows are committed, in each shard the first of its rows: {then}"


async def copied_in_thread(cluster: Cluster, table: Any, rows: Any, settings: CopySettings) -> CopyReport:
    """Copy in a thread, over its own connections; wait for its end even when the task is cancelled.

    Raises the errors of :meth:`shardids.Cluster.copy`.
    """
    loop, stop, engines = get_running_loop(), Event(), cluster._engines.for_copying()
    on_progress = settings.on_progress
    settings = replace(settings, on_progress=lambda copied: loop.call_soon_threadsafe(on_progress, copied))
    given = _pulled(rows, loop) if hasattr(rows, "__aiter__") else rows
    copy = partial(copy_rows, cluster, table, given, settings, engine_of=engines.of, stop=stop)
    copying = create_task(to_thread(copy))
    try:
        return await shield(copying)
    except CancelledError:
        stop.set()
        await wait([copying])
        # What stopped it is the cancellation.
        copying.exception()
        raise
    finally:
        await to_thread(engines.dispose)


def _pulled(rows: Any, loop: AbstractEventLoop) -> Iterator[Any]:
    """Yield the rows of an async iterable, which runs in its loop, in another thread."""
    source = aiter(rows)
    while chunk := run_coroutine_threadsafe(_some(source), loop).result():
        yield from chunk


async def _some(rows: AsyncIterator[Any]) -> list[Any]:
    chunk: list[Any] = []
    async for row in rows:
        chunk.append(row)
        if len(chunk) == CHUNK:
            break
    return chunk
