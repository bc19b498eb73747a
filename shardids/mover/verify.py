"""Compares the rows of a shard on both nodes, without keeping the shard from being written to."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from sqlalchemy import Connection, text

from shardids.errors import MoveFailed
from shardids.mover.sides import Sides


class Comparison:
    """The target's rows as they are now, to be compared later with those of the source, which stay.

    To be made between the end of writes on the source and their beginning on the target: a snapshot of the
    target is taken, and kept until the end of the block.
    """

    def __init__(self, sides: Sides) -> None:
        self._sides = sides
        self._target: Connection = sides.target.engine.connect().execution_options(
            isolation_level="REPEATABLE READ"
        )
        self._target.execute(text("select 1"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._target.close()

    def rows(self) -> int:
        """How many rows are the same on both nodes: all of them.

        Raises:
            MoveFailed: a table differs.
        """
        with self._sides.source.autocommit() as source:
            original = _digests(source, self._sides.shard)
        copy = _digests(self._target, self._sides.shard)
        for table in sorted(original.keys() | copy.keys()):
            there, here = original.get(table), copy.get(table)
            if there != here:
                a, b = self._sides.source.node.name, self._sides.target.node.name
                raise MoveFailed(
                    f'table {table} differs: {_shown(there)} on node "{a}", {_shown(here)} on "{b}"',
                    hint=f'The shard has moved. Its old copy on "{a}" is as it was then; don\'t purge it.',
                )
        return sum(row.rows for row in original.values())


def _digests(connection: Connection, shard: int) -> dict[str, Any]:
    rows = connection.execute(
        text("select name, rows, digest from shardids.digest(:shard)"), {"shard": shard}
    )
    return {row.name: row for row in rows}


def _shown(row: Any) -> str:
    return "no table" if row is None else f"{row.rows} rows (digest {row.digest})"
