"""IDs for tests without a server: the same in every run, and as ``next_id()`` on SQLite."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from sqlalchemy import (
    BigInteger,
    Engine,
    ForeignKey,
    Integer,
    MetaData,
    StaticPool,
    Table,
    create_engine,
    event,
    select,
    text,
)
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

import shardids
from shardids import Layout, ShardId
from shardids.errors import BadArgument, TimeExhausted
from shardids.ids import PRESETS
from shardids.ids.layout import DEFAULT
from shardids.testing import FakeIds, fake_ids

ROOT = Path(__file__).parents[2]


class Base(DeclarativeBase):
    pass


class User(Base):
    __tablename__ = "users"
    id: Mapped[ShardId] = shardids.primary_key()
    name: Mapped[str] = shardids.sharding_key(unique=True)
    photos: Mapped[list[Photo]] = relationship(back_populates="user")


class Photo(Base):
    __tablename__ = "photos"
    id: Mapped[ShardId] = shardids.primary_key()
    user_id: Mapped[ShardId] = mapped_column(ForeignKey("users.id"))
    user: Mapped[User] = relationship(back_populates="photos")


class Visit(Base):
    __tablename__ = "visits"
    id: Mapped[int] = shardids.primary_key()


# Generators.


@pytest.mark.parametrize("name", PRESETS)
def test_ids_are_the_same_in_every_run_rise_and_decode(name: str) -> None:
    layout = Layout.preset(name)
    found = list(islice(fake_ids(layout, shard=5), 5000))
    assert found == list(islice(fake_ids(layout, shard=5), 5000))
    assert found == sorted(set(found))
    assert {layout.decode(one).shard for one in found} == {5}
    assert layout.decode(found[0]).time == layout.first_time + timedelta(days=1)
    assert layout.decode(found[0]).sequence == 0
    # Ticks follow each other: after the last sequence number comes the next millisecond.
    follower = layout.decode(found[layout.sequence_limit]) if layout.sequence_limit < 5000 else None
    assert follower is None or (follower.ms, follower.sequence) == (layout.decode(found[0]).ms + 1, 0)


def test_the_first_id_is_as_asked() -> None:
    start = datetime(2026, 11, 21, 13, 57, 29, 713000, tzinfo=UTC)
    ids = fake_ids(shard=37, start=start, sequence=2)
    assert ids() == next(fake_ids(shard=37, start=start, sequence=2)) == 382529960780272642
    assert (next(ids), ids()) == (382529960780272643, 382529960780272644)
    ids.restart()
    assert ids() == 382529960780272642
    assert ids.layout is DEFAULT
    assert ids.shard == 37


def test_threads_share_a_generator() -> None:
    ids = fake_ids()
    drawn: list[int] = []
    threads = [Thread(target=lambda: drawn.extend(islice(ids, 2000))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(drawn) == list(islice(fake_ids(), 8000))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"shard": 4096}, "4095"),
        ({"shard": -1}, "4095"),
        ({"shard": "5"}, "shard"),
        ({"shard": True}, "shard"),
        ({"sequence": 1024}, "1023"),
        ({"start": datetime(2026, 1, 1)}, "time zone"),
        ({"start": datetime(2023, 1, 1, tzinfo=UTC)}, "before the layout's epoch"),
        ({"start": "2026-01-01"}, "datetime"),
        ({"layout": "js53"}, "Layout"),
    ],
)
def test_what_no_layout_holds_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(BadArgument, match=words):
        fake_ids(**wrong)


def test_time_ends_as_the_layouts_does() -> None:
    with pytest.raises(TimeExhausted):
        fake_ids(start=datetime(2099, 1, 1, tzinfo=UTC))
    ids = fake_ids(start=DEFAULT.last_time, sequence=1023)
    assert DEFAULT.decode(ids()).time == DEFAULT.last_time
    for _ in range(2):
        with pytest.raises(TimeExhausted):
            ids()


# SQLite.


@pytest.fixture
def ids() -> FakeIds:
    return fake_ids(shard=3)


@pytest.fixture
def engine(ids: FakeIds, tmp_path: Path) -> Any:
    engine = create_engine(f"sqlite:///{tmp_path / 'test.db'}")
    ids.register(engine)
    yield engine
    engine.dispose()


def test_models_get_their_keys_on_sqlite(engine: Engine) -> None:
    Base.metadata.create_all(engine)
    expected = fake_ids(shard=3)
    with Session(engine) as session:
        user = User(name="ann", photos=[Photo(), Photo()])
        session.add(user)
        session.commit()
        assert (user.id, *[photo.id for photo in user.photos]) == tuple(islice(expected, 3))
        assert session.scalar(select(shardids.next_id())) == next(expected)
        session.add(Visit())
        session.add(User(id=17, name="given"))
        session.commit()
        assert session.scalar(select(Visit.id)) == next(expected)
        assert session.get(User, 17) is not None


def test_objects_flushed_together_get_their_keys_in_one_statement_in_order(engine: Engine) -> None:
    Base.metadata.create_all(engine)
    statements: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda _c, _cu, statement, *_: statements.append(statement))
    with Session(engine) as session:
        users = [User(name=f"{number:04}") for number in range(800, 0, -1)]
        session.add_all(users)
        session.commit()
        assert [user.id for user in users] == list(islice(fake_ids(shard=3), 800))
        names = session.scalars(select(User.name).order_by(User.id)).all()
        assert names == [f"{number:04}" for number in range(800, 0, -1)]
    assert sum(statement.startswith("INSERT") for statement in statements) == 1


def test_a_schema_translate_map_does_not_name_the_function(ids: FakeIds) -> None:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    with engine.connect() as connection:
        connection.execute(text("attach ':memory:' as shard_0003"))
    # The connection was there before the function.
    ids.register(engine)
    shard = engine.execution_options(schema_translate_map={None: "shard_0003"})
    Base.metadata.create_all(shard)
    with Session(shard) as session:
        session.add(User(name="ann"))
        session.commit()
        assert session.scalar(text("select count(*) from shard_0003.users")) == 1
        assert session.scalar(select(User.id)) == next(fake_ids(shard=3))
    engine.dispose()


def test_a_plain_connection(ids: FakeIds) -> None:
    connection = sqlite3.connect(":memory:")
    ids.register(connection)
    connection.execute("create table t (id bigint primary key default (next_id()), v text)")
    found = connection.execute("insert into t (v) values ('a'), ('b') returning id").fetchall()
    assert [id_ for (id_,) in found] == list(islice(fake_ids(shard=3), 2))
    connection.close()


def test_asyncio(ids: FakeIds, tmp_path: Path) -> None:
    async def use() -> list[int]:
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'test.db'}")
        ids.register(engine)
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        async with AsyncSession(engine, expire_on_commit=False) as session:
            users = [User(name=name) for name in ("ann", "bob")]
            session.add_all(users)
            await session.commit()
        await engine.dispose()
        return [user.id for user in users]

    assert asyncio.run(use()) == list(islice(fake_ids(shard=3), 2))


def test_a_key_that_sqlite_would_number_itself_is_refused(engine: Engine) -> None:
    metadata = MetaData()
    columns = [
        mapped_column(
            "id", kind, primary_key=True, autoincrement=False, server_default=shardids.next_id()
        ).column
        for kind in (Integer(), BigInteger().with_variant(Integer, "sqlite"))
    ]
    for number, column in enumerate(columns):
        Table(f"t{number}", metadata, column)
        with pytest.raises(BadArgument, match=f"t{number}.*never call next_id"):
            metadata.tables[f"t{number}"].create(engine)
    with engine.connect() as connection:
        assert connection.scalar(text("select count(*) from sqlite_schema")) == 0


def test_what_is_not_registered_is_not_there(tmp_path: Path) -> None:
    connection = sqlite3.connect(":memory:")
    connection.execute("create table t (id bigint primary key default (next_id()), v text)")
    with pytest.raises(sqlite3.OperationalError, match="next_id"):
        connection.execute("insert into t (v) values ('a')")
    connection.close()


def test_an_exhausted_generator_fails_the_insert(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'test.db'}")
    fake_ids(start=DEFAULT.last_time, sequence=1023).register(engine)
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all([User(name="ann"), User(name="bob")])
        with pytest.raises(OperationalError, match="user-defined function raised exception"):
            session.commit()
    with Session(engine) as session:
        assert session.scalars(select(User)).all() == []
    engine.dispose()


def test_where_it_cannot_be_registered(ids: FakeIds, engine: Engine) -> None:
    for wrong, words in (
        (create_engine("postgresql+psycopg://nobody@127.0.0.1:1/none"), "postgresql"),
        ("sqlite://", "str"),
        (None, "NoneType"),
    ):
        with pytest.raises(BadArgument, match=words):
            ids.register(wrong)  # type: ignore[arg-type]  # that is what is refused
    ids.register(engine)  # again: no effect
    fake_ids(shard=4).register(engine)
    with pytest.raises(BadArgument, match="two generators"):
        engine.connect()


def test_ids_need_neither_pytest_nor_sqlalchemy() -> None:
    script = """
import sys
sys.modules["pytest"] = sys.modules["_pytest"] = None
from shardids.testing import fake_ids
print(fake_ids(shard=37)())
assert not {"sqlalchemy", "psycopg", "alembic", "typer"} & set(sys.modules), sys.modules
"""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ran.stdout, ran.stderr) == (f"{fake_ids(shard=37)()}\n", "")
