"""What SQL reads from an ID is what Python reads, for every layout that has a name."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardids.ids.layout import PRESETS, Layout
from tests.conftest import BlankDatabases, dsn
from tests.support.generator import connect, install, row

Db = psycopg.Connection[Any]


@pytest.fixture(scope="module", params=PRESETS.values(), ids=PRESETS)
def layout(request: pytest.FixtureRequest) -> Layout:
    return request.param


@pytest.fixture(scope="module")
def sql(layout: Layout, databases: BlankDatabases) -> Iterator[Db]:
    """A connection to a node with the layout and no shards; it shows times in a zone far from UTC."""
    url = databases.take()
    install(url, layout, shards=())
    with connect(dsn(url)) as connection:
        connection.execute("set timezone = 'Pacific/Chatham'")
        yield connection
    databases.give_back(url)


def numbers(bits: int) -> st.SearchStrategy[int]:
    """Any number of so many bits, and often one near an end or near the middle."""
    last, middle = (1 << bits) - 1, 1 << (bits - 1)
    return st.integers(0, last) | st.sampled_from([0, 1, middle - 1, middle, last - 1, last])


def parts(layout: Layout) -> st.SearchStrategy[list[tuple[int, int, int]]]:
    """Lists of ms, shard and sequence."""
    widths = (layout.time_bits, layout.shard_bits, layout.sequence_bits)
    return st.lists(st.tuples(*map(numbers, widths)), min_size=20, max_size=300)


def times(layout: Layout) -> st.SearchStrategy[list[datetime]]:
    """Lists of times within the layout's, to the microsecond."""
    of_ms = st.tuples(numbers(layout.time_bits), st.integers(0, 999) | st.sampled_from([0, 1, 500, 999]))
    return st.lists(
        of_ms.map(lambda time: layout.time_at(time[0]) + timedelta(microseconds=time[1])),
        min_size=20,
        max_size=300,
    )


def test_sql_reads_the_same_parts_of_ids_as_python(layout: Layout, sql: Db) -> None:
    query = """
        select shardids.shard_of(id), shardids.sequence_of(id), shardids.time_of(id),
               shardids.ms_of(shardids.time_of(id))
        from unnest(%s::bigint[]) with ordinality as given (id, place) order by place"""

    @settings(max_examples=15, deadline=None)
    @given(parts(layout))
    def agree(given_parts: list[tuple[int, int, int]]) -> None:
        ids = [layout.encode(ms=ms, shard=shard, sequence=sequence) for ms, shard, sequence in given_parts]
        decoded = [layout.decode(id_) for id_ in ids]
        found = sql.execute(query, [ids]).fetchall()
        # Times of two zones are never equal where one of them is ambiguous (PEP 495).
        in_utc = [(shard, sequence, time.astimezone(UTC), ms) for shard, sequence, time, ms in found]
        assert in_utc == [(id_.shard, id_.sequence, id_.time, id_.ms) for id_ in decoded]

    agree()


def test_sql_makes_the_same_ids_of_ticks_as_python(layout: Layout, sql: Db) -> None:
    query = """
        select shardids.id_of(tick, shard)
        from unnest(%s::bigint[], %s::int[]) with ordinality as given (tick, shard, place) order by place"""

    @settings(max_examples=15, deadline=None)
    @given(parts(layout))
    def agree(given_parts: list[tuple[int, int, int]]) -> None:
        ticks = [ms << layout.sequence_bits | sequence for ms, _, sequence in given_parts]
        ids = [layout.encode(ms=ms, shard=shard, sequence=sequence) for ms, shard, sequence in given_parts]
        found = sql.execute(query, [ticks, [shard for _, shard, _ in given_parts]]).fetchall()
        assert [id_ for (id_,) in found] == ids

    agree()


def test_sql_bounds_a_time_by_the_same_ids_as_python(layout: Layout, sql: Db) -> None:
    query = """
        select shardids.min_id(at), shardids.max_id(at), shardids.ms_of(at)
        from unnest(%s::timestamptz[]) with ordinality as given (at, place) order by place"""

    @settings(max_examples=15, deadline=None)
    @given(times(layout))
    def agree(given_times: list[datetime]) -> None:
        found = sql.execute(query, [given_times]).fetchall()
        assert [bounds[:2] for bounds in found] == [
            (layout.min_id(at), layout.max_id(at)) for at in given_times
        ]
        assert [ms for _, _, ms in found] == [layout.decode(layout.min_id(at)).ms for at in given_times]

    agree()


def test_the_first_and_the_last_id_are_read_alike(layout: Layout, sql: Db) -> None:
    first = layout.encode(ms=0, shard=0)
    last_ms = (1 << layout.time_bits) - 1
    last = layout.encode(ms=last_ms, shard=layout.shard_limit - 1, sequence=layout.sequence_limit - 1)
    middle = layout.encode(ms=1 << (layout.time_bits - 1), shard=layout.shard_limit - 1)
    assert (middle < 0) == (last < 0) == layout.uses_sign_bit
    for id_ in (first, middle, last):
        time, shard, sequence = row(
            sql, "select shardids.time_of(%s), shardids.shard_of(%s), shardids.sequence_of(%s)", *[id_] * 3
        )
        decoded = layout.decode(id_)
        assert (time, shard, sequence) == (decoded.time, decoded.shard, decoded.sequence)
        assert row(sql, "select shardids.min_id(%s), shardids.max_id(%s)", time, time) == (
            layout.min_id(decoded.time),
            layout.max_id(decoded.time),
        )


def test_the_time_of_an_id_is_exact_to_the_millisecond(layout: Layout, sql: Db) -> None:
    """Every ms of a second at the layout's end, where a double has the fewest digits left."""
    start = (1 << layout.time_bits) - 1000
    ids = [layout.encode(ms=start + n, shard=1) for n in range(1000)]
    query = """
        select extract(epoch from shardids.time_of(id)) * 1000 - shardids.epoch_ms()
        from unnest(%s::bigint[]) with ordinality as given (id, place) order by place"""
    assert [ms for (ms,) in sql.execute(query, [ids]).fetchall()] == [start + n for n in range(1000)]


def test_the_planner_folds_the_layout_into_constants(sql: Db, layout: Layout) -> None:
    names = ("epoch_ms", "time_bits", "shard_bits", "sequence_bits")
    calls = ", ".join(f"shardids.{name}()" for name in names)
    (output,) = plan(sql, f"select {calls}")[1:]
    assert "shardids" not in output
    for name in names:
        assert str(getattr(layout, name)) in output


def test_decoding_is_inlined_and_bounds_are_constants_that_an_index_takes(sql: Db, layout: Layout) -> None:
    sql.execute("create temp table item (id bigint primary key)")
    sql.execute("set enable_seqscan = off; set enable_bitmapscan = off")
    at = layout.time_at(1000)
    lines = plan(
        sql,
        f"""select shardids.shard_of(id), shardids.sequence_of(id), shardids.time_of(id) from item
            where id between shardids.min_id('{at.isoformat()}') and shardids.max_id('{at.isoformat()}')""",
    )
    assert not any("shardids." in line for line in lines)
    (condition,) = [line for line in lines if "Index Cond" in line]
    assert f"'{layout.min_id(at)}'::bigint" in condition
    assert f"'{layout.max_id(at)}'::bigint" in condition


def test_nothing_is_read_from_null(sql: Db) -> None:
    found = row(
        sql,
        """select shardids.shard_of(null), shardids.sequence_of(null), shardids.time_of(null),
                  shardids.ms_of(null), shardids.min_id(null), shardids.max_id(null)""",
    )
    assert found == (None,) * 6


def plan(connection: Db, query: str) -> list[str]:
    return [line for (line,) in connection.execute(f"explain (verbose, costs off) {query}").fetchall()]
