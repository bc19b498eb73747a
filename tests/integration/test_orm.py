"""Models and tables whose keys the shards fill: SQLAlchemy, in all its ways to write, and Alembic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata, produce_migrations, render_python_code
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    ForeignKey,
    Integer,
    MetaData,
    Table,
    Text,
    bindparam,
    event,
    func,
    insert,
    inspect,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import URL
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    aliased,
    mapped_column,
    relationship,
    selectinload,
    sessionmaker,
)
from sqlalchemy.schema import CreateTable

from shardids import Cluster, next_id, primary_key
from tests.conftest import BlankDatabases, found_cluster


class Base(DeclarativeBase):
    pass


class Stamped:
    """A mixin."""

    id: Mapped[int] = primary_key(comment="tells when and where", sort_order=-1)


class Author(Stamped, Base):
    __tablename__ = "authors"

    name: Mapped[str]
    books: Mapped[list[Book]] = relationship(back_populates="author", cascade="all, delete-orphan")


class Book(Base):
    __tablename__ = "books"

    key: Mapped[int] = primary_key(name="book_id")
    title: Mapped[str]
    author_id: Mapped[int] = mapped_column(ForeignKey("authors.id"))
    author: Mapped[Author] = relationship(back_populates="books")


class Animal(Base):
    __tablename__ = "animals"
    __mapper_args__ = {"polymorphic_identity": "animal", "polymorphic_on": "kind"}  # noqa: RUF012

    id: Mapped[int] = primary_key()
    kind: Mapped[str]
    name: Mapped[str]


class Dog(Animal):
    __tablename__ = "dogs"
    __mapper_args__ = {"polymorphic_identity": "dog"}  # noqa: RUF012

    id: Mapped[int] = mapped_column(ForeignKey("animals.id"), primary_key=True)
    tricks: Mapped[int]


class DataBase(MappedAsDataclass, DeclarativeBase):
    metadata = Base.metadata


class Point(DataBase):
    __tablename__ = "points"

    id: Mapped[int] = primary_key(init=False)
    x: Mapped[int]


CORE = Table(
    "events",
    Base.metadata,
    Column("id", BigInteger, primary_key=True, server_default=next_id()),
    Column("word", Text, nullable=False),
    Column("other", BigInteger, server_default=next_id(), nullable=False),
)


@pytest.fixture(scope="module")
def home(databases: BlankDatabases) -> Iterator[URL]:
    """The catalog of :func:`make_home`."""
    url = databases.take()
    make_home(url)
    yield url
    databases.give_back(url)


def make_home(url: URL) -> None:
    """A cluster of 8 shards on one node; 0 to 3 have the tables."""
    found_cluster(url, {"a": url}, 8)
    with Cluster.connect(url) as cluster:
        for shard in range(4):
            with cluster.at(shard=shard).engine.begin() as connection:
                Base.metadata.create_all(connection)


@pytest.fixture
def cluster(home: URL) -> Iterator[Cluster]:
    with Cluster.connect(home) as cluster:
        yield cluster


def default_of(connection: Connection, table: str, column: str) -> tuple[Any, ...]:
    """Type and default of a column, and what else may fill it."""
    query = text("""
        select format_type(a.atttypid, a.atttypmod), pg_get_expr(d.adbin, d.adrelid), a.attnotnull,
               a.attidentity::text, pg_get_serial_sequence(:table, :column)
        from pg_attribute a left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
        where a.attrelid = cast(:table as regclass) and a.attname = :column""")
    return tuple(connection.execute(query, {"table": table, "column": column}).one())


# Tables.


def test_a_tables_default_is_the_function_of_its_shard(cluster: Cluster) -> None:
    for shard in range(4):
        schema = f"shard_{shard:04}"
        with cluster.at(shard=shard).connection() as connection:
            connection.exec_driver_sql("set local search_path = pg_catalog")
            for table, column in (
                ("authors", "id"),
                ("books", "book_id"),
                ("animals", "id"),
                ("points", "id"),
                ("events", "id"),
                ("events", "other"),
            ):
                found = default_of(connection, f"{schema}.{table}", column)
                assert found == ("bigint", f"{schema}.next_id()", True, "", None)
            for table, column in (("books", "author_id"), ("dogs", "id")):
                assert default_of(connection, f"{schema}.{table}", column)[:2] == ("bigint", None)
            query = (
                "select relname from pg_class where relkind = 'S' and relnamespace = cast(:s as regnamespace)"
            )
            sequences = connection.scalars(text(query), {"s": schema})
            assert sorted(sequences) == ["id_counter", "id_offset"]


def test_create_all_again_finds_the_tables(cluster: Cluster) -> None:
    with cluster.at(shard=1).engine.begin() as connection:
        Base.metadata.create_all(connection)
        assert inspect(connection).has_table("authors", schema="shard_0001")
    with cluster.at(shard=4).engine.begin() as connection:
        Base.metadata.create_all(connection)
        Base.metadata.drop_all(connection)
        assert not inspect(connection).has_table("authors", schema="shard_0004")


def test_the_sql_without_a_shard_names_none() -> None:
    made = str(CreateTable(CORE).compile(dialect=postgresql.dialect()))
    assert "id BIGINT DEFAULT next_id() NOT NULL" in made
    assert str(select(next_id())).startswith("SELECT next_id() AS")


def test_alembic_makes_the_default_of_its_own_shard(cluster: Cluster) -> None:
    for shard in (5, 6):
        with cluster.engine(cluster.node_of(shard)).begin() as connection:
            connection.exec_driver_sql(f"set local search_path = shard_{shard:04}")
            operations = Operations(MigrationContext.configure(connection))
            operations.create_table(
                "migrated",
                Column("id", BigInteger, primary_key=True, server_default=next_id()),
                Column("word", Text),
            )
            operations.add_column(
                "migrated", Column("other", BigInteger, server_default=next_id(), nullable=False)
            )
            connection.exec_driver_sql("set local search_path = pg_catalog")
            for column in ("id", "other"):
                found = default_of(connection, f"shard_{shard:04}.migrated", column)
                assert found == ("bigint", f"shard_{shard:04}.next_id()", True, "", None)
            (made,) = connection.execute(
                text(f"insert into shard_{shard:04}.migrated default values returning id")
            )
            assert cluster.shard_of(made.id) == shard


def test_autogenerate_writes_a_migration_that_makes_no_difference(cluster: Cluster) -> None:
    def ours(name: str | None, kind: str, _parents: object) -> bool:
        return not (kind == "table" and name == "shardids_version")

    options = {"compare_server_default": True, "compare_type": True, "include_name": ours}
    with cluster.engine(cluster.node_of(7)).begin() as connection:
        connection.exec_driver_sql("set local search_path = shard_0007")
        context = MigrationContext.configure(connection, opts=options)
        script = produce_migrations(context, Base.metadata)
        assert script.upgrade_ops is not None
        code = render_python_code(script.upgrade_ops)
        assert "server_default=sa.text('next_id()')" in code
        names: dict[str, Any] = {}
        exec("import sqlalchemy as sa\ndef upgrade(op):\n" + code, names)
        names["upgrade"](Operations(context))
        assert compare_metadata(context, Base.metadata) == []
        connection.exec_driver_sql("set local search_path = pg_catalog")
        assert default_of(connection, "shard_0007.authors", "id")[1] == "shard_0007.next_id()"


# Writing.


def test_the_orm_writes_one_row(cluster: Cluster) -> None:
    with cluster.session(shard=1) as session:
        author = Author(name="one")
        session.add(author)
        session.flush()
        assert cluster.shard_of(author.id) == 1
        made = author.id
        session.commit()
        session.expunge_all()
        found = session.get_one(Author, made)
        found.name = "changed"
        session.commit()
        assert session.scalars(select(Author.name).where(Author.id == made)).one() == "changed"
        session.delete(found)
        session.commit()
        assert session.get(Author, made) is None


def test_the_orm_writes_many_rows_and_their_relations(cluster: Cluster) -> None:
    with cluster.session(key=7) as session:
        shard = cluster.shard_for(7)
        cluster_authors = [
            Author(name=f"author {n}", books=[Book(title=f"book {n}.{m}") for m in range(3)])
            for n in range(50)
        ]
        session.add_all(cluster_authors)
        session.commit()
        ids = [author.id for author in cluster_authors]
        assert ids == sorted(ids)
        assert len(set(ids)) == 50
        assert {cluster.shard_of(one) for one in ids} == {shard}
        session.expunge_all()
        query = (
            select(Author).where(Author.id.in_(ids)).options(selectinload(Author.books)).order_by(Author.id)
        )
        for number, author in enumerate(session.scalars(query)):
            assert author.name == f"author {number}"
            assert [book.title for book in author.books] == [f"book {number}.{m}" for m in range(3)]
            assert all(cluster.shard_of(book.key) == shard for book in author.books)
        other = aliased(Book)
        joined = select(func.count()).select_from(Author).join(Book).join(other, other.author_id == Author.id)
        assert session.scalars(joined.where(Author.id.in_(ids))).one() == 50 * 9


def test_ids_that_were_reserved_need_no_round_trip(cluster: Cluster) -> None:
    block = cluster.at(shard=2).reserve(300)
    with cluster.session(shard=2) as session, session.begin():
        statements: list[str] = []
        event.listen(
            session.get_bind().engine,
            "before_cursor_execute",
            lambda _c, _cursor, statement, *_rest: statements.append(statement),
        )
        session.add_all(Author(id=one, name="reserved") for one in block)
        session.flush()
        assert len(statements) < 10
        session.execute(
            insert(Author), [{"id": one, "name": "reserved"} for one in cluster.at(shard=2).reserve(300)]
        )
    with cluster.session(shard=2) as session:
        kept = session.scalars(select(Author.id).where(Author.name == "reserved").order_by(Author.id)).all()
        assert kept[:300] == list(block)
        assert len(kept) == 600


def test_core_inserts(cluster: Cluster) -> None:
    with cluster.at(shard=3).engine.begin() as connection:
        (one,) = connection.execute(CORE.insert().values(word="a").returning(CORE.c.id)).scalars()
        (key,) = connection.execute(CORE.insert().values(word="b")).inserted_primary_key
        rows = connection.execute(
            CORE.insert().returning(CORE.c.id, CORE.c.word, CORE.c.other, sort_by_parameter_order=True),
            [{"word": str(n)} for n in range(20)],
        ).all()
        assert [row.word for row in rows] == [str(n) for n in range(20)]
        copied = connection.execute(
            CORE.insert().from_select(["word"], select(CORE.c.word)).returning(CORE.c.id)
        ).scalars()
        upsert = (
            postgresql.insert(CORE).values(id=one, word="c").on_conflict_do_nothing(index_elements=["id"])
        )
        assert connection.execute(upsert.returning(CORE.c.id)).all() == []
        ids = [one, key, *(row.id for row in rows), *(row.other for row in rows), *copied]
        assert len(set(ids)) == len(ids) == 64
        assert {cluster.shard_of(made) for made in ids} == {3}
        connection.execute(CORE.delete())


def test_the_orms_bulk_statements(cluster: Cluster) -> None:
    with cluster.session(shard=0) as session, session.begin():
        made = session.scalars(
            insert(Author).returning(Author), [{"name": f"bulk {n}"} for n in range(30)]
        ).all()
        assert {cluster.shard_of(author.id) for author in made} == {0}
        session.bulk_save_objects([Author(name="bulk")], return_defaults=True)
        changed = session.execute(
            update(Author)
            .where(Author.name.like("bulk%"))
            .values(name=func.upper(Author.name))
            .returning(Author.id)
        )
        assert len(changed.all()) == 31


def test_joined_tables(cluster: Cluster) -> None:
    with cluster.session(shard=2) as session:
        session.add_all([Dog(name=f"dog {n}", tricks=n) for n in range(5)])
        session.commit()
        dogs = session.scalars(select(Dog).order_by(Dog.id)).all()
        assert [dog.tricks for dog in dogs] == list(range(5))
        assert {cluster.shard_of(dog.id) for dog in dogs} == {2}
        assert session.scalars(select(Animal)).all() == dogs


def test_dataclasses(cluster: Cluster) -> None:
    with cluster.session(shard=1) as session, session.begin():
        point = Point(x=3)
        session.add(point)
        session.flush()
        assert cluster.shard_of(point.id) == 1


def test_next_id_as_an_expression(cluster: Cluster) -> None:
    for shard in (2, 6):
        with cluster.at(shard=shard).connection() as connection:
            drawn = connection.scalars(select(next_id()).select_from(func.generate_series(1, 10))).all()
            assert len(set(drawn)) == 10
            assert {cluster.shard_of(one) for one in drawn} == {shard}
            later = select((next_id() > bindparam("one", type_=BigInteger)).label("later"))
            assert connection.execute(later, {"one": drawn[-1]}).scalar_one() is True
            assert isinstance(connection.execute(select(next_id())).scalar_one(), int)


def test_the_default_is_inlined(cluster: Cluster) -> None:
    with cluster.at(shard=1).connection() as connection:
        plan = "\n".join(
            connection.scalars(text("explain (verbose) insert into shard_0001.events (word) values ('a')"))
        )
    assert "shardids.current_id(" in plan
    assert "'shard_0001.id_counter'::regclass" in plan
    assert "shard_0001.next_id()" not in plan


# Several shards.


def test_two_shards_in_one_metadata(cluster: Cluster) -> None:
    both = MetaData()
    tables = [
        Table(
            "pairs",
            both,
            Column("id", BigInteger, primary_key=True, server_default=next_id()),
            Column("word", Text),
            schema=place,
        )
        for place in ("left", "right")
    ]
    places: dict[str | None, str | None] = {"left": "shard_0004", "right": "shard_0005"}
    # A default belongs to its statement's shard, whatever schema its table is in.
    for table, shard in zip(tables, (4, 5), strict=True):
        options = {"schema_translate_map": {**places, None: f"shard_000{shard}"}}
        engine = cluster.engine(cluster.node_of(shard)).execution_options(**options)
        with engine.begin() as connection:
            table.create(connection)
            (made,) = connection.execute(table.insert().values(word="x").returning(table.c.id)).scalars()
            assert cluster.shard_of(made) == shard
            assert connection.scalars(select(tables[0].c.word)).all() == ["x"]


def test_cached_statements_go_to_the_shard_of_their_session(cluster: Cluster) -> None:
    makers = {shard: sessionmaker(cluster.at(shard=shard).engine) for shard in range(4)}
    for turn in range(3):
        for shard, make in makers.items():
            with make() as session, session.begin():
                author = Author(name=f"turn {turn}", books=[Book(title="cached")])
                session.add(author)
                session.add(Dog(name="cached", tricks=turn))
                drawn = session.execute(select(next_id(), func.count()).select_from(Author)).one()
                assert cluster.shard_of(drawn[0]) == shard
                assert cluster.shard_of(author.id) == cluster.shard_of(author.books[0].key) == shard
    for shard, make in makers.items():
        with make() as session:
            query = select(Author.id).where(Author.name.like("turn %"))
            assert [cluster.shard_of(one) for one in session.scalars(query)] == [shard] * 3


def test_one_session_for_several_shards_in_turn(cluster: Cluster) -> None:
    make = sessionmaker()
    for shard in (0, 3, 0):
        with make(bind=cluster.at(shard=shard).engine) as session, session.begin():
            assert (
                cluster.shard_of(session.scalars(insert(Author).values(name="x").returning(Author.id)).one())
                == shard
            )


def test_a_model_may_have_a_column_that_is_no_key(cluster: Cluster) -> None:
    with cluster.at(shard=6).engine.begin() as connection:
        table = Table(
            "plain",
            MetaData(),
            Column("n", Integer, primary_key=True),
            Column("ticket", BigInteger, server_default=next_id(), nullable=False),
        )
        table.create(connection)
        tickets = connection.scalars(
            table.insert().returning(table.c.ticket), [{"n": n} for n in range(5)]
        ).all()
        assert {cluster.shard_of(one) for one in tickets} == {6}
