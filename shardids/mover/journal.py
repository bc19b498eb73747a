"""The journal of moves under way, and the lease of their shard."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Self

from sqlalchemy import Connection, text

from shardids.catalog.leases import MOVE, OnBusy, Standing, read_leases
from shardids.catalog.moves import (
    ARRIVALS,
    COLUMNS,
    FIRST_STEP,
    LAST_STEP,
    PLACE,
    Move,
    Outcome,
    read_moves,
)
from shardids.catalog.nodes import Nodes
from shardids.catalog.pins import refuse_pinned
from shardids.catalog.regions import require_region
from shardids.catalog.rows import Catalog, lock_placement, place_shard, read_placement
from shardids.catalog.skipped import Skipped, read_skipped
from shardids.errors import ClusterConflict
from shardids.replication.journals import MoveJournal
from shardids.replication.sides import Directory, guard, move_nodes
from shardids.replication.steps import OnEvent, Waiting, ignore


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a move ended.

    ``pause_ms`` is how long writers waited: from the lock on the source, in the attempt that succeeded, until
    the target took writes; ``None`` where this process did not see both. ``rows_verified`` is ``None`` if
    nobody asked to compare them. ``left_behind`` names a target that did not answer when the move was
    aborted: the objects that the move had created there stay. ``stale_views`` names the views over shards
    that could not be refreshed, one line for each, with the remedy.
    """

    shard: int
    source: str
    target: str
    outcome: Outcome
    seconds: float
    pause_ms: float | None = None
    rows_verified: int | None = None
    left_behind: str | None = None
    stale_views: tuple[str, ...] = ()


class Journal(MoveJournal[Move]):
    """The journal of one shard, open for writing, and the leases of the process that writes it.

    :meth:`opened` makes it.
    """

    TABLE = "move"
    FIRST = FIRST_STEP
    COMMAND = "shardids shard move"
    _shard: int

    @classmethod
    @contextmanager
    def opened(
        cls, catalog: Catalog, shard: int, *, purpose: str = MOVE, takes_over: bool = False
    ) -> Iterator[Self]:
        """Yield the journal of a shard, and close it afterwards.

        With ``takes_over`` an entry that was interrupted becomes this process's.

        Raises:
            ClusterConflict: another process moves the shard.
        """
        with cls._opened(
            catalog,
            purpose,
            subject=f"shard {shard}",
            argument=str(shard),
            find=lambda connection: next(iter(read_moves(connection, [shard])), None),
            takes_over=takes_over,
        ) as journal:
            journal._shard = shard
            yield journal

    def _route(self, move: Move) -> str:
        return f'node "{move.source}" to "{move.target}"'

    def schema(self) -> str | None:
        """Return the definition that :meth:`keep_schema` recorded for this move."""
        with self._held.transaction() as connection:
            found: str | None = connection.execute(
                text("select schema from shardids_catalog.move where id = :id"), {"id": self.move.id}
            ).scalar_one()
        return found

    def keep_schema(self, definition: str) -> None:
        """Record the definition of the schema that the target is given."""
        self._update("schema = :definition", definition=definition)

    @contextmanager
    def leased(
        self,
        directory: Directory,
        nodes: Collection[str],
        *,
        on_busy: OnBusy = OnBusy.SKIP,
        on_event: OnEvent = ignore,
        former: str | None = None,
    ) -> Iterator[None]:
        """Hold the shard's lease on nodes, as :meth:`MoveJournal._holding` does.

        Raises:
            ShardBusy: another command has the lease: see :func:`shardids.catalog.leases.obtain`.
        """
        with (
            move_nodes(directory.placement, directory.login, name="shardids_lease") as engines,
            self._holding(
                {name: engines[name] for name in nodes},
                self._shard,
                on_busy=on_busy,
                on_wait=lambda attempt, reason: on_event(
                    Waiting(shard=self._shard, attempt=attempt, reason=reason)
                ),
                former=former,
            ),
        ):
            yield

    def refuse_leased(self, directory: Directory, nodes: Collection[str]) -> None:
        """Refuse if another command has the shard's lease; takes nothing.

        Raises:
            ShardBusy: it has.
        """
        with move_nodes(directory.placement, directory.login, name="shardids_lease") as engines:
            for lease in read_leases(self._catalog, engines, nodes):
                if lease.shard == self._shard and lease.standing is not Standing.GONE:
                    raise lease.error()

    @property
    def shard(self) -> int:
        """Returns the number of the shard."""
        return self._shard

    def enter(
        self, target: str, *, offline: bool, automatic: bool = False, size_bytes: int | None = None
    ) -> Move:
        """Record a new move, from the shard's owner to ``target``.

        Raises:
            ClusterConflict: no node owns the shard, or the target does, or is of another region; or the shard
                is pinned.
        """
        with self._held.transaction() as connection:
            # Until the commit no region and no pin changes; who changes one later finds the move.
            lock_placement(connection)
            require_region(read_placement(connection), self._shard, target)
            refuse_pinned(connection, self._shard, target)
            row = connection.execute(
                text(f"""
                    insert into shardids_catalog.move
                      (shard, source, target, offline, automatic, size_bytes, step, epoch)
                    select shard, node, :target, :offline, :automatic, :size_bytes, :step, :epoch
                    from shardids_catalog.placement
                    where shard = :shard and state = 'active' and node <> :target
                    returning {COLUMNS}"""),  # noqa: S608 -- constant
                {
                    "shard": self._shard,
                    "target": target,
                    "offline": offline,
                    "automatic": automatic,
                    "size_bytes": size_bytes,
                    "step": FIRST_STEP,
                    "epoch": self.leases.epoch,
                },
            ).one_or_none()
        if row is None:
            raise ClusterConflict(f'the placement of shard {self._shard} does not allow a move to "{target}"')
        self._set(Move(**row._asdict()))
        return self.move

    def skipped(self) -> list[Skipped]:
        """Return the ticks that the shard passes over; none is added while the journal is open."""
        with self._held.transaction() as connection:
            return read_skipped(connection, "shardids_catalog", [self._shard])

    def announce(self) -> None:
        """Let clients that listen open connections to the target."""
        notice = {"channel": ARRIVALS, "notice": f"{self.move.shard} {self.move.target}"}
        with self._held.transaction() as connection:
            connection.execute(text("select pg_notify(:channel, :notice)"), notice)

    def switch_placement(self, high_water_tick: int) -> None:
        """Make the target the owner and record that only cleaning is left, in one transaction."""
        move = self.move
        with self._held.transaction() as connection:
            place_shard(connection, move.shard, source=move.source, target=move.target)
            change = "step = :step, high_water_tick = :tick"
            self._change(connection, change, step=LAST_STEP, tick=high_water_tick)
        self.step = LAST_STEP

    def is_placed(self) -> bool:
        """Return whether the placement names the target already."""
        with self._held.transaction() as connection:
            return self._is_placed(connection)

    def is_past(self, step: str, error: BaseException) -> bool:
        """Return whether the placement names the target, after a step of the pause failed with ``error``.

        Raises:
            ConnectionFailed: the catalog stays out of reach.
        """
        return self.step == LAST_STEP or (step == PLACE and self._settled(error, self._is_placed))

    def _is_placed(self, connection: Connection) -> bool:
        node = connection.execute(
            text("select node from shardids_catalog.placement where shard = :shard and state = 'active'"),
            {"shard": self.move.shard},
        ).scalar_one_or_none()
        return bool(node == self.move.target)

    def end(self, outcome: Outcome) -> None:
        """Record how the move ended."""
        self._close("outcome = :outcome, schema = null", outcome=outcome)


@contextmanager
def alone(
    catalog: Catalog, shard: int, purpose: str, *, dry_run: bool = False
) -> Iterator[tuple[str, Connection]]:
    """Yield the owner node of a shard and a connection there, under the shard's lease.

    ``purpose`` names the work to commands that meet the lease; with ``dry_run`` it is not taken.

    Raises:
        ClusterConflict: a move of it or an adoption is not over.
        ShardBusy: another command has the shard's lease.
        UnknownShard, ShardLost: no node holds it.
    """
    with Journal.opened(catalog, shard, purpose=purpose) as journal:
        journal.refuse_open()
        refuse_adoption(catalog)
        directory = Directory.read(catalog)
        node = directory.placement.locate(shard)
        with ExitStack() as kept:
            if dry_run:
                journal.refuse_leased(directory, [node.name])
            else:
                kept.enter_context(journal.leased(directory, [node.name]))
            if catalog.node_of(shard).name != node.name:
                raise ClusterConflict(
                    f"shard {shard} was moved meanwhile", hint="Look where: shardids shard list"
                )
            nodes = kept.enter_context(Nodes({node.name: node}, catalog.url, connections=2, durable=True))
            if not dry_run:
                guard(nodes[node.name], shard, journal.leases.epoch)
            yield node.name, kept.enter_context(nodes[node.name].connect())


def refuse_adoption(catalog: Catalog) -> None:
    """Refuse while an adoption is open, which fences shards and activates them itself."""
    with catalog.engine.connect() as connection:
        is_open = connection.scalar(
            text("select exists (select from shardids_catalog.adoption where ended_at is null)")
        )
    if is_open:
        raise ClusterConflict("an adoption is not over", hint="To see how far it is: shardids adopt status")
