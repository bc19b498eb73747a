"""Sorted lists of IDs that lie far apart, each ID with a number of two bytes: up to 1,024 IDs per row.

The shards of old IDs and the keys of moved ones are such lists. Each method runs in the connection's
transaction.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, text

from shardids.errors import ShardidsError
from shardids.pg.queries import batches

_LISTED: Final = 512
"""How many IDs a new row has; the tables allow twice as many."""
_ROWS_A_TIME: Final = 512
"""How many rows are read or written together: 5 MiB at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A row of a list: all that it has of the IDs ``first`` … ``end`` - 1.

    Attributes:
        first: its lowest ID.
        end: the lowest ID of the next row; ``None`` if it is the last.
        ids: its IDs, in order.
        numbers: the number of each.
    """

    first: int
    end: int | None
    ids: array[int]
    numbers: array[int]

    def number_of(self, id_: int) -> int | None:
        """Return the number of an ID; ``None`` if the list does not have it."""
        at = bisect_left(self.ids, id_)
        return self.numbers[at] if at < len(self.ids) and self.ids[at] == id_ else None


class IdList:
    """One list in a table of the catalog.

    Args:
        relation: the table, in schema ``shardids_catalog``.
        column: the column that names the list.
        name: the list.
        numbers: the column with the numbers.
    """

    def __init__(self, relation: str, column: str, name: str | int, numbers: str) -> None:
        self._relation = f"shardids_catalog.{relation}"
        self._column, self._numbers = column, numbers
        self._name: dict[str, Any] = {"name": name}

    def add(
        self,
        connection: Connection,
        ids: Mapping[int, int],
        clash: Callable[[int, int, int], ShardidsError] | None,
    ) -> None:
        """Merge IDs into the list.

        Raises:
            ShardidsError: what ``clash`` returned for an ID, its number in the list and the other one given;
                with ``None`` the number given replaces it.
        """
        if not ids:
            return
        firsts = self.firsts(connection, min(ids), max(ids))
        groups: defaultdict[int | None, dict[int, int]] = defaultdict(dict)
        for id_, number in ids.items():
            at = bisect_right(firsts, id_)
            groups[firsts[at - 1] if at else None][id_] = number
        for some in batches(list(groups), _ROWS_A_TIME):
            there = self.rows(connection, [first for first in some if first is not None])
            rows: dict[int, tuple[bytes, bytes]] = {}
            for first in some:
                merged = dict(there.get(first, {})) if first is not None else {}
                for id_, number in groups[first].items():
                    if clash is not None and merged.get(id_, number) != number:
                        raise clash(id_, merged[id_], number)
                    merged[id_] = number
                for part in batches(sorted(merged), _LISTED if len(merged) > 2 * _LISTED else 2 * _LISTED):
                    rows[part[0]] = _packed(part, merged)
            connection.execute(
                text(f"""
                    insert into {self._relation} ({self._column}, first, ids, {self._numbers})
                    select :name, filled.* from unnest(
                      cast(:firsts as bigint[]), cast(:ids as bytea[]), cast(:numbers as bytea[])) filled
                    on conflict ({self._column}, first)
                    do update set ids = excluded.ids, {self._numbers} = excluded.{self._numbers}"""),  # noqa: S608 -- constants
                {
                    **self._name,
                    "firsts": list(rows),
                    "ids": [packed for packed, _ in rows.values()],
                    "numbers": [packed for _, packed in rows.values()],
                },
            )

    def firsts(self, connection: Connection, lowest: int, highest: int) -> list[int]:
        """Return the lowest IDs of the rows that may have IDs between two, in order."""
        found = connection.scalars(
            text(f"""
                select first from {self._relation}
                where {self._column} = :name and first <= :highest
                  and first >= coalesce((select max(first) from {self._relation}
                                         where {self._column} = :name and first <= :lowest), :lowest)
                order by first"""),  # noqa: S608 -- constants
            {**self._name, "lowest": lowest, "highest": highest},
        )
        return list(found)

    def rows(self, connection: Connection, firsts: Sequence[int]) -> dict[int, dict[int, int]]:
        """Return the IDs of rows, each with its number, by the row's lowest ID."""
        rows = connection.execute(
            text(f"""
                select first, ids, {self._numbers} as numbers from {self._relation}
                where {self._column} = :name and first = any(cast(:firsts as bigint[]))"""),  # noqa: S608 -- constants
            {**self._name, "firsts": firsts},
        )
        return {row.first: _unpacked(row.ids, row.numbers) for row in rows}

    def spans(self, connection: Connection, ids: Iterable[int]) -> list[Span]:
        """Return the rows that may have these IDs; none for an ID below all of the list."""
        found: dict[int, Span] = {}
        for some in batches(list(ids), _ROWS_A_TIME):
            rows = connection.execute(
                text(f"""
                    select distinct l.first, l.ids, l.{self._numbers} as numbers,
                           (select min(n.first) from {self._relation} n
                            where n.{self._column} = :name and n.first > l.first) as next
                    from unnest(cast(:ids as bigint[])) wanted (id)
                    cross join lateral (
                      select * from {self._relation} l
                      where l.{self._column} = :name and l.first <= wanted.id
                      order by l.first desc limit 1) l"""),  # noqa: S608 -- constants
                {**self._name, "ids": some},
            )
            for row in rows:
                ids, numbers = _arrays(row.ids, row.numbers)
                found[row.first] = Span(first=row.first, end=row.next, ids=ids, numbers=numbers)
        return list(found.values())

    def read(self, connection: Connection, ids: Iterable[int]) -> dict[int, int]:
        """Return all of the rows that may have these IDs, each ID with its number."""
        found: dict[int, int] = {}
        for span in self.spans(connection, ids):
            found |= zip(span.ids, span.numbers, strict=True)
        return found

    def of(self, connection: Connection, number: int) -> list[int]:
        """Return the IDs of one number. It reads the whole list."""
        firsts = list(
            connection.scalars(
                text(f"select first from {self._relation} where {self._column} = :name order by first"),  # noqa: S608 -- constants
                self._name,
            )
        )
        return [
            id_
            for some in batches(firsts, _ROWS_A_TIME)
            for its in self.rows(connection, some).values()
            for id_, its_number in its.items()
            if its_number == number
        ]


def _packed(ids: Sequence[int], numbers: Mapping[int, int]) -> tuple[bytes, bytes]:
    return swapped(array("q", ids)).tobytes(), swapped(array("H", map(numbers.__getitem__, ids))).tobytes()


def _unpacked(ids: bytes, numbers: bytes) -> dict[int, int]:
    return dict(zip(*_arrays(ids, numbers), strict=True))


def _arrays(ids: bytes, numbers: bytes) -> tuple[array[int], array[int]]:
    return swapped(array("q", bytes(ids))), swapped(array("H", bytes(numbers)))


def swapped(numbers: array[int]) -> array[int]:
    """Turn a machine's numbers into the catalog's, whose higher byte is the first, and back."""
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers
