"""The time that pytest's fixtures of tests that are rolled back add to a test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from uuid import uuid4

from sqlalchemy import select
from sqlalchemy.orm import DeclarativeBase, Mapped

from benchmarks.report import Section, figure, interleaved, seconds
from shardids import Cluster, Layout, lookup_key, primary_key, sharding_key
from shardids.testing.clusters import (
    ClusterWishes,
    async_cluster,
    async_rolled_back_session,
    catalog_for_tests,
    rolled_back_session,
    tables_of,
)
from shardids.testing.held import held_nodes

TESTS = 200
SHARDS = 4


class _Base(DeclarativeBase):
    pass


class _User(_Base):
    __tablename__ = "users"

    id: Mapped[int] = primary_key()
    name: Mapped[str] = sharding_key(unique=True)
    email: Mapped[str] = lookup_key(unique=True)


def run(rounds: int) -> Section:
    """Measure tests that read all shards, in sessions of the fixtures and in sessions of their own."""
    wishes = ClusterWishes(layout=Layout.preset("default"), shards=SHARDS, nodes=2, catalog=None, server=None)
    with (
        catalog_for_tests(wishes) as url,
        Cluster.connect(url, listen=False) as cluster,
        tables_of(_Base.metadata, cluster, url),
        async_cluster(url) as asynchronous,
    ):

        @contextmanager
        def rolled_back() -> Iterator[Any]:
            with held_nodes.rolled_back(), rolled_back_session(cluster, {}) as session:
                yield session

        def awaiting() -> None:
            with (
                held_nodes.rolled_back(),
                async_rolled_back_session(asynchronous, {}) as session,
                asyncio.Runner() as runner,
            ):
                runner.run(_awaited(session))

        def committing() -> None:
            for _ in range(SHARDS):
                name = uuid4().hex
                with cluster.session(key=name) as session:
                    session.add(_User(name=name, email=name))
                    session.commit()

        def rolling_back() -> None:
            with held_nodes.rolled_back():
                committing()

        m = interleaved(
            {
                "a session that reads": partial(_tests, partial(_reading, cluster.sharded_session)),
                "shard_session": partial(_tests, partial(_reading, rolled_back)),
                "shard_async_session": partial(_tests, awaiting),
                f"{SHARDS} sessions that commit": partial(_tests, committing),
                "the same with shard_rollback": partial(_tests, rolling_back),
            },
            rounds=rounds,
            unit="ms a test",
        )
    reads, *fixtures, commits, undone = m.values()
    return Section(
        title="The fixture of tests",
        conditions=f"An embedded server, two nodes, {SHARDS} shards; {TESTS} tests, each reads all shards, or"
        f" inserts {SHARDS} rows with a look-up key. Rows that stay are in tables that nothing reads then.",
        measures=tuple(m.values()),
        ratios=(
            *(
                figure(f"ms that {name} adds to a test", one.median - reads.median, at_most=10)
                for name, one in zip(list(m)[1:3], fixtures, strict=True)
            ),
            figure("ms that shard_rollback adds to a test", undone.median - commits.median, at_most=10),
        ),
    )


def _tests(test: Callable[[], object]) -> float:
    def tests() -> None:
        for _ in range(TESTS):
            test()

    return seconds(tests) / TESTS * 1000


def _reading(opened: Any) -> None:
    with opened() as session:
        session.scalars(select(_User)).all()


async def _awaited(session: Any) -> None:
    (await session.scalars(select(_User))).all()
