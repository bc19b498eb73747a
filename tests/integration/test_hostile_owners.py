"""Code that owners of tables put where PostgreSQL runs it as whoever reads: nothing of ours runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from sqlalchemy.engine import URL

from shardids import doctor, lookups
from shardids.catalog.rows import Catalog
from shardids.doctor.findings import Severity
from shardids.doctor.samples import ShardingKey
from tests.conftest import BlankDatabases, MakeRole, dsn, found_cluster
from tests.support.clusters import catalog_at, connected
from tests.support.consoles import browsing, told
from tests.support.waiting import wait_for

TRAPS = {
    "by_index": "create index on {s}.by_index ((id + mal.evil(1)))",
    "by_operator": "create index on {s}.by_operator ((id + (1 operator(mal.@@) 1)))",
    "by_part_of_index": "create index on {s}.by_part_of_index (id) where id > mal.evil(1)",
    "by_check": "alter table {s}.by_check add check (id > mal.evil(1))",
    "by_statistics": "create statistics {s}.told on (id + mal.evil(1)), id from {s}.by_statistics",
    "by_child": "create table {s}.child (check (id > mal.evil(1))) inherits ({s}.by_child)",
}
"""What mallory adds to a table of one shard, by its name."""
HARMLESS = """
    create function shard_0000.is_short(bigint) returns boolean language sql immutable return $1 is not null;
    create table shard_0000.notes (id bigint primary key default shard_0000.next_id(), word text not null);
    create index on shard_0000.notes (lower(word)) where word <> upper(word);
    alter table shard_0000.notes add check (shard_0000.is_short(id)), add check (shardids.shard_of(id) = 0);
    create statistics shard_0000.words on lower(word), id from shard_0000.notes"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostile:
    """A cluster of one node where mallory owns tables; ``proof`` is there once a superuser ran his code."""

    url: URL
    mallory: URL
    proof: Path
    id_: int

    def has_run(self) -> bool:
        with connected(self.url) as db:
            row = db.execute("select rolsuper from pg_roles where rolname = %s", [self.mallory.username])
            return self.proof.exists() or row.fetchone() == (True,)

    def forget(self) -> None:
        self.proof.unlink(missing_ok=True)
        with connected(self.url) as db:
            db.execute(f'alter role "{self.mallory.username}" nosuperuser'.encode())


@pytest.fixture(scope="module")
def hostile(
    databases: BlankDatabases, tmp_path_factory: pytest.TempPathFactory, make_role: MakeRole
) -> Iterator[Hostile]:
    url = databases.take()
    found_cluster(url, {"a": url}, 2)
    role = make_role("mallory").set(database=url.database)
    folder = tmp_path_factory.mktemp("owners")
    folder.chmod(0o777)
    proof = folder / "ran"
    with connected(url) as admin:
        for statement in (
            f'create schema mal authorization "{role.username}"',
            f'grant create, usage on schema shard_0000, shard_0001 to "{role.username}"',
            f"select shardids.grant_usage(0, '{role.username}')",
            *HARMLESS.split(";"),
        ):
            admin.execute(statement.encode())
        row = admin.execute("insert into shard_0000.notes (word) values ('Word') returning id").fetchone()
        assert row is not None
        (id_,) = row
    with connected(role) as mallory:
        for statement in (
            f"""create function mal.act() returns void language plpgsql as $$
                begin
                  begin execute 'alter role "{role.username}" superuser';
                  exception when others then null; end;
                  begin copy (select 1) to program 'touch {proof}'; exception when others then null; end;
                end $$""",
            """create function mal.evil(integer) returns integer language plpgsql immutable as
                 'begin perform mal.act(); return 0; end'""",
            """create function mal.sum(integer, integer) returns integer language plpgsql immutable as
                 'begin perform mal.act(); return 0; end'""",
            "create operator mal.@@ (function = mal.sum, leftarg = integer, rightarg = integer)",
            *(
                f"create table shard_0000.{table} (id bigint primary key default shard_0000.next_id())"
                for table in TRAPS
            ),
            *(trap.replace("{s}", "shard_0000") for trap in TRAPS.values()),
            "create table shard_0001.alembic_version (version_num varchar(32) primary key)",
            "create index on shard_0001.alembic_version ((mal.evil(1)))",
            "create table shard_0000.people (email text primary key)",
            "create table shard_0001.people (email text primary key)",
        ):
            mallory.execute(statement.encode())
    with catalog_at(url) as catalog:
        lookups.create(catalog, "people.email")
    with connected(role) as mallory:
        mallory.execute("create index on shard_0001.people ((email || mal.evil(1)::text))")
    there = Hostile(url=url, mallory=role, proof=proof, id_=id_)
    there.forget()
    yield there
    there.forget()
    databases.give_back(url)


@pytest.mark.parametrize("table", TRAPS)
def test_the_traps_work_where_nothing_guards_against_them(hostile: Hostile, table: str) -> None:
    with connected(hostile.url) as admin:
        admin.execute("set constraint_exclusion = on")
        admin.execute(f"select from shard_0000.{table} where id < 5".encode())
    assert hostile.has_run()
    hostile.forget()


def test_the_doctor_leaves_tables_with_traps_out_and_says_so(hostile: Hostile) -> None:
    keys = [ShardingKey(table_name=table, column_name="id") for table in ("notes", "by_index")]
    for read_only in (False, True):
        with closing(Catalog(dsn(hostile.url), read_only=read_only)) as catalog:
            report = doctor.examine(catalog, keys=keys)
        assert not hostile.has_run()
        unread = {found.thing: found for found in report.findings if found.check == "table-unread"}
        assert unread.keys() == {*TRAPS, "alembic_version", "people"}
        assert "so look-up people.email was not compared" in unread["people"].what
        assert {found.severity for found in unread.values()} == {Severity.INFO}
        assert "mal.evil(integer), which belongs to role" in unread["by_index"].what
        assert "mal.sum(integer,integer)" in unread["by_operator"].what
        assert report.skipped == (("engine-changed",) if read_only else ())
        # A table that was not read is not taken for one that is missing, nor is its neighbour left out.
        assert not {"revisions-apart", "node-unread"} & {found.check for found in report.findings}
        samples = [one for node in report.facts.nodes.values() for one in node.samples]
        assert {(one.table_name, one.said_by) for one in samples} == {("notes", "id"), ("notes", "key")}


def test_the_console_leaves_tables_with_traps_out_and_says_so(hostile: Hostile) -> None:
    with browsing(hostile.url) as client:
        wait_for(lambda: told(client, "/api/nodes")[0]["up"], "node a")
        assert client.post("/api/doctor", json={}).status_code == 202
        found = client.post("/api/inspect", json={"text": str(hostile.id_), "look": True}).json()
        assert found["ids"][0]["table"] == "notes"
        left_out = {sentence.partition(" was not looked at: ")[0] for sentence in found["unread"]}
        assert left_out == {f"shard_0000.{table}" for table in TRAPS}
        wait_for(lambda: told(client, "/api/map")["sizes_at"], "sizes")
        shown = told(client, "/api/map")
        assert min(shown["size_bytes"]) > 0
        (sentence,) = shown["sizes_errors"]
        assert "shard_0001.alembic_version was not looked at: index" in sentence
        assert told(client, "/api/migrations")["errors"] == [sentence]
        wait_for(lambda: told(client, "/api/doctor")["state"] != "running", "the examination")
        examined = told(client, "/api/doctor")
    assert examined["state"] == "done"
    assert examined["skipped"] == ["engine-changed"]
    assert "table-unread" in {one["check"] for one in examined["findings"]}
    assert not hostile.has_run()


def test_reading_revisions_is_refused(hostile: Hostile) -> None:
    with (
        connected(hostile.url) as admin,
        pytest.raises(psycopg.errors.InsufficientPrivilege, match="was not looked at"),
    ):
        admin.execute("select shardids.revisions()")
    assert not hostile.has_run()


def test_what_belongs_to_those_who_are_trusted_keeps_nothing_from_being_read(hostile: Hostile) -> None:
    with connected(hostile.url) as admin:
        code = admin.execute("select shardids.strangers_code('shard_0000', 'notes')").fetchone()
        assert code == (None,)
        if admin.execute("select from pg_available_extensions where name = 'citext'").fetchone():
            admin.execute("create extension citext schema public")
            admin.execute("create table shard_0000.mails (id bigint primary key, mail public.citext unique)")
            admin.execute(
                "create index on shard_0000.mails (id) where mail operator(public.<>) 'x'::public.citext"
            )
            code = admin.execute("select shardids.strangers_code('shard_0000', 'mails')").fetchone()
            assert code == (None,)
            admin.execute("drop table shard_0000.mails")
            admin.execute("drop extension citext")
    with connected(hostile.mallory) as mallory:
        # His own code is nothing that he could not run anyway.
        code = mallory.execute("select shardids.strangers_code('shard_0000', 'by_index')").fetchone()
        assert code == (None,)


def test_a_reference_table_with_a_trap_is_not_compared(hostile: Hostile) -> None:
    with connected(hostile.url) as admin:
        admin.execute("create table shardids_ref.lands (id bigint primary key)")
        admin.execute(f'alter table shardids_ref.lands owner to "{hostile.mallory.username}"'.encode())
        admin.execute(f'grant usage, create on schema shardids_ref to "{hostile.mallory.username}"'.encode())
        with connected(hostile.mallory) as mallory:
            mallory.execute("create index on shardids_ref.lands ((id + mal.evil(1)))")
        hostile.forget()
        admin.execute("insert into shardids_catalog.reference_writer (node) values ('a')")
        admin.execute("insert into shardids_catalog.reference_table values ('lands', 'active')")
        try:
            with catalog_at(hostile.url) as catalog:
                report = doctor.examine(catalog)
        finally:
            admin.execute("delete from shardids_catalog.reference_table")
            admin.execute("delete from shardids_catalog.reference_writer")
            admin.execute("drop table shardids_ref.lands")
    found = {one.thing: one.what for one in report.findings if one.check == "table-unread"}
    assert "shardids_ref.lands was not looked at: index" in found["shardids_ref"]
    assert not hostile.has_run()


def test_partition_keys_and_what_is_no_table_are_told(hostile: Hostile) -> None:
    with connected(hostile.mallory) as mallory:
        mallory.execute("create table shard_0000.parted (id bigint) partition by range ((id + mal.evil(1)))")
        mallory.execute("create view shard_0000.seen as select mal.evil(1)")
    hostile.forget()
    with connected(hostile.url) as admin:
        (code,) = admin.execute("select shardids.strangers_code('shard_0000', 'parted')").fetchone() or ("",)
        assert code.startswith("the partition key of shard_0000.parted calls mal.evil(integer)")
        (code,) = admin.execute("select shardids.strangers_code('shard_0000', 'seen')").fetchone() or ("",)
        assert code == "it is not a table"
    assert not hostile.has_run()
    with connected(hostile.mallory) as mallory:
        mallory.execute("drop table shard_0000.parted")
        mallory.execute("drop view shard_0000.seen")


def test_an_owner_adds_no_code_while_his_table_is_read(hostile: Hostile) -> None:
    with connected(hostile.mallory) as mallory:
        mallory.execute("create table shard_0000.late (id bigint primary key)")
        late = [
            "create index on shard_0000.late ((id + mal.evil(1)))",
            "create index concurrently on shard_0000.late ((id + mal.evil(1)))",
            "create statistics shard_0000.later on (id + mal.evil(1)), id from shard_0000.late",
            "alter table shard_0000.late add check (id > mal.evil(1))",
            "create table shard_0000.part_of_late () inherits (shard_0000.late)",
        ]
        mallory.execute("set lock_timeout = '50ms'")
        with connected(hostile.url) as admin:
            with admin.transaction():
                code = admin.execute("select shardids.strangers_code('shard_0000', 'late')").fetchone()
                assert code == (None,)
                for statement in late:
                    with pytest.raises(psycopg.errors.LockNotAvailable):
                        mallory.execute(statement.encode())
            assert admin.execute("show lock_timeout").fetchone() != ("200ms",)
            # The other way round: what can't be locked is not read.
            with mallory.transaction():
                mallory.execute("lock table shard_0000.late in share mode")
                code = admin.execute("select shardids.strangers_code('shard_0000', 'late')").fetchone()
                assert code is not None
                assert "can't be locked now" in code[0]
        mallory.execute("drop index if exists shard_0000.late_expr_idx, shard_0000.late_expr_idx1")
        mallory.execute("drop table shard_0000.late")
