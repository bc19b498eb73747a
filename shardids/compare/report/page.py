"""Writes a comparison as one HTML page that needs no network and no other file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from typing import Any

from shardids.compare.report import advice, charts, summary
from shardids.compare.report.table import (
    NOT_MEASURED,
    ReportColumn,
    order_columns,
    safety_columns,
    size_columns,
    speed_columns,
)
from shardids.compare.results import CASES, Comparison, SchemeResult, to_json
from shardids.compare.schemes.scheme import library

_SPEED = ("draws", "inserts", "spread", "storage")
"""The measures behind the columns of speed; the others are about size, by "storage", order and safety."""
_ORDER = ("order", "causality")
"""Those behind the columns of order."""


def check_libraries() -> None:
    """Refuse to continue without the libraries that :func:`html` needs.

    Raises:
        MissingLibrary: one of Altair, vl-convert, Jinja and pydantic is not installed.
    """
    for name in ("altair", "vl_convert", "jinja2", "pydantic"):
        library(name)


def html(comparison: Comparison) -> str:
    """Return the page: summary, charts, tables, schemes' settings, conditions, and the comparison as JSON.

    Raises:
        MissingLibrary: Altair, vl-convert, Jinja or pydantic is not installed.
    """
    drawn = charts.charts(comparison)
    specs = {
        "config": charts.CONFIG,
        "charts": {chart.name: chart.spec for chart in drawn},
        "scatter": charts.scatter(),
    }
    nodes = {point.node for result in comparison.schemes if result.order for point in result.order.points}
    return str(
        _environment()
        .get_template("report.html")
        .render(
            comparison=comparison,
            conditions=comparison.conditions,
            advices=advice.advices(comparison),
            best=summary.best_of(comparison),
            repeaters=summary.repeaters(comparison),
            suffered=[name for name in CASES if any(_twice(result, name) for result in comparison.schemes)],
            verdict=summary.verdict(comparison),
            charts=drawn,
            families=charts.FAMILIES,
            nodes=dict(zip(sorted(nodes), charts.NODES, strict=False)),
            tables=_tables(comparison),
            left_out=list(summary.left_out(comparison)),
            cases=CASES,
            own=summary.OWN,
            rough=summary.ROUGH,
            missing_title=summary.MISSING_TITLE,
            risks=summary.risks(comparison),
            risks_title=summary.RISKS_TITLE,
            specs=_inside_script(json.dumps(specs)),
            comparison_json=_inside_script(to_json(comparison, indent=None)),
            library=_library(),
            library_versions=charts.versions(),
        )
    )


def _tables(comparison: Comparison) -> Sequence[tuple[str, str, Sequence[ReportColumn], Sequence[str]]]:
    return (
        (
            "Keys issued twice",
            "Of the six cases: keys that had been issued before. Point at a figure to see of how many.",
            safety_columns(),
            [name for name in comparison.conditions.sizes if name not in {*_SPEED, *_ORDER}],
        ),
        (
            "Order",
            "By the time of the draws, and of rows of two nodes that answer each other, under two clocks.",
            order_columns(comparison),
            _ORDER,
        ),
        ("Speed", "k: thousands, M: millions.", speed_columns(comparison), _SPEED),
        ("Size", "When the table has all its rows.", size_columns(), ()),
    )


def _twice(result: SchemeResult, case: str) -> int:
    return result.duplicates[case].twice if case in result.duplicates else 0


def _environment() -> Any:
    jinja = library("jinja2")
    environment = jinja.Environment(
        loader=jinja.PackageLoader("shardids.compare.report", "template"),
        autoescape=True,
        undefined=jinja.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "three": summary.three,
        "duration": summary.duration,
        "sentence": summary.sentence,
        "minute": _minute,
        "without": _without,
        "fewer_rows": _fewer_rows,
    }
    return environment


def _minute(time: datetime) -> str:
    return f"{time:%-d %B %Y, %H:%M %Z}".strip()


def _without(comparison: Comparison, measure: str) -> list[tuple[str, str]]:
    """Return the schemes that lack a measure, and why."""
    missing = [*comparison.left_out.items()]
    for result in comparison.schemes:
        if getattr(result, measure) is None:
            missing.append((result.about.name, _reason(result, measure)))
    return missing


def _fewer_rows(comparison: Comparison) -> str:
    """Return the schemes whose table has fewer rows than the others', which changes all figures per row."""
    rows = {result.about.name: result.storage.rows for result in comparison.schemes if result.storage}
    most = max(rows.values(), default=0)
    return summary.listed([f"{name} ({count:,})" for name, count in rows.items() if count < most])


def _reason(result: SchemeResult, measure: str) -> str:
    return result.left_out.get(measure, NOT_MEASURED)


def _inside_script(json_text: str) -> Any:
    """Return JSON without strings that end the script element or begin a comment."""
    return library("markupsafe").Markup(json_text.replace("<", "\\u003c"))


@cache
def _library() -> Any:
    """Return Vega, Vega-Lite and Vega-Embed as one script."""
    script = library("vl_convert").javascript_bundle(vl_version=charts.vega_lite_version())
    return library("markupsafe").Markup(script.replace("</script", "<\\/script").replace("<!--", "<\\!--"))
