"""The table that rows are copied into: columns, types, defaults, and the columns that determine the shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Final

from psycopg import sql
from sqlalchemy import Column, Dialect, Table, bindparam, inspect
from sqlalchemy.orm import InstrumentedAttribute, Mapper

from shardids.catalog.topology import RegisteredLookup
from shardids.client.copying.sources import Row
from shardids.client.routing.models import ShardFinder, Tells, default_key, how_it_tells, kind_of_key
from shardids.client.routing.writes import shard_told
from shardids.errors import BadArgument

_MOST_REMEMBERED: Final = 500_000
"""How many keys' shards are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTarget:
    """A table, and the columns that are copied into it.

    Attributes:
        name: the table's name.
        id_column: the column that gets IDs of the shard; ``None`` if the rows have IDs, or the table no such
            column.
        columns: those of the rows, and then those with a default in Python.
        given: how many of them the rows have.
        telling: those that determine a row's shard, by their place.
        key: the place of the named column, whose value must not be NULL.
    """

    name: str
    id_column: Column[Any] | None
    columns: Sequence[Column[Any]]
    given: int
    telling: Mapping[int, Tells]
    key: int | None

    def statement(self, schema: str) -> sql.Composed:
        """Return the COPY into a shard's table."""
        names = [column.name for column in (self.id_column, *self.columns) if column is not None]
        return sql.SQL("COPY {} ({}) FROM STDIN").format(
            sql.Identifier(schema, self.name), sql.SQL(", ").join(map(sql.Identifier, names))
        )

    def completed(self, rows: list[Row]) -> list[Row]:
        """Return the rows with the values of the defaults in Python."""
        filled = self.columns[self.given :]
        if not filled:
            return rows
        return [(*row, *map(default_key, filled)) for row in rows]

    def values(self, rows: Sequence[Row], ids: Iterable[int] | None, dialect: Dialect) -> Iterator[Row]:
        """Return the rows as the driver takes them, each with its ID, as an INSERT would send them."""
        columns: list[Iterable[Any]] = [] if ids is None else [ids]
        for at, column in enumerate(self.columns):
            process = column.type.dialect_impl(dialect).bind_processor(dialect)
            values: Iterable[Any] = map(itemgetter(at), rows)
            columns.append(values if process is None else map(process, values))
        return zip(*columns, strict=True)


def target_of(
    table: Any,
    names: Sequence[Any],
    *,
    key: Any = None,
    region: str | None = None,
    id_: Any = None,
    shard: int | None = None,
    spelled: Callable[[str], str] = "{}=".format,
) -> CopyTarget:
    """Return the table with the columns that rows of these names have; ``region`` is that of all keys.

    ``spelled`` writes the name of an argument as the caller's user gives it: in errors.

    Raises:
        BadArgument: it is not a table in each shard, has no such columns, or one whose values COPY can't
            write; or none of its columns determines the shard of a row.
    """
    mapper = inspect(table, raiseerr=False) if not isinstance(table, Table) else None
    found = _table(table, mapper)
    given = [_column(name, found, mapper) for name in names]
    if len(set(given)) < len(given):
        raise BadArgument(f"two columns of these rows are the same column of {found.name}")
    id_column = next((column for column in found.columns if _is_id(column) and column not in given), None)
    filled = [
        column
        for column in found.columns
        if column not in given and column is not id_column and _is_filled(column)
    ]
    columns = [*given, *filled]
    for column in columns:
        _refuse_expressions(column)
    named = [_column(name, found, mapper) for name in (key, id_) if name is not None]
    if len(named) + (shard is not None) > 1:
        raise BadArgument(
            f"at most one of {spelled('key')}, {spelled('id')} and {spelled('shard')} can name the shards"
        )
    if region is not None and key is None:
        raise BadArgument(f"{spelled('region')} names the region of keys, and requires {spelled('key')}")
    telling = {at: tells for at, column in enumerate(columns) if (tells := how_it_tells(column)) is not None}
    place = None
    if named:
        place = _place(named[0], columns, found)
        known = telling.get(place)
        telling[place] = _tells(named[0], known, by_id=id_ is not None, region=region, spelled=spelled)
    if not telling and shard is None:
        raise BadArgument(
            f"cannot determine the shards of the rows of {found.name}",
            hint=f"Name the column to shard by with {spelled('key')}, a column that holds IDs with"
            f" {spelled('id')}, or one shard with {spelled('shard')}.",
        )
    return CopyTarget(
        name=found.name, id_column=id_column, columns=columns, given=len(given), telling=telling, key=place
    )


class Router:
    """A finder of the shards of rows, which remembers the shards of earlier keys.

    ``read`` converts values of rows to a given kind.
    """

    def __init__(
        self,
        target: CopyTarget,
        finder: ShardFinder,
        shard: int | None,
        read: Callable[[Sequence[Any], type | None], Sequence[Any]] = lambda values, _kind: values,
    ) -> None:
        self._target, self._finder, self._shard, self._read = target, finder, shard, read
        self._known = [_KnownShards(tells, finder, read) for tells in target.telling.values()]

    def shards(self, columns: Sequence[Sequence[Any]], rows: int) -> list[int] | None:
        """Return the shard of each row, given its columns that tell it.

        None if :meth:`shard` has to be asked for each: a row has a NULL among them, no shard, or two.
        """
        told = [] if self._shard is None else [[self._shard] * rows]
        try:
            told += [known.shards(values) for known, values in zip(self._known, columns, strict=True)]
        except Exception:  # noqa: BLE001 -- which row it was is found by asking for each
            return None
        if told and None not in told[0] and all(one == told[0] for one in told[1:]):
            return told[0]
        return None

    def shard(self, values: Sequence[Any]) -> int:
        """Return the shard of a row, given its values that tell it.

        Raises:
            ShardidsError: it has none, or two, or its key is NULL.
        """
        target = self._target
        by_place = {
            at: None if value is None else self._read([value], tells.kind)[0]
            for (at, tells), value in zip(target.telling.items(), values, strict=True)
        }
        if target.key is not None and by_place[target.key] is None:
            raise BadArgument(f"{target.columns[target.key].name}, which determines its shard, is NULL")
        row = {target.columns[at].key: value for at, value in by_place.items()}
        if self._shard is None and all(value is None for value in row.values()):
            raise BadArgument(f"{', '.join(row)}, which would determine its shard, is NULL")
        telling = {target.columns[at].key: tells for at, tells in target.telling.items()}
        return shard_told(row, telling, target.name, self._finder, only=self._shard)


class _KnownShards(dict[Any, Any]):
    """The shards of values of one column; that of NULL is ``None``."""

    def __init__(
        self,
        tells: Tells,
        finder: ShardFinder,
        read: Callable[[Sequence[Any], type | None], Sequence[Any]],
    ) -> None:
        super().__init__({None: None})
        self._tells, self._finder, self._read = tells, finder, read

    def shards(self, values: Sequence[Any]) -> list[Any]:
        """Return the shards of values; those that are not known are asked for, all at once."""
        try:
            return list(map(self.__getitem__, values))
        except KeyError:
            self._learn(values)
        return list(map(self.__getitem__, values))

    def _learn(self, values: Iterable[Any]) -> None:
        if len(self) > _MOST_REMEMBERED:
            self.clear()
            self[None] = None
        # In the order of the rows: those that ask for them again mostly come in that order, too, and what
        # was made at the same time lies together in memory.
        new = [value for value in dict.fromkeys(values) if value not in self]
        if new:
            read = self._read(new, self._tells.kind)
            found = dict(self._tells.shards(read, self._finder))
            self.update(zip(new, map(found.__getitem__, read), strict=True))


def refuse_lookups(target: CopyTarget, lookups: Iterable[RegisteredLookup]) -> None:
    """Refuse a table with a look-up key: a copy does not claim its values.

    Raises:
        BadArgument: it has one.
    """
    for lookup in lookups:
        if lookup.table == target.name:
            raise BadArgument(
                f"rows of {target.name} can't be copied: COPY does not claim values of look-up key {lookup}",
                hint="Insert them: session.execute(insert(…), rows) claims the values of all rows at once.",
            )


def _table(table: Any, mapper: Any) -> Table:
    found = mapper.local_table if isinstance(mapper, Mapper) else table
    if not isinstance(found, Table):
        raise BadArgument(f"copy() needs a Table or a mapped class, not {type(table).__name__}")
    if isinstance(mapper, Mapper) and len(mapper.tables) > 1:
        raise BadArgument(
            f"a row of {mapper.class_.__name__} is stored in several tables",
            hint="Copy into each Table separately.",
        )
    if found.schema is not None:
        raise BadArgument(f"{found.fullname} has a schema, so it is not a table of the shards")
    return found


def _column(name: Any, table: Table, mapper: Any) -> Column[Any]:
    if isinstance(name, InstrumentedAttribute):
        name = name.key
    if isinstance(name, Column):
        column: object = name if name.table is table else None
    else:
        named = mapper.column_attrs.get(name) if isinstance(mapper, Mapper) else None
        found = named.columns[0] if named is not None else table.columns.get(name)
        column = next((c for c in table.columns if c.name == name), None) if found is None else found
    if not isinstance(column, Column):
        raise BadArgument(
            f"{table.name} has no column {name}", hint=f"It has {', '.join(table.columns.keys())}."
        )
    return column


def _is_id(column: Column[Any]) -> bool:
    tells = how_it_tells(column)
    return column.primary_key and not column.foreign_keys and tells is not None and tells.kind is None


def _is_filled(column: Column[Any]) -> bool:
    """Return whether a column has a default that Python computes."""
    default = column.default
    if default is None or (default.is_sequence and getattr(default, "optional", False)):
        return False
    if default.is_scalar or default.is_callable:
        return True
    raise BadArgument(
        f"the default of {column} is an SQL expression, which COPY can't write",
        hint="Add the column to the rows, or make the default a server_default.",
    )


def _refuse_expressions(column: Column[Any]) -> None:
    if column.type.bind_expression(bindparam("value")) is not None:
        raise BadArgument(
            f"{column} of type {column.type!r} needs an SQL expression for its values, which COPY can't use",
            hint="Insert these rows with a session.",
        )


def _place(column: Column[Any], columns: Sequence[Column[Any]], table: Table) -> int:
    if column not in columns:
        raise BadArgument(f"the rows have no column {column.name} to shard {table.name} by")
    return list(columns).index(column)


def _tells(
    column: Column[Any],
    known: Tells | None,
    *,
    by_id: bool,
    region: str | None,
    spelled: Callable[[str], str],
) -> Tells:
    """Return how a named column determines the shard; if the models say so too, they have priority."""
    if by_id and known is not None and known.kind is not None:
        raise BadArgument(
            f"{column} is a sharding key and holds no IDs", hint=f"Name it with {spelled('key')}."
        )
    if known is None:
        known = Tells(kind=None if by_id else kind_of_key(column.type, str(column)), type_=column.type)
    if region is None:
        return known
    if known.kind is None or known.region is not None:
        raise BadArgument(
            f"{column} holds {'IDs' if known.kind is None else 'keys that already determine their region'}",
            hint=f"Leave {spelled('region')} out.",
        )
    return replace(known, region=lambda _key: region)
