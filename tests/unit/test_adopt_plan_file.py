"""The plan's file: what is written is read again, whatever the names; what is wrong in it is named."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardids.adopt.plan.document import (
    Finding,
    Hop,
    Kind,
    OldIds,
    Plan,
    Severity,
    TablePlan,
    plan_text,
    read_plan,
    write_plan,
)
from shardids.errors import BadArgument

# PostgreSQL stores no NUL and no lone surrogate.
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=20)
COLUMNS = st.lists(NAMES, min_size=1, max_size=3).map(tuple)
NUMBERS = st.integers(0, 2**63 - 1)


@st.composite
def hops(draw: st.DrawFn) -> Hop:
    columns = draw(COLUMNS)
    return Hop(columns=columns, table=draw(NAMES), referenced=tuple(draw(NAMES) for _ in columns))


TABLES = st.builds(
    TablePlan,
    name=NAMES,
    kind=st.sampled_from(Kind),
    key=st.none() | NAMES,
    path=st.lists(hops(), max_size=3).map(tuple),
    is_guess=st.booleans(),
    unowned=st.none() | st.sampled_from(["source", "shard 0", "shard 17"]),
    id=st.none() | NAMES,
    old_ids=st.none() | st.sampled_from(OldIds),
    rows=NUMBERS,
    size_bytes=NUMBERS,
)
FINDINGS = st.builds(Finding, severity=st.sampled_from(Severity), subject=NAMES, reason=NAMES, remedy=NAMES)
PLANS = st.builds(
    Plan,
    source=NAMES,
    server_version=NUMBERS,
    root=NAMES,
    shard_count=st.integers(1, 65536),
    tables=st.lists(TABLES, max_size=4).map(tuple),
    findings=st.lists(FINDINGS, max_size=3).map(tuple),
)
PLAN = Plan(
    source="postgresql://ann@db:5432/shop",
    server_version=180001,
    root="public.users",
    shard_count=64,
    tables=(
        TablePlan(name="public.users", kind=Kind.ROOT, key="id", id="id", old_ids=OldIds.KEY, rows=20_000),
        TablePlan(
            name="public.items",
            kind=Kind.DERIVED,
            key="user_id",
            path=(Hop(columns=("order_id",), table="public.orders", referenced=("id",)),),
        ),
    ),
    findings=(Finding(severity=Severity.NOTE, subject="public.users", reason="a", remedy="b"),),
)


@given(PLANS, st.lists(NAMES, max_size=3))
def test_a_plan_is_read_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, plan, lines):
    path = tmp_path_factory.mktemp("plans") / "plan.toml"
    write_plan(plan, path, comments={one.name: lines for one in plan.tables} | {"": lines})
    assert read_plan(path) == plan


def test_a_comment_stays_one_whatever_is_in_it():
    text = plan_text(PLAN, {"public.users": ['x\nkind = "loose"', "\x1b[31m\u2028"]})
    assert tomllib.loads(text)["table"][0]["kind"] == "root"
    assert '# x\\nkind = "loose"\n# \\x1b[31m\\u2028\nname = "public.users"' in text


def test_a_file_that_exists_is_kept_unless_forced(tmp_path: Path):
    path = tmp_path / "plan.toml"
    path.write_text("mine", encoding="utf-8")
    with pytest.raises(BadArgument, match="exists already"):
        write_plan(PLAN, path)
    assert path.read_text(encoding="utf-8") == "mine"
    write_plan(PLAN, path, force=True)
    assert read_plan(path) == PLAN
    assert [found.name for found in tmp_path.iterdir()] == ["plan.toml"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(BadArgument, match=r"no/plan.toml can't be written: No such file"):
        write_plan(PLAN, tmp_path / "no" / "plan.toml")
    with pytest.raises(BadArgument, match=r"no/plan.toml can't be read: No such file"):
        read_plan(tmp_path / "no" / "plan.toml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("format = 1", "format = 2", "format is 2; this version of shardids reads 1"),
        ("shard_count = 64", "shard_count = 0", "shard_count is 0; it has to be an integer from 1"),
        ("shard_count = 64", "shard_count = true", "shard_count is True"),
        ("shard_count = 64", 'shard_count = "64"', "shard_count is '64'"),
        ("shard_count = 64", "", "shard_count is None"),
        ("shard_count = 64", "shard_count = 64\nshards = 3", "shards is not known"),
        ('kind = "root"', 'kind = "rot"', "table public.users: kind is 'rot'; it is one of root, direct"),
        ('key = "id"', 'keys = "id"', "table 1: keys is not known"),
        ('key = "id"', "key = 5", "table public.users: key is 5; it has to be a string"),
        (
            'columns = ["order_id"]',
            'columns = ["a", "b"]',
            "table public.items, path: columns and referenced",
        ),
        ('columns = ["order_id"]', "columns = [1]", "columns is [1]; it has to be an array of strings"),
        ('severity = "note"', 'severity = "bad"', "finding 1: severity is 'bad'; it is one of blocks"),
        ("[[finding]]", "[[finding", "is not TOML"),
        ("[[finding]]", "[finding]", "finding is not an array"),
    ],
)
def test_what_no_plan_says_is_refused_and_named(tmp_path: Path, old: str, new: str, message: str):
    path = tmp_path / "plan.toml"
    text = plan_text(PLAN)
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(BadArgument) as refused:
        read_plan(path)
    assert message in refused.value.message
    assert str(path) in refused.value.message
