"""IDs of other generators are taken apart, and none of their layouts is a cluster's."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardids.errors import BadArgument, TimeExhausted
from shardids.ids import FOREIGN, ForeignLayout, Layout, parse_layout, to_signed
from shardids.ids.layout import DEFAULT, SONYFLAKE, UIDGENERATOR
from tests.support.clusters import command_here


@st.composite
def layouts(draw: st.DrawFn) -> ForeignLayout:
    time_bits = draw(st.integers(20, 40))
    shard_bits = draw(st.integers(1, min(32, 63 - time_bits)))
    return ForeignLayout(
        time_bits=time_bits,
        unit_ms=draw(st.sampled_from([1, 4, 10, 100])),
        shard_bits=shard_bits,
        sequence_bits=draw(st.integers(1, min(32, 64 - time_bits - shard_bits))),
        sequence_first=draw(st.booleans()),
        epoch_ms=draw(st.integers(0, 1 << 40)),
    )


def test_the_id_of_uidgenerators_page() -> None:
    """README.md of baidu/uid-generator at ba696f53: its quick start configures 29, 21 and 13 bits from
    2016-09-20, and shows this ID with its parts, in the time zone of the epoch."""
    layout = parse_layout("29x1s-21shard-13seq@1474329600000")
    told = layout.decode(180363646902239241)
    assert (told.time, told.shard, told.sequence) == (datetime(2017, 1, 19, 12, 15, 46, tzinfo=UTC), 4, 9)
    assert told.ms == 10_498_546_000


def test_uidgenerators_default() -> None:
    """28 bits of seconds, 22 of the worker, 13 of the sequence, by the same page; 8.7 years, it says, which
    are 8.5; 1463673600000 is in DefaultUidGenerator.java."""
    assert str(UIDGENERATOR) == "28x1s-22shard-13seq@1463673600000"
    assert UIDGENERATOR.first_time == datetime(2016, 5, 19, 16, tzinfo=UTC)
    assert UIDGENERATOR.last_time == datetime(2024, 11, 20, 13, 24, 15, tzinfo=UTC)
    assert (UIDGENERATOR.id_bits, UIDGENERATOR.ids_per_second) == (63, 8192)
    told = UIDGENERATOR.decode((86_400 << 22 | 4_194_303) << 13 | 8191)
    assert (told.time, told.shard, told.sequence) == (datetime(2016, 5, 20, 16, tzinfo=UTC), 4_194_303, 8191)


def test_sonyflakes_default() -> None:
    """README.md of sony/sonyflake at 028142e5: 39 bits of 10 ms since 2014-09-01 UTC, 8 of a sequence, 16 of
    the machine, in this order; 174 years; 256 IDs in 10 ms. The page shows no ID."""
    assert str(SONYFLAKE) == "39x10ms-8seq-16shard@1409529600000"
    assert list(SONYFLAKE.widths) == ["time", "sequence", "shard"]
    assert SONYFLAKE.first_time == datetime(2014, 9, 1, tzinfo=UTC)
    assert round((SONYFLAKE.last_time - SONYFLAKE.first_time).days / 365.2425) == 174
    assert (SONYFLAKE.id_bits, SONYFLAKE.ids_per_second) == (63, 25_600)
    # A day and 10 ms after the start, the third ID of machine 10.0.1.2: its number is the lower half of that.
    told = SONYFLAKE.decode((8_640_001 << 8 | 2) << 16 | 0x0102)
    assert told.time == datetime(2014, 9, 2, 0, 0, 0, 10_000, tzinfo=UTC)
    assert (told.ms, told.sequence, told.shard) == (86_400_010, 2, 258)


@given(layout=layouts(), data=st.data())
def test_parts_come_back(layout: ForeignLayout, data: st.DataObject) -> None:
    unit = data.draw(st.integers(0, (1 << layout.time_bits) - 1))
    shard = data.draw(st.integers(0, layout.shard_limit - 1))
    sequence = data.draw(st.integers(0, layout.sequence_limit - 1))
    low = (
        sequence << layout.shard_bits | shard
        if layout.sequence_first
        else shard << layout.sequence_bits | sequence
    )
    bits = unit << (layout.shard_bits + layout.sequence_bits) | low
    told = layout.decode(bits)
    assert (told.id, told.ms, told.shard, told.sequence) == (
        to_signed(bits),
        unit * layout.unit_ms,
        shard,
        sequence,
    )
    assert told == layout.decode(told.id)
    assert (told.time - layout.first_time).total_seconds() * 1000 == pytest.approx(told.ms)
    assert layout.first_time <= told.time <= layout.last_time


@given(layouts())
def test_a_layout_is_read_as_it_is_written(layout: ForeignLayout) -> None:
    assert parse_layout(str(layout)) == layout
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_one_of_a_millisecond_says_the_same_as_a_clusters() -> None:
    same = parse_layout(f"41x1ms-12shard-10seq@{DEFAULT.epoch_ms}")
    ours, theirs = DEFAULT.decode(383089632747524096), same.decode(383089632747524096)
    assert (ours.time, ours.ms, ours.shard, ours.sequence) == (
        theirs.time,
        theirs.ms,
        theirs.shard,
        theirs.sequence,
    )
    assert same != DEFAULT


@pytest.mark.parametrize("text", [*FOREIGN, *map(str, FOREIGN.values())])
def test_no_cluster_has_one(text: str) -> None:
    with pytest.raises(BadArgument, match="no cluster can use it") as caught:
        Layout.parse(text)
    assert "shardids id decode" in (caught.value.hint or "")
    assert parse_layout(text) is parse_layout(str(parse_layout(text)))
    for words in (
        ["id", "encode", "--shard", "1", "--time", "now", "--layout", text],
        ["id", "range", "--from", "2026-01-01", "--to", "now", "--layout", text],
        ["id", "stats", "--layout", text],
        ["init", "--shards", "4", "--layout", text, "--catalog", "postgresql://localhost:1/x"],
    ):
        ran = command_here(*words, stdin="1")
        assert (ran.returncode, ran.stdout) == (2, ""), words
        assert "no cluster can use it" in " ".join(ran.stderr.split())


@pytest.mark.parametrize(
    "text",
    [
        "39x10-8seq-16shard@0",
        "39x10ms-8-16@0",
        "39x10ms-8seq-16seq@0",
        "39x10ms-8seq-16shard",
        "39x10us-8seq-16shard@0",
        "39x10ms-8seq-16shard@-1",
        "39x10ms-8seq-16shard@1\n",
    ],
)
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(BadArgument, match="is not a layout"):
        parse_layout(text)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("0x1ms-8seq-16shard@0", "time_bits"),
        ("39x0ms-8seq-16shard@0", "unit_ms"),
        ("39x3601s-8seq-16shard@0", "unit_ms"),
        ("39x1ms-33seq-1shard@0", "sequence_bits"),
        ("39x1ms-9seq-17shard@0", "64 bits"),
        ("39x1s-8seq-16shard@0", "39 bits of 1,000 ms reach past the year 9999"),
    ],
)
def test_widths_that_no_id_has(text: str, word: str) -> None:
    with pytest.raises(BadArgument, match=word):
        parse_layout(text)


def test_ids_and_times_outside_of_a_layout() -> None:
    with pytest.raises(BadArgument, match="leaves the sign bit zero"):
        SONYFLAKE.decode(-1)
    with pytest.raises(TimeExhausted):
        SONYFLAKE.time_at(10 << 39)
    signed = parse_layout("40x10ms-8seq-16shard@0")
    assert signed.decode(-1).ms == ((1 << 40) - 1) * 10
    assert signed.negative_from == signed.time_at(10 << 39)


def test_the_command_shows_the_fields_in_their_order() -> None:
    bits = (8_640_001 << 8 | 2) << 16 | 258
    ran = command_here("id", "decode", "--layout", "sonyflake", str(bits))
    assert ran.returncode == 0
    lines = [line.split() for line in ran.stdout.splitlines()]
    assert "".join(lines[1]) == f"{bits:064b}"
    assert [len(field) for field in lines[1]] == [1, 39, 8, 16]
    assert lines[2] == [
        "time",
        "(39",
        "bits",
        "of",
        "10",
        "ms)",
        "86400010",
        "2014-09-02",
        "00:00:00.010",
        "UTC",
    ]
    assert [line[0] for line in lines[2:]] == ["time", "sequence", "shard"]
