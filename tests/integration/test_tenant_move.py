"""Moving the rows of one key to another shard while they are written to."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager

import psycopg
import pytest
from sqlalchemy import BigInteger, ForeignKey, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import shardids
from shardids import mover, tenants
from shardids.catalog.leases import OnBusy
from shardids.catalog.nodes import Nodes
from shardids.errors import (
    BadArgument,
    ClusterConflict,
    KeyMoved,
    MoveFailed,
    MoveRefused,
    RowsUnsettled,
    ShardBusy,
)
from shardids.pg.embedded import temporary_servers
from shardids.replication.steps import Event, StepBegun, StepDone
from shardids.tables.views import refresh_query_node
from shardids.tenants import leaving
from shardids.tenants.examining import examine
from shardids.tenants.family import read_family
from shardids.watch import doctor
from shardids.watch.facts.glance import at_a_glance
from shardids.watch.facts.reading import Asker
from tests.support.clusters import command_here
from tests.support.lengths import long, sampled
from tests.support.moves import TwoNodes, schema, two_nodes
from tests.support.tenants import (
    CHOICES,
    QUICK,
    TenantWriters,
    abort_open,
    ask,
    assert_once,
    home,
    lose_switch,
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
    abort_open(nodes)


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
            f"insert into {s}.tenants (name) values ('whale')",
            f"update {s}.tenants set name = 'whale' where id = {other}",
            f"insert into {s}.users (tenant_id, name) values ({tenant}, 'late')",
        ):
            with pytest.raises(psycopg.Error, match=f"has moved to shard {target}") as refused:
                connection.execute(statement)
            assert refused.value.sqlstate == "SI017"
            assert refused.value.diag.message_detail == f"shard {target}"
        # Others go on.
        connection.execute(f"insert into {s}.users (tenant_id, name) values ({other}, 'new')")


def test_rows_are_removed_over_several_searches(nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "_FOUND", 30)
    monkeypatch.setattr(leaving, "_BATCH", 7)
    name = "many"
    tenant, target = new_tenant(nodes, name), other_shard(nodes, name)
    node = nodes.catalog.node_of(home(nodes, name)).name
    notes = []

    def count(event: Event) -> None:
        if event == StepDone(step="settle"):
            with nodes.connected(node) as connection:
                notes.extend(connection.execute("select count(*) from shardids.key_change").fetchone())
                connection.execute(
                    "create table public.noted as select 1 from shardids.key_change where false;"
                    " create function public.note() returns trigger language plpgsql security definer as"
                    " 'begin insert into public.noted values (1); return null; end';"
                    " create trigger noted after insert on shardids.key_change for each row"
                    " execute function public.note()"
                )
        if event == StepDone(step="remove"):
            with nodes.connected(node) as connection:
                notes.extend(connection.execute("select count(*) from public.noted").fetchone())
                connection.execute(
                    "drop trigger noted on shardids.key_change; drop function public.note();"
                    " drop table public.noted"
                )

    tenants.move(nodes.catalog, name, target, CHOICES, options=QUICK, on_event=count)
    assert notes == [0, 0]
    assert assert_once(nodes, name, tenant) == 81


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

    with pytest.raises(KeyboardInterrupt) as interrupted:
        tenants.move(nodes.catalog, name, target, CHOICES, options=QUICK, on_event=stop)
    assert interrupted.value.__notes__ == [
        f"Interrupted at step \"{step}\". Go on: shardids tenant move '{name}' --resume;"
        f" undo: shardids tenant move '{name}' --abort"
    ]
    with pytest.raises(ClusterConflict, match="was interrupted at step") as refused:
        tenants.move(nodes.catalog, name, target, CHOICES)
    assert refused.value.hint is not None
    assert f"shardids tenant move '{name}' --resume" in refused.value.hint
    with pytest.raises(ShardBusy, match=f"interrupted move of key '{name}'") as busy:
        mover.move(nodes.catalog, source, nodes.catalog.node_of(target).name)
    assert busy.value.hint is not None
    assert f"shardids tenant move '{name}' --resume, or --abort" in busy.value.hint
    (found,) = doctor.examine(nodes.catalog, ["move-interrupted"]).findings
    assert f"the move of key '{name}' from shard {source} to {target} was interrupted in step" in found.what
    assert ("statements over several shards are refused" in found.what) == (step == "announce")
    assert [one.text for one in found.commands] == [f"shardids tenant move '{name}' --resume"]
    with closing(Asker(nodes.catalog_url)) as asker:
        reading = asker.read()
    assert reading.known is not None
    glanced = doctor.glance(at_a_glance(reading.known, reading.nodes, time.time()))
    assert [one for one in glanced if one.check == "move-interrupted"] == [found]
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
        "table notes has no path to the key",
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
    "a column that may refer to large objects": (
        "alter table {s}.photos add scan oid; select lo_create(0)",
        "column scan of table photos may refer to large objects, which stay",
    ),
    "foreign keys in a circle": (
        "alter table {s}.tenants add owner_id bigint references {s}.users",
        "go round in a circle",
    ),
    "a foreign key by the equality of an extension": (
        "create extension if not exists citext;"
        " create table {s}.teams (id bigint primary key, tenant_id bigint not null references {s}.tenants,"
        " code citext unique); create table {s}.members (id bigint primary key,"
        " team_code citext references {s}.teams (code) on delete cascade)",
        "members_team_code_fkey of table .*members does not compare by PostgreSQL's own equality",
    ),
    "a further foreign key by the equality of an extension": (
        "create extension if not exists citext;"
        " create table {s}.teams (id bigint primary key, tenant_id bigint not null references {s}.tenants,"
        " code citext unique); create table {s}.members (id bigint primary key,"
        " tenant_id bigint not null references {s}.tenants,"
        " team_code citext references {s}.teams (code) on delete cascade)",
        "members_team_code_fkey of table .*members does not compare by PostgreSQL's own equality",
    ),
    "a foreign key on the path that is not valid": (
        "create table {s}.likes (id bigint primary key, user_id bigint not null);"
        " alter table {s}.likes add constraint liker foreign key (user_id) references {s}.users not valid",
        "foreign key liker of table .*likes, on the path to the key, is not enforced or not valid",
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
                    f"drop table if exists {s}.notes, {s}.visits, {s}.follows, {s}.members, {s}.teams,"
                    f" {s}.likes, public.bills;"
                    f" alter table {s}.tenants drop column if exists owner_id;"
                    f" alter table {s}.photos drop column if exists scan;"
                    f" select lo_unlink(oid) from pg_largeobject_metadata;"
                    f" drop function if exists {s}.touch() cascade"
                )
    assert home(nodes, name) == source
    assert tenants.open_key_moves(nodes.catalog) == []


def test_references_to_tables_of_every_node_hold_in_the_new_shard(nodes: TwoNodes) -> None:
    """A value that the target's node lacks is refused by the constraint, and named; the key stays."""
    name = "referring"
    tenant, source, target = new_tenant(nodes, name), home(nodes, name), other_shard(nodes, name)
    ends = {shard: nodes.catalog.node_of(shard).name for shard in (source, target)}
    for shard, node in ends.items():
        with nodes.connected(node) as connection:
            connection.execute(
                "create table public.countries (code text primary key);"
                " insert into public.countries values ('at');"
                f" alter table {schema(shard)}.users add country text references public.countries"
            )
    try:
        with nodes.connected(ends[source]) as connection:
            connection.execute("insert into public.countries values ('de')")
            change = f"update {schema(source)}.users set country = %s where tenant_id = %s"
            connection.execute(change, ["de", tenant])
        with pytest.raises(MoveFailed, match=r"rows of table users can't arrive .* foreign key constraint"):
            tenants.move(nodes.catalog, name, target, CHOICES, options=QUICK)
        tenants.abort(nodes.catalog, name, options=QUICK)
        with nodes.connected(ends[source]) as connection:
            connection.execute(change, ["at", tenant])
        tenants.move(nodes.catalog, name, target, CHOICES, options=QUICK)
        assert {row[-1] for row in rows_of(nodes, target, tenant)["users"]} == {"at"}
        with nodes.connected(ends[target]) as connection, pytest.raises(psycopg.errors.ForeignKeyViolation):
            connection.execute(f"update {schema(target)}.users set country = 'xx' where tenant_id = {tenant}")
    finally:
        for shard, node in ends.items():
            with nodes.connected(node) as connection:
                connection.execute(f"alter table {schema(shard)}.users drop column if exists country")
                connection.execute("drop table if exists public.countries")


@pytest.mark.parametrize("is_forced", [False, True])
def test_rows_behind_row_security_come_along_or_are_refused(nodes: TwoNodes, is_forced: bool) -> None:
    """A role that sees all rows takes them along; one that a policy binds would leave some."""
    name = f"secured {is_forced}"
    tenant, source, target = new_tenant(nodes, name), home(nodes, name), other_shard(nodes, name)
    before = rows_of(nodes, source, tenant)
    s = schema(source)
    every = [f"{schema(one)}.users" for one in (source, target)]

    def secure(how: str) -> None:
        for shard, table in zip((source, target), every, strict=True):
            with nodes.connected(nodes.catalog.node_of(shard).name) as connection:
                connection.execute(how.format(table=table))

    forced = "alter table {table} force row level security;" if is_forced else ""
    secure("alter table {table} enable row level security;" + forced)
    try:
        with nodes.connected(nodes.catalog.node_of(source).name) as connection:
            connection.execute("create role owner_of_tables")
            connection.execute(f"grant usage on schema {s}, shardids to owner_of_tables")
            connection.execute(f"grant select on all tables in schema {s} to owner_of_tables")
            (owner,) = connection.execute("select current_user").fetchone()
            connection.execute(f"alter table {s}.users owner to owner_of_tables")
        node = nodes.catalog.node_of(source)
        with Nodes({node.name: node}, nodes.catalog.url) as there, there[node.name].begin() as connection:
            connection.exec_driver_sql("set local role owner_of_tables")
            family = read_family(connection, s, name, CHOICES)
            said = [refusal.reason for refusal in examine(family, connection, None)]
        hidden = "row security hides rows of users from the role that moves them"
        assert (hidden in said) == is_forced
        trusting = tenants.Options(settle_s=QUICK.settle_s, trusted=("owner_of_tables",))
        assert dict(tenants.move(nodes.catalog, name, target, CHOICES, options=trusting).rows)["users"] == 20
        assert rows_of(nodes, target, tenant) == before
        assert_once(nodes, name, tenant)
    finally:
        secure("alter table {table} disable row level security, no force row level security")
        with nodes.connected(nodes.catalog.node_of(source).name) as connection:
            connection.execute(f"alter table {s}.users owner to {owner}")
            connection.execute("drop owned by owner_of_tables; drop role owner_of_tables")


def test_a_table_that_a_shard_lacks_is_named_with_its_schema(nodes: TwoNodes) -> None:
    target = other_shard(nodes, "nobody")
    for choices in (tenants.Choices(root="customers.name"), tenants.Choices(root="tenants", loose=("nope",))):
        with pytest.raises(BadArgument, match=f"schema {schema(target)} has no table (customers|nope)"):
            tenants.plan(nodes.catalog, "nobody", target, choices)


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


def in_shards(nodes: TwoNodes, shards: Iterable[int], statements: str) -> None:
    for shard in shards:
        with nodes.connected(nodes.catalog.node_of(shard).name) as connection:
            connection.execute(statements.replace("{s}", schema(shard)).replace("{n}", str(shard)))


@contextmanager
def also(nodes: TwoNodes, tables: str, removal: str) -> Iterator[None]:
    """More tables in every shard."""
    in_shards(nodes, range(SHARDS), tables)
    try:
        yield
    finally:
        for move in tenants.open_key_moves(nodes.catalog):
            tenants.abort(nodes.catalog, move.key, options=QUICK)
        in_shards(nodes, range(SHARDS), removal)


def test_a_numeric_primary_key_keeps_all_its_digits(nodes: TwoNodes) -> None:
    name, digits = "digits", "12345678901234567890.1"
    tenant, source, target = new_tenant(nodes, name), home(nodes, name), other_shard(nodes, name)
    tables = (
        "create table {s}.sums (id numeric primary key, tenant_id bigint references {s}.tenants, body text)"
    )

    def write(event: Event) -> None:
        if event == StepDone(step="copy"):
            in_shards(
                nodes,
                [source],
                f"update {{s}}.sums set body = 'changed' where id = {digits}2;"
                f" insert into {{s}}.sums values ({digits}7, {tenant}, 'new');"
                f" delete from {{s}}.sums where id = {digits}5",
            )

    with also(nodes, tables, "drop table {s}.sums"):
        in_shards(
            nodes,
            [source],
            f"insert into {{s}}.sums select n::numeric, {tenant}, 'old'"
            f" from unnest(array['{digits}2', '{digits}5']) n",
        )
        tenants.move(nodes.catalog, name, target, CHOICES, options=QUICK, on_event=write)
        with nodes.connected(nodes.catalog.node_of(target).name) as connection:
            found = connection.execute(
                f"select id::text, body from {schema(target)}.sums order by 1"
            ).fetchall()
    assert found == [(f"{digits}2", "changed"), (f"{digits}7", "new")]


def test_ids_of_every_key_column_lead_to_the_new_shard(nodes: TwoNodes) -> None:
    """Wherever they are from: a default, a function of the application, or the ORM."""
    name = "listed"
    tenant, source, target = new_tenant(nodes, name), home(nodes, name), other_shard(nodes, name)
    owner = "tenant_id bigint not null references {s}.tenants"
    tables = f"""
        create function {{s}}.make_key() returns bigint language sql as 'select {{s}}.next_id()';
        create table {{s}}.docs ({owner}, id bigint default {{s}}.next_id(), primary key (tenant_id, id));
        create table {{s}}.pages (id bigint primary key default {{s}}.make_key(), {owner});
        create table {{s}}.orm (id bigint primary key, {owner}, public bigint unique, number bigint,
                              unique (tenant_id, number));
        create table {{s}}.likes ({owner}, photo_id bigint, primary key (tenant_id, photo_id))"""
    with also(
        nodes, tables, "drop table {s}.docs, {s}.pages, {s}.orm, {s}.likes; drop function {s}.make_key"
    ):
        with nodes.connected(nodes.catalog.node_of(source).name) as connection:
            s = schema(source)
            of_others = [
                row[0] for row in connection.execute(f"select {s}.next_id() from generate_series(1, 2)")
            ]
            connection.execute(
                f"insert into {s}.docs values ({tenant}); insert into {s}.pages values (default, {tenant})"
            )
            connection.execute(f"insert into {s}.orm values ({s}.next_id(), {tenant}, {s}.next_id(), 7)")
            connection.execute(f"insert into {s}.orm values ({s}.next_id(), {tenant}, null, 8)")
            ids = [
                row[0]
                for row in connection.execute(
                    f"select id from {s}.docs union all select id from {s}.pages"
                    f" union all select id from {s}.orm union all select public from {s}.orm where public > 0"
                )
            ]
            connection.execute(f"insert into {s}.likes values ({tenant}, %s), ({tenant}, 3)", [of_others[0]])
        with pytest.raises(
            MoveRefused, match="column photo_id of table likes has 1 values that may"
        ) as refused:
            tenants.move(nodes.catalog, name, target, CHOICES, options=QUICK)
        assert "--refers likes.photo_id" in str(refused.value.hint)
        choices = tenants.Choices(root="tenants.name", refers=("likes.photo_id",))

        def write(event: Event) -> None:
            if event == StepDone(step="copy"):
                with nodes.connected(nodes.catalog.node_of(source).name) as connection:
                    query = f"insert into {s}.orm values ({s}.next_id(), {tenant}, {s}.next_id())"
                    ids.extend(connection.execute(f"{query} returning id, public").fetchone())

        tenants.move(nodes.catalog, name, target, choices, options=QUICK, on_event=write)
        with shardids.Cluster.connect(nodes.catalog_url) as cluster:
            assert len(ids) == 7
            assert {cluster.at(id=one).number for one in ids} == {target}
            assert {cluster.at(id=one).number for one in of_others} == {source}
        with nodes.catalog.engine.connect() as connection:
            lowest = connection.scalar(text("select min(lowest) from shardids_catalog.moved_key"))
            assert lowest > 1 << 32


def test_ids_of_another_type_are_refused(nodes: TwoNodes) -> None:
    name = "of another type"
    new_tenant(nodes, name)
    tables = (
        "create table {s}.docs (id numeric primary key default {s}.next_id(),"
        " tenant_id bigint references {s}.tenants)"
    )
    with (
        also(nodes, tables, "drop table {s}.docs"),
        pytest.raises(
            MoveRefused, match="column id of table docs draws IDs of the cluster and is not bigint"
        ),
    ):
        tenants.move(nodes.catalog, name, other_shard(nodes, name), CHOICES, options=QUICK)


def test_a_key_that_comes_back_is_refused_by_no_table(nodes: TwoNodes) -> None:
    """Nor by one whose rows stay where they are this time."""
    name = "back without logs"
    tenant, source, target = new_tenant(nodes, name), home(nodes, name), other_shard(nodes, name)
    tables = "create table {s}.logs (id bigint primary key default {s}.next_id(), tenant_id bigint)"
    add = f"insert into {{s}}.logs (tenant_id) values ({tenant})"
    with also(nodes, tables, "drop table {s}.logs"):
        with_logs = tenants.Choices(root="tenants.name", keys=("logs.tenant_id",))
        tenants.move(nodes.catalog, name, target, with_logs, options=QUICK)
        with pytest.raises(psycopg.Error, match=f"has moved to shard {target}"):
            ask(nodes, source, add)
        without = tenants.Choices(root="tenants.name", loose=("logs",))
        tenants.move(nodes.catalog, name, source, without, options=QUICK)
        ask(nodes, source, add)
    left = f"select count(*) from pg_trigger where tgname ~ '^shardids_key_' and tgargs like '%{name}%'"
    assert ask(nodes, source, left) == [(0,)]


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


def test_numbers_by_the_root_s_primary_key_go_on_where_they_were(nodes: TwoNodes) -> None:
    name = "numbered by id"
    tenant, source, target = new_tenant(nodes, name), home(nodes, name), other_shard(nodes, name)
    define = "select shardids.define_counter({n}, kind => 'bill', per => 'never')"
    in_shards(nodes, range(SHARDS), define)

    def draw(shard: int, whose: object) -> str:
        with nodes.connected(nodes.catalog.node_of(shard).name) as connection:
            query = f"select {schema(shard)}.next_number(%s, 'bill')"
            return str(connection.execute(query, [str(whose)]).fetchone()[0])

    before = [draw(source, whose) for whose in (tenant, name, tenant)]
    draw(source, f"{name}/2026")
    with pytest.raises(
        MoveRefused, match=r"called after no row of tenants.*'numbered by id/2026'"
    ) as refused:
        tenants.move(nodes.catalog, name, target, CHOICES, options=QUICK)
    assert "--loose shardids_counter" in str(refused.value.hint)
    choices = tenants.Choices(root="tenants.name", loose=("shardids_counter",))
    in_shards(nodes, [source], f"insert into {{s}}.tenants (name) values ('{tenant}')")
    with pytest.raises(MoveRefused, match=f"counters called '{tenant}', '{name}' may be those of key"):
        tenants.move(nodes.catalog, name, target, choices, options=QUICK)
    in_shards(nodes, [source], f"delete from {{s}}.tenants where name = '{tenant}'")
    tenants.move(nodes.catalog, name, target, choices, options=QUICK)
    after = [draw(target, whose) for whose in (tenant, name, tenant)]
    assert len({*before, *after}) == 6
    in_shards(nodes, [source], f"delete from {{s}}.shardids_counter where tenant = '{name}/2026'")
    for whose in (tenant, name):
        with pytest.raises(psycopg.Error, match=f"has moved to shard {target}"):
            draw(source, whose)


def test_a_move_that_ends_leaves_another_key_s_rows_hidden(nodes: TwoNodes) -> None:
    shards = nodes.catalog.placement().by_node()
    first, second = (neighbour_in(nodes, shard) for shard in shards["a"][:2])
    tenant = new_tenant(nodes, first)
    new_tenant(nodes, second)
    seen: list[object] = []

    def look() -> None:
        with nodes.connected("a") as connection:
            try:
                query = "select count(*) from shardids_query.users where tenant_id = %s"
                seen.extend(connection.execute(query, [tenant]).fetchone())
            except psycopg.Error as error:
                seen.append("again in a moment" in str(error))

    def move_second(event: Event) -> None:
        if event == StepBegun(step="settle"):
            done = tenants.move(nodes.catalog, second, shards["b"][1], CHOICES, options=QUICK)
            assert done.stale_views == ()
            look()

    done = tenants.move(nodes.catalog, first, shards["b"][0], CHOICES, options=QUICK, on_event=move_second)
    assert done.stale_views == ()
    look()
    assert seen == [True, 20]


def test_a_catalog_that_has_lost_a_switch_is_found(nodes: TwoNodes) -> None:
    """It was restored to a moment before, or its standby lacked it."""
    name = "restored"
    new_tenant(nodes, name)
    source, target = home(nodes, name), other_shard(nodes, name)
    with nodes.catalog.engine.connect() as connection:
        last = connection.scalar(text("select max(id) from shardids_catalog.key_move"))
    tenants.move(nodes.catalog, name, target, CHOICES, options=QUICK)
    assert doctor.examine(nodes.catalog, ["key-refused"]).findings == ()
    with nodes.catalog.engine.begin() as connection:
        for statement in (
            f"delete from shardids_catalog.key_home where key = '{name}'",
            f"update shardids_catalog.moved_key set shard = origin where key = '{name}'",
            f"delete from shardids_catalog.key_move where key = '{name}'",
            "select setval(pg_get_serial_sequence('shardids_catalog.key_move', 'id'),"
            f" {last or 1}, {last is not None})",
        ):
            connection.execute(text(statement))
    (found,) = doctor.examine(nodes.catalog, ["key-refused"]).findings
    assert found.shards == (source, target)
    assert f"key 'restored' lives in shard {source} by the directory of keys" in found.what
    # The number of the move that was forgotten is not given to another one.
    other = neighbour_in(nodes, source)
    new_tenant(nodes, other)
    tenants.move(nodes.catalog, other, target, CHOICES, options=QUICK)
    assert tenants.all_key_moves(nodes.catalog)[-1].id == (last or 0) + 2
    with nodes.connected(nodes.catalog.node_of(source).name) as connection:
        query = f"insert into {schema(source)}.tenants (name) values (%s)"
        for refused in (name, other):
            with pytest.raises(psycopg.Error, match=f"has moved to shard {target}"):
                connection.execute(query, [refused])
    for command in found.commands:
        with nodes.catalog.engine.begin() as connection:
            connection.execute(text(command.text))
    assert doctor.examine(nodes.catalog, ["key-refused"]).findings == ()
    assert home(nodes, name) == target


LOST = {
    "while rows were removed": None,
    "before they were": StepBegun(step="remove"),
    "when the move had ended": StepDone(step="clean"),
    "when they were": StepDone(step="remove"),
}


class Stop(BaseException):
    """The end of a mover, as by a kill."""


@pytest.mark.parametrize("when", sampled(LOST, 2))
def test_a_move_goes_on_whose_switch_the_catalog_has_lost(
    nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Its rows in the target are neither removed nor copied over, also those that were written since."""
    name = f"lost {when}"
    tenant, source, target = new_tenant(nodes, name), home(nodes, name), other_shard(nodes, name)
    ids = [row[0] for row in rows_of(nodes, source, tenant)["users"]]
    monkeypatch.setattr(leaving, "_BATCH", 7)
    removed: list[None] = []
    real = tenants.steps.Actions.has_arrived

    def write(event: Event) -> None:
        if event == StepDone(step="settle"):
            ask(nodes, target, f"insert into {{s}}.users (tenant_id, name) values ({tenant}, 'since')")
        if event == LOST[when]:
            raise Stop

    def lose(actions: tenants.steps.Actions) -> bool:
        removed.append(None)
        if len(removed) == 4 and LOST[when] is None:
            lose_switch(nodes, name)
        return real(actions)

    with monkeypatch.context() as patched:
        patched.setattr(tenants.steps.Actions, "has_arrived", lose)
        with pytest.raises(Stop if LOST[when] else MoveFailed, match=None if LOST[when] else "taken over"):
            tenants.move(nodes.catalog, name, target, CHOICES, options=QUICK, on_event=write)
    if LOST[when]:
        lose_switch(nodes, name)
    assert home(nodes, name) == source
    before = [rows_of(nodes, shard, tenant) for shard in (source, target)]
    left = {"before they were": 60, "while rows were removed": 60 - 21}
    assert len(before[0]["photos"]) == left.get(when, 0)
    with pytest.raises(MoveFailed, match=f"lives in shard {target}.*the catalog lacks the switch") as refused:
        tenants.abort(nodes.catalog, name, options=QUICK)
    assert f"shardids tenant move '{name}' --resume" in str(refused.value.hint)
    assert [rows_of(nodes, shard, tenant) for shard in (source, target)] == before
    unsettled: list[bool] = []

    def watch(event: Event) -> None:
        if event == StepBegun(step="settle"):
            unsettled.append(nodes.catalog.placement().unsettled == {source, target})

    assert tenants.resume(nodes.catalog, name, options=QUICK, on_event=watch).outcome == "moved"
    assert unsettled == [True]
    assert home(nodes, name) == target
    assert rows_of(nodes, target, tenant) == before[1]
    assert assert_once(nodes, name, tenant) == 82
    assert nodes.catalog.placement().unsettled == frozenset()
    with shardids.Cluster.connect(nodes.catalog_url, listen=False) as cluster:
        assert {cluster.at(id=one).number for one in (*ids, tenant)} == {target}
    with pytest.raises(psycopg.Error, match=f"has moved to shard {target}"):
        ask(nodes, source, f"insert into {{s}}.tenants (name) values ('{name}')")
    assert ask(nodes, target, "select count(*) from shardids.key_arrival") == [(0,)]


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
    mistyped = ["tenant", "move", "nobody", "--to-shard", str(target), "--root"]
    refused = command_here(*mistyped, "tenants", *url)
    assert refused.returncode == 2
    assert "--root tenants.COLUMN" in refused.stderr
    refused = command_here(*mistyped, "tenants.name", "--dry-run", *url)
    assert refused.returncode == 1
    assert_once(nodes, name, tenant)
