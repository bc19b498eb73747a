"""Measures rows that are inserted and committed one by one, each into another of many shards of a server."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator

import psycopg
from psycopg import sql

from shardids.compare.measures.inserts import inserts_of
from shardids.compare.measures.measuring import Measuring, connected
from shardids.compare.measures.sizes import CLIENTS, Sizes
from shardids.compare.results import SPREAD, Inserts
from shardids.compare.schemes import Scheme, Servers, scheme_of
from shardids.compare.schemes.scheme import NOTE


def measure_spread(run: Measuring) -> dict[str, Inserts]:
    """Measures one client, then sixteen, all of the first server, which has all the shards.

    Each client goes through the shards, or through some of them, in an order of its own, again and again.
    """
    run.each("spread", lambda name: run.schemes[name].install_shards(run.servers, SPREAD))
    return inserts_of(run.rounds("spread", run.sizes.spread_rounds, lambda name: _round(name, run)))


def _round(name: str, run: Measuring) -> dict[int, float]:
    """Returns the rows per second, by the number of clients."""
    with _tables(name, run.schemes[name], run.servers):
        return {
            count: sum(
                run.clients.run(
                    _inserter, [(name, run.servers, number, run.sizes) for number in range(count)]
                )
            )
            for count in (1, CLIENTS)
        }


@contextlib.contextmanager
def _tables(name: str, scheme: Scheme, servers: Servers) -> Iterator[None]:
    """Makes an empty table for each shard, and drops them at the end."""
    drop = sql.SQL("drop table if exists {}").format(sql.SQL(", ").join(map(_table(name), range(SPREAD))))
    # Not text, with which each table would have a second one for long values.
    create = sql.SQL("create table {} (id {}, note varchar(100), primary key (id))")
    with connected(servers, 0) as connection:
        try:
            with connection.transaction():
                connection.execute(drop)
                for shard in range(SPREAD):
                    definition = scheme.column_of(shard).definition
                    connection.execute(create.format(_table(name)(shard), definition))
            yield
        finally:
            connection.execute(drop)


def _table(name: str) -> Callable[[int], sql.Identifier]:
    return lambda shard: sql.Identifier(f"shardids_compare_{name}_{shard}")


@contextlib.contextmanager
def _inserter(name: str, servers: Servers, client: int, sizes: Sizes) -> Iterator[Callable[[], float]]:
    """Inserts for a while; returns rows per second. A row whose key exists already does not count."""
    scheme = scheme_of(name)
    by_server = scheme.column_of(0).by_server
    with (
        connected(servers, 0) as connection,
        contextlib.nullcontext() if by_server else scheme.open_shards(servers) as source,
    ):
        # As in a session that has been at work for long: each statement is prepared, and its plan stays.
        connection.prepare_threshold = 0
        connection.execute("set plan_cache_mode = force_generic_plan")
        columns = sql.SQL("(note) values (%s)" if source is None else "(note, id) values (%s, %s)")
        queries = [
            sql.SQL("insert into {} {} returning id").format(_table(name)(shard), columns).as_bytes()
            for shard in range(SPREAD)
        ]

        def insert(shard: int) -> int:
            if scheme.keeps_rows and source is not None:
                source.draw_for(shard)
                return 1
            values = (NOTE,) if source is None else (NOTE, source.draw_for(shard))
            try:
                connection.execute(queries[shard], values)
            except psycopg.errors.UniqueViolation:
                return 0
            return 1

        shards = random.Random(client).sample(range(SPREAD), sizes.spread_each)  # noqa: S311  -- an order, no secret
        connection.execute("set synchronous_commit = off")
        for shard in shards:
            insert(shard)
        connection.execute("reset synchronous_commit")

        def go() -> float:
            rows, begun = 0, time.perf_counter()
            end, turns = begun + sizes.spread_s, itertools.cycle(shards)
            while time.perf_counter() < end:
                rows += insert(next(turns))
            return rows / (time.perf_counter() - begun)

        yield go
