"""Measures a table filled in bulk: how fast that is, and how much space its rows and index take."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, LiteralString

import psycopg
from psycopg import sql

from shardids.compare.measures.measuring import Measuring, connected
from shardids.compare.measures.sizes import Sizes
from shardids.compare.results import Growth, Storage
from shardids.compare.schemes import Scheme, Servers, Source
from shardids.errors import StatementFailed, UnsupportedServer

_STEPS: Final = 20
_CHECKPOINTS: Final = 4
_TRIES: Final = 20
_NAME: Final = "shardids_compare"
_TABLE: Final = sql.Identifier(_NAME)
_INDEX: Final = sql.Literal(f"{_NAME}_pkey")


def measure_storage(run: Measuring) -> dict[str, Storage]:
    """Measures one client of the first node."""
    found = run.rounds(
        "storage", run.sizes.fills, lambda name: _filled(run.schemes[name], run.servers, run.sizes)
    )
    return {
        name: replace(rounds[-1], rows_per_s=statistics.median(each.rows_per_s for each in rounds))
        for name, rounds in found.items()
    }


def _filled(scheme: Scheme, servers: Servers, sizes: Sizes) -> Storage:
    """Makes the table, fills it, measures it and drops it.

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
        connection.execute(
            sql.SQL("create table {} (id {}, n integer, primary key (id))").format(
                _TABLE, scheme.column().definition
            )
        )
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
    """Inserts rows with the keys of a source, or with those that the server makes."""
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
