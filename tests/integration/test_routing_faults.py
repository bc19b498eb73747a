"""Sessions over all shards when something fails, waits or forks: what one database would do."""

from __future__ import annotations

import os
import select as files
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import (
    CheckConstraint,
    ForeignKey,
    MetaData,
    Table,
    bindparam,
    func,
    insert,
    inspect,
    select,
    text,
    update,
)
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from shardids import Cluster, primary_key, sharding_key
from shardids.errors import BadArgument, ConnectionFailed
from tests.conftest import BlankDatabases, found_cluster

SHARDS = 4


class Base(DeclarativeBase):
    pass


class User(Base):
    __tablename__ = "users"

    id: Mapped[int] = primary_key()
    name: Mapped[str] = sharding_key()
    age: Mapped[int] = mapped_column(default=0)

    __table_args__ = (CheckConstraint("age < 100 or name <> 'user 11'"),)


class Photo(Base):
    __tablename__ = "photos"

    id: Mapped[int] = primary_key()
    user_id: Mapped[int] = mapped_column(ForeignKey(User.id))


@pytest.fixture(scope="module")
def home(databases: BlankDatabases) -> Iterator[URL]:
    """The catalog of a cluster of 4 shards with the tables: 0 and 1 on node a, 2 and 3 on b."""
    urls = databases.take(), databases.take()
    found_cluster(urls[0], {"a": urls[0], "b": urls[1]}, SHARDS)
    with Cluster.connect(urls[0], listen=False) as cluster:
        for shard in range(SHARDS):
            with cluster.at(shard=shard).engine.begin() as connection:
                Base.metadata.create_all(connection, checkfirst=False)
    yield urls[0]
    for url in urls:
        databases.give_back(url)


@pytest.fixture
def cluster(home: URL) -> Iterator[Cluster]:
    """The cluster, with 12 users in all shards."""
    with Cluster.connect(home, listen=False, pool_size=2, max_overflow=0, pool_timeout=1) as cluster:
        for shard in range(SHARDS):
            with cluster.at(shard=shard).engine.begin() as connection:
                for table in reversed(Base.metadata.sorted_tables):
                    connection.execute(table.delete())
        with cluster.sharded_session() as session, session.begin():
            session.add_all(User(name=f"user {n}", age=n) for n in range(12))
        yield cluster


def ages(cluster: Cluster) -> list[int]:
    with cluster.sharded_session() as session:
        return sorted(session.scalars(select(User.age)))


UNTOUCHED = list(range(12))
TOO_OLD = update(User).values(age=User.age + 90)
"""Violates a constraint in the shard of one user."""


def test_an_update_that_fails_in_one_shard_changes_nothing_in_any(cluster: Cluster) -> None:
    with cluster.sharded_session() as session:
        with pytest.raises(IntegrityError):
            session.execute(TOO_OLD)
        session.commit()
    assert ages(cluster) == UNTOUCHED


def test_an_insert_that_fails_in_one_shard_inserts_nothing(cluster: Cluster) -> None:
    with cluster.sharded_session() as session:
        rows = [{"name": f"user {n}", "age": 99 + (n == 11)} for n in range(12)]
        with pytest.raises(IntegrityError):
            session.execute(insert(User), rows)
        session.commit()
    assert ages(cluster) == UNTOUCHED


def test_after_a_failed_statement_every_node_refuses_the_next(cluster: Cluster) -> None:
    with cluster.sharded_session() as session:
        with pytest.raises(DBAPIError):
            session.execute(update(User).where(User.name == "user 11").values(age=100))
        for n in range(12):
            with pytest.raises(DBAPIError, match="current transaction is aborted"):
                session.execute(update(User).where(User.name == f"user {n}").values(age=50))
        session.commit()
    assert ages(cluster) == UNTOUCHED


def test_raw_sql_that_fails_on_one_node_ends_the_transaction_on_all(cluster: Cluster) -> None:
    with cluster.sharded_session() as session:
        session.execute(update(User).values(age=50))
        with suppress(DBAPIError):
            session.connection(bind_arguments={"shard_id": 3}).execute(text("select 1 / 0"))
        session.commit()
    assert ages(cluster) == UNTOUCHED


def test_a_savepoint_saves_what_was_written_before_on_every_node(cluster: Cluster) -> None:
    with cluster.sharded_session() as session:
        session.execute(update(User).values(age=User.age + 1))
        with pytest.raises(IntegrityError), session.begin_nested():  # noqa: PT012 -- both are in it
            session.execute(update(User).values(age=User.age + 50))
            session.execute(TOO_OLD)
        session.execute(update(User).values(age=User.age + 1))
        session.commit()
    assert ages(cluster) == [n + 2 for n in UNTOUCHED]


def test_a_savepoint_is_not_released_on_one_node_when_another_failed(cluster: Cluster) -> None:
    with cluster.sharded_session() as session:
        (first,) = session.scalars(select(User.id).where(User.name == "user 11"))
        with pytest.raises(DBAPIError), session.begin_nested():  # noqa: PT012 -- the end of the block raises
            session.execute(update(User).values(age=50))
            with suppress(IntegrityError):
                session.execute(update(User).where(User.id == first).values(age=100))
        # As in a plain session: what could not be released is not rolled back to, either.
        with pytest.raises(DBAPIError, match="current transaction is aborted"):
            session.execute(update(User).where(User.id == first).values(age=7))
        session.commit()
    assert ages(cluster) == UNTOUCHED


def test_a_node_first_used_after_a_failure_fails_too(cluster: Cluster) -> None:
    here, there = (next(f"user {n}" for n in range(12) if node(cluster, n) == name) for name in "ab")
    with cluster.sharded_session() as session:
        with pytest.raises(DBAPIError), session.begin_nested():  # noqa: PT012 -- the end of the block raises
            with suppress(DBAPIError):
                session.execute(text("select 1 / 0"), bind_arguments={"shard_id": cluster.shard_for(here)})
            session.execute(update(User).where(User.name == there).values(age=50))
        session.execute(update(User).where(User.name == there).values(age=51))
        session.commit()
    assert 51 in ages(cluster)


def node(cluster: Cluster, n: int) -> str:
    return cluster.node_of(cluster.shard_for(f"user {n}")).name


def test_a_forked_child_asks_all_nodes_after_its_parent_did(cluster: Cluster) -> None:
    assert ages(cluster) == UNTOUCHED
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(into, str(len(ages(cluster))).encode())
        finally:
            os._exit(0)
    os.close(into)
    try:
        ready, _, _ = files.select([out], [], [], 20)
        assert ready, "the child does not answer"
        assert os.read(out, 10) == b"12"
    finally:
        os.close(out)
        with suppress(ProcessLookupError):
            os.kill(child, 9)
        os.waitpid(child, 0)


def test_sessions_that_wait_for_each_others_connections_give_up_by_name(cluster: Cluster) -> None:
    """Two hold the connections of one node each, and want the other's."""
    met = threading.Barrier(4)
    errors: list[str] = []

    def hold(shard: int) -> None:
        with cluster.sharded_session() as session:
            session.execute(text("select 1"), bind_arguments={"shard_id": shard})
            met.wait(10)
            try:
                session.execute(text("select 1"), bind_arguments={"shard_id": SHARDS - 1 - shard})
            except ConnectionFailed as error:
                errors.append(str(error))

    threads = [threading.Thread(target=hold, args=(shard,)) for shard in (0, 0, 3, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert errors
    assert 'node "' in errors[0]
    assert "pool_size" in errors[0]


def test_fan_outs_take_connections_in_one_order(cluster: Cluster) -> None:
    met = threading.Barrier(4)
    found: list[int] = []

    def ask(n: int) -> None:
        with cluster.sharded_session() as session:
            met.wait(10)
            where = User.name.in_([f"user {one}" for one in (range(12) if n % 2 else reversed(range(12)))])
            found.append(len(session.scalars(select(User).where(where)).all()))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [12] * 4


# What cannot be.


@pytest.mark.parametrize(
    "make",
    [
        lambda cluster: -1,
        lambda cluster: cluster.layout.encode(ms=1, shard=cluster.shard_count),
        lambda cluster: cluster.layout.encode(ms=1, shard=cluster.layout.shard_limit - 1),
        lambda cluster: (1 << 63) - 1,
    ],
)
def test_an_id_that_can_not_exist_finds_nothing(cluster: Cluster, make: Callable[[Cluster], int]) -> None:
    id_ = make(cluster)
    with cluster.sharded_session() as session:
        one = session.scalars(select(User.id).where(User.name == "user 1")).one()
        assert session.get(User, id_) is None
        assert session.scalars(select(User).where(User.id == id_)).all() == []
        assert session.scalars(select(User.id).where(User.id.in_([id_, one]))).all() == [one]
        assert session.execute(update(User).where(User.id == id_).values(age=1)).rowcount == 0  # type: ignore[attr-defined]  # of a CursorResult
        session.add(Photo(user_id=id_))
        with pytest.raises(BadArgument, match="user_id"):
            session.flush()
    with cluster.session(shard=1) as single:
        assert single.get(User, id_) is None
        assert single.scalars(select(User).where(User.id == id_)).all() == []


# Sessions on one shard.


def test_a_table_is_updated_without_its_class(cluster: Cluster) -> None:
    table: Any = User.__table__
    with cluster.session(key="user 1") as session:
        session.execute(table.update().where(table.c.name == "user 1").values(age=77))
        session.execute(table.insert().values(name="user 1", age=78))
        session.execute(table.delete().where(table.c.age == 78))
        session.commit()
        session.execute(table.update().where(User.name == "user 1").values(age=76))
        session.execute(table.insert().values(name="user 1", age=77))
        session.commit()
    with cluster.sharded_session() as session:
        session.execute(table.update().where(table.c.name == "user 2").values(age=79))
        session.execute(table.update().where(User.name == "user 3").values(age=80))
        session.commit()
    assert {76, 77, 79, 80} < set(ages(cluster))


def test_parameters_may_have_any_name(cluster: Cluster) -> None:
    for name in ("a-b", "a b", "a:b", "a%b", "ä", "a(b)"):
        with cluster.sharded_session() as session:
            where = (User.age >= bindparam(name), User.name != bindparam("other-one", "50 %"))
            assert len(session.execute(select(User.id, User.name).where(*where), {name: 10}).all()) == 2
            half = User.name.in_(bindparam(name, expanding=True))
            found = session.execute(select(User.age).where(half), {name: ["user 1", "user 2", "user 3"]})
            assert sorted(found.scalars()) == [1, 2, 3]


def test_reflection_in_a_session_on_one_shard_shows_its_tables(cluster: Cluster) -> None:
    with cluster.session(shard=3) as session:
        connection = session.connection()
        seen = inspect(connection)
        assert seen.has_table("users")
        assert not seen.has_table("no_such_table")
        assert set(seen.get_table_names()) == {"photos", "shardids_version", "users"}
        assert [column["name"] for column in seen.get_columns("users")] == ["id", "name", "age"]
        assert seen.get_pk_constraint("users")["constrained_columns"] == ["id"]
        assert [key["referred_table"] for key in seen.get_foreign_keys("photos")] == ["users"]
        assert (None, "photos") in seen.get_multi_columns()
        assert not seen.has_table("users", schema="public")
        metadata = MetaData()
        metadata.reflect(connection)
        assert set(metadata.tables) == {"photos", "shardids_version", "users"}
        again = Table("users", MetaData(), autoload_with=connection)
        assert session.execute(select(func.count()).select_from(again)).scalar_one() == len(
            [n for n in range(12) if cluster.shard_for(f"user {n}") == 3]
        )
    assert inspect(cluster.at(shard=2).engine).has_table("users")
    with cluster.at(shard=1).connection() as one:
        assert inspect(one).has_table("users")
