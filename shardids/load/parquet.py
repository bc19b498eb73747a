"""Parquet files, read by pyarrow."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from psycopg import Copy, sql

from shardids.client.copying.sources import Row, of_batches
from shardids.errors import BadArgument, MissingLibrary


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetFile:
    """A Parquet file; its rows are read a few thousand at a time."""

    names: Sequence[str]
    file: Any

    @classmethod
    def read(cls, file: IO[bytes]) -> ParquetFile:
        """Returns the file.

        Raises:
            BadArgument: it is none.
            MissingLibrary: pyarrow is not installed.
        """
        try:
            library: Any = importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise MissingLibrary(
                "pyarrow, which reads Parquet files, is not installed",
                hint='Install it with: pip install "shardids[arrow]"',
            ) from error
        try:
            found = library.ParquetFile(file)
        except (ValueError, OSError) as error:
            raise BadArgument(f"{file.name}: not a Parquet file: {error}") from None
        return cls(names=list(found.schema_arrow.names), file=found)

    def records(self) -> Iterator[tuple[int, Row]]:
        """Returns each row and its number."""
        rows = (row for chunk in of_batches(self.file.iter_batches()) for row in chunk)
        yield from enumerate(rows, 1)

    def picker(self, places: Sequence[int], _kinds: Sequence[type | None]) -> Any:
        """Returns what reads the values at these places."""
        return lambda row: tuple(row[place] for place in places)

    def options(self) -> sql.Composable:
        """Returns what follows COPY … FROM STDIN."""
        return sql.SQL("")

    def write(self, copy: Copy, ids: Sequence[int] | None, records: Sequence[Row]) -> None:
        """Sends rows, each after its ID."""
        rows = records if ids is None else ((id_, *row) for id_, row in zip(ids, records, strict=True))
        for row in rows:
            copy.write_row(row)

    @staticmethod
    def place_of_line(_records: Sequence[Row], line: int) -> int:
        """Returns the place of the row with a line that PostgreSQL counted."""
        return line - 1

    @staticmethod
    def shown(record: Row) -> str:
        """Returns a row as text, for people."""
        return repr(record)
