"""Runs, switches, pauses, resumes and aborts the adoption of a database.

The journal records each step before it is taken, and every step can be repeated. What :func:`resume` and
:func:`abort` do follows from the journal and from what the servers really have. Until the switch the source
takes the writes, and all can be undone; from then on the shards take them, and only the rest is left to do. A
switch that keeps a way back lets the source follow the shards (:mod:`shardids.adopt.returning`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from shardids.adopt import relay_requirements, requirements
from shardids.adopt.adopter import Adopter
from shardids.adopt.back_steps import AFTER_BACK, BACK, END
from shardids.adopt.events import Noted, OnEvent, Result, ignore
from shardids.adopt.journal import ABORT, FINISH, FOLLOW, KEPT, RETURNED, Journal
from shardids.adopt.plan import Plan
from shardids.adopt.progress import Status, status
from shardids.adopt.returning import check_back, require_following
from shardids.adopt.sides import Sides, opened_sides, relay_url, source_url
from shardids.adopt.steps import AFTER, MAX_PAUSE_S, SWITCH, run_steps
from shardids.catalog.rows import Catalog
from shardids.catalog.urls import parse_url, shown_url
from shardids.errors import ClusterConflict
from shardids.mover.requirements import Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What an adoption would take in: nothing stands in its way.

    ``relay_bytes``: about how much the relay would hold, by the size at the source; 0 without one.
    """

    split: int
    reference: int
    loose: int
    rows: int
    size_bytes: int
    shards: int
    nodes: int
    relay_bytes: int


def check(
    catalog: Catalog,
    plan: Plan,
    *,
    source: str | None = None,
    via: str | None = None,
    reader: str | None = None,
    trusted: Sequence[str] = (),
) -> Check:
    """Finds out whether a plan can be run; changes nothing.

    Args:
        catalog: the cluster that adopts.
        plan: the plan.
        source: the source's URL, if it differs from the plan's, or to give a password.
        via: the relay's URL; by default the plan's, which has none if the nodes follow the source itself.
        reader: the source's URL with a role that can only read; needed to compare rows where the other role
            can write and other roles own objects.
        trusted: roles whose code may run as those of the URLs, at the source and on the nodes: see
            :mod:`shardids.catalog.trust`.

    Raises:
        AdoptionRefused: it can't; the message has every reason.
        ClusterConflict: an adoption is not over.
    """
    with Journal.opened(catalog) as journal:
        journal.refuse_open()
        with _checked_sides(catalog, plan, (source, via), reader) as sides:
            _examine(catalog, sides, trusted)
            copied = (*sides.split, *sides.reference)
            return Check(
                split=len(sides.split),
                reference=len(sides.reference),
                loose=len(plan.tables) - len(sides.names),
                rows=sum(table.rows for table in copied),
                size_bytes=sum(table.size_bytes for table in copied),
                shards=sides.cluster.shard_count,
                nodes=len(sides.takers),
                relay_bytes=sum(table.size_bytes for table in copied) if sides.relay else 0,
            )


def run(
    catalog: Catalog,
    plan: Plan,
    *,
    source: str | None = None,
    via: str | None = None,
    reader: str | None = None,
    trusted: Sequence[str] = (),
    on_event: OnEvent = ignore,
) -> Result:
    """Brings all rows into the shards, compares them, and lets the nodes follow the source.

    Takes the arguments of :func:`check`. Applications go on using the source.

    Raises:
        AdoptionRefused, ClusterConflict: see :func:`check`; nothing was touched.
        AdoptionFailed: it stopped before its end.
    """
    with Journal.opened(catalog) as journal:
        journal.refuse_open()
        with _checked_sides(catalog, plan, (source, via), reader) as sides:
            shapes, plan = _examine(catalog, sides, trusted), sides.plan
        steps = run_steps(plan)
        journal.enter(plan, plan.source, shapes, steps[0].name)
        with Adopter.opened(catalog, journal, (source, via), MAX_PAUSE_S, on_event, reader=reader) as adopter:
            return adopter.take(steps, then=FOLLOW)


@contextmanager
def _checked_sides(
    catalog: Catalog, plan: Plan, urls: tuple[str | None, str | None], reader: str | None
) -> Iterator[Sides]:
    """Yields the sides of an adoption that may begin; its plan is as the catalog stores it."""
    source, via = urls
    url, through = source_url(catalog, plan.source, source), via or plan.via
    plan = replace(
        plan,
        source=shown_url(parse_url(plan.source)),
        via=None if through is None else shown_url(parse_url(through)),
    )
    relay = relay_url(catalog, plan, through)
    with opened_sides(catalog, plan, url, via=relay, reader=reader, name="shardids_adopt_check") as sides:
        yield sides


def _examine(catalog: Catalog, sides: Sides, trusted: Sequence[str]) -> dict[str, str]:
    """Checks everything; returns the shapes of the source's tables."""
    plan = sides.plan
    requirements.refuse(plan, list(requirements.plan_is_runnable(plan)))
    with sides.source.autocommit() as source:
        refusals: list[Refusal] = [
            *requirements.cluster_is_ready(catalog, sides),
            *requirements.source_is_fit(source, sides),
        ]
    refusals += requirements.rows_can_be_compared(sides)
    there = sides.definitions()
    refusals += requirements.tables_are_fit(sides, there)
    refusals += requirements.code_is_trusted(sides, there, trusted)
    if sides.relay:
        refusals += relay_requirements.relay_is_fit(sides, sides.relay)
        refusals += relay_requirements.paths_are_fit(sides, there)
    requirements.refuse(plan, refusals)
    with sides.source.autocommit() as source:
        refusals += requirements.keys_are_fit(source, sides, there)
    if sides.relay:
        refusals += relay_requirements.relay_is_free(sides, sides.relay, there)
    fed = relay_requirements.as_fed(sides, there)
    for taker in sides.takers:
        refusals += requirements.node_is_fit(taker, sides, fed)
        refusals += requirements.node_reaches_feed(taker, sides)
    requirements.refuse(plan, refusals)
    return {name: definition.shape() for name, definition in there.items()}


def switch(
    catalog: Catalog,
    *,
    source: str | None = None,
    via: str | None = None,
    max_pause_s: float = MAX_PAUSE_S,
    keep_back: bool = False,
    on_event: OnEvent = ignore,
) -> Result:
    """Stops writes at the source and lets the shards take them.

    With ``keep_back`` the source follows the shards from then on, until ``returning.back`` or ``finish``.

    Raises:
        ClusterConflict: no adoption is under way, or it is not ready.
        AdoptionRefused: something that is written to the shards could not go back; nothing was touched.
        AdoptionFailed: it stopped. Before the shards have taken over the source takes writes again.
    """
    with Journal.opened(catalog) as journal:
        require_following(journal, keep_back=keep_back)
        is_open = journal.adoption.switched_at is None
        if is_open and keep_back and not journal.adoption.keeps_back:
            for note in check_back(catalog, journal, source):
                on_event(Noted(note=note))
        with Adopter.opened(catalog, journal, (source, via), max_pause_s, on_event) as adopter:
            adopter.end_former_sessions()
            if is_open:
                adopter.keep_way_back(is_kept=keep_back)
            return _take_over(adopter, journal)


def _take_over(adopter: Adopter, journal: Journal) -> Result:
    if journal.adoption.keeps_back:
        return adopter.take((*SWITCH, *AFTER), then=KEPT)
    return adopter.take((*SWITCH, *AFTER), outcome="adopted")


def resume(
    catalog: Catalog,
    *,
    source: str | None = None,
    via: str | None = None,
    reader: str | None = None,
    on_event: OnEvent = ignore,
) -> Result:
    """Goes on with an adoption that was paused or interrupted, from the step that it was at.

    Raises:
        ClusterConflict: none is under way.
        AdoptionFailed: it stopped again.
    """
    with Journal.opened(catalog) as journal:
        was = journal.step
        with Adopter.opened(catalog, journal, (source, via), MAX_PAUSE_S, on_event, reader=reader) as adopter:
            adopter.end_former_sessions(at_source=was != FINISH)
            if was == ABORT:
                return adopter.undo()
            adopter.follow()
            if was in (FOLLOW, KEPT, RETURNED):
                return adopter.result()
            steps = run_steps(journal.adoption.plan)
            if was in [step.name for step in steps]:
                return adopter.take(steps, then=FOLLOW)
            if was in [step.name for step in (*BACK, *AFTER_BACK)]:
                return adopter.take((*BACK, *AFTER_BACK), then=RETURNED)
            if was == FINISH:
                return adopter.take(END, outcome="adopted")
            return _take_over(adopter, journal)


def pause(catalog: Catalog, *, source: str | None = None, via: str | None = None) -> Result:
    """Stops the nodes from following the source; :func:`resume` lets them go on.

    Raises:
        ClusterConflict: no adoption is under way, another process works at it, or the shards have taken over.
    """
    with Journal.opened(catalog) as journal:
        _refuse_after_switch(journal)
        with Adopter.opened(catalog, journal, (source, via), MAX_PAUSE_S, ignore) as adopter:
            adopter.end_former_sessions()
            return adopter.stop_following()


def abort(
    catalog: Catalog, *, source: str | None = None, via: str | None = None, on_event: OnEvent = ignore
) -> Result:
    """Undoes an adoption: the source is left as it was, and the shards are empty again.

    Of one that has come back it empties the shards. A return that was interrupted before the source had taken
    over is given up, and the shards go on.

    Raises:
        ClusterConflict: none is under way, another process works at it, or the shards have taken over.
    """
    with Journal.opened(catalog) as journal:
        gives_up_return = journal.adoption.switched_at and journal.step in [step.name for step in BACK]
        if not gives_up_return and journal.step not in (RETURNED, ABORT):
            _refuse_after_switch(journal)
        with Adopter.opened(catalog, journal, (source, via), MAX_PAUSE_S, on_event) as adopter:
            adopter.end_former_sessions()
            return adopter.stay() if gives_up_return else adopter.undo()


def compare(
    catalog: Catalog,
    *,
    source: str | None = None,
    via: str | None = None,
    reader: str | None = None,
    on_event: OnEvent = ignore,
) -> Result:
    """Compares every row of the source with those of the shards, while the nodes follow it.

    Raises:
        ClusterConflict: they don't follow it.
        MissingPrivilege: code of other roles would run as one that can write.
        AdoptionFailed: rows differ; the message names them.
    """
    with Journal.opened(catalog) as journal:
        following = (FOLLOW, *(step.name for step in SWITCH))
        if journal.adoption.is_paused or journal.step not in following:
            raise ClusterConflict(
                "rows can be compared as long as the nodes follow the source",
                hint="To see what the adoption is at: shardids adopt status",
            )
        with Adopter.opened(catalog, journal, (source, via), MAX_PAUSE_S, on_event, reader=reader) as adopter:
            return adopter.compare()


def _refuse_after_switch(journal: Journal) -> None:
    if journal.step in [step.name for step in AFTER_BACK]:
        raise ClusterConflict("the source takes over again", hint="To complete it: shardids adopt resume")
    if journal.adoption.switched_at is not None:
        raise ClusterConflict(
            "the shards have taken over: what applications write is there, and no longer in the source",
            hint="To return, if the switch kept a way back: shardids adopt back. To complete the adoption:"
            " shardids adopt resume, or shardids adopt finish",
        )


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
