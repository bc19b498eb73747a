"""Types of columns: that of IDs, a string in JSON, so that no digit is lost; and that of values in shards."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias
from uuid import UUID

from sqlalchemy import CHAR, BigInteger, Date, Enum, Integer, LargeBinary, String, TypeDecorator, Uuid
from sqlalchemy.dialects.postgresql import CITEXT
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.orm import mapped_column
from sqlalchemy.types import TypeEngine

from shardids.ids.text import CANONICAL_DECIMAL, checked_integer, from_decimal, to_decimal

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema


def read_id(value: object) -> int:
    """Parse an ID from outside: its decimal digits as a string, or an integer.

    Raises:
        BadArgument: it has another type (``bool`` and ``float`` among them), another form, or not from
            -2^63 to 2^63 - 1.
    """
    if isinstance(value, str):
        return from_decimal(value)
    return checked_integer("an ID", value, -(1 << 63), (1 << 63) - 1)


@dataclass(frozen=True, slots=True)
class _AsJsonString:
    """The way that pydantic, which need not be installed, reads, writes and documents an ID."""

    def __get_pydantic_core_schema__(self, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema  # noqa: PLC0415 -- pydantic is optional

        written = core_schema.plain_serializer_function_ser_schema(to_decimal, when_used="json")
        return core_schema.no_info_plain_validator_function(read_id, serialization=written)

    def __get_pydantic_json_schema__(
        self, _schema: CoreSchema, _handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"type": "string", "pattern": CANONICAL_DECIMAL, "examples": ["382529960780272642"]}


ShardId: TypeAlias = Annotated[int, mapped_column(BigInteger), _AsJsonString()]
"""An ID: an ``int`` in Python, ``bigint`` in the database, a string of decimal digits in JSON.

JavaScript rounds JSON numbers above 2^53, and IDs are larger. In a model of SQLAlchemy::

    id: Mapped[ShardId] = primary_key()
    user_id: Mapped[ShardId] = mapped_column(ForeignKey("users.id"))

In a model of pydantic, or as the type of a FastAPI parameter, it is written to JSON as a string, and read
from a string or an integer, from -2^63 to 2^63 - 1. Whether it is an ID of the cluster at all says
:meth:`shardids.Cluster.shard_of`.
"""

DIALECT: Final = PGDialect_psycopg()  # type: ignore[no-untyped-call]  # SQLAlchemy's
_BYTEWISE: Final = re.compile(r"C|POSIX|default|ucs_basic|(C|[a-z]{2,3}_[A-Z]{2})(\.\S+)?|.*-x-icu|pg_\S+")
"""Names of PostgreSQL's own collations that find a text equal only to itself."""


def kind_of(type_: TypeEngine[Any]) -> type | None:
    """Return ``int``, ``str``, ``bytes``, ``UUID`` or ``date``; ``None`` for every other type.

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
    """Return the type that the database has, without the decorators around it."""
    type_ = variant(type_)
    while isinstance(type_, TypeDecorator):
        type_ = variant(type_.load_dialect_impl(DIALECT))
    return type_


def variant(type_: TypeEngine[Any]) -> TypeEngine[Any]:
    """Return the variant of a type that is meant for PostgreSQL."""
    return getattr(type_, "_variant_mapping", {}).get(DIALECT.name, type_)  # type: ignore[no-any-return]  # one
