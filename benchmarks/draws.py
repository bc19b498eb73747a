"""What an ID costs, in the server: µs an ID over many draws in one statement."""

from __future__ import annotations

from importlib.resources import files

import psycopg

from benchmarks.report import Section, Timed, interleaved, ratio, seconds
from shardids.devcluster import found
from shardids.embedded import temporary_server

DRAWS = 100_000


def run(rounds: int) -> Section:
    """Measures the draws of one session on a server of its own."""
    with temporary_server() as server:
        found([server], 8)
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute(files("benchmarks").joinpath("published.sql").read_text())
            connection.execute("create sequence plain")
            modern = connection.info.server_version >= 180000
            measures = interleaved(_cases(connection, modern=modern), rounds=rounds, unit="µs an ID")
            version = connection.execute("show server_version").fetchone()
    shown = version[0] if version else "?"
    next_id, nextval = measures["next_id()"], measures["nextval()"]
    return Section(
        title="Draws, one session",
        conditions=f"PostgreSQL {shown}, {DRAWS:,} IDs a statement, {rounds} rounds.",
        measures=tuple(measures.values()),
        ratios=(
            ratio(next_id, nextval, at_most=5),
            ratio(next_id, measures["the published function"], at_most=0.5),
            ratio(next_id, measures["the same, clock read tidied"]),
            ratio(next_id, measures["gen_random_uuid()"]),
            ratio(measures["next_ids(n)"], nextval, at_most=1.2),
        ),
    )


def _cases(connection: psycopg.Connection, *, modern: bool) -> dict[str, Timed]:
    expressions = {
        "nextval()": "nextval('plain')",
        "next_id()": "shard_0005.next_id()",
        "the published function": "published.next_id()",
        "the same, clock read tidied": "published.next_id_tidied()",
        "gen_random_uuid()": "gen_random_uuid()",
    }
    if modern:
        expressions["uuidv7()"] = "uuidv7()"
    cases = {
        name: _timed(connection, f"select count({drawn}) from generate_series(1, {DRAWS})", DRAWS)
        for name, drawn in expressions.items()
    }
    many = 1_000_000
    cases["next_ids(n)"] = _timed(
        connection, f"select count(id) from (select shard_0005.next_ids({many}) id) s", many
    )
    return cases


def _timed(connection: psycopg.Connection, query: str, ids: int) -> Timed:
    # The query is built from the constants above only.
    return lambda: seconds(lambda: connection.execute(query.encode())) / ids * 1e6
