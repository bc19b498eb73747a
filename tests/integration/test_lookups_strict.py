"""Strict look-ups: what any SQL writes is claimed by triggers, and never there twice."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import date
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import delete, select, text
from sqlalchemy.exc import IntegrityError

from shardids import Cluster, lookups, mover
from shardids.catalog.lookups import claims_name, shard_of_claim
from shardids.catalog.sqlfiles import read_sql
from shardids.catalog.urls import parse_url
from shardids.errors import BadArgument, ClusterConflict
from shardids.lookups.comparing import compare_all
from shardids.lookups.places import faulty_nodes
from tests.conftest import BlankDatabases, dsn
from tests.support.clusters import catalog_at
from tests.support.generator import connect
from tests.support.signups import EMAIL, User, claims, named, open_signups, rows

SHARDS = 4
CLAIMS = claims_name("users", "email")


@pytest.fixture(scope="module")
def url(databases: BlankDatabases) -> Iterator[str]:
    urls = databases.take(), databases.take()
    open_signups(urls[0], {"a": urls[0], "b": urls[1]}, SHARDS)
    with catalog_at(urls[0]) as catalog:
        assert lookups.create(catalog, EMAIL, strict=True, store_password=True) == list(range(SHARDS))
    yield dsn(urls[0])
    for one in urls:
        databases.give_back(one)


@pytest.fixture(scope="module")
def _connected(url: str) -> Iterator[Cluster]:
    with Cluster.connect(url, listen=False) as cluster:
        yield cluster


@pytest.fixture
def cluster(_connected: Cluster) -> Iterator[Cluster]:
    """The cluster; each test leaves every row with a claim."""
    yield _connected
    there = claims(_connected)
    assert {email: there.get(email) for email in rows(_connected)} == rows(_connected)


@pytest.fixture
def email() -> str:
    """An address that nobody has."""
    return f"{uuid4()}@example.com"


def psql(cluster: Cluster, shard: int) -> psycopg.Connection[tuple[object, ...]]:
    """A connection to a shard's node that knows nothing of shardids."""
    return connect(dsn(parse_url(cluster.placement.locate(shard).url)))


def inserted(shard: int, email: str) -> str:
    return f"insert into shard_{shard:04}.users (name, email) values ('x', '{email}')"


def copied(db: psycopg.Connection[tuple[object, ...]], shard: int, emails: list[str]) -> None:
    with db.cursor().copy(f"copy shard_{shard:04}.users (name, email) from stdin") as copy:
        for email in emails:
            copy.write_row(("x", email))


def test_what_sql_writes_is_claimed_and_refused_in_another_shard(cluster: Cluster, email: str) -> None:
    with psql(cluster, 1) as one, psql(cluster, 2) as two:
        one.execute(inserted(1, email))
        assert claims(cluster)[email] == 1
        with pytest.raises(
            psycopg.errors.UniqueViolation, match=r'violates look-up "users\.email"'
        ) as refused:
            two.execute(inserted(2, email))
        assert refused.value.diag.message_detail == f"Key (email)=({email}) already exists in another shard."
        assert (refused.value.diag.table_name, refused.value.diag.column_name) == ("users", "email")
        two.execute(inserted(2, f"two-{email}"))
        with pytest.raises(psycopg.errors.UniqueViolation, match="look-up"):
            two.execute(f"update shard_0002.users set email = '{email}' where email = 'two-{email}'")
        two.execute(f"update shard_0002.users set email = 'new-{email}' where email = 'two-{email}'")
        assert claims(cluster)[f"new-{email}"] == 2
        two.execute("update shard_0002.users set age = 7")


def test_copy_merge_and_upserts_are_claimed(cluster: Cluster, email: str) -> None:
    with psql(cluster, 1) as one, psql(cluster, 2) as two:
        copied(one, 1, [f"{n}-{email}" for n in range(2500)])
        assert sum(email in value for value in claims(cluster)) == 2500
        with pytest.raises(psycopg.errors.UniqueViolation, match="look-up"):
            copied(two, 2, [f"new-{email}", f"7-{email}"])
        with pytest.raises(psycopg.errors.UniqueViolation, match="look-up"):
            two.execute(inserted(2, f"8-{email}") + " on conflict (email) do update set age = 1")
        with pytest.raises(psycopg.errors.UniqueViolation, match="look-up"):
            two.execute(f"with made as ({inserted(2, f'9-{email}')} returning id) select count(*) from made")


def test_a_claim_whose_row_never_came_or_went_is_taken_over(cluster: Cluster, email: str) -> None:
    with psql(cluster, 1) as one, psql(cluster, 2) as two:
        one.execute(f"begin; {inserted(1, email)}; rollback")
        assert claims(cluster)[email] == 1
        two.execute(inserted(2, email))
        assert claims(cluster)[email] == 2
        two.execute(f"delete from shard_0002.users where email = '{email}'")
        one.execute(inserted(1, email))
        assert claims(cluster)[email] == 1


@pytest.mark.long
def test_a_row_that_may_still_come_is_waited_for(cluster: Cluster, email: str) -> None:
    with psql(cluster, 1) as one, psql(cluster, 2) as two:
        one.execute(f"begin; {inserted(1, email)}")
        with pytest.raises(psycopg.Error, match=r"shard 1 has claimed .* have not ended for 4 s") as busy:
            two.execute(inserted(2, email))
        assert busy.value.sqlstate == "SI014"
        ends = threading.Timer(0.5, lambda: one.execute("commit"))
        ends.start()
        with pytest.raises(psycopg.errors.UniqueViolation, match="look-up"):
            two.execute(inserted(2, email))
        ends.join()


def test_sessions_and_sql_exclude_each_other(cluster: Cluster, email: str) -> None:
    with cluster.session(shard=1) as session:
        session.add(User(name=named(cluster, 1), email=email))
        session.flush()
        # The trigger has claimed, so the session need not.
        assert session.scalar(text("select current_setting('shardids.claimed')")) == f"shard_0001.{CLAIMS}"
        session.commit()
    with psql(cluster, 2) as two, pytest.raises(psycopg.errors.UniqueViolation, match="look-up"):
        two.execute(inserted(2, email))
    with cluster.session(shard=2) as session:
        session.add(User(name=named(cluster, 2), email=email))
        with pytest.raises(IntegrityError, match=r'violates look-up "users\.email"'):
            session.commit()
        session.rollback()
        session.add(User(name=named(cluster, 2), email=f"two-{email}"))
        session.commit()
    with cluster.session(lookup=User.email == f"two-{email}") as session:
        session.execute(delete(User).where(User.email == f"two-{email}"))
        session.commit()
    with cluster.session(shard=3) as session:
        session.add(User(name=named(cluster, 3), email=f"two-{email}"))
        session.commit()


def test_sessions_claim_where_triggers_do_not(cluster: Cluster, email: str, url: str) -> None:
    """A session that believes a look-up to be strict which is not any more."""
    with catalog_at(url) as catalog:
        lookups.create(catalog, EMAIL, strict=False)
        try:
            assert [one["strict"] for one in lookups.listed(catalog)] == [False]
            assert cluster.placement.lookups[("users", "email")].is_strict
            with cluster.session(shard=1) as session:
                session.add(User(name=named(cluster, 1), email=email))
                session.commit()
            assert claims(cluster)[email] == 1
            with psql(cluster, 1) as one:
                one.execute(inserted(1, f"sql-{email}"))
                assert f"sql-{email}" not in claims(cluster)
                assert one.execute("select count(*) from shardids.lookup_place").fetchone() == (0,)
        finally:
            lookups.create(catalog, EMAIL, strict=True, store_password=True)
            lookups.backfill(catalog, EMAIL)


@pytest.mark.long
def test_transactions_that_are_prepared_claim(cluster: Cluster, email: str) -> None:
    with psql(cluster, 1) as one, psql(cluster, 2) as two:
        one.execute(f"begin; {inserted(1, email)}; prepare transaction '{email}'")
        assert claims(cluster)[email] == 1
        with pytest.raises(psycopg.Error, match="have not ended"):
            two.execute(inserted(2, email))
        one.execute(f"commit prepared '{email}'")
        with pytest.raises(psycopg.errors.UniqueViolation, match="look-up"):
            two.execute(inserted(2, email))


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_higher_isolation_levels_claim(cluster: Cluster, email: str, isolation: str) -> None:
    with psql(cluster, 1) as one, psql(cluster, 2) as two:
        one.execute(f"begin isolation level {isolation}; select count(*) from shard_0001.users")
        two.execute(f"{inserted(2, email)}; delete from shard_0002.users where email = '{email}'")
        one.execute(f"{inserted(1, email)}; commit")
    assert claims(cluster)[email] == 1


def test_roles_that_write_the_table_need_nothing_else(cluster: Cluster, email: str) -> None:
    with psql(cluster, 1) as one, one.transaction(force_rollback=True):
        one.execute("create role writer; grant usage on schema shard_0001 to writer")
        one.execute("grant insert (name, email), select on shard_0001.users to writer")
        one.execute("grant usage on schema shardids to writer; select shardids.grant_usage(1, 'writer')")
        one.execute("set local role writer")
        one.execute(inserted(1, email))
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="schema shardids_dblink"):
            one.execute("select * from shardids_dblink.dblink_get_connections()")


def test_racing_sql_gets_each_address_once(cluster: Cluster, email: str) -> None:
    won: list[tuple[str, int]] = []

    def race(shard: int) -> None:
        with psql(cluster, shard) as db:
            for n in range(40):
                try:
                    db.execute(inserted(shard, f"{n}{email}"))
                except psycopg.errors.UniqueViolation:
                    continue
                won.append((f"{n}{email}", shard))

    threads = [threading.Thread(target=race, args=(shard,)) for shard in range(SHARDS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dict(won) == {one: shard for one, shard in rows(cluster).items() if one.endswith(email)}
    assert len(won) == 40


def test_a_connection_that_was_lost_is_made_again(cluster: Cluster, email: str) -> None:
    with psql(cluster, 1) as one:
        one.execute(";".join(inserted(1, f"{n}-{email}") for n in range(8)))
        for shard in range(SHARDS):
            with psql(cluster, shard) as node:
                node.execute(
                    "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
                    " where application_name = 'shardids claims' and pid <> pg_backend_pid()"
                )
        one.execute(";".join(inserted(1, f"new-{n}-{email}") for n in range(8)))


@pytest.mark.long
def test_moves_take_triggers_along_and_tell_all_nodes(databases: BlankDatabases) -> None:
    urls = databases.take(), databases.take()
    open_signups(urls[0], {"a": urls[0], "b": urls[1]}, SHARDS)
    email = next(one for n in range(99) if shard_of_claim(one := f"m{n}@example.com", SHARDS) == 0)
    with Cluster.connect(dsn(urls[0]), listen=False) as cluster, catalog_at(urls[0]) as catalog:
        lookups.create(catalog, EMAIL, strict=True, store_password=True)
        with psql(cluster, 1) as one:
            one.execute(inserted(1, email))
        for shard in (0, 1):
            source = cluster.placement.node_of[shard]
            moved = mover.move(catalog, shard, "b" if source == "a" else "a")
            assert not moved.stale_views
            cluster.refresh()
            with psql(cluster, 2) as two, pytest.raises(psycopg.errors.UniqueViolation, match="look-up"):
                two.execute(inserted(2, email))
            with psql(cluster, shard) as there:
                there.execute(inserted(shard, f"{shard}-{email}"))
        assert claims(cluster) == rows(cluster)
        assert lookups.drop(catalog, EMAIL) == list(range(SHARDS))
        with psql(cluster, 1) as one:
            one.execute(inserted(1, "unclaimed@example.com"))
            assert one.execute("select count(*) from pg_foreign_server").fetchone() == (0,)
    for database in urls:
        databases.give_back(database)


def test_what_triggers_can_not_keep_is_refused(cluster: Cluster, url: str) -> None:
    with psql(cluster, 1) as one, catalog_at(url) as catalog:
        one.execute("create table shard_0001.more_users () inherits (shard_0001.users)")
        with pytest.raises(BadArgument, match="users is partitioned or inherited"):
            lookups.create(catalog, EMAIL, strict=True)
        (seen,) = compare_all(catalog, every_row=False)
        assert "users is partitioned or inherited" in str(seen.error)
        one.execute("drop table shard_0001.more_users")
        one.execute("grant usage on schema shardids_dblink to public")
        with pytest.raises(ClusterConflict, match="schema shardids_dblink was granted to public"):
            lookups.create(catalog, EMAIL, strict=True)
        assert faulty_nodes(catalog) == {
            cluster.placement.node_of[1]: "schema shardids_dblink was granted to public"
        }
        one.execute("revoke usage on schema shardids_dblink from public")
        lookups.create(catalog, EMAIL, strict=True)
    assert cluster.session(shard=1).scalars(select(User).limit(1)).all() is not None


@pytest.fixture
def stranger(cluster: Cluster) -> Iterator[str]:
    """A role on the node of shard 1 that may write there, and owns nothing."""
    name = f"stranger_{uuid4().hex}"
    with psql(cluster, 1) as one:
        one.execute(f"create role {name}; grant usage on schema shardids, shard_0001 to {name}")
        one.execute(f"grant insert on shard_0001.users to {name}; select shardids.grant_usage(1, '{name}')")
        yield name
        one.execute(f"reassign owned by {name} to current_user; drop owned by {name}; drop role {name}")


def test_roles_that_read_everything_do_not_reach_the_connections(
    cluster: Cluster, email: str, stranger: str, url: str
) -> None:
    """PostgreSQL gives pg_read_all_data and pg_write_all_data USAGE on every schema."""
    with psql(cluster, 1) as one, catalog_at(url) as catalog:
        one.execute(f"grant pg_read_all_data, pg_write_all_data to {stranger}")
        with one.transaction(force_rollback=True):
            # As the page says: PostgreSQL shows them what a node's servers store.
            one.execute(f"set local role {stranger}")
            assert one.execute("select count(*) > 0 from pg_user_mapping").fetchone() == (True,)
        for repair in (False, True):
            if repair:
                one.execute("grant execute on all functions in schema shardids_dblink to public")
                assert list(faulty_nodes(catalog)) == [cluster.placement.node_of[1]]
                assert lookups.refresh(catalog) == {}
            with one.transaction(force_rollback=True):
                one.execute(f"set local role {stranger}")
                one.execute(inserted(1, email))
                with pytest.raises(psycopg.errors.InsufficientPrivilege, match="function dblink_get"):
                    one.execute("select shardids_dblink.dblink_get_connections()")
        one.execute(f"grant execute on function shardids_dblink.dblink_get_connections() to {stranger}")
        with pytest.raises(ClusterConflict, match="a function in schema shardids_dblink was granted to"):
            lookups.create(catalog, EMAIL, strict=True)


def test_what_belongs_to_others_is_not_taken_for_ours(cluster: Cluster, stranger: str, url: str) -> None:
    with psql(cluster, 1) as one, catalog_at(url) as catalog:
        one.execute(f"grant usage on foreign data wrapper dblink_fdw to {stranger}")
        for what in (
            "schema shardids_dblink",
            "server lookups_a",
            "function shardids_dblink.dblink_get_connections()",
        ):
            one.execute(f"alter {what} owner to {stranger}")
            with pytest.raises(ClusterConflict, match=f"is owned by role {stranger}"):
                lookups.create(catalog, EMAIL, strict=True)
            assert list(faulty_nodes(catalog)) == [cluster.placement.node_of[1]]
            one.execute(f"alter {what} owner to current_user")
        lookups.create(catalog, EMAIL, strict=True)


MADE = "create function {0}.zz() returns trigger language plpgsql as 'begin return null; end';"
TRIGGER = " create trigger zz after insert on {0}.{2} for each statement execute function {0}.zz()"


@pytest.mark.parametrize(
    "case",
    [
        (
            "alter table {0}.users owner to {1}",
            "alter table {0}.users owner to current_user",
            "owns users",
        ),
        ("alter schema {0} owner to {1}", "alter schema {0} owner to current_user", "owns shard_0001"),
        ("grant trigger on {0}.users to {1}", "revoke trigger on {0}.users from {1}", "triggers on users"),
        ("grant trigger on {0}.{2} to public", "revoke trigger on {0}.{2} from public", "public may make"),
        ("grant references on {0}.{2} to {1}", "revoke references on {0}.{2} from {1}", "may refer to "),
        ("create table {0}.zz (v varchar references {0}.{2})", "drop table {0}.zz", "zz refers to "),
        (MADE + TRIGGER, "drop function {0}.zz() cascade", "trigger zz is on "),
        (
            MADE + TRIGGER.replace("{2}", "users") + "; alter function {0}.zz() owner to {1}",
            "drop function {0}.zz() cascade",
            "trigger zz on users calls a function of role ",
        ),
    ],
    ids=[
        "table",
        "schema",
        "granted",
        "granted-on-claims",
        "references",
        "referring",
        "on-claims",
        "function",
    ],
)
def test_triggers_of_others_are_refused(
    cluster: Cluster, url: str, stranger: str, case: tuple[str, str, str]
) -> None:
    """They would run over dblink, as the user of the node's URL."""
    damage, repair, what = case
    with psql(cluster, 1) as one, catalog_at(url) as catalog:
        one.execute(damage.format("shard_0001", stranger, CLAIMS))
        try:
            with pytest.raises(ClusterConflict, match=f"can't be strict in shard 1: .*{what}"):
                lookups.create(catalog, EMAIL, strict=True)
            (seen,) = compare_all(catalog, every_row=False)
            assert seen.error is not None
            assert what in seen.error.message
        finally:
            one.execute(repair.format("shard_0001", stranger, CLAIMS))
        assert lookups.create(catalog, EMAIL, strict=True) == []


def test_claims_of_another_owner_are_found_and_given_back(cluster: Cluster, url: str, stranger: str) -> None:
    with psql(cluster, 1) as one, catalog_at(url) as catalog:
        one.execute(f"alter table shard_0001.{CLAIMS} owner to {stranger}")
        (seen,) = compare_all(catalog, every_row=False)
        assert f"{CLAIMS} is owned by role {stranger}" in str(seen.error)
        with pytest.raises(ClusterConflict, match="decides what runs when others claim"):
            lookups.create(catalog, EMAIL, strict=True)
        one.execute(f"alter role {stranger} superuser")
        (seen,) = compare_all(catalog, every_row=False)
        assert "claims have another owner" in str(seen.error)
        lookups.create(catalog, EMAIL, strict=True)
        (seen,) = compare_all(catalog, every_row=False)
        assert seen.error is None


def test_claims_that_another_role_has_made_are_not_taken_for_ours(
    cluster: Cluster, url: str, stranger: str
) -> None:
    """Its default would run as whoever claims: sessions, backfill, and dblink's superuser."""
    with psql(cluster, 1) as one, catalog_at(url) as catalog:
        one.execute(f"alter table shard_0001.{CLAIMS} rename to kept")
        one.execute(f"grant create on schema shard_0001 to {stranger}; set session authorization {stranger}")
        one.execute("create function shard_0001.zz() returns uuid return gen_random_uuid()")
        one.execute(
            f"create table shard_0001.{CLAIMS} (value varchar primary key, shard integer not null,"
            " stamp uuid not null default shard_0001.zz())"
        )
        one.execute("reset session authorization")
        try:
            for strict in (False, True):
                with pytest.raises(ClusterConflict, match=f"{CLAIMS} is owned by role {stranger}"):
                    lookups.create(catalog, EMAIL, strict=strict)
            with pytest.raises(ClusterConflict, match="decides what runs"):
                lookups.backfill(catalog, EMAIL)
            for name, setting in {"table": "users", "column": "email", "claims": CLAIMS}.items():
                one.execute("select set_config(%s, %s, false)", [f"shardids.{name}", setting])
            one.execute("set shardids.schema = 'shard_0001'")
            with pytest.raises(psycopg.Error, match=f"{CLAIMS} belongs to another role"):
                one.execute(read_sql("lookups/claims.v1").encode())
        finally:
            one.execute(f"drop table shard_0001.{CLAIMS}; drop function shard_0001.zz()")
            one.execute(f"alter table shard_0001.kept rename to {CLAIMS}")


KINDS = {"text": "a\\b'c", "bigint": -5, "uuid": uuid4(), "bytea": b"\x00\\q", "date": date(2026, 11, 23)}


@pytest.mark.parametrize("strings", ["on", "off"])
def test_triggers_find_claims_where_sessions_do(cluster: Cluster, strings: str) -> None:
    """Whatever a backslash means in the session that writes."""
    with psql(cluster, 1) as one:
        one.execute(f"set standard_conforming_strings = {strings}".encode())
        for kind, value in KINDS.items():
            found = one.execute("select shardids.claim_shard(%s, (%s)::text, 1000)", [kind, value]).fetchone()
            assert found == (shard_of_claim(value, 1_000),), kind


@pytest.mark.long
def test_a_node_that_was_not_told_refuses_what_it_can_not_claim(
    cluster: Cluster, email: str, url: str
) -> None:
    with psql(cluster, 1) as one, catalog_at(url) as catalog:
        one.execute("delete from shardids.lookup_place")
        with pytest.raises(psycopg.Error, match="does not know where shard") as refused:
            one.execute(inserted(1, email))
        assert refused.value.diag.message_hint == "shardids lookup refresh"
        assert lookups.refresh(catalog) == {}
        one.execute(inserted(1, email))


def test_a_place_whose_server_is_none_of_ours_is_not_connected_to(
    cluster: Cluster, email: str, url: str
) -> None:
    """Of dblink any other text is the options of a connection, of whoever may write the table."""
    with psql(cluster, 1) as one, catalog_at(url) as catalog:
        there = parse_url(url)
        elsewhere = f"host={there.host} port={there.port} dbname={there.database} user={there.username}"
        one.execute("update shardids.lookup_place set connection = 'planted', server = %s", [elsewhere])
        with pytest.raises(psycopg.Error, match="has no foreign server") as refused:
            one.execute(inserted(1, email))
        assert refused.value.diag.message_hint == "shardids lookup refresh"
        assert lookups.refresh(catalog) == {}
        one.execute(inserted(1, email))
