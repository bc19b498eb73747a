"""The steps of a key's move; each can be repeated and undone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from shlex import quote
from typing import Final

from psycopg import sql
from sqlalchemy import Connection, text

from shardids.catalog.keys.copies import bring_homes
from shardids.catalog.leases import OnBusy
from shardids.catalog.query_node import query_node_of
from shardids.catalog.rows import Catalog
from shardids.errors import ClusterConflict, MoveFailed, ShardidsError
from shardids.pg.locks import OpenTransaction, open_transactions
from shardids.replication.barrier import PutOff, stop_in_a_quiet_moment
from shardids.replication.sides import Side
from shardids.replication.steps import OnEvent, Step, Waiting
from shardids.tables.views import follow
from shardids.tables.views.refresh import are_others_unsettled, hide
from shardids.tenants.arriving import Arriving, Verified
from shardids.tenants.entries import keys_of_others, redirect
from shardids.tenants.family import Family, run
from shardids.tenants.journal import CLEAN, GUARD, SWITCHED, KeyJournal
from shardids.tenants.leaving import KeyBarrier, Leaving, remove_rows, unguard
from shardids.tenants.planning import Ends

_COPY: Final = "copy"
_CLOSE_ENOUGH_S: Final = 0.2
"""The target is close enough to the source when a round takes less than this, or half the pause."""
_PATIENCE_S: Final = 120.0
"""How long rounds may fail to get quicker, and how long readers from before are waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a key is moved.

    Attributes:
        max_pause_s: how long writers of the key may wait.
        settle_s: how long clients have to hear that rows are on their way, before and after the switch.
        verify: compare all rows of both shards before the switch.
        on_busy: what to do while another command has the lease of a shard.
        trusted: roles whose code may run as the role that moves: see :mod:`shardids.pg.schemas`.
    """

    max_pause_s: float = 1.0
    settle_s: float = 2.0
    verify: bool = True
    on_busy: OnBusy = OnBusy.WAIT
    trusted: tuple[str, ...] = ()


DEFAULTS: Final = Options()


class Actions:
    """Takes and undoes the steps of one move. Every method of the table below is idempotent."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        journal: KeyJournal,
        leaving: Leaving,
        arriving: Arriving,
        ends: Ends,
        family: Family,
        returns: Sequence[int],
        options: Options,
        on_event: OnEvent,
    ) -> None:
        self.pause_ms: float | None = None
        self.unsettled_ms: float | None = None
        self.verified: Verified | None = None
        self.stale_views: tuple[str, ...] = ()
        self._catalog = catalog
        self._journal = journal
        self._leaving = leaving
        self._arriving = arriving
        self._target = ends.target
        self._schema = ends.target_schema
        self._family = family
        self._nodes = (ends.source.name, ends.target.name)
        self._returns = list(returns)
        self._options = options
        self._on_event = on_event
        self._version: tuple[str, int] | None = None
        self._unsettled_since: float | None = None
        self._is_settled = False
        self._is_guarded = False
        self._attempt = 0

    def guard(self) -> None:
        """Create the barrier of the key in the source, open."""
        self._leaving.guard(self._on_wait)
        self._is_guarded = True

    def unguard(self) -> None:
        """Drop the barrier of the key."""
        self._leaving.unguard(self._on_wait, refuses=False)

    def copy(self) -> None:
        """Bring the rows into the open transaction of the target, and catch up with the source."""
        self._leaving.reopen()
        if not self._is_guarded:
            # After an interruption: tables may have been made since. Its locks wait for those who have
            # written without a note, while the gate was closed.
            self.guard()
        self.remove_arrived()
        with self._leaving.side.autocommit() as source:
            self._version = self._leaving.version(source)
        self._arriving.copy()
        self._release_listed()
        for ids in self._arriving.ids():
            self._journal.list_ids(ids)
        self._catch_up()
        if self._options.verify:
            self.verified = self._arriving.verify()
            self._catch_up()

    def _release_listed(self) -> None:
        if listed := self._journal.listed_ids():
            # By an attempt or a move before: some of the rows may be another key's now.
            with self._leaving.side.begin() as source:
                for part in self._family.parts:
                    self._release(keys_of_others(source, self._family, part, listed))

    def remove_arrived(self) -> None:
        """Remove the rows of an attempt before from the target: they were committed, and not switched."""
        self._arriving.close()
        # Without their record all rows are of others: one may have the same primary key there.
        if self._arriving.has_arrived():
            remove_rows(
                self._target, self._family, self._schema, self._returns, trusted=self._options.trusted
            )
            self._arriving.forget()

    def _catch_up(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            began = time.monotonic()
            self._follow()
            if time.monotonic() - began < max(_CLOSE_ENOUGH_S, self._options.max_pause_s / 2):
                return
            if time.monotonic() > deadline:
                raise MoveFailed(
                    f"shard {self._journal.move.target} does not catch up with key"
                    f" {self._journal.move.key!r}: its rows are written to faster than they arrive",
                    hint="Resume with --resume when less is written, or undo the move with --abort.",
                )

    def announce(self) -> None:
        """Let statements over several shards be refused, and wait for all transactions from before to end."""
        try:
            self._announce()
        except BaseException:
            with suppress(ShardidsError):
                self.retract()
            raise

    def _announce(self) -> None:
        # Before anybody is refused: those that stay open for long.
        self._await_transactions()
        self._unsettle()
        until = time.monotonic() + self._options.settle_s
        while (left := until - time.monotonic()) > 0:
            self._follow()
            time.sleep(min(left, 0.25))
        # Everybody has heard of it now: whoever asked the first of several shards before is refused the rest.
        self._await_transactions()

    def _unsettle(self) -> None:
        self._unsettled_since, self._is_settled = time.monotonic(), False
        self._journal.unsettle(is_unsettled=True)
        if (there := query_node_of(self._catalog)) is not None:
            hide(self._catalog, there, {part.name for part in self._family.parts}, self._nodes)

    def _await_transactions(self) -> None:
        """Wait until all transactions on both nodes that have begun until now have ended.

        Idle ones count too: one that has changed the rows of one shard may be about to ask another one.

        Raises:
            MoveFailed: one has not ended in time.
        """
        before = {side: _transactions(side) for side in (self._leaving.side, self._target)}
        deadline = time.monotonic() + _PATIENCE_S
        for side, began in before.items():
            while found := next((one for id_, one in _transactions(side).items() if id_ in began), None):
                self._wait(f'a transaction on node "{side.name}" is open since before the move: {found}')
                if time.monotonic() > deadline:
                    raise MoveFailed(
                        f'a transaction on node "{side.name}" is open since before the move, for over'
                        f" {_PATIENCE_S:g} s: {found}",
                        hint="When it has ended, or after pg_terminate_backend() of its process there, resume"
                        " with --resume; or undo the move with --abort.",
                    )
                self._follow()
                time.sleep(0.25)

    def _follow(self) -> None:
        self._arriving.follow()
        self._journal.list_ids(self._arriving.new_ids())
        self._release(self._arriving.given_ids())

    def _release(self, given: Mapping[int, str]) -> None:
        """Let IDs whose rows are other keys' in the source follow these keys."""
        for key in sorted(set(given.values())):
            self._journal.list_ids([one for one, its in given.items() if its == key], key=key)

    def retract(self) -> None:
        """Let statements over several shards be answered again."""
        if self._is_settled:
            return
        # A process whose entry was taken over shows nothing.
        self._journal.require()
        move = self._journal.move.id
        # While rows of another key are in two shards the tables stay hidden, until its move ends.
        waits = are_others_unsettled(self._catalog, move)
        if not waits:
            # First: whoever hears that rows are settled may ask the query node.
            self.stale_views = follow(self._catalog, settled=move)
        self._journal.unsettle(is_unsettled=False)
        if waits and not self._catalog.placement().unsettled:
            # It has ended meanwhile, and has left this to this move.
            self.stale_views = follow(self._catalog)
        if self._unsettled_since is not None:
            self.unsettled_ms = (time.monotonic() - self._unsettled_since) * 1000
            self._unsettled_since = None
        self._is_settled = True

    def switch(self) -> None:
        """Make writers of the key wait, take over the last rows, and make the target its home."""
        stop_in_a_quiet_moment(
            self._try_switch,
            on_wait=self._on_wait,
            too_late=lambda reason: MoveFailed(
                f"key {self._journal.move.key!r} could not be switched {reason}",
                hint="Resume it with --resume, perhaps with a longer --max-pause; undo it with --abort.",
            ),
            between=self._catch_up,
        )

    def _try_switch(self) -> None:
        barrier = KeyBarrier(self._leaving, self._options.max_pause_s)
        try:
            with self._leaving.side.autocommit() as watching:
                self._require_version(watching)
                since = barrier.close()
                self._leaving.refuse_holders(watching)
                self._arriving.follow(is_last=True)
                self._release(self._arriving.given_ids())
                if time.monotonic() - since > self._options.max_pause_s * 0.8:
                    raise PutOff("the last rows did not arrive in time")
                self._require_version(watching)
            barrier.refuse()
            self._arriving.commit()
            self._journal.switch(self.verified.total if self.verified else 0, self._arriving.new_ids())
        except BaseException:
            # Before writers go on: the gate may be closed.
            if self._arriving.is_open:
                with suppress(ShardidsError):
                    self._leaving.reopen()
            raise
        finally:
            barrier.release()
        self.pause_ms = (time.monotonic() - since) * 1000

    def _require_version(self, watching: Connection) -> None:
        if self._leaving.version(watching) != self._version:
            raise ClusterConflict(
                f"the schema of shard {self._journal.move.source} was changed while rows of key"
                f" {self._journal.move.key!r} were moved",
                hint="Undo the move with --abort, then start it again.",
            )

    def reopen(self) -> None:
        """Let writers of the key pass in the source, where it lives still."""
        self._arriving.close()
        self._leaving.reopen()
        self.remove_arrived()
        self.retract()

    def switch_again(self) -> None:
        """Record the switch in a catalog that has lost it: the target has the rows, and has taken writes.

        Rows may have been removed from the source, so IDs, claims and old IDs are those of the target's.
        """
        move = self._journal.move
        self._arriving.record_home()
        # Rows may be in both shards.
        self._unsettle()
        time.sleep(self._options.settle_s)
        self._release_listed()
        with self._target.begin() as connection:
            for ids in self._arriving.ids(connection):
                self._journal.list_ids(ids)
        there, require = replace(self._family, schema=self._schema), self._journal.require
        redirect(self._catalog, self._target, there, move.source, move.target, require=require)
        self._journal.switch(0, [])

    def settle(self) -> None:
        """Let look-ups and old IDs lead to the target, and keep the rows until clients have heard of it."""
        move = self._journal.move
        self._require_arrival()
        self._arriving.confirm()
        self._redirect(move.source, move.target)
        bring_homes(self._catalog)
        time.sleep(self._options.settle_s)

    def _redirect(self, source: int, target: int) -> None:
        side, require = self._leaving.side, self._journal.require
        redirect(self._catalog, side, self._family, source, target, require=require)

    def remove(self) -> None:
        """Remove the key's rows from the source, which refuses the key for good from now on.

        The barrier is dropped when they are gone: until then it is what refuses rows that refer to them.
        """
        self._require_arrival()
        self._arriving.confirm()
        self._leaving.remove(lambda _rows: self._require_removal())
        # Before the locks on tables, for which readers may let it wait.
        self.retract()
        self._leaving.unguard(self._on_wait, refuses=True)

    def _require_removal(self) -> None:
        """Require that the next rows may be removed from the source: by this process, and they arrived."""
        self._journal.require()
        self._require_arrival()

    def _require_arrival(self) -> None:
        """Require that the target still has the rows, before more of them are removed from the source.

        Raises:
            MoveFailed: a standby has taken the place of its node, and lacks the transaction of their arrival.
        """
        if self.has_arrived():
            return
        self._require_whole_source()
        raise self._never_arrived(
            f"shard {self._journal.move.source} has them all, as of the switch, and refuses writes to them",
            f"To make that shard the key's home again: shardids tenant move {quote(self._journal.move.key)}"
            " --abort. Writes to the key since the switch are lost with the former server.",
        )

    def _require_whole_source(self) -> None:
        """Require that no rows were removed from the source, which the target lacks."""
        move = self._journal.move
        if self._journal.step != SWITCHED:
            raise self._never_arrived(
                f"shard {move.source} has only those that were not removed yet",
                f"Bring all of them into shard {move.target} by hand: those of shard {move.source}, and the"
                f" others from a backup of node {self._leaving.side.name}. Enter move {move.id} in table"
                f" shardids.key_arrival of node {self._target.name}. Then --resume.",
            )

    def has_arrived(self) -> bool:
        """Return whether the rows were committed on the server that the target has now."""
        return self._arriving.has_arrived()

    def _never_arrived(self, state: str, remedy: str) -> MoveFailed:
        move = self._journal.move
        return MoveFailed(
            f'node "{self._target.name}" lacks the rows of key {move.key!r} that had arrived in shard'
            f" {move.target}: its server was replaced by one that had not received them; {state}",
            hint=remedy,
        )

    def give_back(self) -> None:
        """Make the source the key's home again, after a switch whose rows the target has lost.

        Raises:
            MoveFailed: rows may have been removed from the source, or the target has new rows of the key.
        """
        move = self._journal.move
        self._require_whole_source()
        # Claims first: each leads to a row.
        self._redirect(move.target, move.source)
        with self._target.begin() as connection:
            connection.execute(_PATIENCE)
            for part in self._family.parts:
                # Nobody writes new rows of the key until the directory names the source.
                table = sql.Identifier(self._schema, part.name)
                run(connection, sql.SQL("lock table {} in share row exclusive mode").format(table))
                made = sql.SQL("select count(*) from {} a where {}").format(
                    table, self._family.is_of(part, "a", self._schema)
                )
                if count := run(connection, made).scalar_one():
                    raise self._never_arrived(
                        f"{count} rows of the key were made in its table {part.name} since",
                        f"Delete them there, or bring them into shard {move.source} by hand afterwards. Then:"
                        f" shardids tenant move {quote(move.key)} --abort",
                    )
            self._journal.give_back()
        bring_homes(self._catalog)

    def clean(self) -> None:
        """End the target's refusal of a key that has come back, and forget the arrival."""
        for move in self._returns:
            # Also from tables whose rows stay this time.
            unguard(self._target, self._schema, move, self._on_wait, refuses=False)
            with self._target.begin() as connection:
                connection.execute(text("delete from shardids.key_return where move = :move"), {"move": move})
        self._arriving.forget()

    def _wait(self, reason: str) -> None:
        self._attempt += 1
        self._on_wait(self._attempt, reason)

    def _on_wait(self, attempt: int, reason: str) -> None:
        self._on_event(Waiting(attempt=attempt, reason=reason))


def _transactions(side: Side) -> dict[str, OpenTransaction]:
    """Return the transactions of clients on a node, by their IDs; not those of moves of keys."""
    with side.autocommit() as connection:
        return {
            one.id: one
            for one in open_transactions(connection)
            if one.backend in (None, "client backend") and not one.application.startswith("shardids_key_")
        }


_PATIENCE: Final = text("set local lock_timeout = '5s'")

# fmt: off
STEPS: Final[tuple[Step[Actions], ...]] = (
    Step(name=GUARD, act=Actions.guard, undo=Actions.unguard),
    Step(name=_COPY, act=Actions.copy, undo=Actions.remove_arrived),
    Step(name="announce", act=Actions.announce, undo=Actions.retract, is_journaled=False),
    # The switch: the key lives in the source before it, in the target after it.
    Step(name="switch", act=Actions.switch, undo=Actions.reopen, back_to=_COPY, is_journaled=False),
    Step(name=SWITCHED, act=Actions.settle),
    Step(name="remove", act=Actions.remove),
    Step(name=CLEAN, act=Actions.clean),
)
# fmt: on
