"""The session over all shards: where objects are written, and where statements are sent."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import (
    Connection,
    Double,
    ForeignKey,
    cast,
    collate,
    delete,
    event,
    exists,
    func,
    insert,
    literal,
    literal_column,
    nulls_last,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import URL
from sqlalchemy.exc import DataError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    joinedload,
    mapped_column,
    relationship,
    selectinload,
    subqueryload,
)
from sqlalchemy.orm.exc import StaleDataError

from shardids import AsyncCluster, Cluster, primary_key, sharding_key
from shardids.client.routing.fanout import STAND_IN
from shardids.errors import BadArgument, CannotCombine, FanOutRefused, WrongShard
from shardids.tables import views
from tests.conftest import BlankDatabases, found_cluster
from tests.support.clusters import catalog_at


class Base(DeclarativeBase):
    pass


class User(Base):
    __tablename__ = "users"

    id: Mapped[int] = primary_key()
    name: Mapped[str] = sharding_key(unique=True)
    age: Mapped[int | None]
    country_code: Mapped[str | None] = mapped_column(ForeignKey("countries.code"))
    country: Mapped[Country | None] = relationship()
    photos: Mapped[list[Photo]] = relationship(back_populates="user", cascade="all, delete-orphan")


class Country(Base):
    """The same in every shard: its key tells none."""

    __tablename__ = "countries"

    code: Mapped[str] = mapped_column(primary_key=True)


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
            with cluster.at(shard=shard).engine.begin() as connection:
                Base.metadata.create_all(connection, checkfirst=False)
    with catalog_at(urls[0]) as catalog:
        views.create_query_node(catalog, node="b", reference=["countries"], store_password=True)
    yield urls[0]
    for url in urls:
        databases.give_back(url)


@pytest.fixture
def cluster(home: URL) -> Iterator[Cluster]:
    """The cluster, its tables empty."""
    with Cluster.connect(home) as cluster:
        yield cluster
        for shard in range(8):
            with cluster.at(shard=shard).connection() as connection, connection.begin():
                for table in reversed(Base.metadata.sorted_tables):
                    connection.execute(table.delete())


@contextmanager
def statements(cluster: Cluster) -> Iterator[list[str]]:
    """The statements that the nodes get meanwhile."""
    sent: list[str] = []

    def note(_connection: Connection, _cursor: object, statement: str, *rest: Any) -> None:
        stand_in = rest[1].execution_options.get(STAND_IN)
        if stand_in is None or stand_in.spent:
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


def test_events_of_a_flush_ask_all_shards(cluster: Cluster) -> None:
    people(cluster)
    counts: list[int | None] = []
    with cluster.sharded_session() as session:
        for name in ("before_flush", "after_flush", "after_flush_postexec"):
            event.listen(session, name, lambda one, *_: counts.append(len(one.scalars(select(User)).all())))
        session.add(User(name="eve", age=3))
        session.flush()
        assert counts == [16, 17, 17]


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
            ).first().caption = caption
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
        assert [pool.checkedout() for pool in pools] == [1, 1]


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
        with pytest.raises(BadArgument, match=r"cannot determine the shard of a new (User|Photo)") as caught:
            session.flush()
        assert re.search("sharding key, name|sharding_key", caught.value.hint)
        assert sent == []


def test_relatives_in_two_shards(cluster: Cluster) -> None:
    ids = people(cluster, 1)
    two, five = (ids[names_for(cluster, shard)[0]] for shard in (2, 5))
    (here,), (there,) = names_for(cluster, 2), names_for(cluster, 5)
    drawn = cluster.at(shard=3).reserve(1)[0]
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
        (lambda: Photo(caption="", user_id=foreign), "shard 8 does not exist"),
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


def test_ids_of_no_shard_are_not_written(cluster: Cluster) -> None:
    foreign = cluster.layout.encode(ms=1, shard=8)
    with cluster.sharded_session() as session, statements(cluster) as sent:
        session.add(Photo(user_id=foreign, caption=""))
        with pytest.raises(BadArgument, match="shard 8 does not exist in this cluster") as caught:
            session.flush()
        assert "0 to 7" in caught.value.hint
        assert sent == []


# Statements that ask several shards.


def test_rows_of_all_shards_are_merged(cluster: Cluster) -> None:
    ids = people(cluster)
    ages = {name: n % 2 for n, name in enumerate(ids)}
    by_id = sorted(ids.values())
    with cluster.sharded_session() as session:

        def users(*order: Any, **parts: int) -> list[int]:
            query = select(User).order_by(*order).limit(parts.get("limit")).offset(parts.get("offset"))
            with statements(cluster) as sent:
                found = [user.id for user in session.scalars(query)]
            assert len(sent) == 2
            return found

        assert sorted(users()) == by_id
        assert len(users(limit=5)) == 5
        assert users(User.id) == by_id
        assert users(User.id.desc()) == by_id[::-1]
        assert users(User.id, limit=5) == by_id[:5]
        assert users(User.id, limit=5, offset=3) == by_id[3:8]
        assert users(User.id, offset=14) == by_id[14:]
        assert users(User.id, limit=0) == []
        assert users(User.id, limit=5, offset=20) == []
        by_age = sorted(by_id, key=lambda id_: (-ages[next(n for n, i in ids.items() if i == id_)], id_))
        assert users(User.age.desc(), User.id, limit=9) == by_age[:9]
        by_name = [id_ for _, id_ in sorted(ids.items())]
        assert users(collate(User.name, "C"), limit=7) == by_name[:7]
        assert users(-User.id) == by_id[::-1]


def test_sessions_add_no_listener_while_others_use_the_engine(cluster: Cluster) -> None:
    engines = [cluster.engine(node) for node in cluster.placement.nodes.values()]
    listeners = [len(engine.dialect.dispatch.do_execute) for engine in engines]
    with cluster.sharded_session() as session:
        session.scalars(select(User)).all()
    assert [len(engine.dialect.dispatch.do_execute) for engine in engines] == listeners == [1, 1]


def test_nulls_are_sorted_as_in_postgresql(cluster: Cluster) -> None:
    with cluster.sharded_session() as session, session.begin():
        for shard in range(8):
            for name, age in zip(names_for(cluster, shard, 3), (shard, None, -shard), strict=True):
                session.add(User(name=name, age=age))
    ages = sorted([*range(8), *range(0, -8, -1)])
    with cluster.sharded_session() as session:
        for order, expected in (
            (User.age, [*ages, *[None] * 8]),
            (User.age.desc(), [*[None] * 8, *ages[::-1]]),
            (User.age.asc().nulls_first(), [*[None] * 8, *ages]),
            (nulls_last(User.age.desc()), [*ages[::-1], *[None] * 8]),
        ):
            assert session.scalars(select(User.age).order_by(order)).all() == expected
            assert (
                session.scalars(select(User.age).order_by(order).limit(5).offset(6)).all() == expected[6:11]
            )
            assert [user.age for user in session.scalars(select(User).order_by(order))] == expected


def test_rows_without_objects(cluster: Cluster) -> None:
    ids = people(cluster)
    with cluster.sharded_session() as session:
        query = select(User.name, func.upper(User.name).label("loud"), User.id).order_by(User.id)
        rows = session.execute(query).all()
        assert [(row.name, row.loud, row.id) for row in rows] == [
            (name, name.upper(), id_) for name, id_ in sorted(ids.items(), key=lambda pair: pair[1])
        ]
        joined = select(User, Photo.caption).join(Photo).order_by(Photo.id.desc()).limit(3)
        last = session.execute(joined).all()
        assert [row.caption.split(",")[0] for row in last] == [row.User.name for row in last]
        core = select(User.__table__.c.id).order_by("id")
        assert session.scalars(core).all() == sorted(ids.values())
        renamed = select(User.id.label("number")).order_by("number")
        assert session.scalars(renamed).all() == sorted(ids.values())
        percent = select(User.name).where(User.name.like("name %"), literal_column("'%'") == "%")
        assert sorted(session.scalars(percent)) == sorted(ids)
        streamed = list(session.scalars(select(User.id).order_by(User.id)).partitions(5))
        assert [len(part) for part in streamed] == [5, 5, 5, 1]


def test_values_are_split_by_shard(cluster: Cluster) -> None:
    ids = people(cluster)
    some = [id_ for id_ in ids.values() if cluster.shard_of(id_) in (1, 2, 6)]
    names = [name for name, id_ in ids.items() if id_ in some]
    query = select(User).where(User.id.in_(some), User.name.in_(names), User.name.like("name%"))
    with cluster.sharded_session(fan_out="named") as session, statements(cluster) as sent:
        found = session.scalars(query.order_by(User.id)).all()
        assert [user.id for user in found] == sorted(some)
        asked = [branch for statement in sent for branch in statement.split("UNION ALL")]
        for branch in asked:
            (shard,) = set(re.findall(r"shard_(\d{4})", branch))
            values = {int(value) for value in re.findall(r"\((\d{15,})\)", branch)}
            assert values == {id_ for id_ in some if cluster.shard_of(id_) == int(shard)}
        assert len(asked) == 3
        assert len(sent) == 2


def test_relationships_of_rows_of_all_shards(cluster: Cluster) -> None:
    ids = people(cluster)
    deep = (
        selectinload(User.photos).selectinload(Photo.tags),
        joinedload(User.photos).selectinload(Photo.tags),
        joinedload(User.photos).joinedload(Photo.tags),
        subqueryload(User.photos).joinedload(Photo.tags),
    )
    for load in deep:
        for limit in (None, 9):
            if limit and load is deep[3]:
                continue
            with cluster.sharded_session() as session:
                query = select(User).order_by(User.id.desc()).limit(limit).options(load)
                users = session.scalars(query).unique().all()
                assert [user.id for user in users] == sorted(ids.values(), reverse=True)[:limit]
                with statements(cluster) as sent:
                    for user in users:
                        captions = [photo.caption for photo in sorted(user.photos, key=lambda p: p.id)]
                        assert captions == [f"{user.name}, 1", f"{user.name}, 2"]
                        assert [[tag.word for tag in photo.tags] for photo in user.photos] == [
                            ["red", "blue"]
                        ] * 2
                assert sent == []
    with cluster.sharded_session() as session:
        photos = session.scalars(
            select(Photo).options(joinedload(Photo.user)).order_by(Photo.id).limit(7)
        ).all()
        assert [photo.caption.split(",")[0] for photo in photos] == [photo.user.name for photo in photos]
        assert photos[0].user is session.get(User, photos[0].user_id)


def test_aggregates_of_all_shards(cluster: Cluster) -> None:
    people(cluster)
    with cluster.sharded_session() as session, statements(cluster) as sent:
        ages = select(func.count(), func.sum(User.age), func.min(User.age), func.max(User.age.label("x")))
        assert session.execute(ages.select_from(User)).one() == (16, 8, 0, 1)
        assert session.execute(ages.select_from(User).where(User.age > 5)).one() == (0, None, None, None)
        assert session.scalar(select(func.count(User.id))) == 16
        assert session.scalar(select(func.count()).select_from(select(User).subquery())) == 16
        assert session.query(User).count() == 16
        assert session.scalars(select(func.count(User.id)).order_by(func.count(User.id))).all() == [16]
        assert session.scalar(select(func.count(User.id).filter(User.age == 1).label("ones"))) == 8
        assert session.scalar(select(exists().where(User.age == 1))) is True
        assert session.scalar(select(select(User).where(User.age == 5).exists())) is False
        assert session.scalar(select(~exists().where(User.age == 5))) is True
        assert len([one for one in sent if "pg_proc" not in one]) == 2 * 10
        grouped = select(Photo.user_id, func.count()).group_by(Photo.user_id).having(func.count() > 1)
        assert [n for _, n in session.execute(grouped)] == [2] * 16
        distinct = select(User.id, User.age).distinct().order_by(User.id)
        assert len(session.execute(distinct).all()) == 16
        ranked = select(Photo.id, func.row_number().over(partition_by=Photo.user_id, order_by=Photo.id))
        assert sorted(n for _, n in session.execute(ranked)) == [1] * 16 + [2] * 16
        counted = select(User.id, select(func.count()).where(Photo.user_id == User.id).scalar_subquery())
        assert {n for _, n in session.execute(counted)} == {2}
        with_photos = select(User).where(User.photos.any(Photo.caption.endswith("1")))
        assert len(session.scalars(with_photos).all()) == 16
        cte = select(User.id).where(User.age == 1).cte("ones")
        assert len(session.scalars(select(User).join(cte, cte.c.id == User.id)).all()) == 8
        locked = session.scalars(select(User).order_by(User.id).limit(3).with_for_update()).all()
        assert [user.id for user in locked] == sorted(user.id for user in locked)


WRONG: list[tuple[Any, str, str]] = [
    (select(func.avg(User.age)), "avg", "query node"),
    (select(func.count(User.age.distinct())), "count", "query node"),
    (select(func.max(User.age) - func.min(User.age)), "max", "query node"),
    (select(func.count(), User.name), "count", "query node"),
    (select(func.max(User.name)), "max", "query node"),
    (select(func.count(), func.sum(cast(User.age, Double))), "sum() over", "query node"),
    (select(User.age).distinct(), "DISTINCT", "query node"),
    (select(User.age, func.count()).group_by(User.age), "GROUP BY", "query node"),
    (select(func.count(User.id) + 1).having(func.count(User.id) > 1), "HAVING", "query node"),
    (select(User.id, func.rank().over(order_by=User.age)), "window", "query node"),
    (select(User).offset(3), "OFFSET", "order_by"),
    (select(User).order_by(User.id).fetch(3), "FETCH", "limit()"),
    (select(User).order_by(User.name), "sort String()", "collate"),
    (select(User).order_by(func.random()), "random", "number"),
    (select(User).order_by(select(Photo.id).scalar_subquery()), "subquery on photos", "query node"),
    (select(User).order_by(User.name).with_for_update(), "can't lock rows", "primary keys"),
    (select(User).order_by(User.id).offset(1).with_for_update(), "row locks", "primary keys"),
    (select(User).order_by(text("age + 1")), "ORDER BY", "column"),
    (select(User).limit(func.abs(3)), "LIMIT", ""),
    (select(User.id).union_all(select(Photo.id)), "CompoundSelect", "shard_id"),
    (select(User).from_statement(text("select * from users")), "FromStatement", "shard_id"),
    (text("select 1"), "TextClause", "shard_id"),
    (select(func.pg_backend_pid()), "pg_backend_pid() over several shards", "IMMUTABLE"),
    (select(func.count()).select_from(select(User).limit(3).subquery()), "subquery on users", "first"),
    (select(User).where(User.age == select(func.max(User.age)).scalar_subquery()), "subquery on", "first"),
    (update(User).where(User.name == "x").values(name="y"), "sharding key name", "insert another"),
    (update(User.__table__).ordered_values((User.__table__.c.name, "y")), "sharding key name", "delete"),
    (delete(User).where(User.age == select(func.max(User.age)).scalar_subquery()), "the subquery", "first"),
    (update(User).values(age=select(func.count(Tag.id)).scalar_subquery()), "subquery on tags", "first"),
    (
        insert(User).from_select(["name"], select(User.name + "x")),
        "name of users may belong to another shard",
        "insert them",
    ),
    (insert(User).from_select(["age"], select(User.age)), "shard of a row of users", "id, name"),
    (insert(Photo).from_select(["user_id"], select(func.max(User.id))), "max()", "Select the rows"),
]


@pytest.mark.parametrize(("statement", "said", "hint"), WRONG, ids=[said for _, said, _ in WRONG])
def test_what_can_not_be_combined_without_a_query_node(
    cluster: Cluster, statement: Any, said: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "query_node", lambda: None)
    with cluster.sharded_session() as session, statements(cluster) as sent:
        with pytest.raises(BadArgument, match=re.escape(said)) as caught:
            session.execute(statement)
        assert hint in caught.value.hint
        assert [one for one in sent if "pg_proc" not in one] == []


def test_text_is_sorted_by_a_server(cluster: Cluster) -> None:
    ids = people(cluster)
    names = [name for name in ids if cluster.shard_for(name) < 4]
    with cluster.sharded_session() as session:
        by_name = select(User.name).where(User.name.in_(names)).order_by(User.name)
        found = session.scalars(by_name).all()
        assert sorted(found) == sorted(names)
        assert session.scalars(select(func.now()), bind_arguments={"shard_id": 5}).one()
        connection = session.connection(bind_arguments={"shard_id": 5})
        assert set(connection.scalars(select(User.name))) == {n for n in ids if cluster.shard_for(n) == 5}
        with pytest.raises(BadArgument, match="does not have one connection"):
            session.connection()


def test_fan_out_can_be_refused(cluster: Cluster) -> None:
    ids = people(cluster)
    with cluster.sharded_session(fan_out="named") as session, statements(cluster) as sent:
        for statement in (
            select(User).order_by(User.id),
            select(User, Photo).join(Photo),
            select(func.count()).select_from(User),
            update(User).values(age=5),
            delete(User),
        ):
            with pytest.raises(FanOutRefused, match=r"names no shard.*does not ask all 8") as caught:
                session.execute(statement)
            assert re.search("on (User|users)", caught.value.message)
            assert "shard_id" in caught.value.hint
        assert "User.id == …, User.name == …" in caught.value.hint
        assert sent == []
        assert session.get_one(User, ids[names_for(cluster, 3)[0]]).photos
        assert len(session.scalars(select(User).where(User.id.in_(ids.values()))).all()) == 16


def test_contradictions_find_nothing(cluster: Cluster) -> None:
    ids = list(people(cluster).values())
    with cluster.sharded_session(fan_out="named") as session:
        both = (User.id == ids[0]) & (User.id == ids[-1])
        assert session.scalars(select(User).where(both)).all() == []
        assert session.scalar(select(func.count(User.id)).where(both)) == 0
        assert session.scalars(select(User).where(User.id.in_([]))).all() == []
        assert session.execute(delete(User).where(both)).rowcount == 0


def test_changes_in_several_shards(cluster: Cluster) -> None:
    ids = people(cluster)
    some = [id_ for id_ in ids.values() if cluster.shard_of(id_) in (1, 6)]
    with cluster.sharded_session() as session, session.begin():
        loaded = session.get_one(User, some[0])
        done = session.execute(update(User).where(User.id.in_(some)).values(age=50))
        assert done.rowcount == 4
        assert loaded.age == 50
        found = session.scalars(update(User).where(User.age == 1).values(age=60).returning(User.name)).all()
        assert len(found) == 6
        assert session.execute(delete(Tag)).rowcount == 64
    with cluster.sharded_session() as session:
        assert session.scalar(select(func.count()).select_from(Tag)) == 0
        assert sorted(session.scalars(select(User.age).where(User.age >= 50))) == [50] * 4 + [60] * 6


def test_rows_are_inserted_into_their_shards(cluster: Cluster) -> None:
    names = [names_for(cluster, shard, 3)[turn] for turn in range(3) for shard in range(8)]
    with cluster.sharded_session() as session, session.begin(), statements(cluster) as sent:
        made = session.scalars(
            insert(User).returning(User, sort_by_parameter_order=True), [{"name": name} for name in names]
        ).all()
        assert [user.name for user in made] == names
        assert [cluster.shard_of(user.id) for user in made] == [cluster.shard_for(name) for name in names]
        rows = [{"user_id": user.id, "caption": user.name, "version": 1} for user in made]
        sent.clear()
        session.execute(insert(Photo), rows)
        assert len(sent) == 8
        session.execute(insert(Photo.__table__), rows)
        session.execute(insert(Photo).values(user_id=made[0].id, caption="one", version=1))
        one = session.scalars(
            postgresql.insert(User).on_conflict_do_nothing().returning(User.name), {"name": names[0]}
        ).all()
        assert one == []
        tags = [{"word": "x", "photo_id": photo.id} for photo in session.scalars(select(Photo))]
        session.execute(insert(Tag), tags)
    for shard in range(8):
        with cluster.session(shard=shard) as session:
            assert session.scalar(select(func.count()).select_from(User)) == 3
            assert session.scalar(select(func.count()).select_from(Photo)) == 6 + (shard == 0)
            assert session.scalar(select(func.count()).select_from(Tag)) == 6 + (shard == 0)


def test_rows_are_changed_by_their_keys_and_copied_within_their_shards(cluster: Cluster) -> None:
    ids = list(people(cluster).values())
    with cluster.sharded_session() as session:
        session.execute(update(User), [{"id": id_, "age": n} for n, id_ in enumerate(ids)])
        assert [session.get_one(User, id_).age for id_ in ids] == list(range(16))
        youngest = select(func.min(User.age)).scalar_subquery()
        mine = select(User.id, literal("copy"), literal(1)).where(User.age > 7)
        done = session.execute(insert(Photo).from_select(["user_id", "caption", "version"], mine))
        assert done.rowcount == 8
        session.commit()
        assert session.execute(update(User).where(User.age == youngest).values(age=100)).rowcount == 1
        with pytest.raises(CannotCombine, match="has written to users"):
            session.execute(delete(Tag).where(Tag.photo_id > select(func.max(User.id)).scalar_subquery()))
        session.commit()
        assert session.get_one(User, ids[0]).age == 100
        most = select(func.max(User.age)).scalar_subquery()
        assert session.execute(delete(Tag).where(Tag.word == "red", most > 99)).rowcount == 32
        session.commit()
    for shard in range(8):
        with cluster.session(shard=shard) as one:
            for photo in one.scalars(select(Photo).where(Photo.caption == "copy")):
                assert cluster.shard_of(photo.id) == cluster.shard_of(photo.user_id) == shard


def test_rows_without_a_shard_or_with_two(cluster: Cluster) -> None:
    id_ = people(cluster)[names_for(cluster, 2)[0]]
    foreign = cluster.layout.encode(ms=1, shard=8)
    with cluster.sharded_session() as session, statements(cluster) as sent:
        for model, row, said in (
            (User, {"age": 5}, "cannot determine the shard of a row of User"),
            (User, {"name": names_for(cluster, 3)[0], "id": id_}, "names shard 3"),
            (Photo, {"user_id": foreign}, f"user_id {foreign} of a row of Photo: shard 8 does not exist"),
        ):
            with pytest.raises(BadArgument, match=said):
                session.execute(insert(model), [{"name": "fine", "user_id": id_}, row])
        with pytest.raises(WrongShard, match="shard 5"):
            session.execute(
                insert(User), [{"name": names_for(cluster, 3)[0]}], bind_arguments={"shard_id": 5}
            )
        assert sent == []
        third = names_for(cluster, 5, 3)[2]
        session.execute(insert(User), [{"name": third}], bind_arguments={"shard_id": 5})
        assert session.scalars(select(User.name).where(User.name == third)).all() == [third]


def test_objects_that_could_not_be_told_apart(cluster: Cluster) -> None:
    people(cluster, 1)
    for shard in range(8):
        with cluster.session(shard=shard) as session, session.begin():
            session.add(Country(code="NO"))
            session.flush()
            session.execute(update(User).values(country_code="NO"))
    with cluster.sharded_session() as session:
        user = session.scalars(select(User).where(User.name == names_for(cluster, 3)[0])).one()
        for load in (
            lambda: session.scalars(select(Country)).all(),
            lambda: session.get(Country, "NO"),
            lambda: user.country,
            lambda: session.scalars(select(User).options(joinedload(User.country))).all(),
            lambda: session.scalars(select(User).options(selectinload(User.country))).all(),
            lambda: session.add(Country(code="SE")) or session.flush(),
        ):
            session.expire_all()
            with pytest.raises(
                BadArgument, match=r"Country does not determine|of the rows of countries"
            ) as caught:
                load()
            assert re.search(r"cluster.session\(\)|name the shard", caught.value.hint)
            session.rollback()
        query = select(User.name, Country.code).join(Country)
        assert len(session.execute(query).all()) == 8


def test_asyncio(home: URL, cluster: Cluster) -> None:
    ids = people(cluster)
    names = [names_for(cluster, shard, 3)[2] for shard in range(8)]

    async def main() -> None:
        async with await AsyncCluster.connect(home, listen=False) as aio, aio.sharded_session() as session:
            id_ = next(iter(ids.values()))
            assert (await session.get_one(User, id_)).id == id_
            session.add_all(User(name=name, photos=[Photo(caption=name)]) for name in names)
            await session.commit()
            newest = select(User).order_by(User.id.desc()).limit(8).options(selectinload(User.photos))
            found = (await session.scalars(newest)).all()
            assert sorted(user.name for user in found) == sorted(names)
            assert all(user.photos[0].caption == user.name for user in found)
            assert await session.scalar(select(func.count()).select_from(User)) == 24
            with pytest.raises(DataError, match="division by zero"):
                await session.scalars(select(User).where(1 / (User.id - User.id) == 1))
            await session.rollback()
            assert len((await session.scalars(select(User.id).where(User.id.in_(ids.values())))).all()) == 16
            async with aio.session(shard=2) as one:
                one.add(User(name=names_for(cluster, 3)[0]))
                with pytest.raises(WrongShard, match="shard 2"):
                    await one.flush()

    asyncio.run(main())


def test_an_error_of_a_node_leaves_the_session_usable(cluster: Cluster) -> None:
    people(cluster)
    with cluster.sharded_session() as session:
        with pytest.raises(DataError, match="division by zero"):
            session.scalars(select(User).where(1 / (User.id - User.id) == 1))
        session.rollback()
        assert len(session.scalars(select(User)).all()) == 16


def test_objects_are_inserted_together(cluster: Cluster) -> None:
    names = [names_for(cluster, shard, 3)[turn] for turn in range(3) for shard in range(8)]
    with cluster.sharded_session() as session, statements(cluster) as sent:
        session.add_all(User(name=name, photos=[Photo(caption=name)]) for name in names)
        session.flush()
        assert len(sent) == 16


def test_sessions_can_be_of_the_applications_own_class(home: URL, cluster: Cluster) -> None:
    class Asking(Session):
        """As SQLModel's session, which adds a method."""

        def ask(self, statement: Any) -> Any:
            return self.scalars(statement).all()

    class AsyncAsking(AsyncSession):
        sync_session_class = Asking

    ids = people(cluster, 1)
    two, five = (ids[names_for(cluster, shard)[0]] for shard in (2, 5))
    with cluster.sharded_session(class_=Asking) as session:
        assert isinstance(session, Asking)
        assert sorted(session.ask(select(User.id))) == sorted(ids.values())
    with cluster.at(shard=2).session(class_=Asking) as session:
        assert session.ask(select(User.id)) == [two]
        session.add(Photo(caption="", user_id=five))
        with pytest.raises(WrongShard, match="shard 5"):
            session.flush()

    async def main() -> None:
        async with await AsyncCluster.connect(home, listen=False) as aio:
            async with aio.at(shard=2).session(class_=AsyncAsking) as one:
                assert isinstance(one, AsyncAsking)
                assert await one.run_sync(lambda session: session.ask(select(User.id))) == [two]
            async with aio.sharded_session(class_=AsyncAsking) as one:
                assert len(await one.run_sync(lambda session: session.ask(select(User.id)))) == 8

    asyncio.run(main())


def test_ids_of_many_shards_are_compiled_once_and_asked_per_node(cluster: Cluster) -> None:
    with cluster.sharded_session() as session:
        users = [User(name=name) for shard in range(8) for name in names_for(cluster, shard, 3)]
        session.add_all(users)
        session.commit()
        ids = [user.id for user in users]
        wanted = select(User.id).where(User.id.in_([*ids, ids[0]]))
        compiled: list[object] = []
        for node in cluster.placement.nodes.values():
            event.listen(cluster.engine(node), "before_execute", lambda *_: compiled.append(1))
        with statements(cluster) as sent:
            assert sorted(session.scalars(wanted)) == sorted(ids)
    assert len(sent) == 2
    assert all(sum(str(id_) in one for one in sent) == 1 for id_ in ids)
    # Once for any shard, and once to be loaded.
    assert len(compiled) == 2
