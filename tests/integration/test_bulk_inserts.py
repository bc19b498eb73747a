"""Rows inserted together travel together, and each object gets the key of its own row."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Annotated, Any

import pytest
from sqlalchemy import (
    Column,
    Connection,
    ForeignKey,
    MetaData,
    Table,
    Text,
    event,
    func,
    insert,
    select,
    text,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import URL
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    Session,
    mapped_column,
    relationship,
)
from sqlalchemy.schema import CreateTable

from shardids import Cluster, primary_key
from shardids.errors import ShardFenced
from tests.conftest import BlankDatabases, found_cluster

SHARD = 5
MANY = 2500
BATCHES = 3
"""Statements for MANY rows: SQLAlchemy sends a thousand rows in one."""

Key = Annotated[int, primary_key(comment="by annotation")]


class Base(DeclarativeBase):
    pass


class Plain(Base):
    __tablename__ = "plain"

    id: Mapped[int] = primary_key()
    word: Mapped[str]


class Annotation(Base):
    __tablename__ = "annotation"

    id: Mapped[Key]
    word: Mapped[str]


class Keyed:
    """A mixin."""

    id: Mapped[int] = primary_key(name="key")


class Mixed(Keyed, Base):
    __tablename__ = "mixed"

    word: Mapped[str]


class Abstract(Base):
    __abstract__ = True

    id: Mapped[int] = primary_key()
    word: Mapped[str]


class Concrete(Abstract):
    __tablename__ = "concrete"


class Composite(Base):
    __tablename__ = "composite"

    id: Mapped[Key]
    tenant: Mapped[int] = mapped_column(primary_key=True, default=7)
    word: Mapped[str]


class Versioned(Base):
    __tablename__ = "versioned"

    id: Mapped[int] = primary_key()
    version: Mapped[int] = mapped_column()
    born: Mapped[int] = mapped_column(server_default=text("3"))
    word: Mapped[str]

    __mapper_args__ = {"version_id_col": version, "eager_defaults": True}  # noqa: RUF012


class DataBase(MappedAsDataclass, DeclarativeBase):
    metadata = Base.metadata


class WithoutKey(DataBase):
    __tablename__ = "without_key"

    id: Mapped[int] = primary_key(init=False)
    word: Mapped[str]


class WithNone(DataBase):
    __tablename__ = "with_none"

    id: Mapped[int] = primary_key(default=None, kw_only=True)
    word: Mapped[str]


class Animal(Base):
    __tablename__ = "animals"
    __mapper_args__ = {"polymorphic_identity": "animal", "polymorphic_on": "kind"}  # noqa: RUF012

    id: Mapped[int] = primary_key()
    kind: Mapped[str]
    word: Mapped[str]


class Cat(Animal):
    """In its parent's table."""

    __mapper_args__ = {"polymorphic_identity": "cat"}  # noqa: RUF012


class Dog(Animal):
    """In a table of its own."""

    __tablename__ = "dogs"
    __mapper_args__ = {"polymorphic_identity": "dog"}  # noqa: RUF012

    id: Mapped[int] = mapped_column(ForeignKey("animals.id"), primary_key=True)
    tricks: Mapped[str]


class Person(Base):
    __tablename__ = "people"

    id: Mapped[int] = primary_key()
    word: Mapped[str]
    parent_id: Mapped[int | None] = mapped_column(ForeignKey("people.id"))
    children: Mapped[list[Person]] = relationship(back_populates="parent")
    parent: Mapped[Person | None] = relationship(back_populates="children", remote_side="Person.id")
    letters: Mapped[list[Letter]] = relationship(back_populates="person")


class Letter(Base):
    __tablename__ = "letters"

    id: Mapped[int] = primary_key()
    word: Mapped[str]
    person_id: Mapped[int] = mapped_column(ForeignKey("people.id"))
    person: Mapped[Person] = relationship(back_populates="letters")


EVENTS = Table("events", Base.metadata, primary_key("id"), Column("word", Text, unique=True))


@pytest.fixture(scope="module")
def home(databases: BlankDatabases) -> Iterator[URL]:
    """The catalog of :func:`make_home`."""
    url = databases.take()
    make_home(url)
    yield url
    databases.give_back(url)


def make_home(url: URL) -> None:
    """A cluster of 8 shards on one node; shard 5 has the tables."""
    found_cluster(url, {"a": url}, 8)
    with Cluster.connect(url) as cluster, cluster.at(shard=SHARD).engine.begin() as connection:
        Base.metadata.create_all(connection)


@pytest.fixture
def cluster(home: URL) -> Iterator[Cluster]:
    with Cluster.connect(home) as cluster:
        yield cluster


@pytest.fixture
def session(cluster: Cluster) -> Iterator[Session]:
    """A session on shard 5; what the test writes is rolled back."""
    with cluster.session(shard=SHARD) as session:
        yield session


@contextmanager
def statements(bound: Session | Connection) -> Iterator[list[str]]:
    """What is sent to the server meanwhile: one entry a round trip."""
    sent: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        sent.append(statement)

    engine = (bound if isinstance(bound, Connection) else bound.get_bind()).engine
    event.listen(engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(engine, "before_cursor_execute", note)


def words(count: int) -> list[str]:
    return [f"word {number}" for number in range(count)]


def in_the_table(session: Session, model: type[Any]) -> dict[int, str]:
    """Key and word of each row, past whatever the session remembers."""
    rows = session.connection().execute(select(model.id, model.word).order_by(model.id))
    return {row[0]: row[1] for row in rows}


def check(cluster: Cluster, session: Session, model: type[Any], objects: Sequence[Any]) -> None:
    """Each object has the key of its own row, and the keys rise in the order of the objects."""
    held = {one.id: one.word for one in objects}
    assert len(held) == len(objects)
    assert held == in_the_table(session, model)
    assert all(before.id < after.id for before, after in pairwise(objects))
    assert {cluster.shard_of(one) for one in held} == {SHARD}


# The ORM.


def test_one_object_takes_one_statement(cluster: Cluster, session: Session) -> None:
    session.connection()
    one = Plain(word="one")
    with statements(session) as sent:
        session.add(one)
        session.flush()
    (statement,) = sent
    assert statement.startswith("INSERT INTO shard_0005.plain (word) VALUES")
    assert statement.endswith("RETURNING shard_0005.plain.id")
    check(cluster, session, Plain, [one])


MODELS = (Plain, Annotation, Mixed, Concrete, Composite, Versioned, WithoutKey, WithNone, Cat)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_many_objects_take_a_statement_a_thousand(
    cluster: Cluster, session: Session, model: type[Any]
) -> None:
    objects = [model(word=word) for word in words(MANY)]
    with statements(session) as sent:
        session.add_all(objects)
        session.flush()
    assert len(sent) == BATCHES
    check(cluster, session, model, objects)


def test_joined_tables_take_the_parents_keys(cluster: Cluster, session: Session) -> None:
    dogs = [Dog(word=word, tricks=f"tricks of {word}") for word in words(MANY)]
    with statements(session) as sent:
        session.add_all(dogs)
        session.flush()
    assert len(sent) == BATCHES + 1
    check(cluster, session, Animal, dogs)
    rows = session.connection().execute(select(Dog.__table__.c.id, Dog.__table__.c.tricks))
    assert {tuple(row) for row in rows} == {(dog.id, f"tricks of {dog.word}") for dog in dogs}


def test_related_objects(cluster: Cluster, session: Session) -> None:
    people = [
        Person(word=word, letters=[Letter(word=f"{word}, no. {number}") for number in range(5)])
        for word in words(500)
    ]
    with statements(session) as sent:
        session.add_all(people)
        session.flush()
    assert len(sent) == 1 + BATCHES
    check(cluster, session, Person, people)
    check(cluster, session, Letter, [letter for person in people for letter in person.letters])
    written = select(Letter.word, Person.word).join(Person, Letter.person_id == Person.id)
    assert all(one.startswith(f"{other},") for one, other in session.connection().execute(written))


def test_objects_of_one_table_that_refer_to_each_other(cluster: Cluster, session: Session) -> None:
    root = Person(word="root")
    root.children = [
        Person(word=f"root.{a}", children=[Person(word=f"root.{a}.{b}") for b in range(20)])
        for a in range(20)
    ]
    everybody = [root, *root.children, *(grandchild for one in root.children for grandchild in one.children)]
    with statements(session) as sent:
        session.add(root)
        session.flush()
    assert len(sent) == 3
    assert {one.id: one.word for one in everybody} == in_the_table(session, Person)
    parent = Person.__table__.alias()
    pairs = session.connection().execute(
        select(Person.__table__.c.word, parent.c.word).join(
            parent, Person.__table__.c.parent_id == parent.c.id
        )
    )
    assert {(one, other) for one, other in pairs} == {
        (one.word, one.word.rpartition(".")[0]) for one in everybody if one is not root
    }


def test_given_and_drawn_keys_in_one_flush(cluster: Cluster, session: Session) -> None:
    block = cluster.at(shard=SHARD).reserve(1000)
    given = [Plain(id=one, word=f"given {one}") for one in block]
    drawn = [Plain(word=word) for word in words(1000)]
    with statements(session) as sent:
        session.add_all([*given, *drawn])
        session.flush()
    assert len(sent) == 2
    check(cluster, session, Plain, [*given, *drawn])
    session.rollback()
    # One by one, each in its turn.
    turns = [one for pair in zip(map(again, given[:50]), map(again, drawn[:50]), strict=True) for one in pair]
    session.add_all(turns)
    session.flush()
    assert [one.id for one in turns[::2]] == list(block[:50])
    assert {one.id: one.word for one in turns} == in_the_table(session, Plain)


def again(one: Plain) -> Plain:
    """The object anew, with a key only if its key was given."""
    return Plain(id=one.id, word=one.word) if one.word.startswith("given") else Plain(word=one.word)


def test_savepoints_and_rollbacks(cluster: Cluster, session: Session) -> None:
    kept = [Plain(word=f"kept {number}") for number in range(100)]
    lost = [Plain(word=f"lost {number}") for number in range(100)]
    session.add_all(kept)
    with session.begin_nested() as savepoint:
        session.add_all(lost)
        session.flush()
        first = [one.id for one in lost]
        savepoint.rollback()
    check(cluster, session, Plain, kept)
    written = [Plain(word=one.word) for one in lost]
    with session.begin_nested():
        session.connection()
        with statements(session) as sent:
            session.add_all(written)
            session.flush()
    assert len(sent) == 1
    check(cluster, session, Plain, [*kept, *written])
    assert min(one.id for one in written) > max(first)
    session.rollback()
    assert in_the_table(session, Plain) == {}
    # The same objects, which still hold the keys of the rows that were rolled back.
    session.add_all(kept)
    session.flush()
    check(cluster, session, Plain, kept)


def test_bulk_save_objects(cluster: Cluster, session: Session) -> None:
    objects = [Plain(word=word) for word in words(MANY)]
    with statements(session) as sent:
        session.bulk_save_objects(objects, return_defaults=True)
    assert len(sent) == BATCHES
    check(cluster, session, Plain, objects)
    with statements(session) as sent:
        session.bulk_save_objects([Plain(word=word) for word in words(MANY)])
        session.bulk_insert_mappings(Plain, [{"word": word} for word in words(MANY)])
    assert len(sent) == 2
    assert len(in_the_table(session, Plain)) == 3 * MANY


def test_insert_statements(cluster: Cluster, session: Session) -> None:
    rows = [{"word": word} for word in words(MANY)]
    with statements(session) as sent:
        session.execute(insert(Plain), rows)
    assert len(sent) == 1
    assert len(in_the_table(session, Plain)) == MANY
    session.execute(Plain.__table__.delete())
    with statements(session) as sent:
        made = session.scalars(insert(Plain).returning(Plain, sort_by_parameter_order=True), rows).all()
    assert len(sent) == BATCHES
    assert [one.word for one in made] == words(MANY)
    check(cluster, session, Plain, made)
    with statements(session) as sent:
        drawn = session.scalars(insert(Plain).returning(Plain.id), rows).all()
    assert len(sent) == BATCHES
    assert {cluster.shard_of(one) for one in drawn} == {SHARD}
    with statements(session) as sent:
        dogs = session.scalars(insert(Dog).returning(Dog), [{"word": "a", "tricks": "b"}] * 10).all()
    assert len(sent) == 2
    assert {dog.word + dog.tricks for dog in dogs} == {"ab"}


def test_merge(cluster: Cluster, session: Session) -> None:
    with session.no_autoflush:
        merged = [session.merge(Plain(word=word)) for word in words(MANY)]
    with statements(session) as sent:
        session.flush()
    assert len(sent) == BATCHES
    check(cluster, session, Plain, merged)
    key = merged[0].id
    assert session.merge(Plain(id=key, word="changed")) is merged[0]
    session.flush()
    assert in_the_table(session, Plain)[key] == "changed"


@pytest.mark.long
def test_sessions_side_by_side(cluster: Cluster) -> None:
    def write(_number: int) -> None:
        with cluster.session(shard=SHARD) as session:
            for _ in range(5):
                cluster.at(shard=SHARD).reserve(100)
                objects = [Plain(word=word) for word in words(MANY)]
                session.add_all(objects)
                session.flush()
                check(cluster, session, Plain, objects)
                session.rollback()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))


def test_a_fenced_shard_writes_nothing(cluster: Cluster, session: Session) -> None:
    session.add_all([Plain(word=word) for word in words(100)])
    with cluster.at(shard=SHARD).connection() as connection:
        connection.execute(text("select shardids.fence(5)"))
        connection.commit()
        with pytest.raises(ShardFenced, match="shard 5"):
            session.flush()
        session.rollback()
        connection.execute(text("select shardids.activate(5)"))
        connection.commit()
    assert in_the_table(session, Plain) == {}


# Core.


def test_core_inserts(cluster: Cluster, session: Session) -> None:
    connection = session.connection()
    rows = [{"word": word} for word in words(MANY)]
    ordered = EVENTS.insert().returning(EVENTS.c.id, EVENTS.c.word, sort_by_parameter_order=True)
    with statements(session) as sent:
        made = connection.execute(ordered, rows).all()
    assert len(sent) == BATCHES
    assert [row.word for row in made] == words(MANY)
    assert all(before.id < after.id for before, after in pairwise(made))
    values = EVENTS.insert().values([{"word": "some"}, {"word": "more"}]).returning(EVENTS.c.id)
    with statements(session) as sent:
        assert len(connection.execute(values).all()) == 2
        (key,) = connection.execute(EVENTS.insert().values(word="one")).inserted_primary_key
        copied = EVENTS.insert().from_select(["word"], select(EVENTS.c.word + " copied"))
        connection.execute(copied)
    assert len(sent) == 3
    assert cluster.shard_of(key) == SHARD
    drawn = connection.scalars(select(EVENTS.c.id)).all()
    assert len(drawn) == 2 * (MANY + 3)
    assert {cluster.shard_of(one) for one in drawn} == {SHARD}


def test_upserts(session: Session) -> None:
    connection = session.connection()
    insert_events = postgresql.insert(EVENTS)
    rows = [{"word": word} for word in words(1000)]
    connection.execute(EVENTS.insert(), rows[::2])
    ignoring = insert_events.on_conflict_do_nothing().returning(EVENTS.c.word)
    with statements(session) as sent:
        assert sorted(connection.scalars(ignoring, rows)) == sorted(words(1000)[1::2])
    assert len(sent) == 1
    changing = insert_events.on_conflict_do_update(
        index_elements=["word"], set_={"word": func.upper(insert_events.excluded.word)}
    )
    with statements(session) as sent:
        changed = connection.execute(changing.returning(EVENTS.c.id, EVENTS.c.word), rows).all()
    assert len(sent) == 1
    assert {word.lower() for _, word in changed} == set(words(1000))
    assert dict(map(tuple, changed)) == dict(map(tuple, connection.execute(select(EVENTS))))


# Metadata.


def test_the_schema_holds_no_sequence_of_the_models(cluster: Cluster, session: Session) -> None:
    found = session.scalars(
        text("select relname from pg_class where relkind = 'S' and relnamespace = 'shard_0005'::regnamespace")
    )
    assert sorted(found) == ["id_counter", "id_offset"]
    with cluster.at(shard=6).engine.begin() as connection:
        Base.metadata.create_all(connection)
        Base.metadata.drop_all(connection)
        assert connection.scalar(text("select shard_0006.next_id()")) > 0


def test_copies_of_the_metadata_insert_in_batches_too(cluster: Cluster) -> None:
    copied = MetaData()
    tables = [table.to_metadata(copied) for table in Base.metadata.sorted_tables]
    pickled = pickle.loads(pickle.dumps(Base.metadata))
    for table in (
        copied.tables["plain"],
        EVENTS.to_metadata(MetaData(), name="renamed"),
        pickled.tables["plain"],
    ):
        with cluster.at(shard=7).engine.connect() as connection:
            table.create(connection)
            ordered = table.insert().returning(table.c.word, sort_by_parameter_order=True)
            with statements(connection) as sent:
                made = connection.scalars(ordered, [{"word": word} for word in words(MANY)])
            assert made.all() == words(MANY)
            assert len(sent) == BATCHES
    ddl = [str(CreateTable(table).compile(dialect=postgresql.dialect())) for table in tables]
    assert ddl == [
        str(CreateTable(table).compile(dialect=postgresql.dialect())) for table in Base.metadata.sorted_tables
    ]
    assert not any("SERIAL" in one for one in ddl)
