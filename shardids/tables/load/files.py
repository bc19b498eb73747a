"""CSV and Parquet files, read some thousand records at a time: the records as they stand, and their keys."""

from __future__ import annotations

import csv
import importlib
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO, StringIO
from itertools import accumulate, chain
from typing import IO, Any, Final

from psycopg import Copy, sql

from shardids.client.copying.sources import Row, of_batches
from shardids.errors import BadArgument, MissingLibrary

_INTEGER: Final = re.compile(r"\s*[+-]?\d+\s*", re.ASCII)
_USUAL_INTEGERS: Final = frozenset(b"0123456789-")
_BYTES: Final = re.compile(r"\\x(?:[0-9a-fA-F]{2})*")
_BOM: Final = b"\xef\xbb\xbf"
_END_OF_DATA: Final = rb"\."
_READ: Final = 1 << 18
"""How many bytes of a CSV file are read at a time."""
LONGEST_FIELD: Final = 1 << 30
"""PostgreSQL's limit; the csv module's is 128 KiB unless it is raised."""
_DIGITS: Final = 4
"""How many of an ID's last digits are not formatted each time."""
_TAILS: Final = 10**_DIGITS

Record = bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Records of a file.

    Attributes:
        records: the records.
        lines: the lines where they begin.
        columns: the values of the columns that were asked for, as bytes if the file is CSV; NULL is ``None``.
        unread: records whose columns can't be read, with their lines, and why.
    """

    records: Sequence[Any]
    lines: Sequence[int]
    columns: Sequence[Sequence[Any]]
    unread: Sequence[tuple[int, Any, str]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvFile:
    """A CSV file: quotes are doubled within quotes, and an empty field without quotes is NULL.

    Attributes:
        names: the columns.
        file: the file, from its first record on.
        begun: the first bytes of that record, if they were read to find the names.
        first_line: the number of that record's line.
    """

    names: Sequence[str]
    delimiter: str
    file: IO[bytes]
    begun: bytes
    first_line: int
    _well_quoted: re.Pattern[bytes] = field(init=False, repr=False)
    _tails: Sequence[bytes] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        mark = re.escape(self.delimiter.encode())
        one = rb'(?:"(?:[^"]|"")*+"|[^"%b]*+)' % mark
        object.__setattr__(self, "_well_quoted", re.compile(rb"%b(?:%b%b)*+" % (one, mark, one)))
        object.__setattr__(
            self, "_tails", [f"{tail:0{_DIGITS}d}{self.delimiter}".encode() for tail in range(_TAILS)]
        )

    @classmethod
    def read(cls, file: IO[bytes], delimiter: str, columns: Sequence[str] | None) -> CsvFile:
        """Return the file, whose first line names its columns unless they are given.

        Raises:
            BadArgument: the file lacks this line, or the delimiter is not one ASCII character.
        """
        if len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n\\':
            raise BadArgument(
                f"{delimiter!r} can't separate the fields of a CSV file", hint="Give one character."
            )
        first = file.readline().removeprefix(_BOM)
        if columns is not None:
            return cls(names=list(columns), delimiter=delimiter, file=file, begun=first, first_line=1)
        if not first:
            raise BadArgument(
                f"{getattr(file, 'name', 'the file')} is empty",
                hint="The first line names the columns, unless --columns does.",
            )
        try:
            names = next(csv.reader([first.decode()], delimiter=delimiter), [])
        except (csv.Error, UnicodeDecodeError):
            names = []
        if not (names and all(names)):
            raise BadArgument(
                "the first line does not name the columns", hint="If it is a row, give --columns."
            )
        return cls(names=names, delimiter=delimiter, file=file, begun=b"", first_line=2)

    def batches(self, places: Sequence[int]) -> Iterator[Batch]:
        """Yield all records, with the fields at these places.

        Empty lines are no records, except in a file of one column, where they are NULL.
        """
        line, begun = self.first_line, self.begun
        while data := begun + self.file.read(_READ):
            data, begun = data + self.file.readline(), b""
            batch = self._plain(data, line, places)
            if batch is not None:
                line += data.count(b"\n")
            else:
                batch, line = self._quoted(data, line, places)
            yield batch

    def _plain(self, data: bytes, line: int, places: Sequence[int]) -> Batch | None:
        """Return the records of whole lines, or None unless each line is one, and has all fields."""
        if b'"' in data:
            return None
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
            if b"\r" in data:
                return None
        data = data.removesuffix(b"\n")
        records = data.split(b"\n")
        count, width, mark = len(records), len(self.names), self.delimiter.encode()
        # Without quotes, each delimiter ends a field. The ends of the lines become fields of their own, which
        # no other field equals: if all have their places, each line has as many fields as there are names.
        marked = data.replace(b"\n", mark + b"\n" + mark)
        fields = marked.split(mark)
        if len(fields) != count * (width + 1) - 1 or fields[width :: width + 1].count(b"\n") != count - 1:
            return None
        columns: list[Sequence[Any]] = [fields[place :: width + 1] for place in places]
        if mark * 2 in marked or marked.startswith(mark) or marked.endswith(mark) or not marked:
            # A field is empty, in one of the columns.
            columns = [[field or None for field in column] if b"" in column else column for column in columns]
        return Batch(records=records, lines=range(line, line + count), columns=columns)

    def _quoted(self, data: bytes, line: int, places: Sequence[int]) -> tuple[Batch, int]:
        """Return the records that begin in whole lines, one by one, and the line after them."""
        records: list[bytes] = []
        lines: list[int] = []
        rows: list[list[bytes | None]] = []
        unread: list[tuple[int, bytes, str]] = []
        taken: list[bytes] = []

        def texts() -> Iterator[str]:
            # A record may end in a line that has not been read yet.
            for each in chain(BytesIO(data), iter(self.file.readline, b"")):
                taken.append(each)
                yield each.decode("utf-8", errors="surrogateescape")

        end = line + data.count(b"\n") + (not data.endswith(b"\n"))
        reader = csv.reader(texts(), delimiter=self.delimiter, strict=True)
        while line < end:
            taken.clear()
            try:
                found: list[str] | str = next(reader)
            except csv.Error as error:
                found = str(error)
            record = b"".join(taken).rstrip(b"\r\n")
            began, line = line, line + len(taken)
            if found or len(self.names) == 1:
                try:
                    rows.append(self._picked(record, found or [""], places))
                except BadArgument as error:
                    unread.append((began, record, error.message))
                else:
                    records.append(record)
                    lines.append(began)
        columns = [[row[at] for row in rows] for at in range(len(places))]
        return Batch(records=records, lines=lines, columns=columns, unread=unread), line

    def _picked(self, record: bytes, fields: list[str] | str, places: Sequence[int]) -> list[bytes | None]:
        """Return the fields at these places.

        Raises:
            BadArgument: the csv module refuses the record or reads it otherwise than PostgreSQL, or it ends
                before.
        """
        if isinstance(fields, str):
            raise BadArgument(f"the record is not CSV: {fields}")
        if any('"' in text for text in fields) and not self._well_quoted.fullmatch(record):
            raise BadArgument("a quote stands within a field that does not begin with one")
        if len(fields) <= max(places, default=-1):
            raise BadArgument("the record ends before the field that determines its shard")
        found = [fields[place].encode("utf-8", errors="surrogateescape") for place in places]
        if all(found):
            return [*found]
        # With its quotes doubled, a field that is empty and quoted is not empty.
        text = record.decode("utf-8", errors="surrogateescape").replace('""', '""""')
        doubled = next(csv.reader(StringIO(text, newline=""), delimiter=self.delimiter), [""])
        return [
            None if not (field or doubled[place]) else field
            for place, field in zip(places, found, strict=True)
        ]

    @staticmethod
    def values(fields: Sequence[bytes], kind: type | None) -> list[Any]:
        """Return the values of fields; a kind of ``None`` is an ID.

        Raises:
            BadArgument: one is not of that kind.
        """
        if (kind is None or kind is int) and _USUAL_INTEGERS.issuperset(b"".join(fields)):
            # All that int() takes of these characters are integers to PostgreSQL, too.
            with suppress(ValueError):
                return list(map(int, fields))
        return [_value(field, kind) for field in fields]

    def options(self) -> sql.Composable:
        """Return what follows COPY … FROM STDIN."""
        return sql.SQL("(FORMAT csv, DELIMITER {})").format(sql.Literal(self.delimiter))

    def write(self, copy: Copy, ids: Iterable[range] | None, records: Sequence[Record]) -> None:
        """Send records, each after its ID."""
        if ids is None:
            # As a line of its own it would end the data.
            copy.write(
                b"".join(b'"\\."\n' if record == _END_OF_DATA else record + b"\n" for record in records)
            )
            return
        # The first digits are those of thousands of IDs, and there are few of the last ones: so no ID is
        # formatted by itself, and no record is copied but by the one call that joins all.
        heads: list[bytes] = []
        tails: list[bytes] = []
        for run in ids:
            if run.start < _TAILS:
                heads += [b"\n"] * len(run)
                tails += [b"%d" % id_ + self.delimiter.encode() for id_ in run]
                continue
            first = run.start
            while first < run.stop:
                head, tail = divmod(first, _TAILS)
                count = min(run.stop - first, _TAILS - tail)
                heads += [b"\n%d" % head] * count
                tails += self._tails[tail : tail + count]
                first += count
        pieces = [b""] * (3 * len(records))
        pieces[::3], pieces[1::3], pieces[2::3] = heads, tails, records
        pieces[0] = pieces[0][1:]
        pieces.append(b"\n")
        copy.write(b"".join(pieces))

    @staticmethod
    def place_of_line(records: Sequence[Record], line: int) -> int:
        """Return the place of the record with a line; PostgreSQL counts those in quotes too."""
        return bisect_left(list(accumulate(1 + record.count(b"\n") for record in records)), line)

    @staticmethod
    def shown(record: Record) -> str:
        """Return a record as text, for people."""
        return record.decode("utf-8", errors="backslashreplace")


def _value(field: bytes, kind: type | None) -> Any:
    try:
        text = field.decode()
    except UnicodeDecodeError:
        raise BadArgument(f"{CsvFile.shown(field)} is not UTF-8") from None
    if kind is None or kind is int:
        if not _INTEGER.fullmatch(text):
            raise BadArgument(f"{text!r} is not an integer")
        try:
            return int(text)
        except ValueError as error:  # It has thousands of digits.
            raise BadArgument(str(error)) from None
    if kind is bytes:
        if not _BYTES.fullmatch(text):
            raise BadArgument(f"{text!r} is not bytes in hexadecimal form")
        return bytes.fromhex(text[2:])
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetFile:
    """A Parquet file; its rows are read a few thousand at a time."""

    names: Sequence[str]
    file: Any

    @classmethod
    def read(cls, file: IO[bytes]) -> ParquetFile:
        """Return the file.

        Raises:
            BadArgument: it is not a Parquet file.
            MissingLibrary: pyarrow is not installed.
        """
        try:
            library: Any = importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise MissingLibrary(
                "pyarrow, which reads Parquet files, is not installed",
                hint="Install it with: pip install pyarrow",
            ) from error
        try:
            found = library.ParquetFile(file)
        except (ValueError, OSError) as error:
            raise BadArgument(f"{file.name}: not a Parquet file: {error}") from None
        return cls(names=list(found.schema_arrow.names), file=found)

    def batches(self, places: Sequence[int]) -> Iterator[Batch]:
        """Yield all rows, with the values at these places."""
        first = 1
        for rows in of_batches(self.file.iter_batches()):
            lines = range(first, first + len(rows))
            yield Batch(records=rows, lines=lines, columns=[[row[place] for row in rows] for place in places])
            first = lines.stop

    @staticmethod
    def values(values: Sequence[Any], _kind: type | None) -> Sequence[Any]:
        """Return the values of fields, which have their kind already."""
        return values

    def options(self) -> sql.Composable:
        """Return what follows COPY … FROM STDIN."""
        return sql.SQL("")

    def write(self, copy: Copy, ids: Iterable[range] | None, records: Sequence[Row]) -> None:
        """Send rows, each after its ID."""
        rows: Iterable[Row] = records
        if ids is not None:
            rows = ((id_, *row) for id_, row in zip(chain.from_iterable(ids), records, strict=True))
        for row in rows:
            copy.write_row(row)

    @staticmethod
    def place_of_line(_records: Sequence[Row], line: int) -> int:
        """Return the place of the row with a line that PostgreSQL counted."""
        return line - 1

    @staticmethod
    def shown(record: Row) -> str:
        """Return a row as text, for people."""
        return repr(record)
