"""How many keys come twice when sixteen sessions draw from one shard as fast as they can."""

from __future__ import annotations

from benchmarks.report import Section, Table, figure
from benchmarks.schemes import NEXT_ID, schemes, server_with_all, together, version_of

SESSIONS = 16
DRAWS = 50_000


def run(rounds: int) -> Section:
    """Count the duplicates of all rounds together."""
    total = SESSIONS * DRAWS * rounds
    twice = {}
    with server_with_all() as (server, connection), together(server.url(), SESSIONS) as run_together:
        for scheme in schemes(connection.info.server_version):
            connection.execute(f"create unlogged table drawn (id {scheme.type})".encode())
            draw = f"insert into drawn select {scheme.expression} from generate_series(1, {DRAWS})"
            for _ in range(rounds):
                run_together(draw.encode())
            row = connection.execute("select count(*) - count(distinct id) from drawn").fetchone()
            twice[scheme.name] = row[0] if row else total
            connection.execute("drop table drawn")
        version = version_of(connection)
    return Section(
        title="Duplicates at full speed",
        conditions=f"PostgreSQL {version}, {SESSIONS} sessions, one shard, {total:,} keys of each kind.",
        table=Table(
            columns=("keys that were there already", "of a million"),
            rows={name: (count, count / total * 1e6) for name, count in twice.items()},
        ),
        ratios=(figure(f"{NEXT_ID}, duplicates", twice[NEXT_ID], at_most=0),),
    )
