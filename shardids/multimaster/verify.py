"""Finds what is wrong with the offsets of several masters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from shardids.multimaster.counters import Counter, MasterState, SequenceState

OffsetProblem: TypeAlias = Literal[
    "missing-table",
    "no-sequence",
    "no-offset",
    "wrong-increment",
    "wrong-offset",
    "behind",
    "limited",
    "cycles",
    "server-id",
    "replication",
]
"""What can be wrong; :class:`OffsetFinding` says it in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetFinding:
    """Something that is wrong on one master, and what to do about it."""

    master: str
    column: str
    problem: OffsetProblem
    detail: str
    remedy: str


def verify(states: Sequence[MasterState]) -> list[OffsetFinding]:
    """Compares each master's counters with its offset and with the other masters' counters."""
    keys = sorted({counter.key for state in states for counter in state.counters})
    return [finding for state in states for key in keys for finding in _findings(state, key, len(states))]


def is_right(sequence: SequenceState, counter: Counter, offset: int, masters: int) -> bool:
    """Returns whether a sequence gives values of its master's class only, even if it is behind its table."""
    return (
        sequence.increment == masters
        and sequence.next_value % masters == offset % masters
        and sequence.maximum >= counter.type_limit
        and not sequence.cycles
    )


def is_behind(sequence: SequenceState, counter: Counter) -> bool:
    """Returns whether the table holds values that the sequence has yet to give."""
    return counter.highest_own is not None and counter.highest_own >= sequence.next_value


_APPLY = "shardids baseline multimaster apply"


def _findings(state: MasterState, key: tuple[str, str, str], masters: int) -> Iterator[OffsetFinding]:
    def found(problem: OffsetProblem, detail: str, remedy: str = _APPLY) -> OffsetFinding:
        return OffsetFinding(
            master=state.name, column=".".join(key), problem=problem, detail=detail, remedy=remedy
        )

    counter = state.get(key)
    if counter is None:
        yield found("missing-table", "other masters have it", "Create the table here, as on the others.")
        return
    sequence = counter.sequence
    if sequence is None:
        yield found(
            "no-sequence",
            "an integer primary key that no sequence numbers",
            "Make it an identity column, unless its values come from elsewhere.",
        )
        return
    if sequence.increment == 1:
        yield found("no-offset", f"counts by 1, as if it were alone among {masters} masters")
    elif sequence.increment != masters:
        yield found("wrong-increment", f"counts by {sequence.increment}, not by {masters}")
    elif sequence.next_value % masters != state.offset % masters:
        other = sequence.next_value % masters or masters
        yield found("wrong-offset", f"continues at {sequence.next_value}: offset {other}, not {state.offset}")
    if is_behind(sequence, counter):
        yield found(
            "behind", f"continues at {sequence.next_value}, but the table holds {counter.highest_own}"
        )
    if sequence.maximum < counter.type_limit:
        yield found("limited", f"ends at {sequence.maximum}: an apply or grow was interrupted")
    if sequence.cycles:
        yield found("cycles", "cycles: it would repeat its values after its end")
