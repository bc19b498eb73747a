"""Fifty clients share two server connections: whose rows end up where, and what is left on the server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, BrokenBarrierError

import pytest
from sqlalchemy import ForeignKey, func, select, text
from sqlalchemy.engine import URL
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from shardids import Cluster, primary_key
from shardids.pg.connections import open_engine
from shardids.pg.urls import parse_url
from tests.conftest import BlankDatabases, found_cluster
from tests.support.pgbouncer import PgBouncer

SHARDS = 8
CLIENTS = 50
TURNS = 3
PATIENCE_S = 60


class Base(DeclarativeBase):
    pass


class Author(Base):
    __tablename__ = "authors"

    id: Mapped[int] = primary_key()
    meant_for: Mapped[int]
    client: Mapped[int]
    books: Mapped[list[Book]] = relationship(back_populates="author", order_by="Book.id")


class Book(Base):
    __tablename__ = "books"

    id: Mapped[int] = primary_key()
    meant_for: Mapped[int]
    number: Mapped[int]
    author_id: Mapped[int] = mapped_column(ForeignKey("authors.id"))
    author: Mapped[Author] = relationship(back_populates="books")


@pytest.fixture
def database(databases: BlankDatabases) -> Iterator[URL]:
    url = databases.take()
    yield url
    databases.give_back(url)


@pytest.fixture
def home(database: URL, pgbouncer: PgBouncer) -> URL:
    """The catalog, reached directly, of a cluster with tables in all shards, its node behind PgBouncer."""
    catalog = database.set(username=pgbouncer.user, password=pgbouncer.password or None)
    found_cluster(catalog, {"a": pgbouncer.url(database.database)}, SHARDS)
    with Cluster.connect(catalog) as cluster:
        for shard in range(SHARDS):
            with cluster.at(shard=shard).engine.begin() as connection:
                Base.metadata.create_all(connection)
    return catalog


def write_and_read(cluster: Cluster, client: int) -> None:
    """Writes to every shard, each client in an order of its own, and reads its rows back."""
    for turn in range(TURNS * SHARDS):
        shard = (client + turn * 3) % SHARDS
        with cluster.session(shard=shard) as session:
            books = [Book(meant_for=shard, number=number) for number in range(5)]
            author = Author(meant_for=shard, client=client, books=books)
            session.add(author)
            session.commit()
            key = author.id
        with cluster.session(id=key) as session:
            found = session.get_one(Author, key)
            assert (found.meant_for, found.client) == (shard, client)
            assert [(book.meant_for, book.number) for book in found.books] == [(shard, n) for n in range(5)]


def test_every_row_is_in_its_shard(home: URL, pgbouncer: PgBouncer) -> None:
    all_done, all_counted = Barrier(CLIENTS + 1), Barrier(CLIENTS + 1)

    def run(client: int) -> None:
        # A cluster each, as in processes of their own; it keeps its connection to the end.
        with Cluster.connect(home) as cluster, suppress(BrokenBarrierError):
            try:
                write_and_read(cluster, client)
            except BaseException:
                all_done.abort()
                raise
            all_done.wait(PATIENCE_S)
            all_counted.wait(PATIENCE_S)

    counts: list[int] = []
    with ThreadPoolExecutor(CLIENTS) as threads:
        clients = [threads.submit(run, number) for number in range(CLIENTS)]
        with suppress(BrokenBarrierError):
            all_done.wait(PATIENCE_S)
            here = {"database": home.database}.items()
            for what in ("CLIENTS", "SERVERS"):
                counts.append(sum(here <= one.items() for one in pgbouncer.show(what)))
            all_counted.wait(PATIENCE_S)
        for client in clients:
            client.result()
    assert counts == [CLIENTS, 2]
    check_rows(home)


def check_rows(home: URL) -> None:
    with Cluster.connect(home) as cluster:
        for shard in range(SHARDS):
            with cluster.session(shard=shard) as session:
                for model, count in ((Author, CLIENTS * TURNS), (Book, CLIENTS * TURNS * 5)):
                    rows = session.execute(select(model.id, model.meant_for)).all()
                    assert {(cluster.shard_of(row.id), row.meant_for) for row in rows} == {(shard, shard)}
                    assert len(rows) == count
                by_client = select(func.count(Author.id)).group_by(Author.client)
                assert session.scalars(by_client).all() == [TURNS] * CLIENTS


def test_nothing_of_a_session_is_left_on_the_server(home: URL) -> None:
    with Cluster.connect(home) as cluster:
        write_and_read(cluster, 0)
        with cluster.at(shard=1).connection() as one, cluster.at(shard=2).connection() as other:
            # Both in a transaction at once: these are the two server connections.
            pids = {connection.scalar(text("select pg_backend_pid()")) for connection in (one, other)}
            assert len(pids) == 2
            for connection in (one, other):
                assert connection.scalar(text("select count(*) from pg_prepared_statements")) == 0
                assert connection.scalar(text("show search_path")) == '"$user", public'
                locks = "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()"
                assert connection.scalar(text(locks)) == 0


def test_nothing_is_prepared(databases: BlankDatabases, pgbouncer: PgBouncer) -> None:
    direct = databases.take()
    engine = open_engine(parse_url(pgbouncer.url(direct.database)), what="the database")
    for _ in range(20):
        with engine.begin() as connection:
            connection.execute(text("select 1"))
            assert connection.scalar(text("select count(*) from pg_prepared_statements")) == 0
    engine.dispose()
    databases.give_back(direct)
