"""Checks of reference tables: whether every node has the writer's rows, and goes on having them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from shardids.watch.doctor.findings import Found, Severity, check, in_shell
from shardids.watch.facts.cluster import ClusterFacts

_MIB: Final = 1 << 20
_KEPT_BYTES: Final = 1 << 30
_REPAIR = in_shell("shardids reference repair")


@check("reference-not-followed", Severity.ERROR, remedy="`shardids reference repair`.")
def reference_not_followed(facts: ClusterFacts) -> Iterator[Found]:
    """A node gets no changes of reference tables: it has no subscription, or the writer no slot for it."""
    there = facts.references
    for node, slot in there.slots.items():
        tables = there.readings.get(node, ((),))[-1]
        wrong = ""
        if slot is None or slot.is_lost:
            wrong = f'node "{there.known.writer}", the writer, has no usable replication slot for it'
        elif tables and not tables[0].is_enabled:
            wrong = "its subscription is missing or disabled"
        elif tables and not tables[0].is_working:
            wrong = "the worker of its subscription does not run; the node's log says why"
        if wrong and not there.is_changing:
            yield Found(
                what=f'node "{node}" does not follow the writer of reference tables: {wrong}',
                to_do="Remove the cause, and copy the writer's rows to it",
                commands=_REPAIR,
                nodes=(node,),
            )


@check("reference-differs", Severity.ERROR, remedy="`shardids reference repair`.")
def reference_differs(facts: ClusterFacts) -> Iterator[Found]:
    """A reference table of a node has other rows or columns than on the writer, for half a second or more."""
    there = facts.references
    writer = there.readings.get(there.known.writer or "", ())
    original = {one.name: {one.contents} for one in (writer[0] if writer else ())}
    for reading in writer:
        for one in reading:
            original[one.name].add(one.contents)
    for node, (first, second) in there.readings.items():
        for earlier, later in zip(first, second, strict=True):
            if original and not {earlier.contents, later.contents} & original[later.name]:
                shown = "is missing" if later.definition is None else f"has {later.rows} rows"
                yield Found(
                    what=f'reference table {later.name} of node "{node}" differs from the writer\'s:'
                    f" it {shown}",
                    to_do="If columns differ, run the revisions for the node first. Then repair it",
                    commands=_REPAIR,
                    nodes=(node,),
                    thing=later.name,
                )


@check("reference-unguarded", Severity.ERROR, remedy="`shardids reference create NAME` again.")
def reference_unguarded(facts: ClusterFacts) -> Iterator[Found]:
    """A reference table whose triggers that refuse writes are missing or disabled on a node."""
    for node, readings in facts.references.readings.items():
        for table in readings[-1]:
            if table.definition is not None and not table.is_guarded:
                yield Found(
                    what=f'reference table {table.name} of node "{node}" lacks trigger shardids_reference,'
                    " or on the writer shardids_reference_key or shardids_reference_right, which refuse"
                    " writes that would make nodes differ",
                    to_do="Create it again",
                    commands=in_shell(f"shardids reference create {table.name}"),
                    nodes=(node,),
                    thing=table.name,
                )


@check("reference-writer", Severity.ERROR, remedy="`shardids reference repair`.")
def reference_writer(facts: ClusterFacts) -> Iterator[Found]:
    """The writer of reference tables, promoted or restored, takes no writes; or another node takes them."""
    there = facts.references
    for node, readings in there.readings.items():
        is_writer = node == there.known.writer
        wrong = [one.name for one in readings[-1] if one.is_guarded and one.takes_writes is not is_writer]
        if wrong and not there.is_changing and there.known.successor is None:
            what = (
                f'writes to reference tables are refused on node "{node}", the writer: its server was'
                " promoted, restored or upgraded since"
                if is_writer
                else f'reference tables can be written to on node "{node}", and the writer is node'
                f' "{there.known.writer}": an old copy of its server may have come back'
            )
            yield Found(
                what=f"{what}: {', '.join(wrong)}",
                to_do="Let only the writer take writes",
                commands=_REPAIR,
                nodes=(node,),
            )


@check("reference-lag", Severity.WARNING, remedy="See why the node does not take the changes.")
def reference_lag(facts: ClusterFacts) -> Iterator[Found]:
    """The writer of reference tables keeps more than 1 GiB of its log for a node that does not follow."""
    for node, slot in facts.references.slots.items():
        if slot is not None and slot.kept_bytes is not None and slot.kept_bytes > _KEPT_BYTES:
            yield Found(
                what=f'node "{facts.references.known.writer}" keeps {slot.kept_bytes / _MIB:,.0f} MiB of its'
                f' log for node "{node}", which follows its reference tables',
                to_do="Look for the cause in the log of that node",
                nodes=(node,),
            )


@check("reference-unfinished", Severity.WARNING, remedy="Repeat the command, or `shardids reference repair`.")
def reference_unfinished(facts: ClusterFacts) -> Iterator[Found]:
    """A reference table, or a row of one, whose creation, deletion or dropping was interrupted; or a move."""
    there = facts.references
    if there.is_changing:
        return
    if there.known.successor is not None:
        yield Found(
            what=f'the move of reference tables\' writer to node "{there.known.successor}" was interrupted:'
            " nobody can write to them, and no shard can be moved",
            to_do=f"Complete it by shardids reference move --to {there.known.successor}, or undo it",
            commands=_REPAIR,
        )
    for name, state in there.known.states.items():
        if state != "active":
            command = "create" if state == "creating" else "drop"
            yield Found(
                what=f"{state} of reference table {name} was interrupted",
                to_do="Complete it",
                commands=in_shell(f"shardids reference {command} {name}"),
                thing=name,
            )
    for deletion in there.known.deletions:
        key = ", ".join(f"{column} = {value}" for column, value in deletion.key.items())
        yield Found(
            what=f"the deletion of row {key} of reference table {deletion.table} was interrupted: no shard"
            " can be moved",
            to_do="Complete it by shardids reference delete, or undo it",
            commands=_REPAIR,
            thing=deletion.table,
        )
