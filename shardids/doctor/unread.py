"""Tables that the doctor does not read, because to read them would run code of others as its role."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from sqlalchemy import Connection

from shardids.catalog.strangers import strangers_code

Item = TypeVar("Item")


class Unread:
    """Tables of a node that were left out: by name and shard, what code would have run."""

    def __init__(self) -> None:
        self.tables: dict[tuple[str, int], str] = {}

    def leave_out(
        self, connection: Connection, items: Sequence[Item], table_of: Callable[[Item], tuple[str, str, int]]
    ) -> list[Item]:
        """Returns the items whose tables can be read in the open transaction, and notes the others.

        ``table_of`` returns an item's schema, table and shard.
        """
        places = [table_of(item) for item in items]
        code = strangers_code(connection, dict.fromkeys((schema, table) for schema, table, _ in places))
        for schema, table, shard in places:
            if (schema, table) in code:
                self.tables[table, shard] = code[schema, table]
        return [item for item, place in zip(items, places, strict=True) if place[:2] not in code]
