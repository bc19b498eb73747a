"""Reads tables for the doctor, and notes those that could not be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from shardids.catalog.queries import DROPPED_MEANWHILE
from shardids.catalog.reader import Reader, Refused

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Unread:
    """Reads tables of a node, and keeps those that were left out: by name and shard, the reason.

    ``retries``: an answer that a table was dropped raises, for the node to be asked again.
    """

    def __init__(self, reader: Reader, *, retries: bool) -> None:
        self.reader = reader
        self.tables: dict[tuple[str, int], str] = {}
        self._retries = retries

    def read(
        self,
        items: Sequence[Item],
        table_of: Callable[[Item], tuple[str, int]],
        query_of: Callable[[Item], str],
        *,
        statement_timeout: str | None = None,
    ) -> Iterator[tuple[Item, list[dict[str, Any]]]]:
        """Yields the items whose tables could be read, with the rows of their queries; notes the others.

        ``table_of`` returns an item's table and shard.
        """
        answers = self.reader.read([query_of(item) for item in items], statement_timeout=statement_timeout)
        for item, answer in zip(items, answers, strict=True):
            found = self.noted(*table_of(item), answer)
            if found is not None:
                yield item, found

    def noted(self, table: str, shard: int, answer: Answer | Refused) -> Answer | None:
        """Returns what was read of a table; if it was refused, notes the reason and returns ``None``."""
        if not isinstance(answer, Refused):
            return answer
        if self._retries and answer.sqlstate in DROPPED_MEANWHILE:
            raise self.reader.error(answer, f"{table} of shard {shard}")
        self.tables[table, shard] = answer.reason
        return None
