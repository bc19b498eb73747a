"""The simulator against a shard of a real server: the same draws at the same times give the same ticks."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy.engine import URL

from shardids.ids.layout import DEFAULT
from shardids.ids.planning.simulator import Shards
from shardids.pg.embedded import EmbeddedServer, temporary_server
from shardids.pg.urls import parse_url
from tests.conftest import dsn
from tests.support.generator import install, row, run_ahead, scalar
from tests.support.incarnations import ENDS, begin_another_incarnation, reconnect

ROUNDS = 100
SHARDS = range(4)

# Evaluated from left to right; a draw's clock is read between the two of here.
DRAWN = """
    select shardids.offset_ms(pg_sequence_last_value('{s}.id_offset')),
           coalesce(pg_sequence_last_value('{s}.id_counter'), 0),
           date_part('epoch', clock_timestamp()) * 1000 - shardids.epoch_ms(),
           {s}.next_id(),
           date_part('epoch', clock_timestamp()) * 1000 - shardids.epoch_ms(),
           shardids.offset_ms(pg_sequence_last_value('{s}.id_offset')),
           pg_sequence_last_value('{s}.id_counter')"""


def played(offset_ms: int, counter: int, at_ms: float, mark: float | None) -> tuple[int, int, int]:
    shards = Shards(node_of=[0], skew_ms=[0.0], start_ms=at_ms)
    shards.offset_ms[0], shards.counter[0] = offset_ms, counter
    if mark is not None:
        shards.restart(0, mark=mark)
    _, tick = shards.draw(at_ms, [1])
    return int(shards.offset_ms[0]), int(shards.counter[0]), int(tick[0])


def draw(
    connection: psycopg.Connection[Any], shard: int = 2, *, mark: float | None = None
) -> tuple[int, int]:
    """Draws on both sides, and returns by how much the offset and the counter rose.

    ``mark`` is that of the incarnation, if it is the shard's first draw in it.
    """
    offset, counter, before, drawn, after, new_offset, new_counter = row(
        connection, DRAWN.format(s=f"shard_{shard:04}")
    )
    bits = DEFAULT.shard_bits + DEFAULT.sequence_bits
    tick = drawn >> bits << DEFAULT.sequence_bits | drawn & (DEFAULT.sequence_limit - 1)
    # The clock between: in as many parts as a millisecond may fall into.
    parts = max(int((after - before) * 20), 1)
    moments = [before + (after - before) * part / parts for part in range(parts + 1)]
    assert (new_offset, new_counter, tick) in {played(offset, counter, moment, mark) for moment in moments}
    return new_offset - offset, new_counter - counter


def test_a_lead_of_over_a_minute_takes_two_ticks_a_draw(cluster_url: URL) -> None:
    with psycopg.connect(dsn(cluster_url), autocommit=True) as connection:
        run_ahead(connection, 59_000, shard=2)
        assert {draw(connection) for _ in range(20)} == {(0, 1)}
        run_ahead(connection, 75_000, shard=2)
        assert {draw(connection) for _ in range(20)} == {(0, 2)}


def test_the_same_ticks(cluster_url: URL) -> None:
    chance = random.Random(7)
    kinds = {"usual": 0, "stepped": 0, "raised": 0}
    with psycopg.connect(dsn(cluster_url), autocommit=True) as connection:
        for shard in SHARDS:
            connection.execute(f"select shard_{shard:04}.next_id()")
        for _ in range(ROUNDS):
            # How long a shard is idle decides which way the draw takes.
            time.sleep(chance.choice([0, 0, 0, 0.001, 0.003, 0.01, 0.02, 0.05, 0.3]))
            for shard in SHARDS:
                raised, _ = draw(connection, shard)
                kinds["usual" if not raised else "raised" if raised > 256 else "stepped"] += 1
    assert min(kinds.values()) > 5, kinds


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    """A server that loses nothing it acknowledged when it is killed; restarted often, it would wait."""
    with temporary_server(settings={"synchronous_commit": "on"}) as server:
        install(parse_url(server.url()), shards=SHARDS)
        yield server


def stored(connection: psycopg.Connection[Any], shard: int) -> tuple[int, int]:
    return row(
        connection,
        f"""select shardids.offset_ms(pg_sequence_last_value('shard_{shard:04}.id_offset')),
                   pg_sequence_last_value('shard_{shard:04}.id_counter')""",
    )  # type: ignore[return-value]  # a row of two


@pytest.mark.parametrize("how", ENDS)
def test_the_same_ticks_in_a_new_incarnation(how: str, server: EmbeddedServer) -> None:
    url = server.url()
    leads_ms = {2: 5_000, 3: 75_000}
    with reconnect(url) as observer, reconnect(url) as working:
        for shard in SHARDS:
            scalar(working, f"select shard_{shard:04}.next_id()")
        time.sleep(0.3)
        # Shard 0 lags when the server ends, shard 1 is at the clock.
        draw(working, 1)
        for shard, lead_ms in leads_ms.items():
            run_ahead(working, lead_ms, shard)
            draw(working, shard)
        before = [stored(working, shard) for shard in SHARDS]
        begin_another_incarnation(server, how, observer, working)
    with reconnect(url) as connection:
        mark = (scalar(connection, "select (shardids.offset_base() >> 42) & 524287")) / (1 << 19)
        for shard in SHARDS:
            offset_ms, counter = (
                now - then for now, then in zip(stored(connection, shard), before[shard], strict=True)
            )
            # What a sequence has logged ahead is gone after a crash: 32 values, of the offset 16 ms each.
            assert how != "restart" or (offset_ms, counter) == (0, 0)
            assert offset_ms in range(0, 513, 16)
            assert counter in range(33)
            raised, drawn = draw(connection, shard, mark=mark)
            assert drawn == 3
            if shard in leads_ms:
                assert raised == 10_000 + int(10_000 * mark)
            for _ in range(20):
                assert draw(connection, shard)[1] in (1, 2)
