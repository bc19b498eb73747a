"""``shardids.advance_past``: what a shard issues from then on sorts after an ID, and nothing else changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import psycopg
import pytest
from sqlalchemy.engine import URL

from shardids import Layout
from tests.conftest import dsn
from tests.support.generator import (
    DEFAULT,
    Ids,
    advisory_locks,
    at_once,
    connect,
    distinct,
    draw,
    draw_block,
    increases,
    install,
    refused,
    reserve,
    row,
    run_ahead,
    scalar,
    ticks,
)

Db = psycopg.Connection[Any]

SHARDS = (5, 6, 7)
MS = 1 << (DEFAULT.shard_bits + DEFAULT.sequence_bits)
"""How much IDs differ that are a millisecond apart."""
PAST = "select shardids.advance_past(%s, %s)"


@pytest.fixture
def node(blank_database: Callable[[], URL]) -> str:
    url = blank_database()
    install(url, DEFAULT, SHARDS)
    with connect(dsn(url)) as connection:
        connection.execute("update shardids.node set max_past = max_ahead")
    return dsn(url)


@pytest.fixture
def db(node: str) -> Any:
    with connect(node) as connection:
        yield connection


def in_ms(db: Db, ms: int, shard: int = 7, sequence: int = 0) -> int:
    """An ID of so many ms after the clock."""
    clock_ms = scalar(db, "select shardids.ms_of(clock_timestamp())")
    return DEFAULT.encode(ms=clock_ms + ms, shard=shard, sequence=sequence)


def stored(db: Db, shard: int = 5) -> tuple[Any, ...]:
    return row(
        db,
        f"""select pg_sequence_last_value('shard_{shard:04}.id_offset'),
                   pg_sequence_last_value('shard_{shard:04}.id_counter')""",
    )


@pytest.mark.parametrize("shard", [4, 5, 6])
@pytest.mark.parametrize("sequence", [0, 1, 511, 1023])
def test_the_next_ids_sort_after_it(shard: int, sequence: int, db: Db) -> None:
    """Of a lower shard, of the same and of a higher one: IDs of one millisecond sort by their shards."""
    for ms in (5_000, 60_000, 3_500_000):
        id_ = in_ms(db, ms, shard, sequence)
        assert scalar(db, PAST, 5, id_) is True
        drawn = scalar(db, "select shard_0005.next_id()")
        assert id_ < drawn < id_ + 3 * MS
        assert scalar(db, PAST, 5, id_) is False
        assert scalar(db, "select shard_0005.next_id()") > drawn
    assert advisory_locks(db) == 0


def test_nothing_changes_if_the_shard_is_past_it(db: Db) -> None:
    draw(db, 10)
    latest = int(draw(db, 1)[0])
    before = stored(db)
    for id_ in (
        latest,
        latest - 1,
        in_ms(db, -60_000),
        in_ms(db, -60_000, 5),
        DEFAULT.encode(ms=0, shard=0, sequence=0),
    ):
        assert scalar(db, PAST, 5, id_) is False
    assert stored(db) == before
    # In a transaction that may not write, too.
    with db.transaction():
        db.execute("set transaction read only")
        assert scalar(db, PAST, 5, latest) is False


def test_every_way_to_draw_gives_ids_that_sort_after_it(db: Db) -> None:
    db.execute("create table shard_0005.item (id bigint default shard_0005.next_id(), n int)")
    ways: list[Callable[[], int]] = [
        lambda: scalar(db, "select shard_0005.next_id()"),
        lambda: int(draw_block(db, 10)[0]),
        lambda: int(draw_block(db, 5_000)[0]),
        lambda: scalar(db, "select shardids.id_of(first_tick, 5) from shardids.reserve(5, 100)"),
        lambda: scalar(db, "insert into shard_0005.item (n) select generate_series(1, 3) returning id"),
    ]
    for number, way in enumerate(ways, 1):
        id_ = in_ms(db, number * 20_000)
        db.execute(PAST, [5, id_])
        assert way() > id_


def test_an_id_that_leads_by_more_than_max_past_is_refused_and_changes_nothing(db: Db) -> None:
    db.execute("update shardids.node set max_past = default")
    draw(db, 1)
    before = stored(db)
    id_ = in_ms(db, 62_000)
    with refused("SI005", "shard 5", f"ID {id_}", "ms ahead of the clock", "max_past = 00:01:00", 'node "a"'):
        db.execute(PAST, [5, id_])
    assert stored(db) == before
    db.execute("update shardids.node set max_past = '2 minutes'")
    assert scalar(db, PAST, 5, id_) is True
    assert scalar(db, "select shard_0005.next_id()") > id_


def test_one_call_uses_up_a_minute_of_the_lead_at_most_and_covers_every_jump(db: Db) -> None:
    db.execute("update shardids.node set max_past = default")
    db.execute(PAST, [5, in_ms(db, 59_000)])
    assert scalar(db, "select shard_0005.next_id()") < in_ms(db, 60_000)
    with pytest.raises(psycopg.errors.CheckViolation):
        db.execute("update shardids.node set max_past = '61 minutes'")
    # The largest lead that a restart or a promotion makes is never above it.
    db.execute("update shardids.node set safety_margin = '11 seconds', max_past = '1 second'")
    db.execute(PAST, [5, in_ms(db, 65_000)])
    with refused("SI005", "max_past = 00:01:06"):
        db.execute(PAST, [5, in_ms(db, 67_000)])


def test_an_id_of_a_wrong_clock_that_its_shard_passes_over_is_passed_over_here_too(db: Db) -> None:
    before = stored(db)
    id_ = in_ms(db, 3_700_000)
    tick = int(ticks(id_))
    db.execute("insert into shardids.skipped values (7, %s, %s)", (tick - 10, tick + 10))
    assert scalar(db, PAST, 5, id_) is False
    assert stored(db) == before
    with refused("SI005", "shard 5"):
        db.execute(PAST, [5, in_ms(db, 3_700_000, 6)])


@pytest.mark.parametrize("id_", [None, -1, -(2**63)])
def test_what_is_no_id_is_refused(id_: int | None, db: Db) -> None:
    before = stored(db)
    with refused("SI007", "shard 5", "no ID of this layout", 'node "a"'):
        db.execute("select shardids.advance_past(5, %s::bigint)", [id_])
    assert stored(db) == before


def test_an_id_with_more_bits_than_a_narrow_layout_is_refused(blank_database: Callable[[], URL]) -> None:
    url = blank_database()
    layout = Layout(epoch_ms=DEFAULT.epoch_ms, time_bits=41, shard_bits=6, sequence_bits=10)
    install(url, layout, (5,))
    with connect(dsn(url)) as db:
        drawn = scalar(db, "select shard_0005.next_id()")
        assert scalar(db, PAST, 5, drawn) is False
        with refused("SI007", "no ID of this layout"):
            db.execute(PAST, [5, drawn | 1 << 60])


def test_a_shard_that_issues_no_ids_is_refused(db: Db) -> None:
    id_ = in_ms(db, 60_000)
    with refused("SI001", "shard 9"):
        db.execute(PAST, [9, id_])
    with refused("SI001", "shard null"):
        db.execute("select shardids.advance_past(null, %s)", [id_])
    db.execute("select shardids.fence(5)")
    before = stored(db)
    for past in (id_, in_ms(db, -60_000)):
        with refused("SI002", "shard 5"):
            db.execute(PAST, [5, past])
    assert stored(db) == before
    db.execute("select shardids.fence(6, 'b')")
    with refused("SI003", "shard 6", 'node "b"'):
        db.execute(PAST, [6, id_])


def test_an_activation_of_the_same_transaction_is_not_released(db: Db, node: str) -> None:
    db.execute("select shardids.fence(5)")
    with psycopg.connect(node) as activating:
        activating.execute("select shardids.activate(5)")
        with refused("SI002", "activated in this transaction"):
            activating.execute(PAST, [5, in_ms(db, 60_000)])


def test_one_that_is_cancelled_changes_nothing_and_keeps_no_lock(db: Db, node: str) -> None:
    id_ = in_ms(db, 60_000)
    before = stored(db)
    with connect(node) as holder:
        holder.execute("select pg_advisory_lock(1936220516, 5)")
        db.execute("set statement_timeout = '200ms'")
        with refused("57014"):
            db.execute(PAST, [5, id_])
        db.execute("set statement_timeout = 0")
        # Who is past it asks nobody for the lock.
        assert scalar(db, PAST, 5, in_ms(db, -60_000)) is False
    assert stored(db) == before
    assert scalar(db, PAST, 5, id_) is True
    assert advisory_locks(db) == 0


def test_what_is_rolled_back_stays_raised(db: Db, node: str) -> None:
    id_ = in_ms(db, 60_000)
    with psycopg.connect(node) as other:
        other.execute(PAST, [5, id_])
        other.rollback()
    assert scalar(db, "select shard_0005.next_id()") > id_


def test_a_role_raises_only_shards_that_it_may_draw_from(
    db: Db, node: str, make_role: Callable[[str], URL], request: pytest.FixtureRequest
) -> None:
    role = make_role("app")
    db.execute("select shardids.grant_usage(array[5], %s)", [role.username])
    database = psycopg.conninfo.conninfo_to_dict(node)["dbname"]
    id_ = in_ms(db, 60_000)
    before = stored(db, 6)
    with connect(dsn(role.set(database=str(database)))) as app:
        assert scalar(app, PAST, 5, id_) is True
        for statement in (
            "select shardids.advance_past(6, %s)",
            "select shard_0006.set_aside_6('shard_0006.id_offset', 0, shardids.tick_of(%s))",
            "select shardids.set_aside('shard_0006.id_offset', 6, 0, shardids.tick_of(%s))",
        ):
            with refused("42501", "permission denied"):
                app.execute(statement, [id_])
        # Not beyond max_past either, whichever function it calls itself.
        offset = stored(db)
        with refused("SI005", "shard 5"):
            app.execute(
                "select shard_0005.set_aside_5('shard_0005.id_offset', 0, %s)",
                [ticks(id_) + (7200_000 << 10)],
            )
        with refused("SI005", "shard 5"):
            app.execute("select shard_0005.set_aside_5('shard_0005.id_offset', 0, %s)", [2**62])
        for n, past_tick in ((0, None), (5, ticks(id_)), (-1, ticks(id_)), (None, ticks(id_))):
            with refused("SI007", "shard 5"):
                app.execute("select shard_0005.set_aside_5('shard_0005.id_offset', %s, %s)", [n, past_tick])
        assert stored(db) == offset
    assert stored(db, 6) == before


def test_draws_of_many_sessions_that_pass_each_others_ids_are_distinct_and_in_order(node: str) -> None:
    """Two shards answer each other in eight sessions, while others draw and reserve; one leads by 2 s."""
    with connect(node) as db:
        run_ahead(db, 2_000, shard=6)

    def session(number: int) -> tuple[Ids, int]:
        chance = random.Random(number)
        drawn: list[Ids] = []
        latest, before = 0, 0
        with connect(node) as connection:
            for _ in range(150):
                shard = chance.choice((5, 6))
                if latest:
                    connection.execute(PAST, [shard, latest])
                if chance.random() < 0.2:
                    first, last = reserve(connection, chance.randrange(1, 3000), shard)
                    ids = np.array(
                        [DEFAULT.encode(ms=t >> 10, shard=shard, sequence=t & 1023) for t in (first, last)]
                    )
                else:
                    ids = draw(connection, chance.randrange(1, 20), f"shard_{shard:04}.next_id()")
                before += int(ids[0]) <= latest
                latest = int(ids[-1])
                drawn.append(ids)
        return np.concatenate(drawn), before

    sessions = at_once(8, session)
    assert distinct([ids for ids, _ in sessions])
    assert all(increases(ids) for ids, _ in sessions)
    assert [before for _, before in sessions] == [0] * 8


def test_ticks_are_told(db: Db) -> None:
    ids = draw(db, 100)
    told = db.execute("select shardids.tick_of(id) from unnest(%s::bigint[]) id", [ids.tolist()]).fetchall()
    assert [tick for (tick,) in told] == ticks(ids).tolist()


def test_a_reader_that_goes_by_transactions_misses_no_row_as_one_that_goes_by_ids_does(
    db: Db, node: str
) -> None:
    """As docs/explanation/order.md says."""
    db.execute("""create table shard_0005.notes (
                    id bigint primary key default shard_0005.next_id(),
                    written_in xid8 not null default pg_current_xact_id())""")
    write = "insert into shard_0005.notes default values returning id"
    by_id = "select id from shard_0005.notes where id > %s order by id"
    by_transaction = """select id, written_in::text from shard_0005.notes
                        where written_in < pg_snapshot_xmin(pg_current_snapshot())
                          and (written_in, id) > (%s::xid8, %s) order by written_in, id"""
    with psycopg.connect(node) as slow:
        early = scalar(slow, write)
        late = scalar(db, write)
        assert early < late
        assert db.execute(by_id, [0]).fetchall() == [(late,)]
        assert db.execute(by_transaction, ["0", 0]).fetchall() == []
        slow.commit()
    assert db.execute(by_id, [late]).fetchall() == []
    read = db.execute(by_transaction, ["0", 0]).fetchall()
    assert [id_ for id_, _ in read] == [early, late]
    after = scalar(db, write)
    assert [id_ for id_, _ in db.execute(by_transaction, [read[-1][1], late]).fetchall()] == [after]


def test_no_role_goes_further_past_the_clock_by_calling_what_advance_past_calls(db: Db) -> None:
    db.execute("update shardids.node set max_past = default")
    tick = int(ticks(in_ms(db, 59 * 60_000)))
    before = stored(db)
    with refused("SI005", "shard 5", "max_past"):
        db.execute("select shard_0005.set_aside_5('shard_0005.id_offset', 0, %s)", [tick])
    assert stored(db) == before
