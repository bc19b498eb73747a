"""Adopting a database of 1,500,000 rows: the copy, what live traffic notices, and the pause of writes."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

import psycopg

from benchmarks.report import Measure, Section, figure
from shardids.adopt import adoption
from shardids.adopt.plan.document import Hop, Kind, OldIds, Plan, TablePlan
from shardids.adopt.plan.planning import COPIED_ROWS_PER_S
from shardids.catalog.rows import Catalog
from shardids.pg.embedded import EmbeddedServer, temporary_servers
from shardids.replication.steps import Event, StepBegun
from shardids.testing.devcluster import create_cluster

USERS, ORDERS = 50_000, 950_000
SHARDS, WRITERS, WRITES_A_SECOND = 64, 16, 400
_BEFORE_S = 8
_SOURCE = f"""
    create table users (id bigserial primary key, name text not null);
    create table orders (id bigserial primary key, user_id bigint not null references users, what text);
    insert into users (name) select 'user ' || n from generate_series(1, {USERS}) n;
    insert into orders (user_id, what)
    select 1 + n % {USERS}, repeat('x', 40) from generate_series(1, {ORDERS}) n;
    analyze users; analyze orders"""
_SHARD = """
    create table {s}.users (id bigint primary key default {s}.next_id(), name text not null);
    create table {s}.orders (
      id bigint primary key default {s}.next_id(), user_id bigint not null references {s}.users, what text)"""
ITEMS, CHANGED = 500_000, 60_000
_DERIVED = f"""
    create table items (id bigserial primary key, order_id bigint not null references orders, what text);
    insert into items (order_id, what)
    select 1 + n % {ORDERS}, repeat('x', 40) from generate_series(1, {ITEMS}) n;
    analyze items"""
_DERIVED_SHARD = """;
    create table {s}.items (
      id bigint primary key default {s}.next_id(), order_id bigint not null references {s}.orders,
      what text)"""


def run(rounds: int) -> Section:
    """Adopt the database once a round, under writers, and switch."""
    rates, changes, pauses_ms, waits_ms, ratios, missing = [], [], [], [], [], 0
    for has_core in (False, True) * rounds:
        with shop(is_derived=True, has_core=has_core) as (source, catalog, plan), Writers(source) as writers:
            writers.start_phase()
            time.sleep(_BEFORE_S)
            before = writers.start_phase()
            begun = _steps_of_run(catalog, plan, has_core=has_core)
            during = writers.start_phase()
            if has_core:
                ratios.append(p99(during) / p99(before))
            else:
                rates.append((USERS + ORDERS + ITEMS) / (begun["compare"] - begun["relay"]))
            changes.append(_changes_a_second(source, catalog))
            writers.start_phase()
            pauses_ms.append(adoption.switch(catalog).pause_ms or 0.0)
            waits_ms.append(max(writers.start_phase(), default=0.0) * 1000)
            missing += writers.missing(catalog)
    return Section(
        title=f"Adopting a database of {USERS + ORDERS + ITEMS:,} rows",
        conditions=f"Three tables, {ITEMS:,} of the rows find their key in another; {SHARDS} shards on two"
        " nodes, the relay is a database on a node's server. Three servers on one machine, fsync off."
        f" {WRITERS} sessions insert {WRITES_A_SECOND} rows per second; {rounds} rounds, and as many"
        " while the source and its writers have a core to themselves: the p99 is of these, the rate of the"
        " copy of the others. The adoption is another process."
        " The copy lasts"
        f" from an empty relay until the nodes have caught up. Changes: {CHANGED:,} rows inserted at once,"
        " until the nodes have them. The pause is from the lock at the source to open shards.",
        measures=(
            measure("rows copied", "rows/s", rates),
            measure("row changes", "rows/s", changes),
            measure("no writes are taken", "ms", pauses_ms),
        ),
        ratios=(
            figure("rows/s, median", _median(rates), at_least=COPIED_ROWS_PER_S),
            figure("pause, worst, ms", max(pauses_ms), at_most=300),
            figure("longest write at the source during the switch, ms", max(waits_ms), at_most=500),
            # The source's one core also sends the rows, and reads them again to compare.
            figure("p99 of writes, whole run ÷ before, median", _median(ratios), at_most=4),
            figure("rows missing afterwards", float(missing), at_most=0),
        ),
    )


def _steps_of_run(catalog: Catalog, plan: Plan, *, has_core: bool) -> dict[str, float]:
    """Run the adoption as a process of its own; return the moment at which each step began.

    Threads of one process would wait for each other's turns of Python's interpreter, the writers too.
    """
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    url = catalog.url.render_as_string(False)
    process = context.Process(target=_run_adoption, args=(url, plan, has_core, theirs))
    process.start()
    theirs.close()
    try:
        begun: dict[str, float] = mine.recv()
    finally:
        process.join()
    return begun


def _run_adoption(url: str, plan: Plan, has_core: bool, steps: Connection) -> None:
    begun: dict[str, float] = {}

    def note(event: Event) -> None:
        if isinstance(event, StepBegun):
            begun[event.step] = time.monotonic()

    _pin([os.getpid()], _cores(has_core=has_core)[1])
    with closing(Catalog(url)) as catalog:
        adoption.run(catalog, plan, on_event=note)
    steps.send(begun)


def _cores(*, has_core: bool) -> tuple[list[int], list[int]]:
    """Return the cores of the source and its writers, and those of all else."""
    cores = list(range(os.cpu_count() or 1))
    return (cores[:1], cores[1:]) if has_core and cores[1:] else (cores, cores)


def _changes_a_second(source: EmbeddedServer, catalog: Catalog) -> float:
    begun = time.monotonic()
    with psycopg.connect(source.url(), autocommit=True) as connection:
        connection.execute(
            "insert into items (order_id, what) select 1 + mod(n, %s), 'new' from generate_series(1, %s) n",
            [ORDERS, CHANGED],
        )
    while True:
        status = adoption.status(catalog)
        if status is None or status.relay is None:
            raise RuntimeError("nothing follows the source")
        lags = [None if slot is None else slot.lag_bytes for slot in (status.relay, *status.nodes.values())]
        # The writers' few rows are always on their way.
        if all(lag is not None and lag < 100_000 for lag in lags):
            return CHANGED / (time.monotonic() - begun)


def plan_of(source: EmbeddedServer, relay: str, *, is_derived: bool) -> Plan:
    """Return the plan of its tables."""
    plan = Plan(
        source=source.url(),
        server_version=180000,
        root="public.users",
        shard_count=SHARDS,
        tables=(
            TablePlan(name="public.users", kind=Kind.ROOT, key="id", id="id", old_ids=OldIds.KEY, rows=USERS),
            TablePlan(
                name="public.orders",
                kind=Kind.DIRECT,
                key="user_id",
                id="id",
                old_ids=OldIds.FAN_OUT,
                rows=ORDERS,
            ),
        ),
        via=relay,
    )
    items = TablePlan(
        name="public.items",
        kind=Kind.DERIVED,
        key="user_id",
        path=(Hop(columns=("order_id",), table="public.orders", referenced=("id",)),),
        id="id",
        old_ids=OldIds.FAN_OUT,
        rows=ITEMS,
    )
    return replace(plan, tables=(*plan.tables, items)) if is_derived else plan


@contextmanager
def shop(
    *, is_derived: bool = False, has_core: bool = False
) -> Iterator[tuple[EmbeddedServer, Catalog, Plan]]:
    """Yield a database with its rows, an empty cluster with its tables, and the plan.

    ``has_core``: the source and this process, which writes to it, have a core, where there are several; all
    else has the others.
    """
    with temporary_servers(3, settings={"shared_buffers": "256MB", "max_wal_size": "4GB"}) as servers:
        source, *nodes = servers
        cores = sorted(os.sched_getaffinity(0))
        own, others = _cores(has_core=has_core)
        _pin([os.getpid(), source.pid], own)
        _pin([node.pid for node in nodes], others)
        catalog = Catalog(create_cluster(nodes, SHARDS))
        try:
            with psycopg.connect(source.url(), autocommit=True) as connection:
                connection.execute(_SOURCE)
                if is_derived:
                    connection.execute(_DERIVED)
            for node in catalog.placement().nodes.values():
                shards = catalog.placement().by_node()[node.name]
                with psycopg.connect(node.url, autocommit=True) as connection:
                    for shard in shards:
                        tables = _SHARD + (_DERIVED_SHARD if is_derived else "")
                        connection.execute(tables.replace("{s}", f"shard_{shard:04}"))
            for number, server in enumerate(servers):
                with psycopg.connect(server.url()) as connection:
                    pids = [pid for (pid,) in connection.execute("select pid from pg_stat_activity")]
                _pin(pids, others if number else own)
            relay = nodes[0].url("relay")
            with psycopg.connect(nodes[0].url(), autocommit=True) as connection:
                connection.execute("create database relay")
            yield source, catalog, plan_of(source, relay, is_derived=is_derived)
        finally:
            _pin([os.getpid()], cores)
            catalog.close()


def _pin(pids: Iterable[int | None], cores: Iterable[int]) -> None:
    """Let processes, and those that they start, run on some cores only."""
    for pid in pids:
        # It may have ended meanwhile.
        with suppress(ProcessLookupError):
            os.sched_setaffinity(pid or 0, set(cores))


@dataclass
class Writers:
    """Sessions that insert orders at a steady rate, until the source refuses them."""

    source: EmbeddedServer
    writes_a_second: int = WRITES_A_SECOND
    written: list[int] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)

    def __enter__(self) -> Writers:
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._write, args=(n,)) for n in range(WRITERS)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def start_phase(self) -> list[float]:
        """Return how long the writes of the phase took that ends, in seconds."""
        done, self.waits_s = self.waits_s, []
        return done

    def missing(self, catalog: Catalog) -> int:
        """Return how many acknowledged rows are in no shard."""
        self.__exit__()
        wanted, there = list(self.written), 0
        placement = catalog.placement()
        for node, shards in placement.by_node().items():
            with psycopg.connect(placement.nodes[node].url) as connection:
                for shard in shards:
                    row = connection.execute(
                        f"select count(*) from shard_{shard:04}.orders where id = any (%s)", [wanted]
                    ).fetchone()
                    there += row[0] if row else 0
        return len(wanted) - there

    def _write(self, index: int) -> None:
        with psycopg.connect(self.source.url(), autocommit=True) as connection:
            due = time.monotonic()
            while not self._stop.is_set():
                due = max(due + WRITERS / self.writes_a_second, time.monotonic() - 1)
                time.sleep(max(0.0, due - time.monotonic()))
                begun = time.monotonic()
                try:
                    row = connection.execute(
                        "insert into orders (user_id, what) values (%s, 'new') returning id", [index + 1]
                    ).fetchone()
                except psycopg.Error as error:
                    if error.sqlstate != "SI003":
                        raise
                    return
                self.waits_s.append(time.monotonic() - begun)
                self.written.append(row[0] if row else -1)


def p99(values: list[float]) -> float:
    """Return the 99th percentile."""
    return sorted(values)[int(len(values) * 0.99)] if values else 0.0


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def measure(name: str, unit: str, values: list[float]) -> Measure:
    """Return a measure of several rounds."""
    return Measure(name=name, unit=unit, median=_median(values), lowest=min(values), highest=max(values))
