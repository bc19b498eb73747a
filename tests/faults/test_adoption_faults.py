"""Adoptions over networks that swallow packets, by processes that sleep, from servers that are replaced."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import psycopg
import pytest
from sqlalchemy.engine import make_url

from shardids.adopt import adoption
from shardids.adopt.plan.document import plan_text
from shardids.adopt.run.journal import open_adoption
from shardids.adopt.steps import AFTER, RUN, SWITCH
from shardids.catalog.rows import Catalog, Node
from shardids.errors import AdoptionFailed, ClusterConflict, ShardidsError
from shardids.pg.embedded import EmbeddedServer, temporary_servers
from shardids.replication.steps import Event, StepDone
from tests.support.adoptions import (
    TABLES,
    Clients,
    Shop,
    assert_as_before,
    assert_in_shards,
    begin_anew,
    new_shop,
)
from tests.support.clusters import Nursery
from tests.support.faults import scaled
from tests.support.proxy import Proxy
from tests.support.standbys import Standby, standby_of
from tests.support.waiting import wait_for

ENDS_S = 150
"""How long a command may take that hears nothing from a server; most of it is TCP's and ours to wait."""


@pytest.fixture(scope="module")
def shop() -> Iterator[Shop]:
    with temporary_servers(3) as servers:
        shop = new_shop(servers)
        if not shop.has_row_filters:
            pytest.skip("PostgreSQL 14 has no row filters, and is refused: test_adopt_run.py")
        yield shop
        shop.catalog.close()


@contextmanager
def proxied(shop: Shop) -> Iterator[tuple[dict[str, Proxy], Catalog, str]]:
    """Proxies before all servers, and the catalog and the source's URL by way of them."""
    with ExitStack() as kept:
        ports = {name: server.port for name, server in shop.servers.items()}
        ports["catalog"] = make_url(shop.catalog_url).port or 5432
        proxies = {name: kept.enter_context(Proxy(port)) for name, port in ports.items()}

        def by_way_of(name: str, url: str) -> str:
            changed = make_url(url).set(host="127.0.0.1", port=proxies[name].port)
            return changed.render_as_string(hide_password=False)

        for name in "ab":
            shop.catalog.point_node(Node(name=name, url=by_way_of(name, shop.servers[name].url())))
        catalog = Catalog(by_way_of("catalog", shop.catalog_url))
        try:
            yield proxies, catalog, by_way_of("source", shop.servers["source"].url())
        finally:
            catalog.close()
            for name in "ab":
                shop.catalog.point_node(Node(name=name, url=shop.servers[name].url()))


def bring_to_its_end(shop: Shop) -> None:
    """Resumes, as soon as the catalog has given the lock of a silent process back."""
    deadline = time.monotonic() + 60
    while open_adoption(shop.catalog) is not None:
        try:
            if adoption.resume(shop.catalog).outcome is None:
                adoption.switch(shop.catalog)
        except ClusterConflict as conflict:
            if "another process" not in conflict.message or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


@pytest.mark.parametrize(
    ("step", "silent"),
    scaled(
        [("barrier", "source"), ("stage", "a")],
        [
            (step.name, silent)
            for step in (*RUN, *SWITCH, *AFTER)[:-1]
            for silent in ("source", "a", "catalog")
        ],
    ),
)
def test_a_silent_network_ends_the_command_and_resume_goes_on(shop: Shop, silent: str, step: str) -> None:
    with Clients(shop) as clients, proxied(shop) as (proxies, catalog, source):

        def swallow(event: Event) -> None:
            if event == StepDone(step=step):
                proxies[silent].swallow()

        began = time.monotonic()
        with suppress(ShardidsError):
            adoption.run(catalog, shop.plan, source=source, on_event=swallow)
            adoption.switch(catalog, source=source, on_event=swallow)
        took_s = time.monotonic() - began
        proxies[silent].forward()
        shop.catalog.engine.dispose()
        bring_to_its_end(shop)
    assert took_s < ENDS_S
    assert_in_shards(shop, clients)
    begin_anew(shop)


_SLEEPING = """
import os, signal
from shardids.adopt import adoption
from shardids.replication import steps
from shardids.adopt.plan.document import parse_plan
from shardids.catalog.rows import Catalog
from shardids.replication import barrier
barrier._BEAT_S, barrier._LOST_AFTER = 0.5, "2s"
def watch(event):
    if event == steps.{kind}(step={step!r}):
        print("asleep", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
catalog = Catalog({url!r})
adoption.run(catalog, parse_plan({plan!r}, "plan"), on_event=watch)
adoption.switch(catalog, on_event=watch)
"""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery("from shardids.adopt import adoption")
    yield nursery
    nursery.close()


BEFORE_THE_SWITCH = [step.name for step in (*RUN, *SWITCH)]


def asleep(shop: Shop, nursery: Nursery, step: str, kind: str) -> int:
    """Begins an adoption in a process that stops at a step, without ending; its process ID."""
    script = _SLEEPING.format(kind=kind, step=step, url=shop.catalog_url, plan=plan_text(shop.plan))
    process = nursery.start(script)
    assert nursery.line() == "asleep"
    return process


def aborted(shop: Shop) -> None:
    """Aborts as soon as the catalog has given the lock of the process that sleeps back."""

    def is_aborted() -> bool:
        try:
            return adoption.abort(shop.catalog).outcome == "aborted"
        except ClusterConflict:
            return False

    wait_for(is_aborted, "the lock of the process that sleeps is given back")


@pytest.mark.parametrize(
    ("step", "kind"),
    scaled(
        [("close", "StepBegun"), ("subscribe", "StepDone")],
        [(step, kind) for step in BEFORE_THE_SWITCH for kind in ("StepBegun", "StepDone")],
    ),
)
def test_a_process_that_wakes_up_after_an_abort_does_nothing_more(
    shop: Shop, nursery: Nursery, step: str, kind: str
) -> None:
    if (step, kind) == ("switch", "StepDone"):
        return
    process = asleep(shop, nursery, step, kind)
    try:
        aborted(shop)
    finally:
        os.kill(process, signal.SIGCONT)
    said = nursery.line()
    assert said != "done", said
    time.sleep(0.3)
    assert_as_before(shop)


@pytest.mark.parametrize("step", scaled(["switch"], BEFORE_THE_SWITCH))
def test_a_process_that_wakes_up_after_a_resume_harms_nothing(
    shop: Shop, nursery: Nursery, step: str
) -> None:
    with Clients(shop) as clients:
        process = asleep(shop, nursery, step, "StepBegun")
        try:
            bring_to_its_end(shop)
        finally:
            os.kill(process, signal.SIGCONT)
        assert nursery.line() != "done"
    assert_in_shards(shop, clients)
    assert [one for one in shop.leftovers() if not one.startswith("source")] == []
    begin_anew(shop)


def test_a_slot_that_the_source_has_given_up_is_told(shop: Shop) -> None:
    adoption.run(shop.catalog, shop.plan)
    adoption.pause(shop.catalog)
    with shop.connected("source") as source:
        source.execute("alter system set max_slot_wal_keep_size = '1MB'")
        source.execute("select pg_reload_conf()")

        def is_lost() -> bool:
            source.execute("insert into notes select repeat('x', 100) from generate_series(1, 1000)")
            source.execute("select pg_switch_wal()")
            source.execute("checkpoint")
            lost = "select count(*) from pg_replication_slots where wal_status = 'lost'"
            return source.execute(lost).fetchone() == (1,)

        wait_for(is_lost, "the source gives the slot up")
        source.execute("alter system reset max_slot_wal_keep_size")
        source.execute("select pg_reload_conf()")
    status = adoption.status(shop.catalog)
    assert status is not None
    assert status.relay is not None
    assert status.relay.lag_bytes is None
    adoption.resume(shop.catalog)
    with pytest.raises(AdoptionFailed, match=r"has no replication slot .*, or has given it up"):
        adoption.switch(shop.catalog)
    assert adoption.abort(shop.catalog).outcome == "aborted"
    with shop.connected("source") as source:
        source.execute("truncate notes")
    assert_as_before(shop)


def test_a_promoted_standby_of_the_source_has_no_slots_and_abort_cleans_it() -> None:
    with temporary_servers(3) as servers:
        shop = new_shop(servers)
        if not shop.has_row_filters:
            pytest.skip("PostgreSQL 14 has no row filters, and is refused: test_adopt_run.py")
        with standby_of(servers[0]) as standby:
            adoption.run(shop.catalog, shop.plan)
            promoted = promote(servers[0], standby)
            with pytest.raises(AdoptionFailed, match=r"has no replication slot .*, or has given it up"):
                adoption.switch(shop.catalog, source=standby.url())
            status = adoption.status(shop.catalog, source=standby.url())
            assert status is not None
            assert status.relay is None
            assert not status.is_source_closed
            assert adoption.abort(shop.catalog, source=standby.url()).outcome == "aborted"
            promoted.execute("insert into users (name) values ('goes on')")
            left = promoted.execute(
                "select pubname from pg_publication union all"
                " select tgname from pg_trigger where not tgisinternal"
            )
            assert left.fetchall() == []
            promoted.close()
        assert not any(any(rows) for table in TABLES for rows in shop.rows(table).values())
        shop.catalog.close()


def test_a_promoted_standby_of_a_node_takes_over_only_with_all_rows() -> None:
    with temporary_servers(3) as servers:
        shop = new_shop(servers)
        if not shop.has_row_filters:
            pytest.skip("PostgreSQL 14 has no row filters, and is refused: test_adopt_run.py")
        with standby_of(servers[2]) as standby:
            adoption.run(shop.catalog, shop.plan)
            with psycopg.connect(standby.url(), autocommit=True) as cut_off:
                cut_off.execute("alter system set primary_conninfo = ''")
                cut_off.execute("select pg_reload_conf()")
                gone = "select not exists (select from pg_stat_wal_receiver)"
                wait_for(lambda: cut_off.execute(gone).fetchone() == (True,), "the standby hears no more")
            with shop.connected("source") as source:
                source.execute("update users set name = 'later'")
                (end,) = source.execute("select pg_current_wal_flush_lsn()").fetchone()
                # Else the relay would send the promoted standby the update once more.
                confirmed = "select bool_and(confirmed_flush_lsn >= %s) from pg_replication_slots"
                wait_for(lambda: source.execute(confirmed, [end]).fetchone() == (True,), "the relay has it")
            with shop.connected("relay") as relay:
                (end,) = relay.execute("select pg_current_wal_flush_lsn()").fetchone()
                wait_for(
                    lambda: relay.execute(confirmed, [end]).fetchone() == (True,), "nodes have confirmed it"
                )
            adoption.compare(shop.catalog)
            promote(servers[2], standby).close()
            shop.catalog.point_node(Node(name="b", url=standby.url()))
            shop.servers["b"] = standby  # type: ignore[assignment]  # all that is asked of it is its URL
            with pytest.raises(AdoptionFailed, match='"b" is another server than the one that took rows in'):
                adoption.switch(shop.catalog)
            status = adoption.status(shop.catalog)
            assert status is not None
            assert not status.is_source_closed
            with pytest.raises(AdoptionFailed, match="differs"):
                adoption.compare(shop.catalog)
            assert adoption.abort(shop.catalog).outcome == "aborted"
            assert_as_before(shop)
        shop.catalog.close()


def promote(primary: EmbeddedServer, standby: Standby) -> psycopg.Connection:
    """Ends a server and lets its standby take its place, with what it has received."""
    connection = psycopg.connect(standby.url(), autocommit=True)
    primary.kill()
    connection.execute("select pg_promote(true, 60)")
    return connection
