"""A table's key widened where it is, under 16 writers: rows filled, locks, and how long a writer waits."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, event

from benchmarks.report import Measure, Section, figure
from shardids.adopt.inplace.changing import How
from shardids.adopt.inplace.keys import change_key, finish
from shardids.catalog.rows import Catalog
from shardids.ids.layout import DEFAULT
from shardids.migrate.install import provision
from shardids.pg.embedded import temporary_server
from shardids.pg.urls import parse_url
from shardids.replication.steps import Event, StepBegun

ROWS = 100_000
WRITERS = 16
LOCK_MS = 100

_TABLES = f"""
    create table orders (id serial primary key, note text not null default repeat('x', 100));
    create table lines (id serial primary key, order_id integer not null references orders, quantity integer);
    create index lines_order on lines (order_id);
    insert into orders (note) select repeat('y', 100) from generate_series(1, {ROWS});
    insert into lines (order_id, quantity) select n, 1 from generate_series(1, {ROWS}) n;
    analyze orders, lines;
"""


@dataclass
class _Writes:
    """When each write began and how long it took, in seconds."""

    url: str
    took: list[tuple[float, float]] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        with psycopg.connect(self.url, autocommit=True, prepare_threshold=None) as connection:
            while not self.stop.wait(0.01):
                begun = time.perf_counter()
                connection.execute("insert into orders default values")
                connection.execute("insert into lines (order_id, quantity) values (1, 1)")
                self.took.append((begun, time.perf_counter() - begun))

    def between(self, start: float, end: float) -> list[float]:
        """The writes of a time, in milliseconds."""
        return [took * 1000 for begun, took in self.took if start <= begun < end]


class _Locks:
    """How long transactions take from the first lock that others queue behind to their end, in ms."""

    def __init__(self) -> None:
        self.held: list[float] = []
        self._since: float | None = None

    def before(self, _c: Any, _cursor: Any, statement: str, *_rest: object) -> None:
        is_short = statement.startswith(("lock table", "alter table"))
        if self._since is None and is_short and "validate constraint" not in statement:
            self._since = time.perf_counter()

    def ended(self, _connection: Connection) -> None:
        if self._since is not None:
            self.held.append((time.perf_counter() - self._since) * 1000)
            self._since = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        listeners = (("before_cursor_execute", self.before), ("commit", self.ended), ("rollback", self.ended))
        for name, listener in listeners:
            event.listen(Engine, name, listener)
        try:
            yield
        finally:
            for name, listener in listeners:
                event.remove(Engine, name, listener)


def run(rounds: int) -> Section:
    """Measure whole changes, each of new tables."""
    found = [_once() for _ in range(rounds)]
    measures = tuple(_measure(name, unit, [one[name] for one in found]) for name, unit in _UNITS.items())
    return Section(
        title=f"A key of {ROWS:,} rows widened where it is",
        conditions=f"Two tables of {ROWS:,} rows, of which one refers to the other; {WRITERS} sessions that"
        " insert into both 100 times a second each, as far as they get; fsync off. A lock counts from its"
        f" request to the end of the transaction, attempts that are given up included. {rounds} rounds.",
        measures=measures,
        ratios=(figure("longest lock, ms", max(one["longest lock"] for one in found), at_most=LOCK_MS),),
    )


_UNITS = {
    "rows filled a second": "rows/s",
    "longest lock": "ms",
    "p99 of a write before": "ms",
    "p99 of a write during the change": "ms",
    "longest write during the change": "ms",
}


def _measure(name: str, unit: str, figures: list[float]) -> Measure:
    median, lowest, highest = statistics.median(figures), min(figures), max(figures)
    return Measure(name=name, unit=unit, median=median, lowest=lowest, highest=highest)


def _once() -> dict[str, float]:
    with temporary_server(settings={"fsync": "off"}) as server:
        catalog = Catalog(parse_url(server.url()))
        provision.init(catalog, DEFAULT, 1)
        provision.add_node(catalog, "main", server.url())
        provision.create_shards(catalog, [0])
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute(_TABLES.encode())
        try:
            return _measured(catalog, _Writes(server.url()))
        finally:
            catalog.close()


def _measured(catalog: Catalog, writes: _Writes) -> dict[str, float]:
    threads = [threading.Thread(target=writes.run) for _ in range(WRITERS)]
    for thread in threads:
        thread.start()
    locks, steps = _Locks(), list[tuple[Event, float]]()
    try:
        time.sleep(5)
        begun = time.perf_counter()
        with locks.watched():
            how = How(on_event=lambda event: steps.append((event, time.perf_counter())))
            change_key(catalog, "public.orders", 0, how)
            finish(catalog, "public.orders", 0, how)
        ended = time.perf_counter()
    finally:
        writes.stop.set()
        for thread in threads:
            thread.join()
    begun_at = [(event.step, at) for event, at in steps if isinstance(event, StepBegun)]
    filling = sum(later - at for (name, at), (_, later) in pairwise(begun_at) if name.startswith("fill"))
    during = writes.between(begun, ended)
    return {
        "rows filled a second": 2 * ROWS / filling,
        "longest lock": max(locks.held),
        "p99 of a write before": _p99(writes.between(0, begun)),
        "p99 of a write during the change": _p99(during),
        "longest write during the change": max(during),
    }


def _p99(figures: list[float]) -> float:
    return statistics.quantiles(figures, n=100)[98]
