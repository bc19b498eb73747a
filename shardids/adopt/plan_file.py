"""The plan as a file: TOML, with comments that say why, for people to review and change."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import tomlkit

from shardids.adopt.plan import Finding, Hop, Kind, OldIds, Plan, Severity, TablePlan
from shardids.errors import BadArgument

FORMAT = 1
"""The version of the file's format, which its first line gives."""

_NO_COMMENTS: Mapping[str, Sequence[str]] = MappingProxyType({})
_HEAD = (
    "What shardids adopt is to do. Review it, and change it where you know better; then:",
    "    shardids adopt run THIS-FILE",
)
_ABOUT = {
    "via": "The relay: a database between the source and the nodes.",
    "shard_count": "Keys move to other shards when this changes: the cluster has to have as many.",
    "finding": "What was found. A plan with a finding that blocks is not run.",
}

_FINDING = tuple(field.name for field in fields(Finding))
_HOP = tuple(field.name for field in fields(Hop))

Member = TypeVar("Member", bound=StrEnum)


def write_plan(
    plan: Plan, path: Path, *, comments: Mapping[str, Sequence[str]] = _NO_COMMENTS, force: bool = False
) -> None:
    """Writes a plan to a file, whole or not at all.

    ``comments``: lines to write above a table, by its name, and above what is not of a table, by ``""``.

    Raises:
        BadArgument: the file exists and ``force`` is not set, or it can't be written.
    """
    text = plan_text(plan, comments)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            with new.open("x", encoding="utf-8", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if force:
                new.replace(path)
            else:
                # Fails if somebody has made the file meanwhile.
                path.hardlink_to(new)
        finally:
            new.unlink(missing_ok=True)
    except FileExistsError:
        raise _taken(path) from None
    except OSError as error:
        raise BadArgument(f"{path} can't be written: {error.strerror}") from None


def check_free(path: Path) -> None:
    """Checks that a file is not there, before the work whose result it is to hold.

    Raises:
        BadArgument: it is.
    """
    if path.exists():
        raise _taken(path)


def _taken(path: Path) -> BadArgument:
    return BadArgument(
        f"{path} exists already; nothing was written",
        hint="Give another file by --output, or --force to replace it.",
    )


def plan_text(plan: Plan, comments: Mapping[str, Sequence[str]] = _NO_COMMENTS) -> str:
    """Returns the text of a plan's file."""
    lines = [*map(_comment, (*_HEAD, "", *comments.get("", ()))), "", _line("format", FORMAT)]
    for name in ("source", "server_version", "via", "root", "shard_count"):
        if (value := getattr(plan, name)) is None:
            continue
        if name in _ABOUT:
            lines.append(_comment(_ABOUT[name]))
        lines.append(_line(name, value))
    for table in plan.tables:
        lines += ["", "[[table]]", *map(_comment, comments.get(table.name, ())), *_table_lines(table)]
    if plan.findings:
        lines += ["", _comment(_ABOUT["finding"])]
    for finding in plan.findings:
        lines += ["", "[[finding]]", *(_line(name, getattr(finding, name)) for name in _FINDING)]
    return "\n".join([*lines, ""])


def _table_lines(table: TablePlan) -> Iterator[str]:
    for name in ("name", "kind", "key", "id", "old_ids", "rows", "size_bytes"):
        if (value := getattr(table, name)) is not None:
            yield _line(name, value)
    if table.path:
        hops = (", ".join(_line(name, getattr(hop, name)) for name in _HOP) for hop in table.path)
        yield "path = [\n" + "".join(f"    {{{hop}}},\n" for hop in hops) + "]"


def _line(name: str, value: object) -> str:
    """Returns a key with its value, which tomlkit writes: names can hold anything."""
    if isinstance(value, tuple):
        return f"{name} = [{', '.join(map(_value, value))}]"
    return f"{name} = {_value(value)}"


_PLAIN: Final = re.compile(r"[A-Za-z0-9_ .,:;()-]*")


def _value(value: object) -> str:
    # Of thousands of tables tomlkit takes seconds.
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return f'"{value}"'
    return tomlkit.item(str(value) if isinstance(value, StrEnum) else value).as_string()


def _comment(line: str) -> str:
    return f"# {_shown(line)}".rstrip()


def _shown(line: str) -> str:
    """Returns a line that can't end the comment that it stands in, whatever names are in it."""
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)


def read_plan(path: Path) -> Plan:
    """Reads a plan's file, as :func:`write_plan` has written it or a person has changed it.

    Raises:
        BadArgument: it can't be read, is not TOML, or says what no plan says; the message names the place.
    """
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise BadArgument(f"{path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BadArgument(f"{path} is not TOML: {error}") from None
    return parse_plan(text, str(path))


def parse_plan(text: str, file: str) -> Plan:
    """Reads the text of a plan's file; errors call it ``file``. Raises as :func:`read_plan` does."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadArgument(f"{file} is not TOML: {error}") from None
    return _Reader(file).plan(document)


class _Reader:
    """Turns what a file says into a plan; errors name the file and the place in it."""

    def __init__(self, file: str) -> None:
        self._file = file

    def plan(self, document: dict[str, Any]) -> Plan:
        if (version := document.pop("format", None)) != FORMAT:
            raise self._error("", f"format is {version!r}; this version of shardids reads {FORMAT}")
        names = ["source", "server_version", "via", "root", "shard_count", "table", "finding"]
        values = self._known(document, "", names)
        tables = tuple(
            self._table(entry, f"table {number}")
            for number, entry in enumerate(self._array(values, "table", ""), 1)
        )
        return Plan(
            source=self._text(values, "source", ""),
            server_version=self._number(values, "server_version", "", least=0),
            root=self._text(values, "root", ""),
            shard_count=self._number(values, "shard_count", "", least=1),
            via=self._text(values, "via", "") if "via" in values else None,
            tables=tables,
            findings=tuple(
                self._finding(entry, f"finding {number}")
                for number, entry in enumerate(self._array(values, "finding", ""), 1)
            ),
        )

    def _table(self, entry: object, where: str) -> TablePlan:
        values = self._known(entry, where, [field.name for field in fields(TablePlan)])
        name = self._text(values, "name", where)
        where = f"table {name}"
        return TablePlan(
            name=name,
            kind=self._member(Kind, values, "kind", where),
            key=self._text(values, "key", where) if "key" in values else None,
            path=tuple(self._hop(hop, f"{where}, path") for hop in self._array(values, "path", where)),
            id=self._text(values, "id", where) if "id" in values else None,
            old_ids=self._member(OldIds, values, "old_ids", where) if "old_ids" in values else None,
            rows=self._number(values, "rows", where, least=0) if "rows" in values else 0,
            size_bytes=self._number(values, "size_bytes", where, least=0) if "size_bytes" in values else 0,
        )

    def _hop(self, entry: object, where: str) -> Hop:
        values = self._known(entry, where, _HOP)
        columns, referenced = self._texts(values, "columns", where), self._texts(values, "referenced", where)
        if not columns or len(columns) != len(referenced):
            raise self._error(where, "columns and referenced are not as many")
        return Hop(columns=columns, table=self._text(values, "table", where), referenced=referenced)

    def _finding(self, entry: object, where: str) -> Finding:
        values = self._known(entry, where, _FINDING)
        return Finding(
            severity=self._member(Severity, values, "severity", where),
            subject=self._text(values, "subject", where),
            reason=self._text(values, "reason", where),
            remedy=self._text(values, "remedy", where),
        )

    def _known(self, entry: object, where: str, names: Sequence[str]) -> dict[str, Any]:
        if not isinstance(entry, dict):
            raise self._error(where, f"{entry!r} is not a table of TOML")
        if unknown := sorted(set(entry) - set(names)):
            raise self._error(where, f"{', '.join(unknown)} is not known; known are {', '.join(names)}")
        return entry

    def _array(self, values: dict[str, Any], name: str, where: str) -> list[Any]:
        found = values.get(name, [])
        if not isinstance(found, list):
            raise self._error(where, f"{name} is not an array")
        return found

    def _text(self, values: dict[str, Any], name: str, where: str) -> str:
        if not isinstance(value := values.get(name), str):
            raise self._error(where, f"{name} is {value!r}; it has to be a string")
        return value

    def _texts(self, values: dict[str, Any], name: str, where: str) -> tuple[str, ...]:
        found = self._array(values, name, where)
        if not all(isinstance(value, str) for value in found):
            raise self._error(where, f"{name} is {found!r}; it has to be an array of strings")
        return tuple(found)

    def _number(self, values: dict[str, Any], name: str, where: str, *, least: int) -> int:
        value = values.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self._error(where, f"{name} is {value!r}; it has to be an integer from {least}")
        return value

    def _member(self, kind: type[Member], values: dict[str, Any], name: str, where: str) -> Member:
        text = self._text(values, name, where)
        try:
            return kind(text)
        except ValueError:
            raise self._error(where, f"{name} is {text!r}; it is one of {', '.join(kind)}") from None

    def _error(self, where: str, problem: str) -> BadArgument:
        place = f"{self._file}, {where}" if where else self._file
        return BadArgument(f"{place}: {problem}", hint="To write it again: shardids adopt plan")
