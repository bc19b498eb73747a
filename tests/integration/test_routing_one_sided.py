"""Statements that would see the rows of one shard only: the answer of one database, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import bindparam, delete, exists, func, insert, literal, or_, select, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    aliased,
    column_property,
    foreign,
    joinedload,
    lazyload,
    mapped_column,
    relationship,
    selectinload,
    subqueryload,
    undefer,
    with_loader_criteria,
)
from sqlalchemy.schema import ForeignKey

from shardids import Cluster, primary_key, sharding_key
from shardids.errors import BadArgument, CannotCombine, WrongShard
from shardids.tables import views
from tests.conftest import BlankDatabases, found_cluster
from tests.support.clusters import catalog_at

SHARDS = 4
COUNT = 12
"""Accounts, each with a post, which has a comment by each of three other accounts."""


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "accounts"

    id: Mapped[int] = primary_key()
    handle: Mapped[str] = sharding_key(unique=True)
    age: Mapped[int | None]
    posts: Mapped[list[Post]] = relationship(back_populates="account")


class Post(Base):
    __tablename__ = "posts"

    id: Mapped[int] = primary_key()
    account_id: Mapped[int] = mapped_column(ForeignKey("accounts.id"))
    title: Mapped[str]
    account: Mapped[Account] = relationship(back_populates="posts")
    comments: Mapped[list[Comment]] = relationship(back_populates="post")


class Comment(Base):
    __tablename__ = "comments"

    id: Mapped[int] = primary_key()
    post_id: Mapped[int] = mapped_column(ForeignKey("posts.id"))
    author_name: Mapped[str]
    post: Mapped[Post] = relationship(back_populates="comments")
    author: Mapped[Account | None] = relationship(
        primaryjoin=lambda: foreign(Comment.author_name) == Account.handle, viewonly=True
    )


def written() -> Any:
    return (
        select(func.count(Comment.id)).where(Comment.author_name == Account.handle).correlate_except(Comment)
    )


Account.n_written = column_property(written().scalar_subquery())  # type: ignore[attr-defined]
Account.n_deferred = column_property(written().scalar_subquery(), deferred=True)  # type: ignore[attr-defined]

A, P, C = Account, Post, Comment
ALL = select(func.count()).select_from(Comment).scalar_subquery()
BY_SOME = C.author_name.in_(select(A.__table__.c.handle).where(A.__table__.c.age == 1))
"""Of comments by accounts in any shard."""


@pytest.fixture(scope="module")
def cluster(databases: BlankDatabases) -> Iterator[Cluster]:
    """Four shards on two nodes, of which b is the query node."""
    urls = databases.take(), databases.take()
    found_cluster(urls[0], {"a": urls[0], "b": urls[1]}, SHARDS)
    with Cluster.connect(urls[0], listen=False) as cluster:
        for shard in range(SHARDS):
            with cluster.at(shard=shard).engine.begin() as connection:
                Base.metadata.create_all(connection, checkfirst=False)
        with cluster.sharded_session() as session, session.begin():
            for n in range(COUNT):
                comments = [Comment(author_name=f"h{(n + k) % COUNT}") for k in (1, 2, 3)]
                session.add(Account(handle=f"h{n}", age=n % 2, posts=[Post(title="t", comments=comments)]))
        with catalog_at(urls[0]) as catalog:
            views.create_query_node(catalog, node="b", store_password=True)
        yield cluster
    for url in urls:
        databases.give_back(url)


@pytest.fixture
def session(cluster: Cluster) -> Iterator[Session]:
    with cluster.sharded_session() as session:
        yield session


def test_columns_that_are_loaded_again_are_computed_over_all_shards(session: Session) -> None:
    account: Any = session.scalars(select(A).where(A.handle == "h3")).one()
    assert account.n_written == 3
    session.commit()
    assert account.n_written == 3
    session.refresh(account)
    assert (account.n_written, account.n_deferred) == (3, 3)
    session.expunge_all()
    assert session.get_one(A, account.id).n_written == 3  # type: ignore[attr-defined]
    assert session.get_one(A, account.id, populate_existing=True).n_deferred == 3  # type: ignore[attr-defined]
    session.expunge_all()
    assert [post.account.n_written for post in session.scalars(select(P))] == [3] * COUNT  # type: ignore[attr-defined]
    assert [one.n_deferred for one in session.scalars(select(A))] == [3] * COUNT  # type: ignore[attr-defined]
    eager = select(A).options(undefer(A.n_deferred)).where(A.id == account.id)  # type: ignore[attr-defined]
    assert session.scalars(eager).one().n_deferred == 3  # type: ignore[attr-defined]


def test_columns_that_the_query_node_can_not_compute_yet_are_refused(session: Session) -> None:
    account: Any = session.scalars(select(A).where(A.handle == "h3")).one()
    session.execute(update(C).values(author_name="h3"))
    for ask in (lambda: session.refresh(account), lambda: account.n_deferred):
        with pytest.raises(CannotCombine, match="has written to comments"):
            ask()
    session.rollback()
    assert account.n_deferred == 3


@pytest.mark.parametrize("load", [lazyload, selectinload, subqueryload, joinedload])
@pytest.mark.parametrize("named", [False, True])
def test_relationships_are_loaded_from_the_shards_of_their_own_criteria(
    cluster: Cluster, session: Session, load: Any, named: bool
) -> None:
    posts = select(P).join(A).where(A.handle == "h3") if named else select(P)
    comments = session.scalars(select(C).where(BY_SOME)).all()
    with_criteria = [
        posts.options(load(P.comments), with_loader_criteria(C, BY_SOME)),
        posts.options(load(P.comments.and_(BY_SOME))),
    ]
    expected = 1 if named else len(comments)
    for statement in with_criteria:
        session.expunge_all()
        assert sum(len(post.comments) for post in session.scalars(statement).unique()) == expected
    session.expunge_all()
    some = select(C).where(C.post_id == comments[0].post_id) if named else select(C)
    found = session.scalars(some.options(load(C.author))).unique().all()
    assert [comment.author and comment.author.handle for comment in found] == [
        comment.author_name for comment in found
    ]
    session.expunge_all()
    assert (
        cluster.sharded_session(fan_out="never")
        .scalars(select(P).where(P.id == comments[0].post_id).options(load(P.comments)))
        .unique()
        .one()
        .comments
    )


COLUMNS = ["account_id", "title"]
LIMITED = select(A.id, literal("q")).order_by(A.id)


@pytest.mark.parametrize(
    "rows",
    [
        LIMITED.limit(3),
        LIMITED.offset(3),
        LIMITED.fetch(3),
        LIMITED.where(A.handle.in_([f"h{n}" for n in range(COUNT)])).limit(3),
        select(P.account_id, func.max(P.title)).group_by(P.account_id).order_by(P.account_id).limit(3),
    ],
)
def test_rows_of_an_insert_are_not_limited_in_each_shard(session: Session, rows: Any) -> None:
    for statement in (
        insert(P).from_select(COLUMNS, rows),
        insert(P).from_select(COLUMNS, rows).returning(P.id),
    ):
        with pytest.raises(CannotCombine, match="each would apply its LIMIT"):
            session.execute(statement)
    for inner in (select(LIMITED.fetch(3).subquery()), select(LIMITED.limit(3).subquery())):
        with pytest.raises(CannotCombine, match="different result in each shard"):
            session.execute(insert(P).from_select(COLUMNS, inner))
    assert session.scalar(select(func.count()).select_from(P)) == COUNT
    all_rows = insert(P).from_select(COLUMNS, select(A.id, literal("q"))).returning(P.id)
    assert len(session.execute(all_rows).all()) == COUNT
    one = insert(P).from_select(COLUMNS, LIMITED.where(A.handle == "h3").limit(1)).returning(P.title)
    assert session.scalars(one).all() == ["q"]


def _changed(session: Session, value: Any) -> None:
    session.scalars(select(A).where(A.handle == "h3")).one().age = value
    session.flush()


def _upserted(**options: Any) -> Any:
    return upsert(A).values(handle="h3").on_conflict_do_update(index_elements=["handle"], **options)


VALUES: list[Callable[[Session], object]] = [
    lambda s: s.execute(insert(A).values(handle="q", age=ALL)),
    lambda s: s.execute(insert(A.__table__).values(handle="q", age=func.coalesce(ALL, 1) + 1)),  # type: ignore[arg-type]
    lambda s: s.execute(insert(A).values(handle="q").returning(A.id, ALL)),
    lambda s: s.execute(insert(P).values(account_id=s.scalar(select(func.min(A.id))), title=ALL)),
    lambda s: (s.add(Account(handle="q", age=ALL)), s.flush()),
    lambda s: (s.add(Account(handle="q", age=func.coalesce(ALL, 1))), s.flush()),
    lambda s: _changed(s, ALL),
    lambda s: _changed(s, func.abs(ALL)),
    lambda s: _changed(s, select(func.count(C.id)).where(C.author_name == "h3").scalar_subquery()),
    lambda s: _changed(s, A.n_written),  # type: ignore[attr-defined]
    lambda s: s.execute(_upserted(set_={"age": ALL})),
    lambda s: s.execute(_upserted(set_={"age": 1}, where=A.age < ALL)),
    lambda s: s.execute(insert(P).from_select(COLUMNS, select(A.id, literal("q"))).returning(ALL)),
    lambda s: s.execute(update(A).where(A.handle == "h3").values(age=ALL)),
    lambda s: s.execute(update(A).values(age=ALL)),
]


@pytest.mark.parametrize("write", VALUES)
def test_values_to_write_that_would_see_one_shard_are_refused(
    session: Session, write: Callable[[Session], object]
) -> None:
    with pytest.raises(CannotCombine, match=r"subquery on .* would have a different result in each shard"):
        write(session)
    session.rollback()
    ages = dict(session.execute(select(A.handle, A.age)).all())  # type: ignore[arg-type]  # pairs
    assert ages == {f"h{n}": n % 2 for n in range(COUNT)}


def test_values_of_the_rows_own_shard_are_written(session: Session) -> None:
    account: Any = session.scalars(select(A).where(A.handle == "h3")).one()
    own = select(func.count(P.id)).where(P.account_id == account.id).scalar_subquery()
    account.age = own + 40
    session.flush()
    session.execute(insert(P).values(account_id=account.id, title=own))
    session.execute(_upserted(set_={"age": A.age + 1}))
    assert session.execute(select(A.age).where(A.handle == "h3")).scalar() == 42
    assert session.scalars(select(P.title).where(P.account_id == account.id)).all() == ["t", "1"]


def test_rows_of_several_shards_have_a_count(session: Session) -> None:
    rows = [{"handle": f"q{n}"} for n in range(9)]
    assert session.execute(insert(A).values(rows)).rowcount == -1  # type: ignore[attr-defined]  # of a CursorResult


PLACE = func.row_number().over(order_by=A.id)
PLACES = select(A.id, A.handle, PLACE.label("n")).subquery()
LAST = select(A.id, PLACE.label("n")).cte()
BEHIND = select(PLACES.c.id).where(PLACES.c.n > COUNT - 2)


def placed(id_: int) -> list[Any]:
    """Returns SELECTs of an account's place among all, by its ID."""
    within = select(PLACES.c.id, PLACES.c.n).where(PLACES.c.n > 0).subquery()
    return [
        select(PLACES.c.n).where(PLACES.c.id == id_),
        select(LAST.c.n).where(LAST.c.id == id_),
        select(within.c.n).where(within.c.id == id_),
        select(PLACES.c.n).join(A, A.id == PLACES.c.id).where(A.id == id_),
        select(PLACES.c.n).join(P, P.account_id == PLACES.c.id).where(P.account_id == id_),
        select(select(PLACES.c.n).where(PLACES.c.id == A.id).scalar_subquery()).where(A.id == id_),
        select(within.c.n).where(within.c.id == id_, within.c.id.in_(select(LAST.c.id))),
    ]


def test_a_window_in_a_subquery_goes_over_all_rows(session: Session) -> None:
    ids = session.scalars(select(A.id).order_by(A.id)).all()
    for place, id_ in enumerate(ids, 1):
        for statement in placed(id_):
            assert session.scalars(statement).all() == [place], str(statement)
        handle = session.scalars(select(A.handle).where(A.id == id_)).one()
        assert session.scalars(select(PLACES.c.n).where(PLACES.c.handle == handle)).all() == [place]
        assert len(session.scalars(select(A).where(A.id == id_, A.id.in_(BEHIND))).all()) == (
            place > COUNT - 2
        )


def test_a_window_in_a_subquery_is_refused_where_the_query_node_is_not_asked(
    cluster: Cluster, session: Session
) -> None:
    id_ = session.scalars(select(func.max(A.id))).one()
    for fan_out in ("named", "never"):
        with cluster.sharded_session(fan_out=fan_out) as few:
            for statement in placed(id_):
                with pytest.raises(CannotCombine, match="a window function in a subquery over several"):
                    few.execute(statement)


def test_a_window_over_the_rows_of_one_shard_is_computed_there(cluster: Cluster, session: Session) -> None:
    post = session.scalars(select(P)).first()
    assert post is not None
    place = func.row_number().over(partition_by=(C.post_id, C.id > 0), order_by=C.id.desc())
    by_post = select(C.id, C.post_id, place.label("n")).subquery()
    other = aliased(C)
    bound = select(func.sum(func.count(other.id)).over()).where(other.post_id == C.post_id)
    above = select(P.account_id, by_post.c.n).join(by_post, by_post.c.post_id == P.id).subquery()
    with cluster.sharded_session(fan_out="never") as one:
        for statement in (
            select(by_post.c.n).where(by_post.c.post_id == post.id),
            select(above.c.n).where(above.c.account_id == post.account_id),
            select(place).where(C.post_id == post.id),
            select(bound.scalar_subquery()).where(C.post_id == post.id),
        ):
            assert len(one.scalars(statement).all()) == 3


def of_one(post: Post) -> list[tuple[Any, list[Any]]]:
    """Returns SELECTs from subqueries of a post's comments, and their answers."""
    comments = sorted(post.comments, key=lambda one: one.id)
    ids, names = [one.id for one in comments], sorted(one.author_name for one in comments)
    rows = select(C.id, C.post_id, C.author_name).where(C.post_id == post.id)
    tags = rows.with_only_columns(C.author_name).distinct().subquery()
    last = rows.order_by(C.id.desc()).limit(2).subquery()
    cte = rows.order_by(C.id).offset(1).cte()
    every = rows.subquery()
    objects: Any = aliased(C, select(C).where(C.post_id == post.id).order_by(C.id).limit(1).subquery())
    total = rows.with_only_columns(func.count(C.id).label("n")).having(func.count(C.id) > 2).subquery()
    joined = select(P.title, C.author_name).join(C).where(P.id == post.id)
    titles = joined.group_by(P.title, C.author_name).subquery()
    keyed = select(A.age).where(A.handle == post.account.handle).distinct().subquery()
    numbered = select(every.c.id, func.row_number().over(order_by=every.c.id).label("n")).subquery()
    fewer = select(every.c.author_name).distinct().subquery()
    with_post = select(P.title, every.c.id).join(every, every.c.post_id == P.id).limit(2).subquery()
    return [
        (select(func.count()).select_from(tags), [3]),
        (select(tags.c.author_name).order_by(tags.c.author_name), names),
        (select(last.c.id).order_by(last.c.id), ids[1:]),
        (select(last.c.id).join(P, P.id == last.c.post_id).order_by(last.c.id), ids[1:]),
        (select(func.count(last.c.id)).join(P, P.id == last.c.post_id).where(P.id == post.id), [2]),
        (select(P.title).where(P.id == post.id, P.id.in_(select(last.c.post_id))), ["t"]),
        (select(cte.c.id).order_by(cte.c.id), ids[1:]),
        (select(objects.id), ids[:1]),
        (select(objects), comments[:1]),
        (select(P).options(joinedload(P.comments)).where(P.id == post.id).limit(2), [post]),
        (select(total.c.n), [3]),
        (select(titles.c.author_name).order_by(titles.c.author_name), names),
        (select(keyed.c.age), [post.account.age]),
        (select(numbered.c.n).where(numbered.c.id == ids[1]), [2]),
        (select(fewer.c.author_name).order_by(fewer.c.author_name), names),
        (select(func.count()).select_from(with_post), [2]),
    ]


def test_a_subquery_whose_own_criteria_name_one_shard_is_computed_there(
    cluster: Cluster, session: Session
) -> None:
    for post in session.scalars(select(P)).all()[:4]:
        for statement, expected in of_one(post):
            assert session.scalars(statement).unique().all() == expected, str(statement)
            with cluster.sharded_session(fan_out="never") as few:
                assert len(few.scalars(statement).unique().all()) == len(expected), str(statement)
    # Rows that the query node does not see yet.
    session.execute(update(C).where(C.post_id == post.id).values(author_name="h1"))
    names = select(C.author_name).where(C.post_id == post.id).distinct().subquery()
    assert session.scalars(select(names.c.author_name)).all() == ["h1"]


def test_a_subquery_that_names_another_shard_than_the_statement_has_the_answer_of_one_database(
    cluster: Cluster, session: Session
) -> None:
    posts = session.scalars(select(P)).all()
    post = posts[0]
    far = next(one for one in posts if cluster.shard_of(one.id) != cluster.shard_of(post.id))
    rows = select(P.id, P.account_id, P.title).where(P.id == far.id).limit(1).subquery()
    both = select(P.id, P.title).where(P.id.in_([post.id, far.id]))
    first = both.order_by(P.id.desc()).limit(1).subquery()
    last = both.order_by(P.id).limit(1).subquery()
    mine = select(A.id).where(A.id == post.account_id)
    other = select(func.count(P.id).label("n")).where(P.id == far.id).subquery()
    nothing: Any = select(A.age).where(A.id == far.account_id, A.age > 9).limit(1)
    found: list[tuple[Any, list[Any]]] = [
        (select(rows.c.title).where(rows.c.id == post.id), []),
        (
            select(rows.c.title)
            .select_from(A)
            .outerjoin(rows, rows.c.account_id == A.id)
            .where(mine.whereclause),
            [None],
        ),  # type: ignore[arg-type]
        (mine.where(A.id.not_in(select(rows.c.account_id))), [post.account_id]),
        (mine.where(A.id.in_(select(rows.c.account_id))), []),
        (mine.where(exists().where(rows.c.account_id == A.id)), []),
        (select(A.age).where(mine.whereclause, A.age.not_in(nothing)), [post.account.age]),  # type: ignore[arg-type]
        (select(other.c.n).join(A, A.id == post.account_id), [1]),
        (select(first.c.id).where(first.c.id == min(post.id, far.id)), []),
        (select(last.c.id).where(last.c.id == min(post.id, far.id)), [min(post.id, far.id)]),
        (select(first.c.id).where(first.c.id == max(post.id, far.id)), [max(post.id, far.id)]),
        (select(last.c.id).where(last.c.id == max(post.id, far.id)), []),
    ]
    for statement, expected in found:
        assert session.scalars(statement).all() == expected, str(statement)


D = aliased(Comment)
NUMBERED = select(D.id, func.row_number().over(order_by=D.id).label("n")).subquery()
OTHERS: list[tuple[Any, Callable[[Any, list[int]], bool]]] = [
    # PostgreSQL rounds a mean of 18 digits to an integer; a float would be off by up to 32.
    (
        C.id < select(func.avg(D.id)).scalar_subquery(),
        lambda one, ids: one.id < (2 * sum(ids) + len(ids)) // (2 * len(ids)),
    ),
    (C.id < select(func.min(D.id)).scalar_subquery(), lambda *_: False),
    (select(func.count(D.id)).scalar_subquery() == 3 * COUNT, lambda *_: True),
    (C.id.in_(select(NUMBERED.c.id).where(NUMBERED.c.n <= 20)), lambda one, ids: one.id in ids[:20]),
    (C.id.in_(select(NUMBERED.c.id).where(NUMBERED.c.n > 20)), lambda one, ids: one.id in ids[20:]),
    (BY_SOME, lambda one, _: int(one.author_name[1:]) % 2 == 1),
]


@pytest.mark.parametrize(("criteria", "is_met"), OTHERS)
def test_a_change_of_rows_in_one_shard_may_read_rows_of_others(
    cluster: Cluster, session: Session, criteria: Any, is_met: Callable[[Any, list[int]], bool]
) -> None:
    comments = session.scalars(select(C).order_by(C.id)).all()
    ids = [one.id for one in comments]
    for post in session.scalars(select(P.id)).all():
        found = {one.id for one in comments if one.post_id == post and is_met(one, ids)}
        own = C.post_id == post, criteria
        assert session.execute(update(C).where(*own).values(author_name="q")).rowcount == len(found)  # type: ignore[attr-defined]  # of a CursorResult
        assert {one.id for one in comments if one.author_name == "q"} == found
        session.rollback()
        assert set(session.scalars(delete(C).where(*own).returning(C.id))) == found
        assert session.scalar(select(func.count(C.id))) == 3 * COUNT - len(found)
        session.rollback()
    with cluster.sharded_session(fan_out="named") as few, pytest.raises(CannotCombine):
        few.execute(delete(C).where(*own))


# Sessions on one shard.


def others(cluster: Cluster) -> tuple[str, int]:
    """An account of another shard than that of h3: its handle and its ID."""
    mine = cluster.shard_for("h3")
    handle = next(f"h{n}" for n in range(COUNT) if cluster.shard_for(f"h{n}") != mine)
    with cluster.sharded_session() as session:
        return handle, session.scalars(select(A.id).where(A.handle == handle)).one()


FOREIGN: list[Callable[[str, int], Any]] = [
    lambda handle, _: select(A).where(A.handle == handle),
    lambda handle, _: select(A.id).where(A.handle.in_(["h3", handle])),
    lambda handle, _: select(func.count()).select_from(select(A.id).where(A.handle == handle).subquery()),
    lambda handle, _: select(exists().where(A.handle == handle)),
    lambda handle, _: select(~exists().where(A.handle == handle)),
    lambda handle, _: select(P.id).where(P.account_id.in_(select(A.id).where(A.handle == handle))),
    lambda handle, _: select(P.id).where(P.account_id.not_in(select(A.id).where(A.handle == handle))),
    lambda handle, _: select(select(func.count()).where(A.handle == handle).scalar_subquery()),
    lambda _, id_: select(A.id).where(or_(A.id == id_, A.age == 1)),
    lambda _, id_: select(A.id, P.id).outerjoin(P, P.account_id == id_),
    lambda _, id_: select(A.id).select_from(A.__table__.outerjoin(P.__table__, P.account_id == id_)),
    lambda handle, _: select(select(A.id).where(A.handle == handle).cte().c.id),
    lambda handle, _: select(A.handle).group_by(A.handle).having(A.handle == handle),
    lambda _, id_: select(A.id).where(A.id == id_).union_all(select(A.id)),
    lambda _, id_: update(P).where(P.account_id.in_(select(A.id).where(A.id == id_))).values(title="x"),
    lambda handle, _: delete(C).where(exists().where(A.handle == handle)),
]


@pytest.mark.parametrize("ask", FOREIGN)
def test_a_session_on_one_shard_refuses_criteria_of_others_anywhere(
    cluster: Cluster, ask: Callable[[str, int], Any]
) -> None:
    statement = ask(*others(cluster))
    with cluster.session(key="h3") as session, pytest.raises(WrongShard, match="name shard"):
        session.execute(statement)


def test_a_session_on_one_shard_refuses_a_query_that_counts_others(cluster: Cluster) -> None:
    handle, _ = others(cluster)
    with cluster.session(key="h3") as session:
        query: Any = session.query(A).filter(A.handle == handle)
        for ask in (query.count, query.first, query.exists):
            with pytest.raises(WrongShard, match="name shard"):
                session.scalar(select(ask()))
        mine = session.query(A).filter(A.handle == "h3")
        assert mine.count() == 1
        assert session.scalar(select(mine.exists()))
        assert session.scalar(select(func.count()).where(A.handle != handle)) == session.query(A).count()
        assert session.execute(select(A.age).where(A.handle == bindparam("h")), {"h": "h3"}).all() == [(1,)]


def test_a_session_on_one_shard_refuses_relatives_of_others_by_their_key(cluster: Cluster) -> None:
    mine = cluster.shard_for("h3")
    with cluster.session(key="h3") as session:
        comments = session.scalars(select(C)).all()
        far = [one for one in comments if cluster.shard_for(one.author_name) != mine]
        assert far
        for comment in comments:
            if comment in far:
                with pytest.raises(WrongShard, match="name shard"):
                    _ = comment.author
            else:
                assert comment.author is not None
            assert comment.post.account.posts == [comment.post]


def test_a_count_of_a_subquery_asks_the_shard_that_it_names(cluster: Cluster, session: Session) -> None:
    from tests.integration.test_routing import statements

    inner = select(A.id).where(A.handle == "h3").subquery()
    with statements(cluster) as sent:
        assert session.scalar(select(func.count()).select_from(inner)) == 1
        assert len(sent) == 1
        assert re.search(r"FROM \(SELECT shard_\d+\.accounts", sent[0].replace("\n", " "))
    several = select(A.id).where(A.handle.in_([f"h{n}" for n in range(5)])).subquery()
    assert session.scalar(select(func.count()).select_from(several)) == 5
    assert session.scalar(select(func.count()).select_from(select(several.c.id).limit(3).subquery())) == 3
    empty = select(func.count(A.id).label("n")).where(A.handle == "nobody").subquery()
    assert session.scalars(select(empty.c.n).select_from(empty)).all() == [0]
    with pytest.raises(BadArgument, match="name shard"), cluster.session(key="h3") as one:
        one.scalar(select(func.count()).select_from(several))
