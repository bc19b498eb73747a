"""The charts of a report, and the words around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardids.compare.report.columns import clients
from shardids.compare.report.figures import (
    BULK,
    DENSITY,
    DRAW,
    INDEX,
    MANY,
    OWN,
    ROWS,
    TABLE,
    WAL,
    Measure,
    clients_words,
    listed,
    rows_a_second,
    spread_rows,
)
from shardids.compare.report.vega import (
    BAR,
    NODES,
    STEP,
    Row,
    bars,
    by_family,
    family,
    on_schemes,
    rows_of,
    spec_of,
)
from shardids.compare.results import SPREAD, Comparison, Growth, SchemeResult
from shardids.compare.schemes.scheme import library

_MIB = 2**20
_NAMED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart, and the words around it.

    Attributes:
        name: its name in the page.
        title: what it shows, with the unit.
        reading: how to read it.
        measure: the attribute of the results that it shows; names what was left out.
        spec: the Vega-Lite specification.
    """

    name: str
    title: str
    reading: str
    measure: str
    spec: Mapping[str, Any]


def charts(comparison: Comparison) -> list[Chart]:
    """Returns all charts but the scatter of keys, and leaves out those without data.

    Raises:
        MissingLibrary: Altair is not installed.
    """
    makers = (_inserts, _spread, _bulk, _draws, _growth, _disk, _wal)
    return [chart for make in makers if (chart := make(comparison)) is not None]


def scatter() -> Mapping[str, Any]:
    """Returns the chart of a scheme's keys against the time of issue; the page supplies ``points``."""
    alt = library("altair")
    chart = (
        alt.Chart(alt.NamedData(name="points"))
        .mark_circle(size=9, opacity=0.75, clip=True)
        .encode(
            x=alt.X(
                "ms:Q",
                title=None,
                axis=alt.Axis(tickCount=3, format=",.0f", grid=False),
                scale=alt.Scale(nice=False),
            ),
            y=alt.Y("key:Q", title=None, scale=alt.Scale(domain=[0, 1]), axis=None),
            color=alt.Color("node:N", scale=alt.Scale(domain=[*range(len(NODES))], range=[*NODES])),
            tooltip=[
                alt.Tooltip("ms:Q", title="issued at, ms", format=",.1f"),
                alt.Tooltip("key:Q", title="key, of the run's range", format=".4f"),
                alt.Tooltip("node:N", title="node"),
            ],
        )
    )
    return spec_of(chart, height=130)


def _inserts(comparison: Comparison) -> Chart | None:
    return _rates(
        comparison,
        clients(result.inserts for result in comparison.schemes),
        rows_a_second,
        measure="inserts",
        title="Rows inserted a second",
        reading="Each row is a transaction of its own, and its key is drawn for it. More is better.",
    )


def _spread(comparison: Comparison) -> Chart | None:
    return _rates(
        comparison,
        clients(result.spread for result in comparison.schemes),
        spread_rows,
        measure="spread",
        title=f"Rows inserted a second, each in another of {SPREAD} shards",
        reading="As above, but no two rows after each other are for one table. More is better.",
    )


def _rates(
    comparison: Comparison,
    counts: Sequence[int],
    by: Callable[[int], Measure],
    *,
    measure: str,
    title: str,
    reading: str,
) -> Chart | None:
    """Charts the rate of the most clients; a stroke is that of the fewest."""
    if not counts:
        return None
    least, most = counts[0], counts[-1]
    slow, fast = by(least), by(most)
    tips = (slow, fast)
    rows = rows_of(comparison, fast, tips, lambda result: {"least": slow.value(result)})
    alt = library("altair")
    mark = alt.Chart().mark_tick(thickness=2, size=BAR, color="var(--ink)").encode(x="least:Q")
    return Chart(
        name=measure,
        title=f"{title}, {clients_words(most)}",
        reading=reading + (f" The stroke: {clients_words(least)}." if least != most else ""),
        measure=measure,
        spec=bars(rows, tips, *([mark] if least != most else [])),
    )


def _bulk(comparison: Comparison) -> Chart | None:
    return _chart(
        comparison,
        BULK,
        (BULK, ROWS),
        name="bulk",
        title="Rows filled in bulk a second",
        reading="A table (key, integer) with its primary key, filled in bulk. More is better.",
    )


def _wal(comparison: Comparison) -> Chart | None:
    return _chart(
        comparison,
        WAL,
        (WAL, ROWS),
        name="wal",
        title="Write-ahead log, bytes a row",
        reading="What replicas and backups read; with whole pages after checkpoints. Less is better.",
    )


def _disk(comparison: Comparison) -> Chart | None:
    return _chart(
        comparison,
        INDEX,
        (INDEX, DENSITY, TABLE, ROWS),
        name="index",
        title="Primary key's index, bytes a row",
        reading="When the table has all its rows. Full pages are fewer to cache. Less is better.",
    )


def _chart(
    comparison: Comparison, of: Measure, tips: Sequence[Measure], *, name: str, title: str, reading: str
) -> Chart | None:
    rows = rows_of(comparison, of, tips)
    if not rows:
        return None
    return Chart(name=name, title=title, reading=reading, measure="storage", spec=bars(rows, tips))


def _draws(comparison: Comparison) -> Chart | None:
    quantiles = {"p1": 1, "p25": 25, "p50": 50, "p75": 75, "p99": 99}
    shown = [_quantile(name, at) for name, at in quantiles.items()]
    tips = (*shown, MANY)
    rows = rows_of(
        comparison,
        DRAW,
        tips,
        lambda result: {name: tip.value(result) for name, tip in zip(quantiles, shown, strict=True)},
    )
    if not rows:
        return None
    alt = library("altair")
    scale = alt.Scale(type="log", nice=False, domain=_room(rows))
    axis = alt.Axis(values=[10**power for power in range(-2, 7)], labelExpr=_DECADES, title=None)
    x = alt.X("p1:Q", scale=scale, axis=axis)
    whisker = alt.Chart().mark_rule(strokeWidth=2, opacity=0.55).encode(x=x, x2="p99:Q", color=by_family(alt))
    middle = alt.Chart().mark_bar(size=11, cornerRadius=2).encode(x="p25:Q", x2="p75:Q", color=by_family(alt))
    median = alt.Chart().mark_tick(thickness=2, size=BAR, color="var(--ink)").encode(x="p50:Q")
    text = alt.Chart().mark_text(align="left", dx=6).encode(x="p99:Q", text="label:N")
    chart = on_schemes(alt, rows, tips, whisker, middle, median, text)
    return Chart(
        name="draws",
        title="Time of a single draw, logarithmic",
        reading="Line: 1st to 99th percentile. Bar: the middle half. Stroke and figure: the median in µs."
        " Round trip to the server included, where there is one. Less is better.",
        measure="draws",
        spec=spec_of(chart, height=len(rows) * STEP),
    )


def _quantile(name: str, at: int) -> Measure:
    return Measure(
        label=f"{name}, µs", value=lambda result: result.draws.quantiles_us[at] if result.draws else None
    )


_DECADES = (
    "datum.value >= 1e6 ? datum.value / 1e6 + ' s'"
    " : datum.value >= 1e3 ? datum.value / 1e3 + ' ms' : datum.value + ' µs'"
)


def _room(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns the range from the shortest time to the longest (all above zero), with room for a figure."""
    shortest = max(min(row["p1"] for row in rows), 1e-3)
    longest = max(row["p99"] for row in rows)
    return [shortest * 0.8, longest * (longest / shortest) ** 0.2]


def _growth(comparison: Comparison) -> Chart | None:
    """Charts all schemes whose tables were filled; those whose indexes end alike share one label."""
    measured = [result for result in comparison.schemes if result.storage and result.storage.growth]
    if not measured:
        return None
    own_last = sorted(measured, key=lambda result: result.about.name in OWN)  # the last is drawn on top
    rows = [
        {
            "name": result.about.name,
            "scheme": result.about.title,
            "family": family(result),
            "rows": point.rows,
            "mib": point.index_bytes / _MIB,
        }
        for result in own_last
        for point in _growth_of(result)
    ]
    alt = library("altair")
    x = alt.X("rows:Q", title="rows in the table", axis=alt.Axis(format="~s", grid=False, tickCount=5))
    y = alt.Y("mib:Q", title=None, axis=alt.Axis(tickCount=5))
    line = (
        alt.Chart()
        .mark_line(strokeWidth=2, point=alt.OverlayMarkDef(size=22, filled=True))
        .encode(
            x=x,
            y=y,
            detail="name:N",
            color=by_family(alt),
            order=alt.Order("rows:Q"),
            tooltip=[
                alt.Tooltip("scheme:N"),
                alt.Tooltip("rows:Q", format=","),
                alt.Tooltip("mib:Q", title="index, MiB", format=",.2f"),
            ],
        )
    )
    words = {"align": "right", "dy": -10, "dx": 4, "fontWeight": 600}
    text = alt.Chart(alt.InlineData(values=_labels(measured))).encode(x="rows:Q", y="mib:Q", text="label:N")
    halo = text.mark_text(stroke="var(--card)", strokeWidth=5, strokeJoin="round", **words)
    text = text.mark_text(**words).encode(color=by_family(alt))
    chart = alt.layer(line, halo, text, data=alt.InlineData(values=rows))
    return Chart(
        name="growth",
        title="Primary key's index as the table grows, MiB",
        reading="One line a scheme. Keys in order fill pages; random keys split them.",
        measure="storage",
        spec=spec_of(chart, height=360),
    )


def _growth_of(result: SchemeResult) -> Sequence[Growth]:
    return result.storage.growth if result.storage else ()


def _labels(measured: Sequence[SchemeResult]) -> list[Row]:
    """Makes one label for all lines whose ends are too close for a label each."""
    ends = sorted(
        ((_growth_of(result)[-1], result) for result in measured),
        key=lambda end: (end[0].rows, end[0].index_bytes),
    )
    near = 0.05 * max(growth.index_bytes for growth, _ in ends)
    groups: list[list[tuple[Growth, SchemeResult]]] = []
    for end in ends:
        first = groups[-1][0][0] if groups else None
        if first and first.rows == end[0].rows and end[0].index_bytes - first.index_bytes < near:
            groups[-1].append(end)
        else:
            groups.append([end])
    return [_label(group) for group in groups]


def _label(group: Sequence[tuple[Growth, SchemeResult]]) -> Row:
    # shardids is always named; the others in their order, as many as there is room for.
    first, *others = sorted(group, key=lambda end: end[1].about.name not in OWN)
    names = [result.about.name for _, result in (first, *others)]
    more = len(names) - _NAMED
    if more > 1:
        names = [*names[:_NAMED], f"{more} more"]
    return {
        "label": listed(names),
        "family": family(first[1]),
        "rows": first[0].rows,
        "mib": max(end[0].index_bytes for end in group) / _MIB,
    }
