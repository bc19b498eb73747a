"""What a statement's structure says of its shards: read once for all that differ in their values only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import BindParameter, Insert, Update
from sqlalchemy.engine import Dialect
from sqlalchemy.sql import visitors
from sqlalchemy.util import LRUCache

from shardids.client.routing.criteria import Criteria, Named, Reader
from shardids.client.routing.models import (
    Claimant,
    ShardFinder,
    Tells,
    facts_of,
    how_it_tells,
    mapper_written,
)
from shardids.client.routing.shapes import Check, reads_references
from shardids.client.routing.values import Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What was read.

    Attributes:
        criteria: the WHERE clause.
        name: the model or table that is written, for messages.
        telling: of an INSERT or UPDATE: what in a row tells its shard, by attribute and column.
        written: of those, the ones that the statement sets itself, by the number of their literal.
    """

    criteria: Criteria
    name: str = ""
    telling: Mapping[str, Tells]
    written: Mapping[str, int]


class Read:
    """One statement with its values.

    Attributes:
        reading: what its structure says.
        values: those of its literals, and those that were given beside it.
    """

    __slots__ = ("_key", "reading", "values")

    def __init__(
        self, statement: Any, parameters: Any, finder: ShardFinder, claims: Claimant | None = None
    ) -> None:
        generate = getattr(statement, "_generate_cache_key", None)
        # What SQLAlchemy finds the compiled statement by; it keeps it, and will not make it again.
        key = None if generate is None else generate()
        reading: Reading | None = None if key is None else _KNOWN.get(key.key)
        binds: Sequence[BindParameter[Any]] = () if key is None else key.bindparams
        if reading is None:
            reader = Reader(binds)
            reading = _read(statement, reader)
            if key is not None and len(reader.binds) == len(binds):
                _KNOWN[key.key] = reading
            binds = reader.binds
        self._key = key
        self.reading = reading
        self.values = Values(binds, parameters, finder, claims)

    def named(self) -> Named:
        """Returns what the criteria name. Raises as :func:`criteria.shards_named` does."""
        return self.reading.criteria.named(self.values)

    def in_one_shard(self, statement: Any, dialect: Callable[[], Dialect]) -> None:
        """Refuses a statement whose criteria name one shard, but which also reads rows of others.

        Raises:
            CannotCombine: a table or a subquery in it is not bound to the rows that the criteria are about.
        """
        by_table = self.values.finder.old_ids is not None
        known = None if self._key is None else (self._key.key, by_table)
        if known is not None and _STAYS.get(known):
            return
        Check(statement, dialect(), by_table=by_table).in_one_shard()
        if known is not None:
            _STAYS[known] = True

    def of_references(self, statement: Any, dialect: Callable[[], Dialect]) -> bool:
        """Returns whether it reads reference tables alone, which every node answers alike."""
        known = None if self._key is None else _OF_REFERENCES.get(self._key.key)
        if known is None:
            is_free = getattr(statement, "is_select", False) and self.reading.criteria.read is None
            known = bool(is_free) and reads_references(statement, dialect())
            if self._key is not None:
                _OF_REFERENCES[self._key.key] = known
        return known

    def written(self) -> dict[str, Any]:
        """Returns the values of the statement itself that tell the shard of what it writes."""
        return {name: self.values.value(slot) for name, slot in self.reading.written.items()}


_KNOWN: Final[LRUCache[Any, Reading]] = LRUCache(500)
_STAYS: Final[LRUCache[Any, bool]] = LRUCache(500)
"""Statements that were found to read one shard when their criteria name one."""

_OF_REFERENCES: Final[LRUCache[Any, bool]] = LRUCache(500)


def _read(statement: Any, reader: Reader) -> Reading:
    places = Counter(one.key for one in visitors.iterate(statement) if isinstance(one, BindParameter))
    reader.reused = {key for key, count in places.items() if count > 1}
    criteria = reader.where(getattr(statement, "whereclause", None))
    if not isinstance(statement, Insert | Update):
        return Reading(criteria=criteria, telling={}, written={})
    telling, name = _what_tells(statement)
    # Dialects know the values of an INSERT or UPDATE by these names; there are no public ones.
    values = {**(statement._values or {}), **dict(getattr(statement, "_ordered_values", None) or ())}
    written = {}
    for column, value in values.items():
        key, slot = getattr(column, "key", column), reader.slot(value)
        if key in telling and slot is not None:
            written[str(key)] = slot
    return Reading(criteria=criteria, name=name, telling=telling, written=written)


def _what_tells(statement: Any) -> tuple[dict[str, Tells], str]:
    """Returns what in a row tells its shard, by attribute and column, and the name of the model or table."""
    table = statement.table
    telling = {column.key: tells for column in table.columns if (tells := how_it_tells(column)) is not None}
    mapper = mapper_written(statement)
    if mapper is None:
        return telling, str(table.name)
    facts = facts_of(mapper)
    return telling | dict(facts.telling), facts.name
