"""Moving a key beside rows, code and sequences of others: none of theirs is lost, run or met again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
import pytest

from shardids import tenants
from shardids.catalog.rows import Catalog
from shardids.errors import MoveFailed, MoveRefused
from shardids.pg.embedded import temporary_servers
from shardids.replication.steps import Event, StepBegun, StepDone
from shardids.tenants import arriving, leaving
from tests.support.clusters import command_here
from tests.support.moves import TwoNodes, schema, two_nodes
from tests.support.tenants import (
    QUICK,
    TABLES,
    abort_open,
    ask,
    assert_once,
    home,
    make_tables,
    neighbour_in,
    new_tenant,
    other_shard,
    rows_of,
)

SHARDS = 4
MORE = """
    create table {s}.transfers (
      id bigint primary key default {s}.next_id(),
      tenant_id bigint not null references {s}.tenants on delete cascade,
      to_user bigint references {s}.users on delete cascade);
    create table {s}.loose_notes (
      id bigint primary key default {s}.next_id(), photo_id bigint references {s}.photos on delete cascade);
    create table {s}.comments (
      id bigint primary key, tenant_id bigint not null references {s}.tenants,
      parent_id bigint references {s}.comments);
    create table {s}.albums (
      id bigint primary key default {s}.next_id(),
      user_id bigint not null references {s}.users deferrable initially deferred);
    create table {s}.pages (
      id bigint primary key default {s}.next_id(), album_id bigint not null references {s}.albums);
    create table {s}.tickets (
      tenant_id bigint not null references {s}.tenants, id serial, body text, primary key (tenant_id, id));
    alter table {s}.photos alter constraint photos_user_id_fkey deferrable initially deferred;"""
CHOICES = tenants.Choices(root="tenants.name", loose=("loose_notes",))


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, SHARDS)
        make_tables(nodes, SHARDS, TABLES + MORE)
        yield nodes
        nodes.catalog.close()


@pytest.fixture(autouse=True)
def _each_alone(nodes: TwoNodes) -> Iterator[None]:
    """A test that fails in a move leaves none to the next."""
    yield
    abort_open(nodes)


def every(nodes: TwoNodes, query: str) -> None:
    for shard in range(SHARDS):
        ask(nodes, shard, query)


def moved(nodes: TwoNodes, name: str, on_event: Callable[[Event], None] = lambda _event: None) -> str:
    target = other_shard(nodes, name)
    return tenants.move(nodes.catalog, name, target, CHOICES, options=QUICK, on_event=on_event).outcome


def with_neighbour(nodes: TwoNodes, name: str) -> tuple[int, int, int, int]:
    """Enters a tenant and a neighbour; returns both, a user and a photo of the tenant."""
    tenant, source = new_tenant(nodes, name), home(nodes, name)
    other = new_tenant(nodes, neighbour_in(nodes, source))
    rows = rows_of(nodes, source, tenant)
    return tenant, other, rows["users"][0][0], rows["photos"][0][0]


def test_others_cannot_refer_to_rows_that_are_on_their_way(nodes: TwoNodes) -> None:
    """Neither before the switch nor after it: their rows would go with the rows that they refer to."""
    name = "referred to"
    tenant, other, user, photo = with_neighbour(nodes, name)
    source = home(nodes, name)
    (strange,) = ask(nodes, source, f"select min(id) from {{s}}.users where tenant_id = {other}")[0]
    (theirs,) = ask(nodes, source, f"select min(id) from {{s}}.photos where user_id = {strange}")[0]
    ask(nodes, source, f"insert into {{s}}.loose_notes (photo_id) values ({theirs})")
    ask(nodes, source, f"insert into {{s}}.transfers (tenant_id, to_user) values ({tenant}, {user})")
    (own,) = ask(nodes, source, f"select id from {{s}}.transfers where tenant_id = {tenant}")[0]
    refused: list[str | None] = []

    def interfere(event: Event) -> None:
        if event not in (StepDone(step="announce"), StepDone(step="switch")):
            return
        for statement in (
            f"insert into {{s}}.transfers (tenant_id, to_user) values ({other}, {user})",
            f"insert into {{s}}.loose_notes (photo_id) values ({photo})",
            f"update {{s}}.transfers set tenant_id = {other} where id = {own}",
            # It has a note of others.
            f"update {{s}}.photos set user_id = {user} where id = {theirs}",
        ):
            with pytest.raises(psycopg.Error) as error:
                ask(nodes, source, statement)
            refused.append(error.value.sqlstate)
        # Their own rows they may refer to.
        ask(nodes, source, f"insert into {{s}}.transfers (tenant_id, to_user) values ({other}, {strange})")

    assert moved(nodes, name, interfere) == "moved"
    assert refused == ["SI008"] * 4 + ["SI008", "SI008", "SI017", "SI017"]
    assert ask(nodes, source, f"select count(*) from {{s}}.transfers where tenant_id = {other}") == [(2,)]
    assert ask(nodes, source, "select count(*) from {s}.loose_notes") == [(1,)]
    assert_once(nodes, name, tenant)
    left = "select count(*) from pg_trigger where tgname ~ '^shardids_key_.*_(ref|late)'"
    assert ask(nodes, source, left) == [(0,)]


def test_a_row_that_refers_to_the_keys_since_the_plan_stops_the_move(nodes: TwoNodes) -> None:
    name = "referred to early"
    tenant, other, user, _ = with_neighbour(nodes, name)
    source = home(nodes, name)

    def interfere(event: Event) -> None:
        if event == StepBegun(step="guard"):
            ask(nodes, source, f"insert into {{s}}.transfers (tenant_id, to_user) values ({other}, {user})")

    with pytest.raises(MoveFailed, match="1 rows of table transfers of another key refer by"):
        moved(nodes, name, interfere)
    assert tenants.abort(nodes.catalog, name, options=QUICK).outcome == "aborted"
    assert ask(nodes, source, f"select count(*) from {{s}}.transfers where tenant_id = {other}") == [(1,)]
    assert_once(nodes, name, tenant)


def test_no_row_of_others_is_deleted_with_the_keys(nodes: TwoNodes) -> None:
    """Not even one that got past the triggers, which only a superuser can."""
    name = "cascading"
    tenant, other, user, photo = with_neighbour(nodes, name)
    source = home(nodes, name)

    def interfere(event: Event) -> None:
        if event == StepDone(step="switch"):
            for table, row in (("transfers", f"{other}, {user}"), ("loose_notes", f"{photo}")):
                columns = "tenant_id, to_user" if table == "transfers" else "photo_id"
                ask(
                    nodes,
                    source,
                    f"alter table {{s}}.{table} disable trigger user;"
                    f" insert into {{s}}.{table} ({columns}) values ({row});"
                    f" alter table {{s}}.{table} enable trigger user",
                )

    with pytest.raises(MoveFailed, match=r"in table photos can't be removed .*loose_notes refer to them by"):
        moved(nodes, name, interfere)
    ask(nodes, source, "delete from {s}.loose_notes")
    with pytest.raises(MoveFailed, match=r"in table users can't be removed .*transfers refer to them by"):
        tenants.resume(nodes.catalog, name, options=QUICK)
    found = f"select count(*) from {{s}}.transfers where tenant_id = {other}"
    assert ask(nodes, source, found) == [(1,)]
    ask(nodes, source, f"update {{s}}.transfers set to_user = null where tenant_id = {other}")
    assert tenants.resume(nodes.catalog, name, options=QUICK).outcome == "moved"
    assert ask(nodes, source, found) == [(1,)]
    assert_once(nodes, name, tenant)


def test_no_row_is_deleted_by_a_foreign_key_of_an_extension_that_was_made_meanwhile(nodes: TwoNodes) -> None:
    name = "sales"
    tenant, source = new_tenant(nodes, name), home(nodes, name)

    def refer(event: Event) -> None:
        if event == StepDone(step="settle"):
            ask(
                nodes,
                source,
                "create extension citext; alter table {s}.users add code citext unique;"
                " create table {s}.fans (code citext references {s}.users (code) on delete cascade)",
            )

    try:
        with pytest.raises(MoveFailed, match="fans does not compare by PostgreSQL's own equality"):
            moved(nodes, name, refer)
    finally:
        ask(nodes, source, "drop table if exists {s}.fans; drop extension if exists citext cascade")
    assert tenants.resume(nodes.catalog, name, options=QUICK).outcome == "moved"
    assert_once(nodes, name, tenant)


def test_a_row_that_is_written_before_the_one_it_refers_to_is_not_left_behind(nodes: TwoNodes) -> None:
    """Foreign keys that are deferred, as Django makes them: its key is known when it is committed."""
    name = "deferred"
    tenant, source = new_tenant(nodes, name), home(nodes, name)
    node, s = nodes.catalog.node_of(source).name, schema(source)
    waits: list[str] = []
    with nodes.connected(node) as late, nodes.connected(node) as connection:
        ids = [connection.execute(f"select {s}.next_id()").fetchone()[0] for _ in range(2)]

        def interfere(event: Event) -> None:
            if event == StepDone(step="copy"):
                # This one is committed in time.
                with late.transaction():
                    late.execute(f"insert into {s}.photos (user_id, size) values ({ids[0]}, 7)")
                    add_user(ids[0])
            if event == StepDone(step="announce"):
                late.execute("begin")
                late.execute(f"insert into {s}.photos (user_id, size) values ({ids[1]}, 8)")
                add_user(ids[1])
            if event == StepDone(step="switch"):
                with pytest.raises(psycopg.Error, match="has moved to shard") as refused:
                    late.execute("commit")
                waits.append(refused.value.sqlstate or "")

        def add_user(user: int) -> None:
            values = f"({user}, {tenant}, 'user {user}')"
            connection.execute(f"insert into {s}.users (id, tenant_id, name) values {values}")

        assert moved(nodes, name, interfere) == "moved"
    assert waits == ["SI017"]
    sizes = [row[2] for row in rows_of(nodes, home(nodes, name), tenant)["photos"] if row[1] in ids]
    assert sizes == [7]
    assert_once(nodes, name, tenant)


def test_a_row_that_is_written_before_its_parent_while_a_move_is_resumed_comes_along(
    nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the process was killed in the pause, with the gate closed: writers leave no notes then."""
    name = "killed in the pause"
    tenant, source = new_tenant(nodes, name), home(nodes, name)
    node, s = nodes.catalog.node_of(source).name, schema(source)

    def stop(event: Event) -> None:
        if event == StepDone(step="announce"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        moved(nodes, name, stop)
    (move,) = tenants.open_key_moves(nodes.catalog)
    ask(nodes, source, f"select nextval('shardids.key_gate_{move.id}')")
    with nodes.connected(node) as late:
        (user,) = late.execute(f"select {s}.next_id()").fetchone()
        look_again = leaving.Leaving._look_again

        def write(self: leaving.Leaving) -> None:
            late.execute("begin")
            late.execute(f"insert into {s}.photos (user_id, size) values ({user}, 9)")
            look_again(self)

        def add_user(event: Event) -> None:
            if event == StepDone(step="copy"):
                values = f"({user}, {tenant}, 'late')"
                ask(nodes, source, f"insert into {{s}}.users (id, tenant_id, name) values {values}")
                late.execute("commit")

        monkeypatch.setattr(leaving.Leaving, "_look_again", write)
        resumed = tenants.resume(nodes.catalog, name, options=QUICK, on_event=add_user)
        assert resumed.outcome == "moved"
    sizes = [row[2] for row in rows_of(nodes, home(nodes, name), tenant)["photos"] if row[1] == user]
    assert sizes == [9]
    assert_once(nodes, name, tenant)


def test_rows_whose_parent_is_replaced_by_the_keys_come_along(nodes: TwoNodes) -> None:
    """With a deferred foreign key nothing of them is written, and they are the key's from the COMMIT on."""
    name = "replacing"
    tenant, other, _, _ = with_neighbour(nodes, name)
    source, target = home(nodes, name), other_shard(nodes, name)
    ask(
        nodes,
        source,
        f"insert into {{s}}.albums (user_id) select id from {{s}}.users where tenant_id = {other}",
    )
    ask(nodes, source, "insert into {s}.pages (album_id) select id from {s}.albums")
    query = "select a.user_id, a.id, p.id from {s}.albums a join {s}.pages p on p.album_id = a.id order by 1"
    there = ask(nodes, source, query)
    steps = iter([StepDone(step="copy"), StepDone(step="announce")])
    awaited, taken = next(steps), iter(there)

    def replace(event: Event) -> None:
        nonlocal awaited
        if event == awaited:
            user, awaited = next(taken)[0], next(steps, None)
            ask(
                nodes,
                source,
                f"delete from {{s}}.photos where user_id = {user}; begin;"
                f" delete from {{s}}.users where id = {user};"
                f" insert into {{s}}.users (id, tenant_id, name) values ({user}, {tenant}, '{user}'); commit",
            )

    assert moved(nodes, name, replace) == "moved"
    assert ask(nodes, target, query) == there[:2]
    assert ask(nodes, source, query) == there[2:]


def test_a_row_does_not_change_its_key_unseen(nodes: TwoNodes) -> None:
    """Rows that others refer to may not enter the key, even by a row that is committed later."""
    name = "entered late"
    tenant, other, _, _ = with_neighbour(nodes, name)
    source = home(nodes, name)
    node, s = nodes.catalog.node_of(source).name, schema(source)
    query = (
        "select min(p.id) from {s}.photos p join {s}.users u on u.id = p.user_id"
        f" where u.tenant_id = {other}"
    )
    ((photo,),) = ask(nodes, source, query)
    with nodes.connected(node) as late:
        (user,) = late.execute(f"select {s}.next_id()").fetchone()

        def interfere(event: Event) -> None:
            if event == StepDone(step="copy"):
                late.execute("begin")
                late.execute(f"update {s}.photos set user_id = {user} where id = {photo}")
                values = f"({user}, {tenant}, 'late')"
                ask(nodes, source, f"insert into {{s}}.users (id, tenant_id, name) values {values}")
                with pytest.raises(psycopg.Error, match="can't change its key") as refused:
                    late.execute("commit")
                assert refused.value.sqlstate == "SI008"

        assert moved(nodes, name, interfere) == "moved"
    assert_once(nodes, name, tenant)


TRIGGERS = {
    "gone of table tenants": "create function {s}.gone() returns trigger language plpgsql as"
    " 'begin return old; end'; create trigger gone after delete on {s}.tenants"
    " for each row execute function {s}.gone()",
    "gone of table photos": "create function {s}.gone() returns trigger language plpgsql as"
    " 'begin return null; end'; create trigger gone before delete on {s}.photos"
    " for each row execute function {s}.gone()",
    "rule kept of table users": "create rule kept as on delete to {s}.users do instead nothing",
}


@pytest.mark.parametrize("case", TRIGGERS)
def test_the_applications_triggers_do_not_run_when_the_rows_are_removed(nodes: TwoNodes, case: str) -> None:
    """One that is there is refused at the plan, one that comes later before a row is removed."""
    name = f"triggered {list(TRIGGERS).index(case)}"
    tenant, source = new_tenant(nodes, name), home(nodes, name)
    drop = (
        "drop trigger if exists gone on {s}.tenants; drop trigger if exists gone on {s}.photos;"
        " drop rule if exists kept on {s}.users; drop function if exists {s}.gone()"
    )
    ask(nodes, source, TRIGGERS[case])
    try:
        with pytest.raises(MoveRefused, match=f"{case} would run when the rows are removed") as refused:
            moved(nodes, name)
        assert refused.value.hint.startswith(
            f'alter table "{schema(source)}"."{case.rpartition(" ")[2]}" disable'
        )
        ask(nodes, source, drop)

        def interfere(event: Event) -> None:
            if event == StepDone(step="switch"):
                ask(nodes, source, TRIGGERS[case])

        with pytest.raises(MoveFailed, match=f"{case} would run when the rows are removed"):
            moved(nodes, name, interfere)
    finally:
        ask(nodes, source, drop)
    assert tenants.resume(nodes.catalog, name, options=QUICK).outcome == "moved"
    assert_once(nodes, name, tenant)


def test_numbers_for_people_are_no_obstacle(nodes: TwoNodes) -> None:
    every(nodes, "alter table {s}.tickets add number text")
    every(nodes, "select shardids.number_rows('{s}.tickets', 'number', 'tenant_id', 'ticket', 'never')")
    try:
        new_tenant(nodes, "numbered")
        assert moved(nodes, "numbered") == "moved"
    finally:
        every(nodes, "alter table {s}.tickets drop column number cascade")
        every(nodes, 'drop trigger if exists "shardids_number_tickets.number" on {s}.tickets')


def test_rows_of_a_table_that_refers_to_itself_are_removed(
    nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than a batch has, in an order that no batch is free of; some go while they are moved."""
    monkeypatch.setattr(leaving, "_BATCH", 7)
    monkeypatch.setattr(arriving, "_AT_ONCE", 7)
    name = "tree"
    tenant, source, target = new_tenant(nodes, name), home(nodes, name), other_shard(nodes, name)
    ask(
        nodes,
        source,
        f"insert into {{s}}.comments select n, {tenant}, nullif(n - 1, 0) from generate_series(1, 100) n",
    )

    def interfere(event: Event) -> None:
        if event == StepDone(step="copy"):
            ask(nodes, source, f"delete from {{s}}.comments where tenant_id = {tenant} and id > 50")

    assert moved(nodes, name, interfere) == "moved"
    count = f"select count(*), max(id) from {{s}}.comments where tenant_id = {tenant}"
    assert ask(nodes, target, count) == [(50, 50)]
    assert ask(nodes, source, count) == [(0, None)]
    assert_once(nodes, name, tenant)


def test_serial_columns_go_on_after_the_values_that_arrive(nodes: TwoNodes) -> None:
    name = "serial"
    tenant, source, target = new_tenant(nodes, name), home(nodes, name), other_shard(nodes, name)
    add = f"insert into {{s}}.tickets (tenant_id) values ({tenant}) returning id"
    first = [ask(nodes, source, add)[0][0] for _ in range(3)]
    # By hand, ahead of the sequence.
    ask(nodes, source, f"insert into {{s}}.tickets (tenant_id, id) values ({tenant}, 300)")

    def interfere(event: Event) -> None:
        if event == StepDone(step="announce"):
            ask(nodes, source, "select setval('{s}.tickets_id_seq', 20000)")
            first.append(ask(nodes, source, add)[0][0])

    assert moved(nodes, name, interfere) == "moved"
    after = [ask(nodes, target, add)[0][0] for _ in range(3)]
    assert min(after) > max(*first, 300)
    assert_once(nodes, name, tenant)


def test_sequences_that_begin_apart_are_refused_unless_they_stay_apart(nodes: TwoNodes) -> None:
    name = "apart"
    tenant, source, target = new_tenant(nodes, name), home(nodes, name), other_shard(nodes, name)
    ask(nodes, target, "alter sequence {s}.tickets_id_seq start 1000000")
    try:
        with pytest.raises(MoveRefused, match="of column id of table tickets begin apart"):
            moved(nodes, name)
        ask(nodes, source, "alter sequence {s}.tickets_id_seq maxvalue 999999")
        ask(nodes, target, "alter sequence {s}.tickets_id_seq minvalue 1000000 restart")
        assert moved(nodes, name) == "moved"
        add = f"insert into {{s}}.tickets (tenant_id) values ({tenant}) returning id"
        assert ask(nodes, target, add) == [(1000000,)]
    finally:
        ask(nodes, source, "alter sequence {s}.tickets_id_seq no maxvalue")
        ask(nodes, target, "alter sequence {s}.tickets_id_seq start 1 no minvalue")
    assert_once(nodes, name, tenant)


PROOF = """
    create table if not exists public.proof (who text, what text); grant insert on public.proof to public;
    do $$begin if to_regrole('mallory') is null then create role mallory; end if; end$$"""
EVIL = """
    create table {s}.evil (
      id bigint primary key default {s}.next_id(), body text,
      tenant_id bigint not null references {s}.tenants);
    grant usage, create on schema {s} to mallory; grant execute on function {s}.next_id() to mallory;
    create function {s}.ran(what text) returns integer language plpgsql as
      $$begin insert into public.proof values (current_user, what); return 1; end$$;
    create function {s}.indexed(x integer) returns integer language plpgsql immutable as
      $$declare r integer; begin select {s}.ran('index') into r; return r; end$$;
    create function {s}.checked(x text) returns boolean language plpgsql as
      $$begin perform {s}.ran('check'); return true; end$$;
    create function {s}.fired() returns trigger language plpgsql as
      $$begin perform {s}.ran('trigger'); return null; end$$;"""
PLANTED = {
    "an index in the source": "create index on {s}.evil (({s}.indexed(1)), tenant_id)",
    "a constraint in the target": "alter table {s}.evil add check ({s}.checked(body))",
    "a trigger in the source": "create trigger zz after delete on {s}.evil for each row"
    " execute function {s}.fired()",
}


@pytest.mark.parametrize("case", PLANTED)
def test_no_code_of_others_runs_as_the_role_that_moves(nodes: TwoNodes, case: str) -> None:
    """Neither at the plan nor in a move, unless the owner of the table is trusted by name."""
    name = f"victim {list(PLANTED).index(case)}"
    tenant, source, target = new_tenant(nodes, name), home(nodes, name), other_shard(nodes, name)
    for shard in (source, target):
        ask(nodes, shard, PROOF)
    every(nodes, EVIL)
    ask(nodes, source, f"insert into {{s}}.evil (tenant_id, body) values ({tenant}, 'x')")
    try:
        ask(nodes, target if "target" in case else source, PLANTED[case])
        every(nodes, "alter table {s}.evil owner to mallory")
        for shard in (source, target):
            ask(nodes, shard, "truncate public.proof")
        for attempt in (tenants.plan, tenants.move):
            with pytest.raises(MoveRefused, match='role "mallory" can change what table') as refused:
                attempt(nodes.catalog, name, target, CHOICES)
            assert refused.value.hint.endswith("--trust mallory")
        words = ["tenant", "move", name, "--to-shard", str(target), "--root", "tenants.name", "--dry-run"]
        words += ["--loose", "loose_notes", "--catalog", nodes.catalog_url]
        assert "--trust mallory" in command_here(*words).stderr
        assert [ask(nodes, shard, "select * from public.proof") for shard in (source, target)] == [[], []]
        # A trigger that would run when rows are removed is refused all the same.
        assert command_here(*words, "--trust", "mallory").returncode == int("trigger" in case)
        if "trigger" not in case:
            options = tenants.Options(settle_s=0.3, trusted=("mallory",))
            done = tenants.move(nodes.catalog, name, target, CHOICES, options=options)
            assert done.rows["evil"] == 1
    finally:
        every(nodes, "drop table {s}.evil; drop function {s}.indexed, {s}.checked, {s}.fired, {s}.ran")
        every(nodes, "revoke all on schema {s} from mallory")
        every(nodes, "revoke execute on function {s}.next_id() from mallory")
    assert_once(nodes, name, tenant)


def test_code_that_comes_while_rows_are_moved_is_refused(nodes: TwoNodes) -> None:
    """A role may get a table after the plan: it is asked again before each write."""
    name = "taken over"
    tenant, source, target = new_tenant(nodes, name), home(nodes, name), other_shard(nodes, name)
    for shard in (source, target):
        ask(nodes, shard, PROOF)

    def give(shard: int, step: str) -> Callable[[Event], None]:
        def interfere(event: Event) -> None:
            if event == StepDone(step=step):
                ask(nodes, shard, "alter table {s}.photos owner to mallory")

        return interfere

    owned = ask(
        nodes, source, "select pg_get_userbyid(relowner) from pg_class where oid = '{s}.photos'::regclass"
    )
    back = f'alter table {{s}}.photos owner to "{owned[0][0]}"'
    try:
        with pytest.raises(MoveFailed, match='role "mallory" can change what table'):
            moved(nodes, name, give(target, "guard"))
        with pytest.raises(MoveRefused, match='role "mallory" can change what table'):
            tenants.resume(nodes.catalog, name, options=QUICK)
        ask(nodes, target, back)
        tenants.abort(nodes.catalog, name, options=QUICK)
        with pytest.raises(
            MoveFailed, match=r'photos can.t be removed .*role "mallory" can change what table'
        ):
            moved(nodes, name, give(source, "switch"))
    finally:
        ask(nodes, source, back)
        ask(nodes, target, back)
    assert tenants.resume(nodes.catalog, name, options=QUICK).outcome == "moved"
    assert_once(nodes, name, tenant)


@pytest.mark.long
def test_a_role_with_all_rights_on_the_tables_needs_no_trust(nodes: TwoNodes) -> None:
    """It could have made triggers, but not those of the move, also where a key has left before."""
    for node in "ab":
        with nodes.connected(node) as connection:
            connection.execute("create role writer")
    every(nodes, "grant all on all tables in schema {s} to writer")
    try:
        first = "granted"
        source = home(nodes, first)
        for name in (first, neighbour_in(nodes, source)):
            tenant = new_tenant(nodes, name)
            assert moved(nodes, name) == "moved"
            assert_once(nodes, name, tenant)
        function = "create function {s}.noted() returns trigger language plpgsql as 'begin return new; end'"
        ask(nodes, source, function)
        ask(
            nodes,
            source,
            "create trigger noted before update on {s}.users for each row execute function {s}.noted()",
        )
        with pytest.raises(MoveRefused, match='role "writer" can change what trigger noted on table'):
            moved(nodes, name_in(nodes, source))
    finally:
        ask(nodes, source, "drop function if exists {s}.noted cascade")
        for node in "ab":
            with nodes.connected(node) as connection:
                connection.execute("drop owned by writer; drop role writer")


def name_in(nodes: TwoNodes, shard: int) -> str:
    """A new tenant of a shard."""
    name = neighbour_in(nodes, shard)
    new_tenant(nodes, name)
    return name


def test_triggers_run_as_the_owner_of_the_engine(nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Applications write through them: they have no more rights than the engine, whoever moves."""
    name = "of another superuser"
    tenant, source = new_tenant(nodes, name), home(nodes, name)
    for node in "ab":
        with nodes.connected(node) as connection:
            connection.execute("create role boss superuser")
    owners: list[tuple[object, ...]] = []

    def look(event: Event) -> None:
        if event == StepDone(step="copy"):
            owners.extend(
                ask(
                    nodes,
                    source,
                    "select distinct p.proowner = n.nspowner from pg_proc p join pg_namespace n"
                    " on n.oid = p.pronamespace where n.nspname = 'shardids' and p.proname like 'key_note%'",
                )
            )

    monkeypatch.setenv("PGOPTIONS", "-c role=boss")
    catalog = Catalog(nodes.catalog_url)
    try:
        target = other_shard(nodes, name)
        tenants.move(catalog, name, target, CHOICES, options=QUICK, on_event=look)
    finally:
        catalog.close()
    assert owners == [(True,)]
    monkeypatch.delenv("PGOPTIONS")
    assert_once(nodes, name, tenant)
