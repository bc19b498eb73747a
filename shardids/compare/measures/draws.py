"""Draws without a table, one by one and many at once, and rows inserted and committed one by one."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import psycopg
from psycopg import sql

from shardids.compare.measures.measuring import CLIENTS, NODES, Measuring, connected
from shardids.compare.results import Draws, Inserts
from shardids.compare.schemes import Scheme, Servers, scheme_of
from shardids.compare.schemes.scheme import NOTE

_WARM_UP = 20


def measure_draws(run: Measuring) -> dict[str, Draws]:
    """Measure one client of the first node."""
    found = run.rounds("draws", run.sizes.rounds, lambda name: _round(run.schemes[name], run))
    return {
        name: Draws(
            draws=sum(len(single) for single, _ in rounds),
            quantiles_us=_quantiles_us([time_ns for single, _ in rounds for time_ns in single]),
            many_us=statistics.median(many_us for _, many_us in rounds),
            many=run.sizes.many,
        )
        for name, rounds in found.items()
    }


def _round(scheme: Scheme, run: Measuring) -> tuple[list[int], float]:
    """Return the times of single draws in ns, and the time per key in µs when many are drawn at once."""
    with scheme.open(run.servers) as source:
        for _ in range(_WARM_UP):
            source.draw()
        single = [_timed(source.draw) for _ in range(run.sizes.draws)]
        return single, _timed(lambda: source.draw_many(run.sizes.many)) / run.sizes.many / 1000


def _timed(draw: Callable[[], object]) -> int:
    before = time.perf_counter_ns()
    draw()
    return time.perf_counter_ns() - before


def _quantiles_us(times_ns: list[int]) -> list[float]:
    inner = statistics.quantiles(times_ns, n=100, method="inclusive")
    return [ns / 1000 for ns in (min(times_ns), *inner, max(times_ns))]


_WARM_UP_ROWS = 5


def measure_inserts(run: Measuring) -> dict[str, Inserts]:
    """Measure one client of the first node, then sixteen, half of them on each node.

    Schemes that are made for one server have all sixteen on it.
    """
    return inserts_of(run.rounds("inserts", run.sizes.rounds, lambda name: _insert_round(name, run)))


def inserts_of(found: Mapping[str, Sequence[Mapping[int, float]]]) -> dict[str, Inserts]:
    """Return the results of rounds that each gave rows per second by the number of clients."""
    return {
        name: Inserts(rounds_per_s={count: [each[count] for each in rounds] for count in (1, CLIENTS)})
        for name, rounds in found.items()
    }


def _insert_round(name: str, run: Measuring) -> dict[int, float]:
    """Return the rows per second, by the number of clients."""
    nodes = 1 if _is_for_one_server(run.schemes[name]) else NODES
    with _tables(name, run.schemes[name], run.servers):
        return {
            count: sum(
                run.clients.run(
                    _inserter,
                    [(name, run.servers, number % nodes, run.sizes.insert_s) for number in range(count)],
                )
            )
            for count in (1, CLIENTS)
        }


def _is_for_one_server(scheme: Scheme) -> bool:
    return scheme.column(0).by_server and not scheme.column(1).by_server


@contextlib.contextmanager
def _tables(name: str, scheme: Scheme, servers: Servers) -> Iterator[None]:
    """Make an empty table with the scheme's key on each node, and drop it at the end."""
    drop = sql.SQL("drop table if exists {}").format(_table(name))
    with contextlib.ExitStack() as stack:
        for node in range(NODES):
            connection = stack.enter_context(connected(servers, node))
            stack.callback(connection.execute, drop)
            connection.execute(drop)
            connection.execute(scheme.column(node).table(_table(name), "note text"))
        yield


def _table(name: str) -> sql.Identifier:
    return sql.Identifier(f"shardids_compare_{name}")


@contextlib.contextmanager
def _inserter(name: str, servers: Servers, node: int, seconds: float) -> Iterator[Callable[[], float]]:
    """Insert for so long; return rows per second. A row whose key exists already does not count."""
    scheme = scheme_of(name)
    by_server = scheme.column(node).by_server
    with (
        connected(servers, node) as connection,
        contextlib.nullcontext() if by_server else scheme.open(servers, node) as source,
    ):
        columns = sql.SQL("(note) values (%s)" if source is None else "(note, id) values (%s, %s)")
        query = sql.SQL("insert into {} {} returning id").format(_table(name), columns)

        def insert() -> int:
            if scheme.keeps_rows and source is not None:
                source.draw()
                return 1
            try:
                connection.execute(query, (NOTE,) if source is None else (NOTE, source.draw()))
            except psycopg.errors.UniqueViolation:
                return 0
            return 1

        for _ in range(_WARM_UP_ROWS):
            insert()

        def go() -> float:
            rows, begun = 0, time.perf_counter()
            end = begun + seconds
            while time.perf_counter() < end:
                rows += insert()
            return rows / (time.perf_counter() - begun)

        yield go
