"""Damages done by hand: just the checks that name each find it, and what the doctor says to paste ends it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import psycopg
import pytest

from shardids.pg.queries import batches
from shardids.watch.doctor.findings import Command, Severity
from tests.support.clusters import command_here
from tests.support.lengths import sampled
from tests.support.patient import TABLES, Damage, Patient, S, admitted

DIFFERS = ("schema-differs",)


def drift(done: str, undo: str = "", since: int = 14) -> Damage:
    """A change of shard 5 that no other shard has."""
    return Damage(done=done, found=DIFFERS, undo=undo, since=since)


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
    ),
    drift(
        f"alter table {S}.users drop constraint positive",
        f"alter table {S}.users add constraint positive check (age >= 0)",
    ),
    drift(f"drop index {S}.photos_user"),
    drift(f"create index more on {S}.photos (title)", f"drop index {S}.more"),
    drift(
        f"alter table {S}.users disable row level security",
    ),
    drift(
        f"alter policy own on {S}.users using (true)",
        f"alter policy own on {S}.users using (name = current_user)",
    ),
    drift(f"alter table {S}.users disable trigger touched"),
    drift(f"alter table {S}.photos disable trigger all"),
    drift(
        f"drop trigger touched on {S}.users",
    ),
    drift(f"alter function {S}.touch() security definer", f"alter function {S}.touch() security invoker"),
    drift(
        f"create or replace view {S}.names as select id, name from {S}.users where id > 0",
        f"create or replace view {S}.names as select id, name from {S}.users",
    ),
    drift(f"alter sequence {S}.numbers cache 50", f"alter sequence {S}.numbers cache 1"),
    drift(f"alter table {S}.photos owner to reader", f"alter table {S}.photos owner to postgres"),
    drift(f"alter table {S}.photos replica identity full"),
    drift(f"alter table {S}.photos set (fillfactor = 50)", f"alter table {S}.photos reset (fillfactor)"),
    drift(f"alter table {S}.photos set unlogged"),
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
        found=("extension-in-shard", "node-contract", *DIFFERS),
        undo="drop extension citext",
    ),
    # Who may do what, and where names lead.
    Damage(
        done=f"revoke select on {S}.users from reader",
        found=("role-rights",),
        undo=f"grant select on {S}.users to reader",
    ),
    Damage(
        done=f"revoke usage on schema {S} from reader; grant select on shard_0004.photos to reader",
        found=("role-rights", "role-rights"),
        undo=f"grant usage on schema {S} to reader",
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
    Damage(done="select shardids.grant_usage(array[5], 'reader')", found=("role-rights", "role-rights")),
)


@pytest.fixture(scope="module")
def patient() -> Iterator[Patient]:
    with admitted() as there:
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
            remedied = {
                (one.check, one.shards) for one in found if one.commands and one.check not in NEED_MORE
            }
            assert not remedied or not remedied & {(one.check, one.shards) for one in patient.findings()}
    assert patient.findings() == []


def test_a_schema_that_was_dropped_is_found_and_made_again(patient: Patient) -> None:
    patient.run("b", f"drop schema {S} cascade")
    gone, *others = patient.findings()
    assert others == []
    assert (gone.check, gone.severity) == ("shard-on-no-node", Severity.ERROR)
    assert (gone.nodes, gone.shards) == (("b",), (5,))
    assert "docs/how-to/restore-and-upgrade.md" in gone.to_do
    catalog = {"SHARDIDS_CATALOG": patient.urls["a"]}
    for told in (command_here("shard", "list", "5", **catalog), command_here("upgrade", **catalog)):
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
