"""Runs, switches, pauses, resumes and aborts the adoption of a database, and takes its way back.

The journal records each step before it is taken, and every step can be repeated. What :func:`resume` and
:func:`abort` do follows from the journal and from what the servers really have. Until the switch the source
takes the writes, and all can be undone; from then on the shards take them, and only the rest is left to do. A
switch that keeps a way back lets the source follow the shards until :func:`back` or :func:`finish`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from shardids.adopt.adopter import Adopter, Result
from shardids.adopt.back import way_back
from shardids.adopt.back.checks import check_way_back
from shardids.adopt.plan.document import Plan
from shardids.adopt.run import barrier, requirements
from shardids.adopt.run.journal import (
    FINISH,
    FOLLOW,
    KEPT,
    RETURNED,
    Adoption,
    Journal,
    open_adoption,
)
from shardids.adopt.run.numbers import numbers_can_be_passed_on
from shardids.adopt.run.sides import Sides, opened_sides, relay_url, source_url
from shardids.adopt.run.slots import Slot, slots
from shardids.adopt.run.sparing import NO_LIMITS, Limits
from shardids.adopt.steps import (
    AFTER,
    AFTER_BACK,
    BACK,
    END,
    FOLLOW_BACK,
    RUN,
    SWITCH,
    Steps,
    is_at,
    uses_relay,
)
from shardids.catalog.rows import Catalog
from shardids.errors import ClusterConflict, ConnectionFailed
from shardids.mover.steps import MAX_PAUSE_S
from shardids.pg.urls import parse_url, shown_url
from shardids.replication.steps import ABORT, Noted, OnEvent, ignore
from shardids.replication.subscriptions import Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The contents of an adoption that nothing stands in the way of.

    ``relay_bytes``: how much of the relay's disk each table needs at most, by the size at the source.
    """

    split: int
    reference: int
    loose: int
    rows: int
    size_bytes: int
    shards: int
    nodes: int
    relay_bytes: Mapping[str, int]


def check(
    catalog: Catalog,
    plan: Plan,
    *,
    source: str | None = None,
    via: str | None = None,
    reader: str | None = None,
    trusted: Sequence[str] = (),
) -> Check:
    """Find out whether a plan can be run; change nothing.

    Args:
        catalog: the cluster that adopts.
        plan: the plan.
        source: the source's URL, if it differs from the plan's, or to give a password.
        via: the relay's URL; by default the plan's.
        reader: the source's URL with a role that can only read; needed to compare rows where the other role
            can write and other roles own objects.
        trusted: roles whose code may run as those of the URLs, at the source and on the nodes: see
            :mod:`shardids.pg.schemas`.

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
                size_bytes=plan.copied_bytes,
                shards=sides.cluster.shard_count,
                nodes=len(sides.takers),
                relay_bytes=plan.relay_bytes,
            )


def run(
    catalog: Catalog,
    plan: Plan,
    *,
    source: str | None = None,
    via: str | None = None,
    reader: str | None = None,
    trusted: Sequence[str] = (),
    limits: Limits = NO_LIMITS,
    on_event: OnEvent = ignore,
) -> Result:
    """Bring all rows into the shards, compare them, and let the nodes follow the source.

    Takes the arguments of :func:`check`. Applications go on using the source, which ``limits`` spare.

    Raises:
        AdoptionRefused, ClusterConflict: see :func:`check`; nothing was touched.
        AdoptionFailed: it stopped before its end.
    """
    with Journal.opened(catalog) as journal:
        journal.refuse_open()
        with _checked_sides(catalog, plan, (source, via), reader) as sides:
            shapes, plan = _examine(catalog, sides, trusted), sides.plan
        journal.enter(plan, plan.source, shapes, RUN[0].name)
        with Adopter.opened(
            catalog, journal, (source, via), MAX_PAUSE_S, on_event, reader=reader, limits=limits
        ) as adopter:
            return adopter.bring()


@contextmanager
def _checked_sides(
    catalog: Catalog, plan: Plan, urls: tuple[str | None, str | None], reader: str | None
) -> Iterator[Sides]:
    """Yield the sides of an adoption that may begin; its plan is as the catalog stores it."""
    source, via = urls
    url, relay = source_url(catalog, plan.source, source), relay_url(catalog, plan, via)
    plan = replace(plan, source=shown_url(parse_url(plan.source)), via=shown_url(relay))
    with opened_sides(catalog, plan, url, via=relay, reader=reader, name="shardids_adopt_check") as sides:
        sides.await_source()
        yield sides


def _examine(catalog: Catalog, sides: Sides, trusted: Sequence[str]) -> dict[str, str]:
    """Check everything; return the shapes of the source's tables."""
    plan = sides.plan
    requirements.refuse(plan, list(requirements.plan_is_runnable(plan)))
    there = sides.definitions()
    refusals: list[Refusal] = [*requirements.cluster_is_ready(catalog, sides)]
    with sides.source.autocommit() as source:
        refusals += requirements.source_is_fit(source, sides, there)
    refusals += requirements.rows_can_be_compared(sides, there)
    refusals += requirements.code_is_trusted(sides, there, trusted)
    refusals += requirements.relay_is_fit(sides)
    requirements.refuse(plan, refusals)
    with sides.source.autocommit() as source:
        refusals += requirements.keys_are_fit(source, sides, there)
    refusals += requirements.keys_live_by_hash(catalog, sides, there)
    refusals += requirements.relay_is_free(sides, there)
    for taker in sides.takers:
        refusals += requirements.node_is_fit(taker, sides, there)
        refusals += requirements.node_reaches_relay(taker, sides)
    refusals += numbers_can_be_passed_on(sides, there)
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
    dry_run: bool = False,
) -> Result:
    """Stop writes at the source and let the shards take them.

    A dry run does all that comes before the first change.

    With ``keep_back`` the source follows the shards from then on, until :func:`back` or :func:`finish`.

    Raises:
        ClusterConflict: no adoption is under way, or it is not ready.
        AdoptionRefused: something that is written to the shards could not go back; nothing was touched.
        AdoptionFailed: it stopped. Before the shards have taken over the source takes writes again.
    """
    with Journal.opened(catalog) as journal:
        require_following(journal, keep_back=keep_back)
        is_open = journal.adoption.switched_at is None
        # Before the first step an earlier attempt has left nothing that would count against this one.
        is_begun = journal.adoption.keeps_back and journal.step != SWITCH[0].name
        if is_open and keep_back and not is_begun:
            for note in check_back(catalog, journal, source):
                on_event(Noted(note=note))
        with Adopter.opened(
            catalog, journal, (source, via), max_pause_s, on_event, dry_run=dry_run
        ) as adopter:
            adopter.end_former_sessions(at_source=is_open)
            if dry_run:
                return adopter.result()
            if is_open:
                adopter.keep_way_back(is_kept=keep_back)
            return adopter.take_over()


def resume(
    catalog: Catalog,
    *,
    source: str | None = None,
    via: str | None = None,
    reader: str | None = None,
    limits: Limits = NO_LIMITS,
    on_event: OnEvent = ignore,
    dry_run: bool = False,
) -> Result:
    """Go on with an adoption that was paused or interrupted, from the step that it was at.

    A switch that was paused is not gone on with: the nodes follow the source again, and :func:`switch` begins
    another attempt. A dry run does all that comes before the first change.

    Raises:
        ClusterConflict: none is under way.
        AdoptionFailed: it stopped again.
    """
    with Journal.opened(catalog) as journal:
        was = journal.step
        stays = was in (FOLLOW, KEPT, RETURNED) or (
            is_at(was, SWITCH) and not resumes_switch(journal.adoption)
        )
        with Adopter.opened(
            catalog,
            journal,
            (source, via),
            MAX_PAUSE_S,
            on_event,
            reader=reader,
            limits=limits,
            dry_run=dry_run,
        ) as adopter:
            adopter.end_former_sessions(at_source=not is_at(was, AFTER, END))
            if was == ABORT and not dry_run:
                return adopter.undo()
            adopter.follow()
            if dry_run or stays:
                return adopter.result()
            if is_at(was, RUN):
                return adopter.bring()
            if is_at(was, BACK, AFTER_BACK):
                return adopter.take(BACK, AFTER_BACK, then=RETURNED)
            if was == FINISH:
                return adopter.take(END)
            return adopter.take_over()


def resumes_switch(adoption: Adoption) -> bool:
    """Return whether :func:`resume` lets the shards take over: it goes on with a switch."""
    return is_at(adoption.step, SWITCH) and not adoption.is_paused


def pause(
    catalog: Catalog, *, source: str | None = None, via: str | None = None, dry_run: bool = False
) -> Result:
    """Stop the nodes from following the source; :func:`resume` lets them go on.

    A switch that was interrupted is given up: the source takes writes.

    A dry run does all that comes before the first change.

    Raises:
        ClusterConflict: no adoption is under way, another process works at it, or the shards have taken over.
    """
    with Journal.opened(catalog) as journal:
        _refuse_after_switch(journal)
        with Adopter.opened(catalog, journal, (source, via), MAX_PAUSE_S, ignore, dry_run=dry_run) as adopter:
            adopter.end_former_sessions()
            if dry_run:
                return adopter.result()
            return adopter.stop_following()


def abort(
    catalog: Catalog,
    *,
    source: str | None = None,
    via: str | None = None,
    on_event: OnEvent = ignore,
    dry_run: bool = False,
) -> Result:
    """Undo an adoption: the source is left as it was, and the shards are empty again.

    A dry run does all that comes before the first change.

    Of one that has come back it empties the shards. A return that was interrupted before the source had taken
    over is given up, and the shards go on.

    Raises:
        ClusterConflict: none is under way, another process works at it, or the shards have taken over.
    """
    with Journal.opened(catalog) as journal:
        gives_up_return = journal.adoption.switched_at and is_at(journal.step, BACK)
        if not gives_up_return and journal.step not in (RETURNED, ABORT):
            _refuse_after_switch(journal)
        with Adopter.opened(
            catalog, journal, (source, via), MAX_PAUSE_S, on_event, dry_run=dry_run
        ) as adopter:
            adopter.end_former_sessions()
            if dry_run:
                return adopter.result()
            return adopter.stay() if gives_up_return else adopter.undo()


def compare(
    catalog: Catalog,
    *,
    source: str | None = None,
    via: str | None = None,
    reader: str | None = None,
    limits: Limits = NO_LIMITS,
    on_event: OnEvent = ignore,
) -> Result:
    """Compare every row of the source with those of the shards, while the nodes follow it.

    Raises:
        ClusterConflict: they don't follow it.
        MissingPrivilege: code of other roles would run as one that can write.
        AdoptionFailed: rows differ; the message names them.
    """
    with Journal.opened(catalog) as journal:
        if journal.adoption.is_paused or not (journal.step == FOLLOW or is_at(journal.step, SWITCH)):
            raise ClusterConflict(
                "rows can be compared as long as the nodes follow the source",
                hint="To see its step: shardids adopt status",
            )
        with Adopter.opened(
            catalog, journal, (source, via), MAX_PAUSE_S, on_event, reader=reader, limits=limits
        ) as adopter:
            return adopter.compare()


def _refuse_after_switch(journal: Journal) -> None:
    if is_at(journal.step, AFTER_BACK):
        raise ClusterConflict(
            "the source takes over again", hint="To complete it: shardids adopt run --resume"
        )
    if journal.adoption.switched_at is not None:
        raise ClusterConflict(
            "the shards have taken over: what applications write is there, and no longer in the source",
            hint="To return, if the switch kept a way back: shardids adopt back. To complete the adoption:"
            " shardids adopt run --resume, or shardids adopt finish",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How far an adoption is.

    Attributes:
        nodes: by node, its slot on the relay, or ``None``.
        is_source_closed: the source takes no writes; ``None`` if it does not answer.
        way_back: by node, how its changes come back to the source; ``None`` unless a way back is kept.
        back_kept_bytes: by node, how much of its log it keeps for a way back that has not begun.
        relay: the relay's slot at the source, or ``None``.
        relay_problem: why the relay does not answer; then nothing is known of the nodes.
        source_problem: why the source does not answer; then only the nodes' own slots are known.
    """

    adoption: Adoption
    nodes: dict[str, Slot | None]
    is_source_closed: bool | None
    way_back: dict[str, way_back.NodeBack] | None = None
    back_kept_bytes: Mapping[str, int] = field(default_factory=dict)
    relay: Slot | None = None
    relay_problem: str = ""
    source_problem: str = ""


def status(catalog: Catalog, *, source: str | None = None, via: str | None = None) -> Status | None:
    """Return how far the adoption is that is not over, or ``None``. Disturbs nobody who works at it.

    Raises:
        ConnectionFailed: a node does not answer.
    """
    adoption = open_adoption(catalog)
    if adoption is None:
        return None
    url = source_url(catalog, adoption.source, source)
    name = adoption.session_name(catalog.describe().cluster)
    relay = relay_url(catalog, adoption.plan, via) if uses_relay(adoption) else None
    with opened_sides(catalog, adoption.plan, url, via=relay, name=name) as sides:
        problem, is_closed = "", None
        found: dict[str, Slot] = {}
        try:
            is_closed = barrier.is_closed(sides)
            # The source's slot grows while a relay is dead: that has to be seen.
            if sides.via is not None:
                found = slots(sides.source, [sides.relay])
        except ConnectionFailed as error:
            problem = error.message
        nodes, relay_problem = _of_nodes(sides)
        way = None
        if adoption.step == KEPT or is_at(adoption.step, BACK):
            way = way_back.states_without_source(sides) if problem else way_back.states(sides)
        is_early = adoption.keeps_back and way is None
        return Status(
            adoption=adoption,
            nodes=nodes,
            is_source_closed=is_closed,
            way_back=way,
            back_kept_bytes=way_back.kept_bytes(sides) if is_early else {},
            relay=found.get(sides.relay_name),
            relay_problem=relay_problem,
            source_problem=problem,
        )


def _of_nodes(sides: Sides) -> tuple[dict[str, Slot | None], str]:
    """Return the nodes' slots on the relay, and why the relay does not answer."""
    found: dict[str, Slot] = {}
    problem = ""
    try:
        found = {} if sides.via is None else slots(sides.via.side, sides.takers)
    except ConnectionFailed as error:
        problem = error.message
    return {taker.side.name: found.get(taker.name) for taker in sides.takers}, problem


def check_back(catalog: Catalog, journal: Journal, source: str | None) -> list[str]:
    """Return obstacles of a later way back: constraints of the source that the shards do not keep."""
    adoption = journal.adoption
    url = source_url(catalog, adoption.source, source)
    name = adoption.session_name(catalog.describe().cluster)
    with opened_sides(catalog, adoption.plan, url, name=name) as sides:
        return check_way_back(sides)


def require_following(journal: Journal, *, keep_back: bool) -> None:
    """Require an adoption whose nodes follow the source, or whose switch was interrupted.

    Raises:
        ClusterConflict: they don't; or a way back is wanted from a switch that was decided without one.
    """
    is_ready = journal.step == FOLLOW or is_at(journal.step, SWITCH, AFTER)
    if journal.adoption.is_paused or not is_ready:
        raise ClusterConflict(
            f"the adoption is {'paused' if journal.adoption.is_paused else f'at step {journal.step!r}'}:"
            " the nodes do not follow the source",
            hint="For the next step: shardids adopt status",
        )
    if keep_back and journal.adoption.switched_at is not None and not journal.adoption.keeps_back:
        raise ClusterConflict(
            "the shards have taken over, by a switch that keeps no way back",
            hint="To complete it: shardids adopt run --resume, or shardids adopt switch without --keep-back",
        )


def back(
    catalog: Catalog,
    *,
    source: str | None = None,
    max_pause_s: float = MAX_PAUSE_S,
    on_event: OnEvent = ignore,
    dry_run: bool = False,
) -> Result:
    """Stop writes to the shards and let the source take them again.

    A dry run does all that comes before the first change.

    The shards are left fenced, with their rows; :func:`abort` empties them.

    Raises:
        ClusterConflict: no adoption is under way, or it keeps no way back.
        AdoptionFailed: it stopped. Before the source has taken over the shards take writes again.
    """
    with Journal.opened(catalog) as journal:
        _require_way_back(journal, BACK, AFTER_BACK)
        with Adopter.opened(
            catalog, journal, (source, None), max_pause_s, on_event, dry_run=dry_run
        ) as adopter:
            adopter.end_former_sessions()
            if dry_run:
                return adopter.result()
            return adopter.take(BACK, AFTER_BACK, then=RETURNED)


def finish(
    catalog: Catalog, *, source: str | None = None, on_event: OnEvent = ignore, dry_run: bool = False
) -> Result:
    """Give the way back up: the source no longer follows the shards, and stays closed.

    A dry run does all that comes before the first change.

    The source may be gone: an event names the objects that stay there.

    Raises:
        ClusterConflict: no adoption is under way, or it keeps no way back.
    """
    with Journal.opened(catalog) as journal:
        _require_way_back(journal, FOLLOW_BACK, BACK, END)
        with Adopter.opened(
            catalog, journal, (source, None), MAX_PAUSE_S, on_event, dry_run=dry_run
        ) as adopter:
            adopter.end_former_sessions(at_source=False)
            if dry_run:
                return adopter.result()
            if is_at(journal.step, BACK):
                adopter.stay()
            return adopter.take(END)


def _require_way_back(journal: Journal, *tables: Steps) -> None:
    if journal.step != KEPT and not is_at(journal.step, *tables):
        raise ClusterConflict(
            f"the adoption is at step {journal.step!r}, which has no way back to take or to give up",
            hint="shardids adopt switch --keep-back makes one. To see how far it is: adopt status",
        )
