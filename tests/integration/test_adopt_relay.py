"""Adoptions of rows that find their key in other tables, of older sources, and relays that are lost."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from typer.testing import CliRunner

from shardids.adopt import adoption
from shardids.adopt.plan.document import Kind, Plan, write_plan
from shardids.adopt.run.following import Copying
from shardids.adopt.run.sides import Follower
from shardids.adopt.run.slots import note_copy_slots
from shardids.adopt.run.sparing import Limits
from shardids.cli import app
from shardids.errors import AdoptionFailed, AdoptionRefused, ConnectionFailed
from shardids.replication.sides import Side
from shardids.replication.steps import Event, Noted, StepBegun, Waiting
from tests.matrix import fetched
from tests.support.adoptions import home_of, schema
from tests.support.relays import (
    OWNERS,
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


WRITES = (
    "insert into {s}.users (name) values ('new')",
    'insert into {s}."Orders" (user_id) select max(id) from {s}.users',
    """insert into {s}.items (order_id, number, moods) select max(id), 7, '{low}'
       from {s}."Orders" """,
    "insert into {s}.parts (order_id, item, note) select max(id), 7, 'new' from {s}.\"Orders\"",
    "insert into {s}.marks (part_id, mark) select max(id), 'new' from {s}.parts",
    "update {s}.items set number = 8 where number = 7",
    "update {s}.parts set note = note || '!' where id = (select min(id) from {s}.parts)",
    "delete from {s}.marks where id = (select min(id::text)::uuid from {s}.marks)",
    """update {s}.parts p set order_id = i.order_id, item = i.number from {s}.items i
       where i.order_id = (select min(order_id) from {s}.items)
         and p.id = (select max(id) from {s}.parts)""",
    'delete from {s}."Orders" where id = (select max(id) from {s}."Orders" where id < 1000)',
)
"""What an application does in a shard, to tables of every kind."""


def write_to_shards(store: Store) -> None:
    for node, shards in store.catalog.placement().by_node().items():
        with store.connected(node) as connection:
            for shard in shards:
                for statement in WRITES:
                    assert connection.execute(statement.replace("{s}", schema(shard))).rowcount > 0


def assert_same_at_source(store: Store) -> None:
    for table in OWNERS:
        columns, there = store.source_rows(table, home_of)
        assert store.rows(table, columns) == there, table


@pytest.mark.long
def test_there_and_back_and_there_again_for_good() -> None:
    with store_of(can_go_back=True) as store:
        with Traffic(store) as traffic:
            adoption.run(store.catalog, store.plan)
            await_lull(traffic, 20)
            assert adoption.switch(store.catalog, keep_back=True).step == "kept"
        assert_adopted(store)
        with store.connected("a") as node:
            # It has done its work.
            node.execute("drop database relay")
        write_to_shards(store)
        status = adoption.status(store.catalog)
        assert status is not None
        assert status.way_back is not None
        assert adoption.back(store.catalog).step == "returned"
        assert_same_at_source(store)
        assert adoption.abort(store.catalog).outcome == "returned"
        with store.connected("a") as node:
            node.execute("create database relay")
        assert_as_before(store)
        with Traffic(store) as traffic:
            adoption.run(store.catalog, store.plan)
            await_lull(traffic, 20)
            assert adoption.switch(store.catalog, keep_back=True).step == "kept"
        assert_same_at_source(store)
        write_to_shards(store)
        wait_for(lambda: same_at_source(store), "the source has all")
        assert adoption.finish(store.catalog).outcome == "adopted"
        assert [one for one in store.leftovers() if one not in store.before] == [
            "source: shardids_adopt",
            *(one for one in store.leftovers() if one.startswith("source: shardids_barrier")),
        ]


def test_tables_whose_changes_would_fail_once_they_are_sent_back_are_refused(store: Store) -> None:
    """One table of one shard is enough."""
    shard = store.catalog.placement().by_node()["b"][-1]
    fail = {
        "items": "the shards' table items logs whole rows, and of a derived table not all columns are sent",
    }
    adoption.run(store.catalog, store.plan)
    with store.connected("b") as node:
        if node.info.server_version >= 180000:
            fail["users"] = "the shards' table users logs whole rows, and its generated column is not sent"
        for table, reason in fail.items():
            node.execute(f"alter table {schema(shard)}.{table} replica identity full".encode())
            with pytest.raises(AdoptionRefused) as refused:
                adoption.switch(store.catalog, keep_back=True)
            assert f"{reason}: its updates and deletes would fail" in refused.value.message
            remedy = f"In the shards: alter table {table} replica identity default"
            assert remedy in (refused.value.hint or "")
            node.execute(f"alter table {schema(shard)}.{table} replica identity default".encode())
            with pytest.raises(AdoptionRefused) as refused:
                adoption.switch(store.catalog, keep_back=True, dry_run=True)
            assert "logs whole rows" not in refused.value.message
    adoption.abort(store.catalog)
    assert_as_before(store)


def same_at_source(store: Store) -> bool:
    try:
        assert_same_at_source(store)
    except AssertionError:
        return False
    return True


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


@pytest.mark.long
def test_rows_whose_parents_are_truncated_and_loaded_again_go_with_them() -> None:
    """The shards' tables refer to what is truncated by foreign keys that the source does not have."""
    with store_of() as store, store.connected("source") as source:
        source.execute("alter table marks drop constraint marks_part")
        source.execute("alter table users drop constraint users_country_fkey")
        adoption.run(store.catalog, store.plan)
        source.execute("""
            create temp table kept as
            select p.id, i.order_id, i.number
            from (select id, row_number() over (order by id) as place from parts) p
            join (select order_id, number, row_number() over (order by order_id desc, number) as place
                  from items) i using (place);
            begin;
            truncate parts;
            insert into parts (id, order_id, item) select id, order_id, number from kept;
            commit;
            truncate countries;
            insert into countries values ('at', 'Austria')""")
        assert adoption.switch(store.catalog).outcome == "adopted"
        assert_adopted(store)
        with store.connected("b") as node:
            assert node.execute("select * from countries").fetchall() == [("at", "Austria")]


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
    assert "The relay holds a copy of all these rows" in shardids(*plan)
    assert "block this plan" not in shardids(*plan, "--via", store.relay_url)
    said = shardids("run", str(file), "--dry-run", exit_code=2)
    assert "which relay? It is an empty database" in said
    assert "--via" in said
    said = shardids("run", str(file), "--via", store.relay_url, "--dry-run")
    assert "The relay holds a copy of all these rows, and needs up to" in said
    assert "- public.parts: " in said
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

    def clash(source: Side, relay: Follower) -> None:
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


LIMIT_BYTES = 20 << 20
MESSAGE = f"select pg_logical_emit_message(false, 'test', repeat('x', {LIMIT_BYTES * 3 // 2}))"


@pytest.mark.long
def test_the_log_that_a_slot_of_a_copy_keeps_counts(store: Store) -> None:
    said: list[int] = []
    with store.connected("relay") as relay, store.connected("source") as source:

        def look(event: Event) -> None:
            if event == StepBegun(step="copy to relay"):
                relay.execute("""
                    select pg_advisory_lock(77);
                    create function hold() returns trigger language plpgsql as
                      $$ begin perform pg_advisory_xact_lock(77); return new; end $$;
                    create trigger hold before insert on public.users for each row execute function hold();
                    alter table public.users enable always trigger hold""")
            elif isinstance(event, Copying) and event.tables_left == 1 and not said:
                source.execute(MESSAGE)
                wait_for(lambda: passed_on(source), "the slot of the relay itself moves on")
                status = adoption.status(store.catalog)
                assert status is not None
                assert status.relay is not None
                said.append(status.relay.kept_bytes or 0)
            elif isinstance(event, Copying) and said:
                said.append(0)
            # Without a look the copy would wait for ever.
            if len(said) == 100 or event == StepBegun(step="abort"):
                relay.execute("select pg_advisory_unlock_all()")

        with pytest.raises(AdoptionFailed, match=r'the source keeps .* for slot "pg_\d+_sync_.* was aborted'):
            adoption.run(store.catalog, store.plan, limits=Limits(max_wal_bytes=LIMIT_BYTES), on_event=look)
        assert said[0] > LIMIT_BYTES
        relay.execute("drop function hold")
    assert_as_before(store)


def passed_on(publisher: psycopg.Connection) -> bool:
    """Whether the slots of followers themselves keep less than the limit; a checkpoint lets them."""
    publisher.execute("checkpoint")
    (kept,) = publisher.execute(
        "select max(pg_current_wal_lsn() - restart_lsn) from pg_replication_slots where slot_name !~ '_sync_'"
    ).fetchone()
    return bool(kept < LIMIT_BYTES)


@pytest.mark.long
def test_the_log_that_slots_of_copies_keep_on_the_relay_is_shown(store: Store) -> None:
    said: list[str] = []
    users, is_last = f"{schema(store.catalog.placement().by_node()['a'][0])}.users", False
    with store.connected("relay") as relay, store.connected("a") as node:

        def look(event: Event) -> None:
            nonlocal is_last
            if event == StepBegun(step="subscribe"):
                node.execute("select pg_advisory_lock(77)")
                node.execute("""
                    create function hold() returns trigger language plpgsql as
                    $$ begin perform pg_advisory_xact_lock(77); return new; end $$""")
                node.execute(f"""
                    create trigger hold before insert on {users} for each row execute function hold();
                    alter table {users} enable always trigger hold""")
            elif event == StepBegun(step="copy"):
                is_last = True
            elif isinstance(event, Copying) and is_last and event.tables_left == 1 and not said:
                relay.execute(MESSAGE)
                wait_for(lambda: passed_on(relay), "the slots of the nodes themselves move on")
                env = {"SHARDIDS_CATALOG": store.catalog_url}
                said.append(CliRunner().invoke(app, ["adopt", "status"], env=env).output)
                said.append(CliRunner().invoke(app, ["adopt", "status", "--json"], env=env).output)
                node.execute("select pg_advisory_unlock_all()")

        assert adoption.run(store.catalog, store.plan, on_event=look).step == "follow"
        adoption.abort(store.catalog)
        node.execute("drop function hold cascade")
    assert re.search(
        r"node a: .* behind the relay, which keeps 3\d[.\d]* MB of its log for it \(slot pg_\d+_sync_",
        " ".join(said[0].split()),
    )
    kept = json.loads(said[1])["relay_keeps_bytes"]
    assert kept["a"] > LIMIT_BYTES > kept["b"]
    assert_as_before(store)


@pytest.mark.long
@pytest.mark.parametrize("step", ["place", "indexes"])
def test_the_log_is_looked_at_in_steps_without_events(store: Store, step: str) -> None:
    server, table = ("relay", "public.items") if step == "place" else ("a", f"{schema(0)}.items")
    with store.connected(server) as holder, store.connected("source") as source:
        if step == "indexes":
            holder.execute(f"create index held on {table} (number)".encode())
        # Without a look the step waits for its lock until then.
        late = threading.Timer(60, lambda: holder.execute("commit"))

        def look(event: Event) -> None:
            if event == StepBegun(step=step):
                holder.execute(f"begin; lock table {table} in row exclusive mode".encode())
                threading.Thread(target=keep_log).start()
                late.start()
            elif event == StepBegun(step="abort"):
                holder.execute("commit")

        def keep_log() -> None:
            with store.connected("relay") as relay:
                if step == "place":
                    enabled = "select subenabled from pg_subscription"
                    wait_for(lambda: not relay.execute(enabled).fetchone()[0], "the relay stops")
                    source.execute(MESSAGE)
                else:
                    relay.execute(MESSAGE)

        try:
            with pytest.raises(AdoptionFailed, match=r"keeps .* of its log for slot .* was aborted"):
                adoption.run(
                    store.catalog, store.plan, limits=Limits(max_wal_bytes=LIMIT_BYTES), on_event=look
                )
        finally:
            late.cancel()
            if step == "indexes":
                holder.execute("rollback")
                holder.execute(f"drop index {schema(0)}.held".encode())
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
        for change in ("alter subscription {} disable", "alter subscription {} set (slot_name = none)"):
            lost.execute(change.format(f"{name}_relay"))
        lost.execute(f"drop subscription {name}_relay")
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
