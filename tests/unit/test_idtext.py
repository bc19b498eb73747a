"""The written forms of an ID: which text gives which ID, and which gives none."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardids.errors import BadArgument
from shardids.ids.text import from_decimal, from_text, parse_id, to_decimal, to_signed, to_text, to_unsigned

signed = st.integers(-(2**63), 2**63 - 1)
unsigned = st.integers(0, 2**64 - 1)

# Signed reading and text form; the texts were worked out by hand from the bits.
KNOWN = [
    (0, "0000000000000"),
    (1, "0000000000001"),
    (31, "000000000000Z"),
    (32, "0000000000010"),
    (2**63 - 1, "7ZZZZZZZZZZZZ"),
    (-(2**63), "8000000000000"),
    (-1, "FZZZZZZZZZZZZ"),
]


@pytest.mark.parametrize(
    ("id_", "bits"), [(0, 0), (2**63 - 1, 2**63 - 1), (-(2**63), 2**63), (-1, 2**64 - 1)]
)
def test_readings(id_, bits):
    for reading in (id_, bits):
        assert to_signed(reading) == id_
        assert to_unsigned(reading) == bits
        assert to_decimal(reading) == str(id_)


@given(signed)
def test_decimal_digits_lead_back(id_):
    assert from_decimal(to_decimal(id_)) == id_


NO_CANONICAL_DECIMAL = (
    "",
    "+5",
    "-0",
    "007",
    " 5",
    "5 ",
    "5\n",
    "5.0",
    "1e3",
    "0x5",
    "1_000",
    "\u0665",
    "\uff19",
    "9223372036854775808",
    "-9223372036854775809",
    "9" * 5000,
    "0AKR4Z3Y41502",
)


@pytest.mark.parametrize("text", NO_CANONICAL_DECIMAL)
def test_one_id_has_one_text_of_decimal_digits(text):
    with pytest.raises(BadArgument):
        from_decimal(text)


@pytest.mark.parametrize("convert", [to_signed, to_unsigned, to_decimal, to_text, parse_id])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (2**64, "must be from -9223372036854775808 to 18446744073709551615, not 1844"),
        (-(2**63) - 1, "must be from -9223372036854775808 to 18446744073709551615, not -922"),
        pytest.param(-(10**5000), "an integer of 16610 bits", id="huge"),
        (True, "an ID must be an integer, not bool"),
        (1.0, "an ID must be an integer, not float"),
        (None, "an ID must be an integer, not NoneType"),
        (b"1", "an ID must be an integer, not bytes"),
    ],
)
def test_what_is_no_64_bit_integer_is_refused(convert, value, message):
    with pytest.raises(BadArgument, match=message):
        convert(value)


@pytest.mark.parametrize(("id_", "text"), KNOWN)
def test_known_text_forms(id_, text):
    assert to_text(id_) == text
    assert from_text(text) == id_


@given(signed)
def test_every_form_leads_back(id_):
    assert from_text(to_text(id_)) == id_
    assert from_text(to_text(id_).lower()) == id_
    assert parse_id(to_decimal(id_)) == id_
    assert parse_id(str(to_unsigned(id_))) == id_
    assert parse_id(hex(to_unsigned(id_))) == id_
    assert parse_id(id_) == parse_id(to_unsigned(id_)) == id_


@given(signed)
def test_parse_reads_a_text_form_unless_it_is_all_digits(id_):
    text = to_text(id_)
    assert parse_id(text) == (to_signed(int(text)) if text.isdecimal() else id_)


@given(unsigned, unsigned)
def test_text_sorts_as_the_bits_do(one, other):
    assert (to_text(one) < to_text(other)) == (one < other)
    assert (to_text(one).encode() < to_text(other).encode()) == (one < other)


@pytest.mark.parametrize(
    "text",
    ["0001-1001-01ABC", "00011-0010-1abc", "oooll-ooio-IABC", "O-O-O-L-I-0-0-1-0-1-A-B-C"],
)
def test_text_forgives_case_look_alikes_and_hyphens(text):
    assert from_text(text) == from_text("00011001" + "01ABC")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("000000000000U", "'U' is not a digit"),
        ("000000000000u", "'u' is not a digit"),
        ("00000000 0000", "' ' is not a digit"),
        ("000000000000_", "'_' is not a digit"),
        ("00000000000é0", "'é' is not a digit"),
        ("00000000000٣0", "'٣' is not a digit"),
        ("00000000000\u01310", "'\u0131' is not a digit"),  # dotless i: its upper case is I
        ("000000000000\n", r"'\\n' is not a digit"),
        ("", "0 digits, not 13"),
        ("000000000000", "12 digits, not 13"),
        ("00000000000000", "14 digits, not 13"),
        pytest.param("Z" * 5000, "ZZZ….*5000 digits, not 13", id="long"),
        ("G000000000000", "beyond 64 bits, as its first digit 'G' is above 'F'"),
        ("z000000000000", "beyond 64 bits, as its first digit 'z' is above 'F'"),
        ("-0000000000000", "'-' may stand only between two digits"),
        ("0000000000000-", "'-' may stand only between two digits"),
        ("000000--0000000", "'-' may stand only between two digits"),
    ],
)
def test_what_is_no_text_form_is_refused(text, message):
    with pytest.raises(BadArgument, match=message):
        from_text(text)


@pytest.mark.parametrize(
    ("text", "id_"),
    [
        ("0", 0),
        ("-0", 0),
        ("+7", 7),
        (" \t42\n", 42),
        ("0000000000000000000000000000042", 42),
        ("9223372036854775807", 2**63 - 1),
        ("-9223372036854775808", -(2**63)),
        ("9223372036854775808", -(2**63)),
        ("18446744073709551615", -1),
        ("1234567890123", 1234567890123),  # 13 digits: decimal wins over the text form
        ("0x0", 0),
        ("0xff", 255),
        ("0xFF", 255),
        ("0x7fffffffffffffff", 2**63 - 1),
        ("0xffffffffffffffff", -1),
        ("0x0000000000000000000000ff", 255),
        ("0x00000000123", 0x123),  # 13 characters: hexadecimal wins over lower-case text
        ("0X00000000123", from_text("0X00000000123")),  # upper case is the text form
        ("1234-5678-90123", from_text("1234567890123")),  # hyphens make it a text form
        (" FZZZZZZZZZZZZ ", -1),
    ],
)
def test_parse(text, id_):
    assert parse_id(text) == id_


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got an empty text"),
        (" \n", "got an empty text"),
        ("1_000", "'_' is not a digit"),
        ("٣", "'٣' is not a digit"),
        ("\uff11\uff12", "'\uff11' is not a digit"),  # full-width 12
        ("1.0", r"'\.' is not a digit"),
        ("--5", "1 digits, not 13"),
        ("-0x5", "3 digits, not 13"),
        ("0xu", "'u' is not a digit"),
        ("0x", "2 digits, not 13"),
        ("abc", "3 digits, not 13"),
        ("18446744073709551616", "must be from"),
        ("-9223372036854775809", "must be from"),
        pytest.param("9" * 5000, "999….*beyond the 64 bits", id="long decimal"),
        ("0x10000000000000000", "must be from"),
        pytest.param("0x" + "f" * 5000, "beyond the 64 bits", id="long hexadecimal"),
    ],
)
def test_what_is_no_id_is_refused(text, message):
    with pytest.raises(BadArgument, match=message):
        parse_id(text)


@given(st.text("0123456789abfxilouzABFXILOUZ+-_ .\n\u0131\u0663\uff11\ud800", max_size=20))
def test_any_text_is_read_or_refused_and_never_fails_otherwise(text):
    for read in (from_text, parse_id):
        with contextlib.suppress(BadArgument):
            assert -(2**63) <= read(text) < 2**63
