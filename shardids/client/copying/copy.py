"""What :meth:`shardids.Cluster.copy` does, for both kinds of clusters."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import length_hint
from threading import Event
from types import MappingProxyType
from typing import Any, Final, Protocol

import psycopg
from sqlalchemy import Connection, Dialect, Engine
from sqlalchemy.exc import DBAPIError

from shardids.catalog.statement_log import logged_copy
from shardids.catalog.topology import Node
from shardids.client import blocks
from shardids.client.copying import sources
from shardids.client.copying.lanes import Block, BlockFailed, Copied, Lanes
from shardids.client.copying.sources import Row, Source
from shardids.client.copying.target import Router, Target, refuse_lookups, target_of
from shardids.client.listener import FollowedPlacement
from shardids.client.routing.models import ShardFinder
from shardids.errors import CommitUncertain, CopyFailed, ShardidsError
from shardids.ids.text import checked_integer

_MOST_ROWS: Final = 1 << 22
_ROWS_BETWEEN_CHECKS: Final = 1_000
_LINE: Final = re.compile(r"^COPY .*?, \S+ (\d+)(?:$|[:,])", re.DOTALL)
"""How PostgreSQL says which row of a COPY failed, in any language that puts a word before the number."""


class RowRefused(Exception):
    """A row that can't be sent; nothing of its block is in the shard."""

    def __init__(self, row: int, error: Exception) -> None:
        super().__init__(str(error))
        self.row, self.error = row, error


class Shards(ShardFinder, Protocol):
    """The cluster, as far as copying needs it."""

    def schema_of(self, shard: int) -> str:
        """Returns the name of a shard's schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """What :meth:`shardids.Cluster.copy` has copied.

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
    """How to copy: see :meth:`shardids.Cluster.copy`."""

    columns: Sequence[Any] | None
    key: Any
    region: str | None
    id_: Any
    shard: int | None
    on_progress: Callable[[Copied], object]
    rows_a_transaction: int
    patience_s: float


def copy_rows(
    shards: Shards,
    table: Any,
    rows: Any,
    settings: CopySettings,
    *,
    followed: FollowedPlacement,
    engine_of: Callable[[Node], Engine],
    stop: Event | None = None,
) -> CopyReport:
    """Copies rows into their shards; ``engine_of`` gives the engine of a node, and ``stop`` ends it early.

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
        id_=settings.id_,
        shard=settings.shard,
    )
    refuse_lookups(target, followed.current.lookups.values())
    lanes: Lanes[Row] = Lanes(
        followed=followed,
        engine_of=engine_of,
        send=_Sender(target=target, shards=shards).send,
        rows_a_transaction=most,
        patience_s=settings.patience_s,
        on_copied=settings.on_progress,
        stop=stop,
    )
    try:
        lanes.run(_routed(source, target, Router(target, shards, settings.shard)))
    except BlockFailed as failed:
        raise copy_failed(target.name, failed, lanes.copied) from failed.error
    except Exception as error:
        raise _ended(target.name, error, lanes.copied) from error
    return CopyReport(by_shard=MappingProxyType(lanes.copied))


def _routed(
    source: Source, target: Target, router: Router
) -> Iterator[tuple[Sequence[int], Sequence[Row], Sequence[int]]]:
    number = 1
    for chunk in source.chunks:
        rows = target.completed(chunk)
        yield router.shards(rows, number), rows, range(number, number + len(rows))
        number += len(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sender:
    """Copies blocks of tuples into a table."""

    target: Target
    shards: Shards

    def send(
        self, connection: Connection, block: Block[Row], node: Node, check: Callable[[], None]
    ) -> Copied:
        """Copies a block over the open transaction."""
        ids = None
        if self.target.id_column is not None:
            ids = blocks.reserve(connection, block.shard, len(block.items), self.shards.layout)
        statement = self.target.statement(self.shards.schema_of(block.shard))
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
        return Copied(shard=block.shard, node=node.name, rows=block.numbers, ids=ids)

    def _refused(self, block: Block[Row], first: int, dialect: Dialect, error: Exception) -> RowRefused:
        """Returns the error for the first row, from that place on, whose values can't be had."""
        for row in range(first, len(block.items)):
            try:
                list(self.target.values([block.items[row]], None, dialect))
            except Exception as its_own:  # noqa: BLE001 -- whatever it is, it is what is told
                return RowRefused(block.numbers[row], its_own)
        return RowRefused(block.numbers[first], error)


def copy_failed(table: str, failed: BlockFailed, copied: Mapping[int, int]) -> CopyFailed:
    """Returns the error for a block that failed."""
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
        hint=f"{hint} {_before(copied)}".strip(),
        copied=copied,
        shard=block.shard,
        node=node,
        row=row,
    )


def failed_row(error: BaseException, block: Block[Any]) -> int | None:
    """Returns the number of the row that PostgreSQL says it failed at; ``None`` if it names none."""
    line = failed_line(error)
    return block.numbers[line - 1] if line and line <= len(block.numbers) else None


def failed_line(error: BaseException) -> int | None:
    """Returns the line of a COPY that PostgreSQL names, from 1."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, psycopg.Error):
        cause = cause.__cause__
    context = cause.diag.context if cause is not None else None
    found = _LINE.match(context or "")
    return int(found[1]) if found else None


def in_words(error: BaseException) -> tuple[str, str]:
    """Returns what an error says, and its hint."""
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


def _before(copied: Mapping[int, int]) -> str:
    if not copied:
        return "Nothing was copied."
    return (
        f"{sum(copied.values()):,} rows are committed, in each shard the first of its rows: CopyFailed.copied"
        " has their numbers."
    )
