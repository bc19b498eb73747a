"""Which columns can be look-up keys: what is not known to be right is refused when the model is defined."""

from __future__ import annotations

from datetime import date
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import (
    CHAR,
    BigInteger,
    Column,
    Computed,
    Date,
    DateTime,
    Enum,
    Float,
    ForeignKey,
    Identity,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    SmallInteger,
    String,
    Table,
    Text,
    TypeDecorator,
    Uuid,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import CITEXT
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedColumn

from shardids import lookup_key, primary_key, sharding_key
from shardids.catalog import lookups
from shardids.catalog.lookups import claims_name, shard_of_claim
from shardids.catalog.topology import shard_for_key
from shardids.client.routing.models import claimed_value
from shardids.errors import BadArgument
from shardids.models.lookups import lookups_of

KNOWN: dict[Any, type] = {
    Text(): str,
    String(20): str,
    String(collation="C"): str,
    SmallInteger(): int,
    Integer(): int,
    BigInteger(): int,
    Uuid(): UUID,
    LargeBinary(): bytes,
    Date(): date,
}
UNKNOWN = [Float(), Numeric(), CITEXT(), CHAR(5), String(collation="blind"), DateTime(), Enum("a", "b")]


def made(*arguments: Any, **options: Any) -> Table:
    return Table("users", MetaData(), lookup_key("email", *arguments, **options))


@pytest.mark.parametrize("type_", KNOWN, ids=repr)
def test_types_that_are_known_to_be_equal_byte_by_byte(type_: Any) -> None:
    (lookup,) = lookups_of(made(type_))
    assert (str(lookup), lookup.kind) == ("users.email", KNOWN[type_])


@pytest.mark.parametrize("type_", UNKNOWN, ids=repr)
def test_all_other_types_are_refused(type_: Any) -> None:
    with pytest.raises(BadArgument, match=r"users.email can't be a look-up key: it is not known"):
        made(type_)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((), {"nullable": True}, "it can be NULL"),
        ((), {"server_default": text("'x'")}, "the server makes its values"),
        ((Computed("lower(name)"),), {}, "makes its values"),
        ((Identity(),), {}, "the server makes its values"),
        ((), {"default": func.lower("X")}, "an SQL expression or onupdate"),
        ((), {"onupdate": "x"}, "an SQL expression or onupdate"),
        ((), {"primary_key": True}, "part of the primary key"),
    ],
)
def test_columns_whose_values_sessions_do_not_know_are_refused(
    arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadArgument, match=message):
        made(Text(), *arguments, **options)


class Quiet(TypeDecorator[str]):
    impl = String
    cache_ok = True


class ByExpression(Quiet):
    def bind_expression(self, bindparam: Any) -> Any:
        return func.lower(bindparam)


class ByProcessor(Quiet):
    def bind_processor(self, dialect: Any) -> Any:
        return str.lower


class OwnType(String):
    def bind_processor(self, dialect: Any) -> Any:
        return str.lower


@pytest.mark.parametrize("type_", [ByExpression(), ByProcessor(), OwnType()])
def test_types_that_change_values_after_they_are_claimed_are_refused(type_: Any) -> None:
    with pytest.raises(BadArgument, match="by an SQL expression or a bind processor"):
        made(type_)


def test_a_decorator_that_changes_nothing_is_a_type_like_its_own() -> None:
    (lookup,) = lookups_of(made(Quiet()))
    assert claimed_value(lookup, "Ann") == "Ann"


def test_percent_signs_of_names_are_no_parameters() -> None:
    waits = lookups.wait_for_writers("s", "50%", "a%b", lock_ms=1)
    assert '"s"."50%%" in share mode' in waits
    assert '"a%%b"' in waits


def test_other_keys_are_refused() -> None:
    with pytest.raises(BadArgument, match="it is the sharding key"):
        Table("users", MetaData(), sharding_key("email", Text(), info={"shardids.lookup_key": True}))
    with pytest.raises(BadArgument, match="its table is in schema public"):
        Table("users", MetaData(), lookup_key("email", Text()), schema="public")
    with pytest.raises(BadArgument, match="it is not known that values of type NullType"):
        made(ForeignKey("others.email"))
    with pytest.raises(BadArgument, match="a look-up key must be unique"):
        lookup_key(unique=False)


def test_a_model_that_lets_it_be_null_is_refused_when_it_is_defined() -> None:
    class Base(DeclarativeBase):
        pass

    with pytest.raises(BadArgument, match=r"users.email can't be a look-up key: it can be NULL"):

        class User(Base):
            __tablename__ = "users"
            id: Mapped[int] = primary_key()
            email: Mapped[str | None] = lookup_key(unique=True)


def test_a_model_has_a_unique_column_that_is_not_null() -> None:
    class Base(DeclarativeBase):
        pass

    class User(Base):
        __tablename__ = "users"
        id: Mapped[int] = primary_key()
        email: Mapped[str] = lookup_key(unique=True)

    column: Column[Any] = User.__table__.c.email
    assert column.unique
    assert not column.nullable


def test_names_of_claims_fit_into_postgresql() -> None:
    assert claims_name("users", "email") == "shardids_lookup_users_email"
    long = claims_name("u" * 60, "email")
    assert len(long) + len("_pkey") <= 63
    assert long != claims_name("u" * 60, "name")


def test_the_shard_of_a_claim_is_that_of_the_values_hash() -> None:
    assert shard_of_claim("ann", 64) == shard_for_key("ann", 64)
    assert shard_of_claim(date(2026, 11, 22), 64) == shard_for_key("2026-11-22", 64)


@pytest.mark.parametrize("key", [sharding_key, lookup_key])
def test_a_name_makes_a_column_of_a_table_which_needs_a_type(key: Any) -> None:
    assert isinstance(key(), MappedColumn)
    assert isinstance(key("email", Text), Column)
    with pytest.raises(BadArgument, match='column "email" has no type') as refused:
        key("email")
    assert '(name="email")' in refused.value.hint
