"""Statements over shards, and in one database with the same rows: the same answer in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from sqlalchemy import (
    CHAR,
    DateTime,
    Double,
    Engine,
    ForeignKey,
    Integer,
    String,
    Text,
    bindparam,
    case,
    cast,
    collate,
    desc,
    exists,
    false,
    func,
    insert,
    literal,
    literal_column,
    select,
    text,
    type_coerce,
)
from sqlalchemy.dialects.postgresql import CITEXT
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, joinedload, mapped_column, relationship
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.elements import ColumnClause, quoted_name
from sqlalchemy.sql.functions import FunctionElement

from shardids import Cluster, primary_key, sharding_key
from shardids.errors import CannotCombine
from shardids.pg.connections import open_engine
from shardids.tables import views
from tests.conftest import BlankDatabases, found_cluster
from tests.support.clusters import catalog_at, connected

SHARDS = 4


class Base(DeclarativeBase):
    pass


class Account(Base):
    """A tenant has several, all in one shard."""

    __tablename__ = "accounts"

    id: Mapped[int] = primary_key()
    tenant: Mapped[str] = sharding_key()
    x: Mapped[int]
    any_case: Mapped[str] = mapped_column(CITEXT)
    any_case_c: Mapped[str] = mapped_column(CITEXT(collation="C"))
    padded: Mapped[str] = mapped_column(CHAR(3, collation="C"))
    plain: Mapped[str] = mapped_column(String(collation="C"))
    y: Mapped[int]
    parts: Mapped[list[Part]] = relationship()


class Part(Base):
    """A part of an account, with columns of the same names."""

    __tablename__ = "parts"

    id: Mapped[int] = primary_key()
    account_id: Mapped[int] = mapped_column(ForeignKey(Account.id))
    x: Mapped[int]
    y: Mapped[int]


A = Account


class OwnMax(FunctionElement[int]):
    """The maximum, by the name of another function."""

    name = "sum"
    type = Integer()
    inherit_cache = True


class OwnNumber(ColumnClause[int]):
    """The number of rows."""

    inherit_cache = True


@compiles(OwnMax)
def _max(element: OwnMax, compiler: SQLCompiler, **options: Any) -> str:
    return f"max({compiler.process(element.clauses, **options)})"


@compiles(OwnNumber)
def _number(_element: OwnNumber, _compiler: SQLCompiler, **_: Any) -> str:
    return "count(*)"


FUNCTIONS = """
create schema app;
create aggregate app.sum(int) (sfunc = int4pl, stype = int, initcond = '100');
create aggregate app.min(int) (sfunc = int4pl, stype = int, initcond = '100');
create function app."SUM"(int) returns int language sql immutable as 'select $1 * 2';
create function app.coalesce(bigint, int) returns bigint language sql immutable as 'select $1 * 2';
create function app.length(text) returns int language sql volatile as 'select 5';
alter role current_user in database {database} set search_path = public, app;
"""
"""An application's own, some of them with the names of PostgreSQL's."""


class Pair(NamedTuple):
    """A cluster, and one database with the same rows."""

    cluster: Cluster
    plain: Engine


@pytest.fixture(scope="module")
def pair(databases: BlankDatabases) -> Iterator[Pair]:
    """Four shards on two nodes, of which b is the query node."""
    urls = [databases.take() for _ in range(3)]
    for url in urls:
        with connected(url) as connection:
            connection.execute(b"create extension citext")
            connection.execute(FUNCTIONS.format(database=connection.info.dbname).encode())
    found_cluster(urls[0], {"a": urls[0], "b": urls[1]}, SHARDS)
    plain = open_engine(urls[2], what="the plain database")
    with Cluster.connect(urls[0], listen=False) as cluster:
        for shard in range(SHARDS):
            with cluster.at(shard=shard).engine.begin() as connection:
                Base.metadata.create_all(connection, checkfirst=False)
        with cluster.sharded_session() as session, session.begin():
            for n in range(30):
                # Letters in one case or the other, or characters below a space.
                word = (chr(ord("a") + n * 7 % 26) + "bB\t"[n % 3])[: 1 + n % 2]
                word = word.upper() if n % 5 < 2 else word
                row = Account(tenant=f"t{n % 9}", x=n * 7 % 30, y=n % 4)
                row.parts = [Part(x=n * 11 % 30, y=n * 13 % 30), Part(x=n * 17 % 30, y=n * 19 % 30)]
                row.any_case = row.any_case_c = row.padded = row.plain = word
                session.add(row)
        with cluster.sharded_session() as session, plain.begin() as there:
            tables = Base.metadata.sorted_tables
            rows = [[row._asdict() for row in session.execute(select(*table.c))] for table in tables]
            assert {cluster.shard_of(row["id"]) for row in rows[0]} == set(range(SHARDS))
            there.execute(text("create function next_id() returns bigint language sql as 'select 1::bigint'"))
            Base.metadata.create_all(there, checkfirst=False)
            for table, of_table in zip(tables, rows, strict=True):
                there.execute(insert(table), of_table)
        with catalog_at(urls[0]) as catalog:
            views.create_query_node(catalog, node="b", store_password=True)
        yield Pair(cluster, plain)
    plain.dispose()
    for url in urls:
        databases.give_back(url)


def compare(pair: Pair, statement: Any, given: Any = None) -> str:
    """Compares the answers in their order, and returns the way that the statement over the shards took."""
    with Session(pair.plain) as plain:
        expected = plain.execute(statement, given).all()
    with pair.cluster.sharded_session() as session:
        result: Any = session.execute(statement, given)
        assert result.all() == expected, str(statement)
        return str(getattr(result, "raw", result).context.execution_options["shardids_engine"])


TENANT = collate(A.tenant, "C")
COUNT = func.count()
NUMBER = func.row_number().over(order_by=(COUNT.desc(), A.tenant))
NUMBERED = select(A.tenant, NUMBER.label("n")).group_by(A.tenant).subquery()
BY_TENANT = select(A.tenant, COUNT).group_by(A.tenant)


@pytest.mark.parametrize(
    "statement",
    [
        BY_TENANT.add_columns(NUMBER).order_by(TENANT),
        BY_TENANT.add_columns(func.rank().over(order_by=COUNT)).order_by(TENANT),
        BY_TENANT.add_columns(func.sum(COUNT).over()).order_by(TENANT),
        BY_TENANT.add_columns(COUNT * 100 / func.sum(func.sum(A.x)).over()).order_by(TENANT),
        BY_TENANT.add_columns(func.lag(A.tenant).over(order_by=A.tenant)).order_by(TENANT),
        BY_TENANT.order_by(NUMBER),
        select(A.id, func.sum(func.max(A.x)).over(order_by=A.id)).group_by(A.id).order_by(A.id),
        select(NUMBERED.c.tenant).where(NUMBERED.c.n <= 3).order_by(NUMBERED.c.n),
        select(NUMBERED.c.tenant).where(NUMBERED.c.n <= 3).order_by(collate(NUMBERED.c.tenant, "C")),
    ],
)
def test_windows_go_over_all_groups(pair: Pair, statement: Any) -> None:
    assert compare(pair, statement) == "views"


def test_a_window_that_the_query_node_can_not_compute_is_refused(pair: Pair) -> None:
    # Only a table's primary key tells that a group has one x.
    running = select(A.id, func.sum(A.x).over(order_by=A.id)).group_by(A.id)
    with (
        pair.cluster.sharded_session() as session,
        pytest.raises(
            CannotCombine, match=r"a window function over several shards.*must appear in the GROUP"
        ),
    ):
        session.execute(running)


@pytest.mark.parametrize(
    "statement",
    [
        BY_TENANT.add_columns(COUNT.filter(A.x > 9), func.avg(A.x)).order_by(TENANT),
        select(A.id, func.percentile_disc(0.5).within_group(A.x)).group_by(A.id).order_by(A.id),
    ],
)
def test_aggregates_of_a_group_are_computed_in_its_shard(pair: Pair, statement: Any) -> None:
    assert compare(pair, statement) == "merge"


def test_a_sum_without_rows_is_the_given_number(pair: Pair) -> None:
    for criteria in (A.x >= 0, A.tenant.in_(["t1", "t2", "t3"]), A.x < 0):
        for made in (func.sum(A.x), func.count().filter(A.x > 9)):
            # SQLAlchemy compiles them once: they differ in a value.
            for number, way in ((0, "merge"), (5, "views"), (0, "merge"), (7, "views")):
                assert compare(pair, select(func.coalesce(made, number)).where(criteria)) == way
            named = select(func.coalesce(made, bindparam("instead", 0))).where(criteria)
            for given in ({"instead": 5}, {"instead": 0}, None):
                compare(pair, named, given)


@pytest.mark.parametrize(
    ("key", "way"),
    [
        (collate(A.any_case, "C"), "views"),
        (A.any_case_c, "views"),
        (collate(A.padded, "C"), "views"),
        (A.padded, "views"),
        (collate(cast(A.any_case, Text), "C"), "merge"),
        (A.plain, "merge"),
        (collate(A.plain, "default"), "views"),
    ],
)
def test_text_is_ordered_as_its_type_compares_it(pair: Pair, key: Any, way: str) -> None:
    ways = {compare(pair, select(A.id, A.plain).order_by(key, A.id).limit(n)) for n in range(1, 20)}
    ways.add(compare(pair, select(A.id).order_by(key.desc(), A.id)))
    ways.add(compare(pair, select(func.max(key)).where(A.x > 10)))
    ways.add(compare(pair, select(func.min(key), func.max(key))))
    assert ways == {way}


LATER = select(A.x.label("later"), A.id).order_by("later", A.id)


@pytest.mark.parametrize(
    ("statement", "way"),
    [
        # A number in SQL is a place among the columns.
        (select(A.x, A.id).order_by(literal_column("1", Integer), A.id), "views"),
        (select(A.id, A.x).order_by(literal_column("2").desc(), literal_column("1")), "views"),
        (select(A.x, A.id).order_by(literal_column("1", Integer).label("place"), A.id), "views"),
        (select(A.x, A.id).order_by(type_coerce(literal_column("1"), Integer), A.id), "views"),
        (select(A.x, A.id).order_by(bindparam("place", 1, literal_execute=True), A.id), "views"),
        (select(A.x, A.id).order_by(text("1"), A.id), "views"),
        (select(A.id, A.x.label("1")).order_by(text("1")), "views"),
        (select(A.id, A.x.label("1")).order_by("1", A.id), "merge"),
        # A name is a column's that is selected, or of a table.
        (LATER, "merge"),
        (LATER.add_columns(A.plain).limit(3), "merge"),
        (select(A.id, A.y, A.x).order_by("x", "id"), "merge"),
        (select(A.x, Part.id).join(Part).order_by("x", Part.id), "views"),
        (select(Part.id, A.x).join_from(A, Part).order_by("x", Part.id), "views"),
        (select(A.id, Part.x).join(Part).order_by("x", Part.id), "views"),
        (select(A.id, Part.y.label("x")).join(Part).order_by("x", Part.id), "merge"),
        (select(A.x, A.id).order_by(A.x + 0, A.id), "merge"),
        (select(A.x).join(A.parts).order_by("x", Part.id).where(A.id > 0), "views"),
        (select(A.x, A.id).where(A.id == Part.account_id).order_by("x", Part.id), "views"),
        # Equal for all rows.
        (select(A.x, A.id).order_by(literal(1), A.id), "views"),
    ],
)
def test_keys_of_an_order_are_those_of_postgresql(pair: Pair, statement: Any, way: str) -> None:
    ways = {compare(pair, statement.limit(n)) for n in (1, 3, 8, 17)}
    ways.add(compare(pair, statement))
    assert ways == {way}


@pytest.mark.parametrize(
    "statement",
    [
        select(A.tenant, A.x).distinct().order_by(A.x.desc(), collate(A.tenant, "C")),
        select(A.tenant).distinct().order_by(A.x),
        select(A.x).distinct().order_by(collate(A.tenant, "C")),
        select(A.y).distinct().order_by(A.id),
        select(A.y, func.count()).group_by(A.id, A.y).distinct().order_by(A.id),
    ],
)
def test_an_order_of_distinct_rows_by_something_else_is_refused(
    pair: Pair, statement: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for select_it in (statement, statement.limit(5)):
        with (
            Session(pair.plain) as plain,
            pytest.raises(ProgrammingError, match="must appear in select list"),
        ):
            plain.execute(select_it)
        with (
            pair.cluster.sharded_session() as session,
            pytest.raises(ProgrammingError, match="must appear in select list"),
        ):
            session.execute(select_it)
        with pair.cluster.sharded_session() as session, monkeypatch.context() as without:
            without.setattr(pair.cluster, "query_node", lambda: None)
            with pytest.raises(CannotCombine, match=r"DISTINCT is ordered by .*, which is not selected"):
                session.execute(select_it)


@pytest.mark.parametrize(
    "statement",
    [
        select(A.id, A.x).distinct().order_by(A.x.desc(), A.id),
        select(A.id, A.x).distinct().order_by(A.__table__.c.x, A.id),
        select(A.__table__.c.id, A.__table__.c.x).distinct().order_by(A.x, A.id),
        select(collate(A.tenant, "C").label("t"), A.id).distinct().order_by("t", A.id),
        select(A.id, (A.x + A.y).label("total")).distinct().order_by(A.x + A.y, A.id),
        select(A.id, A.y).distinct().order_by(desc("y"), "id"),
    ],
)
def test_distinct_rows_are_ordered_by_what_is_selected(pair: Pair, statement: Any) -> None:
    assert {compare(pair, one) for one in (statement, statement.limit(5))} == {"merge"}


def test_a_name_is_not_one_of_a_relationship_loaded_by_a_join(pair: Pair) -> None:
    found = select(A).options(joinedload(A.parts)).order_by(desc("x"), "id")
    with pair.cluster.sharded_session() as session:
        rows = session.execute(found).unique()
        assert rows.raw.context.execution_options["shardids_engine"] == "merge"  # type: ignore[attr-defined]  # of a CursorResult
        expected = session.scalars(select(A.id).order_by(A.x.desc(), A.id)).all()
        assert [row.id for (row,) in rows] == expected


@pytest.mark.parametrize(
    "statement",
    [
        select(func.count(), exists().where(Part.x > 20)),
        select(exists().where(Part.x > 99), func.sum(literal(2))),
        select(func.count().filter(literal(1) == 1), ~exists().where(Part.x > 20)),
        select(func.count()).where(exists().where(Part.x > 20)),
    ],
)
def test_an_aggregate_without_from_is_of_one_row_beside_exists(pair: Pair, statement: Any) -> None:
    assert compare(pair, statement) == "views"


SOME = exists().where(Part.account_id == A.id, Part.x > 20)
ANY, NONE = exists().where(Part.x > 20), exists().where(Part.x > 99)


@pytest.mark.parametrize(
    ("statement", "way"),
    [
        # One row in all, whatever the rows are.
        (select(ANY, ~NONE, NONE), "merge"),
        (select(func.count(A.id), ANY), "merge"),
        (select(func.count(A.id), NONE).where(false()), "merge"),
        # A row for each of FROM.
        (select(SOME).select_from(A).order_by(A.id), "merge"),
        (select(SOME).where(A.x > 5).order_by(A.id), "merge"),
        (select(~SOME).select_from(A).order_by(A.id).limit(3), "merge"),
        (select(SOME, ~SOME).select_from(A).where(A.x > 99), "merge"),
        (select(ANY).select_from(A), "views"),
        (select(~ANY).select_from(A).where(A.x > 5), "views"),
        (select(ANY).select_from(A).where(A.x > 99), "views"),
        (select(ANY).where(false()), "views"),
        (select(ANY).where(literal(1) == 2), "views"),
    ],
)
def test_exists_is_a_row_for_each_of_from(pair: Pair, statement: Any, way: str) -> None:
    assert compare(pair, statement) == way


@pytest.mark.parametrize("order", [(A.y, A.id), (A.x.desc(),), (A.y.desc(), A.x)])
def test_objects_of_several_rows_are_in_order_also_as_a_stream(pair: Pair, order: Any) -> None:
    found = select(A).options(joinedload(A.parts)).order_by(*order)
    for statement in (found, found.limit(7), found.limit(5).offset(3), found.where(A.x > 10)):
        answers = []
        for session in (Session(pair.plain), pair.cluster.sharded_session()):
            with session:
                rows = session.scalars(statement, execution_options={"stream_results": True}).unique()
                answers.append([(row.id, {part.id for part in row.parts}) for row in rows])
        assert answers[0] == answers[1]


def test_limited_objects_are_ordered_by_a_label(pair: Pair) -> None:
    found = select(A, (A.x + A.y).label("total")).order_by(desc("total"), A.id).limit(5)
    for statement in (found.options(joinedload(A.parts)), found.with_for_update(of=A)):
        answers = []
        for session in (Session(pair.plain), pair.cluster.sharded_session()):
            with session:
                rows = session.execute(statement).unique()
                answers.append([(row.id, total, {part.id for part in row.parts}) for row, total in rows])
        assert answers[0] == answers[1]


def own(name: str) -> Any:
    """Returns the function of a name that PostgreSQL does not fold to lower case."""
    return getattr(func, quoted_name(name, quote=True))


@pytest.mark.parametrize(
    ("statement", "way"),
    [
        # PostgreSQL's, however they are written.
        (select(func.SUM(A.x), func.pg_catalog.sum(A.x), func.Pg_Catalog.Max(A.x)), "merge"),
        (select(func.COALESCE(func.pg_catalog.sum(A.x), 0)), "merge"),
        (select(A.id).where(func.pg_catalog.concat(A.plain, "") == A.plain).order_by(A.id), "merge"),
        (select(A.id, func.app.sum(A.x)).group_by(A.id).order_by(A.id), "merge"),
        # Others of the same names.
        (select(func.app.sum(A.x, type_=Integer)), "views"),
        (select(func.coalesce(func.app.sum(A.x), 0)), "views"),
        (select(func.app.coalesce(func.sum(A.x), 0)), "views"),
        (select(A.y, func.app.min(A.x, type_=Integer)).group_by(A.y).order_by(A.y), "views"),
        (select(own("SUM")(A.x), A.id).order_by(A.id), "merge"),
        (select(func.sum(own("SUM")(A.x))), "views"),
        (select(A.id).where(func.app.length(A.plain) == 5).order_by(A.id), "views"),
        (select(A.id).where(func.length(A.plain) > 1).order_by(A.id), "views"),
        # Elements that the application compiles to something else than their class does.
        (select(OwnMax(A.x)), "views"),
        (select(A.y, OwnMax(A.x)).group_by(A.y).order_by(A.y), "views"),
        (select(func.max(A.x) + OwnNumber("n")), "views"),
        (select(A.y, func.max(A.x) + OwnNumber("n")).group_by(A.y).order_by(A.y), "views"),
    ],
)
def test_a_function_is_what_postgresql_takes_it_for(pair: Pair, statement: Any, way: str) -> None:
    assert compare(pair, statement) == way


@pytest.mark.parametrize("type_", [Integer, DateTime])
def test_values_of_another_type_than_declared_are_not_compared(pair: Pair, type_: Any) -> None:
    nan = case((A.x == 7, cast("nan", Double)), else_=cast(A.x, Double))
    for made in (func.max(type_coerce(A.any_case, type_)), func.max(type_coerce(nan, type_))):
        with (
            pair.cluster.sharded_session() as session,
            pytest.raises(CannotCombine, match=r"is .*, which is not of the type of its argument"),
        ):
            session.execute(select(made))
