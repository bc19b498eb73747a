"""A database that is used while a cluster adopts it: copied, compared, switched, paused, aborted."""

from __future__ import annotations

import logging
import re
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import psycopg
import pytest
from typer.testing import CliRunner

from shardids.adopt import adoption
from shardids.adopt.plan.document import Finding, Hop, Kind, Severity, TablePlan, write_plan
from shardids.adopt.run.following import Copying
from shardids.adopt.run.journal import Journal
from shardids.adopt.run.sparing import Limits
from shardids.adopt.steps import RUN
from shardids.catalog.keys.homes import drop_home, put_home
from shardids.catalog.leases import Leases, read_leases
from shardids.catalog.nodes import Nodes
from shardids.catalog.topology import shard_for_key
from shardids.cli import app
from shardids.errors import (
    AdoptionFailed,
    AdoptionRefused,
    BadArgument,
    ClusterConflict,
    MissingPrivilege,
    StatementFailed,
)
from shardids.pg.embedded import temporary_servers
from shardids.pg.urls import parse_url
from shardids.replication import barrier
from shardids.replication.steps import Event, Noted, Runner, StepBegun, StepDone, Waiting
from tests.support.adoptions import (
    SHARDS,
    Clients,
    Shop,
    assert_as_before,
    assert_in_shards,
    begin_anew,
    home_of,
    new_shop,
    schema,
)
from tests.support.planted_code import Recorded
from tests.support.waiting import wait_for


def test_keys_that_live_elsewhere_are_refused(shop: Shop) -> None:
    count = shop.catalog.describe().shard_count
    put_home(shop.catalog, "bigint", 5, (shard_for_key(5, count) + 1) % count)
    try:
        with pytest.raises(AdoptionRefused, match=r"key .5. of kind bigint lives in shard \d+ by"):
            adoption.check(shop.catalog, shop.plan)
    finally:
        drop_home(shop.catalog, "bigint", 5)


def test_only_servers_with_row_filters_are_taken(any_shop: Shop) -> None:
    if any_shop.has_row_filters:
        assert adoption.check(any_shop.catalog, any_shop.plan).split == 3
        return
    with pytest.raises(AdoptionRefused, match="the relay runs PostgreSQL 14, which can't publish some rows"):
        adoption.run(any_shop.catalog, any_shop.plan)
    assert any_shop.leftovers() == ["source: The Shop"]


@pytest.mark.long
def test_it_is_undone_as_if_it_had_never_been(shop: Shop) -> None:
    with Clients(shop) as clients:
        assert adoption.run(shop.catalog, shop.plan).step == "follow"
        with shop.connected("a") as node, pytest.raises(psycopg.Error, match="fenced"):
            node.execute(f"insert into {schema(0)}.users (name) values ('too early')")
        with shop.connected("a") as node, pytest.raises(psycopg.Error, match="is being filled"):
            node.execute("delete from countries")
        status = adoption.status(shop.catalog)
        assert status is not None
        assert status.adoption.compared_at is not None
        assert adoption.abort(shop.catalog).outcome == "aborted"
        before = clients.count
    assert before > 0
    assert_as_before(shop)


def test_an_adoption_keeps_the_leases_of_all_shards_until_it_is_over(shop: Shop) -> None:
    def kept() -> set[tuple[int, str, str]]:
        with Nodes(shop.catalog.nodes(), shop.catalog.url) as nodes:
            found = read_leases(shop.catalog, nodes)
        return {(one.shard, one.purpose, one.standing.value) for one in found}

    assert adoption.run(shop.catalog, shop.plan).step == "follow"
    assert kept() == {(shard, "adoption", "interrupted") for shard in range(SHARDS)}
    with Nodes(shop.catalog.nodes(), shop.catalog.url) as nodes:
        (met,) = Leases(shop.catalog, "migration").take(nodes["a"], "a", [0]).values()
    assert met.error().message.startswith('shard 0 is kept by an adoption that is not over [node "a"]')
    assert adoption.abort(shop.catalog).outcome == "aborted"
    assert kept() == set()


def indexes(shop: Shop) -> list[tuple[str, ...]]:
    """The indexes of the shards' tables on node a, as they are made, with their comments."""
    with shop.connected("a") as node:
        return node.execute("""
            select pg_get_indexdef(indexrelid), obj_description(indexrelid, 'pg_class') from pg_index
            where indrelid::regclass::text ~ '^shard_.*Orders' order by 1""").fetchall()


@pytest.mark.parametrize("is_aborted", [True, False])
def test_indexes_are_made_when_the_rows_are_there(shop: Shop, is_aborted: bool) -> None:
    with shop.connected("a") as node:
        node.execute(f"comment on index {schema(0)}.\"Orders_user_id_idx\" is 'by the user'")
    before, during = indexes(shop), list[tuple[str, ...]]()

    class Stopped(Exception):
        pass

    def look(event: Event) -> None:
        if event == StepDone(step="subscribe"):
            during.extend(indexes(shop))
            if is_aborted:
                raise Stopped

    with suppress(Stopped):
        adoption.run(shop.catalog, shop.plan, on_event=look)
    assert len(during) == len(before) / 2
    assert during == [one for one in before if "UNIQUE" in one[0]]
    if not is_aborted:
        assert indexes(shop) == before
    assert adoption.abort(shop.catalog).outcome == "aborted"
    assert indexes(shop) == before
    assert_as_before(shop)


@pytest.mark.long
def test_a_copy_with_a_rate_takes_one_table_after_the_other(shop: Shop) -> None:
    begun, seconds, left = 0.0, 0.0, [0]

    def look(event: Event) -> None:
        nonlocal begun, seconds
        if event == StepBegun(step="copy to relay"):
            begun = time.monotonic()
        elif event == StepDone(step="copy to relay"):
            seconds = time.monotonic() - begun
        elif isinstance(event, Copying) and not seconds:
            left.append(event.tables_left)

    with shop.connected("source") as source:
        tables = "users, lines_low, lines_high, countries"
        (size,) = source.execute(
            f"select sum(pg_table_size(name)) from unnest('{{{tables}}}'::regclass[]) name"
        ).fetchone()
    rate = int(size) * 2
    adoption.run(shop.catalog, shop.plan, limits=Limits(rate_bytes_s=rate, max_latency_s=5), on_event=look)
    # That of Orders comes on top.
    assert seconds > int(size) / rate
    assert max(left) <= 1
    assert adoption.abort(shop.catalog).outcome == "aborted"
    assert_as_before(shop)


def test_a_copy_waits_for_transactions_that_have_written(shop: Shop) -> None:
    waits: list[str] = []
    looks = 0
    with shop.connected("source") as writer:

        def look(event: Event) -> None:
            nonlocal looks
            if event == StepBegun(step="copy to relay"):
                writer.execute("begin; update users set name = name where id = 1")
            elif isinstance(event, Waiting):
                waits.append(event.reason)
            elif isinstance(event, Copying):
                looks += 1
            if waits or looks == 300:
                writer.execute("commit")

        adoption.run(shop.catalog, shop.plan, on_event=look)
        (pid,) = writer.execute("select pg_backend_pid()").fetchone()
    assert adoption.abort(shop.catalog).outcome == "aborted"
    assert f"transactions of the source that have written end: process {pid}" in waits[0]


@pytest.mark.parametrize(
    ("step", "server", "publisher"), [("relay", "source", "source"), ("publish", "a", "relay")]
)
def test_a_slot_waits_for_transactions_that_have_written(
    shop: Shop, step: str, server: str, publisher: str
) -> None:
    """The relay is a database of node a's server."""
    waits: list[str] = []
    with shop.connected(server) as writer:
        (pid,) = writer.execute("select pg_backend_pid()").fetchone()

        def look(event: Event) -> None:
            if event == StepBegun(step=step):
                writer.execute("begin; select pg_current_xact_id()")
            elif isinstance(event, Waiting) and "a slot begins" in event.reason:
                waits.append(event.reason)
                writer.execute("commit")

        adoption.run(shop.catalog, shop.plan, on_event=look)
    assert (
        f"a slot begins when transactions of the {publisher} that have written end: process {pid}" in waits[0]
    )
    assert adoption.abort(shop.catalog).outcome == "aborted"
    assert_as_before(shop)


@pytest.mark.parametrize(
    ("step", "server", "publisher"), [("relay", "source", "source"), ("publish", "a", "relay")]
)
def test_the_log_that_a_slot_keeps_before_it_begins_counts(
    shop: Shop, step: str, server: str, publisher: str
) -> None:
    most = 20 << 20
    with shop.connected(server) as writer, shop.connected(server) as keeper:

        def keep_log() -> None:
            begun = "select count(*) from pg_replication_slots where confirmed_flush_lsn is null"
            wait_for(lambda: keeper.execute(begun).fetchone()[0] > 0, "a slot is being made")
            keeper.execute(f"select pg_logical_emit_message(false, 'test', repeat('x', {most * 3 // 2}))")

        thread = threading.Thread(target=keep_log)
        # Without a look the step waits until then.
        late = threading.Timer(60, lambda: writer.execute("commit"))

        def look(event: Event) -> None:
            if event == StepBegun(step=step):
                writer.execute("begin; select pg_current_xact_id()")
                thread.start()
                late.start()

        try:
            with pytest.raises(
                AdoptionFailed, match=rf"the {publisher} keeps .* of its log for slot .* aborted"
            ):
                adoption.run(shop.catalog, shop.plan, limits=Limits(max_wal_bytes=most), on_event=look)
            assert late.is_alive()
        finally:
            late.cancel()
            thread.join()
    assert_as_before(shop)


def test_it_is_logged(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "shardids.adopt"):
        adoption.run(shop.catalog, shop.plan)
        adoption.abort(shop.catalog)
    records = [one for one in caplog.records if one.name == "shardids.adopt"]
    assert len({one.adoption for one in records}) == 1  # type: ignore[attr-defined] # by extra
    steps = [one.step for one in records if one.levelno == logging.DEBUG]  # type: ignore[attr-defined] # by extra
    assert steps == [*(step.name for step in RUN), "abort"]
    states = [one.message.split(": ")[1] for one in records if one.levelno == logging.INFO]
    states = [re.sub(r"[\d.]+ s$", "N s", words) for words in states if "waits" not in words]
    assert states == [
        f"begins at step {steps[0]}",
        "follow after N s",
        "begins at step follow",
        "aborted after N s",
    ]


def test_it_takes_over(shop: Shop) -> None:
    with Clients(shop) as clients:
        adoption.run(shop.catalog, shop.plan)
        adoption.pause(shop.catalog)
        with pytest.raises(ClusterConflict, match="paused"):
            adoption.switch(shop.catalog)
        assert adoption.resume(shop.catalog).step == "follow"
        adoption.compare(shop.catalog)
        done = adoption.switch(shop.catalog)
        assert done.outcome == "adopted"
        assert done.pause_ms is not None
    assert all(written.refused for written in clients.written)
    assert_in_shards(shop, clients)
    assert [one for one in shop.leftovers() if not one.startswith("source")] == []
    with shop.connected("source") as source, pytest.raises(psycopg.Error, match="was taken into a cluster"):
        source.execute("set session_replication_role = replica; delete from users")
    rows = shop.rows("users")
    assert sum(len(one) for one in rows.values()) >= 600
    with shop.connected("a") as node:
        assert node.execute("select count(*) from countries").fetchone() == (2,)
        node.execute(f"insert into {schema(0)}.users (name, country) values ('new', 'at')")
        node.execute("update countries set name = 'D' where code = 'de'")
    assert shard_for_key(1, SHARDS) == next(
        shard for shard, one in rows.items() if any(r[0] == 1 for r in one)
    )
    begin_anew(shop)


def test_the_commands_say_what_they_do(shop: Shop, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    write_plan(shop.plan, file)

    def shardids(*words: str, exit_code: int = 0) -> str:
        done = CliRunner().invoke(app, ["adopt", *words], env={"SHARDIDS_CATALOG": shop.catalog_url})
        assert done.exit_code == exit_code, done.output
        return done.output

    assert "No adoption is under way" in shardids("status")
    assert "3 tables would be split into 6 shards on 2 nodes, 2 go to every node, 1 stay" in shardids(
        "run", str(file), "--dry-run"
    )
    assert shop.leftovers() == ["source: The Shop"]
    unasked = " ".join(shardids("run", str(file), exit_code=2).split())
    assert "The relay holds a copy of all these rows" in unasked
    assert "at step follow" in shardids("run", str(file), "--yes")
    assert "step: follow" in shardids("status")
    assert '"step": "follow"' in shardids("run", "--compare", "--json")
    assert "no terminal to ask at" in shardids("switch", exit_code=2)
    assert "no terminal to ask at" in shardids("abort", exit_code=2)
    assert "is at step" in shardids("run", str(file), "--yes", exit_code=1)
    said = shardids("switch", "--yes")
    assert "no writes were taken for" in said
    assert "Cluster.connect(" in said
    assert_in_shards(shop)
    begin_anew(shop)


def test_no_switch_is_gone_on_with_unasked(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def shardids(*words: str, exit_code: int = 0) -> str:
        done = CliRunner().invoke(app, ["adopt", *words], env={"SHARDIDS_CATALOG": shop.catalog_url})
        assert done.exit_code == exit_code, done.output
        return " ".join(done.output.split())

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    adoption.run(shop.catalog, shop.plan)
    with monkeypatch.context() as killed:
        killed.setattr(Journal, "switch", die)
        killed.setattr(Runner, "_recover", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            adoption.switch(shop.catalog)
    assert "Stop writes at the source for good? There is no terminal to ask at" in shardids(
        "run", "--resume", exit_code=2
    )
    with shop.connected("source") as source:
        with pytest.raises(psycopg.Error, match="was taken into a cluster"):
            source.execute("update users set name = 'late' where id = 1")
        shardids("run", "--stop")
        source.execute("update users set name = 'while it is paused' where id = 1")
        told = shardids("run", "--resume")
        assert "at step switch" in told
        assert "When applications are ready for the cluster: shardids adopt switch" in told
        source.execute("update users set name = 'as ever' where id = 1")
    assert adoption.switch(shop.catalog).outcome == "adopted"
    assert_in_shards(shop)
    assert [row[1] for row in shop.rows("users")[home_of(1)] if row[0] == 1] == ["as ever"]
    begin_anew(shop)


def test_a_run_that_keeps_too_much_log_aborts_by_itself(shop: Shop, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    write_plan(shop.plan, file)
    with Clients(shop) as clients:
        done = CliRunner().invoke(
            app,
            [
                "adopt",
                "run",
                str(file),
                "--yes",
                "--max-wal",
                "0.001kB",
                "--rate",
                "10MB",
                "--max-latency",
                "1min",
            ],
            env={"SHARDIDS_CATALOG": shop.catalog_url},
        )
        before = clients.count
    assert done.exit_code == 1, done.output
    said = " ".join(done.output.split())
    assert re.search(
        # Perhaps that of a table's copy.
        r"the source keeps .* of its log for slot \"\w+\": --max-wal allows 1 bytes",
        said,
    )
    assert "The adoption was aborted, and no log is kept for it" in said
    assert before > 0
    assert_as_before(shop)
    begin_anew(shop)


BAD = """
    create table owners (id bigint primary key, name text);
    create table nullable (id bigint primary key, owner_id bigint);
    alter table nullable replica identity full;
    create table large (id bigint, owner_id bigint not null, note text, primary key (id, owner_id));
    create table unseen (id bigint primary key, owner_id bigint not null);
    create table doubtful (id bigint primary key, owner_id float8 not null);
    alter table doubtful replica identity full;
    create unlogged table volatile (id bigint primary key, owner_id bigint not null);
    create table parents (id bigint, owner_id bigint not null);
    create table children () inherits (parents);
    create table keyless (name text);
    insert into owners values (1, 'one'), (9000000000000000000, 'snowflake');"""


def test_what_cannot_be_adopted_is_refused_before_anything_is_made(shop: Shop) -> None:
    with shop.connected("source") as source:
        source.execute("create database bad")
    url = shop.servers["source"].url("bad")
    with psycopg.connect(url, autocommit=True) as bad:
        bad.execute(BAD)
    direct = [
        TablePlan(name=f"public.{name}", kind=Kind.DIRECT, key="owner_id", id="id")
        for name in ("nullable", "large", "unseen", "doubtful", "volatile", "parents", "nowhere")
    ]
    root = TablePlan(name="public.owners", kind=Kind.ROOT, key="id", id="id")
    keyless = TablePlan(name="public.keyless", kind=Kind.REFERENCE)
    plan = replace(shop.plan, source=url, root="public.owners", tables=(root, *direct, keyless))
    with pytest.raises(AdoptionRefused) as refused:
        adoption.run(shop.catalog, plan)
    for reason in (
        "public.nullable.owner_id: it may be NULL",
        "public.doubtful.owner_id: a key of type double precision is not hashed",
        "public.volatile: it is unlogged",
        "public.parents: it inherits from a table or is inherited by one",
        "public.keyless: it has no key: as soon as it is published",
        "public.nowhere: the source has no such table",
    ):
        assert reason in refused.value.message
    with pytest.raises(AdoptionRefused, match=r"public.owners.id has 9000000000000000000") as refused:
        adoption.run(shop.catalog, replace(plan, tables=(root,)))
    assert "does not exist" in refused.value.message
    derived = TablePlan(
        name="public.nullable",
        kind=Kind.DERIVED,
        path=(Hop(columns=("owner_id",), table="public.owners", referenced=("id",)),),
    )
    finding = Finding(severity=Severity.BLOCKS, subject="public.x", reason="it is odd", remedy="mend it")
    with pytest.raises(AdoptionRefused, match=r"public\.x: it is odd"):
        adoption.run(shop.catalog, replace(plan, tables=(root, derived), findings=(finding,)))
    with pytest.raises(BadArgument, match="which relay"):
        adoption.run(shop.catalog, replace(shop.plan, via=None))
    with shop.connected("source") as source:
        source.execute("drop database bad")
    assert shop.leftovers() == ["source: The Shop"]
    assert adoption.status(shop.catalog) is None


def test_shards_that_are_in_use_are_refused(shop: Shop) -> None:
    with shop.connected("a") as node:
        node.execute(f"insert into {schema(0)}.users (name) values ('here already')")
        node.execute("create table public.lines ()")
        with pytest.raises(AdoptionRefused) as refused:
            adoption.run(shop.catalog, shop.plan)
        node.execute("drop table public.lines")
        node.execute(f"delete from {schema(0)}.users")
    assert '"shard_0000"."users" has rows already' in refused.value.message
    assert 'node "a" already has a table public.lines' in refused.value.message


def test_a_type_that_prints_values_otherwise_is_refused(shop: Shop) -> None:
    with shop.connected("source") as source:
        source.execute("alter table lines add column weight real")
        texts = source.execute("select 1234567::real::text, 1234567::real::float8::text").fetchone()
    assert texts == ("1.234567e+06", "1234567")
    try:
        for node, shards in shop.catalog.placement().by_node().items():
            with shop.connected(node) as connection:
                for shard in shards:
                    connection.execute(f"alter table {schema(shard)}.lines add column weight float8")
        with pytest.raises(
            AdoptionRefused, match=r"lines.*weight is double precision, and real at the source"
        ):
            adoption.check(shop.catalog, shop.plan)
    finally:
        for node, shards in shop.catalog.placement().by_node().items():
            with shop.connected(node) as connection:
                for shard in shards:
                    connection.execute(f"alter table {schema(shard)}.lines drop column weight")
        with shop.connected("source") as source:
            source.execute("alter table lines drop column weight")


def test_keys_that_look_like_ids_of_the_cluster_are_refused(shop: Shop) -> None:
    with shop.connected("source") as source:
        source.execute("create database large")
    url = shop.servers["source"].url("large")
    with psycopg.connect(url, autocommit=True) as large:
        large.execute("""
            create table owners (id bigint primary key, number bigint not null unique);
            insert into owners values (1, 9000000000000000000)""")
    root = TablePlan(name="public.owners", kind=Kind.ROOT, key="number", id="id")
    plan = replace(shop.plan, source=url, root="public.owners", tables=(root,))
    with pytest.raises(AdoptionRefused, match=r"public\.owners\.number has 9000000000000000000; IDs from"):
        adoption.check(shop.catalog, plan)
    with shop.connected("source") as source:
        source.execute("drop database large with (force)")


def test_no_other_table_is_locked_while_one_waits_to_be_published(shop: Shop) -> None:
    waited: list[str] = []
    with shop.connected("source") as holder, shop.connected("source") as other:
        # As VACUUM does.
        holder.execute("begin; lock table countries in share update exclusive mode")
        freeing = threading.Timer(20, holder.execute, ["commit"])
        freeing.start()

        def look(event: Event) -> None:
            if isinstance(event, Waiting) and not waited:
                waited.append(event.reason)
                for table in ("users", '"The Shop"."Orders"', "lines"):
                    other.execute(f"begin; lock table {table} in share update exclusive mode nowait; commit")
                freeing.cancel()
                holder.execute("commit")

        assert adoption.run(shop.catalog, shop.plan, on_event=look).step == "follow"
        freeing.cancel()
    adoption.abort(shop.catalog)
    assert "public.countries can't be published yet" in waited[0]
    assert_as_before(shop)


def test_tables_outside_the_plan_that_refer_to_the_shards_are_refused(shop: Shop) -> None:
    node = shop.catalog.node_of(1).name
    with shop.connected(node) as admin:
        admin.execute(
            f"create table {schema(1)}.pets (owner_id bigint references {schema(1)}.users)".encode()
        )
        try:
            with pytest.raises(
                AdoptionRefused, match=r"shard_0001\.pets refers to .*pets_owner_id_fkey"
            ) as no:
                adoption.run(shop.catalog, shop.plan)
            assert "alter table shard_0001.pets drop constraint" in (no.value.hint or "")
        finally:
            admin.execute(f"drop table {schema(1)}.pets".encode())
    assert_as_before(shop)


def test_tables_outside_the_plan_that_refer_to_reference_tables_are_refused(shop: Shop) -> None:
    pets = f"{schema(shop.catalog.placement().by_node()['b'][0])}.pets"
    with shop.connected("b") as admin:
        admin.execute("create table stays (country text references countries on delete cascade)")
        # Nobody writes to it before an abort is over.
        admin.execute(f"create table {pets} (country text references countries)")
        try:
            with pytest.raises(AdoptionRefused) as no:
                adoption.check(shop.catalog, shop.plan)
        finally:
            admin.execute("drop table stays")
        assert no.value.message.endswith(
            'node "b": public.stays refers to public.countries (stays_country_fkey), and is not in the plan:'
            " an abort could not empty public.countries, or would delete rows of public.stays"
        )
        assert "alter table public.stays drop constraint stays_country_fkey" in (no.value.hint or "")
        try:
            adoption.check(shop.catalog, shop.plan)
        finally:
            admin.execute(f"drop table {pets}")


def test_shards_stay_closed_until_an_abort_has_emptied_all(shop: Shop) -> None:
    adoption.run(shop.catalog, shop.plan)
    with shop.connected("a") as node:
        before = indexes(shop)
        node.execute("create table stays (country text references countries on delete restrict)")
        node.execute("insert into stays values ('at')")
        with pytest.raises(StatementFailed, match="stays_country_fkey"):
            adoption.abort(shop.catalog)
        assert indexes(shop) == before
        with pytest.raises(psycopg.Error, match="fenced"):
            node.execute(f"insert into {schema(0)}.users (name) values ('too early')")
        node.execute("drop table stays")
    assert adoption.abort(shop.catalog).outcome == "aborted"
    assert_as_before(shop)


def test_shards_whose_ids_name_another_shard_are_refused(shop: Shop) -> None:
    table = f"{schema(0)}.users"
    with shop.connected(shop.catalog.node_of(0).name) as node:
        for change, has in (
            ("set default 7", "has the default 7"),
            (f"set default {schema(1)}.next_id()", "has the default shard_0001.next_id()"),
            ("drop default", "has no default"),
        ):
            node.execute(f"alter table {table} alter id {change}".encode())
            with pytest.raises(AdoptionRefused, match=rf"users.*id.* {re.escape(has)}: clients look") as no:
                adoption.check(shop.catalog, shop.plan)
            assert "set default next_id()" in (no.value.hint or "")
        node.execute(f"alter table {table} alter id set default {schema(0)}.next_id()".encode())
    adoption.check(shop.catalog, shop.plan)


def test_rows_that_differ_are_named(shop: Shop) -> None:
    adoption.run(shop.catalog, shop.plan)
    with shop.connected("a") as node:
        user = node.execute("select min(id) from public.users").fetchone()
        node.execute("set session_replication_role = replica")
        node.execute("update public.users set name = 'another' where id = %s", user)
        with pytest.raises(AdoptionFailed, match=rf"1 rows of public.users are not .*\({user[0]}\) differs"):
            adoption.compare(shop.catalog)
    adoption.abort(shop.catalog)
    assert_as_before(shop)


def test_rows_are_read_as_a_role_that_only_reads_where_others_own_tables(shop: Shop) -> None:
    source = shop.servers["source"]
    recorded = Recorded(source.directory)
    with shop.connected("source") as admin:
        admin.execute("""
            create role mallory; create schema mal authorization mallory;
            create role reading login password 'r'; grant pg_read_all_data to reading;
            alter table countries owner to mallory; set role mallory;
            create function mal.evil() returns text language plpgsql immutable as
              $$ begin
                raise warning 'planted: index as % of %', current_user, session_user; return '';
              end $$;
            reset role; create index mallorys on countries ((name || mal.evil()))""")
        recorded.new()
        try:
            with pytest.raises(
                AdoptionRefused, match=r'rows of the source .*: role "postgres" can write'
            ) as no:
                adoption.run(shop.catalog, shop.plan)
            assert "--reader-url" in (no.value.hint or "")
            assert shop.leftovers() == ["source: The Shop"]
            reader = str(
                parse_url(source.url()).set(username="reading", password="r").render_as_string(False)
            )
            with pytest.raises(AdoptionRefused, match='role "mallory" can change what table') as no:
                adoption.check(shop.catalog, shop.plan, reader=reader)
            assert "--trust mallory" in (no.value.hint or "")
            assert not {role for _, role, _ in recorded.new()} - {"reading"}
            adoption.run(shop.catalog, shop.plan, reader=reader, trusted=["mallory"])
            recorded.new()
            with pytest.raises(MissingPrivilege, match="can write, code of other roles would run as it"):
                adoption.compare(shop.catalog)
            assert recorded.new() == set()
            adoption.compare(shop.catalog, reader=reader)
            assert recorded.new() == {("index", "reading", "reading")}
            elsewhere = parse_url(reader).set(database="template1").render_as_string(hide_password=False)
            with pytest.raises(BadArgument, match="is connected to another database"):
                adoption.compare(shop.catalog, reader=elsewhere)
            adoption.abort(shop.catalog)
        finally:
            admin.execute("""
                alter table countries owner to postgres; drop index mallorys;
                drop owned by mallory, reading; drop role mallory, reading""")
    assert_as_before(shop)


def test_rows_are_not_written_to_tables_of_others_in_the_shards(shop: Shop) -> None:
    table = f"{schema(1)}.users"
    node = shop.catalog.node_of(1).name
    with shop.connected(node) as admin:
        admin.execute("create role mallory")
        admin.execute(f"alter table {table} owner to mallory".encode())
        try:
            where = f'node "{node}": role "mallory" can change what table {table} runs'
            with pytest.raises(AdoptionRefused, match=where):
                adoption.run(shop.catalog, shop.plan)
            adoption.check(shop.catalog, shop.plan, trusted=["mallory"])
        finally:
            admin.execute(f"alter table {table} owner to postgres".encode())
            admin.execute("drop owned by mallory; drop role mallory")
    assert_as_before(shop)


def test_a_table_that_is_changed_meanwhile_stops_the_switch(shop: Shop) -> None:
    adoption.run(shop.catalog, shop.plan)
    with shop.connected("source") as source:
        source.execute("alter table users add column late text")
        with pytest.raises(AdoptionFailed, match=r"public\.users was changed at the source"):
            adoption.switch(shop.catalog)
        adoption.abort(shop.catalog)
        source.execute("alter table users drop column late")
    assert_as_before(shop)


def test_after_the_switch_nothing_needs_the_source(shop: Shop) -> None:
    with temporary_servers(3) as servers:
        shop = new_shop(servers, 2)
        adoption.run(shop.catalog, shop.plan)
        writing = (
            "insert into cities values ('Linz', 'at'); update countries set name = 'A' where code = 'at'"
        )

        class Stopped(Exception):
            pass

        def look(event: Event) -> None:
            if event == StepBegun(step="old ids"):
                raise Stopped

        with pytest.raises(Stopped):
            adoption.switch(shop.catalog, on_event=look)
        for name in "ab":
            with shop.connected(name) as node:
                node.execute(writing)
        source = shop.servers["source"]
        source.stop("immediate")
        notes: list[str] = []

        def note(event: Event) -> None:
            if isinstance(event, Noted):
                notes.append(event.note)

        done = adoption.resume(shop.catalog, on_event=note)
        assert done.outcome == "adopted"
        assert any("_relay" in one and "pg_drop_replication_slot" in one for one in notes)
        with shop.connected("a") as catalog:
            rules = catalog.execute("select table_name, rule from shardids_catalog.old_id_rule").fetchall()
        assert ("Orders", "directory") in rules
        source.restart()
        assert [one for one in shop.leftovers() if not one.startswith("source")] == []
        shop.catalog.close()


def test_a_reader_that_keeps_a_reference_table_closed_is_named(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = partial(barrier.until_locked, patience_s=1.0)
    monkeypatch.setattr(barrier, "until_locked", patient)
    waited: list[str] = []
    adoption.run(shop.catalog, shop.plan)
    with shop.connected("b") as reader:
        pid = reader.info.backend_pid
        reader.execute("set application_name = 'report'")

        def read(event: Event) -> None:
            if event == StepBegun(step="open"):
                reader.execute("begin; select from countries")
            elif isinstance(event, Waiting):
                waited.append(event.reason)

        with pytest.raises(StatementFailed) as failed:
            adoption.switch(shop.catalog, on_event=read)
        reader.execute("rollback")
    who = rf'process {pid} \(report\) of role "postgres" \(in a transaction for \d+ s\)'
    assert re.fullmatch(rf'node "b": table countries is locked by {who}', failed.value.message)
    assert re.fullmatch(rf'table public\.countries on node "b" is in use by {who}', waited[0])
    assert failed.value.hint == (
        f"shardids adopt run --resume, once that has ended; or end it: select pg_terminate_backend({pid})"
    )
    assert adoption.resume(shop.catalog).outcome == "adopted"
    begin_anew(shop)


@pytest.mark.long
def test_a_transaction_that_has_written_is_waited_for(shop: Shop) -> None:
    adoption.run(shop.catalog, shop.plan)
    waited: list[str] = []
    with shop.connected("source") as writer:
        writer.execute("begin; insert into users (name) values ('late')")

        def let_go(event: Event) -> None:
            if isinstance(event, Waiting) and not waited:
                waited.append(event.reason)
                writer.execute("commit")

        assert adoption.switch(shop.catalog, on_event=let_go).outcome == "adopted"
    assert "writes" in waited[0]
    assert any(row[1] == "late" for rows in shop.rows("users").values() for row in rows)
    assert_in_shards(shop)
    begin_anew(shop)


def test_an_interrupted_run_names_the_next_commands(shop: Shop) -> None:
    def interrupt(event: Event) -> None:
        if event == StepBegun(step="copy to relay"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        adoption.run(shop.catalog, shop.plan, on_event=interrupt)
    assert caught.value.__notes__ == [
        'Interrupted at step "copy to relay". Go on: shardids adopt run --resume; undo: shardids adopt abort'
    ]
    adoption.abort(shop.catalog)
    assert_as_before(shop)
