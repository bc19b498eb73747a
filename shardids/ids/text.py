"""The ways to write one ID: signed, unsigned, decimal and as sortable text.

An ID is what PostgreSQL's ``bigint`` holds: a signed 64-bit integer. The same 64 bits read as an
unsigned number are the *unsigned reading*; it differs only for negative IDs, which only layouts
that use the sign bit have. Nothing here depends on a layout.
"""

from __future__ import annotations

import re
from typing import Final, SupportsIndex

from shardids.errors import BadArgument

TEXT_WIDTH: Final = 13
"""Digits of the text form: 64 bits at 5 bits a digit, so the first digit is at most ``F``."""

_ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_SHIFTS: Final = tuple(range(5 * (TEXT_WIDTH - 1), -1, -5))

# Spelled out, because str.upper() makes ASCII letters of others: of the dotless i, for one.
_DIGITS: Final = (
    {digit: value for value, digit in enumerate(_ALPHABET)}
    | {digit.lower(): value for value, digit in enumerate(_ALPHABET)}
    | dict.fromkeys("IiLl", 1)
    | dict.fromkeys("Oo", 0)
)

CANONICAL_DECIMAL: Final = "^(0|-?[1-9][0-9]{0,18})$"
"""What :func:`to_decimal` writes, as a regular expression in the words that JSON Schema knows too."""

# [0-9], because \d and int() accept the digits of every script.
_DECIMAL: Final = re.compile(r"[+-]?[0-9]+")
_HEXADECIMAL: Final = re.compile(r"0x[0-9A-Fa-f]+")
_LONGEST: Final = 40


def to_signed(id_: int, /) -> int:
    """Return the ID as ``bigint`` shows it, from either reading (-2^63 … 2^64 - 1).

    Raises:
        BadArgument: not an integer, or beyond 64 bits.
    """
    bits = to_unsigned(id_)
    return bits - (1 << 64) if bits >> 63 else bits


def to_unsigned(id_: int, /) -> int:
    """Return the unsigned reading of the ID, 0 … 2^64 - 1, from either reading.

    Raises:
        BadArgument: not an integer, or beyond 64 bits.
    """
    return checked_integer("an ID", id_, -(1 << 63), (1 << 64) - 1) & ((1 << 64) - 1)


def to_decimal(id_: int, /) -> str:
    """Return the signed reading in decimal digits.

    Put IDs into JSON in this form, as strings: JavaScript rounds numbers above 2^53.

    Raises:
        BadArgument: not an integer, or beyond 64 bits.
    """
    return str(to_signed(id_))


def from_decimal(text: str, /) -> int:
    """Return the ID (signed) that :func:`to_decimal` wrote.

    Every ID has exactly one such text: no ``+``, no leading zeros, no white space. For what people write, see
    :func:`parse_id`.

    Raises:
        BadArgument: another form, or not from -2^63 to 2^63 - 1.
    """
    # fullmatch, because $ matches before a line feed at the end too.
    if not re.fullmatch(CANONICAL_DECIMAL, text):
        raise BadArgument(f"{_quoted(text)} is not an ID in decimal digits")
    return checked_integer("an ID", int(text), -(1 << 63), (1 << 63) - 1)


def to_text(id_: int, /) -> str:
    """Return the text form: 13 digits of Crockford's base 32, of the unsigned reading.

    Text forms of one layout sort, byte by byte, in the order of birth, also where the IDs
    themselves turn negative.

    Raises:
        BadArgument: not an integer, or beyond 64 bits.
    """
    bits = to_unsigned(id_)
    return "".join([_ALPHABET[bits >> shift & 31] for shift in _SHIFTS])


def from_text(text: str, /) -> int:
    """Return the ID (signed) that a text form stands for.

    Lower case is read as upper case, ``I`` and ``L`` as 1, ``O`` as 0; single hyphens between
    digits are ignored.

    Raises:
        BadArgument: another character, another width than 13 digits, a misplaced hyphen, or a
            value beyond 64 bits.
    """
    groups = text.split("-")
    digits = "".join(groups)
    for digit in digits:
        if digit not in _DIGITS:
            raise BadArgument(f"{_quoted(text)} is not the text form of an ID: {digit!r} is not a digit")
    if len(digits) != TEXT_WIDTH:
        raise BadArgument(
            f"{_quoted(text)} is not the text form of an ID: {len(digits)} digits, not {TEXT_WIDTH}"
        )
    if "" in groups:
        raise BadArgument(
            f"{_quoted(text)} is not the text form of an ID: '-' may stand only between two digits"
        )
    if _DIGITS[digits[0]] > 15:
        raise BadArgument(
            f"{_quoted(text)} is not the text form of an ID: it is beyond 64 bits,"
            f" as its first digit {digits[0]!r} is above 'F'"
        )
    bits = 0
    for digit in digits:
        bits = bits << 5 | _DIGITS[digit]
    return to_signed(bits)


def parse_id(text: str | int, /) -> int:
    """Return the ID (signed) that a person or a program wrote, in any of its forms.

    Read in this order, white space around it ignored:

    1. decimal, with or without a sign, of the signed or the unsigned reading;
    2. hexadecimal of the unsigned reading, prefix ``0x`` (lower case);
    3. the text form, see :func:`from_text`.

    A text form that consists of decimal digits only is therefore read as decimal, and a
    lower-cased one that starts with ``0x`` may be read as hexadecimal. Where only text forms are
    expected, call :func:`from_text`. An integer is returned in its signed reading.

    Raises:
        BadArgument: none of these forms, empty, or beyond 64 bits.
    """
    if not isinstance(text, str):
        return to_signed(text)
    stripped = text.strip()
    if not stripped:
        raise BadArgument("expected an ID, got an empty text")
    if _DECIMAL.fullmatch(stripped):
        return _from_digits(stripped, 10)
    if _HEXADECIMAL.fullmatch(stripped):
        return _from_digits(stripped, 16)
    try:
        return from_text(stripped)
    except BadArgument as error:
        raise BadArgument(
            error.message,
            hint="An ID is written as decimal digits, as 0x and hexadecimal digits,"
            f" or as {TEXT_WIDTH} digits of base 32.",
        ) from None


def _from_digits(number: str, base: int) -> int:
    # int() refuses decimal numbers of thousands of digits with an error of its own; without its
    # leading zeros no number of 64 bits has more than 20 digits.
    significant = number.lstrip("+-0x")
    if len(significant) > 20:
        raise BadArgument(f"{_quoted(number)} is beyond the 64 bits of an ID")
    value = int(significant or "0", base)
    return to_signed(-value if number.startswith("-") else value)


def as_integer(what: str, value: object) -> int:
    """Return ``value`` as a plain int; numpy integers and integer enums count as integers, bool does not.

    Raises:
        BadArgument: not an integer; the message starts with ``what``.
    """
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise BadArgument(f"{what} must be an integer, not {type(value).__name__}")
    return int(value.__index__())


def checked_integer(what: str, value: object, lowest: int, highest: int) -> int:
    """Return ``value`` as a plain int from ``lowest`` to ``highest``, both included.

    Raises:
        BadArgument: not an integer, or out of range; the message starts with ``what``.
    """
    number = as_integer(what, value)
    if not lowest <= number <= highest:
        raise BadArgument(f"{what} must be from {lowest} to {highest}, not {shown(number)}")
    return number


def shown(number: int) -> str:
    """Return the integer as a message shows it: its size if it is too long to read."""
    # Also a guard: Python refuses to print integers of thousands of digits.
    bits = number.bit_length()
    return str(number) if bits <= 128 else f"an integer of {bits} bits"


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…")
