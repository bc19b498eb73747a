"""IDs read from text or a query, a million in a fraction of a second, with all lines that are not IDs."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from tempfile import TemporaryFile
from typing import IO, Final, Protocol

import numpy as np
import numpy.typing as npt
import psycopg
from psycopg import sql
from sqlalchemy.pool import NullPool

from shardids.errors import BadArgument, ShardidsError
from shardids.ids.layout import Layout
from shardids.ids.text import parse_id
from shardids.pg.connections import CONNECT_TIMEOUT_S, open_engine
from shardids.pg.statement_log import logged_copy
from shardids.pg.urls import parse_url

_PIECE: Final = 1 << 24
# 18 digits can't overflow. Longer ones are read one by one.
_PLAIN: Final = re.compile(rb"(?:-?[0-9]{1,18}\n)*+")
_BOM: Final = b"\xef\xbb\xbf"
_NULL: Final = r"\N"
"""What COPY writes for it."""

Ids = npt.NDArray[np.int64]


class _Rows(Protocol):
    line_num: int

    def __iter__(self) -> Iterator[list[str]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    """A line that is not an ID: its number, from 1, and its fault."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadIds:
    """IDs in their signed reading, in the order of the lines; the line of each; and the lines that are no
    ID."""

    ids: Ids
    lines: Ids
    bad: list[BadLine]


def read_ids(file: IO[bytes], *, column: str | None = None, delimiter: str = ",") -> ReadIds:
    """Read IDs, one per line, or a column of a CSV file whose first line names its columns.

    An ID is written in any form that :func:`shardids.ids.parse_id` reads. Empty lines are skipped.

    Raises:
        BadArgument: the column does not exist, the delimiter is not one character, the file is not CSV, or
            has a line of over 16 MB: then it is not a file of IDs.
    """
    return _from_column(file, column, delimiter) if column is not None else _from_lines(file)


def foreign(ids: Ids, layout: Layout) -> npt.NDArray[np.bool_]:
    """Return which IDs the layout can't hold."""
    bits = ids.view(np.uint64)
    if layout.id_bits == 64:
        return np.zeros(ids.shape, np.bool_)
    return np.asarray(bits >> np.uint64(layout.id_bits) != 0)


def _from_lines(file: IO[bytes]) -> ReadIds:
    parts: list[Ids] = []
    numbers: list[Ids] = []
    bad: list[BadLine] = []
    before = 0
    for piece in _pieces(file):
        if not piece:
            raise BadArgument(f"line {before + 1:,} has over {_PIECE:,} bytes: this is not a file of IDs")
        count = piece.count(b"\n")
        if _PLAIN.fullmatch(piece):
            parts.append(np.fromstring(piece, np.int64, sep="\n"))
            numbers.append(np.arange(before + 1, before + 1 + count))
        else:
            texts = piece.decode("utf-8", "replace").split("\n")
            ids, lines = _one_by_one(
                ((at, one) for at, one in enumerate(texts, before + 1) if one.strip()), bad
            )
            parts.append(ids)
            numbers.append(lines)
        before += count
    return ReadIds(ids=_joined(parts), lines=_joined(numbers), bad=bad)


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    """Whole lines, each with a line feed as its end; nothing where a line is longer than a piece."""
    rest = file.read(len(_BOM)).removeprefix(_BOM)
    while read := file.read(_PIECE):
        whole, feed, rest = (rest + read).rpartition(b"\n")
        if feed:
            yield whole.replace(b"\r\n", b"\n").removesuffix(b"\r") + feed
        if len(rest) > _PIECE:
            yield b""
    if rest:
        yield rest.removesuffix(b"\r").removesuffix(b"\n") + b"\n"


def _from_column(file: IO[bytes], column: str, delimiter: str) -> ReadIds:
    if len(delimiter) != 1 or delimiter in '"\r\n':
        raise BadArgument(
            f"{delimiter!r} can't separate the fields of a CSV file", hint="Give one character."
        )
    text = TextIOWrapper(file, encoding="utf-8-sig", errors="replace", newline="")
    # Of the whole process.
    limit_before = csv.field_size_limit(_PIECE)
    # strict: otherwise a quote that is not closed takes all lines to the end.
    rows = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        names = next(rows, [])
        if names.count(column) != 1:
            there = ", ".join(names) or "none"
            raise BadArgument(
                f"the first line does not name one column {column!r}", hint=f"Its columns: {there}."
            )
        place = names.index(column)
        bad: list[BadLine] = []
        ids, lines = _one_by_one(_fields(rows, place, bad), bad)
        return ReadIds(ids=ids, bad=sorted(bad, key=lambda one: one.line), lines=lines)
    except csv.Error as error:
        raise BadArgument(f"line {rows.line_num:,} is not CSV: {error}") from None
    finally:
        csv.field_size_limit(limit_before)
        text.detach()


def _fields(rows: _Rows, place: int, bad: list[BadLine]) -> Iterator[tuple[int, str]]:
    for row in rows:
        if not row:
            continue
        if place < len(row):
            yield rows.line_num, row[place]
        else:
            bad.append(BadLine(line=rows.line_num, reason="the line ends before the column"))


def _one_by_one(lines: Iterable[tuple[int, str]], bad: list[BadLine]) -> tuple[Ids, Ids]:
    ids: list[int] = []
    numbers: list[int] = []
    for number, line in lines:
        if line.strip() == _NULL:
            bad.append(BadLine(line=number, reason="NULL is no ID"))
            continue
        try:
            ids.append(parse_id(line))
            numbers.append(number)
        except BadArgument as error:
            bad.append(BadLine(line=number, reason=error.message))
    return np.array(ids, np.int64), np.array(numbers, np.int64)


def _joined(parts: list[Ids]) -> Ids:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


@contextmanager
def answer(url: str, query: str) -> Iterator[IO[bytes]]:
    """Yield a file with the rows of a query, one per line, as COPY writes them. The query may only read.

    Raises:
        BadArgument: the URL is not one of PostgreSQL, or the query is empty or has not one column.
        ShardidsError: the database can't be reached, or refuses the query.
    """
    if not query.rstrip().removesuffix(";").strip():
        raise BadArgument("the query is empty", hint="For example: select id from shard_0005.photos")
    engine = open_engine(
        parse_url(url), what="the database", connect_timeout_s=CONNECT_TIMEOUT_S, poolclass=NullPool
    )
    # What the user wrote is the user's SQL, with the user's rights. The line feed ends a comment.
    copy = sql.SQL("copy ({}\n) to stdout").format(sql.SQL(query.rstrip().removesuffix(";")))
    with TemporaryFile() as file:
        try:
            with (
                engine.connect().execution_options(postgresql_readonly=True) as connection,
                logged_copy(connection, copy) as rows,
            ):
                columns = rows.cursor.pgresult.nfields if rows.cursor.pgresult else 1
                if columns != 1:
                    raise BadArgument(f"the query has {columns} columns", hint="Select only the IDs.")
                for row in rows:
                    file.write(row)
        except psycopg.Error as error:
            raise ShardidsError(
                f"the database refuses the query: {error.diag.message_primary or error}"
            ) from None
        file.seek(0)
        yield file
