"""Facts of reference tables on nodes, and of the way that nodes follow the writer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final
from uuid import UUID

from sqlalchemy import Engine

from shardids.catalog.nodes import Nodes
from shardids.catalog.references import References, reference_digests, slots_of
from shardids.catalog.topology import REFERENCE_SCHEMA
from shardids.errors import MissingPrivilege, ShardidsError
from shardids.pg.queries import read
from shardids.pg.reader import Refused, reading_as_reader

_BETWEEN_S: Final = 0.5
"""How long rows that differ have to become the same before they are a finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceOnNode:
    """A reference table on a node; ``is_enabled`` and ``is_working`` are of its subscription, if it has one.

    ``takes_writes``: whether its triggers let writes pass as on the writer; ``None`` if they are missing.
    """

    name: str
    definition: str | None
    is_guarded: bool
    takes_writes: bool | None
    is_enabled: bool | None
    is_working: bool | None
    rows: int | None = None
    digest: str | None = None

    @property
    def contents(self) -> tuple[object, ...]:
        """The parts that are the same on all nodes."""
        return (self.rows, self.digest, self.definition)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The slot of a node that follows, on the writer."""

    name: str
    is_lost: bool
    lag_bytes: int | None
    kept_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceFacts:
    """Reference tables, in the catalog and on the nodes that answered.

    Attributes:
        known: the catalog's records.
        is_changing: whether a process is changing them.
        slots: by node; ``None`` where the writer has none.
        refused: nodes that were not read for want of a right, or because code of others would have run.
        readings: of each node, two readings of its tables, half a second apart if the first ones differed.
    """

    known: References = field(default_factory=lambda: References(writer=None, states={}))
    is_changing: bool = False
    slots: Mapping[str, Slot | None] = field(default_factory=dict)
    refused: Mapping[str, ShardidsError] = field(default_factory=dict)
    readings: Mapping[str, Sequence[Sequence[ReferenceOnNode]]] = field(default_factory=dict)


def ask_references(nodes: Nodes, known: References, cluster: UUID, *, is_changing: bool) -> ReferenceFacts:
    """Ask all nodes; those that don't answer are left out, for other checks to find."""
    if known.writer is None or known.writer not in nodes:
        return ReferenceFacts(known=known, is_changing=is_changing)
    names = [name for name, state in known.states.items() if state == "active"]
    slots = {node: slot for slot, node in slots_of(cluster, nodes, known.writer).items()}

    def ask(node: str, engine: Engine) -> Sequence[ReferenceOnNode]:
        with (
            reading_as_reader(engine, f'node "{node}"') as reader,
            engine.connect() as connection,
        ):
            found = read(
                connection,
                "doctor/references.v1",
                ReferenceOnNode,
                names=_array(names),
                subscription=slots.get(node, ""),
            )
            digests = reference_digests(reader, [one.name for one in found if one.definition is not None])
        for name, answer in digests.items():
            if isinstance(answer, Refused):
                error = reader.error(answer, f"{REFERENCE_SCHEMA}.{name}")
                raise MissingPrivilege(error.message, hint=error.hint)
        return [
            replace(one, rows=there[0], digest=there[1])
            if isinstance(there := digests.get(one.name), tuple)
            else one
            for one in found
        ]

    def followers(_node: str, engine: Engine) -> Sequence[Slot]:
        with engine.connect() as connection:
            return read(connection, "doctor/followers.v1", Slot, names=_array(list(slots.values())))

    asked = nodes.each(ask)
    first = second = asked.results
    if len({tuple(one.contents for one in tables) for tables in first.values()}) > 1:
        time.sleep(_BETWEEN_S)
        second = nodes.each(ask, first).results
    there = nodes.each(followers, [known.writer]).results.get(known.writer)
    by_name = {slot.name: slot for slot in there or ()}
    return ReferenceFacts(
        known=known,
        is_changing=is_changing,
        slots={} if there is None else {node: by_name.get(slot) for node, slot in slots.items()},
        refused={
            node: error for node, error in asked.failures.items() if isinstance(error, MissingPrivilege)
        },
        readings={node: (first[node], second[node]) for node in first if node in second},
    )


def _array(names: Sequence[str]) -> str:
    """Return an array as PostgreSQL reads it; these names need no quotes."""
    return f"{{{','.join(names)}}}"
