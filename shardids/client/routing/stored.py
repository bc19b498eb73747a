"""A key as the database stores it: what is hashed, so that what PostgreSQL holds equal is in one shard."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from sqlalchemy import BindParameter, ClauseElement, Column, Enum, String, TypeDecorator, Uuid
from sqlalchemy.types import TypeEngine

from shardids.errors import BadArgument, UnsupportedKey
from shardids.models.kinds import DIALECT, innermost, kind_of, variant
from shardids.models.lookups import Lookup

_HASHED = (int, str, bytes, UUID)


def kind_of_key(type_: TypeEngine[Any], what: str) -> type:
    """Returns what the values of a sharding key are in the database: ``int``, ``str``, ``bytes`` or ``UUID``.

    Raises:
        UnsupportedKey: values of this type can be equal and differ as text, or have no stable hash.
    """
    kind = kind_of(type_)
    if variant(type_).bind_expression(BindParameter("key", type_=type_)) is not None:
        # An SQL expression around the parameter makes in the database what is not hashed here.
        kind = None
    if kind is not None and kind in _HASHED:
        return kind
    raise UnsupportedKey(
        f"{what} of type {innermost(type_)!r} can't be a sharding key:"
        " it has no hash that equal values share",
        hint="Use an integer, text of a deterministic collation, bytes or a UUID; for text in any case, a"
        " type that stores it in lower case.",
    )


def stored_value(type_: TypeEngine[Any], value: Any, kind: type | None) -> Any:
    """Returns what a column's type makes of a value on its way to the database.

    Raises:
        BadArgument: a value of another kind than the column's: PostgreSQL would turn it into one.
    """
    type_ = variant(type_)
    while isinstance(type_, TypeDecorator):
        if type(type_).process_bind_param is not TypeDecorator.process_bind_param:
            value = type_.process_bind_param(value, DIALECT)
        type_ = variant(type_.load_dialect_impl(DIALECT))
    if isinstance(type_, Enum):
        process = type_.bind_processor(DIALECT)  # type: ignore[no-untyped-call]  # SQLAlchemy's
        value = process(value) if process is not None else value
    elif isinstance(type_, Uuid) and isinstance(value, str):
        try:
            value = UUID(value)
        except ValueError:
            raise BadArgument(f"{value!r} is not a UUID") from None
    hashable = isinstance(value, int | str | bytes | UUID) and not isinstance(value, bool)
    if kind is not None and hashable and not isinstance(value, kind):
        raise BadArgument(f"a sharding key of this column is {_named(kind)}, not {_named(type(value))}")
    length = getattr(type_, "length", None)
    if isinstance(type_, String) and isinstance(value, str) and length is not None and len(value) > length:
        # PostgreSQL cuts spaces off.
        raise BadArgument(f"a sharding key of this column has at most {length} characters")
    return value


def claimed_value(lookup: Lookup, given: Any, type_: TypeEngine[Any] | None = None) -> Any:
    """Returns a value of a look-up key as the database stores it; ``type_`` is its own, if not the column's.

    Raises:
        BadArgument: it is not of the column's kind, or only the database knows it.
    """
    if isinstance(given, ClauseElement) or hasattr(given, "__clause_element__"):
        raise BadArgument(
            f"{lookup} is set to an SQL expression or a default, whose value is not known here",
            hint="It is a look-up key, whose values are claimed: give the value.",
        )
    value = stored_value(lookup.type_ if type_ is None else type_, given, None)
    if type(value) is not lookup.kind:
        raise BadArgument(f"{lookup} takes {lookup.kind.__name__}, and {given!r} is stored as {value!r}")
    return value


def _named(kind: type) -> str:
    return "text" if kind is str else kind.__name__


def default_key(column: Column[Any]) -> Any:
    """Returns a new value of a sharding key's default in Python; ``None`` if it has none.

    Raises:
        BadArgument: the default needs the statement that it is for.
    """
    default = column.default
    if default is None or not (default.is_scalar or default.is_callable):
        return None
    if default.is_scalar:
        return default.arg  # type: ignore[attr-defined]  # a scalar default's value
    try:
        return default.arg(None)  # type: ignore[attr-defined]  # SQLAlchemy wraps it to take a context
    except AttributeError as error:
        raise BadArgument(
            f"the default of the sharding key {column} needs its statement: {error}",
            hint="Set the key before the object is flushed.",
        ) from error
