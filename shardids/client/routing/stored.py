"""A key as the database stores it: what is hashed, so that what PostgreSQL holds equal is in one shard."""

from __future__ import annotations

import re
from typing import Any, Final
from uuid import UUID

from sqlalchemy import CHAR, Enum, Integer, LargeBinary, String, TypeDecorator, Uuid
from sqlalchemy.dialects.postgresql import CITEXT
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.types import TypeEngine

from shardids.errors import BadArgument, UnsupportedKey

_DIALECT: Final = PGDialect_psycopg()  # type: ignore[no-untyped-call]  # SQLAlchemy's
_BYTEWISE: Final = re.compile(r"C|POSIX|default|ucs_basic|(C|[a-z]{2,3}_[A-Z]{2})(\.\S+)?|.*-x-icu|pg_\S+")
"""Names of PostgreSQL's own collations, by which text is equal only to itself."""


def kind_of_key(type_: TypeEngine[Any], what: str) -> type:
    """Returns what the values of a sharding key are in the database: ``int``, ``str``, ``bytes`` or ``UUID``.

    Raises:
        UnsupportedKey: values of this type can be equal and differ as text, or have no stable hash.
    """
    stored = _innermost(type_)
    collation = getattr(stored, "collation", None)
    is_bytewise = collation is None or _BYTEWISE.fullmatch(collation)
    if isinstance(stored, Enum) or (
        isinstance(stored, String) and not isinstance(stored, CITEXT | CHAR) and is_bytewise
    ):
        return str
    for sort, kind in ((Uuid, UUID), (Integer, int), (LargeBinary, bytes)):
        if isinstance(stored, sort):
            return kind
    raise UnsupportedKey(
        f"{what} of type {stored!r} can't be a sharding key: it has no hash that equal values share",
        hint="Use an integer, text of a deterministic collation, bytes or a UUID; for text in any case, a"
        " type that stores it in lower case.",
    )


def stored_value(type_: TypeEngine[Any], value: Any, kind: type | None) -> Any:
    """Returns what a column's type makes of a value on its way to the database.

    Raises:
        BadArgument: a value of another kind than the column's: PostgreSQL would turn it into one.
    """
    type_ = _variant(type_)
    while isinstance(type_, TypeDecorator):
        value = type_.process_bind_param(value, _DIALECT)
        type_ = _variant(type_.load_dialect_impl(_DIALECT))
    if isinstance(type_, Enum):
        process = type_.bind_processor(_DIALECT)  # type: ignore[no-untyped-call]  # SQLAlchemy's
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


def _innermost(type_: TypeEngine[Any]) -> TypeEngine[Any]:
    type_ = _variant(type_)
    while isinstance(type_, TypeDecorator):
        type_ = _variant(type_.load_dialect_impl(_DIALECT))
    return type_


def _variant(type_: TypeEngine[Any]) -> TypeEngine[Any]:
    return getattr(type_, "_variant_mapping", {}).get(_DIALECT.name, type_)  # type: ignore[no-any-return]  # one


def _named(kind: type) -> str:
    return "text" if kind is str else kind.__name__
