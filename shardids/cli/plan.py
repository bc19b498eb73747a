"""``shardids plan``: how large a cluster has to be, and whether a layout fits a load."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from shardids.cli.command import Run, takes
from shardids.cli.printing import figures, out, print_json, print_warnings
from shardids.errors import BadArgument
from shardids.ids import FOREIGN, ForeignLayout, parse_layout
from shardids.pg.notation import counted

if TYPE_CHECKING:
    from shardids.ids.planning import Plan

_PRICE = re.compile(r"(node|TB)=([0-9]+(?:\.[0-9]+)?)")
_DEAREST = 1e18
_OPTIONS = {
    "ids_per_second": "--ids-per-second",
    "peak": "--peak",
    "years": "--years",
    "growth": "--growth",
    "rows": "--rows",
    "row_bytes": "--row-bytes",
    "keep_years": "--keep",
    "rows_per_second": "--node-rows",
    "disk": "--node-disk",
    "connections": "--node-connections",
    "latency_ms": "--latency-ms",
}
"""The option of each field that errors name."""
_UNITS = "", "k", "M", "G", "T", "P", "E", "Z", "Y"
_Made = TypeVar("_Made")


@takes("json")
def plan(
    run: Run,
    ids_per_second: Annotated[str, typer.Option(metavar="N", help="The mean today: 50000, or 50k.")],
    peak: Annotated[
        str, typer.Option(metavar="Nx", help="The load of the busiest second, as a multiple of the mean.")
    ] = "1x",
    years: Annotated[float, typer.Option(help="For how long.")] = 10.0,
    growth: Annotated[str, typer.Option(metavar="N%/y", help="How the mean grows: 40%/y, or 2%/m.")] = "0%/y",
    rows: Annotated[str, typer.Option(metavar="N", help="Rows that are there already.")] = "0",
    row_bytes: Annotated[
        str, typer.Option(metavar="N", help="Bytes of a row on disk, with all but the index of its key.")
    ] = "200",
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="Nd|Ny", help="After how long a row is deleted: 90d, or 2y.", show_default="never"
        ),
    ] = None,
    node_rows: Annotated[
        str, typer.Option(metavar="N", help="Rows per second that a node commits; measure yours.")
    ] = "10k",
    node_disk: Annotated[
        str, typer.Option(metavar="N", help="A node's disk: 2TB. It is full at 80 %.")
    ] = "2TB",
    node_connections: Annotated[
        str, typer.Option(metavar="N", help="Connections that a node accepts.")
    ] = "400",
    latency_ms: Annotated[float, typer.Option(help="For how long a row has a connection.")] = 5.0,
    price: Annotated[
        list[str] | None,
        typer.Option(metavar="node=N|TB=N", help="What a node, or a TB of rows, costs a month; repeatable."),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|T-S-Q[@EPOCH_MS]",
            help=f"Say whether this layout, or {' or '.join(FOREIGN)}, fits; exit 1 if not.",
        ),
    ] = None,
    shards: Annotated[
        int | None, typer.Option(min=1, max=1 << 16, help="With --layout: how many shards; else all it has.")
    ] = None,
) -> None:
    """Plan widths, shards and nodes for a load, or say with --layout whether one fits it. Asks no server.

    Exits with 1 where no cluster holds the load, after the plan that comes closest.
    """
    from shardids.ids.planning import Load, Node, validate
    from shardids.ids.planning import plan as planned
    from shardids.ids.planning.load import parse_growth, parse_keep, parse_number, parse_peak

    load = _checked(
        Load,
        ids_per_second=parse_number("--ids-per-second", ids_per_second),
        peak=parse_peak(peak),
        years=years,
        growth=parse_growth(growth),
        rows=parse_number("--rows", rows),
        row_bytes=parse_number("--row-bytes", row_bytes, "B"),
        keep_years=None if keep is None else parse_keep(keep),
    )
    node = _checked(
        Node,
        rows_per_second=parse_number("--node-rows", node_rows),
        disk=parse_number("--node-disk", node_disk, "B"),
        connections=parse_number("--node-connections", node_connections),
        latency_ms=latency_ms,
    )
    prices = _prices(price or [])
    now = datetime.now(UTC)
    if layout is None:
        if shards is not None:
            raise BadArgument("--shards goes with --layout", hint="Without it, the plan says how many.")
        made = planned(load, node=node, now=now)
        _show(made, load, prices, as_json=run.as_json)
        if made.lacking:
            raise typer.Exit(1)
        return
    if prices:
        raise BadArgument("--price does not go with --layout", hint="The plan without it says what it costs.")
    used = parse_layout(layout)
    count = used.shard_limit if shards is None else shards
    # Where the machines of another generator keep their rows, its layout does not say.
    of_nodes = None if isinstance(used, ForeignLayout) else node
    why = validate(load, layout=used, shards=count, now=now, node=of_nodes)
    if run.as_json:
        print_json({"layout": str(used), "shards": count, "fits": not why, "why": why})
    else:
        for one in why or [f"layout {used} fits"]:
            typer.echo(one)
    if why:
        raise typer.Exit(1)


def _checked(make: Callable[..., _Made], **options: float | None) -> _Made:
    """Make it of the options; what is wrong with one is said in its name."""
    try:
        return make(**options)
    except BadArgument as error:
        field, _, rest = error.message.partition(" ")
        if field not in _OPTIONS:
            raise
        raise BadArgument(f"{_OPTIONS[field]} {rest}") from None


def _prices(texts: list[str]) -> dict[str, float]:
    prices: dict[str, float] = {}
    for text in texts:
        found = _PRICE.fullmatch(text)
        if found is None:
            raise BadArgument(
                f"--price: {text!r} is no price", hint="For example: --price node=400 --price TB=90"
            )
        if found[1] in prices:
            raise BadArgument(f"--price: {found[1]} has two prices", hint="Give one for node, one for TB.")
        prices[found[1]] = float(found[2])
        if prices[found[1]] > _DEAREST:
            raise BadArgument(f"--price: {found[1]} must cost at most {_DEAREST:g}")
    return prices


def _rows(plan: Plan, prices: dict[str, float]) -> list[dict[str, Any]]:
    rows = []
    for one in plan.years:
        row: dict[str, Any] = {
            "year": one.year,
            "peak_per_second": one.peak_rate,
            "per_ms_and_shard": one.peak_rate / plan.shards / 1000,
            "rows": one.rows,
            "disk_bytes": one.disk,
            "nodes": one.nodes,
            "because": one.because,
        }
        if prices:
            row["cost_a_month"] = one.nodes * prices.get("node", 0) + one.disk / 1e12 * prices.get("TB", 0)
        rows.append(row)
    return rows


def _show(plan: Plan, load: Any, prices: dict[str, float], *, as_json: bool) -> None:
    from shardids.ids.planning import collisions, key_bytes

    rows, keys, chances = _rows(plan, prices), key_bytes(load), collisions(load)
    if as_json:
        print_json(
            {
                "layout": str(plan.layout),
                "shards": plan.shards,
                "years": rows,
                "limits": [
                    {
                        "what": one.what,
                        "year": one.year if math.isfinite(one.year) else None,
                        "message": one.message,
                    }
                    for one in plan.limits
                ],
                "key_bytes_in_10_years": keys,
                "collision_chance_in_10_years": chances,
                "fits": not plan.lacking,
                "why": plan.lacking,
            }
        )
        return
    _print(plan, rows, keys, chances, has_prices=bool(prices))


def _print(
    plan: Plan,
    rows: list[dict[str, Any]],
    keys: dict[str, float],
    chances: dict[str, float],
    *,
    has_prices: bool,
) -> None:
    out.print(f"layout {plan.layout} ({plan.layout.name}), {counted(plan.shards, 'shard')}")
    out.print(f"made by: shardids init --shards {plan.shards} --layout {plan.layout}\n")
    shown = [
        {
            "year": f"{row['year']:.4g}",
            "IDs/s at the peak": f"{row['peak_per_second']:,.0f}",
            "a ms and shard": f"{row['per_ms_and_shard']:,.3g}",
            "rows": _short(row["rows"]),
            "disk": f"{_short(row['disk_bytes'])}B",
            "nodes": f"{row['nodes']:,}",
            "because of": row["because"],
        }
        | ({"cost a month": f"{row['cost_a_month']:,.0f}"} if has_prices else {})
        for row in rows
    ]
    out.print(figures(shown, left={"because of"}))
    first = plan.years[0].nodes
    nodes = counted(first, "node")
    out.print(f"\nWith the {nodes} of year 0, what ends first:")
    for one in plan.limits:
        out.print(f"  {one.what}: {_when(one.year)}; {one.message}")
    crowded = [one.message for one in plan.limits if one.what == "shards per node" and not one.year]
    print_warnings(
        f"shards per node: {message}; measure yours, or begin with more nodes" for message in crowded
    )
    out.print("\nKeys and one foreign key a row, with their indexes, after 10 years:")
    for kind, size in keys.items():
        out.print(f"  {kind}: {_short(size, 4)}B")
    out.print("\nThe chance that two keys of those years are the same, if they were:")
    for kind, chance in chances.items():
        out.print(f"  {kind}: {chance:.2g}")
    if plan.lacking:
        out.print("\nThis load does not fit one cluster:")
        for why in plan.lacking:
            out.print(f"  {why}")
        out.print(
            "Plan for fewer years, less growth, larger nodes (--node-disk, --node-rows), rows that are"
            " deleted (--keep), or several clusters."
        )


def _when(year: float) -> str:
    if not year:
        return "now"
    return f"after {year:,.2f} years" if math.isfinite(year) else "not within 1,000 years"


def _short(value: float, digits: int = 3) -> str:
    """The number as the options take it: 18.8G."""
    rounded = float(f"{value:.{digits}g}")
    power = min(max(math.floor(math.log10(rounded)) // 3, 0), len(_UNITS) - 1) if rounded else 0
    return f"{rounded / 1000**power:,.{digits}g}{_UNITS[power]}"
