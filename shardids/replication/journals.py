"""The journal of one move, open for writing, and the leases of the process that writes it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar, Generic, Protocol, Self, TypeVar
from uuid import UUID

from sqlalchemy import Connection, Engine, text

from shardids.catalog.leases import Leases, OnBusy, lives
from shardids.catalog.rows import Catalog
from shardids.errors import ClusterConflict, CommitUncertain, ConnectionFailed, MoveFailed
from shardids.pg.locks import AdvisoryLock
from shardids.replication.barrier import HeldLock
from shardids.replication.sides import Side


class Entry(Protocol):
    """A move as a journal records it: its number, its last step, and the epoch of its leases."""

    @property
    def id(self) -> int: ...  # noqa: D102 -- see the class
    @property
    def step(self) -> str: ...  # noqa: D102
    @property
    def epoch(self) -> UUID: ...  # noqa: D102


E = TypeVar("E", bound=Entry)


class MoveJournal(Generic[E]):
    """The journal of one move's subject, open for writing, and the leases of the process that writes it.

    It writes only while the entry has the epoch of its leases: a process that wakes when another has taken
    the entry over writes nothing.

    Attributes:
        TABLE, FIRST: the table of the catalog, and the first step.
        COMMAND: the command that moves it.
        NAME: the name of the session that holds the journal.
        subject: the shard or the key that is moved, as errors name it.
        argument: the same, as the command takes it.
        step: the step that is taken, or is to be taken next.
        leases: those of this command.
    """

    TABLE: ClassVar[str]
    FIRST: ClassVar[str]
    COMMAND: ClassVar[str]
    NAME: ClassVar[str] = "shardids_journal"

    def __init__(
        self, catalog: Catalog, held: HeldLock, leases: Leases, *, subject: str, argument: str
    ) -> None:
        self._catalog = catalog
        self._held = held
        self._move: E | None = None
        self.subject = subject
        self.argument = argument
        self.leases = leases
        self.step = self.FIRST

    @classmethod
    @contextmanager
    def _opened(
        cls,
        catalog: Catalog,
        purpose: str,
        *,
        subject: str,
        argument: str,
        find: Callable[[Connection], E | None],
        takes_over: bool,
    ) -> Iterator[Self]:
        """Yield the journal, and close it afterwards.

        ``find`` reads the open entry; with ``takes_over`` one that was interrupted becomes this process's.

        Raises:
            ClusterConflict: another process works at the entry.
        """
        leases = Leases(catalog, purpose)
        taken = being_moved(subject, cls.COMMAND)
        lost = ConnectionFailed(
            f"the journal of {subject} was lost, with the connection to the catalog",
            hint="When the catalog answers again: --resume or --abort.",
        )
        with HeldLock.taken(
            catalog, AdvisoryLock.LEASE_HOLDER, leases.key, taken=taken, lost=lost, name=cls.NAME
        ) as held:
            journal = cls(catalog, held, leases, subject=subject, argument=argument)
            with held.transaction() as connection:
                found = find(connection)
                if found is not None and (
                    lives(connection, found.epoch)
                    or (takes_over and not take_over(connection, cls.TABLE, found, leases.epoch))
                ):
                    raise taken
            if found is not None:
                journal._set(found)
            yield journal

    @contextmanager
    def _holding(
        self,
        engines: Mapping[str, Engine],
        shard: int,
        *,
        on_busy: OnBusy,
        on_wait: Callable[[int, str], None] = lambda _attempt, _reason: None,
        former: str | None = None,
    ) -> Iterator[None]:
        """Hold a shard's lease on nodes until the block ends, or as long as the move is open.

        ``former`` names the sessions of the process that had the entry before: they are ended. A node that
        does not answer is passed over then: an abort leaves the objects on such a target.

        Raises:
            ShardBusy: another command has the lease: see :func:`shardids.catalog.leases.obtain`.
        """

        def end_former(node: str) -> None:
            if former is not None:
                Side(name=node, engine=engines[node]).end_sessions(former)

        with self.leases.held(
            engines,
            shard,
            on_busy=on_busy,
            on_wait=on_wait,
            takes_over=former is not None,
            clear=end_former,
            is_kept=lambda: self.is_open,
        ):
            yield

    @property
    def move(self) -> E:
        """Returns the move that is not over.

        Raises:
            ClusterConflict: no move is open.
        """
        if self._move is None:
            raise ClusterConflict(f"no move of {self.subject} is under way")
        return self._move

    @property
    def is_open(self) -> bool:
        """Returns whether a move is not over."""
        return self._move is not None

    def refuse_open(self) -> None:
        """Refuse if a move is not over.

        Raises:
            ClusterConflict: a move was begun and has neither ended nor been aborted.
        """
        if self._move is not None:
            raise ClusterConflict(
                f"a move of {self.subject} from {self._route(self._move)} was interrupted at step"
                f' "{self.step}"',
                hint=f"To resume it: {self.COMMAND} {self.argument} --resume; to undo it: --abort",
            )

    @abstractmethod
    def _route(self, move: E) -> str:
        """Return where a move goes from and to, as errors name it."""

    def require(self) -> None:
        """Require that the entry is still this process's.

        Raises:
            MoveFailed: another has taken it over, or closed it.
        """
        self._update("step = step")

    def begin_step(self, step: str) -> None:
        """Record the step that is taken next."""
        self._update("step = :step", step=step)
        self.step = step

    def _settled(self, error: BaseException, ask: Callable[[Connection], bool]) -> bool:
        """Return the answer of ``ask`` if ``error`` may hide that a COMMIT was made.

        After an unanswered COMMIT it asks the catalog; an interrupt may also have come before the answer. If
        the session of the lock is lost, it is ended first, with the lock.

        Raises:
            ConnectionFailed: the catalog stays out of reach.
        """
        is_unknown = isinstance(error, CommitUncertain) or not isinstance(error, Exception)
        return is_unknown and self._held.settled(self._catalog, ask)

    def _set(self, move: E) -> None:
        self._move, self.step = move, move.step

    def _close(self, change: str, **values: object) -> None:
        """Record how the move ended."""
        self._update(f"ended_at = clock_timestamp(), {change}", **values)
        self._move, self.step = None, self.FIRST

    def _update(self, change: str, **values: object) -> None:
        with self._held.transaction() as connection:
            self._change(connection, change, **values)

    def _change(self, connection: Connection, change: str, **values: object) -> None:
        changed = connection.execute(
            text(f"""update shardids_catalog.{self.TABLE} set {change}
                     where id = :id and ended_at is null and epoch = :epoch"""),  # noqa: S608 -- constants
            values | {"id": self.move.id, "epoch": self.leases.epoch},
        ).rowcount
        if changed != 1:
            raise MoveFailed(
                f"the journal's entry of {self.subject} was taken over, or closed, by another process"
            )


def being_moved(subject: str, command: str) -> ClusterConflict:
    """Return the error for a subject that a living process moves."""
    return ClusterConflict(
        f"{subject} is being moved by another process", hint=f"To see how far it is: {command} --list"
    )


def take_over(connection: Connection, table: str, move: Entry, epoch: UUID) -> bool:
    """Give the entry of an interrupted move to the command of an epoch; return whether no other was faster.

    Processes that had it before write nothing more.
    """
    changed = connection.execute(
        text(f"""update shardids_catalog.{table} set epoch = :epoch
                 where id = :id and ended_at is null and epoch = :before"""),  # noqa: S608 -- constants
        {"epoch": epoch, "id": move.id, "before": move.epoch},
    )
    return changed.rowcount == 1
