"""One transaction of a connection that several users share: the transactions of each are savepoints of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from threading import RLock
from typing import Any, Final

import psycopg

from shardids.errors import BadArgument, CannotCombine

_COMMENTS: Final = re.compile(r"\s*(?:(?:/\*.*?\*/|--[^\n]*\n)\s*)*", re.DOTALL)
_CONTROL: Final = re.compile(
    r"(?P<two>(?:prepare\s+transaction|commit\s+prepared|rollback\s+prepared)\b)"
    r"|rollback(?:\s+(?:work|transaction))?\s+to(?:\s+savepoint)?\s+(?P<back>\"[^\"]+\"|\w+)\s*;?\s*$"
    r"|release(?:\s+savepoint)?\s+(?P<release>\"[^\"]+\"|\w+)\s*;?\s*$"
    r"|savepoint\s+(?P<savepoint>\"[^\"]+\"|\w+)\s*;?\s*$"
    r"|(?P<begin>(?:begin|start\s+transaction)\b[^;]*(?:;|$))"
    r"|(?P<commit>(?:commit|end)\b[^;]*;?\s*$)"
    r"|(?P<rollback>(?:rollback|abort)\b[^;]*;?\s*$)",
    re.IGNORECASE,
)
_QUIET: Final = frozenset(
    ("CLOSE", "DEALLOCATE", "DECLARE", "EXPLAIN", "FETCH", "LISTEN", "LOCK", "RESET", "SET", "SHOW")
)
_WRITES: Final = re.compile(
    r"\b(?:delete\s+from|insert\s+into|merge\s+into|update(?!\s*(?:of\b|nowait|skip|;|$)))", re.IGNORECASE
)
_OF_VIEWS: Final = "shardids_query."
_ABORTED: Final = "current transaction is aborted, commands ignored until end of transaction block"


@dataclass(slots=True, eq=False)
class _Mark:
    """A savepoint; ``given`` is the user's name for it, ``None`` for the begin of a transaction."""

    name: str
    user: User | None
    given: str | None
    writes: int


@dataclass(slots=True, eq=False)
class User:
    """A user of the connection: it begins, commits and rolls back as if the connection were its own."""

    is_autocommit: bool = False
    is_begun: bool = False
    has_failed: bool = False
    is_undone: bool = False
    reads_only: bool = False


@dataclass(slots=True)
class Sent:
    """A statement as it is sent, ``None`` if nothing is, and the server's answer, such as INSERT 0 1."""

    statement: Any
    status: str | None = None


class SharedTransaction:
    """The transaction of one connection, in levels: leaving a level undoes all work since its begin.

    A user's COMMIT keeps its savepoint's work; its ROLLBACK undoes it, and is refused where another user has
    committed since. Writes of open transactions are undone with it: these can then only roll back.

    Args:
        connection: to a node, in autocommit mode.
        has_written: returns whether a transaction of the test has written on any node.
    """

    def __init__(self, connection: psycopg.Connection[Any], has_written: Callable[[], bool]) -> None:
        self.connection = connection
        self.lock = RLock()
        self.is_ending = False
        self._has_written = has_written
        self._marks: list[_Mark] = []
        self._writes: list[User | None] = []
        """The users that have written, in this order; ``None`` where it was committed."""
        self._levels: list[_Mark] = []
        self._numbers = count(1)

    @property
    def depth(self) -> int:
        """The number of levels."""
        return len(self._levels)

    @property
    def has_written(self) -> bool:
        """Whether anything was written that is not undone."""
        return bool(self._writes)

    def enter(self) -> None:
        """Begin a level."""
        with self.lock:
            if not self._levels:
                self._run("begin isolation level read committed")
                self._levels.append(_Mark("shardids_0", None, None, 0))
            else:
                self._levels.append(self._mark(None, None))

    def leave(self) -> None:
        """Undo all since the begin of the innermost level, and end it."""
        with self.lock:
            level = self._levels.pop()
            if self._levels:
                self._back_to(level)
                self._end(level)
            else:
                self._run("rollback")
                self._forget(0, 0)
            self.is_ending = False

    @contextmanager
    def statement(self, user: User, query: Any) -> Iterator[Sent]:
        """Let a user execute a statement, within its savepoint."""
        with self.lock:
            text = _text_of(query, self.connection)
            sent = Sent(self._controlled(user, text, query))
            if sent.statement is None:
                yield sent
                return
            self._require_whole(user)
            if user.has_failed:
                raise psycopg.errors.InFailedSqlTransaction(_ABORTED)
            if _OF_VIEWS in text and self._has_written():
                raise CannotCombine(
                    "the query node sees committed rows, and those of a test that is rolled back are not",
                    hint="Select the rows and compute it in Python, or test it without shard_rollback.",
                )
            is_alone = user.is_autocommit and not user.is_begun
            if not user.is_begun:
                self.begin(user)
            guard = self._mark(user, None) if self._would_undo(self._innermost(user), user) else None
            try:
                yield sent
            except BaseException:
                self._back_to(guard or self._innermost(user))
                user.has_failed = not is_alone
                if is_alone:
                    self._drop(user)
                raise
            if _wrote(sent.status, text):
                self._writes.append(user)
            if is_alone:
                self.commit(user)

    def begin(self, user: User) -> None:
        """Begin a user's transaction."""
        with self.lock:
            self._mark(user, None)
            user.is_begun = True
            if user.reads_only:
                self._run("set transaction read only")

    def commit(self, user: User) -> None:
        """Keep a user's work."""
        with self.lock:
            self._require_whole(user)
            if user.has_failed:
                self.rollback(user)
            elif user.is_begun:
                root = next(mark for mark in self._marks if mark.user is user)
                for place in range(root.writes, len(self._writes)):
                    if self._writes[place] is user:
                        self._writes[place] = None
                self._drop(user)

    def rollback(self, user: User) -> None:
        """Undo a user's work since its transaction began.

        Raises:
            BadArgument: another user has committed since then, and that would be undone.
        """
        with self.lock:
            user.is_undone = False
            if not user.is_begun:
                return
            root = next(mark for mark in self._marks if mark.user is user)
            if not self.is_ending and self._may_undo(root, user):
                self._back_to(root)
            self._drop(user)

    def _controlled(self, user: User, text: str, query: Any) -> Any:
        """Return the statement to send in place of a user's; do those that control transactions here."""
        start = _COMMENTS.match(text).end()  # type: ignore[union-attr]  # it matches nothing, too
        found = _CONTROL.match(text, start)
        if found is None:
            return query
        if found["two"]:
            raise BadArgument(
                "PREPARE TRANSACTION needs a real COMMIT, and this test is rolled back",
                hint="Test it without shard_rollback, and delete its rows.",
            )
        if found["begin"] is not None:
            if not user.is_begun:
                self.begin(user)
            # Triggers of look-up keys read the comment.
            rest = text[found.end() :].strip()
            return f"{text[:start]}{rest}" if rest else None
        if found["commit"] is not None:
            self.commit(user)
        elif found["rollback"] is not None:
            self.rollback(user)
        elif found["savepoint"]:
            if user.has_failed:
                raise psycopg.errors.InFailedSqlTransaction(_ABORTED)
            if not user.is_begun:
                self.begin(user)
            self._mark(user, found["savepoint"])
        elif not self.is_ending:
            mark = self._named(user, found["back"] or found["release"])
            if found["release"]:
                self._drop(user, mark)
            elif self._may_undo(mark, user):
                self._back_to(mark)
                user.has_failed = False
        return None

    def _named(self, user: User, given: str) -> _Mark:
        for mark in reversed(self._marks):
            if mark.user is user and mark.given == given:
                return mark
        raise psycopg.errors.InvalidSavepointSpecification(f"savepoint {given} does not exist")

    def _innermost(self, user: User) -> _Mark:
        return next(mark for mark in reversed(self._marks) if mark.user is user)

    def _would_undo(self, mark: _Mark, user: User) -> bool:
        """Return whether another user has written since a mark."""
        return any(one is not user for one in self._writes[mark.writes :])

    def _may_undo(self, mark: _Mark, user: User) -> bool:
        """Return whether to go back to a mark; not where its user has nothing to undo there."""
        is_below = _number(mark) < _number(self._levels[-1])
        if not is_below and not self._would_undo(mark, user):
            return True
        since = self._writes[mark.writes :]
        if user not in since:
            return False
        if is_below or None in since:
            raise BadArgument(
                "a session of this test can't roll back: another one has committed since it began, and all"
                " of them are in one transaction",
                hint="End one session before the next begins, or test it without shard_rollback.",
            )
        for other in since:
            if other is not None and other is not user:
                other.is_undone = True
        return True

    def _require_whole(self, user: User) -> None:
        if user.is_undone and not self.is_ending:
            raise BadArgument(
                "this session's writes were undone by the ROLLBACK of another one: all sessions of this test"
                " are in one transaction",
                hint="End one session before the next begins, or test it without shard_rollback.",
            )

    def _mark(self, user: User | None, given: str | None) -> _Mark:
        mark = _Mark(f"shardids_{next(self._numbers)}", user, given, len(self._writes))
        self._run(f"savepoint {mark.name}")
        if user is not None:
            self._marks.append(mark)
        return mark

    def _back_to(self, mark: _Mark) -> None:
        """Undo all since a mark, which stays."""
        self._run(f"rollback to {mark.name}")
        self._forget(sum(_number(one) <= _number(mark) for one in self._marks), mark.writes)

    def _forget(self, marks: int, writes: int) -> None:
        """Forget the marks and writes beyond so many; users whose begin is gone have to begin again."""
        gone, self._marks = self._marks[marks:], self._marks[:marks]
        del self._writes[writes:]
        there = {mark.user for mark in self._marks}
        for mark in gone:
            if mark.user is not None and mark.user not in there:
                mark.user.is_begun = False

    def _drop(self, user: User, since: _Mark | None = None) -> None:
        """End a user's savepoints, all or since one of them: those of others that are within them stay."""
        first = self._marks.index(since) if since is not None else 0
        for mark in self._marks[first:]:
            if mark.user is user:
                mark.user = None
        lowest, level = None, _number(self._levels[-1])
        while self._marks and self._marks[-1].user is None and _number(self._marks[-1]) > level:
            lowest = self._marks.pop()
        if lowest is not None and not self.is_ending:
            self._end(lowest)
        if since is None:
            user.is_begun = user.has_failed = False

    def _end(self, mark: _Mark) -> None:
        self._run(f"release {mark.name}")

    def _run(self, statement: str) -> None:
        self.connection.execute(statement.encode())


def _number(mark: _Mark) -> int:
    return int(mark.name.rpartition("_")[2])


def _text_of(query: Any, connection: psycopg.Connection[Any]) -> str:
    if isinstance(query, bytes):
        query = query.decode()
    text: str = query if isinstance(query, str) else query.as_string(connection)
    return text


def _wrote(status: str | None, text: str) -> bool:
    """Return whether a statement may have written rows; functions that a SELECT calls don't count."""
    verb, _, number = (status or "SELECT").partition(" ")
    if verb == "SELECT":
        return _WRITES.search(text) is not None
    return verb not in _QUIET and not number.endswith(" 0") and number != "0"
