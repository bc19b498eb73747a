"""The way back of an adoption: whether a switch can keep one, taking it, giving it up."""

from __future__ import annotations

from shardids.adopt.adopter import Adopter
from shardids.adopt.back_checks import check_way_back
from shardids.adopt.back_steps import AFTER_BACK, BACK, END
from shardids.adopt.events import OnEvent, Result, ignore
from shardids.adopt.journal import FINISH, FOLLOW, KEPT, RETURNED, Journal
from shardids.adopt.sides import opened_sides, source_url
from shardids.adopt.steps import AFTER, MAX_PAUSE_S, SWITCH
from shardids.catalog.rows import Catalog
from shardids.errors import ClusterConflict


def check_switch(catalog: Catalog, *, source: str | None = None) -> list[str]:
    """Finds out whether a switch could keep a way back; changes nothing.

    Returns what may stop the way back later: constraints of the source that the shards do not keep.

    Raises:
        ClusterConflict, AdoptionRefused: it can't; see ``adoption.switch``.
    """
    with Journal.opened(catalog) as journal:
        require_following(journal, keep_back=True)
        return check_back(catalog, journal, source)


def check_back(catalog: Catalog, journal: Journal, source: str | None) -> list[str]:
    """Returns what may stop the way back later; see :func:`check_switch`."""
    adoption = journal.adoption
    url = source_url(catalog, adoption.source, source)
    name = adoption.session_name(catalog.describe().cluster)
    with opened_sides(catalog, adoption.plan, url, name=name) as sides:
        return check_way_back(sides)


def require_following(journal: Journal, *, keep_back: bool) -> None:
    """Requires an adoption whose nodes follow the source, or whose switch was interrupted.

    Raises:
        ClusterConflict: they don't; or a way back is wanted from a switch that was decided without one.
    """
    ready = (FOLLOW, *(step.name for step in (*SWITCH, *AFTER)))
    if journal.adoption.is_paused or journal.step not in ready:
        raise ClusterConflict(
            f"the adoption is {'paused' if journal.adoption.is_paused else f'at step {journal.step!r}'}:"
            " the nodes do not follow the source",
            hint="shardids adopt status says what can be done",
        )
    if keep_back and journal.adoption.switched_at is not None and not journal.adoption.keeps_back:
        raise ClusterConflict(
            "the shards have taken over, by a switch that keeps no way back",
            hint="To complete it: shardids adopt resume, or shardids adopt switch without --keep-back",
        )


def back(
    catalog: Catalog,
    *,
    source: str | None = None,
    max_pause_s: float = MAX_PAUSE_S,
    on_event: OnEvent = ignore,
) -> Result:
    """Stops writes to the shards and lets the source take them again.

    The shards are left fenced, with their rows; ``adoption.abort`` empties them.

    Raises:
        ClusterConflict: no adoption is under way, or it keeps no way back.
        AdoptionFailed: it stopped. Before the source has taken over the shards take writes again.
    """
    with Journal.opened(catalog) as journal:
        _require_way_back(journal, *(step.name for step in (*BACK, *AFTER_BACK)))
        with Adopter.opened(catalog, journal, (source, None), max_pause_s, on_event) as adopter:
            adopter.end_former_sessions()
            return adopter.take((*BACK, *AFTER_BACK), then=RETURNED)


def finish(catalog: Catalog, *, source: str | None = None, on_event: OnEvent = ignore) -> Result:
    """Gives the way back up: the source no longer follows the shards, and stays closed.

    The source may be gone: what is left there is told as an event.

    Raises:
        ClusterConflict: no adoption is under way, or it keeps no way back.
    """
    with Journal.opened(catalog) as journal:
        returning = [step.name for step in BACK]
        _require_way_back(journal, FINISH, *returning)
        with Adopter.opened(catalog, journal, (source, None), MAX_PAUSE_S, on_event) as adopter:
            adopter.end_former_sessions(at_source=False)
            if journal.step in returning:
                adopter.stay()
            return adopter.take(END, outcome="adopted")


def _require_way_back(journal: Journal, *steps: str) -> None:
    if journal.step not in (KEPT, *steps):
        raise ClusterConflict(
            f"the adoption is at step {journal.step!r}: there is no way back that could be taken or given up",
            hint="shardids adopt switch --keep-back makes one. To see how far it is: adopt status",
        )
