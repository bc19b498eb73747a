"""What a writer knows to be committed, fsynced before it goes on; what must therefore be in the tables."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

End = Literal["ok", "no", "maybe"]
Table = Literal["entries", "parts", "loads"]
Key = tuple[int, Table, int]
"""Shard, table and ID of a row."""


@dataclass(slots=True)
class Tried:
    """What one attempt at a transaction has done: rows made, values added to rows, rows deleted."""

    made: list[tuple[Table, int, int]] = field(default_factory=list)
    added: list[tuple[int, int]] = field(default_factory=list)
    gone: list[tuple[Table, int]] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)
    """IDs that were issued to it and are in no row of ``made``."""


class Record:
    """A file of what a writer tried and how that ended; an end counts once it is on the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def tried(self, operation: int, shard: int, tried: Tried) -> None:
        done = [tried.made, tried.added, tried.gone, tried.drawn]
        self._write(["try", operation, shard, *done])

    def ended(self, operation: int, end: End) -> None:
        self._write([end, operation])
        os.fdatasync(self._file)

    def _write(self, entry: Sequence[Any]) -> None:
        os.write(self._file, json.dumps(entry).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


class Expected:
    """The values that each row may have, by the records; ``None`` is a row that is not there."""

    def __init__(self) -> None:
        self.rows: dict[Key, set[int | None]] = {}
        self.together: list[list[Key]] = []
        """Rows of one transaction whose COMMIT was not answered: all are there, or none."""
        self.ids: set[int] = set()
        self.twice: list[int] = []
        self.ends: dict[str, int] = {"ok": 0, "no": 0, "maybe": 0}
        self._read: dict[Path, int] = {}

    def read(self, paths: Iterable[Path]) -> None:
        """Takes in what was recorded since the last call, while nothing is under way."""
        for path in paths:
            begin = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(begin)
                lines = file.read()
            self._read[path] = begin + len(lines)
            for attempt, end in _operations(json.loads(line) for line in lines.splitlines()):
                self._take(attempt, end)

    def _take(self, attempt: Sequence[Any], end: End) -> None:
        _, _, shard, made, added, gone, drawn = attempt
        for id_ in [*drawn, *(id_ for _, id_, _ in made)]:
            if id_ in self.ids:
                self.twice.append(id_)
            self.ids.add(id_)
        self.ends[end] += 1
        if end == "no":
            return
        keys: list[Key] = [(shard, table, id_) for table, id_, _ in made]
        if end == "maybe" and keys:
            self.together.append(keys)
        for key, (_, _, value) in zip(keys, made, strict=True):
            self.rows[key] = {value} | ({None} if end == "maybe" else set())
        for id_, more in added:
            self._change((shard, "entries", id_), end, lambda value, more=more: value and value + more)
        for table, id_ in gone:
            self._change((shard, table, id_), end, lambda _value: None)

    def _change(self, key: Key, end: End, change: Callable[[int | None], int | None]) -> None:
        before = self.rows[key]
        self.rows[key] = {change(value) for value in before} | (before if end == "maybe" else set())

    def faults(self, actual: Mapping[Key, int]) -> list[str]:
        """What is not in the tables as it was acknowledged."""
        faults = [f"ID {id_} was issued twice" for id_ in self.twice]
        for key, allowed in self.rows.items():
            if (value := actual.get(key)) not in allowed:
                what = "is lost" if value is None else f"has the value {value}"
                faults.append(f"{_shown(key)} {what}; acknowledged: {allowed}")
        faults += [f"{_shown(key)} is there, and nobody made it" for key in actual.keys() - self.rows.keys()]
        for keys in self.together:
            there = [key in actual for key in keys]
            if any(there) and not all(there):
                faults.append(f"half of a transaction is there: {_shown(keys[0])}")
        return faults

    def settle(self, actual: Mapping[Key, int]) -> None:
        """Takes what is there for what was uncertain: it can't change any more."""
        for keys in self.together:
            for key in keys:
                self.rows[key] &= {actual.get(key)}
        self.together.clear()
        for key in [key for key, allowed in self.rows.items() if len(allowed) > 1]:
            self.rows[key] = {actual.get(key)}
        for key in [key for key, allowed in self.rows.items() if allowed == {None}]:
            del self.rows[key]


def _shown(key: Key) -> str:
    shard, table, id_ = key
    return f"shard {shard}: {table} {id_}"


def _operations(entries: Iterable[Sequence[Any]]) -> Iterator[tuple[Sequence[Any], End]]:
    """Each attempt and its end: of an operation's attempts only the last can have been committed."""
    last: dict[int, Sequence[Any]] = {}
    for entry in entries:
        kind, operation = entry[0], entry[1]
        if kind == "try":
            if operation in last:
                yield last[operation], "no"
            last[operation] = entry
        elif operation in last:
            yield last.pop(operation), kind
    for attempt in last.values():
        yield attempt, "maybe"
