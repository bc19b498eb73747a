"""Moving the rows of one key to another shard while they are written to."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy import BigInteger, ForeignKey, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import shardids
from shardids import mover, tenants
from shardids.catalog.leases import OnBusy
from shardids.errors import ClusterConflict, KeyMoved, MoveRefused, RowsUnsettled, ShardBusy
from shardids.pg.embedded import temporary_servers
from shardids.replication.steps import Event, StepBegun, StepDone
from shardids.tables.views import refresh_query_node
from tests.support.clusters import command_here
from tests.support.lengths import long
from tests.support.moves import TwoNodes, schema, two_nodes
from tests.support.tenants import (
    CHOICES,
    QUICK,
    TenantWriters,
    assert_once,
    home,
    make_tables,
    neighbour_in,
    new_tenant,
    other_shard,
    rows_of,
)

SHARDS = 6


class Base(DeclarativeBase):
    pass


class Tenant(Base):
    __tablename__ = "tenants"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    name: Mapped[str]


class User(Base):
    __tablename__ = "users"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    tenant_id: Mapped[int] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str]


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, SHARDS)
        make_tables(nodes, SHARDS)
        refresh_query_node(nodes.catalog)
        yield nodes
        nodes.catalog.close()


@pytest.fixture(autouse=True)
def _each_alone(nodes: TwoNodes) -> Iterator[None]:
    """A test that fails in a move leaves none to the next."""
    yield
    for move in tenants.open_key_moves(nodes.catalog):
        tenants.abort(nodes.catalog, move.key, options=QUICK)


def test_all_rows_of_a_key_arrive_and_no_others(nodes: TwoNodes) -> None:
    name = "whale"
    tenant, source, target = new_tenant(nodes, name), home(nodes, name), other_shard(nodes, name)
    neighbour = neighbour_in(nodes, source)
    other = new_tenant(nodes, neighbour)
    before, others = rows_of(nodes, source, tenant), rows_of(nodes, source, other)
    planned = tenants.plan(nodes.catalog, name, target, CHOICES)
    assert dict(planned.rows) == {"tenants": 1, "users": 20, "photos": 60}
    assert rows_of(nodes, source, tenant) == before
    done = tenants.move(nodes.catalog, name, target, CHOICES, options=QUICK)
    assert (done.source, done.target, done.outcome) == (source, target, "moved")
    assert dict(done.rows) == dict(planned.rows)
    assert done.stale_views == ()
    assert home(nodes, name) == target
    assert rows_of(nodes, target, tenant) == before
    assert rows_of(nodes, source, other) == others
    assert_once(nodes, name, tenant)
    assert_once(nodes, neighbour, other)
    assert nodes.catalog.placement().unsettled == frozenset()
    with nodes.connected(nodes.catalog.node_of(source).name) as connection:
        left = connection.execute(
            """select count(*) from pg_proc where proname like 'key_note%'
               union all select count(*) from shardids.key_change
               union all select count(*) from pg_class where relname like 'key_gate%'
               union all select count(*) from shardids.lease"""
        ).fetchall()
        assert [count for (count,) in left] == [0] * 4
        s = schema(source)
        for statement in (
            f"insert into {s}.tenants (id, name) values ({tenant}, 'whale')",
            f"insert into {s}.users (tenant_id, name) values ({tenant}, 'late')",
        ):
            with pytest.raises(psycopg.Error, match=f"has moved to shard {target}") as refused:
                connection.execute(statement)
            assert refused.value.sqlstate == "SI017"
            assert refused.value.diag.message_detail == f"shard {target}"
        # Others go on.
        connection.execute(f"insert into {s}.users (tenant_id, name) values ({other}, 'new')")


def test_clients_find_the_key_and_its_ids(nodes: TwoNodes) -> None:
    name = "found"
    tenant, source, target = new_tenant(nodes, name), home(nodes, name), other_shard(nodes, name)
    users = [row[0] for row in rows_of(nodes, source, tenant)["users"]]
    with shardids.Cluster.connect(nodes.catalog_url) as cluster:
        assert cluster.at(key=name).number == source
        tenants.move(nodes.catalog, name, target, CHOICES, options=QUICK)
        cluster.refresh()
        assert cluster.at(key=name).number == target
        assert {cluster.at(id=user).number for user in (*users, tenant)} == {target}
        assert cluster.at(key=name).run(lambda session: session.get(User, users[0])) is not None


def test_writers_lose_nothing_there_and_back(nodes: TwoNodes) -> None:
    name = "written"
    tenant, source, target = new_tenant(nodes, name), home(nodes, name), other_shard(nodes, name)
    with TenantWriters(nodes, name, tenant, every_s=0.002) as writers:
        time.sleep(0.2)
        there = tenants.move(nodes.catalog, name, target, CHOICES, options=QUICK)
        time.sleep(0.2)
        back = tenants.move(nodes.catalog, name, options=QUICK, back=True)
        time.sleep(0.2)
    assert home(nodes, name) == source
    assert_once(nodes, name, tenant, writers)
    assert all(one.refusals <= {"SI017"} for one in writers.written)
    assert there.pause_ms is not None
    assert there.pause_ms < 1000
    assert back.pause_ms is not None
    assert back.pause_ms < 1000
    assert max(max(one.pauses_s) for one in writers.written) < 1.5
    with nodes.connected(nodes.catalog.node_of(source).name) as connection:
        left = connection.execute(
            "select tgname from pg_trigger where tgrelid = %s::regclass and tgname like 'shardids_key_%%'"
            " and pg_get_triggerdef(oid) like %s",
            [f"{schema(source)}.users", f"%{tenant}%"],
        ).fetchall()
        assert left == []
        # What had been refused is taken again.
        connection.execute(f"insert into {schema(source)}.users (tenant_id, name) values ({tenant}, 'again')")


def test_statements_over_several_shards_see_each_row_once_or_are_refused(nodes: TwoNodes) -> None:
    name = "seen once"
    tenant, target = new_tenant(nodes, name), other_shard(nodes, name)
    seen: list[object] = []
    by_views: list[object] = []
    stop = threading.Event()

    def ask() -> None:
        with shardids.Cluster.connect(nodes.catalog_url) as cluster:
            while not stop.is_set():
                try:
                    with cluster.sharded_session() as session:
                        found = session.scalars(select(User.id).where(User.tenant_id == tenant)).all()
                    seen.append(len(found) == len(set(found)) == 20)
                except RowsUnsettled as refused:
                    seen.append(str(refused).splitlines()[1].partition(".")[0])

    def ask_views() -> None:
        with nodes.connected("a") as connection:
            while not stop.is_set():
                try:
                    (count,) = connection.execute(
                        "select count(*) from shardids_query.users where tenant_id = %s", [tenant]
                    ).fetchone()
                    by_views.append(count)
                except psycopg.Error as error:
                    by_views.append("again in a moment" in str(error))

    threads = [threading.Thread(target=ask), threading.Thread(target=ask_views)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.5)
        done = tenants.move(nodes.catalog, name, target, CHOICES, options=QUICK)
        time.sleep(0.5)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert set(seen) == {True, "Again in a moment"}
    assert set(by_views) == {20, True}
    assert seen[-1] is True
    assert by_views[-1] == 20
    assert done.unsettled_ms is not None
    assert done.unsettled_ms > 2 * QUICK.settle_s * 1000


def test_rows_are_refused_while_they_are_on_their_way(nodes: TwoNodes) -> None:
    """A table is not emptied, and a row that others hang on does not change its key."""
    name = "on its way"
    tenant, source, target = new_tenant(nodes, name), home(nodes, name), other_shard(nodes, name)
    neighbour = neighbour_in(nodes, source)
    other = new_tenant(nodes, neighbour)
    s, said = schema(source), []

    def interfere(event: Event) -> None:
        if isinstance(event, StepBegun) and event.step == "announce":
            with nodes.connected(nodes.catalog.node_of(source).name) as connection:
                for statement in (
                    f"truncate {s}.photos",
                    f"update {s}.users set tenant_id = {other}, name = 'other'"
                    f" where tenant_id = {tenant} and name = 'user 1'",
                ):
                    with pytest.raises(psycopg.Error, match="being moved") as refused:
                        connection.execute(statement)
                    said.append(refused.value.sqlstate)
            with pytest.raises(ShardBusy, match="tenant move by"):
                mover.move(
                    nodes.catalog,
                    source,
                    nodes.catalog.node_of(target).name,
                    options=mover.Options(on_busy=OnBusy.SKIP),
                )
            with pytest.raises(ClusterConflict, match="is being moved by another process"):
                tenants.move(nodes.catalog, name, target, CHOICES)

    tenants.move(nodes.catalog, name, target, CHOICES, options=QUICK, on_event=interfere)
    assert said == ["SI008", "SI008"]
    assert_once(nodes, name, tenant)


@pytest.mark.parametrize("step", [long("guard"), long("copy"), "announce"])
def test_an_interrupted_move_is_undone(nodes: TwoNodes, step: str) -> None:
    name = f"undone {step}"
    tenant, source, target = new_tenant(nodes, name), home(nodes, name), other_shard(nodes, name)
    before = rows_of(nodes, source, tenant)

    def stop(event: Event) -> None:
        if event == StepDone(step=step):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tenants.move(nodes.catalog, name, target, CHOICES, options=QUICK, on_event=stop)
    with pytest.raises(ClusterConflict, match="was interrupted at step"):
        tenants.move(nodes.catalog, name, target, CHOICES)
    assert tenants.abort(nodes.catalog, name, options=QUICK).outcome == "aborted"
    assert home(nodes, name) == source
    assert rows_of(nodes, source, tenant) == before
    assert_once(nodes, name, tenant)
    assert nodes.catalog.placement().unsettled == frozenset()
    with nodes.connected(nodes.catalog.node_of(source).name) as connection:
        connection.execute(f"insert into {schema(source)}.users (tenant_id, name) values ({tenant}, 'on')")
        assert connection.execute("select count(*) from shardids.lease").fetchone() == (0,)


@pytest.mark.parametrize("step", [long("copy"), "switch", long("settle"), long("remove")])
def test_an_interrupted_move_is_resumed(nodes: TwoNodes, step: str) -> None:
    name = f"resumed {step}"
    tenant, target = new_tenant(nodes, name), other_shard(nodes, name)

    def stop(event: Event) -> None:
        if event == StepDone(step=step):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tenants.move(nodes.catalog, name, target, CHOICES, options=QUICK, on_event=stop)
    how = tenants.resume if step in ("copy", "settle") else tenants.abort
    assert how(nodes.catalog, name, options=QUICK).outcome == "moved"
    assert home(nodes, name) == target
    assert assert_once(nodes, name, tenant) == 81
    with pytest.raises(ClusterConflict, match="no move of key"):
        tenants.resume(nodes.catalog, name)


REFUSED = {
    "a key without rows": ("", "has no row in the root"),
    "a table without a path": (
        "create table {s}.notes (id bigint primary key, body text)",
        "1 tables .* notes",
    ),
    "no primary key": (
        "create table {s}.visits (tenant_id bigint references {s}.tenants)",
        "table visits has no primary key",
    ),
    "an odd primary key": (
        "create table {s}.visits (tenant_id bigint references {s}.tenants, at timestamptz primary key)",
        "table visits has columns of types",
    ),
    "a partitioned table": (
        "create table {s}.visits (id bigint primary key, tenant_id bigint references {s}.tenants)"
        " partition by hash (id)",
        "table visits is partitioned",
    ),
    "a trigger that fires on arrival": (
        "create function {s}.touch() returns trigger language plpgsql as 'begin return new; end';"
        " create trigger touched before insert on {s}.users for each row execute function {s}.touch()",
        "touched of table users would run",
    ),
    "a row that refers to another tenant's": (
        "create table {s}.follows (id bigint primary key, tenant_id bigint not null references {s}.tenants,"
        " photo_id bigint references {s}.photos);"
        " insert into {s}.follows select 1, t.id, p.id from {s}.tenants t, {s}.photos p"
        " join {s}.users u on u.id = p.user_id where t.name = '{name}' and u.tenant_id <> t.id limit 1",
        "1 rows of table follows of .* refer by .* to rows of another key in photos",
    ),
    "a table of another schema": (
        "create table public.bills (id bigint primary key, tenant_id bigint references {s}.tenants)",
        "table .*bills.* is in another schema",
    ),
    "foreign keys in a circle": (
        "alter table {s}.tenants add owner_id bigint references {s}.users",
        "go round in a circle",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_moved_is_refused_by_name(nodes: TwoNodes, case: str) -> None:
    definition, said = REFUSED[case]
    name = f"refused {list(REFUSED).index(case)}"
    source, target = home(nodes, name), other_shard(nodes, name)
    new_tenant(nodes, neighbour_in(nodes, source))
    if case != "a key without rows":
        new_tenant(nodes, name)
    every = {source, target}
    try:
        for shard in every:
            with nodes.connected(nodes.catalog.node_of(shard).name) as connection:
                connection.execute(
                    definition.replace("{s}", schema(shard)).replace("{name}", name)
                    if definition
                    else "select"
                )
        for attempt in (tenants.plan, tenants.move):
            with pytest.raises(MoveRefused, match=said):
                attempt(nodes.catalog, name, target, CHOICES)
    finally:
        for shard in every:
            with nodes.connected(nodes.catalog.node_of(shard).name) as connection:
                s = schema(shard)
                connection.execute(
                    f"drop table if exists {s}.notes, {s}.visits, {s}.follows, public.bills;"
                    f" alter table {s}.tenants drop column if exists owner_id;"
                    f" drop function if exists {s}.touch() cascade"
                )
    assert home(nodes, name) == source
    assert tenants.open_key_moves(nodes.catalog) == []


def test_a_prepared_transaction_is_waited_for_and_named(nodes: TwoNodes) -> None:
    """It has written rows of the key: the barrier is not closed before it has ended."""
    name = "prepared"
    tenant, source, target = new_tenant(nodes, name), home(nodes, name), other_shard(nodes, name)
    waits: list[str] = []
    with nodes.connected(nodes.catalog.node_of(source).name) as connection:

        def hold(event: Event) -> None:
            if event == StepDone(step="announce"):
                connection.execute("begin")
                connection.execute(
                    f"insert into {schema(source)}.users (tenant_id, name) values ({tenant}, 'kept')"
                )
                connection.execute("prepare transaction 'kept'")
            if isinstance(event, tenants.Waiting) and len(waits) < 2:
                waits.append(event.reason)
                if len(waits) == 2:
                    connection.execute("commit prepared 'kept'")

        tenants.move(nodes.catalog, name, target, CHOICES, options=QUICK, on_event=hold)
    assert waits == ["a transaction that has written rows of the key is still open"] * 2
    assert "kept" in {row[2] for row in rows_of(nodes, target, tenant)["users"]}
    assert_once(nodes, name, tenant)


def test_a_client_with_a_stale_route_is_sent_on(nodes: TwoNodes) -> None:
    name = "stale"
    tenant, source, target = new_tenant(nodes, name), home(nodes, name), other_shard(nodes, name)
    with shardids.Cluster.connect(nodes.catalog_url, listen=False) as cluster:
        assert cluster.at(key=name).number == source
        tenants.move(nodes.catalog, name, target, CHOICES, options=QUICK)

        def add(session: Session) -> None:
            session.add(User(tenant_id=tenant, name="by a stale route"))

        with pytest.raises(KeyMoved):
            cluster.at(shard=source).run(add)
        cluster.at(key=name).run(add)
    assert "by a stale route" in {row[2] for row in rows_of(nodes, target, tenant)["users"]}


def test_numbers_for_people_go_on_where_they_were(nodes: TwoNodes) -> None:
    name = "numbered"
    new_tenant(nodes, name)
    source, target = home(nodes, name), other_shard(nodes, name)

    def draw(shard: int) -> str:
        with nodes.connected(nodes.catalog.node_of(shard).name) as connection:
            query = f"select {schema(shard)}.next_number(%s, 'order', '2026-11-22 12:00Z')"
            return str(connection.execute(query, [name]).fetchone()[0])

    define = "select shardids.define_counter(%s, kind => 'order', per => 'day')"
    with nodes.connected(nodes.catalog.node_of(source).name) as connection:
        connection.execute(define, [source])
    assert draw(source) == "numbered-2026-11-22-0001"
    with pytest.raises(MoveRefused, match="lacks 3 tables with rows of the key: shardids_counter"):
        tenants.move(nodes.catalog, name, target, CHOICES)
    with nodes.connected(nodes.catalog.node_of(target).name) as connection:
        connection.execute(define, [target])
    tenants.move(nodes.catalog, name, target, CHOICES, options=QUICK)
    assert draw(target) == "numbered-2026-11-22-0002"
    with pytest.raises(psycopg.Error, match=f"has moved to shard {target}"):
        draw(source)


def said(*arguments: str) -> str:
    ran = command_here(*arguments)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_command(nodes: TwoNodes) -> None:
    name = "by hand"
    tenant, source, target = new_tenant(nodes, name), home(nodes, name), other_shard(nodes, name)
    common = ["tenant", "move", name, "--to-shard", str(target), "--root", "tenants.name"]
    url = ["--catalog", nodes.catalog_url]
    planned = said(*common, "--dry-run", *url)
    assert f"81 rows of text key 'by hand' would move from shard {source}" in planned.replace("\n", " ")
    assert_once(nodes, name, tenant)
    assert home(nodes, name) == source
    moved = said(*common, "--settle", "200ms", *url)
    assert f"key 'by hand' lives in shard {target}, 81 rows" in moved
    assert "moved" in said("tenant", "move", name, "--list", *url)
    assert f"lives in shard {source}" in said("tenant", "move", name, "--back", "--settle", "200ms", *url)
    assert_once(nodes, name, tenant)
