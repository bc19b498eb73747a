"""How rows of several servers are sorted as one server would, and one statement is made of many."""

from __future__ import annotations

import random
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Date,
    DateTime,
    Enum,
    Float,
    Integer,
    Interval,
    LargeBinary,
    MetaData,
    Numeric,
    String,
    Table,
    Time,
    TypeDecorator,
    Uuid,
    column,
    select,
    table,
    type_coerce,
)
from sqlalchemy.types import TypeEngine

from shardids.client.routing.fanout import Asked, Capture, MergePlan, node_statement, plan
from shardids.client.routing.orders import OrderKey
from shardids.errors import CannotCombine

NAN = float("nan")


class Doubled(TypeDecorator[int]):
    impl = BigInteger
    cache_ok = True


def key(*, descending: bool = False, nulls_first: bool = False) -> OrderKey:
    expression = Column("x", String(collation="C"))
    return OrderKey(expression=expression, descending=descending, nulls_first=nulls_first)


def plan_of(*keys: OrderKey, limit: int | None = None, offset: int = 0) -> MergePlan:
    statement: Any = select(table("t", column("x")))
    return MergePlan(branch=statement, keys=keys, limit=limit, offset=offset, folds=(), locks=False)


def sorted_by(one: OrderKey, values: list[Any]) -> list[Any]:
    answers = [[[value] for value in values[::2]], [[value] for value in values[1::2]]]
    found = [value for (value,) in plan_of(one).merged(answers, [0], is_sorted=False)]
    runs = [sorted(one_run, key=lambda row: one.rank(row[0]), reverse=one.descending) for one_run in answers]
    assert [repr(value) for (value,) in plan_of(one).merged(runs, [0], is_sorted=True)] == [*map(repr, found)]
    return found


@pytest.mark.parametrize(
    "values",
    [
        [-5, -1, 0, 3, 1 << 62],
        [float("-inf"), -0.5, 0.0, 1e300, float("inf")],
        [Decimal("-1.5"), Decimal("0"), Decimal("1e30")],
        [date(1, 1, 1), date(2024, 2, 29), date(9999, 12, 31)],
        [datetime(2024, 1, 1, tzinfo=UTC) + timedelta(days=n) for n in range(5)],
        [False, True],
        [b"", b"\x00", b"\x00\x01", b"\xff"],
        [UUID(int=n) for n in (0, 1, 1 << 64, (1 << 128) - 1)],
        ["", "A", "B", "a", "é", "\U0001f600"],
    ],
    ids=lambda values: type(values[0]).__name__,
)
def test_values_are_sorted_as_postgresql_sorts_them(values: list[Any]) -> None:
    shuffled = [*values, None, None]
    random.Random(5).shuffle(shuffled)
    assert sorted_by(key(), shuffled) == [*values, None, None]
    assert sorted_by(key(nulls_first=True), shuffled) == [None, None, *values]
    assert sorted_by(key(descending=True), shuffled) == [*values[::-1], None, None]
    assert sorted_by(key(descending=True, nulls_first=True), shuffled) == [None, None, *values[::-1]]


@pytest.mark.parametrize("nan", [NAN, Decimal("nan")])
def test_nan_is_above_all_numbers(nan: Any) -> None:
    mixed = [nan, 1, None, nan, float("inf") if nan is NAN else Decimal("inf"), -1]
    assert repr(sorted_by(key(), mixed)) == repr([-1, 1, mixed[4], nan, nan, None])
    assert repr(sorted_by(key(descending=True, nulls_first=True), mixed)) == repr(
        [None, nan, nan, mixed[4], 1, -1]
    )


def test_several_keys_and_a_part_of_the_rows() -> None:
    keys = (key(descending=True), key())
    answers = [[[2, 1, "a"], [2, 5, "b"], [1, 1, "c"]], [[2, 3, "d"], [1, 0, "e"], [1, 9, "f"]]]
    order = "adbecf"
    for limit, offset in ((None, 0), (2, 0), (2, 3), (9, 5), (0, 0), (None, 4)):
        rows = plan_of(*keys, limit=limit, offset=offset).merged(answers, [0, 1], is_sorted=True)
        assert "".join(row[2] for row in rows) == order[offset:][:limit]


@pytest.mark.parametrize(
    "type_", [Integer(), Doubled(), Float(), Numeric(), Boolean(), Date(), DateTime(), Time(), Uuid()]
)
@pytest.mark.parametrize("other", [LargeBinary(), String(collation="C"), Uuid(as_uuid=False)])
def test_types_that_python_sorts(type_: TypeEngine[Any], other: TypeEngine[Any]) -> None:
    query = select(Table("t", MetaData(), Column("x", type_), Column("y", other))).order_by("x", "y")
    assert len(plan(query, None).keys) == 2


@pytest.mark.parametrize(
    "type_",
    [
        String(),
        String(collation="de_DE"),
        Enum("b", "a", native_enum=False),
        Interval(),
        JSON(),
        Time(timezone=True),
    ],
)
def test_types_that_python_does_not_sort_alike(type_: TypeEngine[Any]) -> None:
    query = select(Table("t", MetaData(), Column("x", type_))).order_by("x")
    with pytest.raises(CannotCombine, match="ORDER BY"):
        plan(query, None)


def test_text_that_the_model_takes_for_a_number_is_not_sorted() -> None:
    query = select(type_coerce(column("x"), Integer).label("x")).order_by("x")
    (one,) = plan(query, None).keys
    with pytest.raises(CannotCombine, match="as a language does"):
        one.rank("b")


def asked(sql: str, **parameters: Any) -> Capture:
    capture = Capture()
    capture.sql, capture.parameters = sql, parameters
    return capture


def test_one_statement_of_equal_questions() -> None:
    shared = asked(
        "select * from shardids_any_shard.t where x = %(x_1)s::INTEGER and y = %(y)s and z = 'a%%(x_1)s'",
        x_1=-5,
        y="b",
    )
    sql, parameters = node_statement(
        plan_of(key(descending=True), limit=3, offset=2),
        shared,
        Asked(("shard_0001", "shard_0002")),
    )
    assert sql == (
        "(select * from shard_0001.t where x = %(x_1)s::INTEGER and y = %(y)s and z = 'a%%(x_1)s')\n"
        "UNION ALL (select * from shard_0002.t"
        " where x = %(x_1)s::INTEGER and y = %(y)s and z = 'a%%(x_1)s')\n"
        "ORDER BY shardids_key_0 DESC NULLS LAST\n"
        "LIMIT 5"
    )
    assert parameters == {"x_1": -5, "y": "b"}


def test_a_statement_that_repeats_is_made_once() -> None:
    shared = asked("select 'a%' from shardids_any_shard.t")
    shards = Asked(("shard_0001", "shard_0002"))
    first, _ = node_statement(plan_of(limit=3), shared, shards)
    assert node_statement(plan_of(limit=3), shared, shards)[0] is first
    assert node_statement(plan_of(limit=4), shared, shards)[0].endswith("LIMIT 4")
    assert (
        node_statement(plan_of(limit=3), shared, Asked(("shard_0003",)))[0]
        == "(select 'a%' from shard_0003.t)"
    )


def test_each_shard_gets_its_own_part_of_a_list() -> None:
    sql = "select 1 where a in (%(a_1)s::TEXT, %(a_2)s::TEXT, %(a_3)s::TEXT) and b in (%(b_1)s, %(b_2)s)"
    shared = asked(sql, a_1="x", a_2="y", a_3="z", b_1=1, b_2=2)
    shared.names = {"a": "a", "b": "b"}
    lists: list[dict[str, list[int]]] = [{"a": [0, 2], "b": [1]}, {"a": [1], "b": []}]
    assert node_statement(plan_of(), shared, Asked(("shard_0001", "shard_0002"), lists)) == (
        "(select 1 where a in (%(a_1)s::TEXT, %(a_3)s::TEXT) and b in ((2)))\n"
        "UNION ALL (select 1 where a in (%(a_2)s::TEXT) and b in (NULL))",
        {"a_1": "x", "a_2": "y", "a_3": "z"},
    )


def test_a_list_that_is_written_in_another_way_is_left_whole() -> None:
    shared = asked("select 1 where a in (lower(%(a_1)s), lower(%(a_2)s))", a_1="x", a_2="y")
    shared.names = {"a": "a"}
    sql, _ = node_statement(plan_of(), shared, Asked(("shard_0001",), [{"a": [0]}]))
    assert sql == "(select 1 where a in (lower(%(a_1)s)))"


def test_parameters_of_enums_are_each_shard_s_own() -> None:
    shared = asked("select %(a)s, '%%(a)s', %(c)s", a="x", c=5)
    shared.sends_enums = True
    sql, parameters = node_statement(plan_of(), shared, Asked(("shard_0001", "shard_0002")))
    assert sql == "(select %(shard_0_a)s, '%%(a)s', (5))\nUNION ALL (select %(shard_1_a)s, '%%(a)s', (5))"
    assert parameters == {"shard_0_a": "x", "shard_1_a": "x"}
