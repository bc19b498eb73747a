"""Reference tables: the same rows on every node, what refuses to break that, and what restores it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import BigInteger, ForeignKey, Integer, String, event, func, insert, select, text
from sqlalchemy.engine import make_url
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, selectinload

from shardids import AsyncCluster, Cluster, mover, primary_key, reference_table, sharding_key
from shardids.catalog.references import references_of
from shardids.catalog.rows import Catalog
from shardids.errors import (
    BadArgument,
    ClusterConflict,
    MoveFailed,
    ReferenceRefused,
    ReferencesBehind,
    StatementFailed,
)
from shardids.migrate.install import provision
from shardids.mover import cutover, failover
from shardids.pg.embedded import EmbeddedServer, temporary_server
from shardids.replication.barrier import BarrierSession
from shardids.replication.steps import Event, Waiting
from shardids.tables import references, views
from shardids.tables.references import following as attaching
from shardids.tables.references import state
from shardids.watch import doctor
from tests.conftest import dsn, found_cluster
from tests.support.clusters import command_here as command
from tests.support.migrations import App
from tests.support.referring import Country, Currency, Nodes, User, database, nodes_at
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with temporary_server() as server:
        yield server


@pytest.fixture(scope="module")
def nodes(server: EmbeddedServer) -> Iterator[Nodes]:
    with nodes_at({name: database(server, f"node_{name}") for name in "abc"}) as nodes:
        yield nodes


# Written on one node, there on all.


def test_a_change_is_on_all_nodes_when_commit_returns(nodes: Nodes) -> None:
    for number in range(20):
        with nodes.cluster.reference_session(wait=True) as session, session.begin():
            session.merge(Country(code="IT", name=f"Italy {number}"))
        for node in "abc":
            with nodes.connected(node) as connection:
                query = "select name from shardids_ref.countries where code = 'IT'"
                assert connection.execute(query).fetchone() == (f"Italy {number}",)


def test_plain_sql_on_the_writer_arrives(nodes: Nodes) -> None:
    with nodes.connected("a") as connection:
        connection.execute("insert into shardids_ref.currencies values ('JPY')")
    for node in "bc":
        wait_for(lambda node=node: "JPY" in nodes.codes(node, "currencies"), "the row to arrive")


def test_an_async_session_waits_too(nodes: Nodes) -> None:
    async def write() -> str:
        cluster = await AsyncCluster.connect(dsn(nodes.urls["a"]))
        async with cluster, await cluster.reference_session(wait=True) as session, session.begin():
            session.add(Country(code="ES", name="Spain"))
        async with (
            await AsyncCluster.connect(dsn(nodes.urls["a"])) as cluster,
            cluster.session(shard=nodes.shard_on("c")) as session,
        ):
            return (await session.get_one(Country, "ES")).name

    assert asyncio.run(write()) == "Spain"


def test_a_node_that_does_not_follow_is_named(nodes: Nodes) -> None:
    with nodes.connected("c") as connection:
        (name,) = connection.execute(
            "select subname from pg_subscription where subdbid = shardids.database()"
        ).fetchone()
        connection.execute(f"alter subscription {name} disable")
        with (
            pytest.raises(
                ReferencesBehind, match=r'committed, and node "c" has not confirmed it within 0\.5 s'
            ),
            nodes.cluster.reference_session(wait=True, within_s=0.5) as session,
            session.begin(),
        ):
            session.add(Currency(code="GBP"))
        assert "GBP" in nodes.codes("a", "currencies")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(state, "WITHIN_S", 0.1)
            with pytest.raises(ReferencesBehind, match=r'not deleted: earlier changes .* node "c" within'):
                references.delete_row(nodes.catalog, "currencies", ["GBP"])
        assert references_of(nodes.catalog).deletions == ()
        shown = command("reference", "list", "--json", **nodes.environment)
        assert shown.returncode == 3, shown.stderr
        assert {one["node"]: one["state"] for one in json.loads(shown.stdout)["nodes"]} == {
            "a": "is written to",
            "b": "follows",
            "c": "its subscription is disabled",
        }
    done = command("reference", "repair", **nodes.environment)
    assert done.stdout == 'Node "c" repaired: its subscription is disabled\n', done.stderr
    assert "GBP" in nodes.codes("c", "currencies")
    again = command("reference", "repair", **nodes.environment)
    assert again.stdout == "All nodes follow the writer, with the same rows\n", again.stderr


@pytest.mark.long
def test_a_commit_waits_while_another_node_becomes_the_writer(nodes: Nodes) -> None:
    def move_to(node: str) -> None:
        references.move_writer(nodes.catalog, node)
        nodes.cluster.refresh()
        nodes.cluster.reference_session().close()

    with nodes.cluster.reference_session(wait=True) as session:
        session.add(Country(code="LU", name="Luxembourg"))
        event.listen(session, "after_commit", lambda _: move_to("b"))
        session.commit()
    assert all("LU" in nodes.codes(node) for node in "abc")

    async def write() -> None:
        cluster = await AsyncCluster.connect(dsn(nodes.urls["a"]))
        async with cluster, await cluster.reference_session(wait=True) as session:
            session.add(Country(code="LI", name="Liechtenstein"))
            event.listen(session.sync_session, "after_commit", lambda _: move_to("a"))
            await session.commit()

    asyncio.run(write())
    assert all("LI" in nodes.codes(node) for node in "abc")


def test_a_node_that_is_brought_to_the_writers_rows_has_confirmed_nothing_yet(nodes: Nodes) -> None:
    """Its slot has a position before it has the rows up to there."""
    whole, confirmed = attaching._write, list[bool]()

    def look_first(*given: Any) -> None:
        with nodes.connected("a") as connection:
            slots = "array(select slot_name from pg_replication_slots where not active)"
            behind = connection.execute(f"select shardids.await_references({slots}, '0/1', 0)").fetchall()
        confirmed.append(not behind)
        whole(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attaching, "_write", look_first)
        assert [one.error for one in references.repair(nodes.catalog, anyway=["c"])] == [""]
    assert confirmed == [False]
    nodes.write(Country(code="LU", name="Luxembourg"))


# Read in any session.


def test_objects_are_loaded_in_any_session(nodes: Nodes) -> None:
    names = [f"user {number}" for number in range(12)]
    with nodes.cluster.sharded_session() as session:
        session.add_all([User(name=name, country_code="DE") for name in names])
        session.commit()
        session.expunge_all()
        assert session.get_one(Country, "DE").name == "Germany"
        assert session.scalars(select(Country).where(Country.code == "FR")).one().name == "France"
        assert session.scalars(select(func.count()).select_from(Country)).one() >= 2
        users = session.scalars(select(User).where(User.name.in_(names)).options(selectinload(User.country)))
        assert {user.country.name for user in users} == {"Germany"}
        joined = select(User.name, Country.name).join(Country).where(Country.code == "DE")
        assert sorted(session.execute(joined).all()) == [(name, "Germany") for name in sorted(names)]
        counted = select(func.count()).select_from(User).outerjoin(User.country)
        assert session.scalars(counted).one() == session.scalars(select(func.count(User.id))).one()
    with nodes.cluster.session(key=names[0]) as session:
        user = session.scalars(select(User).where(User.name == names[0])).one()
        assert user.country.name == "Germany"


def test_a_window_over_them_is_computed_in_the_shard_that_is_named(nodes: Nodes) -> None:
    place = func.row_number().over(order_by=Country.code)
    places = select(Country.code, place.label("n")).subquery()
    with nodes.cluster.sharded_session(fan_out="never") as session, session.begin():
        session.add(User(name="placed", country_code="DE"))
        session.flush()
        placed = select(places.c.n).join(User, User.country_code == places.c.code)
        found = session.scalars(placed.where(User.name == "placed")).all()
        assert found == [1 + nodes.codes("a").index("DE")]
        session.rollback()


def test_the_query_node_groups_by_them(nodes: Nodes) -> None:
    views.create_query_node(nodes.catalog, node="b", store_password=True)
    try:
        nodes.cluster.refresh()
        grouped = select(Country.name, func.count(User.id)).join(User.country).group_by(Country.name)
        with nodes.cluster.sharded_session() as session:
            session.add_all([User(name=f"grouped {n}", country_code="DE") for n in range(8)])
            session.commit()
            users = session.scalars(select(func.count(User.id))).one()
            assert users >= 8
            found = session.execute(grouped)
            assert sum(number for _, number in found) == users
            ranked = select(Country.code, func.row_number().over(order_by=Country.code))
            assert [rank for _, rank in session.execute(ranked)] == list(range(1, 1 + len(nodes.codes("a"))))
    finally:
        views.drop_query_node(nodes.catalog)


def test_reference_rows_are_counted_once(nodes: Nodes) -> None:
    with nodes.connected("a") as connection:
        (count,) = connection.execute("select count(*) from shardids_ref.countries").fetchone()
        (users,) = connection.execute(
            "select count(*) from shardids_ref.countries where code = 'DE'"
        ).fetchone()
    assert users == 1
    with nodes.cluster.sharded_session() as session:
        assert len(session.scalars(select(Country)).all()) == count
        assert len(session.scalars(select(Country).union_all(select(Country))).all()) == 2 * count
        # Which shards' users a country has is asked of all shards.
        with pytest.raises(Exception, match="users"):
            session.execute(
                select(Country.code, User.name).outerjoin(User, User.country_code == Country.code)
            ).all()


def test_a_session_on_shards_writes_no_reference_rows(nodes: Nodes) -> None:
    for session in (nodes.cluster.session(shard=0), nodes.cluster.sharded_session()):
        with session:
            session.add(Country(code="XX", name="Nowhere"))
            with pytest.raises(BadArgument, match="can't write to reference table countries"):
                session.commit()
    with nodes.cluster.sharded_session() as session, pytest.raises(BadArgument, match="reference_session"):
        session.execute(insert(Country).values(code="XX", name="Nowhere"))


# Refused on the server.


@pytest.mark.parametrize(
    "statement",
    [
        "insert into shardids_ref.countries values ('XX', 'x')",
        "update shardids_ref.countries set name = 'x'",
        "delete from shardids_ref.countries",
        "truncate shardids_ref.countries cascade",
    ],
)
def test_another_node_takes_no_writes(nodes: Nodes, statement: str) -> None:
    with (
        nodes.connected("b") as connection,
        pytest.raises(psycopg.Error, match='written to on node "a" alone') as caught,
    ):
        connection.execute(statement)
    assert caught.value.sqlstate == "SI013"


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("delete from shardids_ref.countries where code = 'DE'", "DELETE on reference table countries"),
        ("truncate shardids_ref.countries cascade", "countries can't be truncated"),
        (
            "update shardids_ref.countries set code = 'F' where code = 'FR'",
            "UPDATE of code of reference table",
        ),
    ],
)
def test_the_writer_keeps_what_may_be_referred_to(nodes: Nodes, statement: str, why: str) -> None:
    with nodes.connected("a") as connection, pytest.raises(psycopg.Error, match=why) as caught:
        connection.execute(statement)
    assert caught.value.sqlstate == "SI013"


def test_a_writer_on_another_server_takes_no_writes_until_it_is_repaired(nodes: Nodes) -> None:
    with nodes.connected("a") as connection:
        (made,) = connection.execute(
            """select replace(pg_get_triggerdef(oid), shardids.server_timeline(), 'another server')
               from pg_trigger
               where tgname = 'shardids_reference_right' and tgrelid = 'shardids_ref.countries'::regclass"""
        ).fetchone()
        connection.execute(made.replace("CREATE", "CREATE OR REPLACE", 1))
        for statement in (
            "insert into shardids_ref.countries values ('X', 'x')",
            "update shardids_ref.countries set name = name",
        ):
            with pytest.raises(
                psycopg.Error, match="countries takes no writes: this server was promoted"
            ) as caught:
                connection.execute(statement)
            assert caught.value.sqlstate == "SI013"
        assert [one.state for one in references.status(nodes.catalog)] == [
            state.REFUSES,
            "follows",
            "follows",
        ]
        (found,) = doctor.examine(nodes.catalog, ["reference-writer"]).findings
        assert (found.nodes, "countries" in found.what) == (("a",), True)
        done = command("reference", "repair", **nodes.environment)
        assert done.stdout == f'Node "a" repaired: it {state.REFUSES}\n', done.stderr
        connection.execute("update shardids_ref.countries set name = name")


def test_a_node_that_takes_writes_beside_the_writer_is_found_and_repaired(nodes: Nodes) -> None:
    with nodes.connected("c") as connection:
        connection.execute("select shardids.guard_reference_table('shardids_ref.countries', 'c', true)")
        (found,) = doctor.examine(nodes.catalog, ["reference-writer"]).findings
        assert found.nodes == ("c",)
        assert [(one.node, one.error) for one in references.repair(nodes.catalog)] == [("c", "")]
        with pytest.raises(psycopg.Error, match='written to on node "a" alone'):
            connection.execute("update shardids_ref.countries set name = 'x'")


def test_the_orm_sees_the_refusal(nodes: Nodes) -> None:
    with nodes.cluster.reference_session() as session:
        session.delete(session.get_one(Country, "FR"))
        with pytest.raises(ReferenceRefused, match="shardids reference delete countries KEY"):
            session.commit()


def test_who_writes_needs_no_right_on_other_schemas(nodes: Nodes) -> None:
    with nodes.connected("a") as connection:
        connection.execute("create role clerk")
        connection.execute("grant usage on schema shardids_ref to clerk")
        connection.execute("grant select, insert, update on shardids_ref.currencies to clerk")
        connection.execute("set role clerk")
        connection.execute("insert into shardids_ref.currencies values ('CHF')")
        connection.execute("update shardids_ref.currencies set code = code")
        connection.execute("reset role")
        connection.execute("drop owned by clerk")
        connection.execute("drop role clerk")


def test_the_guard_is_passed_by_the_owner_alone(nodes: Nodes, server: EmbeddedServer) -> None:
    with nodes.connected("b") as connection:
        connection.execute("drop role if exists reader")
        connection.execute("create role reader")
        connection.execute("grant usage on schema shardids_ref to reader")
        connection.execute("grant all on shardids_ref.countries to reader")
        connection.execute("set role reader")
        connection.execute("set shardids.reference_work = 'on'")
        with pytest.raises(psycopg.Error, match="alone"):
            connection.execute("insert into shardids_ref.countries values ('XX', 'x')")
        connection.execute("reset role")
        connection.execute("revoke all on shardids_ref.countries from reader")
        connection.execute("revoke usage on schema shardids_ref from reader")
        connection.execute("drop role reader")


# Deleting.


def test_a_row_is_deleted_on_all_nodes(nodes: Nodes) -> None:
    nodes.write(Country(code="YU", name="Yugoslavia"))
    planned = command("reference", "delete", "countries", "YU", "--dry-run", **nodes.environment)
    assert planned.stdout == "Would delete row YU of countries\n", planned.stderr
    assert all("YU" in nodes.codes(node) for node in "abc")
    done = command("reference", "delete", "countries", "YU", "--yes", **nodes.environment)
    assert done.returncode == 0, done.stderr
    assert not any("YU" in nodes.codes(node) for node in "abc")
    nodes.write(Country(code="YU", name="again"))
    assert all("YU" in nodes.codes(node) for node in "abc")


@pytest.mark.parametrize("node", ["a", "b", "c"])
def test_a_row_that_a_node_refers_to_stays_on_all(nodes: Nodes, node: str) -> None:
    nodes.write(Country(code="CH", name="Switzerland"))
    shard, followed = nodes.shard_on(node), nodes.following()
    with nodes.connected(node) as connection:
        connection.execute(f"insert into shard_{shard:04}.users (name, country_code) values ('u', 'CH')")
        with pytest.raises(
            ClusterConflict,
            match=f'was not deleted: rows of shard_{shard:04}.users on node "{node}" refer to it',
        ):
            references.delete_row(nodes.catalog, "countries", ["CH"])
        assert all("CH" in nodes.codes(one) for one in "abc")
        connection.execute(f"delete from shard_{shard:04}.users where country_code = 'CH'")
    assert references.status(nodes.catalog)[0].state == "is written to"
    # The nodes that had deleted it follow as before.
    assert nodes.following() == followed
    nodes.write(Country(code="CH", name="Suisse"))
    for one in "abc":
        with nodes.connected(one) as connection:
            query = "select name from shardids_ref.countries where code = 'CH'"
            assert connection.execute(query).fetchone() == ("Suisse",)


def test_a_row_that_is_being_changed_stays(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardids.tables.references.following.LOCK_TIMEOUT", "300ms")
    with nodes.connected("a") as connection, connection.transaction():
        connection.execute("update shardids_ref.countries set name = 'changing' where code = 'FR'")
        with pytest.raises(ClusterConflict, match=r'FR .* was not deleted: an open transaction on node "a"'):
            references.delete_row(nodes.catalog, "countries", ["FR"])
    assert references_of(nodes.catalog).deletions == ()
    assert all("FR" in nodes.codes(node) for node in "abc")


@pytest.mark.long
def test_no_reference_comes_between_while_a_row_is_deleted(nodes: Nodes) -> None:
    """Writers on every node refer to rows that are deleted: each is refused, or keeps the row."""
    stop = threading.Event()

    def refer(node: str) -> None:
        shard = nodes.shard_on(node)
        with nodes.connected(node) as connection:
            while not stop.is_set():
                try:
                    connection.execute(
                        f"insert into shard_{shard:04}.users (name, country_code) values ('u', 'ZZ')"
                    )
                    connection.execute(f"delete from shard_{shard:04}.users where country_code = 'ZZ'")
                except psycopg.errors.ForeignKeyViolation:
                    continue

    threads = [threading.Thread(target=refer, args=(node,)) for node in "abc"]
    for thread in threads:
        thread.start()
    try:
        for number in range(4):
            nodes.write(Country(code="ZZ", name=f"round {number}"))
            try:
                references.delete_row(nodes.catalog, "countries", ["ZZ"])
            except ClusterConflict as error:
                assert "was not deleted" in error.message  # noqa: PT017 -- it may be deleted, too
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert nodes.dangling() == []


def test_the_placement_is_locked_before_moves_are_as_a_move_does(nodes: Nodes) -> None:
    nodes.write(Country(code="DD", name="East Germany"))
    with nodes.connected("a") as catalog, nodes.connected("a") as other:
        other.execute("begin; select from shardids_catalog.cluster for update")
        deleting = threading.Thread(target=references.delete_row, args=(nodes.catalog, "countries", ["DD"]))
        deleting.start()
        waiting = """select count(*) from pg_stat_activity
            where datname = current_database() and wait_event_type = 'Lock'"""
        wait_for(lambda: catalog.execute(waiting).fetchone() == (1,), "the deletion to wait")
        other.execute("lock table shardids_catalog.move in row exclusive mode nowait; commit")
        deleting.join()
    assert "DD" not in nodes.codes("a")


def test_no_move_begins_during_a_deletion_nor_the_other_way(nodes: Nodes) -> None:
    nodes.write(Country(code="SU", name="Soviet Union"))
    with nodes.connected("a") as catalog:
        catalog.execute(
            """insert into shardids_catalog.reference_deletion (table_name, key)
               values ('countries', '{"code": "SU"}')"""
        )
        with pytest.raises(
            ReferenceRefused, match=r'row \{"code": "SU"\} of reference table countries is being deleted'
        ):
            mover.move(nodes.catalog, nodes.shard_on("b"), "c")
        done = command("reference", "repair", **nodes.environment)
        assert done.returncode == 0, done.stderr
        assert catalog.execute("select count(*) from shardids_catalog.reference_deletion").fetchone() == (0,)
        catalog.execute(
            """insert into shardids_catalog.move (shard, source, target, offline, step)
               values (0, 'a', 'b', false, 'copy')"""
        )
        with pytest.raises(
            ClusterConflict, match="shard 0 is being moved, and rows that arrive that way are not checked"
        ):
            references.delete_row(nodes.catalog, "countries", ["SU"])
        catalog.execute("delete from shardids_catalog.move where step = 'copy' and ended_at is null")
    assert all("SU" in nodes.codes(node) for node in "abc")


def test_cascades_are_refused(nodes: Nodes) -> None:
    shard = nodes.shard_on("b")
    with nodes.connected("b") as connection:
        connection.execute(
            f"""create table shard_{shard:04}.visits (
                  code text references shardids_ref.countries on delete cascade)"""
        )
        with pytest.raises(ClusterConflict, match=r"visits_code_fkey of .* would delete or change rows"):
            references.delete_row(nodes.catalog, "countries", ["FR"])
        connection.execute(f"drop table shard_{shard:04}.visits")


# Moves, nodes.


def test_a_shard_moves_with_its_references(nodes: Nodes) -> None:
    shard = nodes.shard_on("b")
    with nodes.connected("b") as connection:
        connection.execute(f"insert into shard_{shard:04}.users (name, country_code) values ('mover', 'DE')")
    mover.move(nodes.catalog, shard, "c")
    with nodes.connected("c") as connection:
        assert connection.execute(
            f"select country_code from shard_{shard:04}.users where name = 'mover'"
        ).fetchone() == ("DE",)
        with pytest.raises(psycopg.errors.ForeignKeyViolation):
            connection.execute(f"insert into shard_{shard:04}.users (name, country_code) values ('x', '??')")
    mover.purge(nodes.catalog, [shard])
    mover.move(nodes.catalog, shard, "b")
    mover.purge(nodes.catalog, [shard])


@pytest.mark.long
def test_a_shard_is_not_moved_to_a_node_that_does_not_follow(nodes: Nodes) -> None:
    shard = nodes.shard_on("b")
    with nodes.connected("c") as connection:
        (name,) = connection.execute(
            "select subname from pg_subscription where subdbid = shardids.database()"
        ).fetchone()
        connection.execute(f"alter subscription {name} disable")
    with nodes.connected("a") as connection:
        connection.execute("insert into shardids_ref.countries values ('NO', 'Norway')")
    with nodes.connected("b") as connection:
        wait_for(lambda: "NO" in nodes.codes("b"), "the row to arrive")
        connection.execute(f"insert into shard_{shard:04}.users (name, country_code) values ('no', null)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutover, "WITHIN_S", 0.2)
        with pytest.raises(MoveFailed, match='node "c" has not followed the writer of reference tables'):
            mover.move(nodes.catalog, shard, "c")
    with nodes.connected("b") as connection:
        connection.execute(f"update shard_{shard:04}.users set country_code = 'NO' where name = 'no'")
    references.repair(nodes.catalog)
    mover.resume(nodes.catalog, shard)
    assert nodes.dangling() == []
    mover.purge(nodes.catalog, [shard])
    mover.move(nodes.catalog, shard, "b")
    mover.purge(nodes.catalog, [shard])


@pytest.mark.long
def test_a_pause_that_waits_for_reference_rows_ends_and_is_tried_again(nodes: Nodes) -> None:
    """The target has the shard's row before the row that it refers to: writers go on until it has both."""
    shard = nodes.shard_on("b")
    users = f"shard_{shard:04}.users"
    close, said = BarrierSession.close, list[str]()
    with (
        nodes.connected("b") as source,
        nodes.connected("c") as target,
        nodes.connected("a") as writer,
        pytest.MonkeyPatch.context() as patch,
    ):

        def refer_then_close(*given: Any) -> float:
            if "IS" not in nodes.codes("a"):
                # The worker that applies the writer's changes waits for this lock.
                target.execute("begin")
                target.execute("lock table shardids_ref.countries in share row exclusive mode")
                writer.execute("insert into shardids_ref.countries values ('IS', 'Iceland')")
                wait_for(lambda: "IS" in nodes.codes("b"), "the row to be on the source")
                source.execute(f"insert into {users} (name, country_code) values ('in the pause', 'IS')")
            return close(*given)

        def tell(event: Event) -> None:
            if (
                isinstance(event, Waiting)
                and "reference tables did not catch up" in event.reason
                and not said
            ):
                said.append(event.reason)
                source.execute(f"update {users} set name = 'after it' where country_code = 'IS'")
                assert "IS" not in nodes.codes("c")
                target.execute("commit")

        patch.setattr(BarrierSession, "close", refer_then_close)
        mover.move(nodes.catalog, shard, "c", on_event=tell)
        found = target.execute(f"select name from {users} where country_code = 'IS'").fetchall()
    assert (len(said), found) == (1, [("after it",)])
    assert nodes.dangling() == []
    mover.purge(nodes.catalog, [shard])
    mover.move(nodes.catalog, shard, "b")
    mover.purge(nodes.catalog, [shard])


def test_nodes_are_not_changed_without_their_tables(nodes: Nodes, server: EmbeddedServer) -> None:
    url = dsn(database(server, "node_e"))
    for call, instead in (
        (lambda: provision.add_node(nodes.catalog, "e", url), "add_node"),
        (lambda: failover.replace_node(nodes.catalog, "c", url), "replace_node"),
    ):
        with pytest.raises(ClusterConflict, match=r"has reference tables \(countries, currencies") as refused:
            call()
        assert refused.value.hint == f"Call shardids.tables.references.{instead} instead."
    references.add_node(nodes.catalog, "e", url)
    nodes.urls["e"] = make_url(url)
    try:
        assert nodes.codes("e") == nodes.codes("a")
        with pytest.raises(ClusterConflict, match="has reference tables"):
            provision.remove_node(nodes.catalog, "e")
    finally:
        references.remove_node(nodes.catalog, "e")
        del nodes.urls["e"]


def test_a_new_node_has_them_and_a_removed_one_leaves_nothing(nodes: Nodes, server: EmbeddedServer) -> None:
    url = database(server, "node_d")
    added = command("node", "add", "d", "--url", dsn(url), **nodes.environment)
    assert added.returncode == 0, added.stderr
    nodes.urls["d"] = url
    assert nodes.codes("d") == nodes.codes("a")
    with Cluster.connect(dsn(nodes.urls["a"])) as cluster, cluster.reference_session(wait=True) as session:
        session.add(Country(code="PT", name="Portugal"))
        session.commit()
    assert "PT" in nodes.codes("d")
    refused = command("node", "remove", "a", **nodes.environment)
    assert refused.returncode == 1
    removed = command("node", "remove", "d", **nodes.environment)
    assert removed.returncode == 0, removed.stderr
    with nodes.connected("a") as connection:
        (slots,) = connection.execute("select count(*) from pg_replication_slots").fetchone()
    assert slots == 2


@pytest.mark.long
def test_a_writer_that_is_drained_stays_the_writer_until_another_is_chosen(nodes: Nodes) -> None:
    shards = [shard for shard, node in nodes.catalog.placement().node_of.items() if node == "c"]
    references.move_writer(nodes.catalog, "c")
    for more in (["--dry-run"], []):
        said = command("rebalance", "--drain", "c", *more, **nodes.environment)
        assert said.returncode == 0, said.stderr
        assert 'Reference tables are written to on node "c", which this does not change.' in said.stderr
    mover.purge(nodes.catalog, shards)
    assert "c" not in nodes.catalog.placement().node_of.values()
    nodes.cluster.refresh()
    nodes.write(Country(code="SE", name="Sweden"))
    assert all("SE" in nodes.codes(node) for node in "abc")
    refused = command("node", "remove", "c", **nodes.environment)
    assert "shardids reference move --to NODE" in refused.stderr
    references.move_writer(nodes.catalog, "a")
    planned = command("node", "remove", "c", "--dry-run", **nodes.environment)
    assert planned.stdout == 'Would remove node "c"\n', planned.stderr
    home = nodes.catalog.placement().node_of[shards[0]]
    for target in ("c", home):
        mover.move(nodes.catalog, shards[0], target, back=True)
    for dry_run in (True, False):
        with pytest.raises(ClusterConflict, match=f'node "c" has copies of shard {shards[0]}, which'):
            references.remove_node(nodes.catalog, "c", dry_run=dry_run)
        assert nodes.codes("c") == nodes.codes("a")
    for shard in shards:
        mover.move(nodes.catalog, shard, "c", back=True)
    mover.purge(nodes.catalog, shards)
    nodes.cluster.refresh()


@pytest.mark.long
def test_another_node_becomes_the_writer_while_it_is_written_to(nodes: Nodes) -> None:
    """Each write is on all nodes or was refused, and numbers of an identity column go on."""
    stop, written, refused = threading.Event(), list[str](), 0
    with nodes.connected("a") as connection:
        connection.execute(
            "create table shardids_ref.plans (id int generated always as identity primary key, code text)"
        )
    references.create_table(nodes.catalog, "plans")

    def write() -> None:
        nonlocal refused
        count = 0
        while not stop.is_set():
            count += 1
            try:
                with nodes.cluster.reference_session() as session, session.begin():
                    session.execute(
                        text("insert into shardids_ref.plans (code) values (:c)"), {"c": f"{count}"}
                    )
                written.append(f"{count}")
            except ReferenceRefused:
                refused += 1
                nodes.cluster.refresh()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for node in ("b", "c", "a"):
            begun = len(written)
            moved = command("reference", "move", "--to", node, **nodes.environment)
            assert moved.returncode == 0, moved.stderr
            wait_for(lambda begun=begun: len(written) > begun + 20, "writes on the new writer")
    finally:
        stop.set()
        thread.join()
    assert refused
    nodes.write(Country(code="BE", name="Belgium"))
    for node in "abc":
        assert sorted(nodes.codes(node, "plans")) == sorted(written)
    assert references.repair(nodes.catalog) == []
    references.drop_table(nodes.catalog, "plans")


@pytest.mark.long
def test_a_writer_that_can_not_be_moved_stays(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = command("reference", "move", "--to", "b", "--dry-run", **nodes.environment)
    assert planned.stdout == 'Reference tables would be written to on node "b", before on "a"\n', (
        planned.stderr
    )
    with pytest.raises(ClusterConflict, match="no node"):
        references.move_writer(nodes.catalog, "z")
    monkeypatch.setattr("shardids.tables.references.following.LOCK_TIMEOUT", "300ms")
    followed = nodes.following()
    with nodes.connected("a") as connection, connection.transaction():
        # Without an ID, for which a slot on this server would wait.
        connection.execute("lock table shardids_ref.countries in row exclusive mode")
        with pytest.raises(ClusterConflict, match='transaction on node "a" that writes to a reference table'):
            references.move_writer(nodes.catalog, "b")
    with nodes.connected("b") as connection, connection.transaction():
        connection.execute("set local session_replication_role = replica")
        connection.execute("update shardids_ref.countries set name = 'other' where code = 'FR'")
    with pytest.raises(
        ClusterConflict, match='node "b" does not have the same rows of reference table countries'
    ):
        references.move_writer(nodes.catalog, "b")
    monkeypatch.setattr("shardids.tables.references.following._SLOT_TIMEOUT", "300ms")
    with nodes.connected("b") as connection, connection.transaction():
        connection.execute("select pg_current_xact_id()")
        with pytest.raises(
            ClusterConflict,
            match=rf'node "b": transactions .* 300ms: process {connection.info.backend_pid} of role '
            '"postgres" in database "node_b"',
        ):
            references.move_writer(nodes.catalog, "b")
    assert nodes.following() == followed
    nodes.write(Country(code="FR", name="changed"))
    nodes.write(Country(code="FR", name="France"))
    assert references.repair(nodes.catalog) == []
    refused = command("node", "remove", "a", **nodes.environment)
    assert refused.returncode == 1


@pytest.mark.parametrize(
    ("node", "change", "undo", "lacks"),
    [
        (
            "b",
            "drop constraint countries_currency_fkey",
            "add constraint countries_currency_fkey"
            " foreign key (currency) references shardids_ref.currencies",
            '"b" that node "a" has: FOREIGN KEY',
        ),
        ("a", "add constraint c unique (name) deferrable", "drop constraint c", '"b" that .*: UNIQUE'),
        ("b", "add constraint c check (name <> '')", "drop constraint c", '"a" that .*: CHECK'),
        ("a", "alter name set default 'x'", "alter name drop default", '"b" that .*: column name DEFAULT'),
    ],
)
def test_a_writer_enforces_what_the_one_before_did(
    nodes: Nodes, node: str, change: str, undo: str, lacks: str
) -> None:
    with nodes.connected(node) as connection:
        connection.execute(f"alter table shardids_ref.countries {change}")
        try:
            with pytest.raises(
                ClusterConflict, match=f"reference table countries lacks a rule on node {lacks}"
            ):
                references.move_writer(nodes.catalog, "b")
        finally:
            connection.execute(f"alter table shardids_ref.countries {undo}")
    nodes.write(Country(code="FR", name="France"))


def test_numbers_go_on_from_a_sequence_of_another_name(nodes: Nodes) -> None:
    with nodes.connected("a") as connection:
        connection.execute(
            "create table shardids_ref.plans (id int generated always as identity primary key)"
        )
    references.create_table(nodes.catalog, "plans")
    with nodes.connected("a") as connection, nodes.connected("b") as other:
        connection.execute("insert into shardids_ref.plans default values")
        other.execute("alter sequence shardids_ref.plans_id_seq rename to numbers")
        connection.execute("create sequence shardids_ref.loose")
        with pytest.raises(ClusterConflict, match=r'"b" lacks the sequence of shardids_ref.loose'):
            references.move_writer(nodes.catalog, "b")
        connection.execute("drop sequence shardids_ref.loose")
        references.move_writer(nodes.catalog, "b")
        row = other.execute("insert into shardids_ref.plans default values returning id").fetchone()
        assert row == (2,)
    references.move_writer(nodes.catalog, "a")
    references.drop_table(nodes.catalog, "plans")


def test_a_writer_without_its_publication_is_repaired(nodes: Nodes) -> None:
    with nodes.connected("a") as connection:
        connection.execute("drop publication shardids_ref")
    assert references.follow(nodes.catalog, "b", "c") == ()
    nodes.write(Country(code="BE", name="Belgium"))
    assert references.repair(nodes.catalog) == []


# Making and dropping.


@pytest.mark.parametrize(
    ("definition", "why"),
    [
        ("create table {t} (n int)", "no primary key"),
        ("create unlogged table {t} (n int primary key)", "unlogged"),
        ("create table {t} (n int primary key) partition by range (n)", "not a plain table"),
        ("create table {t} (n bigint primary key references shard_0000.users)", "refers to shard_0000.users"),
        (
            "create table {t} (n int primary key); alter table {t} enable row level security",
            "row level security",
        ),
        ("create table {t} (n int primary key, m int references {t} on delete cascade)", "acts on rows"),
        (
            "create table {t} (n int primary key); create trigger stamp before update on {t}"
            " for each row execute function suppress_redundant_updates_trigger()",
            "trigger stamp may change rows",
        ),
    ],
)
def test_unfit_tables_are_refused(nodes: Nodes, definition: str, why: str) -> None:
    with nodes.connected("a") as connection:
        connection.execute(definition.replace("{t}", "shardids_ref.odd"))
        with pytest.raises(ClusterConflict, match=why):
            references.create_table(nodes.catalog, "odd")
        connection.execute("drop table shardids_ref.odd")
    assert "odd" not in {table.name for table in references.tables(nodes.catalog)}


def test_a_table_is_made_by_sql_and_dropped_again(nodes: Nodes) -> None:
    with nodes.connected("a") as connection:
        connection.execute("""
            create type shardids_ref.mood as enum ('low');
            drop type shardids_ref.mood;
            create table shardids_ref.units (
              id integer generated always as identity, "Name" text not null unique deferrable,
              doubled integer generated always as (id * 2) stored,
              extra jsonb, raw bytea, at timestamptz default now(), primary key (id) include (raw));
            create index units_extra on shardids_ref.units using gin (extra);
            insert into shardids_ref.units ("Name", extra, raw)
            values ('metre', '{"a": 1.0}', '\\x00ff'), ('second', null, null)""")
    planned = command("reference", "create", "units", "--dry-run", **nodes.environment)
    assert planned.returncode == 0, planned.stderr
    for _ in range(2):
        done = command("reference", "create", "units", **nodes.environment)
        assert done.stdout == 'Reference table units is on all nodes, and written to on node "a"\n', (
            done.stderr
        )
    with nodes.connected("a") as connection:
        connection.execute("""update shardids_ref.units set "Name" = 'Meter', raw = '\\x01' where id = 1""")
        connection.execute("""insert into shardids_ref.units ("Name") values ('litre')""")
        everything = "select u.* from shardids_ref.units u order by id"
        there = connection.execute(everything).fetchall()
    for node in "bc":
        with nodes.connected(node) as connection:
            wait_for(lambda c=connection: c.execute(everything).fetchall() == there, "the rows to arrive")
    listed = command("reference", "list", "--json", **nodes.environment)
    assert [one["name"] for one in json.loads(listed.stdout)["tables"]] == [
        "countries",
        "currencies",
        "units",
    ]
    refused = command("reference", "drop", "countries", "--yes", **nodes.environment)
    assert "users refers to reference table countries" in refused.stderr
    dropped = command("reference", "drop", "units", "--yes", **nodes.environment)
    assert dropped.returncode == 0, dropped.stderr
    for node in "abc":
        with nodes.connected(node) as connection:
            assert connection.execute("select to_regclass('shardids_ref.units')").fetchone() == (None,)


def test_rows_that_only_a_reader_has_are_not_lost_unnoticed(nodes: Nodes) -> None:
    """As after the promotion of a writer's standby that had not received them."""
    shard = nodes.shard_on("b")
    with nodes.connected("b") as connection:
        connection.execute("set session_replication_role = replica")
        connection.execute("insert into shardids_ref.countries values ('LO', 'lost'), ('UN', 'unused')")
        connection.execute("reset session_replication_role")
        connection.execute(f"insert into shard_{shard:04}.users (name, country_code) values ('u', 'LO')")
        failed = command("reference", "repair", **nodes.environment)
        assert failed.returncode == 1
        assert f"rows of shard_{shard:04}.users refer to a row of reference table countries" in failed.stderr
        assert {"LO", "UN"} <= set(nodes.codes("b"))
        connection.execute(f"delete from shard_{shard:04}.users where country_code = 'LO'")
    done = command("reference", "repair", **nodes.environment)
    assert done.returncode == 0, done.stderr
    assert nodes.codes("b") == nodes.codes("a")


def test_a_value_of_a_unique_column_that_another_row_has_is_repaired(nodes: Nodes) -> None:
    with nodes.connected("a") as connection:
        connection.execute(
            "create table shardids_ref.units (id int primary key, code text unique, more json)"
        )
        connection.execute("insert into shardids_ref.units values (2, 'm', '{}')")
    references.create_table(nodes.catalog, "units")
    with nodes.connected("b") as connection:
        connection.execute("set session_replication_role = replica")
        connection.execute("update shardids_ref.units set id = 1")
    assert [(one.node, one.error) for one in references.repair(nodes.catalog)] == [("b", "")]
    with nodes.connected("b") as connection:
        assert connection.execute("select id from shardids_ref.units").fetchall() == [(2,)]
    references.drop_table(nodes.catalog, "units")


def test_a_table_that_a_node_can_not_have_stops_no_other(nodes: Nodes) -> None:
    with nodes.connected("a") as connection:
        connection.execute("create type public.mood as enum ('low')")
        connection.execute("create table shardids_ref.moods (code public.mood primary key)")
        with pytest.raises(StatementFailed, match="mood"):
            references.create_table(nodes.catalog, "moods")
        connection.execute("insert into shardids_ref.moods values ('low')")
        nodes.write(Currency(code="SEK"))
        assert "SEK" in nodes.codes("c", "currencies")
        references.drop_table(nodes.catalog, "moods")
        connection.execute("drop type public.mood")


def test_a_table_with_an_interrupted_deletion_is_not_dropped(nodes: Nodes) -> None:
    with nodes.connected("a") as connection:
        connection.execute("create table shardids_ref.units (code text primary key)")
        references.create_table(nodes.catalog, "units")
        connection.execute(
            "insert into shardids_catalog.reference_deletion (table_name, key)"
            " values ('units', '{\"code\": \"m\"}')"
        )
    with pytest.raises(ClusterConflict, match="deletion of a row of reference table units"):
        references.drop_table(nodes.catalog, "units")
    references.repair(nodes.catalog)
    references.drop_table(nodes.catalog, "units")


# Migrations, doctor.


def test_a_revision_for_the_node_changes_a_table_on_the_writer_last(
    nodes: Nodes, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDIDS_CATALOG", dsn(nodes.urls["a"]))
    monkeypatch.setenv("SHARDIDS_MIGRATIONS", str(tmp_path / "migrations"))
    for node in "abc":
        with nodes.connected(node) as connection:
            # As from version 15 on.
            connection.execute("revoke create on schema public from public")
    app = App(tmp_path / "migrations", nodes.urls["a"], capsys)
    app.add(
        "n_one",
        """
        op.add_column("countries", sa.Column("iso3", sa.Text), schema="shardids_ref")
        lot = sa.Column("lot", sa.Float, server_default=sa.text("random()"))
        op.add_column("countries", lot, schema="shardids_ref")
        """,
        more='branch_labels = ("node",)\n',
    )
    app.add(
        "s_one",
        """
        key = sa.ForeignKey("shardids_ref.countries.code")
        op.create_table("notes", key_column(), sa.Column("country", sa.String, key))
        """,
    )
    planned = app("up", "--dry-run", "--json").json
    of_nodes = [row["shards"] for row in planned if str(row["shards"]).startswith("node")]
    assert of_nodes == ["node b", "node c", "node a"]
    ran = app("up")
    assert ran.code == 0, ran.err
    # Each node made random numbers of its own.
    assert references.repair(nodes.catalog) == []
    with nodes.connected("a") as connection:
        connection.execute("update shardids_ref.countries set iso3 = 'DEU' where code = 'DE'")
    query = "select iso3, lot::text from shardids_ref.countries where code = 'DE'"
    with nodes.connected("a") as connection:
        there = connection.execute(query).fetchone()
    for node in "bc":
        with nodes.connected(node) as connection:
            wait_for(lambda c=connection: c.execute(query).fetchone() == there, "the column to arrive")


@pytest.mark.long
def test_the_doctor_finds_what_differs(nodes: Nodes) -> None:
    def found() -> list[tuple[str, tuple[str, ...]]]:
        report = doctor.examine(nodes.catalog)
        about = ("reference-", "leftover-", "foreign-")
        return [(one.check, one.nodes) for one in report.findings if one.check.startswith(about)]

    assert found() == []
    with nodes.connected("b") as connection:
        connection.execute("set session_replication_role = replica")
        connection.execute("insert into shardids_ref.currencies values ('XXX')")
        connection.execute("alter table shardids_ref.currencies disable trigger shardids_reference")
    with nodes.connected("c") as connection:
        (name,) = connection.execute(
            "select subname from pg_subscription where subdbid = shardids.database()"
        ).fetchone()
        connection.execute(f"alter subscription {name} disable")
    assert sorted(found()) == [
        ("reference-differs", ("b",)),
        ("reference-not-followed", ("c",)),
        ("reference-unguarded", ("b",)),
    ]
    with nodes.connected("a") as connection:
        connection.execute("alter table shardids_ref.countries disable trigger shardids_reference_key")
    assert ("reference-unguarded", ("a",)) in found()
    references.create_table(nodes.catalog, "countries")
    references.create_table(nodes.catalog, "currencies")
    wait_for(lambda: found() == [], "the doctor to be content")


# Definitions.


def test_a_model_with_something_of_a_shard_is_refused() -> None:
    def define(**columns: Any) -> None:
        base = type("Base", (DeclarativeBase,), {})
        type("Odd", (base,), {"__tablename__": "odd", "__table_args__": reference_table(), **columns})

    with pytest.raises(
        BadArgument, match=r"foreign key from column user_id to users\.id, which is a shard's"
    ):
        define(
            code=mapped_column(Integer, primary_key=True),
            user_id=mapped_column(BigInteger, ForeignKey("users.id")),
        )
    with pytest.raises(BadArgument, match="has IDs of a shard in column id"):
        define(id=primary_key())
    with pytest.raises(BadArgument, match="has the sharding key name"):
        define(code=mapped_column(Integer, primary_key=True), name=sharding_key(String))


def test_create_all_does_not_make_them(nodes: Nodes) -> None:
    class Other(DeclarativeBase):
        pass

    class Planet(Other):
        __tablename__ = "planets"
        __table_args__ = reference_table()
        id: Mapped[int] = mapped_column(primary_key=True)

    with (
        nodes.cluster.at(shard=0).engine.begin() as connection,
        pytest.raises(BadArgument, match="planets is not made with the tables of a shard"),
    ):
        Other.metadata.create_all(connection)


def test_a_server_without_logical_replication_is_refused() -> None:
    with temporary_server(settings={"wal_level": "replica"}) as server:
        urls = {name: database(server, f"node_{name}") for name in "ab"}
        found_cluster(urls["a"], urls, 2)
        catalog = Catalog(dsn(urls["a"]))
        with psycopg.connect(dsn(urls["a"]), autocommit=True) as connection:
            connection.execute("create table shardids_ref.t (n int primary key)")
        with pytest.raises(
            ClusterConflict, match="wal_level = replica: alter system set wal_level = logical"
        ):
            references.create_table(catalog, "t", writer="a")
        assert references.tables(catalog) == []
        repaired = command("reference", "repair", SHARDIDS_CATALOG=dsn(urls["a"]))
        assert repaired.stdout.startswith("No reference table yet."), repaired.stderr
        catalog.close()
