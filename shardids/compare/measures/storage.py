"""A table filled in bulk: time, space of rows and index; and rows committed over many shards of a server."""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final, LiteralString

import psycopg
from psycopg import sql

from shardids.compare.measures.draws import inserts_of
from shardids.compare.measures.measuring import CLIENTS, Measuring, Sizes, connected
from shardids.compare.results import SPREAD, Growth, Inserts, Storage
from shardids.compare.schemes import Scheme, Servers, Source, scheme_of
from shardids.compare.schemes.scheme import NOTE
from shardids.errors import StatementFailed, UnsupportedServer

_STEPS: Final = 20
_CHECKPOINTS: Final = 4
_TRIES: Final = 20
_NAME: Final = "shardids_compare"
_TABLE: Final = sql.Identifier(_NAME)
_INDEX: Final = sql.Literal(f"{_NAME}_pkey")


def measure_storage(run: Measuring) -> dict[str, Storage]:
    """Measure one client of the first node."""
    found = run.rounds(
        "storage", run.sizes.fills, lambda name: _filled(run.schemes[name], run.servers, run.sizes)
    )
    return {
        name: replace(rounds[-1], rows_per_s=statistics.median(each.rows_per_s for each in rounds))
        for name, rounds in found.items()
    }


def _filled(scheme: Scheme, servers: Servers, sizes: Sizes) -> Storage:
    """Make the table, fill it, measure it and drop it.

    Raises:
        UnsupportedServer: the server lacks the extension pgstattuple.
        StatementFailed: too many keys are duplicates to fill the table.
    """
    by_server = scheme.column().by_server
    drop = sql.SQL("drop table if exists {}").format(_TABLE)
    with (
        connected(servers, 0) as connection,
        contextlib.nullcontext() if by_server else scheme.open(servers) as source,
    ):
        try:
            connection.execute("create extension if not exists pgstattuple")
        except (psycopg.errors.UndefinedFile, psycopg.errors.FeatureNotSupported) as error:
            raise UnsupportedServer("the server lacks the extension pgstattuple") from error
        connection.execute(drop)
        connection.execute(scheme.column().table(_TABLE, "n integer"))
        try:
            return _fill(connection, source, sizes)
        finally:
            connection.execute(drop)


def _fill(connection: psycopg.Connection, source: Source | None, sizes: Sizes) -> Storage:
    step = sizes.rows // _STEPS
    wal_before = _one(connection, "select pg_current_wal_insert_lsn()")
    growth: list[Growth] = []
    taken_s = 0.0
    while len(growth) < _STEPS and taken_s < sizes.fill_s:
        if len(growth) % (_STEPS // _CHECKPOINTS) == 0:
            connection.execute("checkpoint")
        begun = time.perf_counter()
        _again_if_twice(lambda: _copy(connection, source, step))
        taken_s += time.perf_counter() - begun
        growth.append(Growth(rows=step * (len(growth) + 1), index_bytes=_size(connection, _INDEX)))
    rows = growth[-1].rows
    wal = _one(
        connection, sql.SQL("select pg_current_wal_insert_lsn() - {}::pg_lsn").format(sql.Literal(wal_before))
    )
    density = _one(connection, sql.SQL("select avg_leaf_density from pgstatindex({})").format(_INDEX))
    return Storage(
        rows=rows,
        rows_per_s=rows / taken_s,
        table_bytes_per_row=_size(connection, sql.Literal(_NAME)) / rows,
        index_bytes_per_row=growth[-1].index_bytes / rows,
        leaf_density_percent=density,
        wal_bytes_per_row=float(wal) / rows,
        growth=growth,
    )


def _copy(connection: psycopg.Connection, source: Source | None, rows: int) -> None:
    """Insert rows with the keys of a source, or with those that the server makes."""
    columns = "n" if source is None else "n, id"
    query = sql.SQL("copy {} ({}) from stdin").format(_TABLE, sql.SQL(columns))
    with connection.cursor() as cursor, cursor.copy(query) as copy:
        if source is None:
            for number in range(rows):
                copy.write_row((number,))
        else:
            for row in enumerate(source.draw_many(rows)):
                copy.write_row(row)


def _again_if_twice(add: Callable[[], None]) -> None:
    # A scheme that issues a key twice loses the failed statement's time, as it would for its users.
    for _ in range(_TRIES):
        try:
            add()
        except psycopg.errors.UniqueViolation:
            continue
        return
    raise StatementFailed(f"{_TRIES} bulk inserts in a row failed on a key that was there already")


def _size(connection: psycopg.Connection, relation: sql.Literal) -> int:
    size: int = _one(connection, sql.SQL("select pg_relation_size({})").format(relation))
    return size


def _one(connection: psycopg.Connection, query: sql.Composed | LiteralString) -> Any:
    ((value,),) = connection.execute(query).fetchall()
    return value


def measure_spread(run: Measuring) -> dict[str, Inserts]:
    """Measure one client, then sixteen, all of the first server, which has all the shards.

    Each client goes through the shards, or through some of them, in its own order, again and again.
    """
    run.each("spread", lambda name: run.schemes[name].install_shards(run.servers, SPREAD))
    return inserts_of(run.rounds("spread", run.sizes.spread_rounds, lambda name: _round(name, run)))


def _round(name: str, run: Measuring) -> dict[int, float]:
    """Return the rows per second, by the number of clients."""
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
    """Make an empty table for each shard, and drop them at the end."""
    drop = sql.SQL("drop table if exists {}").format(sql.SQL(", ").join(map(_table(name), range(SPREAD))))
    with connected(servers, 0) as connection:
        try:
            with connection.transaction():
                connection.execute(drop)
                for shard in range(SPREAD):
                    # Not text, with which each table would have a second one for long values.
                    connection.execute(
                        scheme.column_of(shard).table(_table(name)(shard), "note varchar(100)")
                    )
            yield
        finally:
            connection.execute(drop)


def _table(name: str) -> Callable[[int], sql.Identifier]:
    return lambda shard: sql.Identifier(f"shardids_compare_{name}_{shard}")


@contextlib.contextmanager
def _inserter(name: str, servers: Servers, client: int, sizes: Sizes) -> Iterator[Callable[[], float]]:
    """Insert for a while; return rows per second. A row whose key exists already does not count."""
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
