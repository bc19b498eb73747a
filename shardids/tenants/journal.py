"""The journal of moves of keys, and the leases of both shards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Final, Literal, Self
from uuid import UUID

from sqlalchemy import Connection, Engine, text

from shardids.catalog.keys.homes import write_home
from shardids.catalog.keys.moved_ids import list_ids
from shardids.catalog.leases import KEY_MOVE, Leases, OnBusy, lock_key
from shardids.catalog.rows import Catalog, read_placement
from shardids.errors import ClusterConflict, CommitUncertain, ConnectionFailed, MoveFailed
from shardids.pg.locks import AdvisoryLock
from shardids.replication.barrier import HeldLock
from shardids.replication.sides import Side

GUARD: Final = "guard"
SWITCHED: Final = "settle"
"""The first step after the switch: the key lives in the target, and the move only goes on."""

Outcome = Literal["moved", "aborted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyMove:
    """A move of a key as the journal records it.

    Attributes:
        source, target: the shards.
        choices: as :meth:`shardids.tenants.family.Choices.document` returns them, with the root's primary
            key as ``anchor``.
        step: the last step that was begun.
        is_unsettled: rows may be in both shards, or some of them in one.
        rows: how many there were when the key's home was switched.
        outcome: ``None`` while the move is not over.
    """

    id: int
    kind: str
    key: str
    source: int
    target: int
    choices: Mapping[str, Any]
    step: str
    is_unsettled: bool
    epoch: UUID
    rows: int | None
    started_at: datetime
    switched_at: datetime | None
    ended_at: datetime | None
    outcome: Outcome | None

    @property
    def is_switched(self) -> bool:
        """Returns whether the key lives in the target."""
        return self.switched_at is not None

    def session_name(self, cluster: UUID) -> str:
        """Return the name of the move's sessions; no two moves have the same."""
        return f"shardids_key_{cluster.hex[:8]}_{self.id}"


_COLUMNS: Final = (
    "id, kind, key, source, target, choices, step, is_unsettled, epoch, rows, started_at, switched_at,"
    " ended_at, outcome"
)


def read_key_moves(connection: Connection, *, ended: bool = False) -> list[KeyMove]:
    """Return the moves of keys that are not over, or with ``ended`` all, oldest first."""
    rows = connection.execute(
        text(f"""select {_COLUMNS} from shardids_catalog.key_move
                 where :ended or ended_at is null order by id"""),  # noqa: S608 -- a constant
        {"ended": ended},
    )
    return [KeyMove(**row._mapping) for row in rows]


def open_key_moves(catalog: Catalog) -> list[KeyMove]:
    """Return the moves of keys that are not over, oldest first."""
    with catalog.engine.connect() as connection:
        return read_key_moves(connection)


def all_key_moves(catalog: Catalog) -> list[KeyMove]:
    """Return all moves of keys, oldest first."""
    with catalog.engine.connect() as connection:
        return read_key_moves(connection, ended=True)


class KeyJournal:
    """The journal of one key, open for writing, and the leases of the process that writes it.

    :meth:`opened` makes it. It writes only while the entry has the epoch of its leases.

    Attributes:
        step: the step that is taken, or is to be taken next.
        leases: those of this command.
    """

    def __init__(self, catalog: Catalog, held: HeldLock, key: str, leases: Leases) -> None:
        self._catalog = catalog
        self._held = held
        self._key = key
        self._move: KeyMove | None = None
        self.leases = leases
        self.step = GUARD

    @classmethod
    @contextmanager
    def opened(cls, catalog: Catalog, key: str, *, takes_over: bool = False) -> Iterator[Self]:
        """Yield the journal of a key, and close it afterwards; ``takes_over`` makes its entry this process's.

        Raises:
            ClusterConflict: another process moves the key, or several keys of that name are being moved.
        """
        leases = Leases(catalog, KEY_MOVE)
        taken = ClusterConflict(
            f"key {key!r} is being moved by another process",
            hint="To see how far it is: shardids tenant move --list",
        )
        lost = ConnectionFailed(
            f"the journal of key {key!r} was lost, with the connection to the catalog",
            hint="When the catalog answers again: --resume or --abort.",
        )
        with HeldLock.taken(
            catalog,
            AdvisoryLock.LEASE_HOLDER,
            leases.key,
            taken=taken,
            lost=lost,
            name="shardids_key_journal",
        ) as held:
            journal = cls(catalog, held, key, leases)
            with held.transaction() as connection:
                found = [move for move in read_key_moves(connection) if move.key == key]
                if found and (
                    _lives(connection, found[0].epoch)
                    or (takes_over and not _taken_over(connection, found[0], leases.epoch))
                ):
                    raise taken
            if found:
                journal._move, journal.step = found[0], found[0].step
            yield journal

    @property
    def move(self) -> KeyMove:
        """Returns the move that is not over.

        Raises:
            ClusterConflict: the key has no open move.
        """
        if self._move is None:
            raise ClusterConflict(f"no move of key {self._key!r} is under way")
        return self._move

    @property
    def is_open(self) -> bool:
        """Returns whether a move is not over."""
        return self._move is not None

    def refuse_open(self) -> None:
        """Refuse if a move of the key is not over.

        Raises:
            ClusterConflict: it was interrupted.
        """
        if self._move is not None:
            raise ClusterConflict(
                f"a move of key {self._key!r} from shard {self._move.source} to {self._move.target} was"
                f' interrupted at step "{self.step}"',
                hint="To resume it: shardids tenant move KEY --resume; to undo it: --abort",
            )

    @contextmanager
    def leased(
        self,
        sides: Mapping[int, tuple[str, Engine]],
        *,
        on_busy: OnBusy,
        former: str | None = None,
    ) -> Iterator[None]:
        """Hold the leases of shards, each on its node, until the block ends or as long as the move is open.

        ``former`` names the sessions of the process that had the entry before: they are ended.

        Raises:
            ShardBusy: another command has one.
        """
        with ExitStack() as kept:
            for shard, (node, engine) in sorted(sides.items()):
                clear = partial(_end_sessions, Side(name=node, engine=engine), former)
                kept.enter_context(
                    self.leases.held(
                        {node: engine},
                        shard,
                        on_busy=on_busy,
                        takes_over=former is not None,
                        clear=clear,
                        is_kept=lambda: self.is_open,
                    )
                )
            yield

    def enter(self, kind: str, source: int, target: int, choices: Mapping[str, Any]) -> KeyMove:
        """Record a new move."""
        with self._held.transaction() as connection:
            row = connection.execute(
                text(f"""
                    insert into shardids_catalog.key_move (kind, key, source, target, choices, step, epoch)
                    values (:kind, :key, :source, :target, cast(:choices as jsonb), :step, :epoch)
                    returning {_COLUMNS}"""),  # noqa: S608 -- a constant
                {
                    "kind": kind,
                    "key": self._key,
                    "source": source,
                    "target": target,
                    "choices": json.dumps(choices),
                    "step": GUARD,
                    "epoch": self.leases.epoch,
                },
            ).one()
        self._move = KeyMove(**row._mapping)
        self.step = GUARD
        return self._move

    def begin_step(self, step: str) -> None:
        """Record the step that is taken next."""
        self._update("step = :step", step=step)
        self.step = step

    def unsettle(self, *, is_unsettled: bool) -> None:
        """Let clients refuse statements over several shards with one of these, or answer them again."""
        self._update("is_unsettled = :is_unsettled", is_unsettled=is_unsettled)

    def list_ids(self, ids: Sequence[int]) -> None:
        """List IDs of the key's rows, to be found in the target from the switch on."""
        if ids:
            with self._held.transaction() as connection:
                self._list(connection, ids)

    def _list(self, connection: Connection, ids: Sequence[int]) -> None:
        move, old = self.move, read_placement(connection).old_ids
        new = ids if old is None else [id_ for id_ in ids if not old.has(id_)]
        list_ids(connection, move.kind, move.key, new, shard=move.source)

    def switch(self, rows: int, ids: Sequence[int]) -> None:
        """Make the target the key's home and record that only settling is left, in one transaction.

        ``ids`` are those of its rows that are not listed yet.
        """
        move = self.move
        with self._held.transaction() as connection:
            if ids:
                self._list(connection, ids)
            write_home(connection, move.kind, move.key, move.target, source=move.source)
            change = "step = :step, switched_at = clock_timestamp(), rows = :rows"
            self._change(connection, change, step=SWITCHED, rows=rows)
        self.step = SWITCHED

    def is_past(self, step: str, error: BaseException) -> bool:
        """Return whether the key lives in the target, after a step of the pause failed with ``error``.

        Raises:
            ConnectionFailed: the catalog stays out of reach.
        """
        if self.step == SWITCHED:
            return True
        is_unknown = isinstance(error, CommitUncertain) or not isinstance(error, Exception)
        return is_unknown and self._held.settled(self._catalog, self._is_switched)

    def is_switched(self) -> bool:
        """Return whether the key lives in the target."""
        with self._held.transaction() as connection:
            return self._is_switched(connection)

    def _is_switched(self, connection: Connection) -> bool:
        found = connection.scalar(
            text("select switched_at is not null from shardids_catalog.key_move where id = :id"),
            {"id": self.move.id},
        )
        return bool(found)

    def end(self, outcome: Outcome) -> None:
        """Record how the move ended."""
        self._update("ended_at = clock_timestamp(), outcome = :outcome", outcome=outcome)
        self._move, self.step = None, GUARD

    def _update(self, change: str, **values: object) -> None:
        with self._held.transaction() as connection:
            self._change(connection, change, **values)

    def _change(self, connection: Connection, change: str, **values: object) -> None:
        changed = connection.execute(
            text(f"""update shardids_catalog.key_move set {change}
                     where id = :id and ended_at is null and epoch = :epoch"""),  # noqa: S608 -- constants
            values | {"id": self.move.id, "epoch": self.leases.epoch},
        ).rowcount
        if changed != 1:
            raise MoveFailed(
                f"the journal's entry of key {self._key!r} was taken over, or closed, by another process"
            )


def _end_sessions(side: Side, name: str | None, _node: str) -> None:
    if name is not None:
        side.end_sessions(name)


def _lives(connection: Connection, epoch: UUID) -> bool:
    found = connection.scalar(
        text("""
            select exists (select from pg_locks l
              where l.locktype = 'advisory' and l.granted and l.objsubid = 2 and l.classid = :class
                and l.objid::bigint = cast(:key as bigint) & 4294967295
                and l.database = (select d.oid from pg_database d where d.datname = current_database()))"""),
        {"class": int(AdvisoryLock.LEASE_HOLDER), "key": lock_key(epoch)},
    )
    return bool(found)


def _taken_over(connection: Connection, move: KeyMove, epoch: UUID) -> bool:
    changed = connection.execute(
        text("""update shardids_catalog.key_move set epoch = :epoch
                where id = :id and ended_at is null and epoch = :before"""),
        {"epoch": epoch, "id": move.id, "before": move.epoch},
    )
    return changed.rowcount == 1
