"""Writes the catalog's table ``move``, which records each step of a move before it is taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from sqlalchemy import Connection, text

from shardids.catalog.locks import AdvisoryLock
from shardids.catalog.placing import lock_placement, place_lost_shard, place_shard
from shardids.catalog.reading import read_placement
from shardids.catalog.regions import require_region
from shardids.catalog.rows import Catalog
from shardids.catalog.skipped import Skipped, read_skipped
from shardids.errors import ClusterConflict, ConnectionFailed, MoveFailed
from shardids.mover.held import HeldLock
from shardids.mover.history import COLUMNS, FIRST_STEP, LAST_STEP, LOSS, Move, Outcome, read_moves


class Journal:
    """The journal of one shard, open for writing: nobody else can move the shard meanwhile.

    :meth:`opened` makes it. The connection that writes holds the lock, so a journal that has lost the lock
    can no longer write.
    """

    def __init__(self, catalog: Catalog, held: HeldLock, shard: int) -> None:
        self._catalog = catalog
        self._held = held
        self._shard = shard
        self._move: Move | None = None
        self.step = FIRST_STEP

    def schema(self) -> str | None:
        """Returns the definition that :meth:`keep_schema` recorded for this move."""
        with self._held.transaction() as connection:
            found: str | None = connection.execute(
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
        taken = ClusterConflict(
            f"shard {shard} is being moved by another process",
            hint="To see how far it is: shardids shard moves",
        )
        lost = ConnectionFailed(
            f"the journal of shard {shard} was lost, with the connection to the catalog",
            hint="When the catalog answers again: --resume or --abort.",
        )
        with HeldLock.taken(catalog, AdvisoryLock.MOVE, shard, taken=taken, lost=lost) as held:
            journal = cls(catalog, held, shard)
            with held.transaction() as connection:
                found = read_moves(connection, [shard])
            if found:
                journal._set(found[0])
            yield journal

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
            ClusterConflict: no node owns the shard, or the target does, or is of another region.
        """
        with self._held.transaction() as connection:
            # Until the commit no region changes; who changes one later finds the move.
            lock_placement(connection)
            require_region(read_placement(connection), self._shard, target)
            row = connection.execute(
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

    def skipped(self) -> list[Skipped]:
        """Returns the ticks that the shard passes over; none is added while the journal is open."""
        with self._held.transaction() as connection:
            return read_skipped(connection, "shardids_catalog", [self._shard])

    def require_lock(self) -> None:
        """Requires that no other process moves the shard.

        Raises:
            ConnectionFailed: the catalog has ended the session that holds the lock.
        """
        self._held.require()

    def begin_step(self, step: str) -> None:
        """Records the step that is taken next."""
        self._update("step = :step", step=step)
        self.step = step

    def switch_placement(self, high_water_tick: int) -> None:
        """Makes the target the owner and records that only cleaning is left, in one transaction."""
        move = self.move
        with self._held.transaction() as connection:
            place_shard(connection, move.shard, source=move.source, target=move.target)
            connection.execute(
                text("update shardids_catalog.move set step = :step, high_water_tick = :tick where id = :id"),
                {"id": move.id, "step": LAST_STEP, "tick": high_water_tick},
            )
        self.step = LAST_STEP

    def enter_loss(self, home: str) -> Move:
        """Records that the shard, which was lost with its node, gets a home; ends any other open move of it.

        Raises:
            ClusterConflict: the shard does not count as lost.
        """
        with self._held.transaction() as connection:
            connection.execute(
                text("""
                    update shardids_catalog.move set ended_at = clock_timestamp(), schema = null,
                           outcome = case when step = :last then 'moved' else 'aborted' end
                    where shard = :shard and ended_at is null"""),
                {"shard": self._shard, "last": LAST_STEP},
            )
            row = connection.execute(
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
        """Makes the node that :meth:`enter_loss` names the owner."""
        move = self.move
        with self._held.transaction() as connection:
            place_lost_shard(connection, move.shard, lost_with=move.source, target=move.target)
            connection.execute(
                text("update shardids_catalog.move set high_water_tick = :tick where id = :id"),
                {"id": move.id, "tick": high_water_tick},
            )

    def is_placed(self) -> bool:
        """Returns whether the placement names the target already."""
        with self._held.transaction() as connection:
            return self._is_placed(connection)

    def settle(self) -> bool:
        """Returns whether the placement names the target, after :meth:`switch_placement` got no answer.

        If the session of the lock is lost, it is ended first, and with it the lock.

        Raises:
            ConnectionFailed: the catalog stays out of reach.
        """
        return self._held.settled(self._catalog, self._is_placed)

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
        with self._held.transaction() as connection:
            changed = connection.execute(
                text(f"update shardids_catalog.move set {change} where id = :id and ended_at is null"),  # noqa: S608 -- constants
                values | {"id": self.move.id},
            ).rowcount
        if changed != 1:
            raise MoveFailed(f"the journal's entry of shard {self._shard} was closed by another process")
