"""Keyset pagination by ID, without OFFSET: each page begins where another ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Generic, Protocol, Self, TypeVar

from sqlalchemy import ColumnElement
from sqlalchemy.orm import Mapped

from shardids.errors import BadArgument
from shardids.ids.text import checked_integer

Row = TypeVar("Row")


class _Select(Protocol):
    """The part of SELECT that a page needs; the types differ in SQLAlchemy 2.0, 2.1 and SQLModel."""

    @property
    def selected_columns(self) -> Any: ...
    def where(self, *whereclause: Any) -> Self: ...
    def order_by(self, *clauses: Any) -> Self: ...
    def offset(self, offset: Any) -> Self: ...
    def limit(self, limit: Any) -> Self: ...


Statement = TypeVar("Statement", bound=_Select)

MOST_ROWS: Final = 10_000
"""The highest ``limit`` of a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[Row]):
    """Some rows of a list, and how to ask for those around them.

    Attributes:
        items: the rows, in the order of the list whichever way the page was reached.
        after: what to give as ``after`` for the page that follows; ``None`` if nothing does.
        before: what to give as ``before`` for the page in front; ``None`` if this is the first.
    """

    items: list[Row]
    after: int | None
    before: int | None


class PageQuery(Generic[Statement]):
    """The query for one page of a list that is sorted by ID::

        query = PageQuery(select(Photo), Photo.id, limit=20, after=cursor)
        page = query.page(session.scalars(query.statement))

    ``statement`` is executed by the caller, in one shard or over several: it only has a condition on the ID,
    an ORDER BY and a LIMIT more than the one that was given, of which it replaces ORDER BY, LIMIT and OFFSET.

    Args:
        statement: selects the list.
        column: the ID by which it is sorted, unique in the list. Each row must have an attribute of that
            name: select the model, or the column among others.
        limit: how many rows make a page, 1 to 10,000.
        after: begin behind this ID.
        before: end in front of this ID. With neither it is the first page.
        newest_first: whether the list is sorted from the highest ID to the lowest.

    Raises:
        BadArgument: both ``after`` and ``before``, one that is not an ID, or a limit out of range.
    """

    def __init__(
        self,
        statement: Statement,
        column: Mapped[int] | ColumnElement[int],
        *,
        limit: int,
        after: int | None = None,
        before: int | None = None,
        newest_first: bool = False,
    ) -> None:
        if after is not None and before is not None:
            raise BadArgument("give at most one of after= and before=")
        self._limit = checked_integer("limit", limit, 1, MOST_ROWS)
        self._is_first = after is None and before is None
        self._is_backwards = before is not None
        named: Any = column
        self._key = str(named.key)
        rises = newest_first == self._is_backwards
        cursor = before if after is None else after
        if cursor is not None:
            bound = checked_integer("after or before", cursor, -(1 << 63), (1 << 63) - 1)
            statement = statement.where(column > bound if rises else column < bound)
        order = column.asc() if rises else column.desc()
        # One row more than the page tells whether there is another page.
        self.statement: Statement = (
            statement.order_by(None).order_by(order).offset(None).limit(self._limit + 1)
        )

    def page(self, rows: Iterable[Row]) -> Page[Row]:
        """Return the page that the rows of :attr:`statement` make.

        Raises:
            BadArgument: a row does not have the column, or the page ends between rows that have the same ID.
        """
        found = list(islice(rows, self._limit + 1))
        goes_on = len(found) > self._limit
        items = found[: self._limit]
        last = [self._id_of(row) for row in found[-2:]]
        if goes_on and last[0] == last[1]:
            raise BadArgument(
                f"{self._key} {last[0]} is several rows of the list, and the page ends between them",
                hint="Select one row per ID, as select() of its model, and load what belongs to it with"
                " selectinload(); or sort by the ID of the joined rows.",
            )
        follows, precedes = goes_on, bool(items) and not self._is_first
        if self._is_backwards:
            items.reverse()
            follows, precedes = precedes, goes_on
        return Page(
            items=items,
            after=self._id_of(items[-1]) if follows else None,
            before=self._id_of(items[0]) if precedes else None,
        )

    def _id_of(self, row: Row) -> Any:
        try:
            return getattr(row, self._key)
        except AttributeError:
            raise BadArgument(
                f"a row of the list has no {self._key}",
                hint="Select the model; or, among others, the column that sorts the list.",
            ) from None
