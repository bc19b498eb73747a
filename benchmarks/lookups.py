"""What a value that is unique over all shards costs, beside one that is so in its shard; and a look-up."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from uuid import uuid4

from sqlalchemy import Select, select
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from benchmarks.report import Section, Timed, figure, interleaved, seconds
from shardids import Cluster, lookup_key, primary_key, sharding_key
from shardids.catalog.rows import Catalog
from shardids.pg.embedded import temporary_servers
from shardids.tables import lookups
from shardids.testing import devcluster

SHARDS: Final = 64
CLIENTS: Final = (1, 8)
ROWS: Final = 50
TOGETHER: Final = 1_000
LEAST: Final = 0.45
"""How much of the throughput without a look-up is to be left at 8 clients."""


class _Base(DeclarativeBase):
    pass


class _Alone(_Base):
    __tablename__ = "alone"

    id: Mapped[int] = primary_key()
    name: Mapped[str] = sharding_key()
    email: Mapped[str] = mapped_column(unique=True)


class _Claimed(_Base):
    __tablename__ = "claimed"

    id: Mapped[int] = primary_key()
    name: Mapped[str] = sharding_key()
    email: Mapped[str] = lookup_key(unique=True)


_MODELS: Final = {"unique within the shard": _Alone, "look-up key": _Claimed}

_cluster: Cluster


def run(rounds: int) -> Section:
    """Measure processes that each insert one row and commit, and one that finds rows."""
    with _clients() as (cluster, pools):
        cases: dict[str, Timed] = {}
        for clients, pool in pools.items():
            for label, model in _MODELS.items():
                cases[f"{label}, {clients} client{'s' * (clients > 1)}"] = _inserting(pool, clients, model)
        for label, model in _MODELS.items():
            cases[f"{label}, {TOGETHER:,} rows a flush"] = _flushing(cluster, model)
        m = interleaved(cases, rounds=rounds, unit="ms a row")
        name = _name()
        email = _add(cluster, _Claimed, name)
        found = interleaved(
            {
                "find a shard: session(lookup=…)": _finding(
                    lambda: cluster.session(lookup=_Claimed.email == email)
                ),
                "find a row by its sharding key": _finding(
                    lambda: _select(cluster, select(_Claimed).where(_Claimed.name == name))
                ),
                f"find a row by its look-up key, {SHARDS} shards": _finding(
                    lambda: _select(cluster, select(_Claimed).where(_Claimed.email == email))
                ),
                f"find a row by asking {SHARDS} shards": _finding(
                    lambda: _select(cluster, select(_Alone).where(_Alone.email == email))
                ),
            },
            rounds=rounds,
            unit="ms",
        )
        with cluster.at(shard=0).connection() as connection:
            version = str(connection.exec_driver_sql("show server_version").scalar()).split()[0]
    one, eight, many = (list(m.values())[n : n + len(_MODELS)] for n in range(0, len(m), len(_MODELS)))
    shard, by_key, by_lookup = (each.median for each in list(found.values())[:3])
    kept = {
        (label, name): group[0].median / each.median
        for label, group in (("1 client", one), ("8 clients", eight), (f"{TOGETHER:,} rows a flush", many))
        for name, each in zip(_MODELS, group, strict=True)
        if name != "unique within the shard"
    }
    return Section(
        title="A value that is unique over all shards",
        conditions=f"PostgreSQL {version}, two servers of this machine, {SHARDS} shards, fsync on; each row"
        f" in another shard with its COMMIT, by processes with cluster.session(key=…); {rounds} rounds.",
        measures=(*m.values(), *found.values()),
        ratios=(
            *(
                figure(
                    f"rows a second with a {name}, of those without, {label}",
                    value,
                    at_least=LEAST if (label, name) == ("8 clients", "look-up key") else None,
                )
                for (label, name), value in kept.items()
            ),
            figure("ms to find a shard", shard, at_most=1.0),
            figure(
                "a SELECT by a look-up key beyond one by the sharding key / finding a shard, one round trip",
                (by_lookup - by_key) / shard,
                at_most=1.25,
            ),
        ),
    )


@contextmanager
def _clients() -> Iterator[tuple[Cluster, dict[int, ProcessPoolExecutor]]]:
    settings = {"fsync": "on", "synchronous_commit": "on", "max_locks_per_transaction": "512"}
    with ExitStack() as stack:
        servers = stack.enter_context(temporary_servers(2, settings=settings))
        url = devcluster.create_cluster(servers, SHARDS)
        cluster = stack.enter_context(Cluster.connect(url, listen=False))
        for shard in range(SHARDS):
            with cluster.at(shard=shard).engine.begin() as connection:
                _Base.metadata.create_all(connection)
        catalog = Catalog(url)
        stack.callback(catalog.close)
        lookups.create(catalog, "claimed.email")
        lookups.backfill(catalog, "claimed.email")
        cluster.refresh()
        context = multiprocessing.get_context("spawn")
        pools = {
            clients: stack.enter_context(
                ProcessPoolExecutor(clients, mp_context=context, initializer=_connect, initargs=(str(url),))
            )
            for clients in CLIENTS
        }
        yield cluster, pools


def _connect(url: str) -> None:
    global _cluster  # noqa: PLW0603 -- a process has one
    _cluster = Cluster.connect(url, listen=False)


def _inserting(pool: ProcessPoolExecutor, clients: int, model: type[Any]) -> Timed:
    def insert() -> None:
        for done in [pool.submit(_insert, model) for _ in range(clients)]:
            done.result()

    return lambda: seconds(insert) / (clients * ROWS) * 1000


def _insert(model: type[Any]) -> None:
    for _ in range(ROWS):
        _add(_cluster, model, _name())


def _add(cluster: Cluster, model: type[Any], name: str) -> str:
    with cluster.session(key=name) as session:
        session.add(model(name=name, email=f"{name}@example.com"))
        session.commit()
    return f"{name}@example.com"


def _flushing(cluster: Cluster, model: type[Any]) -> Timed:
    def flush() -> None:
        with cluster.sharded_session() as session:
            names = [_name() for _ in range(TOGETHER)]
            session.add_all(model(name=name, email=f"{name}@example.com") for name in names)
            session.commit()

    return lambda: seconds(flush) / TOGETHER * 1000


def _finding(find: Callable[[], object]) -> Timed:
    def find_all() -> None:
        for _ in range(ROWS):
            find()

    return lambda: seconds(find_all) / ROWS * 1000


def _select(cluster: Cluster, statement: Select[Any]) -> None:
    with cluster.sharded_session() as session:
        session.scalars(statement).all()


def _name() -> str:
    return uuid4().hex
