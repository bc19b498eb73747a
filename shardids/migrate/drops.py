"""Tables and columns that revisions drop, and the rows that would be lost with them.

The SQL of a revision names most of them, so that a run can ask before it begins. A revision in Python, a
function or CASCADE names none: so each transaction that may drop something compares the shard's tables with
those before it, and is rolled back before its COMMIT. The rows are counted then, on all shards of the run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any, Final, Literal

from psycopg import sql
from sqlalchemy import Engine

from shardids.catalog.nodes import Nodes
from shardids.catalog.topology import Placement
from shardids.errors import RowsWouldBeLost
from shardids.pg.notation import counted, shown_shards
from shardids.pg.queries import read
from shardids.pg.reader import Refused, reading_as_reader

_HINTS: Final = {
    "up": "To drop them: --allow-drop. To keep the rows, take the drop out of the revision. Autogenerate"
    " drops each table that the models lack: look whether env.py imports every module with models.",
    "down": "To drop them: --allow-drop. To keep the rows, stay at the present revision.",
}
_ASIDE: Final = re.compile(
    r"(?P<body>(?P<dollar>\$(?:[A-Za-z_]\w*)?\$).*?(?P=dollar))|'(?:[^']|'')*'|--[^\n]*|/\*.*?\*/", re.DOTALL
)
"""Literals and comments; a body is a literal that may hold statements."""
NAME: Final = r'(?:"(?:[^"]|"")+"|[a-z_][\w$]*)'
"""An identifier in SQL."""
_DROP_TABLE: Final = re.compile(
    rf"drop\s+table\s+(?:if\s+exists\s+)?(?P<names>{NAME}(?:\s*,\s*{NAME})*)(?:\s+(?:cascade|restrict))?$",
    re.IGNORECASE,
)
_ALTER_TABLE: Final = re.compile(
    rf"alter\s+table\s+(?:if\s+exists\s+)?(?:only\s+)?(?P<table>{NAME})\s*\*?\s+(?P<actions>.*)$",
    re.IGNORECASE,
)
_DROP_COLUMN: Final = re.compile(
    rf"drop\s+(?:column\s+(?:if\s+exists\s+)?|if\s+exists\s+|(?!constraint\b))(?P<column>{NAME})"
    r"(?:\s+(?:cascade|restrict))?$",
    re.IGNORECASE,
)
_MAY_DROP: Final = re.compile(r"\b(drop|do|select|call|execute|with)\b", re.IGNORECASE)
"""Words of statements that drop, or that may run others."""
_NOTE: Final = sql.SQL("select shardids.note_columns({})")
_REQUIRE: Final = sql.SQL("select shardids.require_columns({}, {}::jsonb)")


@dataclass(frozen=True, slots=True, order=True)
class Dropped:
    """A table of a shard, or with ``column`` a column of it, by their names before the revision."""

    table: str
    column: str = ""

    def __str__(self) -> str:
        return f"column {self.table}.{self.column}" if self.column else f"table {self.table}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The rows that are lost with a table or a column, and the shards that have them.

    Of a column they are those with a value. ``unread`` is a reason why shards could not be counted,
    ``revision`` the one whose SQL names the table or column, if that is known.
    """

    what: Dropped
    rows: int
    shards: tuple[int, ...]
    unread: str = ""
    revision: str = ""

    def __str__(self) -> str:
        count = len(self.shards)
        rows, shards = counted(self.rows, "row"), counted(count, "shard")
        parts = [
            f"{rows} in {shards}: {shown_shards(self.shards)}",
            *([f"not all could be read: {self.unread}"] if self.unread else []),
            *([f"revision {self.revision}"] if self.revision else []),
        ]
        return f"{self.what} ({'; '.join(parts)})"


def statements(text: str) -> Iterator[str]:
    """Yield the statements of a text, those in the body of a DO too, without comments and literals."""
    bodies = [match["body"].strip("$") for match in _ASIDE.finditer(text) if match["body"]]
    for statement in _bare(text).split(";"):
        words = " ".join(statement.split())
        yield words
        if words.lower().startswith("do "):
            for body in bodies:
                for inner in re.split(r";|\b(?:begin|then|else|loop)\b", _bare(body), flags=re.IGNORECASE):
                    yield " ".join(inner.split())


def _bare(text: str) -> str:
    return _ASIDE.sub(lambda match: " " if match[0].startswith(("--", "/*")) else "''", text)


@lru_cache(maxsize=1024)
def may_drop(text: str) -> bool:
    """Return whether SQL may drop a table or a column, also by a function that it calls."""
    return _MAY_DROP.search(text) is not None


@lru_cache(maxsize=1024)
def dropped_by(text: str) -> tuple[Dropped, ...]:
    """Return the tables and columns that SQL names as dropped."""
    return tuple(dict.fromkeys(_dropped_by(text)))


def _dropped_by(text: str) -> Iterator[Dropped]:
    for statement in statements(text):
        if tables := _DROP_TABLE.match(statement):
            yield from (Dropped(_unquoted(name)) for name in re.findall(NAME, tables["names"], re.IGNORECASE))
        elif altered := _ALTER_TABLE.match(statement):
            # A comma inside parentheses or quotes separates no actions, and a piece cut there drops nothing.
            for action in altered["actions"].split(","):
                if column := _DROP_COLUMN.match(action.strip()):
                    yield Dropped(_unquoted(altered["table"]), _unquoted(column["column"]))


def _unquoted(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Located:
    """A row of ``migrate/dropped.v1.sql``."""

    shard: int
    schema: str
    table: str
    column: str | None
    is_empty: bool


def _counted(
    name: str, engine: Engine, shards: Sequence[int], drops: Collection[Dropped]
) -> list[tuple[int, Dropped, int | Refused]]:
    """Return the rows that each of the shards of a node has in each table and column."""
    settings = {"shards": "{" + ",".join(map(str, shards)) + "}", "dropped": _pairs(drops)}
    with engine.connect() as connection:
        connection.execution_options(isolation_level="READ COMMITTED")
        there = read(connection, "migrate/dropped.v1", _Located, **settings)
    # A table without a block has no rows: that is known without reading it, by far the most usual case.
    filled = [one for one in there if not one.is_empty]
    queries = [
        sql.SQL("select count({}) as rows from only {} t")
        .format(
            sql.SQL("*") if one.column is None else sql.Identifier("t", one.column),
            sql.Identifier(one.schema, one.table),
        )
        .as_string()
        for one in filled
    ]
    found: list[tuple[int, Dropped, int | Refused]] = [
        (one.shard, Dropped(one.table, one.column or ""), 0) for one in there if one.is_empty
    ]
    if not queries:
        return found
    with reading_as_reader(engine, f'node "{name}"') as reader:
        answers = reader.read(queries)
    return found + [
        (
            one.shard,
            Dropped(one.table, one.column or ""),
            answer if isinstance(answer, Refused) else int(answer[0]["rows"]),
        )
        for one, answer in zip(filled, answers, strict=True)
    ]


def _pairs(drops: Iterable[Dropped]) -> str:
    """Write names as SQL takes them: ``[[table, column or null], …]``."""
    return json.dumps([[one.table, one.column or None] for one in sorted(drops)])


class DropGuard:
    """Let the transactions of a run drop tables and columns without rows. Threads may share one.

    Args:
        nodes: engines of the nodes.
        placement: where the shards are.
        shards: the shards that the run changes.
        allowed: the tables and columns that may be dropped with their rows.
        direction: that of the run.
    """

    def __init__(
        self,
        nodes: Nodes,
        placement: Placement,
        shards: Collection[int],
        *,
        direction: Literal["up", "down"],
        allowed: Collection[Dropped] = (),
    ) -> None:
        self._nodes = nodes
        self._placement = placement
        self._shards = frozenset(shards)
        self._allowed = frozenset(allowed)
        self._direction = direction
        self._examined: set[Dropped] = set()
        self._lock = Lock()

    def losses(self, drops: Collection[Dropped], shards: Collection[int]) -> tuple[list[Loss], set[Dropped]]:
        """Count the rows that ``drops`` would lose in ``shards``; also return the drops that exist there.

        Raises:
            ConnectionFailed: a node is down.
        """
        if not drops or not shards:
            return [], set()
        wanted = self._placement.by_node(shards)
        answers = self._nodes.each(
            lambda name, engine: _counted(name, engine, wanted[name], drops), wanted
        ).all()
        counts: dict[Dropped, dict[int, int]] = {}
        unread: dict[Dropped, str] = {}
        there = set[Dropped]()
        for shard, what, rows in (row for of_node in answers.values() for row in of_node):
            there.add(what)
            if isinstance(rows, Refused):
                unread.setdefault(what, rows.reason)
                counts.setdefault(what, {}).setdefault(shard, 0)
            elif rows:
                counts.setdefault(what, {})[shard] = rows
        losses = [
            Loss(what=what, rows=sum(of.values()), shards=tuple(sorted(of)), unread=unread.get(what, ""))
            for what, of in sorted(counts.items())
        ]
        return losses, there

    def admit(self, shard: int, drops: Collection[Dropped]) -> set[Dropped]:
        """Return those of ``drops`` that the shard has, after finding that it may lose them.

        The first time that a table or column is to be dropped, all shards of the run are asked; later only
        this shard, for rows that came since.

        Raises:
            RowsWouldBeLost: rows would be lost, here or in another shard of the run.
        """
        asked = set(drops) - self._allowed
        with self._lock:
            shards = {shard} if asked <= self._examined else self._shards | {shard}
            losses, there = self.losses(asked, shards)
            # Of a partitioned table its parts were allowed.
            if losses := [loss for loss in losses if loss.what not in self._allowed]:
                words = f"shard {shard} is as it was: the revisions drop"
                raise refusal(words, losses, self._direction)
            self._examined |= asked
        return there | (set(drops) & self._allowed)


def refusal(words: str, losses: Sequence[Loss], direction: Literal["up", "down"]) -> RowsWouldBeLost:
    """Return the error for rows that a run would lose; ``words`` stand before the list of them."""
    return RowsWouldBeLost(f"{words} {', '.join(map(str, losses))}", hint=_HINTS[direction])


def note(shard: int) -> str:
    """Return the statement that notes the tables of a shard, without its semicolon."""
    return _NOTE.format(shard).as_string(None)


def require(shard: int, allowed: Collection[Dropped]) -> str:
    """Return the statement that fails if more than ``allowed`` was dropped, without its semicolon."""
    return _REQUIRE.format(shard, _pairs(allowed)).as_string(None)


def dropped_in(error: RowsWouldBeLost) -> list[Dropped]:
    """Return the drops of a transaction that :func:`require` ended."""
    diag: Any = getattr(error.__cause__, "diag", None)
    found: list[tuple[str, str | None]] = json.loads(diag.message_detail) if diag is not None else []
    if not found:
        # The revision reset the setting of note(), or the guard itself refused.
        raise error
    return [Dropped(table, column or "") for table, column in found]
