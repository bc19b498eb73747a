"""The session over all shards: where objects are written, and where statements are sent."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Connection, ForeignKey, event, select
from sqlalchemy.engine import URL
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, joinedload, mapped_column, relationship, selectinload
from sqlalchemy.orm.exc import StaleDataError

from shardids import Cluster, primary_key, sharding_key
from shardids.errors import BadArgument
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


def test_statements_that_name_a_shard(cluster: Cluster) -> None:
    ids = people(cluster)
    name, id_ = next(iter(ids.items()))
    shard = cluster.shard_for(name)
    with cluster.sharded_session() as session, statements(cluster) as sent:
        user = session.scalars(select(User).where(User.name == name)).one()
        assert user.id == id_
        assert session.scalars(
            select(Photo.caption).where(Photo.user_id == id_).order_by(Photo.id)
        ).all() == [
            f"{name}, 1",
            f"{name}, 2",
        ]
        session.expire(user)
        assert user.age == 0
        assert len(user.photos) == 2
        assert user.photos[0].tags[1].photo_id == user.photos[0].id
        assert session.scalars(select(Photo).where(Photo.user == user)).all() == user.photos
        session.refresh(user.photos[1])
        loads = [
            selectinload(User.photos).selectinload(Photo.tags),
            joinedload(User.photos).joinedload(Photo.tags),
        ]
        for load in loads:
            session.expunge_all()
            (found,) = session.scalars(select(User).where(User.id == id_).options(load)).unique()
            assert [[tag.word for tag in photo.tags] for photo in found.photos] == [["red", "blue"]] * 2
        assert {s.split("shard_")[1][:4] for s in sent} == {f"{shard:04}"}
        assert all(s.count("shard_") == s.count(f"shard_{shard:04}") for s in sent)


def test_objects_change_in_their_shard(cluster: Cluster) -> None:
    ids = people(cluster)
    with cluster.sharded_session() as session:
        for n, (name, id_) in enumerate(ids.items()):
            user = session.get_one(User, id_)
            user.age = n + 100
            user.photos[0].caption = f"changed {name}"
            session.delete(user.photos[1])
            user.photos.append(Photo(caption=f"third of {name}"))
        session.commit()
        assert session.get_one(User, id_).age == 115
    for shard in range(8):
        with cluster.session(shard=shard) as session:
            for user in session.scalars(select(User)):
                captions = [photo.caption for photo in sorted(user.photos, key=lambda photo: photo.id)]
                assert captions == [f"changed {user.name}", f"third of {user.name}"]
                assert [photo.version for photo in sorted(user.photos, key=lambda p: p.id)] == [2, 1]
    with cluster.sharded_session() as session, session.begin():
        merged = session.merge(User(id=ids[name], name=name, age=7))
        assert merged.photos
        session.delete(merged)
    with cluster.sharded_session() as session:
        assert session.get(User, id_) is None


def test_a_row_that_another_changed_is_not_overwritten(cluster: Cluster) -> None:
    id_ = people(cluster, 1).popitem()[1]
    with cluster.sharded_session() as one, cluster.sharded_session() as other:
        for session, caption in ((one, "one"), (other, "other")):
            session.scalars(
                select(Photo).where(Photo.user_id == id_).order_by(Photo.id)
            ).first().caption = caption  # type: ignore[union-attr]
        one.commit()
        with pytest.raises(StaleDataError):
            other.commit()


def test_savepoints_and_rollback_reach_all_nodes(cluster: Cluster) -> None:
    names = [names_for(cluster, shard)[0] for shard in range(8)]
    with cluster.sharded_session() as session:
        session.add_all(User(name=name) for name in names[::2])
        session.flush()
        with session.begin_nested() as inner:
            session.add_all(User(name=name) for name in names[1::2])
            session.flush()
            inner.rollback()
        inner = session.begin_nested()
        session.add(User(name=names[0]))
        with pytest.raises(IntegrityError):
            session.flush()
        inner.rollback()
        session.commit()
        session.add_all(User(name=name) for name in names[1::2])
        session.flush()
        session.rollback()
    found = []
    for shard in range(8):
        with cluster.session(shard=shard) as session:
            found += session.scalars(select(User.name)).all()
    assert found == names[::2]


def test_one_connection_and_one_transaction_a_node(cluster: Cluster) -> None:
    people(cluster)
    with cluster.sharded_session() as session:
        for shard in range(8):
            session.scalars(select(User).where(User.name == names_for(cluster, shard)[0])).one()
        pools = [cluster.engine(node).pool for node in cluster.placement.nodes.values()]
        assert [pool.checkedout() for pool in pools] == [1, 1]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "made",
    [
        lambda c: User(age=5),
        lambda c: Photo(caption="of nobody"),
        lambda c: Photo(caption="", tags=[Tag(word="x")]),
    ],
)
def test_objects_without_a_shard(cluster: Cluster, made: Callable[[Cluster], object]) -> None:
    with cluster.sharded_session() as session, statements(cluster) as sent:
        session.add_all([User(name="fine"), made(cluster)])
        with pytest.raises(BadArgument, match=r"nothing tells the shard of a new (User|Photo)") as caught:
            session.flush()
        assert re.search("sharding key, name|sharding_key", caught.value.hint)
        assert sent == []


def test_relatives_in_two_shards(cluster: Cluster) -> None:
    ids = people(cluster, 1)
    two, five = (ids[names_for(cluster, shard)[0]] for shard in (2, 5))
    (here,), (there,) = names_for(cluster, 2), names_for(cluster, 5)
    drawn = cluster.reserve(3, 1)[0]
    with cluster.sharded_session() as session:
        old = session.get_one(User, two)
        lost = session.get_one(User, five).photos[0]
        wrong: list[Callable[[], object]] = [
            lambda: Photo(caption="", user=old, user_id=five),
            lambda: Photo(id=drawn, caption="", user=old),
            lambda: User(id=drawn, name=here),
            lambda: User(name=there, photos=[Photo(caption="", user_id=two)]),
            lambda: old.photos.append(Photo(caption="", tags=[Tag(word="", photo_id=five)])),
            lambda: old.photos.append(lost),
            lambda: setattr(lost, "user_id", two),
            lambda: setattr(old, "name", there),
        ]
        for change in wrong:
            with statements(cluster) as sent, session.no_autoflush:
                made = change()
                if made is not None:
                    session.add(made)
                with pytest.raises(BadArgument, match="two shards") as caught:
                    session.flush()
            named = {int(n) for n in re.findall(r"shard (\d)", caught.value.message)}
            assert len(named) == 2
            assert named <= {2, 3, 5}
            assert re.search(r"(User|Photo|Tag)\(", caught.value.message)
            assert "can't cross shards" in caught.value.hint
            assert not [s for s in sent if not s.startswith("SELECT")]
            session.rollback()


def test_a_session_on_one_shard_keeps_to_it(cluster: Cluster) -> None:
    ids = people(cluster, 1)
    two, five = (ids[names_for(cluster, shard)[0]] for shard in (2, 5))
    foreign = cluster.layout.encode(ms=1, shard=8)
    with cluster.session(shard=5) as other:
        lost = other.get_one(User, five)
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: Photo(caption="", user_id=five), "shard 5"),
        (lambda: Photo(id=five, caption="", user_id=two), "shard 5"),
        (lambda: User(name=names_for(cluster, 5)[0]), "shard 5"),
        (lambda: Photo(caption="", user=lost), "shard 5"),
        (lambda: Photo(caption="", user_id=foreign), "no shard 8"),
        (lambda: Photo(caption="", user_id="x"), "user_id 'x' of Photo"),
    ]
    for make, said in wrong:
        with cluster.session(shard=2) as session, statements(cluster) as sent:
            session.add_all([User(name=names_for(cluster, 2, 2)[1]), make()])
            with pytest.raises(BadArgument, match=said) as caught:
                session.flush()
            assert re.search(r"(Photo|User)", caught.value.message)
            assert said != "shard 5" or "shard 2" in caught.value.message
            assert sent == []
            session.expunge_all()
    with cluster.session(shard=2) as session, session.begin():
        session.add(Photo(caption="fine", user_id=two))


def test_ids_of_no_shard(cluster: Cluster) -> None:
    foreign = cluster.layout.encode(ms=1, shard=8)
    with cluster.sharded_session() as session, statements(cluster) as sent:
        for use in (
            lambda: session.get(User, foreign),
            lambda: session.scalars(select(User).where(User.id == foreign)),
            lambda: session.scalars(select(Photo).where(Photo.user_id.in_([foreign]))),
            lambda: session.add(Photo(user_id=foreign, caption="")) or session.flush(),  # type: ignore[func-returns-value]
        ):
            with pytest.raises(BadArgument, match="no shard 8 in this cluster") as caught:
                use()
            assert "0 to 7" in caught.value.hint
        assert sent == []
