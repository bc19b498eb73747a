"""The picture of a plan: its tables as a tree below the root, what was found, and what is suggested."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.text import Text
from rich.tree import Tree

from shardids.adopt.plan import Finding, Kind, Plan, Severity, TablePlan
from shardids.adopt.planning import Planned
from shardids.adopt.suggest import Forecast

_MOST_TABLES: Final = 200
"""How many tables a picture shows of each kind; the file has all."""
_MOST_FINDINGS: Final = 3
"""How many findings of one kind are shown."""
_STYLES: Final = {
    Severity.BLOCKS: "bold red",
    Severity.NEEDS_RELAY: "yellow",
    Severity.NOT_KEPT: "magenta",
    Severity.NOTE: "dim",
}
_HEADS: Final = {
    Severity.BLOCKS: "Blocks",
    Severity.NEEDS_RELAY: "Needs a relay (--via): no publication of the source can do it",
    Severity.NOT_KEPT: "Not kept",
    Severity.NOTE: "To know",
}


def plan_picture(planned: Planned) -> Group:
    """Returns the picture of a plan."""
    plan = planned.plan
    parts: list[RenderableType] = [_tree(planned), *_others(plan), *_findings(plan.findings), Text("")]
    parts.append(_suggestion(planned.forecast))
    blocking = [finding.severity for finding in plan.findings if plan.is_blocked_by(finding)]
    if blocking:
        remedy = "name a relay (--via), or change that" if Severity.NEEDS_RELAY in blocking else "change that"
        what = "1 finding blocks" if len(blocking) == 1 else f"{len(blocking)} findings block"
        said = f"\n{what} this plan: {remedy}, and plan again."
        parts.append(Text(said, "bold red"))
    return Group(*parts)


def _tree(planned: Planned) -> Tree:
    """Returns the tables that are split, each below the one by which its rows find their key."""
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
        (f"  {table.rows:,} rows, {decimal(table.size_bytes)}", "dim"),
    )


def _others(plan: Plan) -> Iterator[RenderableType]:
    for kind, head in ((Kind.REFERENCE, "On every node"), (Kind.LOOSE, "Stay at the source")):
        if tables := [table for table in plan.tables if table.kind is kind]:
            tree = Tree(Text(head, "bold"))
            for table in tables[:_MOST_TABLES]:
                size = f"  {table.rows:,} rows, {decimal(table.size_bytes)}"
                tree.add(Text.assemble(_shown(table.name), (size, "dim")))
            if len(tables) > _MOST_TABLES:
                tree.add(Text(f"… and {len(tables) - _MOST_TABLES:,} more: see the file", "dim"))
            yield Text("")
            yield tree


def _findings(findings: Sequence[Finding]) -> Iterator[RenderableType]:
    """Yields the findings by what they mean; of many that say the same, the first few."""
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
                yield Text(f"  … and {len(some) - _MOST_FINDINGS:,} more of which the same is true", "dim")


def _suggestion(forecast: Forecast) -> Group:
    rows = [("split", f"about {forecast.split_rows:,} rows, {decimal(forecast.split_bytes)}")]
    rows.append(("on every node", decimal(forecast.reference_bytes)))
    growth = "not known" if forecast.bytes_a_day is None else f"{decimal(round(forecast.bytes_a_day))} a day"
    rows.append(("growth", f"{growth}, from {forecast.growth_from}" if forecast.bytes_a_day else growth))
    rows.append(("suggested", f"{forecast.shard_count} shards on {forecast.node_count} nodes"))
    if counts := sorted(forecast.shard_rows.values()):
        read = "exactly" if forecast.is_exact else "estimated from a sample"
        rows.append(
            ("rows a shard", f"{counts[0]:,} to {counts[-1]:,}, mean {sum(counts) // len(counts):,}; {read}")
        )
    rows += [
        ("large key", f"{_shown(one.table)}: {_shown(one.key)} has {one.share:.1%} of the rows")
        for one in forecast.largest
    ]
    rows += [("rule", rule) for rule in forecast.rules]
    return Group(*(Text.assemble((name.ljust(15), "bold"), said) for name, said in rows))


def _shown(text: str) -> str:
    """Returns text that moves no cursor and begins no line, whatever names are in it."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
