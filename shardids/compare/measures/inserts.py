"""Measures rows that are inserted and committed one by one, as a web application does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import psycopg
from psycopg import sql

from shardids.compare.measures.measuring import NODES, Measuring, connected
from shardids.compare.measures.sizes import CLIENTS
from shardids.compare.results import Inserts
from shardids.compare.schemes import Scheme, Servers, scheme_of
from shardids.compare.schemes.scheme import NOTE

_WARM_UP = 5


def measure_inserts(run: Measuring) -> dict[str, Inserts]:
    """Measures one client of the first node, then sixteen, half of them on each node.

    Schemes that are made for one server have all sixteen on it.
    """
    return inserts_of(run.rounds("inserts", run.sizes.rounds, lambda name: _round(name, run)))


def inserts_of(found: Mapping[str, Sequence[Mapping[int, float]]]) -> dict[str, Inserts]:
    """Returns the results of rounds that each gave rows per second by the number of clients."""
    return {
        name: Inserts(rounds_per_s={count: [each[count] for each in rounds] for count in (1, CLIENTS)})
        for name, rounds in found.items()
    }


def _round(name: str, run: Measuring) -> dict[int, float]:
    """Returns the rows per second, by the number of clients."""
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
    """Makes an empty table with the scheme's key on each node, and drops it at the end."""
    drop = sql.SQL("drop table if exists {}").format(_table(name))
    create = "create table {} (id {}, note text, primary key (id))"
    with contextlib.ExitStack() as stack:
        for node in range(NODES):
            connection = stack.enter_context(connected(servers, node))
            stack.callback(connection.execute, drop)
            connection.execute(drop)
            connection.execute(sql.SQL(create).format(_table(name), scheme.column(node).definition))
        yield


def _table(name: str) -> sql.Identifier:
    return sql.Identifier(f"shardids_compare_{name}")


@contextlib.contextmanager
def _inserter(name: str, servers: Servers, node: int, seconds: float) -> Iterator[Callable[[], float]]:
    """Inserts for so long; returns rows per second. A row whose key exists already does not count."""
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

        for _ in range(_WARM_UP):
            insert()

        def go() -> float:
            rows, begun = 0, time.perf_counter()
            end = begun + seconds
            while time.perf_counter() < end:
                rows += insert()
            return rows / (time.perf_counter() - begun)

        yield go
