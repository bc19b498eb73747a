"""A database that is used while a cluster adopts it: copied, compared, switched, paused, aborted."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from typer.testing import CliRunner

from shardids.adopt import adoption
from shardids.adopt.plan.document import Finding, Hop, Kind, Severity, TablePlan, write_plan
from shardids.adopt.steps import run_steps
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
)
from shardids.pg.embedded import temporary_servers
from shardids.pg.urls import parse_url
from shardids.replication.steps import Event, Waiting
from tests.support.adoptions import (
    SHARDS,
    Clients,
    Shop,
    assert_as_before,
    assert_in_shards,
    begin_anew,
    new_shop,
    schema,
)
from tests.support.planted_code import Recorded


@pytest.fixture(scope="module")
def any_shop() -> Iterator[Shop]:
    with temporary_servers(3) as servers:
        shop = new_shop(servers)
        yield shop
        shop.catalog.close()


@pytest.fixture
def shop(any_shop: Shop) -> Shop:
    if not any_shop.has_row_filters:
        pytest.skip("PostgreSQL 14 has no row filters; that it is refused is tested")
    return any_shop


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
    with pytest.raises(AdoptionRefused, match="PostgreSQL 14: its publications can't filter rows"):
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


def test_it_is_logged(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "shardids.adopt"):
        adoption.run(shop.catalog, shop.plan)
        adoption.abort(shop.catalog)
    records = [one for one in caplog.records if one.name == "shardids.adopt"]
    assert len({one.adoption for one in records}) == 1  # type: ignore[attr-defined] # by extra
    steps = [one.step for one in records if one.levelno == logging.DEBUG]  # type: ignore[attr-defined] # by extra
    assert steps == [*(step.name for step in run_steps(shop.plan)), "abort"]
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
    assert "3 tables would be split into 6 shards on 2 nodes, 1 go to every node, 1 stay" in shardids(
        "run", str(file), "--dry-run"
    )
    assert shop.leftovers() == ["source: The Shop"]
    assert "at step follow" in shardids("run", str(file))
    assert "step: follow" in shardids("status")
    assert '"step": "follow"' in shardids("run", "--compare", "--json")
    assert "no terminal to ask at" in shardids("switch", exit_code=2)
    assert "no terminal to ask at" in shardids("abort", exit_code=2)
    assert "is at step" in shardids("run", str(file), exit_code=1)
    said = shardids("switch", "--yes")
    assert "no writes were taken for" in said
    assert "Cluster.connect(" in said
    assert_in_shards(shop)
    begin_anew(shop)


def test_a_run_that_keeps_too_much_log_aborts_by_itself(shop: Shop, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    write_plan(shop.plan, file)
    with Clients(shop) as clients:
        done = CliRunner().invoke(
            app,
            ["adopt", "run", str(file), "--max-wal", "0.001kB", "--rate", "10MB", "--max-latency", "1min"],
            env={"SHARDIDS_CATALOG": shop.catalog_url},
        )
        before = clients.count
    assert done.exit_code == 1, done.output
    said = " ".join(done.output.split())
    assert re.search(
        r"the source keeps .* of its log for slot \"shardids_adopt_\w+\": --max-wal allows 1 bytes", said
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
        "public.unseen.owner_id: the key is not in the replica identity",
        "public.large: an UPDATE does not log its large values",
        "public.doubtful.owner_id: a key of type double precision is not hashed",
        "public.volatile: it is unlogged",
        "public.parents: it inherits from a table or is inherited by one",
        "public.keyless: it has neither a primary key nor another replica identity",
        "public.nowhere: the source has no such table",
    ):
        assert reason in refused.value.message
    with pytest.raises(AdoptionRefused, match=r"public.owners has ID 9000000000000000000") as refused:
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
    with pytest.raises(AdoptionRefused, match=r"public\.nullable: its key is in another table"):
        adoption.run(shop.catalog, replace(plan, tables=(root, derived)))
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
