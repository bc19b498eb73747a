"""Copies a block of records, keeps what the server refuses, moves the shard's mark on: one transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Protocol

import psycopg
from psycopg import sql
from sqlalchemy import Connection

from shardids import Cluster
from shardids.catalog.statement_log import logged_copy
from shardids.catalog.topology import Node
from shardids.catalog.trust import administers, untrusted
from shardids.client import blocks
from shardids.client.copying.copy import failed_line, in_words
from shardids.client.copying.lanes import Block, Copied, of_driver
from shardids.client.copying.target import Target
from shardids.errors import MissingPrivilege, ShardidsError
from shardids.load.marks import Mark, advance, make_table
from shardids.load.rejects import Reject, Rejects

_OF_A_ROW: Final = ("22", "23", "P0")
"""Classes of errors that a row's values cause: data, constraints, and what triggers raise."""


class File(Protocol):
    """A file of records."""

    @property
    def names(self) -> Sequence[str]:
        """The columns."""

    def records(self) -> Iterator[tuple[int, Any]]:
        """Returns the records with their lines."""

    def picker(self, places: Sequence[int], kinds: Sequence[type | None]) -> Callable[[Any], tuple[Any, ...]]:
        """Returns what reads the fields at these places; a kind of ``None`` is an ID."""

    def options(self) -> sql.Composable:
        """Returns what follows COPY … FROM STDIN."""

    def write(self, copy: psycopg.Copy, ids: Sequence[int] | None, records: Sequence[Any]) -> None:
        """Sends records."""

    def place_of_line(self, records: Sequence[Any], line: int) -> int:
        """Returns the place of the record that PostgreSQL means by a line."""

    def shown(self, record: Any) -> str:
        """Returns a record as text, for people."""


@dataclass(frozen=True, slots=True)
class Item:
    """A record, and its number among the rows of its shard, from 1."""

    row: int
    record: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """Sends blocks of one load."""

    cluster: Cluster
    target: Target
    file: File
    load: str
    source: str
    rejects: Rejects
    most_rejects: int
    trusted: Sequence[str]

    def send(
        self, connection: Connection, block: Block[Item], node: Node, check: Callable[[], None]
    ) -> Copied:
        """Copies a block over the open transaction of a connection to its node."""
        schema = self.cluster.schema_of(block.shard)
        self._require_trusted(connection, sql.Identifier(schema, self.target.name))
        before = Mark(rows=block.items[0].row - 1, rejected=0)
        if before.rows == 0:
            make_table(connection, schema)
        ids = None
        if self.target.id_column is not None:
            ids = list(blocks.reserve(connection, block.shard, len(block.items), self.cluster.layout))
        statement = sql.SQL("{} {}").format(self.target.statement(schema), self.file.options())
        refused = self._copy(connection, statement, block, ids, check)
        # First, so that a row is never lost; what is not committed is taken out by the next run.
        self.rejects.add(
            Reject(
                line=block.numbers[place],
                shard=block.shard,
                row=block.items[place].row,
                reason=reason,
                record=self.file.shown(block.items[place].record),
            )
            for place, reason in refused.items()
        )
        refuse_too_many(self.rejects, self.most_rejects)
        after = Mark(rows=before.rows + len(block.items), rejected=len(refused))
        advance(of_driver(connection), schema, self.load, source=self.source, before=before, after=after)
        rows = [number for place, number in enumerate(block.numbers) if place not in refused]
        return Copied(shard=block.shard, node=node.name, rows=rows, ids=None)

    def _require_trusted(self, connection: Connection, table: sql.Identifier) -> None:
        """Refuses a table where others could run code as a role that administers the cluster.

        Raises:
            MissingPrivilege: they could.
        """
        if not administers(connection):
            return
        # That of COPY: until the transaction ends, no trigger, default or constraint is made there.
        of_driver(connection).execute(sql.SQL("lock table {} in row exclusive mode").format(table))
        # Its settings are not the load's.
        with connection.begin_nested() as looking:
            found = untrusted(connection, [table.as_string()], trusted=self.trusted)
            looking.rollback()
        for one in found:
            raise MissingPrivilege(
                one.reason,
                hint="Load as a role that may INSERT there and does not administer the cluster."
                f" {one.remedy}",
            )

    def _copy(
        self,
        connection: Connection,
        statement: sql.Composed,
        block: Block[Item],
        ids: Sequence[int] | None,
        check: Callable[[], None],
    ) -> dict[int, str]:
        """Copies what the server takes; returns the places of the rest, and why.

        A part that it refuses is rolled back and copied again in parts: what comes before the record that the
        server names, that record, and what follows; or halves, if it names none.
        """
        refused: dict[int, str] = {}
        todo = [(0, len(block.items))]
        while todo:
            check()
            start, end = todo.pop()
            records = [item.record for item in block.items[start:end]]
            error = self._try(connection, statement, records, ids and ids[start:end])
            if error is None:
                continue
            if end - start == 1:
                refused[start], _ = in_words(error)
                continue
            line = failed_line(error)
            at = start + self.file.place_of_line(records, line) if line else start + len(records) // 2
            cuts = (
                [start, at, at + 1, end] if line and start <= at < end else [start, (start + end) // 2, end]
            )
            parts = [(a, b) for a, b in pairwise(cuts) if a < b]
            todo += reversed(parts)
        return refused

    def _try(
        self,
        connection: Connection,
        statement: sql.Composed,
        records: Sequence[Any],
        ids: Sequence[int] | None,
    ) -> psycopg.Error | None:
        """Copies records; returns the error if it is one of the records'."""
        try:
            with connection.begin_nested(), logged_copy(connection, statement) as copy:
                self.file.write(copy, ids, records)
        except psycopg.Error as error:
            client_side = error.sqlstate is None and isinstance(
                error, psycopg.ProgrammingError | psycopg.DataError
            )
            if not client_side and (error.sqlstate or "")[:2] not in _OF_A_ROW:
                raise
            return error
        return None


def refuse_too_many(rejects: Rejects, most: int) -> None:
    """Ends a load that rejects more than it may.

    Raises:
        ShardidsError: it does.
    """
    if rejects.count > most:
        raise ShardidsError(
            f"{rejects.count:,} records were rejected, more than the {most:,} that may be",
            hint=f"{rejects.path} says why. To allow more: --max-rejects."
            " Started again, the load goes on where it ended.",
        )
