"""Random statements, over shards and in one database with the same rows: the same answer, or refused.

``SHARDIDS_FUZZ_STATEMENTS`` says how many; some hundred by default, with the fault tests a minute of them,
and 50,000 in the long form. ``SHARDIDS_FUZZ_SEED`` says which: the same number draws the same statements.
"""

from __future__ import annotations

import math
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from sqlalchemy import (
    Date,
    Double,
    Engine,
    ForeignKey,
    Integer,
    Numeric,
    TextClause,
    UpdateBase,
    and_,
    bindparam,
    case,
    cast,
    collate,
    delete,
    exists,
    func,
    insert,
    literal_column,
    not_,
    or_,
    select,
    text,
    union_all,
    update,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    aliased,
    column_property,
    joinedload,
    lazyload,
    mapped_column,
    relationship,
    selectinload,
    subqueryload,
)

from shardids import Cluster, primary_key, sharding_key
from shardids.client.routing.criteria import Read
from shardids.errors import BadArgument
from shardids.pg.connections import open_engine
from shardids.tables import views
from tests.conftest import BlankDatabases, found_cluster
from tests.support.clusters import catalog_at
from tests.support.column_types import Negated, Reversed

_USUAL = {"short": "1000", "long": "50000"}.get(os.environ.get("SHARDIDS_FAULTS", ""), "200")
COUNT = int(os.environ.get("SHARDIDS_FUZZ_STATEMENTS", _USUAL))
SEED = int(os.environ.get("SHARDIDS_FUZZ_SEED", "20261122"))
PART = 1000
"""Statements a seed: what Hypothesis remembers of them stays small."""


class Base(DeclarativeBase):
    pass


class Country(Base):
    __tablename__ = "countries"

    code: Mapped[str] = mapped_column(primary_key=True)
    size: Mapped[int]


class User(Base):
    __tablename__ = "users"

    id: Mapped[int] = primary_key()
    name: Mapped[str] = sharding_key(unique=True)
    age: Mapped[int | None]
    worth: Mapped[Decimal | None] = mapped_column(Numeric)
    score: Mapped[float | None] = mapped_column(Double)
    born: Mapped[date | None] = mapped_column(Date, deferred=True)
    nick: Mapped[str | None] = mapped_column(Reversed(collation="C"))
    debt: Mapped[int | None] = mapped_column(Negated)
    country: Mapped[str | None] = mapped_column(ForeignKey("countries.code"))
    inviter: Mapped[int | None] = mapped_column(ForeignKey("users.id"))
    photos: Mapped[list[Photo]] = relationship(back_populates="user", order_by="Photo.id")
    invited_by: Mapped[User | None] = relationship(remote_side="User.id")


class Photo(Base):
    __tablename__ = "photos"

    id: Mapped[int] = primary_key()
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    likes: Mapped[int | None]
    title: Mapped[str | None]
    user: Mapped[User] = relationship(back_populates="photos")


# Computed over users of all shards, also when it is loaded later, and alone.
_ALIKE = aliased(User)
User.alike = column_property(  # type: ignore[attr-defined]  # a column more
    select(func.count(_ALIKE.id)).where(_ALIKE.age == User.age).correlate_except(_ALIKE).scalar_subquery(),
    deferred=True,
)


@dataclass(frozen=True)
class Pair:
    """A cluster, and one database with the same rows."""

    cluster: Cluster
    plain: Engine
    ids: list[int]


@pytest.fixture(scope="module")
def pair(databases: BlankDatabases) -> Iterator[Pair]:
    """Four shards on two nodes."""
    urls = [databases.take() for _ in range(3)]
    found_cluster(urls[0], {"a": urls[0], "b": urls[1]}, 4)
    plain = open_engine(urls[2], what="the plain database")
    draw = random.Random(7)
    with Cluster.connect(urls[0], listen=False) as cluster:
        countries = [{"code": code, "size": n} for n, code in enumerate(("DK", "NO", "SE"))]
        for shard in range(4):
            with cluster.at(shard=shard).engine.begin() as connection:
                Base.metadata.create_all(connection, checkfirst=False)
                connection.execute(insert(Country), countries)
        with cluster.sharded_session() as session, session.begin():
            users = [_user(draw, n) for n in range(30)]
            session.add_all(users)
            session.flush()
            for user in users:
                same = [one.id for one in users if cluster.shard_of(one.id) == cluster.shard_of(user.id)]
                user.inviter = draw.choice([None, draw.choice(same)])
                session.add_all(_photo(draw, user.id) for _ in range(draw.randrange(4)))
            ids = [user.id for user in users]
        _copy(cluster, plain, countries)
        with catalog_at(urls[0]) as catalog:
            views.create_query_node(catalog, node="b", reference=["countries"], store_password=True)
        yield Pair(cluster, plain, ids)
    plain.dispose()
    for url in urls:
        databases.give_back(url)


def _user(draw: random.Random, n: int) -> User:
    return User(
        name=f"user {n}",
        age=draw.choice([None, 1, 1, 2, 3, 50]),
        worth=draw.choice([None, Decimal("0.1"), Decimal("1e30"), Decimal("-7.25"), Decimal("NaN")]),
        score=draw.choice([None, 0.5, -2.0, math.inf, -math.inf, math.nan]),
        born=cast(draw.choice([None, "2020-01-01", "1999-12-31", "infinity", "-infinity"]), Date),
        nick=draw.choice([None, "az", "by", "cx", "a"]),
        debt=draw.choice([None, 1, 2, 5]),
        country=draw.choice([None, "NO", "SE"]),
    )


def _photo(draw: random.Random, user: int) -> Photo:
    return Photo(
        user_id=user, likes=draw.choice([None, 0, 1, 2, 3]), title=draw.choice([None, "a", "B", "ab"])
    )


def _copy(cluster: Cluster, plain: Engine, countries: list[dict[str, Any]]) -> None:
    tables = [table for table in Base.metadata.sorted_tables if table.name != "countries"]
    with plain.begin() as there:
        there.execute(text("create sequence ids"))
        there.execute(
            text("create function next_id() returns bigint language sql as 'select nextval(''ids'')'")
        )
        Base.metadata.create_all(there, checkfirst=False)
        there.execute(insert(Country), countries)
        there.execute(text("set session_replication_role = replica"))
        for table in tables:
            for shard in range(4):
                with cluster.at(shard=shard).connection() as here:
                    # As text: Python has no date that is infinity.
                    found = here.connection.cursor().execute(f"select * from shard_{shard:04}.{table.name}")
                    names = [column[0] for column in found.description]
                    columns = ", ".join(f"{name}::text" for name in names)
                    rows = here.exec_driver_sql(f"select {columns} from shard_{shard:04}.{table.name}").all()
                types = ", ".join(
                    f"%s::{table.c[name].type.compile(there.dialect).split(' COLLATE')[0]}" for name in names
                )
                for row in rows:
                    there.exec_driver_sql(
                        f"insert into {table.name} ({', '.join(names)}) values ({types})", tuple(row)
                    )


# What statements are made of: right and wrong shapes alike. Constants are few, so that things are equal.

ENTITIES = {"u": User, "v": aliased(User), "p": Photo, "q": aliased(Photo), "c": Country}
NUMBERS = {
    "u": ("age", "id", "inviter", "worth", "score"),
    "v": ("age", "id", "inviter"),
    "p": ("likes", "id", "user_id"),
    "q": ("likes", "id", "user_id"),
    "c": ("size",),
}


@dataclass
class Maker:
    """Draws the parts of one statement."""

    data: Any
    ids: list[int]

    def pick(self, *options: Any) -> Any:
        return self.data.draw(st.sampled_from(options))

    def chance(self, percent: int) -> bool:
        return self.data.draw(st.integers(0, 99)) < percent

    def number(self, names: list[str]) -> Any:
        name = self.pick(*names)
        return getattr(ENTITIES[name], self.pick(*NUMBERS[name]))

    def scalar(self, names: list[str], depth: int = 1) -> Any:  # noqa: PLR0911 -- one a kind
        column = self.number(names)
        kind = self.pick("column", "column", "sum", "function", "case", "subquery", "literal", "cast")
        if depth == 0 or kind == "column":
            return column
        if kind == "sum":
            return column + self.scalar(names, depth - 1)
        if kind == "function":
            function = self.pick(func.abs, func.coalesce, func.greatest, func.sign)
            return function(column, 1) if function in (func.coalesce, func.greatest) else function(column)
        if kind == "case":
            return case((self.condition(names, 0), column), else_=3)
        if kind == "subquery":
            return self.subquery(names).scalar_subquery()
        if kind == "literal":
            return literal_column(self.pick("1", "max(age)", "count(*)"), Integer)
        return cast(column, Numeric)

    def subquery(self, names: list[str]) -> Any:
        inner = self.pick(*[name for name in ENTITIES if name not in names] or ["q"])
        column = self.number([inner])
        what = self.pick(func.count, func.max, func.sum, func.min)(column)
        statement = select(what).select_from(ENTITIES[inner])
        for _ in range(self.data.draw(st.integers(0, 2))):
            statement = statement.where(self.comparison([inner], names))
        return statement

    def comparison(self, some: list[str], others: list[str]) -> Any:
        one = self.number(some)
        other = self.pick(1, 2, self.number(others), self.number(others))
        return self.pick(one == other, one == other, one != other, one > other)

    def link(self, one: str, other: str) -> Any:
        pairs = {
            ("u", "p"): User.id == Photo.user_id,
            ("u", "c"): User.country == Country.code,
            ("p", "q"): Photo.user_id == ENTITIES["q"].user_id,  # type: ignore[attr-defined]  # an alias of Photo
            ("u", "v"): User.inviter == ENTITIES["v"].id,  # type: ignore[attr-defined]  # an alias of User
            ("v", "p"): ENTITIES["v"].id == Photo.user_id,  # type: ignore[attr-defined]  # an alias of User
        }
        return pairs.get((one, other), pairs.get((other, one)))

    def condition(self, names: list[str], depth: int = 2) -> Any:  # noqa: PLR0911 -- one a kind
        kind = self.pick("compare", "compare", "and", "or", "not", "null", "in", "exists", "text", "list")
        if depth == 0 or kind == "compare":
            return self.comparison(names, names)
        if kind in ("and", "or"):
            join = and_ if kind == "and" else or_
            return join(self.condition(names, depth - 1), self.condition(names, depth - 1))
        if kind == "not":
            inner = self.condition(names, depth - 1)
            return inner if isinstance(inner, TextClause) else not_(inner)
        if kind == "null":
            return self.number(names).is_(None)
        if kind == "list":
            return self.number(names).in_([1, 2, 50])
        free = [name for name in ENTITIES if name not in names] or ["q"]
        inner = self.pick(*free)
        if kind == "in":
            statement = select(self.number([inner]))
            if self.chance(30):
                statement = statement.where(self.comparison([inner], names))
            if self.chance(15):
                entity: Any = ENTITIES[inner]
                # Without ties, of which any could be among the first two.
                last = entity.code if inner == "c" else entity.id
                statement = statement.order_by(getattr(entity, NUMBERS[inner][0]), last).limit(2)
            return self.pick(self.number(names).in_(statement), self.number(names).not_in(statement))
        if kind == "exists":
            outer = self.pick(*names)
            link = self.link(inner, outer) if self.chance(70) else None
            bound = exists().where(self.comparison([inner], names)) if link is None else exists().where(link)
            return bound.where(self.comparison([inner], [inner]))
        return text("1 = 1") if self.chance(10) else self.comparison(names, names)

    def select(self) -> tuple[Any, bool]:
        """Returns a SELECT, and whether its order is part of its answer."""
        first = self.pick("u", "u", "p", "p", "v", "c")
        names = [first]
        source: Any = ENTITIES[first]
        statement = None
        while self.chance(45) and len(names) < 3:
            other = self.pick(*[name for name in ENTITIES if name not in names])
            link = next((one for name in names if (one := self.link(name, other)) is not None), None)
            on = link if link is not None and self.chance(75) else self.comparison(names, [other])
            if self.chance(20):
                on = and_(on, self.condition([*names, other], 0))
            from sqlalchemy.orm import join

            source = join(source, ENTITIES[other], on, isouter=self.chance(35), full=self.chance(5))
            names.append(other)
        statement = self.columns(names).select_from(source)
        if self.chance(60):
            statement = statement.where(self.condition(names))
        if first != "c" and self.chance(20):
            statement = statement.where(self.in_one_shard(first))
        if self.chance(10):
            statement = statement.distinct()
        if self.chance(10):
            inner = statement.subquery()
            statement = select(self.pick(func.count(), *inner.c)).select_from(inner)
            return statement, False
        if self.chance(5):
            return union_all(statement, statement), False
        ordered = self.chance(40)
        if ordered:
            keys = [getattr(ENTITIES[name], "id", None) for name in names]
            extra = [self.number(names)] if self.chance(50) else []
            if first == "u" and self.chance(50):
                extra.append(self.pick(collate(User.name, "C"), User.born, User.nick, User.debt, User.score))
            extra = [self.pick(one, one.desc(), one.asc().nulls_first()) for one in extra]
            statement = statement.order_by(*extra, *[key for key in keys if key is not None])
            ordered = "c" not in names
            if ordered and self.chance(50):
                statement = statement.limit(self.pick(0, 1, 3, 10))
            if ordered and self.chance(30):
                statement = statement.offset(self.pick(0, 1, 4))
        elif self.chance(10):
            # More than any join has: which rows a LIMIT keeps without an order is not determined.
            statement = statement.limit(1_000_000)
        return statement, ordered

    def placed(self) -> Any:
        """A SELECT from one that computes a window, mostly of one row of it."""
        name = self.pick("u", "p")
        rows = self.windowed(name)
        if self.chance(20):
            rows = select(rows.c.id, rows.c.owner, rows.c.w).where(rows.c.w > 0).subquery()
        statement = select(rows.c.w, rows.c.id)
        if self.chance(20):
            statement = statement.join(User, User.id == rows.c.owner).where(self.condition(["u"], 0))
        if self.chance(80):
            one = self.pick(*self.ids)
            statement = statement.where(self.pick(rows.c.owner == one, rows.c.owner.in_([one])))
        return statement

    def windowed(self, name: str) -> Any:
        """A subquery of rows' IDs, users and a window."""
        model: Any = ENTITIES[name]
        owner = model.id if name == "u" else model.user_id
        made = self.pick(func.row_number(), func.rank(), func.count())
        parts = {"partition_by": self.pick(owner, self.number([name]))} if self.chance(40) else {}
        window = made.over(order_by=(self.number([name]), model.id), **parts)
        inner = select(model.id.label("id"), owner.label("owner"), window.label("w"))
        if self.chance(30):
            inner = inner.where(self.condition([name], 0))
        if self.chance(30):
            inner = inner.where(self.in_one_shard(name))
        if self.chance(20):
            inner = inner.distinct()
        if self.chance(20):
            inner = inner.order_by(model.id).limit(2)
        return self.pick(inner.subquery, inner.cte)()

    def objects(self) -> Any:
        """Returns a SELECT of objects, with their relationships."""
        name = self.pick("u", "u", "p")
        model: Any = ENTITIES[name]
        load = self.pick(selectinload, joinedload, subqueryload, lazyload)
        paths = [User.photos, User.invited_by] if name == "u" else [Photo.user]
        options = [load(path) for path in paths if self.chance(70)]
        if name == "p" and self.chance(30):
            options = [load(Photo.user).options(self.pick(selectinload, joinedload)(User.invited_by))]
        if self.chance(40):
            return self.aliased(name, model, load)
        statement = select(model).options(*options).order_by(model.id)
        for _ in range(self.data.draw(st.integers(0, 2))):
            statement = statement.where(self.condition([name]))
        if self.chance(30):
            statement = statement.where(self.in_one_shard(name))
        if self.chance(30):
            statement = statement.limit(self.pick(1, 3, 10))
        return statement.offset(self.pick(1, 4)) if self.chance(20) else statement

    def aliased(self, name: str, model: Any, load: Any) -> Any:
        """A SELECT of an alias's objects and a column."""
        other: Any = aliased(model)
        path = other.photos if name == "u" else other.user
        statement = select(other, other.id + 1).options(load(path)).order_by(other.id)
        if self.chance(40):
            statement = statement.limit(self.pick(1, 5))
        return statement.offset(2) if self.chance(30) else statement

    def locked(self) -> tuple[Any, bool]:
        """A SELECT that locks the rows that it returns, and whether their order is part of the answer."""
        name = self.pick("u", "p")
        model: Any = ENTITIES[name]
        what = self.pick(
            select(model.id),
            select(self.number([name])),
            select(model.id, self.number([name])),
            select(model.id),
        )
        for _ in range(self.data.draw(st.integers(0, 2))):
            what = what.where(self.condition([name], self.pick(0, 0, 0, 1)))
        ordered = self.chance(70)
        if ordered:
            extra = [User.born, User.nick] if name == "u" and self.chance(30) else []
            what = what.order_by(*extra, model.id)
            if self.chance(60):
                what = what.limit(self.pick(0, 1, 3, 10))
        options = self.pick({}, {"skip_locked": True}, {"nowait": True}, {"read": True})
        return what.with_for_update(**options), ordered

    def reused(self) -> tuple[Any, dict[str, Any]]:
        """A statement that has one parameter in two places.

        SQLAlchemy itself writes the same for IN and NOT IN if the list is empty.
        """
        some = bindparam("some", expanding=True)
        names = [f"user {n}" for n in range(6)]
        values = {"some": self.data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=4))}
        where = self.pick(
            and_(User.name.in_(some), User.nick.not_in(some)),
            or_(User.name.in_(some), User.name.not_in(some)),
            and_(User.name.in_(some), not_(User.name.in_(some))),
            and_(User.name.in_(some), func.coalesce(User.nick, "x").not_in(some)),
        )
        made = self.pick(select(User.id), update(User).values(age=9), select(func.count(User.id)))
        return made.where(where), values

    def copied(self) -> Any:
        """An INSERT … SELECT of photos."""
        grouped = select(Photo.user_id, func.max(Photo.likes)).group_by(Photo.user_id).order_by(Photo.user_id)
        rows = self.pick(select(User.id, User.age).order_by(User.id), grouped)
        if self.chance(30):
            rows = rows.where(self.in_one_shard("u" if rows is not grouped else "p"))
        if self.chance(40):
            rows = self.pick(rows.limit(2), rows.offset(2), rows.fetch(2))
        return insert(Photo).from_select(["user_id", "likes"], rows)

    def assigned(self) -> tuple[int, Any]:
        """A user, and a value for it, mostly a SELECT's."""
        inner = self.pick("v", "q", "c")
        found = select(self.pick(func.count, func.max, func.min)(self.number([inner])))
        value = found.where(self.comparison([inner], [inner])).scalar_subquery()
        id_ = self.pick(*self.ids)
        own = select(func.count(Photo.id)).where(Photo.user_id == id_).scalar_subquery()
        return id_, self.pick(value, func.coalesce(value, 1) % 100, own, User.age + 1)

    def failing(self) -> Any:
        """A change that fails in some shard, mostly."""
        return update(User).values(age=100 / (User.age - self.pick(1, 2, 3, 50)))

    def in_one_shard(self, name: str) -> Any:
        """A condition that names shards: mostly one."""
        column = {"u": User.id, "p": Photo.user_id, "v": getattr(ENTITIES["v"], "id")}[name]  # noqa: B009  -- an alias
        if self.chance(70):
            return column == self.pick(*self.ids)
        return column.in_([self.pick(*self.ids), self.pick(*self.ids)])

    def columns(self, names: list[str]) -> Any:
        kind = self.pick("plain", "plain", "plain", "aggregate", "aggregate", "grouped", "window")
        if kind == "aggregate":
            made = [self.aggregate(names) for _ in range(self.data.draw(st.integers(1, 3)))]
            return select(*[one.label(f"a{n}") for n, one in enumerate(made)])
        if kind == "grouped":
            key, made = self.number(names), self.aggregate(names)
            if self.chance(15):
                made = self.pick(func.sum(func.count()), func.row_number()).over(order_by=key)
            return select(key.label("k"), made.label("a")).group_by(key)
        if kind == "window":
            over = {"partition_by": self.number(names)} if self.chance(80) else {}
            return select(func.sum(self.number(names)).over(**over).label("w"))
        made = [self.scalar(names) for _ in range(self.data.draw(st.integers(1, 3)))]
        return select(*[one.label(f"c{n}") for n, one in enumerate(made)])

    def aggregate(self, names: list[str]) -> Any:
        column = self.number(names)
        made = self.pick(
            func.count(),
            func.count(column),
            func.sum(column),
            func.min(column),
            func.max(column),
            func.avg(column),
            func.count(column.distinct()),
            func.coalesce(func.sum(column), 0),
            func.coalesce(func.max(column), 0),
            func.bit_and(cast(column, Integer)),
        )
        filtered = self.chance(15) and made.name != "coalesce"
        return made.filter(self.condition(names, 0)) if filtered else made

    def change(self) -> Any:
        name = self.pick("u", "p")
        model: Any = ENTITIES[name]
        if self.chance(8):
            rows = self.windowed(name)
            found = model.id.in_(select(rows.c.id).where(rows.c.w > self.pick(1, 2, 10)))
            changed = (delete(Photo) if name == "p" else update(User).values(age=7)).where(found)
            return changed.where(self.in_one_shard(name)) if self.chance(80) else changed
        if self.chance(40):
            return delete(Photo).where(self.condition(["p"]))
        target = "age" if name == "u" else "likes"
        value = self.pick(7, getattr(model, target) + 1, self.scalar([name]))
        return update(model).where(self.condition([name])).values({target: value})


def outcome(session: Session, statement: Any, ordered: bool, values: Any = None) -> Any:
    if isinstance(statement, UpdateBase):
        return session.execute(statement, values).rowcount  # type: ignore[attr-defined]  # of a CursorResult
    return answer(session, statement, ordered, values)


def answer(session: Session, statement: Any, ordered: bool, values: Any = None) -> Any:
    rows = [tuple(map(_comparable, row)) for row in session.execute(statement, values)]
    return rows if ordered else Counter(rows)


def _comparable(value: Any) -> Any:
    """NaN is not equal to itself, and a sum of floats depends on the order of its terms."""
    if isinstance(value, User | Photo):
        return value.id
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else float(f"{value:.10g}")
    return "NaN" if isinstance(value, Decimal) and value.is_nan() else value


def loaded(session: Session, statement: Any, _ordered: bool, _values: Any) -> Any:
    """The objects that a SELECT finds, with what their relationships hold."""
    found: list[Any] = []
    for one, *rest in session.execute(statement).unique():
        if isinstance(one, User):
            inviter = None if one.invited_by is None else one.invited_by.id
            photos = [(photo.id, photo.title) for photo in one.photos]
            alike = None if found else one.alike  # type: ignore[attr-defined]  # a column more
            found.append((one.id, one.age, one.nick, inviter, photos, alike, *rest))
        else:
            found.append((one.id, one.likes, one.user.id, one.user.name, *rest))
    return found


def copied(session: Session, statement: Any, ordered: bool, copy: Any) -> Any:
    """The rows that are there after an INSERT … SELECT."""
    session.execute(copy)
    return answer(session, statement, ordered)


def flushed(session: Session, statement: Any, ordered: bool, given: Any) -> Any:
    """The rows that are there after a flush of a value."""
    session.get_one(User, given[0]).age = given[1]
    session.flush()
    return answer(session, statement, ordered)


OUTCOMES: Counter[str] = Counter()
ROWS = [
    select(*(column for column in model.__table__.columns if column.key != "born")) for model in (User, Photo)
]


def compare(pair: Pair, data: Any) -> None:  # noqa: PLR0912, PLR0915 -- one kind after another
    """Draws one statement, and notes how it was answered."""
    make = Maker(data, pair.ids)
    what = make.pick(
        *["select"] * 7,
        *["change"] * 3,
        *["objects"] * 3,
        *["locked"] * 2,
        "placed",
        "reused",
        "failing",
        *WRITES,
    )
    ordered, answer_of, values = False, outcome, None
    if what in ("select", "written"):
        statement, ordered = make.select()
    elif what == "change":
        statement = make.change()
    elif what == "placed":
        statement = make.placed()
    elif what == "locked":
        statement, ordered = make.locked()
    elif what == "reused":
        statement, values = make.reused()
    elif what == "failing":
        statement = make.failing()
    elif what == "copied":
        statement, answer_of, values = select(Photo.user_id, Photo.likes), copied, make.copied()
    elif what == "flushed":
        statement, answer_of, values = select(User.id, User.age), flushed, make.assigned()
    else:
        statement, answer_of = make.objects(), loaded
    written = make.change() if what == "written" else None
    with pair.cluster.sharded_session() as sharded, Session(pair.plain) as plain:
        if written is not None:
            try:
                assert outcome(plain, written, False) == outcome(sharded, written, False)
            except (BadArgument, DBAPIError):
                OUTCOMES["failed"] += 1
                return
        expected: Any = None
        failed = False
        try:
            expected = answer_of(plain, statement, ordered, values)
        except (DBAPIError, OverflowError):
            failed = True
        try:
            found = answer_of(sharded, statement, ordered, values)
        except BadArgument as error:
            _note_refused(what, failed, error)
            return
        except (DBAPIError, OverflowError):
            assert failed, statement
            OUTCOMES["failed"] += 1
            if isinstance(statement, UpdateBase):
                _assert_nothing_is_left(pair, sharded, plain)
            return
        if failed:
            # An ORDER BY that PostgreSQL refuses beside an aggregate is left out over several shards.
            OUTCOMES["failed"] += 1
            return
        assert found == expected, str(statement)
        if isinstance(statement, UpdateBase):
            for rows in ROWS:
                assert answer(sharded, rows, False) == answer(plain, rows, False), str(statement)
        named = Read(statement, values, pair.cluster).named().shards
        OUTCOMES["over shards" if named is None or len(named) > 1 else "in one shard"] += 1


def _note_refused(what: str, failed: bool, error: BadArgument) -> None:
    if failed:
        OUTCOMES["failed"] += 1
    elif what in WRITES:
        OUTCOMES["refused writes, or after one"] += 1
    else:
        OUTCOMES["refused"] += 1
        REASONS[error.message.split("; and ")[-1][:80]] += 1


WRITES = "written", "copied", "flushed"
REASONS: Counter[str] = Counter()


def _assert_nothing_is_left(pair: Pair, sharded: Session, plain: Session) -> None:
    """What failed changes nothing, although it is committed."""
    sharded.commit()
    plain.commit()
    with pair.cluster.sharded_session() as again, Session(pair.plain) as there:
        assert answer(again, ROWS[0], False) == answer(there, ROWS[0], False)


@pytest.mark.long
@pytest.mark.parametrize("part", range(-(-COUNT // PART)))
@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning")
def test_statements_are_answered_as_by_one_database_or_refused(pair: Pair, part: int) -> None:
    @seed(SEED + part)
    @settings(
        max_examples=min(PART, COUNT - part * PART),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
        print_blob=True,
    )
    @given(data=st.data())
    def compare_some(data: Any) -> None:
        compare(pair, data)

    compare_some()


@pytest.mark.long
def test_enough_statements_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    """None was wrong, or the test above had failed."""
    total = OUTCOMES.total()
    with capsys.disabled():
        said = ", ".join(f"{name} {count / total:.1%}" for name, count in OUTCOMES.most_common())
        sys.stdout.write(f"\n{total:,} statements: {said}\n")
        for reason, count in REASONS.most_common(12):
            sys.stdout.write(f"  {count:5} {reason}\n")
    assert OUTCOMES["over shards"] > total * 0.4, OUTCOMES
    assert OUTCOMES["in one shard"] > total * 0.05, OUTCOMES
    assert OUTCOMES["refused"] < max(total * 0.02, 8), OUTCOMES
