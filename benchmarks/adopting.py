"""Planning an adoption of 10,000 tables, and comparing the rows of one that is written to."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg

from benchmarks import taking_in
from benchmarks.report import Measure, Section, figure, interleaved, ratio, seconds
from benchmarks.taking_in import measure, p99
from shardids.adopt import adoption
from shardids.adopt.plan.document import read_plan, write_plan
from shardids.adopt.plan.planning import make_plan
from shardids.pg.embedded import temporary_server
from shardids.replication.steps import Event, StepBegun

TABLES = 10_000
ROWS = 20
_LIMIT = Measure(name="10 s", unit="s", median=10, lowest=10, highest=10)
_A_TRANSACTION = 250
"""How many tables one transaction makes: more would need more locks than the server has room for."""


def run(rounds: int) -> Section:
    """Measure the plan of a source: with empty tables, and with rows that are checked."""
    with temporary_server() as server, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.toml"

        def plan() -> float:
            return seconds(lambda: _plan(server.url(), path))

        _execute(server.url(), _made_tables())
        measures = interleaved({"empty tables": plan}, rounds=rounds, unit="s")
        _execute(server.url(), _filled_tables())
        measures |= interleaved({f"{ROWS} rows a table": plan}, rounds=rounds, unit="s")
        split = sum(table.kind.is_split for table in read_plan(path).tables)
    return Section(
        title=f"Planning the adoption of {TABLES:,} tables",
        conditions=f"Server and command on one machine, fsync off, {rounds} rounds. A root of 1,000 rows, and"
        f" tables with a primary key, an index and a foreign key each, to the root or to one of them; every"
        f" fourth has a second one to the root, which its rows are checked for. {split:,} are split. Reading,"
        " checking and writing the file.",
        measures=tuple(measures.values()),
        ratios=tuple(ratio(measure, _LIMIT, at_most=1) for measure in measures.values()),
    )


COMPARED_WRITES_A_SECOND = 100
_SETTLE_S = 3


def comparison(rounds: int) -> Section:
    """Adopt a database once, and compare its rows under writers and without."""
    begun: dict[str, float] = {}

    def note(event: Event) -> None:
        if isinstance(event, StepBegun):
            begun[event.step] = time.monotonic()

    busy, before, during = list[float](), list[float](), list[float]()
    with taking_in.shop() as (source, catalog, plan):
        with taking_in.Writers(source, COMPARED_WRITES_A_SECOND) as writers:
            adoption.run(catalog, plan, on_event=note)
            for _ in range(rounds):
                writers.start_phase()
                time.sleep(_SETTLE_S)
                before += writers.start_phase()
                busy.append(seconds(lambda: adoption.compare(catalog)))
                during += writers.start_phase()
        idle = [seconds(lambda: adoption.compare(catalog)) for _ in range(rounds)]
    copying_s = begun["compare"] - begun["relay"]
    return Section(
        title="Comparing the 1,000,000 rows of an adoption",
        conditions=f"Two tables, {taking_in.SHARDS} shards on two nodes, three servers on one machine, fsync"
        f" off; {taking_in.WRITERS} sessions that insert {COMPARED_WRITES_A_SECOND} rows per second at the"
        f" source; {rounds} rounds. The copy is that of the same rows, under the same writers, until the"
        " nodes have caught up.",
        measures=(
            measure("the copy", "s", [copying_s]),
            measure("the comparison, under writers", "s", busy),
            measure("the comparison, without", "s", idle),
            measure("p99 of writes, before", "ms", [p99(before) * 1000]),
            measure("p99 of writes, during the comparison", "ms", [p99(during) * 1000]),
        ),
        ratios=(
            figure(
                "the comparison under writers / the copy", sorted(busy)[rounds // 2] / copying_s, at_most=1
            ),
            figure("p99 of writes, during / before", p99(during) / p99(before)),
        ),
    )


def _plan(url: str, path: Path) -> None:
    planned = make_plan(url, root="users")
    write_plan(planned.plan, path, comments=planned.comments, force=True)


def _execute(url: str, scripts: Iterator[str]) -> None:
    with psycopg.connect(url, autocommit=True) as db:
        for script in scripts:
            db.execute(script.encode())


def _made_tables() -> Iterator[str]:
    yield "create table users (id bigint primary key, name text, created_at timestamptz default now())"
    yield "insert into users select n, 'user ' || n from generate_series(1, 1000) n"
    for start in range(0, TABLES, _A_TRANSACTION):
        yield ";".join(map(_made_table, range(start, start + _A_TRANSACTION)))


def _made_table(number: int) -> str:
    parent = "users" if number < 10 or number % 5 else f"t{number // 10}"
    second = ", other_id bigint references users" if number % 4 == 0 else ""
    columns = f"parent_id bigint not null references {parent}{second}, name text, state integer"
    return (
        f"create table t{number} (id bigserial primary key, {columns}, created_at timestamptz default now());"
        f"create index on t{number} (parent_id)"
    )


def _filled_tables() -> Iterator[str]:
    for start in range(0, TABLES, _A_TRANSACTION):
        yield ";".join(map(_filled_table, range(start, start + _A_TRANSACTION)))


def _filled_table(number: int) -> str:
    column, value = (", other_id", ", 1 + n % 20") if number % 4 == 0 else ("", "")
    rows = f"select n, 'name'{value} from generate_series(1, {ROWS}) n"
    return f"insert into t{number} (parent_id, name{column}) {rows}"
