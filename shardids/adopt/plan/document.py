"""A plan of an adoption, and its file: TOML with comments that say why, for people to review and change."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

import tomlkit

from shardids.errors import BadArgument


class Kind(StrEnum):
    """How the rows of a table find their shards.

    Attributes:
        ROOT: by their own primary key, which is the sharding key of the others.
        DIRECT: by a column of theirs that holds the root's key.
        DERIVED: by foreign keys that lead to a table that holds the root's key.
        REFERENCE: not at all: every node gets all rows.
        LOOSE: not at all: nothing leads to the root, and the table stays at the source.
    """

    ROOT = "root"
    DIRECT = "direct"
    DERIVED = "derived"
    REFERENCE = "reference"
    LOOSE = "loose"

    @property
    def is_split(self) -> bool:
        """Returns whether its rows are split over the shards."""
        return self in (Kind.ROOT, Kind.DIRECT, Kind.DERIVED)


class OldIds(StrEnum):
    """How the shard of an ID that was issued before the adoption is found.

    Attributes:
        KEY: the ID is the sharding key itself.
        DIRECTORY: by a list of IDs and shards in the catalog.
        FAN_OUT: by asking every shard.
    """

    KEY = "key"
    DIRECTORY = "directory"
    FAN_OUT = "fan-out"


STAYS: Final = "source"
"""Where rows without a key are left, if no shard takes them."""
_UNOWNED: Final = re.compile(rf"{STAYS}|shard (0|[1-9][0-9]{{0,4}})")


class Severity(StrEnum):
    """The weight of a finding for the adoption.

    Attributes:
        BLOCKS: it can't be run.
        TO_CONFIRM: a guess, which blocks until the plan's file no longer calls it one.
        NOT_KEPT: the cluster will not have something that the source has.
        NOTE: something is to be known.
    """

    BLOCKS = "blocks"
    TO_CONFIRM = "to confirm"
    NOT_KEPT = "not kept"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """A foreign key on the way to the root's key: ``columns`` refer to ``referenced`` of ``table``."""

    columns: tuple[str, ...]
    table: str
    referenced: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlan:
    """What becomes of one table.

    Names of tables are quoted where SQL needs it; names of columns are bare, as in ``pg_attribute``.

    Attributes:
        name: the table with its schema, both quoted where SQL needs it: ``public.users``.
        kind: how its rows find their shards.
        key: the column that holds the sharding key; of a DERIVED table, that of the last hop's table.
        path: the foreign keys to follow to the table that holds the key (DERIVED).
        is_guess: the path or the key is a guess by names: such a plan is not run until this line is gone.
        unowned: where rows go whose key is NULL: ``source``, where they stay, or ``shard 5``; None: there are
            none, since the key is NOT NULL.
        id: the primary key's column, if it is one of an integer type or uuid. In the shards an integer key is
            bigint, whatever it is at the source.
        old_ids: how an ID that was issued before finds its shard; None for tables that are not split.
        rows: estimated number of rows.
        size_bytes: size of the table with its indexes.
    """

    name: str
    kind: Kind
    key: str | None = None
    path: tuple[Hop, ...] = ()
    is_guess: bool = False
    unowned: str | None = None
    id: str | None = None
    old_ids: OldIds | None = None
    rows: int = 0
    size_bytes: int = 0

    @property
    def unowned_shard(self) -> int | None:
        """Returns the shard of rows whose key is NULL, if they go to one."""
        found = _UNOWNED.fullmatch(self.unowned or "")
        return int(found[1]) if found and found[1] else None

    @property
    def root_key(self) -> str | None:
        """Returns the key's column, if the table is the root."""
        return self.key if self.kind is Kind.ROOT else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that the plan's reader has to know, with what to do about it."""

    severity: Severity
    subject: str
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A reviewed plan: what ``shardids adopt plan`` writes and ``shardids adopt run`` reads.

    Attributes:
        source: the source's URL without its password.
        server_version: ``server_version_num`` of the source.
        root: the root table's name.
        shard_count: into how many shards the rows are split; the cluster has as many.
        tables: every table, parents before children.
        findings: a plan with one that blocks is not run.
        via: the URL of the relay, without its password; None if the run is to name it.
    """

    source: str
    server_version: int
    root: str
    shard_count: int
    tables: tuple[TablePlan, ...]
    findings: tuple[Finding, ...] = ()
    via: str | None = None

    @property
    def copied_bytes(self) -> int:
        """Returns the size at the source of the tables whose rows are copied."""
        return sum(table.size_bytes for table in self.tables if table.kind is not Kind.LOOSE)

    @property
    def relay_bytes(self) -> dict[str, int]:
        """Returns how much of the relay's disk each table needs at most, by the size at the source.

        Rows of derived tables are written once more when they get their shards.
        """
        return {
            table.name: table.size_bytes * (2 if table.kind is Kind.DERIVED else 1)
            for table in self.tables
            if table.kind is not Kind.LOOSE
        }

    def is_blocked_by(self, finding: Finding) -> bool:
        """Return whether a finding keeps the plan from being run."""
        if finding.severity is Severity.TO_CONFIRM:
            return any(table.is_guess and table.name == finding.subject for table in self.tables)
        return finding.severity is Severity.BLOCKS


FORMAT = 1
"""The version of the file's format, which its first line gives."""

_NO_COMMENTS: Mapping[str, Sequence[str]] = MappingProxyType({})
_HEAD = (
    "What shardids adopt is to do. Review it, and change it where you know better; then:",
    "    shardids adopt run THIS-FILE",
)
_ABOUT = {
    "via": "The relay: an empty database that follows the source, and that the nodes follow.",
    "shard_count": "Keys move to other shards when this changes: the cluster has to have as many.",
    "finding": "A plan with a finding that blocks is not run.",
}

_FINDING = tuple(field.name for field in fields(Finding))
_HOP = tuple(field.name for field in fields(Hop))

Record = TypeVar("Record", bound="Plan | TablePlan | Hop | Finding")
_IN_FILE: Final = {"tables": "table", "findings": "finding"}
"""The file's names for fields of a plan."""


def write_plan(
    plan: Plan, path: Path, *, comments: Mapping[str, Sequence[str]] = _NO_COMMENTS, force: bool = False
) -> None:
    """Write a plan to a file, whole or not at all.

    ``comments``: lines to write above a table, by its name; by ``""`` those above everything else.

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
    """Check that a file is not there, before the work whose result it is to hold.

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
    """Return the text of a plan's file."""
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
    for name in ("name", "kind", "key", "unowned", "id", "old_ids", "rows", "size_bytes"):
        if (value := getattr(table, name)) is not None:
            yield _line(name, value)
    if table.is_guess:
        yield "is_guess = true"
    if table.path:
        hops = (", ".join(_line(name, getattr(hop, name)) for name in _HOP) for hop in table.path)
        yield "path = [\n" + "".join(f"    {{{hop}}},\n" for hop in hops) + "]"


def _line(name: str, value: object) -> str:
    """Return a key with its value, which tomlkit writes: names can hold anything."""
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
    """Return a line that can't end the comment that it stands in, whatever names are in it."""
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)


def read_plan(path: Path) -> Plan:
    """Read a plan's file, as :func:`write_plan` has written it or a person has changed it.

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
    """Read the text of a plan's file; errors call it ``file``. Raises as :func:`read_plan` does."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadArgument(f"{file} is not TOML: {error}") from None
    return _Reader(file).plan(document)


class _Reader:
    """Turns the text of a file into a plan; errors name the file and the place in it."""

    def __init__(self, file: str) -> None:
        self._file = file

    def plan(self, document: dict[str, Any]) -> Plan:
        if (version := document.pop("format", None)) != FORMAT:
            raise self._error("", f"format is {version!r}; this version of shardids reads {FORMAT}")
        return self._record(Plan, document, "")

    def _record(self, kind: type[Record], entry: object, where: str) -> Record:
        """Read a dataclass: each field by its type."""
        if not isinstance(entry, dict):
            raise self._error(where, f"{entry!r} is not a table of TOML")
        known = {_IN_FILE.get(field.name, field.name): field for field in fields(kind)}
        if unknown := sorted(entry.keys() - known.keys()):
            raise self._error(where, f"{', '.join(unknown)} is not known; known are {', '.join(known)}")
        if kind is TablePlan:
            where = f"table {self._value(str, entry.get('name'), 'name', where)}"
        types = get_type_hints(kind)
        record = kind(
            **{
                field.name: self._value(types[field.name], entry.get(name), name, where)
                for name, field in known.items()
                if name in entry or field.default is MISSING
            }
        )
        if isinstance(record, TablePlan) and not _UNOWNED.fullmatch(record.unowned or STAYS):
            raise self._error(where, f"unowned is {record.unowned!r}; it is {STAYS!r} or 'shard 5'")
        if isinstance(record, Hop) and not 0 < len(record.columns) == len(record.referenced):
            raise self._error(where, "columns and referenced are not as many")
        return record

    def _value(self, kind: Any, value: Any, name: str, where: str) -> Any:
        """Read the value of a field, of one of the types that plans have."""
        if get_origin(kind) is tuple:
            return self._several(get_args(kind)[0], value, name, where)
        kind = next(iter(get_args(kind)), kind)  # Of an optional field the type that is not None.
        if kind is bool:
            if not isinstance(value, bool):
                raise self._error(where, f"{name} is {value!r}; it has to be true or false")
            return value
        if kind is int:
            least = 1 if name == "shard_count" else 0
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise self._error(where, f"{name} is {value!r}; it has to be an integer from {least}")
            return value
        if not isinstance(value, str):
            raise self._error(where, f"{name} is {value!r}; it has to be a string")
        try:
            return kind(value)
        except ValueError:
            raise self._error(where, f"{name} is {value!r}; it is one of {', '.join(kind)}") from None

    def _several(self, kind: type, value: Any, name: str, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list | None):
            raise self._error(where, f"{name} is not an array")
        if kind is str:
            if not all(isinstance(one, str) for one in value or ()):
                raise self._error(where, f"{name} is {value!r}; it has to be an array of strings")
            return tuple(value or ())
        return tuple(
            self._record(kind, one, f"{where}, {name}" if where else f"{name} {number}")
            for number, one in enumerate(value or (), 1)
        )

    def _error(self, where: str, problem: str) -> BadArgument:
        place = f"{self._file}, {where}" if where else self._file
        return BadArgument(f"{place}: {problem}", hint="To write it again: shardids adopt plan")
