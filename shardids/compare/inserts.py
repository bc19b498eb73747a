"""Rows inserted and committed one by one, as a web application does."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import psycopg
from psycopg import sql

from shardids.baselines import Scheme, Servers, scheme_of
from shardids.baselines.postgresql import Session
from shardids.compare.clients import Clients
from shardids.compare.results import Inserts
from shardids.compare.sizes import CLIENTS, Sizes

NODES = 2
_NOTE = "a row of a table that is not very wide"
_WARM_UP = 5


def measure_inserts(
    schemes: Mapping[str, Scheme],
    servers: Servers,
    clients: Clients,
    sizes: Sizes,
    say: Callable[[str], None],
) -> dict[str, Inserts]:
    """One client of the first node, then sixteen, half of them on each node; the median of the rounds."""
    rates: dict[str, dict[int, list[float]]] = {name: {1: [], CLIENTS: []} for name in schemes}
    with contextlib.ExitStack() as stack:
        for name, scheme in schemes.items():
            stack.enter_context(_tables(name, scheme, servers))
        for round_ in range(1, sizes.rounds + 1):
            for name, scheme in schemes.items():
                for count in (1, CLIENTS):
                    say(f"inserts by {count}, round {round_} of {sizes.rounds}: {scheme.about.title}")
                    jobs = [(name, servers, number % NODES, sizes.insert_s) for number in range(count)]
                    rates[name][count].append(sum(clients.run(_inserter, jobs)))
    return {
        name: Inserts(per_s={count: statistics.median(each) for count, each in rates[name].items()})
        for name in schemes
    }


@contextlib.contextmanager
def _tables(name: str, scheme: Scheme, servers: Servers) -> Iterator[None]:
    """An empty table with the scheme's key on each node, dropped at the end."""
    for node in range(NODES):
        with connected(servers, node) as connection:
            connection.execute(
                sql.SQL("create table {} (id {}, note text, primary key (id))").format(
                    _table(name), scheme.column(node).definition
                )
            )
    try:
        yield
    finally:
        for node in range(NODES):
            with connected(servers, node) as connection:
                connection.execute(sql.SQL("drop table {}").format(_table(name)))


def _table(name: str) -> sql.Identifier:
    return sql.Identifier(f"shardids_compare_{name}")


@contextlib.contextmanager
def connected(servers: Servers, node: int) -> Iterator[psycopg.Connection]:
    """An autocommit connection to a node."""
    session = Session(servers.postgresql[node], what=f"node {node}")
    try:
        yield session.connection
    finally:
        session.close()


@contextlib.contextmanager
def _inserter(name: str, servers: Servers, node: int, seconds: float) -> Iterator[Callable[[], float]]:
    """Inserts for so long; gives rows a second. A row whose key was there already is no row."""
    scheme = scheme_of(name)
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(connected(servers, node))
        if scheme.column(node).by_server:
            query = sql.SQL("insert into {} (note) values (%s) returning id").format(_table(name))
            parameters: Callable[[], tuple[object, ...]] = lambda: (_NOTE,)  # noqa: E731  -- one of two
        else:
            query = sql.SQL("insert into {} (id, note) values (%s, %s) returning id").format(_table(name))
            source = stack.enter_context(scheme.open(servers, node))
            parameters = lambda: (source.draw(), _NOTE)  # noqa: E731

        def insert() -> int:
            try:
                connection.execute(query, parameters())
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
