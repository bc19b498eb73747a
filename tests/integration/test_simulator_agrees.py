"""The simulator against a shard of a real server: the same draws at the same times give the same ticks."""

from __future__ import annotations

import random
import time
from typing import Any

import psycopg
from sqlalchemy.engine import URL

from shardids.ids.layout import DEFAULT
from shardids.planning.simulator import Shards
from tests.conftest import dsn
from tests.support.generator import row, run_ahead

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


def played(offset_ms: int, counter: int, at_ms: float) -> tuple[int, int, int]:
    shards = Shards(node_of=[0], skew_ms=[0.0], start_ms=at_ms)
    shards.offset_ms[0], shards.counter[0] = offset_ms, counter
    _, tick = shards.draw(at_ms, [1])
    return int(shards.offset_ms[0]), int(shards.counter[0]), int(tick[0])


def draw(connection: psycopg.Connection[Any], shard: int = 2) -> tuple[int, int]:
    """Draws on both sides, and returns by how much the offset and the counter rose."""
    offset, counter, before, drawn, after, new_offset, new_counter = row(
        connection, DRAWN.format(s=f"shard_{shard:04}")
    )
    bits = DEFAULT.shard_bits + DEFAULT.sequence_bits
    tick = drawn >> bits << DEFAULT.sequence_bits | drawn & (DEFAULT.sequence_limit - 1)
    # The clock between: in as many parts as a millisecond may fall into.
    parts = max(int((after - before) * 20), 1)
    moments = [before + (after - before) * part / parts for part in range(parts + 1)]
    assert (new_offset, new_counter, tick) in {played(offset, counter, moment) for moment in moments}
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
