"""Which shards a WHERE clause names."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import (
    BigInteger,
    ForeignKey,
    and_,
    bindparam,
    false,
    func,
    insert,
    not_,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, aliased, mapped_column, relationship

from shardids import primary_key, sharding_key
from shardids.catalog.keys.known import NO_HOMES
from shardids.catalog.topology import shard_for_key
from shardids.client.routing.criteria import Named, Read, narrowed
from shardids.client.routing.models import Key, facts_of
from shardids.errors import BadArgument, UnsupportedKey
from shardids.ids.layout import DEFAULT, Layout


class Finder:
    """A cluster of 16 shards."""

    layout: Layout = DEFAULT
    shard_count = 16
    old_ids = None
    homes = NO_HOMES
    moved_ids = None

    def shard_of(self, id_: int, *, of: str | None = None) -> int:
        shard = DEFAULT.decode(id_).shard
        if shard >= 16:
            raise BadArgument(f"shard {shard} does not exist in this cluster")
        return shard

    def shard_for(self, key: Key, *, region: str | None = None) -> int:
        assert region is None
        return shard_for_key(key, 16)


class Base(DeclarativeBase):
    pass


class Country(Base):
    """A model whose key tells nothing."""

    __tablename__ = "countries"

    code: Mapped[str] = mapped_column(primary_key=True)


class User(Base):
    __tablename__ = "users"

    id: Mapped[int] = primary_key()
    name: Mapped[str] = sharding_key()
    age: Mapped[int]
    country: Mapped[str] = mapped_column(ForeignKey("countries.code"))
    friend_id: Mapped[int] = mapped_column(BigInteger)  # may be in any shard: no foreign key


class Photo(Base):
    __tablename__ = "photos"

    id: Mapped[int] = primary_key()
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    user: Mapped[User] = relationship()


class Detail(Base):
    """A primary key that is a foreign key, to a foreign key."""

    __tablename__ = "details"

    photo_id: Mapped[int] = mapped_column(ForeignKey("photos.id"), primary_key=True)
    owner: Mapped[str] = mapped_column(ForeignKey("users.name"), primary_key=True)


def id_in(shard: int, ms: int = 1000, sequence: int = 0) -> int:
    return DEFAULT.encode(ms=ms, shard=shard, sequence=sequence)


def name_in(shard: int) -> str:
    return next(f"n{n}" for n in range(1000) if shard_for_key(f"n{n}", 16) == shard)


def shards_named(where: Any, parameters: Any, finder: Finder) -> Named:
    return Read(select(User.id).where(true() if where is None else where), parameters, finder).named()


A = aliased(Photo)
SUB = (
    select(Photo.user_id.label("owner"), func.max(Photo.id).label("last")).group_by(Photo.user_id).subquery()
)
ALL = None

CASES: list[tuple[Any, set[int] | None]] = [
    (User.id == id_in(3), {3}),
    (id_in(3) == User.id, {3}),
    (User.id.in_([id_in(3), id_in(5), id_in(3, 7)]), {3, 5}),
    (User.id.in_([]), set()),
    (User.name == name_in(4), {4}),
    (User.name.in_([name_in(4), name_in(6)]), {4, 6}),
    (Photo.user_id == id_in(2), {2}),
    (Photo.user == User(id=id_in(2)), {2}),
    (Detail.photo_id == id_in(2), {2}),
    (Detail.owner == name_in(9), {9}),
    (A.user_id == id_in(2), {2}),
    (SUB.c.owner == id_in(2), {2}),
    (and_(User.id == id_in(3), User.age > 5), {3}),
    (and_(User.id == id_in(3), User.name == name_in(3)), {3}),
    (and_(User.id == id_in(3), User.name == name_in(4)), set()),
    (and_(User.id.in_([id_in(3), id_in(4)]), Photo.user_id.in_([id_in(4), id_in(5)])), {4}),
    (or_(User.id == id_in(3), User.name == name_in(4)), {3, 4}),
    (or_(User.id == id_in(3), User.age == 4), ALL),
    (and_(or_(User.id == id_in(3), User.id == id_in(4)), User.id == id_in(4)), {4}),
    (and_(User.id == id_in(3), or_(User.age == 1, User.age == 2)), {3}),
    (and_(true(), User.id == id_in(3)), {3}),
    (false(), set()),
    (or_(User.id == id_in(3), false()), {3}),
    (not_(User.id == id_in(3)), ALL),
    (not_(and_(User.id == id_in(3), User.age == 1)), ALL),
    (User.id != id_in(3), ALL),
    (User.id.not_in([id_in(3)]), ALL),
    (User.id + 1 == id_in(3), ALL),
    (func.lower(User.name) == name_in(4), ALL),
    (User.name.like(name_in(4)), ALL),
    (User.age == id_in(3), ALL),
    (User.country == "NO", ALL),
    (User.friend_id == id_in(3), ALL),
    (User.id == Photo.user_id, ALL),
    (User.id == None, ALL),  # noqa: E711 -- SQLAlchemy's way to say IS NULL
    (User.id.in_(select(Photo.user_id)), ALL),
    (SUB.c.last == id_in(2), ALL),
    (Country.code == "NO", ALL),
    (User.id.between(id_in(3), id_in(3)), ALL),
    (User.id >= id_in(3), ALL),
]


@pytest.mark.parametrize(
    ("criterion", "shards"), CASES, ids=lambda it: None if isinstance(it, set) else str(it)[:60]
)
def test_shards_of_criteria(criterion: Any, shards: set[int] | None) -> None:
    found = shards_named(select(User).where(criterion).whereclause, None, Finder())
    assert found.shards == shards


def test_criteria_of_several_calls_and_of_updates() -> None:
    query = select(User).join(Photo).where(User.id == id_in(3)).where(Photo.user_id == id_in(4))
    assert shards_named(query.whereclause, None, Finder()).shards == set()
    change = update(User).where(User.id.in_([id_in(3), id_in(4)])).values(age=1)
    assert shards_named(change.whereclause, None, Finder()).shards == {3, 4}
    assert shards_named(None, None, Finder()).shards is None


def test_parameters() -> None:
    query = select(User).where(User.id.in_(bindparam("ids", expanding=True)), User.name == bindparam("name"))
    where = query.whereclause
    given = {"ids": [id_in(3), id_in(4)], "name": name_in(4)}
    assert shards_named(where, given, Finder()).shards == {4}
    # Whoever leaves a parameter out gets the database's word, not a guess.
    assert shards_named(where, {"name": name_in(4)}, Finder()).shards == {4}
    assert shards_named(where, None, Finder()).shards is None


def test_each_shard_gets_its_own_values() -> None:
    three, four, other = id_in(3), id_in(4), id_in(3, 7)
    query = select(User).where(User.id.in_([three, four, other]), User.age.in_([1, 2]))
    named = shards_named(query.whereclause, None, Finder())
    for shard, ids in ((3, [three, other]), (4, [four]), (5, [])):
        mine, _ = narrowed(query, None, named, shard)
        assert sorted(mine.compile().params.values(), key=str) == sorted([ids, [1, 2]], key=str)
    assert [three, four, other] in query.compile().params.values()
    query = select(User).where(User.id.in_(bindparam("ids", expanding=True)))
    named = shards_named(query.whereclause, {"ids": [three, four]}, Finder())
    same, given = narrowed(query, {"ids": [three, four], "x": 1}, named, 4)
    assert same is query
    assert given == {"ids": [four], "x": 1}


@pytest.mark.parametrize(
    ("criterion", "error", "said"),
    [
        (User.id == id_in(99), BadArgument, "users.id: shard 99 does not exist"),
        (Photo.user_id.in_([id_in(1), id_in(99)]), BadArgument, "photos.user_id: shard 99 does not exist"),
        (User.id == -5, BadArgument, "negative"),
        (User.id == 1.5, BadArgument, "users.id"),
        (User.name == 1.5, UnsupportedKey, "users.name"),
    ],
)
def test_values_that_name_no_shard(criterion: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        shards_named(criterion, None, Finder())


def test_what_models_say() -> None:
    assert facts_of(User.__mapper__).key == "name"
    assert not facts_of(Country.__mapper__).located
    assert facts_of(Detail.__mapper__).located
    assert facts_of(Photo.__mapper__).relatives == ("user",)

    class Twice(Base):
        __tablename__ = "twice"
        id: Mapped[int] = primary_key()
        one: Mapped[str] = sharding_key()
        two: Mapped[str] = sharding_key()

    with pytest.raises(BadArgument, match="Twice has two sharding keys, one and two"):
        facts_of(Twice.__mapper__)


def test_statements_that_are_alike_are_read_by_their_own_values() -> None:
    for shard in (3, 4, 5, 3):
        where = and_(User.id == id_in(shard), User.name.in_([name_in(shard), name_in(shard + 1)]))
        for statement in (select(User).where(where), update(User).where(where).values(age=shard)):
            named = Read(statement, None, Finder()).named()
            assert named.shards == {shard}
            assert list(named.lists.values()) == [
                {shard: [0], shard + 1: [1]},
            ]
    known = Read(select(User.id).where(User.id == id_in(3)), None, Finder()).reading
    assert Read(select(User.id).where(User.id == id_in(9)), None, Finder()).reading is known
    assert Read(select(User.id).where(User.id >= id_in(3)), None, Finder()).reading is not known


def test_what_a_statement_writes_is_read_by_its_own_values() -> None:
    for shard in (3, 4):
        inserted = Read(insert(Photo).values(user_id=id_in(shard)), None, Finder())
        assert inserted.rows(None)[0] == {"user_id": id_in(shard)}
        changed = Read(update(Photo).values(user_id=id_in(shard)), None, Finder())
        assert changed.rows(None)[0] == {"user_id": id_in(shard)}
        assert changed.named().shards is None
