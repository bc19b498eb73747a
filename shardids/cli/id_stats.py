"""``shardids id stats``: what many IDs tell together."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardids.cli.command import Run, takes
from shardids.cli.printing import err, figures, out, print_json, print_warnings
from shardids.errors import BadArgument, ShardidsError
from shardids.ids import Layout

if TYPE_CHECKING:
    from rich.table import Table

    from shardids.watch.stats.detector import Anomaly
    from shardids.watch.stats.measured import IdStats
    from shardids.watch.stats.reading import ReadIds

_MOST_NAMED = 5
_MOST_FOUND = 20
_MOST_LISTED = 10
_HOUR, _DAY = timedelta(hours=1), timedelta(days=1)


@takes("catalog?", "json")
def stats(
    run: Run,
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE|-", help="IDs, one per line, or a CSV file; - is stdin.", show_default="-"
        ),
    ] = None,
    column: Annotated[
        str | None, typer.Option(metavar="NAME", help="The file is CSV, and this column has the IDs.")
    ] = None,
    delimiter: Annotated[
        str | None, typer.Option(help="What separates the fields of the CSV file.", show_default=",")
    ] = None,
    query: Annotated[
        str | None, typer.Option(metavar="SQL", help="Ask the database of --url for IDs instead; one column.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The database that runs --query: postgresql://user@host/database"),
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Name lines that are not IDs, and go on.")
    ] = False,
    top: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many shards to list, those with most IDs first.",
            show_default="10; with --json all",
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option("--layout", metavar="NAME|T-S-Q[@EPOCH_MS]", help="As for shardids id decode."),
    ] = None,
) -> None:
    """Read IDs as a record of load: shards, rates, gaps, order, clocks, and anomalies.

    Clocks are judged if the IDs come in about the order of their insertion. Exits 0 whatever is found.
    """
    if find_spec("numpy") is None:
        raise ShardidsError("shardids id stats needs numpy", hint="pip install 'shardids[ops]'")
    from shardids.watch.stats.measured import of

    if (query is None) != (url is None):
        raise BadArgument(
            "--query and --url go together", hint="--query is the query, --url the database that runs it."
        )
    if query is not None:
        _refuse_of_file({"FILE": file, "--column": column, "--delimiter": delimiter})
    if delimiter is not None and column is None:
        raise BadArgument("--delimiter goes with --column", hint="Without it, each line is an ID.")
    used, old_ids_below = _layout(run, layout)
    read = _read("-" if file is None else file, column, "," if delimiter is None else delimiter, query, url)
    ids, bad = _checked(read, used)
    _name(bad, "line" if query is None else "row", is_csv=column is not None, skip_bad=skip_bad)
    measured = of(ids, used, now=datetime.now(UTC), old_ids_below=old_ids_below)
    print_warnings(_doubts(measured))
    if run.as_json:
        print_json(_as_json(measured, len(bad), top))
    else:
        _print(measured, top or _MOST_LISTED)


def _refuse_of_file(given: dict[str, str | None]) -> None:
    if names := [name for name, value in given.items() if value is not None]:
        raise BadArgument(
            f"--query does not go with {', '.join(names)}", hint="The IDs are of a file or of a query."
        )


def _layout(run: Run, layout: str | None) -> tuple[Layout, int | None]:
    if layout is not None or not run.url:
        return Layout.parse(layout or "default"), None
    rules = run.catalog.placement().old_ids
    return run.catalog.describe().layout, rules.below if rules else None


def _read(file: str, column: str | None, delimiter: str, query: str | None, url: str | None) -> ReadIds:
    from shardids.watch.stats.reading import read_ids

    with ExitStack() as stack:
        if query is not None and url is not None:
            from shardids.watch.stats.reading import answer

            return read_ids(stack.enter_context(answer(url, query)))
        if file == "-" and sys.stdin is None:
            raise ShardidsError("stdin is closed", hint="Name a file, or pipe the IDs in.")
        opened_file = sys.stdin.buffer if file == "-" else stack.enter_context(Path(file).open("rb"))
        return read_ids(opened_file, column=column, delimiter=delimiter)


def _checked(read: ReadIds, layout: Layout) -> tuple[Any, list[tuple[int, str]]]:
    """The IDs that the layout can hold, and the other lines with their faults, in their order."""
    from shardids.watch.stats.reading import foreign

    is_foreign = foreign(read.ids, layout)
    bad = [(one.line, one.reason) for one in read.bad]
    for place in is_foreign.nonzero()[0]:
        try:
            layout.decode(int(read.ids[place]))
        except BadArgument as error:
            bad.append((int(read.lines[place]), error.message))
    return read.ids[~is_foreign], sorted(bad)


def _name(bad: list[tuple[int, str]], what: str, *, is_csv: bool, skip_bad: bool) -> None:
    if not bad:
        return
    named = [f"{what} {line:,}: {reason}" for line, reason in bad[:_MOST_NAMED]]
    more = len(bad) - len(named)
    if more:
        named.append(f"and {more:,} more")
    if not skip_bad:
        csv = "If the file is CSV: --column NAME. " if what == "line" and not is_csv else ""
        raise BadArgument(
            "; ".join(named), hint=f"{csv}To leave out lines that are not IDs of this layout: --skip-bad"
        )

    print_warnings([f"{one}, left out" if one.startswith(what) else one for one in named])


def _doubts(stats: IdStats) -> list[str]:
    """Why these may be IDs of another layout, or of none."""
    another = f"are they of another layout than {stats.layout}? See --layout and --catalog"
    of_first_hour = stats.last is not None and stats.last < stats.layout.first_time + _HOUR
    if of_first_hour and stats.now > stats.layout.first_time + _DAY:
        return [f"all IDs are of the first hour of the layout: did shards issue them, and {another}"]
    if stats.ahead * 2 > stats.count and stats.most_ahead_ms > _DAY / timedelta(milliseconds=1):
        return [f"{stats.ahead:,} of {stats.count:,} IDs are ahead of now: {another}"]
    return []


def _print(stats: IdStats, top: int) -> None:

    out.print(_summary(stats))
    if not stats.count:
        err.print("There are no others." if stats.old else "There are no IDs.")
        return
    out.print()
    out.print(_shards(stats, top))
    out.print()
    if stats.is_sorted:
        out.print("Nothing is said of clocks: the IDs are sorted, which hides whose clock is off.")
    elif not stats.tells_clocks:
        out.print(
            "Nothing is said of clocks: that takes four shards, and IDs in the order of their insertion."
        )
    if stats.duplicates:
        out.print(
            f"{stats.duplicates:,} had come before: rows that were read twice, a column that refers to"
            " others, or IDs that were issued twice."
        )
    if not stats.anomalies:
        out.print("Nothing else is unusual." if stats.duplicates else "Nothing unusual.")
    for one in stats.anomalies[:_MOST_FOUND]:
        out.print(f"[bold yellow]{one.kind}[/] ", markup=True, end="")
        out.print(_told(one))
    if len(stats.anomalies) > _MOST_FOUND:
        err.print(f"and {len(stats.anomalies) - _MOST_FOUND:,} more; all of them: --json")


def _told(one: Anomaly) -> str:
    of = "all shards" if one.shard is None else f"shard {one.shard}"
    when = f", {one.start:%Y-%m-%d %H:%M:%S}" if one.start else ""
    until = f" to {one.end:%Y-%m-%d %H:%M:%S}" if one.start and one.end else ""
    return f"{of}{when}{until}: {one.message}"


def _summary(stats: IdStats) -> Table:
    from rich.table import Table

    from shardids.watch.stats.detector import rate, span

    table = Table(box=None, show_header=False, pad_edge=False)
    rows = {"IDs": f"{stats.count:,}", "shards": f"{stats.shards.shard.size:,}"}
    if stats.old:
        rows["from before the cluster"] = f"{stats.old:,}"
    if stats.first and stats.last:
        rows["born"] = f"{_time(stats.first)} to {_time(stats.last)} UTC"
    if stats.per_second:
        rows["rate"] = rate(stats.per_second, "ID")
    rows |= {
        "duplicates": f"{stats.duplicates:,}",
        "pairs out of order": f"{stats.out_of_order:.4%}",
        "ahead of now": f"{stats.ahead:,}"
        + (f", by {span(stats.most_ahead_ms / 1000, 3)} at most" if stats.ahead else ""),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _time(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S}.{at.microsecond // 1000:03}"


def _shards(stats: IdStats, top: int) -> Table:
    from shardids.watch.stats.detector import span

    rows = [
        {
            "shard": str(row["shard"]),
            "IDs": f"{row['count']:,}",
            "share": f"{row['share']:.2%}",
            "last": str(row["last"])[:19].replace("T", " "),
            "longest gap": span(row["longest_gap_ms"] / 1000, 3),
            "most a ms": f"{row['most_in_ms']:,}",
            "ticks in a row": f"{row['run']:,}",
        }
        for row in _by_count(stats, top)
    ]
    return figures(rows, left={"last"})


def _by_count(stats: IdStats, top: int | None) -> list[dict[str, Any]]:
    from shardids.watch.stats.detector import time_of

    shards = stats.shards
    return [
        {
            "shard": int(shards.shard[row]),
            "count": int(shards.count[row]),
            "share": int(shards.count[row]) / stats.count,
            "first": time_of(int(shards.first_ms[row])).isoformat(timespec="milliseconds"),
            "last": time_of(int(shards.last_ms[row])).isoformat(timespec="milliseconds"),
            "longest_gap_ms": int(shards.gap_ms[row]),
            "longest_gap_from": time_of(int(shards.gap_start_ms[row])).isoformat(timespec="milliseconds"),
            "most_in_ms": int(shards.most_in_ms[row]),
            "run": int(shards.run[row]),
        }
        for row in (-shards.count).argsort(kind="stable")[:top]
    ]


def _as_json(stats: IdStats, bad: int, top: int | None) -> dict[str, object]:
    return {
        "ids": stats.count,
        "bad": bad,
        "old": stats.old,
        "layout": str(stats.layout),
        "first": stats.first and stats.first.isoformat(timespec="milliseconds"),
        "last": stats.last and stats.last.isoformat(timespec="milliseconds"),
        "ids_per_second": stats.per_second,
        "duplicates": stats.duplicates,
        "ahead": stats.ahead,
        "most_ahead_ms": stats.most_ahead_ms,
        "out_of_order": stats.out_of_order,
        "sorted": stats.is_sorted,
        "tells_clocks": stats.tells_clocks,
        "shard_count": int(stats.shards.shard.size),
        "shards": _by_count(stats, top),
        "anomalies": [_anomaly_as_json(one) for one in stats.anomalies],
    }


def _anomaly_as_json(one: Anomaly) -> dict[str, object]:
    return {
        "kind": str(one.kind),
        "shard": one.shard,
        "start": one.start and one.start.isoformat(timespec="milliseconds"),
        "end": one.end and one.end.isoformat(timespec="milliseconds"),
        "value": one.value,
        "expected": one.expected,
        "message": one.message,
    }
