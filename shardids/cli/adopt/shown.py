"""How ``shardids adopt`` shows plans, adoptions in progress and their results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Final

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.text import Text
from rich.tree import Tree

from shardids.adopt import adoption
from shardids.adopt.adopter import Result
from shardids.adopt.back.handing_back import HOW_TO_MEND
from shardids.adopt.back.way_back import NodeBack
from shardids.adopt.inplace.changing import Filled
from shardids.adopt.inplace.keys import Status
from shardids.adopt.plan.document import Finding, Kind, Plan, Severity, TablePlan
from shardids.adopt.plan.planning import Forecast, Planned
from shardids.adopt.run.comparing import Compared
from shardids.adopt.run.following import Copying
from shardids.adopt.run.journal import FOLLOW
from shardids.adopt.run.slots import Slot
from shardids.adopt.steps import SWITCH, UNFOLLOWED, is_at
from shardids.catalog.rows import Catalog
from shardids.cli.printing import Stream, bars, err, out, print_json
from shardids.errors import BadArgument
from shardids.pg.notation import counted, parse_duration_ms
from shardids.pg.urls import shown_url
from shardids.replication.steps import Event, Lagging, Noted, OnEvent, StepBegun, StepDone, Waiting


def pause_seconds(max_pause: str) -> float:
    """Return what ``--max-pause`` says, in seconds."""
    milliseconds = parse_duration_ms(max_pause)
    if not 50 <= milliseconds <= 600_000:
        raise BadArgument(f"{max_pause!r} is not between 50ms and 10min", hint="For example: 500ms or 2s")
    return milliseconds / 1000


def print_done(done: Result, *, as_json: bool) -> None:
    """Print how far a command has brought the adoption."""
    if as_json:
        print_json(asdict(done))
        return
    paused = "" if done.pause_ms is None else f"; no writes were taken for {done.pause_ms:.0f} ms"
    out.print(f"{done.outcome or f'at step {done.step}'} after {done.seconds:.1f} s{paused}")
    if done.outcome is None and (done.step == FOLLOW or is_at(done.step, SWITCH)):
        err.print("When applications are ready for the cluster: shardids adopt switch")


@contextmanager
def shown() -> Iterator[OnEvent]:
    """Show an adoption in progress: by a bar on a terminal, otherwise by a line for each step."""
    with bars("{task.description}", "bar", "left") as progress:
        task = progress.add_task("", total=None)

        def show(event: Event) -> None:
            line, total, completed = _told(event)
            if isinstance(event, Noted) and err.is_terminal:
                progress.console.print(line, markup=False)
            if not err.is_terminal:
                if isinstance(event, StepBegun | Waiting | Compared | Noted):
                    err.print(line)
                return
            progress.update(task, description=line, total=total, completed=completed)

        yield show


def _told(event: Event) -> tuple[str, float | None, float]:
    """Return a text for an event, with the total and the completed part of its bar."""
    total: float | None = None
    completed = 0.0
    match event:
        case StepBegun() | StepDone():
            line = event.step
        case Copying():
            completed, total = event.rows_done, event.rows_total
            line = f"copy · {completed:,} of about {total:,} rows · {event.tables_left} to do"
        case Filled():
            line, completed, total = f"fill {event.table}", event.share, 1.0
        case Lagging():
            line = f"follow · {decimal(event.lag_bytes)} behind"
        case Waiting():
            line = f"put off ({event.attempt}): {event.reason}"
        case Compared():
            are = "row is" if event.rows == 1 else "rows are"
            where = "" if event.copies == 1 else f" on each of {event.copies} nodes"
            line = f"compare · {event.table}: {event.rows:,} {are} the same{where}"
        case Noted():
            line = f"note: {event.note}"
        case _:
            raise TypeError(f"no words for {event}")
    return line, total, completed


_MOST_TABLES: Final = 200
"""How many tables a picture shows of each kind; the file has all."""
_MOST_FINDINGS: Final = 3
"""How many findings of one kind are shown."""
_STYLES: Final = {
    Severity.BLOCKS: "bold red",
    Severity.TO_CONFIRM: "bold yellow",
    Severity.NOT_KEPT: "magenta",
    Severity.NOTE: "dim",
}
_HEADS: Final = {
    Severity.BLOCKS: "Blocks",
    Severity.TO_CONFIRM: "To confirm in the plan's file: guesses",
    Severity.NOT_KEPT: "Not kept",
    Severity.NOTE: "To know",
}


def plan_picture(planned: Planned) -> Group:
    """Return the picture of a plan."""
    plan = planned.plan
    parts: list[RenderableType] = [_tree(planned), *_others(plan), *_findings(plan.findings), Text("")]
    parts.append(_suggestion(planned.forecast))
    parts.append(Text.assemble(("relay".ljust(15), "bold"), relay_needs(plan.relay_bytes)))
    blocking = [finding.severity for finding in plan.findings if plan.is_blocked_by(finding)]
    if blocking:
        what = "1 finding blocks" if len(blocking) == 1 else f"{len(blocking)} findings block"
        said = f"\n{what} this plan: change that, and plan again."
        parts.append(Text(said, "bold red"))
    return Group(*parts)


def _tree(planned: Planned) -> Tree:
    """Return the tables that are split, each below the one that leads its rows to their key."""
    below: dict[str, list[TablePlan]] = defaultdict(list)
    for table in planned.plan.tables:
        if table.kind is Kind.DIRECT:
            below[planned.plan.root].append(table)
        elif table.kind is Kind.DERIVED:
            below[table.path[0].table].append(table)
    root = next(table for table in planned.plan.tables if table.name == planned.plan.root)
    tree = Tree(_line(root))
    ahead, left = [(tree, root.name)], _MOST_TABLES
    while ahead:
        branch, name = ahead.pop()
        for number, table in enumerate(below[name]):
            if not left:
                branch.add(Text(f"… and {len(below[name]) - number:,} more: see the file", "dim"))
                break
            left -= 1
            ahead.append((branch.add(_line(table)), table.name))
    return tree


def _line(table: TablePlan) -> Text:
    by = ", ".join(table.path[0].columns) if table.path else table.key
    return Text.assemble(
        (_shown(table.name), "bold"),
        (f"  {table.kind} by {_shown(by or '')}", "cyan"),
        (_size(table), "dim"),
    )


def _size(table: TablePlan) -> str:
    return f"  {counted(table.rows, 'row')}, {decimal(table.size_bytes)}"


def _others(plan: Plan) -> Iterator[RenderableType]:
    for kind, head in ((Kind.REFERENCE, "On every node"), (Kind.LOOSE, "Stay at the source")):
        if tables := [table for table in plan.tables if table.kind is kind]:
            tree = Tree(Text(head, "bold"))
            for table in tables[:_MOST_TABLES]:
                tree.add(Text.assemble(_shown(table.name), (_size(table), "dim")))
            if len(tables) > _MOST_TABLES:
                tree.add(Text(f"… and {len(tables) - _MOST_TABLES:,} more: see the file", "dim"))
            yield Text("")
            yield tree


def _findings(findings: Sequence[Finding]) -> Iterator[RenderableType]:
    """Yield the findings by weight; of many that say the same, the first few."""
    for severity, head in _HEADS.items():
        alike: dict[str, list[Finding]] = defaultdict(list)
        for finding in findings:
            if finding.severity is severity:
                alike[finding.reason].append(finding)
        if not alike:
            continue
        yield Text.assemble("\n", (head, _STYLES[severity]))
        for reason, some in alike.items():
            for finding in some[:_MOST_FINDINGS]:
                yield Text.assemble("  ", (_shown(finding.subject), "bold"), f": {_shown(reason)}")
                yield Text(f"      {_shown(finding.remedy)}", "dim")
            if len(some) > _MOST_FINDINGS:
                yield Text(f"  … and {len(some) - _MOST_FINDINGS:,} more like these", "dim")


def _suggestion(forecast: Forecast) -> Group:
    rows = [("split", f"about {forecast.split_rows:,} rows, {decimal(forecast.split_bytes)}")]
    rows.append(("on every node", decimal(forecast.reference_bytes)))
    growth = "not known" if forecast.bytes_a_day is None else f"{decimal(round(forecast.bytes_a_day))} a day"
    rows.append(("growth", f"{growth}, from {forecast.growth_from}" if forecast.bytes_a_day else growth))
    rows.append(
        ("duration", f"copy about {shown_duration(forecast.copy_s)}, comparison no longer; measure yours")
    )
    rows.append(("suggested", f"{forecast.shard_count} shards on {forecast.node_count} nodes"))
    if counts := sorted(forecast.shard_rows.values()):
        read = "exactly" if forecast.is_exact else "estimated from a sample"
        rows.append(
            (
                "rows per shard",
                f"{counts[0]:,} to {counts[-1]:,}, mean {sum(counts) // len(counts):,}; {read}",
            )
        )
    rows += [
        ("large key", f"{_shown(one.table)}: {_shown(one.key)} has {one.share:.1%} of the rows")
        for one in forecast.largest
    ]
    rows += [("rule", rule) for rule in forecast.rules]
    return Group(*(Text.assemble((name.ljust(15), "bold"), said) for name, said in rows))


def shown_duration(seconds: float) -> str:
    """Return a duration as people read an estimate."""
    if seconds < 60:
        return "a minute"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{round(seconds / 3600)} h"


def _shown(text: str) -> str:
    """Return text that moves no cursor and begins no line, whatever names are in it."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def print_check(found: adoption.Check, *, as_json: bool) -> None:
    """Print an adoption that nothing stands in the way of."""
    if as_json:
        print_json(asdict(found))
        return
    out.print(
        f"{found.split} tables would be split into {found.shards} shards on {found.nodes} nodes,"
        f" {found.reference} go to every node, {found.loose} stay at the source;"
        f" about {found.rows:,} rows, {decimal(found.size_bytes)}"
    )
    out.print(relay_needs(found.relay_bytes))
    print_relay_tables(found.relay_bytes, to=out)
    out.print("No obstacles found; nothing was changed")


def relay_needs(size_bytes: Mapping[str, int]) -> str:
    """Return how much of its disk the relay needs, in words; ``size_bytes``: of each table."""
    return f"The relay holds a copy of all these rows, and needs up to {decimal(sum(size_bytes.values()))}"


def print_relay_tables(size_bytes: Mapping[str, int], *, to: Stream) -> None:
    """Print how much of the relay's disk each table needs, the largest first."""
    for name, size in sorted(size_bytes.items(), key=lambda one: -one[1])[:_MOST_TABLES]:
        to.print(f"- {_shown(name)}: {decimal(size)}")


_WORDS: Final[Mapping[tuple[str, object], str]] = {
    ("compared", None): "never",
    ("switched", None): "not yet",
    ("", None): "not known",
    ("", True): "yes",
    ("", False): "no",
}
"""The words of a status for a value, of one name or of all."""


def print_status(found: adoption.Status | None, *, as_json: bool) -> None:
    """Print how far the adoption is."""
    if found is None:
        if as_json:
            print_json(None)
        else:
            err.print("No adoption is under way")
        return
    its = found.adoption
    row = {
        "source": its.source,
        "step": its.step,
        "paused": its.is_paused,
        "started": its.started_at.isoformat(timespec="seconds"),
        "compared": its.compared_at and its.compared_at.isoformat(timespec="seconds"),
        "switched": its.switched_at and its.switched_at.isoformat(timespec="seconds"),
        "source_takes_writes": None if found.is_source_closed is None else not found.is_source_closed,
        "source_problem": found.source_problem or None,
        "lag_bytes": {node: slot and slot.lag_bytes for node, slot in found.nodes.items()},
        "relay_keeps_bytes": {node: slot and slot.kept_bytes for node, slot in found.nodes.items()},
        "back_kept_bytes": found.back_kept_bytes,
        "relay": {
            "url": its.plan.via,
            "lag_bytes": found.relay and found.relay.lag_bytes,
            "slot": found.relay and found.relay.name,
            "source_keeps_bytes": found.relay and found.relay.kept_bytes,
            "problem": found.relay_problem or None,
        },
    }
    if as_json:
        print_json(row | {"way_back": {node: asdict(one) for node, one in (found.way_back or {}).items()}})
        return
    for name, value in row.items():
        if name not in {"lag_bytes", "relay_keeps_bytes", "back_kept_bytes", "relay", "source_problem"}:
            said = _WORDS.get((name, value), _WORDS.get(("", value), value))
            out.print(f"{name.replace('_', ' ')}: {said}")
    if found.source_problem:
        err.print(f"The source does not answer: {found.source_problem}")
    if found.way_back is not None:
        _print_way_back(found.way_back, answers=not found.source_problem)
        return
    is_switched = its.switched_at is not None
    if not is_switched:
        _print_followers(found)
    for node, kept in found.back_kept_bytes.items():
        out.print(f"node {node}: keeps {decimal(kept)} of its log for a way back that has not begun")
    if found.back_kept_bytes:
        ways = "run --resume" if is_switched else "switch, or shardids adopt abort"
        err.print(f"A switch that was interrupted has left that: shardids adopt {ways}")


def _keeps(slot: Slot) -> str:
    return f"keeps {decimal(slot.kept_bytes or 0)} of its log for it (slot {slot.kept_by or slot.name})"


def _print_followers(found: adoption.Status) -> None:
    out.print(f"relay: {found.adoption.plan.via}")
    if found.relay is not None and found.relay.lag_bytes is None:
        err.print(f"The source has given slot {found.relay.name} of the relay up: shardids adopt abort")
    elif found.relay is not None:
        out.print(
            f"relay: {decimal(found.relay.lag_bytes or 0)} behind the source, which {_keeps(found.relay)}"
        )
    if found.relay_problem:
        err.print(f"The relay does not answer, and the source keeps its log meanwhile: {found.relay_problem}")
    for node, slot in found.nodes.items():
        behind = "has no slot on the relay, or one that was given up"
        if slot is not None and slot.lag_bytes is not None:
            behind = f"{decimal(slot.lag_bytes)} behind the relay, which {_keeps(slot)}"
        elif is_at(found.adoption.step, UNFOLLOWED):
            behind = f"does not follow yet: the adoption is at step {found.adoption.step}"
        out.print(f"node {node}: {behind}")


def _print_way_back(states: dict[str, NodeBack], *, answers: bool) -> None:
    """Print how the source follows the shards, and how to go on if it does not."""
    for node, state in states.items():
        out.print(f"way back from node {node}: {state.told()}")
    if any(state.is_lost for state in states.values()):
        err.print("The way back is gone: shardids adopt finish")
    elif not answers:
        err.print(
            "The nodes keep their logs for the source meanwhile."
            " If it is lost for good: shardids adopt finish"
        )
    elif any(state.is_stopped for state in states.values()):
        err.print(HOW_TO_MEND)
    else:
        err.print("To return to the source: shardids adopt back; to stay: shardids adopt finish")


def print_changes(there: Catalog, *, is_kept: bool) -> None:
    """Print what applications have to change."""
    out.print("The shards have taken over. Applications now:")
    for line in (
        f"connect by the catalog: Cluster.connect({shown_url(there.url)!r})",
        "open sessions by the key: cluster.session(key=KEY), or by an ID: cluster.session(id=ID, of=Table)",
        "leave new IDs to the default of the column: next_id() of the shard",
    ):
        out.print(f"- {line}")
    if is_kept:
        out.print(
            "The source's tables refuse writes, and follow the shards until adopt back or adopt finish."
        )
    else:
        out.print("The source's tables refuse writes. Drop the old database when nobody reads it any more.")


def print_table(done: Status, *, is_done: bool, dry_run: bool) -> None:
    """Print how far the change of one table's key is."""
    columns = ", ".join(done.columns)
    match done.state:
        case None if done.columns and not is_done:
            text = f"No obstacles found: {columns}; nothing was changed"
        case None:
            text = f"{done.table}: nothing is under way"
        case "swapped":
            text = f"{columns}: bigint. IDs come from the sequence until --finish; --back is open until then"
        case "drawing":
            text = (
                f"{columns} was bigint already, and draws from shard {done.shard}; next: --back or --finish"
            )
        case _:
            text = f"{done.table}: {done.state}"
    out.print(text)
    for table_name, share in done.filled.items():
        out.print(f"{table_name}: {share:.0%} filled")
    if dry_run and done.state:
        out.print("Nothing was changed")
