"""Numbers that columns draw from sequences: after the switch each shard goes on after the source's last one.

A sequence of a shard knows nothing of the others: two shards draw the same number. What is kept is that no
shard draws one that the source has drawn.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, text

from shardids.adopt.definitions import Definition
from shardids.adopt.sides import Sides, Taker
from shardids.catalog.queries import read
from shardids.errors import AdoptionFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbers:
    """A sequence and a column that draws from it. ``last``: ``None`` if nobody has drawn."""

    name: str
    column: str
    sequence: str
    oid: int
    increment: int
    is_readable: bool
    last: int | None


def _read(connection: Connection, names: Iterable[str]) -> list[_Numbers]:
    return read(connection, "adopt/numbers.v1", _Numbers, names=json.dumps(sorted(names)))


class Numbering:
    """Which sequences of the shards go on after which of the source. Made before writes stop.

    Raises:
        AdoptionFailed: the role may not read a sequence of the source.
    """

    def __init__(self, sides: Sides, there: Mapping[str, Definition]) -> None:
        self._sides = sides
        self._names = [table.name for table in sides.split]
        with sides.source.engine.connect() as connection:
            found = _read(connection, self._names)
        columns = {(one.name, one.column) for one in found}
        self._drawing: dict[str, list[tuple[_Numbers, tuple[str, str]]]] = {}
        tables = [there[name] for name in self._names if any(name == one for one, _ in columns)]
        for taker in sides.takers if tables else ():
            self._drawing[taker.name] = [
                (one, column) for one, column in self._of_shards(taker, tables) if column in columns
            ]
        needed = {column for drawing in self._drawing.values() for _, column in drawing}
        for one in found:
            if (one.name, one.column) in needed and not one.is_readable:
                raise AdoptionFailed(
                    f"the role may not read sequence {one.sequence}, which numbers {one.name}",
                    hint=f"At the source: grant select on sequence {one.sequence} to …",
                )

    def _of_shards(
        self, taker: Taker, tables: Iterable[Definition]
    ) -> list[tuple[_Numbers, tuple[str, str]]]:
        """Returns the sequences of a node's shards, each with the source's table and column."""
        source = {
            self._sides.in_shard(table, shard): table.name for table in tables for shard in taker.shards
        }
        with taker.side.engine.connect() as connection:
            return [(one, (source[one.name], one.column)) for one in _read(connection, source)]

    def pass_on(self) -> None:
        """Sets the shards' sequences past the numbers that the source has drawn, and never back.

        Raises:
            StatementFailed: a sequence of a shard has no room for the source's numbers.
        """
        if not any(self._drawing.values()):
            return
        last: dict[tuple[str, str], list[int]] = defaultdict(list)
        with self._sides.source.engine.connect() as connection:
            for one in _read(connection, self._names):
                if one.last is not None:
                    last[one.name, one.column].append(one.last)
        for taker in self._sides.takers:
            values: dict[int, list[int]] = defaultdict(list)
            for one, column in self._drawing[taker.name]:
                values[one.oid] += [*last[column], *([] if one.last is None else [one.last])]
            increments = {one.oid: one.increment for one, _ in self._drawing[taker.name]}
            furthest = {
                oid: max(found) if increments[oid] > 0 else min(found)
                for oid, found in values.items()
                if found
            }
            with taker.side.begin() as connection:
                connection.execute(_SET, {"oids": list(furthest), "values": list(furthest.values())})


_SET = text("""
    select setval(oid::regclass, value)
    from unnest(cast(:oids as bigint[]), cast(:values as bigint[])) s (oid, value)""")
