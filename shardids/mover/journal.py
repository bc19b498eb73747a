"""The catalog's table ``move``: each step of a move, written before it is taken."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Self

from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError

from shardids.catalog.connections import keep_commits, keep_settings
from shardids.catalog.locks import AdvisoryLock
from shardids.catalog.nodes import administrative_engine
from shardids.catalog.rows import Catalog, place_shard
from shardids.errors import ClusterConflict, ConnectionFailed, MoveFailed, ShardidsError
from shardids.mover.sides import SESSION

FIRST_STEP = "tables"
LAST_STEP = "clean"
"""The step that is left once the shard is placed on the target."""
_SETTLE_S = 20.0
"""How long an unanswered switch of the placement is asked about."""
_BEAT_S = 5.0
_LOST_AFTER = "25s"
"""How long the catalog keeps the lock of a mover that it does not hear of."""
ABORT = "abort"
"""What the journal has in place of a step while a move is undone."""

Outcome = Literal["moved", "aborted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A move as the journal has it.

    ``step`` is the last step that was begun; ``outcome`` is ``None`` while the move is not over.
    """

    id: int
    shard: int
    source: str
    target: str
    offline: bool
    step: str
    started_at: datetime
    outcome: Outcome | None


_COLUMNS = "id, shard, source, target, offline, step, started_at, outcome"


class Journal:
    """The journal of one shard, open for writing: nobody else can move the shard meanwhile.

    Made by :meth:`opened`. The lock lives in the connection that writes, so a journal that lost the lock
    can write nothing any more.
    """

    def __init__(self, catalog: Catalog, connection: Connection, shard: int) -> None:
        self._catalog = catalog
        self._connection = connection
        self._is_free = threading.Lock()
        self._closed = threading.Event()
        self._is_lost = False
        self._process = connection.scalar(text("select pg_backend_pid()"))
        connection.rollback()
        self._shard = shard
        self._move: Move | None = None
        self.step = FIRST_STEP

    def schema(self) -> str | None:
        """What :meth:`keep_schema` was given for this move."""
        with self._transaction():
            found: str | None = self._connection.execute(
                text("select schema from shardids_catalog.move where id = :id"), {"id": self.move.id}
            ).scalar_one()
        return found

    def keep_schema(self, definition: str) -> None:
        """Writes down the definition of the schema that the target is given."""
        self._update("schema = :definition", definition=definition)

    @classmethod
    @contextmanager
    def opened(cls, catalog: Catalog, shard: int) -> Iterator[Self]:
        """The journal, closed afterwards.

        Raises:
            ClusterConflict: another process moves the shard.
        """
        with _connected(catalog) as connection:
            with connection.begin():
                is_mine = connection.execute(
                    text("select pg_try_advisory_lock(:class, :shard)"),
                    {"class": AdvisoryLock.MOVE, "shard": shard},
                ).scalar_one()
            if not is_mine:
                raise ClusterConflict(
                    f"shard {shard} is being moved by another process",
                    hint="To see how far it is: shardids shard moves",
                )
            journal = cls(catalog, connection, shard)
            with connection.begin():
                found = _moves(connection, [shard])
            if found:
                journal._set(found[0])
            beating = threading.Thread(target=journal._beat, name="shardids_journal", daemon=True)
            beating.start()
            try:
                yield journal
            finally:
                journal._closed.set()
                beating.join()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._is_free:
            if self._is_lost or self._connection.invalidated:
                # A new connection would not have the lock.
                raise ConnectionFailed(
                    f"the journal of shard {self._shard} was lost, with the connection to the catalog",
                    hint="When the catalog answers again: --resume or --abort.",
                )
            with self._connection.begin():
                yield

    def _beat(self) -> None:
        """Keeps the session alive: the catalog ends that of a mover it no longer hears of, and so its lock.

        What a mover that was lost finds when it wakes up is a journal that it can't write to any more.
        """
        while not self._closed.wait(_BEAT_S):
            if self._is_free.acquire(blocking=False):
                try:
                    self._connection.execute(text("select 1"))
                    self._connection.rollback()
                except (ShardidsError, SQLAlchemyError):
                    self._is_lost = True
                    return
                finally:
                    self._is_free.release()

    @property
    def move(self) -> Move:
        """The move that is not over.

        Raises:
            ClusterConflict: there is none.
        """
        if self._move is None:
            raise ClusterConflict(f"no move of shard {self._shard} is under way")
        return self._move

    def refuse_open(self) -> None:
        """Refuses a shard of which a move is not over.

        Raises:
            ClusterConflict: it was begun and neither ended nor aborted.
        """
        if self._move is not None:
            raise ClusterConflict(
                f'a move of shard {self._shard} from node "{self._move.source}" to "{self._move.target}"'
                f' was interrupted at step "{self.step}"',
                hint=f"To resume it: shardids shard move {self._shard} --resume; to undo it: --abort",
            )

    def enter(self, target: str, *, offline: bool) -> Move:
        """Enters a new move from where the shard is placed.

        Raises:
            ClusterConflict: it is placed nowhere, or on the target.
        """
        with self._transaction():
            row = self._connection.execute(
                text(f"""
                    insert into shardids_catalog.move (shard, source, target, offline, step)
                    select shard, node, :target, :offline, :step from shardids_catalog.placement
                    where shard = :shard and state = 'active' and node <> :target
                    returning {_COLUMNS}"""),  # noqa: S608 -- constant
                {"shard": self._shard, "target": target, "offline": offline, "step": FIRST_STEP},
            ).one_or_none()
        if row is None:
            raise ClusterConflict(f'the placement of shard {self._shard} does not allow a move to "{target}"')
        self._set(Move(**row._asdict()))
        return self.move

    def begin_step(self, step: str) -> None:
        """Writes down what is done next."""
        self._update("step = :step", step=step)
        self.step = step

    def switch_placement(self) -> None:
        """Places the shard on the target, and writes down that only cleaning is left: both or neither."""
        move = self.move
        with self._transaction():
            place_shard(self._connection, move.shard, source=move.source, target=move.target)
            self._connection.execute(
                text("update shardids_catalog.move set step = :step where id = :id"),
                {"id": move.id, "step": LAST_STEP},
            )
        self.step = LAST_STEP

    def is_placed(self) -> bool:
        """Whether the placement names the target already."""
        with self._transaction():
            return self._is_placed(self._connection)

    def settle(self) -> bool:
        """Whether the placement names the target, when :meth:`switch_placement` had no answer to its COMMIT.

        The session that may still be committing is ended first, and with it the lock.

        Raises:
            ConnectionFailed: the catalog stays out of reach.
        """
        deadline = time.monotonic() + _SETTLE_S
        while True:
            try:
                with _connected(self._catalog) as connection:
                    ended = text("select pg_terminate_backend(:process, 5000)")
                    connection.execute(ended, {"process": self._process})
                    return self._is_placed(connection)
            except ConnectionFailed:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    def _is_placed(self, connection: Connection) -> bool:
        node = connection.execute(
            text("select node from shardids_catalog.placement where shard = :shard"),
            {"shard": self.move.shard},
        ).scalar_one()
        return bool(node == self.move.target)

    def end(self, outcome: Outcome) -> None:
        """Closes the entry."""
        self._update("ended_at = clock_timestamp(), outcome = :outcome, schema = null", outcome=outcome)
        self._move = None

    def _set(self, move: Move) -> None:
        self._move, self.step = move, move.step

    def _update(self, change: str, **values: object) -> None:
        with self._transaction():
            changed = self._connection.execute(
                text(f"update shardids_catalog.move set {change} where id = :id and ended_at is null"),  # noqa: S608 -- constants
                values | {"id": self.move.id},
            ).rowcount
        if changed != 1:
            raise MoveFailed(f"the journal's entry of shard {self._shard} was closed by another process")


@contextmanager
def _connected(catalog: Catalog) -> Iterator[Connection]:
    """A connection to the catalog that is closed, not pooled: its lock ends with it."""
    engine = administrative_engine(catalog.url, what="the catalog", application_name="shardids_journal")
    keep_commits(engine)
    keep_settings(engine, SESSION | {"idle_session_timeout": _LOST_AFTER})
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


_MOVES = text(f"""
    select {_COLUMNS} from shardids_catalog.move
    where (:ended or ended_at is null)
      and (cast(:shards as integer[]) is null or shard = any (cast(:shards as integer[])))
    order by id""")  # noqa: S608 -- constant


def _moves(connection: Connection, shards: list[int] | None, *, ended: bool = False) -> list[Move]:
    rows = connection.execute(_MOVES, {"shards": shards, "ended": ended})
    return [Move(**row._asdict()) for row in rows]


def open_moves(catalog: Catalog, shards: Iterable[int] | None = None) -> list[Move]:
    """Moves that are not over, of these shards or of all, oldest first."""
    with catalog.engine.connect() as connection:
        return _moves(connection, None if shards is None else list(shards))


def all_moves(catalog: Catalog) -> list[Move]:
    """All moves, oldest first."""
    with catalog.engine.connect() as connection:
        return _moves(connection, None, ended=True)
