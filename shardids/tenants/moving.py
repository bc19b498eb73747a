"""Moves of keys: run, resumed and undone.

The journal records each step before it is taken. Until the directory of keys has the new home, the key lives
in the source, and all that the target has of it is removed by an undo or before the next attempt; from then
on only the source is cleaned.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from shlex import quote
from typing import Final

from sqlalchemy import Engine, text

from shardids.catalog.keys.homes import kinds_of, refused_keys
from shardids.catalog.leases import OnBusy
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import schema_name
from shardids.errors import ClusterConflict, MoveFailed, ShardidsError
from shardids.replication.sides import Directory, Side, move_nodes
from shardids.replication.steps import ABORT, OnEvent, Report, Runner, ignore
from shardids.tenants.arriving import Arriving, is_home
from shardids.tenants.examining import require_trusted
from shardids.tenants.family import Choices, Family, read_family
from shardids.tenants.journal import CLEAN, KeyJournal, KeyMove, Outcome, read_key_moves
from shardids.tenants.leaving import Leaving, has_left
from shardids.tenants.making import NewShard, make, require_unused
from shardids.tenants.planning import chosen, ends_of, examined, refuse_new_tables
from shardids.tenants.steps import DEFAULTS, STEPS, Actions, Options
from shardids.traces import span


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyResult:
    """How a move ended.

    ``pause_ms`` is how long writers of the key waited, ``unsettled_ms`` how long statements over several
    shards were refused; ``None`` where this process did not see it. ``rows`` is their number, by table, if
    they were compared. ``stale_views`` says why the query node could not be refreshed.
    """

    key: str
    source: int
    target: int
    outcome: Outcome
    seconds: float
    pause_ms: float | None = None
    unsettled_ms: float | None = None
    rows: Mapping[str, int] = field(default_factory=dict)
    stale_views: tuple[str, ...] = ()


class _Mover:
    """One move and the means to take its steps. :meth:`opened` makes it."""

    def __init__(self, journal: KeyJournal, actions: Actions, report: Report) -> None:
        self._journal = journal
        self._move = journal.move
        self._actions = actions
        self._report = report
        self._runner = Runner(actions, report, journal, self._stuck)
        self._started = time.monotonic()

    def _stuck(self, step: str, error: BaseException, second: ShardidsError) -> MoveFailed:
        return MoveFailed(
            f"key {self._move.key!r} may take no writes: step {step!r} of its move failed ({error}), and so"
            f" did making shard {self._move.source} take them again ({second.message})",
            hint="When the nodes answer again: --resume or --abort.",
        )

    def run(self) -> KeyResult:
        """Take the steps from the one that the journal is at to the last."""
        with span("shardids.tenant.move", source=self._move.source, target=self._move.target):
            self._runner.take(STEPS)
            self._journal.end("moved")
        return self._result("moved")

    def undo(self) -> KeyResult:
        """Make the source the key's only shard, and remove all that the move has created."""
        with span("shardids.tenant.abort", source=self._move.source, target=self._move.target):
            self._runner.abort(STEPS)
            self._journal.end("aborted")
        return self._result("aborted")

    def switch_again(self) -> None:
        """Record the switch in a catalog that has lost it; the steps after it follow."""
        self._actions.switch_again()

    def give_back_or_run(self) -> KeyResult:
        """Complete a move whose key lives in the target; undo it if the target's server lost the rows."""
        # The last step deletes the record of the arrival: all rows were removed from the source before it.
        if self._journal.step == CLEAN or self._actions.has_arrived():
            return self.run()
        self._actions.give_back()
        return self.undo()

    def _result(self, outcome: Outcome) -> KeyResult:
        actions = self._actions
        result = KeyResult(
            key=self._move.key,
            source=self._move.source,
            target=self._move.target,
            outcome=outcome,
            seconds=time.monotonic() - self._started,
            pause_ms=actions.pause_ms,
            unsettled_ms=actions.unsettled_ms,
            rows=actions.verified.rows if actions.verified and outcome == "moved" else {},
            stale_views=actions.stale_views,
        )
        self._report.ended(outcome, seconds=result.seconds, pause_ms=result.pause_ms, outcome=outcome)
        return result


def move(
    catalog: Catalog,
    key: str,
    target: int | None = None,
    choices: Choices | None = None,
    *,
    new: NewShard | None = None,
    options: Options = DEFAULTS,
    back: bool = False,
    on_event: OnEvent = ignore,
) -> KeyResult:
    """Move a key and its rows to another shard.

    Interrupted while it makes a ``new`` shard, or after that, it goes on with the same one when it is called
    again. One that was made stays, empty, if the move is undone: the next key that gets a new one takes it.

    Args:
        catalog: the catalog.
        key: the key as text.
        target: the shard; with ``back`` the one that the key was last moved from.
        choices: how its rows are found; as the last time if it is ``None``.
        new: the shard to make for it, in place of ``target``.
        options: how it is moved.
        back: move the key back.
        on_event: receives the events.

    Raises:
        BadArgument, ClusterConflict, MoveRefused: see :func:`plan`; nothing was touched.
        ShardBusy: another command has the lease of a shard; nothing was touched.
        MoveFailed: the move stopped before its end. The key takes writes in the source if that was possible.
    """
    with KeyJournal.opened(catalog, key) as journal:
        journal.refuse_open()
        target, choices = chosen(catalog, key, target, choices, new=new, back=back)
        found, _ = examined(catalog, key, target, choices, options.trusted)
        if new is not None:
            target = make(catalog, new, found.source, on_event)
        assert target is not None  # noqa: S101 -- chosen() requires it
        directory = Directory.read(catalog)
        with _leased(journal, directory, (found.source, target), options.on_busy):
            if new is not None:
                require_unused(catalog, target)
            # While it waited for the leases, rows and tables may have changed.
            again, family = examined(catalog, key, target, choices, options.trusted)
            if again.source != found.source:
                raise ClusterConflict(
                    f"key {key!r} was moved meanwhile, to shard {again.source}",
                    hint="Run the command again if it is to move on.",
                )
            document = choices.document() | {"anchor": family.anchor}
            above = _highest_number(directory)
            journal.enter(found.kind, found.key, found.source, target, document, above=above)
            with _opened(catalog, journal, family, options, on_event) as mover:
                return mover.run()


def resume(
    catalog: Catalog, key: str, *, options: Options = DEFAULTS, on_event: OnEvent = ignore
) -> KeyResult:
    """Resume an interrupted move: before the switch its rows are copied anew.

    If the catalog has lost the switch, which both nodes know of, it is recorded again.

    Raises:
        ClusterConflict: no move is open, or its mover lives.
        MoveRefused: tables were made or changed since, before the switch, and a plan would refuse them.
        MoveFailed, ShardBusy: see :func:`move`.
    """
    with _taken_over(catalog, key, options, on_event, goes_on=True) as (journal, mover):
        return mover.undo() if journal.step == ABORT else mover.run()


def abort(
    catalog: Catalog, key: str, *, options: Options = DEFAULTS, on_event: OnEvent = ignore
) -> KeyResult:
    """Undo an interrupted move, or complete it if the key lives in the target already and its rows are there.

    Raises:
        ClusterConflict, ShardBusy: see :func:`resume`.
        MoveFailed: the same, or the catalog has lost the switch: only :func:`resume` leads on.
    """
    with _taken_over(catalog, key, options, on_event) as (journal, mover):
        return mover.give_back_or_run() if journal.is_switched() else mover.undo()


def _highest_number(directory: Directory) -> int:
    """Return the highest number of a move that a node has; those that don't answer are passed over."""

    def ask(_name: str, engine: Engine) -> int:
        with engine.connect() as connection:
            return int(connection.execute(_NUMBERS).scalar_one())

    with move_nodes(directory.placement, directory.login, name="shardids_key_check") as nodes:
        return max(nodes.each(ask).results.values(), default=0)


def _returns(catalog: Catalog, move: KeyMove, target: Side) -> list[int]:
    """Return the moves of the key whose refusal the target has: its own triggers say so.

    A catalog that was restored may have forgotten them. Then the kind of a refused key is not known; it is
    another's if the directory has such a key of another kind.
    """
    with target.begin() as connection:
        refused = refused_keys(connection)
    with catalog.engine.connect() as connection:
        known = {past.id: past.kind for past in read_key_moves(connection, ended=True)}
        kinds = kinds_of(connection, move.key)
    unknown = move.kind if set(kinds) <= {move.kind} else None
    return [
        one.move
        for one in refused
        if (one.shard, one.key, known.get(one.move, unknown)) == (move.target, move.key, move.kind)
    ]


_NUMBERS: Final = text(r"""
    select greatest(
      0,
      (select max(cast(substring(tgname from '^shardids_key_(\d{1,18})_') as bigint)) from pg_trigger
       where tgfoid = to_regprocedure('shardids.pass_key()')),
      (select max(move) from shardids.key_return), (select max(move) from shardids.key_arrival))""")


@contextmanager
def _taken_over(
    catalog: Catalog, key: str, options: Options, on_event: OnEvent, *, goes_on: bool = False
) -> Iterator[tuple[KeyJournal, _Mover]]:
    with KeyJournal.opened(catalog, key, takes_over=True) as journal:
        move, directory = journal.move, Directory.read(catalog)
        former = move.session_name(directory.cluster)
        with _leased(journal, directory, (move.source, move.target), options.on_busy, former=former):
            prefix = directory.schema_prefix
            with ends_of(directory, move.source, move.target, name="shardids_key_check") as ends:
                # Again: those that the former process opened before it lost the leases.
                ends.source.end_sessions(former)
                ends.target.end_sessions(former)
                for side, shard in ((ends.source, move.source), (ends.target, move.target)):
                    with side.begin() as connection:
                        require_trusted(connection, shard, options.trusted)
                choices = Choices.of(move.choices)
                # Once rows are removed from the source, only the target has the root's.
                is_switched = journal.is_switched()
                # Both nodes know it: the catalog was restored, or its standby lacks the switch.
                is_lost = not is_switched and (
                    is_home(ends.target, move.id) or has_left(ends.source, ends.source_schema, move.id)
                )
                if is_lost and not goes_on:
                    raise _lost_switch(move)
                has_moved = is_switched or is_lost
                lives = (ends.target, move.target) if has_moved else (ends.source, move.source)
                with lives[0].begin() as connection:
                    family = read_family(
                        connection,
                        schema_name(prefix, lives[1]),
                        move.key,
                        choices,
                        anchor=move.choices["anchor"],
                    )
                    if goes_on and not has_moved and move.step != ABORT:
                        refuse_new_tables(catalog, move, family, connection)
            family = replace(family, schema=schema_name(prefix, move.source))
            with _opened(catalog, journal, family, options, on_event) as mover:
                if is_lost:
                    mover.switch_again()
                yield journal, mover


def _lost_switch(move: KeyMove) -> MoveFailed:
    return MoveFailed(
        f"key {move.key!r} lives in shard {move.target}, which has its rows and has taken writes; the catalog"
        " lacks the switch: it was restored to a moment before it, or its standby had not received it",
        hint=f"The move can't be undone. Go on: shardids tenant move {quote(move.key)} --resume",
    )


@contextmanager
def _leased(
    journal: KeyJournal,
    directory: Directory,
    shards: tuple[int, int],
    on_busy: OnBusy,
    *,
    former: str | None = None,
) -> Iterator[None]:
    with (
        ends_of(directory, *shards, name="shardids_lease") as ends,
        journal.leased(ends.engines(*shards), on_busy=on_busy, former=former),
    ):
        yield


@contextmanager
def _opened(
    catalog: Catalog,
    journal: KeyJournal,
    family: Family,
    options: Options,
    on_event: OnEvent,
) -> Iterator[_Mover]:
    directory = Directory.read(catalog)
    one = journal.move
    report = Report(
        "tenants",
        f"move {one.id} of a key",
        {"move": one.id, "shard": one.source, "target": one.target},
        on_event,
        step=one.step,
        milestones={"switch": f"lives in shard {one.target}"},
        ways=f"Go on: shardids tenant move {quote(one.key)} --resume;"
        f" undo: shardids tenant move {quote(one.key)} --abort",
    )
    name = one.session_name(directory.cluster)
    begins = f"move from shard {one.source} to {one.target} at step {one.step}"
    with (
        report.watching(begins),
        ends_of(directory, one.source, one.target, name=name, epoch=journal.leases.epoch) as ends,
    ):
        returns = _returns(catalog, one, ends.target)
        leaving = Leaving(ends.source, one.source, one.id, one.target, family, trusted=options.trusted)
        arriving = Arriving(ends, one.id, family, returns, options.trusted)
        actions = Actions(
            catalog=catalog,
            journal=journal,
            leaving=leaving,
            arriving=arriving,
            ends=ends,
            family=family,
            returns=returns,
            options=options,
            on_event=report,
        )
        try:
            yield _Mover(journal, actions, report)
        finally:
            with suppress(ShardidsError):
                arriving.close()
