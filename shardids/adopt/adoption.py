"""Runs, switches, pauses, resumes and aborts the adoption of a database.

The journal records each step before it is taken, and every step can be repeated. What :func:`resume` and
:func:`abort` do follows from the journal and from what the servers really have. Until the switch the source
takes the writes, and all can be undone; from then on the shards take them, and only the rest is left to do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardids.adopt import barrier, requirements
from shardids.adopt.adopter import Adopter
from shardids.adopt.events import OnEvent, Result, ignore
from shardids.adopt.journal import ABORT, FOLLOW, Adoption, Journal, open_adoption
from shardids.adopt.plan import Plan
from shardids.adopt.replication import lags
from shardids.adopt.sides import Sides, opened_sides, source_url
from shardids.adopt.steps import AFTER, MAX_PAUSE_S, RUN, SWITCH
from shardids.catalog.connections import parse_url, shown_url
from shardids.catalog.rows import Catalog
from shardids.errors import (
    ClusterConflict,
)
from shardids.mover.requirements import Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What an adoption would take in: nothing stands in its way."""

    split: int
    reference: int
    loose: int
    rows: int
    size_bytes: int
    shards: int
    nodes: int


def check(catalog: Catalog, plan: Plan, *, source: str | None = None) -> Check:
    """Finds out whether a plan can be run; changes nothing.

    Args:
        catalog: the cluster that adopts.
        plan: the plan.
        source: the source's URL, if it differs from the plan's, or to give a password.

    Raises:
        AdoptionRefused: it can't; the message has every reason.
        ClusterConflict: an adoption is not over.
    """
    with Journal.opened(catalog) as journal:
        journal.refuse_open()
        url, plan = source_url(catalog, plan.source, source), _without_password(plan)
        with opened_sides(catalog, plan, url, name="shardids_adopt_check") as sides:
            _examine(catalog, sides)
            return Check(
                split=len(sides.split),
                reference=len(sides.reference),
                loose=len(plan.tables) - len(sides.names),
                rows=sum(table.rows for table in (*sides.split, *sides.reference)),
                size_bytes=sum(table.size_bytes for table in (*sides.split, *sides.reference)),
                shards=sides.cluster.shard_count,
                nodes=len(sides.takers),
            )


def run(catalog: Catalog, plan: Plan, *, source: str | None = None, on_event: OnEvent = ignore) -> Result:
    """Brings all rows into the shards, compares them, and lets the nodes follow the source.

    Takes the arguments of :func:`check`. Applications go on using the source.

    Raises:
        AdoptionRefused, ClusterConflict: see :func:`check`; nothing was touched.
        AdoptionFailed: it stopped before its end.
    """
    with Journal.opened(catalog) as journal:
        journal.refuse_open()
        url, plan = source_url(catalog, plan.source, source), _without_password(plan)
        with opened_sides(catalog, plan, url, name="shardids_adopt_check") as sides:
            shapes = _examine(catalog, sides)
        journal.enter(plan, plan.source, shapes, RUN[0].name)
        with Adopter.opened(catalog, journal, source, MAX_PAUSE_S, on_event) as adopter:
            return adopter.take(RUN, then=FOLLOW)


def _without_password(plan: Plan) -> Plan:
    """Returns the plan as the catalog stores it, and messages show it."""
    return replace(plan, source=shown_url(parse_url(plan.source)))


def _examine(catalog: Catalog, sides: Sides) -> dict[str, str]:
    """Checks everything; returns the shapes of the source's tables."""
    plan = sides.plan
    requirements.refuse(plan, list(requirements.plan_is_runnable(plan)))
    with sides.source.autocommit() as source:
        refusals: list[Refusal] = [
            *requirements.cluster_is_ready(catalog, sides),
            *requirements.source_is_fit(source, sides),
        ]
    there = sides.definitions()
    refusals += requirements.tables_are_fit(sides, there)
    requirements.refuse(plan, refusals)
    with sides.source.autocommit() as source:
        refusals += requirements.keys_are_fit(source, sides, there)
    for taker in sides.takers:
        refusals += requirements.node_is_fit(taker, sides, there)
        refusals += requirements.node_reaches_source(taker, sides)
    requirements.refuse(plan, refusals)
    return {name: definition.shape() for name, definition in there.items()}


def switch(
    catalog: Catalog,
    *,
    source: str | None = None,
    max_pause_s: float = MAX_PAUSE_S,
    on_event: OnEvent = ignore,
) -> Result:
    """Stops writes at the source and lets the shards take them.

    Raises:
        ClusterConflict: no adoption is under way, or it is not ready.
        AdoptionFailed: it stopped. Before the shards have taken over the source takes writes again.
    """
    with Journal.opened(catalog) as journal:
        ready = (FOLLOW, *(step.name for step in (*SWITCH, *AFTER)))
        if journal.adoption.is_paused or journal.step not in ready:
            raise ClusterConflict(
                f"the adoption is {'paused' if journal.adoption.is_paused else f'at step {journal.step!r}'}:"
                " the nodes do not follow the source yet",
                hint="shardids adopt resume",
            )
        with Adopter.opened(catalog, journal, source, max_pause_s, on_event) as adopter:
            adopter.end_former_sessions()
            return adopter.take((*SWITCH, *AFTER), outcome="adopted")


def resume(catalog: Catalog, *, source: str | None = None, on_event: OnEvent = ignore) -> Result:
    """Goes on with an adoption that was paused or interrupted, from the step that it was at.

    Raises:
        ClusterConflict: none is under way.
        AdoptionFailed: it stopped again.
    """
    with Journal.opened(catalog) as journal:
        was = journal.step
        with Adopter.opened(catalog, journal, source, MAX_PAUSE_S, on_event) as adopter:
            adopter.end_former_sessions()
            if was == ABORT:
                return adopter.undo()
            adopter.follow()
            if was == FOLLOW:
                return adopter.result()
            if was in [step.name for step in RUN]:
                return adopter.take(RUN, then=FOLLOW)
            return adopter.take((*SWITCH, *AFTER), outcome="adopted")


def pause(catalog: Catalog, *, source: str | None = None) -> Result:
    """Stops the nodes from following the source; :func:`resume` lets them go on.

    Raises:
        ClusterConflict: no adoption is under way, another process works at it, or the shards have taken over.
    """
    with Journal.opened(catalog) as journal:
        _refuse_after_switch(journal)
        with Adopter.opened(catalog, journal, source, MAX_PAUSE_S, ignore) as adopter:
            adopter.end_former_sessions()
            return adopter.stop_following()


def abort(catalog: Catalog, *, source: str | None = None, on_event: OnEvent = ignore) -> Result:
    """Undoes an adoption: the source is left as it was, and the shards are empty again.

    Raises:
        ClusterConflict: none is under way, another process works at it, or the shards have taken over.
    """
    with Journal.opened(catalog) as journal:
        _refuse_after_switch(journal)
        with Adopter.opened(catalog, journal, source, MAX_PAUSE_S, on_event) as adopter:
            adopter.end_former_sessions()
            return adopter.undo()


def compare(catalog: Catalog, *, source: str | None = None, on_event: OnEvent = ignore) -> Result:
    """Compares every row of the source with those of the shards, while the nodes follow it.

    Raises:
        ClusterConflict: they don't follow it.
        AdoptionFailed: rows differ; the message names them.
    """
    with Journal.opened(catalog) as journal:
        if journal.adoption.is_paused or journal.step != FOLLOW:
            raise ClusterConflict(
                "rows can be compared as long as the nodes follow the source",
                hint="To see what the adoption is at: shardids adopt status",
            )
        with Adopter.opened(catalog, journal, source, MAX_PAUSE_S, on_event) as adopter:
            return adopter.compare()


def _refuse_after_switch(journal: Journal) -> None:
    if journal.adoption.switched_at is not None:
        raise ClusterConflict(
            "the shards have taken over: what applications write is there, and no longer in the source",
            hint="To complete the adoption: shardids adopt resume",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How far an adoption is. ``lag_bytes``: by node, what it has not confirmed; ``None`` without a slot."""

    adoption: Adoption
    lag_bytes: dict[str, int | None]
    is_source_closed: bool


def status(catalog: Catalog, *, source: str | None = None) -> Status | None:
    """Returns how far the adoption is that is not over, or ``None``. Disturbs nobody who works at it.

    Raises:
        ConnectionFailed: the source does not answer.
    """
    adoption = open_adoption(catalog)
    if adoption is None:
        return None
    url = source_url(catalog, adoption.source, source)
    name = adoption.session_name(catalog.describe().cluster)
    with opened_sides(catalog, adoption.plan, url, name=name) as sides:
        return Status(adoption=adoption, lag_bytes=lags(sides), is_source_closed=barrier.is_closed(sides))


__all__ = [
    "Check",
    "Status",
    "abort",
    "check",
    "compare",
    "pause",
    "resume",
    "run",
    "status",
    "switch",
]
