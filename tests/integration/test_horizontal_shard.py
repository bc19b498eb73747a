"""What SQLAlchemy's own tests ask of a session over shards, asked of ``sharded_session()`` on PostgreSQL.

``FOLLOWED`` has a line for each test in ``test/ext/test_horizontal_shard.py`` of SQLAlchemy 2.1.9, with
the test that stands for it and what differs. SQLAlchemy runs those of ``ShardTest`` on five set-ups: SQLite
files, attached databases, names of tables, two dialects, and its older callbacks. Here there is one: two
nodes with two schemas each.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from sqlalchemy import Connection, ForeignKey, delete, event, inspect, select, text, update
from sqlalchemy.engine import URL
from sqlalchemy.exc import NoResultFound
from sqlalchemy.ext.associationproxy import AssociationProxy, association_proxy
from sqlalchemy.ext.baked import BakedQuery
from sqlalchemy.ext.horizontal_shard import set_shard_id
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    defer,
    lazyload,
    mapped_column,
    relationship,
    selectinload,
)

from shardids import Cluster, primary_key, sharding_key
from shardids.client.routing.fanout import STAND_IN
from shardids.errors import BadArgument
from tests.conftest import BlankDatabases, found_cluster

Fate = Literal["same", "differs"]

NO_TOKEN = "the ID tells the shard, so identities have no token; session.shard_of(object) says it"

FOLLOWED: dict[str, tuple[Fate, str, str]] = {
    "ShardTest.test_get": ("same", "test_get_finds_a_row_of_any_shard", ""),
    "ShardTest.test_get_one": ("same", "test_get_one_raises_where_there_is_no_row", ""),
    "ShardTest.test_get_explicit_shard": ("same", "test_a_query_looks_in_the_shard_it_is_told", ""),
    "ShardTest.test_set_shard_option_relationship": (
        "differs",
        "test_relationships_load_from_the_shard_of_their_owner",
        "keys route each further load to one shard, and a fan-out is one statement a node",
    ),
    "ShardTest.test_set_shard_option_column": (
        "differs",
        "test_deferred_columns_load_from_the_shard_of_their_row",
        "a fan-out is one statement a node, not one a shard",
    ),
    "ShardTest.test_query_explicit_shard_via_bind_opts": ("same", "test_bind_arguments_name_the_shard", ""),
    "ShardTest.test_plain_db_lookup": ("same", "test_rows_are_in_the_shards_of_their_keys", ""),
    "ShardTest.test_plain_core_lookup_w_shard": ("same", "test_bind_arguments_name_the_shard", ""),
    "ShardTest.test_roundtrip_future": ("same", "test_what_was_written_is_read", ""),
    "ShardTest.test_roundtrip": ("differs", "test_what_was_written_is_read", NO_TOKEN),
    "ShardTest.test_get_baked_query": ("differs", "test_baked_queries_get_a_row_of_any_shard", NO_TOKEN),
    "ShardTest.test_get_baked_query_shard_id": (
        "differs",
        "test_baked_queries_look_in_the_shard_they_are_told",
        NO_TOKEN,
    ),
    "ShardTest.test_filter_baked_query_shard_id": (
        "same",
        "test_baked_queries_look_in_the_shard_they_are_told",
        "",
    ),
    "ShardTest.test_shard_id_event": (
        "differs",
        "test_the_load_event_can_ask_for_the_shard",
        "one load for all shards: ask session.shard_of(object), not the context's bind_arguments",
    ),
    "ShardTest.test_baked_mix": ("same", "test_a_bakery_serves_sessions_of_both_kinds", ""),
    "ShardTest.test_orm_update_synchronize": ("same", "test_an_update_changes_rows_and_objects", ""),
    "ShardTest.test_orm_delete_synchronize": ("same", "test_a_delete_takes_rows_and_objects", ""),
    "DistinctEngineShardTest.test_plain_core_textual_lookup_w_shard": (
        "same",
        "test_text_goes_to_the_shard_it_is_told_and_to_no_other",
        "",
    ),
    "DistinctEngineShardTest.test_plain_core_textual_lookup": (
        "differs",
        "test_text_goes_to_the_shard_it_is_told_and_to_no_other",
        "text that names no shard is refused: nobody knows how its rows would be merged",
    ),
    "SelectinloadRegressionTest.test_selectinload_query": (
        "same",
        "test_selectin_loading_gives_the_objects_of_the_session",
        "",
    ),
    "RefreshDeferExpireTest.test_refresh": ("same", "test_one_shard_is_asked_for_what_is_loaded_again", ""),
    "RefreshDeferExpireTest.test_deferred": ("same", "test_one_shard_is_asked_for_what_is_loaded_again", ""),
    "RefreshDeferExpireTest.test_unexpire": ("same", "test_one_shard_is_asked_for_what_is_loaded_again", ""),
    "LazyLoadIdentityKeyTest.test_lazy_load_from_identity_map": (
        "same",
        "test_a_parent_in_the_session_needs_no_statement",
        "",
    ),
    "LazyLoadIdentityKeyTest.test_lazy_load_from_db": (
        "same",
        "test_a_parent_is_loaded_from_the_shard_of_its_child",
        "",
    ),
    "LazyLoadIdentityKeyTest.test_lazy_load_no_baked_conflict": (
        "same",
        "test_the_second_lazy_load_goes_to_its_own_shard",
        "",
    ),
    "UseAssocProxForM2MTest.test_update_many_to_many_sharded": (
        "differs",
        "test_association_objects_are_written_with_both_their_ends",
        "shards are told by keys, not by a callback: an object that nothing tells one is refused",
    ),
    "UseAssocProxForM2MTest.test_update_many_to_many_sharded__save_junction_table_directly": (
        "same",
        "test_association_objects_are_written_by_their_keys",
        "",
    ),
}
"""By SQLAlchemy's test: same, or not; the test of this module that stands for it; what differs."""


class Base(DeclarativeBase):
    pass


class City(Base):
    __tablename__ = "cities"

    id: Mapped[int] = primary_key()
    name: Mapped[str] = sharding_key(unique=True)
    continent: Mapped[str]
    motto: Mapped[str] = mapped_column(deferred=True)
    reports: Mapped[list[Report]] = relationship(back_populates="city")


class Report(Base):
    __tablename__ = "reports"

    id: Mapped[int] = primary_key()
    city_id: Mapped[int] = mapped_column(ForeignKey("cities.id"))
    degrees: Mapped[int]
    city: Mapped[City] = relationship(back_populates="reports")


class Book(Base):
    __tablename__ = "books"

    id: Mapped[int] = primary_key()
    title: Mapped[str] = sharding_key(unique=True)
    links: Mapped[list[Link]] = relationship(back_populates="book")
    authors: AssociationProxy[list[Author]] = association_proxy(
        "links", "author", creator=lambda author: Link(author=author)
    )


class Author(Base):
    __tablename__ = "authors"

    id: Mapped[int] = primary_key()
    links: Mapped[list[Link]] = relationship(back_populates="author")


class Link(Base):
    __tablename__ = "links"

    author_id: Mapped[int] = mapped_column(ForeignKey("authors.id"), primary_key=True)
    book_id: Mapped[int] = mapped_column(ForeignKey("books.id"), primary_key=True)
    book: Mapped[Book] = relationship(back_populates="links")
    author: Mapped[Author] = relationship(back_populates="links")


@pytest.fixture(scope="module")
def home(databases: BlankDatabases) -> Iterator[URL]:
    """The catalog of a cluster of 4 shards with the tables: 0 and 1 on node a, 2 and 3 on b."""
    urls = databases.take(), databases.take()
    found_cluster(urls[0], {"a": urls[0], "b": urls[1]}, 4)
    with Cluster.connect(urls[0]) as cluster:
        for shard in range(4):
            with cluster.at(shard=shard).engine.begin() as connection:
                Base.metadata.create_all(connection, checkfirst=False)
    yield urls[0]
    for url in urls:
        databases.give_back(url)


@pytest.fixture
def cluster(home: URL) -> Iterator[Cluster]:
    """The cluster, its tables empty."""
    with Cluster.connect(home) as cluster:
        yield cluster
        for shard in range(4):
            with cluster.at(shard=shard).connection() as connection, connection.begin():
                for table in reversed(Base.metadata.sorted_tables):
                    connection.execute(table.delete())


def name_in(cluster: Cluster, shard: int, number: int = 0) -> str:
    found = [name for n in range(200) if cluster.shard_for(name := f"name {n}") == shard]
    return found[number]


@pytest.fixture
def cities(cluster: Cluster) -> dict[str, int]:
    """IDs by name of two cities a shard; the first of shards 0, 1 and 3 reports 75, 80 and 85 degrees."""
    with cluster.sharded_session() as session, session.begin():
        made = []
        for shard in range(4):
            for number in range(2):
                name = name_in(cluster, shard, number)
                made.append(City(name=name, continent=f"continent {shard}", motto=f"of {name}"))
        for number, degrees in ((0, 75), (2, 80), (6, 85)):
            made[number].reports.append(Report(degrees=degrees))
        session.add_all(made)
        session.flush()
        return {city.name: city.id for city in made}


@contextmanager
def statements(cluster: Cluster) -> Iterator[Counter[str]]:
    """How many statements each node gets meanwhile."""
    sent: Counter[str] = Counter()
    engines = {name: cluster.engine(node) for name, node in zip("ab", nodes(cluster), strict=True)}

    def listener(name: str) -> Callable[..., None]:
        def note(_connection: Connection, _cursor: object, _statement: str, *rest: Any) -> None:
            stand_in = rest[1].execution_options.get(STAND_IN)
            if stand_in is None or stand_in.spent:
                sent[name] += 1

        return note

    notes = {name: listener(name) for name in engines}
    for name, engine in engines.items():
        event.listen(engine, "before_cursor_execute", notes[name])
    yield sent
    for name, engine in engines.items():
        event.remove(engine, "before_cursor_execute", notes[name])


def nodes(cluster: Cluster) -> list[Any]:
    """The nodes of shards 0 and 1, and of 2 and 3."""
    return list(cluster.placement.nodes.values())


def test_every_test_of_sqlalchemys_is_accounted_for() -> None:
    tree = ast.parse(Path(__file__).read_text())
    here = {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}
    assert set(FOLLOWED) == set(SQLALCHEMYS.split())
    for fate, test, why in FOLLOWED.values():
        assert test in here
        assert bool(why) == (fate != "same")


def test_get_finds_a_row_of_any_shard(cluster: Cluster, cities: dict[str, int]) -> None:
    """ShardTest.test_get"""
    with cluster.sharded_session() as session:
        for name, id_ in cities.items():
            city = session.get(City, id_)
            assert city is not None
            assert city.name == name
            assert session.get(City, id_) is city


def test_get_one_raises_where_there_is_no_row(cluster: Cluster, cities: dict[str, int]) -> None:
    """ShardTest.test_get_one"""
    with cluster.sharded_session() as session:
        for name, id_ in cities.items():
            assert session.get_one(City, id_).name == name
        with pytest.raises(NoResultFound, match="No row was found when one was required"):
            session.get_one(City, cluster.at(shard=2).reserve(1)[0])


def test_a_query_looks_in_the_shard_it_is_told(cluster: Cluster, cities: dict[str, int]) -> None:
    """ShardTest.test_get_explicit_shard"""
    id_ = cities[name_in(cluster, 1)]
    with cluster.sharded_session() as session:
        query: Any = session.query(City)
        assert query.set_shard(2).where(City.id == id_).first() is None
        assert query.set_shard(1).where(City.id == id_).one().id == id_
        session.expunge_all()
        assert query.set_shard(2).where(City.id == id_).first() is None
        assert session.get_one(City, id_).name == name_in(cluster, 1)


NAMED = ["nothing", "option of the first", "option", "bind argument"]


def first_city(session: Session, statement: Any, named: str) -> City:
    """The first row, of shard 0, which is named in that way."""
    shard: Any = 0
    if named.startswith("option"):
        statement = statement.options(set_shard_id(shard, propagate_to_loaders=named == "option"))
    bound = {"shard_id": 0} if named == "bind argument" else {}
    city: City = session.scalars(statement, bind_arguments=bound).one()
    return city


@pytest.mark.parametrize("named", NAMED)
@pytest.mark.parametrize("load", [None, lazyload, selectinload], ids=["none", "lazyload", "selectinload"])
def test_relationships_load_from_the_shard_of_their_owner(
    cluster: Cluster, cities: dict[str, int], load: Any, named: str
) -> None:
    """ShardTest.test_set_shard_option_relationship"""
    statement = select(City).where(City.motto == f"of {name_in(cluster, 0)}")
    if load is not None:
        statement = statement.options(load(City.reports))
    with cluster.sharded_session() as session, statements(cluster) as sent:
        city = first_city(session, statement, named)
        assert [report.degrees for report in city.reports] == [75]
        assert sent == ({"a": 2, "b": 1} if named == "nothing" else {"a": 2})


@pytest.mark.parametrize("named", NAMED)
@pytest.mark.parametrize("deferred", [False, True])
def test_deferred_columns_load_from_the_shard_of_their_row(
    cluster: Cluster, cities: dict[str, int], deferred: bool, named: str
) -> None:
    """ShardTest.test_set_shard_option_column"""
    statement = select(City).where(City.motto == f"of {name_in(cluster, 0)}")
    if deferred:
        statement = statement.options(defer(City.continent))
    with cluster.sharded_session() as session, statements(cluster) as sent:
        assert first_city(session, statement, named).continent == "continent 0"
        assert sent == ({"a": 1 + deferred} | ({"b": 1} if named == "nothing" else {}))


def test_bind_arguments_name_the_shard(cluster: Cluster, cities: dict[str, int]) -> None:
    """ShardTest.test_query_explicit_shard_via_bind_opts, test_plain_core_lookup_w_shard"""
    name = name_in(cluster, 1)
    table = City.__table__
    with cluster.sharded_session() as session, statements(cluster) as sent:
        query = select(City).where(City.id == cities[name])
        assert session.scalars(query, bind_arguments={"shard_id": 1}).one().name == name
        found = session.execute(table.select(), bind_arguments={"shard_id": 1}).all()
        assert {row.name for row in found} == {name, name_in(cluster, 1, 1)}
        assert sent == {"a": 2}


def test_rows_are_in_the_shards_of_their_keys(cluster: Cluster, cities: dict[str, int]) -> None:
    """ShardTest.test_plain_db_lookup"""
    for shard in range(4):
        with cluster.at(shard=shard).connection() as connection:
            found = {(row.id, row.name) for row in connection.execute(City.__table__.select())}
        names = [name_in(cluster, shard, number) for number in range(2)]
        assert found == {(cities[name], name) for name in names}


@pytest.mark.parametrize("legacy", [True, False])
def test_what_was_written_is_read(cluster: Cluster, cities: dict[str, int], legacy: bool) -> None:
    """ShardTest.test_roundtrip, test_roundtrip_future"""
    with cluster.sharded_session() as session:

        def cities_where(*criteria: Any) -> list[City]:
            if legacy:
                return session.query(City).filter(*criteria).all()
            return list(session.execute(select(City).filter(*criteria)).scalars())

        name = name_in(cluster, 1)
        (city,) = cities_where(City.motto == f"of {name}")
        assert city.motto == f"of {name}"
        session.expire_all()
        assert session.get_one(City, city.id).motto == city.motto
        assert [report.degrees for report in city.reports] == [80]
        assert {one.name for one in cities_where(City.continent == "continent 0")} == {
            name_in(cluster, 0),
            name_in(cluster, 0, 1),
        }
        some = cities_where(City.continent.in_(["continent 1", "continent 2"]))
        assert {one.name for one in some} == {name_in(cluster, s, n) for s in (1, 2) for n in (0, 1)}
        assert {session.shard_of(one) for one in some} == {1, 2}
        assert {inspect(one).identity_token for one in some} == {None}
        reports = [one.reports[0] for one in cities_where(City.reports.any())]
        assert {session.shard_of(one) for one in reports} == {0, 1, 3}
        assert {inspect(one).identity_key for one in reports} == {(Report, (r.id,), None) for r in reports}


bakery: Any = BakedQuery.bakery


def test_baked_queries_get_a_row_of_any_shard(cluster: Cluster, cities: dict[str, int]) -> None:
    """ShardTest.test_get_baked_query"""
    baked: Any = bakery()(lambda session: session.query(City))
    with cluster.sharded_session() as session:
        for name, id_ in cities.items():
            city = baked(session).get(id_)
            assert city.name == name
            assert inspect(city).key[2] is None
            assert session.shard_of(city) == cluster.shard_for(name)


def test_baked_queries_look_in_the_shard_they_are_told(cluster: Cluster, cities: dict[str, int]) -> None:
    """ShardTest.test_get_baked_query_shard_id, test_filter_baked_query_shard_id"""
    name = name_in(cluster, 1)
    id_ = cities[name]
    baker: Any = bakery()
    with cluster.sharded_session() as session:
        baked = baker(lambda session: session.query(City))
        found = baked(session).with_post_criteria(lambda query: query.set_shard(1)).get(id_)
        assert found.name == name
        filtered = baker(lambda session: session.query(City)).with_criteria(
            lambda query: query.filter_by(id=id_)
        )
        assert filtered(session).with_post_criteria(lambda query: query.set_shard(1)).one() is found
        there = filtered(session).with_post_criteria(lambda query: query.set_shard(2))
        assert there.one_or_none() is None


def test_a_bakery_serves_sessions_of_both_kinds(cluster: Cluster, cities: dict[str, int]) -> None:
    """ShardTest.test_baked_mix"""
    name = name_in(cluster, 2)
    baked: Any = bakery()(lambda session: session.query(City))
    for _ in range(2):
        with cluster.sharded_session() as session:
            assert baked(session).get(cities[name]).name == name
        with Session(cluster.at(shard=2).engine) as plain:
            assert baked(plain).get(cities[name]).name == name


def test_the_load_event_can_ask_for_the_shard(cluster: Cluster, cities: dict[str, int]) -> None:
    """ShardTest.test_shard_id_event"""
    told: list[int] = []

    def note(city: City, context: Any) -> None:
        told.append(context.session.shard_of(city))

    event.listen(City, "load", note)
    try:
        with cluster.sharded_session() as session:
            first: Any = session.query(City).filter_by(name=name_in(cluster, 1))
            kept = first.set_shard(1).one()
            found = session.query(City).all()
            assert kept in found
    finally:
        event.remove(City, "load", note)
    assert told[0] == 1
    assert Counter(told) == {0: 2, 1: 2, 2: 2, 3: 2}


SYNCHRONIZE = pytest.mark.parametrize("how", ["fetch", "evaluate", "auto"])


@SYNCHRONIZE
@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("returning", [True, False])
def test_an_update_changes_rows_and_objects(
    cluster: Cluster, cities: dict[str, int], how: Any, legacy: bool, returning: bool
) -> None:
    """ShardTest.test_orm_update_synchronize, and the same with RETURNING."""
    with cluster.sharded_session() as session:
        reports = session.query(Report).all()
        assert {report.degrees for report in reports} == {75, 80, 85}
        if legacy:
            session.query(Report).filter(Report.degrees >= 80).update(
                {"degrees": Report.degrees + 6}, synchronize_session=how
            )
        else:
            change: Any = update(Report).where(Report.degrees >= 80).values(degrees=Report.degrees + 6)
            change = change.execution_options(synchronize_session=how)
            if returning:
                assert set(session.scalars(change.returning(Report.degrees))) == {86, 91}
            else:
                session.execute(change)
        with statements(cluster) as sent:
            assert {report.degrees for report in reports} == {75, 86, 91}
            assert sent == {}
        assert set(session.scalars(select(Report.degrees))) == {75, 86, 91}


@SYNCHRONIZE
@pytest.mark.parametrize("legacy", [True, False])
def test_a_delete_takes_rows_and_objects(
    cluster: Cluster, cities: dict[str, int], how: Any, legacy: bool
) -> None:
    """ShardTest.test_orm_delete_synchronize"""
    with cluster.sharded_session() as session:
        reports = session.query(Report).all()
        if legacy:
            session.query(Report).filter(Report.degrees >= 80).delete(synchronize_session=how)
        else:
            session.execute(
                delete(Report).where(Report.degrees >= 80).execution_options(synchronize_session=how)
            )
        with statements(cluster) as sent:
            assert {r.degrees: inspect(r).deleted for r in reports} == {75: False, 80: True, 85: True}
            assert sent == {}
        assert session.scalars(select(Report.degrees)).all() == [75]


def test_text_goes_to_the_shard_it_is_told_and_to_no_other(cluster: Cluster, cities: dict[str, int]) -> None:
    """DistinctEngineShardTest.test_plain_core_textual_lookup_w_shard, test_plain_core_textual_lookup"""
    with cluster.sharded_session() as session, statements(cluster) as sent:
        with pytest.raises(BadArgument, match="a TextClause does not name a shard"):
            session.execute(text("select * from cities where id = 1"))
        assert sent == {}
        asked = "select name from shard_0002.cities"
        found = session.scalars(text(asked), bind_arguments={"shard_id": 2}).all()
        assert set(found) == {name_in(cluster, 2), name_in(cluster, 2, 1)}
        assert sent == {"b": 1}


def test_selectin_loading_gives_the_objects_of_the_session(cluster: Cluster) -> None:
    """SelectinloadRegressionTest.test_selectinload_query"""
    with cluster.sharded_session() as session:
        made = [
            City(name=name_in(cluster, shard), continent="", motto="", reports=[Report(degrees=shard)])
            for shard in range(4)
        ]
        session.add_all(made)
        session.commit()
        found = session.query(City).options(selectinload(City.reports)).all()
        assert set(found) == set(made)
        with statements(cluster) as sent:
            assert [city.reports[0].degrees for city in made] == [0, 1, 2, 3]
            assert sent == {}


@pytest.mark.parametrize("again", ["refresh", "deferred", "unexpire"])
def test_one_shard_is_asked_for_what_is_loaded_again(
    cluster: Cluster, cities: dict[str, int], again: str
) -> None:
    """RefreshDeferExpireTest.test_refresh, test_deferred, test_unexpire"""
    name = name_in(cluster, 3)
    with cluster.sharded_session(fan_out="named") as session:
        query: Any = session.query(City).filter_by(name=name)
        city = query.set_shard(3).one()
        with statements(cluster) as sent:
            if again == "refresh":
                session.refresh(city)
            elif again == "unexpire":
                session.expire(city)
                assert city.continent == "continent 3"
            else:
                assert city.motto == f"of {name}"
            assert sent == {"b": 1}


def test_a_parent_in_the_session_needs_no_statement(cluster: Cluster, cities: dict[str, int]) -> None:
    """LazyLoadIdentityKeyTest.test_lazy_load_from_identity_map"""
    with cluster.sharded_session() as session:
        cities_kept = session.scalars(select(City)).all()
        for report in session.scalars(select(Report)).all():
            session.expire(report, ["city"])
            with statements(cluster) as sent:
                assert report.city in cities_kept
                assert sent == {}


def test_a_parent_is_loaded_from_the_shard_of_its_child(cluster: Cluster, cities: dict[str, int]) -> None:
    """LazyLoadIdentityKeyTest.test_lazy_load_from_db"""
    with cluster.sharded_session() as session:
        for report in session.scalars(select(Report)).all():
            with statements(cluster) as sent:
                assert report.city.id == report.city_id
                assert session.shard_of(report.city) == session.shard_of(report)
                assert sent == {"a" if session.shard_of(report) < 2 else "b": 1}


def test_the_second_lazy_load_goes_to_its_own_shard(cluster: Cluster, cities: dict[str, int]) -> None:
    """LazyLoadIdentityKeyTest.test_lazy_load_no_baked_conflict"""
    with cluster.sharded_session() as session:
        found = [session.get_one(City, cities[name_in(cluster, shard)]) for shard in range(4)]
        assert [[report.degrees for report in city.reports] for city in found] == [[75], [80], [], [85]]


def test_association_objects_are_written_with_both_their_ends(cluster: Cluster) -> None:
    """UseAssocProxForM2MTest.test_update_many_to_many_sharded"""
    with cluster.sharded_session() as session:
        for shard in range(4):
            book = Book(title=name_in(cluster, shard))
            book.authors.append(Author(id=cluster.at(shard=shard).reserve(1)[0]))
            session.add(book)
        session.commit()
        for book in session.scalars(select(Book)):
            assert (
                session.shard_of(book.authors[0]) == session.shard_of(book) == cluster.shard_for(book.title)
            )
        session.add(Author())
        with pytest.raises(BadArgument, match="cannot determine the shard of a new Author"):
            session.flush()


def test_association_objects_are_written_by_their_keys(cluster: Cluster) -> None:
    """UseAssocProxForM2MTest.test_update_many_to_many_sharded__save_junction_table_directly"""
    with cluster.sharded_session() as session:
        book = Book(title=name_in(cluster, 3))
        author = Author(id=cluster.at(shard=3).reserve(1)[0])
        session.add_all([book, author])
        session.commit()
        session.add(Link(book_id=book.id, author_id=author.id))
        session.commit()
        assert list(book.authors) == [author]
        assert session.shard_of(book.links[0]) == 3


SQLALCHEMYS = """
ShardTest.test_get
ShardTest.test_get_one
ShardTest.test_get_explicit_shard
ShardTest.test_set_shard_option_relationship
ShardTest.test_set_shard_option_column
ShardTest.test_query_explicit_shard_via_bind_opts
ShardTest.test_plain_db_lookup
ShardTest.test_plain_core_lookup_w_shard
ShardTest.test_roundtrip_future
ShardTest.test_roundtrip
ShardTest.test_get_baked_query
ShardTest.test_get_baked_query_shard_id
ShardTest.test_filter_baked_query_shard_id
ShardTest.test_shard_id_event
ShardTest.test_baked_mix
ShardTest.test_orm_update_synchronize
ShardTest.test_orm_delete_synchronize
DistinctEngineShardTest.test_plain_core_textual_lookup_w_shard
DistinctEngineShardTest.test_plain_core_textual_lookup
SelectinloadRegressionTest.test_selectinload_query
RefreshDeferExpireTest.test_refresh
RefreshDeferExpireTest.test_deferred
RefreshDeferExpireTest.test_unexpire
LazyLoadIdentityKeyTest.test_lazy_load_from_identity_map
LazyLoadIdentityKeyTest.test_lazy_load_from_db
LazyLoadIdentityKeyTest.test_lazy_load_no_baked_conflict
UseAssocProxForM2MTest.test_update_many_to_many_sharded
UseAssocProxForM2MTest.test_update_many_to_many_sharded__save_junction_table_directly
"""
"""The tests of SQLAlchemy 2.1.9, in their order."""
