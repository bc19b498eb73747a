"""How far the adoption is that is not over: what its journal, the source, the relay and the nodes say."""

from __future__ import annotations

from dataclasses import dataclass

from shardids.adopt import barrier, way_back
from shardids.adopt.back_steps import BACK
from shardids.adopt.journal import KEPT, Adoption, open_adoption
from shardids.adopt.replication import Slot, lags, slots
from shardids.adopt.sides import Sides, opened_sides, relay_url, source_url
from shardids.catalog.rows import Catalog
from shardids.errors import ConnectionFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How far an adoption is.

    Attributes:
        lag_bytes: by node, what it has not confirmed of the source's log; ``None`` without a slot.
        is_source_closed: the source takes no writes; ``None`` if it does not answer.
        way_back: by node, how its changes come back to the source; ``None`` unless a way back is kept.
        relay: the relay's slot at the source, or ``None``.
        relay_problem: why the relay does not answer; then nothing is known of the nodes.
        source_problem: why the source does not answer; then only the nodes' own slots are known.
    """

    adoption: Adoption
    lag_bytes: dict[str, int | None]
    is_source_closed: bool | None
    way_back: dict[str, way_back.NodeBack] | None = None
    relay: Slot | None = None
    relay_problem: str = ""
    source_problem: str = ""


def status(catalog: Catalog, *, source: str | None = None, via: str | None = None) -> Status | None:
    """Returns how far the adoption is that is not over, or ``None``. Disturbs nobody who works at it.

    Raises:
        ConnectionFailed: a node does not answer.
    """
    adoption = open_adoption(catalog)
    if adoption is None:
        return None
    url = source_url(catalog, adoption.source, source)
    name = adoption.session_name(catalog.describe().cluster)
    relay = relay_url(catalog, adoption.plan, via)
    with opened_sides(catalog, adoption.plan, url, via=relay, name=name) as sides:
        problem, is_closed, found = "", None, []
        try:
            is_closed = barrier.is_closed(sides)
            # The source's slot grows while a relay is dead: that has to be seen.
            found = slots(sides.source, [sides.relay]) if sides.relay else []
        except ConnectionFailed as error:
            problem = error.message
        lag_bytes, relay_problem = _lags(sides, answers=not problem)
        way = None
        if adoption.step in (KEPT, *(step.name for step in BACK)):
            way = way_back.states_without_source(sides) if problem else way_back.states(sides)
        return Status(
            adoption=adoption,
            lag_bytes=lag_bytes,
            is_source_closed=is_closed,
            way_back=way,
            relay=found[0] if found else None,
            relay_problem=relay_problem,
            source_problem=problem,
        )


def _lags(sides: Sides, *, answers: bool) -> tuple[dict[str, int | None], str]:
    """Returns how far the nodes are behind, and why the relay, if they follow one, does not answer."""
    nothing: dict[str, int | None] = {taker.side.name: None for taker in sides.takers}
    if sides.relay is None:
        return (lags(sides) if answers else nothing), ""
    try:
        return lags(sides), ""
    except ConnectionFailed as error:
        return nothing, error.message
