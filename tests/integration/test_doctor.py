"""The doctor on clusters that are well, and on clusters that are broken in every way it knows."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import closing

import psycopg
import pytest
from psycopg import sql
from psycopg.errors import UniqueViolation
from sqlalchemy import event
from sqlalchemy.engine import URL, Engine

from shardids import Cluster
from shardids.errors import BadArgument
from shardids.migrate import recording
from shardids.migrate.install import provision
from shardids.pg.connections import open_engine
from shardids.pg.embedded import temporary_server
from shardids.pg.urls import parse_url
from shardids.testing import devcluster
from shardids.watch import doctor
from shardids.watch.doctor.findings import Finding, Where
from shardids.watch.facts.rows import ShardingKey
from tests.conftest import MakeRole, dsn
from tests.support.clusters import catalog_at, command_here, connected, everything

Blank = Callable[[], URL]
Pair = tuple[URL, URL]
Sighting = tuple[str, str, tuple[str, ...], tuple[int, ...]]

ALL_BUT_RATES = [check.name for check in doctor.CHECKS if check.name not in {"tick-rate", "unknown-option"}]
"""The rates take half a second; Debian's server has options in every column that others don't know."""


@pytest.fixture
def pair(cluster_urls: dict[str, URL]) -> Pair:
    """A cluster of 8 shards, the lower half on node a, which holds the catalog too, the rest on node b."""
    return cluster_urls["a"], cluster_urls["b"]


def examined(url: URL, names: list[str] | None = None) -> doctor.Report:
    with catalog_at(url) as catalog:
        return doctor.examine(catalog, ALL_BUT_RATES if names is None else names)


def seen(report: doctor.Report) -> set[Sighting]:
    """Check, severity, nodes and shards of each finding; every one says what is to be done."""
    sightings = [(str(f.check), str(f.severity), f.nodes, f.shards) for f in report.findings]
    assert len(set(sightings)) == len(sightings)
    assert all(f.what and f.to_do for f in report.findings)
    return set(sightings)


def pasted(finding: Finding) -> list[str]:
    """What can be pasted of a finding."""
    return [command.text for command in finding.commands]


def run(url: URL, *statements: str) -> None:
    with connected(url) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def make_shard(url: URL, shard: int) -> None:
    """Makes a shard on a node without a word to the catalog."""
    engine = open_engine(url, what="node")
    with engine.connect() as connection:
        provision.create_shard(connection, shard)
    engine.dispose()


def move(source: URL, target: URL, catalog: URL, shard: int, node: str) -> None:
    """Moves an empty shard: stops the original, makes the other, places it there."""
    run(source, f"select shardids.fence({shard}, '{node}')")
    make_shard(target, shard)
    run(catalog, f"update shardids_catalog.placement set node = '{node}' where shard = {shard}")


def test_a_cluster_that_is_well(pair: Pair) -> None:
    before = everything(*pair)
    with catalog_at(pair[0]) as catalog:
        report = doctor.examine(catalog)
    assert (report.findings, report.is_well) == ((), True)
    assert report.checks == tuple(check.name for check in doctor.CHECKS)
    assert everything(*pair) == before


@pytest.mark.long
def test_a_session_that_holds_a_lock_in_a_statement_is_named_and_one_that_draws_is_not(pair: Pair) -> None:
    a, b = pair
    with closing(psycopg.connect(dsn(a))) as holder, closing(psycopg.connect(dsn(b))) as drawing:
        holder.pgconn.send_query(
            b"set statement_timeout = '60s'; select pg_advisory_lock(1936220516, 1), pg_sleep(3600)"
        )
        drawing.pgconn.send_query(
            b"set statement_timeout = '60s';"
            b"do $$ begin loop perform shardids.reserve(4, 1), pg_sleep(0.001); end loop; end $$"
        )
        run(b, "select pg_sleep(5.2)")
        report = examined(a)
        assert seen(report) == {("lock-held", "error", ("a",), (1,))}
        run(a, *pasted(report.findings[0]))
        assert seen(examined(a)) == set()
        drawing.cancel()


def test_a_moved_shard_is_well(pair: Pair) -> None:
    a, b = pair
    move(a, b, a, 3, "b")
    report = examined(a)
    assert seen(report) == {("old-copy", "info", ("a",), (3,))}
    assert report.is_well
    move(b, a, a, 4, "a")
    assert seen(examined(a)) == {("old-copy", "info", ("a",), (3,)), ("old-copy", "info", ("b",), (4,))}


def test_shards_in_the_wrong_place(pair: Pair) -> None:
    a, b = pair
    make_shard(b, 0)  # twice
    run(a, "select shardids.fence(1), shardids.fence(2, 'b')")
    run(a, "delete from shardids.shard where id = 3", "drop schema shard_0003 cascade")
    run(b, "select shardids.fence(4, 'a')")
    make_shard(a, 4)  # active where the catalog does not have it
    run(b, "update shardids.shard set server = 'another/1' where id = 5")
    run(b, "delete from shardids.shard where id = 6")
    run(b, "drop sequence shard_0007.id_offset cascade")
    run(a, "insert into shardids_catalog.node values ('c', 'postgresql://127.0.0.1:1/none')")
    make_shard(a, 9)
    assert seen(examined(a)) == {
        ("node-unreachable", "error", ("c",), ()),
        ("shard-on-two-nodes", "error", ("a", "b"), (0,)),
        ("shard-stopped", "error", ("a",), (1,)),
        ("shard-stopped", "error", ("a",), (2,)),
        ("shard-on-no-node", "error", ("a",), (3,)),
        ("shard-misplaced", "error", ("b", "a"), (4,)),
        ("copy-not-activated", "error", ("b",), (5,)),
        ("shard-unregistered", "error", ("b",), (6,)),
        ("shard-incomplete", "error", ("b",), (7,)),
        ("shard-misplaced", "error", ("a",), (9,)),
    }
    run(b, "update shardids.node set on_copy = 'warn'")
    assert ("copy-not-activated", "warning", ("b",), (5,)) in seen(examined(a))


def test_nodes_that_are_not_what_they_should_be(pair: Pair, blank_database: Blank) -> None:
    a, b = pair
    other = blank_database()
    held = (4, 5, 6, 7)

    def point_b_at(url: str) -> None:
        with connected(a) as connection:
            connection.execute("update shardids_catalog.node set url = %s where name = 'b'", [url])

    point_b_at(dsn(other))
    assert seen(examined(a)) == {("node-mistaken", "error", ("b",), ())}
    point_b_at(dsn(a))
    assert ("node-mistaken", "error", ("b",), ()) in seen(examined(a))
    point_b_at(dsn(b.set(database="nonesuch")))
    report = examined(a)
    assert seen(report) == {("node-unreachable", "error", ("b",), held)}
    assert 'database "nonesuch" does not exist' in report.findings[0].what
    point_b_at(dsn(b))
    run(a, "update shardids_catalog.placement set state = 'creating' where shard in (1, 2)")
    read_only = sql.SQL("alter database {} set default_transaction_read_only = on")
    database = sql.Identifier(str(b.database))
    with connected(b) as connection:
        connection.execute(read_only.format(database))
    assert seen(examined(a)) == {
        ("node-read-only", "error", ("b",), ()),
        ("shard-unfinished", "warning", (), (1, 2)),
    }
    with connected(b) as connection:
        connection.execute("set default_transaction_read_only = off")
        connection.execute(sql.SQL("alter database {} reset all").format(database))


def test_engines_that_differ(pair: Pair) -> None:
    a, b = pair
    run(a, "update shardids_catalog.shardids_version set version_num = 'catalog_9999'")
    run(b, "update shardids.shardids_version set version_num = 'node_0000'")
    run(
        b,
        "update shard_0005.shardids_version set version_num = 'shard_0000'",
        "drop table shard_0006.shardids_version",
    )
    run(
        b,
        "create or replace function shardids.sequence_bits() returns integer"
        " language sql immutable return 11",
    )
    run(a, "create or replace function shard_0001.next_id() returns bigint language sql return 1")
    run(
        a,
        "create or replace function shard_0002.next_ids(n integer) returns setof bigint language sql return"
        " 1",
        "drop function shard_0003.next_ids",
    )
    assert seen(examined(a)) == {
        ("engine-revision", "warning", (), ()),
        ("engine-revision", "warning", ("b",), ()),
        ("engine-revision", "warning", ("b",), (5,)),
        ("engine-revision", "warning", ("b",), (6,)),
        ("layout-differs", "error", ("b",), ()),
        ("generator-changed", "error", ("a",), (1,)),
        ("generator-changed", "error", ("a",), (2, 3)),
    }


def test_functions_of_the_engine_that_were_changed_by_hand(pair: Pair) -> None:
    a, b = pair
    with connected(a) as connection:
        for function in ("is_unchanged", "advance"):  # in SQL and in PL/pgSQL
            row = connection.execute(
                "select pg_get_functiondef(%s::regproc)", [f"shardids.{function}"]
            ).fetchone()
            assert row is not None
            changed = row[0].replace("= seen", ">= seen").replace("* 2 > margin_ms", "> margin_ms")
            assert changed != row[0]
            connection.execute(changed.encode())
        connection.execute("create function shardids.shard_of(text) returns int language sql return 1")
    run(b, "alter function shardids.fence security invoker", "drop function shardids.revoke_usage")
    report = examined(a)
    assert [(f.check, f.nodes, f.what.partition(": ")[2]) for f in report.findings] == [
        (
            "engine-changed",
            ("a",),
            "shardids.advance(shard integer, id_offset regclass, ticks bigint, past_tick bigint, OUT"
            " seen bigint, OUT first_tick bigint, OUT last_tick bigint), shardids.is_unchanged(seen"
            " bigint, id_offset regclass)",
        ),
        ("engine-changed", ("a",), "shardids.shard_of(text)"),
        ("engine-changed", ("b",), "shardids.revoke_usage(shards integer[], role name)"),
        (
            "engine-changed",
            ("b",),
            "shardids.fence(shard integer, moved_to text, OUT high_water_tick bigint)",
        ),
    ]


TABLES = """
    create table {s}.users (id bigint primary key default {s}.next_id(), name text);
    create table {s}.photos (id bigint primary key default {s}.next_id(),
                             user_id bigint references {s}.users);
    create table {s}.profiles (user_id bigint primary key references {s}.users);
    create table {s}.tags (photo_id bigint references {s}.photos, tag text, primary key (photo_id, tag));
    create table {s}.colours (code smallint primary key, name text);
    create table {s}.tokens (token uuid primary key);
    create table {s}.alembic_version (version_num varchar(32) primary key);
    insert into {s}.alembic_version values ('0001');
"""


def record_schemas(url: URL) -> None:
    """Records what all shards have as what they must have."""
    with catalog_at(url) as catalog:
        recording.accept(catalog, recording.plan_acceptance(catalog), "test")


def with_tables(pair: Pair) -> Pair:
    """An application's tables in all shards."""
    for url, shards in zip(pair, (range(4), range(4, 8)), strict=True):
        run(url, *(TABLES.format(s=f"shard_{shard:04}") for shard in shards))
    record_schemas(pair[0])
    return pair


def test_tables_that_are_well(pair: Pair) -> None:
    assert examined(with_tables(pair)[0]).findings == ()


NOTES = """set allow_system_table_mods = on;
    update pg_attribute set attoptions = array['pg_attver=' || attrelid]
    where attrelid = any (array['shard_0000.users', 'shard_0001.users']::regclass[]) and attname <> 'name'"""


def test_column_options_that_postgresql_does_not_know_are_no_difference(pair: Pair) -> None:
    a, _ = with_tables(pair)
    run(a, NOTES)
    report = examined(a, [*ALL_BUT_RATES, "unknown-option"])
    assert report.is_well
    (noted,) = report.findings
    assert (noted.check, str(noted.severity), {*noted.shards} >= {0, 1}) == ("unknown-option", "info", True)
    assert "pg_attver" in noted.what
    run(a, "alter table shard_0000.users alter name set (n_distinct = 7)")
    (finding,) = examined(a).findings
    assert "n_distinct" in finding.what


def test_an_index_that_is_finished_while_indexes_are_read_is_not_invalid(pair: Pair) -> None:
    a, _ = with_tables(pair)
    change = "update pg_index set indisvalid = {} where indexrelid = 'shard_0001.users_name'::regclass"
    run(a, "create index users_name on shard_0001.users (name)", change.format(False))
    looks = []

    def finish(*execution: object) -> None:
        if "not x.indisvalid" in str(execution[2]):
            looks.append(execution)
            run(a, change.format(True))

    event.listen(Engine, "after_cursor_execute", finish)
    try:
        assert examined(a, ["invalid-index"]).findings == ()
    finally:
        event.remove(Engine, "after_cursor_execute", finish)
    assert looks


def test_keys_and_indexes(pair: Pair) -> None:
    a, b = with_tables(pair)
    run(
        a,
        *(f"create table shard_000{shard}.logs (id bigserial primary key)" for shard in (0, 1)),
        "create table shard_0000.events (id integer generated always as identity primary key)",
        "alter table shard_0001.photos alter id drop default",
        "alter table shard_0002.photos alter id set default shard_0003.next_id()",
        *(
            f"create table shard_000{s}.likes (photo_id integer references shard_000{s}.photos)"
            for s in (2, 3)
        ),
        "alter table shard_0003.profiles add photo_id bigint references shard_0002.photos",
        "insert into shard_0001.users (name) values ('ann'), ('ann')",
        "update shard_0002.alembic_version set version_num = '0002'",
    )
    run(b, "drop table shard_0007.alembic_version")
    with pytest.raises(UniqueViolation):
        run(a, "create unique index concurrently users_name on shard_0001.users (name)")
    left_out = ("schema-differs", "schema-unrecorded")
    report = examined(a, [name for name in ALL_BUT_RATES if name not in left_out])
    assert [(f.check, str(f.severity), f.nodes, f.shards, f.thing) for f in report.findings] == [
        ("key-of-another-shard", "error", ("a",), (2,), "photos.id"),
        ("foreign-key-type", "error", ("a",), (2, 3), "likes.photo_id"),
        ("primary-key-default", "warning", ("a",), (0,), "events.id"),
        ("primary-key-default", "warning", ("a",), (0, 1), "logs.id"),
        ("primary-key-default", "warning", ("a",), (1,), "photos.id"),
        ("foreign-key-leaves-shard", "warning", ("a",), (3,), "profiles.photo_id"),
        ("invalid-index", "warning", ("a",), (1,), "users_name"),
        ("revisions-apart", "warning", (), (2,), "alembic_version"),
        ("revisions-apart", "warning", (), (7,), "alembic_version"),
    ]
    # What is to be done can be pasted.
    by_name = {f.check: f for f in report.findings}
    run(a, *pasted(by_name["key-of-another-shard"]), "delete from shard_0001.users")
    run(a, *pasted(by_name["invalid-index"]))
    names = ["key-of-another-shard", "invalid-index"]
    assert examined(a, names).findings == ()


MOVES = """
    create table if not exists shardids_catalog.move (
      id bigint generated always as identity primary key, shard integer not null, source text not null,
      target text not null, offline boolean not null, step text not null,
      epoch uuid not null default gen_random_uuid(), ended_at timestamptz, outcome text)"""


def test_what_moves_leave_behind(pair: Pair) -> None:
    a, b = with_tables(pair)
    run(
        a,
        MOVES,
        "insert into shardids_catalog.move (shard, source, target, offline, step)"
        " values (0, 'a', 'b', false, 'copy')",
        "select shardids.fence(0)",
        f"create subscription shardids_move_1 connection 'dbname={b.database}' publication shardids_move_1"
        " with (connect = false)",
        # As somebody does who takes an old copy for the shard: all of it refuses writes until an ID is drawn.
        "select shardids.fence(1), shardids.add_barriers(1), shardids.activate(1)",
        "select shard_0002.next_id(), shardids.add_barriers(2)",
    )
    with pytest.raises(psycopg.Error, match="is fenced"):
        run(a, "insert into shard_0001.users (name) values ('x')")
    run(b, "create publication shardids_move_1", "create publication others")
    rejected = {
        ("writes-rejected", "error", ("a",), (1,)),
        ("writes-rejected", "warning", ("a",), (2,)),
    }
    # While the move goes on, what it made is in use.
    with connected(a) as mover:
        mover.execute(
            "select pg_advisory_lock(1936220520, ('x' || left(epoch::text, 8))::bit(32)::integer)"
            " from shardids_catalog.move where shard = 0"
        )
        assert seen(examined(a)) == rejected
    assert seen(examined(a)) == rejected | {("move-interrupted", "error", ("a", "b"), (0,))}
    run(
        a,
        "update shardids_catalog.move set ended_at = now(), outcome = 'aborted'",
        "select shardids.activate(0)",
    )
    report = examined(a)
    assert seen(report) == rejected | {
        ("leftover-subscription", "warning", ("a",), ()),
        ("leftover-publication", "warning", ("b",), ()),
    }
    for command in (command for finding in report.findings for command in finding.commands):
        if command.where is Where.SHELL:
            _, *words = shlex.split(command.text)
            assert command_here(*words, "--yes", SHARDIDS_CATALOG=dsn(a)).returncode == 0, command.text
        else:
            run({"a": a, "b": b}[command.node or "a"], command.text)
    assert examined(a).findings == ()


def test_a_slot_that_was_left_behind() -> None:
    with temporary_server(settings={"wal_level": "logical"}) as server:
        url = parse_url(devcluster.create_cluster([server], 2))
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute("select pg_create_logical_replication_slot('shardids_move_7', 'pgoutput')")
            connection.execute("select pg_create_physical_replication_slot('shardids_standby')")
            report = examined(url)
            assert [(f.check, f.thing) for f in report.findings] == [("leftover-slot", "shardids_move_7")]
            assert "MiB of WAL" in report.findings[0].what
            connection.execute(report.findings[0].commands[0].text.encode())
        assert examined(url).findings == ()


def test_roles_that_may_here_and_not_there(pair: Pair, make_role: MakeRole) -> None:
    a, b = with_tables(pair)
    reader, writer = (str(make_role(prefix).username) for prefix in ("Reader", "Writer"))
    with catalog_at(a) as catalog:
        provision.grant(catalog, writer)
        provision.grant(catalog, reader)
    for url, shards in ((a, range(4)), (b, range(4, 8))):
        run(url, *(f'grant select, insert on shard_{shard:04}.users to "{writer}"' for shard in shards))
    assert seen(examined(a)) == {("role-rights", "warning", ("a", "b"), tuple(range(8)))}
    record_schemas(a)
    assert examined(a).findings == ()
    run(
        a,
        f"select shardids.revoke_usage(array[shard], '{reader}') from generate_series(1, 2) shard",
        f'revoke insert on shard_0003.users from "{writer}"',
        f'alter table shard_0000.users owner to "{writer}"',
    )
    run(b, f'grant update on shard_0007.photos to "{reader}"')
    report = examined(a)
    assert seen(report) == {
        ("schema-differs", "warning", ("a",), (0,)),
        ("role-rights", "warning", ("b",), (7,)),
        ("role-rights", "warning", ("a",), (1, 2)),
        ("role-rights", "warning", ("a",), (3,)),
    }
    by_shards = {f.shards: f for f in report.findings}
    assert by_shards[3,].what.endswith("that are recorded: insert users")
    assert by_shards[0,].what.startswith('shard 0 on node "a" differs from the recorded schema')
    assert pasted(by_shards[1, 2])[0] == f"shardids grant {reader} --shards 1-2"
    assert pasted(by_shards[3,]) == []
    run(a, f'grant insert on shard_0003.users to "{writer}"')
    with catalog_at(a) as catalog:
        provision.grant(catalog, reader, [1, 2])
    run(
        a,
        "alter table shard_0000.users owner to current_user",
        f'grant select, insert on shard_0000.users to "{writer}"',
    )
    run(b, *pasted(by_shards[7,]))
    assert examined(a).findings == ()
    for url in pair:
        run(url, f'drop owned by "{reader}", "{writer}" cascade')


def set_path(url: URL, role: str, path: str | None) -> None:
    """Sets a role's search_path in a database, or takes it back."""
    names = sql.Identifier(role), sql.Identifier(str(url.database))
    change = sql.SQL("alter role {} in database {} ").format(*names)
    with connected(url) as connection:
        connection.execute(change + sql.SQL(f"set search_path = {path}" if path else "reset search_path"))


def test_names_that_lead_astray(pair: Pair, make_role: MakeRole) -> None:
    a, b = with_tables(pair)
    role = str(make_role("Path").username)
    run(
        a,
        "create table public.users (id bigint)",
        "create table public.alembic_version (version_num text)",
        "create schema app",
        "create view app.photos as select 1 as id",
        "create function app.next_id() returns bigint language sql return 1",
    )
    set_path(a, role, "app, public")
    set_path(b, role, "shard_0005, public")
    report = examined(a)
    set_path(a, role, None)
    set_path(b, role, None)
    assert [(f.check, f.nodes, f.shards, f.thing) for f in report.findings] == [
        ("search-path", ("b",), (5,), role),
        ("shadowed-name", ("a",), (), "app.next_id()"),
        ("shadowed-name", ("a",), (0, 1, 2, 3), "app.photos"),
        ("shadowed-name", ("a",), (0, 1, 2, 3), "public.users"),
    ]


def test_rows_in_the_wrong_shard(pair: Pair) -> None:
    a, b = with_tables(pair)
    keys = [ShardingKey(table_name="users", column_name="name")]
    with Cluster.connect(a) as cluster:
        names = {
            shard: [n for n in map(str, range(100)) if cluster.shard_for(n) == shard] for shard in range(8)
        }
        for shard, there in names.items():
            run(
                a if shard < 4 else b,
                *(f"insert into shard_{shard:04}.users (name) values ('{name}')" for name in there),
            )
    with catalog_at(a) as catalog:
        assert doctor.examine(catalog, ALL_BUT_RATES, keys).findings == ()
        moved = names[1][0]
        run(a, f"update shard_0000.users set name = '{moved}' where name = '{names[0][0]}'")
        run(b, "insert into shard_0004.users (id, name) select shard_0005.next_id(), null")
        report = doctor.examine(catalog, ALL_BUT_RATES, keys)
        assert seen(report) == {
            ("key-in-wrong-shard", "error", ("a",), (0,)),
            ("row-in-wrong-shard", "warning", ("b",), (4,)),
        }
        by_key, by_id = (f.what for f in report.findings)
        assert f"users.name: 1 of {len(names[0])} rows read" in by_key
        assert by_key.endswith(f"for example {moved!r} in shard 0, which says shard 1")
        assert by_id.endswith("in shard 4, which says shard 5")
        with pytest.raises(BadArgument, match=r"no shard has a column nonesuch\.name"):
            doctor.examine(catalog, ALL_BUT_RATES, [ShardingKey.parse("nonesuch.name")])
        run(a, "alter table shard_0000.users add born date")
        with pytest.raises(BadArgument, match="is of type date, which has no stable hash"):
            doctor.examine(catalog, ALL_BUT_RATES, [ShardingKey.parse("users.born")])
        for text in ("users", "users.", ".name", "a.b.c", ""):
            with pytest.raises(BadArgument, match="is not a table and a column"):
                ShardingKey.parse(text)


def test_every_row_of_a_sharding_key_is_read_when_asked(pair: Pair) -> None:
    a, b = pair
    types = {
        "small": ("smallint", "n"),
        "whole": ("integer", "n - 5"),
        "big": ("bigint", "(n - 5) * 1000000007::bigint"),
        "word": ("text", "'ä ' || n"),
        "short": ("varchar(20)", "'\\ ''%' || n"),
        "raw": ("bytea", "decode(to_hex(n + 16), 'hex')"),
        "token": ("uuid", "md5(n::text)::uuid"),
        "mood": ("public.mood", "case n % 2 when 0 then 'low' else 'high' end::public.mood"),
    }
    keys = [ShardingKey(table_name="keyed", column_name=name) for name in types]
    columns = ", ".join(f"{name} {type_}" for name, (type_, _) in types.items())
    expressions = ", ".join(expression for _, expression in types.values())
    for url, shards in ((a, range(4)), (b, range(4, 8))):
        run(
            url,
            "create type public.mood as enum ('low', 'high')",
            *(f"create table shard_{shard:04}.keyed ({columns})" for shard in shards),
        )
    # More pages than a sample reads.
    run(a, f"insert into shard_0002.keyed select {expressions} from generate_series(1, 200) n")
    run(a, "insert into shard_0002.keyed select from generate_series(1, 20000)")
    with connected(a) as connection, Cluster.connect(a) as cluster:
        selected = connection.execute(f"select {', '.join(types)} from shard_0002.keyed where small > 0")
        values = selected.fetchall()
        wrong = {
            name: sum(cluster.shard_for(row[index]) != 2 for row in values)
            for index, name in enumerate(types)
        }
    with catalog_at(a) as catalog:
        report = doctor.examine(catalog, ["key-in-wrong-shard"], keys, every_row=True)
        assert {f.thing: f.what.split(" in shard")[0] for f in report.findings} == {
            f"keyed.{name}": f"keyed.{name}: {count} of 200 rows read"
            for name, count in wrong.items()
            if count
        }
        assert len(report.findings) >= 7
        for finding in report.findings:
            assert finding.shards == (2,)
        run(
            a,
            # Not every server is built with ICU, whose collations alone can be so.
            "create collation public.alike (provider = libc, locale = 'C')",
            "update pg_collation set collisdeterministic = false where collname = 'alike'",
            "alter table shard_0002.keyed alter word type text collate public.alike",
        )
        with pytest.raises(BadArgument, match=r"keyed\.word has a nondeterministic collation"):
            doctor.examine(catalog, ["key-in-wrong-shard"], keys)


def test_ticks_ahead_of_the_clock(pair: Pair) -> None:
    a, _ = pair
    run(a, "update shardids.node set max_ahead = '20 minutes', max_reserve = 16777216")
    with connected(a) as connection:
        for shard, reservations in ((0, 6), (1, 8), (2, 22)):
            connection.execute(
                f"select shardids.reserve({shard}, 16777216) from generate_series(1, {reservations})"
            )
    assert seen(examined(a)) == {("ticks-ahead", "warning", ("a",), (1, 2))}
    run(a, "update shardids.node set max_ahead = '7 minutes'")
    assert seen(examined(a)) == {("ticks-ahead", "error", ("a",), (1, 2))}


def test_a_shard_that_went_past_an_id_that_led(pair: Pair) -> None:
    a, _ = pair
    run(a, "update shardids.node set max_past = '30 minutes'")
    ahead = "((shardids.ms_of(clock_timestamp()) + 1700000) << 22) | (6 << 10)"
    run(a, f"select shardids.advance_past(1, {ahead})")
    (finding,) = examined(a).findings
    assert (finding.check, finding.shards) == ("ticks-ahead", (1,))
    assert "sessions with after= (advance_past) went past an ID from the future" in finding.to_do


def test_a_check_that_there_is_not(pair: Pair) -> None:
    assert [str(f.severity) for f in examined(pair[0], ["years-left"]).findings] == []
    with pytest.raises(BadArgument, match="check 'nonesuch' does not exist"):
        examined(pair[0], ["years-left", "nonesuch"])
