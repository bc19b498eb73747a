"""Statements that repeat are prepared, unless a pooler stands before the server or an option forbids it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from shardids import AsyncCluster, Cluster
from shardids.catalog.connections import open_engine
from tests.support.clusters import connected

OFTEN = 7
PREPARED = text("select count(*) from pg_prepared_statements where statement = 'select id from things'")
READ = text("select id from things")


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
            assert cluster.run(read_often, shard=1) == 1
            other.execute(f"alter table shard_0001.things alter id type {type_}".encode())
            if is_run:
                assert cluster.run(read_often, shard=1) == 1
            else:
                with pytest.raises(DBAPIError, match="cached plan"), cluster.session(shard=1) as session:
                    read_often(session)
