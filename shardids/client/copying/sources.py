"""Readers that turn rows of any kind into tuples: mappings, tuples, polars frames, Arrow objects."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import itemgetter
from typing import Any, Final

from shardids.errors import BadArgument, MissingLibrary

Row = tuple[Any, ...]

CHUNK: Final = 2_000
"""How many rows are read at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSource:
    """Rows as tuples, in lists of up to :data:`CHUNK`, and the names of their columns."""

    names: Sequence[str]
    chunks: Iterator[list[Row]]


def read(rows: Any, columns: Sequence[Any] | None) -> RowSource:
    """Return the rows as tuples; read no more than the first one now.

    ``columns`` names the values of tuples that have no names themselves.

    Raises:
        BadArgument: they are of no known kind, or nothing or two things name their columns.
        MissingLibrary: they speak Arrow, and pyarrow is not installed.
    """
    # A class has these methods as well.
    if not isinstance(rows, type):
        if hasattr(rows, "iter_rows") and hasattr(rows, "columns"):
            _refuse_names(columns)
            return RowSource(names=list(rows.columns), chunks=_chunked(rows.iter_rows()))
        if hasattr(rows, "__arrow_c_stream__") or hasattr(rows, "__arrow_c_array__"):
            _refuse_names(columns)
            return _arrow(rows)
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        raise BadArgument(
            f"rows can't be read from a value of type {type(rows).__name__}",
            hint="Give an iterable of mappings or tuples, a polars DataFrame, or an Arrow table.",
        )
    return _iterable(iter(rows), columns)


def _iterable(rows: Iterator[Any], columns: Sequence[Any] | None) -> RowSource:
    first = next(rows, None)
    if first is None:
        return RowSource(names=list(columns or ()), chunks=iter(()))
    rows = chain([first], rows)
    if isinstance(first, Mapping):
        _refuse_names(columns)
        names = list(first)
        return RowSource(names=names, chunks=_of_mappings(rows, names))
    if not isinstance(first, Sequence) or isinstance(first, str | bytes):
        raise BadArgument(
            f"row 1 is of type {type(first).__name__}",
            hint="Give each row as a mapping, or as a tuple or list of values.",
        )
    fields = getattr(first, "_fields", None)
    if columns is None and fields is None:
        raise BadArgument(
            "the rows have no column names", hint='Give columns=("name", …), or rows that are mappings.'
        )
    named = list(fields or ()) if columns is None else list(columns)
    return RowSource(names=named, chunks=_of_tuples(rows, len(named)))


def _refuse_names(columns: Sequence[Any] | None) -> None:
    if columns is not None:
        raise BadArgument("columns= is only for rows without column names; these rows have names")


def _of_tuples(rows: Iterator[Any], width: int) -> Iterator[list[Row]]:
    number = 0
    for chunk in _chunked(rows):
        try:
            fits = {*map(len, chunk)} == {width}
        except TypeError:
            fits = False
        if not fits:
            at = next(n for n, row in enumerate(chunk, number + 1) if not _is_row(row) or len(row) != width)
            raise BadArgument(f"row {at} does not have {width} values, as the first row or columns= has")
        number += len(chunk)
        yield chunk


def _is_row(row: Any) -> bool:
    return isinstance(row, Sequence) and not isinstance(row, str | bytes)


def _of_mappings(rows: Iterator[Any], names: Sequence[str]) -> Iterator[list[Row]]:
    if not names:
        raise BadArgument("row 1 is empty", hint="A row has at least one column.")
    pick: Any = itemgetter(*names)
    number = 0
    for chunk in _chunked(rows):
        try:
            # An itemgetter of one name returns no tuple.
            tuples = list(map(pick, chunk)) if len(names) > 1 else [(pick(row),) for row in chunk]
            fits = {*map(len, chunk)} == {len(names)}
        except (KeyError, TypeError, IndexError):
            fits = False
        if not fits:
            wanted = set(names)
            at = next(
                n
                for n, row in enumerate(chunk, number + 1)
                if not isinstance(row, Mapping) or set(row) != wanted
            )
            raise BadArgument(
                f"row {at} does not have the columns of the first one: {', '.join(map(str, names))}",
                hint="Give all rows the same columns, with None for a missing value.",
            )
        number += len(chunk)
        yield tuples


def _arrow(rows: Any) -> RowSource:
    try:
        pyarrow: Any = importlib.import_module("pyarrow")
    except ImportError as error:
        raise MissingLibrary(
            "pyarrow, which reads Arrow tables, is not installed",
            hint="Install it with: pip install pyarrow",
        ) from error
    if hasattr(rows, "__arrow_c_stream__"):
        reader = pyarrow.RecordBatchReader.from_stream(rows)
        return RowSource(names=list(reader.schema.names), chunks=of_batches(reader))
    batch = pyarrow.record_batch(rows)
    return RowSource(names=list(batch.schema.names), chunks=of_batches([batch]))


def of_batches(batches: Iterable[Any]) -> Iterator[list[Row]]:
    """Yield the rows of Arrow's record batches."""
    for batch in batches:
        for start in range(0, batch.num_rows, CHUNK):
            part = batch.slice(start, CHUNK)
            yield list(zip(*(column.to_pylist() for column in part.columns), strict=True))


def _chunked(rows: Iterator[Any]) -> Iterator[list[Any]]:
    while chunk := list(islice(rows, CHUNK)):
        yield chunk
