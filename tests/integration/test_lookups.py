"""Columns that are unique over all shards: what sessions write is claimed, found, and never there twice."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, delete, event, func, insert, select, text, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import IntegrityError, InvalidRequestError
from sqlalchemy.orm import Session

from shardids import AsyncCluster, Cluster, mover
from shardids.catalog.lookups import claims_name, shard_of_claim
from shardids.errors import BadArgument, ClusterConflict, LookupBusy, UnknownValue
from shardids.tables import lookups
from tests.conftest import BlankDatabases, dsn
from tests.support.clusters import catalog_at
from tests.support.clusters import command_here as command
from tests.support.signups import EMAIL, Photo, User, claims, count, named, open_signups, rows

SHARDS = 4
TAKEN = 'duplicate key value violates look-up "users.email"'


@pytest.fixture(scope="module")
def url(databases: BlankDatabases) -> Iterator[str]:
    urls = databases.take(), databases.take()
    open_signups(urls[0], {"a": urls[0], "b": urls[1]}, SHARDS)
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


def user(cluster: Cluster, shard: int, email: str) -> User:
    return User(name=named(cluster, shard), email=email)


def add(cluster: Cluster, shard: int, email: str) -> int:
    with cluster.session(shard=shard) as session:
        one = user(cluster, shard, email)
        session.add(one)
        session.commit()
        return one.id


def claimed(cluster: Cluster, email: str, shard: int) -> None:
    """Leaves a claim whose row never came, as a client that dies between claim and COMMIT does."""
    with cluster.session(shard=shard) as session:
        session.add(user(cluster, shard, email))
        session.flush()
        session.rollback()
    assert claims(cluster)[email] == shard


UNCLAIMED = "set local shardids.unclaimed_writes = 'allowed'"
"""How a DBA writes look-up keys without a claim."""


def shown_as_taken(error: IntegrityError, email: str) -> None:
    assert TAKEN in str(error)
    assert f"Key (email)=({email})" in str(error)
    assert error.orig is not None
    assert error.orig.sqlstate == "23505"  # type: ignore[attr-defined]  # psycopg's


def test_an_address_is_refused_in_another_shard_and_nothing_of_the_transaction_is_committed(
    cluster: Cluster, email: str
) -> None:
    add(cluster, 1, email)
    with cluster.session(shard=2) as session:
        session.add(user(cluster, 2, f"other-{email}"))
        session.flush()
        session.add(user(cluster, 2, email))
        with pytest.raises(IntegrityError) as refused:
            session.commit()
        shown_as_taken(refused.value, email)
        session.rollback()
    assert f"other-{email}" not in rows(cluster)
    assert claims(cluster)[email] == 1


def test_an_address_is_refused_in_its_own_shard_by_postgresql(cluster: Cluster, email: str) -> None:
    add(cluster, 1, email)
    with pytest.raises(IntegrityError, match="users_email_key"):
        add(cluster, 1, email)


def test_a_session_over_all_shards_claims_what_it_flushes(cluster: Cluster, email: str) -> None:
    with cluster.sharded_session() as session:
        session.add_all(user(cluster, shard, f"{shard}{email}") for shard in range(SHARDS))
        session.commit()
    assert {f"{shard}{email}": shard for shard in range(SHARDS)}.items() <= claims(cluster).items()
    with cluster.sharded_session() as session:
        session.add(user(cluster, 3, f"1{email}"))
        with pytest.raises(IntegrityError, match=TAKEN):
            session.flush()


def test_one_address_for_two_rows_of_a_flush_is_refused(cluster: Cluster, email: str) -> None:
    with cluster.sharded_session() as session:
        session.add_all(user(cluster, shard, email) for shard in (0, 1))
        with pytest.raises(IntegrityError, match=TAKEN):
            session.commit()
    assert email not in rows(cluster)


def test_who_changes_an_address_claims_the_new_one(cluster: Cluster, email: str) -> None:
    id_ = add(cluster, 1, email)
    add(cluster, 2, f"two-{email}")
    with cluster.session(id=id_) as session:
        session.get_one(User, id_).email = f"two-{email}"
        with pytest.raises(IntegrityError, match=TAKEN):
            session.commit()
        session.rollback()
        session.get_one(User, id_).email = f"new-{email}"
        session.commit()
    assert claims(cluster)[f"new-{email}"] == 1
    # The old one is free: nobody has it.
    add(cluster, 3, email)


WRITES = {
    "values": lambda name, email: (insert(User).values(name=name, email=email), None),
    "rows of values": lambda name, email: (insert(User).values([{"name": name, "email": email}]), None),
    "parameters": lambda name, email: (insert(User), {"name": name, "email": email}),
    "many parameters": lambda name, email: (
        insert(User),
        [{"name": name, "email": email}, {"name": name, "email": f"2{email}"}],
    ),
    "a Core table": lambda name, email: (insert(User.__table__), {"name": name, "email": email}),
    "an upsert that does nothing": lambda name, email: (
        postgresql.insert(User).values(name=name, email=email).on_conflict_do_nothing(),
        None,
    ),
    "an upsert that updates": lambda name, email: (
        (one := postgresql.insert(User).values(name=name, email=email)).on_conflict_do_update(
            index_elements=["email"], set_={"email": one.excluded.email, "age": 1}
        ),
        None,
    ),
}


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("over_all", [False, True])
def test_rows_inserted_by_statements_are_claimed(
    cluster: Cluster, email: str, way: str, over_all: bool
) -> None:
    statement, given = WRITES[way](named(cluster, 1), email)
    with cluster.sharded_session() if over_all else cluster.session(shard=1) as session:
        session.execute(statement, given)
        session.commit()
    assert claims(cluster)[email] == 1
    statement, given = WRITES[way](named(cluster, 2), email)
    with cluster.sharded_session() if over_all else cluster.session(shard=2) as session:
        with pytest.raises(IntegrityError, match=TAKEN):
            session.execute(statement, given)
        # As after a failed flush: what was written before the refusal can't be committed.
        with pytest.raises(InvalidRequestError):
            session.commit()
        session.rollback()
    assert rows(cluster)[email] == 1


@pytest.mark.parametrize("over_all", [False, True])
def test_addresses_set_by_update_are_claimed(cluster: Cluster, email: str, over_all: bool) -> None:
    id_, other = add(cluster, 1, email), add(cluster, 2, f"two-{email}")
    with cluster.sharded_session() if over_all else cluster.session(shard=1) as session:
        session.execute(update(User).where(User.id == id_).values(email=f"new-{email}"))
        session.commit()
    assert claims(cluster)[f"new-{email}"] == 1
    with cluster.sharded_session() if over_all else cluster.session(shard=2) as session:
        with pytest.raises(IntegrityError, match=TAKEN):
            session.execute(update(User).where(User.id == other).values(email=f"new-{email}"))
        session.rollback()


@pytest.mark.parametrize("over_all", [False, True])
def test_bulk_operations_are_claimed(cluster: Cluster, email: str, over_all: bool) -> None:
    def opened() -> Session:
        return cluster.sharded_session() if over_all else cluster.session(shard=1)

    with opened() as session:
        session.bulk_save_objects([user(cluster, 1, f"1{email}")])
        session.bulk_insert_mappings(User, [{"name": named(cluster, 1), "email": f"2{email}"}])
        session.commit()
        one = session.scalars(select(User).where(User.email == f"1{email}")).one()
        session.bulk_update_mappings(User, [{"id": one.id, "name": one.name, "email": f"3{email}"}])
        session.commit()
    assert {f"{n}{email}": 1 for n in (1, 2, 3)}.items() <= claims(cluster).items()
    add(cluster, 2, f"two-{email}")
    with opened() as session:
        with pytest.raises(IntegrityError, match=TAKEN):
            session.bulk_save_objects([user(cluster, 1, f"two-{email}")])
        with pytest.raises(InvalidRequestError):
            session.commit()


def test_what_can_not_be_claimed_is_refused_by_name(cluster: Cluster, email: str) -> None:
    id_ = add(cluster, 1, email)
    refused: dict[str, Any] = {
        "SQL expression": update(User).where(User.id == id_).values(email=func.lower("X")),
        "INSERT … SELECT": insert(User).from_select(["name", "email"], select(User.name, User.email)),
        "gives no value for look-up key users.email": insert(User).values(name=named(cluster, 1)),
        "users.email takes str": insert(User).values(name=named(cluster, 1), email=5),
    }
    for message, statement in refused.items():
        with cluster.session(shard=1) as session:
            with pytest.raises((BadArgument, Exception), match=message) as error:
                session.execute(statement)
            assert isinstance(error.value, BadArgument), message
    with cluster.sharded_session() as session, pytest.raises(BadArgument, match="over several shards sets"):
        session.execute(update(User).values(email=email))
    with cluster.session(shard=1) as session:
        session.add(User(name=named(cluster, 1), email=func.lower("X")))
        with pytest.raises(BadArgument, match="SQL expression"):
            session.commit()
    with pytest.raises(BadArgument, match="look-up key"):
        cluster.copy(User, [{"name": named(cluster, 1), "email": f"c{email}"}])
    with (
        cluster.session(shard=1) as session,
        session.connection(execution_options={"isolation_level": "AUTOCOMMIT"}),
        pytest.raises(BadArgument, match="AUTOCOMMIT"),
    ):
        session.execute(update(User).where(User.id == id_).values(email=f"auto-{email}"))
    with cluster.session(shard=1) as session:
        session.execute(update(User).where(User.id == id_).values(email=email))
        session.commit()


def test_a_claim_whose_row_never_came_is_taken_over(cluster: Cluster, email: str) -> None:
    claimed(cluster, email, 1)
    add(cluster, 2, email)
    assert claims(cluster)[email] == 2


def test_a_claim_is_not_taken_while_its_row_may_still_come(cluster: Cluster, email: str) -> None:
    with cluster.session(shard=1) as first:
        first.add(user(cluster, 1, email))
        first.flush()
        with pytest.raises(LookupBusy, match=r"shard 1 has claimed .* have not ended"):
            add(cluster, 2, email)
        first.commit()
    with pytest.raises(IntegrityError, match=TAKEN):
        add(cluster, 2, email)


def test_who_waits_for_the_row_of_another_shard_sees_it(cluster: Cluster, email: str) -> None:
    failures: list[BaseException] = []

    def later() -> None:
        try:
            add(cluster, 2, email)
        except IntegrityError as error:
            failures.append(error)

    with cluster.session(shard=1) as first:
        first.add(user(cluster, 1, email))
        first.flush()
        thread = threading.Thread(target=later)
        thread.start()
        thread.join(0.3)
        first.commit()
    thread.join()
    assert TAKEN in str(failures[0])


def test_a_deleted_address_is_free_in_every_shard_and_its_claim_is_swept(
    cluster: Cluster, email: str, url: str
) -> None:
    for shard in (1, 2):
        with cluster.session(shard=shard) as session:
            session.add(user(cluster, shard, email))
            session.commit()
            session.execute(delete(User).where(User.email == email))
            session.commit()
    assert claims(cluster)[email] == 2
    kept = rows(cluster)
    with catalog_at(url) as catalog:
        wished = lookups.sweep(catalog, EMAIL, dry_run=True)
        assert claims(cluster)[email] == 2
        swept = lookups.sweep(catalog, EMAIL)
    assert wished.given_up == swept.given_up >= 1
    assert claims(cluster) == kept


@pytest.mark.long
def test_every_row_is_compared_without_a_sharding_key(cluster: Cluster, email: str, url: str) -> None:
    claimed(cluster, email, 1)
    checks = ("--checks", "row-without-claim,claim-without-row")
    done = command("doctor", "--every-row", *checks, SHARDIDS_CATALOG=url)
    assert (done.returncode, "claim-without-row" in done.stdout) == (0, True), done.stderr
    with catalog_at(url) as catalog:
        lookups.sweep(catalog, EMAIL)


def test_a_busy_shard_does_not_keep_a_sweep_from_others(cluster: Cluster, url: str) -> None:
    busy, gone = [one for n in range(99) if shard_of_claim(one := f"{n}-{uuid4()}", SHARDS) == 0][:2]
    claimed(cluster, busy, 1)
    claimed(cluster, gone, 2)
    with cluster.at(shard=1).connection() as connection, catalog_at(url) as catalog:
        connection.exec_driver_sql("lock table shard_0001.users in row exclusive mode")
        assert lookups.sweep(catalog, EMAIL).busy >= 1
    assert busy in claims(cluster)
    assert gone not in claims(cluster)


@pytest.mark.long
def test_a_sweep_leaves_what_is_being_written(cluster: Cluster, email: str, url: str) -> None:
    with cluster.session(shard=1) as session, catalog_at(url) as catalog:
        session.add(user(cluster, 1, email))
        session.flush()
        assert lookups.sweep(catalog, EMAIL).busy >= 1
        session.commit()
    assert claims(cluster)[email] == 1


def test_a_row_is_found_by_its_address_in_one_shard(cluster: Cluster, email: str) -> None:
    id_ = add(cluster, 3, email)
    with cluster.session(lookup=User.email == email) as session:
        assert session.scalars(select(User.id)).all().count(id_) == 1
    assert (
        cluster.at(lookup=User.email == email).run(
            lambda session: session.scalar(select(User.id).filter_by(email=email))
        )
        == id_
    )
    with cluster.sharded_session(fan_out="named") as session:
        assert session.scalars(select(User).where(User.email == email)).one().id == id_
        assert session.scalars(select(User).where(User.email.in_([email, "nobody"]))).one().id == id_
        assert session.scalars(select(User).where(User.email == "nobody")).all() == []
        session.execute(update(User).where(User.email == email).values(age=7))
        # What is not flushed yet is found, too.
        session.add(user(cluster, 2, f"new-{email}"))
        assert session.scalars(select(User).where(User.email == f"new-{email}")).one().name
        session.commit()
    with cluster.session(id=id_) as session:
        assert session.get_one(User, id_).age == 7


def test_a_look_up_key_costs_one_statement_more_than_the_sharding_key(cluster: Cluster, email: str) -> None:
    add(cluster, 1, email)
    sent: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: object) -> None:
        sent.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        with cluster.sharded_session() as session:
            name = session.scalars(select(User).where(User.email == email)).one().name
        assert len(sent) == 2
        with cluster.sharded_session() as session:
            session.scalars(select(User).where(User.name == name)).all()
        assert len(sent) == 3
        with cluster.session(lookup=User.email == email):
            assert len(sent) == 4
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def test_an_unknown_address_and_other_criteria_are_refused(cluster: Cluster) -> None:
    with pytest.raises(UnknownValue, match=r"no row has the users.email nobody@example.com"):
        cluster.session(lookup=User.email == "nobody@example.com")
    for wrong in (User.name == "ann", User.email != "ann", User.email.in_(["ann"])):
        with pytest.raises(BadArgument, match="does not compare a look-up key with a value"):
            cluster.session(lookup=wrong)
    with pytest.raises(BadArgument, match="exactly one of"):
        cluster.session(lookup=User.email == "a", shard=1)


def test_savepoints_keep_what_was_claimed_and_let_go_of_what_was_rolled_back(
    cluster: Cluster, email: str
) -> None:
    add(cluster, 2, f"two-{email}")
    with cluster.session(shard=1) as session:
        session.add(user(cluster, 1, email))
        session.flush()
        with pytest.raises(IntegrityError, match=TAKEN), session.begin_nested():
            session.add(user(cluster, 1, f"two-{email}"))
        session.commit()
    assert rows(cluster)[email] == 1


def test_many_rows_are_claimed_together(cluster: Cluster, email: str) -> None:
    with cluster.sharded_session() as session:
        session.add_all(user(cluster, n % SHARDS, f"{n}{email}") for n in range(1000))
        session.commit()
    assert sum(email in one for one in claims(cluster)) == 1000


def test_values_that_a_shard_had_claimed_are_settled_together(cluster: Cluster, email: str) -> None:
    def write(shard: int, first: int) -> None:
        with cluster.session(shard=shard) as session:
            session.add_all(user(cluster, shard, f"{n}{email}") for n in range(first, 300))
            session.commit()

    with cluster.session(shard=1) as session:
        session.add_all(user(cluster, 1, f"{n}{email}") for n in range(300))
        session.flush()
        session.rollback()
    add(cluster, 1, f"0{email}")
    began = time.monotonic()
    with pytest.raises(IntegrityError, match=rf"Key \(email\)=\(0{email}\)"):
        write(2, 0)
    write(2, 1)
    # One value after the other takes a wait for all writers each.
    assert time.monotonic() - began < 5
    assert sum(email in one for one, shard in claims(cluster).items() if shard == 2) == 299


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_transaction_with_a_snapshot_finds_the_row_where_it_was(
    cluster: Cluster, email: str, level: str
) -> None:
    id_ = add(cluster, 1, email)
    select_ = select(User.id).where(User.email == email)
    with cluster.sharded_session() as session:
        for shard in (1, 3):
            session.connection(
                bind_arguments={"shard_id": shard}, execution_options={"isolation_level": level}
            ).exec_driver_sql("select count(*) from shardids.node")
        with cluster.session(shard=1) as other:
            other.execute(delete(User).where(User.email == email))
            other.commit()
        moved = add(cluster, 3, email)
        assert session.scalar(select_) == id_
    with cluster.sharded_session(fan_out="named") as session:
        assert session.scalar(select_) == moved
        session.connection(bind_arguments={"shard_id": 1})
        assert session.scalar(select_) == moved


def test_sessions_of_asyncio_claim_and_find(url: str, cluster: Cluster, email: str) -> None:
    async def main() -> None:
        async with await AsyncCluster.connect(url, listen=False) as there:
            async with there.session(shard=1) as session:
                session.add(user(cluster, 1, email))
                await session.commit()
            async with there.sharded_session() as session:
                session.add(user(cluster, 2, email))
                with pytest.raises(IntegrityError, match=TAKEN):
                    await session.commit()
                await session.rollback()
                found = await session.scalars(select(User).where(User.email == email))
                assert found.one().name == named(cluster, 1)
            with pytest.raises(BadArgument, match="has to be awaited"):
                there.session(lookup=User.email == email)

            async def name(session: Any) -> Any:
                return await session.scalar(select(User.name).where(User.email == email))

            assert await there.at(lookup=User.email == email).run(name) == named(cluster, 1)
            shard = await there.at(lookup=User.email == email)
            assert shard.number == 1
            async with shard.session() as session:
                assert await name(session) == named(cluster, 1)
            with pytest.raises(UnknownValue):
                await there.at(lookup=User.email == f"not {email}")

    asyncio.run(main())


def test_racing_clients_get_each_address_once(cluster: Cluster, email: str) -> None:
    won: list[tuple[str, int]] = []

    def race(shard: int) -> None:
        for n in range(40):
            with cluster.session(shard=shard) as session:
                session.add(user(cluster, shard, f"{n}{email}"))
                try:
                    session.commit()
                except (IntegrityError, LookupBusy):
                    continue
            won.append((f"{n}{email}", shard))

    threads = [threading.Thread(target=race, args=(shard,)) for shard in range(SHARDS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    there = {one: shard for one, shard in rows(cluster).items() if one.endswith(email)}
    assert dict(won) == there
    assert len(won) == len(there) == 40


def test_rows_that_were_there_are_claimed_by_a_backfill(cluster: Cluster, email: str, url: str) -> None:
    with cluster.session(shard=1) as session:
        session.execute(text(UNCLAIMED))
        session.execute(
            text("insert into shard_0001.users (name, email) values (:name, :email)"),
            {"name": named(cluster, 1), "email": email},
        )
        session.commit()
    with catalog_at(url) as catalog:
        assert lookups.backfill(catalog, EMAIL, dry_run=True).claimed == 1
        assert email not in claims(cluster)
        assert lookups.backfill(catalog, EMAIL).claimed == 1
    assert claims(cluster)[email] == 1


def test_a_backfill_names_values_that_two_shards_have(cluster: Cluster, email: str, url: str) -> None:
    for shard in (1, 2):
        with cluster.at(shard=shard).connection() as connection:
            connection.exec_driver_sql(UNCLAIMED)
            connection.exec_driver_sql(
                f"insert into shard_{shard:04}.users (name, email) values ('x', %s)", (email,)
            )
            connection.commit()
    with catalog_at(url) as catalog, pytest.raises(ClusterConflict, match=f"rows of two shards .* '{email}'"):
        lookups.backfill(catalog, EMAIL)
    with cluster.session(shard=2) as session:
        session.execute(delete(User).where(User.email == email))
        session.commit()
    assert count(cluster, 1)


def test_a_column_that_can_not_be_claimed_is_refused_before_anything_is_made(
    cluster: Cluster, url: str
) -> None:
    refused = {
        "users.nothing": "the column does not exist",
        "nothing.email": "the table does not exist",
        "users.age": "it can be NULL",
        "users.name": "no unique index",
        "email": "is not of the form TABLE.COLUMN",
    }
    with catalog_at(url) as catalog:
        for name, message in refused.items():
            with pytest.raises(BadArgument, match=message) as caught:
                lookups.create(catalog, name)
            if name == "users.nothing":
                assert "email" in caught.value.hint
        assert [one["lookup"] for one in lookups.listed(catalog)] == [EMAIL]
        assert lookups.create(catalog, EMAIL) == []


def test_the_claim_of_a_value_is_where_its_hash_says() -> None:
    assert {shard_of_claim(f"u{n}@example.com", SHARDS) for n in range(100)} == set(range(SHARDS))


def test_a_statement_is_claimed_for_its_shard_whatever_its_autoflush_executes(
    cluster: Cluster, email: str
) -> None:
    id_ = add(cluster, 2, f"old-{email}")
    with cluster.sharded_session() as session:

        @event.listens_for(session, "before_flush")
        def _audit(*_: object) -> None:
            session.execute(insert(Photo), {"user_id": other.id})

        other = session.get_one(User, add(cluster, 1, f"one-{email}"))
        other.age = 5
        session.execute(update(User).where(User.id == id_).values(email=email))
        session.commit()
    assert claims(cluster)[email] == 2


@pytest.mark.parametrize("over_all", [False, True])
def test_writes_within_other_statements_are_refused(cluster: Cluster, email: str, over_all: bool) -> None:
    id_ = add(cluster, 1, email)
    new = {"name": named(cluster, 1), "email": f"new-{email}"}
    made = insert(User).values(new).returning(User.id).cte("made")
    changed = update(User).where(User.id == id_).values(email=f"new-{email}").returning(User.id)
    for statement in (
        select(User).from_statement(insert(User).values(new).returning(User)),
        select(User).from_statement(changed),
        select(made),
        select(made.c.id),
        select(User.id).where(User.id == id_).add_cte(changed.cte("changed")),
        delete(Photo).where(Photo.user_id == made.c.id),
        insert(Photo).values(user_id=select(made.c.id).scalar_subquery()),
    ):
        with (
            cluster.sharded_session() if over_all else cluster.session(shard=1) as session,
            pytest.raises(
                BadArgument,
                match=r"an INSERT or UPDATE within another statement writes look-up key users.email",
            ),
        ):
            session.execute(statement)
    assert f"new-{email}" not in rows(cluster)


def test_a_value_that_the_column_cuts_is_refused(cluster: Cluster, email: str, url: str) -> None:
    def altered(type_: str) -> None:
        for shard in range(SHARDS):
            with cluster.at(shard=shard).connection() as connection:
                trigger = claims_name("users", "email")
                connection.exec_driver_sql(f"drop trigger if exists {trigger} on shard_{shard:04}.users")
                connection.exec_driver_sql(f"alter table shard_{shard:04}.users alter email type {type_}")
                connection.commit()

    with catalog_at(url) as catalog:
        altered("varchar(200)")
        try:
            with pytest.raises(ClusterConflict, match=r"is now character varying\(200\), and its claims"):
                lookups.sweep(catalog, EMAIL)
            assert lookups.create(catalog, EMAIL) == []
            with pytest.raises(BadArgument, match=r"changes the value: it stores "):
                add(cluster, 1, f"{email}".ljust(201))
        finally:
            # The claim of what was cut is where nobody looks for it.
            for shard in range(SHARDS):
                with cluster.at(shard=shard).connection() as connection:
                    table = f"shard_{shard:04}.{claims_name('users', 'email')}"
                    connection.exec_driver_sql(f"delete from {table} where length(value) = 200")
                    connection.commit()
            altered("varchar")
            lookups.create(catalog, EMAIL)
        assert lookups.sweep(catalog, EMAIL).claims
    assert email not in {one.strip() for one in rows(cluster)}


def test_tables_whose_privileges_claims_do_not_follow_are_refused(cluster: Cluster, url: str) -> None:
    for change, undo, message in (
        ("grant select (email) on {} to public", "revoke select (email) on {} from public", "on columns"),
        (
            "alter table {} enable row level security",
            "alter table {} disable row level security",
            "has row security",
        ),
    ):
        with cluster.at(shard=1).connection() as connection, catalog_at(url) as catalog:
            connection.exec_driver_sql(change.format("shard_0001.users"))
            connection.commit()
            try:
                with pytest.raises(BadArgument, match=message):
                    lookups.create(catalog, EMAIL)
            finally:
                connection.exec_driver_sql(undo.format("shard_0001.users"))
                connection.commit()


@pytest.mark.long
def test_who_is_waited_for_is_named(cluster: Cluster, email: str) -> None:
    claimed(cluster, email, 1)
    with cluster.at(shard=1).connection() as connection:
        connection.exec_driver_sql("lock table shard_0001.users in share update exclusive mode")
        pid = connection.exec_driver_sql("select pg_backend_pid()").scalar()
        with pytest.raises(LookupBusy, match=rf"process IDs there: {pid}\)"):
            add(cluster, 2, email)


def test_a_backfill_waits_for_those_who_wrote_before(cluster: Cluster, email: str, url: str) -> None:
    with cluster.at(shard=1).connection() as connection, catalog_at(url) as catalog:
        connection.exec_driver_sql(UNCLAIMED)
        connection.exec_driver_sql("insert into shard_0001.users (name, email) values ('x', %s)", (email,))
        ends = threading.Timer(0.5, connection.commit)
        ends.start()
        lookups.backfill(catalog, EMAIL)
        ends.join()
    assert claims(cluster)[email] == 1


@pytest.mark.long
def test_a_clash_is_found_after_the_claim_and_the_row_have_moved(databases: BlankDatabases) -> None:
    urls = databases.take(), databases.take()
    open_signups(urls[0], {"a": urls[0], "b": urls[1]}, SHARDS)
    email = next(one for n in range(99) if shard_of_claim(one := f"m{n}@example.com", SHARDS) == 0)
    with Cluster.connect(dsn(urls[0]), listen=False) as moving, catalog_at(urls[0]) as catalog:
        add(moving, 1, email)
        for shard in (0, 1):
            source = moving.placement.node_of[shard]
            mover.move(catalog, shard, "b" if source == "a" else "a", options=mover.Options(offline=True))
            with pytest.raises(IntegrityError, match=TAKEN):
                add(moving, 2, email)
        with Cluster.connect(dsn(urls[0]), listen=False) as behind:
            source = behind.placement.node_of[1]
            mover.move(
                catalog,
                1,
                "b" if source == "a" else "a",
                back=True,
                options=mover.Options(offline=True),
            )
            moving.refresh()
            with moving.session(lookup=User.email == email) as session:
                session.execute(delete(User).where(User.email == email))
                session.commit()
            # The old copy, which is all that it knows of, still has the row.
            add(behind, 2, email)
        assert claims(moving) == {email: 2}
        assert lookups.drop(catalog, EMAIL, dry_run=True) == list(range(SHARDS))
        assert lookups.drop(catalog, EMAIL) == list(range(SHARDS))
        assert lookups.listed(catalog) == []
        with pytest.raises(ClusterConflict, match=r"look-up .* does not exist"):
            lookups.drop(catalog, EMAIL)
    for database in urls:
        databases.give_back(database)
