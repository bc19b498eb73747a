"""The way back of an adoption: kept with the switch, taken, or given up.

``SHARDIDS_TEST_SOURCE_BIN`` names the programs of another version for the source, as tests/matrix.py fetches.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest
from sqlalchemy.engine import URL
from typer.testing import CliRunner

from shardids.adopt import adoption
from shardids.adopt.back import handing_back, way_back
from shardids.adopt.run.journal import Journal
from shardids.adopt.run.numbers import sequences_are_fit, try_sequences
from shardids.adopt.run.sides import Taker, opened_sides
from shardids.cli import app
from shardids.errors import AdoptionFailed, AdoptionRefused, ClusterConflict, ConnectionFailed
from shardids.pg.embedded import temporary_servers
from shardids.pg.urls import parse_url
from shardids.replication.steps import Event, Noted, OnEvent, StepBegun, Waiting
from tests.support.adoptions import Clients, Shop, assert_as_before, new_shop, schema
from tests.support.replicas import deafen
from tests.support.returns import ShardClients, assert_at_source, same_everywhere
from tests.support.standbys import standby_of
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.usefixtures("needs_row_filters")


@pytest.fixture(scope="module")
def shop() -> Iterator[Shop]:
    programs = os.environ.get("SHARDIDS_TEST_SOURCE_BIN")
    with (
        temporary_servers(1, bindir=Path(programs) if programs else None) as sources,
        temporary_servers(2) as nodes,
    ):
        shop = new_shop([*sources, *nodes], can_go_back=True)
        yield shop
        shop.catalog.close()


@pytest.fixture
def own_shop() -> Iterator[Shop]:
    """A shop for a test that does not return."""
    with temporary_servers(3) as servers:
        shop = new_shop(servers, 2, can_go_back=True)
        yield shop
        shop.catalog.close()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def in_shards(shop: Shop, statement: str) -> None:
    """Runs a statement for each shard, ``{s}``."""
    for node, shards in shop.catalog.placement().by_node().items():
        with shop.connected(node) as connection:
            for shard in shards:
                connection.execute(statement.replace("{s}", schema(shard)))


def test_there_and_back(shop: Shop) -> None:
    with Clients(shop) as clients:
        adoption.run(shop.catalog, shop.plan)
        with pytest.raises(ClusterConflict, match="at step 'follow', which has no way back"):
            adoption.back(shop.catalog)
        done = adoption.switch(shop.catalog, keep_back=True)
    assert (done.step, done.outcome) == ("kept", None)
    assert done.pause_ms is not None
    assert all(written.refused for written in clients.written)
    with pytest.raises(ClusterConflict, match="the shards have taken over"):
        adoption.abort(shop.catalog)
    with ShardClients(shop) as writers:
        until(lambda: writers.count > 200)
        back = adoption.back(shop.catalog)
    assert (back.step, back.outcome) == ("returned", None)
    assert back.pause_ms is not None
    assert all(written.refused for written in writers.written)
    assert_at_source(shop, clients, writers)
    same_everywhere(shop)
    for late in (
        "insert into {s}.users (name) values ('too late')",
        "insert into {s}.users (id, name) select max(id) + 1, 'too late' from {s}.users",
        "update {s}.users set name = 'too late' where id = (select min(id) from {s}.users)",
        "delete from {s}.lines",
        "truncate {s}.lines",
    ):
        for node, shards in shop.catalog.placement().by_node().items():
            with shop.connected(node) as connection:
                for shard in shards:
                    with pytest.raises(psycopg.Error) as refused:
                        connection.execute(late.replace("{s}", schema(shard)))
                    assert refused.value.sqlstate == "SI002"
    with shop.connected("a") as node, pytest.raises(psycopg.Error, match="was given back"):
        node.execute("delete from countries")
    with Clients(shop) as clients_again:
        until(lambda: clients_again.count > 30)
    assert all(user < 10**9 for written in clients_again.written for user in written.users)
    assert set(shop.leftovers()) == {
        "source: The Shop",
        *(f"{node}: shardids_{what}" for node in "ab" for what in ("adoption", "barrier")),
    }
    assert adoption.abort(shop.catalog).outcome == "returned"
    assert_as_before(shop)


def test_what_could_not_go_back_is_refused_and_changes_nothing(shop: Shop) -> None:
    in_shards(
        shop,
        """alter table {s}.users add seen_at timestamptz, alter name drop not null;
           alter table {s}."Orders" alter amount type numeric;
           alter table {s}.lines alter number type bigint""",
    )
    adoption.run(shop.catalog, shop.plan)
    before = shop.leftovers()
    with shop.connected("source") as source:
        source.execute("""
            create function stamp() returns trigger language plpgsql as 'begin return new; end';
            create trigger stamp before insert on users for each row execute function stamp();
            alter table users enable always trigger stamp;
            alter table countries force row level security""")
        with pytest.raises(AdoptionRefused) as refused:
            adoption.switch(shop.catalog, keep_back=True)
        source.execute("drop function stamp cascade; alter table countries no force row level security")
    for reason in (
        "can't take back the writes to the shards",
        "public.users.seen_at is in the shards only",
        "public.users.name may be NULL in the shards",
        '"The Shop"."Orders".amount is numeric in the shards, and numeric(10,2) at the source',
        "public.lines.number is integer at the source: new IDs don't fit",
        "trigger stamp of public.users would fire",
        "public.countries has row-level security for its owner too",
    ):
        assert reason in refused.value.message
    assert 'alter table public.lines alter column "number" type bigint' in (refused.value.hint or "")
    with pytest.raises(AdoptionRefused, match="seen_at"):
        adoption.switch(shop.catalog, keep_back=True, dry_run=True)
    status = adoption.status(shop.catalog)
    assert status is not None
    assert (status.adoption.step, status.adoption.keeps_back) == ("follow", False)
    assert shop.leftovers() == before
    adoption.abort(shop.catalog)
    in_shards(
        shop,
        """alter table {s}.users drop seen_at, alter name set not null;
           alter table {s}."Orders" alter amount type numeric(10, 2);
           alter table {s}.lines alter number type integer""",
    )
    assert_as_before(shop)


def kept(shop: Shop) -> list[str]:
    """Switches with a way back; returns what is said of it."""
    notes: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, Noted):
            notes.append(event.note)

    adoption.run(shop.catalog, shop.plan)
    adoption.switch(shop.catalog, keep_back=True, on_event=note)
    return notes


def shardids(shop: Shop, *words: str, exit_code: int = 0) -> str:
    done = CliRunner().invoke(app, ["adopt", *words], env={"SHARDIDS_CATALOG": shop.catalog_url})
    assert done.exit_code == exit_code, done.output
    return done.output


def test_columns_that_an_index_only_includes_are_of_no_key(shop: Shop) -> None:
    notes: list[str] = []
    with shop.connected("source") as source:
        source.execute("create unique index one_name on users (name) include (id) where name ~ 'twin'")
    try:
        adoption.run(shop.catalog, shop.plan)
        adoption.switch(
            shop.catalog,
            keep_back=True,
            dry_run=True,
            on_event=lambda event: notes.append(event.note) if isinstance(event, Noted) else None,
        )
        adoption.abort(shop.catalog)
    finally:
        with shop.connected("source") as source:
            source.execute("drop index one_name")
    assert any("one_name of public.users (name) unique" in note for note in notes)


@pytest.mark.long
def test_a_clash_at_the_source_is_shown_and_can_be_mended(shop: Shop) -> None:
    with shop.connected("source") as source:
        source.execute("create unique index one_name on users (name) where name ~ 'twin'")
    notes = kept(shop)
    assert any("one_name of public.users (name) unique" in note for note in notes)
    shards = shop.catalog.placement().by_node()["a"]
    with shop.connected("a") as node:
        first, second = (
            node.execute(f"insert into {schema(shard)}.users (name) values ('twin') returning id").fetchone()[
                0
            ]
            for shard in shards[:2]
        )
        with shop.connected("b") as other:
            shard = shop.catalog.placement().by_node()["b"][0]
            other.execute(f"insert into {schema(shard)}.users (name) values ('on its way')")
        until(lambda: "way back from node a: stopped" in shardids(shop, "status"))
        assert "it has failed" in shardids(shop, "back", "--dry-run")
        assert '"is_applying": true' in shardids(shop, "status", "--json")
        with pytest.raises(AdoptionFailed, match='change that comes from node "a"'):
            adoption.back(shop.catalog)
        node.execute(f"update {schema(shards[0])}.users set name = 'twin 1' where id = %s", [first])
    with shop.connected("source") as source, source.transaction():
        assert source.execute("select count(*) from users where name = 'on its way'").fetchone() == (1,)
        source.execute("alter table users disable trigger shardids_barrier")
        source.execute("update users set name = 'twin 1' where id = %s", [first])
        source.execute("alter table users enable always trigger shardids_barrier")
    until(lambda: "stopped" not in shardids(shop, "status"))
    assert "at step returned" in shardids(shop, "back", "--yes")
    same_everywhere(shop)
    with shop.connected("source") as source:
        found = dict(source.execute("select id, name from users where name ~ 'twin'").fetchall())
        assert found == {first: "twin 1", second: "twin"}
        source.execute("drop index one_name")
    assert "returned after" in shardids(shop, "abort", "--yes")
    assert_as_before(shop)


class Interrupted(Exception):
    pass


def stop_at(step: str) -> Callable[[Event], None]:
    """What stops a command, as a kill does, when a step begins."""

    def stop(event: Event) -> None:
        if isinstance(event, StepBegun) and event.step == step:
            raise Interrupted

    return stop


@pytest.mark.long
def test_a_switch_that_fails_leaves_nothing_that_keeps_log(own_shop: Shop) -> None:
    shop = own_shop
    kept: list[str] = []
    adoption.run(shop.catalog, shop.plan)
    with shop.connected("source") as source:

        def change(event: Event) -> None:
            if isinstance(event, StepBegun) and event.step == "catch up":
                kept.append(shardids(shop, "status"))
            elif isinstance(event, StepBegun) and event.step == "switch":
                source.execute("alter table users add column late text")

        with pytest.raises(AdoptionFailed, match=r"public\.users was changed at the source"):
            adoption.switch(shop.catalog, keep_back=True, on_event=change)
        source.execute("alter table users drop column late")
    assert not any("_back" in one for one in shop.leftovers())
    assert "of its log for a way back that has not begun" in kept[0]
    assert "has not begun" not in shardids(shop, "status")
    with shop.connected("source") as source:
        source.execute("alter table users force row level security")
        with pytest.raises(AdoptionRefused, match="row-level security for its owner too"):
            adoption.switch(shop.catalog, keep_back=True)
        source.execute("alter table users no force row level security")
    assert adoption.switch(shop.catalog, keep_back=True).step == "kept"
    assert adoption.back(shop.catalog).step == "returned"


def test_every_shard_logs_enough_after_a_switch_that_was_killed_between_two(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source finds orders by two columns, of which the shards' key has one."""
    adoption.run(shop.catalog, shop.plan)
    retry = way_back._retry
    with monkeypatch.context() as killed:

        def die(taker: Taker, statement: str, values: Mapping[str, object], on_event: OnEvent) -> None:
            retry(taker, statement, values, on_event)
            if values.get("all"):
                raise Interrupted

        killed.setattr(way_back, "_retry", die)
        with pytest.raises(Interrupted):
            adoption.switch(shop.catalog, keep_back=True)
    assert sorted(set(identities_of_orders(shop))) == ["d", "f"]
    assert adoption.resume(shop.catalog).step == "kept"
    assert set(identities_of_orders(shop)) == {"f"}
    in_shards(
        shop,
        """delete from {s}.lines where order_id = (select min(id) from {s}."Orders");
           delete from {s}."Orders" where id = (select min(id) from {s}."Orders");
           update {s}."Orders" set amount = -1 where id = (select max(id) from {s}."Orders")""",
    )
    adoption.back(shop.catalog)
    same_everywhere(shop)
    adoption.abort(shop.catalog)
    assert set(identities_of_orders(shop)) == {"d"}
    assert_as_before(shop)


def test_the_way_back_names_the_transactions_that_it_waits_for(shop: Shop) -> None:
    waits: list[str] = []
    adoption.run(shop.catalog, shop.plan)
    with shop.connected("b") as writer:
        (pid,) = writer.execute("select pg_backend_pid()").fetchone()

        def look(event: Event) -> None:
            if event == StepBegun(step="way back"):
                writer.execute("begin; select pg_current_xact_id()")
            elif isinstance(event, Waiting) and "a slot begins" in event.reason:
                waits.append(event.reason)
                writer.execute("commit")

        assert adoption.switch(shop.catalog, keep_back=True, on_event=look).step == "kept"
    assert any(f'of node "b" that have written end: process {pid}' in reason for reason in waits)
    adoption.back(shop.catalog)
    adoption.abort(shop.catalog)
    assert_as_before(shop)


def identities_of_orders(shop: Shop) -> list[str]:
    """Returns how the shards' tables of orders log changed rows."""
    found: list[str] = []
    for name in "ab":
        with shop.connected(name) as node:
            rows = node.execute(
                "select relreplident::text from pg_class where relname = 'Orders' and relkind = 'r'"
            )
            found += [identity for (identity,) in rows.fetchall()]
    return found


@pytest.mark.long
def test_as_long_as_it_is_kept(shop: Shop) -> None:
    adoption.run(shop.catalog, shop.plan)
    for keep_back in (True, False):
        with pytest.raises(Interrupted):
            adoption.switch(shop.catalog, keep_back=keep_back, on_event=stop_at("catch up"))
        assert any("_back" in one for one in shop.leftovers()) is keep_back
    assert adoption.switch(shop.catalog, keep_back=True).step == "kept"
    with shop.connected("source") as source:
        for change in ("insert into users (name) values ('x')", "truncate users cascade"):
            with pytest.raises(psycopg.Error, match="was taken into a cluster"):
                source.execute(f"set session_replication_role = replica; {change}")
    with shop.connected("a") as node, shop.connected("b") as other:
        first, second = shop.catalog.placement().by_node()["a"][:2]
        with pytest.raises(psycopg.Error, match="can't be truncated as long as its changes are sent"):
            node.execute(f"truncate {schema(first)}.lines")
        for one in (node, other):
            with pytest.raises(psycopg.Error, match="can't be truncated as long as its changes are sent"):
                one.execute("truncate cities")
        with pytest.raises(psycopg.Error, match="brings changes to the adopted database"):
            node.execute("insert into public.users (name) values ('x')")
        (stranger,) = node.execute(f"select {schema(second)}.next_id()").fetchone()
        with pytest.raises(psycopg.errors.CheckViolation):
            node.execute(f"insert into {schema(first)}.users (id, name) values (%s, 'x')", [stranger])
        with pytest.raises(psycopg.Error, match="partition"):
            node.execute(f"alter table {schema(first)}.users add column late text")
        other.execute("insert into countries values ('fr', 'France')")
        with pytest.raises(AdoptionFailed, match='countries has other rows on node "b" than on "a"'):
            adoption.back(shop.catalog)
        # The shards go on.
        node.execute(f"insert into {schema(first)}.users (name, country) values ('new', 'at')")
        node.execute("insert into countries values ('fr', 'France')")
    adoption.back(shop.catalog)
    same_everywhere(shop)
    with shop.connected("source") as source:
        assert source.execute("select count(*) from countries").fetchone() == (3,)
        source.execute("delete from countries where code = 'fr'")
    adoption.abort(shop.catalog)
    assert_as_before(shop)


@pytest.mark.long
def test_sequences_go_on_past_what_the_shards_have_drawn(shop: Shop) -> None:
    with shop.connected("source") as source:
        source.execute("""
            create sequence codes; create sequence falling increment -1; create sequence places;
            create domain place as numeric; create domain best_place as place;
            alter table users add code text default 'A' || nextval('codes'),
              add depth integer default nextval('falling'), add best best_place default nextval('places')""")
        source.execute("create role reader login; grant select on users to reader")
        source.execute('grant usage on schema "The Shop" to reader')
    for name in "ab":
        with shop.connected(name) as node:
            node.execute("create domain place as numeric; create domain best_place as place")
    in_shards(shop, "alter table {s}.users add code text, add depth integer, add best public.best_place")
    notes = kept(shop)
    assert any("codes as it is: " in note and "users.code, " in note for note in notes)
    with opened_sides(shop.catalog, shop.plan, reader_of(shop), name="reader") as sides:
        with sides.source.autocommit() as source:
            refused = [refusal.reason for refusal in sequences_are_fit(source, sides)]
        with pytest.raises(AdoptionFailed, match="may not set the source's sequence"):
            try_sequences(sides)
    assert any("falling of " in reason and "users.depth" in reason for reason in refused)
    with shop.connected("a") as node:
        node.execute(f"insert into {schema(0)}.users (name, depth, best) values ('deep', -9000, 9000.5)")
    with shop.connected("source") as source:
        source.execute("alter role postgres set statement_timeout = '1h'")
        drawn = source.execute("select last_value from codes").fetchone()[0]
    assert adoption.back(shop.catalog).step == "returned"
    with shop.connected("source") as source:
        source.execute("alter role postgres reset statement_timeout")
        made = source.execute("insert into users (name) values ('next') returning code, depth, best")
        assert made.fetchone() == (f"A{drawn + 1}", -9001, 9002)
        source.execute("delete from users where name in ('deep', 'next')")
    adoption.abort(shop.catalog)
    with shop.connected("source") as source:
        source.execute("alter table users drop code, drop depth, drop best")
        source.execute("drop sequence codes, falling, places; drop domain best_place, place")
        source.execute("drop owned by reader; drop role reader")
    in_shards(shop, "alter table {s}.users drop code, drop depth, drop best")
    for name in "ab":
        with shop.connected(name) as node:
            node.execute("drop domain best_place, place")
    assert_as_before(shop)


def reader_of(shop: Shop) -> URL:
    """Returns the source's URL for role reader."""
    url = parse_url(shop.servers["source"].url())
    with shop.connected("source") as source:
        source.execute("alter role reader password 'reads'")
    return url.set(username="reader", password="reads", query={})


@pytest.mark.long
def test_a_switch_without_a_way_back_gets_none_later(own_shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = own_shop

    def die(*_: object, **__: object) -> None:
        raise Interrupted

    adoption.run(shop.catalog, shop.plan)
    with monkeypatch.context() as killed:
        killed.setattr(Journal, "keep_back", die)
        with pytest.raises(Interrupted):
            adoption.switch(shop.catalog, keep_back=True)
    assert adoption.resume(shop.catalog).step == "follow"

    with pytest.raises(Interrupted):
        adoption.switch(shop.catalog, on_event=stop_at("old ids"))
    for wish in (
        lambda: adoption.switch(shop.catalog, keep_back=True),
        lambda: adoption.switch(shop.catalog, keep_back=True, dry_run=True),
    ):
        with pytest.raises(ClusterConflict, match="by a switch that keeps no way back"):
            wish()
    assert adoption.resume(shop.catalog).outcome == "adopted"


@pytest.mark.long
def test_a_source_that_dies_before_it_follows_the_shards(own_shop: Shop) -> None:
    shop = own_shop

    adoption.run(shop.catalog, shop.plan)
    with pytest.raises(Interrupted):
        adoption.switch(shop.catalog, keep_back=True, on_event=stop_at("clean"))
    shop.servers["source"].stop("immediate")
    with pytest.raises(ConnectionFailed) as failed:
        adoption.resume(shop.catalog)
    assert "shardids adopt finish" in failed.value.hint
    shop.servers["source"].restart()
    assert adoption.resume(shop.catalog).step == "kept"
    at_source = {"The Shop", "shardids_adopt", "shardids_barrier"}
    left = [one.split(": ")[1] for one in shop.leftovers() if one.startswith("source")]
    assert {one for one in left if not one.endswith("_back") and not one.startswith("pg_")} == at_source
    assert adoption.finish(shop.catalog).outcome == "adopted"


@pytest.mark.long
def test_a_way_back_whose_source_dies_before_it_can_be_given_up(own_shop: Shop) -> None:
    shop = own_shop

    adoption.run(shop.catalog, shop.plan)
    with pytest.raises(Interrupted):
        adoption.switch(shop.catalog, keep_back=True, on_event=stop_at("follow back"))
    shop.servers["source"].stop("immediate")
    assert "of its log for a way back that has not begun" in shardids(shop, "status")
    assert adoption.finish(shop.catalog).outcome == "adopted"
    shop.servers["source"].restart()
    assert [one for one in shop.leftovers() if not one.startswith("source")] == []


@pytest.mark.long
def test_a_source_that_dies_and_the_standby_in_its_place(
    own_shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = own_shop
    kept(shop)
    back_of = "select pubname from pg_publication where pubname ~ 'back'"
    with shop.connected("b") as node:
        (name,) = node.execute(back_of).fetchone()
        (noted,) = node.execute(
            f"select obj_description(oid, 'pg_publication') from pg_publication where pubname = '{name}'"
        ).fetchone()
        node.execute(f"comment on publication \"{name}\" is '0000000F'")
        for is_late in (False, True):
            with monkeypatch.context() as patched:
                if is_late:
                    patched.setattr(handing_back, "approach", lambda *_, **__: None)
                with pytest.raises(AdoptionFailed, match="another server than the one that followed"):
                    adoption.back(shop.catalog)
            in_shards(shop, "insert into {s}.users (name) values ('the shards go on')")
        node.execute(f"comment on publication \"{name}\" is '{noted}'")
    source = shop.servers["source"]
    with standby_of(source) as standby:
        deafen(source, standby)
        in_shards(shop, "insert into {s}.users (name) values ('acknowledged')")
        with shop.connected("source") as old:
            acknowledged = "select count(*) from users where name = 'acknowledged'"
            until(lambda: old.execute(acknowledged).fetchone() == (2,))
        # What the source has not confirmed yet, the standby would get from the nodes once it is promoted.
        for node_name in "ab":
            with shop.connected(node_name) as node:
                (written,) = node.execute("select pg_current_wal_lsn()").fetchone()
                behind = f"select count(*) from pg_replication_slots where confirmed_flush_lsn < '{written}'"
                until(lambda node=node, behind=behind: node.execute(behind).fetchone() == (0,))
        source.stop()
        told = shardids(shop, "status")
        assert "The source does not answer" in told
        assert "way back from node b: stopped" in told
        assert '"source_takes_writes": null' in shardids(shop, "status", "--json")
        with psycopg.connect(standby.url(), autocommit=True) as new:
            new.execute("select pg_promote()")
            assert new.execute(acknowledged).fetchone() == (0,)
        assert "lost: the source is another server" in " ".join(
            shardids(shop, "status", "--source", standby.url()).split()
        )
        with pytest.raises(AdoptionFailed, match="another server"):
            adoption.back(shop.catalog, source=standby.url())
    notes: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, Noted):
            notes.append(event.note)

    assert adoption.finish(shop.catalog, on_event=note).outcome == "adopted"
    assert any("was left as it is" in one and name in one for one in notes)
    for node_name in "ab":
        with shop.connected(node_name) as node:
            assert node.execute("select count(*) from pg_replication_slots").fetchone() == (0,)
            assert node.execute(back_of).fetchone() is None
    in_shards(shop, "truncate {s}.lines")


@pytest.mark.long
def test_a_way_back_that_is_lost(shop: Shop) -> None:
    kept(shop)
    with shop.connected("a") as node:
        until(lambda: is_dropped(node))
    assert "lost" in shardids(shop, "status")
    with pytest.raises(AdoptionFailed, match="the way back is gone"):
        adoption.back(shop.catalog)
    assert "adopted after" in shardids(shop, "finish", "--yes")
    assert [one for one in shop.leftovers() if not one.startswith("source")] == []
    with shop.connected("source") as source, pytest.raises(psycopg.Error, match="was taken into a cluster"):
        source.execute("delete from users")


def is_dropped(node: psycopg.Connection) -> bool:
    """Drops the slot of the way back; false if it was in use."""
    of_slots = "from pg_replication_slots where slot_name ~ 'back'"
    with suppress(psycopg.Error):
        node.execute(f"select pg_terminate_backend(active_pid) {of_slots}")
        node.execute(f"select pg_drop_replication_slot(slot_name) {of_slots}")
    return node.execute(f"select count(*) {of_slots}").fetchone() == (0,)
