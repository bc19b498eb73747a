"""Look-ups against clients that claim nothing, and against roles that may write in one shard only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import insert, text, update
from sqlalchemy.engine import URL
from sqlalchemy.exc import IntegrityError

from shardids import Cluster, mover
from shardids.catalog.lookups import MARK, claims_name, shard_of_claim
from shardids.errors import ClusterConflict, MissingPrivilege, UnclaimedWrite
from shardids.pg.embedded import temporary_servers
from shardids.pg.urls import parse_url
from shardids.tables import lookups
from shardids.watch import doctor
from tests.conftest import BlankDatabases, MakeRole, dsn
from tests.support.client_programs import Dumper
from tests.support.clusters import catalog_at
from tests.support.signups import EMAIL, User, claims, named, open_signups, rows

SHARDS = 4
CLAIMS = claims_name("users", "email")
ALLOWED = "set local shardids.unclaimed_writes = 'allowed'"
Db = psycopg.Connection[Any]


@pytest.fixture(scope="module")
def signups(databases: BlankDatabases) -> Iterator[URL]:
    """A cluster of four shards on two nodes, whose look-up is ready."""
    urls = [databases.take() for _ in range(2)]
    open_signups(urls[0], dict(zip("ab", urls, strict=True)), SHARDS)
    yield urls[0]
    for url in urls:
        databases.give_back(url)


@pytest.fixture
def cluster(signups: URL) -> Iterator[Cluster]:
    with Cluster.connect(signups, listen=False) as cluster:
        yield cluster


@pytest.fixture
def email() -> str:
    return f"{uuid4()}@example.com"


@contextmanager
def sql_in(cluster: Cluster, shard: int, role: str | None = None) -> Iterator[Db]:
    """A plain connection to a shard's node, as a role."""
    url = parse_url(cluster.node_of(shard).url)
    with psycopg.connect(dsn(url), autocommit=True) as connection:
        if role is not None:
            connection.execute(sql.SQL("set session authorization {}").format(sql.Identifier(role)))
        yield connection


def kept_in(shard: int, start: str = "k") -> str:
    """An address whose claim is kept in a shard."""
    return next(
        one for _ in range(1000) if shard_of_claim(one := f"{start}{uuid4()}@example.com", SHARDS) == shard
    )


def add(cluster: Cluster, shard: int, email: str) -> None:
    with cluster.session(shard=shard) as session:
        session.add(User(name=named(cluster, shard), email=email))
        session.commit()


def copy(connection: Db, email: str) -> None:
    with connection.cursor().copy("copy shard_0001.users (name, email) from stdin") as writer:
        writer.write_row(("x", email))


WRITES: dict[str, Callable[[Db, str], object]] = {
    "insert": lambda db, email: db.execute(
        "insert into shard_0001.users (name, email) values ('x', %s)", (email,)
    ),
    "insert, prepared": lambda db, email: db.execute(
        "insert into shard_0001.users (name, email) values ('x', %s)", (email,), prepare=True
    ),
    "insert … select": lambda db, email: db.execute(
        "insert into shard_0001.users (name, email) select 'x', %s", (email,)
    ),
    "on conflict do nothing": lambda db, email: db.execute(
        "insert into shard_0001.users (name, email) values ('x', %s) on conflict do nothing", (email,)
    ),
    "update": lambda db, email: db.execute("update shard_0001.users set email = %s where false", (email,)),
    "on conflict do update": lambda db, email: db.execute(
        "insert into shard_0001.users (name, email) values ('x', %s)"
        " on conflict (email) do update set email = excluded.email",
        (email,),
    ),
    "in a CTE": lambda db, email: db.execute(
        "with made as (insert into shard_0001.users (name, email) values ('x', %s) returning id)"
        " select * from made",
        (email,),
    ),
    "in a block, which names the mark": lambda db, email: db.execute(
        f"do $$ begin {MARK} insert into shard_0001.users (name, email) values ('x', '{email}');"
        " end $$".encode()
    ),
    "with the mark at its end": lambda db, email: db.execute(
        f"insert into shard_0001.users (name, email) values ('x', '{email}') {MARK}".encode()
    ),
    "copy": copy,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_sql_that_claims_nothing_is_refused(
    cluster: Cluster, email: str, write: Callable[[Db, str], object]
) -> None:
    with sql_in(cluster, 1) as connection:
        with pytest.raises(
            psycopg.Error, match=r"without a claim writes shard_0001\.users\.email"
        ) as refused:
            write(connection, email)
        assert refused.value.sqlstate == "SI014"
        assert "shardids lookup backfill users.email" in str(refused.value.diag.message_hint)
        # The way of a DBA, who claims afterwards.
        with connection.transaction():
            connection.execute(ALLOWED)
            write(connection, email)
        with connection.transaction(), pytest.raises(psycopg.Error, match="without a claim"):
            write(connection, email)
        with connection.transaction():
            connection.execute(ALLOWED)
            connection.execute("delete from shard_0001.users where email = %s", (email,))


def test_what_writes_no_look_up_key_needs_no_claim(cluster: Cluster, email: str) -> None:
    add(cluster, 1, email)
    with sql_in(cluster, 1) as connection:
        connection.execute("update shard_0001.users set age = 5 where email = %s", (email,))
        connection.execute("create table shard_0001.other (email text)")
        connection.execute("insert into shard_0001.other values ('x')")
        connection.execute("drop table shard_0001.other")
        connection.execute("delete from shard_0001.users where email = %s", (email,))
        # As subscriptions and moves write.
        with connection.transaction():
            connection.execute("set local session_replication_role = replica")
            WRITES["insert"](connection, email)
            raise psycopg.Rollback


def test_statements_of_a_session_that_it_does_not_claim_are_refused(cluster: Cluster, email: str) -> None:
    row = {"name": named(cluster, 1), "email": email}
    with cluster.session(shard=1) as session:
        # Also in a transaction that has claimed.
        session.add(User(name=named(cluster, 1), email=f"first-{email}"))
        session.flush()
        for write in (
            lambda: session.execute(
                text("insert into shard_0001.users (name, email) values (:name, :email)"), row
            ),
            lambda: session.connection().execute(insert(User.__table__), row),
            lambda: session.connection().execute(update(User.__table__).values(email=email)),
        ):
            with pytest.raises(UnclaimedWrite), session.begin_nested():
                write()
        session.execute(insert(User), row)
        session.execute(update(User).where(User.email == email).values(email=f"new-{email}"))
        session.commit()
    with (
        cluster.at(shard=2).engine.begin() as connection,
        pytest.raises(UnclaimedWrite, match=r"shard_0002\.users\.email"),
    ):
        connection.execute(insert(User.__table__), row)
    there = rows(cluster)
    assert {f"first-{email}", f"new-{email}"} <= there.keys()
    assert email not in there
    assert there.items() <= claims(cluster).items()


def test_parts_of_a_table_are_guarded_too(cluster: Cluster, signups: URL) -> None:
    """Writes to a part fire no trigger of the whole. Parts that come later are found; create guards them."""
    with sql_in(cluster, 1) as node:
        node.execute("create table shard_0001.old_users () inherits (shard_0001.users)")
    try:
        with catalog_at(signups) as catalog:
            found = {one.check: one for one in doctor.examine(catalog).findings}
            assert "trigger that refuses statements without a claim" in found["lookup-unfit"].what
            lookups.create(catalog, EMAIL)
            assert "lookup-unfit" not in {one.check for one in doctor.examine(catalog).findings}
        with sql_in(cluster, 1) as node, pytest.raises(psycopg.Error, match=r"writes shard_0001\.old_users"):
            node.execute("insert into shard_0001.old_users (id, name, email) values (1, 'x', 'y')")
    finally:
        with sql_in(cluster, 1) as node:
            node.execute("drop table shard_0001.old_users")


def test_the_doctor_finds_a_guard_that_is_missing_and_backfill_makes_it(
    cluster: Cluster, signups: URL, email: str
) -> None:
    with sql_in(cluster, 2) as node, catalog_at(signups) as catalog:
        node.execute(f"alter table shard_0002.users disable trigger {CLAIMS}".encode())
        node.execute("insert into shard_0002.users (name, email) values ('x', %s)", (email,))
        found = {one.check: one.what for one in doctor.examine(catalog, every_row=True).findings}
        assert "users.email in shard 2: the trigger" in found["lookup-unfit"]
        lookups.backfill(catalog, EMAIL)
        assert claims(cluster)[email] == 2
        assert not {
            one.check for one in doctor.examine(catalog, every_row=True).findings if "look" in one.check
        }
        with pytest.raises(psycopg.Error, match="without a claim"):
            node.execute("insert into shard_0002.users (name, email) values ('x', 'other')")


def test_a_look_up_guards_from_its_backfill_until_it_is_dropped(
    databases: BlankDatabases, email: str
) -> None:
    urls = [databases.take() for _ in range(2)]
    open_signups(urls[0], dict(zip("ab", urls, strict=True)), SHARDS)
    with Cluster.connect(urls[0], listen=False) as cluster, catalog_at(urls[0]) as catalog:
        lookups.drop(catalog, EMAIL)
        with sql_in(cluster, 1) as node:
            WRITES["insert"](node, email)
            lookups.create(catalog, EMAIL)
            WRITES["insert"](node, f"two-{email}")  # applications without the model
            lookups.backfill(catalog, EMAIL, dry_run=True)
            WRITES["insert"](node, f"three-{email}")
            assert lookups.backfill(catalog, EMAIL).claimed == 3
            with pytest.raises(psycopg.Error, match="without a claim"):
                WRITES["insert"](node, f"four-{email}")
            lookups.drop(catalog, EMAIL)
            WRITES["insert"](node, f"five-{email}")
            left = node.execute(
                "select count(*) from pg_proc where proname = %s union all select count(*) from pg_trigger"
                " where tgname = %s union all select count(*) from pg_class where relname = %s",
                [CLAIMS] * 3,
            ).fetchall()
            assert left == [(0,)] * 3
    for url in urls:
        databases.give_back(url)


# Roles.


@pytest.fixture
def writer(cluster: Cluster, signups: URL, make_role: MakeRole) -> Iterator[str]:
    """A role that may draw everywhere, read everywhere, and write in shard 1 only."""
    role = str(make_role().username)
    for shard in range(SHARDS):
        with sql_in(cluster, shard) as node:
            node.execute(f'grant usage on schema shardids, shard_{shard:04} to "{role}"'.encode())
            node.execute(f'grant select on shard_{shard:04}.users to "{role}"'.encode())
    with sql_in(cluster, 1) as node:
        node.execute(f'grant insert, update, delete on shard_0001.users to "{role}"'.encode())
    with catalog_at(signups) as catalog:
        lookups.create(catalog, EMAIL)
    yield role
    for shard in range(SHARDS):
        with sql_in(cluster, shard) as node:
            node.execute(f'drop owned by "{role}"'.encode())
    with catalog_at(signups) as catalog:
        lookups.create(catalog, EMAIL)


def call(connection: Db, keeper: int, arguments: str, *given: Any) -> list[Any]:
    return connection.execute(
        f"select * from shard_{keeper:04}.{CLAIMS}({arguments})".encode(), given
    ).fetchall()


@pytest.mark.parametrize("keeper", [1, 3])
def test_a_role_that_writes_in_one_shard_changes_no_claims_of_others(
    cluster: Cluster, signups: URL, writer: str, keeper: int
) -> None:
    """Wherever the claim is kept: in the role's own shard, or on the other node."""
    theirs, mine, free = (kept_in(keeper, start) for start in "tmf")
    add(cluster, 2, theirs)
    with sql_in(cluster, keeper, writer) as connection:
        for statement in (
            f"insert into shard_{keeper:04}.{CLAIMS} (value, shard) values ('x', 1)",
            f"update shard_{keeper:04}.{CLAIMS} set shard = 1",
            f"delete from shard_{keeper:04}.{CLAIMS}",
            f"truncate shard_{keeper:04}.{CLAIMS}",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement.encode())
        claim, take = "%s::text[], %s::int[]", "%s::text[], %s::uuid[], %s::int[]"
        assert call(connection, keeper, claim, [mine], [1]) == [(mine,)]
        assert call(connection, keeper, claim, [theirs], [1]) == []
        for value, shard in ((free, 2), (theirs, 2), (free, 999), (free, -1), (free, None)):
            if shard is None:
                with pytest.raises(psycopg.Error):
                    call(connection, keeper, claim, [value], [None])
                continue
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match=f"claims of shard {shard} "):
                call(connection, keeper, claim, [value], [shard])
        there = connection.execute(
            f"select value, stamp from shard_{keeper:04}.{CLAIMS} where value = any (%s)".encode(),
            ([theirs, mine],),
        )
        stamps = dict(there.fetchall())
        for shards in ([1], None):
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match="claims of shard 2 "):
                call(connection, keeper, take, [theirs], [stamps[theirs]], shards)
        assert call(connection, keeper, take, [mine], [uuid4()], None) == []
        assert call(connection, keeper, take, [mine], [stamps[mine]], None) == [(mine,)]
    there_now = claims(cluster)
    assert there_now[theirs] == 2
    assert not {mine, free} & there_now.keys()


def test_a_role_s_rights_follow_its_memberships_and_set_role(
    cluster: Cluster, writer: str, make_role: MakeRole
) -> None:
    member, other, of_all = (str(make_role().username) for _ in range(3))
    value = kept_in(1)
    with sql_in(cluster, 1) as admin:
        admin.execute(f'grant "{writer}" to "{member}"'.encode())
        admin.execute(f'grant usage on schema shard_0001 to "{other}"'.encode())
        admin.execute(f'grant pg_write_all_data to "{of_all}"'.encode())
        admin.execute(f'grant execute on function shard_0001.{CLAIMS}(text[], int[]) to "{other}"'.encode())
    try:
        with sql_in(cluster, 1, member) as connection:
            assert call(connection, 1, "%s::text[], %s::int[]", [value], [1]) == [(value,)]
        with sql_in(cluster, 1, of_all) as connection:
            assert call(connection, 1, "%s::text[], %s::int[]", [value], [1]) == [(value,)]
        with sql_in(cluster, 1, other) as connection:
            connection.execute("create temp table shards (number int)")
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match=f'role "{other}" may not change'):
                call(connection, 1, "%s::text[], %s::int[]", [value], [1])
        with sql_in(cluster, 1) as connection:
            connection.execute(f'set role "{other}"'.encode())
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match=f'role "{other}" may not change'):
                call(connection, 1, "%s::text[], %s::int[]", [value], [1])
    finally:
        with sql_in(cluster, 1) as admin:
            admin.execute(f'drop owned by "{other}"'.encode())


def test_a_claim_for_a_shard_that_there_is_not_is_free(cluster: Cluster, signups: URL) -> None:
    """One was left by hand, or by an earlier version, which let roles write claims."""
    values = [kept_in(2, start) for start in "abc"]
    with sql_in(cluster, 2) as node:
        for value in values:
            node.execute(
                f"insert into shard_0002.{CLAIMS} (value, shard) values (%s, 999)".encode(), (value,)
            )
    with cluster.sharded_session() as session:
        assert not session.query(User).where(User.email == values[0]).all()
    add(cluster, 1, values[0])
    with cluster.session(shard=3) as session:
        session.execute(insert(User), {"name": named(cluster, 3), "email": values[1]})
        session.commit()
    assert {claims(cluster)[value] for value in values[:2]} == {1, 3}
    with catalog_at(signups) as catalog:
        found = {one.check for one in doctor.examine(catalog, every_row=True).findings}
        assert "claim-without-row" in found
        assert lookups.sweep(catalog, EMAIL).given_up
    assert values[2] not in claims(cluster)


def test_rights_that_were_given_on_claims_are_found_and_taken_back(
    cluster: Cluster, signups: URL, make_role: MakeRole
) -> None:
    role = str(make_role().username)
    with sql_in(cluster, 1) as node, catalog_at(signups) as catalog:
        node.execute(f'grant insert, update on shard_0001.{CLAIMS} to "{role}"'.encode())
        found = {one.check: one.what for one in doctor.examine(catalog).findings}
        assert f'role "{role}" has INSERT on {CLAIMS}' in found["lookup-unfit"]
        with pytest.raises(ClusterConflict, match="has INSERT"):
            lookups.backfill(catalog, EMAIL)
        lookups.create(catalog, EMAIL)
        assert "lookup-unfit" not in {one.check for one in doctor.examine(catalog).findings}


def test_what_another_role_has_made_in_the_place_of_claims_is_refused(
    cluster: Cluster, signups: URL, make_role: MakeRole
) -> None:
    role = str(make_role().username)
    for owned in (
        f"alter table shard_0001.{CLAIMS} owner to",
        f"alter function shard_0001.{CLAIMS}(text[], int[]) owner to",
    ):
        with sql_in(cluster, 1) as node, catalog_at(signups) as catalog:
            node.execute(f'grant usage, create on schema shard_0001 to "{role}"'.encode())
            node.execute(f'{owned} "{role}"'.encode())
            try:
                for ask in (lookups.create, lookups.backfill, lookups.sweep):
                    with pytest.raises(MissingPrivilege, match=f'{CLAIMS}.* belongs to role "{role}"'):
                        ask(catalog, EMAIL)
            finally:
                node.execute(f"{owned} current_user".encode())
                node.execute(f'revoke usage, create on schema shard_0001 from "{role}"'.encode())


# What writes rows by itself.


@pytest.mark.long
def test_a_move_that_replicates_takes_claims_functions_and_guards_along() -> None:
    with temporary_servers(2) as servers:
        urls = [parse_url(server.url()) for server in servers]
        open_signups(urls[0], dict(zip("ab", urls, strict=True)), SHARDS)
        with Cluster.connect(urls[0], listen=False) as cluster, catalog_at(urls[0]) as catalog:
            emails = [kept_in(keeper) for keeper in range(SHARDS) for _ in range(3)]
            for number, email in enumerate(emails):
                add(cluster, number % SHARDS, email)
            mover.move(catalog, 1, "b" if cluster.node_of(1).name == "a" else "a")
            cluster.refresh()
            with sql_in(cluster, 1) as node, pytest.raises(psycopg.Error, match="without a claim"):
                WRITES["insert"](node, "new@example.com")
            add(cluster, 1, kept_in(1))
            with pytest.raises(IntegrityError, match="violates look-up"):
                add(cluster, 2, next(one for one in emails if rows(cluster)[one] == 1))
            assert claims(cluster) == rows(cluster)
            found = {one.check for one in doctor.examine(catalog, every_row=True).findings}
            assert not {one for one in found if "lookup" in one or "claim" in one}


def test_a_dump_is_restored_whole_or_its_rows_with_the_parameter(
    cluster: Cluster, signups: URL, blank_database: Callable[[], URL], admin: Db
) -> None:
    email = kept_in(1)
    add(cluster, 1, email)
    node = parse_url(cluster.node_of(1).url)
    dumper = Dumper(admin.info.server_version)
    table = ("-t", "shard_0001.users")
    # Triggers come after the rows.
    whole = blank_database()
    dumper.restore(dsn(whole), dumper.dump(dsn(node)))
    with psycopg.connect(dsn(whole)) as connection:
        assert connection.execute(f"select shard from shard_0001.{CLAIMS}".encode()).fetchall()
        with pytest.raises(psycopg.Error, match="without a claim"):
            WRITES["insert"](connection, "new@example.com")
        connection.rollback()
        connection.execute("delete from shard_0001.users")
    data = dumper.dump(dsn(node), "--data-only", *table)
    with pytest.raises(AssertionError, match="without a claim writes"):
        dumper.restore(dsn(whole), data)
    dumper.restore(f"{dsn(whole)}&options=-c%20shardids.unclaimed_writes%3Dallowed", data)
    with psycopg.connect(dsn(whole)) as connection:
        restored = connection.execute("select count(*) from shard_0001.users where email = %s", (email,))
        assert restored.fetchone() == (1,)
