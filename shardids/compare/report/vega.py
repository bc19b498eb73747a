"""What all charts share: Vega-Lite by Altair, in colours that follow the page.

Colours are CSS variables of the page, so that charts follow its light and dark themes without a new drawing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from shardids.compare.report.figures import OWN, Measure
from shardids.compare.results import Comparison, SchemeResult
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
    """Returns the kind of a scheme, one of :data:`FAMILIES`."""
    own, narrow, broad = FAMILIES
    return own if result.about.name in OWN else narrow if result.key_bytes == 8 else broad


def vega_lite_version() -> str:
    """Returns the version of Vega-Lite that Altair writes specifications for, as vl-convert names it."""
    major, minor, *_ = str(library("altair").SCHEMA_VERSION).removeprefix("v").split(".")
    return f"{major}.{minor}"


def versions() -> Mapping[str, str]:
    """Returns the versions of what vl-convert bundles, by name."""
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
    """Returns a row for each scheme that has the measure, the best first.

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
    """Returns a chart with one bar per scheme, in the order of the rows, with its figure at its end."""
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
    """Returns layers with a line for each scheme, in the order of the rows; shardids' names stand out."""
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
    """Returns the colour of a scheme's kind."""
    return alt.Color("family:N", scale=alt.Scale(domain=[*FAMILIES], range=[*FAMILIES.values()]))


def spec_of(chart: Any, *, height: int) -> Mapping[str, Any]:
    """Returns the specification of a chart that is as wide as its place in the page."""
    found: dict[str, Any] = chart.properties(width="container", height=height).to_dict()
    found.pop("config", None)  # the page gives it to all charts
    return found
