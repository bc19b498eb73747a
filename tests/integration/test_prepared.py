"""Statements that repeat are prepared, unless a pooler stands before the server or an option forbids it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import select, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session

from shardids import AsyncCluster, Cluster, primary_key
from shardids.client.routing import statements
from shardids.client.routing.fanout import plan
from shardids.pg.connections import open_engine
from tests.support.clusters import connected

OFTEN = 7
PREPARED = text("select count(*) from pg_prepared_statements where statement = 'select id from things'")
READ = text("select id from things")


HOW_MANY = "select count(*) from pg_prepared_statements where statement ~ 'UNION ALL'"
POOL = {"pool_size": 1, "max_overflow": 0}


class Base(DeclarativeBase):
    pass


class Note(Base):
    __tablename__ = "notes"

    id: Mapped[int] = primary_key()


def read_often(session: Session) -> int:
    session.execute(text("set local search_path = shard_0001"))
    for _ in range(OFTEN):
        session.execute(READ).all()
    return int(session.scalar(PREPARED) or 0)


@pytest.fixture
def things(cluster_url: URL) -> URL:
    with connected(cluster_url) as connection:
        connection.execute(
            "create table shard_0001.things (id integer); insert into shard_0001.things values (5)"
        )
    return cluster_url


@pytest.mark.parametrize(("options", "prepared"), [({}, 1), ({"prepare_threshold": None}, 0)])
def test_what_repeats_is_prepared(things: URL, options: dict[str, Any], prepared: int) -> None:
    with Cluster.connect(things, connect_args=options) as cluster, cluster.session(shard=1) as session:
        assert read_often(session) == prepared


def test_what_repeats_is_prepared_under_asyncio(things: URL) -> None:
    async def prepared() -> int:
        async with await AsyncCluster.connect(things) as cluster, cluster.session(shard=1) as session:
            return await session.run_sync(read_often)

    assert asyncio.run(prepared()) == 1


def test_an_engine_in_autocommit_mode_gets_rid_of_a_stale_plan(things: URL) -> None:
    engine = open_engine(things, what="the node", isolation_level="AUTOCOMMIT", pool_size=1, max_overflow=0)
    read = text("select id from shard_0001.things")

    def read_often() -> None:
        for _ in range(OFTEN):
            with engine.connect() as connection:
                connection.execute(read).all()

    with connected(things) as other:
        read_often()
        other.execute("alter table shard_0001.things alter id type bigint")
        with pytest.raises(DBAPIError, match="cached plan"):
            read_often()
        read_often()
    engine.dispose()


def test_run_repeats_what_a_change_of_types_made_stale(things: URL) -> None:
    """psycopg forgets what it prepared at each rollback, and so after the error."""
    with Cluster.connect(things) as cluster, connected(things) as other:
        for type_, is_run in (("bigint", False), ("numeric", True)):
            # Not closed without a COMMIT.
            assert cluster.at(shard=1).run(read_often) == 1
            other.execute(f"alter table shard_0001.things alter id type {type_}".encode())
            if is_run:
                assert cluster.at(shard=1).run(read_often) == 1
            else:
                with pytest.raises(DBAPIError, match="cached plan"), cluster.session(shard=1) as session:
                    read_often(session)


@pytest.fixture
def notes(cluster_url: URL) -> URL:
    with Cluster.connect(cluster_url) as cluster:
        for shard in range(cluster.shard_count):
            with cluster.at(shard=shard).engine.begin() as connection:
                Base.metadata.create_all(connection)
    return cluster_url


def test_new_sessions_that_only_merge_rows_keep_statements_prepared(notes: URL) -> None:
    """psycopg forgets them at a rollback, and so when a session is closed."""
    with Cluster.connect(notes, **POOL) as cluster:
        (node, *_) = cluster.placement.nodes.values()
        for is_kept in (True, False):
            for _ in range(OFTEN):
                with cluster.sharded_session() as session:
                    session.scalars(select(Note)).all()
            with cluster.sharded_session() as session:
                if not is_kept:
                    session.connection(bind_arguments={"shard_id": 0}).execute(text("select 1"))
            with cluster.engine(node).connect() as connection:
                assert connection.exec_driver_sql(HOW_MANY).scalar() == is_kept


def test_new_sessions_keep_statements_prepared_under_asyncio(notes: URL) -> None:
    async def prepared() -> int:
        async with await AsyncCluster.connect(notes, **POOL) as cluster:
            for _ in range(OFTEN):
                async with cluster.sharded_session() as session:
                    (await session.scalars(select(Note))).all()
            (node, *_) = cluster.placement.nodes.values()
            async with cluster.engine(node).connect() as connection:
                return int((await connection.exec_driver_sql(HOW_MANY)).scalar() or 0)

    assert asyncio.run(prepared()) == 1


def test_a_session_that_is_closed_commits_neither_rows_nor_settings(notes: URL) -> None:
    with Cluster.connect(notes, **POOL) as cluster:
        engines = [cluster.engine(node) for node in cluster.placement.nodes.values()]
        for engine in engines:
            with engine.begin() as connection:
                connection.exec_driver_sql("""
                    create table public.readings (id bigint);
                    create function public.noted() returns bigint language sql as
                      'insert into public.readings values (5) returning id'""")
        for shard in range(cluster.shard_count):
            with cluster.at(shard=shard).engine.begin() as connection:
                schema = cluster.schema_of(shard)
                connection.exec_driver_sql(
                    f"drop table {schema}.notes; create view {schema}.notes as select public.noted() as id"
                )
        with cluster.sharded_session() as session:
            assert session.scalars(select(Note.id)).all() == [5] * cluster.shard_count
        for engine in engines:
            with engine.connect() as connection:
                assert connection.exec_driver_sql("select count(*) from public.readings").scalar() == 0
        with cluster.sharded_session() as session:
            setting = "set application_name = 'left behind'"
            session.connection(bind_arguments={"shard_id": 0}).exec_driver_sql(setting)
            session.scalars(select(Note.id)).all()
        with engines[0].connect() as connection:
            assert connection.exec_driver_sql("show application_name").scalar() != "left behind"


def test_a_statement_is_planned_once_for_each_limit(notes: URL, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Any] = []

    def noted(statement: Any, parameters: Any) -> Any:
        planned.append(statement)
        return plan(statement, parameters)

    monkeypatch.setattr(statements, "plan", noted)
    newest = select(Note.id).order_by(Note.id.desc())
    with Cluster.connect(notes) as cluster, cluster.sharded_session() as session:
        session.add_all([*map(note_of, cluster.at(shard=1).reserve(5))])
        session.commit()
        for limit, count in ((2, 1), (3, 2), (2, 2), (3, 2), (None, 3), (None, 3)):
            found = session.scalars(newest.limit(limit)).all()
            assert (len(found), len(planned)) == (limit or 5, count)
        # Equal values are not always sent alike: 1 and 1.0, for one.
        for value in (found[0], found[1], found[1]):
            assert session.scalar(newest.where(Note.id <= value).limit(1)) == value
        assert len(planned) == 6


def note_of(id_: int) -> Note:
    return Note(id=id_)
