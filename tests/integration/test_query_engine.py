"""What the query node answers sessions over all shards, and what is refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import (
    Column,
    Enum,
    MetaData,
    Table,
    Text,
    delete,
    event,
    func,
    insert,
    or_,
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
    joinedload,
    mapped_column,
    relationship,
    selectinload,
)
from sqlalchemy.sql.schema import ForeignKey

from shardids import AsyncCluster, Cluster, primary_key, sharding_key
from shardids.errors import (
    BadArgument,
    CannotCombine,
    ClusterConflict,
    ConnectionFailed,
    FanOutRefused,
    MissingPrivilege,
)
from shardids.tables import views
from shardids.tables.views.refresh import state_of
from tests.conftest import MakeRole, found_cluster
from tests.support.clusters import catalog_at, connected

SHARDS = 4
Blank = Callable[[], URL]


class Base(DeclarativeBase):
    pass


class User(Base):
    __tablename__ = "users"

    id: Mapped[int] = primary_key()
    name: Mapped[str] = sharding_key()
    age: Mapped[int | None]
    mood: Mapped[str] = mapped_column(Enum("good", "bad", "average", name="mood"), default="good")
    photos: Mapped[list[Photo]] = relationship(back_populates="user")


class Photo(Base):
    __tablename__ = "photos"

    id: Mapped[int] = primary_key()
    user_id: Mapped[int] = mapped_column(ForeignKey(User.id, ondelete="cascade"))
    likes: Mapped[int] = mapped_column(default=0)
    user: Mapped[User] = relationship(back_populates="photos")


class Setting(Base):
    """Nothing says in which shard its rows are."""

    __tablename__ = "settings"

    name: Mapped[str] = mapped_column(primary_key=True)


@pytest.fixture
def urls(blank_database: Blank) -> dict[str, URL]:
    """Four shards of users and their photos on nodes a and b; the query node is a third database."""
    urls = {name: blank_database() for name in ("a", "b", "q")}
    found_cluster(urls["a"], {"a": urls["a"], "b": urls["b"]}, SHARDS)
    with Cluster.connect(urls["a"], listen=False) as cluster:
        for shard in range(SHARDS):
            with cluster.at(shard=shard).engine.begin() as connection:
                Base.metadata.create_all(connection, checkfirst=False)
                connection.execute(insert(Setting), [{"name": "colour"}])
        with cluster.sharded_session() as session, session.begin():
            for n in range(12):
                mood = "average" if n % 2 else "bad"
                photos = [Photo(likes=n), Photo(likes=n % 3)]
                session.add(User(name=f"user {n}", age=n % 3 or None, mood=mood, photos=photos))
    with catalog_at(urls["a"]) as catalog:
        url = urls["q"].render_as_string(hide_password=False)
        views.create_query_node(catalog, url=url, reference=["settings"], store_password=True)
    return urls


@pytest.fixture
def cluster(urls: dict[str, URL]) -> Iterator[Cluster]:
    with Cluster.connect(urls["a"], listen=False) as cluster:
        yield cluster


@pytest.fixture
def session(cluster: Cluster) -> Iterator[Session]:
    with cluster.sharded_session() as session:
        yield session


def way(result: Any) -> str:
    return str(result.raw.context.execution_options["shardids_engine"])


GROUPS = select(User.age, func.count(), func.avg(User.id)).group_by(User.age)


def test_a_result_says_which_way_its_statement_took(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shardids.client")
    assert way(session.execute(select(User).where(User.name == "user 1"))) == "shard"
    assert way(session.execute(select(User))) == "merge"
    assert caplog.messages == []
    assert way(session.execute(GROUPS)) == "views"
    (message,) = caplog.messages
    assert message.startswith("views: 3 rows of the query node: SELECT users.age")


def test_what_shards_can_not_be_asked_is_computed_over_all_of_them(session: Session) -> None:
    assert sorted((age or 0, count) for age, count, _ in session.execute(GROUPS)) == [(0, 4), (1, 4), (2, 4)]
    ranks = select(User.name, func.row_number().over(order_by=User.id))
    assert [rank for _, rank in session.execute(ranks.order_by(User.id))] == list(range(1, 13))
    assert session.scalar(select(func.count(User.age.distinct()))) == 2
    both = select(User.age).union(select(Photo.likes))
    assert {age for (age,) in session.execute(both)} == {None, *range(12)}
    # A join that does not follow the sharding, and a table that is alike in every shard.
    other = select(func.count()).select_from(User).join(Photo, User.age == Photo.likes)
    assert session.scalar(other) == 4 * 5 + 4 * 5
    assert session.scalar(select(func.count()).select_from(Setting)) == 1
    median = select(func.percentile_disc(0.5).within_group(Photo.likes))
    assert session.scalar(median) == 2
    assert session.scalar(select(func.count()).select_from(User).having(func.count() > 100)) is None


def test_two_subqueries_are_answered_although_postgres_fdw_confuses_their_scans(session: Session) -> None:
    some = select(User.id).exists()
    counted = select(func.count(User.id)).scalar_subquery()
    statement = select(Photo.likes, counted).where(or_(Photo.likes != Photo.likes, some))
    found = session.execute(statement).all()
    assert len(found) == 24
    assert {count for _, count in found} == {12}


def test_aggregates_are_computed_on_the_nodes_first(cluster: Cluster, session: Session) -> None:
    node = cluster.query_node()
    assert node is not None
    sent: list[str] = []
    event.listen(cluster.engine(node), "before_cursor_execute", lambda *given: sent.append(given[2]))

    def asked(statement: Any) -> list[Any]:
        sent.clear()
        rows = [tuple(row) for row in session.execute(statement)]
        # PostgreSQL without any help of ours gives the same.
        assert ("shardids_nodes." in sent[-1]) == ("shardids_node" in sent[-1])
        return rows

    likes, parity = Photo.likes, (Photo.likes % 2)
    grouped = select(parity, func.count(), func.sum(likes), func.min(likes), func.max(likes), func.avg(likes))
    odd = [n for n in (*range(12), *(n % 3 for n in range(12))) if n % 2]
    even = [n for n in (*range(12), *(n % 3 for n in range(12))) if not n % 2]
    expected = [
        (n, len(of), sum(of), min(of), max(of), Decimal(sum(of)) / len(of)) for n, of in ((0, even), (1, odd))
    ]
    found = asked(grouped.group_by(parity).order_by(parity))
    assert [row[:5] for row in found] == [row[:5] for row in expected]
    assert [round(row[5], 9) for row in found] == [round(row[5], 9) for row in expected]
    assert "GROUP BY" in sent[-1]
    assert "GROUP BY shardids_node," in sent[-1]
    few = grouped.group_by(parity).having(func.count() > 0, func.sum(likes) > 39).where(likes > -1)
    assert [row[0] for row in asked(few.order_by(func.count().desc()).limit(1))] == [expected[1][0]]
    nothing = select(func.count(), func.coalesce(func.avg(likes), -1)).where(likes > 1000)
    assert asked(nothing) == [(0, -1)]
    assert "shardids_nodes." in sent[-1]
    part = select(func.avg(likes).filter(likes > 9) + 1, func.count().filter(likes > 9))
    assert asked(part) == [(Decimal("11.5"), 2)]
    assert "shardids_nodes." in sent[-1]
    for other in (
        select(User.age, func.count(User.mood.distinct())).group_by(User.age),
        select(func.avg(likes)).join(User),
        select(parity, func.array_agg(likes)).group_by(parity),
        select(User.mood, func.count()).group_by(User.mood),
        select(parity, func.sum(func.count()).over()).group_by(parity),
        select(func.avg(select(likes).subquery().c.likes)),
        select(Setting.name, Setting.name + "x").where(Setting.name == "colour"),
    ):
        assert asked(other)
        assert "shardids_nodes." not in sent[-1]


def test_enums_are_compared_and_sorted_as_in_a_shard(session: Session) -> None:
    moods = select(User.mood, func.count()).where(User.mood != "good").group_by(User.mood).order_by(User.mood)
    assert session.execute(moods).all() == [("bad", 6), ("average", 6)]


def test_objects_from_the_query_node_are_written_to_their_own_shards(session: Session) -> None:
    best = select(Photo).order_by(func.rank().over(order_by=Photo.likes.desc())).limit(3)
    found = session.scalars(best.options(joinedload(Photo.user))).all()
    assert [photo.likes for photo in found] == [11, 10, 9]
    assert [photo.user.name for photo in found] == ["user 11", "user 10", "user 9"]
    for photo in found:
        photo.likes += 100
    session.commit()
    assert session.scalars(select(Photo.likes).where(Photo.likes > 50).order_by(Photo.likes)).all() == [
        *(109, 110, 111)
    ]
    # Objects that the session has are not loaded twice, and what is loaded later comes from their shards.
    again = session.scalars(best).all()
    assert set(map(id, again)) == set(map(id, found))
    users = select(User).order_by(func.row_number().over(order_by=User.id)).options(selectinload(User.photos))
    assert [len(user.photos) for user in session.scalars(users)] == [2] * 12
    assert found[0].user.photos


def test_what_the_session_has_not_committed_is_not_overlooked(session: Session) -> None:
    user = session.scalars(select(User).where(User.name == "user 1")).one()
    assert session.execute(GROUPS).all()
    user.age = 17
    # The query flushes it first.
    with pytest.raises(CannotCombine, match="has written to users, which the query node does not see"):
        session.execute(GROUPS)
    session.commit()
    assert 17 in {age for age, *_ in session.execute(GROUPS)}
    kinds = select(func.count(Photo.likes.distinct()))
    for write, is_seen in (
        (update(User).where(User.name == "user 1").values(age=18), True),
        (insert(User).values(name="new"), True),
        (update(Photo).where(Photo.user_id == user.id).values(likes=1000), False),
        # The photos go by a cascade.
        (delete(User).where(User.id == user.id), False),
    ):
        before = session.scalar(kinds)
        session.execute(write)
        if is_seen:
            assert session.scalar(kinds) == before
        else:
            with pytest.raises(CannotCombine, match=r"written to photos[^\n]*\nCommit first"):
                session.execute(kinds)
        with pytest.raises(CannotCombine, match=r"written to users|written to photos"):
            session.execute(select(func.avg(User.age + Photo.likes)).join(Photo))
        # What the session's own connections can add up is asked of them.
        photos = select(func.count(), func.sum(Photo.likes), func.max(Photo.likes), func.min(Photo.id))
        rows = session.execute(select(Photo.likes, Photo.id)).all()
        likes = [like for like, _ in rows]
        assert session.execute(photos).one() == (
            len(rows),
            sum(likes),
            max(likes),
            min(id_ for _, id_ in rows),
        )
        session.rollback()
    session.connection({"shard_id": 0}).execute(text("truncate shard_0000.photos"))
    with pytest.raises(CannotCombine, match="written to photos"):
        session.execute(kinds)
    session.rollback()
    session.connection({"shard_id": 0}).execute(text("create temporary table mine ()"))
    assert session.execute(GROUPS).all()
    with session.begin_nested() as savepoint:
        session.execute(update(User).values(age=5))
        savepoint.rollback()
    assert session.execute(GROUPS).all()
    session.rollback()


def test_another_role_and_row_security_are_refused_by_name(
    urls: dict[str, URL], session: Session, make_role: MakeRole
) -> None:
    role = str(make_role().username)
    name = f'"{role}"'
    for shard in range(SHARDS):
        with connected(urls["a" if shard < SHARDS // 2 else "b"]) as node:
            node.execute(f"grant usage on schema shard_000{shard} to {name}".encode())
            node.execute(f"grant select on all tables in schema shard_000{shard} to {name}".encode())
    session.connection({"shard_id": 0}).execute(text(f"set role {name}"))
    with pytest.raises(CannotCombine, match=f"uses role {name}"):
        session.execute(GROUPS)
    session.connection({"shard_id": 0}).execute(text("reset role"))
    with connected(urls["a"]) as node:
        node.execute(b"alter table shard_0000.users enable row level security")
        node.execute(b"alter table shard_0000.users force row level security")
    session.connection({"shard_id": 0}).execute(text(f"set role {name}"))
    with pytest.raises(CannotCombine, match="row security hides rows of users"):
        session.execute(GROUPS)
    session.connection({"shard_id": 0}).execute(text("reset role"))
    session.rollback()
    for url in urls.values():
        with connected(url) as node:
            node.execute(f"drop owned by {name}".encode())


def test_a_session_with_one_snapshot_is_not_shown_a_later_one(urls: dict[str, URL]) -> None:
    with (
        Cluster.connect(urls["a"], listen=False, isolation_level="REPEATABLE READ") as cluster,
        cluster.sharded_session() as session,
        pytest.raises(CannotCombine, match="transaction is repeatable read"),
    ):
        session.execute(GROUPS)


def test_locks_writes_and_other_schemas_are_refused(session: Session) -> None:
    fixed = Table("pg_namespace", MetaData(), Column("nspname", Text), schema="pg_catalog")
    changed = update(Photo).values(likes=0).returning(Photo.id).cte()
    grouped = select(func.count(User.age.distinct()))
    for wrong, why in (
        (
            select(User.id).order_by(func.row_number().over(order_by=User.id)).with_for_update(),
            "can't lock rows",
        ),
        (select(func.count(changed.c.id.distinct())), "read-only transaction"),
        (
            select(func.count(fixed.c.nspname.distinct())),
            r"pg_catalog\.pg_namespace is in a schema of the nodes",
        ),
        (grouped.where(func.no_such_function(User.id) > 0), "no_such_function"),
    ):
        with pytest.raises(CannotCombine, match=why):
            session.execute(wrong)
    with pytest.raises(DBAPIError, match="division by zero"):
        session.execute(select(func.avg(User.id / 0)))


def test_an_error_names_what_helps(urls: dict[str, URL], session: Session) -> None:
    locked = select(User.age).with_for_update().subquery()
    changed = update(Photo).values(likes=0).returning(Photo.id).cte()
    for wrong, helps in (
        (select(func.count(changed.c.id.distinct())), False),
        (select(func.count(locked.c.age.distinct())), False),
        (select(User.age, func.avg(User.id)), False),
        (select(func.count(User.age.distinct())).where(func.no_such_function(User.id) > 0), True),
    ):
        with pytest.raises(CannotCombine) as caught:
            session.execute(wrong)
        assert ("query-node refresh" in caught.value.hint) is helps
        assert "elect the" in caught.value.hint
    with connected(urls["q"]) as connection:
        connection.execute("alter server shardids_b options (set port '1')")
    with pytest.raises(
        ConnectionFailed, match='the query node can\'t reach node "b": could not connect'
    ) as failed:
        session.execute(GROUPS)
    assert "query-node status" in failed.value.hint


def test_the_engine_says_what_is_allowed(cluster: Cluster) -> None:
    with cluster.sharded_session(fan_out="named") as session, pytest.raises(FanOutRefused):
        session.execute(GROUPS)
    with cluster.sharded_session(fan_out="never") as session:
        assert session.scalars(select(User).where(User.name == "user 1")).one()
        for wide in (
            select(User),
            GROUPS,
            delete(Photo),
            select(User).where(User.name.in_(["user 1", "user 2"])),
        ):
            with pytest.raises(FanOutRefused, match="shards, and this session sends statements to one"):
                session.execute(wide)
    with pytest.raises(BadArgument, match=r"fan_out must be .*, not 'other'"):
        cluster.sharded_session(fan_out="other")  # type: ignore[arg-type]  # what is tested


def test_a_cluster_without_a_query_node_says_how_to_get_one(urls: dict[str, URL], cluster: Cluster) -> None:
    with catalog_at(urls["a"]) as catalog, cluster.sharded_session() as session:
        assert session.execute(GROUPS).all()
        views.drop_query_node(catalog)
        with pytest.raises(CannotCombine, match=r"schema .shardids_query. does not exist"):
            session.execute(GROUPS)
        with pytest.raises(
            CannotCombine, match="To create a query node, which can: shardids query-node create"
        ):
            session.execute(GROUPS)
        views.create_query_node(catalog, node="b", store_password=True)
        assert session.execute(GROUPS).all()
        with pytest.raises(CannotCombine, match=r'relation ".*settings" does not exist'):
            session.execute(select(func.count(Setting.name.distinct())))


def test_a_query_node_that_is_stale_is_not_asked(
    urls: dict[str, URL], cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardids.client.routing import query_node

    monkeypatch.setattr(query_node, "_PATIENCE_S", 0.2)
    with catalog_at(urls["a"]) as catalog, connected(urls["a"]) as admin:
        admin.execute("update shardids_catalog.placement set node = 'a' where shard = 2")
        assert cluster.refresh()
        with (
            cluster.sharded_session() as session,
            pytest.raises(ClusterConflict, match="does not read every shard from its owner"),
        ):
            session.execute(GROUPS)
        admin.execute("update shardids_catalog.placement set node = 'b' where shard = 2")
        with cluster.sharded_session() as session:
            assert session.execute(GROUPS).all()
        assert state_of(catalog).faults == ()  # type: ignore[union-attr]  # it is there


def test_a_role_needs_the_views_alone(urls: dict[str, URL], make_role: MakeRole) -> None:
    role = make_role("app")
    name = f'"{role.username}"'
    with connected(urls["a"]) as catalog, connected(urls["q"]) as there:
        catalog.execute("select shardids_catalog.grant_usage(%s)", [role.username])
        login = urls["a"].set(username=role.username, password=role.password)
        with Cluster.connect(login, listen=False) as cluster:
            with (
                cluster.sharded_session() as session,
                pytest.raises(MissingPrivilege, match="permission denied for schema shardids_query"),
            ):
                session.execute(select(func.count(Setting.name)).union_all(select(1)))
            there.execute(f"grant usage on schema shardids_query to {name}".encode())
            there.execute(f"grant select on all tables in schema shardids_query to {name}".encode())
            # Of the shards it may read none.
            with cluster.sharded_session() as session:
                counts = session.scalars(select(func.count(Setting.name)).union_all(select(1)))
                assert counts.all() == [1, 1]
        there.execute(f"drop owned by {name}".encode())
        catalog.execute(f"drop owned by {name}".encode())


def test_the_async_session_asks_the_query_node(urls: dict[str, URL]) -> None:
    async def main() -> None:
        async with (
            await AsyncCluster.connect(urls["a"], listen=False) as cluster,
            cluster.sharded_session() as session,
        ):
            assert len((await session.execute(GROUPS)).all()) == 3
            assert len((await session.execute(GROUPS.limit(2))).all()) == 2
            session.add(User(name="new"))
            with pytest.raises(CannotCombine, match="written to users"):
                await session.execute(GROUPS)

    asyncio.run(main())
