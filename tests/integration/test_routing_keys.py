"""Sharding keys are hashed as the database stores them; sessions on one shard refuse what is of another."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import (
    CHAR,
    BigInteger,
    Integer,
    Numeric,
    String,
    TypeDecorator,
    Uuid,
    delete,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import CITEXT
from sqlalchemy.engine import URL
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped

from shardids import Cluster, primary_key, sharding_key
from shardids.client.routing.models import kind_of_key
from shardids.errors import BadArgument, UnsupportedKey, WrongShard
from tests.conftest import BlankDatabases, found_cluster


class Base(DeclarativeBase):
    pass


class Lower(TypeDecorator[str]):
    """Text in lower case, whatever is given."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, _dialect: Any) -> str | None:
        return None if value is None else value.lower()


class Trimmed(TypeDecorator[str]):
    """Text that the database changes: what is hashed is not what is stored."""

    impl = String
    cache_ok = True

    def bind_expression(self, bindparam: Any) -> Any:
        return func.lower(func.trim(bindparam))


class Named(Base):
    __tablename__ = "named"

    id: Mapped[int] = primary_key()
    name: Mapped[str] = sharding_key(Lower(), unique=True)
    note: Mapped[str | None]


class Token(Base):
    __tablename__ = "tokens"

    id: Mapped[int] = primary_key()
    token: Mapped[str] = sharding_key(Uuid(as_uuid=False), unique=True)


class Numbered(Base):
    __tablename__ = "numbered"

    id: Mapped[int] = primary_key()
    number: Mapped[int] = sharding_key(BigInteger, unique=True)


class Short(Base):
    __tablename__ = "short"

    id: Mapped[int] = primary_key()
    code: Mapped[str] = sharding_key(String(3), unique=True)


class Account(Base):
    __tablename__ = "accounts"

    id: Mapped[int] = primary_key()
    key: Mapped[uuid.UUID] = sharding_key(Uuid, default=uuid.uuid4)


@pytest.fixture(scope="module")
def cluster(databases: BlankDatabases) -> Iterator[Cluster]:
    """Eight shards on one node."""
    url: URL = databases.take()
    found_cluster(url, {"a": url}, 8)
    with Cluster.connect(url, listen=False) as cluster:
        for shard in range(8):
            with cluster.at(shard=shard).engine.begin() as connection:
                Base.metadata.create_all(connection, checkfirst=False)
        yield cluster
    databases.give_back(url)


def test_keys_that_are_stored_alike_are_in_one_shard(cluster: Cluster) -> None:
    text = str(uuid.uuid4())
    for model, attribute, one, other in ((Named, "name", "Ann", "ANN"), (Token, "token", text, text.upper())):
        with cluster.sharded_session() as session, session.begin():
            session.add(model(**{attribute: one}))
        with cluster.sharded_session(fan_out="named") as session:
            query = select(model).where(getattr(model, attribute) == other)
            assert len(session.scalars(query).all()) == 1
            query = select(model).where(getattr(model, attribute).in_([one, other]))
            assert len(session.scalars(query).all()) == 1
            session.add(model(**{attribute: other}))
            with pytest.raises(IntegrityError):
                session.flush()
            session.rollback()
            with pytest.raises(IntegrityError):
                session.execute(insert(model), [{attribute: other}])


def test_values_of_another_kind_than_the_column_are_refused(cluster: Cluster) -> None:
    with cluster.sharded_session() as session:
        for model, row, said in (
            (Numbered, {"number": "5"}, "is int, not text"),
            (Named, {"name": b"ann"}, "is text, not bytes"),
            (Token, {"token": "no token"}, "is not a UUID"),
            (Short, {"code": "ab  "}, "at most 3 characters"),
        ):
            ((name, value),) = row.items()
            for use in (
                lambda model=model, row=row: session.add(model(**row)) or session.flush(),
                lambda model=model, row=row: session.execute(insert(model), [row]),
                lambda model=model, name=name, value=value: session.scalars(
                    select(model).where(getattr(model, name).in_([value]))
                ),
            ):
                with pytest.raises(BadArgument, match=said):
                    use()
                session.rollback()


@pytest.mark.parametrize("type_", [CITEXT(), CHAR(3), Numeric(), String(collation="no_accents"), Trimmed()])
def test_types_whose_equality_is_not_that_of_their_text_are_refused(type_: Any) -> None:
    with pytest.raises(UnsupportedKey, match=r"t\.x of type"):
        kind_of_key(type_, "t.x")


@pytest.mark.parametrize(
    ("type_", "kind"),
    [
        (String(), str),
        (String(collation="C"), str),
        (String(collation="de_DE.utf8"), str),
        (String(collation="und-x-icu"), str),
        (Lower(), str),
        (Integer(), int),
        (Uuid(), uuid.UUID),
        (String().with_variant(Uuid(), "postgresql"), uuid.UUID),
    ],
)
def test_kinds_of_keys(type_: Any, kind: type) -> None:
    assert kind_of_key(type_, "t.x") is kind


def test_a_default_in_python_is_the_sharding_key(cluster: Cluster) -> None:
    with cluster.sharded_session() as session, session.begin():
        accounts = [Account() for _ in range(5)]
        session.add_all(accounts)
        session.flush()
        for account in accounts:
            assert cluster.shard_of(account.id) == cluster.shard_for(account.key)
        session.execute(insert(Account), [{} for _ in range(5)])
    with cluster.sharded_session() as session:
        stored = session.scalars(select(Account)).all()
        assert len(stored) == 10
        assert all(cluster.shard_of(account.id) == cluster.shard_for(account.key) for account in stored)


def test_rows_in_values_are_inserted_into_their_shards(cluster: Cluster) -> None:
    rows = [{"number": number} for number in range(20)]
    with cluster.sharded_session() as session, session.begin():
        session.execute(insert(Numbered).values(rows))
        made = session.scalars(
            insert(Numbered).values([{"number": 50}, {"number": 51}]).returning(Numbered)
        ).all()
        assert [one.number for one in made] == [50, 51]
    with cluster.sharded_session() as session:
        for one in session.scalars(select(Numbered)):
            assert cluster.shard_of(one.id) == cluster.shard_for(one.number)


def test_get_with_text_says_what_is_wrong(cluster: Cluster) -> None:
    with cluster.sharded_session() as session, pytest.raises(BadArgument, match="an ID must be an integer"):
        session.get(Named, "123")


def test_a_session_on_one_shard_refuses_statements_about_others(cluster: Cluster) -> None:
    mine = next(name for name in map(str, range(100)) if cluster.shard_for(name) == 1)
    other = next(name for name in map(str, range(100)) if cluster.shard_for(name) == 2)
    foreign = cluster.at(shard=2).reserve(1)[0]
    with cluster.session(shard=1) as session:
        for statement in (
            select(Named).where(Named.name == other),
            select(Named).where(Named.id == foreign),
            select(Named).where(Named.name.in_([mine, other])),
            update(Named).where(Named.name.in_([mine, other])).values(note="x"),
            delete(Named.__table__).where(Named.__table__.c.id == foreign),
            insert(Named).values(name=other),
            insert(Named.__table__).values(id=foreign, name=mine),
            insert(Named).values([{"name": mine}, {"name": other}]),
            update(Named).where(Named.name == mine).values(name=other),
        ):
            with pytest.raises(WrongShard, match="shard 2"):
                session.execute(statement)
        with pytest.raises(WrongShard, match="shard 2"):
            session.execute(insert(Named), [{"name": mine}, {"name": other}])
        session.execute(insert(Named), [{"name": mine}])
        assert session.scalars(select(Named.name).where(Named.name.in_([mine]))).all() == [mine]
        session.execute(update(Named).where(Named.name == mine).values(note="x"))
        assert session.execute(delete(Named).where(Named.note == "x")).rowcount == 1


def test_rows_of_shards_are_not_written_into_one_schema_for_all(cluster: Cluster) -> None:
    class Apart(DeclarativeBase):
        pass

    class Shared(Apart):
        __tablename__ = "shared"
        __table_args__ = {"schema": "public"}  # noqa: RUF012

        id: Mapped[int] = primary_key()
        name: Mapped[str] = sharding_key()

    with cluster.at(shard=0).engine.begin() as connection:
        # Its default is next_id() of this shard, for rows of whichever.
        Apart.metadata.create_all(connection)
    said = "the table of Shared is in schema public, not in each shard"
    for opened in (cluster.sharded_session(), cluster.session(shard=1)):
        with opened as session:
            session.add(Shared(name="ann"))
            with pytest.raises(BadArgument, match=said):
                session.flush()
    with cluster.session(shard=0) as session, pytest.raises(BadArgument, match=said):
        session.execute(insert(Shared).values(name="ann"))
    with cluster.at(shard=0).connection() as connection:
        assert connection.scalar(select(func.count()).select_from(Shared.__table__)) == 0
