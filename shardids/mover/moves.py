"""Moves a shard: step by step, each one in the journal before it is taken, each one repeatable.

What :func:`resume` and :func:`abort` do follows from the journal and from what is really there. Until the
placement is switched the shard is the source's, and a move can be undone; from then on it is the target's,
and only cleaning is left.
"""

from __future__ import annotations

from contextlib import closing

from shardids.catalog.rows import Catalog, unknown_node
from shardids.errors import ClusterConflict
from shardids.mover import checks
from shardids.mover.checks import Plan
from shardids.mover.events import Event, OnEvent, Result
from shardids.mover.journal import Journal, all_moves
from shardids.mover.sides import sides_of
from shardids.mover.steps import DEFAULTS, Mover, Options


def _ignore(_event: Event) -> None:
    pass


def plan_move(
    catalog: Catalog, shard: int, target: str, *, offline: bool = False, back: bool = False, parallel: int = 1
) -> Plan:
    """Finds out whether a shard can be moved; changes nothing. Arguments as of :func:`move`.

    Raises:
        ClusterConflict: unknown node, the node it is on, or a move of it is not over.
        MoveRefused: all other reasons.
    """
    with Journal.opened(catalog, shard) as journal:
        journal.refuse_open()
        return _examine(catalog, shard, target, offline=offline, back=back, parallel=parallel)


def move(
    catalog: Catalog,
    shard: int,
    target: str,
    *,
    options: Options = DEFAULTS,
    back: bool = False,
    on_event: OnEvent = _ignore,
) -> Result:
    """Moves a shard to another node.

    ``back``: an old copy that was left on the target goes.

    Raises:
        ClusterConflict, MoveRefused: see :func:`plan_move`; nothing was touched. MoveRefused also when a
            standby of the target was promoted meanwhile: see :func:`resume`.
        MoveFailed: it stopped on its way. Where it could, it left the source writable.
    """
    with Journal.opened(catalog, shard) as journal:
        journal.refuse_open()
        plan = _examine(catalog, shard, target, offline=options.offline, back=back)
        journal.enter(target, offline=options.offline)
        with Mover.opened(catalog, journal, options, on_event, plan.scripts) as mover:
            return mover.run()


def resume(
    catalog: Catalog,
    shard: int,
    *,
    options: Options = DEFAULTS,
    on_event: OnEvent = _ignore,
) -> Result:
    """Goes on with a move that was broken off, from the step that it was at.

    Raises:
        MoveRefused: the target's server is a standby that was promoted meanwhile.
        ClusterConflict, MoveFailed: see :func:`move`.
    """
    with (
        Journal.opened(catalog, shard) as journal,
        Mover.opened(catalog, journal, options, on_event) as mover,
    ):
        mover.end_former_sessions()
        if journal.step == "abort":
            return mover.undo()
        if not journal.is_placed():
            mover.refuse_promoted_target()
        return mover.run()


def abort(catalog: Catalog, shard: int, *, on_event: OnEvent = _ignore) -> Result:
    """Undoes a move that was broken off. One that has switched the placement is brought to its end instead.

    Raises:
        ClusterConflict: there is none, or its mover is alive.
    """
    with (
        Journal.opened(catalog, shard) as journal,
        Mover.opened(catalog, journal, DEFAULTS, on_event) as mover,
    ):
        mover.end_former_sessions()
        return mover.run() if journal.is_placed() else mover.undo()


def former_node(catalog: Catalog, shard: int) -> str:
    """The node that a shard was moved away from last.

    Raises:
        ClusterConflict: it was never moved.
    """
    now = catalog.node_of(shard).name
    for past in reversed(all_moves(catalog)):
        if past.shard == shard and past.outcome == "moved" and past.target == now:
            return past.source
    raise ClusterConflict(f"shard {shard} was never moved", hint="Name a node: --to NODE")


def _examine(
    catalog: Catalog, shard: int, target: str, *, offline: bool, back: bool, parallel: int = 1
) -> Plan:
    source, names = catalog.node_of(shard).name, catalog.nodes()
    if target not in names:
        raise unknown_node(target, names)
    if source == target:
        raise ClusterConflict(f'shard {shard} is on node "{target}" already')
    sides = sides_of(catalog, shard, source, target, name="shardids_move_check")
    with closing(sides):
        return checks.examine(sides, offline=offline, replace_copy=back, parallel=parallel)
