"""Code that others put where PostgreSQL runs it as the role that reads: it runs as a role that only reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from sqlalchemy.engine import URL

from shardids.adopt.plan.planning import make_plan
from shardids.catalog.nodes import administrative_engine
from shardids.catalog.rows import Catalog
from shardids.errors import BadArgument, ClusterConflict, MissingPrivilege
from shardids.migrate.plan import Position
from shardids.migrate.status import read_node
from shardids.pg.embedded import temporary_server
from shardids.pg.reader import (
    Refused,
    install_reader,
    reading_as_reader,
    remove_reader,
    require_no_code_of_others,
)
from shardids.pg.urls import parse_url
from shardids.tables import lookups
from shardids.watch import doctor
from shardids.watch.doctor.contents import OF_ROWS
from shardids.watch.facts.reading import Asker
from shardids.watch.facts.rows import ShardingKey
from tests.conftest import BlankDatabases, MakeRole, dsn, found_cluster
from tests.support.clusters import catalog_at, connected
from tests.support.consoles import browsing, told
from tests.support.moves import digests_at
from tests.support.planted_code import PLANTED, REFUSED, Recorded, kinds, plant, table_of
from tests.support.waiting import wait_for

READER = "shardids_reader"
RUN_WHEN_READ = {
    kind
    for kind in PLANTED
    if kind[0] not in {"pg_trigger", "pg_range", "pg_attrdef", "pg_type", "pg_policy"}
    and kind != ("pg_rewrite", "ev_qual")
}
"""Those that a query of a superuser runs; the others run when rows are written, or for other roles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostile:
    """A cluster of one node where mallory planted what an ordinary role can."""

    url: URL
    proof: Path
    recorded: Recorded
    id_: int

    def ran(self) -> set[str]:
        """The roles that planted functions ran as since the last call; fails if one became more."""
        found = self.recorded.new()
        with connected(self.url) as db:
            row = db.execute("select rolsuper from pg_roles where rolname = 'mallory'").fetchone()
        assert row == (False,), "mallory became a superuser"
        assert not self.proof.exists(), "mallory ran a program on the server"
        return {role for _, role, _ in found}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hostile]:
    folder = tmp_path_factory.mktemp("owners")
    folder.chmod(0o777)
    with temporary_server() as server:
        url = parse_url(server.url())
        found_cluster(url, {"a": url}, 2)
        with connected(url) as admin:
            for statement in (
                "create role mallory login password 'm'",
                "grant create on database postgres to mallory",
                "grant create, usage on schema shard_0000, shard_0001 to mallory",
                "select shardids.grant_usage(array[0], 'mallory')",
                "create table shard_0000.notes"
                " (id bigint primary key default shard_0000.next_id(), word text)",
            ):
                admin.execute(statement.encode())
            row = admin.execute("insert into shard_0000.notes (word) values ('w') returning id").fetchone()
            assert row is not None
        with connected(url.set(username="mallory", password="m")) as mallory:
            plant(mallory, "mallory", folder / "ran", "shard_0000")
            for statement in (
                "create table shard_0001.alembic_version (version_num varchar(32) primary key)",
                "create index on shard_0001.alembic_version ((mal.evil('a version table')))",
                "create table shard_0000.people (email text primary key)",
                "create table shard_0001.people (email text primary key)",
            ):
                mallory.execute(statement.encode())
        with connected(url) as admin:
            # A table of the engine's owner, with a column of another role's type.
            admin.execute(
                "create table shardids_ref.lands (id bigint primary key, c mal.colour default 'red')"
            )
            admin.execute("insert into shardids_ref.lands values (1, 'red')")
            admin.execute("insert into shardids_catalog.reference_writer (node) values ('a')")
            admin.execute("insert into shardids_catalog.reference_table values ('lands', 'active')")
        with catalog_at(url) as catalog:
            lookups.create(catalog, "people.email")
        with connected(url.set(username="mallory", password="m")) as mallory:
            mallory.execute("insert into shard_0001.people values ('m@x')")
            for schema in ("shard_0000", "shard_0001"):
                for statement in (
                    "create index on {}.people ((mal.evil('a look-up')))",
                    "create trigger once before update on {}.people for each statement"
                    " execute function mal.fires('a look-up, by statement')",
                ):
                    mallory.execute(sql.SQL(statement).format(sql.Identifier(schema)))
        recorded = Recorded(server.directory)
        yield Hostile(url=url, proof=folder / "ran", recorded=recorded, id_=row[0])


def test_every_kind_of_object_that_can_carry_a_function_is_planted_or_refused(hostile: Hostile) -> None:
    with connected(hostile.url) as admin:
        there = kinds(admin)
        assert there - PLANTED.keys() - REFUSED.keys() == set(), "new in this version of PostgreSQL"
    with connected(hostile.url.set(username="mallory", password="m")) as mallory:
        mallory.execute("create table shard_0000.plain (n bigint)")
        try:
            for kind in there & REFUSED.keys():
                with pytest.raises(psycopg.Error):
                    mallory.execute(REFUSED[kind].replace("{s}", "shard_0000").encode())
        finally:
            mallory.execute("drop table shard_0000.plain")
    hostile.recorded.new()


def test_the_plants_run_as_a_superuser_where_nothing_guards_against_them(hostile: Hostile) -> None:
    with _rights_kept(hostile):
        for kind in sorted(RUN_WHEN_READ):
            with connected(hostile.url) as admin, admin.transaction():
                admin.execute("set local constraint_exclusion = on")
                admin.execute(
                    f"select to_jsonb(t), t::text from shard_0000.{table_of(kind)} t"
                    " where id <> 5 and n = 0".encode()
                )
                raise psycopg.Rollback
            assert {role for _, role, _ in hostile.recorded.new()} - {"mallory"} == {"postgres"}, kind


@contextmanager
def _rights_kept(hostile: Hostile) -> Iterator[None]:
    try:
        yield
    finally:
        hostile.proof.unlink(missing_ok=True)
        with connected(hostile.url) as admin:
            admin.execute("alter role mallory nosuperuser")


def test_the_doctor_reads_tables_of_others_as_a_role_that_only_reads(hostile: Hostile) -> None:
    # A view is no table of the shard's, and not read.
    tables = {table_of(kind) for kind in PLANTED if kind != ("pg_rewrite", "ev_action")}
    keys = [ShardingKey(table_name=table, column_name="word") for table in tables]
    for read_only in (False, True):
        with closing(Catalog(dsn(hostile.url), read_only=read_only)) as catalog:
            report = doctor.examine(catalog, keys=keys, every_row=True)
        assert hostile.ran() == {READER}
        assert report.skipped == (("engine-changed",) if read_only else ())
        samples = [one for node in report.facts.nodes.values() for one in node.samples]
        assert {one.table_name for one in samples if one.said_by == "key"} == tables
        assert "notes" in {one.table_name for one in samples if one.said_by == "id"}
        assert report.facts.nodes["a"].application_revisions[1] == ()
        (lookup,) = report.facts.lookups
        assert lookup.error is None
        assert not lookup.unread
        assert report.facts.references.readings["a"][0][0].rows == 1


def test_look_ups_are_filled_and_swept_by_what_a_role_reads_that_only_reads(hostile: Hostile) -> None:
    with catalog_at(hostile.url) as catalog:
        assert lookups.backfill(catalog, "people.email", dry_run=True).rows == 1
        assert lookups.sweep(catalog, "people.email", dry_run=True).claims == 0
        assert hostile.ran() == {READER}
        # Waits for writers of the tables, with a lock.
        assert lookups.backfill(catalog, "people.email").claimed == 1
        assert hostile.ran() == {READER}
        with connected(hostile.url.set(username="mallory", password="m")) as mallory:
            mallory.execute("set shardids.unclaimed_writes = 'allowed'")
            mallory.execute("insert into shard_0000.people values ('m@x'), ('gone')")
        hostile.recorded.new()
        with pytest.raises(ClusterConflict, match="rows of two shards have one people"):
            lookups.backfill(catalog, "people.email")
        assert hostile.ran() == {READER}
        with connected(hostile.url.set(username="mallory", password="m")) as mallory:
            mallory.execute("delete from shard_0000.people")
        hostile.recorded.new()
        swept = lookups.sweep(catalog, "people.email")
        assert (swept.claims, swept.given_up, swept.busy) == (2, 1, 0)
        assert hostile.ran() == {READER}


def test_a_plan_of_an_adoption_reads_rows_as_a_role_that_only_reads(hostile: Hostile, tmp_path: Path) -> None:
    source = hostile.url.set(database="source")
    with connected(hostile.url) as admin:
        admin.execute("create database source")
        admin.execute("grant create on database source to mallory")
        admin.execute("create role reading login password 'r'")
        admin.execute("grant pg_read_all_data to reading")
    with connected(source) as admin:
        admin.execute("create table public.users (id bigint primary key)")
        admin.execute("insert into public.users values (0)")
    with connected(source.set(username="mallory", password="m")) as mallory:
        mallory.execute("create schema shop")
        mallory.execute(
            "create function shop.next_id() returns bigint as 'select random() * 1e18' language sql"
        )
        # To be taken for the engine's owner.
        mallory.execute("create schema shardids")
        plant(mallory, "mallory", tmp_path / "ran", "shop")
    with connected(source) as admin:
        planted = (
            "select c.relname from pg_class c where c.relnamespace = 'shop'::regnamespace"
            " and c.relkind in ('r', 'p') and not c.relispartition and c.relname !~ '_rows$' order by 1"
        )
        tables = [str(row[0]) for row in admin.execute(planted.encode())]
    hostile.recorded.new()
    keys = [f"shop.{table}.n" for table in tables]
    plan = make_plan(source, root="public.users", keys=keys).plan
    assert hostile.ran() == set()
    (skipped,) = [one for one in plan.findings if one.subject == "rows"]
    assert 'no row was read: role "postgres" can write' in skipped.reason
    assert "GRANT pg_read_all_data" in skipped.remedy
    unchecked = {one.subject for one in plan.findings if "its rows were not checked" in one.reason}
    assert unchecked == {f"shop.{table}" for table in tables}

    reading = source.set(username="reading", password="r")
    plan = make_plan(source, root="public.users", keys=keys, reader=reading).plan
    assert hostile.ran() == {"reading"}
    assert "reading" not in plan.source
    with pytest.raises(
        BadArgument, match='another database or server: "postgres", and the source is "source"'
    ):
        make_plan(source, root="public.users", reader=hostile.url.set(username="reading", password="r"))
    # Of row security, which the role may not pass.
    assert {one.subject for one in plan.findings if "its rows were not checked" in one.reason} == {
        f"shop.{table_of(('pg_policy', column))}" for column in ("polqual", "polwithcheck")
    }
    assert not [one for one in plan.findings if one.subject == "rows"]


def test_the_console_and_metrics_read_as_a_role_that_only_reads(hostile: Hostile) -> None:
    with browsing(hostile.url) as client:
        wait_for(lambda: told(client, "/api/nodes")[0]["up"], "node a")
        assert client.post("/api/doctor", json={}).status_code == 202
        found = client.post("/api/inspect", json={"text": str(hostile.id_), "look": True}).json()
        assert found["ids"][0]["table"] == "notes"
        assert found["unread"] == []
        wait_for(lambda: told(client, "/api/map")["sizes_at"], "sizes")
        assert told(client, "/api/migrations")["errors"] == []
        wait_for(lambda: told(client, "/api/doctor")["state"] != "running", "the examination")
        assert told(client, "/api/doctor")["state"] == "done"
    asker = Asker(hostile.url)
    try:
        assert asker.read().nodes["a"].error is None
    finally:
        asker.close()
    assert hostile.ran() == {READER}


def test_a_reader_who_is_left_something_behind_runs_none_of_it(hostile: Hostile) -> None:
    engine = administrative_engine(hostile.url, what="node")
    try:
        with reading_as_reader(engine, "node") as reader:
            assert reader.skips is None
            table = table_of(("pg_index", "indexprs"))
            query = f"select concat(t.id) as id from shard_0000.{table} t where n = 0"
            first, second, path = reader.read(
                [query, query, "select current_setting('search_path') as path, current_user::text as role"]
            )
            assert not isinstance(first, Refused)
            assert first == second
            assert path == [{"path": "pg_catalog, pg_temp", "role": READER}]
            # In the next transaction, too.
            assert reader.read([query]) == [first]
            assert reader.read(["select 1 / 0 as n"]) == [
                Refused(reason="division by zero", sqlstate="22012")
            ]
    finally:
        engine.dispose()
    assert hostile.ran() == {READER}


def test_the_reader_reads_nothing_in_a_transaction_that_can_write(hostile: Hostile) -> None:
    with (
        connected(hostile.url) as admin,
        pytest.raises(psycopg.Error, match="runs in read-only transactions only"),
    ):
        admin.execute("select shardids_reader.read(array['select 1'])")


def test_a_version_table_of_others_is_not_read_by_a_transaction_that_writes(hostile: Hostile) -> None:
    with (
        connected(hostile.url) as admin,
        pytest.raises(psycopg.errors.InsufficientPrivilege, match="belongs to role"),
    ):
        admin.execute("select shardids.enter_revision(1, 'alembic_version', '{}')")
    assert hostile.ran() == set()


@pytest.fixture
def node(databases: BlankDatabases, make_role: MakeRole) -> Iterator[tuple[URL, str]]:
    """A cluster of one node in which another role owns a table."""
    url = databases.take()
    found_cluster(url, {"a": url}, 2)
    role = str(make_role("mallory").username)
    with connected(url) as admin:
        admin.execute("create table shard_0000.notes (id bigint primary key default shard_0000.next_id())")
        admin.execute(sql.SQL("alter table shard_0000.notes owner to {}").format(sql.Identifier(role)))
    yield url, role
    databases.give_back(url)


def test_a_backfill_waits_for_the_write_barrier_of_a_shard_that_is_being_moved(
    node: tuple[URL, str],
) -> None:
    url, _ = node
    with connected(url) as admin, admin.transaction():
        admin.execute("set local transaction read only")
        admin.execute("select shardids.pass_barrier(0, 'shard_0000.notes')")
    with connected(url) as admin, admin.transaction() as transaction:
        admin.execute("select shardids.add_barriers(0)")
        admin.execute("select shardids.release(0)")
        admin.execute("select shardids.pass_barrier(0, 'shard_0000.notes')")
        admin.execute("select shardids.fence(0)")
        with pytest.raises(psycopg.Error, match="is fenced and issues no IDs"):
            admin.execute("select shardids.pass_barrier(0, 'shard_0000.notes')")
        raise psycopg.Rollback(transaction)


def _skips(url: URL) -> str | None:
    engine = administrative_engine(url, what="node")
    try:
        with reading_as_reader(engine, 'node "a"') as reader:
            return reader.skips
    finally:
        engine.dispose()


def test_without_a_reader_the_doctor_lists_the_checks_that_it_skipped(node: tuple[URL, str]) -> None:
    url, _ = node
    with catalog_at(url) as catalog:
        before = doctor.examine(catalog).findings
        assert "row-in-wrong-shard" in doctor.examine(catalog).checks
        engine = administrative_engine(url, what="node")
        with engine.begin() as connection:
            remove_reader(connection)
        report = doctor.examine(catalog)
        (found,) = [one for one in report.findings if one.check == "reader-missing"]
        assert "can write, code of other roles would run as it" in found.what
        assert set(report.skipped) == set(OF_ROWS)
        assert not set(report.checks) & set(OF_ROWS)
        with engine.begin() as connection:
            assert install_reader(connection) is None
        engine.dispose()
        assert doctor.examine(catalog).findings == before


def test_where_nobody_else_owns_anything_no_reader_is_needed(node: tuple[URL, str]) -> None:
    url, _ = node
    engine = administrative_engine(url, what="node")
    with engine.begin() as connection:
        remove_reader(connection)
    engine.dispose()
    assert "there is no role" in (_skips(url) or "") or "is not there" in (_skips(url) or "")
    with connected(url) as admin:
        admin.execute("drop table shard_0000.notes")
    assert _skips(url) is None


@pytest.mark.parametrize(
    ("done", "undone", "fault"),
    [
        ("grant shardids_reader to {}", "revoke shardids_reader from {}", "other roles are members"),
        ("alter role shardids_reader createrole", "alter role shardids_reader nocreaterole", "may do more"),
        ("alter role shardids_reader login", "alter role shardids_reader nologin", "may do more"),
        (
            "grant pg_write_all_data to shardids_reader",
            "revoke pg_write_all_data from shardids_reader",
            "member",
        ),
        ("grant {} to shardids_reader", "revoke {} from shardids_reader", "member of other roles"),
        ("create table public.t (); alter table public.t owner to shardids_reader", "", "owns more"),
        ("alter function shardids_reader.read(text[]) security invoker", "", "is another than"),
        ("alter function shardids_reader.read(text[]) owner to {}", "", "is another than"),
        ("alter schema shardids_reader owner to {}", "", "is another than"),
        ("alter function shardids_reader.read(text[]) reset search_path", "", "is another than"),
    ],
)
def test_a_reader_that_may_do_more_or_that_others_can_change_is_not_used(
    node: tuple[URL, str], done: str, undone: str, fault: str
) -> None:
    url, role = node
    quoted = sql.Identifier(role).as_string()
    with connected(url) as admin:
        assert _skips(url) is None
        admin.execute(done.replace("{}", quoted).encode())
        try:
            assert fault in (_skips(url) or "")
        finally:
            admin.execute(undone.replace("{}", quoted).encode() or b"select 1")


def test_a_role_that_can_create_roles_makes_the_reader_itself(
    databases: BlankDatabases, make_role: MakeRole, admin: psycopg.Connection
) -> None:
    url = databases.take()
    own = make_role("owner")
    name = sql.Identifier(str(own.username))
    admin.execute(sql.SQL("alter role {} createrole").format(name))
    admin.execute(
        sql.SQL("grant create on database {} to {}").format(sql.Identifier(str(url.database)), name)
    )
    if admin.info.server_version >= 160000:
        admin.execute(sql.SQL("grant pg_read_all_data to {} with admin option").format(name))
        admin.execute(
            sql.SQL("grant shardids_reader to {} with admin option, inherit false, set false").format(name)
        )
    mine = own.set(database=url.database)
    found_cluster(mine, {"a": mine}, 2)
    stranger = make_role("mallory")
    with connected(url) as superuser:
        superuser.execute(
            "create table shard_0000.notes (id bigint primary key default shard_0000.next_id())"
        )
        superuser.execute(
            sql.SQL("alter table shard_0000.notes owner to {}").format(sql.Identifier(str(stranger.username)))
        )
    assert _skips(mine) is None
    assert _skips(url) is None
    with catalog_at(mine) as catalog:
        assert "row-in-wrong-shard" in doctor.examine(catalog).checks
    databases.give_back(url)


def test_a_role_that_only_reads_reads_itself(node: tuple[URL, str], make_role: MakeRole) -> None:
    url, _ = node
    reading = make_role("reading")
    name = sql.Identifier(str(reading.username))
    with connected(url) as admin:
        admin.execute(sql.SQL("grant pg_read_all_data to {}").format(name))
        assert _skips(reading.set(database=url.database)) is None
        admin.execute(sql.SQL("grant insert on shard_0000.notes to {}").format(name))
        assert "can write" in (_skips(reading.set(database=url.database)) or "")


def test_objects_of_a_role_that_is_set_are_of_others_to_a_superuser(node: tuple[URL, str]) -> None:
    url, role = node
    engine = administrative_engine(url, what="node")
    with engine.begin() as connection:
        remove_reader(connection)
    engine.dispose()
    database = sql.Identifier(str(url.database))
    with connected(url) as admin:
        admin.execute(sql.SQL("alter database {} set role = {}").format(database, sql.Identifier(role)))
        try:
            assert 'role "postgres" can write' in (_skips(url) or "")
        finally:
            admin.execute(sql.SQL("alter database {} reset role").format(database))


def test_what_predefined_roles_own_is_of_others(node: tuple[URL, str], make_role: MakeRole) -> None:
    url, _ = node
    engine = administrative_engine(url, what="node")
    with engine.begin() as connection:
        remove_reader(connection)
    engine.dispose()
    reading = make_role("reading")
    with connected(url) as admin:
        admin.execute("alter table shard_0000.notes owner to current_user")
        admin.execute("create function public.f() returns integer language sql return 1")
        admin.execute(
            sql.SQL("grant pg_read_all_data, pg_monitor to {}").format(sql.Identifier(str(reading.username)))
        )
        assert _skips(url) is None
        assert _skips(reading.set(database=url.database)) is None
        admin.execute("alter function public.f() owner to pg_monitor")
        assert "can write" in (_skips(url) or "")
        assert "can write" in (_skips(reading.set(database=url.database)) or "")


def test_without_a_reader_migrations_read_version_tables_that_hold_no_code_of_others(
    node: tuple[URL, str],
) -> None:
    url, role = node
    engine = administrative_engine(url, what="node")
    with engine.begin() as connection:
        remove_reader(connection)
    with connected(url) as admin:
        for shard in range(2):
            admin.execute(f"create table shard_000{shard}.alembic_version (version_num varchar(32))".encode())
            admin.execute(f"insert into shard_000{shard}.alembic_version values ('one')".encode())
        admin.execute(
            sql.SQL("alter table shard_0001.alembic_version owner to {}").format(sql.Identifier(role))
        )
    try:
        for one in (engine, engine.execution_options(isolation_level="AUTOCOMMIT")):
            there = read_node("a", one, "alembic_version")
            assert isinstance(there[0], Position)
            assert there[0].heads == ("one",)
            assert isinstance(there[1], MissingPrivilege)
            assert f'belongs to role "{role}"' in there[1].message
    finally:
        engine.dispose()


def test_a_move_compares_rows_as_a_role_that_only_reads(hostile: Hostile) -> None:
    found = digests_at(hostile.url, 0)
    assert {f"shard_0000.{table_of(kind)}" for kind in RUN_WHEN_READ - {("pg_rewrite", "ev_action")}} <= {
        *found
    }
    assert hostile.ran() == {READER}


def test_a_comparison_with_models_is_refused_where_it_would_run_code_of_others(node: tuple[URL, str]) -> None:
    url, _ = node
    engine = administrative_engine(url, what="node")
    try:
        with engine.connect() as connection, pytest.raises(MissingPrivilege, match="could run code of other"):
            require_no_code_of_others(connection, "comparing")
        with connected(url) as admin:
            admin.execute("drop table shard_0000.notes")
        with engine.connect() as connection:
            require_no_code_of_others(connection, "comparing")
    finally:
        engine.dispose()
