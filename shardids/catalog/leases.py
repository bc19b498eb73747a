"""Leases of shards: the right of one command to change a shard, kept as a row on the shard's node.

A command draws an epoch, and holds an advisory lock of the catalog by that epoch as long as it lives. On
each node it takes the leases of its shards, and each of its transactions there requires them by the epoch
(``sql/engine/leases.v1.sql``). The next command takes over a lease whose holder is gone, with a new
epoch, unless an open move or adoption keeps it: then only ``--resume`` and ``--abort`` take it.
"""

from __future__ import annotations

import getpass
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from shlex import quote
from typing import Any, Final
from uuid import UUID, uuid4

from sqlalchemy import Connection, Engine, text

from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog
from shardids.errors import ConnectionFailed, MissingPrivilege, ShardBusy
from shardids.pg.locks import AdvisoryLock

_CHUNK: Final = 500
"""How many leases one transaction takes: taking one over takes a lock until the COMMIT."""
_LONGEST_NAME: Final = 63
"""How many characters of ``application_name`` a server keeps."""
_LOOK_S: Final = 0.5
"""How often to look whether a lease was returned."""
_SETTLING_S: Final = 20.0
"""How long sessions of a holder that is gone may take to end."""


class OnBusy(StrEnum):
    """How a command treats a shard whose lease another command holds."""

    WAIT = "wait"
    """Waits as long as the other command lives."""
    SKIP = "skip"
    """Leaves the shard out, and reports it."""


class Standing(StrEnum):
    """The state of a lease's holder, as the catalog knows it."""

    RUNNING = "running"
    """The process lives, and may be slow."""
    INTERRUPTED = "interrupted"
    """The process is gone, and a move or an adoption that it has not ended keeps the lease."""
    GONE = "gone"
    """The process is gone: the next command takes the lease over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A lease as a node has it.

    Attributes:
        holder: the user, machine and process that took it.
        pid: a session on the node that works under it.
        key: the key whose move keeps it.
    """

    shard: int
    node: str
    epoch: UUID
    purpose: str
    holder: str
    began_at: datetime
    standing: Standing
    pid: int | None = None
    key: str | None = None

    def row(self) -> dict[str, object]:
        """Return the lease as commands show it."""
        return {
            "shard": self.shard,
            "node": self.node,
            "what": self.purpose,
            "who": self.holder,
            "since": self.began_at.isoformat(timespec="seconds"),
            "state": self.standing.value,
        }

    def __str__(self) -> str:
        """Name it as errors do."""
        return f"{self.purpose} by {self.holder} since {self.began_at:%Y-%m-%d %H:%M:%S %Z}"

    def error(self) -> ShardBusy:
        """Return the error for a command that meets it."""
        if self.standing is Standing.INTERRUPTED and self.purpose == ADOPTION:
            return ShardBusy(
                f'shard {self.shard} is kept by an adoption that is not over [node "{self.node}"]: {self}',
                hint="To see how far it is: shardids adopt status",
            )
        if self.standing is Standing.INTERRUPTED and self.purpose == FAILOVER:
            return ShardBusy(
                f"shard {self.shard}, which was lost, is kept by a command that has not finished its home"
                f' [node "{self.node}"]: {self}',
                hint="Repeat that command, which completes it: shardids node replace",
            )
        if self.standing is Standing.INTERRUPTED and self.purpose == KEY_MOVE:
            key = self.key or ""
            return ShardBusy(
                f"shard {self.shard} is kept by an interrupted move of key {key!r}"
                f' [node "{self.node}"]: {self}',
                hint=f"Resume or undo it first: shardids tenant move {quote(key)} --resume, or --abort.",
            )
        if self.standing is Standing.INTERRUPTED:
            return ShardBusy(
                f'shard {self.shard} is kept by an interrupted {self.purpose} [node "{self.node}"]: {self}',
                hint=f"Resume or undo it first: shardids shard move {self.shard} --resume, or --abort.",
            )
        if self.standing is Standing.GONE:
            return ShardBusy(
                f'shard {self.shard}: process {self.pid} on node "{self.node}" still works for a command that'
                f" is gone: {self}",
                hint=f"Wait until it has ended, or end it there: select pg_terminate_backend({self.pid})",
            )
        return ShardBusy(
            f'shard {self.shard} is being changed by another command [node "{self.node}"]: {self}',
            hint="Wait until it has ended, as --on-busy wait does. A process that was killed, or sleeps,"
            " loses its lease within 25 s.",
        )


def lock_key(epoch: UUID) -> int:
    """Return the second part, a signed integer, of the catalog's lock that the holder of an epoch has."""
    return int.from_bytes(epoch.bytes[:4], "big", signed=True)


def lives(connection: Connection, epoch: UUID) -> bool:
    """Return whether the command of an epoch still holds its lock of the catalog."""
    return bool(connection.scalar(_ALIVE, {"epoch": epoch}))


def process_name() -> str:
    """Return the user, machine and process of this command."""
    return f"{_user()}@{socket.gethostname()}, process {os.getpid()}"


def session_name(what: str) -> str:
    """Return a name for the session that shows that a command lives: the command, the user and the time."""
    since = f" since {datetime.now(UTC):%Y-%m-%d %H:%M:%SZ}"
    return f"shardids {what} by {_user()}@{socket.gethostname()}"[: _LONGEST_NAME - len(since)] + since


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "?"


class Leases:
    """The leases of one command, which lives as long as it holds its lock of the catalog.

    Attributes:
        epoch: its transactions require the leases by it.
        purpose: the name of the command, as others read it: ``move``, ``migration``.
    """

    def __init__(self, catalog: Catalog, purpose: str) -> None:
        self.epoch: Final = uuid4()
        self.purpose: Final = purpose
        self._catalog = catalog

    @property
    def key(self) -> int:
        """Returns the second part of the lock that the command holds in the catalog."""
        return lock_key(self.epoch)

    def take(
        self, engine: Engine, node: str, shards: Iterable[int], *, keeps: Collection[int] = ()
    ) -> dict[int, Lease]:
        """Take the leases of shards on a node; return those that others hold, by shard.

        A shard with an open move belongs to that move, even if a server that was restored has lost its lease.
        ``keeps`` are the shards whose interrupted work this command takes over.
        """
        wanted, others = sorted(set(shards)), dict[int, Lease]()
        for first in range(0, len(wanted), _CHUNK):
            others |= self._take(engine, node, wanted[first : first + _CHUNK], keeps)
        mine = {shard for shard in wanted if shard not in others and shard not in keeps}
        with self._catalog.engine.connect() as connection:
            moves = [
                lease for lease in _of_moves(connection) if lease.shard in mine and lease.epoch != self.epoch
            ]
        if moves:
            self.give_back(engine, [lease.shard for lease in moves])
        return others | {lease.shard: lease for lease in moves}

    def _take(self, engine: Engine, node: str, shards: list[int], keeps: Collection[int]) -> dict[int, Lease]:
        ended = set[UUID]()
        while True:
            with engine.begin() as connection:
                values = {"shards": shards, "epoch": self.epoch, "ended": list(ended)}
                values |= {"purpose": self.purpose, "holder": process_name()}
                rows = connection.execute(_TAKE, values).all()
            with self._catalog.engine.connect() as connection:
                others = known(
                    connection,
                    [
                        (row.shard, node, row.epoch, row.purpose, row.holder, row.began_at, row.pid)
                        for row in rows
                    ],
                )
            others = [
                replace(lease, standing=Standing.GONE)
                if lease.shard in keeps and lease.standing is Standing.INTERRUPTED
                else lease
                for lease in others
            ]
            free = {lease.epoch for lease in others if lease.standing is Standing.GONE}
            if free <= ended:
                return {lease.shard: lease for lease in others}
            ended |= free

    def give_back(self, engine: Engine, shards: Iterable[int]) -> None:
        """Return the leases of shards on a node, as far as they are still this command's."""
        with engine.begin() as connection:
            connection.execute(_RETURN, {"shards": list(shards), "epoch": self.epoch})

    @contextmanager
    def held(
        self,
        engines: Mapping[str, Engine],
        shard: int,
        *,
        on_busy: OnBusy = OnBusy.SKIP,
        on_wait: Callable[[int, str], None] = lambda _attempt, _reason: None,
        takes_over: bool = False,
        clear: Callable[[str], object] = lambda _node: None,
        is_kept: Callable[[], bool] = lambda: False,
    ) -> Iterator[None]:
        """Hold a shard's lease on nodes until the block ends, or as long as ``is_kept`` says then.

        ``on_wait`` is that of :func:`obtain`. With ``takes_over`` it takes over interrupted work on the
        shard, and leaves out a node that does not answer; ``clear`` ends sessions of that work on a node.

        Raises:
            ShardBusy: another command has the lease: see :func:`obtain`.
        """

        def give_back() -> None:
            for engine in engines.values():
                with suppress(ConnectionFailed):
                    self.give_back(engine, [shard])

        def take() -> Collection[Lease]:
            others: list[Lease] = []
            for name, engine in engines.items():
                try:
                    clear(name)
                    others += self.take(engine, name, [shard], keeps=(shard,) * takes_over).values()
                except ConnectionFailed:
                    if not takes_over:
                        give_back()
                        raise
            if others:
                give_back()
            return others

        obtain(take, on_busy, on_wait)
        try:
            yield
        finally:
            if not is_kept():
                give_back()


def obtain(take: Callable[[], Iterable[Lease]], on_busy: OnBusy, on_wait: Callable[[int, str], None]) -> None:
    """Call ``take`` until it returns no lease of others; it must not keep some while it lacks others.

    ``on_wait`` receives the number of the attempt that failed, and the lease that was in its way.

    Raises:
        ShardBusy: another command has a lease, and is not to be waited for, or is gone and keeps it.
    """
    attempt, deadline = 0, time.monotonic() + _SETTLING_S
    while (other := next(iter(take()), None)) is not None:
        attempt += 1
        is_settling = other.standing is Standing.GONE and time.monotonic() < deadline
        if not is_settling and (on_busy is OnBusy.SKIP or other.standing is not Standing.RUNNING):
            raise other.error()
        if attempt == 1:
            on_wait(attempt, str(other))
        time.sleep(_LOOK_S)


def read_leases(
    catalog: Catalog, nodes: Nodes, names: Iterable[str] | None = None, *, all_must_answer: bool = True
) -> list[Lease]:
    """Return the leases on nodes, by shard; by default those of every node.

    An open move counts as one on its source, even if that was restored to a time before the move; one of a
    key on the owners of both shards.

    Raises:
        ConnectionFailed: a node does not answer, unless such nodes may be left out.
    """

    def ask(name: str, engine: Engine) -> list[tuple[Any, ...]]:
        with engine.connect() as connection:
            rows = connection.execute(text("select * from shardids.lease"))
            return [(r.shard, name, r.epoch, r.purpose, r.holder, r.began_at, None) for r in rows]

    answers = nodes.each(ask, names)
    there = answers.all() if all_must_answer else answers.results
    with catalog.engine.connect() as connection:
        found = known(connection, [row for rows in there.values() for row in rows])
        leased = {lease.shard for lease in found}
        found += [one for one in _of_moves(connection) if one.node in there and one.shard not in leased]
    return sorted(found, key=lambda lease: (lease.shard, lease.node))


def visible_leases(catalog: Catalog, nodes: Nodes) -> list[Lease]:
    """Return the leases that a role may see, on the nodes that answer: to be shown beside something else."""
    try:
        return read_leases(catalog, nodes, all_must_answer=False)
    except MissingPrivilege:
        return []


def of_owners(leases: Iterable[Lease], owners: Mapping[int, str]) -> dict[int, Lease]:
    """Return a lease for each shard that has one: that on its owner if there are several."""
    ordered = sorted(leases, key=lambda lease: owners.get(lease.shard) == lease.node)
    return {lease.shard: lease for lease in ordered}


MOVE: Final = "move"
"""The purpose of leases that an open move keeps."""
ADOPTION: Final = "adoption"
"""The purpose of leases that an open adoption keeps."""
KEY_MOVE: Final = "tenant move"
"""The purpose of leases that an open move of a key keeps."""
FAILOVER: Final = "failover"
"""The purpose of leases that the home of a lost shard keeps until it is activated."""

_TAKE: Final = text("""
    select shard, other_epoch as epoch, other_purpose as purpose, other_holder as holder,
           other_began_at as began_at, pid
    from shardids.take_leases(:shards, :epoch, :purpose, :holder, cast(:ended as uuid[]))""")
_RETURN: Final = text("select shardids.return_leases(:shards, :epoch)")

_LIVES: Final = f"""
    exists (select from pg_locks l
            where l.locktype = 'advisory' and l.granted and l.objsubid = 2
              and l.classid = {int(AdvisoryLock.LEASE_HOLDER)}
              and l.objid::bigint = ('x' || left(w.epoch::text, 8))::bit(32)::bigint
              and l.database = (select d.oid from pg_database d where d.datname = current_database()))"""  # noqa: S608 -- constant
_ALIVE: Final = text(f"select {_LIVES} from (select cast(:epoch as uuid)) w (epoch)")  # noqa: S608 -- constant
_OPEN_MOVES: Final = text(f"""
    select w.shard, w.source as node, w.epoch, '{MOVE}' as purpose, w.started_at, null as key,
           {_LIVES} as lives
    from shardids_catalog.move w where w.ended_at is null
    union all
    select p.shard, p.node, w.epoch, '{KEY_MOVE}', w.started_at, w.key, {_LIVES}
    from shardids_catalog.key_move w join shardids_catalog.placement p on p.shard in (w.source, w.target)
    where w.ended_at is null""")  # noqa: S608 -- constant
_STANDINGS: Final = text(f"""
    select w.n, {_LIVES} as lives,
           case w.purpose
             when '{MOVE}' then exists (
               select from shardids_catalog.move m where m.shard = w.shard and m.ended_at is null)
             when '{ADOPTION}' then exists (
               select from shardids_catalog.adoption a where a.ended_at is null)
             when '{KEY_MOVE}' then exists (
               select from shardids_catalog.key_move k
               where w.shard in (k.source, k.target) and k.ended_at is null)
             when '{FAILOVER}' then exists (
               select from shardids_catalog.loss l where l.shard = w.shard and l.completed_at is null)
             else false
           end as is_kept,
           case w.purpose when '{KEY_MOVE}' then (
             select k.key from shardids_catalog.key_move k
             where w.shard in (k.source, k.target) and k.ended_at is null limit 1) end as key
    from unnest(cast(:shards as integer[]), cast(:epochs as uuid[]), cast(:purposes as text[]))
      with ordinality w (shard, epoch, purpose, n)
    order by w.n""")  # noqa: S608 -- constants


def _of_moves(connection: Connection) -> list[Lease]:
    """Return open moves as leases: of shards on their sources, of keys on the owners of both shards."""
    return [
        Lease(
            shard=row.shard,
            node=row.node,
            epoch=row.epoch,
            purpose=row.purpose,
            holder="a process",
            began_at=row.started_at,
            standing=Standing.RUNNING if row.lives else Standing.INTERRUPTED,
            key=row.key,
        )
        for row in connection.execute(_OPEN_MOVES)
    ]


def known(connection: Connection, rows: Sequence[tuple[Any, ...]]) -> list[Lease]:
    """Return leases as nodes have them, each with the standing of its holder."""
    if not rows:
        return []
    shards, _nodes, epochs, purposes, *_ = zip(*rows, strict=True)
    values = {"shards": list(shards), "epochs": list(epochs), "purposes": list(purposes)}
    return [
        Lease(
            **dict(zip(("shard", "node", "epoch", "purpose", "holder", "began_at", "pid"), row, strict=True)),
            standing=Standing.RUNNING
            if there.lives
            else Standing.INTERRUPTED
            if there.is_kept
            else Standing.GONE,
            key=there.key,
        )
        for row, there in zip(rows, connection.execute(_STANDINGS, values), strict=True)
    ]
