"""Look-up keys: columns whose values are unique over all shards, and find the shard of their row.

How uniqueness is kept: ``docs/decisions/0035-unique-over-shards.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, overload
from weakref import WeakKeyDictionary

from sqlalchemy import Column, Enum, Table, event
from sqlalchemy.orm import MappedColumn, Mapper
from sqlalchemy.types import TypeDecorator, TypeEngine

from shardids.errors import BadArgument
from shardids.models.columns import SHARDING_KEY, Part, column_of
from shardids.models.types import DIALECT, innermost, kind_of, variant

LOOKUP_KEY = "shardids.lookup_key"
"""Marks a look-up key in a column's ``info``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """A look-up key, as a model defines it.

    Attributes:
        table: the table's name, as it is in every shard.
        column: the column's name.
        key: the column's key, its name in statements.
        kind: what its values are in the database: ``int``, ``str``, ``bytes``, ``UUID`` or ``date``.
        type_: its type.
    """

    table: str
    column: str
    key: str
    kind: type
    type_: TypeEngine[Any]

    def __str__(self) -> str:
        return f"{self.table}.{self.column}"


@overload
def lookup_key(*arguments: Part, unique: bool = True, **options: Any) -> MappedColumn[Any]: ...
@overload
def lookup_key(name: str, /, *arguments: Part, unique: bool = True, **options: Any) -> Column[Any]: ...


def lookup_key(*arguments: Any, unique: bool = True, **options: Any) -> Any:
    """Return a column whose values are unique over all shards, and find the shard of their row::

        class User(Base):
            __tablename__ = "users"
            id: Mapped[int] = shardids.primary_key()
            email: Mapped[str] = shardids.lookup_key(unique=True)

        class User(SQLModel, table=True):
            id: ShardId = Field(default=None, sa_column=primary_key("id"))
            email: str = Field(sa_column=lookup_key("email", String))

    ``shardids lookup create users.email`` makes the place where sessions claim its values, before they commit
    the rows. ``session(lookup=User.email == "…")`` and ``select(User).where(User.email == "…")`` go to the
    one shard that has the row. The column is never NULL: with its name, for tables and SQLModel, it is
    ``NOT NULL``. Its type is an integer, text of a deterministic collation, bytes, a UUID or a date.
    ``arguments`` and ``options`` go to :func:`sqlalchemy.orm.mapped_column`, or :class:`sqlalchemy.Column`.

    Raises:
        BadArgument: a name, and no type; when the model is defined: another type, a column that can be NULL
            or that the server fills, a primary or sharding key.
    """
    if arguments and isinstance(arguments[0], str):
        options.setdefault("nullable", False)
    return column_of(arguments, {**options, "unique": _required(unique), "info": _marked(options)})


def lookups_of(table: Any) -> tuple[Lookup, ...]:
    """Return the look-up keys of a table."""
    return _of_table(table) if isinstance(table, Table) else ()


def lookups_are_defined() -> bool:
    """Return whether any table of this process has, or had, a look-up key."""
    return _are_defined


def lookups_of_mapper(mapper: Mapper[Any]) -> Mapping[str, Lookup]:
    """Return the look-up keys of a mapped class, by attribute."""
    found = _OF_MAPPERS.get(mapper)
    if found is None:
        found = _OF_MAPPERS[mapper] = {
            prop.key: lookup
            for prop in mapper.column_attrs
            for column in prop.columns
            if (lookup := lookup_of(column)) is not None
        }
    return found


_are_defined = False
_OF_MAPPERS: WeakKeyDictionary[Mapper[Any], Mapping[str, Lookup]] = WeakKeyDictionary()


def lookup_of(column: object) -> Lookup | None:
    """Return the look-up key that a table's column is, if it is one."""
    if not isinstance(column, Column) or LOOKUP_KEY not in column.info or not isinstance(column.table, Table):
        return None
    kind = kind_of(column.type)
    assert kind is not None  # noqa: S101 -- it was looked at when the table was made
    return Lookup(table=column.table.name, column=column.name, key=column.key, kind=kind, type_=column.type)


@lru_cache(500)
def _of_table(table: Table) -> tuple[Lookup, ...]:
    return tuple(lookup for column in table.columns if (lookup := lookup_of(column)) is not None)


def _required(unique: bool) -> bool:
    if unique is not True:
        raise BadArgument("a look-up key must be unique", hint="Write lookup_key(unique=True).")
    return unique


def _marked(options: dict[str, Any]) -> dict[Any, Any]:
    return {**options.pop("info", {}), LOOKUP_KEY: True}


@event.listens_for(Column, "after_parent_attach")
def _check(column: Column[Any], table: object) -> None:
    """Refuse a look-up key that can't be kept, when its table is defined."""
    if LOOKUP_KEY not in column.info or not isinstance(table, Table):
        return
    for is_wrong, what, hint in _faults(column, table):
        if is_wrong:
            raise BadArgument(f"{table.name}.{column.name} can't be a look-up key: {what}", hint=hint)
    global _are_defined  # noqa: PLW0603 -- asked before each statement
    _are_defined = True


def _is_changed_unseen(type_: TypeEngine[Any]) -> bool:
    """Return whether the database gets other values than ``process_bind_param()`` makes."""
    type_ = variant(type_)
    while isinstance(type_, TypeDecorator):
        kind = type(type_)
        if (
            kind.bind_expression is not TypeDecorator.bind_expression
            or kind.bind_processor is not TypeDecorator.bind_processor
        ):
            return True
        type_ = variant(type_.load_dialect_impl(DIALECT))
    kinds = {getattr(type(type_), name).__module__ for name in ("bind_expression", "bind_processor")}
    return any(not module.startswith("sqlalchemy.") for module in kinds)


def _faults(column: Column[Any], table: Table) -> list[tuple[bool, str, str]]:
    default = column.default
    in_sql = default is not None and not (default.is_scalar or default.is_callable)
    return [
        (bool(column.info.get(SHARDING_KEY)), "it is the sharding key", "unique=True makes that unique."),
        (column.primary_key, "it is part of the primary key", "Name another column."),
        (table.schema is not None, f"its table is in schema {table.schema}, not in each shard", ""),
        (
            bool(column.nullable),
            "it can be NULL, and NULLs are not unique",
            "Mapped[str], not Mapped[str | None]; nullable=False for a Column.",
        ),
        (
            kind_of(column.type) is None or isinstance(innermost(column.type), Enum),
            f"it is not known that values of type {innermost(column.type)!r} are equal byte by byte",
            "Use an integer, text of a deterministic collation, bytes, a UUID or a date; for text in any"
            " case, a type that stores it in lower case.",
        ),
        (
            _is_changed_unseen(column.type),
            f"{column.type!r} changes values by an SQL expression or a bind processor, unseen by claims",
            "Change them in process_bind_param() of a TypeDecorator.",
        ),
        (
            in_sql or column.onupdate is not None or column.server_onupdate is not None,
            "an SQL expression or onupdate makes its values",
            "Sessions claim values before they are committed: give them in Python.",
        ),
        (
            column.server_default is not None or column.computed is not None or column.identity is not None,
            "the server makes its values",
            "Sessions claim values before they are committed: give them in Python.",
        ),
    ]
