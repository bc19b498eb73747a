"""Writes the catalog's table ``move``, which records each step of a move before it is taken."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError

from shardids.catalog.connections import keep_commits, keep_settings
from shardids.catalog.locks import AdvisoryLock
from shardids.catalog.nodes import administrative_engine
from shardids.catalog.placing import place_lost_shard, place_shard
from shardids.catalog.rows import Catalog
from shardids.errors import ClusterConflict, ConnectionFailed, MoveFailed, ShardidsError
from shardids.mover.history import COLUMNS, FIRST_STEP, LAST_STEP, LOSS, Move, Outcome, read_moves
from shardids.mover.sides import SESSION

_SETTLE_S = 20.0
"""How long to ask the catalog about a switch of the placement that it did not answer."""
_BEAT_S = 5.0
_LOST_AFTER = "25s"
"""How long the catalog keeps the lock of a mover that it no longer hears from."""


class Journal:
    """The journal of one shard, open for writing: nobody else can move the shard meanwhile.

    :meth:`opened` makes it. The connection that writes holds the lock, so a journal that has lost the lock
    can no longer write.
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
        """Returns the definition that :meth:`keep_schema` recorded for this move."""
        with self._transaction():
            found: str | None = self._connection.execute(
                text("select schema from shardids_catalog.move where id = :id"), {"id": self.move.id}
            ).scalar_one()
        return found

    def keep_schema(self, definition: str) -> None:
        """Records the definition of the schema that the target is given."""
        self._update("schema = :definition", definition=definition)

    @classmethod
    @contextmanager
    def opened(cls, catalog: Catalog, shard: int) -> Iterator[Self]:
        """Yields the journal of a shard, and closes it afterwards.

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
                found = read_moves(connection, [shard])
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
        """Keeps the session alive: the catalog ends the session, and the lock, of a mover that falls silent.

        A mover that was lost and wakes up finds a journal that it can no longer write to.
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
        """Returns the move that is not over.

        Raises:
            ClusterConflict: there is none.
        """
        if self._move is None:
            raise ClusterConflict(f"no move of shard {self._shard} is under way")
        return self._move

    @property
    def is_open(self) -> bool:
        """Returns whether a move is not over."""
        return self._move is not None

    def refuse_open(self) -> None:
        """Refuses if a move of the shard is not over.

        Raises:
            ClusterConflict: a move was begun and has neither ended nor been aborted.
        """
        if self._move is not None:
            raise ClusterConflict(
                f'a move of shard {self._shard} from node "{self._move.source}" to "{self._move.target}"'
                f' was interrupted at step "{self.step}"',
                hint=f"To resume it: shardids shard move {self._shard} --resume; to undo it: --abort",
            )

    def enter(self, target: str, *, offline: bool) -> Move:
        """Records a new move, from the shard's owner to ``target``.

        Raises:
            ClusterConflict: no node owns the shard, or the target does.
        """
        with self._transaction():
            row = self._connection.execute(
                text(f"""
                    insert into shardids_catalog.move (shard, source, target, offline, step)
                    select shard, node, :target, :offline, :step from shardids_catalog.placement
                    where shard = :shard and state = 'active' and node <> :target
                    returning {COLUMNS}"""),  # noqa: S608 -- constant
                {"shard": self._shard, "target": target, "offline": offline, "step": FIRST_STEP},
            ).one_or_none()
        if row is None:
            raise ClusterConflict(f'the placement of shard {self._shard} does not allow a move to "{target}"')
        self._set(Move(**row._asdict()))
        return self.move

    def begin_step(self, step: str) -> None:
        """Records the step that is taken next."""
        self._update("step = :step", step=step)
        self.step = step

    def switch_placement(self, high_water_tick: int) -> None:
        """Makes the target the owner and records that only cleaning is left, in one transaction."""
        move = self.move
        with self._transaction():
            place_shard(self._connection, move.shard, source=move.source, target=move.target)
            self._connection.execute(
                text("update shardids_catalog.move set step = :step, high_water_tick = :tick where id = :id"),
                {"id": move.id, "step": LAST_STEP, "tick": high_water_tick},
            )
        self.step = LAST_STEP

    def enter_loss(self, home: str) -> Move:
        """Records that the shard, which was lost with its node, gets a home; ends any other open move of it.

        Raises:
            ClusterConflict: the shard does not count as lost.
        """
        with self._transaction():
            self._connection.execute(
                text("""
                    update shardids_catalog.move set ended_at = clock_timestamp(), schema = null,
                           outcome = case when step = :last then 'moved' else 'aborted' end
                    where shard = :shard and ended_at is null"""),
                {"shard": self._shard, "last": LAST_STEP},
            )
            row = self._connection.execute(
                text(f"""
                    insert into shardids_catalog.move (shard, source, target, offline, step)
                    select shard, node, :home, false, :step from shardids_catalog.placement
                    where shard = :shard and state = 'lost'
                    returning {COLUMNS}"""),  # noqa: S608 -- constant
                {"shard": self._shard, "home": home, "step": LOSS},
            ).one_or_none()
            if row is None:
                raise ClusterConflict(f"shard {self._shard} does not count as lost any more")
        self._set(Move(**row._asdict()))
        return self.move

    def place_lost(self, high_water_tick: int) -> None:
        """Makes the home of :meth:`enter_loss` the owner."""
        move = self.move
        with self._transaction():
            place_lost_shard(self._connection, move.shard, lost_with=move.source, target=move.target)
            self._connection.execute(
                text("update shardids_catalog.move set high_water_tick = :tick where id = :id"),
                {"id": move.id, "tick": high_water_tick},
            )

    def is_placed(self) -> bool:
        """Returns whether the placement names the target already."""
        with self._transaction():
            return self._is_placed(self._connection)

    def settle(self) -> bool:
        """Returns whether the placement names the target, after :meth:`switch_placement` got no answer.

        Ends the session that may still be committing first, and with it the lock.

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
            text("select node from shardids_catalog.placement where shard = :shard and state = 'active'"),
            {"shard": self.move.shard},
        ).scalar_one_or_none()
        return bool(node == self.move.target)

    def end(self, outcome: Outcome) -> None:
        """Records how the move ended."""
        self._update("ended_at = clock_timestamp(), outcome = :outcome, schema = null", outcome=outcome)
        self._move, self.step = None, FIRST_STEP

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
    """Yields a connection to the catalog that is closed, not pooled, so that its lock ends with it."""
    engine = administrative_engine(catalog.url, what="the catalog", application_name="shardids_journal")
    keep_commits(engine)
    keep_settings(engine, SESSION | {"idle_session_timeout": _LOST_AFTER})
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()
