"""The charts of a report, by Altair, and the words around them.

Colours are CSS variables of the page, so that charts follow its light and dark themes without a new drawing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from shardids.compare.report.summary import (
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
from shardids.compare.report.table import clients
from shardids.compare.results import SPREAD, Comparison, Growth, SchemeResult
from shardids.compare.schemes.scheme import library

Row = Mapping[str, Any]

FAMILIES: Mapping[str, str] = {
    "shardids": "var(--own)",
    "other 64-bit keys": "var(--narrow)",
    "128-bit keys": "var(--broad)",
}
"""The kinds of schemes that have a colour, the same in every chart."""

NODES = ("var(--node-0)", "var(--node-1)", "var(--node-2)", "var(--node-3)")

BAR = 15
"""The thickness of a bar, in px."""
STEP = 23
"""The height of a scheme's line, in px."""
_LABEL_WIDTH = 118

CONFIG: Mapping[str, object] = {
    "background": None,
    "font": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif",
    "view": {"stroke": None},
    "axis": {
        "domain": False,
        "ticks": False,
        "grid": True,
        "gridColor": "var(--line)",
        "labelColor": "var(--soft)",
        "titleColor": "var(--soft)",
        "titleFontWeight": "normal",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "labelPadding": 6,
    },
    "text": {"color": "var(--ink)", "fontSize": 12},
    "legend": {"disable": True},
}
"""Returns what all charts share: Vega-Lite's ``config``."""


def family(result: SchemeResult) -> str:
    """Return the kind of a scheme, one of :data:`FAMILIES`."""
    own, narrow, broad = FAMILIES
    return own if result.about.name in OWN else narrow if result.key_bytes == 8 else broad


def vega_lite_version() -> str:
    """Return the version of Vega-Lite that Altair writes specifications for, as vl-convert names it."""
    major, minor, *_ = str(library("altair").SCHEMA_VERSION).removeprefix("v").split(".")
    return f"{major}.{minor}"


def versions() -> Mapping[str, str]:
    """Return the versions of what vl-convert bundles, by name."""
    bundled = library("vl_convert")
    return {
        "Vega": bundled.get_vega_version(),
        "Vega-Lite": vega_lite_version(),
        "Vega-Embed": bundled.get_vega_embed_version(),
    }


def rows_of(
    comparison: Comparison,
    measure: Measure,
    tips: Sequence[Measure],
    more: Callable[[SchemeResult], Row] = lambda _: {},
) -> list[Row]:
    """Return a row for each scheme that has the measure, the best first.

    ``tips`` are shown when the pointer is over a scheme; ``more`` are further fields to draw.
    """
    found = [
        (
            value,
            {
                "name": result.about.name,
                "scheme": result.about.title,
                "family": family(result),
                "value": value,
                "label": measure.text(value),
                **{f"tip{number}": tip.text(tip.value(result)) for number, tip in enumerate(tips)},
                **more(result),
            },
        )
        for result in comparison.schemes
        if (value := measure.value(result)) is not None
    ]
    return [row for _, row in sorted(found, key=itemgetter(0), reverse=measure.most)]


def bars(rows: Sequence[Row], tips: Sequence[Measure], *more: Any) -> Mapping[str, Any]:
    """Return a chart with one bar per scheme, in the order of the rows, with its figure at its end."""
    alt = library("altair")
    rows = [{**row, "end": max(row["value"], row.get("least") or 0)} for row in rows]
    longest = max(row["end"] for row in rows)
    bar = (
        alt.Chart()
        .mark_bar(size=BAR, cornerRadiusEnd=2)
        .encode(
            x=alt.X("value:Q", axis=None, scale=alt.Scale(domain=[0, longest * 1.2 or 1])),
            color=by_family(alt),
        )
    )
    text = alt.Chart().mark_text(align="left", dx=6).encode(x="end:Q", text="label:N")
    return spec_of(on_schemes(alt, rows, tips, bar, text, *more), height=len(rows) * STEP)


def on_schemes(alt: Any, rows: Sequence[Row], tips: Sequence[Measure], *layers: Any) -> Any:
    """Return layers with a line for each scheme, in the order of the rows; shardids' names stand out."""
    own = {"test": f"indexof({list(OWN)!r}, datum.value) >= 0"}
    axis = alt.Axis(
        grid=False,
        labelLimit=_LABEL_WIDTH,
        labelColor={"condition": {**own, "value": "var(--ink)"}, "value": "var(--soft)"},
        labelFontWeight={"condition": {**own, "value": 700}, "value": 400},
    )
    names = [row["name"] for row in rows]
    return alt.layer(*layers, data=alt.InlineData(values=list(rows))).encode(
        y=alt.Y("name:N", sort=names, title=None, axis=axis),
        tooltip=[
            alt.Tooltip("scheme:N"),
            *(alt.Tooltip(f"tip{number}:N", title=tip.label) for number, tip in enumerate(tips)),
        ],
    )


def by_family(alt: Any) -> Any:
    """Return the colour of a scheme's kind."""
    return alt.Color("family:N", scale=alt.Scale(domain=[*FAMILIES], range=[*FAMILIES.values()]))


def spec_of(chart: Any, *, height: int) -> Mapping[str, Any]:
    """Return the specification of a chart that is as wide as its place in the page."""
    found: dict[str, Any] = chart.properties(width="container", height=height).to_dict()
    found.pop("config", None)  # the page gives it to all charts
    return found


_MIB = 2**20
_NAMED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart, and the words around it.

    Attributes:
        name: its name in the page.
        title: its quantity, with the unit.
        reading: how to read it.
        measure: the attribute of the results that it shows; names the omitted schemes.
        spec: the Vega-Lite specification.
    """

    name: str
    title: str
    reading: str
    measure: str
    spec: Mapping[str, Any]


def charts(comparison: Comparison) -> list[Chart]:
    """Return all charts but the scatter of keys, and leave out those without data.

    Raises:
        MissingLibrary: Altair is not installed.
    """
    makers = (_inserts, _spread, _bulk, _draws, _growth, _disk, _wal)
    return [chart for make in makers if (chart := make(comparison)) is not None]


def scatter() -> Mapping[str, Any]:
    """Return the chart of a scheme's keys against the time of issue; the page supplies ``points``."""
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
        reading="Each row is one transaction, and its key is drawn for it. More is better.",
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
    """Chart the rate of the most clients; a stroke is that of the fewest."""
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
    """Return the range from the shortest time to the longest (all above zero), with room for a figure."""
    shortest = max(min(row["p1"] for row in rows), 1e-3)
    longest = max(row["p99"] for row in rows)
    return [shortest * 0.8, longest * (longest / shortest) ** 0.2]


def _growth(comparison: Comparison) -> Chart | None:
    """Chart all schemes whose tables were filled; those whose indexes end alike share one label."""
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
    """Make one label for all lines whose ends are too close for a label each."""
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
