"""Numbers for people: each comes once, none is missing where none may be, days end where tenants live."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy.engine import make_url

from tests.conftest import MakeRole, dsn
from tests.support.generator import connect

Db = psycopg.Connection[Any]


def define(db: Db, kind: str = "order", per: str = "day", **more: object) -> None:
    given = {"kind": kind, "per": per, **more}
    named = sql.SQL(", ").join(
        sql.SQL("{} => {}").format(sql.Identifier(name), sql.Literal(value)) for name, value in given.items()
    )
    db.execute(sql.SQL("select shardids.define_counter(5, {})").format(named))


def draw(db: Db, tenant: str | None = "ACME", kind: str = "order", moment: str = "2026-11-22 12:00Z") -> str:
    row = db.execute("select shard_0005.next_number(%s, %s, %s)", [tenant, kind, moment]).fetchone()
    assert row is not None
    return str(row[0])


def number_of(text: str) -> int:
    return int(text.rpartition("-")[2])


@contextmanager
def refused(state: str, *words: str) -> Iterator[None]:
    with pytest.raises(psycopg.Error) as error:
        yield
    assert error.value.sqlstate == state
    assert all(word in str(error.value) for word in words), str(error.value)


# What numbers look like, and when they begin again.


def test_numbers_count_a_tenant_a_kind_and_a_day(db: Db) -> None:
    define(db)
    define(db, "invoice", "year", prefix="INV-{period}/", padding=6)
    assert [draw(db), draw(db), draw(db, "beta")] == [
        "ACME-2026-11-22-0001",
        "ACME-2026-11-22-0002",
        "beta-2026-11-22-0001",
    ]
    assert draw(db, moment="2026-11-23 00:00Z") == "ACME-2026-11-23-0001"
    # A clock that was set back: the day goes on.
    assert draw(db) == "ACME-2026-11-22-0003"
    assert draw(db, kind="invoice") == "INV-2026/000001"


@pytest.mark.parametrize(
    ("per", "same", "other", "shown"),
    [
        ("day", "2026-11-22 23:59:59.999999Z", "2026-11-23Z", "t-2026-11-22-0002"),
        ("month", "2026-11-30 23:59Z", "2026-12-01Z", "t-2026-11-0002"),
        ("year", "2026-12-31 23:59Z", "2027-01-01Z", "t-2026-0002"),
        ("never", "1999-01-01Z", None, "t-0002"),
    ],
)
def test_a_period_ends_when_the_next_begins(
    db: Db, per: str, same: str, other: str | None, shown: str
) -> None:
    define(db, per=per)
    assert number_of(draw(db, "t")) == 1
    assert draw(db, "t", moment=same) == shown
    if other:
        assert number_of(draw(db, "t", moment=other)) == 1


@pytest.mark.parametrize(
    ("zone", "moments", "shown"),
    [
        # 23 and 25 hours: the clock goes forward at 2:00, and back at 3:00.
        (
            "Europe/Berlin",
            ("2027-03-27 23:00Z", "2027-03-28 21:59Z", "2027-03-28 22:00Z"),
            ("28", "28", "29"),
        ),
        (
            "Europe/Berlin",
            ("2026-10-24 22:00Z", "2026-10-25 22:59Z", "2026-10-25 23:00Z"),
            ("25", "25", "26"),
        ),
        # Midnight comes twice: the clock goes back from 24:00 to 23:00, and the day goes on.
        (
            "America/Santiago",
            ("2027-04-04 02:59Z", "2027-04-04 03:30Z", "2027-04-04 04:00Z"),
            ("03", "03", "04"),
        ),
        (
            "Pacific/Auckland",
            ("2026-11-22 10:59Z", "2026-11-22 11:00Z", "2026-11-23 10:59Z"),
            ("22", "23", "23"),
        ),
    ],
)
def test_days_end_where_the_tenant_lives(
    db: Db, zone: str, moments: tuple[str, ...], shown: tuple[str, ...]
) -> None:
    define(db)
    db.execute("select shardids.set_counter_zone(5, 'ACME', %s)", [zone])
    drawn = [draw(db, moment=moment) for moment in moments]
    assert tuple(text.split("-")[3] for text in drawn) == shown
    assert len(set(drawn)) == len(drawn)


def test_the_time_is_that_of_the_statement(db: Db) -> None:
    define(db)
    with db.transaction():
        (began,) = db.execute("select now()").fetchone() or ()
        number, at = db.execute(
            "select shard_0005.next_number('a', 'order'), statement_timestamp() at time zone 'UTC'"
        ).fetchone() or ("", began)
    assert number == f"a-{at:%Y-%m-%d}-0001"
    assert at.timestamp() != began.timestamp()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"per": "week"}, ["per day, month, year or never", "'week'", "shard 5", 'node "a"']),
        ({"zone": "Europe/Berln"}, ["no time zone 'Europe/Berln'", "Europe/Berlin"]),
        ({"zone": "CEST"}, ["no time zone"]),
        ({"zone": "Berlin+1"}, ["no time zone"]),
        ({"zone": None}, ["no time zone"]),
        ({"padding": 19}, ["0 to 18 digits"]),
        ({"padding": None}, ["0 to 18 digits"]),
        ({"lanes": 0}, ["1 to 1024 lanes"]),
        ({"keep_days": 0}, ["1 to 100000 days"]),
        ({"prefix": "{shop}-"}, ["another placeholder"]),
        ({"prefix": "{tenant"}, ["another placeholder"]),
        ({"per": "never", "prefix": "{period}-"}, ["never begin again"]),
        ({"kind": ""}, ["1 to 100 characters"]),
    ],
)
def test_what_can_not_be_defined(db: Db, given: dict[str, Any], words: list[str]) -> None:
    with refused("SI007", *words):
        define(db, **given)
    assert db.execute("select to_regclass('shard_0005.shardids_counter')").fetchone() == (None,)


def test_numbers_without_tenant_or_of_an_unknown_kind(db: Db) -> None:
    define(db)
    for tenant in (None, ""):
        with refused("SI007", "needs a tenant", "shard 5"):
            draw(db, tenant)
    with refused("SI007", "no numbers of kind 'invoice'"):
        draw(db, kind="invoice")
    with refused("SI001", "shard 99"):
        db.execute("select shardids.define_counter(99, 'order', 'day')")


def test_a_kind_is_defined_again(db: Db) -> None:
    define(db)
    draw(db)
    define(db, padding=6, prefix="{period}#", zone="Asia/Tokyo")
    assert draw(db) == "2026-11-22#000002"
    for changed in ({"per": "month"}, {"lanes": 8}):
        with refused("SI007", "'order' are defined already, per day and with 1 lanes", "another kind"):
            define(db, **changed)


def test_a_kind_without_numbers_can_not_change_either(db: Db, node: str) -> None:
    define(db)
    with connect(node) as other:
        other.execute("begin")
        # Nobody else sees that there is a number.
        draw(other)
        with refused("SI007", "can't be changed to per day and 32 lanes"):
            define(db, lanes=32)
        other.execute("commit")
    assert number_of(draw(db)) == 2


@pytest.mark.parametrize("lanes", [1, 4])
def test_a_number_with_too_many_digits_is_an_error(db: Db, lanes: int) -> None:
    define(db, padding=1, lanes=lanes)
    assert [number_of(draw(db)) for _ in range(9)] == list(range(1, 10))
    for _ in range(2):
        with refused(
            "SI011", "number 10 of kind 'order' of tenant 'ACME' needs more than 1 digits", "more padding"
        ):
            draw(db)
    define(db, padding=2, lanes=lanes)
    assert number_of(draw(db)) == 10
    define(db, padding=0, lanes=lanes)
    assert draw(db) == "ACME-2026-11-22-11"


def test_old_periods_are_pruned_and_do_not_begin_anew(db: Db) -> None:
    define(db, keep_days=2)
    days = [f"2026-11-{day}" for day in range(10, 15)]
    for day in days:
        draw(db, moment=f"{day} 12:00Z")
    draw(db, "beta", moment="2026-11-10 12:00Z")
    kept = db.execute("select tenant, period::text from shard_0005.shardids_counter order by 1, 2").fetchall()
    assert kept == [("ACME", day) for day in days[1:]] + [("beta", "2026-11-10")]
    assert number_of(draw(db, moment="2026-11-12 12:00Z")) == 2
    with refused("SI007", "of 2026-11-10 are not kept any more", "for 2 days", "wrong clock"):
        draw(db, moment="2026-11-10 12:00Z")


def test_a_time_far_ahead_does_not_end_the_present(db: Db) -> None:
    define(db)
    draw(db)
    with refused("SI007", "of 2999-01-01 is more than 400 days ahead"):
        draw(db, moment="2999-01-01Z")
    assert number_of(draw(db)) == 2


# Transactions.


def test_a_rolled_back_number_comes_again(db: Db, node: str) -> None:
    define(db)
    with connect(node) as other:
        other.execute("begin")
        assert number_of(draw(other)) == 1
        # The next waits: whether it is 1 or 2 is not known yet.
        db.execute("set lock_timeout = '50ms'")
        with refused("55P03"):
            draw(db)
        assert number_of(draw(db, "beta")) == 1
        other.execute("rollback")
        assert number_of(draw(db)) == 1
        other.execute("begin")
        other.execute("savepoint s")
        draw(other)
        other.execute("rollback to s")
        assert number_of(draw(other)) == 2
        other.execute("commit")
        assert number_of(draw(db)) == 3


def test_quick_numbers_wait_for_nobody(db: Db, node: str) -> None:
    define(db, lanes=4)
    db.execute("set lock_timeout = '50ms'")
    sessions = [connect(node) for _ in range(4)]
    try:
        for session in sessions:
            session.execute("begin")
        assert [number_of(draw(session)) for session in sessions] == [1, 2, 3, 4]
        # All lanes are held, by transactions of which nobody else sees a row.
        with refused("55P03"):
            draw(db)
        sessions[1].execute("rollback")
        assert number_of(draw(db)) == 2
        sessions[0].execute("commit")
        sessions[2].execute("commit")
        assert sorted(number_of(draw(db)) for _ in range(3)) == [5, 6, 7]
        assert number_of(draw(sessions[3])) == 8
        sessions[3].execute("commit")
    finally:
        for session in sessions:
            session.close()
    drawn = [number_of(draw(db)) for _ in range(20)]
    assert drawn == list(range(9, 29))


def test_many_numbers_leave_half_of_the_lanes_to_others(db: Db, node: str) -> None:
    define(db, lanes=8, padding=6)
    with connect(node) as other:
        other.execute("begin")
        taken = [number_of(draw(other)) for _ in range(100)]
        assert len({number % 8 for number in taken}) == 4
        db.execute("set lock_timeout = '50ms'")
        mine = [number_of(draw(db)) for _ in range(100)]
        other.execute("commit")
    assert len({*taken, *mine}) == 200


@pytest.mark.parametrize("lanes", [1, 16])
def test_sixteen_clients_draw_each_number_once(db: Db, node: str, lanes: int) -> None:
    define(db, lanes=lanes, padding=6)
    db.execute("create table shard_0005.kept (number text primary key)")

    def client(index: int) -> None:
        with connect(node) as session:
            for turn in range(25):
                session.execute("begin")
                session.execute(
                    "insert into shard_0005.kept"
                    " select shard_0005.next_number('ACME', 'order', '2026-11-22Z')"
                )
                session.execute("rollback" if (index + turn) % 5 == 0 else "commit")

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(client, range(16)))
    numbers = {number_of(text) for (text,) in db.execute("select number from shard_0005.kept").fetchall()}
    assert len(numbers) == 16 * 20
    if lanes == 1:
        assert numbers == set(range(1, 321))
    else:
        assert max(numbers) < 320 + 2 * lanes


def test_nobody_waits_beside_a_transaction_that_stays_open(db: Db, node: str) -> None:
    """Others draw from a lane after a draw has begun, and before it locks one."""
    define(db, lanes=64, padding=6)
    db.execute("create table shard_0005.drawn (number text)")
    for _ in range(192):
        draw(db)

    def client(_index: int) -> None:
        with connect(node) as session:
            # Far above the clients' waits for each other; the holder commits only after they have ended.
            session.execute("set lock_timeout = '20s'")
            session.execute(
                "do $$ begin for turn in 1..200 loop insert into shard_0005.drawn"
                " select shard_0005.next_number('ACME', 'order', '2026-11-22Z'); commit; end loop; end $$"
            )

    with connect(node) as holder, ThreadPoolExecutor(16) as pool:
        holder.execute("begin")
        held = {draw(holder) for _ in range(30)}
        assert len({number_of(number) % 64 for number in held}) == 30
        list(pool.map(client, range(16)))
        holder.execute("commit")
    drawn = {number for (number,) in db.execute("select number from shard_0005.drawn").fetchall()}
    assert len(drawn | held) == 3230


def test_a_free_lane_out_of_sight_is_drawn_from_before_anybody_waits(db: Db, node: str) -> None:
    define(db, lanes=8)
    draws = """
        do $$ begin
          for n in 1..%s loop
            perform shard_0005.next_number('ACME', 'order', '2026-11-22 12:00Z');
            commit;
          end loop;
        end $$"""
    db.execute(draws % 16)
    with connect(node) as one, connect(node) as other:
        one.execute("begin")
        late = draw(one)
        db.execute(draws % 600)
        one.execute("commit")
        one.execute("begin")
        other.execute("begin")
        held = [draw(session) for session in (one, one, one, one, other, other, other)]
        assert {number_of(number) % 8 for number in held}.isdisjoint({number_of(late) % 8})
        db.execute("set lock_timeout = '1s'")
        assert number_of(draw(db)) == number_of(late) + 8


# By hand.


def test_a_number_that_was_held_for_long_comes_again(db: Db, node: str) -> None:
    define(db, lanes=2)
    draw(db), draw(db)
    many = """
        do $$ begin
          for n in 1..600 loop
            insert into drawn select shard_0005.next_number('ACME', 'order', '2026-11-22 12:00Z');
            commit;
          end loop;
        end $$"""
    with connect(node) as other:
        other.execute("begin")
        held = draw(other)
        db.execute("create temp table drawn (number text)")
        db.execute(many)
        other.execute("rollback")
    assert db.execute("select from drawn where number = %s", [held]).rowcount == 0
    db.execute(many)
    assert db.execute("select from drawn where number = %s", [held]).rowcount == 1
    numbers = sorted(number_of(number) for (number,) in db.execute("select number from drawn"))
    assert len(set(numbers)) == 1200
    # It was the lowest from then on, until it had caught up.
    assert max(numbers) - 1202 <= 700


@pytest.mark.parametrize("lanes", [1, 4])
def test_a_counter_is_set_skipped_and_reset_by_hand(db: Db, lanes: int) -> None:
    define(db, per="never", lanes=lanes)
    assert [number_of(draw(db)) for _ in range(3)] == [1, 2, 3]

    def by_hand(number: int, **more: object) -> tuple[Any, ...]:
        given = {"next": number, "reason": "audit", **more}
        named = sql.SQL(", ").join(
            sql.SQL("{} => {}").format(sql.Identifier(name), sql.Literal(value))
            for name, value in given.items()
        )
        row = db.execute(
            sql.SQL(
                "select highest_before, next_number from shardids.set_number(5, 'ACME', 'order', {})"
            ).format(named)
        ).fetchone()
        assert row is not None
        return row

    assert by_hand(10) == (3, 10)
    assert [number_of(draw(db)) for _ in range(5)] == [10, 11, 12, 13, 14]
    assert by_hand(5, skip=True) == (14, 20)
    assert number_of(draw(db)) == 20
    for number in (20, 1):
        with refused("SI007", f"numbers {number} to 20 of kind 'order'", "may have been issued", "--again"):
            by_hand(number)
    assert by_hand(21) == (20, 21)
    assert by_hand(1, again=True) == (20, 1)
    assert [number_of(draw(db)) for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    for wrong in (0, -1, None):
        with refused("SI007", "can't be set to"):
            by_hand(wrong)  # type: ignore[arg-type]
    with refused("SI007", "says why"):
        by_hand(100, reason="")
    changes = db.execute(
        "select of_tenant, of_kind, highest_before, next_number, reason, changed_by = session_user"
        " from shardids.counter_changes(5)"
    ).fetchall()
    assert changes == [
        ("ACME", "order", before, after, "audit", True)
        for before, after in ((3, 10), (14, 20), (20, 21), (20, 1))
    ]
    assert db.execute("select of_tenant, highest from shardids.counters(5)").fetchall() == [("ACME", 6)]


def test_a_period_that_has_no_numbers_yet_is_set(db: Db) -> None:
    define(db)
    db.execute("select shardids.set_number(5, 'new', 'order', 500, 'taken over', period => '2026-11-22')")
    assert draw(db, "new") == "new-2026-11-22-0500"
    assert number_of(draw(db, "new", moment="2026-11-23Z")) == 1


def test_a_period_that_is_not_kept_or_far_ahead_is_not_set(db: Db) -> None:
    define(db, keep_days=2)
    for day in range(10, 15):
        draw(db, moment=f"2026-11-{day}Z")
    set_number = "select shardids.set_number(5, 'ACME', 'order', 50, 'why', period => %s, again => %s)"
    with refused("SI007", "of 2026-11-11 are not kept any more", "may have been issued", "--again"):
        db.execute(set_number, ["2026-11-11", False])
    for again in (False, True):
        with refused("SI007", "2999-01-01 is more than the 2 days ahead", "Nothing was changed"):
            db.execute(set_number, ["2999-01-01", again])
    db.execute(set_number, ["2026-11-12", False])
    db.execute(set_number, ["2026-11-11", True])
    assert number_of(draw(db, moment="2026-11-11Z")) == 50
    assert number_of(draw(db, moment="2026-11-14Z")) == 2


def test_setting_waits_for_those_who_draw(db: Db, node: str) -> None:
    define(db, lanes=4)
    draw(db)
    with connect(node) as other:
        other.execute("begin")
        draw(other)
        db.execute("set lock_timeout = '50ms'")
        with refused("55P03"):
            db.execute("select shardids.set_number(5, 'ACME', 'order', 100, 'why', period => '2026-11-22')")
        other.execute("commit")
    db.execute("select shardids.set_number(5, 'ACME', 'order', 100, 'why', period => '2026-11-22')")
    assert number_of(draw(db)) == 100


# Rows.

ORDERS = """
    create table shard_0005."Order's" (
      id bigint primary key default shard_0005.next_id(), "Cus tomer" text, "no." text not null unique);
    select shardids.number_rows(
      'shard_0005."Order''s"', 'no.', 'Cus tomer', 'it''s %I', 'day', padding => 6)"""


def test_rows_are_numbered_however_they_come(db: Db) -> None:
    db.execute(ORDERS)
    db.execute(ORDERS.split(";")[1])
    db.execute("""insert into shard_0005."Order's" ("Cus tomer") select 'a' from generate_series(1, 3)""")
    db.execute("""insert into shard_0005."Order's" ("Cus tomer", "no.") values ('a', 'by hand')""")
    with db.cursor().copy("""copy shard_0005."Order's" ("Cus tomer") from stdin""") as copy:
        for _ in range(3):
            copy.write_row(["a"])
    found = db.execute("""select "no." from shard_0005."Order's" order by id""").fetchall()
    numbers = [text for (text,) in found]
    assert numbers.pop(3) == "by hand"
    assert [number_of(text) for text in numbers] == [1, 2, 3, 4, 5, 6]
    with refused("SI007", "needs a tenant"):
        db.execute("""insert into shard_0005."Order's" default values""")


@pytest.mark.parametrize(
    ("table", "columns", "words"),
    [
        ("public.orders", "('number', 'tenant', 'order', 'day')", ["is not in a shard"]),
        ("shard_0005.orders", "('nr', 'tenant', 'order', 'day')", ["no column nr"]),
        ("shard_0005.orders", "('number', 'shop', 'order', 'day')", ["no column shop"]),
        ("shard_0005.orders", "('tenant', 'number', 'order', 'day')", ["not of type text"]),
        ("shard_0005.orders", "('number', 'tenant', 'order', 'dy')", ["not per 'dy'"]),
        (f"shard_0005.{'o' * 41}", "('number', 'tenant', 'order', 'day')", ["longer than 46 bytes"]),
    ],
)
def test_rows_that_can_not_be_numbered(db: Db, table: str, columns: str, words: list[str]) -> None:
    db.execute(f"create table {table} (tenant integer, number text)".encode())
    with refused("SI007", *words):
        db.execute(f"select shardids.number_rows('{table}', {columns[1:]}".encode())
    assert db.execute("select count(*) from pg_trigger where not tgisinternal").fetchone() == (0,)


def test_tables_number_their_rows_by_their_own_kinds(db: Db) -> None:
    for table, column in (("a_b", "c"), ("a", "b_c"), ("a.b", "c"), ("a", "b.c")):
        name = sql.Identifier("shard_0005", table)
        db.execute(sql.SQL("create table if not exists {} (tenant text)").format(name))
        db.execute(sql.SQL("alter table {} add {} text").format(name, sql.Identifier(column)))
        numbering = sql.SQL("select shardids.number_rows({}, {}, 'tenant', {}, 'never')").format(
            sql.Literal(name.as_string(db)), sql.Literal(column), sql.Literal(f"{table}/{column}")
        )
        if column == "b.c":
            with refused("SI007", 'numbers table shard_0005."a.b" already', "name the column differently"):
                db.execute(numbering)
        else:
            db.execute(numbering)
            db.execute(numbering)
    db.execute("insert into shard_0005.a (tenant) values ('x')")
    db.execute("insert into shard_0005.a_b (tenant) values ('x')")
    kinds = db.execute("select of_kind, highest from shardids.counters(5) order by 1").fetchall()
    assert kinds == [("a/b_c", 1), ("a_b/c", 1)]


def test_a_table_takes_the_name_of_one_that_was_renamed(db: Db) -> None:
    db.execute("create table shard_0005.a (tenant text, n text) partition by list (tenant)")
    db.execute("create table shard_0005.part partition of shard_0005.a default")
    numbering = "select shardids.number_rows('shard_0005.a', 'n', 'tenant', %s, 'never')"
    db.execute(numbering, ["one"])
    db.execute(numbering, ["one"])
    db.execute("alter table shard_0005.a rename to old")
    db.execute("create table shard_0005.a (tenant text, n text)")
    with refused(
        "SI007", 'shard_0005."shardids_number_a.n"() numbers table shard_0005.old already', "CASCADE"
    ):
        db.execute(numbering, ["two"])
    db.execute("insert into shard_0005.old (tenant) values ('x')")
    assert db.execute("select of_kind from shardids.counters(5)").fetchall() == [("one",)]


# Who may.


@pytest.mark.parametrize("granted", ["before", "after"])
def test_a_role_that_may_draw_ids_may_draw_numbers_and_nothing_else(
    db: Db, node: str, make_role: MakeRole, granted: str
) -> None:
    role = make_role("app")
    steps: list[Callable[[], object]] = [
        lambda: db.execute("select shardids.grant_usage(array[5], %s)", [role.username]),
        lambda: define(db),
    ]
    for step in steps if granted == "before" else reversed(steps):
        step()
    with connect(dsn(make_url(node).set(username=role.username, password=role.password))) as app:
        assert number_of(draw(app)) == 1
        for statement in (
            "select * from shard_0005.shardids_counter",
            "update shard_0005.shardids_counter set next_number = 1",
            "select shardids.set_number(5, 'ACME', 'order', 1, 'why', again => true)",
            "select shardids.define_counter(5, 'order', 'year')",
            "select shardids.counters(5)",
        ):
            with refused("42501"):
                app.execute(statement.encode())
        db.execute("select shardids.revoke_usage(array[5], %s)", [role.username])
        with refused("42501"):
            draw(app)
