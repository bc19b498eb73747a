"""The type of an ID in models of SQLAlchemy and pydantic: a string in JSON, so that no digit is lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from sqlalchemy import BigInteger
from sqlalchemy.orm import mapped_column

from shardids.ids.text import CANONICAL_DECIMAL, checked_integer, from_decimal, to_decimal

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema


def read_id(value: object) -> int:
    """Parses an ID from outside: its decimal digits as a string, or an integer.

    Raises:
        BadArgument: it has another type (``bool`` and ``float`` among them), another form, or not from
            -2^63 to 2^63 - 1.
    """
    if isinstance(value, str):
        return from_decimal(value)
    return checked_integer("an ID", value, -(1 << 63), (1 << 63) - 1)


@dataclass(frozen=True, slots=True)
class _AsJsonString:
    """Tells pydantic, which need not be installed, how to read, write and document an ID."""

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
