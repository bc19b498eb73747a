"""What the values of a column's type are in the database, where equal values are equal byte by byte."""

from __future__ import annotations

import re
from datetime import date
from typing import Any, Final
from uuid import UUID

from sqlalchemy import CHAR, Date, Enum, Integer, LargeBinary, String, TypeDecorator, Uuid
from sqlalchemy.dialects.postgresql import CITEXT
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.types import TypeEngine

DIALECT: Final = PGDialect_psycopg()  # type: ignore[no-untyped-call]  # SQLAlchemy's
_BYTEWISE: Final = re.compile(r"C|POSIX|default|ucs_basic|(C|[a-z]{2,3}_[A-Z]{2})(\.\S+)?|.*-x-icu|pg_\S+")
"""Names of PostgreSQL's own collations, by which text is equal only to itself."""


def kind_of(type_: TypeEngine[Any]) -> type | None:
    """Returns ``int``, ``str``, ``bytes``, ``UUID`` or ``date``; ``None`` for every other type.

    Of the others values can be equal and differ as text, or it is not known that they can't.
    """
    stored = innermost(type_)
    collation = getattr(stored, "collation", None)
    is_bytewise = collation is None or _BYTEWISE.fullmatch(collation)
    if isinstance(stored, Enum) or (
        isinstance(stored, String) and not isinstance(stored, CITEXT | CHAR) and is_bytewise
    ):
        return str
    kinds = ((Uuid, UUID), (Integer, int), (LargeBinary, bytes), (Date, date))
    return next((kind for sort, kind in kinds if isinstance(stored, sort)), None)


def innermost(type_: TypeEngine[Any]) -> TypeEngine[Any]:
    """Returns the type that the database has, without the decorators around it."""
    type_ = variant(type_)
    while isinstance(type_, TypeDecorator):
        type_ = variant(type_.load_dialect_impl(DIALECT))
    return type_


def variant(type_: TypeEngine[Any]) -> TypeEngine[Any]:
    """Returns the variant of a type that is meant for PostgreSQL."""
    return getattr(type_, "_variant_mapping", {}).get(DIALECT.name, type_)  # type: ignore[no-any-return]  # one
