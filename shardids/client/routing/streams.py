"""Rows of several nodes, read a few at a time by server-side cursors: ``yield_per``, ``stream_results``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import total_ordering
from heapq import merge
from itertools import chain, islice
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.engine.cursor import CursorFetchStrategy

from shardids.client.routing.fanout import Question, node_statement, sent_to, split_columns
from shardids.client.routing.merging import MergePlan
from shardids.client.routing.replay import Replay, Row


def stream(plan: MergePlan, asked: Mapping[Connection, Sequence[Question]], chunk: int) -> Replay:
    """Returns the answer of all shards as :func:`fanout.gather` does, but reads it as it is used.

    Args:
        plan: how to combine the shards' rows; without folds.
        asked: the questions, by the session's connection to the node that holds the shards.
        chunk: how many rows to fetch from a node at once.
    """
    nodes = [_Node(connection, *node_statement(plan, questions)) for connection, questions in asked.items()]
    keys, kept, description = split_columns(plan, nodes[0].cursor.description)
    rows = _in_order(plan, nodes, keys, chunk)
    if keys:
        rows = ([row[place] for place in kept] for row in rows)
    return Replay(_Streamed(rows, nodes, description))


class _Node:
    """A server-side cursor on one node."""

    def __init__(self, connection: Connection, sql: str, parameters: dict[str, Any]) -> None:
        self._result = sent_to(connection, sql, parameters, stream_results=True)
        self.cursor: Any = self._result.cursor

    def rows(self, chunk: int) -> Iterator[Row]:
        while rows := self._result.fetchmany(chunk):
            yield from rows

    def close(self) -> None:
        self._result.close()


def _in_order(plan: MergePlan, nodes: Sequence[_Node], places: Sequence[int], chunk: int) -> Iterator[Row]:
    streams = [node.rows(chunk) for node in nodes]
    if not plan.keys:
        rows: Iterator[Row] = chain.from_iterable(streams)
    else:
        keys = list(zip(plan.keys, places, strict=True))

        def rank(row: Row) -> tuple[Any, ...]:
            ranks = ((key, key.rank(row[place])) for key, place in keys)
            return tuple(_Descending(one) if key.descending else one for key, one in ranks)

        rows = merge(*streams, key=rank)
    return islice(rows, plan.offset, None if plan.limit is None else plan.offset + plan.limit)


@total_ordering
class _Descending:
    """A rank that comes before lower ones."""

    __slots__ = ("rank",)

    def __init__(self, rank: Any) -> None:
        self.rank = rank

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Descending) and bool(self.rank == other.rank)

    def __lt__(self, other: _Descending) -> bool:
        return bool(other.rank < self.rank)

    __hash__ = None  # type: ignore[assignment]  # it is only compared


class _Streamed(CursorFetchStrategy):
    """Gives a result of SQLAlchemy its rows, and ends the cursors on the nodes with it."""

    __slots__ = ("_nodes", "_rows", "alternate_cursor_description")

    def __init__(self, rows: Iterator[Row], nodes: Sequence[_Node], description: Any) -> None:
        self._rows = rows
        self._nodes = nodes
        self.alternate_cursor_description = description

    def soft_close(self, result: Any, dbapi_cursor: Any) -> None:
        self._close()
        super().soft_close(result, dbapi_cursor)

    def hard_close(self, result: Any, dbapi_cursor: Any) -> None:
        self._close()
        super().hard_close(result, dbapi_cursor)

    def yield_per(self, result: Any, dbapi_cursor: Any, num: int) -> None:
        """Changes nothing: the nodes are read that way already."""

    def fetchone(self, result: Any, dbapi_cursor: Any, hard_close: bool = False) -> Any:
        row = next(self._rows, None)
        if row is None:
            result._soft_close(hard=hard_close)
        return row

    def fetchmany(self, result: Any, dbapi_cursor: Any, size: int | None = None) -> Any:
        rows = list(islice(self._rows, size))
        if not rows:
            result._soft_close()
        return rows

    def fetchall(self, result: Any, dbapi_cursor: Any) -> Any:
        rows = list(self._rows)
        result._soft_close()
        return rows

    def _close(self) -> None:
        for node in self._nodes:
            node.close()
