"""Damages done by hand: just the checks that name each find it, and what the doctor says to paste ends it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace

import psycopg
import pytest

from shardids import doctor
from shardids.catalog.queries import batches
from shardids.catalog.rows import Catalog
from shardids.dev import devcluster
from shardids.dev.embedded import temporary_servers
from shardids.doctor.findings import Command, Severity, Where
from shardids.views import drop_query_node
from tests.support.clusters import catalog_at, command_here
from tests.support.lengths import sampled

CHECKS = [check.name for check in doctor.CHECKS if check.name != "tick-rate"]
DIFFERS = ("schema-differs",)

TABLES = """
    create table {s}.users (id bigint primary key default {s}.next_id(), name text not null,
                            age integer default 0 constraint positive check (age >= 0));
    create table {s}.photos (id bigint primary key default {s}.next_id(), user_id bigint references {s}.users,
                             title varchar(40));
    create index photos_user on {s}.photos (user_id);
    create view {s}.names as select id, name from {s}.users;
    create sequence {s}.numbers;
    create function {s}.touch() returns trigger language plpgsql as 'begin return new; end';
    create trigger touched before update on {s}.users for each row execute function {s}.touch();
    alter table {s}.users enable row level security;
    create policy own on {s}.users using (name = current_user);
    create table {s}.alembic_version (version_num varchar(32) primary key);
    insert into {s}.alembic_version values ('0001');
    insert into {s}.users (name) select 'x' from generate_series(1, 20);
    select shardids.define_counter(id, 'order', 'day') from shardids.shard where schema = '{s}';
    grant usage on schema {s} to reader;
    grant select on {s}.users to reader;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """What is done to a node or the catalog, the checks that find it, and what ends it if no command does.

    ``stays``: the session that does it stays connected, idle for over five seconds when the doctor comes.
    """

    done: str
    found: tuple[str, ...]
    undo: str = ""
    on: str = "b"
    undo_on: str = ""
    since: int = 14
    stays: bool = False

    def to(self, shard: int) -> Damage:
        """The same damage, done to another shard than 5."""
        done, undo = (
            re.sub(r"\b5\)", f"{shard})", text.replace(S, f"shard_{shard:04}"))
            for text in (self.done, self.undo)
        )
        return replace(self, done=done, undo=undo)


def drift(done: str, undo: str, since: int = 14) -> Damage:
    """A change of shard 5 that no other shard has."""
    return Damage(done=done, found=DIFFERS, undo=undo, since=since)


S = "shard_0005"
ODD = (5, 6, 7)
"""Fewer than half of the shards, so that the others are the usual ones."""
NEED_MORE = {"revision-unfinished", "move-interrupted", "engine-revision", "revision-edited"}
"""Checks whose remedies need more than this cluster has: see needs_more."""
DAMAGES = (
    # Where shards are.
    Damage(done="select shardids.fence(5)", found=("shard-stopped",)),
    Damage(done="select shardids.fence(5, 'a')", found=("shard-stopped",)),
    Damage(done="begin; select shardids.fence(5); rollback", found=("shard-stopped",)),
    Damage(
        done="update shardids_catalog.placement set node = 'a' where shard = 5",
        found=("shard-misplaced",),
        on="catalog",
    ),
    Damage(
        done="delete from shardids_catalog.placement where shard = 5",
        found=("shard-misplaced",),
        on="catalog",
    ),
    Damage(
        done="update shardids_catalog.placement set state = 'creating' where shard = 5",
        found=("shard-unfinished",),
        on="catalog",
    ),
    Damage(
        done="insert into shardids_catalog.region (name, first_shard, last_shard) values ('eu', 5, 5)",
        found=("shard-outside-region",),
        on="catalog",
        undo="delete from shardids_catalog.region",
    ),
    Damage(done="delete from shardids.shard where id = 5", found=("shard-unregistered",)),
    Damage(done="update shardids.shard set server = 'x/1' where id = 5", found=("copy-not-activated",)),
    Damage(done="update shardids.node set on_copy = 'warn'", found=("on-copy-warns",)),
    Damage(done="create schema shard_0099; create table shard_0099.t ()", found=("schema-orphaned",)),
    Damage(done="alter database postgres set default_transaction_read_only = on", found=("node-read-only",)),
    Damage(done="alter role postgres set default_transaction_read_only = on", found=("node-read-only",)),
    Damage(
        done="create table public.kept as select * from shardids.node; delete from shardids.node",
        found=("node-mistaken",),
        undo="insert into shardids.node select * from public.kept; drop table public.kept",
    ),
    Damage(
        done="update shardids_catalog.node set url = replace(url, '/postgres?', '/template1?')"
        " where name = 'b'",
        found=("node-mistaken",),
        on="catalog",
        undo="update shardids_catalog.node set url = replace(url, '/template1?', '/postgres?')"
        " where name = 'b'",
    ),
    Damage(
        done="update shardids_catalog.node set url = replace(url, '/postgres?', '/none?') where name = 'b'",
        found=("node-unreachable",),
        on="catalog",
        undo="update shardids_catalog.node set url = replace(url, '/none?', '/postgres?') where name = 'b'",
    ),
    # The generator.
    Damage(
        done="update shardids.shardids_version set version_num = 'x' || version_num",
        found=("engine-revision",),
        undo="update shardids.shardids_version set version_num = substr(version_num, 2)",
    ),
    Damage(
        done=f"update {S}.shardids_version set version_num = 'x' || version_num",
        found=("engine-revision",),
        undo=f"update {S}.shardids_version set version_num = substr(version_num, 2)",
    ),
    Damage(
        done="create or replace function shardids.sequence_bits() returns integer language sql immutable"
        " parallel safe return 11",
        found=("layout-differs", "row-in-wrong-shard"),
        undo="create or replace function shardids.sequence_bits() returns integer language sql immutable"
        " parallel safe return 10",
    ),
    Damage(
        done="create function shardids.shard_of(text) returns integer language sql return 1",
        found=("engine-changed",),
    ),
    Damage(
        done="alter function shardids.fence(integer, text) security invoker",
        found=("engine-changed",),
        undo="alter function shardids.fence(integer, text) security definer",
    ),
    Damage(done=f"alter sequence {S}.id_counter cache 20", found=("generator-sequence",)),
    Damage(done=f"alter sequence {S}.id_counter cycle", found=("generator-sequence",)),
    Damage(done=f"alter sequence {S}.id_offset increment by 7", found=("generator-sequence",)),
    Damage(done=f"alter sequence {S}.id_offset owner to reader", found=("generator-sequence",)),
    Damage(done=f"alter sequence {S}.id_counter set unlogged", found=("generator-sequence",), since=15),
    Damage(
        done="select shardids.reserve(5, 4000000);"
        f" insert into {S}.users (name) select 'x' from generate_series(1, 9);"
        f" select setval('{S}.id_counter', 1)",
        found=("generator-behind",),
    ),
    # Keys.
    Damage(
        done=f"create table {S}.t (id bigserial primary key)",
        found=("primary-key-default", *DIFFERS),
        undo=f"drop table {S}.t",
    ),
    Damage(
        done=f"create table {S}.t (id integer primary key default {S}.next_id())",
        found=("id-column-type", *DIFFERS),
        undo=f"drop table {S}.t",
    ),
    Damage(
        done=f"create table {S}.t (id integer primary key)",
        found=("id-column-type", *DIFFERS),
        undo=f"drop table {S}.t",
    ),
    Damage(
        done=f"alter table {S}.users alter id drop default",
        found=("primary-key-default", *DIFFERS),
        undo=f"alter table {S}.users alter id set default {S}.next_id()",
    ),
    Damage(
        done=f"alter table {S}.users alter id set default shard_0006.next_id()",
        found=("key-of-another-shard", *DIFFERS),
    ),
    Damage(
        done=f"create table {S}.t (photo_id integer references {S}.photos)",
        found=("foreign-key-type", *DIFFERS),
        undo=f"drop table {S}.t",
    ),
    Damage(
        done=f"alter table {S}.photos add constraint far foreign key (user_id) references shard_0006.users",
        found=("foreign-key-leaves-shard", *DIFFERS),
        undo=f"alter table {S}.photos drop constraint far",
    ),
    Damage(
        done=f"update pg_index set indisvalid = false where indexrelid = '{S}.photos_user'::regclass",
        found=("invalid-index",),
    ),
    Damage(
        done=f"insert into {S}.users (id, name) select shard_0006.next_id(), 'far'",
        found=("row-in-wrong-shard",),
        undo=f"delete from {S}.users where name = 'far'",
    ),
    # Migrations.
    Damage(
        done=f"update {S}.alembic_version set version_num = '0002'",
        found=("revisions-apart",),
        undo=f"update {S}.alembic_version set version_num = '0001'",
    ),
    Damage(
        done=f"comment on table {S}.alembic_version is 'shardids: up 0002 1'",
        found=("revision-unfinished",),
        undo=f"comment on table {S}.alembic_version is null",
    ),
    # Schemas that differ.
    drift(f"create table {S}.t (id uuid)", f"drop table {S}.t"),
    drift(f"alter table {S}.users add nick text", f"alter table {S}.users drop nick"),
    drift(
        f"alter table {S}.users alter name drop not null", f"alter table {S}.users alter name set not null"
    ),
    drift(f"alter table {S}.users alter age set default 1", f"alter table {S}.users alter age set default 0"),
    drift(
        f"alter table {S}.photos alter title type varchar(80)",
        f"alter table {S}.photos alter title type varchar(40)",
    ),
    drift(
        f"alter table {S}.users drop constraint positive;"
        f" alter table {S}.users add constraint positive check (age >= 0) not valid",
        f"alter table {S}.users validate constraint positive",
    ),
    drift(
        f"alter table {S}.users drop constraint positive",
        f"alter table {S}.users add constraint positive check (age >= 0)",
    ),
    drift(f"drop index {S}.photos_user", f"create index photos_user on {S}.photos (user_id)"),
    drift(f"create index more on {S}.photos (title)", f"drop index {S}.more"),
    drift(
        f"alter table {S}.users disable row level security",
        f"alter table {S}.users enable row level security",
    ),
    drift(
        f"alter policy own on {S}.users using (true)",
        f"alter policy own on {S}.users using (name = current_user)",
    ),
    drift(f"alter table {S}.users disable trigger touched", f"alter table {S}.users enable trigger touched"),
    drift(f"alter table {S}.photos disable trigger all", f"alter table {S}.photos enable trigger all"),
    drift(
        f"drop trigger touched on {S}.users",
        f"create trigger touched before update on {S}.users for each row execute function {S}.touch()",
    ),
    drift(f"alter function {S}.touch() security definer", f"alter function {S}.touch() security invoker"),
    drift(
        f"create or replace view {S}.names as select id, name from {S}.users where id > 0",
        f"create or replace view {S}.names as select id, name from {S}.users",
    ),
    drift(f"alter sequence {S}.numbers cache 50", f"alter sequence {S}.numbers cache 1"),
    drift(f"alter table {S}.photos owner to reader", f"alter table {S}.photos owner to postgres"),
    drift(
        f"alter table {S}.photos replica identity full", f"alter table {S}.photos replica identity default"
    ),
    drift(f"alter table {S}.photos set (fillfactor = 50)", f"alter table {S}.photos reset (fillfactor)"),
    drift(f"alter table {S}.photos set unlogged", f"alter table {S}.photos set logged"),
    # Numbers for people.
    Damage(done=f"update {S}.shardids_counter_kind set padding = 6", found=("counter-kind-differs",)),
    Damage(
        done=f"update {S}.shardids_counter_kind set zone = 'Asia/Tokyo', prefix = 'x'",
        found=("counter-kind-differs",),
    ),
    Damage(done=f"delete from {S}.shardids_counter_kind", found=("counter-kind-differs",)),
    Damage(
        done=f"update {S}.shardids_counter_kind set lanes = 32",
        found=("counter-kind-differs",),
        undo=f"update {S}.shardids_counter_kind set lanes = 1",
    ),
    Damage(
        done=f"insert into {S}.shardids_counter_zone values ('O''Hara', 'Asia/Tokyo');"
        " insert into shard_0006.shardids_counter_zone values ('O''Hara', 'Europe/Berlin')",
        found=("counter-zone-differs",),
        undo=f"delete from {S}.shardids_counter_zone; delete from shard_0006.shardids_counter_zone",
    ),
    # What others leave.
    Damage(
        done="insert into shardids_catalog.move (shard, source, target, offline, step)"
        " values (5, 'b', 'a', false, 'copy')",
        found=("move-interrupted",),
        on="catalog",
        undo="delete from shardids_catalog.move",
    ),
    Damage(done="create publication shardids_move_9", found=("leftover-publication",)),
    Damage(
        done="create subscription shardids_move_9 connection 'dbname=none' publication x"
        " with (connect = false)",
        found=("leftover-subscription",),
    ),
    Damage(
        done="select pg_create_logical_replication_slot('shardids_move_9', 'pgoutput')",
        found=("leftover-slot",),
    ),
    Damage(done="select pg_create_logical_replication_slot('others', 'pgoutput')", found=("slot-inactive",)),
    Damage(done="select pg_create_physical_replication_slot('standby', true)", found=("slot-inactive",)),
    Damage(done="select shardids.add_barriers(5)", found=("writes-rejected",)),
    Damage(
        done=f"begin; lock table {S}.users in share mode; prepare transaction 'lost'; select pg_sleep(5.2)",
        found=("prepared-transaction",),
    ),
    Damage(done="select pg_advisory_lock(1936220516, 5)", found=("lock-held",), stays=True),
    Damage(done="begin; select pg_advisory_xact_lock(1936220516, 5)", found=("lock-held",), stays=True),
    Damage(done="begin; select shardids.enter_shard(5)", found=("lock-held",), stays=True),
    Damage(
        done=f"create extension citext schema {S}",
        found=("extension-in-shard", *DIFFERS),
        undo="drop extension citext",
    ),
    # Who may do what, and where names lead.
    Damage(done=f"revoke select on {S}.users from reader", found=("role-rights",)),
    Damage(
        done=f"revoke usage on schema {S} from reader; grant select on shard_0004.photos to reader",
        found=("role-rights", "role-rights"),
    ),
    Damage(
        # Longer than a name may be, with commas, and results among the arguments.
        done="".join(
            f'create function {s}."Describe"(the_first_argument integer, the_second_argument numeric(5,2),'
            " out the_first_result text, out the_second_result text) language sql as 'select null, null';"
            f' revoke execute on function {s}."Describe" from public; '
            for s in (S, "shard_0006", "shard_0007")
        )
        + f'grant execute on function {S}."Describe" to reader',
        found=("role-rights", *DIFFERS),
        undo="; ".join(f'drop function {s}."Describe"' for s in (S, "shard_0006", "shard_0007")),
    ),
    Damage(
        done=f"alter schema {S} owner to reader",
        found=("schema-owner", *DIFFERS),
        undo=f"grant usage on schema {S} to reader",
    ),
    Damage(done="alter schema shardids owner to reader", found=("schema-owner", *DIFFERS)),
    Damage(done=f"alter role reader set search_path = {S}, public", found=("search-path",)),
    Damage(done=f"alter role reader in database postgres set search_path = {S}", found=("search-path",)),
    Damage(done=f"alter database postgres set search_path = {S}", found=("search-path",)),
    Damage(done=f"alter role all set search_path = {S}", found=("search-path",)),
    Damage(
        done="create table public.users (id bigint)", found=("shadowed-name",), undo="drop table public.users"
    ),
    Damage(
        done="create function public.next_id() returns bigint language sql return 1",
        found=("shadowed-name",),
        undo="drop function public.next_id()",
    ),
    # The last: the role keeps what it is granted in the other shards.
    Damage(done="select shardids.grant_usage(5, 'reader')", found=("role-rights", "role-rights")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """A cluster of two servers, whose node a holds the catalog too."""

    urls: dict[str, str]

    def run(self, on: str, *statements: str) -> None:
        """Runs statements on a node, each as psql would, in one session."""
        with self.session(on, *statements):
            pass

    @contextmanager
    def session(self, on: str, *statements: str) -> Iterator[None]:
        """The same, in a session that lasts as long as the block; the statements need not be all of it."""
        with closing(
            psycopg.connect(self.urls["a" if on == "catalog" else on], autocommit=True)
        ) as connection:
            for statement in statements:
                for one in statement.split("; "):
                    connection.execute(one.encode())
            yield

    @contextmanager
    def damaged(self, damage: Damage) -> Iterator[None]:
        """Does a damage, and in the end undoes what no command of the findings ends."""
        with self.session(damage.on, damage.done) if damage.stays else nullcontext():
            if not damage.stays:
                self.run(damage.on, damage.done)
            try:
                yield
            finally:
                if damage.undo:
                    self.run(damage.undo_on or damage.on, damage.undo)

    def paste(self, remedies: Sequence[Command]) -> None:
        """Runs the commands, those for a database in one session a place, as a DBA has it."""
        for remedy in remedies:
            if remedy.where is Where.SHELL:
                _, *arguments = shlex.split(remedy.text)
                done = command_here(*arguments, SHARDIDS_CATALOG=self.urls["a"])
                assert done.returncode == 0, (remedy.text, done.stderr)
        for place in sorted({remedy.place for remedy in remedies if remedy.where is not Where.SHELL}):
            there = [remedy for remedy in remedies if remedy.place == place]
            self.run(there[0].node or "catalog", *(remedy.text for remedy in there))

    def findings(self) -> list[doctor.Finding]:
        """What is wrong with it."""
        with catalog_at(self.urls["a"]) as catalog:
            found = doctor.examine(catalog, CHECKS).findings
        return [finding for finding in found if finding.severity is not Severity.INFO]


@pytest.fixture(scope="module")
def patient() -> Iterator[Patient]:
    settings = {"wal_level": "logical", "max_prepared_transactions": "5"}
    with temporary_servers(2, settings=settings) as servers:
        urls = {name: server.url() for name, server in zip("ab", servers, strict=True)}
        catalog = Catalog(devcluster.found(servers, 8))
        node_of = catalog.placement().node_of
        # It would be out of date after most damages.
        drop_query_node(catalog)
        catalog.close()
        there = Patient(urls=urls)
        for name in "ab":
            there.run(name, "create role reader")
        for shard, name in node_of.items():
            with psycopg.connect(urls[name], autocommit=True) as connection:
                connection.execute(TABLES.format(s=f"shard_{shard:04}").encode())
        yield there


def test_a_healthy_cluster_has_no_findings(patient: Patient) -> None:
    assert patient.findings() == []


def side_by_side(damages: Sequence[Damage]) -> Iterator[tuple[Damage, ...]]:
    """Damages to one shard alone are done to several shards at once, the others one after the other."""
    alone = [damage for damage in damages if damage.found == DIFFERS or damage.stays]
    for stays in (False, True):
        for together in batches([damage for damage in alone if damage.stays is stays], len(ODD)):
            yield tuple(damage.to(shard) for shard, damage in zip(ODD, together, strict=False))
    yield from ((damage,) for damage in damages if damage not in alone)


SETS = [pytest.param(damages) for damages in side_by_side(DAMAGES)]


@pytest.mark.parametrize("damages", sampled(SETS, every=3), ids=lambda damages: damages[0].done[:60])
def test_a_damage_is_found_and_its_remedy_works_when_pasted(
    patient: Patient, damages: tuple[Damage, ...]
) -> None:
    with psycopg.connect(patient.urls["b"]) as connection:
        version = connection.info.server_version // 10_000
    if not (damages := tuple(damage for damage in damages if damage.since <= version)):
        pytest.skip("a later PostgreSQL has it first")
    with ExitStack() as stack:
        for damage in damages:
            stack.enter_context(patient.damaged(damage))
        if any(damage.stays for damage in damages):
            patient.run("b", "select pg_sleep(5.2)")
        found = patient.findings()
        expected = sorted(check for damage in damages for check in damage.found)
        assert sorted(finding.check for finding in found) == expected, found
        assert all(finding.what and finding.to_do for finding in found)
        if len(damages) > 1:
            assert sorted(shard for finding in found for shard in finding.shards) == [*ODD[: len(damages)]]
        patient.paste([one for finding in found for one in finding.commands if not needs_more(one)])
        if any(damage.undo for damage in damages):
            remedied = {finding.check for finding in found if finding.commands} - NEED_MORE
            assert not remedied or not remedied & {finding.check for finding in patient.findings()}
    assert patient.findings() == []


def test_a_schema_that_was_dropped_is_found_and_made_again(patient: Patient) -> None:
    patient.run("b", f"drop schema {S} cascade")
    gone, *others = patient.findings()
    assert others == []
    assert (gone.check, gone.severity) == ("shard-on-no-node", Severity.ERROR)
    assert (gone.nodes, gone.shards) == (("b",), (5,))
    assert "docs/how-to/restore-and-upgrade.md" in gone.to_do
    catalog = {"SHARDIDS_CATALOG": patient.urls["a"]}
    for told in (command_here("shard", "show", "5", **catalog), command_here("upgrade", **catalog)):
        assert told.returncode == 1
        assert 'shard 5 on node "b"' in told.stderr
        assert "OID" not in told.stderr
        assert "shardids doctor" in told.stderr
    planned = command_here("upgrade", "--dry-run", **catalog)
    assert 'shard 5 on node "b"' in planned.stderr
    assert planned.returncode == 1
    (look,) = gone.commands
    patient.paste([look])
    assert [one.check for one in patient.findings()] == ["shard-on-no-node"]
    patient.paste([replace(look, text=look.text.replace("--dry-run", "--yes"))])
    assert "shard-on-no-node" not in {one.check for one in patient.findings()}
    with psycopg.connect(patient.urls["b"], autocommit=True) as connection:
        connection.execute(TABLES.format(s=S).encode())
    assert [one for one in patient.findings() if one.check != "role-rights"] == []


def needs_more(remedy: Command) -> bool:
    """Whether a command needs more than this cluster has: revisions, a real move, an older release."""
    return remedy.text.startswith(("shardids migrate", "shardids shard move", "shardids upgrade"))
