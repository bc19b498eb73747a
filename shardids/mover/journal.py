"""The catalog's table ``move``: each step of a move, written before it is taken."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Self

from sqlalchemy import Connection, NullPool, text

from shardids.catalog.connections import CONNECT_TIMEOUT_S, keep_commits, open_engine
from shardids.catalog.locks import AdvisoryLock
from shardids.catalog.rows import Catalog, place_shard
from shardids.errors import ClusterConflict, MoveFailed

FIRST_STEP = "tables"
LAST_STEP = "clean"
"""The step that is left once the shard is placed on the target."""
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

    def __init__(self, connection: Connection, shard: int) -> None:
        self._connection = connection
        self._shard = shard
        self._move: Move | None = None
        self.step = FIRST_STEP

    def schema(self) -> str | None:
        """What :meth:`keep_schema` was given for this move."""
        with self._connection.begin():
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
        engine = open_engine(
            catalog.url,
            what="the catalog",
            administrative=True,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            poolclass=NullPool,
        )
        keep_commits(engine)
        with engine.connect() as connection:
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
            journal = cls(connection, shard)
            with connection.begin():
                found = _moves(connection, [shard])
            if found:
                journal._set(found[0])
            yield journal

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
        with self._connection.begin():
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
        with self._connection.begin():
            place_shard(self._connection, move.shard, source=move.source, target=move.target)
            self._connection.execute(
                text("update shardids_catalog.move set step = :step where id = :id"),
                {"id": move.id, "step": LAST_STEP},
            )
        self.step = LAST_STEP

    def is_placed(self) -> bool:
        """Whether the placement names the target already."""
        with self._connection.begin():
            node = self._connection.execute(
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
        with self._connection.begin():
            changed = self._connection.execute(
                text(f"update shardids_catalog.move set {change} where id = :id and ended_at is null"),  # noqa: S608 -- constants
                values | {"id": self.move.id},
            ).rowcount
        if changed != 1:
            raise MoveFailed(f"the journal's entry of shard {self._shard} was closed by another process")


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
