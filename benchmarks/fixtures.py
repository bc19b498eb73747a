"""The time that the pytest fixture ``shard_session`` adds to a test."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import DeclarativeBase, Mapped

from benchmarks.report import Section, figure, interleaved, seconds
from shardids import Cluster, Layout, lookup_key, primary_key, sharding_key
from shardids.testing.clusters import ClusterWishes, catalog_for_tests, rolled_back, tables_of

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
    """Measure tests that read all shards, with the session of the fixture and with one of their own."""
    wishes = ClusterWishes(layout=Layout.preset("default"), shards=SHARDS, nodes=2, catalog=None, server=None)
    with (
        catalog_for_tests(wishes) as url,
        Cluster.connect(url, listen=False) as cluster,
        tables_of(_Base.metadata, cluster, url),
    ):
        m = interleaved(
            {
                "a session of its own": partial(_reading, cluster.sharded_session),
                "shard_session": partial(_reading, partial(rolled_back, cluster, {})),
            },
            rounds=rounds,
            unit="ms a test",
        )
    own, fixture = m.values()
    return Section(
        title="The fixture of tests",
        conditions=f"An embedded server, two nodes, {SHARDS} shards; {TESTS} tests, each reads all shards.",
        measures=(own, fixture),
        ratios=(figure("ms that shard_session adds to a test", fixture.median - own.median, at_most=10),),
    )


def _reading(opened: Any) -> float:
    def tests() -> None:
        for _ in range(TESTS):
            session: AbstractContextManager[Any] = opened()
            with session as one:
                one.scalars(select(_User)).all()

    return seconds(tests) / TESTS * 1000
