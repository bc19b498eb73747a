"""The session over all shards: where objects are written, and where statements are sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Connection, ForeignKey, event, select
from sqlalchemy.engine import URL
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from shardids import Cluster, primary_key, sharding_key
from tests.conftest import BlankDatabases, found_cluster


class Base(DeclarativeBase):
    pass


class User(Base):
    __tablename__ = "users"

    id: Mapped[int] = primary_key()
    name: Mapped[str] = sharding_key(unique=True)
    age: Mapped[int | None]
    photos: Mapped[list[Photo]] = relationship(back_populates="user", cascade="all, delete-orphan")


class Photo(Base):
    __tablename__ = "photos"

    id: Mapped[int] = primary_key()
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    caption: Mapped[str]
    version: Mapped[int] = mapped_column()
    user: Mapped[User] = relationship(back_populates="photos")
    tags: Mapped[list[Tag]] = relationship(cascade="all, delete-orphan", order_by="Tag.id")

    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012


class Tag(Base):
    """Reached from its photo only."""

    __tablename__ = "tags"

    id: Mapped[int] = primary_key()
    photo_id: Mapped[int] = mapped_column(ForeignKey("photos.id"))
    word: Mapped[str]


@pytest.fixture(scope="module")
def home(databases: BlankDatabases) -> Iterator[URL]:
    """The catalog of a cluster of 8 shards with the tables: 0 to 3 on node a, 4 to 7 on b."""
    urls = databases.take(), databases.take()
    found_cluster(urls[0], {"a": urls[0], "b": urls[1]}, 8)
    with Cluster.connect(urls[0]) as cluster:
        for shard in range(8):
            with cluster.shard_engine(shard).begin() as connection:
                Base.metadata.create_all(connection, checkfirst=False)
    yield urls[0]
    for url in urls:
        databases.give_back(url)


@pytest.fixture
def cluster(home: URL) -> Iterator[Cluster]:
    """The cluster, its tables empty."""
    with Cluster.connect(home) as cluster:
        yield cluster
        for shard in range(8):
            with cluster.connection(shard) as connection, connection.begin():
                for table in reversed(Base.metadata.sorted_tables):
                    connection.execute(table.delete())


@contextmanager
def statements(cluster: Cluster) -> Iterator[list[str]]:
    """The statements that the nodes get meanwhile."""
    sent: list[str] = []

    def note(_connection: Connection, _cursor: object, statement: str, *_rest: object) -> None:
        sent.append(statement)

    engines = [cluster.engine(node) for node in cluster.placement.nodes.values()]
    for engine in engines:
        event.listen(engine, "before_cursor_execute", note)
    yield sent
    for engine in engines:
        event.remove(engine, "before_cursor_execute", note)


def names_for(cluster: Cluster, shard: int, count: int = 1) -> list[str]:
    """Names whose shard it is."""
    found = (f"name {n}" for n in range(10000) if cluster.shard_for(f"name {n}") == shard)
    return [next(found) for _ in range(count)]


def people(cluster: Cluster, each: int = 2) -> dict[str, int]:
    """Writes users into every shard, each with two photos of two tags; their IDs by name."""
    with cluster.sharded_session() as session, session.begin():
        users = [
            User(name=name, age=n)
            for shard in range(8)
            for n, name in enumerate(names_for(cluster, shard, each))
        ]
        for user in users:
            user.photos = [
                Photo(caption=f"{user.name}, {n}", tags=[Tag(word=w) for w in ("red", "blue")])
                for n in (1, 2)
            ]
        session.add_all(users)
        session.flush()
        return {user.name: user.id for user in users}


def test_objects_are_written_where_their_key_and_their_parents_say(cluster: Cluster) -> None:
    ids = people(cluster)
    assert len(set(ids.values())) == 16
    for name, id_ in ids.items():
        assert cluster.shard_of(id_) == cluster.shard_for(name)
    for shard in range(8):
        with cluster.session(shard=shard) as session:
            users = session.scalars(select(User)).all()
            assert {user.name for user in users} == {n for n in ids if cluster.shard_for(n) == shard}
            for user in users:
                assert [photo.caption for photo in user.photos] == [f"{user.name}, 1", f"{user.name}, 2"]
                assert [[tag.word for tag in photo.tags] for photo in user.photos] == [["red", "blue"]] * 2
                made = [tag.id for photo in user.photos for tag in photo.tags]
                assert {cluster.shard_of(one) for one in made} == {shard}


def test_get_asks_one_shard_once(cluster: Cluster) -> None:
    ids = people(cluster)
    with cluster.sharded_session() as session, statements(cluster) as sent:
        for name, id_ in ids.items():
            user = session.get_one(User, id_)
            assert user.name == name
            assert session.get(User, id_) is user
        assert len(sent) == 16
        assert Counter(s.split("FROM shard_")[1][:4] for s in sent) == {f"{n:04}": 2 for n in range(8)}
