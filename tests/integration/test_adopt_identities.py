"""Keys by which changed rows are found: ``shardids adopt plan`` blocks those that PostgreSQL can't use."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from sqlalchemy.engine import URL

from shardids.adopt.plan.planning import make_plan
from shardids.adopt.run.making import Making, Statements, make_table
from shardids.catalog.nodes import administrative_engine
from shardids.pg.definitions import Definition, read_definitions
from shardids.pg.embedded import EmbeddedServer, temporary_servers
from tests.conftest import dsn
from tests.support.waiting import wait_for

USERS = "create table users (id bigint primary key); insert into users values (1), (2);"
NOTES = "user_id bigint not null references users, note text, at date not null default '2026-05-01'"
PARTS = """
    create table notes_old partition of notes for values from (minvalue) to ('2026-01-01');
    create table notes_new partition of notes for values from ('2026-01-01') to (maxvalue);"""


@pytest.fixture
def make_source(blank_database: Callable[[], URL]) -> Callable[[str], URL]:
    def make(statements: str) -> URL:
        url = blank_database()
        with psycopg.connect(dsn(url), autocommit=True) as db:
            db.execute(USERS + statements)
        return url

    return make


def blocking(url: URL) -> dict[str, tuple[str, str]]:
    plan = make_plan(url, root="users").plan
    return {
        one.subject: (one.reason, one.remedy)
        for one in plan.findings
        if plan.is_blocked_by(one) and one.subject.startswith("public.")
    }


def notes_of(url: URL, *, is_whole: bool = False) -> Definition:
    engine = administrative_engine(url, what="the source", application_name="test")
    try:
        with engine.connect() as connection:
            found = read_definitions(connection, ["public.notes"], is_whole=is_whole)
            return found["public.notes"]
    finally:
        engine.dispose()


def test_a_deferrable_primary_key_blocks_until_another_index_is_the_identity(
    make_source: Callable[[str], URL],
) -> None:
    url = make_source(f"create table notes (id bigint primary key deferrable, {NOTES})")
    with psycopg.connect(dsn(url), autocommit=True) as db:
        reason, remedy = blocking(url)["public.notes"]
        assert reason.startswith(
            "its primary key is deferrable, which replication can't use: as soon as it is"
        )
        assert "REPLICA IDENTITY USING INDEX" in remedy
        db.execute("alter table notes replica identity full")
        assert blocking(url)["public.notes"][0].startswith("its primary key is deferrable")
        db.execute(
            "create unique index other on notes (id); alter table notes replica identity using index other"
        )
        assert not blocking(url)


def test_a_published_table_with_a_deferrable_primary_key_refuses_updates(
    blank_database: Callable[[], URL],
) -> None:
    with psycopg.connect(dsn(blank_database()), autocommit=True) as db:
        db.execute("create table t (id bigint primary key deferrable); insert into t values (1)")
        db.execute("create publication p for table t")
        with pytest.raises(psycopg.Error, match="does not have a replica identity"):
            db.execute("update t set id = 2")


def test_columns_that_an_index_only_includes_are_of_no_key(make_source: Callable[[str], URL]) -> None:
    url = make_source(f"create table notes (id bigint, {NOTES}, primary key (id) include (note, at))")
    notes = notes_of(url)
    assert (notes.identity, notes.primary_key) == (("id",), ("id",))
    assert not blocking(url)


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        # Each partition has a key, and the whole has none.
        ("", "alter table notes_old add primary key (id); alter table notes_new add primary key (id)"),
        # The same, and the relay is sent all columns: an ID may be there once in each partition.
        (
            "",
            "alter table notes_old add primary key (id); alter table notes_new add primary key (id);"
            "alter table only notes replica identity full",
        ),
        # Partitions log other columns than those that identify a row of the whole.
        (
            ", primary key (id, at)",
            "create unique index other on notes_new (id);"
            "alter table notes_new replica identity using index other",
        ),
    ],
)
def test_partitions_share_a_unique_key_with_the_whole(
    make_source: Callable[[str], URL], key: str, changes: str
) -> None:
    url = make_source(
        f"create table notes (id bigint not null, {NOTES}{key}) partition by range (at); {PARTS} {changes}"
    )
    reason, remedy = blocking(url)["public.notes"]
    assert reason.startswith("it and its partitions have no key in common")
    with psycopg.connect(dsn(url), autocommit=True) as db:
        if key:
            assert remedy == "ALTER TABLE public.notes REPLICA IDENTITY DEFAULT; likewise its partitions"
            db.execute("alter table notes_new replica identity default")
        else:
            assert remedy.startswith(
                "CREATE UNIQUE INDEX … ON public.notes (…); ALTER TABLE public.notes REPLICA"
            )
            db.execute("create unique index whole on notes (id, at)")
            db.execute("alter table only notes replica identity using index whole")
            for part in ("notes_old", "notes_new"):
                db.execute(f"alter table {part} replica identity using index {part}_id_at_idx")
    assert set(notes_of(url).identity or ()) == {"id", "at"}
    assert not blocking(url)


@pytest.mark.parametrize("key", ["", "add primary key (note) deferrable,"])
def test_the_index_that_finds_rows_does_so_in_the_shards(
    make_source: Callable[[str], URL], blank_database: Callable[[], URL], key: str
) -> None:
    """Rows as a whole find none if a column's type has no equality."""
    url = make_source(
        f"create table notes (id bigint not null, {NOTES}, doc json);"
        f"create unique index other on notes (id); alter table notes {key} replica identity using index other"
    )
    assert not blocking(url)
    made = Statements()
    make_table(Making(structure=notes_of(url, is_whole=True), name="notes", with_grants=False), made)
    own = blank_database()
    with psycopg.connect(dsn(own), autocommit=True) as db:
        for statement in made.all:
            db.execute(statement.encode())
    assert notes_of(own).identity == ("id",)


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with temporary_servers(1) as (server,):
        yield server


@pytest.mark.usefixtures("needs_row_filters")
@pytest.mark.parametrize(
    ("source", "keys"),
    [
        (
            f"create table notes (id bigint not null, {NOTES}, primary key (id) include (note))",
            ("id, note", "id"),
        ),
        (
            f"create table notes (id bigint not null, {NOTES}) partition by range (at); {PARTS}"
            "alter table notes_old add primary key (id); alter table notes_new add primary key (id)",
            ("id", None),
        ),
    ],
)
def test_a_relay_whose_key_is_not_the_one_that_is_sent_stops(
    server: EmbeddedServer, source: str, keys: tuple[str, str | None]
) -> None:
    """Shows what PostgreSQL does with such keys."""
    wrong, right = keys
    with psycopg.connect(server.url(), autocommit=True) as admin:
        admin.execute("create database source")
        admin.execute("create database relay")
    with (
        psycopg.connect(server.url("source"), autocommit=True) as there,
        psycopg.connect(server.url("relay"), autocommit=True) as relay,
    ):
        there.execute(USERS + source)
        there.execute("create publication p for table notes with (publish_via_partition_root = true)")
        there.execute("select pg_create_logical_replication_slot('s', 'pgoutput')")
        relay.execute("create table notes (id bigint, user_id bigint, note text, at date)")

        conninfo = make_conninfo(
            host=there.info.host,
            port=there.info.port,
            user=there.info.user,
            password=there.info.password,
            dbname="source",
        )

        def follow_with(key: str) -> None:
            relay.execute(f"alter table notes add constraint k primary key ({key}), replica identity full")

        follow_with(wrong)
        relay.execute(
            f"create subscription s connection '{conninfo}' publication p"
            " with (create_slot = false, copy_data = false)"
        )
        there.execute("insert into notes values (1, 1, 'one')")
        there.execute("update notes set note = note || '!'")
        failures = "select apply_error_count from pg_stat_subscription_stats"
        wait_for(lambda: relay.execute(failures).fetchone()[0] > 0, "the relay fails")
        if right is not None:
            relay.execute("alter table notes drop constraint k")
            follow_with(right)
            wait_for(lambda: relay.execute("select note from notes").fetchone() == ("one!",), "it goes on")
        relay.execute("alter subscription s disable; alter subscription s set (slot_name = none)")
        relay.execute("drop subscription s")
        wait_for(
            lambda: there.execute("select not active from pg_replication_slots").fetchone()[0], "it has ended"
        )
        there.execute("select pg_drop_replication_slot('s')")
    with psycopg.connect(server.url(), autocommit=True) as admin:
        for name in ("source", "relay"):
            admin.execute(f"drop database {name} with (force)")
