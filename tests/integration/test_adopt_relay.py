"""Adoptions through a relay: rows that find their key in other tables, and servers without row filters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from typer.testing import CliRunner

from shardids.adopt import adoption
from shardids.adopt.plan.document import Kind, Plan, Severity, write_plan
from shardids.adopt.run.following import Copying
from shardids.adopt.run.relay import note_copy_slots
from shardids.adopt.run.sides import Relay
from shardids.cli import app
from shardids.errors import AdoptionFailed, AdoptionRefused, ConnectionFailed
from shardids.replication.sides import Side
from shardids.replication.steps import Event, Noted, Waiting
from tests.matrix import fetched
from tests.support.relays import (
    Store,
    Traffic,
    assert_adopted,
    assert_as_before,
    await_lull,
    begin_anew,
    store_of,
)
from tests.support.waiting import wait_for

# As source PostgreSQL 14 is tested below, with nodes of another version.
pytestmark = pytest.mark.usefixtures("needs_row_filters")


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with store_of() as store:
        yield store


@pytest.mark.long
def test_rows_take_their_shards_from_others_while_all_is_changed(store: Store) -> None:
    assert [t.name for t in store.plan.tables if t.kind is Kind.DERIVED] == [
        "public.items",
        "public.parts",
        "public.marks",
    ]
    assert any(finding.severity is Severity.NEEDS_RELAY for finding in store.plan.findings)
    with Traffic(store) as traffic:
        assert adoption.run(store.catalog, store.plan).step == "follow"
        await_lull(traffic, 100)
        adoption.pause(store.catalog)
        await_lull(traffic, 20)
        assert adoption.resume(store.catalog).step == "follow"
        adoption.compare(store.catalog)
        await_lull(traffic, 100)
        done = adoption.switch(store.catalog)
    assert done.outcome == "adopted"
    assert all(traffic.refused)
    assert_adopted(store)
    with store.connected("source") as source:
        source.execute("drop schema shardids_adopt cascade")
    assert store.leftovers() == store.before
    begin_anew(store)


@pytest.mark.long
def test_it_is_undone_as_if_it_had_never_been(store: Store) -> None:
    with Traffic(store):
        adoption.run(store.catalog, store.plan)
        assert adoption.abort(store.catalog).outcome == "aborted"
    assert_as_before(store)


@pytest.mark.long
@pytest.mark.parametrize("version", ["14"])
def test_a_source_without_row_filters_is_taken_through_a_relay(version: str) -> None:
    with store_of(fetched(version)) as store, Traffic(store) as traffic:
        assert store.plan.server_version < 150000
        with pytest.raises(AdoptionRefused, match=r"(?s)PostgreSQL 14: .*--via") as refused:
            adoption.run(store.catalog, replace(store.plan, via=None))
        assert "--via" in (refused.value.hint or "")
        direct = [table for table in store.plan.tables if table.kind is not Kind.DERIVED]
        with pytest.raises(AdoptionRefused, match=r"PostgreSQL 14: its publications can't filter rows"):
            adoption.run(store.catalog, replace(store.plan, via=None, findings=(), tables=tuple(direct)))
        assert adoption.run(store.catalog, store.plan).step == "follow"
        await_lull(traffic, 100)
        assert adoption.switch(store.catalog).outcome == "adopted"
        assert_adopted(store)


@pytest.mark.long
def test_rows_without_a_key_are_named_and_stop_the_switch(store: Store) -> None:
    with store.connected("source") as source:
        source.execute("insert into marks (id, mark) values ('00000000-0000-0000-0000-000000000001', 'lost')")
        with pytest.raises(AdoptionFailed, match=r"1 rows of public\.marks find no key by part_id.*0001"):
            adoption.run(store.catalog, store.plan)
        source.execute("update marks set part_id = (select min(id) from parts) where part_id is null")
        assert adoption.resume(store.catalog).step == "follow"
        source.execute("update marks set part_id = null where mark = 'lost'")
        with pytest.raises(AdoptionFailed, match=r"1 rows of public\.marks find no key"):
            adoption.switch(store.catalog)
        source.execute("delete from marks where mark = 'lost'")
        assert adoption.switch(store.catalog).outcome == "adopted"
    assert_adopted(store)
    begin_anew(store)


@pytest.mark.long
def test_a_row_that_loses_its_key_while_the_switch_waits_opens_the_source_again(store: Store) -> None:
    adoption.run(store.catalog, store.plan)
    with store.connected("source") as source, store.connected("source") as writer:
        writer.execute("begin; insert into marks (mark) values ('late')")

        def let_go(event: Event) -> None:
            if isinstance(event, Waiting):
                writer.execute("commit")

        with pytest.raises(AdoptionFailed, match=r"1 rows of public\.marks find no key"):
            adoption.switch(store.catalog, on_event=let_go)
        source.execute("delete from marks where mark = 'late'")
        status = adoption.status(store.catalog)
        assert status is not None
        assert not status.is_source_closed
    adoption.abort(store.catalog)
    assert_as_before(store)


def refused(store: Store, plan: Plan) -> str:
    with pytest.raises(AdoptionRefused) as found:
        adoption.run(store.catalog, plan)
    assert store.leftovers() == store.before
    assert adoption.status(store.catalog) is None
    return found.value.message


def test_what_can_not_be_a_relay_is_refused_before_anything_is_made(store: Store) -> None:
    plan = store.plan
    assert "the relay is the source" in refused(store, replace(plan, via=store.source.url()))
    assert "the relay is a node or has a catalog" in refused(store, replace(plan, via=store.nodes[1].url()))
    with store.connected("relay") as relay:
        relay.execute("create table public.items ()")
    store_before, store.before = store.before, store.leftovers()
    assert "the relay already has tables: public.items" in refused(store, plan)
    with store.connected("relay") as relay:
        relay.execute("drop table public.items; create schema shardids_relay")
    store.before = store.leftovers()
    assert "it is a relay already" in refused(store, plan)
    with store.connected("relay") as relay:
        relay.execute("drop schema shardids_relay")
    store.before = store_before
    with pytest.raises(ConnectionFailed, match="the relay"):
        adoption.run(store.catalog, replace(plan, via=store.nodes[0].url("nowhere")))


def test_paths_that_can_not_be_followed_are_refused(store: Store) -> None:
    plan = store.plan
    tables = {table.name: table for table in plan.tables}
    items, marks = tables["public.items"], tables["public.marks"]

    def changed(name: str, **changes: object) -> Plan:
        one = replace(tables[name], **changes)  # type: ignore[arg-type]  # a test's own values
        return replace(plan, tables=tuple((tables | {name: one}).values()))

    assert "public.items: its path leads to no table that is split" in refused(
        store, changed(items.name, path=())
    )
    assert "is not one hop and then that of public.parts" in refused(
        store, changed(marks.name, path=marks.path[:1])
    )
    for column, reason in {
        "weight": "public.marks.weight: it is on the way to a key, and numeric",
        "nothing": "public.marks.nothing: it is on the way to a key, and does not exist",
        "mark": "public.marks.mark: it and public.parts.id are of types that a relay does not compare",
    }.items():
        hop = replace(marks.path[0], columns=(column,))
        assert reason in refused(store, changed(marks.name, path=(hop, *marks.path[1:])))
    without = refused(store, replace(plan, via=None, findings=()))
    assert "public.items: its key is in another table" in without


@pytest.mark.long
def test_the_commands_name_the_relay(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    write_plan(replace(store.plan, via=None), file)

    def shardids(*words: str, exit_code: int = 0) -> str:
        done = CliRunner().invoke(app, ["adopt", *words], env={"SHARDIDS_CATALOG": store.catalog_url})
        assert done.exit_code == exit_code, done.output
        return " ".join(done.output.split())

    source = store.source.url()
    plan = (
        "plan",
        source,
        "--root",
        "users",
        "--shards",
        "6",
        "-o",
        str(tmp_path / "another.toml"),
        "--force",
    )
    assert "findings block this plan" in shardids(*plan, exit_code=3)
    assert "block this plan" not in shardids(*plan, "--via", store.relay_url)
    said = shardids("run", str(file), "--dry-run", exit_code=1)
    assert "--via" in said
    said = shardids("run", str(file), "--via", store.relay_url, "--dry-run")
    assert "The relay would hold all of it" in said
    refused = shardids("run", str(file), "--via", store.relay_url, exit_code=2)
    assert "Has its disk the room? There is no terminal to ask at" in refused
    assert "at step follow" in shardids("run", str(file), "--via", store.relay_url, "--yes")
    said = shardids("status")
    assert "behind the source, which keeps" in said
    assert f"relay: postgresql://postgres@127.0.0.1:{store.nodes[0].port}/relay" in said
    assert json.loads(shardids("status", "--json"))["relay"]["slot"].endswith("_relay")
    with store.connected("a") as node:
        node.execute("alter database relay allow_connections false")
        node.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = 'relay'")
    said = shardids("status")
    assert "The relay does not answer, and the source keeps its log meanwhile" in said
    with store.connected("a") as node:
        node.execute("alter database relay allow_connections true")
    shardids("abort", "--yes")
    assert_as_before(store)


@pytest.mark.long
def test_an_adoption_whose_relay_is_lost_is_undone_by_way_of_another(store: Store) -> None:
    adoption.run(store.catalog, store.plan)
    with store.connected("a") as node:
        node.execute("create database another")
        node.execute("alter database relay allow_connections false")
        node.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = 'relay'")
        with pytest.raises(ConnectionFailed, match="the relay"):
            adoption.abort(store.catalog)
        done = adoption.abort(store.catalog, via=store.nodes[0].url("another"))
        assert done.outcome == "aborted"
        node.execute("alter database relay allow_connections true")
        node.execute("drop database another")
    clear_lost(store)
    assert_as_before(store)


@pytest.mark.long
@pytest.mark.parametrize("is_known", [True, False])
def test_slots_of_copies_that_a_lost_relay_has_left_are_dropped(store: Store, is_known: bool) -> None:
    class Stopped(Exception):
        pass

    def slots() -> list[str]:
        with store.connected("source") as source:
            query = "select slot_name from pg_replication_slots where slot_name ~ '_sync_' order by 1"
            return [name for (name,) in source.execute(query).fetchall()]

    def wait(event: Event) -> None:
        if isinstance(event, Copying) and slots():
            raise Stopped

    def clash(source: Side, relay: Relay) -> None:
        if is_known:
            note_copy_slots(source, relay)
        # A row that is there already: its table's copy fails again and again.
        with store.connected("relay") as lost:
            lost.execute("insert into parts (id, order_id, item) values (1, 1, 1)")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("shardids.adopt.run.relay.note_copy_slots", clash)
        with pytest.raises(Stopped):
            adoption.run(store.catalog, store.plan, on_event=wait)
    with store.connected("a") as node:
        node.execute("create database another")

        def lose_relay() -> list[str]:
            # A worker has no slot between two attempts to copy its table.
            node.execute("alter database relay allow_connections true")
            wait_for(slots, "a copy has a slot")
            node.execute("alter database relay allow_connections false")
            node.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = 'relay' or backend_type ~ 'logical replication'"
            )
            wait_for(lambda: not busy(store), "the relay's workers have ended")
            return slots()

        left, notes = wait_for(lose_relay, "a copy's slot is left"), list[str]()
        with store.connected("source") as source:
            # A slot of a subscription of somebody else.
            source.execute("select pg_create_logical_replication_slot('pg_7_sync_8_9', 'pgoutput')")

        def note(event: Event) -> None:
            if isinstance(event, Noted):
                notes.append(event.note)

        done = adoption.abort(store.catalog, via=store.nodes[0].url("another"), on_event=note)
        assert done.outcome == "aborted"
        if is_known:
            assert slots() == ["pg_7_sync_8_9"]
            assert notes == []
        else:
            assert slots() == sorted([*left, "pg_7_sync_8_9"])
            assert all(name in notes[0] for name in left)
        node.execute("alter database relay allow_connections true")
        node.execute("drop database another")
    with store.connected("source") as source:
        source.execute(
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name ~ '_sync_'"
        )
    clear_lost(store)
    assert_as_before(store)


def busy(store: Store) -> list[tuple[str]]:
    """The slots of copies that are in use."""
    with store.connected("source") as source:
        return source.execute(
            "select slot_name from pg_replication_slots where slot_name ~ '_sync_' and active"
        ).fetchall()


def clear_lost(store: Store) -> None:
    """Removes what a relay has that was lost, and is there again."""
    with store.connected("relay") as lost:
        name = obj_name(lost)
        lost.execute("select shardids_relay.unfollow(%s)", [f"{name}_relay"])
        lost.execute("select shardids_relay.drop_tables()")
        lost.execute("drop schema shardids_relay cascade")
        lost.execute("select pg_drop_replication_slot(slot_name) from pg_replication_slots")
        for (publication,) in lost.execute("select pubname from pg_publication").fetchall():
            lost.execute(f'drop publication "{publication}"')


def obj_name(relay: psycopg.Connection) -> str:
    """The name of the adoption that made a relay."""
    (name,) = relay.execute(
        "select obj_description('shardids_relay'::regnamespace, 'pg_namespace')"
    ).fetchone()
    return name
