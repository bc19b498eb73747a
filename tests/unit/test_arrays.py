"""Arrays of IDs: the same answers and the same refusals as one ID at a time."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardids.errors import BadArgument, TimeExhausted
from shardids.ids.arrays import decode_array, encode_array
from shardids.ids.layout import DEFAULT, DISCORD, INSTAGRAM, JS53, PRESETS
from shardids.ids.text import to_signed, to_unsigned

every_preset = pytest.mark.parametrize("layout", PRESETS.values(), ids=PRESETS)


def corners(layout):
    """Corner IDs of the layout: first, last, and around the sign bit."""
    top = 2**layout.id_bits
    step = 2 ** (layout.shard_bits + layout.sequence_bits)
    return [0, 1, step - 1, step, top // 2 - 1, top // 2, top - step, top - 1]


@every_preset
@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_decode_agrees_with_the_layout(layout, dtype):
    ids = np.array(corners(layout), dtype=np.uint64).view(dtype)
    arrays = decode_array(layout, ids)
    decoded = [layout.decode(int(id_)) for id_ in ids]
    assert arrays.ms.tolist() == [one.ms for one in decoded]
    assert arrays.shard.tolist() == [one.shard for one in decoded]
    assert arrays.sequence.tolist() == [one.sequence for one in decoded]
    assert [time.replace(tzinfo=UTC) for time in arrays.time.tolist()] == [one.time for one in decoded]


@given(layout=st.sampled_from(list(PRESETS.values())), data=st.data())
def test_encode_agrees_with_the_layout(layout, data):
    bits = data.draw(st.lists(st.integers(0, 2**layout.id_bits - 1), max_size=5))
    decoded = [layout.decode(to_signed(one)) for one in bits]
    ids = encode_array(
        layout,
        ms=[one.ms for one in decoded],
        shard=[one.shard for one in decoded],
        sequence=[one.sequence for one in decoded],
    )
    assert ids.dtype == np.int64
    assert ids.tolist() == [one.id for one in decoded]


@every_preset
def test_encode_undoes_decode(layout):
    ids = np.array([to_signed(one) for one in corners(layout)])
    parts = decode_array(layout, ids)
    again = encode_array(layout, ms=parts.ms, shard=parts.shard, sequence=parts.sequence)
    assert np.array_equal(again, ids)


def test_types_and_shapes():
    ids = np.arange(12, dtype=np.int64).reshape(3, 4)
    arrays = decode_array(DEFAULT, ids)
    assert arrays.time.dtype == np.dtype("datetime64[ms]")
    assert arrays.ms.dtype == np.int64
    assert arrays.shard.dtype == arrays.sequence.dtype == np.int32
    assert {part.shape for part in (arrays.time, arrays.ms, arrays.shard, arrays.sequence)} == {(3, 4)}


@pytest.mark.parametrize(
    "ids",
    [
        np.arange(100, 120)[::-3],
        np.arange(100, 107, dtype=">i8"),
        np.arange(100, 107, dtype=">u8"),
        np.arange(100, 107, dtype=np.int8),
        np.arange(100, 107, dtype=np.uint32),
        np.arange(100, 107).tolist(),
    ],
    ids=["strided", "big-endian", "big-endian unsigned", "int8", "uint32", "list"],
)
def test_any_array_of_integers_will_do(ids):
    assert decode_array(DEFAULT, ids).sequence.tolist() == list(ids)


def test_the_given_array_is_left_alone():
    ids = np.arange(5_000_000, 5_000_005)
    before = ids.copy()
    parts = decode_array(DEFAULT, ids)
    assert np.array_equal(ids, before)
    encode_array(DEFAULT, ms=parts.ms, shard=parts.shard, sequence=parts.sequence)
    assert parts.ms.tolist() == [1] * 5


@pytest.mark.parametrize("empty", [[], np.array([], dtype=np.int64), np.array([], dtype=np.uint64)])
def test_nothing_gives_nothing(empty):
    assert decode_array(DEFAULT, empty).time.shape == (0,)
    assert encode_array(DEFAULT, ms=empty, shard=1).shape == (0,)


def test_single_numbers_are_broadcast():
    assert encode_array(DEFAULT, ms=[1, 2], shard=3).tolist() == [
        DEFAULT.encode(ms=1, shard=3),
        DEFAULT.encode(ms=2, shard=3),
    ]
    assert encode_array(DEFAULT, ms=[[1], [2]], shard=[3, 4], sequence=5).shape == (2, 2)
    with pytest.raises(BadArgument, match="differ in shape"):
        encode_array(DEFAULT, ms=[1, 2], shard=[1, 2, 3])


@pytest.mark.parametrize(
    ("layout", "ids", "message"),
    [
        (DEFAULT, [5, -1, -2], r"at index \[1\]: ID -1 is negative, but layout 41-12-10@"),
        (DEFAULT, np.array([5, 2**63], dtype=np.uint64), r"at index \[1\]: .* takes 64 bits"),
        (DEFAULT, np.array([[5, 6], [7, -8]]), r"at index \[1, 1\]: ID -8 is negative"),
        (JS53, [2**53 - 1, 2**53], r"at index \[1\]: ID 9007199254740992 takes 54 bits"),
        (JS53, np.array([-1], dtype=np.int8), r"at index \[0\]: ID -1 is negative"),
        (DEFAULT, [1.0], "IDs must be integers of at most 64 bits, not float64"),
        (DEFAULT, np.array([], dtype=np.float64), "not float64"),
        (DEFAULT, [True], "not bool"),
        (DEFAULT, ["1"], "not <U1"),
        (DEFAULT, [None], "not object"),
        (DISCORD, [2**64], "not object"),
        (DEFAULT, np.array(["2025-01-01"], dtype="datetime64[ms]"), r"not datetime64\[ms\]"),
    ],
)
def test_what_the_layout_refuses_is_refused(layout, ids, message):
    with pytest.raises(BadArgument, match=message):
        decode_array(layout, ids)


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ({"ms": [0, -1], "shard": 0}, BadArgument, r"at index \[1\]: ms -1 is before"),
        (
            {"ms": [0, 2**41], "shard": 0},
            TimeExhausted,
            r"at index \[1\]: ms 2199023255552 is past",
        ),
        ({"ms": 0, "shard": [5, 4096]}, BadArgument, r"\[1\]: shard must be from 0 to 4095"),
        ({"ms": 0, "shard": [-1]}, BadArgument, r"\[0\]: shard must be from 0 to 4095, not -1"),
        (
            {"ms": 0, "shard": 0, "sequence": [0, 0, 1024]},
            BadArgument,
            r"\[2\]: sequence must be from 0 to 1023, not 1024",
        ),
        (
            {"ms": np.array([2**64 - 1], dtype=np.uint64), "shard": 0},
            TimeExhausted,
            "ms 18446744073709551615 is past",
        ),
        ({"ms": [0.5], "shard": 0}, BadArgument, "ms must be integers"),
        ({"ms": 0, "shard": True}, BadArgument, "shard must be integers"),
        ({"ms": 0, "shard": 0, "sequence": "1"}, BadArgument, "sequence must be integers"),
    ],
)
def test_what_cannot_be_encoded_is_refused(parts, error, message):
    with pytest.raises(error, match=message):
        encode_array(DEFAULT, **parts)


def test_negative_ids_are_fine_where_the_layout_uses_the_sign_bit():
    arrays = decode_array(INSTAGRAM, [-1])
    assert arrays.ms.tolist() == [2**41 - 1]
    assert to_unsigned(int(encode_array(INSTAGRAM, ms=arrays.ms, shard=8191, sequence=1023)[0])) == (
        2**64 - 1
    )


def test_only_this_module_needs_numpy_and_says_how_to_get_it():
    script = (
        "import sys; sys.modules['numpy'] = None\n"
        "import shardids.ids.layout, shardids.catalog.topology\n"
        "try:\n    import shardids.ids.arrays\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "pip install numpy" in done.stdout


def test_old_ids_are_refused_by_their_index() -> None:
    new = DEFAULT.encode(ms=10**10, shard=7)
    assert decode_array(DEFAULT, [new, 17]).shard.tolist() == [7, 0]
    assert decode_array(DEFAULT, [new], old_ids_below=1 << 40).shard.tolist() == [7]
    assert decode_array(DEFAULT, [], old_ids_below=1 << 40).shard.tolist() == []
    with pytest.raises(BadArgument, match=r"at index \[1, 0\]: ID 17 was issued before the cluster"):
        decode_array(DEFAULT, [[new, new], [17, new]], old_ids_below=1 << 40)
    with pytest.raises(BadArgument, match="old_ids_below must be"):
        decode_array(DEFAULT, [new], old_ids_below=0)
