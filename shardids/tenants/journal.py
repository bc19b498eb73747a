"""The journal of moves of keys, and the leases of both shards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from shlex import quote
from typing import Any, Final, Literal, Self
from uuid import UUID

from sqlalchemy import Connection, Engine, text

from shardids.catalog.keys.homes import write_home
from shardids.catalog.keys.known import key_text, parse_key
from shardids.catalog.keys.moved_ids import is_id, list_ids, listed_ids
from shardids.catalog.leases import KEY_MOVE, OnBusy
from shardids.catalog.rows import Catalog, describe_in, read_placement
from shardids.errors import BadArgument
from shardids.replication.journals import MoveJournal
from shardids.replication.steps import ABORT

GUARD: Final = "guard"
SWITCHED: Final = "settle"
"""The first step after the switch: the key lives in the target, and the move only goes on."""
CLEAN: Final = "clean"
"""The last step."""

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

    def is_of(self, key: str) -> bool:
        """Return whether a key is that of the move, however it is written."""
        try:
            return key_text(parse_key(key, self.kind)) == self.key
        except BadArgument:
            return False

    def session_name(self, cluster: UUID) -> str:
        """Return the name of the move's sessions; no two moves have the same."""
        return f"shardids_key_{cluster.hex[:8]}_{self.id}"


_COLUMNS: Final = (
    "id, kind, key, source, target, choices, step, is_unsettled, epoch, rows, started_at, switched_at,"
    " ended_at, outcome"
)


_COUNT_ON: Final = text("""
    select setval(s.name, greatest(cast(:above as bigint), pg_sequence_last_value(s.name)))
    from (select pg_get_serial_sequence('shardids_catalog.key_move', 'id')::regclass as name) s""")


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


class KeyJournal(MoveJournal[KeyMove]):
    """The journal of one key, open for writing, and the leases of the process that writes it.

    :meth:`opened` makes it.
    """

    TABLE = "key_move"
    FIRST = GUARD
    COMMAND = "shardids tenant move"
    NAME = "shardids_key_journal"

    @classmethod
    @contextmanager
    def opened(cls, catalog: Catalog, key: str, *, takes_over: bool = False) -> Iterator[Self]:
        """Yield the journal of a key, and close it afterwards; ``takes_over`` makes its entry this process's.

        Raises:
            ClusterConflict: another process moves the key.
        """
        with cls._opened(
            catalog,
            KEY_MOVE,
            subject=f"key {key!r}",
            argument=quote(key),
            find=lambda connection: next((m for m in read_key_moves(connection) if m.is_of(key)), None),
            takes_over=takes_over,
        ) as journal:
            yield journal

    def _route(self, move: KeyMove) -> str:
        return f"shard {move.source} to {move.target}"

    @contextmanager
    def leased(
        self,
        sides: Mapping[int, tuple[str, Engine]],
        *,
        on_busy: OnBusy,
        former: str | None = None,
    ) -> Iterator[None]:
        """Hold the leases of shards, each on its node, as :meth:`MoveJournal._holding` does.

        Raises:
            ShardBusy: another command has one.
        """
        with ExitStack() as kept:
            for shard, (node, engine) in sorted(sides.items()):
                kept.enter_context(self._holding({node: engine}, shard, on_busy=on_busy, former=former))
            yield

    def enter(
        self, kind: str, key: str, source: int, target: int, choices: Mapping[str, Any], *, above: int
    ) -> KeyMove:
        """Record a new move of a key as the directory has it; its number is above one that nodes have."""
        with self._held.transaction() as connection:
            highest = connection.scalar(text("select coalesce(max(id), 0) from shardids_catalog.key_move"))
            if above > highest:
                # The catalog was restored, and has forgotten moves. Their refusals have their numbers.
                connection.execute(_COUNT_ON, {"above": above})
            row = connection.execute(
                text(f"""
                    insert into shardids_catalog.key_move (kind, key, source, target, choices, step, epoch)
                    values (:kind, :key, :source, :target, cast(:choices as jsonb), :step, :epoch)
                    returning {_COLUMNS}"""),  # noqa: S608 -- a constant
                {
                    "kind": kind,
                    "key": key,
                    "source": source,
                    "target": target,
                    "choices": json.dumps(choices),
                    "step": GUARD,
                    "epoch": self.leases.epoch,
                },
            ).one()
        self._set(KeyMove(**row._mapping))
        return self.move

    def unsettle(self, *, is_unsettled: bool) -> None:
        """Let clients refuse statements over several shards with one of these, or answer them again."""
        self._update("is_unsettled = :is_unsettled", is_unsettled=is_unsettled)

    def list_ids(self, ids: Sequence[int], *, key: str | None = None) -> None:
        """List IDs of the key's rows, which lead to the target from the switch on; pass over other values.

        ``key``: another key of the source, whose rows these are.
        """
        if ids:
            with self._held.transaction() as connection:
                self._list(connection, ids, key)

    def listed_ids(self) -> list[int]:
        """Return the IDs that were listed as the key's before, by this move or others."""
        with self._held.transaction() as connection:
            return listed_ids(connection, self.move.kind, self.move.key)

    def _list(self, connection: Connection, ids: Sequence[int], key: str | None = None) -> None:
        move, placement = self.move, read_placement(connection)
        layout, old = describe_in(connection, connection.engine.url).layout, placement.old_ids
        new = [
            id_
            for id_ in ids
            if (old is None or not old.has(id_)) and is_id(layout, id_, placement.node_of.keys())
        ]
        list_ids(connection, move.kind, key or move.key, new, shard=move.source)

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

    def give_back(self) -> None:
        """Make the source the key's home again, and record that the move is undone, in one transaction."""
        move = self.move
        with self._held.transaction() as connection:
            write_home(connection, move.kind, move.key, move.source, source=move.target)
            self._change(connection, "step = :step, switched_at = null, rows = null", step=ABORT)
        self.step = ABORT

    def is_past(self, step: str, error: BaseException) -> bool:
        """Return whether the key lives in the target, after a step of the pause failed with ``error``.

        Raises:
            ConnectionFailed: the catalog stays out of reach.
        """
        return self.step == SWITCHED or self._settled(error, self._is_switched)

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
        self._close("outcome = :outcome", outcome=outcome)
