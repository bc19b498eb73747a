"""What a transaction that fences or activates a shard leaves when it is rolled back, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

from shardids.migrate.install import trees
from shardids.migrate.install.inspecting import inspect_shard
from shardids.pg.connections import open_engine
from shardids.watch import doctor
from tests.conftest import MakeDatabase, dsn, found_cluster
from tests.support.clusters import catalog_at
from tests.support.generator import DEFAULT, connect, draw, install, refused, run_ahead, scalar, ticks

Db = psycopg.Connection[Any]

NEXT = "select shard_0005.next_id()"
DRAWS = (NEXT, "select shard_0005.next_ids(100)", "select shardids.reserve(5, 10)")
ACTIVATE = "select shardids.activate(5)"
WAYS = {
    "at the top": (ACTIVATE,),
    "in a savepoint": ("savepoint s", ACTIVATE),
    "in a released savepoint": ("savepoint s", ACTIVATE, "release s"),
    "before a savepoint": (ACTIVATE, "savepoint s"),
    "in nested savepoints": ("savepoint s", "savepoint t", ACTIVATE, "release t", "release s", "savepoint u"),
    "in a block with a handler": (
        "do $$ begin perform shardids.activate(5); exception when others then raise; end $$",
    ),
    "after a rolled back one": ("savepoint s", ACTIVATE, "rollback to s", ACTIVATE),
    "in repeatable read": ("set transaction isolation level repeatable read", ACTIVATE),
}


@pytest.fixture
def url(blank_database: Callable[[], URL]) -> URL:
    url = blank_database()
    install(url)
    return url


@pytest.fixture
def other(url: URL) -> Iterator[Db]:
    with connect(dsn(url)) as connection:
        yield connection


def refused_in(connection: Db, statement: str, *words: str) -> None:
    """The statement is refused with SI002; its transaction goes on."""
    connection.execute("savepoint attempt")
    with refused("SI002", "shard 5", *words):
        connection.execute(statement)
    connection.execute("rollback to attempt")


@pytest.mark.parametrize("statement", DRAWS)
@pytest.mark.parametrize("way", WAYS)
def test_a_draw_does_not_release_a_fence_on_the_word_of_its_own_transaction(
    way: str, statement: str, url: URL, other: Db
) -> None:
    high_water = scalar(other, "select shardids.fence(5)")
    with psycopg.connect(dsn(url)) as connection:
        for step in WAYS[way]:
            connection.execute(step)
        refused_in(connection, statement, "in this transaction")
        connection.rollback()
        for session in (connection, other):
            with refused("SI002"):
                session.execute(statement)
            session.rollback()
    other.execute(ACTIVATE)
    assert ticks(scalar(other, NEXT)) > high_water


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_does_not_draw_on_an_activation_that_is_rolled_back(
    way: str, url: URL, make_database: MakeDatabase
) -> None:
    with connect(dsn(url)) as original:
        run_ahead(original, 5_000)
    copy_url = make_database(template=str(url.database))
    with psycopg.connect(dsn(copy_url)) as copy, connect(dsn(copy_url)) as another:
        for step in WAYS[way]:
            copy.execute(step)
        refused_in(copy, NEXT, "in this transaction")
        copy.rollback()
        for statement in DRAWS:
            with refused("SI004"):
                another.execute(statement)


def test_an_activation_is_drawn_on_once_it_is_committed(url: URL, other: Db) -> None:
    """By the transaction that follows, and by one that had begun before."""
    other.execute("create table item (n int)")
    other.execute("select shardids.fence(5)")
    with psycopg.connect(dsn(url)) as early, psycopg.connect(dsn(url)) as activating:
        early.execute("insert into item values (1)")  # its transaction ID is below the activation's
        activating.execute(ACTIVATE)
        refused_in(early, NEXT)
        activating.commit()
        assert scalar(early, NEXT) < scalar(activating, NEXT)


def test_a_shard_can_be_drawn_from_in_the_transaction_that_makes_it(url: URL, other: Db) -> None:
    with psycopg.connect(dsn(url)) as connection:
        connection.execute("select shardids.enter_shard(6), set_config('search_path', 'shard_0006', true)")
        connection.execute(trees.shard_sql())
        assert scalar(connection, "select shardids.shard_of(shard_0006.next_id())") == 6
        connection.rollback()
    with refused("SI001"):
        other.execute("select shardids.reserve(6, 1)")


def test_a_shard_whose_row_is_fenced_draws_nothing_whatever_its_sequences_say(other: Db) -> None:
    """As a restore of sequences alone leaves it, which sets them back by more than some steps."""
    draw(other, 10)
    other.execute("update shardids.shard set state = 'fenced'")
    other.execute("select pg_sleep(0.3)")
    for statement in DRAWS:
        with refused("SI002"):
            other.execute(statement)


# Ticks that are none


def test_an_id_in_place_of_a_tick_is_refused_and_changes_nothing(other: Db) -> None:
    last = draw(other)[0]
    for state in ("active", "fenced"):
        with refused("SI005", "shard 5", "max_ahead"):
            other.execute("select shardids.activate(5, %s)", [int(last)])
        assert scalar(other, "select state from shardids.shard where id = 5") == state
        if state == "active":
            assert draw(other)[0] > last
            other.execute("select shardids.fence(5)")
    other.execute(ACTIVATE)
    ahead_ms = DEFAULT.decode(int(draw(other)[0])).ms - scalar(
        other, "select shardids.ms_of(clock_timestamp())"
    )
    assert ahead_ms < 1000


def test_the_documented_way_back_brings_a_shard_to_the_clock_again(other: Db) -> None:
    """docs/reference/sql.md: after a clock that was years ahead, of whose IDs none is kept."""
    other.execute("update shardids.node set max_ahead = '10 years'")
    kept = ticks(draw(other)[0])
    other.execute("select shardids.activate(5, %s)", [kept + (365 * 86_400_000 << DEFAULT.sequence_bits)])
    draw(other, 10)
    other.execute("update shardids.node set max_ahead = '1 hour'")
    with refused("SI005"):
        other.execute(NEXT)
    other.execute("select shardids.fence(5)")
    other.execute("update shardids.shard set high_water_tick = %s where id = 5", [kept])
    other.execute("select setval('shard_0005.id_offset', -2)")
    other.execute(ACTIVATE)
    tick = ticks(draw(other)[0])
    now = scalar(other, "select shardids.ms_of(clock_timestamp())")
    assert kept < tick
    assert (tick >> DEFAULT.sequence_bits) - now < 1000


# Fences whose transaction fails


def test_a_downgrade_that_fails_leaves_its_shard_issuing_ids(url: URL, other: Db) -> None:
    other.execute("create table shard_0005.item (id bigint default shard_0005.next_id())")
    last = draw(other)[0]
    other.execute("select pg_sleep(0.01)")
    engine = open_engine(url, what="node")
    with pytest.raises(DBAPIError, match="depend"), engine.begin() as connection:
        trees.downgrade(connection, "shard", {"shard": "5"})
    engine.dispose()
    assert draw(other)[0] > last


def test_a_downgrade_keeps_draws_waiting_and_a_rollback_lets_them_go_on(url: URL, other: Db) -> None:
    last = draw(other)[0]
    engine = open_engine(url, what="node")
    with engine.connect() as connection, connection.begin() as transaction:
        connection.execute(text("select pg_sleep(0.01)"))
        trees.downgrade(connection, "shard", {"shard": "5"})
        other.execute("set lock_timeout = '50ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            other.execute(NEXT)
        transaction.rollback()
    engine.dispose()
    assert draw(other)[0] > last


def test_a_fence_that_was_rolled_back_is_seen_by_doctor_and_shard_show(
    blank_database: Callable[[], URL],
) -> None:
    url = blank_database()
    found_cluster(url, {"a": url}, 4)
    with psycopg.connect(dsn(url)) as fencing:
        fencing.execute("select shardids.fence(3)")
        fencing.rollback()
    with catalog_at(url) as catalog:
        (finding,) = doctor.examine(catalog, ["shard-stopped"]).findings
        assert finding.shards == (3,)
        assert "rolled back" in finding.what
        assert [command.text for command in finding.commands] == ["shardids shard activate 3"]
        assert "rolled back" in str(inspect_shard(catalog, 3)["state"])
        with connect(dsn(url)) as owner:
            owner.execute("select shardids.activate(3)")
            owner.execute("select shard_0003.next_id()")
        assert doctor.examine(catalog, ["shard-stopped"]).findings == ()
        assert inspect_shard(catalog, 3)["state"] == "active"


@pytest.mark.parametrize("change", ["cache 5000", "increment 3", "cycle"])
def test_a_shard_whose_sequence_was_altered_is_not_drawn_from_once_it_is_activated(
    change: str, db: Db
) -> None:
    """A session that keeps values draws them later, below those of others."""
    db.execute("select shardids.fence(5)")
    db.execute(f"alter sequence shard_0005.id_counter {change}".encode())
    db.execute("select shardids.activate(5)")
    with refused("SI004", "shard 5", "shard_0005.id_counter was altered", 'node "a"'):
        db.execute("select shard_0005.next_id()")
    db.execute("alter sequence shard_0005.id_counter increment 1 cache 1 no cycle")
    draw(db, 3)
