"""What a move does not see by itself: other schemas, open transactions, disabled triggers, DDL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from shardids import mover
from shardids.errors import ClusterConflict, MoveRefused
from shardids.mover import Options, StepBegun, StepDone, Waiting, cutover
from shardids.pg.embedded import temporary_servers
from shardids.pg.locks import AdvisoryLock
from tests.support.clusters import command
from tests.support.killed_moves import finish
from tests.support.lengths import sampled
from tests.support.moves import TwoNodes, assert_one_owner, digests_at, schema, two_nodes
from tests.support.waiting import wait_for

TABLES = """
    create table {s}.users (id bigint primary key default {s}.next_id(), name text);
    create table {s}.notes (body text);
    alter table {s}.notes replica identity full;
    insert into {s}.users (name) select 'u' || n from generate_series(1, 10) n"""
PREPARED = {"max_prepared_transactions": "4"}


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2, settings=PREPARED) as servers:
        nodes = two_nodes(servers, 80)
        yield nodes
        nodes.catalog.close()


def names(nodes: TwoNodes, shard: int) -> set[str]:
    with nodes.connected(nodes.catalog.node_of(shard).name) as connection:
        return {name for (name,) in connection.execute(f"select name from {schema(shard)}.users")}


class Meanwhile:
    """Runs something in another session at a step of a move, and ends it when the move has had to wait."""

    def __init__(self, step: str, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._step, self._begin, self._end = step, begin, end
        self.reasons: list[str] = []

    def __call__(self, event: mover.Event) -> None:
        if isinstance(event, StepBegun) and event.step == self._step:
            self._begin()
        if isinstance(event, Waiting):
            self.reasons.append(event.reason)
            if len(self.reasons) == 1:
                self._end()


@pytest.mark.long
@pytest.mark.parametrize(
    ("prepare", "begin", "end"),
    [
        (
            "alter table {s}.users disable trigger all",
            "begin; insert into {s}.users (name) values ('late')",
            "commit; alter table {s}.users enable trigger all",
        ),
        (
            "",
            "begin; alter table {s}.users disable trigger all; insert into {s}.users (name) values ('late');"
            " alter table {s}.users enable trigger all",
            "commit",
        ),
        (
            "set session_replication_role = replica",
            "begin; insert into {s}.users (name) values ('late')",
            "commit",
        ),
        (
            "",
            "begin; insert into {s}.users (name) values ('late'); prepare transaction 'p'",
            "commit prepared 'p'",
        ),
    ],
    ids=["triggers disabled before", "triggers disabled inside", "replica role", "prepared"],
)
def test_a_load_that_passes_no_trigger_is_waited_for(
    nodes: TwoNodes, prepare: str, begin: str, end: str
) -> None:
    shard = nodes.new_shard(TABLES)
    with nodes.connected("a") as loader:

        def run(script: str) -> Callable[[], None]:
            def work() -> None:
                for statement in script.replace("{s}", schema(shard)).split(";"):
                    if statement.strip():
                        loader.execute(statement)

            return work

        def begun() -> None:
            run(prepare)()
            run(begin)()

        meanwhile = Meanwhile("cutover", begun, run(end))
        done = mover.move(nodes.catalog, shard, "b", options=Options(verify=True), on_event=meanwhile)
    assert done.outcome == "moved"
    assert meanwhile.reasons
    assert "late" in names(nodes, shard)
    assert_one_owner(nodes, shard)


def test_a_prepared_transaction_is_named(nodes: TwoNodes) -> None:
    shard = nodes.new_shard(TABLES)
    with nodes.connected("a") as session:

        def begin() -> None:
            session.execute(f"begin; insert into {schema(shard)}.users (name) values ('two')")
            session.execute("prepare transaction 'phase one'")

        def end() -> None:
            session.execute("commit prepared 'phase one'")

        meanwhile = Meanwhile("cutover", begin, end)
        mover.move(nodes.catalog, shard, "b", on_event=meanwhile)
    assert "prepared transaction 'phase one' has been in a writing transaction" in meanwhile.reasons[0]
    assert "two" in names(nodes, shard)


@pytest.mark.long
@pytest.mark.parametrize(
    ("statements", "changed"),
    [
        ("create table {s}.late (id bigint primary key); insert into {s}.late values (1)", 'table "late"'),
        ("grant select on {s}.users to public", 'acl "TABLE users"'),
        ("create function {s}.late() returns integer language sql return 1", 'function "late()"'),
    ],
    ids=["table", "grant", "function"],
)
def test_a_change_of_the_schema_that_is_not_committed_at_the_cutover_is_waited_for(
    nodes: TwoNodes, statements: str, changed: str
) -> None:
    """Then it is found, and named: the source keeps the shard, with what was changed."""
    shard = nodes.new_shard(TABLES)
    with nodes.connected("a") as session:

        def begin() -> None:
            session.execute("begin")
            for statement in statements.replace("{s}", schema(shard)).split("; "):
                session.execute(statement)

        meanwhile = Meanwhile("cutover", begin, lambda: session.execute("commit") and None)
        with pytest.raises(ClusterConflict) as refused:
            mover.move(nodes.catalog, shard, "b", on_event=meanwhile)
    assert meanwhile.reasons
    assert f"{changed} was changed while it was moved" in refused.value.message
    assert mover.abort(nodes.catalog, shard).outcome == "aborted"
    assert_one_owner(nodes, shard)
    if "table" in changed:
        with nodes.connected("a") as connection:
            assert connection.execute(f"select count(*) from {schema(shard)}.late").fetchone() == (1,)


@pytest.mark.parametrize(
    ("step", "statement", "changed"),
    sampled(
        [
            ("indexes", "create index late on {s}.users (name)", 'index "late"'),
            ("catch up", "create index late on {s}.users (name)", 'index "late"'),
            ("catch up", "grant select on {s}.users to public", 'acl "TABLE users"'),
            ("copy", "create index late on {s}.users (name)", 'index "late"'),
            ("tables", "create table {s}.late (id bigint primary key)", 'constraint "late late_pkey"'),
            (
                "copy",
                "create view {s}.late as select 1 as one; grant select on {s}.late to public",
                ': acl "TABLE late", view "late" was',
            ),
            ("copy", "alter table {s}.users add constraint late check (name <> '')", 'table "users"'),
            ("copy", "alter table {s}.users alter name set default 'x'", 'table "users"'),
            ("copy", "create view {s}.late as select 1 as one", 'view "late"'),
            ("copy", "comment on table {s}.users is 'late'", 'comment "TABLE users"'),
            ("copy", "create policy late on {s}.users using (true)", 'policy "users late"'),
        ],
        every=4,
    ),
)
def test_a_change_of_the_schema_during_the_move_is_not_lost(
    nodes: TwoNodes, step: str, statement: str, changed: str
) -> None:
    shard = nodes.new_shard(TABLES)

    def change(event: mover.Event) -> None:
        if event == StepDone(shard=shard, step=step):
            with nodes.connected("a") as source:
                source.execute(statement.replace("{s}", schema(shard)))

    with pytest.raises(ClusterConflict) as refused:
        mover.move(nodes.catalog, shard, "b", on_event=change)
    assert changed in refused.value.message
    assert "was changed while it was moved" in refused.value.message
    assert nodes.catalog.node_of(shard).name == "a"
    with nodes.connected("a") as source:
        source.execute(f"insert into {schema(shard)}.users (name) values ('goes on')")
    with pytest.raises(ClusterConflict, match="was changed while it was moved"):
        finish(nodes, shard, mover.resume)
    assert mover.abort(nodes.catalog, shard).outcome == "aborted"
    assert mover.move(nodes.catalog, shard, "b").outcome == "moved"
    assert_one_owner(nodes, shard)


def test_statements_that_change_no_definition_do_not_stop_a_move(nodes: TwoNodes) -> None:
    shard = nodes.new_shard(TABLES)

    def work(event: mover.Event) -> None:
        if event == StepDone(shard=shard, step="catch up"):
            with nodes.connected("a") as source:
                source.execute(f"truncate {schema(shard)}.notes")
                source.execute(f"analyze {schema(shard)}.users")
                source.execute(f"reindex table {schema(shard)}.users")

    assert mover.move(nodes.catalog, shard, "b", on_event=work).outcome == "moved"


@contextmanager
def undone(nodes: TwoNodes, node: str, *statements: str) -> Iterator[None]:
    yield
    with nodes.connected(node) as connection:
        for statement in statements:
            connection.execute(statement)


def test_purge_keeps_what_is_not_the_shards(nodes: TwoNodes) -> None:
    shard, other = nodes.new_shard(TABLES), nodes.new_shard(TABLES)
    s, t = schema(shard), schema(other)
    mover.move(nodes.catalog, shard, "b")
    outside = (
        f"create extension citext schema {s}",
        f"alter table {t}.notes add email {s}.citext",
        f"create view public.pair as select id from {s}.users union all select id from {t}.users",
        f"create table public.orders (user_id bigint references {s}.users)",
        f"create table public.children () inherits ({s}.notes)",
    )
    with nodes.connected("a") as source:
        for statement in outside:
            source.execute(statement)
        dry = command("shard", "purge", str(shard), "--dry-run", SHARDIDS_CATALOG=nodes.catalog_url)
        for refusal in (dry.stderr, refused_purge(nodes, shard)):
            for name in (
                "extension citext",
                f"column email of table {t}.notes",
                "view public.pair",
                "constraint orders_user_id_fkey on table public.orders",
                "table public.children",
            ):
                assert f'- {name} on node "a" (with shard {shard})' in refusal
        assert dry.returncode == 1
        with pytest.raises(MoveRefused, match='extension citext on node "a" would be dropped with the old'):
            mover.move(nodes.catalog, shard, "a", back=True)
        with pytest.raises(psycopg.errors.DependentObjectsStillExist, match="extension citext"):
            source.execute("select shardids.drop_copy(%s)", [shard])
        source.execute("drop view public.pair")
        source.execute("drop table public.orders, public.children")
        source.execute("alter extension citext set schema public")
        assert [copy.shard for copy in mover.purge(nodes.catalog, [shard])] == [shard]
        source.execute(f"insert into {t}.notes (email) values ('A@b')")
        assert source.execute(f"select count(*) from {t}.notes where email = 'a@B'").fetchone() == (1,)
        source.execute("drop extension citext cascade")


def refused_purge(nodes: TwoNodes, shard: int) -> str:
    with pytest.raises(ClusterConflict) as refused:
        mover.purge(nodes.catalog, [shard])
    return str(refused.value)


def test_a_purge_of_many_drops_none_if_one_is_refused(nodes: TwoNodes) -> None:
    first, second = nodes.new_shard(TABLES), nodes.new_shard(TABLES)
    for shard in (first, second):
        mover.move(nodes.catalog, shard, "b")
    with nodes.connected("a") as source:
        source.execute(f"create view public.reader as select * from {schema(second)}.users")
        with pytest.raises(ClusterConflict, match="reader"):
            mover.purge(nodes.catalog, [first, second])
        assert len(mover.old_copies(nodes.catalog, [first, second])) == 2
        source.execute("drop view public.reader")
    assert len(mover.purge(nodes.catalog, [first, second])) == 2


def test_children_in_another_schema_are_refused(nodes: TwoNodes) -> None:
    shard = nodes.new_shard(TABLES)
    s = schema(shard)
    with nodes.connected("a") as source:
        source.execute("create schema archive")
        source.execute(f"create table {s}.log (id bigint primary key) partition by range (id)")
        source.execute(f"create table archive.log_old partition of {s}.log for values from (0) to (9)")
        source.execute("create table archive.more () inherits (" + s + ".notes)")
    with pytest.raises(MoveRefused) as refused:
        mover.plan_move(nodes.catalog, shard, "b")
    for child, parent in (("log_old", "log"), ("more", "notes")):
        words = f"table archive.{child} is a partition or child of {s}.{parent}, in another schema"
        assert words in refused.value.message
    with nodes.connected("a") as source:
        for table in ("log_old", "more"):
            source.execute(f"alter table archive.{table} set schema {s}")
        source.execute(f"alter table {s}.more replica identity full")
        source.execute(f"insert into {s}.log values (1); insert into {s}.more values ('kept')")
    done = mover.move(nodes.catalog, shard, "b", options=Options(verify=True))
    assert done.rows_verified == 10 + 2 + 1  # One is in the table of the shard's revision.


def test_rows_are_compared_through_the_partitioned_table_too(nodes: TwoNodes) -> None:
    shard = nodes.new_shard()
    counted = {
        name: one.rows for name, one in digests_at(nodes.url("a"), shard).items() if one.digest is None
    }
    assert counted == {f"{schema(shard)}.events": 60}


@pytest.mark.parametrize(
    ("statements", "reason"),
    [
        ("create publication feed for table {s}.users", "publication feed on node"),
        ("create publication feed for all tables", "publication feed on node"),
        (
            "create function {s}.to_int({s}.users) returns integer language sql return 1;"
            " create cast ({s}.users as integer) with function {s}.to_int({s}.users)",
            "the cast from {s}.users to integer on node",
        ),
        (
            "alter table {s}.users add picture oid; select lo_create(0)",
            "column picture of table {s}.users may",
        ),
        (
            "create function {s}.t() returns trigger language plpgsql as 'begin return new;end';"
            " create trigger t before insert on {s}.users for each row execute function {s}.t();"
            " alter table {s}.users enable always trigger t",
            "trigger t of table {s}.users is enabled for replicated rows",
        ),
        (
            "create role keeper; grant create, usage on schema {s} to keeper;"
            " alter table {s}.notes owner to keeper;"
            " revoke all on schema {s} from keeper",
            'role "keeper" owns tables of schema {s} and lacks USAGE on it',
        ),
    ],
    ids=[
        "publication",
        "publication of all",
        "cast",
        "large objects",
        "always trigger",
        "owner without usage",
    ],
)
def test_what_is_not_moved_is_refused_by_name(nodes: TwoNodes, statements: str, reason: str) -> None:
    shard = nodes.new_shard(TABLES)
    with nodes.connected("b") as target:
        if "keeper" in statements:
            target.execute("create role keeper")
    with nodes.connected("a") as source:
        for statement in statements.replace("{s}", schema(shard)).split("; "):
            source.execute(statement)
        with pytest.raises(MoveRefused) as refused:
            mover.plan_move(nodes.catalog, shard, "b")
        assert reason.replace("{s}", schema(shard)) in refused.value.message
        if "publication" in statements:
            source.execute("drop publication feed")


@pytest.mark.long
@pytest.mark.parametrize(
    ("statements", "changed"),
    [
        (
            "alter table {s}.users disable trigger all; insert into {s}.users (id, name) values (7, 'late');"
            " alter table {s}.users enable trigger all",
            None,
        ),
        ("create index late on {s}.users (name)", 'index "late"'),
    ],
    ids=["load", "index"],
)
def test_what_is_done_between_the_last_look_and_the_end_of_the_cutover_is_not_lost(
    nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch, statements: str, changed: str | None
) -> None:
    """By somebody who passes the barrier, and sees before COMMIT that the shard is still active here."""
    shard = nodes.new_shard(TABLES)
    read_handover, states = cutover.read_handover, []

    def meanwhile(*arguments: Any) -> cutover.Handover:
        if not states:
            with nodes.connected("a") as session, session.transaction():
                session.execute(statements.replace("{s}", schema(shard)))
                active = "select state from shardids.shard where id = %s"
                states.append(session.execute(active, [shard]).fetchone())
        return read_handover(*arguments)

    monkeypatch.setattr(cutover, "read_handover", meanwhile)
    reasons: list[str] = []

    def listen(event: mover.Event) -> None:
        if isinstance(event, Waiting):
            reasons.append(event.reason)

    if changed is None:
        assert mover.move(nodes.catalog, shard, "b", on_event=listen).outcome == "moved"
        assert "late" in names(nodes, shard)
        assert "has no write barrier, or a disabled one" in reasons[0]
    else:
        with pytest.raises(ClusterConflict, match=changed):
            mover.move(nodes.catalog, shard, "b", on_event=listen)
        assert reasons == ["the shard's schema was changed"]
        assert mover.abort(nodes.catalog, shard).outcome == "aborted"
    assert states == [("active",)]
    assert_one_owner(nodes, shard)


def test_writers_that_are_being_refused_do_not_put_the_cutover_off(
    nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They get the barrier's lock when the fence is committed, and have it until they have rolled back."""
    shard = nodes.new_shard(TABLES)
    read_handover, waiting = cutover.read_handover, threading.Event()
    with nodes.connected("a") as writer, nodes.connected("a") as watching, ThreadPoolExecutor(1) as beside:
        lock = [int(AdvisoryLock.WRITE_BARRIER), shard]

        def meanwhile(*arguments: Any) -> cutover.Handover:
            if not waiting.is_set():
                beside.submit(writer.execute, "select pg_advisory_lock_shared(%s, %s)", lock)
                is_waiting = (
                    "select count(*) from pg_locks where not granted and classid = %s and objid = %s",
                    lock,
                )
                wait_for(lambda: watching.execute(*is_waiting).fetchone() == (1,), "the writer waits")
                waiting.set()
            return read_handover(*arguments)

        monkeypatch.setattr(cutover, "read_handover", meanwhile)
        events: list[mover.Event] = []
        assert mover.move(nodes.catalog, shard, "b", on_event=events.append).outcome == "moved"

    assert waiting.is_set()
    assert [event.reason for event in events if isinstance(event, Waiting)] == []
    assert_one_owner(nodes, shard)
