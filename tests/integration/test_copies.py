"""A copy of a shard issues no IDs as if it were the original, however the copy was made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import psycopg
import pytest
from psycopg import sql
from sqlalchemy.engine import URL

from tests.conftest import MakeDatabase, MakeRole, dsn
from tests.support.client_programs import Dumper
from tests.support.generator import (
    DEFAULT,
    advisory_locks,
    connect,
    distinct,
    draw,
    draw_block,
    increases,
    install,
    refused,
    row,
    run_ahead,
    scalar,
    ticks,
)

Db = psycopg.Connection[Any]

NEXT = "select shard_0005.next_id()"
ALL_DRAWS = (NEXT, "select shard_0005.next_ids(10)", "select shardids.reserve(5, 10)")


@pytest.fixture
def url(blank_database: Callable[[], URL]) -> URL:
    """The original: a node with shard 5 and a table."""
    url = blank_database()
    install(url)
    with connect(dsn(url)) as connection:
        connection.execute(
            "create table shard_0005.item (id bigint default shard_0005.next_id() primary key, n int)"
        )
        connection.execute("insert into shard_0005.item (n) select generate_series(1, 1000)")
    return url


@pytest.fixture
def original(url: URL) -> Iterator[Db]:
    with connect(dsn(url)) as connection:
        yield connection


@pytest.fixture(scope="session")
def dumper(admin: Db) -> Dumper:
    return Dumper(admin.info.server_version)


@pytest.fixture
def restored(blank_database: Callable[[], URL], dumper: Dumper) -> Iterator[Callable[..., Db]]:
    """Restores dumps in a new database, or in one with an engine, and gives sessions there."""
    sessions: list[Db] = []

    def restore(*dumps: str, engine: bool = False, shards: tuple[int, ...] = ()) -> Db:
        url = blank_database()
        if engine:
            install(url, shards=shards)
        for dumped in dumps:
            dumper.restore(dsn(url), dumped)
        sessions.append(connect(dsn(url)))
        return sessions[-1]

    yield restore
    for session in sessions:
        session.close()


def refuses(copy: Db, *words: str) -> None:
    """The first draw of a session is refused, and so is every other, in whatever way."""
    for statement in ALL_DRAWS * 2:
        with refused("SI004", "shard 5", "copy", *words):
            copy.execute(statement)
    assert advisory_locks(copy) == 0


# Copies of a whole database


@pytest.mark.parametrize("ahead_ms", [0, 50_000, 90_000])
def test_a_copied_database_refuses_and_the_original_goes_on(
    ahead_ms: int, url: URL, make_database: MakeDatabase
) -> None:
    """Ticks ahead of the clock are no reason for a draw to look at it."""
    with connect(dsn(url)) as original:
        issued = draw(original, 100)
        if ahead_ms:
            run_ahead(original, ahead_ms)
    copy_url = make_database(template=str(url.database))
    with connect(dsn(copy_url)) as copy, connect(dsn(url)) as original:
        with refused("SI004", "shard 5", "activated on", 'node "a"'):
            copy.execute(NEXT)
        refuses(copy)
        issued = np.concatenate([issued, draw(original, 100), draw_block(original, 100)])
        assert increases(issued)
        copy.execute("select shardids.activate(5)")
        ids = np.concatenate([draw(copy, 100), draw_block(copy, 100)])
        assert increases(ids)
        assert ids[0] > issued[-1]
        assert increases(np.concatenate([issued, draw(original, 100)]))


def test_the_refusal_says_what_to_do(url: URL, make_database: MakeDatabase) -> None:
    with connect(dsn(make_database(template=str(url.database)))) as copy:
        with pytest.raises(psycopg.Error) as caught:
            copy.execute(NEXT)
        hint = caught.value.diag.message_hint or ""
        assert hint.endswith(": shardids shard activate 5")
        # What the command does, once it has looked at all nodes.
        copy.execute("select shardids.activate(5)")
        assert scalar(copy, "select shardids.shard_of(shard_0005.next_id())") == 5


def test_a_copy_of_a_copy_refuses(url: URL, make_database: MakeDatabase) -> None:
    first_url = make_database(template=str(url.database))
    with connect(dsn(first_url)) as first:
        first.execute("select shardids.activate(5)")
        run_ahead(first, 30_000)
        last = draw(first, 10)[-1]
    with connect(dsn(make_database(template=str(first_url.database)))) as second:
        refuses(second)
        second.execute("select shardids.activate(5)")
        assert draw(second)[0] > last


def test_an_activated_copy_is_above_all_that_the_original_issued_before(
    url: URL, make_database: MakeDatabase
) -> None:
    with connect(dsn(url)) as original:
        last = run_ahead(original, 90_000)
    copy_url = make_database(template=str(url.database))
    with connect(dsn(copy_url)) as copy:
        copy.execute("select shardids.activate(5)")
        assert ticks(draw(copy)[0]) > last


def test_a_copy_may_warn_instead(url: URL, make_database: MakeDatabase) -> None:
    with connect(dsn(url)) as original:
        original.execute("update shardids.node set on_copy = 'warn'")
        last = run_ahead(original, 5_000)
    with connect(dsn(make_database(template=str(url.database)))) as copy:
        warnings = collect(copy)
        ids = np.concatenate([draw(copy, 100), draw_block(copy, 100)])
    assert increases(ids)
    assert ticks(ids[0]) > last
    assert any("shard 5" in text and "copy" in text for text in warnings)
    assert all("shardids shard activate 5" in text for text in warnings)


def test_a_copy_whose_sequences_were_never_set_warns_too(
    original: Db, restored: Callable[..., Db], dumper: Dumper, url: URL
) -> None:
    original.execute("update shardids.node set on_copy = 'warn'")
    copy = restored(*schema_and_tables(dumper, url))
    warnings = collect(copy)
    draw(copy, 10)
    assert any("shard 5" in text and "copy" in text for text in warnings)


def collect(connection: Db) -> list[str]:
    """Messages and hints of the warnings that are still to come."""
    warnings: list[str] = []
    connection.add_notice_handler(
        lambda warning: warnings.append(f"{warning.message_primary} {warning.message_hint}")
    )
    return warnings


# Fenced originals


def test_a_copy_of_a_fenced_shard_stays_fenced(url: URL, make_database: MakeDatabase) -> None:
    with connect(dsn(url)) as original:
        high_water = scalar(original, "select shardids.fence(5)")
    with connect(dsn(make_database(template=str(url.database)))) as copy:
        for statement in ALL_DRAWS:
            with refused("SI002", "shard 5"):
                copy.execute(statement)
        copy.execute("select shardids.activate(5)")
        assert ticks(draw(copy)[0]) > high_water


@pytest.mark.parametrize("moved_to", [None, "b"])
def test_a_fence_that_is_known_only_from_its_row_holds(
    moved_to: str | None, original: Db, restored: Callable[..., Db], dumper: Dumper, url: URL
) -> None:
    """Replication brings rows and no sequences: the copy's own were set earlier, from an active shard."""
    draw(original, 10)
    sequences = dumper.dump(dsn(url), "--data-only", "--table=shard_0005.id_*")
    original.execute("select shardids.fence(5, %s)", [moved_to])
    structure, tables = schema_and_tables(dumper, url)
    copy = restored(structure, tables, sequences)
    assert scalar(copy, "select pg_sequence_last_value('shard_0005.id_offset')") >= 0
    for statement in ALL_DRAWS:
        with refused("SI003" if moved_to else "SI002", "shard 5"):
            copy.execute(statement)


# Dumps


def schema_and_tables(dumper: Dumper, url: URL) -> tuple[str, str]:
    """What logical replication starts from and brings: definitions, and rows without sequences."""
    structure = dumper.dump(dsn(url), "--schema-only", "--schema=shardids", "--schema=shard_0005")
    tables = ["--table=shardids.shard", "--table=shardids.node", "--table=shard_0005.item"]
    return structure, dumper.dump(dsn(url), "--data-only", *tables)


def test_a_restored_dump_refuses_until_it_is_activated(
    original: Db, restored: Callable[..., Db], dumper: Dumper, url: URL
) -> None:
    run_ahead(original, 30_000)
    dumped = dumper.dump(dsn(url))
    issued = draw(original, 100)
    copy = restored(dumped)
    refuses(copy)
    with refused("SI004"):
        copy.execute("insert into shard_0005.item (n) values (1)")
    assert increases(np.concatenate([issued, draw(original, 100)]))
    copy.execute("select shardids.activate(5)")
    ids = np.concatenate([draw(copy, 100), draw_block(copy, 100)])
    assert increases(ids)
    assert ids[0] > issued[-1]
    copy.execute("insert into shard_0005.item (n) select generate_series(1, 1000)")
    assert scalar(copy, "select count(*) from shard_0005.item") == 2000


def test_a_restored_dump_keeps_inlined_draws_and_settings(
    original: Db, restored: Callable[..., Db], dumper: Dumper, url: URL
) -> None:
    original.execute("update shardids.node set max_ahead = '2 hours', max_reserve = 77")
    copy = restored(dumper.dump(dsn(url)))
    assert row(copy, "select max_ahead::text, max_reserve from shardids.node") == ("02:00:00", 77)
    lines = copy.execute("explain (verbose, costs off) insert into shard_0005.item values (default)")
    text = "\n".join(line for (line,) in lines.fetchall())
    assert "shardids.current_id(pg_sequence_last_value('shard_0005.id_offset'::regclass)" in text
    assert scalar(copy, "select shardids.epoch_ms()") == DEFAULT.epoch_ms


def test_a_shards_schema_restored_beside_another_engine_refuses_until_it_is_activated(
    original: Db, restored: Callable[..., Db], dumper: Dumper, url: URL
) -> None:
    issued = draw(original, 100)
    copy = restored(dumper.dump(dsn(url), "--schema=shard_0005"), engine=True, shards=(6,))
    refuses(copy)
    assert scalar(copy, "select shardids.shard_of(shard_0006.next_id())") == 6
    copy.execute("select shardids.activate(5)")
    ids = np.concatenate([draw(copy, 100), draw_block(copy, 100)])
    assert increases(ids)
    assert ids[0] > issued[-1]
    assert row(copy, "select schema, state from shardids.shard where id = 5") == ("shard_0005", "active")


@pytest.mark.parametrize("ahead_ms", [0, 30_000])
def test_a_dump_restored_in_the_place_of_its_original_refuses_until_it_is_activated(
    ahead_ms: int, original: Db, dumper: Dumper, url: URL
) -> None:
    """In the same database and incarnation; what was issued since the dump is not in it."""
    if ahead_ms:
        run_ahead(original, ahead_ms)
    dumped = dumper.dump(dsn(url), "--clean", "--if-exists")
    issued = draw(original, 20_000)
    original.close()
    dumper.restore(dsn(url), dumped)
    with connect(dsn(url)) as session:
        refuses(session)
        session.execute("select shardids.activate(5)")
        assert draw(session)[0] > issued[-1]


# Ahead of the clock it is a documented limit: docs/decisions/0005-copies-and-restarts.md
@pytest.mark.parametrize("ahead_ms", [0])
def test_a_shards_schema_that_is_dropped_and_restored_stops_until_it_is_activated(
    ahead_ms: int, original: Db, dumper: Dumper, url: URL
) -> None:
    """What was issued between dump and drop is not in the dump."""
    if ahead_ms:
        run_ahead(original, ahead_ms)
    dumped = dumper.dump(dsn(url), "--schema=shard_0005")
    issued = draw(original, 10_000)
    original.execute("drop schema shard_0005 cascade")
    dumper.restore(dsn(url), dumped)
    with connect(dsn(url)) as session:
        refuses(session)
        session.execute("select shardids.activate(5)")
        ids = np.concatenate([draw(session, 100), draw_block(session, 100)])
    assert increases(np.concatenate([issued, ids]))


# Ahead of the clock it is a documented limit: docs/decisions/0005-copies-and-restarts.md
@pytest.mark.parametrize("ahead_ms", [0])
def test_a_schema_restored_under_the_name_of_the_renamed_original_refuses(
    ahead_ms: int, original: Db, dumper: Dumper, url: URL
) -> None:
    """The original goes on by its new name."""
    if ahead_ms:
        run_ahead(original, ahead_ms)
    dumped = dumper.dump(dsn(url), "--schema=shard_0005")
    issued = [draw(original, 100)]
    original.execute("alter schema shard_0005 rename to first_0005")
    dumper.restore(dsn(url), dumped)
    for _ in range(2):
        with refused("SI004", "shard 5"):
            original.execute(NEXT)
        issued.append(draw(original, 100, "first_0005.next_id()"))
    assert increases(np.concatenate(issued))


def test_blocks_of_a_renamed_schema_and_its_copy_are_distinct(original: Db, dumper: Dumper, url: URL) -> None:
    dumped = dumper.dump(dsn(url), "--schema=shard_0005")
    original.execute("alter schema shard_0005 rename to first_0005")
    dumper.restore(dsn(url), dumped)
    blocks = [draw(original, 10, "first_0005.next_id()")]
    for _ in range(3):
        blocks.append(draw(original, 1, "first_0005.next_ids(20)"))
        with suppress(psycopg.errors.DatabaseError):
            blocks.append(draw(original, 1, "shard_0005.next_ids(20)"))
    assert distinct(blocks)


def test_a_dump_without_rows_refuses(restored: Callable[..., Db], dumper: Dumper, url: URL) -> None:
    copy = restored(dumper.dump(dsn(url), "--schema-only"))
    refuses(copy)


def test_a_replica_whose_sequences_were_never_set_refuses_until_it_is_activated(
    original: Db, restored: Callable[..., Db], dumper: Dumper, url: URL
) -> None:
    issued = draw(original, 100)
    copy = restored(*schema_and_tables(dumper, url))
    assert scalar(copy, "select pg_sequence_last_value('shard_0005.id_counter')") is None
    refuses(copy)
    copy.execute("select shardids.activate(5)")
    ids = np.concatenate([draw(copy, 100), draw_block(copy, 100)])
    assert increases(ids)
    assert ids[0] > issued[-1]


def test_a_fenced_replica_whose_sequences_were_never_set_stays_fenced(
    original: Db, restored: Callable[..., Db], dumper: Dumper, url: URL
) -> None:
    high_water = scalar(original, "select shardids.fence(5)")
    copy = restored(*schema_and_tables(dumper, url))
    for statement in ALL_DRAWS:
        with refused("SI002", "shard 5"):
            copy.execute(statement)
    copy.execute("select shardids.activate(5)")
    assert ticks(draw(copy)[0]) > high_water


@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_restored_shard_is_not_activated_while_a_sequence_belongs_to_another_role(
    is_in_place: bool, restored: Callable[..., Db], dumper: Dumper, url: URL, make_role: MakeRole
) -> None:
    """Beside another engine, or in the place of its schema, which was dropped."""
    role = str(make_role().username)
    dumped = dumper.dump(dsn(url), "--schema=shard_0005")
    if is_in_place:
        with connect(dsn(url)) as original:
            original.execute("drop schema shard_0005 cascade")
        dumper.restore(dsn(url), dumped)
    with connect(dsn(url)) if is_in_place else restored(dumped, engine=True, shards=(6,)) as copy:
        before = copy.execute("select * from shardids.shard order by id").fetchall()
        for sequence in ("id_counter", "id_offset"):
            alter = sql.SQL("alter sequence {} owner to {}")
            copy.execute(alter.format(sql.Identifier("shard_0005", sequence), sql.Identifier(role)))
            with pytest.raises(psycopg.errors.InsufficientPrivilege) as caught:
                copy.execute("select shardids.activate(5)")
            said = f'shard 5 can\'t start: sequence shard_0005.{sequence} belongs to role "{role}"'
            assert said in str(caught.value)
            assert copy.execute("select * from shardids.shard order by id").fetchall() == before
            refuses(copy)
            hint = caught.value.diag.message_hint or ""
            copy.execute(hint[hint.index("ALTER SEQUENCE") :].encode())
        copy.execute("select shardids.activate(5)")
        assert increases(draw(copy, 10))
