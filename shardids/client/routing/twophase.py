"""The commit of a session's transaction on several nodes, or on none.

All nodes that were written to prepare their part, except one, the decider: it commits in one phase, with a
row that records that the transaction is committed. The row exists if and only if that COMMIT succeeded, so a
client that dies leaves no doubt; ``shardids transactions --resolve`` ends its prepared parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto
from functools import partial
from secrets import token_bytes
from typing import Any, Final
from uuid import UUID

import psycopg
from sqlalchemy import Connection, Engine, RootTransaction
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from shardids.catalog.topology import Node
from shardids.errors import (
    BadArgument,
    CommitUncertain,
    ConnectionFailed,
    MissingPrivilege,
    ShardidsError,
    UnsupportedServer,
)
from shardids.logs import logger, shown_error
from shardids.pg.gids import Gid, lock_of, transaction_of

log = logger("client")

_NODE: Final = "shardids_node"
_HAS_WRITTEN: Final = """
    select pg_catalog.pg_current_xact_id_if_assigned() is not null,
           pg_catalog.current_setting('transaction_isolation')"""
_FACTS: Final = """
    select pg_catalog.current_setting('max_prepared_transactions') as slots,
           pg_catalog.to_regprocedure('shardids.decide(bytea, bytea[])') is not null as is_there,
           pg_catalog.has_function_privilege(
             pg_catalog.to_regprocedure('shardids.decide(bytea, bytea[])'), 'execute') as is_allowed,
           current_user as role"""
_FAILURES: Final = (psycopg.Error, SQLAlchemyError, ShardidsError)


class Decisions:
    """The state that sessions of a cluster that commit on several nodes share; safe between threads.

    Attributes:
        cluster: the cluster.
        are_real: returns whether COMMIT is one, and not part of a test that is rolled back.
    """

    def __init__(self, cluster: UUID, are_real: Callable[[], bool] = lambda: True) -> None:
        self.cluster = cluster
        self.are_real = are_real
        self._fit: set[Node] = set()
        self._engines: dict[Node, tuple[Engine, Engine]] = {}
        self._ended: dict[str, deque[bytes]] = {}

    def require_fit(self, node: Node, connection: Connection) -> None:
        """Check, once per node, that it allows prepared transactions, and that this role may decide on them.

        Raises:
            BadArgument: the connection commits each statement.
            UnsupportedServer: it allows no prepared transactions, or its objects are of an older shardids.
            MissingPrivilege: the role may not decide.
        """
        if connection.connection.autocommit:
            raise BadArgument(
                f'node "{node.name}" is used in AUTOCOMMIT: each statement commits immediately',
                hint="A session with twophase=True needs another isolation level.",
            )
        if node in self._fit:
            return
        facts = connection.exec_driver_sql(_FACTS).one()
        where = f'node "{node.name}"'
        if facts.slots == "0":
            raise UnsupportedServer(
                f"{where} can't commit together with other nodes: max_prepared_transactions is 0",
                hint="Set it on its server and its standbys, to max_connections for example, and restart.",
            )
        if not facts.is_there:
            raise UnsupportedServer(
                f"{where} does not have function shardids.decide, which twophase=True needs",
                hint="An older shardids installed its objects. To upgrade them: shardids upgrade",
            )
        if not facts.is_allowed:
            raise MissingPrivilege(
                f'{where}: role "{facts.role}" may not call shardids.decide',
                hint=f"To allow it: shardids grant {facts.role}",
            )
        self._fit.add(node)

    def require_all_fit(self, nodes: Iterable[Node], engine_of: Callable[[Node], Engine]) -> None:
        """Check the nodes that can be reached as :meth:`require_fit` does; the rest at their first use."""
        for node in nodes:
            if node not in self._fit:
                with suppress(ConnectionFailed), engine_of(node).connect() as connection:
                    self.require_fit(node, connection)

    def engine(self, engine: Engine, node: Node) -> Engine:
        """Return a node's engine for sessions that commit on several nodes; it shares the pool.

        Raises:
            BadArgument: a test is rolled back.
        """
        if not self.are_real():
            raise BadArgument(
                "twophase=True needs a real COMMIT, and this test is rolled back",
                hint="Test it without shard_rollback, and delete its rows.",
            )
        if self._engines.get(node, (None,))[0] is not engine:
            made = engine.execution_options(**{_NODE: node})
            # SQLAlchemy commits in two phases per node; here a transaction over nodes is ended by that one of
            # its parts which is asked first, also if that one is lost.
            made.connect = partial(_PartConnection, made)  # type: ignore[method-assign]  # see above
            self._engines[node] = (engine, made)
        return self._engines[node][1]

    def add_ended(self, decider: str, secret: bytes) -> None:
        """Remember a transaction that was committed on all nodes: nobody needs its decision any more."""
        self._ended.setdefault(decider, deque()).append(secret)

    def take_ended(self, decider: str) -> list[bytes]:
        """Return the secrets of such transactions, each of them once."""
        ended, taken = self._ended.get(decider, deque()), []
        while ended:
            try:
                taken.append(ended.popleft())
            except IndexError:  # Another thread took the last.
                break
        return taken


class Stage(Enum):
    """The stage of the commit of a session's transaction."""

    OPEN = auto()
    PREPARED = auto()
    DECIDING = auto()
    COMMITTED = auto()
    ROLLED_BACK = auto()


class Part(RootTransaction):
    """The transaction of a session on one node."""

    __slots__ = ("gid", "whole")

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.gid: str | None = None
        self.whole: Whole | None = None

    @property
    def node(self) -> Node:
        """The node."""
        node: Node = self.connection.get_execution_options()[_NODE]
        return node

    def prepare(self) -> None:
        """Prepare all parts of the whole; SQLAlchemy calls it for each of them."""
        if self.whole is not None:
            self.whole.prepare()

    def commit_here(self) -> None:
        """Send COMMIT."""
        super().commit()

    def commit(self) -> None:
        """Commit the whole, if it is not committed yet."""
        if self.whole is None or not self.whole.commit(self):
            self.commit_here()

    def rollback(self) -> None:
        """Roll back the whole."""
        try:
            super().rollback()
        finally:
            self._roll_back_prepared()

    def close(self) -> None:
        """Roll back the whole, unless it is committed."""
        try:
            super().close()
        finally:
            self._roll_back_prepared()

    def _roll_back_prepared(self) -> None:
        # SQLAlchemy leaves the other parts alone when this one's connection is lost.
        if self.whole is not None:
            self.whole.roll_back_prepared()


class _PartConnection(Connection):
    """A connection whose transaction is one part of a session's."""

    def begin_twophase(self, xid: Any = None) -> Any:
        """Act as :meth:`sqlalchemy.Connection.begin_twophase`; the name is given when it is prepared."""
        return Part(self)


class Whole:
    """One transaction of a session, and its parts on the nodes.

    Args:
        decisions: the shared state of the cluster's sessions.
    """

    def __init__(self, decisions: Decisions) -> None:
        self._decisions = decisions
        self._secret = token_bytes(32)
        self._parts: list[Part] = []
        self._decider: Part | None = None
        self._levels: set[str] = set()
        self._stage = Stage.OPEN

    def add(self, part: Part) -> None:
        """Add the part of another node."""
        if part.whole is None:
            part.whole = self
            self._parts.append(part)

    def prepare(self) -> None:
        """Prepare the parts that have written, except the decider's; parts that only read need no PREPARE."""
        if self._stage is not Stage.OPEN:
            return
        to_prepare = self._written() if len(self._parts) > 1 else []
        if len(to_prepare) > 1:
            self._decider = to_prepare[0]
            try:
                self._prepare(to_prepare, self._decider.node.name)
            except BaseException:
                self.roll_back_prepared()
                raise
        self._stage = Stage.PREPARED

    def _prepare(self, parts: list[Part], decider: str) -> None:
        name = transaction_of(self._secret)
        # For whoever looks for this session while it is stopped: no other transaction takes this lock.
        parts[0].connection.exec_driver_sql(
            "select pg_catalog.pg_advisory_xact_lock_shared(%s)", (lock_of(name),)
        )
        for number, part in enumerate(parts[1:], 2):
            gid = Gid(
                cluster=self._decisions.cluster,
                transaction=name,
                number=number,
                count=len(parts),
                decider=decider,
            )
            # Kept before it is sent: a PREPARE whose answer is lost may have been carried out.
            part.gid = str(gid)
            part.connection.exec_driver_sql(f"PREPARE TRANSACTION '{gid}'")

    def commit(self, part: Part) -> bool:
        """Decide, and commit the prepared parts, before SQLAlchemy commits the first part.

        Returns whether nothing is left to do for ``part``.

        Raises:
            CommitUncertain: the connection to the decider was lost during COMMIT. Prepared parts stay so.
        """
        if self._decider is None:
            return False
        if self._stage is Stage.PREPARED:
            with self._undone_if_it_fails():
                self._decide(self._decider)
            self._stage = Stage.COMMITTED
            ended = [self._end(part, "commit") for part in self._parts if part.gid is not None]
            if all(ended):
                self._decisions.add_ended(self._decider.node.name, self._secret)
        if part is not self._decider:
            # The transaction is committed, whatever becomes of this: it is prepared, or it only read.
            with suppress(*_FAILURES):
                part.commit_here()
        return True

    def roll_back_prepared(self) -> None:
        """Roll back the prepared parts, unless the transaction is, or may be, committed."""
        if self._stage in (Stage.OPEN, Stage.PREPARED):
            self._stage = Stage.ROLLED_BACK
            for part in self._parts:
                if part.gid is not None:
                    self._end(part, "roll back")

    def _written(self) -> list[Part]:
        """Return the parts to prepare, in the order of their first statements, first one that has an ID.

        Under SERIALIZABLE these are all parts, for there a COMMIT that wrote nothing can also fail.
        """
        wrote, read = [], []
        for part in self._parts:
            has_written, level = part.connection.exec_driver_sql(_HAS_WRITTEN).one()
            if has_written:
                wrote.append(part)
            elif level == "serializable":
                read.append(part)
            self._levels.add(level)
        return wrote + read if wrote else []

    def _decide(self, decider: Part) -> None:
        # At another level an error may come of rows that others delete at the same time.
        ended = self._decisions.take_ended(decider.node.name) if self._levels == {"read committed"} else []
        decider.connection.exec_driver_sql("select shardids.decide(%s, %s)", (self._secret, ended))
        self._stage = Stage.DECIDING
        decider.commit_here()

    @contextmanager
    def _undone_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # Whatever else ends COMMIT, an interrupt for example, leaves open what the server did.
            was_refused = isinstance(error, DBAPIError) and not error.connection_invalidated
            if isinstance(error, ShardidsError) and not isinstance(error, CommitUncertain):
                was_refused = True
            if self._stage is Stage.PREPARED or was_refused:
                self._stage = Stage.PREPARED
                self.roll_back_prepared()
            raise

    def _end(self, part: Part, verb: str) -> bool:
        """Commit or roll back a part that is, or may be, prepared; return whether that is done."""
        connection = part.connection
        end: Callable[..., None] = {
            "commit": connection.commit_prepared,
            "roll back": connection.rollback_prepared,
        }[verb]
        if connection.closed or connection.invalidated:
            reason = "the connection is lost"
        else:
            try:
                end(part.gid, recover=True)
            except psycopg.errors.UndefinedObject:
                return True  # It was never prepared, or somebody else has ended it.
            except _FAILURES as error:
                reason = shown_error(error)
            else:
                return True
        log.warning(
            'transaction %s stays prepared on node "%s", where it is to be %s: %s;'
            " shardids transactions --resolve ends it",
            part.gid,
            part.node.name,
            "committed" if verb == "commit" else "rolled back",
            reason,
            extra={"node": part.node.name},
        )
        return False
