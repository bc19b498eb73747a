"""Layout: what an ID says, which IDs a time allows, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import enum
import pickle
from datetime import UTC, date, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardids.errors import BadArgument, TimeExhausted
from shardids.ids.layout import (
    DEFAULT,
    DISCORD,
    INSTAGRAM,
    JS53,
    PRESETS,
    TWITTER,
    IdRange,
    Layout,
)
from shardids.ids.text import to_unsigned

MS = timedelta(milliseconds=1)
US = timedelta(microseconds=1)
LAST_MS_OF_9999 = 253_402_300_799_999


def layout_of(time_bits=41, shard_bits=12, sequence_bits=10, epoch_ms=0):
    return Layout(
        time_bits=time_bits,
        shard_bits=shard_bits,
        sequence_bits=sequence_bits,
        epoch_ms=epoch_ms,
    )


@st.composite
def layouts(draw):
    time_bits = draw(st.integers(30, 42))
    shard_bits = draw(st.integers(1, 16))
    sequence_bits = draw(st.integers(1, min(22, 64 - time_bits - shard_bits)))
    epoch_ms = draw(st.integers(0, LAST_MS_OF_9999 - (1 << time_bits) + 1))
    return layout_of(time_bits, shard_bits, sequence_bits, epoch_ms)


@st.composite
def parts(draw, *, layout=None):
    layout = layout or draw(layouts())
    ms = draw(st.integers(0, (1 << layout.time_bits) - 1))
    shard = draw(st.integers(0, layout.shard_limit - 1))
    sequence = draw(st.integers(0, layout.sequence_limit - 1))
    return layout, ms, shard, sequence


every_preset = pytest.mark.parametrize("layout", PRESETS.values(), ids=PRESETS)
sign_bit_presets = pytest.mark.parametrize("layout", [INSTAGRAM, DISCORD], ids=str)


# Layouts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "written", "first", "negative_from"),
    [
        (DEFAULT, "41-12-10@1704067200000", datetime(2024, 1, 1, tzinfo=UTC), None),
        (
            INSTAGRAM,
            "41-13-10@1314220021721",
            datetime(2011, 8, 24, 21, 7, 1, 721_000, tzinfo=UTC),
            datetime(2046, 6, 27, 17, 0, 49, 497_000, tzinfo=UTC),
        ),
        (
            TWITTER,
            "41-10-12@1288834974657",
            datetime(2010, 11, 4, 1, 42, 54, 657_000, tzinfo=UTC),
            None,
        ),
        (
            DISCORD,
            "42-10-12@1420070400000",
            datetime(2015, 1, 1, tzinfo=UTC),
            datetime(2084, 9, 6, 15, 47, 35, 552_000, tzinfo=UTC),
        ),
        (JS53, "41-6-6@1704067200000", datetime(2024, 1, 1, tzinfo=UTC), None),
    ],
    ids=PRESETS,
)
def test_presets(layout, written, first, negative_from):
    assert str(layout) == written
    assert layout.first_time == first
    assert layout.negative_from == negative_from
    assert layout.uses_sign_bit is (negative_from is not None)
    assert layout.fits_javascript is (layout is JS53)
    assert layout.last_time == first + MS * (2**layout.time_bits - 1)
    assert layout.first_time.tzinfo is UTC


def test_the_default_lasts_until_2093():
    assert DEFAULT.last_time == datetime(2093, 9, 6, 15, 47, 35, 551_000, tzinfo=UTC)
    assert (DEFAULT.shard_limit, DEFAULT.sequence_limit, DEFAULT.id_bits) == (4096, 1024, 63)


@every_preset
def test_a_preset_is_found_by_its_name_and_by_its_bits(layout):
    assert Layout.preset(layout.name) is layout
    assert Layout.parse(layout.name) is layout
    assert Layout.parse(str(layout)) is layout


@given(layouts())
def test_a_layout_is_read_as_it_is_written(layout):
    assert Layout.parse(str(layout)) == layout


def test_widths_without_an_epoch_take_the_default_one():
    assert Layout.parse("41-12-10") is DEFAULT
    assert Layout.parse("40-8-8") == layout_of(40, 8, 8, DEFAULT.epoch_ms)


def test_unknown_preset_lists_the_known_ones():
    with pytest.raises(BadArgument, match=r"'snow'.*default, instagram, twitter, discord, js53"):
        Layout.preset("snow")


@pytest.mark.parametrize(
    "text",
    [
        *("", "Default", "41", "41-12", "41-12-10-1", "41|12|10", "41:12:10", "41,12,10"),
        *("41-12-10@", "41-12-10@-1", "-41-12-10", "41-12-10 ", "41-12-10\n", "4१-12-10"),
        *("41-12-10@1_000", "999-12-10", pytest.param("41-12-10@" + "9" * 5000, id="long")),
    ],
)
def test_what_is_no_layout_is_refused(text):
    with pytest.raises(BadArgument, match="is not a layout"):
        Layout.parse(text)


def test_a_written_layout_obeys_the_same_limits():
    with pytest.raises(BadArgument, match="time_bits must be from 30 to 42, not 43"):
        Layout.parse("43-10-10")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"time_bits": 29}, "time_bits must be from 30 to 42, not 29"),
        ({"time_bits": 43}, "time_bits must be from 30 to 42, not 43"),
        ({"shard_bits": 0}, "shard_bits must be from 1 to 16, not 0"),
        ({"shard_bits": 17}, "shard_bits must be from 1 to 16, not 17"),
        ({"sequence_bits": 0}, "sequence_bits must be from 1 to 22, not 0"),
        ({"sequence_bits": 23}, "sequence_bits must be from 1 to 22, not 23"),
        ({"shard_bits": 14}, r"at most 64 bits, not 65 \(41 \+ 14 \+ 10\)"),
        ({"epoch_ms": -1}, "epoch_ms must be from 0 to .*, not -1"),
        ({"epoch_ms": 1 << 5000}, "epoch_ms must be from 0 to .*, not an integer of 5001 bits"),
        ({"epoch_ms": 0.0}, "epoch_ms must be an integer, not float"),
        ({"time_bits": True}, "time_bits must be an integer, not bool"),
        ({"time_bits": "41"}, "time_bits must be an integer, not str"),
    ],
)
def test_impossible_layouts_are_refused(change, message):
    with pytest.raises(BadArgument, match=message):
        layout_of(**change)


def test_the_latest_epoch_reaches_the_end_of_datetime():
    latest = LAST_MS_OF_9999 - 2**42 + 1
    layout = layout_of(42, 1, 1, latest)
    assert layout.last_time == datetime.max.replace(microsecond=999_000, tzinfo=UTC)
    last = layout.encode(ms=2**42 - 1, shard=0)
    assert layout.decode(last).time == layout.last_time
    with pytest.raises(BadArgument, match="epoch_ms"):
        layout_of(42, 1, 1, latest + 1)


def test_a_layout_is_a_value():
    named = dataclasses.replace(DEFAULT, name="mine")
    assert named == DEFAULT
    assert hash(named) == hash(DEFAULT)
    assert pickle.loads(pickle.dumps(named)).name == "mine"
    assert copy.deepcopy(DEFAULT) == DEFAULT
    with pytest.raises(dataclasses.FrozenInstanceError):
        named.shard_bits = 3
    with pytest.raises(TypeError):
        PRESETS["mine"] = named


def test_foreign_integers_become_plain_ones():
    class Width(enum.IntEnum):
        SHARD = 12

    layout = layout_of(shard_bits=Width.SHARD)
    assert type(layout.shard_bits) is int


# Encoding and decoding -------------------------------------------------------------------------


@given(parts())
def test_decode_undoes_encode(case):
    layout, ms, shard, sequence = case
    id_ = layout.encode(ms=ms, shard=shard, sequence=sequence)
    assert -(2**63) <= id_ < 2**63
    for reading in (id_, to_unsigned(id_)):
        decoded = layout.decode(reading)
        assert decoded.id == id_
        assert (decoded.ms, decoded.shard, decoded.sequence) == (ms, shard, sequence)
        assert decoded.time == layout.first_time + MS * ms
        assert decoded.time.tzinfo is UTC
    assert layout.encode(at=decoded.time, shard=shard, sequence=sequence) == id_


def test_a_known_instagram_id():
    # The example of the published description: user 31341 of 2000 shards, the table's 5001st row.
    id_ = 1_387_263_000 << 23 | 1341 << 10 | 5001 % 1024
    decoded = INSTAGRAM.decode(id_)
    assert (decoded.ms, decoded.shard, decoded.sequence) == (1_387_263_000, 1341, 905)


def test_a_known_discord_id():
    # The example of Discord's reference: 2016-04-30 11:18:25.796 UTC, worker 1, process 0, 7.
    decoded = DISCORD.decode(175_928_847_299_117_063)
    assert decoded.time == datetime(2016, 4, 30, 11, 18, 25, 796_000, tzinfo=UTC)
    assert (decoded.shard, decoded.sequence) == (1 << 5 | 0, 7)


@every_preset
def test_corners(layout):
    last_ms, last_shard, last_sequence = (
        2**layout.time_bits - 1,
        layout.shard_limit - 1,
        layout.sequence_limit - 1,
    )
    assert layout.encode(at=layout.first_time, shard=0) == 0
    assert layout.encode(ms=0, shard=0, sequence=last_sequence) == last_sequence
    assert layout.encode(ms=0, shard=1) == last_sequence + 1
    assert layout.encode(ms=0, shard=last_shard, sequence=last_sequence) == (layout.encode(ms=1, shard=0) - 1)
    last = layout.encode(at=layout.last_time, shard=last_shard, sequence=last_sequence)
    assert last == (-1 if layout.uses_sign_bit else 2**layout.id_bits - 1)
    decoded = layout.decode(last)
    assert (decoded.ms, decoded.shard, decoded.sequence) == (last_ms, last_shard, last_sequence)
    assert decoded.time == layout.last_time


@sign_bit_presets
def test_ids_turn_negative_at_the_sign_bit(layout):
    before = layout.max_id(layout.negative_from - MS)
    after = layout.min_id(layout.negative_from)
    assert (before, after) == (2**63 - 1, -(2**63))
    assert to_unsigned(after) == to_unsigned(before) + 1
    assert layout.decode(after).time == layout.negative_from
    assert layout.decode(2**63) == layout.decode(after)


@given(
    at=st.datetimes(datetime(2024, 1, 1), datetime(2093, 1, 1), timezones=st.just(UTC)),
    offset=st.integers(-1439, 1439),
)
def test_a_datetime_is_floored_to_its_millisecond_exactly(at, offset):
    id_ = DEFAULT.encode(at=at, shard=0)
    assert DEFAULT.decode(id_).time == at.replace(microsecond=at.microsecond // 1000 * 1000)
    elsewhere = at.astimezone(timezone(timedelta(minutes=offset)))
    assert DEFAULT.encode(at=elsewhere, shard=0) == id_


def test_a_decoded_id_shows_its_parts():
    id_ = DEFAULT.encode(at=datetime(2025, 3, 1, 12, tzinfo=UTC), shard=5, sequence=9)
    assert repr(DEFAULT.decode(id_)) == (
        f"DecodedId(id={id_}, time=2025-03-01T12:00:00.000+00:00, ms=36763200000, shard=5, sequence=9)"
    )
    assert DEFAULT.decode(id_) == DEFAULT.decode(id_)
    assert hash(DEFAULT.decode(id_)) == hash(DEFAULT.decode(id_))
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEFAULT.decode(id_).id = 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shard": 0}, "exactly one"),
        ({"shard": 0, "ms": 0, "at": DEFAULT.first_time}, "exactly one"),
        ({"shard": 0, "at": datetime(2025, 1, 1)}, "no time zone"),
        ({"shard": 0, "at": date(2025, 1, 1)}, "must be a datetime, not date"),
        ({"shard": 0, "at": DEFAULT.first_time - US}, "2023-12-31.* before the layout's epoch"),
        ({"shard": 0, "ms": -1}, "ms -1 is before the layout's epoch"),
        ({"shard": 0, "ms": 1.0}, "ms must be an integer, not float"),
        ({"shard": 0, "ms": False}, "ms must be an integer, not bool"),
        ({"shard": -1, "ms": 0}, "shard must be from 0 to 4095, not -1"),
        ({"shard": 4096, "ms": 0}, "shard must be from 0 to 4095, not 4096"),
        ({"shard": True, "ms": 0}, "shard must be an integer, not bool"),
        ({"shard": 0, "ms": 0, "sequence": -1}, "sequence must be from 0 to 1023, not -1"),
        ({"shard": 0, "ms": 0, "sequence": 1024}, "sequence must be from 0 to 1023, not 1024"),
    ],
)
def test_what_cannot_be_encoded_is_refused(arguments, message):
    with pytest.raises(BadArgument, match=message):
        DEFAULT.encode(**arguments)


@every_preset
def test_time_past_the_end_is_exhausted_not_wrapped(layout):
    end = layout.last_time + MS
    for call in (
        lambda: layout.encode(at=end, shard=0),
        lambda: layout.encode(ms=2**layout.time_bits, shard=0),
        lambda: layout.encode(ms=10**5000, shard=0),
        lambda: layout.min_id(end),
        lambda: layout.max_id(end),
        lambda: layout.time_at(2**layout.time_bits),
    ):
        with pytest.raises(TimeExhausted, match=f"the last that {layout.time_bits} time bits"):
            call()
    assert layout.decode(layout.encode(at=end - US, shard=0)).time == layout.last_time


@pytest.mark.parametrize(
    ("layout", "id_", "message"),
    [
        (DEFAULT, True, "must be an integer, not bool"),
        (DEFAULT, "5", "must be an integer, not str"),
        (DEFAULT, 5.0, "must be an integer, not float"),
        (DEFAULT, None, "must be an integer, not NoneType"),
        (DEFAULT, -1, "ID -1 is negative, but layout 41-12-10@.* leaves the sign bit zero"),
        (DEFAULT, 2**63, "ID 9223372036854775808 takes 64 bits, but layout 41-12-10@.* has only 63"),
        (JS53, 2**64 - 1, "takes 64 bits, but layout 41-6-6@.* has only 53"),
        (DEFAULT, 2**64, "must be from -9223372036854775808 to 18446744073709551615"),
        (DISCORD, 2**64, "must be from -9223372036854775808 to 18446744073709551615"),
        (DISCORD, -(2**63) - 1, "must be from -9223372036854775808 to 18446744073709551615"),
        pytest.param(DISCORD, 10**5000, "an integer of 16610 bits", id="huge"),
        (JS53, 2**53, "takes 54 bits, but layout 41-6-6@.* has only 53"),
        (JS53, -1, "negative"),
    ],
)
def test_what_is_no_id_of_the_layout_is_refused(layout, id_, message):
    with pytest.raises(BadArgument, match=message):
        layout.decode(id_)


# Bounds ----------------------------------------------------------------------------------------


@given(parts())
def test_min_and_max_id_enclose_exactly_their_millisecond(case):
    layout, ms, shard, sequence = case
    at = layout.time_at(ms) + 999 * US
    id_ = layout.encode(ms=ms, shard=shard, sequence=sequence)
    assert layout.min_id(at) <= id_ <= layout.max_id(at)
    assert layout.decode(layout.min_id(at)).ms == layout.decode(layout.max_id(at)).ms == ms


def test_bounds_refuse_what_encode_refuses():
    for bound in (DEFAULT.min_id, DEFAULT.max_id):
        with pytest.raises(BadArgument, match="before the layout's epoch"):
            bound(DEFAULT.first_time - US)
        with pytest.raises(BadArgument, match="no time zone"):
            bound(datetime(2025, 1, 1))


near = st.integers(-3_000, 6_000).map(lambda us: DEFAULT.first_time + us * US)


@given(start=near, end=near, ms=st.integers(0, 6), shard=st.sampled_from([0, 5, 4095]))
def test_a_range_holds_exactly_the_ids_born_in_it(start, end, ms, shard):
    born = DEFAULT.time_at(ms)
    try:
        whole = DEFAULT.id_range(start, end)
        narrow = DEFAULT.id_range(start, end, shard=shard)
    except BadArgument:
        assert not start <= born < end
        return
    for sequence in (0, 1023):
        id_ = DEFAULT.encode(ms=ms, shard=shard, sequence=sequence)
        assert (whole.first <= id_ <= whole.last) == (start <= born < end)
        assert (narrow.first <= id_ <= narrow.last) == (start <= born < end)


def test_a_range_of_one_shard_ends_on_its_first_and_last_id():
    start, end = DEFAULT.time_at(10), DEFAULT.time_at(12)
    assert DEFAULT.id_range(start, end, shard=7) == IdRange(
        first=DEFAULT.encode(ms=10, shard=7, sequence=0),
        last=DEFAULT.encode(ms=11, shard=7, sequence=1023),
    )


@pytest.mark.parametrize("layout", [DEFAULT, TWITTER, JS53], ids=str)
def test_times_outside_count_as_the_ends(layout):
    everything = layout.id_range(datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC))
    assert everything == IdRange(first=0, last=2**layout.id_bits - 1)


@pytest.mark.parametrize(
    ("start_us", "end_us"),
    [
        (5_000, 5_000),
        (6_000, 5_000),
        (5_001, 5_999),
        (-10, 0),
        (-10, -5),
        (2**41 * 1000, 2**42 * 1000),
    ],
    ids=["empty", "reversed", "inside a millisecond", "before", "long before", "after"],
)
def test_a_range_without_ids_is_refused(start_us, end_us):
    first = DEFAULT.first_time
    with pytest.raises(BadArgument, match="no ID can be born"):
        DEFAULT.id_range(first + start_us * US, first + end_us * US)


def test_a_range_refuses_naive_times_and_unknown_shards():
    first = DEFAULT.first_time
    with pytest.raises(BadArgument, match="no time zone"):
        DEFAULT.id_range(datetime(2025, 1, 1), first)
    with pytest.raises(BadArgument, match="no time zone"):
        DEFAULT.id_range(first, datetime(2025, 1, 1))
    with pytest.raises(BadArgument, match="shard must be from 0 to 4095"):
        DEFAULT.id_range(first, first + MS, shard=4096)


@sign_bit_presets
def test_a_range_does_not_cross_the_sign_bit(layout):
    turn = layout.negative_from
    for start, end in ((turn - MS, turn + US), (layout.first_time, layout.last_time)):
        with pytest.raises(BadArgument, match="IDs turn negative") as caught:
            layout.id_range(start, end)
        assert turn.isoformat() in caught.value.message
        assert caught.value.hint == f"Split the range at {turn.isoformat()}."


@sign_bit_presets
def test_a_range_may_touch_the_sign_bit_from_either_side(layout):
    turn, end = layout.negative_from, layout.last_time + MS
    assert layout.id_range(layout.first_time, turn) == IdRange(first=0, last=2**63 - 1)
    assert layout.id_range(turn - US, end) == IdRange(first=-(2**63), last=-1)
