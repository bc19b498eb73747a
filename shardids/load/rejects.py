"""The records that were refused, in a CSV file: line, shard, number in the shard, reason, record."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import IO

from shardids.errors import BadArgument

_HEADER = ("line", "shard", "row", "reason", "record")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """A record that is not loaded.

    Attributes:
        line: its line in the file.
        shard: its shard; ``None`` if it has none.
        row: its number among the shard's rows of this load, from 1.
        reason: why.
        record: the record.
    """

    line: int
    shard: int | None
    row: int
    reason: str
    record: str


class Rejects:
    """The file, which is written before the transaction that counts them commits; threads may share it.

    What a run before this one wrote and did not commit is removed, and what has no shard, which is found
    again.
    """

    def __init__(self, path: Path, marks: Mapping[int, int], *, dry_run: bool) -> None:
        self.path, self._lock, self._dry_run = path, Lock(), dry_run
        self._file: IO[str] | None = None
        kept: list[list[str]] = []
        with suppress(FileNotFoundError), path.open(encoding="utf-8", newline="") as file:
            rows = csv.reader(file)
            if tuple(next(rows, _HEADER)) != _HEADER:
                raise BadArgument(
                    f"{path} is there, and holds no rejected records", hint="Name another file: --rejects"
                )
            kept = [row for row in rows if _is_committed(row, marks)]
        self._seen = {(int(row[1]), int(row[2])) for row in kept}
        self.count = len(kept)
        if kept:
            self._write(kept, durably=True)
        elif not dry_run:
            path.unlink(missing_ok=True)

    def add(self, rejects: Iterable[Reject]) -> None:
        """Writes rejects, those of shards to the disk; one that is there already is not repeated."""
        with self._lock:
            new = [each for each in rejects if each.shard is None or (each.shard, each.row) not in self._seen]
            if not new:
                return
            self._seen.update((each.shard, each.row) for each in new if each.shard is not None)
            self.count += len(new)
            rows = [
                [
                    str(each.line),
                    "" if each.shard is None else str(each.shard),
                    str(each.row),
                    each.reason,
                    each.record,
                ]
                for each in new
            ]
            self._write(rows, durably=any(each.shard is not None for each in new))

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def _write(self, rows: list[list[str]], *, durably: bool) -> None:
        if self._dry_run:
            return
        if self._file is None:
            self._file = self.path.open("w", encoding="utf-8", newline="")
            csv.writer(self._file).writerow(_HEADER)
        csv.writer(self._file).writerows(rows)
        self._file.flush()
        if durably:
            os.fsync(self._file.fileno())


def _is_committed(row: list[str], marks: Mapping[int, int]) -> bool:
    # The last line may be cut off.
    if len(row) != len(_HEADER) or not row[1].isdecimal() or not row[2].isdecimal():
        return False
    return int(row[2]) <= marks.get(int(row[1]), 0)
