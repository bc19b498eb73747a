"""What the fault tests share: ways to draw, connections, and waiting."""

from __future__ import annotations

import os
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import psycopg
import pytest

from shardids import Layout

LAYOUT = Layout.preset("default")
LONG = os.environ.get("SHARDIDS_FAULTS", "short") == "long"
ALL_KINDS = ("one", "many", "many", "many", "block", "reserve")
SLOW_KINDS = ("one", "many", "many", "block")
"""Ways to draw that take a shard ahead of the clock by less than safety_margin in a few seconds."""

Ids = npt.NDArray[np.int64]
Scale = TypeVar("Scale")


def scaled(short: Scale, long: Scale) -> Scale:
    """The figure for this run: ``SHARDIDS_FAULTS=long`` asks for the long one."""
    return long if LONG else short


def ticks_of(ids: Ids) -> Ids:
    low = (1 << LAYOUT.sequence_bits) - 1
    above = LAYOUT.shard_bits + LAYOUT.sequence_bits
    return ((ids >> above) << LAYOUT.sequence_bits) | (ids & low)


def ids_of(first_tick: int, last_tick: int, shard: int) -> Ids:
    ticks = np.arange(first_tick, last_tick + 1, dtype=np.int64)
    low = (1 << LAYOUT.sequence_bits) - 1
    ms_and_shard = ((ticks >> LAYOUT.sequence_bits) << LAYOUT.shard_bits) | shard
    return (ms_and_shard << LAYOUT.sequence_bits) | (ticks & low)


def draw(cursor: psycopg.Cursor[Any], kind: str, size: int, shard: int = 0) -> Ids:
    """IDs by one statement, in the order in which the server drew them."""
    schema = f"shard_{shard:04}"
    if kind == "reserve":
        first, last = cursor.execute(
            "select first_tick, last_tick from shardids.reserve(%s, %s)", (shard, size)
        ).fetchone()
        return ids_of(first, last, shard)
    if kind == "one":
        return _integers(cursor.execute(f"select int8send({schema}.next_id())").fetchone())
    source = {
        "many": f"(select {schema}.next_id() from generate_series(1, %s::integer))",
        "block": f"{schema}.next_ids(%s::integer)",
    }[kind]
    query = f"select string_agg(int8send(id), '') from {source} drawn (id)"
    return _integers(cursor.execute(query, (size,)).fetchone())


def _integers(row: tuple[bytes]) -> Ids:
    return np.frombuffer(row[0], dtype=">i8").astype(np.int64)


def connect(url: str) -> psycopg.Connection[Any]:
    """An autocommit connection."""
    return psycopg.connect(url, autocommit=True, connect_timeout=10)


def scalar(connection: psycopg.Connection[Any], query: str, *parameters: object) -> Any:
    row = connection.execute(query, parameters or None).fetchone()
    assert row is not None
    return row[0]


def clock_ms(connection: psycopg.Connection[Any]) -> int:
    """The server's clock, since the layout's epoch."""
    return int(scalar(connection, "select shardids.ms_of(clock_timestamp())"))


def end_sessions(url: str) -> None:
    """Ends the other sessions of a database."""
    with connect(url) as admin:
        admin.execute(
            """select pg_terminate_backend(pid, 5000) from pg_stat_activity
               where datname = current_database() and pid <> pg_backend_pid()"""
        )


def assert_refused(connection: psycopg.Connection[Any], state: str, message: str) -> None:
    """No way to draw gives IDs."""
    for kind in ALL_KINDS:
        with pytest.raises(psycopg.Error, match=message) as refused:
            draw(connection.cursor(binary=True), kind, 10)
        assert refused.value.sqlstate == state
