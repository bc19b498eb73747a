"""What a session of SQLAlchemy can do, one method after another: on shards as in one database, or refused."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
from sqlalchemy import (
    Column,
    Engine,
    ForeignKey,
    String,
    Table,
    distinct,
    event,
    func,
    insert,
    inspect,
    lambda_stmt,
    literal,
    select,
    text,
    update,
)
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    aliased,
    contains_eager,
    joinedload,
    mapped_column,
    relationship,
    selectin_polymorphic,
    selectinload,
    subqueryload,
    with_polymorphic,
)

from shardids import AsyncCluster, Cluster, primary_key, sharding_key
from shardids.errors import BadArgument, ShardidsError, WrongShard
from shardids.pg.connections import open_engine
from tests.conftest import BlankDatabases, found_cluster


class Base(DeclarativeBase):
    pass


class Mood(enum.Enum):
    good = "good"
    bad = "bad"


follow_table = Table(
    "follows",
    Base.metadata,
    Column("follower_id", ForeignKey("users.id"), primary_key=True),
    Column("followed_id", ForeignKey("users.id"), primary_key=True),
)
wear_table = Table(
    "wears",
    Base.metadata,
    Column("user_id", ForeignKey("users.id"), primary_key=True),
    Column("badge_id", ForeignKey("badges.id"), primary_key=True),
)


class User(Base):
    __tablename__ = "users"

    id: Mapped[int] = primary_key()
    name: Mapped[str] = sharding_key(unique=True)
    age: Mapped[int | None]
    mood: Mapped[Mood] = mapped_column(default=Mood.good)
    pets: Mapped[list[Pet]] = relationship(back_populates="user", order_by="Pet.id")
    follows: Mapped[list[User]] = relationship(
        secondary=follow_table,
        primaryjoin="User.id == follows.c.follower_id",
        secondaryjoin="User.id == follows.c.followed_id",
        back_populates="followers",
        order_by="User.id",
    )
    followers: Mapped[list[User]] = relationship(
        secondary=follow_table,
        primaryjoin="User.id == follows.c.followed_id",
        secondaryjoin="User.id == follows.c.follower_id",
        back_populates="follows",
        order_by="User.id",
    )
    badges: Mapped[list[Badge]] = relationship(
        secondary=wear_table, back_populates="users", order_by="Badge.id"
    )


class Badge(Base):
    __tablename__ = "badges"

    id: Mapped[int] = primary_key()
    owner: Mapped[str] = sharding_key()
    title: Mapped[str]
    users: Mapped[list[User]] = relationship(secondary=wear_table, back_populates="badges")


class Pet(Base):
    __tablename__ = "pets"

    id: Mapped[int] = primary_key()
    kind: Mapped[str] = mapped_column(String(10))
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    user: Mapped[User] = relationship(back_populates="pets")

    __mapper_args__ = {"polymorphic_on": kind, "polymorphic_identity": "pet"}  # noqa: RUF012


class Dog(Pet):
    __tablename__ = "dogs"

    id: Mapped[int] = mapped_column(ForeignKey("pets.id"), primary_key=True)
    barks: Mapped[int]

    __mapper_args__ = {"polymorphic_identity": "dog"}  # noqa: RUF012


class Cat(Pet):
    __tablename__ = "cats"

    id: Mapped[int] = mapped_column(ForeignKey("pets.id"), primary_key=True)
    meows: Mapped[int]

    __mapper_args__ = {"polymorphic_identity": "cat"}  # noqa: RUF012


@dataclass(frozen=True)
class Pair:
    """A cluster of four shards on two nodes, and one database with the same rows."""

    cluster: Cluster
    plain: Engine
    home: URL


@pytest.fixture(scope="module")
def pair(databases: BlankDatabases) -> Iterator[Pair]:
    urls = [databases.take() for _ in range(3)]
    found_cluster(urls[0], {"a": urls[0], "b": urls[1]}, 4)
    plain = open_engine(urls[2], what="the plain database")
    with Cluster.connect(urls[0], listen=False) as cluster:
        for shard in range(4):
            with cluster.at(shard=shard).engine.begin() as connection:
                Base.metadata.create_all(connection, checkfirst=False)
        with cluster.sharded_session() as session, session.begin():
            fill(cluster, session)
        copy(cluster, plain)
        yield Pair(cluster, plain, urls[0])
    plain.dispose()
    for url in urls:
        databases.give_back(url)


def fill(cluster: Cluster, session: Session) -> None:
    users = [User(name=f"user {n}", age=n % 5 or None, mood=list(Mood)[n % 2]) for n in range(20)]
    for n, user in enumerate(users):
        there = [one for one in users if cluster.shard_for(one.name) == cluster.shard_for(user.name)]
        user.pets = [Dog(barks=n), Cat(meows=n + m) if n % 3 else Pet()][: n % 4] if (m := n) else []
        user.follows = [one for one in there if one is not user][:2]
        user.badges = [Badge(owner=user.name, title=f"badge {m}") for m in range(n % 3)]
    session.add_all(users)


def copy(cluster: Cluster, plain: Engine) -> None:
    with plain.begin() as there:
        there.execute(text("create function next_id() returns bigint language sql as 'select 0::bigint'"))
        Base.metadata.create_all(there, checkfirst=False)
        for table in Base.metadata.sorted_tables:
            for shard in range(4):
                with cluster.at(shard=shard).connection() as here:
                    rows = [dict(row._mapping) for row in here.execute(select(table))]
                if rows:
                    there.execute(insert(table), rows)


Ask = Callable[[Session], Any]
ON = aliased(User)


def first(session: Session) -> User:
    return session.scalars(select(User).order_by(User.id)).first()  # type: ignore[return-value]  # there are users


def pets_of(user: User) -> list[tuple[str, Any]]:
    return [(type(pet).__name__, getattr(pet, "barks", None)) for pet in user.pets]


def users(session: Session, *options: Any) -> list[tuple[Any, ...]]:
    found = session.scalars(select(User).order_by(User.id).options(*options)).unique()
    return [
        (
            one.id,
            [u.id for u in one.follows],
            [u.id for u in one.followers],
            [b.id for b in one.badges],
            pets_of(one),
        )
        for one in found
    ]


def streamed(statement: Any, **options: Any) -> Ask:
    def ask(session: Session) -> Any:
        return [getattr(one, "id", one) for one in session.scalars(statement.execution_options(**options))]

    return ask


def changed(work: Callable[[Session, list[int]], Any], result: Any) -> Ask:
    """Does something with the IDs of all users, and returns what a statement finds afterwards."""

    def ask(session: Session) -> Any:
        work(session, list(session.scalars(select(User.id).order_by(User.id))))
        return session.scalar(result)

    return ask


def closed_after_one(session: Session) -> int:
    with session.execute(OLDEST.execution_options(yield_per=2)) as result:
        return result.fetchone()[0].id  # type: ignore[index]  # there are users


OLDEST = select(User).order_by(User.age, User.id)
SAME: dict[str, Ask] = {
    "secondary, lazy": users,
    "secondary, selectin": lambda s: users(s, selectinload(User.follows), selectinload(User.badges)),
    "secondary, joined": lambda s: users(s, joinedload(User.follows), joinedload(User.badges)),
    "secondary, subquery": lambda s: users(s, subqueryload(User.follows), subqueryload(User.badges)),
    "secondary, join": lambda s: sorted(
        map(tuple, s.execute(select(User.id, ON.id).join(User.follows.of_type(ON))))
    ),
    "secondary, any": lambda s: sorted(s.scalars(select(User.id).where(User.follows.any(User.age == 1)))),
    "secondary, contains": lambda s: sorted(
        s.scalars(select(User.id).where(User.follows.contains(first(s))))
    ),
    "secondary, removed": lambda s: (
        setattr(first(s), "follows", []),
        s.flush(),
        s.scalar(select(func.count(follow_table.c.follower_id))),
    ),
    "contains_eager": lambda s: [
        (one.id, len(one.pets))
        for one in s.scalars(
            select(User).join(User.pets).options(contains_eager(User.pets)).order_by(User.id, Pet.id)
        ).unique()
    ],
    "yield_per": lambda s: sorted(streamed(select(User), yield_per=3)(s)),
    "yield_per, ordered": streamed(select(User).order_by(User.id), yield_per=3),
    "yield_per, descending": streamed(select(User).order_by(User.age.desc(), User.id), yield_per=3),
    "yield_per, NULLs first": streamed(
        select(User).order_by(User.age.asc().nulls_first(), User.id.desc()), yield_per=4
    ),
    "yield_per, limit": streamed(OLDEST.limit(7).offset(3), yield_per=2),
    "yield_per, one shard": streamed(select(User).where(User.name == "user 3"), yield_per=3),
    "yield_per, aggregate": streamed(select(func.count(User.id)), yield_per=3),
    "stream_results": streamed(select(User.id).order_by(User.id.desc()), stream_results=True),
    "max_row_buffer": streamed(select(User.id).order_by(User.id), stream_results=True, max_row_buffer=2),
    "partitions": lambda s: [
        len(part) for part in s.execute(OLDEST.execution_options(yield_per=6)).partitions()
    ],
    "Query.yield_per": lambda s: [one.id for one in s.query(User).order_by(User.id).yield_per(4)],
    "two streams at once": lambda s: [
        (one.id, other)
        for one, other in zip(
            s.scalars(OLDEST.execution_options(yield_per=2)),
            s.scalars(select(User.id).order_by(User.id.desc()).execution_options(yield_per=3)),
            strict=True,
        )
    ],
    "a stream that is closed": lambda s: (closed_after_one(s), s.scalar(select(func.count(User.id)))),
    "statements while rows are streamed": lambda s: [
        (one.id, [pet.id for pet in one.pets]) for one in s.scalars(OLDEST.execution_options(yield_per=2))
    ],
    "selectin while rows are streamed": lambda s: [
        (one.id, len(one.pets))
        for one in s.scalars(OLDEST.options(selectinload(User.pets)).execution_options(yield_per=3))
    ],
    "inheritance, base": lambda s: [
        (pet.id, type(pet).__name__, getattr(pet, "barks", None), getattr(pet, "meows", None))
        for pet in s.scalars(select(Pet).order_by(Pet.id))
    ],
    "inheritance, subclass": lambda s: [
        (dog.id, dog.barks, dog.user.name) for dog in s.scalars(select(Dog).order_by(Dog.id))
    ],
    "inheritance, with_polymorphic": lambda s: sorted(
        (pet.id, getattr(pet, "barks", None)) for pet in s.scalars(select(with_polymorphic(Pet, "*")))
    ),
    "inheritance, selectin_polymorphic": lambda s: sorted(
        (pet.id, getattr(pet, "barks", None))
        for pet in s.scalars(select(Pet).options(selectin_polymorphic(Pet, [Dog, Cat])))
    ),
    "inheritance, of_type": lambda s: sorted(
        s.scalars(select(User.id).join(User.pets.of_type(Dog)).where(Dog.barks > 3))
    ),
    "inheritance, joined relationship": lambda s: users(s, joinedload(User.pets)),
    "count of IDs": lambda s: s.scalar(select(func.count(distinct(Pet.user_id)))),
    "coalesce": lambda s: s.scalar(select(func.coalesce(func.sum(User.age), 0))),
    "select(1)": lambda s: (s.scalar(select(1)), s.scalar(select(literal("x")))),
    "enums": lambda s: sorted(mood.value for mood in s.scalars(select(User.mood))),
    "enums in criteria": lambda s: sorted(s.scalars(select(User.id).where(User.mood == Mood.bad))),
    "enums in a list": lambda s: sorted(s.scalars(select(User.id).where(User.mood.in_(list(Mood))))),
    "get by dict and tuple": lambda s: s.get(User, {"id": first(s).id}) is s.get(User, (first(s).id,)),
    "get with options": lambda s: (
        s.get(User, first(s).id, options=[joinedload(User.pets)], populate_existing=True).id
    ),  # type: ignore[union-attr]  # there
    "get for update": lambda s: s.get_one(User, first(s).id, with_for_update=True).id,
    "get of nothing": lambda s: s.get(User, first(s).id + 1000),
    "Query": lambda s: (
        s.query(User).count(),
        s.query(s.query(User).exists()).scalar(),
        [one.id for one in s.query(User).order_by(User.id)[2:5]],
        s.query(User).filter_by(name="user 3").one().name,
        s.query(User).filter(User.age == 1).update({"age": User.age + 8}),
        s.query(Badge).filter(Badge.title == "no badge").delete(),
    ),
    "refresh": lambda s: (s.refresh(first(s)), s.refresh(first(s), ["age"]), first(s).age),
    "expire": lambda s: (s.expire(first(s)), first(s).name, s.expire(first(s), ["pets"]), len(first(s).pets)),
    "merge": lambda s: s.merge(User(id=first(s).id, name=first(s).name, age=66)).age,
    "delete": lambda s: (
        s.delete(s.scalars(select(Badge).order_by(Badge.id)).first()),
        s.scalar(select(func.count(Badge.id))),
    ),
    "nested": lambda s: (s.begin_nested().rollback(), s.scalar(select(func.count(User.id)))),
    "bulk_save_objects of new ones": changed(
        lambda s, ids: s.bulk_save_objects([Dog(id=id_ + 500, user_id=id_, barks=1) for id_ in ids]),
        select(func.sum(Dog.barks)),
    ),
    "bulk_save_objects of old ones": changed(
        lambda s, _: s.bulk_save_objects([aged(one, 7) for one in s.scalars(select(User))]),
        select(func.sum(User.age)),
    ),
    "bulk_insert_mappings": changed(
        lambda s, ids: s.bulk_insert_mappings(
            Pet, [{"id": i + 500, "user_id": i, "kind": "pet"} for i in ids]
        ),  # type: ignore[arg-type]  # SQLAlchemy wants a Mapper
        select(func.count(Pet.id)),
    ),
    "bulk_update_mappings": changed(
        lambda s, ids: s.bulk_update_mappings(User, [{"id": i, "age": n} for n, i in enumerate(ids)]),  # type: ignore[arg-type]  # SQLAlchemy wants a Mapper
        select(func.sum(User.age)),
    ),
    "insert of rows in values()": changed(
        lambda s, ids: s.execute(
            insert(Pet).values([{"id": i + 500, "user_id": i, "kind": "pet"} for i in ids])
        ),
        select(func.count(Pet.id)),
    ),
    "results": lambda s: (
        s.execute(select(User.id, User.name).order_by(User.id)).mappings().all()[0]["name"],
        list(s.execute(select(User.id, User.name.label("x"), func.abs(User.age))).keys()),
        len(s.execute(select(User.id)).freeze()().all()),
        len(s.execute(select(User.id)).fetchmany(3)),
        s.execute(update(User).values(age=3)).rowcount,  # type: ignore[attr-defined]  # of a CursorResult
    ),
}


def aged(user: User, age: int) -> User:
    user.age = age
    return user


@pytest.mark.parametrize("name", SAME)
def test_sessions_over_shards_do_what_a_plain_session_does(pair: Pair, name: str) -> None:
    with Session(pair.plain) as plain, pair.cluster.sharded_session() as sharded:
        assert SAME[name](sharded) == SAME[name](plain)


def associate(session: Session) -> None:
    found = session.scalars(select(User)).all()
    shards = session.shards  # type: ignore[attr-defined]  # of a session over all shards
    other = next(one for one in found if shards.shard_of(one.id) != shards.shard_of(found[0].id))
    found[0].follows.append(other)
    session.flush()


REFUSED: dict[str, Ask] = {
    "avg": lambda s: s.scalar(select(func.avg(User.age))),
    "count of what is no ID": lambda s: s.scalar(select(func.count(distinct(User.age)))),
    "get by text": lambda s: s.get(User, "123"),
    "lambda": lambda s: s.scalars(lambda_stmt(lambda: select(User.id))),
    "from_statement": lambda s: s.scalars(select(User).from_statement(text("select * from users"))),
    "text": lambda s: s.execute(text("select 1")),
    "text with rows": lambda s: s.execute(text("select 1"), [{}, {}]),
    "union": lambda s: s.scalars(select(User.id).union(select(Pet.user_id))),
    "Query.union": lambda s: s.query(User.id).union(s.query(Pet.user_id)).all(),
    "connection": lambda s: s.connection(),
    "get_bind": lambda s: s.get_bind(User),
    "a subquery on other shards beside a key": lambda s: s.execute(
        select(User.id, select(func.count(Pet.id)).scalar_subquery()).where(User.name == "user 3")
    ),
    "a condition on other shards beside a key": lambda s: s.execute(
        select(User).where(User.name == "user 3", User.age.in_(select(Pet.id).order_by(Pet.id).limit(3)))
    ),
    "a join by something else beside a key": lambda s: s.execute(
        select(User, ON).join(ON, ON.age == User.age).where(User.name == "user 3")
    ),
    "a change by rows of other shards": lambda s: s.execute(
        update(User).where(User.name == "user 3").values(age=select(func.count(Pet.id)).scalar_subquery())
    ),
    "bulk_save_objects of what lives nowhere": lambda s: s.bulk_save_objects([Pet(kind="pet")]),
    "objects of two shards in an association": associate,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_sessions_over_shards_do_not_do_is_refused_by_name(pair: Pair, name: str) -> None:
    with pair.cluster.sharded_session() as session:
        with pytest.raises(BadArgument) as caught:
            REFUSED[name](session)
        assert caught.value.message


def test_what_is_bound_to_a_key_is_computed_in_its_shard(pair: Pair) -> None:
    asks = [
        select(func.avg(User.age)).where(User.name == "user 3"),
        select(User.age, func.count()).where(User.name == "user 3").group_by(User.age),
        select(User.id, func.row_number().over(order_by=User.age)).where(User.name == "user 3"),
        select(User.id).where(User.name == "user 3", User.pets.any()),
        select(User.id, Pet.id).join(User.pets).where(User.name == "user 3").order_by(Pet.id).limit(1),
        select(User.id, func.string_agg(Pet.kind, ","))
        .join(User.pets)
        .where(User.name == "user 3")
        .group_by(User.id),
    ]
    with Session(pair.plain) as plain, pair.cluster.sharded_session(fan_out="named") as sharded:
        for ask in asks:
            assert sharded.execute(ask).all() == plain.execute(ask).all()


def names_in(cluster: Cluster, shard: int) -> Iterator[str]:
    return (f"new {n}" for n in range(1000) if cluster.shard_for(f"new {n}") == shard)


def error_of(session: Session, ask: Ask) -> Exception | None:
    try:
        ask(session)
    except Exception as error:  # noqa: BLE001  -- which it is, the test says
        return error
    return None


def test_sessions_on_one_shard_raise_their_own_errors_and_the_servers_only(pair: Pair) -> None:
    """What is refused is about users of other shards."""
    asks = {**SAME, **REFUSED}
    del asks["objects of two shards in an association"]  # It asks the session over all shards where they are.
    for name, ask in asks.items():
        with pair.cluster.session(shard=pair.cluster.shard_for("user 3")) as session:
            error = error_of(session, ask)
        assert error is None or isinstance(error, ShardidsError | DBAPIError), (name, error)
        assert "cursor" not in str(error), (name, error)


def test_bulk_operations_write_where_rows_belong_and_nothing_else(pair: Pair) -> None:
    cluster = pair.cluster
    with cluster.sharded_session() as session:
        ids = list(session.scalars(select(User.id)))
        made = [Dog(user_id=id_, barks=5) for id_ in ids]
        session.bulk_save_objects(made, return_defaults=True)
        assert [cluster.shard_of(one.id) for one in made] == [cluster.shard_of(one.user_id) for one in made]
        new = [User(name=next(names_in(cluster, shard))) for shard in range(4)]
        session.bulk_save_objects(new, return_defaults=True)
        assert [cluster.shard_of(one.id) for one in new] == [0, 1, 2, 3]
        names = [*islice(names_in(cluster, 3), 5, 7), *islice(names_in(cluster, 1), 5, 7)]
        rows: list[dict[str, Any]] = [{"name": name} for name in sorted(names)]
        session.bulk_insert_mappings(User, rows, return_defaults=True)  # type: ignore[arg-type]  # SQLAlchemy wants a Mapper
        assert [session.get_one(User, row["id"]).name for row in rows] == sorted(names)
    two = next(names_in(cluster, 2))
    with cluster.session(shard=1) as session:
        for bulk in (
            lambda: session.bulk_save_objects([User(name=two)]),
            lambda: session.bulk_insert_mappings(User, [{"name": two}]),  # type: ignore[arg-type]  # SQLAlchemy wants a Mapper
            lambda: session.bulk_update_mappings(User, [{"id": cluster.at(shard=2).reserve(1)[0], "age": 1}]),  # type: ignore[arg-type]  # SQLAlchemy wants a Mapper
        ):
            with pytest.raises(WrongShard, match="shard 2"):
                bulk()


def test_objects_tell_their_shard_when_they_are_loaded(pair: Pair) -> None:
    """Its identity has no token: the key in it tells the shard."""
    told: list[tuple[int, int]] = []

    def note(target: User, context: Any, *_: Any) -> None:
        told.append((context.session.shard_of(target), pair.cluster.shard_of(inspect(target).identity[0])))

    event.listen(User, "load", note)
    event.listen(User, "refresh", note)
    try:
        with pair.cluster.sharded_session() as session:
            found = session.scalars(select(User)).all()
            session.refresh(found[0])
            fresh = User(name=next(names_in(pair.cluster, 3)))
            session.add(fresh)
            session.flush()
            assert session.shard_of(fresh) == 3
    finally:
        event.remove(User, "load", note)
        event.remove(User, "refresh", note)
    assert len(told) == 21
    assert {shard for shard, _ in told} == {0, 1, 2, 3}
    assert all(shard == there for shard, there in told)


def test_asyncio(pair: Pair) -> None:
    async def main() -> None:
        async with await AsyncCluster.connect(pair.home, listen=False) as cluster:
            with Session(pair.plain) as plain:
                for name, ask in SAME.items():
                    async with cluster.sharded_session() as session:
                        assert await session.run_sync(ask) == ask(plain), name
                    plain.rollback()
                expected = streamed(OLDEST, yield_per=3)(plain)
            async with cluster.sharded_session() as session:
                rows = await session.stream_scalars(OLDEST.execution_options(yield_per=3))
                assert [one.id async for one in rows] == expected

    asyncio.run(main())


def test_core_columns_are_sharding_keys() -> None:
    metadata = Base.metadata.__class__()
    table = Table(
        "people",
        metadata,
        primary_key("id"),
        sharding_key("name", String, unique=True, region=str.lower),
    )
    from shardids.client.routing.models import is_sharding_key

    assert is_sharding_key(table.c.name)
    assert not is_sharding_key(table.c.id)
