"""The simulator against a shard of a real server: the same draws at the same times give the same ticks."""

from __future__ import annotations

import random
import time

import psycopg
from sqlalchemy.engine import URL

from shardids.ids.layout import DEFAULT
from shardids.planning.simulator import Shards
from tests.conftest import dsn
from tests.support.generator import row

DRAWS = 400

# Evaluated from left to right; a draw's clock is read between the two of here.
DRAWN = """
    select shardids.offset_ms(pg_sequence_last_value('shard_0002.id_offset')),
           coalesce(pg_sequence_last_value('shard_0002.id_counter'), 0),
           date_part('epoch', clock_timestamp()) * 1000 - shardids.epoch_ms(),
           shard_0002.next_id(),
           date_part('epoch', clock_timestamp()) * 1000 - shardids.epoch_ms(),
           shardids.offset_ms(pg_sequence_last_value('shard_0002.id_offset')),
           pg_sequence_last_value('shard_0002.id_counter')"""


def played(offset_ms: int, counter: int, at_ms: float) -> tuple[int, int, int]:
    shards = Shards(node_of=[0], skew_ms=[0.0], start_ms=at_ms)
    shards.offset_ms[0], shards.counter[0] = offset_ms, counter
    _, tick = shards.draw(at_ms, [1])
    return int(shards.offset_ms[0]), int(shards.counter[0]), int(tick[0])


def test_the_same_ticks(cluster_url: URL) -> None:
    chance = random.Random(7)
    kinds = {"usual": 0, "stepped": 0, "raised": 0}
    with psycopg.connect(dsn(cluster_url), autocommit=True) as connection:
        connection.execute("select shard_0002.next_id()")
        for _ in range(DRAWS):
            # How long the shard is idle decides which way the draw takes.
            time.sleep(chance.choice([0, 0, 0, 0.001, 0.003, 0.01, 0.02, 0.05, 0.3]))
            offset, counter, before, drawn, after, new_offset, new_counter = row(connection, DRAWN)
            bits = DEFAULT.shard_bits + DEFAULT.sequence_bits
            tick = drawn >> bits << DEFAULT.sequence_bits | drawn & (DEFAULT.sequence_limit - 1)
            wanted = (new_offset, new_counter, tick)
            # The clock between: in as many parts as a millisecond may fall into.
            parts = max(int((after - before) * 20), 1)
            moments = [before + (after - before) * part / parts for part in range(parts + 1)]
            assert wanted in {played(offset, counter, moment) for moment in moments}, (
                offset,
                counter,
                before,
                after,
            )
            raised = new_offset - offset
            kinds["usual" if not raised else "raised" if raised > 256 else "stepped"] += 1
    assert min(kinds.values()) > 5, kinds
