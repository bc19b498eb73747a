"""Statements over all shards that once came back wrong: each is right now, or refused."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import (
    ForeignKey,
    Integer,
    and_,
    column,
    delete,
    distinct,
    exists,
    false,
    func,
    insert,
    literal,
    literal_column,
    not_,
    or_,
    select,
    text,
    true,
    union,
    union_all,
    update,
    values,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import URL
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, aliased, mapped_column, relationship

from shardids import Cluster, primary_key, sharding_key
from shardids.errors import BadArgument, CannotCombine
from tests.conftest import BlankDatabases, found_cluster


class Base(DeclarativeBase):
    pass


class Mood(enum.Enum):
    good = "good"
    bad = "bad"


class Country(Base):
    """Nothing says in which shard its rows live: each shard has them all."""

    __tablename__ = "countries"

    code: Mapped[str] = mapped_column(primary_key=True)
    size: Mapped[int]


class User(Base):
    __tablename__ = "users"

    id: Mapped[int] = primary_key()
    name: Mapped[str] = sharding_key(unique=True)
    age: Mapped[int | None]
    balance: Mapped[int] = mapped_column(default=0)
    mood: Mapped[Mood] = mapped_column(default=Mood.good)
    country_code: Mapped[str | None] = mapped_column(ForeignKey("countries.code"))
    inviter_id: Mapped[int | None] = mapped_column(ForeignKey("users.id"))
    photos: Mapped[list[Photo]] = relationship(back_populates="user")


class Photo(Base):
    __tablename__ = "photos"

    id: Mapped[int] = primary_key()
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    likes: Mapped[int]
    user: Mapped[User] = relationship(back_populates="photos")


@pytest.fixture(scope="module")
def catalog(databases: BlankDatabases) -> Iterator[URL]:
    """The catalog of 4 shards on two nodes, with 20 users, each with one to three photos."""
    urls = databases.take(), databases.take()
    found_cluster(urls[0], {"a": urls[0], "b": urls[1]}, 4)
    with Cluster.connect(urls[0], listen=False) as cluster:
        for shard in range(4):
            with cluster.at(shard=shard).engine.begin() as connection:
                Base.metadata.create_all(connection, checkfirst=False)
                connection.execute(insert(Country), [{"code": "NO", "size": 5}, {"code": "SE", "size": 10}])
    yield urls[0]
    for url in urls:
        databases.give_back(url)


@pytest.fixture
def session(catalog: URL) -> Iterator[Session]:
    """A session over the shards, whose rows are not committed."""
    with Cluster.connect(catalog, listen=False) as cluster, cluster.sharded_session() as session:
        users = [
            User(
                name=f"user {n}",
                age=n % 3 or None,
                balance=100,
                mood=list(Mood)[n % 2],
                country_code="NO" if n % 2 else None,
            )
            for n in range(20)
        ]
        for n, user in enumerate(users):
            user.photos = [Photo(likes=n + m) for m in range(1 + n % 3)]
        session.add_all(users)
        session.flush()
        yield session


U, P = aliased(User), aliased(Photo)
PER_USER = select(func.count(P.id)).where(P.user_id == User.id).scalar_subquery()


def test_a_relative_update_changes_objects_as_it_changes_rows(session: Session) -> None:
    users = session.scalars(select(User)).all()
    session.execute(update(User).values(balance=User.balance + 10))
    assert [user.balance for user in users] == [110] * 20
    session.execute(update(User).where(User.age == 1).values(balance=User.balance * 2))
    assert sum(user.balance for user in users) == session.scalar(select(func.sum(User.balance)))
    users[0].balance += 1
    session.flush()
    assert session.scalar(select(func.sum(User.balance))) == sum(user.balance for user in users)
    done = session.execute(delete(Photo).where(Photo.likes > 5))
    session.expire_all()
    assert done.rowcount == 39 - session.scalar(select(func.count(Photo.id)))  # type: ignore[operator]  # a count


def photos(user: int) -> int:
    return 1 + user % 3


LIKES = sorted(n + m for n in range(20) for m in range(photos(n)))

RIGHT: list[tuple[str, Callable[[Session], Any], Any]] = [
    ("count with a limit", lambda s: s.scalars(select(func.count(User.id)).limit(1)).all(), [20]),
    ("count with limit 0", lambda s: s.scalars(select(func.count(User.id)).limit(0)).all(), []),
    ("count with an offset", lambda s: s.scalars(select(func.count(User.id)).offset(1)).all(), []),
    ("first of a sum", lambda s: s.query(func.sum(User.balance)).first()[0], 2000),
    ("coalesce of a sum", lambda s: s.scalar(select(func.coalesce(func.sum(Photo.likes), 0))), sum(LIKES)),
    (
        "coalesce of no rows",
        lambda s: s.scalar(select(func.coalesce(func.sum(Photo.likes), 0)).where(Photo.likes > 99)),
        0,
    ),
    ("count distinct IDs", lambda s: s.scalar(select(func.count(distinct(Photo.user_id)))), 20),
    ("a constant", lambda s: s.scalar(select(1)), 1),
    ("no table", lambda s: s.scalar(select(func.lower("A"))), "a"),
    ("count of no table", lambda s: s.scalar(select(func.count())), 1),
    (
        "aggregates of no table",
        lambda s: tuple(s.execute(select(func.sum(literal(2)), func.count(literal(1)))).one()),
        (2, 1),
    ),
    (
        "sum of no table",
        lambda s: s.scalars(select(func.coalesce(func.sum(literal(2)), 0)).limit(1)).all(),
        [2],
    ),
    ("count of no row", lambda s: s.scalar(select(func.count()).where(false())), 0),
    (
        "enums",
        lambda s: sorted(mood.value for mood in s.scalars(select(User.mood))),
        ["bad"] * 10 + ["good"] * 10,
    ),
    ("enums in objects", lambda s: {user.mood for user in s.scalars(select(User))}, set(Mood)),
    ("bound subquery", lambda s: sum(s.scalars(select(PER_USER).select_from(User))), len(LIKES)),
    (
        "bound subquery with a limit",
        lambda s: sorted(
            s.scalars(
                select(
                    select(P.likes).where(P.user_id == User.id).order_by(P.likes).limit(1).scalar_subquery()
                ).select_from(User)
            )
        ),
        list(range(20)),
    ),
    (
        "grouped by a key",
        lambda s: sorted(s.scalars(select(func.avg(Photo.likes)).group_by(Photo.user_id)))[0],
        0,
    ),
    (
        "groups of a key, with HAVING, in order",
        lambda s: s.scalars(
            select(func.count())
            .select_from(Photo)
            .group_by(Photo.user_id)
            .having(func.max(Photo.likes) > 18)
            .order_by(func.count().desc(), Photo.user_id)
        ).all(),
        sorted((photos(n) for n in range(20) if n + photos(n) - 1 > 18), reverse=True),
    ),
    (
        "distinct with an ID",
        lambda s: len(s.execute(select(Photo.user_id, Photo.likes > 5).distinct()).all()),
        len({(n, n + m > 5) for n in range(20) for m in range(photos(n))}),
    ),
    (
        "IN with IDs",
        lambda s: len(
            s.scalars(select(User).where(User.id.in_(select(Photo.user_id).where(Photo.likes > 9)))).all()
        ),
        len({n for n in range(20) for m in range(photos(n)) if n + m > 9}),
    ),
    (
        "NOT IN with IDs that are never NULL",
        lambda s: len(
            s.scalars(select(User).where(User.id.not_in(select(Photo.user_id).where(Photo.likes > 9)))).all()
        ),
        20 - len({n for n in range(20) for m in range(photos(n)) if n + m > 9}),
    ),
    (
        "outer join along an ID",
        lambda s: len(s.execute(select(User, P).outerjoin(P, and_(P.user_id == User.id, P.likes > 9))).all()),
        sum(max(1, sum(n + m > 9 for m in range(photos(n)))) for n in range(20)),
    ),
    (
        "full join along an ID",
        lambda s: len(s.execute(select(User.id, P.id).join(P, P.user_id == User.id, full=True)).all()),
        len(LIKES),
    ),
    (
        "a table that all shards have, along a foreign key",
        lambda s: s.scalar(select(func.sum(Country.size)).select_from(User).join(Country)),
        50,
    ),
    (
        "UPDATE bound to other tables",
        lambda s: (
            s.execute(
                update(User).where(User.id == Photo.user_id, Photo.likes == 3).values(age=Photo.likes)
            ).rowcount
        ),
        len([n for n in range(20) for m in range(photos(n)) if n + m == 3]),
    ),
]


@pytest.mark.parametrize(("ask", "expected"), [pytest.param(a, e, id=i) for i, a, e in RIGHT])
def test_right(session: Session, ask: Callable[[Session], Any], expected: Any) -> None:
    assert ask(session) == expected


TOP = select(P.id).order_by(P.likes.desc()).limit(3)
REFUSED: list[tuple[str, Any]] = [
    ("delete with a limit", delete(Photo).where(Photo.id.in_(TOP))),
    ("update with a limit", update(Photo).where(Photo.id.in_(TOP)).values(likes=0)),
    (
        "delete with a window",
        delete(Photo).where(
            Photo.id.in_(
                select(select(P.id, func.row_number().over(order_by=P.likes).label("n")).subquery().c.id)
            )
        ),
    ),
    (
        "delete with HAVING",
        delete(Photo).where(Photo.likes.in_(select(P.likes).group_by(P.likes).having(func.count() > 1))),
    ),
    ("delete with a union", delete(Photo).where(Photo.id.in_(union(select(P.id), select(User.id))))),
    ("delete by an average", delete(Photo).where(Photo.likes > select(func.avg(P.likes)).scalar_subquery())),
    ("delete of a copied table", delete(Country)),
    ("count of groups", select(func.count()).select_from(select(User.age).group_by(User.age).subquery())),
    (
        "count of a union",
        select(func.count()).select_from(union(select(User.age), select(Photo.likes)).subquery()),
    ),
    ("union", union_all(select(User.id), select(Photo.id))),
    ("window by an ID", select(func.row_number().over(partition_by=Photo.user_id))),
    (
        "an aggregate of the rows around",
        select(
            select(func.count(User.id)).where(P.user_id == User.id).correlate(User).scalar_subquery()
        ).select_from(User),
    ),
    ("an aggregate without FROM beside EXISTS", select(func.count(), exists().where(User.age == 1))),
    ("row_number", select(func.row_number().over(order_by=User.age))),
    ("lag", select(func.lag(User.age).over(order_by=User.id))),
    ("ntile", select(func.ntile(4).over(order_by=User.id))),
    (
        "top by row_number",
        select(select(User.id, func.row_number().over(order_by=User.age).label("n")).subquery().c.id),
    ),
    ("fetch", select(User).order_by(User.id).fetch(3)),
    ("literal max", select(literal_column("max(age)")).select_from(User)),
    ("text count", select(text("count(*)")).select_from(User)),
    ("text in WHERE", select(User).where(text("age = (select max(age) from users)"))),
    ("covar_pop", select(func.covar_pop(User.age, User.balance))),
    ("regr_slope", select(func.regr_slope(User.age, User.balance))),
    ("range_intersect_agg", select(func.range_intersect_agg(func.int4range(User.age, 9)))),
    ("percentile", select(func.percentile_cont(0.5).within_group(User.age))),
    ("string_agg", select(func.string_agg(User.name, ","))),
    ("unknown function", select(func.my_aggregate(User.age))),
    ("random", select(User.id, func.random())),
    ("coalesce of a maximum", select(func.coalesce(func.max(User.age), -1))),
    ("sum of what is no number", select(func.sum(User.name))),
    ("group by a nullable key", select(User.inviter_id, func.count()).group_by(User.inviter_id)),
    ("distinct nullable key", select(User.inviter_id).distinct()),
    (
        "group by the right side of an outer join",
        select(P.user_id, func.count())
        .select_from(User)
        .outerjoin(P, and_(P.user_id == User.id, P.likes > 9))
        .group_by(P.user_id),
    ),
    ("a table that all shards have", select(Country.code)),
    ("count of a table that all shards have", select(func.count()).select_from(Country)),
    ("outer join from such a table", select(Country.code, User.id).outerjoin(User)),
    ("cross join with such a table", select(User.id, Country.code).join(Country, Country.size > User.age)),
    (
        "pairs of users by way of such a table",
        select(User.id, U.id)
        .select_from(User)
        .join(Country, Country.code == User.country_code)
        .join(U, U.country_code == Country.code),
    ),
    (
        "such a table's users",
        select(User.id, Country.code)
        .join(Country, Country.code == User.country_code)
        .where(exists().where(U.country_code == Country.code)),
    ),
    ("VALUES", select(values(column("x", Integer), name="v").data([(1,), (2,)]))),
    ("generate_series", select(func.generate_series(1, 3).column_valued("x"))),
    ("set-returning function", select(func.generate_series(1, User.balance))),
    ("join by something else", select(User.id, P.id).join(P, P.likes == User.age)),
    ("comma join", select(User.id, U.id).where(User.age == U.age)),
    ("outer join by something else", select(User.id, P.id).outerjoin(P, P.likes == User.age)),
    (
        "outer join, bound in WHERE only",
        select(User.id, P.id)
        .outerjoin(P, P.likes == User.age)
        .where(or_(P.id.is_(None), P.user_id == User.id)),
    ),
    ("lateral", select(User.id).join(select(func.max(P.likes).label("m")).lateral(), true())),
    ("EXISTS that is not bound", select(User).where(exists().where(P.likes > User.balance))),
    ("scalar subquery that is not bound", select(User.id, select(func.count(P.id)).scalar_subquery())),
    ("NOT IN with NULL", select(User).where(User.id.not_in(select(U.inviter_id)))),
    (
        "IN with NULL, negated",
        select(User).where(not_(and_(User.id.in_(select(U.inviter_id)), User.age == 1))),
    ),
    (
        "NOT IN with NULL, of rows that may be in another shard",
        select(User).where(
            User.name == "user 1", User.inviter_id.not_in(select(P.user_id).where(P.user_id == 0))
        ),
    ),
    ("IN with NULL as a value", select(User.id, User.id.in_(select(U.inviter_id)))),
    ("IN over other columns", select(User).where(User.age.in_(select(P.likes)))),
    ("recursive", select(select(User.id).cte("r", recursive=True).c.id)),
    ("no operator", select(User).where(User.age.op("+ (select max(age) from users) +")(5) == 1)),
    ("TABLESAMPLE", select(User.__table__.tablesample(10).c.id)),
    ("HAVING", select(func.count(User.id)).having(func.count(User.id) > 1)),
    ("prefix", select(User.id).prefix_with("ALL")),
    ("suffix", select(User.id).suffix_with("-- all")),
    ("hint", select(User.id).with_hint(User, "ONLY")),
    ("hint of the statement", select(User.id).with_statement_hint("-- all")),
    ("CTE that nothing reads", select(User.id).add_cte(select(U.id).limit(1).cte("other"))),
    *(
        [("DISTINCT ON", select(User.id, User.age).ext(postgresql.distinct_on(User.age)))]
        if hasattr(postgresql, "distinct_on")  # from SQLAlchemy 2.1 on
        else []
    ),
]


@pytest.mark.parametrize("statement", [pytest.param(one, id=name) for name, one in REFUSED])
def test_refused(session: Session, statement: Any) -> None:
    before = session.scalar(select(func.count(Photo.id)))
    with pytest.raises(BadArgument) as caught:
        session.execute(statement)
    assert isinstance(caught.value, CannotCombine)
    assert caught.value.hint
    assert session.scalar(select(func.count(Photo.id))) == before


def test_counting_groups_of_a_query_is_refused(session: Session) -> None:
    with pytest.raises(CannotCombine):
        session.query(User.age).group_by(User.age).count()
    with pytest.raises(CannotCombine):
        session.query(User.id).union(session.query(Photo.user_id)).count()
    assert session.query(User).filter(User.age == 1).count() == 7
