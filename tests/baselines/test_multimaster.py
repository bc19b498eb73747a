"""Offsets on several PostgreSQL masters: plan, apply, verify, grow, and what a skipped step does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import psycopg
import pytest
from sqlalchemy.engine import URL

from shardids.compare.multimaster import Master, OffsetFinding, carry_out, make_plan, read_masters, verify
from shardids.errors import BadArgument, ClusterConflict, ConnectionFailed, StatementFailed
from tests.conftest import dsn

TABLES = """
create table photo (id bigint generated always as identity primary key, note text);
create table "Odd Name" ("Key" serial primary key);
create schema app;
create sequence app.shared;
create table app.event (id bigint primary key default nextval('app.shared'));
create table tag (name text primary key);
"""
COLUMNS = ["app.event.id", "public.Odd Name.Key", "public.photo.id"]

MakeMasters = Callable[..., list[Master]]


@pytest.fixture
def make_masters(blank_database: Callable[[], URL]) -> MakeMasters:
    """Makes databases with the tables, each on its own as a master would be."""
    names = iter("abcdef")

    def make(count: int, tables: str = TABLES) -> list[Master]:
        masters = [Master(name=next(names), url=dsn(blank_database())) for _ in range(count)]
        for master in masters:
            run(master, tables)
        return masters

    return make


def run(master: Master, script: str) -> None:
    with psycopg.connect(master.url, autocommit=True) as connection:
        connection.execute(script.encode())


def insert(master: Master, count: int = 1) -> list[int]:
    """Inserts photos, and gives their keys."""
    with psycopg.connect(master.url, autocommit=True) as connection:
        rows = connection.execute(
            "insert into photo (note) select 'x' from generate_series(1, %s) returning id", (count,)
        )
        return [key for (key,) in rows.fetchall()]


def apply(masters: Sequence[Master]) -> int:
    steps = make_plan(read_masters(masters)).steps
    carry_out(masters, steps)
    return len(steps)


def problems(masters: Sequence[Master]) -> set[tuple[str, str, str]]:
    return {(f.master, f.column, f.problem) for f in verify(read_masters(masters))}


def test_apply_gives_each_master_its_class_and_leaves_what_is_right_alone(make_masters: MakeMasters) -> None:
    masters = make_masters(3)
    used = {key for master in masters[:1] for key in insert(master, 500)}
    assert problems(masters) == {(m.name, c, "no-offset") for m in masters for c in COLUMNS}
    plan = make_plan(read_masters(masters))
    assert [step.phase for step in plan.steps] == ["fence"] * 9 + ["switch"] * 9
    assert (
        next(s.statement for s in plan.steps if s.column == "public.photo.id")
        == 'ALTER SEQUENCE "public"."photo_id_seq" MAXVALUE 10501 NO CYCLE'
    )
    assert plan.steps[-2].statement == (
        'ALTER SEQUENCE "public"."photo_id_seq" INCREMENT BY 3 MINVALUE 1 NO MAXVALUE'
        " START WITH 2 RESTART WITH 10502 NO CYCLE"
    )
    carry_out(masters, plan.steps)
    assert verify(read_masters(masters)) == []
    assert apply(masters) == 0
    with ThreadPoolExecutor(3) as pool:
        drawn = list(pool.map(lambda master: insert(master, 1000), masters))
    for offset, keys in enumerate(drawn, 1):
        assert {key % 3 for key in keys} == {offset % 3}
        assert min(keys) > 10_501
        used.update(keys)
    assert len(used) == 3500


def test_masters_draw_while_a_plan_is_carried_out(make_masters: MakeMasters) -> None:
    masters = make_masters(2)
    apply(masters)
    drawn: list[int] = []
    (third,) = make_masters(1)
    grown = [*masters, third]
    plan = make_plan(read_masters(grown))
    carry_out(grown, plan.steps, lambda _step: drawn.extend(k for m in masters for k in insert(m, 20)))
    drawn += [key for master in grown for key in insert(master, 200)]
    assert len(set(drawn)) == len(drawn) == 2 * 20 * len(plan.steps) + 600
    assert verify(read_masters(grown)) == []


def test_verify_finds_nothing_wrong_with_masters_that_are_written_to(make_masters: MakeMasters) -> None:
    masters = make_masters(2)
    apply(masters)
    ending = Event()

    def write(master: Master) -> None:
        with psycopg.connect(master.url, autocommit=True) as connection:
            while not ending.is_set():
                connection.execute("insert into photo (note) values ('x')")
                connection.execute("insert into app.event default values")

    with ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(write, master) for master in (*masters, *masters)]
        try:
            found = [finding for _ in range(25) for finding in verify(read_masters(masters))]
        finally:
            ending.set()
        for writer in writers:
            writer.result()
    assert found == []


def test_verify_names_each_fault(make_masters: MakeMasters) -> None:
    masters = make_masters(2)
    apply(masters)
    a, b = masters
    insert(a, 3)
    last_of_b = insert(b, 3)[-1]
    run(b, "alter sequence app.shared increment by 3")
    run(a, 'alter sequence "Odd Name_Key_seq" restart with 20002')
    run(b, f"insert into photo overriding system value values ({last_of_b + 10}, 'by hand')")
    # A greater value of the other's class is that of a row that was replicated.
    run(a, f"insert into photo overriding system value values ({last_of_b + 10}, 'replicated')")
    run(b, "drop table tag; create table plain (id bigint primary key); create table more (id serial)")
    run(a, "create table plain (id bigint primary key)")
    run(a, "alter sequence app.shared maxvalue 99999 cycle")
    assert problems(masters) == {
        ("b", "app.event.id", "wrong-increment"),
        ("a", "public.Odd Name.Key", "wrong-offset"),
        ("b", "public.photo.id", "behind"),
        ("a", "public.more.id", "missing-table"),
        ("b", "public.more.id", "no-offset"),
        ("a", "public.plain.id", "no-sequence"),
        ("b", "public.plain.id", "no-sequence"),
        ("a", "app.event.id", "limited"),
        ("a", "app.event.id", "cycles"),
    }
    details = {f.problem: f.detail for f in verify(read_masters(masters)) if f.column != "app.event.id"}
    assert details["wrong-offset"] == "continues at 20002: offset 2, not 1"
    assert details["behind"] == f"continues at {last_of_b + 2}, but the table holds {last_of_b + 10}"
    with pytest.raises(ClusterConflict, match=r'public\.more\.id: master "a" has no such column'):
        apply(masters)
    run(b, "drop table more")
    apply(masters)
    # What no sequence numbers is for people to decide.
    assert {finding.problem for finding in verify(read_masters(masters))} == {"no-sequence"}
    assert insert(b)[0] == last_of_b + 12
    only_app = verify(read_masters(masters, ["app"]))
    assert only_app == []


def skipped(masters: Sequence[Master], new: Master, skip: Callable[[str, str], bool]) -> list[list[int]]:
    """Grows by one master but for some steps, and gives what each then draws."""
    grown = [*masters, new]
    steps = [step for step in make_plan(read_masters(grown)).steps if not skip(step.phase, step.master)]
    carry_out(grown, steps)
    return [insert(master, 8000) for master in grown]


def test_a_master_that_was_forgotten_collides(make_masters: MakeMasters) -> None:
    masters = make_masters(2)
    apply(masters)
    (new,) = make_masters(1)
    a, b, c = skipped(masters, new, lambda _phase, master: master == "b")
    # b goes on by 2 and runs past the bound, into the values that are a's and c's by now.
    assert set(b) & set(a)
    assert set(b) & set(c)
    run(masters[1], "create table arrived (id bigint primary key); insert into arrived select id from photo")
    with psycopg.connect(masters[1].url) as connection, pytest.raises(psycopg.errors.UniqueViolation):
        connection.execute("insert into arrived values (%s)", (min(set(b) & set(c)),))
    assert ("b", "public.photo.id", "wrong-increment") in problems([*masters, new])


@pytest.mark.parametrize("fenced", [True, False])
def test_between_two_switches_only_fences_prevent_collisions(fenced: bool, make_masters: MakeMasters) -> None:
    masters = make_masters(2)
    apply(masters)
    (new,) = make_masters(1)
    grown = [*masters, new]
    steps = make_plan(read_masters(grown), headroom=100).steps
    fences = [step for step in steps if step.phase == "fence"]
    # The first master is switched, and the second not yet.
    half = [step for step in steps if step.phase == "switch" and step.master == "a"]
    carry_out(grown, [*fences, *half] if fenced else half)
    of_a = insert(masters[0], 200)
    of_b = insert(masters[1], 40)
    if fenced:
        with pytest.raises(psycopg.errors.SequenceGeneratorLimitExceeded):
            insert(masters[1], 40)
        assert max(of_b) < min(of_a)
    else:
        of_b += insert(masters[1], 200)
        assert set(of_a) & set(of_b)


def test_a_master_that_was_fenced_but_not_switched_stops_and_nothing_collides(
    make_masters: MakeMasters,
) -> None:
    masters = make_masters(2)
    apply(masters)
    (new,) = make_masters(1)
    with pytest.raises(psycopg.errors.SequenceGeneratorLimitExceeded, match="reached maximum value"):
        skipped(masters, new, lambda phase, master: (phase, master) == ("switch", "b"))
    grown = [*masters, new]
    assert {(f.master, f.problem) for f in verify(read_masters(grown)) if f.column == "public.photo.id"} == {
        ("b", "wrong-increment"),
        ("b", "limited"),
    }
    # A new plan goes on from there. It leaves b's fence, above which the others have drawn, where it is.
    plan = make_plan(read_masters(grown))
    photo = {(s.phase, s.master) for s in plan.steps if s.column == "public.photo.id"}
    assert photo == {("fence", "a"), ("fence", "c"), *(("switch", name) for name in "abc")}
    carry_out(grown, plan.steps)
    assert verify(read_masters(grown)) == []
    drawn = [key for master in grown for key in insert(master, 100)]
    assert len(set(drawn)) == 300


def test_a_master_that_drew_past_the_bound_stops_the_plan_before_any_switch(
    make_masters: MakeMasters,
) -> None:
    masters = make_masters(2)
    plan = make_plan(read_masters(masters), headroom=5)
    insert(masters[1], 10)
    with pytest.raises(StatementFailed, match=r'after 5 of 12 steps.*on master "b".*MAXVALUE') as stopped:
        carry_out(masters, plan.steps)
    assert "drew past the bound" in stopped.value.hint
    assert "wrong-offset" not in {problem for _, _, problem in problems(masters)}
    apply(masters)
    assert verify(read_masters(masters)) == []


def test_masters_leave_until_one_is_left(make_masters: MakeMasters) -> None:
    a, b, c = make_masters(3)
    apply([a, b, c])
    of_c = insert(c, 50)
    gone = dataclasses.replace(c, leaves=True)
    plan = make_plan(read_masters([a, b, gone], ["public"]), headroom=100)
    photo = [(s.phase, s.master) for s in plan.steps if s.column == "public.photo.id"]
    assert photo == [("fence", "a"), ("fence", "b"), ("fence", "c"), ("switch", "a"), ("switch", "b")]
    carry_out([a, b, gone], plan.steps)
    drawn = insert(a, 50) + insert(b, 50)
    assert min(drawn) > max(of_c) + 100
    assert {key % 2 for key in drawn[:50]} == {1}
    # The one that left goes on to its bound, and gives no key of the others.
    last = insert(c, 33)
    assert max(last) < min(drawn)
    with pytest.raises(psycopg.errors.SequenceGeneratorLimitExceeded):
        insert(c, 2)
    assert make_plan(read_masters([a, b, gone], ["public"])).steps == ()

    # A master that was lost can't be fenced; what it wrote and did not replicate is for its owner to decide.
    apply([a, dataclasses.replace(b, leaves=True)])
    assert verify(read_masters([a])) == []
    first, second = insert(a, 2)
    assert second == first + 1
    assert first > max(drawn)
    # One that left unfenced, as it was not named, is fenced when it is.
    run(b, "alter sequence photo_id_seq no maxvalue")
    assert [s.phase for s in make_plan(read_masters([a, dataclasses.replace(b, leaves=True)])).steps] == [
        "fence",
        "fence",
        "switch",
    ]
    # It comes back as any new one does.
    apply([a, b])
    assert verify(read_masters([a, b])) == []
    assert {key % 2 for key in insert(b, 10)} == {0}


def test_refusals(make_masters: MakeMasters) -> None:
    a, b = make_masters(2)
    with pytest.raises(BadArgument, match="no master is named that stays"):
        read_masters([dataclasses.replace(a, leaves=True)])
    with pytest.raises(BadArgument, match='two masters are named "a"'):
        read_masters([a, dataclasses.replace(b, name="a")])
    with pytest.raises(BadArgument, match="'a b' is not a name"):
        Master(name="a b", url=a.url)
    with pytest.raises(BadArgument, match="headroom of 0"):
        make_plan(read_masters([a, b]), headroom=0)
    with pytest.raises(ConnectionFailed, match='master "x" can\'t be reached'):
        read_masters([a, Master(name="x", url="postgresql://nobody:secret@127.0.0.1:1/x")])
    run(a, 'insert into "Odd Name" values (2147483000)')
    with pytest.raises(ClusterConflict, match=r"public\.Odd Name\.Key can't go past 2147483647"):
        make_plan(read_masters([a, b]))
    with pytest.raises(ConnectionFailed, match='master "x"') as failed:
        carry_out([a, Master(name="x", url="postgresql://nobody:secret@127.0.0.1:1/x")], ())
    assert "secret" not in str(failed.value)


def test_findings_say_what_to_do(make_masters: MakeMasters) -> None:
    masters = make_masters(2, "create table photo (id bigint generated always as identity)")
    assert verify(read_masters(masters))[0] == OffsetFinding(
        master="a",
        column="public.photo.id",
        problem="no-offset",
        detail="counts by 1, as if it were alone among 2 masters",
        remedy="shardids multimaster",
    )
