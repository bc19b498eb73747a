"""What a key costs, in the server: µs a key over many draws in one statement."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from benchmarks.report import Section, Table, Timed, interleaved, ratio, seconds
from benchmarks.schemes import (
    NEXT_ID,
    NEXT_IDS,
    NEXTVAL,
    PUBLISHED,
    SHARD,
    TIDIED,
    UUID4,
    UUID7,
    schemes,
    server_with_all,
    together,
    version_of,
)

DRAWS = 100_000
MANY = 1_000_000
IDLE_SHARDS = 1024
SESSIONS = (1, 2, 8, 32)
IDLE = "next_id(), idle shard"


def one_session(rounds: int) -> Section:
    """Measure the draws of one session, also from shards that have lain idle."""
    with server_with_all(IDLE_SHARDS) as (_, connection):
        cases = {
            scheme.name: _timed(partial(connection.execute, scheme.draw_many(DRAWS)), DRAWS)
            for scheme in schemes(connection.info.server_version)
        }
        cases[NEXT_IDS] = _timed(partial(connection.execute, _block(MANY)), MANY)
        cases[IDLE] = _timed(partial(connection.execute, _EACH_SHARD), IDLE_SHARDS)
        m = interleaved(cases, rounds=rounds, unit="µs a key")
        version = version_of(connection)
    return Section(
        title="Draws, one session",
        conditions=f"PostgreSQL {version}, {DRAWS:,} keys a statement, {rounds} rounds. Idle: one ID from"
        f" each of {IDLE_SHARDS:,} shards that drew none for over 2 ms: each is brought to the clock first.",
        measures=tuple(m.values()),
        ratios=(
            ratio(m[NEXT_ID], m[NEXTVAL], at_most=5),
            ratio(m[NEXT_ID], m[PUBLISHED], at_most=1 / 2.3),
            ratio(m[NEXT_ID], m[TIDIED]),
            ratio(m[NEXT_ID], m[UUID4], at_most=1.2),
            *([ratio(m[NEXT_ID], m[UUID7])] if UUID7 in m else []),
            ratio(m[NEXT_IDS], m[NEXTVAL], at_most=1),
        ),
    )


def many_sessions(rounds: int) -> Section:
    """Measure the draws of several sessions at once from one shard."""
    with server_with_all() as (server, connection), ExitStack() as stack:
        all_ = schemes(connection.info.server_version)
        names = [*(scheme.name for scheme in all_), NEXT_IDS]
        cases = {}
        for count in SESSIONS:
            run_together = stack.enter_context(together(server.url(), count))
            each = DRAWS // count
            queries = [*(scheme.draw_many(each) for scheme in all_), _block(each)]
            for name, query in zip(names, queries, strict=True):
                cases[f"{name}, {count}"] = _timed(partial(run_together, query), each * count)
        m = interleaved(cases, rounds=rounds, unit="µs a key")
        version = version_of(connection)
    return Section(
        title="Draws, several sessions",
        conditions=f"PostgreSQL {version}, {DRAWS:,} keys of one shard shared out among the sessions,"
        f" {rounds} rounds; the median time over the number of keys.",
        table=Table(
            columns=tuple(f"{count} session{'s' * (count > 1)}, µs a key" for count in SESSIONS),
            rows={name: tuple(m[f"{name}, {count}"].median for count in SESSIONS) for name in names},
        ),
        ratios=tuple(ratio(m[f"{NEXT_ID}, {count}"], m[f"{PUBLISHED}, {count}"]) for count in SESSIONS),
    )


# An ID of each shard, one statement a shard, as from Python, but without the way there.
_EACH_SHARD = b"""do $do$
declare shard integer;
begin
  for shard in select id from shardids.shard loop
    execute format('select %I.next_id()', shardids.schema_of(shard));
  end loop;
end $do$"""


def _block(count: int) -> bytes:
    return f"select count(id) from (select shard_{SHARD:04d}.next_ids({count}) id) drawn".encode()


def _timed(work: Callable[[], object], keys: int) -> Timed:
    return lambda: seconds(work) / keys * 1e6
