"""CSV files as PostgreSQL reads them: records are sent as they are; only what tells the shard is read."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import IO, Any, Final

from psycopg import Copy, sql

from shardids.errors import BadArgument

_QUOTED: Final = re.compile(rb'"((?:[^"]|"")*+)"')
_INTEGER: Final = re.compile(r"\s*[+-]?\d+\s*", re.ASCII)
_BOM: Final = b"\xef\xbb\xbf"
_END_OF_DATA: Final = rb"\."

Record = bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvFile:
    """A CSV file: quotes are doubled within quotes, and an empty field without quotes is NULL.

    Attributes:
        names: the columns.
        lines: the lines after the header, and the number of the first of them.
    """

    names: Sequence[str]
    delimiter: str
    lines: Iterable[bytes]
    first_line: int

    @classmethod
    def read(cls, file: IO[bytes], delimiter: str, columns: Sequence[str] | None) -> CsvFile:
        """Returns the file, whose first line names its columns unless they are given.

        Raises:
            BadArgument: there is no such line, or the delimiter is not one ASCII character.
        """
        if len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n\\':
            raise BadArgument(
                f"{delimiter!r} can't separate the fields of a CSV file", hint="Give one character."
            )
        lines = _without_bom(file)
        if columns is not None:
            return cls(names=list(columns), delimiter=delimiter, lines=lines, first_line=1)
        header = next(lines, b"").rstrip(b"\r\n")
        names = [_text(field) for field in _split(header, delimiter)]
        if not all(names):
            raise BadArgument(
                "the first line does not name the columns", hint="If it is a row, give --columns."
            )
        return cls(names=[name or "" for name in names], delimiter=delimiter, lines=lines, first_line=2)

    def records(self) -> Iterator[tuple[int, Record]]:
        """Returns each record as it stands there, and the number of its first line.

        Empty lines are no records, except in a file of one column, where they are NULL.
        """
        began = self.first_line
        parts: list[bytes] = []
        is_open = False
        for number, line in enumerate(self.lines, self.first_line):
            if not parts:
                began = number
            parts.append(line)
            # Of doubled quotes there are two.
            is_open ^= bool(line.count(b'"') % 2)
            if not is_open:
                record = b"".join(parts).rstrip(b"\r\n")
                parts = []
                if record or len(self.names) == 1:
                    yield began, record
        if parts:
            yield began, b"".join(parts).rstrip(b"\r\n")

    def picker(self, places: Sequence[int], kinds: Sequence[type | None]) -> _Picker:
        """Returns what reads the fields at these places; a kind of ``None`` is an ID."""
        return _Picker(self.delimiter, places, kinds)

    def options(self) -> sql.Composable:
        """Returns what follows COPY … FROM STDIN."""
        return sql.SQL("(FORMAT csv, DELIMITER {})").format(sql.Literal(self.delimiter))

    def write(self, copy: Copy, ids: Sequence[int] | None, records: Sequence[Record]) -> None:
        """Sends records, each after its ID."""
        if ids is None:
            # As a line of its own it would end the data.
            copy.write(
                b"".join(b'"\\."\n' if record == _END_OF_DATA else record + b"\n" for record in records)
            )
            return
        separator = self.delimiter.encode()
        copy.write(
            b"".join(b"%d%b%b\n" % (id_, separator, record) for id_, record in zip(ids, records, strict=True))
        )

    @staticmethod
    def place_of_line(records: Sequence[Record], line: int) -> int:
        """Returns the place of the record with a line; PostgreSQL counts those in quotes too."""
        return bisect_left(list(accumulate(1 + record.count(b"\n") for record in records)), line)

    @staticmethod
    def shown(record: Record) -> str:
        """Returns a record as text, for people."""
        return record.decode("utf-8", errors="backslashreplace")


class _Picker:
    """Reads some fields of a record."""

    def __init__(self, delimiter: str, places: Sequence[int], kinds: Sequence[type | None]) -> None:
        mark = re.escape(delimiter.encode())
        field = rb'[^"%b]*+(?:"[^"]*+"[^"%b]*+)*+' % (mark, mark)
        self._patterns = [
            re.compile(rb"(?:%b%b){%d}(%b)(?:%b|\Z)" % (field, mark, place, field, mark)) for place in places
        ]
        self._kinds = kinds

    def __call__(self, record: Record) -> tuple[Any, ...]:
        """Returns the values. Raises BadArgument for a record without such a field, or of another kind."""
        return tuple(
            self._value(pattern.match(record), kind)
            for pattern, kind in zip(self._patterns, self._kinds, strict=True)
        )

    @staticmethod
    def _value(found: re.Match[bytes] | None, kind: type | None) -> Any:
        if found is None:
            raise BadArgument(
                "the record ends before the field that tells its shard, or a quote is not closed"
            )
        value = _text(found[1])
        if value is None or kind is str:
            return value
        if kind is None or kind is int:
            if not _INTEGER.fullmatch(value):
                raise BadArgument(f"{value!r} is not an integer")
            return int(value)
        if kind is bytes:
            if not re.fullmatch(r"\\x(?:[0-9a-fA-F]{2})*", value):
                raise BadArgument(f"{value!r} is not bytes in hexadecimal form")
            return bytes.fromhex(value[2:])
        return value


def _text(field: bytes) -> str | None:
    if not field:
        return None
    if b'"' in field:
        field = _QUOTED.sub(lambda found: found[1].replace(b'""', b'"'), field)
    try:
        return field.decode("utf-8")
    except UnicodeDecodeError:
        raise BadArgument(f"{field!r} is not UTF-8") from None


def _split(record: bytes, delimiter: str) -> list[bytes]:
    mark = re.escape(delimiter.encode())
    field = rb'[^"%b]*+(?:"[^"]*+"[^"%b]*+)*+' % (mark, mark)
    return [found[1] for found in re.finditer(rb"(?:\A|%b)(%b)" % (mark, field), record)]


def _without_bom(file: IO[bytes]) -> Iterator[bytes]:
    first = file.readline()
    if first:
        yield first.removeprefix(_BOM)
        yield from file
